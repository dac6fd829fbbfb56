"""Subgoals cut from proofs of hard theorems, against GRPO on these theorems, on equally many sampled rules.

The world is that of sequents.py, and an attempt is a proof sampled whole (proof_attempts.py). A hard theorem
takes at least HARD rules in its gold proof; the start hardly proves any. GRPO pays 1 for a proof. The arms:

    theorems         the hard theorems alone
    subgoals         goals of their gold proofs, as sequents of their own, which take at most n rules; n grows
                     by one whenever over half of an update's attempts succeed, up to whole theorems
    other theorems   the same, but other theorems of at most n rules in place of subgoals
    gold proofs      SFT on the rules of the gold proofs first, then the hard theorems alone

Subgoals need gold proofs, of which they show the goals and not the rules; `gold proofs` shows the rules too.
"""

import copy
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from posttrain.methods.build import build
from posttrain.plan.dataset_rows import row
from posttrain_prove.tasks.propositional import Propositional
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
from posttrain_study.claims.proof_attempts import (
    LONGEST,
    Gold,
    ProofPolicy,
    gold_proofs,
    outcome,
    pass_rates,
    start_of,
)
from posttrain_study.claims.sequents import VOCABULARY, Guide, Sequent, TreeLearner, spelt

GROUPS, SIZE, BUDGET, EVERY = 16, 8, 48_000, 16_000
"""Groups of an update, their attempts, the rules that are sampled in all, and between two measurements."""
HARD, LEVEL, MASTERED, SFT_STEPS = 8, 2, 0.5, 200
TRAIN = Propositional(low=6, high=20, train=300)
HELD_OUT = Propositional(low=6, high=20, held_out=240)
SAMPLES = 8
BANDS = ((1, 3), (4, 5), (6, 7), (8, 10), (11, 15))
"""Rules of gold proofs, by which held-out theorems are divided."""
ARMS = {"theorems": 1e-3, "subgoals": 1e-3, "other theorems": 1e-3, "gold proofs": 1e-3}
"""Rate of AdamW for each."""


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every arm from the same start."""
    start = start_of(seed)
    guide = Guide(start.model, seed)
    proofs = gold_proofs("train", replace(TRAIN, seed=1000 + seed), guide)
    held_out = gold_proofs("held_out", replace(HELD_OUT, seed=1000 + seed), guide)
    figures: Figures = {}
    for arm, lr in ARMS.items():
        report(f"subgoals, seed {seed}, {arm}")
        figures[arm] = train(arm, lr, seed, start, proofs, held_out)
    return figures


class TaskSchedule:
    """Draw the sequents that an arm asks for, by the level that it has reached."""

    def __init__(self, arm: str, proofs: Sequence[Gold], draw: torch.Generator) -> None:
        self.hard = [gold for gold in proofs if HARD <= gold.length <= LONGEST]
        self.draw, self.level = draw, LEVEL if arm in ("subgoals", "other theorems") else LONGEST
        self.parts = [gold.parts for gold in self.hard]
        easy = [gold for gold in proofs if gold.length < HARD]
        self.others = [gold.whole for gold in easy] if arm == "other theorems" else []

    def pick(self) -> Sequent:
        """Return the largest goal within the level of a hard theorem, or a theorem as large as that goal."""
        parts = self.parts[self._draw(len(self.parts))]
        size, goal = [part for part in parts if part[0] <= self.level][-1]
        if self.others and size < HARD:
            nearest = min(abs(size - other) for other, _ in self.others)
            alike = [theorem for other, theorem in self.others if abs(size - other) == nearest]
            goal = alike[self._draw(len(alike))]
        return goal

    def _draw(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.draw))

    def advance(self, solved: float) -> None:
        """Raise the level if enough attempts of an update succeeded."""
        self.level = min(self.level + (solved > MASTERED), LONGEST)


def train(
    arm: str, lr: float, seed: int, start: TreeLearner, proofs: Sequence[Gold], held_out: Sequence[Gold]
) -> dict[str, Any]:
    """Train, and return the pass rates in each band of held-out theorems by the rules that were sampled."""
    draw = torch.Generator().manual_seed(seed)
    tasks = TaskSchedule(arm, proofs, draw)
    learner = copy.deepcopy(start)
    if arm == "gold proofs":
        learn_rules(learner, tasks.hard)
    policy = ProofPolicy(learner, build("grpo", {}, horizon=LONGEST), lr)
    theorems = [gold.theorem for gold in held_out]
    bands = [[n for n, gold in enumerate(held_out) if low <= gold.length <= high] for low, high in BANDS]
    curves: dict[str, Any] = {"rules": [], "bands": [], "level": [], "updates": 0}
    sampled, updates = 0, 0
    while True:
        if sampled >= EVERY * len(curves["rules"]):
            rates = pass_rates(policy, theorems, SAMPLES, seed)
            curves["rules"].append(sampled)
            curves["bands"].append([statistics.fmean(rates[n] for n in band) for band in bands])
            curves["level"].append(tasks.level)
        if sampled >= BUDGET:
            return {**curves, "updates": updates, "hard": len(tasks.hard), "sizes": list(map(len, bands))}
        starts = [tasks.pick() for _ in range(GROUPS)]
        attempts = policy.attempts([sequent for sequent in starts for _ in range(SIZE)], draw)
        policy.learn_from(attempts, [outcome(attempt) for attempt in attempts], SIZE)
        tasks.advance(statistics.fmean(attempt.proved for attempt in attempts))
        sampled += sum(len(attempt.rules) for attempt in attempts)
        updates += 1


def learn_rules(learner: TreeLearner, proofs: Sequence[Gold]) -> None:
    """Train on the rules of gold proofs."""
    rows = []
    for gold in proofs:
        for sequent, rule in gold.rules.items():
            tokens = [*spelt(sequent), VOCABULARY[rule]]
            rows.append(row(tokens, [False] * (len(tokens) - 1) + [True], 1.0))
    learner.rows = rows
    learner.train(SFT_STEPS)


# ---------------------------------------------------------------------- rules, table and picture


def hard_rate(curves: dict[str, Any], place: int = -1) -> float:
    """Return the pass rate on held-out theorems of HARD rules or more, the mean over theorems."""
    pairs = zip(curves["bands"][place], curves["sizes"], BANDS, strict=True)
    hard = [(rate, size) for rate, size, (low, _) in pairs if low >= HARD]
    return float(sum(rate * size for rate, size in hard) / sum(size for _, size in hard))


def gain(figures: Figures, other: str) -> float:
    """Return how much more often subgoals end with a proof of a hard theorem."""
    return hard_rate(figures["subgoals"]) - hard_rate(figures[other])


RULES = {
    "subgoals": VerdictRule(
        f"pass rate on held-out theorems of {HARD} rules or more after {BUDGET:,} sampled rules, "
        "subgoals minus theorems",
        lambda figures: gain(figures, "theorems"),
        0.03,
    ),
    "subgoals_or_easy": VerdictRule(
        f"pass rate on held-out theorems of {HARD} rules or more after {BUDGET:,} sampled rules, "
        "subgoals minus other theorems",
        lambda figures: gain(figures, "other theorems"),
        0.03,
    ),
}


def named(band: tuple[int, int]) -> str:
    return f"{band[0]}–{band[1]}"


def table(results: Results) -> str:
    """Return the pass rates of each arm by the length of the gold proof."""
    runs = [run["theorems"] for run in results.runs]
    rows = [["the start", *(spread([run["bands"][0][n] for run in runs], ".0%") for n in range(len(BANDS)))]]
    for arm in ARMS:
        runs = [run[arm] for run in results.runs]
        rows.append([arm, *(spread([run["bands"][-1][n] for run in runs], ".0%") for n in range(len(BANDS)))])
    return markdown(("asked for", *(f"{named(band)} rules" for band in BANDS)), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the pass rate on hard theorems by sampled rules, and at the end by the length of gold proofs."""
    over_time, by_length = figure.subplots(1, 2)
    grid = [n * EVERY for n in range(BUDGET // EVERY + 1)]
    for n, arm in enumerate(ARMS):
        runs = [run[arm] for run in results.runs]
        rates = [[100 * hard_rate(run, place) for place in range(len(grid))] for run in runs]
        curve(over_time, grid, rates, arm, f"C{n}")
        ends = [[100 * rate for rate in run["bands"][-1]] for run in runs]
        curve(by_length, range(len(BANDS)), ends, arm, f"C{n}")
    over_time.set(xlabel="rules sampled", ylabel=f"pass rate, gold proofs of {HARD} rules or more, %")
    starts = [[100 * rate for rate in run["theorems"]["bands"][0]] for run in results.runs]
    curve(by_length, range(len(BANDS)), starts, "the start", "grey")
    by_length.set(xlabel="rules of the gold proof", ylabel="pass rate at the end, %")
    by_length.set_xticks(range(len(BANDS)), list(map(named, BANDS)))
    for axes in (over_time, by_length):
        axes.set_ylim(0, None)
    by_length.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(11.0, 4.2))
