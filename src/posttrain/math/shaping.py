"""Rewards that are added to a task's own: functions of how long an answer is."""

import torch
from jaxtyping import Int

PerRow = torch.Tensor


def overlong(length: Int[torch.Tensor, "B"], horizon: int, buffer: float) -> PerRow:
    """0 up to horizon - buffer tokens, then linearly down to -1 at the horizon.

    An answer that is cut off at the horizon would else be a wrong one without a warning.

    Source: soft overlong punishment, DAPO, arXiv:2503.14476, eq. 13.

    >>> overlong(torch.tensor([60, 80, 95, 100]), horizon=100, buffer=20.0)
    tensor([-0.0000, -0.0000, -0.7500, -1.0000], dtype=torch.float64)
    """
    return -((length.double() - (horizon - buffer)) / buffer).clamp(0, 1)
