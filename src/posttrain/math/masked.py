"""Sums and moments under a bool mask.

True means "counts". Entries outside the mask may hold anything, NaN included: they are
selected away, never multiplied by zero, so they change no bit of the result and receive
a gradient of exactly zero.
"""

import torch
from jaxtyping import Bool, Float, Int

from posttrain.math.everywhere import HERE, Everywhere

PerToken = Float[torch.Tensor, "B T"]
PerRow = Float[torch.Tensor, "B"]
Mask = Bool[torch.Tensor, "B T"]
Group = Int[torch.Tensor, "B"]


def fill(x: PerToken, mask: Mask) -> PerToken:
    """x where the mask is True and exactly 0 elsewhere.

    >>> fill(torch.tensor([[1.0, float("nan")]]), torch.tensor([[True, False]]))
    tensor([[1., 0.]])
    """
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def observations(mask: Mask, length: Int[torch.Tensor, "B"]) -> Mask:
    """True at each row's tokens after its first sampled one that were not sampled, up to its length.

    These are results of tools, messages of an environment, and the tokens of the template around both.

    >>> mask = torch.tensor([[False, True, True, False, False, True, False, False]])
    >>> observations(mask, torch.tensor([7])).int()
    tensor([[0, 0, 0, 1, 1, 0, 1, 0]], dtype=torch.int32)
    """
    place = torch.arange(mask.shape[1], device=mask.device)
    return (mask.cumsum(-1) > 0) & ~mask & (place < length[:, None])


def row_sum(x: PerToken, mask: Mask) -> PerRow:
    """Σ_t x_t over each row's masked entries; 0 for a row without any.

    >>> row_sum(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([3.])
    """
    return fill(x, mask).sum(-1)


def row_mean(x: PerToken, mask: Mask) -> PerRow:
    """Mean of each row's masked entries; 0 for a row without any.

    >>> row_mean(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]]))
    tensor([1.5000])
    """
    return row_sum(x, mask) / mask.sum(-1).clamp(min=1)


def mean(
    x: Float[torch.Tensor, "..."], mask: Bool[torch.Tensor, "..."], everywhere: Everywhere = HERE
) -> Float[torch.Tensor, ""]:
    """Mean over all masked entries; NaN without any.

    >>> mean(torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([[True, True], [True, False]]))
    tensor(3.)
    """
    return everywhere.sum(x[mask].sum()) / everywhere.sum(mask.sum())


def variance(
    x: Float[torch.Tensor, "..."], mask: Bool[torch.Tensor, "..."], everywhere: Everywhere = HERE
) -> Float[torch.Tensor, ""]:
    """Population variance (ddof 0) over all masked entries; NaN without any.

    >>> variance(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]))
    tensor(1.)
    """
    wide = torch.where(mask, x, 0.0).double()  # in float64 the mean of equal float32 numbers is exact
    return mean((wide - mean(wide, mask, everywhere)).square(), mask, everywhere).to(x)


def group_mean(x: PerRow, group: Group) -> PerRow:
    """For each row, the mean of x over the rows of its group.

    >>> group_mean(torch.tensor([1.0, 3.0, 7.0]), torch.tensor([0, 0, 5]))
    tensor([2., 2., 7.])
    """
    numbers, index = torch.unique(group, return_inverse=True)
    total = torch.zeros(len(numbers), dtype=x.dtype, device=x.device).index_add(0, index, x)
    return (total / torch.bincount(index))[index]


def group_size(group: Group) -> Int[torch.Tensor, "B"]:
    """For each row, the number of rows in its group.

    >>> group_size(torch.tensor([0, 0, 5]))
    tensor([2, 2, 1])
    """
    _, index = torch.unique(group, return_inverse=True)
    return torch.bincount(index)[index]
