"""`posttrain sweep`: combinations of values and seeds, each a run, and which differences are real."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, TaskID
from rich.table import Table

from posttrain.commands.options import Json, progress_bar
from posttrain.errors import RunError, UserError, counted
from posttrain.models.pretrained import silent
from posttrain.pipeline import sweep as sweeps
from posttrain.recipe.catalogue import find_recipe
from posttrain.report.sweep import check_metric, show, show_difference
from posttrain.report.terminal import console, out, say
from posttrain.run.journal import stop_requested

SEEDS = 3
VERDICTS = {True: "real", False: "not shown", None: "too few seeds"}
"""Text of each value of `real` (see evaluation/seeds.py)."""


def sweep(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="A file, or a name of `posttrain recipes`; not needed with --resume.",
            callback=lambda value: find_recipe(value) if value else None,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="A.B=C,D",
            help="Values of a key, separated by commas, lists in brackets; may be repeated: "
            "--set optim.lr=1e-6,3e-6. With one value it overrides the key in all runs.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs of each combination, with run.seed 0, 1 ...; 3 by default. May grow later."
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="By default runs/RECIPE-sweep.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the sweep in this directory.")
    ] = None,
    metric: Annotated[
        str,
        typer.Option(
            help="Compare this metric at the end of each run: of losses, perplexity, bits a byte and KL less "
            'is better, and of "min METRIC" too. By default the last evaluation of each run.'
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Run every combination of values with several seeds, and say which differences are real.

    All combinations are checked before the first run starts. Each run is a `posttrain train` with a process
    and a directory of its own; one that fails is reported, and the others are made. The same command again,
    or --resume, continues the run that was interrupted and makes those that are missing.
    A combination is compared with the best one over the seeds that both have: Student's t of paired
    differences, two-sided, corrected by Holm for the number of combinations. Fewer than 3 seeds decide
    nothing.

    Example: `posttrain sweep arithmetic_grpo --set optim.lr=1e-6,3e-6 --seeds 3`
    """
    log = silent if as_json else say
    check_metric(metric)
    plan, root = _plan_of(recipe, sets or (), seeds, run_dir, resume)
    go_on = f"go on with posttrain sweep --resume {root}"
    with sweeps.lock(root):
        if recipe is not None and (root / sweeps.RECORD).exists():
            sweeps.check_same(plan, root)
        states = sweeps.states(plan, root)
        missing = [one for one in plan.runs(root) if states[one.name][0] != "finished"]
        if missing:
            with progress_bar(hidden=as_json) as bar:
                line = bar.add_task("checking all combinations", total=len(plan.combinations))
                sweeps.check(plan, root, log, lambda count: bar.update(line, completed=count))
            sweeps.save(plan, root)
        stopped = _run(plan, root, missing, states, log, as_json=as_json, metric=metric, go_on=go_on)
        result = sweeps.report(plan, root, states, metric)
    if as_json:
        typer.echo(json.dumps({**result, "report": str(root / "sweep.html")}))
    else:
        _print(result)
        out.print(f"report {root / 'sweep.html'}", soft_wrap=True)
    if stopped:
        raise RunError("stopped", f"{stopped} is saved", go_on)


def _plan_of(
    recipe: Path | None, sets: Sequence[str], seeds: int | None, run_dir: Path | None, resume: Path | None
) -> tuple[sweeps.Sweep, Path]:
    """Return the sweep of the command line, and its directory."""
    if resume is not None and run_dir is not None:
        raise UserError("--out", "--resume names the directory", "leave one of them out")
    if recipe is None:
        if resume is None:
            raise UserError("RECIPE", "no recipe is given", "name one, or go on with --resume DIR")
        if sets:
            raise UserError("--set", "a sweep goes on with its own values", "leave it out")
        return sweeps.load(resume, seeds), resume
    root = resume or run_dir or Path("runs") / f"{recipe.stem}-sweep"
    if resume is not None or (seeds is None and (root / sweeps.RECORD).exists()):
        seeds = sweeps.load(root, seeds).seeds
    return sweeps.read(recipe, sets, seeds or SEEDS), root


def _run(
    plan: sweeps.Sweep,
    root: Path,
    missing: Sequence[sweeps.SweepRun],
    states: dict[str, tuple[str, str]],
    log: Callable[[str], None],
    *,
    as_json: bool,
    metric: str,
    go_on: str,
) -> str:
    """Make the missing runs, and update their states and the page after each.

    Returns the name of the run at which it was stopped, or "".
    """
    total = len(states)
    before = total - len(missing)
    try:
        with stop_requested() as is_stopped, progress_bar(hidden=as_json) as bar:
            for number, one in enumerate(missing, start=before + 1):
                task = bar.add_task(f"{number} of {total}: {one.name}", total=one.updates)
                _tell(log, one, "begins", f"{number} of {total}", as_json=as_json)
                states[one.name] = sweeps.run(one, is_stopped, partial(_advance, bar, task))
                bar.remove_task(task)
                state, cause = states[one.name]
                _tell(log, one, state, cause, as_json=as_json)
                with suppress(UserError):  # no finished run has the metric yet
                    sweeps.report(plan, root, states, metric)
                if state == "stopped" or is_stopped():
                    return one.name
    except KeyboardInterrupt:
        raise KeyboardInterrupt(go_on) from None
    return ""


def _advance(bar: Progress, task: TaskID, update: int) -> None:
    bar.update(task, completed=update)


def _tell(log: Callable[[str], None], one: sweeps.SweepRun, state: str, text: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(
            json.dumps({"run": one.name, "state": state} | ({"cause": text} if state == "failed" else {}))
        )
    else:
        log(f"{one.name}: {state}" + (f", {text}" if text else ""))


def _print(result: Mapping[str, Any]) -> None:
    """Print the comparison as a table, and what follows from it."""
    name = result["metric"]

    def between(low: float | None, high: float | None, write: Callable[[str, float], str]) -> str:
        return "–" if low is None or high is None else f"{write(name, low)} … {write(name, high)}"

    table = Table("combination", "seeds", "mean", "95 %", "to the best", "95 %", "p (Holm)", "difference")
    for row in result["combinations"]:
        against = row["against"] or {}
        real, difference = against.get("real"), against.get("difference")
        verdict = "tied" if row["tied"] else VERDICTS[real]
        if row["name"] == result["best"]:
            verdict = "the best mean"
        table.add_row(
            row["label"],
            str(row["n"]),
            "–" if row["mean"] is None else show(name, row["mean"]),
            between(row["low"], row["high"], show),
            "–" if difference is None else show_difference(name, difference),
            between(against.get("low"), against.get("high"), show_difference),
            "–" if against.get("p_holm") is None else f"{against['p_holm']:.3g}",
            verdict if row["n"] else "no finished run",
        )
    out.print(f"{name}, {result['measured']}: mean over {counted(result['seeds'], 'seed')}", soft_wrap=True)
    page = out if out.is_terminal else console(width=160)  # in a file or a pipe a line stays whole
    page.print(table)
    for sentence in result["says"]:
        out.print(sentence, soft_wrap=True)
    for one in result["runs"]:
        if one["state"] == "failed":
            out.print(f"{one['name']} failed: {one['cause']}", soft_wrap=True)
