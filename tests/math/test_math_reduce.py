"""reduce: weights are 0 outside the mask, sum to what each docstring says, and know no padding."""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.math import reduce

Reduction = Callable[[torch.Tensor], torch.Tensor]
HORIZON = 8
ALL: dict[str, Reduction] = {
    "per_token": reduce.per_token,
    "per_sequence": reduce.per_sequence,
    "per_horizon": partial(reduce.per_horizon, horizon=HORIZON),
    "per_row": reduce.per_row,
}
every_reduction = pytest.mark.parametrize("name", ALL)
MASKS = st.integers(1, 6).flatmap(
    lambda T: st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=1, max_size=6)
)
TRAINED = MASKS.filter(lambda rows: any(map(any, rows)))


def slowly(name: str, mask: list[list[bool]]) -> list[list[float]]:
    tokens = sum(map(sum, mask))
    rows = sum(map(any, mask))
    share = {
        "per_token": lambda row: Fraction(1, tokens),
        "per_sequence": lambda row: Fraction(1, sum(row) * rows),
        "per_horizon": lambda row: Fraction(1, HORIZON * rows),
        "per_row": lambda row: Fraction(1, rows),
    }[name]
    return [[float(share(row)) if on else 0.0 for on in row] for row in mask]


@every_reduction
@given(rows=TRAINED)
@settings(max_examples=60, deadline=None)
def test_weights_equal_loops(name: str, rows: list[list[bool]]) -> None:
    weight = ALL[name](torch.tensor(rows))
    torch.testing.assert_close(
        weight, torch.tensor(slowly(name, rows), dtype=torch.float64), rtol=1e-15, atol=0
    )
    assert not weight[~torch.tensor(rows)].any()


@given(rows=TRAINED)
@settings(max_examples=60, deadline=None)
def test_means_have_weights_that_sum_to_one(rows: list[list[bool]]) -> None:
    """per_row sums over tokens and per_horizon divides by a constant: theirs sum to the mean length."""
    mask = torch.tensor(rows)
    length = mask.sum().item() / mask.any(-1).sum().item()
    sums = {name: ALL[name](mask).sum().item() for name in ALL}
    assert sums == pytest.approx(
        {"per_token": 1.0, "per_sequence": 1.0, "per_row": length, "per_horizon": length / HORIZON}, rel=1e-12
    )


@every_reduction
@given(rows=TRAINED, columns=st.integers(1, 4), empty=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_padding_and_rows_without_a_trained_token_change_no_weight(
    name: str, rows: list[list[bool]], columns: int, empty: int
) -> None:
    T = len(rows[0])
    wide = [row + [False] * columns for row in rows] + [[False] * (T + columns)] * empty
    weight = ALL[name](torch.tensor(wide))
    assert torch.equal(weight[: len(rows), :T], ALL[name](torch.tensor(rows)))
    assert not weight[len(rows) :].any()
    assert not weight[:, T:].any()


@every_reduction
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (0, 4), (3, 0)])
def test_a_step_without_a_trained_token_is_an_error(name: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        ALL[name](torch.zeros(shape, dtype=torch.bool))


def test_weighted_sum_is_the_sum_of_products() -> None:
    g = torch.Generator().manual_seed(2)
    loss, weight = torch.randn(2, 3, 4, generator=g, dtype=torch.float64).unbind()
    mask = torch.rand(3, 4, generator=g) < 0.5
    wanted = math.fsum(
        float(loss[i, t] * weight[i, t]) for i in range(3) for t in range(4) if bool(mask[i, t])
    )
    assert reduce.weighted_sum(loss, weight, mask).item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_weighted_sum_reads_nothing_outside_the_mask(poison: float) -> None:
    g = torch.Generator().manual_seed(3)
    loss, weight = torch.randn(2, 4, 5, generator=g).unbind()
    mask = torch.rand(4, 5, generator=g) < 0.5
    values, gradients = [], []
    for filler in (0.0, poison):
        x, w = (torch.where(mask, v, torch.tensor(filler)) for v in (loss, weight))
        x.requires_grad_()
        out = reduce.weighted_sum(x, w, mask)
        values.append(out.detach())
        gradients.append(torch.autograd.grad(out, x)[0])
    assert torch.equal(*values)
    assert torch.equal(*gradients)
    assert not gradients[1][~mask].any()


def test_no_token_trained_in_a_microbatch_is_a_sum_of_zero() -> None:
    """The step has tokens, this microbatch has none: it adds exactly 0, and backward runs."""
    loss = torch.full((2, 2), math.nan, requires_grad=True)
    out = reduce.weighted_sum(loss, torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.bool))
    out.backward()
    assert out.item() == 0
    assert loss.grad is not None
    assert not loss.grad.any()


def test_what_has_no_weight_is_not_looked_at() -> None:
    loss = torch.tensor([[1.0, math.nan, math.inf, -math.inf, 4.0]], requires_grad=True)
    weight = torch.tensor([[0.5, 0.0, 0.0, 0.5, 0.25]], dtype=torch.float64)
    total = reduce.weighted_sum(loss, weight, torch.tensor([[True, True, True, False, True]]))
    total.backward()
    assert loss.grad is not None
    assert total.item() == 1.5
    assert total.dtype == loss.dtype
    assert loss.grad.tolist() == [[0.5, 0.0, 0.0, 0.0, 0.25]]


# ---------------------------------------------------------------------- groups

GROUPED = TRAINED.flatmap(
    lambda rows: st.tuples(
        st.just(rows), st.lists(st.integers(-2, 2), min_size=len(rows), max_size=len(rows))
    )
)


@given(made=GROUPED)
@settings(max_examples=60, deadline=None)
def test_every_group_counts_the_same_and_within_it_every_token(
    made: tuple[list[list[bool]], list[int]],
) -> None:
    rows, group = made
    weight = reduce.per_group(torch.tensor(rows), torch.tensor(group))
    tokens = {g: sum(sum(row) for row, own in zip(rows, group, strict=True) if own == g) for g in group}
    groups = sum(n > 0 for n in tokens.values())
    for row, own, found in zip(rows, group, weight.tolist(), strict=True):
        wanted = [1 / (tokens[own] * groups) if on else 0.0 for on in row]
        assert found == pytest.approx(wanted, rel=1e-6)
    assert float(weight.sum()) == pytest.approx(1, rel=1e-5)


@given(made=GROUPED, columns=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_padding_and_groups_without_a_trained_token_change_no_groups_weight(
    made: tuple[list[list[bool]], list[int]], columns: int
) -> None:
    rows, group = made
    T = len(rows[0])
    wide = [row + [False] * columns for row in rows] + [[False] * (T + columns)] * 2
    weight = reduce.per_group(torch.tensor(wide), torch.tensor([*group, group[0], 9]))
    assert torch.equal(weight[: len(rows), :T], reduce.per_group(torch.tensor(rows), torch.tensor(group)))
    assert not weight[len(rows) :].any()
    assert not weight[:, T:].any()


def test_a_mean_over_a_tasks_tokens_refuses_a_step_without_any() -> None:
    group = torch.tensor([0, 0, 1])
    mask = torch.tensor([[True, True], [True, False], [True, False]])
    assert torch.equal(reduce.per_group_token(mask, group), reduce.per_group(mask, group))
    with pytest.raises(ValueError, match="nothing to train on"):
        reduce.per_group_token(torch.zeros(3, 2, dtype=torch.bool), group)


def test_a_groups_weights_follow_its_rows_in_any_order() -> None:
    g = torch.Generator().manual_seed(6)
    mask, group = torch.rand(7, 5, generator=g) < 0.5, torch.tensor([3, -1, 3, 8, -1, 3, 8])
    order = torch.randperm(7, generator=g)
    assert torch.equal(reduce.per_group(mask[order], group[order]), reduce.per_group(mask, group)[order])


def test_no_group_with_a_trained_token_weighs_nothing() -> None:
    """As where all answers to every question were worth the same: a step without a pair is no error."""
    weight = reduce.per_group(torch.zeros(3, 4, dtype=torch.bool), torch.tensor([0, 0, 1]))
    assert weight.shape == (3, 4)
    assert not weight.any()
