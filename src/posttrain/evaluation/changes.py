"""Measure how far a run moved each of its weights from the start of training.

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
from posttrain.models import nf4, pretrained
from posttrain.models.file_names import to_files
from posttrain.models.fingerprint import finite
from posttrain.models.heads import BIAS, WEIGHT
from posttrain.models.rounding import dither
from posttrain.recipe.recipe import Recipe
from posttrain.types import UserError

TOP = 5
"""Number of singular values reported of each update."""
MEND = "name the model that the run started from with --against"


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change of one weight: its update ΔW = W_trained − W_start."""

    name: str
    kind: str
    """Name of the layer: q_proj, down_proj, embed_tokens ..."""
    shape: tuple[int, ...]
    norm: float
    """‖ΔW‖, Frobenius."""
    start_norm: float
    """‖W_start‖."""
    relative: float | None
    """‖ΔW‖ / ‖W_start‖; None for a weight that starts as 0."""
    singular_values: tuple[float, ...]
    """The five largest singular values of ΔW."""
    effective_rank: float
    participation_rank: float
    stable_rank: float
    rank_99: int
    """Rank of the smallest approximation with 99 % of ‖ΔW‖²."""


def change(
    name: str, shape: tuple[int, ...], singular: Float[torch.Tensor, "k"], start_norm: float
) -> Change:
    """Return the change of a weight from the singular values of its update.

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
    """Summarise several weights: the norms of all their entries together, and the medians of their ranks."""
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
    """Return tables of each weight, each kind of weight, and all weights."""
    kinds: dict[str, list[Change]] = {}
    for entry in changes:
        kinds.setdefault(entry.kind, []).append(entry)
    return {
        "weights": [asdict(c) for c in changes],
        "kinds": {kind: summary(members) for kind, members in kinds.items()},
        "whole": summary(changes),
    }


# ---------------------------------------------------------------------- weights


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is loaded at each use."""

    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


Weights = dict[str, LazyTensor]


def stored_weights(folder: Path) -> Weights:
    """Return the weights in the files of a model's directory, under their names there."""
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
            tensor: torch.Tensor = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        problem = f"cannot be read any more: {error}"
        raise UserError(str(file), problem, "if the run is still running, try again") from None
    return tensor


def initial_weights(
    path: Path, names: Iterable[str], dtype: torch.dtype, seed: int | None = None, *, frozen: bool = False
) -> Weights:
    """Return the weights of a model at the start of training: the float32 masters of weights of this dtype.

    frozen: the model is under an adapter and has no masters; return its weights of this dtype.

    If the files have all these names, weights are read one by one; otherwise the model is loaded, or
    initialised from the seed. Raises UserError for a model that a training run would refuse.
    """
    config = pretrained.load_config(path, scores=True)
    # Masters are dithered under the names of parameters, and files name some otherwise, as experts.
    renamed = bool(set(names) - pretrained.parameter_shapes(config).keys() - {WEIGHT, BIAS})
    if seed is None and not renamed:
        pretrained.check_weights(path)
        weights = stored_weights(path)
        if weights.keys() >= set(names):
            return {n: LazyTensor(m.shape, partial(_master, n, m, dtype, frozen)) for n, m in weights.items()}
    model = pretrained.load_model(path, dtype=dtype, init_seed=seed, scores=True)
    if renamed:
        masters = {n: p.float() if frozen else dither(n, p.detach()) for n, p in model.named_parameters()}
        return {n: LazyTensor(tuple(x.shape), x.detach) for n, x in to_files(model, masters).items()}
    weights = {n: LazyTensor(tuple(p.shape), p.detach) for n, p in model.named_parameters()}
    return {n: LazyTensor(m.shape, partial(_master, n, m, dtype, frozen)) for n, m in weights.items()}


def _master(name: str, matrix: LazyTensor, dtype: torch.dtype, frozen: bool) -> torch.Tensor:
    weight = matrix.load().to(dtype)
    return weight.float() if frozen else dither(name, weight)


def _stored(matrix: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
    return nf4.stored(matrix.load().to(dtype)).float()


def _adapted(matrix: LazyTensor, factors: Factors) -> torch.Tensor:
    return factors.adapted(matrix.load())


@dataclass(frozen=True)
class Comparison:
    """The weights of a checkpoint, and those that they are compared with."""

    trained: Weights
    start: Weights
    factors: dict[str, Factors]
    """Factors of an adapter, if the start is the model under it."""

    def names(self) -> list[str]:
        """Return the names of matrices in both; UserError if shapes differ, or for none in common."""
        names = [n for n, m in self.trained.items() if len(m.shape) == 2 and n in self.start]
        for name in names:
            ours, theirs = (list(w[name].shape) for w in (self.trained, self.start))
            if ours != theirs:
                problem = f"the model changed shape: {name} is {ours} in the run and {theirs} in the other"
                raise UserError("", problem, MEND)
        if not names:
            raise UserError("", "the run and the model it is compared with have no matrix in common", MEND)
        return names

    def left_out(self) -> dict[str, list[str]]:
        """Return the weights that are not measured, by reason."""
        return {
            "not matrices": [n for n, m in self.trained.items() if len(m.shape) != 2],
            "not there at the start": [n for n in self.trained if n not in self.start],
        }

    def change(self, name: str) -> Change:
        trained, start, factors = self.trained[name], self.start[name].load(), self.factors.get(name)
        parts: tuple[torch.Tensor, ...]
        if factors is not None and factors.magnitude is None:
            parts, singular_values = (factors.a, factors.b), factors.singular_values
        else:
            end = trained.load().float()
            # A frozen weight has no master: it equals the rounded start.
            update = torch.zeros_like(end) if end.equal(start.to(torch.bfloat16).float()) else end - start
            parts, singular_values = (update,), partial(torch.linalg.svdvals, update)
        if not all(map(finite, parts)):
            raise UserError("", f"{name} has NaN or infinite numbers", "the run has diverged")
        return change(name, trained.shape, singular_values(), float(start.double().norm()))


def compare(folder: Path, recipe: Recipe, base: Path | None, against: Path | None) -> Comparison:
    """Compare a checkpoint with `base`, the model that its run started from, or with another, `against`.

    A run that trained an adapter needs `base` in any case.
    """
    dtype = getattr(torch, recipe.model.dtype)
    seed = recipe.run.seed if recipe.model.random_init else None
    is_adapter = (folder / "adapter").exists()
    factors = saved_factors(folder / "adapter") if is_adapter else {}
    trained = {} if is_adapter else stored_weights(pretrained.without_strays(folder / "model"))
    start = {} if base is None else initial_weights(base, factors or trained, dtype, seed, frozen=is_adapter)
    if recipe.model.is_quantized:  # the start of the run is what 4 bits hold
        linear = nf4.layers(pretrained.skeleton(pretrained.load_config(base))) if base else {}
        start |= {
            name: LazyTensor(weight.shape, partial(_stored, weight, dtype))
            for name, weight in start.items()
            if name.removesuffix(".weight") in linear
        }
    if missing := factors.keys() - start.keys():
        raise UserError("model.path", f"the model has no {min(missing)}, which the run adapted")
    if is_adapter and against is not None:
        trained |= start
    for name, f in factors.items():
        trained[name] = LazyTensor((len(f.b), f.a.shape[1]), partial(_adapted, start[name], f))
    if against is None:
        return Comparison(trained, start, factors)
    return Comparison(trained, initial_weights(against, trained, dtype, frozen=is_adapter), {})
