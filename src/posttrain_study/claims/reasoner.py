"""Stages of recipes/pretrain_to_reasoner.toml as starts: a Llama of 126 000 weights that learns sums."""

import shutil
import statistics
import subprocess
import sys
from math import comb
from pathlib import Path
from typing import Any

from mathcheck.plugin.number import Number
from posttrain.data.arithmetic import Arithmetic
from posttrain.errors import RunError
from posttrain.evaluation.compare import Compare, answers
from posttrain.models import checkpoint
from posttrain.recipe.catalogue import recipes_dir
from posttrain.recipe.verifier import VerifierChoice
from posttrain.types import Sampling

SUMS = Arithmetic(low=2, high=49, held_out=200, template="What is {a} + {b}?")


def recipe(stage: str) -> Path:
    """Return the recipe of a stage: sft or grpo."""
    return recipes_dir() / "pretrain_to_reasoner" / f"{stage}.toml"


def stages(place: Path, seed: int = 0) -> Path:
    """Return the folder of the pipeline's stages, made from this seed unless it is complete.

    The GRPO stage is cut to one update: nothing starts from it.
    """
    if not (place / "complete").exists():
        shutil.rmtree(place, ignore_errors=True)
        sets = ["grpo.run.updates=1", "grpo.rollout.groups=2", "compare.limit=1", f"nothing.seed={seed}"]
        for stage in ("pretrain", "sft", "grpo"):
            sets += [f"{stage}.run.seed={seed}", f"{stage}.run.threads=1"]
        words = [sys.executable, "-m", "posttrain", "train", "pretrain_to_reasoner", "--run-dir", str(place)]
        words += ["--quiet", *(word for value in sets for word in ("--set", value))]
        if code := subprocess.run(words, check=False).returncode:
            raise RunError("the start's pipeline", f"exit status {code}", f"its runs are in {place}")
        (place / "complete").touch()
    return place


def last_checkpoint(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run."""
    newest, _ = checkpoint.newest(run_dir / "checkpoints")
    if newest is None:
        raise RunError(str(run_dir), "it has no checkpoint", "remove the folder, and run again")
    return newest


def accuracy(model: Path) -> float:
    """Return the share of held-out sums whose greedy answer is right."""
    return evaluate(model, samples=1, temperature=0.0)["pass@1"]


def evaluate(model: Path, *, samples: int, temperature: float, seed: int = 0) -> dict[str, float]:
    """Return pass@1, pass@samples and the entropy, in nats a token, of answers to the held-out sums."""
    number: dict[str, Any] = {
        "number": Number(where="last")
    }  # the registry adds the fields of VerifierChoice
    comparison = Compare(
        stages=("one", "other"),
        arithmetic=SUMS,
        verifier=VerifierChoice(**number),
        sampling=Sampling(temperature=temperature, max_new_tokens=14),
        limit=SUMS.held_out,
        samples=samples,
        seed=seed,
    )
    every = answers(comparison, str(model), lambda count, total: None)
    right: dict[str, int] = {}
    for answer in every:
        right[answer.task] = right.get(answer.task, 0) + (answer.label == "right")
    figures = {}
    for k in (1, samples):
        misses = [comb(samples - c, k) / comb(samples, k) for c in right.values()]
        figures[f"pass@{k}"] = 1 - statistics.fmean(misses)
    figures["entropy"] = -sum(answer.logp for answer in every) / sum(answer.length for answer in every)
    return figures
