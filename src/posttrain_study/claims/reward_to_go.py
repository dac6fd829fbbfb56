"""The reward to go against the whole return as the weight of a token, on chains of 12 additions.

The chains and the table of gae_lambda.py. Either each step that follows from the one before is rewarded with
1/12, or the answer is, at its end, with the sum of that. `reinforce` weighs each step with the answer's
return, `reinforce_to_go` with the rewards from the step on; without a baseline. 100 updates of 32 answers;
the chance that every step is right is exact. Rates were chosen for each case on seeds 100 and 101.
"""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot, pad

from posttrain.methods.build import build
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
from posttrain_study.claims.gae_lambda import EVERY, HELD_OUT, ROWS, SKILL, UPDATES, Chains
from posttrain_study.claims.table_policy import TablePolicy, TableRollouts

LENGTH = 12
RATES = {
    ("each step", "reinforce"): 0.1,
    ("each step", "reinforce_to_go"): 0.1,
    ("at the end", "reinforce"): 0.1,
    ("at the end", "reinforce_to_go"): 0.1,
}
"""Of Adam, by when rewards are paid and by method."""
NAMES = {"reinforce": "the whole return", "reinforce_to_go": "the reward to go"}


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return the chance that every step is right, by update, of each case."""
    figures: Figures = {}
    for (paid, method), lr in RATES.items():
        report(f"reward_to_go, seed {seed}, {method}, {paid}")
        figures[f"{paid} {method}"] = train(paid, method, lr, seed)
    return figures


def train(paid: str, name: str, lr: float, seed: int) -> list[float]:
    """Train, and return the chance that every step of a held-out chain is right, each EVERY updates."""
    draw = torch.Generator().manual_seed(seed + 1000)
    noise = torch.randn(100, 10, generator=torch.Generator().manual_seed(seed))
    right = one_hot((torch.arange(10)[:, None] + torch.arange(10)).flatten() % 10, 10)
    policy = TablePolicy(noise + SKILL[LENGTH] * right, build(name, {}, horizon=LENGTH), lr)
    held_out = Chains(HELD_OUT, LENGTH, torch.Generator().manual_seed(seed + 2000))
    states, sound = held_out.states(held_out.sums), []
    for update in range(UPDATES + 1):
        if update % EVERY == 0:
            p = policy.logits.detach().softmax(-1)
            sound.append(float(p[states, held_out.sums].prod(1).mean()))
        if update == UPDATES:
            break
        chains = Chains(ROWS, LENGTH, draw)
        answers = chains.sample(policy, draw)
        visited = chains.states(answers)
        reward = (answers == (visited // 10 + visited % 10) % 10).float() / LENGTH
        if paid == "at the end":
            reward = pad(reward.sum(1, keepdim=True), (LENGTH - 1, 0))
        policy.learn(TableRollouts(visited, answers, reward, group=torch.arange(ROWS)))
    return sound


def gain(figures: Figures, paid: str) -> float:
    """Return the mean over the run with the reward to go less that with the whole return."""
    to_go, total = (figures[f"{paid} {method}"] for method in ("reinforce_to_go", "reinforce"))
    return float(sum(to_go) / len(to_go) - sum(total) / len(total))


RULES = {
    "reward_to_go": VerdictRule(
        "chance that every step is right, mean over the run, rewards at each step, to go minus whole return",
        lambda figures: gain(figures, "each step"),
        0.02,
    ),
}


def table(results: Results) -> str:
    """Return mean and end of each case."""
    rows = []
    for (paid, method), lr in RATES.items():
        runs = [run[f"{paid} {method}"] for run in results.runs]
        means = spread([sum(run) / len(run) for run in runs], ".1%")
        rows.append([paid, NAMES[method], f"{lr:g}", means, spread([run[-1] for run in runs], ".1%")])
    return markdown(("rewards", "weight of a step", "rate", "every step right, mean", "at the end"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the chance that every step is right by update."""
    axes = figure.subplots()
    for n, (paid, method) in enumerate(RATES):
        runs = [run[f"{paid} {method}"] for run in results.runs]
        curve(axes, range(0, UPDATES + 1, EVERY), runs, f"{NAMES[method]}, rewards {paid}", f"C{n}")
    axes.set(xlabel="updates of 32 answers", ylabel="chance that every step is right", ylim=(0, 1.02))
    axes.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(7.0, 4.2))
