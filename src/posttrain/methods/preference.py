"""The preference family: answers to one question compared with one another, or each labelled good or bad.

    implicit     an answer's implicit reward              a log-ratio, its mean, log-odds ...
    divergence   the penalty behind that reward           f'(π/π_ref); the reverse KL in DPO
    pair_loss    the loss of a margin                     logistic, squared, hinge ...

A row's total reward is the judge's preference: in a group, answers with more reward are preferred to
answers with less. A loss is one number a group, the mean over its pairs, and stands at each of its tokens. A
pair compares episodes: all conversations of an episode are one answer (`join`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Bool, Float

from posttrain.math import masked, preference, reduce, returns
from posttrain.math.choice import AtLeast
from posttrain.math.episodes import Episodes
from posttrain.types import PROBE, Batch, Method, Outputs, PerRow, PerToken

PairLoss = Callable[..., Float[torch.Tensor, "..."]]
Pairs = Bool[torch.Tensor, "B B"]


@dataclass(frozen=True)
class Preference(Method):
    """mean over groups of the mean over pairs (w, l) of pair_weight · pair_loss(h, β) + sft_weight · NLL(w).

    h = f'(u_w) - f'(u_l), u the implicit reward; NLL(w) = -(1/|w|) Σ_t log π(w_t).
    """

    implicit: Callable[..., PerRow]
    pair_loss: PairLoss
    divergence: Callable[..., PerRow] = preference.reverse_kl
    beta: Annotated[float, AtLeast(1e-6)] = 0.1
    """Strength of the pull towards the reference: with a small β a preference moves the policy far."""
    pair_weight: float = 1.0
    sft_weight: float = 0.0
    """Weight of the preferred answer's negative log-likelihood, which is added to the loss."""

    unit: ClassVar[str] = "group"

    @property
    def needs(self) -> frozenset[str]:
        """logp_ref, unless the implicit reward has no reference."""
        return frozenset() if self.unread else frozenset({"logp_ref"})

    @property
    def unread(self) -> frozenset[str]:
        """The divergence, if the implicit reward has no reference."""
        free = self.implicit in (preference.mean_logp, preference.log_odds)
        return frozenset({"divergence"}) if free else frozenset()

    def weight(self, batch: Batch) -> PerToken:
        """Return 1/(groups · tokens of the group) on answers that are in a pair."""
        answers, episodes = join(batch)
        return episodes.part(by_group(answers))

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return the group's loss at each of its tokens."""
        answers, episodes = join(batch)
        logp = episodes.join(out.logp)
        h = _margins(self._implicit(logp, answers))
        losses = self.pair_weight * self.pair_loss(h, self.beta)
        if self.sft_weight:
            losses = losses - self.sft_weight * masked.row_mean(logp, answers.mask)[:, None]
        loss = preference.over_pairs(losses, better(answers), answers.group)
        return episodes.part(at_tokens(loss, answers))

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Return implicit rewards β f'(u) of both sides, the share of pairs in order, and log-likelihoods."""
        answers, episodes = join(batch)
        logp = episodes.join(out.logp.detach())
        reward = self.beta * self._implicit(logp, answers)
        means = compared_means(reward, answers, "rewards")
        means |= _over_pairs(_sides(masked.row_mean(logp, answers.mask), "logp"), answers)
        return {name: episodes.part(mean) for name, mean in means.items()}

    def _implicit(self, logp: PerToken, batch: Batch) -> PerRow:
        reward = self.implicit(logp, batch.logp_ref, batch.mask)
        return reward if self.unread else self.divergence(reward)


@dataclass(frozen=True)
class Unpaired(Method):
    """mean over answers of λ_D (1 - σ(β u - z)) if desirable, else λ_U (1 - σ(z - β u)); u the log-ratio.

    An answer is desirable if its reward is positive. z = max(0, β · mean log-ratio of the probes): prompts
    with answers to other prompts, which measure the policy's KL to the reference and are not trained.

    Source: KTO, arXiv:2402.01306, eq. 8.
    """

    beta: Annotated[float, AtLeast(1e-6)] = 0.1
    desirable_weight: float = 1.0
    """λ_D; λ_D times the number of desirable answers should be 1 to 4/3 times λ_U times that of others."""
    undesirable_weight: float = 1.0
    """λ_U, the weight of undesirable answers."""

    unit: ClassVar[str] = "row"
    probes: ClassVar[bool] = True
    asks: ClassVar[frozenset[str]] = frozenset({"both signs"})
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old", "logp_ref"})
    """logp_old too, because probes compare the policy before the update with the reference."""
    start: ClassVar[Mapping[str, float]] = {"kl": 0.0}

    def prepare(self, batch: Batch) -> Batch:
        """Return the batch with the KL of its probes, at least 0, in nats an answer.

        Without probes the last update's KL stays.
        """
        assert batch.logp_old is not None
        assert batch.logp_ref is not None
        rows = _is_probe(batch) & batch.mask.any(-1)
        gap = preference.log_ratio(batch.logp_old, batch.logp_ref, batch.mask)
        if not batch.everywhere.sum(rows.sum()):
            return batch
        measured = max(0.0, float(masked.mean(gap, rows, batch.everywhere)))
        return replace(batch, state={**batch.state, "kl": measured})

    def weight(self, batch: Batch) -> PerToken:
        """Return 1/(answers · tokens of the answer); 0 on probes."""
        mask = batch.mask & ~_is_probe(batch)[:, None]
        # A step of probes alone trains nothing; a step without any token is an error.
        tokens, learnt = batch.everywhere.sum(torch.stack([batch.mask.sum(), mask.sum()])).tolist()
        only_probes = tokens and not learnt
        return mask.double() if only_probes else reduce.per_sequence(mask, everywhere=batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """Return the answer's loss at each of its tokens."""
        losses = preference.prospect(
            self.beta * self._log_ratio(out, batch),
            _worth(batch) > 0,
            self.beta * batch.state["kl"],
            self.desirable_weight,
            self.undesirable_weight,
        )
        return at_tokens(losses, batch)

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Return implicit rewards, with the sign of the label, and the share of positive ones."""
        reward = self.beta * (self._log_ratio(out, batch).detach() - batch.state["kl"])
        sign = torch.where(_worth(batch) > 0, 1.0, -1.0).to(reward)
        right = (sign * reward > 0).to(reward)
        return {
            "rewards/margin": at_tokens(sign * reward, batch),
            "rewards/accuracy": at_tokens(right, batch),
        }

    def _log_ratio(self, out: Outputs, batch: Batch) -> PerRow:
        assert batch.logp_ref is not None
        return preference.log_ratio(out.logp, batch.logp_ref, batch.mask)


def join(batch: Batch) -> tuple[Batch, Episodes]:
    """Return (the batch with one row an episode, its conversations side by side; the map back to rows).

    Each conversation carries the episode's total reward, so the first alone keeps it.
    """
    episodes = Episodes.of(batch.episode, batch.mask)
    if batch.episode is None:
        return batch, episodes
    first = (episodes.place == 0)[:, None].expand_as(batch.mask)
    batch = replace(batch, reward=masked.fill(batch.reward, first), episode=None, routes=None)
    columns: dict[str, Any] = {
        name: episodes.join(column) if column.ndim > 1 else episodes.first(column)
        for name in batch.__slots__
        if isinstance(column := getattr(batch, name), torch.Tensor)
    }
    return replace(batch, **columns), episodes


def better(batch: Batch) -> Pairs:
    """Return True at [i, j] if rows i and j answer the same question and i has more reward."""
    return preference.better(_worth(batch), batch.group, batch.mask.any(-1))


def by_group(batch: Batch) -> PerToken:
    """Return 1/(groups · tokens of the group) on answers that are in a pair, 0 elsewhere.

    Raises ValueError if no token is trained.
    """
    if not batch.everywhere.sum(batch.mask.sum()):
        raise ValueError("nothing to train on: no answer of this step has a trained token")
    pairs = better(batch)
    paired = batch.mask & (pairs | pairs.T).any(-1)[:, None]
    return reduce.per_group(paired, batch.group, batch.everywhere)


def at_tokens(x: PerRow, batch: Batch) -> PerToken:
    """Return each row's number at each of its trained tokens."""
    return masked.fill(x[:, None].expand(batch.mask.shape), batch.mask)


def compared_means(reward: PerRow, batch: Batch, name: str) -> dict[str, PerToken]:
    """Return name/chosen, /rejected, /margin and /accuracy: means over a group's pairs, at its tokens."""
    h = _margins(reward)
    # A tie counts one half, so that a model that scores all answers alike has an accuracy of one half.
    right = (h > 0).to(h) + 0.5 * (h == 0).to(h)
    return _over_pairs(_sides(reward, name) | {f"{name}/margin": h, f"{name}/accuracy": right}, batch)


def _over_pairs(metrics: Mapping[str, Float[torch.Tensor, "B B"]], batch: Batch) -> dict[str, PerToken]:
    pairs = better(batch)
    return {k: at_tokens(preference.over_pairs(v, pairs, batch.group), batch) for k, v in metrics.items()}


def _sides(x: PerRow, name: str) -> dict[str, Float[torch.Tensor, "B B"]]:
    """Return for every pair (i, j) of rows x_i as name/chosen and x_j as name/rejected."""
    n = len(x)
    return {f"{name}/chosen": x[:, None].expand(n, n), f"{name}/rejected": x[None, :].expand(n, n)}


def _margins(x: PerRow) -> Float[torch.Tensor, "B B"]:
    return x[:, None] - x[None, :]


def _worth(batch: Batch) -> PerRow:
    return returns.worth(batch.reward, batch.mask, like=batch.logp_gen)


def _is_probe(batch: Batch) -> Bool[torch.Tensor, "B"]:
    return ((batch.version == PROBE) & batch.mask).any(-1)
