"""Draw docs/architecture.svg from the code: the rooms of the kernel in layers, and the packages that plug in.

The layers are those of the import-linter contract and the plugs are the entry points, both in pyproject.toml.
Sizes are lines of code as scripts/measure.py counts them. scripts/docs.py writes the picture, and reports a
stale one with --check.
"""

import ast
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from measure import code_lines

from posttrain.base.kinds import GROUPS

WIDTH, MARGIN, TOP = 920, 16, 64
ROW, GAP, HEAD = 30, 6, 36
"""Heights of a room, the space between two, and the height of a package's name."""
KERNEL, STRIP, PACKAGE = 556, 34, 276
"""Widths of the kernel, the registry at its side, and the packages."""
LEFT = WIDTH - MARGIN - PACKAGE
LINE, INDENT = 17, 11
"""Pixels from a line of text to the next; characters before the names of a group of kinds."""
LARGE, SMALL = 8.5, 7.3
"""Widths of a character of monospaced text of 14 and of 12 pixels."""
SIZE = re.compile(r'data-of="([\w.]+)" data-lines="(\d+)"')
STYLE = (
    ".plane{fill:#fdfdfc}.panel{fill:#f4f2ec;stroke:#d8d5cc}.room{fill:#ffffff;stroke:#9fb9d8}"
    ".strip{fill:#2a78d6}.package{fill:#ffffff;stroke:#2a78d6;stroke-width:1.5}.yours{stroke-dasharray:5 4}"
    ".plug{stroke:#2a78d6;stroke-width:2}.dot{fill:#2a78d6}"
    "text{fill:#14130f;font-size:12px}.title{font-size:17px;font-weight:650}"
    ".code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace}"
    ".name{font-size:14px;font-weight:600}.soft{fill:#6b6860}.on{fill:#ffffff;font-size:13px;font-weight:600}"
    "@media (prefers-color-scheme:dark){.plane{fill:#1b1b19}.panel{fill:#242421;stroke:#3b3a36}"
    ".room{fill:#1b1b19;stroke:#4a6585}.strip{fill:#2f6cb3}.package{fill:#1b1b19;stroke:#4d95ec}"
    ".plug{stroke:#4d95ec}.dot{fill:#4d95ec}text{fill:#f3f1ea}.soft{fill:#a5a299}}"
)
TITLE = "The kernel in layers, and the packages that plug into it"
NOTES = (
    "A room may import the rooms below it, never one above. Rooms side by side do not import each other,",
    "unless they touch. The kernel imports none of the packages on the right: it finds their kinds, and its",
    "own, in the registry. Numbers are lines of code, without comments and docstrings, to about a hundred.",
)


def architecture(root: Path, before: str = "") -> str:
    """Return the picture of the code below `root`; `before` is the picture that it replaces."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    shown = {name: int(number) for name, number in SIZE.findall(before)}
    below, packages = _packages(root, project, shown)
    bottom, kernel = _kernel(root, layers, shown)
    bottom = max(bottom, below)
    height = bottom + 14 + LINE * len(NOTES) + MARGIN
    notes = [
        f'<text class="soft" x="{MARGIN}" y="{bottom + 14 + LINE * (n + 1) - 4}">{escape(note)}</text>'
        for n, note in enumerate(NOTES)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
            f' height="{height}" role="img"'
            ' font-family="system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif">',
            f"<title>{TITLE}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="plane" width="{WIDTH}" height="{height}" rx="12"/>',
            f'<text class="title" x="{MARGIN}" y="32">{TITLE}</text>',
            *kernel,
            *packages,
            *notes,
            "</svg>\n",
        ]
    )


def _kernel(root: Path, layers: list[str], shown: Mapping[str, int]) -> tuple[int, list[str]]:
    """Return the y below the kernel, and its elements."""
    source = root / "src" / "posttrain"
    bottom = TOP + HEAD + len(layers) * (ROW + GAP) + GAP
    out = [
        f'<rect class="panel" x="{MARGIN}" y="{TOP}" width="{KERNEL}" height="{bottom - TOP}"/>',
        f'<rect class="strip" x="{MARGIN + KERNEL}" y="{TOP}" width="{STRIP}" height="{bottom - TOP}"/>',
        f'<text class="on" text-anchor="middle" transform="translate({MARGIN + KERNEL + STRIP / 2 + 5} '
        f'{(TOP + bottom) / 2}) rotate(-90)">registry of kinds: entry points, looked up by name</text>',
        *_named("posttrain", source, shown, MARGIN, TOP, KERNEL),
    ]
    for number, layer in enumerate(layers):
        touching = ":" in layer
        names = [name for name in re.split(r"\s*[|:]\s*", layer) if name.startswith("posttrain.")]
        space = 0 if touching else 8
        width = (KERNEL - 24 - space * (len(names) - 1)) / len(names)
        y = TOP + HEAD + number * (ROW + GAP)
        for place, name in enumerate(names):
            x = MARGIN + 12 + place * (width + space)
            out.append(f'<rect class="room" x="{x:g}" y="{y}" width="{width:g}" height="{ROW}"/>')
            out += _named(name, source / name.removeprefix("posttrain."), shown, x, y, width, height=ROW)
    return bottom, out


def _packages(root: Path, project: Mapping[str, Any], shown: Mapping[str, int]) -> tuple[int, list[str]]:
    """Return the y below the packages, and their elements, with the kinds that they register."""
    groups = project["project"]["entry-points"]
    out, y = list[str](), TOP
    for package in sorted(p for p in (root / "src").iterdir() if (p / "__init__.py").exists()):
        if package.name == "posttrain":
            continue
        kinds = {
            group.removeprefix("posttrain."): ", ".join(
                name for name, place in entries.items() if place.startswith(f"{package.name}.")
            )
            for group, entries in sorted(groups.items())
        }
        doc = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
        heading = _named(package.name, package, shown, LEFT, y, PACKAGE)
        y, elements = _package(y, heading, doc.splitlines()[0], {k: v for k, v in kinds.items() if v})
        out += elements
        y += 8
    heading = iter([f'<text class="name" x="{LEFT + 12}" y="{y + 23}">your package</text>'])
    y, elements = _package(
        y, heading, "Register your own in the same way.", {"any of": ", ".join(GROUPS)}, look="package yours"
    )
    return y, [*out, *elements]


def _package(
    y: int, heading: Iterator[str], says: str, kinds: Mapping[str, str], *, look: str = "package"
) -> tuple[int, list[str]]:
    """Return the y below a package, and its elements."""
    at = y + HEAD + LINE - 6
    lines = []
    for part in textwrap.wrap(says, int((PACKAGE - 24) / 6.6)):
        lines.append(f'<text class="soft" x="{LEFT + 12}" y="{at}">{escape(part)}</text>')
        at += LINE
    for group, names in kinds.items():
        lines += [
            f'<path class="plug" d="M{MARGIN + KERNEL + STRIP} {at - 4}H{LEFT}"/>',
            f'<circle class="dot" cx="{LEFT}" cy="{at - 4}" r="4"/>',
            f'<text class="code" x="{LEFT + 12}" y="{at}">{escape(group)}</text>',
        ]
        for part in textwrap.wrap(names, int((PACKAGE - 24) / SMALL) - INDENT):
            lines.append(
                f'<text class="code soft" x="{LEFT + 12 + INDENT * SMALL:g}" y="{at}">{escape(part)}</text>'
            )
            at += LINE
    height = at - LINE + 12 - y
    box = f'<rect class="{look}" x="{LEFT}" y="{y}" width="{PACKAGE}" height="{height}" rx="4"/>'
    return y + height, [box, *heading, *lines]


def _named(
    name: str, place: Path, shown: Mapping[str, int], x: float, y: float, width: float, height: int = HEAD
) -> Iterator[str]:
    """Yield the name of a room or a package, at its left, and its size, at its right.

    Raises ValueError if the two do not fit into the width.
    """
    size, label = _size(name, place, shown), name.removeprefix("posttrain.")
    if 28 + LARGE * len(label) + SMALL * len(f"{size:,}") > width:
        raise ValueError(f"{label} and its size do not fit into {width:g} pixels")
    base = y + height / 2 + 5
    yield f'<text class="code name" x="{x + 12:g}" y="{base:g}">{label}</text>'
    yield (
        f'<text class="code soft" x="{x + width - 12:g}" y="{base:g}" text-anchor="end" '
        f'data-of="{name}" data-lines="{size}">{size:,}</text>'
    )


_lines = cache(code_lines)


def _size(name: str, place: Path, shown: Mapping[str, int]) -> int:
    """Return the lines of code of a module or folder, to the nearest hundred.

    A number that was shown before stays while it is right to a hundred lines or a tenth, whichever is more,
    so that few commits make the picture stale.
    """
    files = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    lines = sum(map(_lines, files))
    before = shown.get(name)
    if before is not None and abs(lines - before) <= max(100, before / 10):
        return before
    return max(100, round(lines, -2))
