"""The commands `truth` and `classic`."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from posttrain_study.classic.__main__ import NAMES
from posttrain_study.classic.__main__ import main as run_classic


def truth(
    method: Annotated[str | None, typer.Argument(metavar="[METHOD]", help="One line of the table.")] = None,
) -> None:
    """Compare the exact expectation of each estimator with what it estimates, by enumeration."""
    importlib.import_module("posttrain_study.truth").command(method)


def classic(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"all, or one of {', '.join(NAMES)}.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Run a small example of classical reinforcement learning, and compare it with the exact optimum."""
    words = [name, "--seed", str(seed), *(["--plot", str(plot)] if plot else [])]
    raise typer.Exit(run_classic(words))
