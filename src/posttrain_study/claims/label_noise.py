"""DPO, IPO, cDPO and rDPO on wrong labels: gold reward and KL over 64 epochs.

The reference answers 8 questions (tiny.py). 256 pairs of its answers are labelled by gold, a share of the
labels is then flipped, and a policy is trained on them for 64 epochs. cDPO and rDPO know the true share.
Two more cases have labels drawn from Bradley and Terry's model, which are wrong the more often the closer two
answers are. Gold and KL(π ‖ π_ref) are exact. Hyperparameters were chosen on seed 99.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
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
    markdown,
    spread,
)
from posttrain_study.claims.tiny import (
    LONGEST,
    Pairs,
    Table,
    Trainee,
    frontier,
    gold_of,
    kl_of,
    likelihoods,
    mean_of,
    reference_model,
    sample_pairs,
)

PAIRS, EPOCHS, PAIRS_A_STEP, FRESH, LR = 256, 64, 64, 4096, 5e-3
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)
BRADLEY_TERRY = -1.0
"""Stands for a share where labels are sampled instead of flipped."""
EVALUATED = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, EPOCHS)
"""Epochs after which the policy is evaluated."""


@dataclass(frozen=True)
class Case:
    """A method, its β, and the share of wrong labels."""

    method: str
    share: float
    beta: float = 0.1

    @property
    def name(self) -> str:
        """Key of the case in the figures."""
        share = "bt" if self.share == BRADLEY_TERRY else f"{100 * self.share:.0f}"
        return f"{self.method}-{self.beta:g}-{share}"

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers of the method; cDPO and rDPO get the true share."""
        return {"beta": self.beta} | ({"flipped": self.share} if self.method in ("cdpo", "rdpo") else {})


NAMES = {"dpo": "DPO", "ipo": "IPO", "cdpo": "cDPO", "rdpo": "rDPO"}
DETAILED = 0.2
"""The share with another β, and with curves of gold by KL."""
CASES = [Case(method, share) for share in (*SHARES, BRADLEY_TERRY) for method in ("dpo", "ipo")]
CASES += [Case(method, share) for share in (DETAILED, 0.4) for method in ("cdpo", "rdpo")]
CASES += [Case(method, DETAILED, 0.3) for method in ("dpo", "ipo")]


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every case from the same reference, gold and pairs."""
    model, gold = reference_model(seed), gold_of(seed)
    logp_ref, chance = likelihoods(model), torch.Generator().manual_seed(3000 + seed)
    pairs, fresh = sample_pairs(logp_ref, PAIRS, chance), sample_pairs(logp_ref, FRESH, chance)
    pairs, fresh = pairs.turned(pairs.gap(gold) < 0), fresh.turned(fresh.gap(gold) < 0)
    lots = torch.rand(PAIRS, generator=chance, dtype=torch.float64)
    best = [point for point in frontier(logp_ref, gold) if point[0] < 6]
    cases = {}
    for case in CASES:
        report(f"label_noise, seed {seed}, {case.name}")
        wrong = lots < ((-pairs.gap(gold)).sigmoid() if case.share == BRADLEY_TERRY else case.share)
        trainee = Trainee(model, build(case.method, case.numbers, horizon=LONGEST), LR)
        path = train(trainee, pairs.turned(wrong), logp_ref, gold, fresh, wrong, seed)
        cases[case.name] = {"wrong": float(wrong.double().mean()), "path": path}
    return {"frontier": best, "cases": cases}


def train(
    trainee: Trainee, pairs: Pairs, logp_ref: Table, gold: Table, fresh: Pairs, wrong: torch.Tensor, seed: int
) -> list[dict[str, float]]:
    """Train on the pairs, and return what the policy is after each epoch of EVALUATED."""
    batch, draw, path = pairs.batch(), torch.Generator().manual_seed(seed), []
    with torch.no_grad():
        batch = replace(batch, logp_ref=trainee.outputs(batch).logp)
    for epoch in range(EPOCHS + 1):
        if epoch:
            trainee.epoch(batch, PAIRS_A_STEP, draw)
        if epoch in EVALUATED:
            logp = likelihoods(trainee.model)
            right, followed = fresh.gap(logp - logp_ref) > 0, pairs.gap(logp - logp_ref)[wrong] > 0
            path.append(
                {
                    "epoch": float(epoch),
                    "gold": mean_of(gold, logp),
                    "kl": kl_of(logp, logp_ref),
                    "right": float(right.double().mean()),
                    "followed": float(followed.double().mean()) if bool(wrong.any()) else 0.0,
                }
            )
    return path


# ---------------------------------------------------------------------- what the claims say


def best_gold(figures: Figures, case: Case) -> float:
    """Return the highest gold of a case's path, which early stopping on gold would have."""
    return max(float(point["gold"]) for point in figures["cases"][case.name]["path"])


def final_gold(figures: Figures, case: Case) -> float:
    """Return the gold after the last epoch."""
    return float(figures["cases"][case.name]["path"][-1]["gold"])


def difference(
    value: Callable[[Figures, Case], float], one: str, other: str, shares: tuple[float, ...]
) -> Callable[[Figures], float]:
    """Return the measure value(one) - value(other), the mean over shares of wrong labels."""

    def measured(figures: Figures) -> float:
        return statistics.fmean(
            value(figures, Case(one, share)) - value(figures, Case(other, share)) for share in shares
        )

    return measured


def fall(figures: Figures, case: Case) -> float:
    """Return how much gold is lost from the best epoch to the last."""
    return best_gold(figures, case) - final_gold(figures, case)


RULES = {
    "ipo_noise": VerdictRule(
        "gold at the best epoch, IPO minus DPO, mean over 10 to 40 % wrong labels",
        difference(best_gold, "ipo", "dpo", SHARES[1:]),
    ),
    "ipo_overtraining": VerdictRule(
        "gold lost from the best epoch to the last, DPO minus IPO, mean over 0 to 40 % wrong labels",
        difference(fall, "dpo", "ipo", SHARES),
    ),
    "rdpo_noise": VerdictRule(
        "gold after the last epoch, rDPO minus DPO, mean over 20 and 40 % wrong labels",
        difference(final_gold, "rdpo", "dpo", (DETAILED, 0.4)),
    ),
}


# ---------------------------------------------------------------------- table and picture


def table(results: Results) -> str:
    """Return the table of all cases: means, and ranges over seeds."""
    head = (
        *("wrong labels", "method", "β", "best gold (epoch)", "gold at the end", "KL at the best"),
        *("KL at the end", "fresh pairs right at the end", "wrong labels followed"),
    )
    cases = sorted(CASES, key=lambda case: (case.share == BRADLEY_TERRY, case.share, case.beta))
    return markdown(head, [row_of(case, [run["cases"][case.name] for run in results.runs]) for case in cases])


def row_of(case: Case, runs: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a case."""
    best, end = [max(run["path"], key=lambda x: x["gold"]) for run in runs], [run["path"][-1] for run in runs]
    wrong = statistics.fmean(run["wrong"] for run in runs)
    return [
        f"Bradley–Terry, {wrong:.0%}" if case.share == BRADLEY_TERRY else f"{case.share:.0%}",
        NAMES[case.method],
        f"{case.beta:g}",
        f"{spread([x['gold'] for x in best])} ({statistics.median(x['epoch'] for x in best):g})",
        spread([x["gold"] for x in end]),
        f"{statistics.fmean(x['kl'] for x in best):.1f}",
        f"{statistics.fmean(x['kl'] for x in end):.1f}",
        f"{statistics.fmean(x['right'] for x in end):.0%}",
        f"{statistics.fmean(x['followed'] for x in end):.0%}" if wrong else "–",
    ]


def draw(results: Results, figure: Any) -> None:
    """Draw gold by epoch for DPO and IPO at every share, and gold by KL at one share; means over seeds."""
    axes = figure.subplots(1, 3, sharey=True)
    viridis = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151")
    for panel, method in zip(axes[:2], ("dpo", "ipo"), strict=True):
        for share, color in zip(SHARES, viridis, strict=True):
            heights = over_seeds(results, Case(method, share), "gold")
            panel.plot(EVALUATED, heights, label=f"{share:.0%}", color=color, lw=1.8)
        heights = over_seeds(results, Case(method, BRADLEY_TERRY), "gold")
        panel.plot(EVALUATED, heights, "k:", label="Bradley–Terry")
        panel.set(title=NAMES[method], xlabel="epoch", xscale="symlog", xlim=(0, EPOCHS))
        panel.set_xticks([0, 1, 4, 16, 64], ["0", "1", "4", "16", "64"])
    axes[0].set_ylabel("expected gold")
    axes[0].legend(frameon=False, title="wrong labels")
    for method, name in NAMES.items():
        case = Case(method, DETAILED)
        axes[2].plot(
            over_seeds(results, case, "kl"), over_seeds(results, case, "gold"), "o-", ms=3, label=name
        )
    for run in results.runs:
        axes[2].plot(*zip(*run["frontier"], strict=True), color="grey", lw=0.5)
    axes[2].plot([], [], color="grey", lw=0.5, label="best possible")
    axes[2].set(title=f"{DETAILED:.0%} wrong, epoch after epoch", xlabel="KL(π ‖ π_ref), nats an answer")
    axes[2].legend(frameon=False)


def over_seeds(results: Results, case: Case, key: str) -> list[float]:
    """Return the mean over seeds at each evaluation."""
    paths = [run["cases"][case.name]["path"] for run in results.runs]
    return [statistics.fmean(path[n][key] for path in paths) for n in range(len(paths[0]))]


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 4.0))
