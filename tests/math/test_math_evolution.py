"""evolution: fitness against a plain account of it, and what shaping and noise leave as it is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.math.evolution import (
    centred_ranks,
    fitness,
    independent,
    mirrored,
    standardised,
    unshaped,
)

NUMBERS = st.lists(st.integers(-20, 20), min_size=2, max_size=20)


@given(data=st.data())
def test_fitness_is_the_mean_over_the_same_tasks_for_all(data: st.DataObject) -> None:
    """Each cell by itself: the mean of its rows, or of the other cells of its task if it has none."""
    place = st.tuples(st.sampled_from([0, 2, 5]), st.sampled_from([1, 4, 7, 8]))
    rows = data.draw(st.lists(st.tuples(place, st.integers(-8, 8)), min_size=1, max_size=30))
    members, tasks = sorted({m for (m, _), _ in rows}), sorted({t for (_, t), _ in rows})
    cells = {
        (m, t): sum(found) / len(found)
        for m in members
        for t in tasks
        if (found := [r for where, r in rows if where == (m, t)])
    }
    wanted = []
    for m in members:
        of_tasks = []
        for t in tasks:
            others = [cells[n, t] for n in members if (n, t) in cells]
            of_tasks.append(cells.get((m, t), sum(others) / len(others)))
        wanted.append(sum(of_tasks) / len(tasks))
    returns = torch.tensor([float(r) for _, r in rows])
    found, F = fitness(returns, *(torch.tensor(column) for column in zip(*(p for p, _ in rows), strict=True)))
    assert found.tolist() == members
    torch.testing.assert_close(F, torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-6)


def test_equal_fitness_of_other_rewards_has_equal_bits() -> None:
    """0.1 + 0.2 is not 0.3 in float64; a rank between them would be noise."""
    returns = torch.tensor([0.1, 0.2, 0.3, 0.0], dtype=torch.float64)
    _, F = fitness(returns, torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1]))
    assert F[0] == F[1]
    assert not standardised(F).any()
    assert not centred_ranks(F).any()


@given(NUMBERS, st.integers(1, 50), st.integers(-50, 50))
def test_standardised_forgets_scale_and_shift(values: list[int], scale: int, shift: int) -> None:
    F = torch.tensor(values, dtype=torch.float64)
    z = standardised(F)
    torch.testing.assert_close(standardised(F * scale + shift), z, rtol=1e-6, atol=1e-6)
    assert float(z.sum()) == pytest.approx(0, abs=1e-9)
    assert float(z.square().mean()) == pytest.approx(float(len(set(values)) > 1), abs=1e-6)


@given(NUMBERS)
def test_ranks_keep_the_order_and_forget_the_scale(values: list[int]) -> None:
    F = torch.tensor(values, dtype=torch.double)
    z = centred_ranks(F)
    torch.testing.assert_close(z, centred_ranks(F**3 * 50 + 7))
    assert float(z.sum()) == pytest.approx(0, abs=1e-9)
    assert float(z.abs().max()) <= 0.5
    assert ((F[:, None] < F) == (z[:, None] < z - 1e-12)).all()
    assert float(centred_ranks(F[:1])) == 0


def test_on_a_quadratic_the_expectation_is_its_gradient_exactly() -> None:
    """±√D e_i has the moments of a Gaussian up to the third, so its mean is the expectation."""
    torch.manual_seed(0)
    D, sigma = 5, 0.7
    half, b, theta = (torch.randn(*size, dtype=torch.float64) for size in ((D, D), (D,), (D,)))
    H = half + half.T
    basis = D**0.5 * torch.eye(D, dtype=torch.float64)
    for noise, draws in ((mirrored, basis), (independent, torch.cat([basis, -basis]))):
        numbers, signs = noise(torch.arange(2 * D))
        epsilon = signs[:, None] * draws[numbers]
        at = theta + sigma * epsilon
        F = 0.5 * torch.einsum("nd,de,ne->n", at, H, at) + at @ b
        step = unshaped(F) @ epsilon / (2 * D * sigma)
        torch.testing.assert_close(step, H @ theta + b)
