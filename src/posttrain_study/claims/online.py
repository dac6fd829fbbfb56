"""Train a policy of the tiny language (tiny.py) on its own answers, and see what it is after each update.

The policy is a network of two layers and 2,400 weights that reads the question and the letters so far. It is
evaluated at every prefix at once, so log π of every answer, and with it the expected reward, is exact at each
update and costs less than sampling would. A step is the method's own prepare, weight and loss.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import nn
from torch.nn.functional import one_hot, pad

from posttrain.methods.build import build
from posttrain.types import Batch, Method, Outputs
from posttrain_study.claims.tiny import (
    END,
    LENGTH,
    LETTERS,
    LONGEST,
    QUESTIONS,
    SPELT,
    Table,
    Trainee,
    question,
)

HIDDEN = 64
ASKED = torch.tensor([question(x) for x in range(QUESTIONS)])
WRITTEN = torch.tensor([[*answer, *[0] * (LONGEST - len(answer))] for answer in SPELT])
"""Tokens of each answer, padded on the right, [COUNT, LONGEST]."""
TOKENS = torch.tensor([len(answer) for answer in SPELT])
"""Tokens of each answer, with the mark that ends it."""
IS_TOKEN = torch.arange(LONGEST) < TOKENS[:, None]
PREFIXES = torch.tensor(
    [
        [*answer[:n], *[END] * (LONGEST - n)]
        for n, answer in zip(LENGTH.tolist(), SPELT, strict=True)
        if n < LONGEST
    ]
)
"""Letters of each prefix, and END for those that are not written yet, [prefixes, LONGEST]."""
FEATURES = torch.cat(
    [
        one_hot(torch.arange(QUESTIONS), QUESTIONS)[:, None].expand(-1, len(PREFIXES), -1),
        one_hot(PREFIXES, LETTERS + 1).flatten(1)[None].expand(QUESTIONS, -1, -1),
    ],
    -1,
).float()
"""What the network reads at each prefix of each question."""
See = Callable[[int, Table], None]
"""Receives the number of updates made, and log π of every answer."""
After = Callable[["PrefixPolicy", Batch], None]
"""Receives the policy after an update, and the prepared rows that it was made of."""


def places(letters: torch.Tensor) -> torch.Tensor:
    """Return the index in PREFIXES of what comes before each token. letters: [rows, LONGEST]; padding is any.

    >>> places(torch.tensor([[0, 2, END, 0, 0, 0]]))[0, :3].tolist(), PREFIXES[[1, 6], :2].tolist()
    ([0, 1, 6], [[0, 3], [0, 2]])
    """
    code, start, before = torch.zeros(len(letters), dtype=torch.long), 0, []
    for n in range(LONGEST):
        before.append(start + code)
        code, start = code * LETTERS + letters[:, n].clamp(max=LETTERS - 1), start + LETTERS**n
    return torch.stack(before, 1)


BEFORE = places(WRITTEN)


class PrefixPolicy(Trainee):
    """Train a copy of a network by a method with AdamW, with a critic of its own if the method reads one."""

    def __init__(self, model: nn.Module, method: Method, lr: float) -> None:
        self.network, self.method, self.head = copy.deepcopy(model), method, None
        self.critic = layers(1) if "value" in method.needs else None
        self.weights = [p for part in (self.network, self.critic) if part for p in part.parameters()]
        self.optimiser = torch.optim.AdamW(self.weights, lr=lr, weight_decay=0.0, fused=True)

    def outputs(self, batch: Batch) -> Outputs:
        """Return log π and the entropy of each token, and the critic's value of the state before it."""
        letters, features = batch.tokens[:, 2:], FEATURES[states(batch)].to(self.weights[0])
        logp = self.network(features).log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        value = pad(self.critic(features)[..., 0], (2, 0)) if self.critic else None
        return Outputs(pad(logp.gather(-1, letters[..., None])[..., 0], (2, 0)), pad(entropy, (2, 0)), value)


def layers(outputs: int) -> nn.Sequential:
    """Return a network of two layers that reads FEATURES."""
    return nn.Sequential(nn.Linear(FEATURES.shape[-1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))


def states(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index in FEATURES of the state before each token of the answers, [rows, LONGEST]."""
    questions = batch.tokens[:, 0] * LETTERS + batch.tokens[:, 1]
    return questions[:, None], places(batch.tokens[:, 2:])


@torch.no_grad()
def log_probs(network: nn.Module) -> Table:
    """Return log π of every answer to every question."""
    return of_answers(network(FEATURES).double().log_softmax(-1))


def of_answers(logp: torch.Tensor) -> Table:
    """Return log π of every answer from log π of each letter after each prefix, [QUESTIONS, prefixes, 4]."""
    return torch.where(IS_TOKEN, logp[:, BEFORE, WRITTEN], 0.0).sum(-1)


def batch_of(questions: torch.Tensor, answers: torch.Tensor, worth: torch.Tensor) -> Batch:
    """Return groups of answers as a batch. questions: [groups]; answers and their worth: [groups, K]."""
    groups, size = answers.shape
    flat, place = answers.flatten(), torch.arange(2 + LONGEST)
    end = 2 + TOKENS[flat]
    reward = torch.zeros(len(flat), 2 + LONGEST, dtype=torch.float64)
    reward.scatter_(1, end[:, None] - 1, worth.flatten()[:, None].double())
    zeros = torch.zeros(reward.shape)
    return Batch(
        tokens=torch.cat([ASKED[questions].repeat_interleave(size, 0), WRITTEN[flat]], 1),
        mask=(place >= 2) & (place < end[:, None]),
        length=end,
        group=torch.arange(groups).repeat_interleave(size),
        reward=reward,
        logp_gen=zeros,
        logp_policy=zeros,
        version=torch.zeros(reward.shape, dtype=torch.long),
    )


def of_mixtures(draw: torch.Generator) -> Table:
    """Return log-probabilities of answers of any length with letters of a mixture that each question has."""
    mixture = torch.randn(QUESTIONS, LETTERS, generator=draw, dtype=torch.float64).log_softmax(-1)
    counts = one_hot(WRITTEN, LETTERS + 1) * IS_TOKEN[..., None]
    return mixture @ counts.sum(1)[:, :LETTERS].double().T - torch.log(torch.tensor(LONGEST + 1.0))


@cache
def reference(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a network that SFT taught to answer with letters of each question's mixture, at any length."""
    torch.manual_seed(seed)
    network = layers(LETTERS + 1).to(dtype)
    draw = torch.Generator().manual_seed(2000 + seed)
    logp = of_mixtures(draw)
    policy = PrefixPolicy(network, build("sft", {}, horizon=LONGEST), lr=0.01)
    for _ in range(100):
        answers = torch.multinomial(logp.exp(), 16, replacement=True, generator=draw)
        policy.step(batch_of(torch.arange(QUESTIONS), answers, torch.zeros(answers.shape)))
    return policy.network


@dataclass(frozen=True)
class Routine:
    """How many updates of how many answers, and in how many optimiser steps each is made."""

    updates: int
    groups: int = QUESTIONS
    """Groups an update. A multiple of the questions asks each equally often; fewer ask some."""
    size: int = 16
    """Answers to the question of a group."""
    lr: float = 1e-2
    epochs: int = 1
    minibatches: int = 1
    least: int = 0
    """Letters that an answer has at least: shorter ones are not sampled."""


def improve(
    start: nn.Module,
    method: Method,
    worth: Table | Callable[[torch.Generator], Table],
    plan: Routine,
    seed: int,
    see: See = lambda update, logp: None,
    *,
    after: After = lambda policy, batch: None,
    source: Table | None = None,
    refresh_every: int = 0,
) -> PrefixPolicy:
    """Train a copy of a network on answers that it samples, and return its trainee.

    worth: the reward of each answer, or a function that draws it for each update. The start is also the
    reference of a KL penalty. source: log-probabilities of the answers that are trained on, in place of the
    policy's own. refresh_every: updates between copies of the policy into the reference; 0: none. The
    generator depends on the seed alone.
    """
    policy, ref = PrefixPolicy(start, method, plan.lr), PrefixPolicy(start, method, plan.lr)
    chance = torch.Generator().manual_seed(5000 + seed)
    for update in range(plan.updates + 1):
        logp = log_probs(policy.network)
        see(update, logp)
        if update < plan.updates:
            rewards = worth(chance) if callable(worth) else worth
            rows = sample(logp if source is None else source, rewards, plan, chance)
            batch = prepared(policy, ref, rows, plan)
            for _ in range(plan.epochs):
                policy.epoch(batch, -(-plan.groups // plan.minibatches), chance)
            after(policy, batch)
            if refresh_every and (update + 1) % refresh_every == 0:
                ref.network.load_state_dict(policy.network.state_dict())
    return policy


@torch.no_grad()
def prepared(policy: Trainee, ref: Trainee, batch: Batch, plan: Routine) -> Batch:
    """Return the batch with log-probabilities where the method and the number of steps need them."""
    method = policy.method
    if "logp_ref" in method.needs:
        batch = replace(batch, logp_ref=ref.outputs(batch).logp)
    if plan.epochs * plan.minibatches > 1 or "logp_old" in method.needs:
        batch = replace(batch, logp_old=policy.outputs(batch).logp)
    if "value" in method.needs:
        batch = replace(batch, value=policy.outputs(batch).value)
    return method.prepare(batch)


def sample(logp: Table, worth: Table, plan: Routine, chance: torch.Generator) -> Batch:
    """Sample the groups of an update. Every question is asked once, in random order, before one is again."""
    rounds = -(-plan.groups // QUESTIONS)
    order = torch.cat([torch.randperm(QUESTIONS, generator=chance) for _ in range(rounds)])[: plan.groups]
    p = logp.exp().masked_fill(plan.least > LENGTH, 0.0)
    answers = torch.multinomial(p[order], plan.size, replacement=True, generator=chance)
    return batch_of(order, answers, worth[order[:, None], answers])


def entropy_of(logp: Table) -> float:
    """Return the entropy of the policy over whole answers in nats, the mean over questions."""
    return float(-(logp.exp() * logp).sum(1).mean())


def best_answers(logp: Table, gold: Table, share: float) -> Table:
    """Return 1 for the answers of most gold that have this share of the probability or just above, else 0."""
    order = gold.argsort(1, descending=True)
    p = logp.exp().gather(1, order)
    return torch.zeros_like(gold).scatter(1, order, (p.cumsum(1) - p < share).double())
