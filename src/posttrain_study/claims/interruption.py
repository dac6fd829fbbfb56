"""Running answers interrupted at every update, or drained: the sampler's steps, ages of tokens, accuracy.

A question is a number and a letter: the number names one of six orders of the alphabet, and the answer is
the letters that come after this one. There are LOGNORMAL many, so few answers are long. A model made as that
of digit_sums.py learns by SFT from walks of which one step in seven jumps to any letter, so an answer
of eight tokens in the mean can be 48 long. GRPO with truncated weights trains it, at most two updates behind.
One engine of 64 rows samples in the loop's thread, by steps: an update's weights arrive 16 steps after it, so
that a run is the same on every machine. Time is counted in steps of the engine.

    draining       weights arrive when all answers of a round are finished; then the next round begins
    interrupting   weights arrive between two steps; running answers continue with them, and their KV cache is
                   computed again
"""

import random
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch

from posttrain.api.opening import open_session
from posttrain.loop.online import OnlineRun
from posttrain.loop.session import LoopSession
from posttrain.models.pretrained import load_tokenizer, save_pretrained
from posttrain.models.scratch import CLOSE
from posttrain.rollout.local import LocalSampler
from posttrain.types import Trajectory
from posttrain_study.claims.digit_sums import (
    Changes,
    Rows,
    digest_of,
    load,
    new_tokenizer,
    recipe,
    teach,
    untaught_model,
)
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

ORDERS, LONGEST, JUMPS = 6, 47, 0.15
LOGNORMAL = (1.6, 0.8)
"""Mean and deviation of the logarithm of an answer's letters, which are at least 1 and at most 25."""
QUESTIONS, WALKS = 1920, 8000
UPDATES, EVERY, GROUPS, SIZE, ROWS, LAG = 40, 8, 16, 8, 64, 2
ASYNC: Changes = {"async.max_lag": LAG, "async.pace": "steps", "async.steps_per_update": 16}
DRAINING, INTERRUPTING = "draining", "interrupting"
ARMS: dict[str, Changes] = {
    DRAINING: {**ASYNC, "async.swap": "between"},
    INTERRUPTING: {**ASYNC, "async.swap": "within"},
}
RATES = dict.fromkeys(ARMS, 3e-3)
"""The better of 1e-3 and 3e-3 for each, by the chance of a right answer at the end on seeds 100 and 101."""


@cache
def order_of(number: int) -> str:
    """Return one of the orders of the alphabet."""
    letters = list(ascii_lowercase)
    random.Random(f"order {number}").shuffle(letters)
    return "".join(letters)


def answer_of(question: str) -> str:
    """Return the right answer to a question.

    >>> order_of(3)[-3:], answer_of("3" + order_of(3)[-3])
    ('ctw', 'tw')
    """
    return order_of(int(question[0])).partition(question[1])[2]


def questions(count: int, dice: random.Random) -> list[str]:
    """Return questions with lognormally many letters to go."""
    texts = []
    for _ in range(count):
        number, letters = dice.randrange(ORDERS), round(dice.lognormvariate(*LOGNORMAL))
        texts.append(f"{number}{order_of(number)[-1 - min(max(letters, 1), 25)]}")
    return texts


def walk(question: str, dice: random.Random) -> str:
    """Return an answer with jumps: after each the order continues from the letter that it reached."""
    order, at, letters = order_of(int(question[0])), question[1], ""
    while at != order[-1] and len(letters) < LONGEST:
        at = dice.choice(ascii_lowercase) if dice.random() < JUMPS else order[order.index(at) + 1]
        letters += at
    return letters


def start(out: Path) -> Path:
    """Return the folder of the start, which is made in OUT unless it is there."""
    place, untaught = out / "start", out / "untaught"
    if not place.exists():
        shutil.rmtree(untaught, ignore_errors=True)
        tokenizer, dice = new_tokenizer(), random.Random("walks")
        save_pretrained(untaught_model(tokenizer, positions=64), tokenizer, untaught)
        rows = [{"prompt": q, "answer": walk(q, dice)} for q in questions(WALKS, dice)]
        teach(untaught, rows, {"run.threads": 1}, place)
    return place


@cache
def asked() -> Rows:
    """Return the questions of every run with their right answers."""
    return [{"prompt": q, "answer": answer_of(q)} for q in questions(QUESTIONS, random.Random("asked"))]


@torch.no_grad()
def right(model: Path) -> float:
    """Return the chance of a right answer, computed, the mean over the questions that are asked."""
    tokenizer, chances = load_tokenizer(model), dict[str, float]()
    texts = {row["prompt"]: row["prompt"] + row["answer"] + CLOSE for row in asked()}
    rows = {question: tokenizer(text)["input_ids"] for question, text in texts.items()}
    for size in {len(row) for row in rows.values()}:
        batch = {question: row for question, row in rows.items() if len(row) == size}
        tokens = torch.tensor(list(batch.values()))
        logp = load(model)(input_ids=tokens, use_cache=False).logits.log_softmax(-1)[:, 1:-1]
        answer = logp.gather(-1, tokens[:, 2:, None])[..., 0].sum(1).exp()
        chances |= dict(zip(batch, answer.tolist(), strict=True))
    return statistics.fmean(chances[row["prompt"]] for row in asked())


@dataclass
class Tokens:
    """Counts over the sampled tokens of a run."""

    lengths: list[int] = field(default_factory=list)
    mixed: int = 0
    """Answers with tokens of several versions."""
    again: int = 0
    """Tokens whose keys and values were computed again: at each change of version all before it."""
    age: int = 0
    """Sum over tokens of the updates between the weights that sampled one and those that it trains."""
    oldest: int = 0

    def add(self, row: Trajectory, update: int) -> None:
        """Count an answer that this update, counted from 0, is trained on."""
        places = [n for n, sampled in enumerate(row.sampled) if sampled]
        versions = [row.version[n] for n in places]
        changes = [n for n, old, new in zip(places[1:], versions, versions[1:], strict=False) if new > old]
        self.lengths.append(len(places))
        self.mixed += bool(changes)
        self.again += sum(changes)
        self.age += sum(update - version for version in versions)
        self.oldest = max(self.oldest, *(update - version for version in versions))


def measure(seed: int, out: Path, report: Report) -> Figures:
    """Train with every schedule from the same start."""
    report("interruption, the start")
    model = start(out)
    figures: Figures = {"start": {"digest": digest_of(model), "right": right(model)}}
    for name in ARMS:
        report(f"interruption, seed {seed}, {name}")
        figures[name] = train(name, RATES[name], seed, model, out)
    return figures


def changes_of(name: str, seed: int) -> Changes:
    """Return what the recipe of a run sets."""
    run = {
        "method.correction": "token_truncated",
        "run.updates": UPDATES,
        "run.seed": seed,
        "rollout.groups": GROUPS,
        "rollout.group_size": SIZE,
        "rollout.select": "all",
        "sampling.max_new_tokens": LONGEST + 1,
        "engine.rows": ROWS,
        "optim.lr": RATES[name],
        "checkpoint.every": EVERY,
        "checkpoint.keep": 0,
    }
    return run | ARMS[name]


def train(name: str, lr: float, seed: int, model: Path, out: Path) -> dict[str, Any]:
    """Return what the sampler did in a run, and the chance of a right answer along it."""
    place, tokens = out / f"{name.replace(' ', '-')}-{seed}", Tokens()
    shutil.rmtree(place, ignore_errors=True)
    loaded = recipe("grpo", model, asked(), changes_of(name, seed) | {"optim.lr": lr}, place)
    parts = open_session(loaded, place, title=name)
    with LoopSession(parts) as session:
        for update in range(UPDATES):
            groups = session.sample()
            for episode in (e for group in groups for e in group):
                tokens.add(episode.trajectory, update)
            session.update(groups)
            session.publish()
            if (update + 1) % EVERY == 0:
                session.save()
        assert isinstance(parts.loop, OnlineRun)
        assert isinstance(parts.loop.sampler, LocalSampler)
        steps = parts.loop.sampler.worker.rollouts.steps
    path = [right(folder / "model") for folder in sorted((place / "checkpoints").glob("step_*"))]
    count = sum(tokens.lengths)
    return {
        "steps": steps / UPDATES,
        "idle": 1 - count / (steps * ROWS),
        "again": tokens.again / count,
        "mixed": tokens.mixed / len(tokens.lengths),
        "age": tokens.age / count,
        "oldest": tokens.oldest,
        "length": count / len(tokens.lengths),
        "longest": max(tokens.lengths),
        "path": path,
    }


# ---------------------------------------------------------------------- what the claims say


def end(figures: Figures, name: str) -> float:
    """Return the chance of a right answer after the last update."""
    return float(figures[name]["path"][-1])


def saved(one: str, other: str) -> Callable[[Figures], float]:
    """Return the measure share of the engine's steps of the other schedule that one saves."""
    return lambda figures: 1 - float(figures[one]["steps"] / figures[other]["steps"])


RULES = {
    "interruption": VerdictRule(
        "share of the engine's steps for as many updates that interrupting saves, of those of draining",
        saved(INTERRUPTING, DRAINING),
        0.1,
    ),
    "interruption_accuracy": VerdictRule(
        f"chance of a right answer after {UPDATES} updates, interrupting minus draining",
        lambda figures: end(figures, INTERRUPTING) - end(figures, DRAINING),
        0.05,
        equal=True,
    ),
}


# ---------------------------------------------------------------------- table and picture

COLUMNS = {
    "steps": ("engine steps an update", ".1f"),
    "idle": ("rows without an answer", ".0%"),
    "again": ("computed again, of sampled tokens", ".0%"),
    "mixed": ("answers of several policies", ".0%"),
    "age": ("age of a token, updates", ".2f"),
    "oldest": ("oldest token", ".0f"),
    "length": ("tokens an answer", ".1f"),
}


def table(results: Results) -> str:
    """Return mean and range over seeds of what the sampler did, and of the chance at the end."""
    runs, rows = results.runs, []
    for name in ARMS:
        cells = [spread([run[name][key] for run in runs], form) for key, (_, form) in COLUMNS.items()]
        rows.append([name, *cells, spread([end(run, name) for run in runs], ".1%")])
    head = ("schedule", *(label for label, _ in COLUMNS.values()), "right at the end")
    first = runs[0]["start"]
    start = f"The start has the digest {first['digest']}, and is right with a chance of {first['right']:.1%}."
    return f"{markdown(head, rows)}\n\n{start}"


def draw(results: Results, figure: Any) -> None:
    """Draw the chance of a right answer by updates and by engine steps; and the steps of an update."""
    by_update, by_step, bars = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    updates = range(0, UPDATES + 1, EVERY)
    for n, name in enumerate(ARMS):
        paths = [[run["start"]["right"], *run[name]["path"]] for run in results.runs]
        steps = [run[name]["steps"] for run in results.runs]
        curve(by_update, updates, paths, name, f"C{n}")
        curve(by_step, [n * statistics.fmean(steps) for n in updates], paths, name, f"C{n}")
        bars.bar(n, statistics.fmean(steps), color=f"C{n}")
        bars.vlines(n, min(steps), max(steps), color="k")
    by_update.set(xlabel="updates", ylabel="chance of a right answer")
    by_step.set(xlabel="steps of the engine")
    bars.set(ylabel="steps of the engine an update")
    bars.set_xticks(range(len(ARMS)), [name.replace(" ", "\n") for name in ARMS], rotation=30, fontsize=8)
    by_update.legend(frameon=False)


EXPERIMENT = Experiment(measure, table, draw, RULES, size=(12.0, 4.0))
