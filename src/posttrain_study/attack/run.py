"""`posttrain attack` after its words are read: load tasks, judge, and print what is overpaid."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from posttrain.data.gather import Data
from posttrain.data.load import load_tasks
from posttrain.errors import UserError
from posttrain.evaluation.verdicts import read_responses
from posttrain.process.workers import most_workers
from posttrain.recipe import config
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.tasks import make_tasks
from posttrain.recipe.verifier import read_verifier, verifier_file
from posttrain.report.terminal import out, print_wide
from posttrain.types import Task, Verdict
from posttrain.verifiers.function import Function
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.self_test import check_all
from posttrain_study.attack import measure
from posttrain_study.attack.measure import BestOf, Payment
from posttrain_study.attack.policy import LearntText

SHOWN = 12
"""Most tricks that are printed."""


@dataclass(frozen=True)
class Attack:
    """What a reward paid to answers that know nothing."""

    tricks: Sequence[Payment]
    """Each trick, the best paid first."""
    right: Payment | None
    """Right answers to the same tasks; None where none are known."""
    learnt: Payment | None
    """The text of the policy, on tasks that it was not learnt on; None if none was learnt or judged."""
    attempt: LearntText | None
    """The same text where it was learnt."""
    best_of: Sequence[BestOf]


def attack(
    reward: str,
    tasks_file: Path | None,
    overrides: Sequence[str],
    *,
    responses: Path | None,
    truth: str | None,
    limit: int,
    rounds: int,
    seed: int,
    workers: int,
    deadline_s: float,
    advance: Callable[[int], None],
) -> Attack:
    """Return what the reward pays; `advance` gets the number of answers that were judged.

    Raises UserError for a verifier that compares answers, and for tasks that it cannot judge.
    """
    source = _source(reward) if tasks_file is None else None
    scorer = source.verifier.build() if source and not overrides else None
    verifier = scorer or read_verifier(reward, overrides)
    if verifier.grouped and not isinstance(verifier, Function):  # which may take lists
        problem = f"{verifier.name} compares answers with one another, and an attack is one answer"
        raise UserError(reward, problem, "name a verifier that judges one answer")
    if (responses is None) != (truth is None):
        key, other = ("--truth", "--responses") if responses is None else ("--responses", "--truth")
        raise UserError(key, f"it is read together with {other}", f"give {other} too")
    if workers > (most := most_workers()):
        raise UserError("--workers", f"this machine has room for {most}", "lower it")
    verifier.require()
    every = load_tasks(Data(path=str(tasks_file))) if source is None else _tasks_of(source)
    usable = [task for task in every if _is_usable(verifier, task)]
    if not usable:
        check_all(verifier, every)
    tasks = _sample(usable, limit, seed)
    with Pool(workers=workers, deadline_s=deadline_s) as pool:

        def judge(answers: measure.Answers) -> Sequence[Verdict]:
            verdicts = pool.judge(verifier, answers)
            advance(len(answers))
            return verdicts

        right = measure.pay_right_answers(verifier, tasks, judge)
        tricks = measure.pay_tricks(verifier, tasks, judge)
        learnt, attempt = None, None
        if rounds:
            learnt, attempt = measure.pay_learnt_text(verifier, tasks, judge, rounds, seed)
        curve: Sequence[BestOf] = ()
        if responses is not None and truth is not None:
            strict = read_verifier(truth)
            strict.require()
            by_id = {task.id: task for task in every}
            answers = [(response.task, response.text) for response in read_responses(responses, by_id)]
            curve = measure.best_of(_by_task(answers, judge(answers), pool.judge(strict, answers)))
    return Attack(tricks, right, learnt, attempt, curve)


def _source(reward: str) -> Recipe:
    """Return a recipe, or the recipe of a run, with its only source of tasks."""
    file = verifier_file(reward)
    if file is None:
        raise UserError("TASKS.jsonl", f"{reward} is not a recipe, which has tasks", "name a file of tasks")
    recipe = config.read(file).recipe
    if len(recipe.task) > 1:
        raise UserError(reward, "its tasks have several sources, each with a judge", "name a file of tasks")
    return recipe.take_source(0)


def _tasks_of(recipe: Recipe) -> list[Task]:
    return make_tasks(recipe.source, recipe.eval.limit, recipe.run.seed)[0]


def _is_usable(verifier: Verifier, task: Task) -> bool:
    try:
        verifier.check(task)
    except UserError:
        return False
    return True


def _sample(tasks: Sequence[Task], limit: int, seed: int) -> list[Task]:
    if len(tasks) < 2:
        raise UserError("TASKS.jsonl", f"there are {len(tasks)} tasks", "give two or more")
    return random.Random(seed).sample(tasks, min(limit, len(tasks)))


def _by_task(
    answers: measure.Answers, rewards: Sequence[Verdict], truths: Sequence[Verdict]
) -> list[list[tuple[float, float]]]:
    """Return (reward, truth) of each answer that both could judge, task by task."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for (task, _), reward, truth in zip(answers, rewards, truths, strict=True):
        if reward.score is not None and truth.score is not None:
            pairs.setdefault(task.id, []).append((reward.score, truth.score))
    if not pairs:
        raise UserError("--responses", "no answer could be judged by both", "look at posttrain verify")
    return list(pairs.values())


def print_attack(attack: Attack) -> None:
    """Print the tricks that are paid more than the worst one, the learnt text, and the best of n."""
    if not attack.tricks:
        out.print("no answer could be judged: posttrain verify shows why")
        return
    floor = attack.tricks[-1].mean
    listed = [payment for payment in attack.tricks[:SHOWN] if payment.mean > floor]
    if listed:
        table = Table("answer that knows nothing", "mean", "full", "text", box=None)
        for payment in listed:
            text = repr(payment.example)
            text = text if len(text) < 28 else f"{text[:24]}..."
            table.add_row(payment.name, f"{payment.mean:.3g}", f"{payment.paid:.0%}", text)
        print_wide(table)
    if rest := attack.tricks[len(listed) :]:
        out.print(f"{'and ' * bool(listed)}{len(rest)} tricks that earn {rest[0].mean:.3g} or less")
    top = attack.tricks[0]
    if attack.learnt and attack.attempt:
        where = f"{attack.learnt.mean:.3g} on other tasks ({attack.attempt.reward:.3g} where it was learnt)"
        out.print(f"learnt without reading a task: {where}: {attack.attempt.text[:80]!r}", soft_wrap=True)
        top = max(top, attack.learnt, key=lambda payment: payment.mean)
    elif attack.attempt:
        out.print(f"the learnt text makes the verifier fail: {attack.attempt.text[:80]!r}", soft_wrap=True)
    name = top.name if top.mean > floor else "all alike"
    share = "; no right answers are known here to compare with"
    if attack.right:
        right = attack.right.mean
        share = f", {top.mean / right:.0%} of a right answer's {right:.3g}" if right else ""
    out.print(f"paid most: {name}, with {top.mean:.3g}{share}", soft_wrap=True)
    if attack.best_of:
        table = Table("best of", "by this reward", "by the truth", box=None)
        for point in attack.best_of:
            table.add_row(str(point.n), f"{point.reward:.3f}", f"{point.truth:.3f}")
        print_wide(table)
