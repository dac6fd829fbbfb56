"""Fit rewards to comparisons on the language of tiny.py: a reward model's, and DPO's implicit one.

Both minimise -log σ(r_w - r_l) from the same reference, and stop where this loss is least on a fifth of the
pairs, which they do not train on. Neither is stopped by anything that a user would not see.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import logsigmoid
from transformers import LlamaForCausalLM

from posttrain.methods.build import build
from posttrain.types import Batch
from posttrain_study.claims.goodhart import EVERY
from posttrain_study.claims.tiny import (
    COUNT,
    LONGEST,
    QUESTIONS,
    Pairs,
    Table,
    Trainee,
    likelihoods,
)

SURE = 2.0
"""How much the log-odds of a judge rise with a unit of gold."""
PAIRS_A_STEP, KEPT_BACK = 64, 5
"""Pairs in a step, and one pair of how many is kept back."""
CHECKED, PATIENCE = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256), 3
"""Steps after which the loss on the pairs kept back is measured, and how often it may fail to fall."""


@dataclass(frozen=True)
class Fit:
    """A reward of every answer, and its model, where the loss on the pairs kept back was least."""

    reward: Table
    loss: float
    steps: int
    model: LlamaForCausalLM


def judged(pairs: Pairs, worth: Table, draw: torch.Generator) -> Pairs:
    """Prefer an answer to the other with probability σ(difference in worth)."""
    lots = torch.rand(len(pairs), generator=draw, dtype=torch.float64)
    return pairs.turned(lots > pairs.gap(worth).sigmoid())


def implicit_reward(
    model: LlamaForCausalLM, pairs: Pairs, beta: float, lr: float, seed: int, method: str = "dpo"
) -> Fit:
    """Return β log π/π_ref, the reward of a policy that DPO trains from the reference."""
    trainee, logp_ref = Trainee(model, build(method, {"beta": beta}, horizon=LONGEST), lr), likelihoods(model)
    batch = with_reference(trainee, trainable(pairs).batch())
    return fit(trainee, batch, pairs, lambda: beta * (likelihoods(trainee.model) - logp_ref), seed)


def reward_model(model: LlamaForCausalLM, pairs: Pairs, lr: float, seed: int) -> Fit:
    """Return the score of a reward model that is trained from the reference."""
    trainee = Trainee(model, build("reward", {}, horizon=LONGEST), lr)
    return fit(trainee, trainable(pairs).batch(marks=True), pairs, lambda: scores(trainee), seed)


def fit(trainee: Trainee, batch: Batch, pairs: Pairs, reward: Callable[[], Table], seed: int) -> Fit:
    """Train epoch after epoch, and return the fit of the least loss on the pairs kept back."""
    withheld = pairs.at(torch.arange(0, len(pairs), KEPT_BACK))
    draw, nothing = torch.Generator().manual_seed(seed), torch.zeros(QUESTIONS, COUNT).double()
    best = Fit(nothing, math.log(2), 0, copy.deepcopy(trainee.model))
    order, size, failures = torch.empty(0, dtype=torch.long), min(PAIRS_A_STEP, len(batch) // 2), 0
    for step in range(1, CHECKED[-1] + 1):
        if len(order) < size:
            order = torch.randperm(len(batch) // 2, generator=draw)
        part, order = order[:size], order[size:]
        trainee.step(batch.rows((2 * part[:, None] + torch.arange(2)).flatten()))
        if step in CHECKED:
            table = reward()
            loss = float(-logsigmoid(withheld.gap(table)).mean())
            failures += 1
            if loss < best.loss:
                best, failures = Fit(table, loss, step, copy.deepcopy(trainee.model)), 0
            if failures == PATIENCE:
                break
    return best


def trainable(pairs: Pairs) -> Pairs:
    """Return the pairs that are not kept back."""
    return pairs.at(torch.arange(len(pairs))[torch.arange(len(pairs)) % KEPT_BACK > 0])


@torch.no_grad()
def with_reference(trainee: Trainee, batch: Batch) -> Batch:
    """Return the batch with log π of the present weights as that of the reference."""
    return replace(batch, logp_ref=trainee.outputs(batch).logp)


@torch.no_grad()
def scores(trainee: Trainee) -> Table:
    """Return a reward model's score of every answer."""
    out = trainee.outputs(EVERY)
    assert out.value is not None
    return out.value[EVERY.mask].double().view(QUESTIONS, COUNT)
