"""What a recipe asks, checked as far as it can be without a model: the method, the tasks and who judges."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.curriculum.curriculum import supply
from posttrain.curriculum.select import selection
from posttrain.data import Data, Ranking, load_conversations, load_labelled, load_rankings, load_steps
from posttrain.data.gather import summary
from posttrain.envs.protocol import Env
from posttrain.methods.build import build
from posttrain.methods.table import Line, line
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.rule import Context
from posttrain.recipe.rules import check
from posttrain.recipe.tasks import make_tasks
from posttrain.report.condition import Condition
from posttrain.report.glossary import sections, words
from posttrain.types import Method, Task, UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Unjudged, Verifier
from posttrain.verifiers.self_test import self_test


@dataclass(frozen=True)
class Resolved:
    """What a recipe asks, known without a model: the method, the tasks and who judges them."""

    recipe: Recipe
    line: Line
    method: Method
    train: Sequence[Any]
    """Tasks, or what an offline method learns: conversations, rankings, labelled answers or steps."""
    held_out: Sequence[Any]
    verifier: Verifier | None
    env: Env | None

    @property
    def online(self) -> bool:
        """Whether the policy is sampled from."""
        return self.line.loop == "online"


def context_of(recipe: Recipe, ranks: int = 1) -> Context:
    """Build a recipe's method and what judges it, as its rules look at them; UserError if one cannot be."""
    found = line(recipe.method.get("name", ""))
    task, online = recipe.task, found.loop == "online"
    verifier, env = recipe.build_verifier_and_env() if online else (None, None)
    turns = task.agent.max_calls if task.agent else getattr(env, "max_turns", 1)
    horizon = recipe.sampling.max_new_tokens * turns
    # What a game pays is discounted as it is: there a reward is no advance on the score.
    scored = online and not (env or task.agent)
    options = dict(recipe.method)
    method = build(options.pop("name"), options, horizon=horizon, potentials=scored)
    if "teacher" in method.asks and not (verifier or env or task.agent or task.tools or task.repair):
        verifier = Unjudged()  # only what measures is lacking
    return Context(recipe, found, built=method, verifier=verifier, env=env, ranks=ranks)


def resolve_recipe(
    recipe: Recipe, say: Callable[[str], None] = lambda text: None, *, ranks: int = 1
) -> Resolved:
    """The method, tasks and judge of a recipe, each checked as far as it can be without a model.

    `say` is told in which form records were recognised. ranks: how many train together.

    Raises UserError for an impossible combination, and for the first fault of the data.
    """
    _check_metric(recipe.run.condition)
    context = context_of(recipe, ranks)
    check(context)
    found, method, verifier, env = context.line, context.method, context.verifier, context.env
    name, task = context.name, recipe.task
    if context.online:
        selection(recipe.rollout.select, 0.0)  # one's own can be had
        if judge := recipe.build_verifier():
            judge.require()  # before tasks are made, which may take minutes
        train, held_out = make_tasks(task, recipe.eval.limit, recipe.run.seed, say)
        if judge:
            train = _without_faults(judge, task.data, train, say)
            held_out = _without_faults(judge, task.held_out, held_out, say)
        supply(recipe.curriculum, train, seed=recipe.run.seed)  # each task has the field that it goes by
        if task.tools:
            task.tools.require()
        if task.agent:
            task.agent.check()
        for part in recipe.verifier.build_parts():
            part.check_all(train)
        if judge:
            r = recipe.rollout
            with Pool(workers=r.workers, deadline_s=r.deadline_s, memory_mb=r.memory_mb) as pool:
                self_test(judge, [*train, *held_out], pool)
        return Resolved(recipe, found, method, train, held_out, verifier, env)
    records, kept = _records(recipe, found, say)
    if "value" in method.needs:
        _check_rewards(name, records)
    if found.learns == "labels":
        _check_labels(name, method, (*records, *kept))
    if "margins" in method.asks:
        _check_margins(name, (*records, *kept))
    return Resolved(recipe, found, method, records, kept, None, None)


def _without_faults(
    judge: Verifier, data: Data | None, tasks: list[Task], say: Callable[[str], None]
) -> list[Task]:
    """Leave out the tasks that the verifier cannot judge, and say why, where the data has bad = "skip"."""
    if data is None or data.bad != "skip":
        return tasks
    faults: dict[int, UserError] = {}
    for n, task in enumerate(tasks):
        try:
            judge.check(task)
        except UserError as fault:
            faults[n] = fault
    return without(tasks, faults, f"{judge.name} can judge", say)


def without(
    tasks: Sequence[Task], faults: Mapping[int, UserError], able: str, say: Callable[[str], None]
) -> list[Task]:
    """Leave out the tasks at these places, and say why; UserError ("{able} none") if none is left."""
    usable = [task for n, task in enumerate(tasks) if n not in faults]
    if not faults:
        return usable
    if not usable:
        first = next(iter(faults.values()))
        problem = f"{able} none of the {len(tasks)} tasks; the first: {first.problem}"
        raise UserError(first.key, problem, first.fix)
    file, reasons = tasks[0].source.rpartition(":")[0], summary(list(faults.values()), reasons=True)
    say(f"{file}: {len(faults)} of {len(tasks)} tasks skipped: {reasons}")
    return usable


def _check_rewards(name: str, conversations: Sequence[Any]) -> None:
    """UserError for the first answer whose reward is missing or no number."""
    for each in conversations:
        reward = getattr(each, "reward", None)
        number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
        if reward is not None and not (number and math.isfinite(reward)):
            raise UserError(each.source, f"the reward is {reward!r}", "a finite number")
        if reward is None:
            raise UserError(
                each.source,
                f"{name} learns from rewards, and the answer of {each.id!r} has none",
                'give each record a field "reward"',
            )


def _check_margins(name: str, rankings: Sequence[Ranking]) -> None:
    """UserError for the first answers of which only the order is known: there is no margin between them."""
    for each in (r for r in rankings if not r.scored):
        problem = f"{name} learns by how much an answer is better, and of {each.id!r} only the order is known"
        fix = "give each record scores or a margin, or take method.name = 'reward' without method.margin"
        raise UserError(each.source, problem, fix)


def _check_labels(name: str, method: Method, answers: Sequence[Ranking]) -> None:
    """UserError for a label that is no probability, and for answers that are all wanted, or none of them."""
    if "probabilities" in method.asks:
        for each in answers:
            if not 0 <= each.scores[0] <= 1:
                raise UserError(
                    each.source,
                    f"{name} learns right and wrong, and the label of {each.id!r} is {each.scores[0]:g}",
                    "give a label from 0 to 1, or take method.name = 'reward_regression'",
                )
    wanted = {each.scores[0] > 0 for each in answers}
    if "both signs" in method.asks and len(wanted) == 1:
        said = "above 0, so all are wanted" if True in wanted else "0 or less, so none is wanted"
        raise UserError(
            "task.data",
            f"{name} tells good answers from bad ones, and all labels are {said}",
            "give true or false, or numbers on both sides of 0",
        )


def _check_metric(condition: Condition | None) -> None:
    """UserError if `run.stop_when` names a metric that does not exist."""
    if condition and condition.metric != "update" and not words([condition.metric]):
        known = [name for section in sections().values() for names in section for name in names.split(", ")]
        fix = did_you_mean(condition.metric, known) or "docs/metrics.md lists the metrics"
        raise UserError("run.stop_when", f"there is no metric {condition.metric!r}", fix)


def _records(recipe: Recipe, found: Line, say: Callable[[str], None]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What an offline method learns from, and what it is evaluated on."""
    choice = recipe.task
    if choice.text is not None:
        return [choice.text], [choice.held_out_text] if choice.held_out_text and recipe.eval.limit else []
    if choice.data is None:
        train, held_out = make_tasks(recipe.task, recipe.eval.limit, recipe.run.seed, say)
        return [_answered(t) for t in train], [_answered(t) for t in held_out]
    loaders: Mapping[str, Callable[..., Sequence[Any]]] = {
        "answers": load_conversations,
        "rankings": load_rankings,
        "labels": load_labelled,
        "steps": load_steps,
    }
    load = loaders[found.learns]
    held = load(choice.held_out, say=say)[: recipe.eval.limit] if choice.held_out is not None else []
    return load(choice.data, say=say), held


def _answered(task: Task) -> Task:
    """The task with its answer, or its proof, as the assistant's turn, for supervised fine-tuning."""
    answer = task.answer or task.fields.get("gold")
    if not answer:
        raise UserError(task.source, f"task {task.id!r} has no answer that could be imitated")
    return Task(
        id=task.id,
        messages=(*task.messages, {"role": "assistant", "content": answer}),
        source=task.source,
    )
