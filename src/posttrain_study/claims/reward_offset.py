"""Rewards that are all positive: do below-average answers never fall, and what does a baseline change?

The exact part: the expected change of every answer's log-probability after one step of REINFORCE, for a
policy that is a softmax over the answers, with the course's three rewards and with 20 random sets. It
is computed from the method's own gradient for each answer, weighed by its chance. The sampled part: in how
many batches an answer that was sampled and is below average falls, with 3 and with 1,000 possible answers.

The trained part: 20 tasks of 8 answers whose rewards are 8 + N(0, 1), or N(0, 1); 60 updates of 16 answers a
task with plain gradient steps. Rates were chosen for each arm on seed 100.
"""

from pathlib import Path
from typing import Any

import torch

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
from posttrain_study.claims.table_policy import TablePolicy, TableRollouts

COURSE = (8.5, 8.2, 8.0)
OFFSET = 8.0
TASKS, ANSWERS, SIZE, UPDATES = 20, 8, 16, 60
ARMS: dict[str, tuple[str, float, float]] = {
    "no baseline, rewards around 8": ("reinforce", OFFSET, 0.3),
    "running mean, rewards around 8": ("reinforce_running", OFFSET, 3.0),
    "leave-one-out, rewards around 8": ("rloo", OFFSET, 10.0),
    "no baseline, rewards around 0": ("reinforce", 0.0, 10.0),
}
"""Method, offset of the rewards, and learning rate for the mean over tasks of each answer's loss."""
RAW, RUNNING, RLOO, CENTRED = ARMS


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return the exact changes, the shares of sampled batches, and the curves of each arm."""
    draw = torch.Generator().manual_seed(seed)
    sets = [(torch.zeros(3), torch.tensor(COURSE))]
    for n in range(20):
        sets.append((torch.randn(3 + n % 6, generator=draw), 8.0 + torch.randn(3 + n % 6, generator=draw)))
    report(f"reward_offset, seed {seed}, one step")
    changes = [expected_changes(logits, rewards) for logits, rewards in sets]
    below = [
        float(x)
        for (logits, rewards), change in zip(sets, changes, strict=True)
        for x in change[rewards < logits.softmax(0) @ rewards]
    ]
    figures: Figures = {
        "course": changes[0].tolist(),
        "least": min(below),
        "falling": sum(x < 0 for x in below) / len(below),
        "sampled": {str(count): sampled_falls(count, draw) for count in (3, 1000)},
        "arms": {},
    }
    rewards = torch.randn(TASKS, ANSWERS, generator=draw)
    for arm, (method, offset, lr) in ARMS.items():
        report(f"reward_offset, seed {seed}, {arm}")
        figures["arms"][arm] = train(method, rewards + offset, lr, seed)
    return figures


def step_changes(logits: torch.Tensor, rewards: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the change of all log-probabilities, per unit of the learning rate, after a step on answers."""
    rate, task = 1e-4, torch.zeros(len(answers), 1, dtype=torch.long)
    policy = TablePolicy(logits[None].double(), build("reinforce", {}, horizon=1), rate, adam=False)
    policy.learn(TableRollouts(task, answers[:, None], rewards[answers][:, None], task[:, 0]))
    return (policy.logits.detach()[0].log_softmax(0) - logits.double().log_softmax(0)) / rate


def expected_changes(logits: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """Return the expected change of each log-probability: each answer's, weighed by its chance."""
    changes = [step_changes(logits, rewards, torch.tensor([n])) for n in range(len(rewards))]
    return logits.double().softmax(0) @ torch.stack(changes)


def sampled_falls(count: int, draw: torch.Generator, batches: int = 400) -> float:
    """Return how often an answer that was sampled, and is below the batch's mean, falls in that step.

    Batches are three different answers of a policy that is uniform over `count`.
    """
    falls = []
    for _ in range(batches):
        rewards = 8.0 + torch.randn(count, generator=draw)
        answers = torch.randperm(count, generator=draw)[:3]
        change = step_changes(torch.zeros(count), rewards, answers)[answers]
        falls += (change[rewards[answers] < rewards[answers].mean()] < 0).tolist()
    return float(sum(falls) / len(falls))


def train(method: str, rewards: torch.Tensor, lr: float, seed: int) -> list[float]:
    """Return the regret after each update: (best reward - expected reward), as a share of the start's."""
    draw, tasks = torch.Generator().manual_seed(seed + 1000), torch.arange(TASKS).repeat_interleave(SIZE)
    # The loss is a mean over the rows of all tasks, each of which moves its own logits.
    policy = TablePolicy(torch.zeros(TASKS, ANSWERS), build(method, {}, horizon=1), lr * TASKS, adam=False)
    best, regret = rewards.max(1).values, []
    for update in range(UPDATES + 1):
        expected = (policy.logits.detach().softmax(-1) * rewards).sum(1)
        regret.append(float((best - expected).mean() / (best - rewards.mean(1)).mean()))
        if update < UPDATES:
            answers = policy.sample(tasks, draw)
            paid = rewards[tasks, answers]
            policy.learn(TableRollouts(tasks[:, None], answers[:, None], paid[:, None], tasks))
    return regret


def mean_regret(figures: Figures, arm: str) -> float:
    """Return the mean regret over all updates."""
    regret = figures["arms"][arm]
    return float(sum(regret) / len(regret))


RULES = {
    "reward_offset": VerdictRule(
        "expected change of a below-average answer's log-probability, the least over 21 sets of rewards",
        lambda figures: float(figures["least"]),
        1e-6,
        exact=True,
    ),
    "reward_offset_speed": VerdictRule(
        "mean regret as a share of the start's, rewards around 8, no baseline minus leave-one-out",
        lambda figures: mean_regret(figures, RAW) - mean_regret(figures, RLOO),
        0.05,
    ),
}


def table(results: Results) -> str:
    """Return the regret of each arm, and below it the changes in one step."""
    head = ("arm", "learning rate", "mean regret of all updates", "regret at the end")
    rows = []
    for arm, (_, _, lr) in ARMS.items():
        means = [mean_regret(run, arm) for run in results.runs]
        ends = [run["arms"][arm][-1] for run in results.runs]
        rows.append([arm, f"{lr:g}", spread(means, ".1%"), spread(ends, ".1%")])
    course = ", ".join(f"{x:+.3f}" for x in results.runs[0]["course"]).replace("-", "−")
    falling = spread([run["falling"] for run in results.runs], ".0%")
    sampled = {
        count: spread([run["sampled"][count] for run in results.runs], ".0%") for count in ("3", "1000")
    }
    lines = [
        ["expected change of log π of the course's three answers, for a rate of 1", course],
        ["below-average answers whose log π falls in expectation", falling],
        ["sampled answers below the batch's mean that fall in that step, of 3 answers in all", sampled["3"]],
        ["the same, of 1,000 answers in all", sampled["1000"]],
    ]
    return f"{markdown(head, rows)}\n\n{markdown(('one step without a baseline', ''), lines)}"


def draw(results: Results, figure: Any) -> None:
    """Draw the course's example, and the regret of each arm."""
    bars, curves = figure.subplots(1, 2)
    changes = results.runs[0]["course"]
    bars.bar([f"{x}" for x in COURSE], changes, color=["C0", "C1", "C3"], width=0.6)
    bars.axhline(0, color="black", lw=0.8)
    bars.set(xlabel="reward", title="expected change of log π, one step without a baseline")
    for n, arm in enumerate(ARMS):
        curve(curves, range(UPDATES + 1), [run["arms"][arm] for run in results.runs], arm, f"C{n}")
    curves.set(xlabel="updates of 16 answers", title="regret, as a share of the start's", ylim=(0, 1.05))
    curves.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES)
