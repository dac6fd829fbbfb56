"""Sums and maxima over all ranks that train together: all that mathematics needs to know of the others.

The rows of an update may lie in several processes, and what is said of *all* rows (the divisor of a mean, the
moments of a batch) is then a sum over processes. Groups are never cut, so what is said of a group is not.
Every rank makes the same calls in the same order, so none may depend on what a rank has by itself.
"""

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Everywhere(Protocol):
    """What is added up, or compared, over all ranks."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Σ over ranks, entry by entry; the same bits on each."""
        ...

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """The largest over ranks, entry by entry; NaN where one has NaN."""
        ...


class Here:
    """One process: what it has is all there is.

    >>> Here().sum(torch.tensor(3.0))
    tensor(3.)
    """

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def max(self, x: torch.Tensor) -> torch.Tensor:
        return x


HERE: Everywhere = Here()
