"""Several epochs over the same answers: with clipping, without, and with a penalty on KL(π_old ‖ π).

RLOO's advantages with a ratio by token: an update samples 128 answers, and makes two steps in each of its
epochs. Arms have equally many answers, and so more steps with more epochs; the rate of each was chosen among
four on seed 100 by the mean of gold over all updates. After each update the ratio π/π_old of every sampled
token, and of every token after every prefix, is known.
"""

import copy
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from posttrain.methods.build import build
from posttrain.types import Batch
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
from posttrain_study.claims.online import FEATURES, PrefixPolicy, Routine, improve, reference
from posttrain_study.claims.tiny import LONGEST, Table, gold_of, mean_of

UPDATES = 30
SURROGATES: dict[str, dict[str, Any]] = {
    "clipped at 0.2": {"surrogate": "clipped"},
    "no bound": {"surrogate": "unclipped"},
    "KL penalty": {"surrogate": "unclipped", "kl_from_old": 1.0},
}
COLORS = ("#4c72b0", "#c44e52", "#55a868")
RATES: dict[str, dict[int, float]] = {
    "clipped at 0.2": {1: 3e-2, 2: 3e-2, 4: 3e-2, 8: 3e-2},
    "no bound": {1: 3e-2, 2: 3e-2, 4: 1e-2, 8: 1e-2},
    "KL penalty": {4: 3e-2},
}
"""Epochs of each arm, and the rate of each."""


class Ratios:
    """Note, after each update, how far the ratios of sampled tokens and of all tokens are from 1."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self.before = copy.deepcopy(policy)
        self.sampled, self.quantile, self.every = list[float](), list[float](), list[float]()

    @torch.no_grad()
    def __call__(self, policy: PrefixPolicy, batch: Batch) -> None:
        """Note the largest |ρ - 1| and its 99 % quantile over sampled tokens, and the largest over all."""
        assert batch.logp_old is not None
        moved = (policy.outputs(batch).logp - batch.logp_old)[batch.mask].exp().sub(1).abs()
        after, before = (x(FEATURES).log_softmax(-1) for x in (policy.network, self.before))
        self.sampled.append(float(moved.max()))
        self.quantile.append(float(moved.quantile(0.99)))
        self.every.append(float((after - before).exp().sub(1).abs().max()))
        self.before = copy.deepcopy(policy.network)


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every arm from the same reference."""
    start, gold, cases = reference(seed), gold_of(seed), {}
    for name, numbers in SURROGATES.items():
        for epochs, rate in RATES[name].items():
            report(f"epochs, seed {seed}, {name}, {epochs}")
            path, ratios = list[float](), Ratios(start)
            method = build("rloo", numbers, horizon=LONGEST)
            plan = Routine(UPDATES, lr=rate, epochs=epochs, minibatches=2)
            improve(start, method, gold, plan, seed, note(path, gold), after=ratios)
            notes = {"sampled": ratios.sampled, "quantile": ratios.quantile, "every": ratios.every}
            cases[f"{name}-{epochs}"] = {"gold": path, **notes}
    return {"cases": cases}


def note(path: list[float], gold: Table) -> Any:
    """Return a function that appends the expected gold to the path."""
    return lambda update, logp: path.append(mean_of(gold, logp))


# ---------------------------------------------------------------------- what the claims say


def mean_gold(figures: Figures, name: str, epochs: int) -> float:
    """Return the mean of gold after each update, which is higher the sooner it rises."""
    return statistics.fmean(figures["cases"][f"{name}-{epochs}"]["gold"][1:])


def farthest(figures: Figures, name: str, epochs: int, key: str) -> float:
    """Return the largest of a number over the updates."""
    return float(max(figures["cases"][f"{name}-{epochs}"][key]))


CLIPPED, FREE, PENALTY = SURROGATES
RULES = {
    "epochs_reuse": VerdictRule(
        "gold, the mean over all updates, four epochs with clipping minus one",
        lambda figures: mean_gold(figures, CLIPPED, 4) - mean_gold(figures, CLIPPED, 1),
        margin=0.03,
    ),
    "epochs_unbounded": VerdictRule(
        "gold, the mean over all updates, eight epochs with clipping minus eight without",
        lambda figures: mean_gold(figures, CLIPPED, 8) - mean_gold(figures, FREE, 8),
        margin=0.03,
    ),
    "clip_bounds": VerdictRule(
        "log₂ of 0.2 over the largest |π/π_old − 1| of a sampled token after any of 30 updates, four epochs",
        lambda figures: math.log2(0.2 / farthest(figures, CLIPPED, 4, "sampled")),
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return the table of all arms: means, and ranges over seeds."""
    head = (
        *("bound", "epochs", "rate", "gold, mean over updates", "gold at the end"),
        *("99 % of sampled tokens move by", "the farthest of them", "of all tokens"),
    )
    rows = []
    for name in SURROGATES:
        for epochs, rate in RATES[name].items():
            runs = [run["cases"][f"{name}-{epochs}"] for run in results.runs]
            gold = [spread([mean_gold(run, name, epochs) for run in results.runs])]
            gold += [spread([run["gold"][-1] for run in runs])]
            moved = [f"{statistics.fmean(statistics.fmean(run['quantile']) for run in runs):.0%}"]
            moved += [
                f"{statistics.fmean(max(run[key]) for run in runs):.0%}" for key in ("sampled", "every")
            ]
            rows.append([name, f"{epochs}", f"{rate:g}", *gold, *moved])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw gold by epochs, gold by update, and the ratios of sampled tokens by update."""
    axes = figure.subplots(1, 3)
    for (name, rates), color in zip(RATES.items(), COLORS, strict=True):
        heights = [[mean_gold(run, name, epochs) for epochs in rates] for run in results.runs]
        curve(axes[0], list(rates), heights, name, color)
        axes[0].lines[-1].set_marker("o")
        most = max(rates)
        runs = [run["cases"][f"{name}-{most}"] for run in results.runs]
        curve(axes[1], range(UPDATES + 1), [run["gold"] for run in runs], f"{name}, {most} epochs", color)
        curve(
            axes[2], range(1, UPDATES + 1), [run["sampled"] for run in runs], f"{name}, {most} epochs", color
        )
    runs = [run["cases"][f"{CLIPPED}-1"] for run in results.runs]
    curve(axes[1], range(UPDATES + 1), [run["gold"] for run in runs], f"{CLIPPED}, 1 epoch", "#8172b3")
    curve(axes[2], range(1, UPDATES + 1), [run["sampled"] for run in runs], f"{CLIPPED}, 1 epoch", "#8172b3")
    axes[0].set(xscale="log", xlabel="epochs", ylabel="gold, mean over updates")
    axes[0].set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    axes[0].minorticks_off()
    axes[1].set(xlabel="update", ylabel="expected gold")
    axes[2].axhline(0.2, color="black", lw=0.8, ls=":")
    axes[2].set(
        yscale="log", ylim=(0.05, 1000), xlabel="update", ylabel="largest |π/π_old − 1| of a sampled token"
    )
    axes[0].legend(frameon=False)
    axes[1].legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(13.0, 4.0))
