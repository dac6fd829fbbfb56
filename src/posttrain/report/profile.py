"""What `posttrain profile` found, as a table of words for the terminal and for the page."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = (
    *("part", "seconds", "share", "calls", "tokens"),
    *("FLOP", "of peak", "bytes read", "of peak"),
)
RESTS = {
    "sampling": "episodes, and the rest",
    "engine": "scheduling and stops in Python",
    "prefill": "embeddings, norms, rotations, gates",
    "decoding": "embeddings, norms, rotations, gates",
    "forward": "embeddings, norms, rotations, gates",
    "cache": "keys and values written and joined, masks",
    "scoring": "cutting into microbatches",
    "backward": "norms, rotations, gates, sums of gradients",
    "training": "columns, advantages, loss, metrics",
    "handing over": "copies of the weights",
    "an update": "selection, and the rest",
}
"""What the time of a part is that none of its parts has."""
SIZES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def table(profile: dict[str, Any]) -> list[list[str]]:
    """Rows of COLUMNS, each part under the one that it is in, which is set off by two spaces.

    Raises KeyError, TypeError or ValueError for what is no profile.
    """
    return [list(row) for row in _rows(profile["whole"], float(profile["whole"]["seconds"]), 0)]


def _rows(part: dict[str, Any], whole: float, depth: int) -> Iterator[tuple[str, ...]]:
    yield (
        "  " * depth + str(part["name"]),
        f"{float(part['seconds']):.4f}",
        f"{float(part['share']):.1%}",
        amount(part["calls"]) if depth else "",
        amount(part["tokens"]),
        amount(part["flop"]),
        _share(part["flop_of_peak"]),
        amount(part["bytes"]),
        _share(part["bytes_of_peak"]),
    )
    for each in part["parts"]:
        yield from _rows(each, whole, depth + 1)
    if part["parts"]:
        name = f"{'  ' * (depth + 1)}{RESTS.get(part['name'], 'the rest')}"
        share = float(part["rest"]) / whole if whole else 0.0
        yield (name, f"{float(part['rest']):.4f}", f"{share:.1%}", *[""] * (len(COLUMNS) - 3))


def remarks(profile: dict[str, Any]) -> list[str]:
    """What must be known to read the table, one sentence each.

    Raises KeyError, TypeError or ValueError for what is no profile.
    """
    seconds, peak = profile["seconds"], profile["peak"]
    dear = float(seconds["profiled"]) / float(seconds["plain"]) - 1
    return [
        f"{profile['method']} of {profile['model']}, {profile['dtype']} on {profile['device']}, "
        f"{profile['threads']} threads: means of {profile['updates']} updates after the first, "
        f"of which {profile['trained']} trained.",
        f"An update took {float(seconds['profiled']):.3f} s under the profile and "
        f"{float(seconds['plain']):.3f} without it ({dear:+.1%}); the weights were then "
        + ("the same bits." if profile["same_weights"] else "others: not every bit comes out twice here."),
        f"The peaks are measured: {amount(peak['flop'])}FLOP/s of products in {profile['dtype']}, "
        f"{amount(peak['bytes'])}B/s read from memory.",
        *map(str, profile["notes"]),
    ]


def read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """{columns, rows, remarks} of a file, empty if it is not there; and a note if it is no profile."""
    try:
        profile = json.loads(path.read_bytes())
        return {"columns": COLUMNS, "rows": table(profile), "remarks": remarks(profile)}, []
    except FileNotFoundError:
        return {}, []
    except (OSError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError):
        return {}, [f"{path.name} is no profile that could be read, so it was left out."]


def amount(x: float) -> str:
    """Three significant digits with k, M, G, T or P, and nothing for 0.

    >>> amount(0), amount(12.0), amount(2.5e12), amount(1234)
    ('', '12', '2.5T', '1.23k')
    """
    shown = float(f"{x:.3g}")  # what is rounded up to a unit is one of it
    for size, letter in SIZES:
        if shown >= size:
            return f"{shown / size:.3g}{letter}"
    return f"{x:.3g}" if x else ""


def _share(x: float | None) -> str:
    return "" if x is None else f"{x:.1%}"
