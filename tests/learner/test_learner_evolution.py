"""Steps along the noise of perturbed weights: their expectation, their bits, and what they leave alone."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from posttrain.learner.evolution import Population
from posttrain.learner.learner import Learner
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Master, Optim
from posttrain.math import evolution
from posttrain.methods.build import build
from posttrain.methods.evolution import Evolution
from posttrain.methods.table import ES
from posttrain.types import Batch, Trajectory

Make = Callable[..., Any]


def rows(rewards: list[list[float]], version: int = 0) -> Batch:
    """One answer of two tokens for each member and task; rewards[task][member]."""
    trajectories, groups, members = [], [], []
    for task, of_task in enumerate(rewards):
        for member, reward in enumerate(of_task):
            columns = {"version": [0, version, version], "reward": [0.0, 0.0, reward]}
            trajectories.append(Trajectory.given([5, 6, 7], 1, None, **columns))
            groups.append(task)
            members.append(member)
    return replace(Batch.of(trajectories, groups), member=torch.tensor(members))


def masters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Master]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [Master(f"w{n}", nn.Parameter(x)) for n, x in enumerate(drawn)]


def flat(found: list[Master]) -> torch.Tensor:
    return torch.cat([m.numbers().flatten() for m in found])


def bits(found: list[Master]) -> list[torch.Tensor]:
    """The parameters, and the rest of their masters, as they lie in memory."""
    return [x.clone() for m in found for x in (m.parameter.detach(), m.rest) if x is not None]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


# ---------------------------------------------------------------------- what is estimated

D, SIGMA, MEMBERS, UPDATES = 5, 1.2, 80, 100
HALF = torch.randn(D, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
H, SLOPE = HALF + HALF.T, torch.linspace(-1, 1, D, dtype=torch.float64)
Function = Callable[[torch.Tensor], torch.Tensor]
OBJECTIVES: dict[str, tuple[Function, Function]] = {
    "linear": (lambda x: 0.4 + SLOPE @ x, lambda x: SLOPE),
    "quadratic": (lambda x: 0.5 * x @ H @ x + SLOPE @ x, lambda x: H @ x + SLOPE),
    # J_σ of Σ sin x is e^(-σ²/2) Σ sin x.
    "sine": (lambda x: x.sin().sum(), lambda x: math.exp(-(SIGMA**2) / 2) * x.cos()),
}


@pytest.mark.parametrize("noise", [evolution.mirrored, evolution.independent])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.sample("sine-mirrored")
def test_the_expected_step_is_the_gradient_of_the_smoothed_objective(name: str, noise: Any) -> None:
    """Over many seeds of the noise, within five standard errors; two parameters, a matrix and a vector."""
    J, gradient = OBJECTIVES[name]
    found = masters((2, 2), (1,))
    population = Population(Evolution(evolution.unshaped, noise, sigma=SIGMA), found, seed=11)
    theta, steps = flat(found), []
    for update in range(UPDATES):
        rewards = []
        for member in range(MEMBERS):
            with population.member(update, member):
                rewards.append(float(J(flat(found))))
        batch = population.method.prepare(rows([rewards], version=update))
        population.step(update, batch, rate=1.0)
        steps.append(flat(found) - theta)
        for master, weight in zip(found, theta.split([4, 1]), strict=True):
            master.set(weight.view_as(master.parameter))
    estimate = torch.stack(steps)
    error = 5 * estimate.std(0) / UPDATES**0.5 + 1e-6
    print(f"seed 11: off by {(estimate.mean(0) - gradient(theta)).abs().tolist()}, allowed {error.tolist()}")
    assert bool(((estimate.mean(0) - gradient(theta)).abs() < error).all())
    if name == "sine":
        assert bool(((estimate.mean(0) - theta.cos()).abs() > error).any()), "it cannot tell J from J_σ"


def test_the_step_is_the_formula_with_noise_drawn_by_hand() -> None:
    """Of any dtype; nothing but seeds and rewards is needed, and a unit of lr is the standardised step."""
    rewards = [[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0], [0.5, 0.0, 0.5, 0.0]]
    F = torch.tensor(rewards, dtype=torch.float64).mean(0)
    z = (F - F.mean()) / F.std(correction=0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found, shapes = masters((3, 4), (40,), dtype=dtype), ((3, 4), (40,))
        before = [m.numbers().clone() for m in found]
        population = Population(replace(ES, sigma=0.25), found, seed=7)
        metrics = population.step(4, population.method.prepare(rows(rewards, version=4)), rate=0.5)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norm = 0.0
        for place, (master, start) in enumerate(zip(found, before, strict=True)):
            wanted = torch.zeros(shapes[place], dtype=torch.float64)
            for member in range(4):
                generator = torch.Generator().manual_seed(hash((7, 4, member // 2, place)) % 2**63)
                epsilon = torch.randn(shapes[place], generator=generator, dtype=wide)
                wanted += 0.5 / (4 * 0.25) * z[member] * (-1) ** member * epsilon
            norm += float(wanted.square().sum())
            torch.testing.assert_close(master.numbers() - start, wanted.to(wide), rtol=1e-4, atol=1e-6)
        assert metrics["evolution/step"] == pytest.approx(norm**0.5, rel=1e-6)
        assert metrics["evolution/best"] == pytest.approx(float(F.max()))
        assert metrics["evolution/spread"] == pytest.approx(float(F.std(correction=0)))


def test_a_member_that_lacks_an_answer_has_its_whole_weight_in_the_step() -> None:
    """Its mean is made good from the others; its shaped fitness, which is one number, is not."""
    method = Evolution(evolution.standardised, evolution.independent, sigma=SIGMA)
    batch = rows([[1.0, 0.0], [1.0, 0.0]], version=0)
    assert batch.member is not None
    missing = ((batch.member == 0) & (batch.group == batch.group.max())).nonzero().flatten()
    batch.mask[missing] = False
    assert method.coefficients(method.prepare(batch)) == pytest.approx({0: 1.0, 1: -1.0})


def test_noise_differs_by_parameter_update_number_and_seed() -> None:
    found = masters((64,), (64,))
    draws = [
        Population(ES, found, seed=seed).noise(update, number, place)
        for seed in (0, 1)
        for update in (0, 1)
        for number in (0, 1)
        for place in (0, 1)
    ]
    correlation = torch.corrcoef(torch.stack(draws))
    print("seeds 0, 1: largest correlation", float((correlation - torch.eye(len(draws))).abs().max()))
    assert float((correlation - torch.eye(len(draws))).abs().max()) < 0.6
    assert torch.equal(draws[0], Population(ES, found, seed=0).noise(0, 0, 0))


# ---------------------------------------------------------------------- what stays as it was


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_are_restored_to_the_bit_whatever_happens(dtype: torch.dtype) -> None:
    found = masters((50, 60), (7,), dtype=dtype)
    population, before = Population(ES, found, seed=2), bits(found)
    for member in range(6):
        with population.member(3, member):
            assert not equal(bits(found), before)
    assert equal(bits(found), before)
    with pytest.raises(KeyboardInterrupt), population.member(3, 0):
        raise KeyboardInterrupt
    assert equal(bits(found), before)


def test_adding_and_subtracting_noise_would_not_restore_them() -> None:
    """Which is why they are copied: of weights of usual size many drift at once, in either dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        [master] = masters((50, 60), dtype=dtype)
        weight = 0.02 * master.parameter.detach()
        noise = (1e-3 * Population(ES, [master], seed=2).noise(0, 0, 0)).to(dtype)
        drifted = (weight + noise) - noise != weight
        print(dtype, float(drifted.float().mean()))
        assert float(drifted.float().mean()) > 0.05


def test_members_of_a_pair_lie_opposite_each_other() -> None:
    found = masters((50, 60))
    population, theta, held = Population(replace(ES, sigma=0.1), found, seed=2), flat(found), []
    for member in (4, 5):
        with population.member(0, member):
            held.append(flat(found))
    torch.testing.assert_close((held[0] + held[1]) / 2, theta)
    assert float((held[0] - theta).std()) == pytest.approx(0.1, rel=0.1)


def test_members_who_are_all_alike_move_no_weight() -> None:
    found = masters((50, 60), dtype=torch.bfloat16)
    population, before = Population(ES, found, seed=2), bits(found)
    batch = population.method.prepare(rows([[0.1] * 6, [0.7] * 6]))
    metrics = population.step(0, batch, rate=1.0)
    assert metrics["evolution/step"] == metrics["evolution/spread"] == 0, "the alarm reads an exact 0"
    assert equal(bits(found), before)


def test_rows_of_others_are_refused() -> None:
    found = masters((3, 4))
    population = Population(ES, found, seed=2)
    batch = population.method.prepare(rows([[1.0, 0.0]], version=4))
    with pytest.raises(ValueError, match="another update's population"):
        population.step(5, batch, rate=1.0)
    with pytest.raises(ValueError, match="answers of perturbed weights"):
        population.method.prepare(replace(batch, member=None))
    with pytest.raises(ValueError, match="nothing to train on"):
        population.method.prepare(replace(batch, mask=torch.zeros_like(batch.mask)))


# ---------------------------------------------------------------------- a learner


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in learner.weights()}


def test_an_update_of_a_learner_needs_no_gradient_and_reproduces(llama: Make) -> None:
    rewards = [[1.0, 0.0, 0.0, 0.5], [1.0, 1.0, 0.0, 1.0]]
    learners = [Learner(llama(0), build("es", {}, horizon=8), optim=Optim(lr=1e-3), seed=5) for _ in range(2)]
    for learner in learners:
        for update in range(3):
            done = learner.update(rows(rewards, version=update))
            assert done.metrics.keys() == {"lr", "evolution/best", "evolution/spread", "evolution/step"}
        assert all(p.grad is None for p in learner.model.parameters())
        assert all(not m.state for m in learner.masters.masters)
        assert (learner.step_count, learner.update_count) == (3, 3)
    one, other = map(weights, learners)
    assert all(torch.equal(x, other[name]) for name, x in one.items())
    assert learners[0].tensors()["optimizer"] == {}
    with pytest.raises(ValueError, match="no halves"):
        learners[0].forward_backward(rows(rewards, version=3))


def test_with_an_adapter_its_weights_alone_are_perturbed(llama: Make) -> None:
    learner = Learner(llama(0), build("es", {}, horizon=8), lora=Lora(rank=2, alpha=4.0), seed=5)
    population, before = learner.population, weights(learner)
    assert population is not None
    base = {n: p.clone() for n, p in learner.model.named_parameters() if not p.requires_grad}
    with population.member(0, 1):
        held = weights(learner)
        assert all(torch.equal(p, base[n]) for n, p in learner.model.named_parameters() if n in base)
    moved = {name for name, x in held.items() if not torch.equal(x, before[name])}
    assert moved
    assert all("_proj" in name for name in moved)
    after = weights(learner)
    assert all(torch.equal(x, before[name]) for name, x in after.items())
