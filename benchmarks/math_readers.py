"""Compares the verifier `math` with Math-Verify on pairs of golds and responses.

    pip install 'math-verify[antlr4_13_2]'      # beside posttrain
    python benchmarks/math_readers.py tests/mathcheck/math_pairs.jsonl

Each line of the file holds `gold`, `response`, `expected` and perhaps `fields`. Math-Verify is given the
gold in a box and the whole response, with its defaults. It knows no types, units or tolerances: `plain`
counts only the pairs that have no fields and whose gold is neither a quantity, a choice nor words.
"""

import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from math_verify import parse, verify  # type: ignore[import-not-found]

from mathcheck.plugin.math import Math
from posttrain.types import Task


def ours(pair: dict[str, Any]) -> bool:
    """Whether our reader calls the response right."""
    task = Task(id="q", messages=(), answer=pair["gold"], fields=pair.get("fields", {}))
    return Math()(task, pair["response"]).score == 1.0


def theirs(pair: dict[str, Any]) -> bool:
    """Whether Math-Verify calls the response right."""
    return bool(verify(parse(f"\\boxed{{{pair['gold']}}}"), parse(pair["response"])))


def plain(pair: dict[str, Any]) -> bool:
    """Whether the pair asks only for mathematics."""
    letters = re.sub(r"\\[A-Za-z]+", " ", pair["gold"])
    return (
        "fields" not in pair
        and "\\text" not in pair["gold"]
        and not re.search(r"[A-Za-z]{2}|^\W*[A-J]\W*$", letters)
    )


def main() -> None:
    """Prints a table of counts, and the pairs on which the two differ."""
    logging.disable(logging.CRITICAL)
    pairs = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    readers: dict[str, Callable[[dict[str, Any]], bool]] = {
        "posttrain": ours,
        f"Math-Verify {version('math-verify')}": theirs,
    }
    said = {name: [read(pair) for pair in pairs] for name, read in readers.items()}
    for subset, chosen in (("all", lambda pair: True), ("plain", plain)):
        at = [i for i, pair in enumerate(pairs) if chosen(pair)]
        for name, found in said.items():
            counts = Counter((pairs[i]["expected"] == "right", found[i]) for i in at)
            agree = counts[True, True] + counts[False, False]
            print(
                f"{subset}: {name} agrees on {agree} of {len(at)}; "
                f"accepts {counts[False, True]} that are not right, refuses {counts[True, False]} that are"
            )
    for i, pair in enumerate(pairs):
        for name, found in said.items():
            if found[i] != (pair["expected"] == "right"):
                print(json.dumps({"reader": name, **pair}, ensure_ascii=False))


if __name__ == "__main__":
    main()
