"""DPO on pairs of the start, in rounds and online, against GRPO, on chains of additions.

The chains and the table of 1000 logits are those of process_outcome.py. An answer is right if its last sum
is. DPO compares each right answer with each wrong one to the same question. Every method sees 200 x 128
answers, in groups of 8, and makes 200 steps of Adam:

    DPO            all answers are sampled from the start, which is the reference
    DPO, 4 rounds  50 steps each: sampler and reference are the policy at the start of the round
    online DPO     each step on new answers of the policy; the start is the reference
    GRPO           the same without a reference

One more case makes 800 steps of DPO on the answers of the start. Three starts have about 1, 4 and 13 % of
sound answers, in which every sum is right; the first is right hardly more often than by chance, so that it
has to find most additions. Each method has one rate and one β for all starts, chosen on seeds 100 to 102.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from posttrain.math import reduce
from posttrain.methods.build import build
from posttrain.types import Batch, Outputs
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    curve,
    markdown,
    spread,
)
from posttrain_study.claims.process_outcome import HELD_OUT, LONGEST, ChainPolicy, chains, outcome

GROUPS, SIZE, UPDATES, EVERY, EPOCHS = 16, 8, 200, 10, 4
STARTS = {"1 %": 2.0, "4 %": 2.75, "13 %": 3.5}
"""Share of sound answers: by how much the start prefers right sums, in nats of their logits."""
HARD = "1 %"


@dataclass(frozen=True)
class TrainingCase:
    """A method, its rate and its β."""

    method: str
    lr: float
    beta: float = 0.0
    fresh: int = UPDATES
    """Updates between two samplers; 1: each update has answers of the policy that it trains."""
    epochs: int = 1
    """Passes over the answers between two samplers."""


CASES = {
    "DPO": TrainingCase("dpo", 0.1, 0.03),
    "DPO, 4 epochs": TrainingCase("dpo", 0.03, 0.03, epochs=EPOCHS),
    "DPO, 4 rounds": TrainingCase("dpo", 0.1, 0.03, fresh=UPDATES // 4),
    "online DPO": TrainingCase("dpo", 0.1, 0.1, fresh=1),
    "GRPO": TrainingCase("grpo", 0.1, fresh=1),
}


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train from both starts by every method."""
    curves: Figures = {}
    for start in STARTS:
        for name, case in CASES.items():
            report(f"preferences_on_reasoning, seed {seed}, {start}, {name}")
            curves[f"{name}, {start}"] = train(case, STARTS[start], seed)
    return curves


def train(case: TrainingCase, skill: float, seed: int) -> dict[str, list[float]]:
    """Train by a method, and return the chances that held-out chains are answered right, and soundly."""
    method = build(case.method, {"beta": case.beta} if case.beta else {}, horizon=LONGEST - 1)
    policy, reference = ChainPolicy(seed, method, case.lr, skill), ChainPolicy(seed, method, case.lr, skill)
    draw = torch.Generator().manual_seed(seed + 1000)
    held_out = chains(HELD_OUT, torch.Generator().manual_seed(seed + 2000))
    batches: list[Batch] = []
    curves: dict[str, list[float]] = {"update": [], "right": [], "sound": []}
    for update in range(UPDATES * case.epochs + 1):
        if update % (EVERY * case.epochs) == 0:
            right, sound = policy.chances(held_out)
            for key, value in (("update", update), ("right", right), ("sound", sound)):
                curves[key].append(value)
        if update < UPDATES:
            if case.fresh == 1:
                batches.append(sampled(policy, reference, draw))
            else:
                if update % case.fresh == 0:
                    reference.logits = torch.nn.Parameter(policy.logits.detach().clone())
                batches.append(sampled(reference, reference, draw))
        step(policy, batches[update % UPDATES])
    return curves


def sampled(sampler: ChainPolicy, reference: ChainPolicy, draw: torch.Generator) -> Batch:
    """Return groups of a policy's answers, paid for a right last sum."""
    questions = chains(GROUPS, draw).repeat_interleave(SIZE, 0)
    answers = sampler.answers(questions, draw)
    tokens, before = torch.cat([questions, answers], 1), (LONGEST + 1, 0)
    with torch.no_grad():
        logp, logp_ref = sampler.logp(tokens), reference.logp(tokens)
    return Batch(
        tokens=tokens,
        mask=pad(torch.ones_like(answers, dtype=torch.bool), before),
        length=torch.full((len(tokens),), tokens.shape[1]),
        group=torch.arange(len(tokens)) // SIZE,
        reward=pad(outcome(questions, answers), before),
        logp_gen=logp,
        logp_policy=logp,
        version=torch.zeros_like(tokens),
        logp_ref=logp_ref,
    )


def step(policy: ChainPolicy, batch: Batch) -> None:
    """Make a step of the policy's method and optimiser."""
    method, batch = policy.method, policy.method.prepare(batch)
    logp = policy.logp(batch.tokens)
    losses = method.loss(Outputs(logp=logp, entropy=torch.zeros_like(logp)), batch)
    loss = reduce.weighted_sum(losses, method.weight(batch), batch.mask)
    policy.optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    policy.optimiser.step()


# ---------------------------------------------------------------------- what the claims say


def end(figures: Figures, case: str, key: str = "sound", start: str = HARD) -> float:
    """Return a share of the answers at the end of a case."""
    return float(figures[f"{case}, {start}"][key][-1])


def narrowed(figures: Figures) -> float:
    """Return what online DPO gains over DPO, less a third of what GRPO gains over it."""
    offline = end(figures, "DPO")
    return end(figures, "online DPO") - offline - (end(figures, "GRPO") - offline) / 3


RULES = {
    "preferences_on_reasoning": VerdictRule(
        "share of sound answers at the end, GRPO minus DPO, from the start with 1 %",
        lambda figures: end(figures, "GRPO") - end(figures, "DPO"),
        0.05,
    ),
    "online_dpo_gap": VerdictRule(
        "sound answers at the end, from the start with 1 %, online DPO − DPO less a third of GRPO − DPO",
        narrowed,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return mean and range over seeds of both shares at the end, from each start."""
    runs = results.runs
    columns = [(start, key) for start in STARTS for key in ("right", "sound")]
    rows = [
        [
            "the start",
            *(spread([run[f"GRPO, {start}"][key][0] for run in runs], ".1%") for start, key in columns),
        ]
    ]
    for case in CASES:
        rows.append(
            [case, *(spread([end(run, case, key, start) for run in runs], ".1%") for start, key in columns)]
        )
    return markdown(("method", *(f"{key}, from {start}" for start, key in columns)), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the share of sound answers by update, a panel for each start."""
    panels = figure.subplots(1, len(STARTS), sharey=True)
    for axes, start in zip(panels, STARTS, strict=True):
        for n, (name, case) in enumerate(CASES.items()):
            runs = [run[f"{name}, {start}"] for run in results.runs]
            answers = [update / case.epochs * GROUPS * SIZE for update in runs[0]["update"]]
            curve(axes, answers, [run["sound"] for run in runs], name, f"C{n}")
        axes.set(title=f"start: {start} sound", xlabel="answers", ylim=(0, 1))
    panels[0].set_ylabel("share of sound answers")
    panels[-1].legend(frameon=False, loc="lower right")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 4.0))
