"""Does IPO stand wrong labels, and long training on them, better than DPO?

The reference answers 8 questions (tiny.py). 256 pairs of its answers are labelled by gold, a share of the
labels is then flipped, and a policy is trained on them for 64 epochs. cDPO and rDPO are told the true share.
Two more rows have labels drawn from Bradley and Terry's model, which are wrong the more often the closer two
answers are. Gold and KL(π ‖ π_ref) are exact.

    python benchmarks/findings/label_noise.py --seeds 5 --out runs/label_noise
"""

import argparse
import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tiny import (
    LONGEST,
    Pairs,
    Table,
    Trainee,
    build_reference_scores,
    drawn_pairs,
    frontier,
    gold_of,
    kl_of,
    likelihoods,
    mean_of,
)

from posttrain.methods.build import build
from posttrain.process.machine import configure

PAIRS, EPOCHS, PAIRS_A_STEP, FRESH, LR = 256, 64, 64, 4096, 5e-3
SHARES = (0.0, 0.1, 0.2, 0.3, 0.4)
BRADLEY_TERRY = -1.0
"""Stands for a share where labels are drawn and not flipped."""
READ = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, EPOCHS)
"""Epochs after which the policy is read."""


@dataclass(frozen=True)
class Case:
    """A method, its β, and the share of wrong labels."""

    method: str
    share: float
    beta: float = 0.1

    @property
    def name(self) -> str:
        """The case as part of a file's name."""
        share = "bt" if self.share == BRADLEY_TERRY else f"{100 * self.share:.0f}"
        return f"{self.method}-{self.beta:g}-{share}"

    @property
    def numbers(self) -> dict[str, float]:
        """What the method is given; cDPO and rDPO are told the share."""
        return {"beta": self.beta} | ({"flipped": self.share} if self.method in ("cdpo", "rdpo") else {})


NAMES = {"dpo": "DPO", "ipo": "IPO", "cdpo": "cDPO", "rdpo": "rDPO"}
SHOWN = 0.2
"""The share at which there is more to see: other β, and the way through gold and KL."""
CASES = [Case(method, share) for share in (*SHARES, BRADLEY_TERRY) for method in ("dpo", "ipo")]
CASES += [Case(method, share) for share in (SHOWN, 0.4) for method in ("cdpo", "rdpo")]
CASES += [Case(method, SHOWN, 0.3) for method in ("dpo", "ipo")]


def main() -> None:
    """Makes the runs that are missing, then the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(1)
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    for seed in seeds:
        runs_of(seed, options.out)
    found = {
        case: [json.loads((options.out / f"{case.name}-{seed}.json").read_text()) for seed in seeds]
        for case in CASES
    }
    print(
        "| wrong labels | method | β | best gold (epoch) | gold at the end | KL at the best | KL at the end "
        "| fresh pairs right at the end | wrong labels followed |\n|---|---|---|---|---|---|---|---|---|"
    )
    for case in sorted(CASES, key=lambda case: (case.share == BRADLEY_TERRY, case.share, case.beta)):
        print(
            f"| {labels(case, found[case])} | {NAMES[case.method]} | {case.beta:g} "
            f"| {' | '.join(cells(found[case]))} |"
        )
    draw(found, options.out / "label_noise.svg")


def runs_of(seed: int, out: Path) -> None:
    """Makes the runs of a seed that are missing; all have the same reference, gold and pairs."""
    missing = [case for case in CASES if not (out / f"{case.name}-{seed}.json").exists()]
    if not missing:
        return
    model, gold = build_reference_scores(seed), gold_of(seed)
    logp_ref, chance = likelihoods(model), torch.Generator().manual_seed(3000 + seed)
    pairs, fresh = drawn_pairs(logp_ref, PAIRS, chance), drawn_pairs(logp_ref, FRESH, chance)
    pairs, fresh = pairs.turned(pairs.gap(gold) < 0), fresh.turned(fresh.gap(gold) < 0)
    lot = torch.rand(PAIRS, generator=chance, dtype=torch.float64)
    best = [point for point in frontier(logp_ref, gold) if point[0] < 6]
    for case in missing:
        wrong = lot < ((-pairs.gap(gold)).sigmoid() if case.share == BRADLEY_TERRY else case.share)
        trainee = Trainee(model, build(case.method, case.numbers, horizon=LONGEST), LR)
        path = trained(trainee, pairs.turned(wrong), logp_ref, gold, fresh, wrong, seed)
        made = {"wrong": float(wrong.double().mean()), "frontier": best, "path": path}
        (out / f"{case.name}-{seed}.json").write_text(json.dumps(made))
        print(f"{case.name}-{seed}: gold {path[-1]['gold']:.2f}, KL {path[-1]['kl']:.2f}", flush=True)


def trained(
    trainee: Trainee, pairs: Pairs, logp_ref: Table, gold: Table, fresh: Pairs, wrong: torch.Tensor, seed: int
) -> list[dict[str, float]]:
    """What the policy is after each epoch of READ."""
    batch, dealt, path = pairs.batch(), torch.Generator().manual_seed(seed), []
    with torch.no_grad():
        batch = replace(batch, logp_ref=trainee.says(batch).logp)
    for epoch in range(EPOCHS + 1):
        if epoch:
            trainee.epoch(batch, PAIRS_A_STEP, dealt)
        if epoch in READ:
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


def best_of(run: dict[str, Any]) -> dict[str, float]:
    """The reading of most gold: where one who knew gold would have stopped."""
    found: dict[str, float] = max(run["path"], key=lambda at: at["gold"])
    return found


def labels(case: Case, runs: list[dict[str, Any]]) -> str:
    """Which labels are wrong."""
    wrong = statistics.fmean(run["wrong"] for run in runs)
    return f"Bradley–Terry, {wrong:.0%}" if case.share == BRADLEY_TERRY else f"{case.share:.0%}"


def cells(runs: list[dict[str, Any]]) -> list[str]:
    """A row of the table: means, and ranges over the seeds."""
    best, end = [best_of(run) for run in runs], [run["path"][-1] for run in runs]

    def spread(values: list[float]) -> str:
        return f"{statistics.fmean(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    epoch = statistics.median(at["epoch"] for at in best)
    flipped = statistics.fmean(run["wrong"] for run in runs) > 0
    return [
        f"{spread([at['gold'] for at in best])} ({epoch:g})",
        spread([at["gold"] for at in end]),
        f"{statistics.fmean(at['kl'] for at in best):.1f}",
        f"{statistics.fmean(at['kl'] for at in end):.1f}",
        f"{statistics.fmean(at['right'] for at in end):.0%}",
        f"{statistics.fmean(at['followed'] for at in end):.0%}" if flipped else "–",
    ]


def draw(found: dict[Case, list[dict[str, Any]]], out: Path) -> None:
    """Gold by epoch for DPO and IPO at every share, and gold by KL at one share; means over seeds."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True)
    for place, method in zip(axes[:2], ("dpo", "ipo"), strict=True):
        for n, share in enumerate(SHARES):
            gold = over_seeds(found[Case(method, share)], "gold")
            place.plot(READ, gold, label=f"{share:.0%}", color=pyplot.colormaps["viridis"](n / 5), lw=1.8)
        place.plot(READ, over_seeds(found[Case(method, BRADLEY_TERRY)], "gold"), "k:", label="Bradley–Terry")
        place.set(title=NAMES[method], xlabel="epoch", xscale="symlog", xlim=(0, EPOCHS))
        place.set_xticks([0, 1, 4, 16, 64], ["0", "1", "4", "16", "64"])
    axes[0].set_ylabel("expected gold")
    axes[0].legend(frameon=False, title="wrong labels")
    for method, name in NAMES.items():
        runs = found[Case(method, SHOWN)]
        axes[2].plot(over_seeds(runs, "kl"), over_seeds(runs, "gold"), "o-", ms=3, label=name)
    for run in found[Case("dpo", SHOWN)]:
        axes[2].plot(*zip(*run["frontier"], strict=True), color="grey", lw=0.5)
    axes[2].plot([], [], color="grey", lw=0.5, label="best possible")
    axes[2].set(title=f"{SHOWN:.0%} wrong, epoch after epoch", xlabel="KL(π ‖ π_ref), nats an answer")
    axes[2].legend(frameon=False)
    for place in axes:
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out)


def over_seeds(runs: list[dict[str, Any]], key: str) -> list[float]:
    """The mean over seeds, reading by reading."""
    return [statistics.fmean(run["path"][n][key] for run in runs) for n in range(len(READ))]


if __name__ == "__main__":
    main()
