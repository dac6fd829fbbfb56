"""Advantages that maximise the best of k answers to a task and not the mean answer: pass@k.

Functions of returns and groups, like those of advantages.py.
"""

from collections.abc import Iterator
from math import comb
from typing import Annotated

import torch

from posttrain.math.choice import AtLeast, choice
from posttrain.math.masked import Group, PerRow

Count = Annotated[int, AtLeast(1)]


@choice(compares="group", group=lambda numbers: numbers["k"] + 1)
def pass_at_k(returns: PerRow, group: Group, k: Count = 2) -> PerRow:
    """k (E[max R of k rows with this one] - E[max R of k rows without it]), over subsets of the group.

    Unbiased for the gradient of E[max of k fresh returns], which for returns in {0, 1} is pass@k: the
    second term is a baseline that does not depend on the row. k = 1 is leave_one_out.

    Raises ValueError for a group with fewer than k + 1 rows.

    Source: the objective is that of PKPO, arXiv:2505.15201, and of "Pass@k training", arXiv:2508.10751, whose
    baselines differ; pass_at_k_normalised is the credit of the second.

    >>> pass_at_k(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long), k=2)
    tensor([ 2.0000, -0.6667, -0.6667, -0.6667])
    """
    advantage = torch.zeros_like(returns)
    for above in _above_minimum(returns, group, k):
        for i, value in above.items():
            others = sorted(other for j, other in above.items() if j != i)
            advantage[i] = k * (_mean_of_max(others, k - 1, value) - _mean_of_max(others, k, -torch.inf))
    return advantage


@choice(compares="group", group=lambda numbers: numbers["k"] + 1)
def pass_at_k_normalised(returns: PerRow, group: Group, k: Count = 2, eps: float = 1e-6) -> PerRow:
    """(E[max R of k rows with this one] - E[max R of k rows]) / (σ + eps), over subsets of the group.

    σ is the deviation of the max over these subsets: `normalised` over groups of k answers, and for k = 1
    `normalised` itself. With returns in {0, 1} and N_- of N wrong, σ² = p (1 - p), where p =
    1 - C(N_-, k)/C(N, k) is the share of subsets with a right answer.

    Raises ValueError for a group with fewer than k + 1 rows.

    Source: Pass@k training, arXiv:2508.10751, section 2.4, there for returns of 0 and 1. Its own runs clip
    and average over tokens as DAPO does.

    >>> pass_at_k_normalised(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long), k=2)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """
    advantage = torch.zeros_like(returns)
    for above in _above_minimum(returns, group, k):
        ordered = sorted(above.values())
        mean = _mean_of_max(ordered, k, -torch.inf)
        variance = _mean_of_max([(value - mean) ** 2 for value in ordered], k, -torch.inf)
        for i, value in above.items() if variance else ():
            others = sorted(other for j, other in above.items() if j != i)
            advantage[i] = (_mean_of_max(others, k - 1, value) - mean) / (variance**0.5 + eps)
    return advantage


def _above_minimum(returns: PerRow, group: Group, k: int) -> Iterator[dict[int, float]]:
    """Yield {row: its return - the group's minimum} of each group.

    A constant changes no advantage, and without the minimum equal returns are exactly 0.

    Raises ValueError for a group with fewer than k + 1 rows.
    """
    for number in torch.unique(group):
        rows = (group == number).nonzero().flatten().tolist()
        if len(rows) < k + 1:
            raise ValueError(f"pass_at_k with k = {k} needs at least {k + 1} samples in every group")
        yield {i: float(returns[i] - returns[rows].min()) for i in rows}


def _mean_of_max(values: list[float], size: int, floor: float) -> float:
    """E[max(floor, subset)] over the subsets of `values` of this size; values are sorted, lowest first."""
    if size == 0:
        return floor
    shares = (comb(place, size - 1) / comb(len(values), size) for place in range(len(values)))
    return sum(share * max(floor, value) for share, value in zip(shares, values, strict=True))
