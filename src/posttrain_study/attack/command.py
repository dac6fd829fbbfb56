"""`posttrain attack`: what a reward overpays, before a policy finds it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from posttrain.types import Task
    from posttrain_study.attack.measure import BestOf, Payment

SHOWN = 12
"""Tricks that are printed: those paid most."""


def attack(
    reward: Annotated[
        str,
        typer.Argument(
            metavar="VERIFIER|RECIPE",
            help="A verifier's name, module:function, a recipe or a run, as for posttrain verify.",
        ),
    ],
    tasks: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TASKS.jsonl]",
            help="Tasks as for training, any form of docs/data.md; by default those of the recipe.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="An option of the verifier: --set partial=true"),
    ] = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answers of a model, several to a task: `id` and `response`. Shows what the best of n by "
            "this reward is worth to --truth.",
        ),
    ] = None,
    truth: Annotated[
        str | None,
        typer.Option(
            metavar="VERIFIER", help="The judge that is taken for the truth of --responses; a stricter one."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Tasks that are tried, drawn at random.")] = 40,
    rounds: Annotated[
        int, typer.Option(min=0, help="Rounds in which a policy that reads no task learns; 0: none.")
    ] = 30,
    seed: Annotated[int, typer.Option(help="Of the drawn tasks and of that policy.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that judge in parallel.")] = 2,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds for one verdict, unless the verifier sets a limit.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="All figures as one JSON object.")] = False,
) -> None:
    """Show what a reward pays to answers that know nothing, before a policy finds out.

    About forty known tricks are tried (a constant, the question again, every number, empty tags, a program
    that exits, an order to the judge ...), and the wrong answers of the verifier's own self-test. Then a
    policy that never reads a task learns a fixed text from the reward alone; it is judged on tasks that it
    did not learn on. With --responses and --truth the best of n answers by this reward is judged by a
    stricter one: where the first rises and the second falls, the reward is being exploited.

    Example: posttrain attack math tasks.jsonl, or posttrain attack reward.py:score tasks.jsonl --rounds 60
    """
    from posttrain.commands.options import progress_bar
    from posttrain.errors import UserError
    from posttrain.evaluation.verdicts import read_responses
    from posttrain.process.workers import most_workers
    from posttrain.recipe.verifier import read_verifier
    from posttrain.verifiers.pool import Pool
    from posttrain.verifiers.self_test import check_all
    from posttrain_study.attack import measure

    verifier = read_verifier(reward, sets or ())
    if verifier.grouped:
        problem = f"{verifier.name} compares answers with one another, and an attack is one answer"
        raise UserError(reward, problem, "name a verifier that judges one answer")
    if (responses is None) != (truth is None):
        key, other = ("--truth", "--responses") if responses is None else ("--responses", "--truth")
        raise UserError(key, f"it is read together with {other}", f"give {other} too")
    if workers > (most := most_workers()):
        raise UserError("--workers", f"this machine has room for {most}", "lower it")
    verifier.require()
    every = _read_tasks(reward, tasks)
    chosen = _draw(every, limit, seed)
    check_all(verifier, chosen)
    with Pool(workers=workers, deadline_s=deadline) as pool, progress_bar(hidden=as_json) as bar:
        line = bar.add_task("judging", total=None)

        def judge(answers: measure.Answers) -> Any:
            verdicts = pool.judge(verifier, answers)
            bar.update(line, advance=len(answers))
            return verdicts

        right = measure.pay_right_answers(verifier, chosen, judge)
        paid = measure.pay_tricks(verifier, chosen, judge)
        learnt = measure.pay_learnt_text(verifier, chosen, judge, rounds, seed) if rounds else None
        curve: list[BestOf] = []
        if responses is not None and truth is not None:
            strict = read_verifier(truth)
            strict.require()
            answers = [(r.task, r.text) for r in read_responses(responses, {task.id: task for task in every})]
            curve = measure.best_of(_by_task(answers, judge(answers), pool.judge(strict, answers)))
    if as_json:
        content = {
            "right": asdict(right) if right else None,
            "tricks": [asdict(payment) for payment in paid],
            "learnt": [asdict(part) for part in learnt if part] if learnt else None,
            "best_of": [asdict(point) for point in curve],
        }
        typer.echo(json.dumps(content))
        return
    _print(paid, learnt, right, curve)


def _read_tasks(reward: str, path: Path | None) -> "list[Task]":
    """Return the tasks of a file, or those that a recipe, or the recipe of a run, trains on."""
    from posttrain.data.gather import Data
    from posttrain.data.load import load_tasks
    from posttrain.errors import UserError
    from posttrain.recipe import config
    from posttrain.recipe.tasks import make_tasks
    from posttrain.recipe.verifier import verifier_file

    if path is not None:
        return load_tasks(Data(path=str(path)))
    file = verifier_file(reward)
    if file is None:
        raise UserError("TASKS.jsonl", f"{reward} is not a recipe, which has tasks", "name a file of tasks")
    recipe = config.read(file).recipe
    if len(recipe.task) > 1:
        raise UserError(reward, "its tasks have several sources, each with a judge", "name a file of tasks")
    return make_tasks(recipe.source, recipe.eval.limit, recipe.run.seed)[0]


def _draw(tasks: "list[Task]", limit: int, seed: int) -> "list[Task]":
    import random

    from posttrain.errors import UserError

    if len(tasks) < 2:
        raise UserError("TASKS.jsonl", f"there are {len(tasks)} tasks", "give two or more")
    return random.Random(seed).sample(tasks, min(limit, len(tasks)))


def _by_task(answers: Any, rewards: Any, truths: Any) -> list[list[tuple[float, float]]]:
    """Return (reward, truth) of each answer that both could judge, task by task."""
    from posttrain.errors import UserError

    pairs: dict[str, list[tuple[float, float]]] = {}
    for (task, _), reward, truth in zip(answers, rewards, truths, strict=True):
        if reward.score is not None and truth.score is not None:
            pairs.setdefault(task.id, []).append((reward.score, truth.score))
    if not pairs:
        raise UserError("--responses", "no answer could be judged by both", "look at posttrain verify")
    return list(pairs.values())


def _print(
    paid: "list[Payment]",
    learnt: Any,
    right: "Payment | None",
    curve: "list[BestOf]",
) -> None:
    from rich.table import Table

    from posttrain.report.terminal import out, print_wide

    if not paid:
        out.print("no answer could be judged: posttrain verify shows why")
        return
    floor = paid[-1].mean
    listed = [payment for payment in paid[:SHOWN] if payment.mean > floor]
    if listed:
        table = Table("answer that knows nothing", "mean", "full", "text", box=None)
        for payment in listed:
            text = repr(payment.example)
            cells = (
                f"{payment.mean:.3g}",
                f"{payment.paid:.0%}",
                text if len(text) < 28 else f"{text[:24]}...",
            )
            table.add_row(payment.name, *cells)
        print_wide(table)
    if rest := paid[len(listed) :]:
        out.print(f"{'and ' * bool(listed)}{len(rest)} tricks that earn {rest[0].mean:.3g} or less")
    top = paid[0]
    if learnt and learnt[0]:
        payment, attempt = learnt
        out.print(
            f"learnt without reading a task: {payment.mean:.3g} on other tasks "
            f"({attempt.reward:.3g} where it was learnt): {attempt.text[:80]!r}",
            soft_wrap=True,
        )
        top = max(top, payment, key=lambda one: one.mean)
    name = top.name if top.mean > floor else "all alike"
    share = "; no right answers are known here to compare with"
    if right:
        share = f", {top.mean / right.mean:.0%} of a right answer's {right.mean:.3g}" if right.mean else ""
    out.print(f"paid most: {name}, with {top.mean:.3g}{share}", soft_wrap=True)
    if curve:
        table = Table("best of", "by this reward", "by the truth", box=None)
        for point in curve:
            table.add_row(str(point.n), f"{point.reward:.3f}", f"{point.truth:.3f}")
        print_wide(table)
