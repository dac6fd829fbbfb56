"""Searches that a process model guides against best-of-n that it ranks, at equally many steps drawn.

A question is eight digits; an answer has a step for each, on a line of its own as 7-3=4: begin with 0, and at
each digit take the difference of the two without its sign. The policy has learnt from answers of which one
step in five is wrong (any other digit, from which the next steps go on), so it is wrong as often, and never
sure. A process model has learnt from 20,000 other such answers whether each step follows from the one before;
what an answer so far is worth is the product of these probabilities.

Every search draws as many steps, 8 a way from the question to an end. Of the ends that a search comes to, the
answer is the one that the process model finds best; "majority" takes the commonest last digit of the same
ends that best_of_n has, and asks no model.

    python benchmarks/findings/guided.py --seeds 3 --out runs/findings/guided

Models and searches that are there are not made again.
"""

import argparse
import contextlib
import io
import json
import random
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import posttrain
from posttrain import cli
from posttrain.base.toml import dump
from posttrain.process.machine import configure

LENGTH, WRONG, TASKS = 8, 0.2, 200
BUDGETS = (16, 64, 256)
"""Steps that a search may draw."""
STRATEGIES = {
    "best_of_n": {},  # as many ways as the budget has
    "beam": {"width": 4, "keep": 4},
    "best_first": {"width": 4},
    "puct": {"width": 4},
}
LABELLED = 20_000
"""Answers that the process model learns from."""
Row = dict[str, Any]


def main() -> None:
    """Makes what is missing and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(1)
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, int], list[float]] = {}
    for seed in range(options.first, options.first + options.seeds):
        policy, model = made(options.out, seed)
        for strategy in STRATEGIES:
            for budget in BUDGETS:
                place = options.out / f"search-{seed}-{strategy}-{budget}.json"
                if not place.exists():
                    place.write_text(json.dumps(searched(policy, model, strategy, budget, seed)) + "\n")
                told = json.loads(place.read_text())
                for name, share in told.items():
                    found.setdefault((name, budget), []).append(share)
                print(f"seed {seed}, {strategy}, {budget}: {told}", file=sys.stderr, flush=True)
    print(table(found))


def right(digits: str) -> list[int]:
    """The steps of a question.

    >>> right("70390042")
    [7, 7, 4, 5, 5, 5, 1, 1]
    """
    steps, at = list[int](), 0
    for digit in digits:
        at = abs(at - int(digit))
        steps.append(at)
    return steps


def answered(dice: random.Random) -> tuple[str, list[int]]:
    """A question, and an answer with wrong steps."""
    digits = "".join(dice.choices("0123456789", k=LENGTH))
    steps, at = list[int](), 0
    for digit in digits:
        at = abs(at - int(digit))
        if dice.random() < WRONG:
            at = dice.choice([n for n in range(10) if n != at])
        steps.append(at)
    return digits, steps


def shown_steps(question: str, steps: list[int]) -> list[str]:
    """The lines of an answer.

    >>> shown_steps("703", [7, 7, 4])
    ['0-7=7', '7-0=7', '7-3=4']
    """
    before = [0, *steps[:-1]]
    return [f"{a}-{b}={c}" for a, b, c in zip(before, question, steps, strict=True)]


def made(out: Path, seed: int) -> tuple[Path, Path]:
    """A policy and its process model, from nothing; made unless they are there."""
    dice, here = random.Random(f"guided-{seed}"), out / f"models-{seed}"
    here.mkdir(exist_ok=True)
    shown = [answered(dice) for _ in range(60_000)]
    rows = [{"prompt": q, "answer": "\n".join(shown_steps(q, steps))} for q, steps in shown]
    tasks = [{"prompt": q, "answer": str(right(q)[-1])} for q, _ in (answered(dice) for _ in range(TASKS))]
    (here / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks))
    start = here / "new"
    if not start.exists():
        (here / "text.txt").write_text("\n".join(f"{r['prompt']}\n{r['answer']}" for r in rows[:200]))
        words = [
            "model",
            "new",
            start,
            "--text",
            here / "text.txt",
            "--vocab",
            264,
            "--layers",
            2,
            "--hidden",
            64,
        ]
        said([*words, "--seed", seed])
    policy = trained(here / "policy", start, {"name": "sft"}, rows, seed, updates=1000)
    labelled = []
    for question, steps in (answered(dice) for _ in range(LABELLED)):
        before = [0, *steps[:-1]]
        sound = [abs(a - int(b)) == c for a, b, c in zip(before, question, steps, strict=True)]
        written = shown_steps(question, steps)
        labelled.append({"prompt": question, "steps": written, "labels": list(map(int, sound))})
    # From the policy, so that it can read.
    return policy, trained(here / "process", policy, {"name": "process_reward"}, labelled, seed, updates=600)


def trained(place: Path, start: Path, method: Row, rows: list[Row], seed: int, updates: int) -> Path:
    """The model of a run, which is made unless it is there."""
    if not (place / "done").exists():
        judge = method["name"] == "process_reward"
        own: Row = {"critic": {"lr": 3e-3}} if judge else {}
        run = posttrain.train(
            {"path": str(start), "dtype": "float32"},
            method=method,
            data=rows,
            updates=updates,
            seed=seed,
            lr=2e-3 if judge else 3e-3,
            dir=place,
            show="none",
            batch={"batch_size": 64, **({"separator": "\n"} if judge else {})},
            optim={"schedule": "cosine", "warmup_steps": 20},
            checkpoint={"every": 0},
            run={"threads": 1},
            **own,
        )
        (place / "done").write_text(str(run.model))
    return Path((place / "done").read_text())


def searched(policy: Path, model: Path, strategy: str, budget: int, seed: int) -> dict[str, float]:
    """The share of tasks that a search answers rightly; beside best_of_n what a majority of its ends says."""
    tables: Row = {
        "model": {"path": str(policy), "dtype": "float32"},
        "method": {"name": "expert_iteration"},
        "task": {"data": {"path": str(policy_tasks(policy))}},
        "verifier": {"number": {"where": "last"}},
        "sampling": {"max_new_tokens": 8},
        "engine": {"rows": 256},
        "search": {
            "strategy": strategy,
            "moves": budget,
            "depth": LENGTH + 2,
            **({"width": max(budget // LENGTH, 1)} | STRATEGIES[strategy]),
            "value_model": {"paths": [str(model)], "kind": "process", "over_steps": "product"},
        },
        "run": {"seed": seed, "threads": 1},
    }
    recipe = policy_tasks(policy).with_name("search.toml")
    recipe.write_text(dump(tables))
    lines = said(["search", recipe, "--split", "train", "--limit", TASKS, "--json"])
    found = [json.loads(line) for line in lines.splitlines()]
    told = {strategy: statistics.fmean(line["solved"] for line in found)}
    if strategy == "best_of_n":
        answers = [json.loads(line)["answer"] for line in policy_tasks(policy).read_text().splitlines()]
        ordered = sorted(found, key=lambda line: int(line["task"].rpartition(":")[2]))
        told["majority"] = statistics.fmean(
            voted(line) == answer for line, answer in zip(ordered, answers, strict=True)
        )
    return told


def voted(line: Row) -> str:
    """The commonest last digit of the ends, each as often as it was drawn."""
    votes: Counter[str] = Counter()
    ends = {state["number"]: state["shown"] for state in line["states"] if state["done"]}
    for state in line["states"]:
        for move in state["moves"]:
            if move.get("to") in ends:
                votes[ends[move["to"]][-1]] += move["said"]
    return votes.most_common(1)[0][0] if votes else ""


def policy_tasks(policy: Path) -> Path:
    """The tasks beside a policy's run."""
    return next(each for each in policy.parents if each.name.startswith("models-")) / "tasks.jsonl"


def said(words: list[Any]) -> str:
    """What a command prints; it must succeed."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = cli.run([str(word) for word in words])
    assert code == 0, words
    return text.getvalue()


def table(found: dict[tuple[str, int], list[float]]) -> str:
    """Markdown: the mean share of right answers, with the range over seeds."""
    lines = [f"| search | {' | '.join(f'{b} steps' for b in BUDGETS)} |", "|---|" + "---|" * len(BUDGETS)]
    for name in dict.fromkeys(name for name, _ in found):
        cells = []
        for budget in BUDGETS:
            shares = found[name, budget]
            cells.append(f"{statistics.fmean(shares):.0%} ({min(shares):.0%}–{max(shares):.0%})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
