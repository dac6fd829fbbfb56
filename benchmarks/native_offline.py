"""posttrain's SFT and DPO on data of mixed lengths: the other side of trl_sft.py and trl_dpo.py.

A recipe, planned and trained as `posttrain train` does it: fp32 masters with bf16 compute, AdamW, the same
conversations or pairs in the same order (checked, token by token), the same rates. `--microbatch` is a number
of rows as on the other side: as many packed tokens as those rows have at most. The reference's
log-probabilities are computed once, before the first step; a timed pair is charged its share of that pass.

    python benchmarks/native_offline.py --method sft --model DIR --data hh_harmless_test.jsonl.gz --out X.json
"""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

# isort: off
import posttrain  # noqa: F401 - before torch, so that its threads wait as those of a run do

# isort: on
from offline_data import (
    LIMIT,
    WARM_UP,
    Messages,
    Pair,
    command_line,
    conversations,
    cut,
    digest,
    memory,
    pair_rows,
    pairs,
    repeated,
    row,
)
from prompts import resident_mib, restart_peak

from posttrain.curriculum.stream import Stream
from posttrain.data import Data
from posttrain.learner.learner import Steps
from posttrain.learner.optim import Optim
from posttrain.loop.build import build_session_parts
from posttrain.loop.session import LoopSession
from posttrain.plan.plan import Plan, plan_run
from posttrain.process.machine import configure
from posttrain.recipe.recipe import Checkpoints, Model, Recipe, TaskChoice
from posttrain.recipe.settings import Dataset, RunSettings
from posttrain.run.rundir import RunDir

RATES = {"sft": 2e-5, "dpo": 1e-6}
Rows = list[tuple[list[int], list[bool]]]


def main() -> None:
    """Repeats the measurement, or is one of its runs."""
    parser = command_line(__doc__)
    parser.add_argument("--method", choices=tuple(RATES), required=True)
    parser.add_argument("--microbatch-tokens", type=int, default=0, help="packed; 0: what --microbatch says")
    options = parser.parse_args()
    if not options.one:
        return repeated(options)
    options.microbatch_tokens = options.microbatch_tokens or options.microbatch * LIMIT
    configure(options.threads)
    n = batch_size(options) * (WARM_UP + options.steps)
    draw = conversations if options.method == "sft" else pairs
    drawn: list[Messages] | list[Pair] = draw(options.data, n, options.seed)
    stream = Stream(range(n), seed=0)
    order = [stream.take()[1] for _ in range(n)]
    with tempfile.TemporaryDirectory() as folder:
        file, run_dir = Path(folder, "data.jsonl"), Path(folder, "run")
        # The loop takes the records at random; they are laid down so that it takes them in our order.
        laid = dict(zip(order, map(record, drawn), strict=True))
        file.write_text("".join(json.dumps(laid[place]) + "\n" for place in range(n)))
        chosen = plan_run(recipe(options, file), say=print)
        groups = taken(chosen, drawn, order)
        meter = Meter(resident_mib(), options.steps, groups, batch_size(options))
        with contextlib.suppress(MeasuredError):
            directory, how = RunDir(run_dir, resume=False), {"resume": False, "config": {}}
            LoopSession(build_session_parts(chosen, directory, show=meter, say=print, **how)).finish()
    timed = meter.steps[WARM_UP:]
    seconds = sum(s["seconds"] for s in timed)
    # In SFT there is no reference, and nothing is added.
    seconds += meter.reference_seconds * options.steps / (WARM_UP + options.steps)
    speed = {
        "sft": ("tokens_per_second", sum(s["tokens"] for s in timed) / seconds),
        "dpo": ("pairs_per_second", len(timed) * batch_size(options) / seconds),
    }
    name, value = speed[options.method]
    result = {
        "settings": {
            "what": f"posttrain {options.method}",
            "data": options.data.name,
            "rows": options.rows,
            "microbatch": options.microbatch,
            "microbatch_tokens": options.microbatch_tokens,
            "dtype": options.dtype,
            "steps": options.steps,
            "seed": options.seed,
            "threads": options.threads,
        },
        name: value,
        "reference_seconds": meter.reference_seconds,
        **meter.memory,
        "digest": digest(each for group in groups for each in group),
        "steps": meter.steps,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return None


def batch_size(options: argparse.Namespace) -> int:
    """Conversations or pairs of a step."""
    return int(options.rows) // (2 if options.method == "dpo" else 1)


def record(drawn: Messages | Pair) -> dict[str, Messages]:
    """A conversation or a pair as a record that posttrain reads."""
    if not isinstance(drawn, Pair):
        return {"messages": drawn}
    sides = {"chosen": drawn.chosen, "rejected": drawn.rejected}
    return {"prompt": drawn.prompt} | {
        name: [{"role": "assistant", "content": answer}] for name, answer in sides.items()
    }


def recipe(options: argparse.Namespace, file: Path) -> Recipe:
    """The run; what is not named is posttrain's default."""
    return Recipe(
        model=Model(path=str(options.model), dtype=options.dtype, device="cpu"),
        method={"name": options.method},
        task=(TaskChoice(data=Data(path=str(file))),),
        run=RunSettings(updates=WARM_UP + options.steps, threads=options.threads),
        batch=Dataset(batch_size=batch_size(options), max_length=LIMIT),
        steps=Steps(microbatch_tokens=options.microbatch_tokens),
        optim=Optim(lr=RATES[options.method]),
        checkpoint=Checkpoints(every=0),
    )


def taken(chosen: Plan, drawn: Sequence[Messages | Pair], order: list[int]) -> list[Rows]:
    """The rows of each record in the order of training, which must be those of the other side."""
    if len(chosen.groups) != len(drawn):
        raise SystemExit(f"{len(chosen.groups)} of {len(drawn)} records are trained on: take another --seed")
    tokenizer, found = chosen.policy.tokenizer, []
    for place, each in zip(order, drawn, strict=True):
        rows = [cut(r.tokens, r.sampled) for r in chosen.groups[place]]
        if rows != (pair_rows(tokenizer, each) if isinstance(each, Pair) else [row(tokenizer, each)]):
            raise SystemExit(f"the two sides would not train on the same tokens of {each}")
        found.append(rows)
    return found


class MeasuredError(Exception):
    """All steps are done; a checkpoint would come next, which nobody wants."""


class Meter:
    """Told of every phase and step of the run, as the command line's display is."""

    def __init__(self, start: float, steps: int, groups: list[Rows], batch_size: int) -> None:
        self.start, self.last, self.groups, self.batch_size = start, WARM_UP + steps, groups, batch_size
        self.steps: list[dict[str, float]] = []
        self.memory: dict[str, float] = {}
        self.loaded = self.reference_seconds = 0.0

    def __call__(self, phase: str, facts: Mapping[str, float]) -> None:
        """Keeps the seconds of each step, and the memory before the first and at the last."""
        if phase == "train" and not self.loaded:
            restart_peak()
            self.loaded = resident_mib()
        if phase != "update":
            return
        self.reference_seconds += facts.get("time/reference", 0.0)
        n = len(self.steps) * self.batch_size
        step = {
            "step": facts["update"],
            "seconds": facts["time/train"],
            "tokens": sum(len(tokens) for g in self.groups[n : n + self.batch_size] for tokens, _ in g),
            "loss": facts["loss"],
            "grad_norm": facts["grad_norm"],
        }
        self.steps.append(step)
        print(json.dumps(step), flush=True)
        if len(self.steps) == self.last:
            self.memory = memory(self.start, self.loaded)
            raise MeasuredError


if __name__ == "__main__":
    main()
