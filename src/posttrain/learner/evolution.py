"""Perturbed weights, and a step along their noise: no gradient, no moments, and no noise that is stored.

The noise of a parameter follows from (seed, update, number of the noise, place of the parameter), so it is
drawn again wherever it is needed: to perturb the weights, and for the step. Perturbed weights are restored
from a copy: subtracting σε again would not restore them, since x + y - y is not x in floating point.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from posttrain.learner.optim import Master
from posttrain.methods.evolution import Evolution
from posttrain.types import Batch


@dataclass(frozen=True)
class Population:
    """The members θ ± σ ε_d of an update, ε_d ~ N(0, I) for d = 0, 1, 2 ..., θ the numbers of `masters`."""

    method: Evolution
    masters: Sequence[Master]
    seed: int

    def noise(self, update: int, number: int, place: int) -> torch.Tensor:
        """Return ε_number of the parameter at this place, in its master's dtype.

        A device draws the same bits each time; a CPU and a GPU draw different ones.
        """
        like = self.masters[place].parameter
        generator = torch.Generator(like.device)
        generator.manual_seed(hash((self.seed, update, number, place)) % 2**63)
        dtype = torch.promote_types(like.dtype, torch.float32)
        return torch.randn(like.shape, generator=generator, dtype=dtype, device=like.device)

    @contextmanager
    def member(self, update: int, member: int) -> Iterator[None]:
        """Hold the weights of a member in the model, rounded to its dtype; then restore it to the bit."""
        numbers, signs = self.method.noise(torch.tensor([member]))
        number, scale = int(numbers), float(signs) * self.method.sigma
        before = [master.parameter.detach().clone() for master in self.masters]
        try:
            with torch.no_grad():
                for place, master in enumerate(self.masters):
                    noise = self.noise(update, number, place)
                    master.parameter.copy_(torch.add(master.numbers(), noise, alpha=scale))
            yield
        finally:
            with torch.no_grad():
                for master, weight in zip(self.masters, before, strict=True):
                    master.parameter.copy_(weight)

    def step(self, update: int, batch: Batch, rate: float) -> dict[str, float]:
        """Add rate/(nσ) Σ_i z_i ε_i to the masters, z_i the advantages of a prepared batch; return metrics.

        Raises ValueError for rows that other weights drew than the members of this update.
        """
        if bool((batch.version[batch.mask] != update).any()):
            raise ValueError("these answers are of another update's population: call sample() for new ones")
        _, fitness = self.method.fitness(batch)
        scale = rate / (len(fitness) * self.method.sigma)
        coefficients = self.method.coefficients(batch)
        return {
            "evolution/best": float(fitness.max()),
            "evolution/spread": float(fitness.std(correction=0)),
            "evolution/step": self.move(update, {d: scale * c for d, c in sorted(coefficients.items())}),
        }

    @torch.no_grad()
    def move(self, update: int, coefficients: Mapping[int, float]) -> float:
        """Add Σ_d c_d ε_d to the masters, in the order of the mapping; return the 2-norm of the sum."""
        norms = []
        for place, master in enumerate(self.masters):
            total = master.zeros()
            for number, coefficient in coefficients.items():
                if coefficient:
                    total.add_(self.noise(update, number, place), alpha=coefficient)
            norms.append(float(torch.linalg.vector_norm(total, dtype=torch.float64)))
            master.set(total.add_(master.numbers()))
        return math.hypot(*norms)
