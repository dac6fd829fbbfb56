"""Forward passes of microbatches: log-probabilities, entropies and values of the trained tokens."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner import kernels
from posttrain.learner.critic import CriticModel
from posttrain.learner.pack import Pack, microbatches, pack, trained_states
from posttrain.learner.recompute import recomputing
from posttrain.math import masked, tokens
from posttrain.math.everywhere import HERE, Everywhere
from posttrain.models.attention import output_head
from posttrain.models.loading import computing
from posttrain.types import Batch, Outputs, PerToken, RunError, Trajectory

_MORE = 2
"""Factor of the rows of logits in a chunk where a kernel keeps them in 16 bits."""
Picked = Float[torch.Tensor, "M"]


class Net(nn.Module):
    """The policy and its critic, if any: the module through which the learner runs every forward pass.

    So FSDP2's hooks around it see every pass, and inside it every weight is complete.
    """

    def __init__(self, policy: PreTrainedModel, critic: CriticModel | None = None) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic

    def forward(
        self, packed: Pack, temperature: float | None, *, critic_alone: bool = False
    ) -> tuple[Picked | None, Picked | None, Picked | None]:
        """Return log π and entropy of a pack's trained tokens, and V.

        Without a temperature log π and entropy are None, without a critic V is None. With `critic_alone` the
        policy runs without gradients.
        """
        needs_states = temperature is not None or (self.critic is not None and self.critic.body is None)
        picked = entropies = None
        with torch.set_grad_enabled(torch.is_grad_enabled() and not critic_alone):
            hidden = trained_states(self.policy, packed) if needs_states else None
            if temperature is not None and hidden is not None:
                picked, entropies = tokens.pick_from_hidden(
                    hidden,
                    output_head(self.policy),
                    packed.target.to(hidden.device),
                    temperature,
                    vocabulary=self.policy.get_output_embeddings().weight.shape[0],
                    picks=kernels.pick,
                    more=_MORE if kernels.suits(hidden) else 1,
                )
        return picked, entropies, None if self.critic is None else self.critic(packed, hidden)


def forward(net: Net, batch: Batch, temperature: float, *, critic_alone: bool = False) -> Outputs:
    """Return log π, entropy and V at every trained token of the rows, with gradients if they are enabled.

    With `critic_alone` only V has a gradient, in the critic's own weights. Rows are packed, the output head
    runs only where a token is trained, and [B, T, V] never exists.
    """
    packed = pack(batch, trees=True)
    with recomputing():
        picked, entropies, numbers = net(packed, temperature, critic_alone=critic_alone)
    value = None if numbers is None else column(packed, batch, numbers)
    return Outputs(column(packed, batch, picked), column(packed, batch, entropies), value)


def parts(
    batch: Batch, budget: int, *, keep_groups: bool = False, together: Everywhere = HERE
) -> Iterator[tuple[list[int], Batch, bool]]:
    """Yield (row numbers, rows, True if it is the last) of each microbatch.

    All ranks of `together` get the same number of microbatches: a rank with fewer gets some without row
    numbers, whose batch is a row of two untrained tokens.
    """
    cut = microbatches(batch, budget, keep_groups=keep_groups)
    most = int(together.max(torch.tensor(len(cut))))
    for n, rows in enumerate(cut + [[]] * (most - len(cut))):
        part = batch.rows(torch.tensor(rows)) if rows else Batch.of([Trajectory.given([0, 0])], [0])
        yield rows, part, n == most - 1


@computing()
def score_batch(
    net: Net, batch: Batch, temperature: float, budget: int, together: Everywhere = HERE
) -> Outputs:
    """Return log π, entropy and V of all rows, microbatch by microbatch, without gradients."""
    logp, entropy, value = (torch.zeros_like(batch.logp_gen) for _ in range(3))
    with torch.no_grad():
        for rows, part, _ in parts(batch, budget, together=together):
            out = forward(net, part, temperature)
            if not rows:
                continue
            logp[rows], entropy[rows] = out.logp.to(logp), out.entropy.to(entropy)
            if out.value is not None:
                value[rows] = out.value.to(value)
    return Outputs(logp=logp, entropy=entropy, value=None if net.critic is None else value)


def values(net: Net, batch: Batch) -> PerToken:
    """Return V at every trained token without the output head, and without the policy if V has a body."""
    packed = pack(batch, trees=True)
    return column(packed, batch, net(packed, None)[2])


def column(packed: Pack, batch: Batch, values: Picked | None) -> PerToken:
    """Return the numbers of a pack's trained tokens at their places in the batch, 0 elsewhere."""
    assert values is not None
    values = values.cpu()[packed.asks]
    return values.new_zeros(batch.mask.shape).index_put((packed.row, packed.column), values)


def with_advantage(prepared: Batch, advantage: PerToken | None) -> Batch:
    """Return the batch with `advantage` in place of the method's; None keeps the method's.

    Raises ValueError if `advantage` has another shape than the batch or is not finite, RunError if the
    method's is not finite.
    """
    if advantage is not None:
        shape, expected = list(getattr(advantage, "shape", ())), list(prepared.mask.shape)
        if shape != expected:
            raise ValueError(f"advantage has shape {shape}, and the columns of the batch have {expected}")
        prepared = replace(prepared, advantage=masked.fill(advantage, prepared.mask))
    if prepared.advantage is not None:
        rows = (~prepared.advantage.isfinite() & prepared.mask).any(-1).nonzero().flatten().tolist()
        if rows:
            if advantage is not None:
                raise ValueError(f"an advantage of row {rows[0]} that the batch brings is not finite")
            raise RunError(
                "advantages",
                f"an advantage that the method makes of the rewards (row {rows[0]}) is not finite",
            )
    return prepared
