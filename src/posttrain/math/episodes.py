"""Rows of one episode: an agent's conversations, laid side by side or added up.

Rows that share a number in `Batch.episode` are the conversations of one episode, and each is paid what the
episode is worth. What compares answers compares episodes: these functions lead from rows to episodes and
back. batch.py: Batch lists what is of an episode and what of a row.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped

Rows = Shaped[torch.Tensor, "B"]
Each = Shaped[torch.Tensor, "E"]
Mask = Bool[torch.Tensor, "B T"]


@dataclass(frozen=True, slots=True)
class Episodes:
    """The rows of each of E episodes, which have at most R.

    >>> episodes = Episodes.of(torch.tensor([7, 4, 7]), torch.tensor([[True], [True], [True]]))
    >>> episodes.sum(torch.tensor([1.0, 2.0, 3.0])), episodes.join(torch.tensor([[5], [6], [8]]))
    (tensor([2., 4.]), tensor([[6, 0],
            [5, 8]]))
    """

    rows: Int[torch.Tensor, "E R"]
    """Row numbers in the order of the batch, those with a trained token first; 0 where there are fewer."""
    there: Bool[torch.Tensor, "E R"]
    """Whether an episode has so many rows."""
    number: Int[torch.Tensor, "B"]
    """The place of each row's episode."""
    place: Int[torch.Tensor, "B"]
    """The place of each row in its episode."""

    @staticmethod
    def of(episode: Int[torch.Tensor, "B"] | None, mask: Mask) -> "Episodes":
        """The episodes of these rows; None: each row is one."""
        every = torch.arange(len(mask), device=mask.device)
        if episode is None:
            return Episodes(
                every[:, None], torch.ones_like(every, dtype=torch.bool)[:, None], every, 0 * every
            )
        numbers, number = torch.unique(episode, return_inverse=True)
        untrained = (~mask.any(-1)).to(number)
        order = (2 * number + untrained).argsort(stable=True)
        counts = torch.bincount(number, minlength=len(numbers))
        place = torch.empty_like(number)
        place[order] = every - (counts.cumsum(0) - counts)[number[order]]
        most = int(counts.max()) if len(mask) else 1
        rows, there = number.new_zeros(len(numbers), most), every[:most] < counts[:, None]
        rows[number, place] = every
        return Episodes(rows, there, number, place)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """What the first row of each episode has that has a trained token, or else the first."""
        return x[self.rows[:, 0]]

    def sum(self, x: Rows) -> Each:
        """Σ over the rows of each episode."""
        return x[self.rows].masked_fill(~self.there, 0).sum(-1)

    def others(self, x: Rows) -> Rows:
        """Σ over the other rows of each row's episode."""
        return self.to_rows(self.sum(x)) - x

    def to_rows(self, x: Each) -> Rows:
        """A number of each episode at each of its rows."""
        return x[self.number]

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T] as [E, R T]: the rows of each episode side by side; 0 where it has fewer."""
        E, R = self.rows.shape
        return x[self.rows].masked_fill(~self.there[:, :, None], 0).reshape(E, R * x.shape[1])

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """[E, R T] as [B, T]: the reverse of join."""
        E, R = self.rows.shape
        return x.reshape(E, R, x.shape[1] // R)[self.number, self.place]
