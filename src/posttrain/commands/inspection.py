"""`posttrain run inspect`: measure how far a run moved each matrix, and in how many directions."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from posttrain.commands.options import Json, progress_bar
from posttrain.evaluation.changes import Change, compare, sections
from posttrain.models import checkpoint, pretrained
from posttrain.process import machine
from posttrain.recipe import config
from posttrain.recipe.target import check_run
from posttrain.report.page import put
from posttrain.report.terminal import console, err, out
from posttrain.types import UserError

ROWS = 20
"""Weights in the table, by default."""


def inspect(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Its newest whole checkpoint is read.")],
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with this model, and not with the run's own start."),
    ] = None,
    as_json: Json = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Print this many weights, those that moved most: by default {ROWS}, as JSON all."
        ),
    ] = None,
) -> None:
    """Measure what training did to each matrix: how far it moved, and in how many directions.

    It prints the update's norm, largest singular values and effective rank, for each weight, each kind of
    matrix and all weights, and writes everything to RUN_DIR/inspect.json.

    Example: `posttrain run inspect runs/arithmetic_sft-001`
    """
    check_run(run, "name a directory that posttrain train left")
    loaded = config.read(run / "config.toml")
    machine.configure(loaded.recipe.run.threads)
    folder, skipped = checkpoint.select(run)
    for fault in skipped:
        err.print(fault, style="dim", soft_wrap=True)
    with loaded.located():
        needed = against is None or (folder / "adapter").exists()
        start_dir = pretrained.resolve(loaded.recipe.model.path) if needed else None
        comparison = compare(folder, loaded.recipe, start_dir, _resolve_against(against))
        names = comparison.names()
    with progress_bar(hidden=as_json) as bar:
        changes = [comparison.change(name) for name in bar.track(names, description="measuring")]
    start = against or loaded.recipe.model.path
    report = {
        "checkpoint": folder.name,
        "start": start,
        **sections(changes),
        "left_out": comparison.left_out(),
    }
    put(run / "inspect.json", json.dumps(report, indent=1) + "\n")
    changes.sort(key=lambda c: -math.inf if c.relative is None else c.relative, reverse=True)
    if as_json:
        for change in changes[:limit]:
            typer.echo(json.dumps(asdict(change)))
        return
    _print(report, changes[: limit or ROWS])


def _resolve_against(against: str | None) -> Path | None:
    """Return the directory of the model of --against, or None."""
    if against is None:
        return None
    try:
        return pretrained.resolve(against)
    except UserError as error:
        raise error.at("--against", keep=error.key != pretrained.KEY) from None


def _print(report: dict[str, Any], changes: Sequence[Change]) -> None:
    page = out if out.is_terminal else console(width=140)  # in a file or a pipe a line stays whole
    weights = _table("weight", "shape", "σ₁ ... σ₅ of ΔW")
    for c in changes:
        top = " ".join(f"{s:.2g}" for s in c.singular_values)
        weights.add_row(c.name, "×".join(map(str, c.shape)), top, *_numbers(asdict(c), min(c.shape)))
    page.print(weights)
    kinds = _table("kind", "weights", "moved")
    for kind, group in {**report["kinds"], "all": report["whole"]}.items():
        kinds.add_row(kind, str(group["weights"]), str(group["moved"]), *_numbers(group, group["full_rank"]))
    page.print()
    page.print(kinds)
    page.print(
        f"\n{report['checkpoint']} minus {report['start']}; ranks of a kind are medians; "
        f"{len(changes)} of {len(report['weights'])} weights are shown, inspect.json has all"
    )
    for reason, names in report["left_out"].items():
        if names:
            page.print(f"left out: {reason}: {len(names)}, such as {names[0]}")


def _table(*first: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for head in first:
        table.add_column(head)
    for head in ("‖ΔW‖", "‖ΔW‖/‖W‖", "eff. rank", "particip.", "stable", "99 %", "of"):
        table.add_column(head, justify="right")
    return table


def _numbers(numbers: dict[str, Any], full_rank: float) -> list[str]:
    relative = "-" if numbers["relative"] is None else f"{numbers['relative']:.3g}"
    ranks = [f"{numbers[key]:.1f}" for key in ("effective_rank", "participation_rank", "stable_rank")]
    return [f"{numbers['norm']:.3g}", relative, *ranks, f"{numbers['rank_99']:g}", f"{full_rank:g}"]
