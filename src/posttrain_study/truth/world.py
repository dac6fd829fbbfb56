"""Language models so small that every answer, and every group of answers, can be enumerated.

Two or three tokens, answers of at most three tokens, float64. The expectation of an estimator is a sum
over all groups of answers: probability times gradient. The probabilities, and the truth in exact.py, come
from transformers' own forward pass; the gradient of a group comes from the learner's `forward` and from the
method's own prepare, weight and loss. Nothing is sampled, so every difference is a bias.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int

from posttrain.batch import Divergence
from posttrain.learner.forward import Net, forward, states_of_teacher
from posttrain.learner.pack import Pack
from posttrain.math import reduce
from posttrain.math.tokens import Against
from posttrain.models.attention import output_head
from posttrain.types import Batch, Method, Outputs, PerToken, Trajectory
from posttrain_study.truth.answers import Group, bounded_length, fixed_length, group_chances
from posttrain_study.truth.policy import Policy, tiny


@dataclass(frozen=True)
class Estimate:
    """The mean of an estimator, and its variance."""

    mean: Float[torch.Tensor, "P"]
    """E[g], g being the direction in which the method would move after one group."""
    variance: float
    """Trace of g's covariance, times the answers in a group: the contribution of one answer."""


class World:
    """All answers to one prompt, their rewards, and three policies.

    `policy` is trained, `old` may have drawn the answers, and `reference` is the reference of the KL.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        *,
        prompt: Sequence[int],
        temperature: float,
        rewards: Float[torch.Tensor, "N"],
        policies: tuple[Policy, Policy, Policy],
    ) -> None:
        self.answers, self.prompt = [list(a) for a in answers], list(prompt)
        self.temperature = temperature
        self.length = max(map(len, answers))
        self.policy, self.old, self.reference = policies
        self.mask: Bool[torch.Tensor, "N L"] = torch.tensor(
            [[t < len(a) for t in range(self.length)] for a in answers]
        )
        self.tokens: Int[torch.Tensor, "N L"] = torch.tensor(
            [a + [0] * (self.length - len(a)) for a in self.answers]
        )
        self.reward: Float[torch.Tensor, "N L"] = self._at_the_end(rewards.double())
        self._logp: dict[Policy, PerToken] = {}
        self._greedy: dict[Policy, int] = {}
        self._scores: list[torch.Tensor] = []
        self._divergences: dict[tuple[Policy, str], tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: list[Batch] = []

    def with_rewards(self, reward: torch.Tensor) -> "World":
        """Return this world with other rewards: one an answer, paid with its last token, or one a token."""
        other = copy.copy(self)
        if reward.ndim == 1:
            reward = self._at_the_end(reward.double())
        other.reward = reward.double()
        return other

    def _at_the_end(self, values: Float[torch.Tensor, "N"]) -> Float[torch.Tensor, "N L"]:
        last = self.mask.sum(1) - 1
        return torch.zeros(self.mask.shape, dtype=torch.float64).scatter(1, last[:, None], values[:, None])

    def with_policy(self, policy: Policy) -> "World":
        """Return this world after an update from its policy, which becomes `old`, to this one."""
        other = copy.copy(self)
        other.policy, other.old, other._scores = policy, self.policy, []
        return other

    @property
    def returns(self) -> Float[torch.Tensor, "N"]:
        """R(y) of each answer."""
        return self.reward.sum(1)

    # --- probabilities, by transformers' own forward pass

    def step_log_probs(self, policy: Policy) -> Float[torch.Tensor, "N L V"]:
        """log π(· | prompt and the answer's first t tokens)."""
        prompt = torch.tensor(self.prompt).expand(len(self.answers), -1)
        logits: torch.Tensor = policy.plain(input_ids=torch.cat([prompt, self.tokens], 1)).logits
        return (logits[:, len(self.prompt) - 1 : -1] / self.temperature).log_softmax(-1)

    def token_logp(self, policy: Policy) -> Float[torch.Tensor, "N L"]:
        """Log-probability of each token of each answer, 0 after its end."""
        return self.pick_tokens(self.step_log_probs(policy))

    def pick_tokens(self, step: Float[torch.Tensor, "N L V"]) -> Float[torch.Tensor, "N L"]:
        """Return the entry of the token that each answer has there, 0 after its end."""
        return step.gather(-1, self.tokens[..., None])[..., 0] * self.mask

    def logp(self, policy: Policy) -> Float[torch.Tensor, "N"]:
        """Log-probability of each answer."""
        return self.token_logp(policy).sum(-1)

    @torch.no_grad()
    def score_norm(self, policy: Policy) -> Float[torch.Tensor, "N L"]:
        """Return Σ_v (1[v = y] - π(v))² of each token y, from the whole distribution; 0 after the end."""
        probabilities = self.step_log_probs(policy).exp()
        one_hot = torch.nn.functional.one_hot(self.tokens, probabilities.shape[-1])
        return (one_hot - probabilities).square().sum(-1) * self.mask

    def cached_logp(self, policy: Policy) -> Float[torch.Tensor, "N L"]:
        """token_logp without a gradient, computed once for each policy."""
        if policy not in self._logp:
            with torch.no_grad():
                self._logp[policy] = self.token_logp(policy)
        return self._logp[policy]

    @property
    def greedy(self) -> int:
        """Number of the answer that has the policy's likeliest token at each place."""
        if self.policy not in self._greedy:
            with torch.no_grad():
                step, rows = self.step_log_probs(self.policy), list(range(len(self.answers)))
            for t in range(self.length):
                if self.mask[rows[0], t]:
                    token = int(step[rows[0], t].argmax())
                    rows = [i for i in rows if self.mask[i, t] and self.tokens[i, t] == token]
            self._greedy[self.policy] = rows[0]
        return self._greedy[self.policy]

    def groups(self, size: int) -> list[Group]:
        """Return every group of this size; order does not matter, so each multiset is listed once."""
        return list(itertools.combinations_with_replacement(range(len(self.answers)), size))

    def probabilities(self, size: int, policy: Policy | None = None) -> Float[torch.Tensor, "G"]:
        """Probability of each group, drawn from the policy or from another one."""
        p = self.cached_logp(policy or self.policy).sum(1).exp()
        return group_chances(p, self.groups(size))

    # --- gradients, by the learner's own code

    def batch(self, group: Group, sampler: Policy | None = None) -> Batch:
        """Return the rows of these answers as one group, as a sampler with this policy would return them.

        In float64, where a sampler has float32.
        """
        if not self._rows:
            everything = [Trajectory.given(self.prompt + a, len(self.prompt)) for a in self.answers]
            self._rows.append(Batch.of(everything, [0] * len(everything)))
        generated = self.column(self.cached_logp(sampler or self.policy), group)
        return replace(
            self._rows[0].rows(torch.tensor(group)),
            reward=self.column(self.reward, group),
            logp_gen=generated,
            logp_policy=generated,
            greedy=self.returns[self.greedy].expand(generated.shape),
        )

    def column(self, values: Float[torch.Tensor, "N L"], group: Group) -> PerToken:
        """Return these numbers as a column of the group's batch."""
        rows = values[torch.tensor(group)]
        return torch.cat([rows.new_zeros(len(group), len(self.prompt)), rows], 1)

    def scores(self) -> tuple[Float[torch.Tensor, "N L P"], Float[torch.Tensor, "N L P"]]:
        """Gradients of each token's log-probability and of its entropy, by the learner's forward."""
        if not self._scores:
            start, everything = len(self.prompt), tuple(range(len(self.answers)))
            out = forward(Net(self.policy.model), self.batch(everything), self.temperature)
            columns = out.logp[:, start:], out.entropy[:, start:]
            self._scores += map(self._gradients, columns)
            self._scores += [column.detach() for column in columns]
        return self._scores[0], self._scores[1]

    def divergences(self, divergence: Divergence) -> tuple[Float[torch.Tensor, "N L"], torch.Tensor]:
        """Return each token's divergence from the reference, and its gradients, by the learner's forward."""
        key = self.policy, repr(divergence)
        if key not in self._divergences:
            teacher = Net(self.reference.model)

            def compare(packed: Pack, batch: Batch) -> list[Against]:
                hidden = states_of_teacher(teacher, packed, batch)
                return [Against(hidden, output_head(teacher.policy), divergence)]

            everything = self.batch(tuple(range(len(self.answers))))
            out = forward(Net(self.policy.model), everything, self.temperature, compare)
            assert out.divergence is not None
            column = out.divergence[:, len(self.prompt) :]
            self._divergences[key] = column.detach(), self._gradients(column)
        return self._divergences[key]

    def _gradients(self, values: Float[torch.Tensor, "N L"]) -> Float[torch.Tensor, "N L P"]:
        """Return the gradient of each number by the policy's parameters."""
        parameters = list(self.policy.model.parameters())
        gradients = torch.zeros(*values.shape, sum(p.numel() for p in parameters), dtype=torch.float64)
        for i, t in self.mask.nonzero().tolist():
            one = torch.autograd.grad(values[i, t], parameters, retain_graph=True)
            gradients[i, t] = torch.cat([g.flatten() for g in one])
        return gradients

    def group_gradients(
        self,
        method: Method,
        groups: Sequence[Group],
        *,
        sampler: Policy | None = None,
        anchor: Policy | None = None,
        value: Float[torch.Tensor, "N L"] | None = None,
        state: Mapping[str, float] | None = None,
    ) -> Float[torch.Tensor, "G P"]:
        """Return the gradient of the method's loss over each group, in the policy's parameters.

        `sampler` has drawn the answers (default: the policy), `anchor` is the denominator of the ratio
        (default: the sampler), `value` is the critic's value before each token, and `state` the method's
        state after the last update (default: its start). A critic's own gradient is not included.
        """
        d_logp, d_entropy = self.scores()
        columns, slopes = [*self._scores[2:]], [d_logp, d_entropy]
        if method.compare is not None:
            for values, one in zip((columns, slopes), self.divergences(method.compare), strict=True):
                values.append(one)
        out = []
        for group in groups:
            batch = method.prepare(
                self.fill_batch(method, group, sampler=sampler, anchor=anchor, value=value, state=state)
            )
            leaves = [self.column(x, group).requires_grad_() for x in columns]
            logp, entropy, *compared = leaves
            loss = method.loss(Outputs(logp, entropy, batch.value, *compared), batch)
            total = reduce.weighted_sum(loss, method.weight(batch), batch.mask)
            gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
            terms = [
                torch.einsum("kt,ktp->p", gradient[:, len(self.prompt) :], slope[list(group)])
                for gradient, slope in zip(gradients, slopes, strict=True)
            ]
            out.append(torch.stack(terms).sum(0))
        return torch.stack(out)

    def fill_batch(
        self,
        method: Method,
        group: Group,
        *,
        sampler: Policy | None = None,
        anchor: Policy | None = None,
        value: Float[torch.Tensor, "N L"] | None = None,
        state: Mapping[str, float] | None = None,
    ) -> Batch:
        """Return the group's batch with the columns that the learner fills before prepare.

        All draws of a filter are 0: what it may drop, it drops.
        """
        batch = self.batch(group, sampler)

        def column(policy: Policy) -> PerToken:
            return self.column(self.cached_logp(policy), group)

        if sampler or anchor or "logp_old" in method.needs:
            batch = replace(batch, logp_old=column(anchor or sampler or self.policy))
        if "logp_ref" in method.needs:
            batch = replace(batch, logp_ref=column(self.reference))
        if "states" in method.asks:  # an answer is one turn, which begins in the prompt
            starts = torch.arange(batch.tokens.shape[1]) == len(self.prompt)
            batch = replace(batch, turn_state=starts.long().expand_as(batch.tokens))
        if "value" in method.needs:
            assert value is not None, "the method has a critic, and nothing says what it values"
            batch = replace(batch, value=self.column(value, group))
        if "entropy" in method.needs:
            self.scores()
            batch = replace(batch, entropy=self.column(self._scores[3], group))
        if "score_norm" in method.needs:
            policy = anchor or sampler or self.policy
            batch = replace(batch, score_norm=self.column(self.score_norm(policy), group))
        if "uniform" in method.needs:
            batch = replace(batch, uniform=torch.zeros_like(batch.logp_gen))
        return replace(batch, state=method.start if state is None else state)

    def estimate(
        self,
        method: Method,
        size: int = 2,
        *,
        sampler: Policy | None = None,
        anchor: Policy | None = None,
        value: Float[torch.Tensor, "N L"] | None = None,
    ) -> Estimate:
        """Return the exact mean and variance of the direction that the method takes after one group."""
        p = self.probabilities(size, sampler)
        g = -self.group_gradients(method, self.groups(size), sampler=sampler, anchor=anchor, value=value)
        mean = p @ g
        return Estimate(mean, float(p @ (g - mean).square().sum(1)) * size)


def even() -> World:
    """Return a world with 27 answers of three tokens."""
    return _world(fixed_length(3, 3), temperature=1.0)


def uneven() -> World:
    """Return a world with 15 answers of one to three tokens, at a temperature other than 1."""
    return _world(bounded_length(3, 3), temperature=0.7)


def short() -> World:
    """Return a world with 4 answers of one to three tokens and rewards as a verifier gives them.

    It is small enough for groups of many answers.
    """
    world = _world(bounded_length(2, 3), temperature=2.0, vocabulary=2, width=4, layers=1)
    return world.with_rewards(torch.tensor([1.0, 0.2, 0.5, 0.0]))


def _world(answers: list[list[int]], temperature: float, vocabulary: int = 3, **size: int) -> World:
    g = torch.Generator().manual_seed(5)
    first, second, third = (tiny(seed, vocabulary=vocabulary, **size) for seed in range(3))
    return World(
        answers,
        prompt=[vocabulary - 1, 0],
        temperature=temperature,
        rewards=torch.randn(len(answers), generator=g, dtype=torch.float64),
        policies=(first, second, third),
    )
