"""`posttrain model export`: write the model of a run for other programs."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.api.export import export_run
from posttrain.commands.options import progress_bar
from posttrain.process import machine
from posttrain.report.terminal import say


def export(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR",
            help="A run, for its newest checkpoint; RUN_DIR@best or RUN_DIR@UPDATE for another.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model goes; must not be there yet.")],
    dtype: Annotated[
        str,
        typer.Option(help="float32, the weights that were trained, or bfloat16, which takes half the room."),
    ] = "float32",
    gguf: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Also write model-TYPE.gguf for llama.cpp, Ollama and LM Studio: "
            "q8_0 (a quarter of float32), f16, bf16 or f32.",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Upload the directory to this repository of the Hub."),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="With --push: make the repository private if it is new.")
    ] = False,
) -> None:
    """Write a run's model as a directory that transformers, vLLM and other recipes load.

    An adapter is merged into its model. With it come the tokenizer, the chat template, and a model card,
    README.md.
    """
    machine.configure()
    with progress_bar() as bar:
        row = bar.add_task("GGUF", total=None, visible=False)

        def progress(count: int, total: int) -> None:
            bar.update(row, completed=count, total=total, visible=True)

        export_run(run, out, say, dtype=dtype, gguf=gguf, push=push, private=private, progress=progress)
    typer.echo(str(out))
    if push:
        typer.echo(f"https://huggingface.co/{push}")
