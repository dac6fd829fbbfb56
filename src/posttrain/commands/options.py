"""Arguments and options that several commands share, and the progress bar of all of them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from posttrain.errors import UserError
from posttrain.recipe.catalogue import find_recipe
from posttrain.report.terminal import err

RecipeFile = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="A file, or a name of `posttrain recipes`.", callback=find_recipe),
]
Policy = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|RUN_DIR",
        help="A model, or a run for its newest checkpoint; RUN_DIR@best or RUN_DIR@UPDATE for another.",
    ),
]
Model = Annotated[
    str | None, typer.Option(help="Another model than the recipe's, or than the run's newest checkpoint.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Overrides a key; may be repeated: --set optim.lr=1e-5"),
]
NewFile = Annotated[Path, typer.Option("--out", "-o", help="A JSONL file, which must not be there yet.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0 takes a free one.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]


def check_dtype(dtype: str | None) -> None:
    """Raise UserError for a value of --dtype that is not a dtype of weights."""
    if dtype not in (None, "bfloat16", "float32"):
        raise UserError("--dtype", f"unknown dtype {dtype!r}", "bfloat16 or float32")


def progress_bar(*, hidden: bool = False) -> Progress:
    """Return a progress bar on stderr, which is shown only in a terminal."""
    return Progress(console=err, disable=hidden or not err.is_terminal, transient=True)
