"""masked: every function equals a plain loop over the entries that count, and reads no other entry."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.math import masked

REDUCTIONS = [masked.fill, masked.row_sum, masked.row_mean, masked.mean, masked.variance]
POISON = [math.nan, math.inf, -math.inf, 3e38]


def example(seed: int, B: int = 4, T: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and a mask whose row 0 is full and whose row 1 is empty."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(B, T, generator=g) < 0.5
    mask[0], mask[1] = True, False
    return torch.randn(B, T, generator=g, dtype=torch.float64), mask


@pytest.mark.parametrize("seed", range(5))
def test_sums_and_moments_equal_loops(seed: int) -> None:
    x, mask = example(seed)
    rows = [
        [v for v, m in zip(vs, ms, strict=True) if m]
        for vs, ms in zip(x.tolist(), mask.tolist(), strict=True)
    ]
    flat = [v for row in rows for v in row]
    mean = math.fsum(flat) / len(flat)
    assert masked.row_sum(x, mask).tolist() == pytest.approx([math.fsum(r) for r in rows], abs=1e-12)
    assert masked.row_mean(x, mask).tolist() == pytest.approx(
        [math.fsum(r) / len(r) if r else 0.0 for r in rows], abs=1e-12
    )
    assert masked.mean(x, mask).item() == pytest.approx(mean, abs=1e-12)
    assert masked.variance(x, mask).item() == pytest.approx(
        math.fsum((v - mean) ** 2 for v in flat) / len(flat), abs=1e-12
    )
    assert masked.fill(x, mask).tolist() == [
        [v if m else 0.0 for v, m in zip(vs, ms, strict=True)]
        for vs, ms in zip(x.tolist(), mask.tolist(), strict=True)
    ]


@pytest.mark.parametrize("function", REDUCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("poison", POISON)
def test_what_lies_outside_the_mask_changes_no_bit(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], poison: float
) -> None:
    x, mask = example(seed=11)
    values, gradients = [], []
    for filler in (0.0, poison):
        y = torch.where(mask, x.float(), torch.tensor(filler)).requires_grad_()
        out = function(y, mask)
        values.append(out.detach())
        gradients.append(torch.autograd.grad(out.square().sum(), y)[0])
    assert torch.equal(*values)
    assert torch.equal(*gradients)
    assert not gradients[1][~mask].any()
    assert gradients[1][mask].any()


def test_an_empty_mask_has_no_mean_and_an_empty_row_is_zero() -> None:
    x, mask = torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool)
    assert masked.mean(x, mask).isnan()
    assert masked.row_mean(x, mask).tolist() == masked.row_sum(x, mask).tolist() == [0.0, 0.0]


@given(
    rows=st.lists(
        st.tuples(st.sampled_from([-7, 0, 3, 10**12]), st.integers(-64, 64)), min_size=1, max_size=12
    )
)
@settings(max_examples=50, deadline=None)
def test_groups_are_whatever_rows_share_a_number(rows: list[tuple[int, int]]) -> None:
    """Numbers need not be contiguous, sorted or small; rows of a group need not lie together."""
    group = torch.tensor([g for g, _ in rows])
    x = torch.tensor([v for _, v in rows], dtype=torch.float64)
    members = {g: [v for h, v in rows if h == g] for g, _ in rows}
    assert masked.group_size(group).tolist() == [len(members[g]) for g, _ in rows]
    assert masked.group_mean(x, group).tolist() == [sum(members[g]) / len(members[g]) for g, _ in rows]
