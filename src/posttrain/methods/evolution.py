"""Evolution strategies: the weights move along the noise of the perturbed weights whose answers did well."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from posttrain.math import masked, returns
from posttrain.math.choice import AtLeast
from posttrain.math.evolution import Members, PerMember, fitness
from posttrain.types import Batch, Method, Outputs, PerRow, PerToken


@dataclass(frozen=True)
class Evolution(Method):
    """θ ← θ + lr/(nσ) Σ_i z(F_i) ε_i, F_i the mean return of the answers of θ + σ ε_i.

    Each of the n members of the population answers every task of the update once: answer i of each group is
    by member i (`Batch.member`), and has the advantage z(F_i). No token has a loss, and nothing is
    differentiated: learner/evolution.py adds the noise and takes the step.

    Source: arXiv:2509.24372, algorithm 1, whose α is lr/σ, and whose members are independent.
    """

    shaping: Callable[..., PerMember]
    """Fitness of all members -> their weights in the step: standardised, ranks, or the fitness itself."""
    noise: Callable[[Members], tuple[Members, Members]]
    """Number of a member -> its noise: in pairs of opposite sign, or independent."""
    sigma: Annotated[float, AtLeast(1e-12)] = 1e-3
    """σ: deviation of the noise on each trained weight of a member."""

    @property
    def least_group(self) -> int:
        """Two members: the shaped fitness of one alone is 0."""
        return 2

    def fitness(self, batch: Batch) -> tuple[Members, PerMember]:
        """Return (numbers of the members that have rows, their fitness).

        Raises ValueError if the rows are not of members, or if no row has a trained token.
        """
        R = returns.worth(batch.reward, batch.mask, like=batch.logp_gen)
        return _by_member(R, batch)

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with the shaped fitness of its member as each row's advantage."""
        members, F = self.fitness(batch)
        assert batch.member is not None
        is_of = (batch.member[:, None] == members).to(F)
        z = (is_of @ self.shaping(F).to(F)).to(batch.logp_gen)
        return replace(batch, advantage=masked.fill(z[:, None].expand_as(batch.mask), batch.mask))

    def coefficients(self, batch: Batch) -> dict[int, float]:
        """Return c_d by the number d of a draw of noise: Σ_i z_i ε_i = Σ_d c_d ε_d, z_i the advantages."""
        assert batch.advantage is not None
        assert batch.member is not None
        rows, first = batch.mask.any(-1), batch.mask.int().argmax(-1, keepdim=True)
        # One number a member, whichever tasks have a row of it.
        members, index = torch.unique(batch.member[rows], return_inverse=True)
        z = batch.advantage.new_zeros(len(members))
        z[index] = batch.advantage.gather(1, first)[rows, 0]
        draws, signs = self.noise(members)
        out = dict.fromkeys(draws.tolist(), 0.0)
        for draw, weight in zip(draws.tolist(), (signs * z).tolist(), strict=True):
            out[draw] += weight
        return out

    def weight(self, batch: Batch) -> PerToken:
        """Return 0: no token has a loss."""
        return torch.zeros_like(batch.logp_gen)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return 0: no token has a loss."""
        return torch.zeros_like(out.logp)


def _by_member(of_row: PerRow, batch: Batch) -> tuple[Members, PerMember]:
    """Return (numbers of the members that have rows, the mean over tasks of the rows of each)."""
    if batch.member is None:
        raise ValueError("evolution learns from answers of perturbed weights: train on those of sample()")
    rows = batch.mask.any(-1)
    if not rows.any():
        raise ValueError("nothing to train on: no token of this update was sampled by the policy")
    return fitness(of_row[rows], batch.member[rows], batch.group[rows])
