"""Estimate the bytes that a run writes, before it begins."""

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.curriculum.replay_buffer import TOKEN_BYTES
from posttrain.plan.companions import head_class, scores_once
from posttrain.plan.dataset_rows import Group
from posttrain.plan.memory import (
    Shape,
    gib,
)
from posttrain.plan.model_info import (
    ModelInfo,
)
from posttrain.plan.resolve import Resolved
from posttrain.types import UserError


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes that a run writes, files of a few kB apart."""

    weights: int
    """Of a checkpoint, without resume/."""
    resume: int
    """Of resume/."""
    written: int
    """Checkpoints of the whole run."""
    keep: int
    keep_weights: int
    best: bool = False
    """Whether the best checkpoint keeps its weights, too."""
    beside: Mapping[str, int]
    """What there is besides checkpoints, at most."""
    merged: int
    """Of an adapter in its model, which a pipeline makes for later stages."""
    free: int
    """What the disk still has, and what this very run takes of it already."""

    @property
    def peak(self) -> int:
        """The most at any moment, which is while the last checkpoint is written."""
        whole, weights = self._counts(self.written - 1)
        stays = whole * (self.weights + self.resume) + weights * self.weights
        return stays + self.weights + self.resume + sum(self.beside.values())

    @property
    def finished(self) -> int:
        """What is left of a pipeline's stage that keeps weights alone."""
        stay = min(self.written, 1 + self.keep_weights + self.best) if self.keep else self.written
        return stay * self.weights + self.merged + sum(self.beside.values())

    def _counts(self, written: int) -> tuple[int, int]:
        """How many checkpoints of so many stay whole, and how many with their weights alone."""
        whole = min(written, self.keep) if self.keep else written
        return whole, min(written - whole, self.keep_weights + self.best)

    def rows(self) -> dict[str, str]:
        """As lines for a person."""
        whole, weights = self._counts(self.written)
        stay = f"{self.written}, of which {whole} stay" if whole < self.written else str(self.written)
        return {
            "a checkpoint": f"{gib(self.weights + self.resume)}, {gib(self.weights)} of them its weights",
            "checkpoints": stay + (f", and the weights of {weights}" if weights else ""),
            **{name: f"at most {gib(size)}" for name, size in self.beside.items()},
            "in all": f"at most {gib(self.peak)}",
            "free now": gib(self.free),
        }

    def check(self, path: Path) -> None:
        """UserError if not even one checkpoint has room."""
        need = self.weights + self.resume
        if need > self.free:
            raise UserError(
                str(path),
                f"a checkpoint takes {gib(need)}, and {gib(self.free)} of the disk are free",
                "free some of it, or write to another disk",
            )


LINE_BYTES = 64
"""Of samples, for a token."""


def estimate_disk(
    resolved: Resolved,
    policy: ModelInfo,
    groups: Sequence[Group],
    path: Path,
    shape: Shape,
    *,
    critic: Shape | None,
    longest: int,
) -> Disk:
    """What a run in this directory will write; `critic` is one of a model of its own.

    What is trained has a master and two moments of AdamW of four bytes each. `longest`: tokens of a prompt.
    """
    recipe, itemsize = resolved.recipe, policy.dtype.itemsize
    parameters, trained = shape.parameters, shape.trained
    head = head_class(policy.config, resolved) is not None
    model = itemsize * parameters if recipe.lora.rank else 4 * trained
    weights = model * (head or not recipe.lora.rank) + 8 * trained * bool(recipe.lora.rank)
    resume = 8 * trained * (resolved.line.step == "adamw") + 12 * (critic.parameters if critic else 0)
    resume += 4 * parameters * bool(recipe.reference.refresh_every)
    every, updates = recipe.checkpoint.every, recipe.run.updates
    beside = {}
    if resolved.online:
        r, e = recipe.rollout, recipe.eval
        length = longest + recipe.sampling.max_new_tokens
        evaluations = bool(e.limit) * (2 + (updates - 1) // e.every if e.every else 2)
        if r.replay:
            resume += TOKEN_BYTES * r.groups * r.group_size * length * min(r.replay_lag + 1, updates)
        each = [(updates, r.groups * r.group_size * length), (evaluations, e.limit * length)]
        bound = recipe.record.tokens or math.inf
        beside["rollouts"] = LINE_BYTES * int(sum(times * min(bound, tokens) for times, tokens in each))
    if scores_once(resolved):
        beside["the reference's answers"] = 4 * sum(len(row.tokens) for group in groups for row in group)
    return Disk(
        weights=weights,
        resume=resume,
        written=-(-updates // every) if every else 1,
        keep=recipe.checkpoint.keep,
        keep_weights=recipe.checkpoint.keep_weights,
        best=recipe.checkpoint.best and recipe.eval.every > 0,
        beside=beside,
        merged=0 if head or not recipe.lora.rank else 4 * parameters,
        free=room(path),
    )


def room(path: Path) -> int:
    """Bytes that what writes to this directory may take: those free, and what it has taken already."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    own = 0
    for file in path.rglob("*") if path.is_dir() else ():
        with suppress(OSError):  # it is gone by now
            own += file.stat().st_size if file.is_file() else 0
    return shutil.disk_usage(there).free + own
