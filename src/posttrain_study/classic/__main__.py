"""python -m posttrain_study.classic NAME: run an example, print its table and draw its plot."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from posttrain.errors import UserError

NAMES = ("bandits", "mdp", "maze", "tabular", "dqn", "evolution", "planner")


def main(argv: Sequence[str]) -> int:
    """Run the examples that the arguments name and return 0; after a mistake, print one line and return 2."""
    try:
        arguments = _parser().parse_args(argv)
        names = NAMES if arguments.name == "all" else (arguments.name,)
        draw = _import_optional("posttrain_study.classic.plot").draw if arguments.plot else None
        examples = _import_optional("posttrain_study.classic.examples").EXAMPLES
        results = []
        for name in names:
            results.append(examples[name](arguments.seed))
            print(f"{results[-1].title}\n\n{table(results[-1].head, results[-1].rows)}\n", flush=True)
        if draw is not None:
            draw(results, arguments.plot)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def table(head: Sequence[str], rows: Sequence[Sequence[str | float]]) -> str:
    """Format rows under their heads, numbers right-aligned with four digits after the point.

    >>> print(table(("method", "J"), [("a", 1.5), ("b", 12)]))
    method        J
    a        1.5000
    b            12
    """
    cells = [list(head), *([_format_cell(value) for value in row] for row in rows)]
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, width, strict=True))
        )
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _format_cell(value: str | float) -> str:
    return value if isinstance(value, str) else str(value) if isinstance(value, int) else f"{value:.4f}"


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports mistakes as UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, message, f"{self.format_usage().strip()}")


def _parser() -> _Parser:
    parser = _Parser(prog="posttrain classic", description="Classic examples beside their exact optimum.")
    parser.add_argument("name", choices=(*NAMES, "all"), metavar="NAME", help=f"{', '.join(NAMES)}, or all")
    parser.add_argument("--plot", type=_plot_path, metavar="FILE", help="draw the results into this PNG")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="random seed (default 0)")
    return parser


def _seed(word: str) -> int:
    if not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is not an integer from 0 on")
    return int(word)


def _plot_path(name: str) -> Path:
    """Return the path of a plot, checked before anything is computed."""
    if not name.endswith(".png"):
        raise argparse.ArgumentTypeError(f"{name!r} does not end in .png")
    if not Path(name).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {str(Path(name).parent)!r}")
    return Path(name)


def _import_optional(module: str) -> Any:
    """Import a module of this package that needs an optional library."""
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
