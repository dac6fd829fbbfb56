"""LoRA of ranks 1, 4, 16 and 64 against full fine-tuning, in SFT and in GRPO, with the ranks of the updates.

Both start from stages of recipes/pretrain_to_reasoner.toml, a Llama of 126 000 weights. SFT is the recipe's
own, on 400 sums with their answers, drawn by the seed, from the pretrained model, which has read sums and has
yet to answer. GRPO is shorter than the recipe's, from the SFT stage. Accuracy is that of the greedy answer to
200 held-out sums. Ranks are those of `posttrain run inspect`, medians over the 14 matrices that an adapter
has; none can be above 64.
"""

import json
import random
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from posttrain.api.export import write_merged
from posttrain.api.opening import train
from posttrain.data.arithmetic import arithmetic
from posttrain.evaluation.changes import compare, summary
from posttrain.recipe import config
from posttrain_study.claims.experiment import (
    Experiment,
    Figures,
    Report,
    Results,
    VerdictRule,
    markdown,
    spread,
)
from posttrain_study.claims.reasoner import SUMS, accuracy, last_checkpoint, recipe, stages

QUESTIONS, START_SEED = 400, 1
RANKS = {"rank 1": 1, "rank 4": 4, "rank 16": 16, "rank 64": 64, "full": 0}
MEASURED = ("accuracy", "relative", "effective_rank", "stable_rank", "rank_99")


@dataclass(frozen=True)
class Training:
    """A stage of the pipeline, the stage that it starts from, and changes of its recipe."""

    start: str
    sets: tuple[str, ...]
    rates: dict[str, float]
    """Learning rate of each arm: the best of a short list on seed 100, which is not reported."""


TRAININGS = {
    "sft": Training(
        "03-pretrain", (), {"rank 1": 1e-2, "rank 4": 1e-2, "rank 16": 1e-2, "rank 64": 1e-2, "full": 6e-3}
    ),
    "grpo": Training(
        "04-sft",
        ("rollout.groups=32", "rollout.max_rounds=2", "run.updates=30", "eval.every=", "eval.limit=0"),
        {"rank 1": 1.5e-3, "rank 4": 5e-3, "rank 16": 5e-3, "rank 64": 5e-3, "full": 5e-4},
    ),
}


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train every arm of both stages from the same start. Runs that OUT holds are not made again."""
    report("lora_rank, the start")
    start = stages(out / "start", START_SEED)
    figures: Figures = {}
    for name, training in TRAININGS.items():
        model = last_checkpoint(start / training.start) / "model"
        figures[f"{name}, the start"] = {"accuracy": accuracy(model)}
        for arm in RANKS:
            report(f"lora_rank, seed {seed}, {name}, {arm}")
            figures[f"{name}, {arm}"] = run(name, arm, training.rates[arm], seed, model, out)
    return figures


def run(name: str, arm: str, lr: float, seed: int, start: Path, out: Path) -> dict[str, float]:
    """Return the figures of a run, which is made unless it is there."""
    place = out / f"{name}-{arm.replace(' ', '-')}-{lr:g}-{seed}"
    result = place / "result.json"
    if not result.exists():
        shutil.rmtree(place, ignore_errors=True)
        sets = [f"model.path={start}", f"run.seed={seed}", "run.threads=1", f"optim.lr={lr}"]
        sets += [*TRAININGS[name].sets, *([f"lora.rank={RANKS[arm]}"] if RANKS[arm] else [])]
        sets += [f"task.data.path={questions(seed, out)}"] if name == "sft" else []
        loaded = config.read(recipe(name), sets)
        train(loaded, place, title=name, resume=False, view=lambda kind, data: None)
        result.write_text(json.dumps(figures_of(loaded, place)) + "\n")
    figures: dict[str, float] = json.loads(result.read_text())
    return figures


def questions(seed: int, out: Path) -> Path:
    """Write sums with their answers, as lines of the text that the model was pretrained on."""
    file = out / f"questions-{seed}.jsonl"
    lines = []
    for task in random.Random(seed).sample(arithmetic("train", SUMS), QUESTIONS):
        a, b = task.fields["operands"]
        pair = {"prompt": task.messages[0]["content"], "completion": f"{a} + {b} = {task.answer}"}
        lines.append(json.dumps(pair) + "\n")
    file.write_text("".join(lines))
    return file


def figures_of(loaded: config.LoadedRecipe, place: Path) -> dict[str, float]:
    """Return the accuracy of a trained model, and how far its matrices moved, in how many directions."""
    last = last_checkpoint(place)
    update = compare(last, loaded.recipe, Path(loaded.recipe.model.path), None)
    changes = [update.change(matrix) for matrix in update.names() if ".layers." in matrix]
    model = last / "model"
    if (last / "adapter").exists():
        model = place / "merged"
        write_merged(loaded, last / "adapter", model)
    lines = [json.loads(text) for text in (place / "metrics.jsonl").read_text().splitlines()]
    return {
        "accuracy": accuracy(model),
        "loss": statistics.fmean(line["loss"] for line in lines[-10:]),
        **{key: value for key, value in summary(changes).items() if key in MEASURED},
        "trained": count_trained(last),
        "seconds": lines[-1]["seconds"],
    }


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
        "accuracy after SFT, an adapter of rank 64 minus one of rank 4",
        difference("sft", "rank 64", "rank 4"),
    ),
}


def table(results: Results) -> str:
    """Return mean and range over seeds of the accuracy, and means of the rest."""
    head = (
        *("training", "arm", "trained numbers", "rate", "accuracy (range)", "loss at the end"),
        *("‖ΔW‖/‖W‖", "eff. rank", "stable rank", "99 %", "seconds"),
    )
    rows = []
    for name, training in TRAININGS.items():
        start = results.runs[0][f"{name}, the start"]["accuracy"]
        rows.append([name, "the start", "–", "–", f"{start:.1%}", *["–"] * 6])
        for arm in RANKS:
            runs = [figures[f"{name}, {arm}"] for figures in results.runs]
            mean = {key: statistics.fmean(seed[key] for seed in runs) for key in runs[0]}
            cells = [f"{mean['trained']:,.0f}", f"{training.rates[arm]:g}"]
            cells += [spread([seed["accuracy"] for seed in runs], ".1%"), f"{mean['loss']:.3f}"]
            cells += [f"{mean['relative']:.2f}"]
            cells += [f"{mean[key]:.1f}" for key in ("effective_rank", "stable_rank", "rank_99", "seconds")]
            rows.append([name, arm, *cells])
    return markdown(head, rows)


def draw(results: Results, figure: Any) -> None:
    """Draw accuracy by rank, a point for each seed; and below it the ranks of the updates."""
    panels = figure.subplots(2, len(TRAININGS), squeeze=False, sharey="row")
    places = list(range(len(RANKS)))
    kinds = (
        ("rank_99", "for 99 %", "C1s"),
        ("effective_rank", "effective", "C2o"),
        ("stable_rank", "stable", "C3^"),
    )
    for column, name in enumerate(TRAININGS):
        arms = [[figures[f"{name}, {arm}"] for figures in results.runs] for arm in RANKS]
        top, below = panels[0][column], panels[1][column]
        start = results.runs[0][f"{name}, the start"]["accuracy"]
        top.axhline(start, color="0.6", linestyle=":", label="the start")
        for x, seeds in enumerate(arms):
            top.plot([x] * len(seeds), [seed["accuracy"] for seed in seeds], "o", color="C0", alpha=0.5)
        means = [statistics.fmean(seed["accuracy"] for seed in seeds) for seeds in arms]
        top.plot(places, means, "C0-", label="mean")
        top.set_title(name)
        most = [rank or 64 for rank in RANKS.values()]
        below.plot(places, most, "_", color="0.5", markersize=24, label="the highest possible")
        for key, label, style in kinds:
            heights = [statistics.fmean(seed[key] for seed in seeds) for seeds in arms]
            below.plot(places, heights, style, label=label)
        below.set_yscale("log", base=2)
        below.set_yticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        for axes in (top, below):
            axes.set_xticks(places, [arm.removeprefix("rank ") for arm in RANKS])
        below.set_xlabel("rank of the adapter")
    panels[0][0].set(ylabel="accuracy", ylim=(0, 1.03))
    panels[1][0].set_ylabel("rank of the update")
    for first in panels[:, 0]:
        first.legend(frameon=False, fontsize=8)


EXPERIMENT = Experiment(measure, table, draw, RULES, first_seed=1, size=(7.0, 6.0))
