"""A loophole in an exact reward: how rare it may be at the start and still take a policy over.

The reference answers 8 questions (tiny.py), and GRPO is paid the gold reward itself. One bad answer to each
question, of less gold than the reference has in the mean, is paid more than the best answer: the loophole. It
is the answer whose probability under the reference is nearest to 0.1, 0.01 or 0.001. Gold and the share of
answers that take the loophole are exact.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
from posttrain_study.claims.policy_path import ANSWERS, follow
from posttrain_study.claims.tiny import QUESTIONS, Table, gold_of, likelihoods, mean_of, reference_model

UPDATES = 80


@dataclass(frozen=True)
class Loophole:
    """A loophole's probability at the start, or 0 for none, its pay above the best, and the KL penalty."""

    rare: float
    extra: float = 1.0
    kl: float = 0.0

    @property
    def name(self) -> str:
        """Key of the case in the figures."""
        return f"{self.rare:g}, +{self.extra:g}, KL {self.kl:g}"


NONE, CLAIMED = Loophole(0.0), Loophole(0.01)
CASES = [NONE, Loophole(0.1), CLAIMED, Loophole(0.001), Loophole(0.1, extra=0.1), Loophole(0.1, kl=0.2)]


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with each loophole from the same start."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, figures = likelihoods(model), dict[str, Any]()
    for case in CASES:
        report(f"loophole_size, seed {seed}, {case.name}")
        hole = loophole(case.rare, gold, logp_ref)
        paid = torch.where(hole > 0, gold.amax(1, keepdim=True) + case.extra, gold)
        path = follow(
            model, paid, {"taken": hole, "gold": gold}, seed=seed, updates=UPDATES, kl_weight=case.kl
        )
        figures[case.name] = path
    return figures


def loophole(rare: float, gold: Table, logp_ref: Table) -> Table:
    """Return 1 for the bad answer to each question whose probability is nearest to `rare`, else 0."""
    if not rare:
        return torch.zeros_like(gold)
    bad = gold < mean_of(gold, logp_ref)
    distance = (logp_ref - torch.tensor(rare).log()).abs().masked_fill(~bad, torch.inf)
    hole = torch.zeros_like(gold)
    hole[torch.arange(QUESTIONS), distance.argmin(1)] = 1.0
    return hole


def loss_of_gold(figures: Figures) -> float:
    """Return the gold that a loophole of probability 0.01 costs at the end."""
    return float(figures[NONE.name]["gold"][-1] - figures[CLAIMED.name]["gold"][-1])


RULES = {
    "loophole_size": VerdictRule(
        "gold at the end, without a loophole minus with one of probability 0.01, in standard deviations",
        loss_of_gold,
        margin=0.2,
    ),
}


def table(results: Results) -> str:
    """Return how often each loophole is taken at the end, and what gold is left."""
    head = (
        *("probability at the start", "pays above the best", "KL penalty", "draws expected of the start"),
        *("taken at the end", "updates until half", "gold at the end"),
    )
    rows = []
    for case in CASES:
        runs = [run[case.name] for run in results.runs]
        start = sum(run["taken"][0] for run in runs) / len(runs)
        rows.append(
            [
                f"{start:.1g}",
                f"{case.extra:g}",
                f"{case.kl:g}",
                f"{start * UPDATES * ANSWERS:.2g}",
                spread([run["taken"][-1] for run in runs]),
                ", ".join(half(run["taken"]) for run in runs),
                spread([run["gold"][-1] for run in runs]),
            ]
        )
    return markdown(head, rows)


def half(shares: list[float]) -> str:
    """Return the first update before which half of the answers take the loophole, or a dash."""
    return next((str(n) for n, share in enumerate(shares) if share >= 0.5), "–")


def draw(results: Results, figure: Any) -> None:
    """Draw the share of answers that take the loophole, and gold, by update."""
    shares, golds = figure.subplots(1, 2)
    colors = ("#888888", "#d1495b", "#e0a030", "#2a788e")
    for case, color in zip(CASES[:4], colors, strict=True):
        for axes, key in ((shares, "taken"), (golds, "gold")):
            heights = [run[case.name][key][::2] for run in results.runs]
            curve(axes, range(0, UPDATES + 1, 2), heights, f"{case.rare:g}" if case.rare else "none", color)
    shares.set(title="share of answers that take the loophole", xlabel="update", ylim=(0, 1))
    golds.set(title="expected gold", xlabel="update")
    shares.legend(frameon=False, title="probability at the start", loc="upper left")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(10.0, 4.0))
