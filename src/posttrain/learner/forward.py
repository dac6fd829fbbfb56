"""Forward passes of microbatches: log-probabilities, entropies and values of the trained tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner import kernels, pieces
from posttrain.learner.context import ContextRanks, TokenShare
from posttrain.learner.critic import CriticModel
from posttrain.learner.flops import ModelFlops
from posttrain.learner.pack import Pack, microbatches, pack, trained_states
from posttrain.learner.prompt_group import is_half
from posttrain.learner.recompute import recomputing
from posttrain.math import masked, tokens
from posttrain.math.everywhere import HERE, Everywhere
from posttrain.math.tokens import Against
from posttrain.models.attention import output_head
from posttrain.models.loading import computing
from posttrain.types import Batch, Outputs, PerToken, RunError, Trajectory

_MORE = 2
"""Factor of the rows of logits in a chunk where a kernel keeps them in 16 bits."""
Picked = Float[torch.Tensor, "M"]
IDLE = Batch.of([Trajectory.given([0, 0])], [0])
"""A row of two tokens, for passes whose results are not read."""


class Net(nn.Module):
    """The policy and its critic, if any: the module through which the learner runs every forward pass.

    So FSDP2's hooks around it see every pass, and inside it every weight is complete. With `compiles` what is
    picked of logits is computed by torch.compile.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        critic: CriticModel | None = None,
        context: ContextRanks | None = None,
        *,
        compiles: bool = False,
    ) -> None:
        super().__init__()
        self._compiles = compiles
        self.policy, self.critic, self.context = policy, critic, context
        self.flops = 0.0
        """The floating-point operations of all passes so far."""
        self._policy_flops = ModelFlops.of(policy)
        self._critic_flops = None if critic is None or critic.body is None else ModelFlops.of(critic.body)

    def count_logits(self, tokens: int) -> None:
        """Count the operations of the policy's output head, without gradients, where it runs by itself."""
        self.flops += 2 * self._policy_flops.head * tokens

    def forward(
        self,
        packed: Pack,
        temperature: float | None,
        against: Sequence[Against] = (),
        *,
        critic_alone: bool = False,
        states_alone: bool = False,
    ) -> "NetOutputs":
        """Return what is known of a pack's trained tokens.

        Without a temperature there are no log π and no entropies, without a critic no V, without `against` no
        divergences. With `critic_alone` the policy runs without gradients, and with `states_alone` there are
        hidden states and nothing else. In a context this rank computes its share of the tokens.
        """
        if self.context is None:
            options = {"critic_alone": critic_alone, "states_alone": states_alone}
            return self._outputs(packed, temperature, against, **options)
        half = is_half(self.policy.get_input_embeddings().weight)
        share = TokenShare(packed, self.context, half=half, more=max(1, len(against)))
        against = share.against(against) if against else ()
        out = self._outputs(share, temperature, against, critic_alone=critic_alone, states_alone=states_alone)
        return NetOutputs(*map(share.join, out))

    def _outputs(
        self,
        packed: Pack | TokenShare,
        temperature: float | None,
        against: Sequence[Against],
        *,
        critic_alone: bool,
        states_alone: bool,
    ) -> "NetOutputs":
        learns = torch.is_grad_enabled()
        if states_alone:
            self.flops += self._policy_flops.of_pass(packed.positions, 0, learns=learns)
            return NetOutputs(states=trained_states(self.policy, packed, replays=False))
        needs_states = temperature is not None or (self.critic is not None and self.critic.body is None)
        picked = entropies = divergences = None
        if needs_states:
            logits = 0 if temperature is None else len(packed.target)
            self.flops += self._policy_flops.of_pass(
                packed.positions, logits, learns=learns and not critic_alone
            )
        with torch.set_grad_enabled(learns and not critic_alone):
            target = packed.target.to(self.policy.get_input_embeddings().weight.device)
            hidden = trained_states(self.policy, packed) if needs_states else None
            if temperature is not None and hidden is not None:
                columns = hidden, output_head(self.policy), target
                linear = self.policy.get_output_embeddings()
                vocabulary, weights = linear.weight.shape[0], _narrow(linear, hidden.device)
                if against:
                    picked, entropies, divergences = tokens.compare_each(
                        *columns, against, temperature, vocabulary=vocabulary, weights=weights
                    )
                else:
                    picked, entropies = tokens.pick_from_hidden(
                        *columns,
                        temperature,
                        vocabulary=vocabulary,
                        picks=pieces.pick if self._compiles else kernels.pick,
                        more=_MORE if self._compiles or kernels.suits(hidden) else 1,
                        weights=weights,
                    )
        value = None if self.critic is None else self.critic(packed, hidden)
        if self._critic_flops:
            self.flops += self._critic_flops.of_pass(packed.positions, 0, learns=learns)
        return NetOutputs(picked, entropies, value, divergences)


def _narrow(head: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Return the trained weights of an output head whose gradients are summed in float32 over its chunks.

    On a CPU none: its chunks are few, and its runs keep their bits.
    """
    if device.type == "cpu":
        return []
    return [p for p in head.parameters() if p.requires_grad and p.dtype.itemsize < 4]


class NetOutputs(NamedTuple):
    """The results of a pass at the M trained tokens of a pack."""

    logp: Picked | None = None
    entropy: Picked | None = None
    value: Picked | None = None
    divergence: Picked | None = None
    states: Float[torch.Tensor, "M D"] | None = None


Compare = Callable[[Pack, Batch], Sequence[Against]]
"""Returns the references' distributions at the trained tokens of a pack, which is that of the batch."""


def forward(
    net: Net,
    batch: Batch,
    temperature: float,
    compare: Compare | None = None,
    *,
    critic_alone: bool = False,
) -> Outputs:
    """Return log π, entropy and V at every trained token of the rows, with gradients if they are enabled.

    Also the divergence from a reference, with `compare`. With `critic_alone` only V has a gradient, in the
    critic's own weights. Rows are packed, the output head runs only where a token is trained, and [B, T, V]
    never exists.
    """
    # Where the reference reads other prompts, equal beginnings of two answers are different states for it.
    several = compare is not None and batch.teacher is not None and len(set(batch.teacher.tolist())) > 1
    packed = pack(batch, trees=batch.teacher_prompt is None and not several)
    against = () if compare is None else compare(packed, batch)
    with recomputing():
        outputs: NetOutputs = net(packed, temperature, against, critic_alone=critic_alone)
    return Outputs(
        logp=column(packed, batch, outputs.logp),
        entropy=column(packed, batch, outputs.entropy),
        value=None if outputs.value is None else column(packed, batch, outputs.value),
        divergence=None if outputs.divergence is None else column(packed, batch, outputs.divergence),
    )


@torch.no_grad()
def states_of_teacher(net: Net, packed: Pack, batch: Batch) -> Float[torch.Tensor, "M D"]:
    """Return a reference's hidden states at the trained tokens of a pack, without gradients.

    If the batch has `teacher_prompt`s, the reference reads those in place of the rows' own prompts: the n-th
    trained token of a row is then the n-th of the reference's row, which is as much longer as its prompt.
    """
    if batch.teacher_prompt is None:
        return _states(net, packed)
    taught = with_teacher_prompts(batch)
    other = pack(taught, trees=True)
    number = batch.mask.cumsum(-1) - 1
    index = torch.zeros_like(number)
    index[other.row, taught.mask.cumsum(-1)[other.row, other.column] - 1] = other.asks
    places = torch.zeros(len(packed.target), dtype=torch.long)
    places[packed.asks] = index[packed.row, number[packed.row, packed.column]]
    hidden = _states(net, other)
    return hidden[places.to(hidden.device)]


def _states(net: Net, packed: Pack) -> Float[torch.Tensor, "M D"]:
    outputs: NetOutputs = net(packed, None, states_alone=True)
    assert outputs.states is not None
    return outputs.states


def with_teacher_prompts(batch: Batch) -> Batch:
    """Return the rows with the reference's prompts in place of what comes before their first trained tokens.

    Only `tokens`, `mask`, `length` and `group` are filled.
    """
    assert batch.teacher_prompt is not None
    assert batch.teacher_prompt_length is not None
    starts = torch.where(batch.mask.any(-1), batch.mask.to(torch.uint8).argmax(-1), batch.length)
    rows = zip(batch.teacher_prompt, batch.teacher_prompt_length, starts, strict=True)
    prompts = [(prompt[:length].tolist(), int(start)) for prompt, length, start in rows]
    trajectories = [
        Trajectory.given(
            [*prompt, *batch.tokens[i, start:end].tolist()],
            trained=[False] * len(prompt) + batch.mask[i, start:end].tolist(),
        )
        for i, ((prompt, start), end) in enumerate(zip(prompts, batch.length.tolist(), strict=True))
    ]
    return Batch.of(trajectories, batch.group.tolist())


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
        part = batch.rows(torch.tensor(rows)) if rows else IDLE
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
    return column(packed, batch, net(packed, None).value)


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
