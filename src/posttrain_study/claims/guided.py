"""Searches that a process model guides against best-of-n that it ranks, at equally many sampled steps.

A question is eight digits; an answer has a step for each, on a line of its own as 7-3=4: begin with 0, and at
each digit take the difference of the two without its sign. The policy has learnt from answers of which one
step in five is wrong (any other digit, from which the next steps go on), so it is wrong as often, and never
sure. A process model has learnt from 20,000 other such answers whether each step follows from the one before;
the score of a partial answer is the product of these probabilities.

Every search samples as many steps, 8 a way from the question to an end. Of the ends that a search reaches,
the answer is the one that the process model finds best; "majority" takes the commonest last digit of the same
ends that best_of_n has, and asks no model.
"""

import contextlib
import io
import json
import random
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import posttrain
from posttrain import cli
from posttrain.base.toml import dump
from posttrain.errors import RunError
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

LENGTH, WRONG, TASKS = 8, 0.2, 200
BUDGETS = (16, 64, 256)
"""Steps that a search may sample."""
STRATEGIES = {
    "best_of_n": {},  # as many ways as the budget has
    "beam": {"width": 4, "keep": 4},
    "best_first": {"width": 4},
    "puct": {"width": 4},
}
LABELLED = 20_000
"""Answers that the process model learns from."""
Row = dict[str, Any]


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Search with every strategy at every budget. Models and searches that OUT holds are not made again."""
    report(f"guided, seed {seed}, the models")
    policy, model = models(out, seed)
    figures: Figures = {}
    for strategy in STRATEGIES:
        for budget in BUDGETS:
            report(f"guided, seed {seed}, {strategy}, {budget}")
            place = out / f"search-{seed}-{strategy}-{budget}.json"
            if not place.exists():
                place.write_text(json.dumps(search(policy, model, strategy, budget, seed)) + "\n")
            for name, share in json.loads(place.read_text()).items():
                figures.setdefault(name, {})[str(budget)] = share
    return figures


def right(digits: str) -> list[int]:
    """Return the right steps of a question.

    >>> right("70390042")
    [7, 7, 4, 5, 5, 5, 1, 1]
    """
    steps, at = list[int](), 0
    for digit in digits:
        at = abs(at - int(digit))
        steps.append(at)
    return steps


def flawed(dice: random.Random) -> tuple[str, list[int]]:
    """Return a question, and an answer with wrong steps."""
    digits = "".join(dice.choices("0123456789", k=LENGTH))
    steps, at = list[int](), 0
    for digit in digits:
        at = abs(at - int(digit))
        if dice.random() < WRONG:
            at = dice.choice([n for n in range(10) if n != at])
        steps.append(at)
    return digits, steps


def step_lines(question: str, steps: list[int]) -> list[str]:
    """Return the lines of an answer.

    >>> step_lines("703", [7, 7, 4])
    ['0-7=7', '7-0=7', '7-3=4']
    """
    before = [0, *steps[:-1]]
    return [f"{a}-{b}={c}" for a, b, c in zip(before, question, steps, strict=True)]


def models(out: Path, seed: int) -> tuple[Path, Path]:
    """Return a policy and its process model, trained from nothing unless they are there."""
    dice, here = random.Random(f"guided-{seed}"), out / f"models-{seed}"
    here.mkdir(exist_ok=True)
    examples = [flawed(dice) for _ in range(60_000)]
    rows = [{"prompt": q, "answer": "\n".join(step_lines(q, steps))} for q, steps in examples]
    tasks = [{"prompt": q, "answer": str(right(q)[-1])} for q, _ in (flawed(dice) for _ in range(TASKS))]
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
        output_of([*words, "--seed", seed])
    policy = train(here / "policy", start, {"name": "sft"}, rows, seed, updates=1000)
    labelled = []
    for question, steps in (flawed(dice) for _ in range(LABELLED)):
        before = [0, *steps[:-1]]
        labels = [abs(a - int(b)) == c for a, b, c in zip(before, question, steps, strict=True)]
        lines = step_lines(question, steps)
        labelled.append({"prompt": question, "steps": lines, "labels": list(map(int, labels))})
    # From the policy, so that it can read.
    return policy, train(here / "process", policy, {"name": "process_reward"}, labelled, seed, updates=600)


def train(place: Path, start: Path, method: Row, rows: list[Row], seed: int, updates: int) -> Path:
    """Return the model of a run, which is made unless it is there."""
    if not (place / "done").exists():
        judge = method["name"] == "process_reward"
        tables: Row = {"critic": {"lr": 3e-3}} if judge else {}
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
            **tables,
        )
        (place / "done").write_text(str(run.model))
    return Path((place / "done").read_text())


def search(policy: Path, model: Path, strategy: str, budget: int, seed: int) -> dict[str, float]:
    """Return the share of tasks that a search answers rightly, and with best_of_n that of a majority."""
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
    lines = output_of(["search", recipe, "--split", "train", "--limit", TASKS, "--json"])
    tasks = [json.loads(line) for line in lines.splitlines()]
    shares = {strategy: statistics.fmean(line["solved"] for line in tasks)}
    if strategy == "best_of_n":
        answers = [json.loads(line)["answer"] for line in policy_tasks(policy).read_text().splitlines()]
        ordered = sorted(tasks, key=lambda line: int(line["task"].rpartition(":")[2]))
        shares["majority"] = statistics.fmean(
            majority(line) == answer for line, answer in zip(ordered, answers, strict=True)
        )
    return shares


def majority(line: Row) -> str:
    """Return the commonest last digit of the ends, each as often as it was sampled."""
    votes: Counter[str] = Counter()
    ends = {state["number"]: state["shown"] for state in line["states"] if state["done"]}
    for state in line["states"]:
        for move in state["moves"]:
            if move.get("to") in ends:
                votes[ends[move["to"]][-1]] += move["said"]
    return votes.most_common(1)[0][0] if votes else ""


def policy_tasks(policy: Path) -> Path:
    """Return the file of tasks next to a policy's run."""
    return next(parent for parent in policy.parents if parent.name.startswith("models-")) / "tasks.jsonl"


def output_of(words: list[Any]) -> str:
    """Return the output of a command. Raises RunError if it fails."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        code = cli.run([str(word) for word in words])
    if code:
        raise RunError(f"posttrain {words[0]}", f"exit status {code}")
    return text.getvalue()


RULES = {
    "guided_search": VerdictRule(
        "share of right answers, mean over 64 and 256 steps, mean of the guided searches minus best-of-n",
        lambda figures: statistics.fmean(
            figures[strategy][budget] - figures["best_of_n"][budget]
            for strategy in ("beam", "best_first", "puct")
            for budget in ("64", "256")
        ),
    ),
}


def table(results: Results) -> str:
    """Return the mean share of right answers, with the range over seeds."""
    rows = []
    for name in results.runs[0]:
        shares = [[figures[name][str(budget)] for figures in results.runs] for budget in BUDGETS]
        rows.append([name, *(spread(seeds, ".0%") for seeds in shares)])
    return markdown(("search", *(f"{budget} steps" for budget in BUDGETS)), rows)


def draw(results: Results, figure: Any) -> None:
    """Draw the share of right answers by budget."""
    axes = figure.subplots()
    for n, name in enumerate(results.runs[0]):
        seeds = [[figures[name][str(budget)] for budget in BUDGETS] for figures in results.runs]
        curve(axes, BUDGETS, seeds, name, f"C{n}")
    axes.set(xscale="log", xlabel="sampled steps", ylabel="right answers", ylim=(0, 1))
    axes.set_xticks(BUDGETS, list(map(str, BUDGETS)))
    axes.minorticks_off()
    axes.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, first_seed=1, size=(6.0, 4.2))
