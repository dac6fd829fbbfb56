"""What rlhf.toml came to: reward models on held-out pairs, and proxy against gold score, update by update.

The proxy is the reward model that a stage is trained against, gold the second one, which learnt from pairs
that the first never saw; here it judges the answers that PPO and GRPO were trained on.

    python recipes/rlhf/curves.py runs/rlhf --out runs/rlhf/curves.svg
"""

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.data.load import load_tasks
from posttrain.models import checkpoint
from posttrain.process.machine import configure
from posttrain.recipe import config
from posttrain.verifiers.model.scorer import Scorer

REWARD, GOLD, POLICIES = "03-reward", "04-gold", {"PPO": "05-ppo", "GRPO": "06-grpo"}
AT_ONCE, WINDOW = 16, 4
Curve = dict[str, list[float]]


def main() -> None:
    """Prints two tables and draws the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pipeline", type=Path, help="the directory of a finished pipeline")
    parser.add_argument("--out", type=Path, required=True, help="where the picture goes")
    options = parser.parse_args()
    configure(1)
    print(reward_models(options.pipeline))
    found, _ = checkpoint.newest(options.pipeline / GOLD / "checkpoints")
    gold = Scorer(str(found and found / "model"), "outcome", dtype="auto", device="cpu")
    curves = {name: curve(options.pipeline / stage, gold) for name, stage in POLICIES.items()}
    print(table(curves))
    draw(curves, options.out)


def lines(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def reward_models(pipeline: Path) -> str:
    """Markdown: accuracy on the held-out pairs, with a standard error, and what length has to do with it."""
    rows = ["| reward model | pairs held out | before | accuracy | chosen shorter | longer | length bias |"]
    rows.append("|---|---|---|---|---|---|---|")
    for stage in (REWARD, GOLD):
        first, *_, last = (line for line in lines(pipeline / stage) if "eval/accuracy" in line)
        right, pairs = last["eval/accuracy"], last["eval/pairs"]
        error = math.sqrt(right * (1 - right) / pairs)
        lengths = " | ".join(f"{last[f'eval/accuracy_{name}']:.1%}" for name in ("shorter", "longer"))
        said = f"{first['eval/accuracy']:.1%} | {right:.1%} ± {error:.1%}"
        rows.append(f"| {stage} | {pairs:.0f} | {said} | {lengths} | {last['eval/length_bias']:+.2f} |")
    return "\n".join(rows)


def curve(run: Path, gold: Scorer) -> Curve:
    """Means over each update's answers: proxy score, gold score, tokens; and nats a token from the start."""
    data = config.read(run / "config.toml").recipe.source.data
    if data is None:
        raise ValueError(f"{run} was trained on no data")
    asked = {task.id: task.messages for task in load_tasks(data)}
    out: Curve = {"proxy": [], "gold": [], "length": [], "kl": []}
    away = {line["update"]: line.get("kl/ref", math.nan) for line in lines(run)}
    for file in sorted((run / "samples").glob("[0-9]*.jsonl")):
        said = [json.loads(line) for line in file.read_text().splitlines()]
        rows = [gold.outcome(asked[each["task"]], response(each)) for each in said]
        scores = [n for at in range(0, len(rows), AT_ONCE) for [n] in gold.numbers(rows[at : at + AT_ONCE])]
        out["gold"].append(statistics.fmean(scores))
        out["proxy"].append(statistics.fmean(each["score"] for each in said if each["score"] is not None))
        out["length"].append(statistics.fmean(sum(each["sampled"]) for each in said))
        out["kl"].append(away[int(file.stem)])
    return out


def response(sample: dict[str, Any]) -> str:
    """What the policy said, without the token that ended it."""
    drawn = [p for p, own in zip(sample["pieces"], sample["sampled"], strict=True) if own]
    return "".join(drawn[:-1] if sample["stop"] == "eos" else drawn)


def table(curves: dict[str, Curve]) -> str:
    """Markdown: the first and the last updates, WINDOW of them together."""
    rows = ["| policy | updates | proxy | gold | tokens | KL, nats a token |", "|---|---|---|---|---|---|"]
    for name, of in curves.items():
        count = len(of["gold"])
        for begin in sorted({0, max(0, (count - WINDOW) // 2), max(0, count - WINDOW)}):
            part = {key: statistics.fmean(found[begin : begin + WINDOW]) for key, found in of.items()}
            cells = f"{part['proxy']:+.2f} | {part['gold']:+.2f} | {part['length']:.1f} | {part['kl']:.4f}"
            rows.append(f"| {name} | {begin + 1}–{min(begin + WINDOW, count)} | {cells} |")
    return "\n".join(rows)


def smoothed(found: Sequence[float]) -> list[float]:
    """Means of the last WINDOW numbers, of fewer at the beginning."""
    return [statistics.fmean(found[max(0, at - WINDOW + 1) : at + 1]) for at in range(len(found))]


def draw(curves: dict[str, Curve], out: Path) -> None:
    """Proxy and gold score, and length, by update."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    panels = {"proxy": "score of the reward model", "gold": "score of the gold model", "length": "tokens"}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(11, 3.6))
    for place, (key, label) in zip(axes, panels.items(), strict=True):
        for colour, (name, of) in enumerate(curves.items()):
            updates = range(1, len(of[key]) + 1)
            place.plot(updates, of[key], ".", color=f"C{colour}", alpha=0.3)
            place.plot(updates, smoothed(of[key]), color=f"C{colour}", label=name)
        place.set(xlabel="update", title=label)
        place.grid(alpha=0.25)
        place.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()
