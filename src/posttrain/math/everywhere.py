"""Sums and maxima over all ranks that train together.

The rows of an update may lie in several processes. A number about *all* rows (the divisor of a mean, the
moments of a batch) is then a sum over processes; a number about a group is not, because groups are never cut.
Every rank must make the same calls in the same order, so no call may depend on a rank's own rows.
"""

from typing import Protocol, runtime_checkable

import torch


@runtime_checkable
class Everywhere(Protocol):
    """Reductions over all ranks that train together."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return Σ x over ranks, entry by entry; the same bits on every rank."""
        ...

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Return the maximum over ranks, entry by entry; NaN where a rank has NaN."""
        ...


class Here:
    """Reductions of a single process, which return their argument.

    >>> Here().sum(torch.tensor(3.0))
    tensor(3.)
    """

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def max(self, x: torch.Tensor) -> torch.Tensor:
        return x


HERE: Everywhere = Here()
