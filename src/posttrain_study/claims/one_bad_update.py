"""One update with a rate 30, 100 or 300 times too large: how reinforcement learning and imitation come back.

The answers of most gold, which are 5 % of the reference's, are right. RLOO is paid 1 for them; supervised
fine-tuning imitates as many as RLOO samples. Both have had 20 updates when one is too large,
and then 80 more at the rate as before. The chance of a right answer is exact. A run is back at the first
update at which that chance is what it was before the large update.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from posttrain.methods.build import build
from posttrain.types import Batch
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
)
from posttrain_study.claims.online import (
    PrefixPolicy,
    Routine,
    best_answers,
    entropy_of,
    improve,
    log_probs,
    reference,
)
from posttrain_study.claims.tiny import LONGEST, Table, gold_of, mean_of

FACTORS, SHOCK, LATER, SHARE, LR = (30, 100, 300), 20, 80, 0.05, 1e-2
METHODS = {"rloo": "RLOO", "sft": "SFT"}
COLORS = {"rloo": "#c44e52", "sft": "#4c72b0"}


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train both methods with each size of the large update."""
    start, cases = reference(seed), {}
    logp = log_probs(start)
    right = best_answers(logp, gold_of(seed), SHARE)
    demonstrations = (logp + right.log()).log_softmax(1)
    for method in METHODS:
        for factor in FACTORS:
            report(f"one_bad_update, seed {seed}, {method}, {factor}")
            path: list[tuple[float, float]] = []
            improve(
                start,
                build(method, {}, horizon=LONGEST),
                right,
                Routine(SHOCK + 1 + LATER, lr=LR),
                seed,
                recorder(path, right),
                after=shock(factor),
                source=demonstrations if method == "sft" else None,
            )
            p, entropy = zip(*path, strict=True)
            cases[f"{method}-{factor}"] = {"p": p, "entropy": entropy}
    return {"cases": cases}


def recorder(path: list[tuple[float, float]], right: Table) -> Callable[[int, Table], None]:
    """Return a function that appends the chance of a right answer, and the entropy, to the path."""
    return lambda update, logp: path.append((mean_of(right, logp), entropy_of(logp)))


def shock(factor: float) -> Callable[[PrefixPolicy, Batch], None]:
    """Return a function that makes the update after SHOCK ones, and no other, `factor` times as large."""
    updates = 0

    def after(policy: PrefixPolicy, batch: Batch) -> None:
        nonlocal updates
        updates += 1
        policy.optimiser.param_groups[0]["lr"] = LR * (factor if updates == SHOCK else 1)

    return after


# ---------------------------------------------------------------------- what the claims say


def back(path: list[float]) -> int | None:
    """Return the updates from the large one until the chance is what it was; None: not within LATER."""
    later = path[SHOCK + 1 :]
    return next((n for n, p in enumerate(later) if p >= path[SHOCK]), None)


def lost(figures: Figures, method: str) -> float:
    """Return the share of the sizes after which the method is not back."""
    return statistics.fmean(back(figures["cases"][f"{method}-{factor}"]["p"]) is None for factor in FACTORS)


RULES = {
    "one_bad_update": VerdictRule(
        f"share of runs that are not back {LATER} updates after the large one, RLOO minus SFT",
        lambda figures: lost(figures, "rloo") - lost(figures, "sft"),
        margin=0.1,
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return the table of all cases."""
    head = (
        *("method", "size of the update", "right before", "right after", "entropy after, nats", "runs back"),
        *("updates until back, median", f"right {LATER} updates later"),
    )
    rows = []
    for method, name in METHODS.items():
        for factor in FACTORS:
            runs = [run["cases"][f"{method}-{factor}"] for run in results.runs]
            before, after, end = (
                f"{statistics.fmean(run['p'][n] for run in runs):.0%}" for n in (SHOCK, SHOCK + 1, -1)
            )
            entropy = f"{statistics.fmean(run['entropy'][SHOCK + 1] for run in runs):.2f}"
            times = [n for run in runs if (n := back(run["p"])) is not None]
            median = f"{statistics.median(times):g}" if times else "–"
            cells = [f"{len(times)} of {len(runs)}", median, end]
            rows.append([name, f"{factor} ×", before, after, entropy, *cells])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the chance of a right answer by update for each size: every seed thin, the mean thick."""
    axes = figure.subplots(1, len(FACTORS), sharey=True)
    ticks = [*range(0, SHOCK, 4), SHOCK, *range(SHOCK + 1, SHOCK + LATER + 2, 4)]
    for panel, factor in zip(axes, FACTORS, strict=True):
        for method, name in METHODS.items():
            runs = [run["cases"][f"{method}-{factor}"]["p"] for run in results.runs]
            paths = [[run[n] for n in ticks] for run in runs]
            for path in paths:
                panel.plot(ticks, path, color=COLORS[method], lw=0.5, alpha=0.5)
            means = [statistics.fmean(points) for points in zip(*paths, strict=True)]
            panel.plot(ticks, means, color=COLORS[method], lw=1.8, label=name)
        panel.set(title=f"one update {factor} × too large", xlabel="update")
    axes[0].set_ylabel("chance of a right answer")
    axes[0].legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 3.8))
