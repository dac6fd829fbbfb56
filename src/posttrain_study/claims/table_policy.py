"""A policy that is a table of logits, trained by a method: for tasks whose states can be counted.

A step of training is the method's own prepare, weight and loss. A table says how likely each action is in
each state, so that chances and values are sums and not estimates. No state generalises to another.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch.nn.functional import pad

from posttrain.math import reduce
from posttrain.types import Batch, Method, Outputs


@dataclass(frozen=True)
class TableRollouts:
    """Episodes of an update; those of a task share a number in `group`. `mask`: steps that exist."""

    state: Int[torch.Tensor, "B T"]
    action: Int[torch.Tensor, "B T"]
    reward: Float[torch.Tensor, "B T"]
    group: Int[torch.Tensor, "B"]
    mask: Bool[torch.Tensor, "B T"] | None = None
    critic_state: Int[torch.Tensor, "B T"] | None = None
    """Row of the critic's table at each step, for a method with a learnt critic."""
    value: Float[torch.Tensor, "B T"] | None = None
    """Values that are given instead: they are not trained."""


class TablePolicy:
    """Train logits [states, actions], and a critic's values [critic states] if the method reads any."""

    def __init__(
        self,
        logits: Float[torch.Tensor, "S A"],
        method: Method,
        lr: float,
        *,
        adam: bool = True,
        critic: tuple[int, float] | None = None,
    ) -> None:
        """Copy the logits. critic: states of a learnt critic, which begins at 0, and its learning rate."""
        self.logits = torch.nn.Parameter(logits.clone())
        self.values = torch.nn.Parameter(torch.zeros(critic[0] if critic else 0))
        self.method, self.memory = method, dict(method.start)
        kind = torch.optim.Adam if adam else torch.optim.SGD
        groups = [{"params": [self.logits], "lr": lr}]
        groups += [{"params": [self.values], "lr": critic[1]}] if critic else []
        self.optimiser = kind(groups, lr=lr)

    @torch.no_grad()
    def sample(self, state: Int[torch.Tensor, "B"], draw: torch.Generator) -> Int[torch.Tensor, "B"]:
        """Sample an action in each state."""
        return torch.multinomial(self.logits[state].softmax(-1), 1, generator=draw)[:, 0]

    def learn(self, rollouts: TableRollouts) -> None:
        """Make an optimiser step on these episodes."""
        out = self.outputs(rollouts)
        batch = self.batch(rollouts, out)
        loss = reduce.weighted_sum(self.method.loss(out, batch), self.method.weight(batch), batch.mask)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()
        self.memory = dict(self.method.update_state(batch, {}))

    def log_table(self) -> Float[torch.Tensor, "S A"]:
        """Return log π of every action in each state."""
        return self.logits.log_softmax(-1)

    def outputs(self, rollouts: TableRollouts) -> Outputs:
        """Return log π of each action, and the values of the critic; the first column is the prompt's."""
        logp = self.log_table()[rollouts.state, rollouts.action]
        value = None if rollouts.critic_state is None else _column(self.values[rollouts.critic_state])
        return Outputs(_column(logp), torch.zeros_like(_column(logp)), value)

    @torch.no_grad()
    def batch(self, rollouts: TableRollouts, out: Outputs) -> Batch:
        """Return the episodes as the method prepares them, each after a prompt of one token."""
        out = Outputs(out.logp.detach(), out.entropy, None if out.value is None else out.value.detach())
        mask = torch.ones_like(rollouts.action, dtype=torch.bool) if rollouts.mask is None else rollouts.mask
        batch = Batch(
            tokens=_column(rollouts.action),
            mask=_column(mask),
            length=1 + mask.sum(1),
            group=rollouts.group,
            reward=_column(rollouts.reward.double()),
            logp_gen=out.logp,
            logp_policy=out.logp,
            version=torch.zeros_like(_column(rollouts.action)),
            value=out.value if rollouts.value is None else _column(rollouts.value),
            state=self.memory,
        )
        return replace(self.method.prepare(batch), state=self.memory)


def _column(values: torch.Tensor) -> torch.Tensor:
    return pad(values, (1, 0))
