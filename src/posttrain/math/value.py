"""Losses of a critic, token by token: functions of V, its target, and V before the update.

With the ½ of notes B (A and C leave it out): the gradient is (V - target) ∇V.
"""

import torch

from posttrain.math.masked import PerToken


def squared(value: PerToken, target: PerToken, value_old: PerToken) -> PerToken:
    """½ (V - target)².

    >>> squared(torch.tensor([[1.0]]), torch.tensor([[3.0]]), torch.tensor([[0.0]]))
    tensor([[2.]])
    """
    return (value - target).square() / 2


def clipped(value: PerToken, target: PerToken, value_old: PerToken, value_clip: float = 0.2) -> PerToken:
    """½ max((V - target)², (V_old + clip(V - V_old, ±value_clip) - target)²).

    A value that has moved by more than `value_clip` towards its target in this update has no gradient; a
    value that moved away from its target always has. value_clip is in units of the return.

    Source: the code of PPO; Engstrom et al., arXiv:2005.12729, section 3.

    >>> V, target, old = torch.tensor([[1.0]]), torch.tensor([[3.0]]), torch.tensor([[0.0]])
    >>> clipped(V, target, old), squared(V, target, old)
    (tensor([[3.9200]]), tensor([[2.]]))
    """
    near = value_old + (value - value_old).clamp(-value_clip, value_clip)
    return torch.maximum((value - target).square(), (near - target).square()) / 2
