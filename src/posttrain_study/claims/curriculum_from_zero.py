"""Curricula where the start solves none of the hard tasks: chains of up to 10 additions modulo 5.

An answer is rewarded if every sum is right. Each place of a chain has a table of its own, so that the first n
places are learnt from chains of n or more, and a long chain needs all its places. At the start a sum is right
with a chance near 0.3. RLOO with 160 updates of 16 groups of 8 answers:

    hard only   chains of 10
    uniform     lengths 1 to 10 alike
    ordered     lengths 1 to 10 in turn, 16 updates each
    mastered    a length more, whenever over half of an update's answers are right
    backwards   chains of 10 of which all sums but the last are given, one fewer whenever over half are right

The chance that a chain is solved is exact.
"""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot

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

BASE, LONGEST = 5, 10
GROUPS, SIZE, UPDATES, EVERY, HELD_OUT = 16, 8, 160, 4, 300
SKILL, MASTERED = 0.3, 0.5
ARMS = {"hard only": 0.3, "uniform": 0.1, "ordered": 1.0, "mastered": 0.3, "backwards": 0.3}
"""Rate of Adam for each."""


class Lock:
    """Questions as digits [rows, LONGEST + 1], and the right sum at each place, [rows, LONGEST]."""

    def __init__(self, rows: int, draw: torch.Generator) -> None:
        self.digits = torch.randint(BASE, (rows, LONGEST + 1), generator=draw).repeat_interleave(SIZE, 0)
        self.sums = self.digits.cumsum(1)[:, 1:] % BASE

    def states(self, place: int, before: torch.Tensor) -> torch.Tensor:
        """Return the state at a place: its number, the sum so far and the digit."""
        return (place * BASE + before) * BASE + self.digits[:, place + 1]

    def chances(self, p: torch.Tensor) -> torch.Tensor:
        """Return the chance that all sums up to each place are right, [LONGEST], the mean over questions."""
        before = torch.cat([self.digits[:, :1], self.sums[:, :-1]], 1)
        states = torch.stack([self.states(place, before[:, place]) for place in range(LONGEST)], 1)
        return p[states, self.sums].cumprod(1).mean(0)


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Return the chances by update of each arm."""
    figures: Figures = {}
    for arm, lr in ARMS.items():
        report(f"curriculum_from_zero, seed {seed}, {arm}")
        figures[arm] = train(arm, lr, seed)
    return figures


def train(arm: str, lr: float, seed: int) -> dict[str, list[float]]:
    """Train; return the chance to solve chains of 10 and chains of all lengths, and the solved ones."""
    draw = torch.Generator().manual_seed(seed)
    held_out = Lock(HELD_OUT, torch.Generator().manual_seed(seed + 1000))
    noise = torch.randn(LONGEST * BASE * BASE, BASE, generator=draw)
    sums = (torch.arange(BASE)[:, None] + torch.arange(BASE)).flatten() % BASE
    start = 0.3 * noise + 2 * SKILL * one_hot(sums, BASE).repeat(LONGEST, 1)
    policy = TablePolicy(start, build("rloo", {}, horizon=LONGEST), lr)
    level, curves = 1, {name: list[float]() for name in ("hard", "all", "level")}
    for update in range(UPDATES + 1):
        if update % EVERY == 0:
            chances = held_out.chances(policy.logits.detach().softmax(-1))
            curves["hard"].append(float(chances[-1]))
            curves["all"].append(float(chances.mean()))
            curves["level"].append(float(level))
        if update == UPDATES:
            break
        if arm == "ordered":
            level = 1 + LONGEST * update // UPDATES
        first, last = torch.zeros(GROUPS, dtype=torch.long), torch.full((GROUPS,), level)
        if arm == "hard only":
            last[:] = LONGEST
        elif arm == "uniform":
            last = torch.randint(1, LONGEST + 1, (GROUPS,), generator=draw)
        elif arm == "backwards":
            first, last = LONGEST - last, torch.full_like(last, LONGEST)
        solved = learn(policy, first.repeat_interleave(SIZE), last.repeat_interleave(SIZE), draw)
        if arm in ("mastered", "backwards") and solved > MASTERED:
            level = min(level + 1, LONGEST)
    return curves


def learn(policy: TablePolicy, first: torch.Tensor, last: torch.Tensor, draw: torch.Generator) -> float:
    """Make an update on answers to the places from first to last; return the share that is right."""
    lock, states, answers = Lock(GROUPS, draw), list[torch.Tensor](), list[torch.Tensor]()
    before = lock.digits[:, 0]
    for n in range(LONGEST):
        before = torch.where(first == n, lock.digits[:, : n + 1].sum(1) % BASE, before)
        states.append(lock.states(n, before))
        before = policy.sample(states[-1], draw)
        answers.append(before)
    place, action = torch.arange(LONGEST), torch.stack(answers, 1)
    tasked = (first[:, None] <= place) & (place < last[:, None])
    right = ~((action != lock.sums) & tasked).any(1)
    reward = (right[:, None] & (place == last[:, None] - 1)).float()
    group = torch.arange(len(right)) // SIZE
    policy.learn(TableRollouts(torch.stack(states, 1), action, reward, group, mask=tasked))
    return float(right.float().mean())


# ---------------------------------------------------------------------- rule, table and picture


RULES = {
    "curriculum_from_zero": VerdictRule(
        "chance to solve a chain of 10 after 20,480 answers, ordered minus uniform",
        lambda figures: float(figures["ordered"]["hard"][-1] - figures["uniform"]["hard"][-1]),
        0.1,
    ),
}


def half(hard: list[float]) -> str:
    """Return the answers until a chain of 10 is solved with a chance of one half."""
    reached = [n for n, chance in enumerate(hard) if chance > 0.5]
    return f"{reached[0] * EVERY * GROUPS * SIZE:,}" if reached else "never"


def table(results: Results) -> str:
    """Return the chances at the end of each arm."""
    rows = []
    for arm, lr in ARMS.items():
        runs = [run[arm] for run in results.runs]
        ends = [spread([run[name][-1] for run in runs], ".1%") for name in ("hard", "all")]
        rows.append([arm, f"{lr:g}", *ends, ", ".join(half(run["hard"]) for run in runs)])
    start = [run["uniform"] for run in results.runs]
    rows.insert(0, ["the start", "", f"{start[0]['hard'][0]:.1e}", f"{start[0]['all'][0]:.1%}", ""])
    head = (
        "tasks",
        "rate",
        "chains of 10 solved",
        "of all lengths",
        "answers until half are solved, by seed",
    )
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw both chances of each arm by the answers sampled."""
    titles = {"hard": "chance to solve a chain of 10", "all": "mean chance, lengths 1 to 10"}
    answers = [n * GROUPS * SIZE for n in range(0, UPDATES + 1, EVERY)]
    for axes, (name, title) in zip(figure.subplots(1, 2, sharey=True), titles.items(), strict=True):
        for n, arm in enumerate(ARMS):
            curve(axes, answers, [run[arm][name] for run in results.runs], arm, f"C{n}")
        axes.set(xlabel="answers", title=title, ylim=(0, 1.02))
    figure.axes[0].legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES)
