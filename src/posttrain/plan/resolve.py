"""Resolve a recipe without a model: build its method, load its tasks, and check its verifier."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.curriculum.curriculum import build_supply
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
    """A recipe with its method, its tasks and their verifier or environment."""

    recipe: Recipe
    line: Line
    method: Method
    train: Sequence[Any]
    """Tasks, or the records of an offline method: conversations, rankings, labelled answers or steps."""
    held_out: Sequence[Any]
    verifier: Verifier | None
    env: Env | None

    @property
    def online(self) -> bool:
        """True if the policy is sampled."""
        return self.line.loop == "online"


def build_context(recipe: Recipe, ranks: int = 1) -> Context:
    """Build a recipe's method and its verifier or environment, for its rules.

    Raises UserError if one cannot be built.
    """
    table_line = line(recipe.method.get("name", ""))
    task, online = recipe.task, table_line.loop == "online"
    verifier, env = recipe.build_verifier_and_env() if online else (None, None)
    turns = task.agent.max_calls if task.agent else getattr(env, "max_turns", 1)
    horizon = recipe.sampling.max_new_tokens * turns
    # The rewards of a game are discounted unchanged; elsewhere a step's reward is an advance on the score.
    scored = online and not (env or task.agent)
    options = dict(recipe.method)
    method = build(options.pop("name"), options, horizon=horizon, potentials=scored)
    if "teacher" in method.asks and not (verifier or env or task.agent or task.tools or task.repair):
        verifier = Unjudged()  # the teacher trains; a verifier would only measure
    return Context(recipe, table_line, built=method, verifier=verifier, env=env, ranks=ranks)


def resolve_recipe(
    recipe: Recipe, say: Callable[[str], None] = lambda text: None, *, ranks: int = 1
) -> Resolved:
    """Build the method, tasks and verifier of a recipe, and check them as far as possible without a model.

    `say` receives the recognised format of records. ranks: number of learner ranks.

    Raises UserError for an impossible combination, and for the first fault of the data.
    """
    _check_metric(recipe.run.condition)
    context = build_context(recipe, ranks)
    check(context)
    method, name, task = context.method, context.name, recipe.task
    if context.online:
        selection(recipe.rollout.select, 0.0)  # raises UserError
        if judge := recipe.build_verifier():
            judge.require()  # before tasks are made, which may take minutes
        train, held_out = make_tasks(task, recipe.eval.limit, recipe.run.seed, say)
        if judge:
            train = _skip_unjudgeable(judge, task.data, train, say)
            held_out = _skip_unjudgeable(judge, task.held_out, held_out, say)
        build_supply(recipe.curriculum, train, seed=recipe.run.seed)  # raises UserError
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
        return Resolved(recipe, context.line, method, train, held_out, context.verifier, context.env)
    records, held_out_records = _load_records(recipe, context.line, say)
    if "value" in method.needs:
        _check_rewards(name, records)
    if context.line.learns == "labels":
        _check_labels(name, method, (*records, *held_out_records))
    if "margins" in method.asks:
        _check_margins(name, (*records, *held_out_records))
    return Resolved(recipe, context.line, method, records, held_out_records, None, None)


def _skip_unjudgeable(
    judge: Verifier, data: Data | None, tasks: list[Task], say: Callable[[str], None]
) -> list[Task]:
    """Leave out tasks that the verifier cannot judge, and report why, if the data has bad = "skip"."""
    if data is None or data.bad != "skip":
        return tasks
    faults: dict[int, UserError] = {}
    for n, task in enumerate(tasks):
        try:
            judge.check(task)
        except UserError as fault:
            faults[n] = fault
    return skip_tasks(tasks, faults, f"{judge.name} can judge", say)


def skip_tasks(
    tasks: Sequence[Task], faults: Mapping[int, UserError], able: str, say: Callable[[str], None]
) -> list[Task]:
    """Leave out the tasks at these places and report why; raise UserError ("{able} none") if none remains."""
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
    """Raise UserError for the first answer without a finite reward."""
    for record in conversations:
        reward = getattr(record, "reward", None)
        if reward is None:
            raise UserError(
                record.source,
                f"{name} learns from rewards, and the answer of {record.id!r} has none",
                'give each record a field "reward"',
            )
        number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
        if not (number and math.isfinite(reward)):
            raise UserError(record.source, f"the reward is {reward!r}", "a finite number")


def _check_margins(name: str, rankings: Sequence[Ranking]) -> None:
    """Raise UserError for the first ranking without scores, whose answers have no margin."""
    for ranking in (r for r in rankings if not r.scored):
        problem = f"{name} learns by how much an answer is better, "
        problem += f"and of {ranking.id!r} only the order is known"
        fix = "give each record scores or a margin, or take method.name = 'reward' without method.margin"
        raise UserError(ranking.source, problem, fix)


def _check_labels(name: str, method: Method, answers: Sequence[Ranking]) -> None:
    """Raise UserError for a label that is not a probability, and if all labels have the same sign."""
    if "probabilities" in method.asks:
        for answer in answers:
            if not 0 <= answer.scores[0] <= 1:
                raise UserError(
                    answer.source,
                    f"{name} learns right and wrong, and the label of {answer.id!r} is {answer.scores[0]:g}",
                    "give a label from 0 to 1, or take method.name = 'reward_regression'",
                )
    signs = {answer.scores[0] > 0 for answer in answers}
    if "both signs" in method.asks and len(signs) == 1:
        labels = "above 0, so all are wanted" if True in signs else "0 or less, so none is wanted"
        raise UserError(
            "task.data",
            f"{name} tells good answers from bad ones, and all labels are {labels}",
            "give true or false, or numbers on both sides of 0",
        )


def _check_metric(condition: Condition | None) -> None:
    """Raise UserError if `run.stop_when` names a metric that does not exist."""
    if condition and condition.metric != "update" and not words([condition.metric]):
        metrics = [name for section in sections().values() for names in section for name in names.split(", ")]
        fix = did_you_mean(condition.metric, metrics) or "docs/metrics.md lists the metrics"
        raise UserError("run.stop_when", f"there is no metric {condition.metric!r}", fix)


def _load_records(
    recipe: Recipe, table_line: Line, say: Callable[[str], None]
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the training records and the held-out records of an offline method."""
    choice = recipe.task
    if choice.text is not None:
        return [choice.text], [choice.held_out_text] if choice.held_out_text and recipe.eval.limit else []
    if choice.data is None:
        train, held_out = make_tasks(recipe.task, recipe.eval.limit, recipe.run.seed, say)
        return [_with_answer(t) for t in train], [_with_answer(t) for t in held_out]
    loaders: Mapping[str, Callable[..., Sequence[Any]]] = {
        "answers": load_conversations,
        "rankings": load_rankings,
        "labels": load_labelled,
        "steps": load_steps,
    }
    load = loaders[table_line.learns]
    held_out_records = load(choice.held_out, say=say)[: recipe.eval.limit] if choice.held_out else []
    return load(choice.data, say=say), held_out_records


def _with_answer(task: Task) -> Task:
    """Add the answer, or the proof, as the assistant's turn, for supervised fine-tuning."""
    answer = task.answer or task.fields.get("gold")
    if not answer:
        raise UserError(task.source, f"task {task.id!r} has no answer that could be imitated")
    return Task(
        id=task.id,
        messages=(*task.messages, {"role": "assistant", "content": answer}),
        source=task.source,
    )
