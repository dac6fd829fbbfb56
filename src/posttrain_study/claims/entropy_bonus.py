"""Whether an entropy bonus keeps a policy from settling on the first answers that are paid.

Every question pays 1 for answers of one or two letters that begin with its likeliest letter, and 3 for those
of five letters that begin with two letters of its own, which are about one in sixty of the reference's.
RLOO learns with several factors α of the bonus. The α of the verdict was chosen on seeds 100 to 102 by the
share of questions whose better answers are found, which are those that the policy gives in over half of its
answers.
"""

import statistics
from collections.abc import Callable
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
from posttrain_study.claims.online import WRITTEN, Routine, entropy_of, improve, log_probs, reference
from posttrain_study.claims.tiny import LENGTH, LETTERS, LONGEST, QUESTIONS, Table, mean_of

ALPHAS, BEST = (0.0, 0.03, 0.1, 0.2, 0.5), 0.2
PLAN, EVERY = Routine(updates=120, lr=1e-2), 10
NEAR, FAR, FAR_LETTERS, PREFIX = 1.0, 3.0, 5, 2
"""What near and far answers pay, letters of a far answer, and how many of those are given."""


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with every α from the same reference."""
    start, cases = reference(seed), {}
    near, far = hills(log_probs(start), seed)
    for alpha in ALPHAS:
        report(f"entropy_bonus, seed {seed}, {alpha:g}")
        path: list[dict[str, float]] = []
        method = build("rloo", {"entropy_bonus": alpha}, horizon=LONGEST)
        improve(start, method, NEAR * near + FAR * far, PLAN, seed, recorder(path, near, far))
        cases[f"{alpha:g}"] = path
    return {"cases": cases}


def hills(logp: Table, seed: int) -> tuple[Table, Table]:
    """Return 1 for the near answers of each question, and 1 for its far ones."""
    first = WRITTEN[:, 0]
    common = torch.stack([logp.exp()[:, (first == x) & (LENGTH > 0)].sum(1) for x in range(LETTERS)], 1)
    near = (common.argmax(1)[:, None] == first) & ((LENGTH == 1) | (LENGTH == 2))
    chance = torch.Generator().manual_seed(7000 + seed)
    prefix = torch.randint(LETTERS, (QUESTIONS, 1, PREFIX), generator=chance)
    far = (WRITTEN[:, :PREFIX] == prefix).all(-1) & (LENGTH == FAR_LETTERS)
    return near.double(), far.double()


def recorder(path: list[dict[str, float]], near: Table, far: Table) -> Callable[[int, Table], None]:
    """Return a function that appends the masses, the questions found, and the entropy, to the path."""

    def see(update: int, logp: Table) -> None:
        if update % EVERY == 0:
            share = ((logp.exp() * far).sum(1) > 0.5).double().mean()
            path.append(
                {
                    "near": mean_of(near, logp),
                    "far": mean_of(far, logp),
                    "reward": NEAR * mean_of(near, logp) + FAR * mean_of(far, logp),
                    "found": float(share),
                    "entropy": entropy_of(logp),
                }
            )

    return see


def final(figures: Figures, alpha: float, key: str) -> float:
    """Return the last number of a path."""
    return float(figures["cases"][f"{alpha:g}"][-1][key])


RULES = {
    "entropy_bonus": VerdictRule(
        f"share of prompts whose better answers are found, α = {BEST:g} minus none",
        lambda figures: final(figures, BEST, "found") - final(figures, 0.0, "found"),
        margin=0.1,
    ),
}


def table(results: Results) -> str:
    """Return the table of all α: means, and ranges over seeds."""
    head = ("α", "better answers found", "expected reward", "entropy halfway, nats", "entropy at the end")
    rows = []
    for alpha in ALPHAS:
        paths = [run["cases"][f"{alpha:g}"] for run in results.runs]
        shares = spread([final(run, alpha, "found") for run in results.runs], ".0%")
        reward = spread([final(run, alpha, "reward") for run in results.runs])
        entropy = [statistics.fmean(path[n]["entropy"] for path in paths) for n in (len(paths[0]) // 2, -1)]
        rows.append([f"{alpha:g}", shares, reward, *(f"{value:.2f}" for value in entropy)])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the entropy, and the probability of near and far answers, by update."""
    axes = figure.subplots(1, 3)
    viridis = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151")
    updates = range(0, PLAN.updates + 1, EVERY)
    for panel, key in zip(axes, ("entropy", "near", "far"), strict=True):
        for alpha, color in zip(ALPHAS, viridis, strict=True):
            paths = [run["cases"][f"{alpha:g}"] for run in results.runs]
            curve(panel, updates, [[point[key] for point in path] for path in paths], f"{alpha:g}", color)
        panel.set(xlabel="update")
    axes[0].set_ylabel("entropy of an answer, nats")
    axes[1].set_ylabel("probability of answers that pay 1")
    axes[2].set_ylabel("probability of answers that pay 3")
    axes[0].legend(frameon=False, title="α")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 3.8))
