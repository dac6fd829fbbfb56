"""One microbatch through the model: what it says of every trained token."""

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
"""Times as many rows of logits at once where they have 16 bits, and no kernel makes 32 of them."""
Picked = Float[torch.Tensor, "M"]


class Net(nn.Module):
    """The policy, and its critic where there is one: the one module through which the learner runs them.

    Whatever wraps it (FSDP2's hooks) sees every forward pass, and inside it every weight is whole.
    """

    def __init__(self, policy: PreTrainedModel, critic: CriticModel | None = None) -> None:
        super().__init__()
        self.policy, self.critic = policy, critic

    def forward(
        self, packed: Pack, temperature: float | None
    ) -> tuple[Picked | None, Picked | None, Picked | None]:
        """log π and entropy of the trained tokens of a pack, where a temperature is given; and V."""
        reads = temperature is not None or (self.critic is not None and self.critic.body is None)
        hidden = trained_states(self.policy, packed) if reads else None
        picked = entropies = None
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


def forward(net: Net, batch: Batch, temperature: float) -> Outputs:
    """log π, entropy and V at every trained token of these rows, with gradients where they are on.

    Rows are packed, the output head runs only where a token is trained, and [B, T, V] never exists.
    """
    packed = pack(batch, trees=True)
    with recomputing():
        picked, entropies, numbers = net(packed, temperature)
    value = None if numbers is None else column(packed, batch, numbers)
    return Outputs(column(packed, batch, picked), column(packed, batch, entropies), value)


def parts(
    batch: Batch, budget: int, *, whole: bool = False, together: Everywhere = HERE
) -> Iterator[tuple[list[int], Batch, bool]]:
    """(row numbers, rows, whether it is the last) of each microbatch.

    Where ranks go `together` one that has fewer than another is given some without rows: of two tokens that
    nobody chose.
    """
    cut = microbatches(batch, budget, whole=whole)
    most = int(together.max(torch.tensor(len(cut))))
    for n, rows in enumerate(cut + [[]] * (most - len(cut))):
        part = batch.rows(torch.tensor(rows)) if rows else Batch.of([Trajectory.given([0, 0])], [0])
        yield rows, part, n == most - 1


@computing()
def score_batch(
    net: Net, batch: Batch, temperature: float, budget: int, together: Everywhere = HERE
) -> Outputs:
    """The same of all rows, microbatch by microbatch, without gradients."""
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
    """V at every trained token, without the output head, nor the policy if the critic is not on it."""
    packed = pack(batch, trees=True)
    return column(packed, batch, net(packed, None)[2])


def column(packed: Pack, batch: Batch, values: Picked | None) -> PerToken:
    """Numbers of a pack's trained tokens where they belong in the batch, 0 elsewhere."""
    assert values is not None
    values = values.cpu()[packed.asks]
    return values.new_zeros(batch.mask.shape).index_put((packed.row, packed.column), values)


def with_advantage(prepared: Batch, given: PerToken | None) -> Batch:
    """With these advantages in place of the method's, if there are any.

    ValueError for those of another shape than the batch, or not finite; RunError if the method's are not.
    """
    if given is not None:
        shape, wanted = list(getattr(given, "shape", ())), list(prepared.mask.shape)
        if shape != wanted:
            raise ValueError(f"advantage has shape {shape}, and the columns of the batch have {wanted}")
        prepared = replace(prepared, advantage=masked.fill(given, prepared.mask))
    if prepared.advantage is not None:
        wrong = (~prepared.advantage.isfinite() & prepared.mask).any(-1).nonzero().flatten().tolist()
        if wrong:
            if given is not None:
                raise ValueError(f"an advantage of row {wrong[0]} that the batch brings is not finite")
            raise RunError(
                "advantages",
                f"an advantage that the method makes of the rewards (row {wrong[0]}) is not finite",
            )
    return prepared
