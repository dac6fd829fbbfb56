"""Searches of conjunctions in Coq under a policy that knows nothing: what taking goals apart is worth.

    python benchmarks/parts.py --parts 1,2,3 --tasks 48 --seeds 3 --moves 256

Each theorem is a conjunction of random theorems ([task.propositional], low = 4, high = 8). The policy says
each tactic that the form of a move allows as likely as any other, and none twice in a state. What is found is
judged by the verifier `coq`; a search of which it refuses the proof is counted as refused.
"""

import argparse
import json
import random
from collections.abc import Callable
from functools import partial
from math import log
from pathlib import Path

from posttrain.report import write
from posttrain.search.choice import SearchChoice
from posttrain.search.protocol import Apply, Budget, Move, Propose, State
from posttrain.search.record import record
from posttrain.search.strategies.best_first import best_first, best_of_n
from posttrain.search.strategies.hypertree import hypertree
from posttrain.search.strategies.puct import puct
from posttrain.search.tree import Search, Tree
from posttrain.types import Task
from posttrain_prove.coq.moves import CoqTransitions
from posttrain_prove.coq.verifier import Coq
from posttrain_prove.tasks.propositional import Propositional, propositional

SEARCHES = {
    "hypertree": hypertree,
    "best_first": best_first,
    "puct": partial(puct, values=False),
    "best_of_n": best_of_n,
}
FORM = ("intro.", "split.", "left.", "right.", "exfalso.", "assumption.")


def conjunctions(parts: int, count: int) -> list[Task]:
    """Theorems of so many parts, over four atoms."""
    made = propositional("held_out", Propositional(low=4, high=8, held_out=count * parts))
    bodies = [str(task.fields["statement"]).partition(": Prop, ")[2] for task in made]
    tasks = []
    for n in range(count):
        body = " /\\ ".join(f"({each})" for each in bodies[n * parts : (n + 1) * parts])
        atoms = " ".join("ABCD")
        fields = {"name": "t", "statement": f"forall {atoms} : Prop, {body}", "opening": f"intros {atoms}."}
        tasks.append(Task(id=f"{parts}-{n}", messages=({"role": "user", "content": body},), fields=fields))
    return tasks


def says(question: Propose, seed: int, repeats: bool) -> list[Move]:
    """The next draws of a state."""
    hypotheses = str(question.state.shown[0]["content"]).partition("======")[0].splitlines()
    names = [line.partition(" :")[0] for line in hypotheses]
    known = [*FORM, *(f"{tactic} {name}." for name in names for tactic in ("apply", "destruct"))]
    dice = random.Random(f"{seed} {question.state.task.id} {question.state.key}")
    if repeats:
        drawn = dice.choices(known, k=question.first + question.count)
    else:
        drawn = dice.sample(known, len(known))
    chance = log((1 - 1e-6) / len(known))
    return [Move(text, chance) for text in drawn[question.first :][: question.count]]


def run(search: Search, steps: CoqTransitions, says: Callable[[Propose], list[Move]]) -> Tree:
    """The tree of a search, under a policy that says so."""
    try:
        questions = next(search)
        while True:
            answers = []
            for q in questions:
                assert isinstance(q, Propose | Apply)
                answers.append(says(q) if isinstance(q, Propose) else steps.apply(q.asked))
            questions = search.send(answers)
    except StopIteration as end:
        tree: Tree = end.value
        return tree


def main() -> None:
    """Prints, for each number of parts and each strategy, how many were proved within budgets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="1,2,3")
    parser.add_argument("--strategies", default=",".join(SEARCHES))
    parser.add_argument("--tasks", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--moves", type=int, default=256)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--judge", action="store_true", help="Have each proof judged too.")
    parser.add_argument("--out", type=Path, help="A new directory for a report of the last number of parts.")
    given = parser.parse_args()
    steps, judge = CoqTransitions(), Coq()
    budgets = [given.moves // 4, given.moves // 2, given.moves]
    for parts in map(int, given.parts.split(",")):
        tasks = conjunctions(parts, given.tasks)
        for name in given.strategies.split(","):
            spent: list[list[int]] = []
            refused, lines = 0, []
            for seed in range(given.seeds):
                spent.append([])
                for task in tasks:
                    [root] = steps.begin([task])
                    assert isinstance(root, State)
                    search = SEARCHES[name](root, Budget(moves=given.moves, depth=64), width=given.width)
                    tree = run(search, steps, partial(says, seed=seed, repeats=name == "best_of_n"))
                    if tree.end and given.judge and judge(task, tree.end.text).score != 1.0:
                        refused += 1
                    elif tree.end:
                        spent[-1].append(tree.drawn)
                    told = {"task": task.id, "label": "proved" if tree.end else "unsolved"}
                    told |= {"answer": tree.end.text if tree.end else "", "solved": tree.end is not None}
                    choice = SearchChoice(strategy=name, moves=given.moves)  # type: ignore[arg-type]
                    lines.append(told | {"reason": "", "score": 1.0} | record(task, tree, choice))
            rows = [[sum(m <= budget for m in each) for each in spent] for budget in budgets]
            told_rows = "  ".join(
                f"{b}: {'/'.join(map(str, row))}" for b, row in zip(budgets, rows, strict=True)
            )
            print(f"{parts} parts  {name:10}  of {given.tasks}  {told_rows}  refused {refused}", flush=True)
            if given.out:
                (given.out / "trees").mkdir(parents=True, exist_ok=True)
                text = "".join(json.dumps(line) + "\n" for line in lines)
                (given.out / "trees" / f"{name}.jsonl").write_text(text)
    if given.out:
        (given.out / "config.toml").write_text('[search]\nstrategy = "hypertree"\n')
        (given.out / "plan.json").write_text(json.dumps({"title": "conjunctions", "sections": []}))
        print(write(given.out))
    steps.close()


if __name__ == "__main__":
    main()
