"""RL at test time on variants of a theorem, against more search for its proof and RL on other theorems.

The world and the Llama are those of value_in_search.py. A target is a held-out theorem that its search does
not prove within FIRST moves. Each gets MORE moves, in three ways:

    plain search     the same search continues
    variants         about PRACTICE moves search variants of the target ([task.variants]), in rounds; after
                     each the Llama learns from the proofs found; the rest searches the target again
    other theorems   the same on fresh theorems of the kind that the Llama was trained on

A move drawn for a variant costs as much as one drawn for the target. Seconds of training are reported too.
"""

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.types import Task
from posttrain_prove.tasks.propositional import propositional
from posttrain_prove.tasks.variants import Variants, variants
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
from posttrain_study.claims.sequents import (
    MOST_TOKENS,
    Guide,
    TreeLearner,
    rows_of,
    search_all,
    spelt,
    theorem_of,
)
from posttrain_study.claims.value_in_search import (
    BEST_FIRST,
    HELD_OUT,
    TRAIN,
    proved_within,
    trained,
)

TARGETS, FIRST, MORE, PRACTICE = 6, 256, 1024, 512
"""Theorems of a seed; moves of the first search, moves after it, and how many go to practice."""
HARD = replace(HELD_OUT, low=28, high=40)
DRAWN, ROUND, MOVES, REPEATS = 96, 16, 16, 20
"""Theorems to practise on at most, those of a round, moves for each, and steps of training after a round."""
WAYS = ("plain search", "variants", "other theorems")


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Give each target the same number of moves in every way."""
    base = trained(seed, report)
    guide = Guide(base.model, seed)
    targets = stalled(seed, guide)
    others = propositional("train", replace(TRAIN, seed=1000 + seed, train=DRAWN))
    elsewhere = practised(base, others, seed)  # the same for every target
    proved: dict[str, list[int]] = {way: [] for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number, target in enumerate(targets):
        report(f"seed {seed}, target {number + 1} of {len(targets)}")
        for way in WAYS:
            start = time.process_time()
            searcher, spent, earlier = guide, 0, 0.0
            if way == "variants":
                searcher, spent, _ = practised(base, variants_of(target, seed), seed)
            elif way == "other theorems":
                searcher, spent, earlier = elsewhere
            # a search that continues is the same search with a larger budget
            room = MORE - spent if spent else FIRST + MORE
            [tree] = search_all([target], searcher, replace(BEST_FIRST, moves=room))
            before = FIRST + spent if spent else 0
            proved[way].append(before + tree.drawn if tree.solved else 0)
            seconds[way].append(time.process_time() - start + earlier)
    return {"targets": len(targets), "moves": proved, "seconds": seconds}


def stalled(seed: int, guide: Guide) -> list[Task]:
    """Return the first held-out theorems that FIRST moves of the guided search neither prove nor exhaust."""
    tasks = propositional("held_out", replace(HARD, seed=seed, held_out=4 * TARGETS))
    tasks = [task for task in tasks if len(spelt(theorem_of(task))) <= MOST_TOKENS]
    trees = search_all(tasks, guide, replace(BEST_FIRST, moves=FIRST))
    pairs = zip(tasks, trees, strict=True)
    return [task for task, tree in pairs if not tree.solved and tree.drawn >= FIRST][:TARGETS]


def variants_of(target: Task, seed: int) -> list[Task]:
    """Return the variants of a theorem that the Llama can read."""
    tasks = variants(Variants(theorem=str(theorem_of(target)[1]), train=DRAWN, seed=seed))
    return [task for task in tasks if len(spelt(theorem_of(task))) <= MOST_TOKENS]


def practised(base: TreeLearner, theorems: Sequence[Task], seed: int) -> tuple[Guide, int, float]:
    """Return a Llama that learnt from proofs of these theorems too, and the moves and seconds for it."""
    learner, spent, start_s = copy.deepcopy(base), 0, time.process_time()
    for start in range(0, len(theorems), ROUND):
        if spent >= PRACTICE:
            break
        guide = Guide(learner.model, seed)
        trees = search_all(theorems[start : start + ROUND], guide, replace(BEST_FIRST, moves=MOVES))
        fresh = [row for tree in trees for row in rows_of(tree, BEST_FIRST)]
        learner.add(fresh)
        learner.train(REPEATS, fresh=len(fresh))
        spent += sum(tree.drawn for tree in trees)
    return Guide(learner.model, seed), spent, time.process_time() - start_s


# ---------------------------------------------------------------------- rule, table and picture


def share(figures: Figures, way: str) -> float:
    """Return the share of targets that are proved in the end."""
    return float(sum(moves > 0 for moves in figures["moves"][way]) / figures["targets"])


RULES = {
    "test_time_rl": VerdictRule(
        f"share of stalled theorems proved with {MORE:,} more moves, RL on their variants minus plain search",
        lambda figures: share(figures, "variants") - share(figures, "plain search"),
        0.05,
    ),
    "test_time_variants": VerdictRule(
        f"share of stalled theorems proved with {MORE:,} more moves, RL on their variants minus on others",
        lambda figures: share(figures, "variants") - share(figures, "other theorems"),
        0.05,
    ),
}


def table(results: Results) -> str:
    """Return the shares proved in each way, the moves spent on practice, and the processor time."""
    rows = []
    for way in WAYS:
        runs = results.runs
        numbers = [sum(n > 0 for n in run["moves"][way]) for run in runs]
        count = f"{sum(numbers)} of {sum(run['targets'] for run in runs)}"
        seconds = [statistics.fmean(run["seconds"][way]) for run in runs]
        cells = [spread([share(run, way) for run in runs], ".0%"), spread(seconds, ".1f")]
        rows.append([way, count, *cells])
    return markdown(("after the first search", "proved", "share, by seed", "seconds a theorem"), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the shares proved by moves."""
    axes, grid = figure.subplots(), list(range(FIRST, FIRST + MORE + 1, 16))
    for n, way in enumerate(WAYS):
        of_runs = [(run["moves"][way], run["targets"]) for run in results.runs]
        curve(axes, grid, [proved_within(grid, *pair) for pair in of_runs], way, f"C{n}")
    axes.axvspan(FIRST, FIRST + PRACTICE, color="grey", alpha=0.08, lw=0)
    axes.text(FIRST + PRACTICE / 2, 0.97, "practice", ha="center", va="top", color="grey")
    axes.set(xlabel="moves drawn for a theorem, practice included", ylabel="theorems proved", ylim=(0, 1))
    axes.legend(frameon=False, loc="center left")


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(7.0, 4.0))
