"""Every method on one small task with equal samples: what each learns, by one command.

The task is that of ppo_clipping.py: a Llama of 12,000 weights is shown one of 8 letters and is to answer with
the 4 letters that belong to it; the reward is the share of letters that are right, and chance is 1/24, as the
vocabulary has 16 letters and 8 tasks. An update has 8 answers to each of the 8 tasks, and a run 80 updates.
Methods that sample draw them from the policy. Those that learn from judged answers are given as many of the
untrained model's. Imitation is given right answers, and a teacher is a model that imitated them. Each
method's learning rate is the better of two on two seeds of their own; all else is the method's default. Two
minibatches an update, except for trust regions and es.

    python benchmarks/all_methods.py --seeds 3 --jobs 2 --out X.json
"""

import argparse
import copy
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ppo_clipping import LENGTH, LETTERS, ROWS, TASKS, as_batch, sampled, tiny
from transformers import LlamaForCausalLM

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.learner.trust_region import Trust
from posttrain.methods.build import build
from posttrain.methods.evolution import Evolution
from posttrain.methods.policy_gradient import RewardPart
from posttrain.methods.table import METHODS, Line
from posttrain.process.machine import configure
from posttrain.types import PROBE, Batch, Method

UPDATES = 80
RATES = (3e-3, 1e-2)
TUNED_ON = (1000, 1001)
"""Seeds on which the learning rates are compared."""
OPTIONS: dict[str, dict[str, Any]] = {"expert_iteration": {"accept": 0.25}, "es": {"sigma": 0.03}}
"""Rewards here are shares, and the weights few and large."""
ES_RATES = (4.5e-4, 1.5e-3)
"""The paper's step along the noise, lr/σ = σ/2, and three times as much."""
KL_OF_RATE = 10.0
"""Bound of a trust region in nats by learning rate: 0.03 and 0.1."""
PARTS = tuple(RewardPart("", str(n), 1.0) for n in range(LENGTH))
"""Each letter, for a credit that compares parts of the reward."""
LEFT_OUT = {
    "pretrain": "learns from text",
    "gigpo": "compares turns, and an answer here is one",
} | {name: "is a reward model" for name, line in METHODS.items() if "head" in line.method.needs}
MEASURED = [name for name in METHODS if name not in LEFT_OUT]


def main() -> None:
    """Run every method and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", choices=MEASURED)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = options.only or MEASURED
    print("| method | learns from | lr | reward at the end (each seed) | of all updates | seconds |")
    print("|---|---|---|---|---|---|")
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(options.jobs, initializer=partial(configure, 1)) as pool:
        for name, result in zip(names, pool.map(partial(measure, seeds=options.seeds), names), strict=True):
            results[name] = result
            ends = [statistics.fmean(rewards[-10:]) for rewards in result["rewards"]]
            mean = statistics.fmean(map(statistics.fmean, result["rewards"]))
            seeds, line = ", ".join(f"{end:.2f}" for end in ends), METHODS[name]
            is_trust = line.step == "trust_region"
            rate = f"{result['lr'] * KL_OF_RATE:g} nats" if is_trust else f"{result['lr']:g}"
            cells = [name, data_of(line), rate, f"{statistics.fmean(ends):.2f} ({seeds})"]
            print(f"| {' | '.join(cells)} | {mean:.2f} | {result['seconds']:.1f} |", flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


def data_of(line: Line) -> str:
    """Return what a method learns from."""
    if "teacher" in line.method.asks:
        return "a teacher"
    if line.loop == "online":
        return "its own answers"
    imitates = line.learns == "answers" and "value" not in line.method.needs
    return "right answers" if imitates else "judged answers"


def measure(name: str, seeds: int) -> dict[str, Any]:
    """Choose the learning rate of a method, and run it with every seed."""
    rates = ES_RATES if name == "es" else RATES
    ends = {lr: statistics.fmean(x for seed in TUNED_ON for x in run(name, seed, lr)[-10:]) for lr in rates}
    lr = max(ends, key=lambda rate: ends[rate])
    begin = time.perf_counter()
    rewards = [run(name, seed, lr) for seed in range(seeds)]
    return {"lr": lr, "tuned": ends, "rewards": rewards, "seconds": (time.perf_counter() - begin) / seeds}


def run(name: str, seed: int, lr: float) -> list[float]:
    """Return the mean reward of the policy's answers before each update."""
    line, model, draw = METHODS[name], tiny(seed), torch.Generator().manual_seed(seed)
    target = torch.randint(LETTERS, (TASKS, LENGTH), generator=torch.Generator().manual_seed(1000 + seed))
    parts = PARTS if name == "gdpo" else ()
    method = build(name, OPTIONS.get(name, {}), horizon=LENGTH, parts=parts)
    learner = build_learner(line, method, model, target, seed, lr)
    start, prompts, rewards = copy.deepcopy(model), torch.arange(ROWS) % TASKS, list[float]()
    for _ in range(UPDATES):
        answers, logp = sampled(model, prompts, draw)
        rewards.append(float(letter_rewards(prompts, answers, target).sum(1).mean()))
        if isinstance(method, Evolution):
            batch = make_population_batch(learner, model, target, draw)
        elif line.loop == "online":
            batch = make_batch(prompts, answers, logp, target)
        elif data_of(line) == "judged answers":
            batch = make_batch(prompts, *sampled(start, prompts, draw), target)
        else:
            batch = make_batch(prompts, target[prompts], torch.zeros(ROWS, LENGTH), target)
        if getattr(method, "asks_greedy", False):
            likeliest, _ = sampled(model, torch.arange(TASKS), None)
            R = letter_rewards(torch.arange(TASKS), likeliest, target).sum(1)[prompts]
            batch = replace(batch, greedy=R.double()[:, None].expand(batch.mask.shape))
        if parts:
            batch = replace(batch, parts=letter_rewards(prompts, answers, target).double())
        if method.probes:
            batch = add_probes(batch)
        learner.update(replace(batch, version=mark_versions(batch, learner.update_count)))
    return rewards


def build_learner(
    line: Line, method: Method, model: LlamaForCausalLM, target: torch.Tensor, seed: int, lr: float
) -> Learner:
    """Return the learner of a method, with the models that it needs next to the policy."""
    reads_reference = "logp_ref" in method.needs or method.compare
    reference = None
    if reads_reference:
        reference = train_teacher(target, seed) if "teacher" in method.asks else copy.deepcopy(model)
    single_step = line.step != "adamw"
    return Learner(
        model,
        method,
        critic=CriticModel(model) if "value" in method.needs else None,
        reference=reference,
        optim=Optim(lr=lr),
        critic_optim=Optim(lr=lr),
        trust=Trust(max_kl=lr * KL_OF_RATE) if line.step == "trust_region" else None,
        steps=Steps(minibatches=1 if single_step else 2),
        seed=seed,
    )


def train_teacher(target: torch.Tensor, seed: int) -> LlamaForCausalLM:
    """Return a model that imitated the right answers."""
    model, prompts = tiny(seed + 500), torch.arange(ROWS) % TASKS
    learner = Learner(model, build("sft", {}, horizon=LENGTH), optim=Optim(lr=1e-2))
    for _ in range(60):
        learner.update(make_batch(prompts, target[prompts], torch.zeros(ROWS, LENGTH), target))
    # Attention through layouts is of the learner's model alone.
    copied = LlamaForCausalLM(tiny(0).config)
    copied.load_state_dict(model.state_dict())
    return copied


def letter_rewards(prompts: torch.Tensor, answers: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return what each letter is paid."""
    return (answers == target[prompts]).float() / LENGTH


def make_batch(
    prompts: torch.Tensor, answers: torch.Tensor, logp: torch.Tensor, target: torch.Tensor
) -> Batch:
    """Return the rows of an update, the answers to a task as one group."""
    return replace(as_batch(prompts, answers, logp, letter_rewards(prompts, answers, target)), group=prompts)


def make_population_batch(
    learner: Learner, model: LlamaForCausalLM, target: torch.Tensor, draw: torch.Generator
) -> Batch:
    """Return an answer of each perturbed policy to each task."""
    tasks, members = torch.arange(TASKS), ROWS // TASKS
    samples = []
    assert learner.population is not None
    for member in range(members):
        with learner.population.member(learner.update_count, member):
            samples.append(sampled(model, tasks, copy.deepcopy(draw)))  # the same draws for all members
    answers, logp = (torch.cat(column) for column in zip(*samples, strict=True))
    batch = make_batch(tasks.repeat(members), answers, logp, target)
    return replace(batch, member=torch.arange(members).repeat_interleave(TASKS))


def add_probes(batch: Batch) -> Batch:
    """Return the rows, and each prompt again with the answer to another task."""
    probes = batch.rows(torch.arange(len(batch)))
    tokens = probes.tokens.clone()
    tokens[:, 2:] = tokens.roll(1, 0)[:, 2:]
    probes = replace(probes, tokens=tokens, version=torch.full_like(batch.version, PROBE))
    both = {field.name: [getattr(rows, field.name) for rows in (batch, probes)] for field in fields(Batch)}
    columns = {name: torch.cat(pair) for name, pair in both.items() if isinstance(pair[0], torch.Tensor)}
    return replace(batch, **columns)  # type: ignore[arg-type]


def mark_versions(batch: Batch, update: int) -> torch.Tensor:
    """Return the version of the weights that drew each token."""
    return torch.where(batch.version == PROBE, batch.version, torch.full_like(batch.version, update))


if __name__ == "__main__":
    main()
