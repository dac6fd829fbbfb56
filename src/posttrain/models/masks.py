"""Attention masks as numbers that are added to scores."""

import torch

BLOCK = 512
"""Tokens that attend at once under a mask, so that the mask of a long row is not quadratic."""

ALIGNED = 8
"""Numbers of a mask that a GPU's kernel reads at a time."""


class Bands:
    """Masks for blocks of causal rows: views of a few bands for each window, created once a pass.

    A view and its rows begin at multiples of ALIGNED columns: GPU kernels refuse other masks, or copy
    them in every layer.
    """

    def __init__(self) -> None:
        self._bands: dict[tuple[int | None, torch.dtype, int], tuple[int, torch.Tensor]] = {}

    def mask(self, rows: int, before: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """Return the mask [rows, before + rows] of tokens with `before` tokens before them.

        It is 0 where a token sees another and -inf elsewhere. Row i sees column before + i, itself, and the
        window - 1 columns before it, or all for window None.

        >>> Bands().mask(2, 1, 2, torch.zeros(()))
        tensor([[0., 0., -inf],
                [-inf, 0., 0.]])
        """
        key = window, like.dtype, before % ALIGNED
        if key not in self._bands or self._bands[key][0] < before:
            row = torch.arange(BLOCK, device=like.device)[:, None]
            column = torch.arange(aligned(before + BLOCK), device=like.device) - before
            sees = column <= row
            if window is not None:
                sees &= column > row - window
            self._bands[key] = before, additive(sees, like.dtype)
        diagonal, band = self._bands[key]
        return band[:rows, diagonal - before : diagonal + rows]


def aligned(width: int) -> int:
    """Return the next multiple of ALIGNED.

    >>> aligned(1), aligned(16)
    (8, 16)
    """
    return -(-width // ALIGNED) * ALIGNED


def additive(sees: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where `sees` is True, -inf elsewhere; from a bool mask each layer would create and save this.

    >>> additive(torch.tensor([True, False]), torch.float32)
    tensor([0., -inf])
    """
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, -torch.inf)
