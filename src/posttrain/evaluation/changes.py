"""What a run did to its weights: each one's update, beside where it started.

Weights are read one at a time, and the update of a low-rank adapter is measured on its factors.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from posttrain.learner.lora import Factors, saved_factors
from posttrain.math import spectrum
from posttrain.models import pretrained
from posttrain.models.fingerprint import finite
from posttrain.models.rounding import dither
from posttrain.recipe.recipe import Recipe
from posttrain.types import UserError

TOP = 5
"""Largest singular values that are kept of each update."""
MEND = "name the model that the run started from with --against"


@dataclass(frozen=True, kw_only=True)
class Change:
    """What became of one weight: its update ΔW = W_trained − W_start."""

    name: str
    kind: str
    """The layer's own name: q_proj, down_proj, embed_tokens ..."""
    shape: tuple[int, ...]
    norm: float
    """‖ΔW‖, Frobenius."""
    start_norm: float
    """‖W_start‖."""
    relative: float | None
    """‖ΔW‖ / ‖W_start‖; None for a weight that was 0."""
    singular_values: tuple[float, ...]
    """The five largest of ΔW."""
    effective_rank: float
    participation_rank: float
    stable_rank: float
    rank_99: int
    """Of the least approximation that keeps 99 % of ‖ΔW‖²."""


def change(
    name: str, shape: tuple[int, ...], singular: Float[torch.Tensor, "k"], start_norm: float
) -> Change:
    """A weight's change, from the singular values of its update.

    >>> c = change("model.layers.0.self_attn.q_proj.weight", (3, 3), torch.tensor([3.0, 4.0, 0.0]), 10.0)
    >>> c.kind, c.norm, c.relative, c.rank_99
    ('q_proj', 5.0, 0.5, 2)
    """
    s = singular.double().sort(descending=True).values
    norm = float(s.norm())
    return Change(
        name=name,
        kind=name.removesuffix(".weight").rpartition(".")[2],
        shape=shape,
        norm=norm,
        start_norm=start_norm,
        relative=norm / start_norm if start_norm else None,
        singular_values=tuple(s[:TOP].tolist()),
        effective_rank=spectrum.effective_rank(s),
        participation_rank=spectrum.participation_rank(s),
        stable_rank=spectrum.stable_rank(s),
        rank_99=spectrum.energy_rank(s, 0.99),
    )


def summary(changes: Sequence[Change]) -> dict[str, Any]:
    """Several weights as one: the norm of all their numbers together, and the medians of their ranks."""
    norm, start = (math.hypot(*(getattr(c, key) for c in changes)) for key in ("norm", "start_norm"))
    ranks = ("effective_rank", "participation_rank", "stable_rank", "rank_99")
    return {
        "weights": len(changes),
        "moved": sum(c.norm > 0 for c in changes),
        "norm": norm,
        "relative": norm / start if start else None,
        **{rank: median(getattr(c, rank) for c in changes) for rank in ranks},
        "full_rank": median(min(c.shape) for c in changes),
    }


def sections(changes: Sequence[Change]) -> dict[str, Any]:
    """All of it as tables: each weight, each kind of weight, the whole."""
    kinds: dict[str, list[Change]] = {}
    for each in changes:
        kinds.setdefault(each.kind, []).append(each)
    return {
        "weights": [asdict(c) for c in changes],
        "kinds": {kind: summary(of) for kind, of in kinds.items()},
        "whole": summary(changes),
    }


# ---------------------------------------------------------------------- weights


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is in memory only while somebody looks at it."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


Weights = dict[str, LazyTensor]


def stored(folder: Path) -> Weights:
    """The weights of a model's directory, under the names that its files give them."""
    out = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                shape = tuple(opened.get_slice(name).get_shape())
                out[name] = LazyTensor(shape, partial(_tensor, file, name))
    return out


def _tensor(file: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(str(file), framework="pt") as opened:
            found: torch.Tensor = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        problem = f"cannot be read any more: {error}"
        raise UserError(str(file), problem, "if the run goes on, try again") from None
    return found


def start_of(
    path: Path, wanted: Iterable[str], dtype: torch.dtype, seed: int | None = None, *, frozen: bool = False
) -> Weights:
    """A model's weights as training begins with them: the masters of what is computed in this type.

    frozen: under an adapter, where they have no masters and are what is computed with.

    They are read one by one where the files have all that is wanted, under these names; otherwise the model
    is loaded, or drawn from the seed. Raises UserError for all that a training run would refuse.
    """
    if seed is None:
        pretrained.load_config(path, scores=True)
        pretrained.check_weights(path)
        found = stored(path)
        if found.keys() >= set(wanted):
            return {n: LazyTensor(m.shape, partial(_begun, n, m, dtype, frozen)) for n, m in found.items()}
    model = pretrained.load_model(path, dtype=dtype, init_seed=seed, scores=True)
    read = {n: LazyTensor(tuple(p.shape), p.detach) for n, p in model.named_parameters()}
    return {n: LazyTensor(m.shape, partial(_begun, n, m, dtype, frozen)) for n, m in read.items()}


def _begun(name: str, matrix: LazyTensor, dtype: torch.dtype, frozen: bool) -> torch.Tensor:
    weight = matrix.read().to(dtype)
    return weight.float() if frozen else dither(name, weight)


def _adapted(matrix: LazyTensor, factors: Factors) -> torch.Tensor:
    return factors.adapted(matrix.read())


@dataclass(frozen=True)
class Comparison:
    """A checkpoint's weights beside others."""

    trained: Weights
    start: Weights
    factors: dict[str, Factors]
    """Of an adapter, where the start is the model under it."""

    def names(self) -> list[str]:
        """The matrices that both have; UserError where they differ in shape, or where there are none."""
        names = [n for n, m in self.trained.items() if len(m.shape) == 2 and n in self.start]
        for name in names:
            ours, theirs = (list(w[name].shape) for w in (self.trained, self.start))
            if ours != theirs:
                what = f"{name} is {ours} in the run and {theirs} in what it is compared with"
                raise UserError("", f"the model changed shape: {what}", MEND)
        if not names:
            raise UserError("", "the run and what it is compared with have no matrix in common", MEND)
        return names

    def left_out(self) -> dict[str, list[str]]:
        """What is not measured, by why."""
        return {
            "not matrices": [n for n, m in self.trained.items() if len(m.shape) != 2],
            "not there at the start": [n for n in self.trained if n not in self.start],
        }

    def change(self, name: str) -> Change:
        """What became of this weight."""
        trained, start, factors = self.trained[name], self.start[name].read(), self.factors.get(name)
        parts: tuple[torch.Tensor, ...]
        if factors is not None and factors.magnitude is None:
            parts, singular_values = (factors.a, factors.b), factors.singular_values
        else:
            end = trained.read().float()
            # A frozen weight has no master: it is still what the start rounds to.
            update = torch.zeros_like(end) if end.equal(start.to(torch.bfloat16).float()) else end - start
            parts, singular_values = (update,), partial(torch.linalg.svdvals, update)
        if not all(map(finite, parts)):
            raise UserError("", f"{name} has NaN or infinite numbers", "the run has diverged")
        return change(name, trained.shape, singular_values(), float(start.double().norm()))


def compare(folder: Path, recipe: Recipe, begun: Path | None, against: Path | None) -> Comparison:
    """A checkpoint beside the model that it started from, `begun`; or beside another, `against`.

    A run that trained an adapter needs what it began with in any case.
    """
    dtype = getattr(torch, recipe.model.dtype)
    seed = recipe.run.seed if recipe.model.random_init else None
    is_adapter = (folder / "adapter").exists()
    factors = saved_factors(folder / "adapter") if is_adapter else {}
    trained = {} if is_adapter else stored(pretrained.without_strays(folder / "model"))
    start = {} if begun is None else start_of(begun, factors or trained, dtype, seed, frozen=is_adapter)
    if lost := factors.keys() - start.keys():
        raise UserError("model.path", f"the model has no {min(lost)}, which the run adapted")
    if is_adapter and against is not None:
        trained |= start
    for name, f in factors.items():
        trained[name] = LazyTensor((len(f.b), f.a.shape[1]), partial(_adapted, start[name], f))
    if against is None:
        return Comparison(trained, start, factors)
    return Comparison(trained, start_of(against, trained, dtype, frozen=is_adapter), {})
