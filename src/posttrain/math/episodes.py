"""Rows of one episode: an agent's conversations, laid side by side or added up.

Rows that share a number in `Batch.episode` are the conversations of one episode, and each is paid the
episode's total reward. Functions that compare answers compare episodes: `Episodes` maps rows to episodes and
back. batch.py: Batch lists which quantities belong to an episode and which to a row.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped

from posttrain.math.masked import Group, Mask

Rows = Shaped[torch.Tensor, "B"]
PerEpisode = Shaped[torch.Tensor, "E"]


@dataclass(frozen=True, slots=True)
class Episodes:
    """The rows of E episodes, at most R each.

    >>> episodes = Episodes.of(torch.tensor([7, 4, 7]), torch.tensor([[True], [True], [True]]))
    >>> episodes.sum(torch.tensor([1.0, 2.0, 3.0])), episodes.join(torch.tensor([[5], [6], [8]]))
    (tensor([2., 4.]), tensor([[6, 0],
            [5, 8]]))
    """

    rows: Int[torch.Tensor, "E R"]
    """Row numbers in the order of the batch, those with a trained token first; 0 at places without a row."""
    exists: Bool[torch.Tensor, "E R"]
    """True at places with a row."""
    number: Int[torch.Tensor, "B"]
    """Index of each row's episode."""
    place: Int[torch.Tensor, "B"]
    """Index of each row in its episode."""

    @staticmethod
    def of(episode: Int[torch.Tensor, "B"] | None, mask: Mask) -> "Episodes":
        """Return the episodes of the rows; None: each row is an episode."""
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
        rows, exists = number.new_zeros(len(numbers), most), every[:most] < counts[:, None]
        rows[number, place] = every
        return Episodes(rows, exists, number, place)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Return x at one row of each episode: the first with a trained token, or the first if none has."""
        return x[self.rows[:, 0]]

    def sum(self, x: Rows) -> PerEpisode:
        """Σ x over the rows of each episode."""
        return x[self.rows].masked_fill(~self.exists, 0).sum(-1)

    def others(self, x: Rows) -> Rows:
        """Σ x over the other rows of each row's episode."""
        return self.to_rows(self.sum(x)) - x

    def to_rows(self, x: PerEpisode) -> Rows:
        """Return each episode's number at each of its rows."""
        return x[self.number]

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T] as [E, R T], the rows of each episode side by side; 0 at places without a row."""
        E, R = self.rows.shape
        return x[self.rows].masked_fill(~self.exists[:, :, None], 0).reshape(E, R * x.shape[1])

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """Return [E, R T] as [B, T]: the inverse of `join`."""
        E, R = self.rows.shape
        return x.reshape(E, R, x.shape[1] // R)[self.number, self.place]


def number_turns(
    turn_state: Int[torch.Tensor, "B T"], mask: Mask, group: Group
) -> tuple[Mask, Int[torch.Tensor, "N"], Int[torch.Tensor, "S"]]:
    """Return (True where a turn starts, each turn's number of its state and group, turns by number)."""
    starts = (turn_state != 0) & mask
    states = torch.stack([group[:, None].expand_as(turn_state)[starts], turn_state[starts]], dim=1)
    _, index, count = torch.unique(states, dim=0, return_inverse=True, return_counts=True)
    return starts, index, count
