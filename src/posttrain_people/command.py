"""The command `label`, without what serving its page imports."""

import importlib
from pathlib import Path
from typing import Annotated

import typer

from posttrain.commands.options import Json, Port


def label(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN_DIR|FILE.jsonl", help="A run with samples, or prompts with answers, pairs or steps."
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Training data; every label is also in its log, labels.log.jsonl."),
    ] = Path("labels.jsonl"),
    mode: Annotated[
        str,
        typer.Option(
            help="pairs: the better of two; rank: the order of up to nine; steps: each step good or bad."
        ),
    ] = "pairs",
    rater: Annotated[
        str, typer.Option(help="Who labels; a second start continues where this rater stopped.")
    ] = "me",
    raters: Annotated[
        list[str] | None,
        typer.Option(
            "--of", metavar="NAME", help="Each rater, repeated, if they share the questions (--ratings)."
        ),
    ] = None,
    ratings: Annotated[
        int,
        typer.Option(
            min=0, help="Raters of one question, of those of --of; 0: all. 2 or more show agreement."
        ),
    ] = 0,
    ensemble: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN_DIR",
            help="Reward models, repeated: ask first where their score differences spread most.",
        ),
    ] = None,
    separator: Annotated[
        str, typer.Option(help="For --mode steps: what ends a step of an answer; \\n is a newline.")
    ] = "\\n\\n",
    limit: Annotated[
        int, typer.Option(min=0, help="Only the first questions of their order; 0 asks all.")
    ] = 0,
    seed: Annotated[
        int, typer.Option(help="Seed of the order of questions and of the positions of answers.")
    ] = 0,
    port: Port = 0,
    summary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Print agreement, strengths and reliabilities of these labels, and end."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Have a person compare answers, rank them or mark their steps, on a page of this machine.

    Answers are blind and in random order, and keys suffice: ? lists them. Each label is on disk before the
    next question. The result is data for DPO, reward models (pairs, rank) and process reward models (steps).

    Example: `posttrain label answers.jsonl --out labels.jsonl --rater ann`
    """
    labelling = importlib.import_module("posttrain_people.labelling")
    if summary is not None:
        labelling.print_summary(summary, as_json=as_json)
        return
    order = labelling.QuestionOrder(
        raters=raters or [], ratings=ratings, ensemble=ensemble or [], limit=limit, seed=seed
    )
    labelling.serve(source, out, mode, rater, order, separator=separator, port=port)
