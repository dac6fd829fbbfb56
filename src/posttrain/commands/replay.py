"""`posttrain replay`: a run whose samplers went by the clock, made again from the record of what they did."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file

from posttrain.api.opening import claimed_directory, train
from posttrain.models.checkpoint import RESUME, listed, numbered
from posttrain.recipe import config
from posttrain.recipe.target import check_run
from posttrain.report.terminal import out
from posttrain.runtime.record.resume import last_update
from posttrain.runtime.record.schedule import RecordedSchedule
from posttrain.types import RunError, UserError


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A finished run with samplers of its own.")],
    run_dir: Annotated[
        Path | None, typer.Option(help="Where it is made again; by default runs/NAME-replay-001, -002 ...")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the last line.")] = False,
) -> None:
    """Makes an asynchronous run again, in one thread, and compares weights and samples bit for bit.

    With async.pace = "clock" the order of events is the machine's. Each sampler writes down what it did
    before which step of its engine; with that, the recipe and as many threads, everything comes out again.
    """
    check_run(run)
    found = config.read(run / "config.toml")
    ahead, (_, env) = found.recipe.async_, found.recipe.judges()
    if (run / "ranks").is_dir():
        raise UserError(str(run), "it was trained by several ranks, and is made again by one")
    if ahead.window > 1:
        raise UserError("async.window", "which groups passed others is in no record")
    if env is not None and not env.trusted and ahead.max_lag:
        problem = "when an environment in a process of its own replied is in no record"
        raise UserError("task.repair" if found.recipe.task.repair else "task.env", problem)
    if last_update(run) < found.recipe.run.updates:
        problem = f"it has ended at update {last_update(run)} of {found.recipe.run.updates}"
        raise UserError(str(run), problem, "end it with `posttrain train --resume` first")
    recorded = RecordedSchedule(run, ahead.samplers)
    path = run_dir or claimed_directory(f"{run.resolve().name}-replay")
    train(found, path, title="replay", resume=False, view="none" if quiet else "plan", recorded=recorded)
    tensors, rows = _compared(run, path)
    out.print(f"equal bit for bit: {tensors} tensors, {rows} samples  {path}", soft_wrap=True)


def _beside(file: Path, run: Path, again: Path) -> Path:
    other = again / file.relative_to(run)
    if not other.exists():
        raise RunError("replay", f"{other} did not come out")
    return other


def _compared(run: Path, again: Path) -> tuple[int, int]:
    """How many tensors and samples are the same; RunError for the first that is not."""
    tensors = rows = 0
    _, last = list(numbered(run / "checkpoints"))[-1]
    files = (file for file in listed(last) if file.parent.name != RESUME)
    for file in sorted(file for file in files if file.suffix == ".safetensors"):
        one, other = load_file(file), load_file(_beside(file, run, again))
        for name, tensor in one.items():
            if not torch.equal(tensor, other[name]):
                raise RunError("replay", f"{name} came out otherwise")
        tensors += len(one)
    for file in sorted((run / "samples").glob("*.jsonl")):
        one_text, other_text = file.read_bytes(), _beside(file, run, again).read_bytes()
        if one_text != other_text:
            raise RunError("replay", f"{file.name} of samples came out otherwise")
        rows += one_text.count(b"\n")
    return tensors, rows
