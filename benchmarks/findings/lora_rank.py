"""LoRA of ranks 1, 4, 16 and 64 against full fine-tuning, in SFT and in GRPO, with the ranks of the updates.

Both start from stages of recipes/pretrain_to_reasoner.toml, a Llama of 126 000 weights. SFT is the recipe's
own, on 400 sums with their answers, drawn by the seed, from the pretrained model, which has read sums and has
yet to answer. GRPO is shorter than the recipe's, from the SFT stage. Accuracy is that of the most likely
answer to 200 held-out sums. Ranks are those of `posttrain run inspect`, medians over the 14 matrices that an
adapter has; none can be above 64.

    python benchmarks/findings/lora_rank.py --tune --out runs/findings/lora_rank
    python benchmarks/findings/lora_rank.py --seeds 3 --out runs/findings/lora_rank

The first line trains every arm with each rate of its short list, on seed 100; the second takes the best of
them, which are written in CHOSEN. Without --start the pipeline makes the stages first, once, from seed 1.
Runs that are there are not made again.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from mathcheck.plugin.number import Number
from posttrain.api.export import write_merged
from posttrain.api.opening import train
from posttrain.data.arithmetic import Arithmetic, arithmetic
from posttrain.evaluation.changes import compare, summary
from posttrain.evaluation.compare import Compare, answers
from posttrain.models import checkpoint
from posttrain.process.machine import configure
from posttrain.recipe import config
from posttrain.recipe.verifier import VerifierChoice
from posttrain.types import Sampling

ROOT = Path(__file__).resolve().parent.parent.parent
PIPELINE = ROOT / "recipes" / "pretrain_to_reasoner.toml"
SUMS = Arithmetic(low=2, high=49, held_out=200, template="What is {a} + {b}?")
QUESTIONS, TUNING = 400, 100
RANKS = {"rank 1": 1, "rank 4": 4, "rank 16": 16, "rank 64": 64, "full": 0}
MEASURED = ("accuracy", "relative", "effective_rank", "stable_rank", "rank_99")


@dataclass(frozen=True)
class Training:
    """A stage of the pipeline, with what is changed, and its rates to choose from."""

    recipe: str
    start: str
    sets: tuple[str, ...]
    full: tuple[float, ...]
    adapter: tuple[float, ...]

    def rates(self, arm: str) -> tuple[float, ...]:
        """The short list of an arm."""
        return self.adapter if RANKS[arm] else self.full


TRAININGS = {
    "sft": Training("sft.toml", "03-pretrain", (), (1e-3, 3e-3, 6e-3), (3e-3, 1e-2, 3e-2)),
    "grpo": Training(
        "grpo.toml",
        "04-sft",
        ("rollout.groups=32", "rollout.max_rounds=2", "run.updates=30", "eval.every=", "eval.limit=0"),
        (5e-4, 1e-3),
        (1.5e-3, 5e-3),
    ),
}
CHOSEN = {
    "sft": {"rank 1": 1e-2, "rank 4": 1e-2, "rank 16": 1e-2, "rank 64": 1e-2, "full": 6e-3},
    "grpo": {"rank 1": 1.5e-3, "rank 4": 5e-3, "rank 16": 5e-3, "rank 64": 5e-3, "full": 5e-4},
}


def main() -> None:
    """Makes the runs that are missing, prints the table and draws it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="try the rates on a seed that is not reported")
    parser.add_argument("--only", action="append", choices=list(TRAININGS), help="these trainings alone")
    parser.add_argument("--start", type=Path, help="a directory of the pipeline; made if not given")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(1)
    options.out.mkdir(parents=True, exist_ok=True)
    start = options.start or made(options.out / "start")
    chosen = options.only or list(TRAININGS)
    if options.tune:
        for name in chosen:
            for arm in RANKS:
                tried = [
                    (run(name, arm, lr, TUNING, start, options.out), lr) for lr in TRAININGS[name].rates(arm)
                ]
                found = ", ".join(f"{lr:g}: {said['accuracy']:.3f}" for said, lr in tried)
                print(f"{name}, {arm}: {found}", flush=True)
        return
    seeds = range(1, options.seeds + 1)
    runs = {
        (name, arm): [run(name, arm, CHOSEN[name][arm], seed, start, options.out) for seed in seeds]
        for name in chosen
        for arm in RANKS
    }
    before = {name: accuracy(newest(start / TRAININGS[name].start) / "model") for name in chosen}
    print(table(before, runs))
    draw(before, runs, options.out / "lora_rank.svg")


def made(place: Path, seed: int = 1) -> Path:
    """The pipeline's stages from this seed, its GRPO stage cut to one update."""
    if not (place / "pipeline.html").exists():
        shutil.rmtree(place, ignore_errors=True)
        words = [
            sys.executable,
            "-m",
            "posttrain",
            "train",
            str(PIPELINE),
            "--run-dir",
            str(place),
            "--quiet",
        ]
        short = ["grpo.run.updates=1", "grpo.rollout.groups=2", "compare.limit=1", f"nothing.seed={seed}"]
        stages = ("pretrain", "sft", "grpo")
        seeded = [f"{stage}.run.{key}" for stage in stages for key in (f"seed={seed}", "threads=1")]
        subprocess.run(
            [*words, *(word for each in (*short, *seeded) for word in ("--set", each))], check=True
        )
    return place


def newest(place: Path) -> Path:
    """The last checkpoint of a run."""
    found, _ = checkpoint.newest(place / "checkpoints")
    if found is None:
        sys.exit(f"{place} has no checkpoint")
    return found


def run(name: str, arm: str, lr: float, seed: int, start: Path, out: Path) -> dict[str, float]:
    """What a run came to; made unless it is there."""
    place = out / f"{name}-{arm.replace(' ', '-')}-{lr:g}-{seed}"
    result = place / "result.json"
    if not result.exists():
        shutil.rmtree(place, ignore_errors=True)
        of = TRAININGS[name]
        sets = [f"model.path={newest(start / of.start) / 'model'}", f"run.seed={seed}", "run.threads=1"]
        sets += [f"optim.lr={lr}", *of.sets, *([f"lora.rank={RANKS[arm]}"] if RANKS[arm] else [])]
        sets += [f"task.data.path={questions(seed, out)}"] if name == "sft" else []
        recipe = config.read(PIPELINE.with_suffix("") / of.recipe, sets)
        train(recipe, place, title=name, resume=False, view=lambda kind, data: None)
        result.write_text(json.dumps(measured(recipe, place)) + "\n")
    found: dict[str, float] = json.loads(result.read_text())
    print(f"{place.name}: " + ", ".join(f"{key} {found[key]:.3g}" for key in found), file=sys.stderr)
    return found


def questions(seed: int, out: Path) -> Path:
    """A file of sums with their answers, as lines of the text that the model was pretrained on."""
    file = out / f"questions-{seed}.jsonl"
    lines = []
    for task in random.Random(seed).sample(arithmetic("train", SUMS), QUESTIONS):
        a, b = task.fields["operands"]
        pair = {"prompt": task.messages[0]["content"], "completion": f"{a} + {b} = {task.answer}"}
        lines.append(json.dumps(pair) + "\n")
    file.write_text("".join(lines))
    return file


def measured(recipe: config.LoadedRecipe, place: Path) -> dict[str, float]:
    """How often the trained model is right, and how its adapted matrices moved, in how many directions."""
    last = newest(place)
    update = compare(last, recipe.recipe, Path(recipe.recipe.model.path), None)
    moved = [update.change(matrix) for matrix in update.names() if ".layers." in matrix]
    model = last / "model"
    if (last / "adapter").exists():
        model = place / "merged"
        write_merged(recipe, last / "adapter", model)
    lines = [json.loads(x) for x in (place / "metrics.jsonl").read_text().splitlines()]
    ranks = {key: found for key, found in summary(moved).items() if key in MEASURED}
    return {
        "accuracy": accuracy(model),
        "loss": statistics.fmean(line["loss"] for line in lines[-10:]),
        **ranks,
        "trained": trained(last),
        "seconds": lines[-1]["seconds"],
    }


def trained(last: Path) -> int:
    """How many numbers a run trained: those of its adapter, or all of the model's."""
    folder = last / "adapter" if (last / "adapter").exists() else last / "model"
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(str(file), framework="pt") as opened:
            count += sum(opened.get_tensor(key).numel() for key in opened.keys())  # noqa: SIM118
    return count


def accuracy(model: Path) -> float:
    """The share of held-out sums whose most likely answer is right."""
    asked = Compare(
        stages=("one", "other"),
        arithmetic=SUMS,
        verifier=VerifierChoice(number=Number(where="last")),
        sampling=Sampling(temperature=0.0, max_new_tokens=14),
        limit=SUMS.held_out,
    )
    return statistics.fmean(x.label == "right" for x in answers(asked, str(model), lambda done, of: None))


Runs = dict[tuple[str, str], list[dict[str, float]]]


def table(before: dict[str, float], runs: Runs) -> str:
    """Markdown: mean and range over seeds of the accuracy, means of the rest."""
    lines = [
        "| training | arm | numbers trained | rate | accuracy (range) | loss at the end "
        "| ‖ΔW‖/‖W‖ | eff. rank | stable rank | 99 % | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, arm), found in runs.items():
        if arm == next(iter(RANKS)):
            lines.append(f"| {name} | the start | – | – | {before[name]:.1%} | – | – | – | – | – | – |")
        mean = {key: statistics.fmean(x[key] for x in found) for key in found[0]}
        right = [x["accuracy"] for x in found]
        cells = [
            f"{mean['trained']:,.0f}",
            f"{CHOSEN[name][arm]:g}",
            f"{mean['accuracy']:.1%} ({min(right):.1%}–{max(right):.1%})",
            f"{mean['loss']:.3f}",
            f"{mean['relative']:.2f}",
            *(f"{mean[key]:.1f}" for key in ("effective_rank", "stable_rank", "rank_99", "seconds")),
        ]
        lines.append(f"| {name} | {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(before: dict[str, float], runs: Runs, out: Path) -> None:
    """Accuracy by rank, a point a seed; and below it the ranks of the updates."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    places, names = list(range(len(RANKS))), list(before)
    figure, rows = pyplot.subplots(2, len(names), figsize=(3.5 * len(names), 6), squeeze=False, sharey="row")
    for column, name in enumerate(names):
        found = [runs[name, arm] for arm in RANKS]
        top, below = rows[0][column], rows[1][column]
        top.axhline(before[name], color="0.6", linestyle=":", label="the start")
        for x, seeds in enumerate(found):
            top.plot([x] * len(seeds), [s["accuracy"] for s in seeds], "o", color="C0", alpha=0.5)
        top.plot(
            places, [statistics.fmean(s["accuracy"] for s in seeds) for seeds in found], "C0-", label="mean"
        )
        top.set_title(name)
        most = [rank or 64 for rank in RANKS.values()]
        below.plot(places, most, "_", color="0.5", markersize=24, label="the most there can be")
        kinds = (
            ("rank_99", "for 99 %", "C1s"),
            ("effective_rank", "effective", "C2o"),
            ("stable_rank", "stable", "C3^"),
        )
        for key, label, style in kinds:
            below.plot(
                places, [statistics.fmean(s[key] for s in seeds) for seeds in found], style, label=label
            )
        below.set_yscale("log", base=2)
        below.set_yticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        for axes in (top, below):
            axes.set_xticks(places, [arm.removeprefix("rank ") for arm in RANKS])
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        below.set_xlabel("rank of the adapter")
    rows[0][0].set(ylabel="accuracy", ylim=(0, 1.03))
    rows[1][0].set_ylabel("rank of the update")
    for first in rows[:, 0]:
        first.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()
