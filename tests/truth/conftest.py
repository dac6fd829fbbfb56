"""A language model so small that every answer, and every group of two answers, can be written down.

Three tokens, answers of at most three of them, float64. Expectations are sums over all groups of
probability times gradient. Probabilities and true gradients come from transformers' own forward
pass; a group's gradient from the learner's `forward` and the method's own prepare, weight and loss.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.attention import use_layouts
from posttrain.learner.learner import Learner, forward
from posttrain.math import reduce
from posttrain.types import Batch, Method, Outputs, Trajectory

PROMPT = [2, 0]
LENGTH = 3
EOS = 1


def tiny(seed: int) -> LlamaForCausalLM:
    """A random Llama over three tokens, in float64 throughout."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=3,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).double().eval()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":  # which rounds to float32 on its way
                plain = nn.RMSNorm(8, eps=child.variance_epsilon, dtype=torch.float64)
                plain.weight.data.copy_(1 + 0.3 * torch.randn(8))
                setattr(module, name, plain)
    return model


class World:
    """All answers, their rewards, a policy and another one to compare it with."""

    def __init__(self, answers: Sequence[Sequence[int]], temperature: float) -> None:
        self.answers, self.temperature = [list(a) for a in answers], temperature
        g = torch.Generator().manual_seed(5)
        self.rewards = torch.randn(len(answers), generator=g, dtype=torch.float64)
        self.policy, self.other = tiny(0), tiny(1)
        self._plain = {id(m): copy.deepcopy(m) for m in (self.policy, self.other)}
        for model in (self.policy, self.other):
            use_layouts(model)
        self._scores: dict[bool, torch.Tensor] = {}
        self._spoken_logp: dict[int, torch.Tensor] = {}

    # --- the truth, by transformers' own forward pass

    def step_log_probs(self, model: nn.Module) -> torch.Tensor:
        """[N, LENGTH, 3]: log π(. | prompt and the answer's first t tokens)."""
        padded = [PROMPT + a + [0] * (LENGTH - len(a)) for a in self.answers]
        logits = self._plain[id(model)](input_ids=torch.tensor(padded)).logits
        return (logits[:, len(PROMPT) - 1 : -1] / self.temperature).log_softmax(-1)

    @property
    def spoken(self) -> torch.Tensor:
        """[N, LENGTH]: whether the answer has a token there."""
        return torch.tensor([[t < len(a) for t in range(LENGTH)] for a in self.answers])

    def token_logp(self, model: nn.Module) -> torch.Tensor:
        """[N, LENGTH]: log-probability of each token of each answer, 0 where there is none."""
        targets = torch.tensor([a + [0] * (LENGTH - len(a)) for a in self.answers])
        return self.step_log_probs(model).gather(-1, targets[..., None])[..., 0] * self.spoken

    def logp(self, model: nn.Module) -> torch.Tensor:
        """[N]: log-probability of each answer."""
        return self.token_logp(model).sum(-1)

    def gradient_of(self, value: torch.Tensor) -> torch.Tensor:
        """Of a number made from the policy's true probabilities, over all its parameters."""
        parameters = list(self._plain[id(self.policy)].parameters())
        found = torch.autograd.grad(value, parameters)
        return torch.cat([g.flatten() for g in found])

    def true_gradient(self) -> torch.Tensor:
        """∇J, J = Σ_y π(y) R(y)."""
        return self.gradient_of((self.logp(self.policy).exp() * self.rewards).sum())

    # --- what the code does

    def batch(self, *picked: int, group: Sequence[int] | None = None) -> Batch:
        """The rows of these answers, as one group, with rewards in float64."""
        rows = []
        for i in picked:
            n = len(self.answers[i])
            zeros, P = [0.0] * (len(PROMPT) + n), len(PROMPT)
            rows.append(
                Trajectory(
                    tokens=PROMPT + self.answers[i],
                    sampled=[False] * P + [True] * n,
                    logp_gen=zeros,
                    logp_policy=zeros,
                    version=[0] * (P + n),
                    reward=[*zeros[:-1], 1.0],
                )
            )
        batch = Batch.of(rows, group or [0] * len(rows))
        return replace(batch, reward=batch.reward.double() * self.rewards[list(picked), None])

    def pairs(self) -> list[tuple[int, int]]:
        """Every group of two, in order."""
        return list(itertools.product(range(len(self.answers)), repeat=2))

    def probabilities(self, model: nn.Module | None = None) -> torch.Tensor:
        """Of each group of two, drawn from the policy or from another model."""
        p = self.logp(model or self.policy).exp().detach()
        return (p[:, None] * p).flatten()

    def scores(self) -> tuple[torch.Tensor, torch.Tensor]:
        """([N, T, P], [N, T, P]): gradients of each token's log-probability and entropy, by the learner."""
        if not self._scores:
            out = forward(self.policy, self.batch(*range(len(self.answers))), self.temperature)
            parameters = list(self.policy.parameters())
            for which, values in ((False, out.logp), (True, out.entropy)):
                rows = []
                for v in values.flatten():
                    found = torch.autograd.grad(v, parameters, retain_graph=True)
                    rows.append(torch.cat([g.flatten() for g in found]))
                self._scores[which] = torch.stack(rows).view(*values.shape, -1)
            self._out = Outputs(logp=out.logp.detach(), entropy=out.entropy.detach())
        return self._scores[False], self._scores[True]

    def filled(self, method: Method, batch: Batch, picked: Sequence[int], old: bool) -> Batch:
        """The batch with the columns that the learner would fill, old from the other model if asked."""

        def column(model: nn.Module) -> torch.Tensor:
            if id(model) not in self._spoken_logp:
                self._spoken_logp[id(model)] = self.token_logp(model).detach()
            out = torch.zeros_like(batch.reward)
            part = self._spoken_logp[id(model)][list(picked)]
            out[:, len(PROMPT) :] = part[:, : out.shape[1] - len(PROMPT)]
            return out

        if old or "logp_old" in method.needs:
            batch = replace(batch, logp_old=column(self.other if old else self.policy))
        if "logp_ref" in method.needs:
            batch = replace(batch, logp_ref=column(self.other))
        return batch

    def group_gradients(
        self, method: Method, pairs: Sequence[tuple[int, int]] | None = None, *, old: bool = False
    ) -> torch.Tensor:
        """[groups, P]: the gradient that the method takes of every group of two, or of these."""
        d_logp, d_entropy = self.scores()
        out = []
        for picked in pairs or self.pairs():
            batch = method.prepare(self.filled(method, self.batch(*picked), picked, old))
            T = batch.mask.shape[1]
            whole = (self._out.logp, self._out.entropy)
            logp, entropy = (x[list(picked), :T].requires_grad_() for x in whole)
            loss = method.loss(Outputs(logp=logp, entropy=entropy), batch)
            total = reduce.weighted_sum(loss, method.weight(batch).to(logp), batch.mask)
            gl, ge = torch.autograd.grad(total, (logp, entropy), allow_unused=True, materialize_grads=True)
            g = torch.einsum("kt,ktp->p", gl, d_logp[list(picked), :T])
            out.append(g + torch.einsum("kt,ktp->p", ge, d_entropy[list(picked), :T]))
        return torch.stack(out)

    def expected(self, method: Method) -> torch.Tensor:
        """The exact expectation of the method's ascent direction over all groups of two."""
        return -(self.probabilities() @ self.group_gradients(method))

    def learner(self, method: Method) -> Callable[[Batch], torch.Tensor]:
        """batch -> the gradient with which Learner.update would move, which it is kept from doing."""
        learner = Learner(
            self.policy, method, reference=self.other, temperature=self.temperature, microbatch_tokens=4
        )
        taken = []

        def move(loss: float) -> float:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.policy.parameters()]
            taken.append(torch.cat([g.flatten() for g in grads]))
            learner.masters.zero_grad()
            return 0.0

        learner._move = move

        def gradient(batch: Batch) -> torch.Tensor:
            learner.update(batch)
            return taken.pop()

        return gradient


def fixed_length() -> list[list[int]]:
    """All 27 answers of three tokens."""
    return [list(a) for a in itertools.product(range(3), repeat=LENGTH)]


def ended() -> list[list[int]]:
    """All 15 answers that stop at the end token or after three tokens."""
    cut = {tuple(a[: a.index(EOS) + 1] if EOS in a else a) for a in fixed_length()}
    return [list(a) for a in sorted(cut)]


@pytest.fixture(scope="session")
def even() -> World:
    """Answers of one length."""
    return World(fixed_length(), temperature=1.0)


@pytest.fixture(scope="session")
def uneven() -> World:
    """Answers of one, two and three tokens, at a temperature other than 1."""
    return World(ended(), temperature=0.7)


@pytest.fixture(params=["even", "uneven"])
def world(request: pytest.FixtureRequest) -> World:
    """Each of the two worlds."""
    found: World = request.getfixturevalue(request.param)
    return found
