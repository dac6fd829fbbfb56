"""Searches of equations in Coq under a policy that knows what to try: what lemmas are worth, and whose.

    python benchmarks/sketches.py --tasks 12 --seeds 2 --moves 2048

The equations ([task.peano], two or three operations) are those that are proved with one of four lemmas for a
premise in an eighth of the budget, and not without. In a state the policy says induction on each variable
that has no hypothesis of one, rewriting with each hypothesis from left to right, simpl and reflexivity, each
as likely as any other and none twice. A planner sketches one lemma at a time:

    none      no sketches
    drawn     any equation of one or two operations that holds, as likely as any other
    known     one of the four: n + 0 = n, n + S m = S (n + m), and that addition commutes and associates

What is found is judged by the verifier `coq` with --judge.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import log

from parts import run

from posttrain.search.protocol import Budget, Move, Propose, State
from posttrain.search.strategies.best_first import best_first
from posttrain.search.strategies.hypertree import hypertree
from posttrain.search.tree import Search
from posttrain.types import Task
from posttrain_prove.coq.moves import CoqTransitions
from posttrain_prove.coq.verifier import Coq
from posttrain_prove.tasks.peano import Peano, peano

KNOWN = (
    "forall n : nat, n + 0 = n",
    "forall n m : nat, n + S m = S (n + m)",
    "forall n m : nat, n + m = m + n",
    "forall n m k : nat, n + (m + k) = n + m + k",
)
DRAWN = tuple(
    str(task.fields["statement"])
    for size, count in ((1, 60), (2, 400))
    for task in peano("train", Peano(low=size, high=size, train=count))
)
ARMS: dict[str, tuple[Callable[..., Search], tuple[str, ...]]] = {
    "best_first": (best_first, ()),
    "none": (hypertree, ()),
    "drawn": (partial(hypertree, sketches=4, nested=1), DRAWN),
    "known": (partial(hypertree, sketches=4, nested=1), KNOWN),
}


def theorems(count: int, steps: CoqTransitions, moves: int) -> list[Task]:
    """Equations that are proved with a known lemma for a premise, and not without, in so many moves."""
    found = list[Task]()
    for task in peano("held_out", Peano(low=2, high=3, computed=False, held_out=300)):
        statement = task.fields["statement"]
        premised = [
            {**task.fields, "statement": f"({lemma}) -> {statement}", "opening": "intro H."}
            for lemma in KNOWN
        ]
        given = [replace(task, id=f"{task.id}-{n}", fields=each) for n, each in enumerate(premised)]
        if any(_proved(each, steps, moves) for each in given) and not _proved(task, steps, moves):
            found.append(task)
        if len(found) == count:
            break
    return found


def _proved(task: Task, steps: CoqTransitions, moves: int) -> bool:
    [root] = steps.begin([task])
    assert isinstance(root, State)
    return (
        run(hypertree(root, Budget(moves=moves), width=1), steps, partial(says, seed=0, lemmas=())).end
        is not None
    )


def says(question: Propose, seed: int, lemmas: tuple[str, ...]) -> list[Move]:
    """The next draws of a state."""
    state = question.state
    dice = random.Random(f"{seed} {state.task.id} {state.key} {question.sketch}")
    if question.sketch:
        drawn = dice.sample(lemmas, min(len(lemmas), question.first + question.count))
        chance = log(1 / len(lemmas))
        said = [f"assert ({each})." for each in drawn]
    else:
        known = tried(state)
        said, chance = dice.sample(known, len(known)), log((1 - 1e-6) / len(known))
    # Of a sketch the mean over its tokens counts; an equation has about ten.
    tokens = tuple(range(10)) if question.sketch else ()
    moves = [Move(text, chance, tokens, sketch=question.sketch) for text in said]
    return moves[question.first :][: question.count]


def tried(state: State) -> list[str]:
    """What may help in a state."""
    given, _, goal = state.key.rpartition("============================\n")
    if goal.startswith("forall"):
        return ["intros."]
    lines = [line.partition(" : ") for line in given.splitlines()]
    variables = [name for names, _, kind in lines if kind == "nat" for name in names.split(", ")]
    rules = [name for name, _, kind in lines if "=" in kind]
    begun = {name.removeprefix("IH") for name in rules}
    said = ["reflexivity.", "simpl.", *(f"induction {name}." for name in variables if name not in begun)]
    return said + [f"rewrite {name}." for name in rules]


def main() -> None:
    """Prints, for each planner, how many were proved within budgets, and how many of these with a lemma."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--tasks", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--moves", type=int, default=512)
    parser.add_argument("--judge", action="store_true", help="Have each proof judged too.")
    given = parser.parse_args()
    steps, judge = CoqTransitions(sketches=True), Coq()
    tasks = theorems(given.tasks, steps, given.moves // 8)
    budgets = [given.moves // 8, given.moves // 4, given.moves // 2, given.moves]
    for name in given.arms.split(","):
        strategy, lemmas = ARMS[name]
        rows, used, refused = [], 0, 0
        for seed in range(given.seeds):
            spent = []
            for task in tasks:
                [root] = steps.begin([task])
                assert isinstance(root, State)
                search = strategy(root, Budget(moves=given.moves, depth=64), width=1)
                tree = run(search, steps, partial(says, seed=seed, lemmas=lemmas))
                if tree.end:
                    end = steps.trim(tree.end)
                    spent.append(tree.drawn)
                    used += "assert" in end.text
                    refused += given.judge and judge(task, end.text).score != 1.0
            rows.append([sum(m <= budget for m in spent) for budget in budgets])
        told = "  ".join(
            f"{b}: {'/'.join(map(str, each))}"
            for b, each in zip(budgets, zip(*rows, strict=True), strict=True)
        )
        print(f"{name:10}  of {len(tasks)}  {told}  with a lemma {used}  refused {refused}", flush=True)
    steps.close()


if __name__ == "__main__":
    main()
