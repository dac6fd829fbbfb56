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
from posttrain.plan.memory import Shape, gib
from posttrain.plan.model_info import ModelInfo
from posttrain.plan.resolve import Resolved
from posttrain.types import UserError


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes that a run writes, without files of a few kB."""

    weights: int
    """A checkpoint without resume/."""
    resume: int
    """The folder resume/ of a checkpoint."""
    written: int
    """Number of checkpoints in the whole run."""
    keep: int
    keep_weights: int
    best: bool = False
    """True if the best checkpoint keeps its weights too."""
    others: Mapping[str, int]
    """Files other than checkpoints, at most."""
    merged: int
    """An adapter merged into its model, which a pipeline makes for later stages."""
    free: int
    """Bytes free on the disk, and those that this run already uses."""

    @property
    def peak(self) -> int:
        """The most at any moment: while the last checkpoint is written."""
        full, weights = self._counts(self.written - 1)
        earlier = full * (self.weights + self.resume) + weights * self.weights
        return earlier + self.weights + self.resume + sum(self.others.values())

    @property
    def finished(self) -> int:
        """What remains of a pipeline's stage that keeps weights alone."""
        stay = min(self.written, 1 + self.keep_weights + self.best) if self.keep else self.written
        return stay * self.weights + self.merged + sum(self.others.values())

    def _counts(self, written: int) -> tuple[int, int]:
        """Return how many of the written checkpoints stay complete, and how many keep their weights alone."""
        full = min(written, self.keep) if self.keep else written
        return full, min(written - full, self.keep_weights + self.best)

    def copied(self, shares: int) -> int:
        """Return the bytes of a checkpoint that each of several ranks holds while it is written."""
        return (self.weights + self.resume) // shares

    def rows(self) -> dict[str, str]:
        """Return lines for a person."""
        full, weights = self._counts(self.written)
        count = f"{self.written}, of which {full} stay" if full < self.written else str(self.written)
        return {
            "a checkpoint": f"{gib(self.weights + self.resume)}, {gib(self.weights)} of them its weights",
            "checkpoints": count + (f", and the weights of {weights}" if weights else ""),
            **{name: f"at most {gib(size)}" for name, size in self.others.items()},
            "in all": f"at most {gib(self.peak)}",
            "free now": gib(self.free),
        }

    def check(self, path: Path) -> None:
        """Raise UserError if not even one checkpoint fits."""
        size = self.weights + self.resume
        if size > self.free:
            raise UserError(
                str(path),
                f"a checkpoint takes {gib(size)}, and {gib(self.free)} of the disk are free",
                "free some of it, or write to another disk",
            )


SAMPLE_TOKEN_BYTES = 64
"""Bytes of a token in samples/."""


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
    """Estimate what a run in this directory will write; `critic`: a critic's own model.

    A trained parameter has a master and two AdamW moments, or Muon's one, of four bytes each, or of eight in
    float64; AdamW's may take 8 bits. longest: tokens of a prompt.
    """
    recipe, itemsize = resolved.recipe, policy.dtype.itemsize
    wide = max(4, itemsize)
    parameters, trained = shape.parameters, shape.trained
    head = head_class(policy.config, resolved) is not None
    model = itemsize * parameters if recipe.lora.rank else wide * trained
    weights = model * (head or not recipe.lora.rank) + 2 * wide * trained * bool(recipe.lora.rank)
    resume = (shape.moment_bytes or wide * (2 * trained - shape.matrices)) * (resolved.line.step == "adamw")
    if critic:
        resume += wide * critic.parameters
        resume += critic.moment_bytes or wide * (2 * critic.parameters - critic.matrices)
    resume += wide * parameters * bool(recipe.reference.refresh_every)
    every, updates = recipe.checkpoint.every, recipe.run.updates
    others = {}
    if resolved.online:
        r, e = recipe.rollout, recipe.eval
        length = longest + recipe.sampling.max_new_tokens
        evaluations = bool(e.limit) * (2 + (updates - 1) // e.every if e.every else 2)
        if r.replay:
            resume += TOKEN_BYTES * r.groups * r.group_size * length * min(r.replay_lag + 1, updates)
        files = [(updates, r.groups * r.group_size * length), (evaluations, e.limit * length)]
        bound = recipe.record.tokens or math.inf
        others["rollouts"] = SAMPLE_TOKEN_BYTES * int(sum(n * min(bound, tokens) for n, tokens in files))
    if scores_once(resolved):
        others["the reference's answers"] = 4 * sum(len(row.tokens) for group in groups for row in group)
    return Disk(
        weights=weights,
        resume=resume,
        written=-(-updates // every) if every else 1,
        keep=recipe.checkpoint.keep,
        keep_weights=recipe.checkpoint.keep_weights,
        best=bool(recipe.checkpoint.best) and recipe.eval.every > 0,
        others=others,
        merged=0 if head or not recipe.lora.rank else 4 * parameters,
        free=room(path),
    )


def room(path: Path) -> int:
    """Return the bytes that a run in this directory may use: those free, and those that it already uses."""
    folder = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    used = 0
    for file in path.rglob("*") if path.is_dir() else ():
        with suppress(OSError):  # deleted in the meantime
            used += file.stat().st_size if file.is_file() else 0
    return shutil.disk_usage(folder).free + used
