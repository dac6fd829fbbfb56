"""LoRA of ranks 1, 4 and 32 against full fine-tuning in SFT, and of rank 1 in GRPO; the ranks of the updates.

Both start from the model of digit_sums.py, which answers one question of three rightly. SFT has 400 questions
with their answers, drawn by the seed, GRPO samples its answers. Measured is the chance of a right answer, on
1000 held-out questions. Ranks are those of `posttrain run inspect`, medians over the six matrices that an
adapter has; none can be above 32.
"""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from posttrain.api.export import write_merged
from posttrain.evaluation.changes import compare, summary
from posttrain.recipe import config
from posttrain_study.claims.digit_sums import (
    HELD_OUT,
    HIDDEN,
    Changes,
    answered,
    last_checkpoint,
    quality,
    questions,
    run,
    start,
)
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)

TAUGHT = 400
RANKS = {"rank 1": 1, "rank 4": 4, "rank 32": 32, "full": 0}
MEASURED = ("relative", "effective_rank", "stable_rank", "rank_99")


@dataclass(frozen=True)
class Training:
    """Changes of a recipe, and rates."""

    changes: Changes
    rates: dict[str, float]
    """Learning rate of each arm: the best on seed 100, which is not reported, of steps of about three."""


TRAININGS = {
    "sft": Training(
        {
            "run.updates": 150,
            "batch.batch_size": 16,
            "optim.schedule": "cosine",
            "optim.warmup_steps": 5,
            "optim.min_lr_ratio": 0.1,
        },
        dict.fromkeys(RANKS, 1e-2),
    ),
    "grpo": Training(
        {
            "run.updates": 60,
            "rollout.groups": 16,
            "rollout.group_size": 8,
            "rollout.select": "all",
            "steps.minibatches": 2,
            "optim.schedule": "linear",
            "optim.min_lr_ratio": 0.3,
        },
        dict.fromkeys(("rank 1", "full"), 3e-3),
    ),
}


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every arm in both ways from the same start."""
    report("lora_rank, the start")
    model, digest = start(out)
    figures: Figures = {"the start": {"digest": digest, "accuracy": quality(model).right}}
    for name, training in TRAININGS.items():
        for arm in training.rates:
            report(f"lora_rank, seed {seed}, {name}, {arm}")
            figures[f"{name}, {arm}"] = adapt(name, arm, training.rates[arm], seed, model, out)
    return figures


def adapt(name: str, arm: str, lr: float, seed: int, model: Path, out: Path) -> dict[str, float]:
    """Train an arm, and return its figures."""
    texts = questions()[HELD_OUT:]
    if name == "sft":
        texts = tuple(random.Random(seed).sample(texts, TAUGHT))
    changes = {**TRAININGS[name].changes, "run.seed": seed, "optim.lr": lr}
    if RANKS[arm]:
        changes["lora.rank"] = RANKS[arm]
    loaded, place = run(
        name, model, answered(texts), changes, out / f"{name}-{arm.replace(' ', '-')}-{lr:g}-{seed}"
    )
    return figures_of(loaded, place)


def figures_of(loaded: config.LoadedRecipe, place: Path) -> dict[str, float]:
    """Return the accuracy of a trained model, and how far its matrices moved, in how many directions."""
    last = last_checkpoint(place)
    update = compare(last, loaded.recipe, Path(loaded.recipe.model.path), None)
    changes = [update.change(matrix) for matrix in update.names() if is_adapted(matrix)]
    model = last / "model"
    if (last / "adapter").exists():
        model = place / "merged"
        write_merged(loaded, last / "adapter", model)
    figures = {key: value for key, value in summary(changes).items() if key in MEASURED}
    return {"accuracy": quality(model).right, **figures, "trained": count_trained(last)}


def is_adapted(name: str) -> bool:
    """Return whether a weight is one of the matrices that an adapter has."""
    return ".layers." in name and any(part in name for part in ("_proj.weight", "fc1.weight", "fc2.weight"))


def count_trained(last: Path) -> int:
    """Return how many numbers a run trained: those of its adapter, or all of the model's."""
    folder = last / "adapter" if (last / "adapter").exists() else last / "model"
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as tensors:
            count += sum(tensors.get_tensor(key).numel() for key in tensors.keys())  # noqa: SIM118
    return count


def difference(training: str, one: str, other: str) -> Callable[[Figures], float]:
    """Return the measure accuracy of one arm minus that of another."""
    return lambda figures: float(
        figures[f"{training}, {one}"]["accuracy"] - figures[f"{training}, {other}"]["accuracy"]
    )


RULES = {
    "lora_rank_grpo": VerdictRule(
        "accuracy after GRPO, an adapter of rank 1 minus full fine-tuning",
        difference("grpo", "rank 1", "full"),
        0.05,
        equal=True,
    ),
    "lora_rank_sft": VerdictRule(
        "accuracy after SFT, an adapter of rank 4 minus full fine-tuning",
        difference("sft", "rank 4", "full"),
        0.05,
        equal=True,
    ),
    "lora_rank_more": VerdictRule(
        "accuracy after SFT, an adapter of rank 32 minus one of rank 4",
        difference("sft", "rank 32", "rank 4"),
    ),
}


def table(results: Results) -> str:
    """Return mean and range over seeds of the accuracy, and means of the rest."""
    head = (
        *("training", "arm", "trained numbers", "rate", "accuracy (range)"),
        *("‖ΔW‖/‖W‖", "eff. rank", "stable rank", "99 %"),
    )
    first = results.runs[0]["the start"]
    rows = [["–", f"the start, {first['digest']}", "–", "–", f"{first['accuracy']:.1%}", *["–"] * 4]]
    for name, training in TRAININGS.items():
        for arm in training.rates:
            runs = [figures[f"{name}, {arm}"] for figures in results.runs]
            mean = {key: statistics.fmean(seed[key] for seed in runs) for key in runs[0]}
            cells = [f"{mean['trained']:,.0f}", f"{training.rates[arm]:g}"]
            cells += [spread([seed["accuracy"] for seed in runs], ".1%"), f"{mean['relative']:.2f}"]
            cells += [f"{mean[key]:.1f}" for key in ("effective_rank", "stable_rank", "rank_99")]
            rows.append([name, arm, *cells])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw accuracy by rank, a point for each seed; and below it the ranks of the updates."""
    panels = figure.subplots(2, len(TRAININGS), squeeze=False, sharey="row")
    kinds = (
        ("rank_99", "for 99 %", "C1s"),
        ("effective_rank", "effective", "C2o"),
        ("stable_rank", "stable", "C3^"),
    )
    for column, (name, training) in enumerate(TRAININGS.items()):
        places = [n for n, arm in enumerate(RANKS) if arm in training.rates]
        arms = [[figures[f"{name}, {arm}"] for figures in results.runs] for arm in training.rates]
        top, below = panels[0][column], panels[1][column]
        top.axhline(results.runs[0]["the start"]["accuracy"], color="0.6", linestyle=":", label="the start")
        for x, seeds in zip(places, arms, strict=True):
            top.plot([x] * len(seeds), [seed["accuracy"] for seed in seeds], "o", color="C0", alpha=0.5)
        means = [statistics.fmean(seed["accuracy"] for seed in seeds) for seeds in arms]
        top.plot(places, means, "C0-", label="mean")
        top.set_title(name)
        most = [RANKS[arm] or HIDDEN for arm in training.rates]
        below.plot(places, most, "_", color="0.5", markersize=24, label="the highest possible")
        for key, label, style in kinds:
            heights = [statistics.fmean(seed[key] for seed in seeds) for seeds in arms]
            below.plot(places, heights, style, label=label)
        below.set_yscale("log", base=2)
        below.set_yticks([1, 4, 32], ["1", "4", "32"])
        for axes in (top, below):
            axes.set_xticks(range(len(RANKS)), [arm.removeprefix("rank ") for arm in RANKS])
        below.set_xlabel("rank of the adapter")
    panels[0][0].set(ylabel="accuracy", ylim=(0, 1.03))
    panels[1][0].set_ylabel("rank of the update")
    for first in panels[:, 0]:
        first.legend(frameon=False, fontsize=8)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(7.0, 6.0))
