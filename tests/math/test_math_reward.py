"""reward: each loss against its formula and likelihood, ties and rows that take no part included."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.math import preference, reward

SCORES = st.lists(st.floats(-5, 5), min_size=2, max_size=5)


def all_together(n: int) -> torch.Tensor:
    return torch.ones(n, n, dtype=torch.bool)


def ranking(score: list[float], worth: list[float]) -> float:
    """The loss of one group, as a float."""
    found = reward.plackett_luce(
        torch.tensor(score, dtype=torch.float64), torch.tensor(worth), all_together(len(score))
    )
    assert float(found.max() - found.min()) < 1e-12, "a group's loss stands at each of its rows"
    return float(found[0])


def test_regression_is_half_the_square_and_its_slope_the_gap() -> None:
    s = torch.tensor([[1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[3.0, -2.5]], dtype=torch.float64)
    assert reward.regression(s, target).tolist() == [[2.0, 0.125]]
    assert torch.autograd.grad(reward.regression(s, target).sum(), s)[0].tolist() == [[-2.0, 0.5]]


@given(s=st.floats(-30, 30), target=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_classification_is_the_cross_entropy_and_its_slope_the_gap(s: float, target: float) -> None:
    x = torch.tensor([[s]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[target]], dtype=torch.float64)
    found = reward.classification(x, y)
    wanted = target * math.log1p(math.exp(-s)) + (1 - target) * math.log1p(math.exp(s))
    assert found.item() == pytest.approx(wanted, rel=1e-10, abs=1e-12)
    slope = torch.autograd.grad(found.sum(), x)[0].item()
    assert slope == pytest.approx(1 / (1 + math.exp(-s)) - target, abs=1e-12)


def test_a_share_of_successes_is_learnt_as_the_mean_of_its_labels() -> None:
    """The slope over seven labels of which two are 1 is that of the one label 2/7."""
    s = torch.full((1, 7), 0.3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[1.0, 0, 0, 1, 0, 0, 0]]).double()
    each = torch.autograd.grad(reward.classification(s, labels).mean(), s)[0].sum()
    one = torch.autograd.grad(reward.classification(s, torch.full_like(s, 2 / 7)).mean(), s)[0].sum()
    torch.testing.assert_close(each, one)
    best = torch.tensor([[math.log(2 / 5)]], dtype=torch.float64, requires_grad=True)
    loss = reward.classification(best.expand(1, 7), labels).mean()
    assert float(torch.autograd.grad(loss, best)[0]) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("loss", [reward.regression, reward.classification])
def test_extreme_scores_are_finite(loss: Callable[..., torch.Tensor]) -> None:
    s = torch.tensor([[-1e4, 1e4]], requires_grad=True)
    found = loss(s, torch.tensor([[1.0, 0.0]]))
    assert bool(found.isfinite().all())
    assert bool(torch.autograd.grad(found.sum(), s)[0].isfinite().all())


# ---------------------------------------------------------------------- rankings


@given(scores=st.tuples(st.floats(-20, 20), st.floats(-20, 20)))
@settings(max_examples=40, deadline=None)
def test_a_ranking_of_two_is_the_logistic_loss(scores: tuple[float, float]) -> None:
    a, b = scores
    wanted = float(preference.logistic(torch.tensor(a - b, dtype=torch.float64), 1.0))
    assert ranking([a, b], [1.0, 0.0]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert ranking([b, a], [0.0, 1.0]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_a_ranking_of_three_is_the_probability_of_its_order() -> None:
    """Drawn one after the other in proportion to exp(s), and the six orders are all there are."""
    s = [0.7, -1.1, 0.2]
    e = [math.exp(x) for x in s]
    total = 0.0
    for order in itertools.permutations(range(3)):
        first, second, _ = order
        chance = e[first] / sum(e) * e[second] / (sum(e) - e[first])
        worth = [0.0, 0.0, 0.0]
        for place, i in enumerate(order):
            worth[i] = 3.0 - place
        assert math.exp(-ranking(s, worth)) == pytest.approx(chance, rel=1e-12)
        total += math.exp(-ranking(s, worth))
    assert total == pytest.approx(1, rel=1e-12)


@given(scores=SCORES)
@settings(max_examples=40, deadline=None)
def test_only_the_order_of_the_worths_counts(scores: list[float]) -> None:
    n = len(scores)
    assert ranking(scores, [float(k) for k in range(n)]) == pytest.approx(
        ranking(scores, [10.0 * k**3 - 7 for k in range(n)]), rel=1e-12
    )


@given(scores=SCORES, shift=st.floats(-50, 50))
@settings(max_examples=40, deadline=None)
def test_no_ranking_says_where_0_is(scores: list[float], shift: float) -> None:
    worth = [float(k) for k in range(len(scores))]
    moved = ranking([s + shift for s in scores], worth)
    assert moved == pytest.approx(ranking(scores, worth), rel=1e-8, abs=1e-10)


def test_answers_of_equal_worth_are_not_compared_with_one_another() -> None:
    """One best of three equal others: P(it is drawn first). Two best over one: each against it alone."""
    s = [0.4, -0.3, 1.2, 0.1]
    e = [math.exp(x) for x in s]
    assert ranking(s, [1.0, 0.0, 0.0, 0.0]) == pytest.approx(-math.log(e[0] / sum(e)), rel=1e-12)
    both = -math.log(e[0] / (e[0] + e[2])) - math.log(e[1] / (e[1] + e[2]))
    assert ranking(s[:3], [1.0, 1.0, 0.0]) == pytest.approx(both, rel=1e-12)
    assert ranking(s, [2.0, 2.0, 2.0, 2.0]) == 0


def test_a_tied_pair_pulls_at_nothing() -> None:
    s = torch.tensor([0.4, -0.3], requires_grad=True)
    found = reward.plackett_luce(s, torch.ones(2), all_together(2))
    assert not torch.autograd.grad(found.sum(), s)[0].any()


def test_groups_and_rows_that_take_no_part_are_apart() -> None:
    """A row that is with nobody, not even itself, is worth nothing whatever its score, NaN included."""
    s = torch.tensor([0.4, math.nan, -0.3, 2.0, 1.0], dtype=torch.float64)
    group, there = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([True, False, True, True, True])
    together = (group[:, None] == group[None, :]) & there[:, None] & there[None, :]
    leaf = s.requires_grad_()
    found = reward.plackett_luce(leaf, torch.tensor([1.0, 5.0, 0.0, 0.0, 1.0]), together)
    first, second = ranking([0.4, -0.3], [1.0, 0.0]), ranking([2.0, 1.0], [0.0, 1.0])
    assert found.tolist() == pytest.approx([first, 0.0, first, second, second], rel=1e-12)
    gradient = torch.autograd.grad(found.sum(), leaf)[0]
    assert bool(gradient.isfinite().all())
    assert not gradient[1].any()


def test_a_rankings_gradient_is_that_of_the_probability_of_its_order() -> None:
    s = torch.tensor([0.7, -1.1, 0.2, 0.9], dtype=torch.float64, requires_grad=True)
    worth = torch.tensor([1.0, 4.0, 3.0, 2.0])
    loss = reward.plackett_luce(s, worth, all_together(4))[0]
    order = worth.argsort(descending=True)
    slowly = torch.stack([s[order[k:]].logsumexp(0) - s[order[k]] for k in range(4)]).sum()
    torch.testing.assert_close(*(torch.autograd.grad(x, s, retain_graph=True)[0] for x in (loss, slowly)))


def test_extreme_scores_of_a_ranking_are_finite_in_float32() -> None:
    s = torch.tensor([-1e4, 1e4, 0.0], requires_grad=True)
    found = reward.plackett_luce(s, torch.tensor([2.0, 1.0, 0.0]), all_together(3))
    assert bool(found.isfinite().all())
    assert bool(torch.autograd.grad(found.sum(), s)[0].isfinite().all())
