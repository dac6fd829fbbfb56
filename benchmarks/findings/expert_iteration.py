"""Expert iteration against GRPO on the same number of sampled answers.

Both start from the SFT stage of recipes/pretrain_to_reasoner.toml, a Llama of 126 000 weights that answers
sums, and draw 16 x 64 x 8 answers to sums that are not held out. Expert iteration imitates those that the
verifier accepts: after every 512 answers, each as often as it was drawn; or in four rounds of 2048, different
answers to a task once each and every task alike, over two epochs. On the 200 held-out sums are measured:
accuracy of the most likely answer, pass@1 and pass@16 of 16 draws, and the entropy of an answer's token.

    python benchmarks/findings/expert_iteration.py --seeds 3 --out runs/findings/expert_iteration

Without --start the pipeline makes that stage first, once. Runs that are there are not made again.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from math import comb
from pathlib import Path
from typing import Any

from mathcheck.plugin.number import Number
from posttrain.api.opening import train
from posttrain.data.arithmetic import Arithmetic
from posttrain.evaluation.compare import Compare, answers
from posttrain.process.machine import configure
from posttrain.recipe import config
from posttrain.recipe.verifier import VerifierChoice
from posttrain.types import Sampling

ROOT = Path(__file__).resolve().parent.parent.parent
PIPELINE = ROOT / "recipes" / "pretrain_to_reasoner.toml"
RECIPE = ROOT / "recipes" / "pretrain_to_reasoner" / "grpo.toml"
UPDATES, DRAWS, HELD_OUT = 16, 16, 200
COMMON = [
    "rollout.select=all",
    "run.threads=1",
    "optim.lr=1e-3",
    f"eval.limit={HELD_OUT}",
]
OFTEN = [f"run.updates={UPDATES}", "eval.every=4"]
ROUNDS = [
    "run.updates=4",
    f"rollout.groups={64 * UPDATES // 4}",
    "steps.epochs=2",
    "steps.minibatches=8",
    "eval.every=1",
]
CASES: dict[str, list[str]] = {
    "GRPO": ["method.name=grpo", *OFTEN],
    "expert iteration, every 512": [
        "method.name=expert_iteration",
        "method.repeats=counted",
        "method.balance=unbalanced",
        *OFTEN,
    ],
    "expert iteration, four rounds": ["method.name=expert_iteration", *ROUNDS],
}
MEASURED = ("greedy", "pass@1", f"pass@{DRAWS}", "entropy")


def main() -> None:
    """Makes the runs that are missing, prints the table and draws the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--start", type=Path, help="a model that answers sums; made if not given")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(1)
    options.out.mkdir(parents=True, exist_ok=True)
    start = options.start or made(options.out / "start")
    before = kept(options.out / "before.json", lambda: measured(start, seed=0))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for seed in range(options.first, options.first + options.seeds):
        for name, runs in found.items():
            runs.append(run(name, seed, start, options.out))
    print(table(before, found))
    draw(before, found, options.out / "expert_iteration.svg")


def made(place: Path) -> Path:
    """The model of the pipeline's SFT stage; its GRPO stage is cut to one update."""
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
        short = ["grpo.run.updates=1", "grpo.rollout.groups=2", "compare.limit=1"]
        for change in (*short, *(f"{stage}.run.threads=1" for stage in ("pretrain", "sft", "grpo"))):
            words += ["--set", change]
        subprocess.run(words, check=True)
    return newest(place / "04-sft")


def newest(run_dir: Path) -> Path:
    """The model of the last checkpoint."""
    return max((run_dir / "checkpoints").iterdir()) / "model"


def kept(file: Path, make: Callable[[], object]) -> Any:
    """What a file of JSON holds; made first if it is not there."""
    if not file.exists():
        found = make()
        file.write_text(json.dumps(found) + "\n")
    return json.loads(file.read_text())


def run(name: str, seed: int, start: Path, out: Path) -> dict[str, Any]:
    """The curve of a run and what its last model is worth; made unless it is there."""
    place = out / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"

    def make() -> dict[str, Any]:
        shutil.rmtree(place, ignore_errors=True)
        changes = [f"model.path={start}", f"run.seed={seed}", *COMMON, *CASES[name]]
        train(config.read(RECIPE, changes), place, title=name, resume=False, view=lambda kind, data: None)
        curve, drawn = [], 0.0
        for line in (json.loads(x) for x in (place / "metrics.jsonl").read_text().splitlines()):
            drawn += 8 * (line.get("select/kept", 0) + line.get("select/dropped", 0))
            if "eval/accuracy" in line:
                curve.append((drawn, line["eval/accuracy"]))
        return {"curve": curve, **measured(newest(place), seed)}

    found: dict[str, Any] = kept(place.with_suffix(".json"), make)
    said = ", ".join(f"{key} {found[key]:.3f}" for key in MEASURED)
    print(f"{name}, seed {seed}: {said}", file=sys.stderr, flush=True)
    return found


def measured(model: Path, seed: int) -> dict[str, float]:
    """Greedy accuracy, pass@k of DRAWS answers, and -log π a token of them, on the held-out sums."""
    out = {}
    for temperature, samples in ((0.0, 1), (1.0, DRAWS)):
        asked = Compare(
            stages=("one", "other"),
            arithmetic=Arithmetic(low=2, high=49, held_out=HELD_OUT, template="What is {a} + {b}?"),
            verifier=VerifierChoice(number=Number(where="last")),
            sampling=Sampling(temperature=temperature, max_new_tokens=14),
            limit=HELD_OUT,
            samples=samples,
            seed=seed,
        )
        said = answers(asked, str(model), lambda done, of: None)
        right: dict[str, int] = {}
        for answer in said:
            right[answer.task] = right.get(answer.task, 0) + (answer.label == "right")
        if samples == 1:
            out["greedy"] = statistics.fmean(right.values())
            continue
        for k in (1, DRAWS):
            missed = [comb(samples - c, k) / comb(samples, k) for c in right.values()]
            out[f"pass@{k}"] = 1 - statistics.fmean(missed)
        out["entropy"] = -sum(a.logp for a in said) / sum(a.length for a in said)
    return out


def table(before: dict[str, float], found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: mean and range over seeds."""
    begun = [f"{before[key]:.3f}" if key == "entropy" else f"{before[key]:.1%}" for key in MEASURED]
    lines = [
        f"| method | seeds | greedy accuracy | pass@1 | pass@{DRAWS} | entropy, nats a token |",
        "|---|---|---|---|---|---|",
        f"| the start | – | {' | '.join(begun)} |",
    ]
    for name, runs in found.items():
        cells = []
        for key in MEASURED:
            values = [r[key] for r in runs]
            form = "{:.3f} ({:.3f}–{:.3f})" if key == "entropy" else "{:.1%} ({:.1%}–{:.1%})"
            cells.append(form.format(statistics.fmean(values), min(values), max(values)))
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(before: dict[str, float], found: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """Greedy accuracy by answers drawn, and where pass@1, pass@16 and the entropy end."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (curves, ends) = pyplot.subplots(1, 2, figsize=(10, 4.2))
    for n, (name, runs) in enumerate(found.items()):
        drawn = [x for x, _ in runs[0]["curve"]]
        seen = [[r["curve"][i][1] for r in runs] for i in range(len(drawn))]
        colour = f"C{n}"
        curves.plot(drawn, [statistics.fmean(x) for x in seen], "o-", ms=3, color=colour, label=name)
        curves.fill_between(
            drawn, [min(x) for x in seen], [max(x) for x in seen], alpha=0.15, color=colour, lw=0
        )
        ends.plot([r["entropy"] for r in runs], [r[f"pass@{DRAWS}"] for r in runs], "o", color=colour)
        ends.plot([r["entropy"] for r in runs], [r["pass@1"] for r in runs], "^", color=colour)
    ends.plot(
        before["entropy"], before[f"pass@{DRAWS}"], "o", color="k", label=f"pass@{DRAWS}; black: the start"
    )
    ends.plot(before["entropy"], before["pass@1"], "^", color="k", label="pass@1")
    curves.set(xlabel="answers drawn", ylabel="greedy accuracy on held-out sums")
    ends.set(xlabel="entropy, nats a token", ylabel="on held-out sums")
    for axes in (curves, ends):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()
