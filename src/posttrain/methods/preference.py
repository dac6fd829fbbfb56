"""The preference family: answers to one question compared with one another, or each told good or bad.

    implicit     what an answer is worth to the policy    a log-ratio, its mean, log-odds ...
    divergence   from what penalty on the policy          f'(π/π_ref); the reverse KL in DPO
    pair_loss    what a margin costs                      logistic, squared, hinge ...

A row's worth to whoever judged is its total reward; in a group the answers of more reward are preferred to
those of less. A loss is one number a group, the mean over its pairs, and stands at each of its tokens. A pair
compares episodes: all conversations of one are one answer (`join`).
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

    h = f'(u_w) - f'(u_l), u the implicit worth; NLL(w) = -(1/|w|) Σ_t log π(w_t).
    """

    implicit: Callable[..., PerRow]
    pair_loss: PairLoss
    divergence: Callable[..., PerRow] = preference.reverse_kl
    beta: Annotated[float, AtLeast(1e-6)] = 0.1
    """How far a preference moves the policy: small is far."""
    pair_weight: float = 1.0
    sft_weight: float = 0.0
    """How much the preferred answer's negative log-likelihood counts beside."""

    unit: ClassVar[str] = "group"

    @property
    def needs(self) -> frozenset[str]:
        """The reference's log-probabilities, unless the implicit worth has none."""
        return frozenset() if self.unread else frozenset({"logp_ref"})

    @property
    def unread(self) -> frozenset[str]:
        """The divergence, where the implicit worth has no reference to diverge from."""
        free = self.implicit in (preference.mean_logp, preference.log_odds)
        return frozenset({"divergence"}) if free else frozenset()

    def weight(self, batch: Batch) -> PerToken:
        """1/(groups · tokens of the group) on answers that are in a pair."""
        answers, episodes = join(batch)
        return episodes.part(by_group(answers))

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """The group's loss, at each of its tokens."""
        answers, episodes = join(batch)
        logp = episodes.join(out.logp)
        h = _margins(self._implicit(logp, answers))
        each = self.pair_weight * self.pair_loss(h, self.beta)
        if self.sft_weight:
            each = each - self.sft_weight * masked.row_mean(logp, answers.mask)[:, None]
        loss = preference.over_pairs(each, better(answers), answers.group)
        return episodes.part(at_tokens(loss, answers))

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Implicit rewards β f'(u) of both sides, how often their order is right, and both likelihoods."""
        answers, episodes = join(batch)
        logp = episodes.join(out.logp.detach())
        reward = self.beta * self._implicit(logp, answers)
        means = compared_means(reward, answers, "rewards")
        means |= _over_pairs(_sides(masked.row_mean(logp, answers.mask), "logp"), answers)
        return {name: episodes.part(mean) for name, mean in means.items()}

    def _implicit(self, logp: PerToken, batch: Batch) -> PerRow:
        worth = self.implicit(logp, batch.logp_ref, batch.mask)
        return worth if self.unread else self.divergence(worth)


@dataclass(frozen=True)
class Unpaired(Method):
    """mean over answers of λ_D (1 - σ(β u - z)) if wanted, of λ_U (1 - σ(z - β u)) if not; u the log-ratio.

    An answer is wanted if its reward is positive. z = max(0, β · mean log-ratio of the probes): answers put
    to questions that are not theirs, which measure the policy's KL to the reference and are not trained.

    Source: KTO, arXiv:2402.01306, eq. 8.
    """

    beta: Annotated[float, AtLeast(1e-6)] = 0.1
    desirable_weight: float = 1.0
    """λ_D, of wanted answers; λ_D times their number should be 1 to 4/3 times λ_U times the others'."""
    undesirable_weight: float = 1.0
    """λ_U, of unwanted ones."""

    unit: ClassVar[str] = "row"
    probes: ClassVar[bool] = True
    asks: ClassVar[frozenset[str]] = frozenset({"both signs"})
    needs: ClassVar[frozenset[str]] = frozenset({"logp_old", "logp_ref"})
    """Of the policy before the update too, which the probes compare."""
    start: ClassVar[Mapping[str, float]] = {"kl": 0.0}

    def prepare(self, batch: Batch) -> Batch:
        """The batch with the KL of its probes, in nats an answer, at least 0; without any, the last one."""
        assert batch.logp_old is not None
        assert batch.logp_ref is not None
        rows = _is_probe(batch) & batch.mask.any(-1)
        gap = preference.log_ratio(batch.logp_old, batch.logp_ref, batch.mask)
        if not batch.everywhere.sum(rows.sum()):
            return batch
        measured = max(0.0, float(masked.mean(gap, rows, batch.everywhere)))
        return replace(batch, state={**batch.state, "kl": measured})

    def weight(self, batch: Batch) -> PerToken:
        """1/(answers · tokens of the answer); 0 on probes."""
        mask = batch.mask & ~_is_probe(batch)[:, None]
        # A step dealt only probes has nothing to learn; one without any token is an error.
        tokens, learnt = batch.everywhere.sum(torch.stack([batch.mask.sum(), mask.sum()])).tolist()
        only_probes = tokens and not learnt
        return mask.double() if only_probes else reduce.per_sequence(mask, everywhere=batch.everywhere)

    def loss(self, out: Outputs, batch: Batch) -> PerToken:
        """The answer's loss, at each of its tokens."""
        each = preference.prospect(
            self.beta * self._log_ratio(out, batch),
            _worth(batch) > 0,
            self.beta * batch.state["kl"],
            self.desirable_weight,
            self.undesirable_weight,
        )
        return at_tokens(each, batch)

    def watch(self, out: Outputs, batch: Batch) -> dict[str, PerToken]:
        """Implicit rewards, with the sign of what was wanted, and how often that is positive."""
        over = self.beta * (self._log_ratio(out, batch).detach() - batch.state["kl"])
        sign = torch.where(_worth(batch) > 0, 1.0, -1.0).to(over)
        right = (sign * over > 0).to(over)
        return {
            "rewards/margin": at_tokens(sign * over, batch),
            "rewards/accuracy": at_tokens(right, batch),
        }

    def _log_ratio(self, out: Outputs, batch: Batch) -> PerRow:
        assert batch.logp_ref is not None
        return preference.log_ratio(out.logp, batch.logp_ref, batch.mask)


def join(batch: Batch) -> tuple[Batch, Episodes]:
    """The batch with a row an episode, its conversations side by side; and the way back to its rows.

    Each conversation is paid what the episode is worth, so only one of them keeps its reward.
    """
    episodes = Episodes.of(batch.episode, batch.mask)
    if batch.episode is None:
        return batch, episodes
    first = (episodes.place == 0)[:, None].expand_as(batch.mask)
    batch = replace(batch, reward=masked.fill(batch.reward, first), episode=None)
    columns: dict[str, Any] = {
        name: episodes.join(column) if column.ndim > 1 else episodes.first(column)
        for name in batch.__slots__
        if isinstance(column := getattr(batch, name), torch.Tensor)
    }
    return replace(batch, **columns), episodes


def better(batch: Batch) -> Pairs:
    """Which row is preferred to which: [i, j] where both answer the same question and i has more reward."""
    return preference.better(_worth(batch), batch.group, batch.mask.any(-1))


def by_group(batch: Batch) -> PerToken:
    """1/(groups · tokens of the group) on answers that are in a pair; 0 throughout where none is.

    Raises ValueError when no token is trained.
    """
    if not batch.everywhere.sum(batch.mask.sum()):
        raise ValueError("nothing to train on: no answer of this step has a trained token")
    pairs = better(batch)
    paired = batch.mask & (pairs | pairs.T).any(-1)[:, None]
    return reduce.per_group(paired, batch.group, batch.everywhere)


def at_tokens(each: PerRow, batch: Batch) -> PerToken:
    """A number of each row at each of its trained tokens."""
    return masked.fill(each[:, None].expand(batch.mask.shape), batch.mask)


def compared_means(reward: PerRow, batch: Batch, name: str) -> dict[str, PerToken]:
    """name/chosen, /rejected, /margin and /accuracy: means over each group's pairs, at each of its tokens."""
    h = _margins(reward)
    # A tie is half right: a model that says the same of every answer has an accuracy of one half.
    right = (h > 0).to(h) + 0.5 * (h == 0).to(h)
    return _over_pairs(_sides(reward, name) | {f"{name}/margin": h, f"{name}/accuracy": right}, batch)


def _over_pairs(named: Mapping[str, Float[torch.Tensor, "B B"]], batch: Batch) -> dict[str, PerToken]:
    pairs = better(batch)
    return {k: at_tokens(preference.over_pairs(v, pairs, batch.group), batch) for k, v in named.items()}


def _sides(each: PerRow, name: str) -> dict[str, Float[torch.Tensor, "B B"]]:
    """A number of each row, for every pair (i, j) of rows: that of i, chosen, and that of j, rejected."""
    n = len(each)
    return {f"{name}/chosen": each[:, None].expand(n, n), f"{name}/rejected": each[None, :].expand(n, n)}


def _margins(each: PerRow) -> Float[torch.Tensor, "B B"]:
    return each[:, None] - each[None, :]


def _worth(batch: Batch) -> PerRow:
    return returns.worth(batch.reward, batch.mask, like=batch.logp_gen)


def _is_probe(batch: Batch) -> Bool[torch.Tensor, "B"]:
    return ((batch.version == PROBE) & batch.mask).any(-1)
