"""Evolution strategies: gradient ascent on the weights, using only the fitness of perturbed copies.

The objective is the smoothed fitness F_σ(θ) = E[F(θ + σε)], ε ~ N(0, I), whose gradient is

    ∇F_σ(θ) = E[F(θ + σε) ε] / σ = E[(F(θ + σε) − F(θ − σε)) ε] / 2σ

so F may be a black box: not differentiable, with delayed rewards, a complete episode. The second form,
of antithetic pairs, has no variance from F(θ) itself. For a quadratic F both equal ∇F(θ).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from posttrain.math.evolution import centred_ranks

Noise = Float[torch.Tensor, "N D"]
PerSample = Float[torch.Tensor, "N"]
Weights = Float[torch.Tensor, "D"]
Fitness = Callable[[nn.Module, int], float]
"""The fitness of a module; the number seeds everything random in the trial."""
Shape = Callable[[PerSample], PerSample]


def gradient(fitness: PerSample, noise: Noise, sigma: float) -> Weights:
    """mean_i F(θ + σε_i) ε_i / σ.    unbiased for ∇F_σ

    Source: arXiv:1703.03864, eq. 1 and algorithm 1; REINFORCE over weights.

    >>> gradient(torch.tensor([1.0, 3.0]), torch.tensor([[1.0], [-1.0]]), 0.5)
    tensor([-2.])
    """
    return fitness @ noise / (len(noise) * sigma)


def antithetic_gradient(up: PerSample, down: PerSample, noise: Noise, sigma: float) -> Weights:
    """mean_i (F(θ + σε_i) − F(θ − σε_i)) ε_i / 2σ.    unbiased for ∇F_σ

    Source: mirrored sampling, Brockhoff et al. 2010; arXiv:1703.03864, section 2.1.

    >>> antithetic_gradient(torch.tensor([1.0]), torch.tensor([3.0]), torch.tensor([[1.0]]), 0.5)
    tensor([-2.])
    """
    return (up - down) @ noise / (2 * len(noise) * sigma)


@dataclass(frozen=True, kw_only=True)
class EvolutionSettings:
    """Settings of a run of evolution."""

    generations: int = 60
    pairs: int = 16
    """Antithetic pairs in a generation, of two trials each."""
    sigma: float = 0.3
    """Deviation of the noise on each weight."""
    lr: float = 0.1
    """Learning rate of Adam, which takes the estimate as a gradient."""
    shape: Shape = centred_ranks


@dataclass(frozen=True, eq=False)
class Evolved:
    """A module with the last weights, and the mean fitness of each generation's trials."""

    module: nn.Module
    fitness: list[float]


def evolve(module: nn.Module, fitness: Fitness, settings: EvolutionSettings, *, seed: int) -> Evolved:
    """Return a trained copy of the module; the module itself is unchanged.

    All trials of a generation get the same seed, so they differ only in their weights.

    Source: arXiv:1703.03864, algorithm 1, with antithetic pairs and Adam.
    """
    mean, trial = copy.deepcopy(module), copy.deepcopy(module)
    theta = parameters_to_vector(mean.parameters()).detach().clone()
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam([theta], lr=settings.lr, maximize=True)
    history = []

    def worth(weights: Weights, draw: int) -> float:
        vector_to_parameters(weights, trial.parameters())
        return fitness(trial, draw)

    with torch.no_grad():
        for _ in range(settings.generations):
            draw = int(torch.randint(2**31, (), generator=generator))
            noise = torch.randn(settings.pairs, len(theta), generator=generator, dtype=theta.dtype)
            points = theta + settings.sigma * torch.cat([noise, -noise])
            trials = torch.tensor([worth(point, draw) for point in points], dtype=theta.dtype)
            up, down = settings.shape(trials).chunk(2)
            theta.grad = antithetic_gradient(up, down, noise, settings.sigma)
            optimiser.step()
            history.append(float(trials.mean()))
        vector_to_parameters(theta, mean.parameters())
    return Evolved(mean, history)
