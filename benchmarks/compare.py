"""Ratios from the JSON files that run.sh wrote, as a Markdown table, and the plot of the learning curves.

python benchmarks/compare.py runs/bench
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any


def offline(found: dict[str, Any], method: str, speed: str, unit: str, side: str = "native") -> None:
    """SFT or DPO against the fastest of TRL's forms, and the memory of both with the same microbatch."""
    forms = {k: v for k, v in found.items() if k.startswith(f"trl-{method}-")}
    ours = found.get(f"{side}-{method}")
    if not forms or ours is None:
        return

    def against(form: str, key: str, what: str, digits: str, *, higher: bool) -> None:
        theirs, own = ([r[key] for r in result["repeats"]] for result in (forms[form], ours))
        row(what, theirs, own, digits, higher=higher)

    best = max(forms, key=lambda k: forms[k][speed]["mean"])
    against(best, speed, f"{side} {method}, {best}, {unit}", "{:.2f}", higher=True)
    alike = {k: v for k, v in forms.items() if v["settings"]["microbatch"] == ours["settings"]["microbatch"]}
    least = min(alike, key=lambda k: alike[k]["peak_mib_over_start"]["mean"])
    for key, name in (
        ("peak_mib", "process"),
        ("peak_mib_over_start", "over what was there before the weights"),
    ):
        what = f"peak memory of {side} {method}, {least}, {name}, MiB"
        against(least, key, what, "{:.0f}", higher=False)


def main() -> None:
    """Prints every comparison for which both files are there."""
    folder = Path(sys.argv[1])
    found = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"))}
    print("| what | theirs | ours | ratio |\n|---|---|---|---|")
    for dtype in ("bfloat16", "float32"):
        if f"generate-{dtype}" in found and f"native-{dtype}" in found:
            theirs, ours = (speeds(found[f"{k}-{dtype}"]) for k in ("generate", "native"))
            row(f"sampling, {dtype}, tokens/s", theirs, ours, "{:.0f}", higher=True)
    if "trl-step" in found and "native-step" in found:
        # The first step of each grows memory and warms caches.
        theirs, ours = ([s["seconds"] for s in found[k]["steps"][1:]] for k in ("trl-step", "native-step"))
        row("one GRPO step, s", theirs, ours, "{:.1f}", higher=False)
    for rows in (8, 64):
        if f"trl-memory-{rows}" in found and f"native-memory-{rows}" in found:
            pair = [found[f"{k}-memory-{rows}"]["steps"][1:] for k in ("trl", "native")]
            for key, name in (
                ("peak_resident_mib_in_training", "process"),
                ("peak_mib_over_before", "over what was there before"),
            ):
                theirs, ours = ([s[key] for s in steps] for steps in pair)
                row(
                    f"peak memory of a training step, {rows} rows, {name}, MiB",
                    theirs,
                    ours,
                    "{:.0f}",
                    higher=False,
                )
    for side in ("native", "frugal"):
        offline(found, "sft", "tokens_per_second", "tokens/s", side)
        offline(found, "dpo", "pairs_per_second", "pairs/s", side)
    curves(found, folder)


def speeds(result: dict[str, Any]) -> list[float]:
    """Tokens a second of each repeat."""
    return [r["tokens_per_second"] for r in result["repeats"]]


def row(name: str, theirs: list[float], ours: list[float], form: str, *, higher: bool) -> None:
    """One line: medians with their ranges, and how many times better ours is."""
    a, b = statistics.median(theirs), statistics.median(ours)
    ratio = b / a if higher else a / b
    cells = [
        f"{form.format(statistics.median(x))} ({form.format(min(x))}–{form.format(max(x))})"
        for x in (theirs, ours)
    ]
    print(f"| {name} | {cells[0]} | {cells[1]} | {ratio:.2f}× |")


def curves(found: dict[str, Any], folder: Path) -> None:
    """Draws the reward of both sides over the steps, each seed thin and the mean thick."""
    sides = {
        name: [[s["reward"] for s in v["steps"]] for k, v in found.items() if k.startswith(f"{name}-curve-")]
        for name in ("trl", "native")
    }
    if not all(sides.values()):
        return
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    for (_, runs), colour, label in zip(
        sides.items(), ("tab:orange", "tab:blue"), ("TRL 1.16", "posttrain"), strict=True
    ):
        length = min(map(len, runs))
        for run in runs:
            axis.plot(range(1, len(run) + 1), run, color=colour, alpha=0.25, linewidth=1)
        mean = [statistics.fmean(run[i] for run in runs) for i in range(length)]
        axis.plot(
            range(1, length + 1), mean, color=colour, linewidth=2.5, label=f"{label}, {len(runs)} seeds"
        )
    axis.set(
        xlabel="optimiser step", ylabel="mean reward of 64 samples", title="GRPO on two-operand addition"
    )
    axis.legend()
    figure.tight_layout()
    figure.savefig(folder / "curves.svg")
    print(f"\ncurves: {folder / 'curves.svg'}")


if __name__ == "__main__":
    main()
