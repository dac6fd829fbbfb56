"""Masks of attention: who sees whom, as numbers that are added to scores."""

import torch

BLOCK = 512
"""So many tokens attend at once where they do so under a mask, which is then no square of a long row."""

ALIGNED = 8
"""A kernel of a GPU reads so many numbers of a mask at a time."""


class Bands:
    """Masks for blocks of causal rows, views of a few bands for each window; made once a pass.

    A view begins at a multiple of ALIGNED columns, as do its rows: kernels of a GPU refuse others, or copy
    them in every layer.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int | None, torch.dtype, int], tuple[int, torch.Tensor]] = {}

    def mask(self, rows: int, before: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """[rows, before + rows]: 0 where a token is seen, -inf where not; the last of each row is itself.

        >>> Bands().mask(2, 1, 2, torch.zeros(()))
        tensor([[0., 0., -inf],
                [-inf, 0., 0.]])
        """
        key = window, like.dtype, before % ALIGNED
        if key not in self._made or self._made[key][0] < before:
            row = torch.arange(BLOCK, device=like.device)[:, None]
            column = torch.arange(aligned(before + BLOCK), device=like.device) - before
            seen = column <= row
            if window is not None:
                seen &= column > row - window
            self._made[key] = before, additive(seen, like.dtype)
        itself, band = self._made[key]
        return band[:rows, itself - before : itself + rows]


def aligned(width: int) -> int:
    """The next multiple of ALIGNED.

    >>> aligned(1), aligned(16)
    (8, 16)
    """
    return -(-width // ALIGNED) * ALIGNED


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `seen`, -inf elsewhere. Of `seen` itself each layer would make this again, and keep it.

    >>> additive(torch.tensor([True, False]), torch.float32)
    tensor([0., -inf])
    """
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)
