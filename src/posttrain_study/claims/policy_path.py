"""Train a policy of tiny.py with GRPO on a table of rewards, and follow exact expectations on the way."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from transformers import LlamaForCausalLM

from posttrain.methods.build import build
from posttrain_study.claims.tiny import (
    LONGEST,
    Table,
    Trainee,
    kl_of,
    likelihoods,
    mean_of,
    sampled_batch,
)

ANSWERS, LR = 16, 3e-3
Path = dict[str, list[float]]
"""Values before each update and after the last, by name."""


def follow(
    model: LlamaForCausalLM,
    rewards: Table,
    tables: Mapping[str, Table],
    *,
    seed: int,
    updates: int,
    kl_weight: float = 0.0,
) -> Path:
    """Train a copy of the model, and return E[table] of each table and "kl", KL(π ‖ π_ref) in nats.

    An update has ANSWERS answers to each question, sampled from the policy, and makes one step of AdamW.
    kl_weight: of the KL penalty in the loss.
    """
    trainee = Trainee(model, build("grpo", {"kl_in_loss": kl_weight}, horizon=LONGEST), LR)
    reference, logp_ref = Trainee(model, trainee.method, LR), likelihoods(model)
    draw, path = torch.Generator().manual_seed(5000 + seed), {name: list[float]() for name in (*tables, "kl")}
    for update in range(updates + 1):
        logp = likelihoods(trainee.model)
        for name, values in tables.items():
            path[name].append(mean_of(values, logp))
        path["kl"].append(kl_of(logp, logp_ref))
        if update < updates:
            improve(trainee, reference if kl_weight else None, logp, rewards, draw)
    return path


def improve(
    trainee: Trainee, reference: Trainee | None, logp: Table, rewards: Table, draw: torch.Generator
) -> torch.Tensor:
    """Make one step on ANSWERS answers to each question, drawn from the policy, and return the answers.

    reference: what a KL penalty in the loss compares with; None without one. logp: log π of each answer.
    """
    samples = torch.multinomial(logp.exp(), ANSWERS, replacement=True, generator=draw)
    batch = sampled_batch(samples, rewards)
    if reference:
        with torch.no_grad():
            batch = replace(batch, logp_ref=reference.outputs(batch).logp)
    trainee.step(trainee.method.prepare(batch))
    return samples
