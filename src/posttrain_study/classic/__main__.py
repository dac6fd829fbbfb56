"""python -m posttrain_study.classic NAME: runs an example, prints its table and draws its plot."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from posttrain.errors import UserError

NAMES = ("bandits", "mdp", "maze", "tabular", "dqn", "evolution", "planner")


def main(argv: Sequence[str]) -> int:
    """0 after the examples that these words name; 2 after one line on what is wrong with them."""
    try:
        words = _parser().parse_args(argv)
        named = NAMES if words.name == "all" else (words.name,)
        draw = _needed("posttrain_study.classic.plot").draw if words.plot else None
        examples = _needed("posttrain_study.classic.examples").EXAMPLES
        found = []
        for name in named:
            found.append(examples[name](words.seed))
            print(f"{found[-1].title}\n\n{table(found[-1].head, found[-1].rows)}\n", flush=True)
        if draw is not None:
            draw(found, words.plot)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def table(head: Sequence[str], rows: Sequence[Sequence[str | float]]) -> str:
    """Rows under their heads, numbers with four digits behind the point and to the right.

    >>> print(table(("method", "J"), [("a", 1.5), ("b", 12)]))
    method        J
    a        1.5000
    b            12
    """
    cells = [list(head), *([_shown(value) for value in row] for row in rows)]
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, width, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _shown(value: str | float) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, int) else f"{value:.4f}"


class _Parser(argparse.ArgumentParser):
    """argparse, whose complaints are lines of ours."""

    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, message, f"{self.format_usage().strip()}")


def _parser() -> _Parser:
    parser = _Parser(prog="posttrain classic", description="Classic examples beside their exact optimum.")
    parser.add_argument("name", choices=(*NAMES, "all"), metavar="NAME", help=f"{', '.join(NAMES)}, or all")
    parser.add_argument("--plot", type=_picture, metavar="FILE", help="draw what it learnt into this PNG")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of everything random (default 0)")
    return parser


def _seed(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is no integer from 0 on")
    return int(word)


def _picture(name: str) -> Path:
    """Where a plot can be written, which is asked before anything is learnt."""
    if not name.endswith(".png"):
        raise argparse.ArgumentTypeError(f"{name!r} does not end in .png")
    if not Path(name).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(Path(name).parent)!r}")
    return Path(name)


def _needed(module: str) -> Any:
    """A module of ours that needs a library which not everybody has."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in ("gymnasium", "matplotlib"):
            raise
        raise UserError(
            "posttrain classic", f"{error.name} is not installed", "pip install 'posttrain[classic]'"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
