"""Evolution strategies: the estimators against the smoothed gradient, and the maze."""

import numpy as np
import pytest
import torch
from torch import nn

from posttrain.math.evolution import centred_ranks, unshaped
from posttrain_study.classic import mdp as exact
from posttrain_study.classic.evolution import (
    EvolutionSettings,
    antithetic_gradient,
    evolve,
    gradient,
)
from posttrain_study.classic.maze import maze
from posttrain_study.classic.simulate import mean_return


def test_on_a_quadratic_the_expectation_is_its_gradient_exactly():
    """±√D e_i has the moments of a Gaussian up to the third, so its mean is the expectation."""
    torch.manual_seed(0)
    D, sigma = 5, 0.7
    half, b, theta = torch.randn(D, D).double(), torch.randn(D).double(), torch.randn(D).double()
    H = half + half.T

    def fitness(at: torch.Tensor) -> torch.Tensor:
        return 0.5 * torch.einsum("nd,de,ne->n", at, H, at) + at @ b

    basis = D**0.5 * torch.eye(D, dtype=torch.double)
    both = torch.cat([basis, -basis])
    one_sided = gradient(fitness(theta + sigma * both), both, sigma)
    paired = antithetic_gradient(fitness(theta + sigma * basis), fitness(theta - sigma * basis), basis, sigma)
    torch.testing.assert_close(one_sided, H @ theta + b)
    torch.testing.assert_close(paired, H @ theta + b)


def test_elsewhere_it_is_the_gradient_of_the_smoothed_fitness():
    """F = sin: F_σ(θ) = e^{−σ²/2} sin θ, so ∇F_σ = e^{−σ²/2} cos θ, which is not F'."""
    theta, sigma, N = 0.4, 1.2, 400_000
    noise = torch.randn(N, 1, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    truth = np.exp(-(sigma**2) / 2) * np.cos(theta)
    up, down = (torch.sin(theta + s * sigma * noise[:, 0]) for s in (1, -1))
    for found, single in (
        (gradient(up, noise, sigma), up * noise[:, 0] / sigma),
        (antithetic_gradient(up, down, noise, sigma), (up - down) * noise[:, 0] / (2 * sigma)),
    ):
        error = 5 * float(single.std()) / N**0.5
        assert float(found) == pytest.approx(truth, abs=error)
        assert abs(float(found) - np.cos(theta)) > 10 * error


def test_a_pair_does_not_feel_a_constant_and_a_single_trial_does():
    noise = torch.randn(64, 3, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    up, down = noise.sum(dim=1), -noise.sum(dim=1)
    paired = [antithetic_gradient(up + c, down + c, noise, 0.5) for c in (0.0, 1000.0)]
    torch.testing.assert_close(*paired)
    single = [gradient(up + c, noise, 0.5) for c in (0.0, 1000.0)]
    assert float((single[0] - single[1]).norm()) > 10


def policy(module: nn.Module) -> np.ndarray:
    return exact.softmax(module(torch.eye(6)).detach().double().numpy())


def earns(module: nn.Module, seed: int) -> float:
    return mean_return(maze(), policy(module), episodes=4, horizon=20, seed=seed)


def tiny() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 4, bias=False))
    nn.init.zeros_(module[0].weight)
    return module


@pytest.mark.parametrize("shape", [centred_ranks, unshaped])
def test_a_policy_on_the_maze_comes_near_the_optimum(shape):
    module, best = tiny(), 8.1
    before = exact.objective(maze(), policy(module))
    evolved = evolve(module, earns, EvolutionSettings(generations=60, pairs=12, shape=shape), seed=0)
    after = exact.objective(maze(), policy(evolved.module))
    assert before == pytest.approx(-3.93, abs=0.01)
    # A uniform policy is 12 below the optimum; what is left is less than a twelfth of that.
    assert best - 1 < after <= best
    assert np.mean(evolved.fitness[-5:]) > np.mean(evolved.fitness[:5])
    assert float(module[0].weight.detach().abs().max()) == 0, "the module that was given has moved"


def test_evolution_climbs_a_quadratic_to_its_top():
    top = torch.tensor([[1.0, -2.0, 0.5]])
    settings = EvolutionSettings(generations=150, pairs=8, sigma=0.05, lr=0.05, shape=unshaped)
    evolved = evolve(
        nn.Linear(3, 1, bias=False), lambda m, _: -float(((m.weight - top) ** 2).sum()), settings, seed=0
    )
    torch.testing.assert_close(evolved.module.weight.detach(), top, atol=0.05, rtol=0)


def test_evolution_is_fixed_by_its_seed_and_gives_a_generation_one_draw():
    draws = []

    def fitness(module: nn.Module, seed: int) -> float:
        draws.append(seed)
        return float(module[0].weight.sum()) + seed % 3

    settings = EvolutionSettings(generations=3, pairs=2)
    module = tiny()
    before = torch.get_rng_state()
    one = evolve(module, fitness, settings, seed=0)
    assert (torch.get_rng_state() == before).all()
    assert [len(set(draws[i : i + 4])) for i in (0, 4, 8)] == [1, 1, 1]
    assert len(set(draws)) == 3
    same, other = (evolve(tiny(), fitness, settings, seed=s) for s in (0, 1))
    assert torch.equal(one.module[0].weight, same.module[0].weight)
    assert not torch.equal(one.module[0].weight, other.module[0].weight)
    assert one.fitness == same.fitness
