"""Uniform tasks against three curricula, from the same start, on chains of additions of mixed length.

Tasks and policy are those of process_outcome.py: running sums of digits, and a table that knows some
additions better than others. Chains of 2 to 6 digits come in equal shares; an answer is paid if every step
is right. GRPO draws 200 x 16 x 8 answers to 200 tasks, asked in random order, easiest first within each
epoch, by a band of success rates, or by a bandit over the lengths (docs/curriculum.md); the code that
`[curriculum]` runs decides what comes next. All of it from two starts: a fair one, which takes 38 % of its
steps rightly, and a weak one, which takes 21 %.

    python benchmarks/findings/curriculum.py --seeds 6 --out runs/findings/curriculum

Judged is the chance, computed and not sampled, that every step is right, as the mean over the five lengths.
Runs that are there are not made again.
"""

import statistics
from pathlib import Path
from typing import Any

import torch
from process_outcome import GROUPS, LONGEST, SIZE, Policy, chains, collected, spread, sums
from torch.nn.functional import one_hot

from posttrain.curriculum.curriculum import build_supply
from posttrain.methods.build import build
from posttrain.recipe.settings import Curriculum
from posttrain.types import Task

UPDATES, EVERY, EACH, HELD_OUT = 200, 5, 40, 100
"""EACH and HELD_OUT are chains of each length."""
LENGTHS = range(2, LONGEST + 1)
LR = 0.1
"""Of Adam; with uniform tasks and another seed it ends as well as 0.3, and better than 0.03."""
STARTS = {"fair": 2.0, "weak": 1.0}
KINDS = {
    "uniform": Curriculum(),
    "order": Curriculum(kind="order"),
    "band": Curriculum(kind="band"),
    "bandit": Curriculum(kind="bandit", buckets=len(LENGTHS)),
}
CASES = [f"{start}, {kind}" for start in STARTS for kind in KINDS]


def main() -> None:
    """Makes what is missing, prints the table and draws the curves."""
    found, out = collected(__doc__, CASES, run, seeds=6, shown="all")
    print(table(found))
    draw(found, out / "curriculum.svg")


def asked(seed: int) -> list[Task]:
    """EACH chains of each length; the difficulty is the number of steps."""
    draw = torch.Generator().manual_seed(seed + 4000)
    return [
        Task(id=f"{length}/{n}", messages=(), fields={"difficulty": length - 1, "digits": digits})
        for length in LENGTHS
        for n, digits in enumerate(chains(EACH, draw, length).tolist())
    ]


def sound(questions: torch.Tensor, answers: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """1 at the last of so many steps, if all of them are right."""
    behind = torch.arange(LONGEST - 1) >= length[:, None]
    right = ((answers == sums(questions)) | behind).all(1)
    return one_hot(length - 1, LONGEST - 1) * right[:, None].float()


def run(name: str, seed: int) -> dict[str, list[float]]:
    """How likely held-out chains are answered right, and what was asked, as the run goes on."""
    start, kind = name.split(", ")
    policy = Policy(seed, build("grpo", {}, horizon=LONGEST - 1), LR, STARTS[start])
    tasks = build_supply(KINDS[kind], asked(seed), seed=seed)
    draw, dice = (torch.Generator().manual_seed(seed + more) for more in (1000, 2000))
    held_out = {length: chains(HELD_OUT, dice, length) for length in LENGTHS}
    found: dict[str, list[float]] = {"drawn": [], "all": [], "long": [], "asked": [], "useful": []}
    for update in range(UPDATES + 1):
        if update % EVERY == 0:
            chances = [policy.chances(held_out[length], length)[1] for length in LENGTHS]
            found["drawn"].append(update * GROUPS * SIZE)
            found["all"].append(statistics.fmean(chances))
            found["long"].append(chances[-1])
        taken = [tasks.take()[1] for _ in range(GROUPS)]
        questions = torch.tensor([task.fields["digits"] for task in taken]).repeat_interleave(SIZE, 0)
        length = torch.tensor([task.fields["difficulty"] for task in taken]).repeat_interleave(SIZE)
        answers = policy.answers(questions, draw)
        paid = sound(questions, answers, length)
        rates = paid.sum(1).view(GROUPS, SIZE).mean(1).tolist()
        tasks.observe(list(zip(taken, rates, strict=True)))
        policy.learn(questions, answers, paid, length)
        found["asked"].append(float(length.float().mean()))
        found["useful"].append(statistics.fmean(0 < rate < 1 for rate in rates))
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: mean and range over seeds."""
    drawn = next(iter(found.values()))[0]["drawn"]
    places = [(0, "all"), (len(drawn) // 4, "all"), (len(drawn) // 2, "all"), (-1, "all"), (-1, "long")]
    heads = [f"{'five steps' if key == 'long' else 'right'}, after {drawn[n]:,}" for n, key in places]
    lines = [
        f"| start, tasks | seeds | {' | '.join(heads)} | groups that taught |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        cells = [spread([r[key][n] for r in runs]) for n, key in places]
        cells.append(f"{statistics.fmean(statistics.fmean(r['useful']) for r in runs):.0%}")
        lines.append(f"| {name} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """The learning curves from each start: means over seeds, ranges as bands."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(STARTS), figsize=(10, 4.2), sharey=True)
    for axes, start in zip(panels, STARTS, strict=True):
        for n, kind in enumerate(KINDS):
            runs = found[f"{start}, {kind}"]
            drawn, colour = runs[0]["drawn"], f"C{n}"
            seen = list(zip(*(r["all"] for r in runs), strict=True))
            axes.plot(drawn, [statistics.fmean(x) for x in seen], color=colour, label=kind, lw=1.8)
            axes.fill_between(
                drawn, [min(x) for x in seen], [max(x) for x in seen], color=colour, alpha=0.12, lw=0
            )
        axes.set(xlabel="answers drawn", title=f"{start} start", ylim=(0, 1))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="chance that every step is right")
    panels[1].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out)


if __name__ == "__main__":
    main()
