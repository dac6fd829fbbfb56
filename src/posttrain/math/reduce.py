"""From a mask to the weights of a sum: the only file that divides.

A step's loss is Σ weight_t · loss_t over all its tokens, in whatever microbatch or rank they lie.
Each function here sees the mask of the *whole step* and returns weights that are 0
outside it. So the meaning of "mean" is chosen once, and no split of the step can change it: if the rows
lie on several ranks, divisors are counted `everywhere`.
Weights are float64, and weighted_sum rounds them to the type of the losses. Only per_group_token and
per_group read the groups.

An agent's episode may be several rows. The mean over answers of per_row and per_horizon is over episodes: the
number of rows depends on the policy's answers, so a mean over rows would be biased. A sequence is a row.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int

from posttrain.math.choice import function_of, takes
from posttrain.math.episodes import Episodes
from posttrain.math.everywhere import HERE, Everywhere
from posttrain.math.masked import Group, Mask, PerToken, fill, group_mean, group_size

Episode = Int[torch.Tensor, "B"] | None


def of_step(
    reduction: Callable[..., PerToken],
    mask: Mask,
    group: Group,
    episode: Episode = None,
    everywhere: Everywhere = HERE,
) -> PerToken:
    """reduction(mask, group, everywhere), with `episode` if the reduction has such a parameter.

    >>> of_step(per_row, torch.tensor([[True], [True]]), torch.tensor([0, 0]), torch.tensor([3, 3]))
    tensor([[1.],
            [1.]], dtype=torch.float64)
    """
    if takes(function_of(reduction), "episode"):
        return reduction(mask, group, everywhere, episode=episode)
    return reduction(mask, group, everywhere)


def _answers(mask: Mask, episode: Episode, everywhere: Everywhere) -> torch.Tensor:
    """Return the number of episodes with a trained token."""
    return _count(Episodes.of(episode, mask).first(mask.any(-1)), everywhere)


def _count(mask: torch.Tensor, everywhere: Everywhere) -> torch.Tensor:
    """Return the number of True entries on all ranks; ValueError if there are none."""
    count = everywhere.sum(mask.sum())
    if not count:
        raise ValueError("nothing to train on: no token of this step was sampled by the policy")
    return count


def per_token(mask: Mask, group: Group | None = None, everywhere: Everywhere = HERE) -> PerToken:
    """1 / (number of trained tokens in the step): every token counts the same.

    Long answers weigh more than short ones.

    Source: DAPO, arXiv:2503.14476, eq. 8; SFT as notes A's code has it.

    >>> per_token(torch.tensor([[True, True, True], [True, False, False]]))
    tensor([[0.2500, 0.2500, 0.2500],
            [0.2500, 0.0000, 0.0000]], dtype=torch.float64)
    """
    return mask.double() / _count(mask, everywhere)


def per_sequence(mask: Mask, group: Group | None = None, everywhere: Everywhere = HERE) -> PerToken:
    """1 / (|y_i| · number of rows with a trained token): every row counts the same.

    A token of a short answer weighs more: among right answers (A > 0) that favours short ones,
    among wrong ones (A < 0) long ones.

    Source: GRPO, arXiv:2402.03300, eq. 3; SFT, notes C eq. 2.2.

    >>> per_sequence(torch.tensor([[True, True, False], [True, False, False]]))
    tensor([[0.2500, 0.2500, 0.0000],
            [0.5000, 0.0000, 0.0000]], dtype=torch.float64)
    """
    length = mask.sum(-1, keepdim=True)
    return mask.double() / (length.clamp(min=1) * _count(length > 0, everywhere))


def per_horizon(
    mask: Mask,
    group: Group | None = None,
    everywhere: Everywhere = HERE,
    *,
    horizon: int,
    episode: Episode = None,
) -> PerToken:
    """1 / (horizon · number of answers with a trained token): a constant, so that no length is favoured.

    horizon is the most tokens of an answer, the same in every step.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2.

    >>> per_horizon(torch.tensor([[True, True, False], [True, False, False]]), horizon=4)
    tensor([[0.1250, 0.1250, 0.0000],
            [0.1250, 0.0000, 0.0000]], dtype=torch.float64)
    """
    return mask.double() / (horizon * _answers(mask, episode, everywhere))


def per_row(
    mask: Mask, group: Group | None = None, everywhere: Everywhere = HERE, *, episode: Episode = None
) -> PerToken:
    """1 / (number of answers with a trained token): the sum over tokens, the mean over answers.

    The policy-gradient theorem's own weighting: Σ_t A ∇log π_t is the score of the answer.

    Source: REINFORCE, Williams 1992; RLOO, arXiv:2402.14740.

    >>> per_row(torch.tensor([[True, True, False], [True, False, False]]))
    tensor([[0.5000, 0.5000, 0.0000],
            [0.5000, 0.0000, 0.0000]], dtype=torch.float64)
    """
    return mask.double() / _answers(mask, episode, everywhere)


def per_group_token(mask: Mask, group: Group, everywhere: Everywhere = HERE) -> PerToken:
    """1 / (trained tokens of the group · groups with one): per_token within a task; tasks count the same.

    Source: DAPO, arXiv:2503.14476, eq. 8 as printed, its expectation over questions taken as a mean; most
    code bases compute per_token.

    >>> per_group_token(torch.tensor([[True, True], [True, True], [True, False]]), torch.tensor([4, 4, 7]))
    tensor([[0.1250, 0.1250],
            [0.1250, 0.1250],
            [0.5000, 0.0000]], dtype=torch.float64)
    """
    _count(mask, everywhere)
    return per_group(mask, group, everywhere)


def per_group(mask: Mask, group: Group, everywhere: Everywhere = HERE) -> PerToken:
    """1 / (trained tokens of the group · groups with one): every group counts the same.

    For losses that are one number a group, such as a pair's, and stand at each of its tokens. Without a
    trained token all weights are 0.

    Source: DPO, arXiv:2305.18290, eq. 7: the mean over pairs.

    >>> per_group(torch.tensor([[True, True], [True, True], [True, False]]), torch.tensor([4, 4, 7]))
    tensor([[0.1250, 0.1250],
            [0.1250, 0.1250],
            [0.5000, 0.0000]], dtype=torch.float64)
    """
    length = mask.sum(-1)
    total = group_mean(length.double(), group) * group_size(group)
    groups = everywhere.sum(torch.tensor(len(torch.unique(group[length > 0]))))
    return mask.double() / (total.clamp(min=1) * groups.clamp(min=1))[:, None]


def weighted_sum(loss: PerToken, weight: PerToken, mask: Mask) -> Float[torch.Tensor, ""]:
    """Σ weight · loss over the mask, in the type of the loss. Losses of weight 0 are not read and may be NaN.

    >>> loss = torch.tensor([[1.0, float("nan"), float("inf")]])
    >>> weighted_sum(loss, torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([[True, True, False]]))
    tensor(0.5000)
    """
    weight = fill(weight, mask).to(loss)
    return (fill(loss, weight != 0) * weight).sum()
