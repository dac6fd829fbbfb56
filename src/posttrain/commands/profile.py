"""`posttrain profile`: a few updates of a recipe, thrown away, and where their time went."""

import json
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from posttrain.api.opening import check_alone
from posttrain.commands.train import RecipeFile, Set
from posttrain.methods.table import label
from posttrain.models.fingerprint import digest
from posttrain.models.pretrained import silent
from posttrain.process import machine
from posttrain.recipe import config
from posttrain.report.page import put
from posttrain.report.profile import COLUMNS, remarks, table
from posttrain.report.terminal import console, out, quiet, say
from posttrain.runtime import build
from posttrain.runtime.profile import Clock, measured
from posttrain.runtime.profile_parts import timed_parts
from posttrain.runtime.record.rundir import RunDir
from posttrain.runtime.session import Session
from posttrain.types import UserError


@dataclass(frozen=True)
class Play:
    """Some updates of a recipe, as they were made."""

    seconds: list[float]
    """Of each but the first."""
    trained: int
    """Of these."""
    weights: str
    """The digest of the weights after the last."""


def profile(
    recipe: RecipeFile,
    sets: Set = None,
    updates: Annotated[int, typer.Option(min=1, help="How many, after a first that is not counted.")] = 3,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE.json", help="Writes it there; the report shows RUN_DIR/profile.json."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as one JSON object.")] = False,
) -> None:
    """Plays a few updates of a recipe, and prints where their time goes, against this machine's best.

    First it measures how fast this machine multiplies and reads. Then the same updates are made twice,
    without and with a profile, in a directory that is thrown away. Nothing is evaluated, saved or tracked.

    Example: `posttrain profile recipes/arithmetic_grpo.toml --out runs/arithmetic_grpo-001/profile.json`
    """
    check_alone()
    found = config.read(recipe, sets or ())
    if file is not None and not file.absolute().parent.is_dir():
        raise UserError(str(file.parent), "there is no such directory", "make it, or name another")
    told = silent if as_json else say
    with found.located():
        _check(found.recipe, updates)
        with machine.configured(found.recipe.run.threads):
            made = _profiled(found, updates, told)
    text = json.dumps({"recipe": str(recipe), **made})
    if file is not None:
        put(file, text + "\n")
    if as_json:
        typer.echo(text)
    else:
        _print(made)


def _check(recipe: Any, updates: int) -> None:
    """UserError for what cannot be profiled."""
    if recipe.train.ranks:
        raise UserError("train.ranks", "several ranks cannot be profiled", "add --set train.ranks=0")
    if recipe.async_.where == "thread":
        problem = "a sampler in another thread computes beside the learner: their times cannot be told apart"
        raise UserError("async.place", problem, "add --set async.place=process")
    if recipe.run.updates <= updates:
        problem = f"the run has {recipe.run.updates} updates, and {1 + updates} are made, the first uncounted"
        raise UserError("run.updates", problem, "name fewer with --updates, or --set run.updates=...")


def _profiled(found: config.LoadedRecipe, updates: int, told: Callable[[str], None]) -> dict[str, Any]:
    """Everything that is known of the recipe's updates, as plain numbers."""
    recipe = replace(found.recipe, track=replace(found.recipe.track, sinks=()))
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="posttrain-profile-") as place:
        folder = Path(place)
        chosen = build.plan(recipe, told, folder)
        device, dtype = chosen.policy.device, chosen.policy.dtype
        told("measuring products and memory")
        peak = measured(device, dtype)
        told(f"making {1 + updates} updates without a profile")
        plain = _play(chosen, found.tables, folder / "plain", updates)
        recorded = device.type == "cuda" and chosen.resolved.online and recipe.engine.cuda_graphs
        clock = Clock(device, ("canary", *(["decoding"] if recorded else [])))
        told("making them again with one")
        # Planned again, so that nothing is left of the first time; with as much memory as there was.
        cut = chosen.microbatch_tokens
        chosen = replace(build.plan(recipe, silent, folder), microbatch_tokens=cut)
        profiled = _play(chosen, found.tables, folder / "profiled", updates, clock)
    return {
        "method": label(recipe.method["name"]),
        "model": recipe.model.path,
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "updates": updates,
        "trained": profiled.trained,
        "seconds": {
            "profiled": sum(profiled.seconds) / updates,
            "plain": sum(plain.seconds) / updates,
        },
        "same_weights": profiled.weights == plain.weights,
        "peak": {"flop": peak.flop, "bytes": peak.bytes},
        "whole": clock.whole.told(updates, peak),
        "notes": unseen(chosen, recorded=recorded),
    }


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does, so that the directory goes."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def unseen(chosen: build.Plan, *, recorded: bool) -> list[str]:
    """What of the sampler's work a profile does not see; recorded: its steps are replayed on a GPU."""
    recipe, notes = chosen.resolved.recipe, list[str]()
    if not chosen.resolved.online:
        return notes
    if recipe.async_.where != "here":
        what = (
            "Samplers are in processes of their own: what they do is not seen, only how long it is waited for"
        )
        notes.append(f"{what}; --set async.place=here shows one that takes turns with training.")
    elif recipe.engine.name != "native":
        notes.append("What vLLM does is not seen: it is in the rest of sampling and of handing over.")
    if recorded:
        what = "A decoding step is one recording on the GPU, into which nobody looks"
        notes.append(f"{what}; --set engine.cuda_graphs=false shows its parts, and takes longer.")
    return notes


def _play(
    chosen: build.Plan, tables: dict[str, Any], path: Path, updates: int, clock: Clock | None = None
) -> Play:
    """One update, and then as many as are counted, in this directory."""
    directory, begun = RunDir(path, resume=False), [time.perf_counter()]
    trained = 0
    try:
        with timed_parts(clock) if clock else nullcontext():
            parts = build.build_session_parts(
                chosen, directory, resume=False, config=tables, show=quiet, say=silent
            )
            with Session(parts) as session:
                for number in range(1 + updates):
                    if clock and number == 1:
                        clock.reset()
                    if groups := session.sample():
                        session.update(groups)
                        session.publish()
                        trained += number > 0
                    begun.append(time.perf_counter())
                if clock:
                    clock.stop()
                weights = digest(session.learner.weights())
    finally:
        directory.close()
    return Play([b - a for a, b in pairwise(begun[1:])], trained, weights)


def _print(made: dict[str, Any]) -> None:
    page = out if out.is_terminal else console(width=150)  # in a file or a pipe a line stays whole
    shown = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        shown.add_column(name, justify="left" if name == COLUMNS[0] else "right", no_wrap=True)
    for row in table(made):
        shown.add_row(*row)
    page.print(shown)
    page.print()
    for line in remarks(made):
        page.print(line, soft_wrap=True)
