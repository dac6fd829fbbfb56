"""What a recipe asks, checked as far as it can be without a model: the method, the tasks and who judges."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.nearest import did_you_mean
from posttrain.data import Data, Ranking, load_conversations, load_labelled, load_rankings, load_steps
from posttrain.data.gather import summary
from posttrain.envs.protocol import Env
from posttrain.errors import ADD_VERIFIER, NO_VERIFIER, spelled
from posttrain.methods.build import build
from posttrain.methods.table import Line, label, line
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.tasks import tasks
from posttrain.report.glossary import sections, words
from posttrain.runtime.tasks.curriculum import supply
from posttrain.runtime.tasks.select import selection
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


def resolve_recipe(recipe: Recipe, say: Callable[[str], None] = lambda text: None) -> Resolved:
    """The method, tasks and judge of a recipe, each checked as far as it can be without a model.

    `say` is told in which form records were recognised.

    Raises UserError for an impossible combination, and for the first fault of the data.
    """
    found = line(recipe.method.get("name", ""))
    name, options = label(recipe.method["name"]), {k: v for k, v in recipe.method.items() if k != "name"}
    task, online = recipe.task, found.loop == "online"
    verifier, env = recipe.judges() if online else (None, None)
    turns = task.agent.max_calls if task.agent else getattr(env, "max_turns", 1)
    horizon = recipe.sampling.max_new_tokens * turns
    # What a game pays is discounted as it is: there a reward is no advance on the score.
    scored = online and not (env or task.agent)
    method = build(recipe.method["name"], options, horizon=horizon, potentials=scored)
    if "teacher" in method.asks and not (verifier or env or task.agent or task.tools or task.repair):
        verifier = Unjudged()  # only what measures is lacking
    _check_parts(recipe, found, method)
    _check_condition(recipe)
    if online:
        if task.text is not None:
            raise UserError("task.text", f"{name} answers tasks, and plain text asks nothing")
        _check_online(recipe, method, verifier, env)
        if judge := recipe.judge():
            judge.require()  # before tasks are made, which may take minutes
        train, held_out = tasks(task, recipe.eval.limit, recipe.run.seed, say)
        if judge:
            train = _without_faults(judge, task.data, train, say)
            held_out = _without_faults(judge, task.held_out, held_out, say)
        supply(recipe.curriculum, train, seed=recipe.run.seed)  # each task has the field that it goes by
        if task.tools:
            task.tools.require()
        if task.agent:
            task.agent.check()
        for function in recipe.verifier.function:
            function.check_all(train)
        if judge:
            r = recipe.rollout
            with Pool(workers=r.workers, deadline_s=r.deadline_s, memory_mb=r.memory_mb) as pool:
                self_test(judge, [*train, *held_out], pool)
        return Resolved(recipe, found, method, train, held_out, verifier, env)
    if task.game or task.env or task.tools or task.agent:
        raise UserError("task", "an offline method learns from data, and plays no games")
    if recipe.steps.minibatches > recipe.batch.batch_size:
        raise UserError(
            "steps.minibatches",
            f"{recipe.steps.minibatches} minibatches cannot be dealt from {recipe.batch.batch_size} rows",
            "give at most batch.batch_size",
        )
    records, kept = _records(recipe, found, say)
    if method.probes and recipe.batch.batch_size < 2:
        raise UserError(
            "batch.batch_size",
            f"{name} compares with answers to other questions, and a batch of 1 has none",
            "give 2 or more",
        )
    if "value" in method.needs:
        _check_rewards(name, records)
    if found.learns == "labels":
        _check_labels(name, method, (*records, *kept))
    if "margins" in method.asks:
        _check_margins(name, (*records, *kept))
    return Resolved(recipe, found, method, records, kept, None, None)


def _without_faults(
    judge: Verifier, data: Data | None, found: list[Task], say: Callable[[str], None]
) -> list[Task]:
    """Leave out the tasks that the verifier cannot judge, and say why, where the data has bad = "skip".

    Raises UserError if none is left.
    """
    if data is None or data.bad != "skip" or not found:
        return found
    usable, faults = list[Task](), list[UserError]()
    for task in found:
        try:
            judge.check(task)
            usable.append(task)
        except UserError as fault:
            faults.append(fault)
    if not usable:
        problem = f"{judge.name} can judge none of the {len(found)} tasks; the first: {faults[0].problem}"
        raise UserError(faults[0].key, problem, faults[0].fix)
    if faults:
        file, reasons = found[0].source.rpartition(":")[0], summary(faults, reasons=True)
        say(f"{file}: {len(faults)} of {len(found)} tasks skipped: {reasons}")
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


def _check_condition(recipe: Recipe) -> None:
    """UserError if `run.stop_when` names a metric that does not exist or is not measured on the way."""
    condition = recipe.run.condition
    if condition is None:
        return
    if condition.metric == "update":
        raise UserError("run.stop_when", "updates are counted already", "set run.updates")
    if not words([condition.metric]):
        known = [name for section in sections().values() for names in section for name in names.split(", ")]
        fix = did_you_mean(condition.metric, known) or "docs/metrics.md lists the metrics"
        raise UserError("run.stop_when", f"there is no metric {condition.metric!r}", fix)
    if condition.metric.startswith("eval/") and not (recipe.eval.limit and recipe.eval.every):
        problem = f"{condition.metric} is measured only before the first and after the last update"
        fix = "set eval.every to the updates between evaluations, and eval.limit above 0"
        raise UserError("run.stop_when", problem, fix)


def _check_parts(recipe: Recipe, found: Line, method: Method) -> None:
    """UserError for a part that this method does not have, or cannot be given."""
    name = label(recipe.method["name"])
    read = {
        "critic": bool(method.needs & {"value", "head"}),
        "reference": "logp_ref" in method.needs,
        "trust": found.step == "trust_region",
        "optim": found.step == "adamw",
    }
    for table, reads in read.items():
        # Given at all, were it with the very defaults: a table of one's own is another object.
        if not reads and getattr(recipe, table) is not getattr(Recipe, table):
            raise UserError(table, f"[{table}] is never read by {name}", "leave the table out")
    if "teacher" in method.asks and not recipe.reference.path:
        problem = f"{name} learns from a teacher alone, and no model is named"
        fix = "set it to the teacher, or give method.reward_weight a number above 0"
        raise UserError("reference.path", problem, fix)
    if "head" not in method.needs and recipe.critic.heads > 1:
        raise UserError("critic.heads", "only reward models have several", "leave it out")
    if "head" in method.needs and recipe.critic.kind == "own":
        raise UserError(
            "critic.kind",
            f"{name} trains the model that its head is on",
            "leave it out; model.path says which model becomes the reward model",
        )
    if found.step == "trust_region":
        if recipe.model.dtype != "float32":
            raise UserError(
                "model.dtype",
                f"{name} multiplies with the Fisher matrix, which is noise in {recipe.model.dtype}",
                "set it to 'float32'",
            )
        if recipe.steps.gradient_checkpointing != "none":
            raise UserError(
                "steps.gradient_checkpointing", f"{name} has no gradient checkpointing", "leave it out"
            )
    if getattr(method, "kl_from_old", 0.0) and recipe.steps.epochs * recipe.steps.minibatches == 1:
        raise UserError(
            "steps.epochs",
            f"{name} holds the policy near the start of an update, and one step starts there",
            "take several epochs or minibatches; PPO's own are 4 epochs",
        )
    if recipe.steps.target_kl and not method.measures_kl:
        raise UserError("steps.target_kl", f"{name} does not measure the KL", "leave it out")
    if recipe.reference.refresh_every and recipe.lora.rank:
        raise UserError(
            "reference.refresh_every",
            "with an adapter the reference is the model without it, and cannot follow",
            "leave reference.refresh_every or [lora] out",
        )
    older = "rollout.replay" if recipe.rollout.replay else "async.max_lag" * bool(recipe.async_.max_lag)
    targets = recipe.search is not None and recipe.search.learn == "visits"
    if older and not (method.corrects or targets):
        problem = f"{name} takes every token for one that the present policy drew, and some are older"
        fix = "set method.correction, as to 'token_truncated', or take method.name = 'decoupled_ppo'"
        raise UserError(older, problem, fix)


def _check_online(recipe: Recipe, method: Method, verifier: Verifier | None, env: Env | None) -> None:
    size, name = recipe.rollout.group_size, label(recipe.method["name"])
    least = method.least_group
    if size < least:
        raise UserError(
            "rollout.group_size",
            f"{name} compares the episodes of a task, and a group of {size} has none to compare",
            f"give {least} or more, or take method.name = 'reinforce'",
        )
    if recipe.steps.minibatches > recipe.rollout.groups:
        raise UserError(
            "steps.minibatches",
            f"{recipe.steps.minibatches} minibatches cannot be dealt from {recipe.rollout.groups} groups",
            "give at most rollout.groups",
        )
    selection(recipe.rollout.select, 0.0)  # one's own can be had
    if recipe.rollout.select == "varied" and size < 2:
        raise UserError("rollout.select", "one episode a task never varies", "set it to 'all'")
    if getattr(method, "overlong_buffer", 0.0) and env is not None and not hasattr(env, "max_turns"):
        raise UserError(
            "method.overlong_buffer",
            "the environment does not say how long an episode may be",
            "give it a field max_turns, or leave overlong_buffer out",
        )
    if recipe.sampling.greedy:
        raise UserError(
            "sampling.temperature",
            "a policy that always takes its likeliest token has nothing to learn from",
            "0.7 to 1.0 is usual",
        )
    if recipe.task.agent:
        _check_agent(recipe)
    elif (verifier is None) == (env is None):
        raise UserError(
            "verifier",
            "nobody says what a good answer is"
            if verifier is None
            else "the environment gives the rewards, and a verifier is named beside it",
            str(ADD_VERIFIER if verifier is None else NO_VERIFIER),
        )


def _check_agent(recipe: Recipe) -> None:
    """UserError for what cannot be had where a program plays that nobody knows."""
    if recipe.async_.pace == "steps":
        problem = "when an agent asks hangs on the clock"
        raise UserError("async.pace", problem, "leave it out")
    if recipe.rollout.replay:
        problem = "an agent's episode may be several rows, and a replay keeps one"
        raise UserError("rollout.replay", problem, "leave it out")


def _records(recipe: Recipe, found: Line, say: Callable[[str], None]) -> tuple[Sequence[Any], Sequence[Any]]:
    """What an offline method learns from, and what it is evaluated on."""
    choice = recipe.task
    if (choice.text is None) != (found.learns != "text"):
        problem = f"{label(recipe.method['name'])} learns from {found.learns}"
        problem += ", and there is no text" if choice.text is None else ", and not from plain text"
        raise UserError("task", problem, f"give {spelled('task.data' if choice.text else 'task.text')}")
    if choice.text is not None:
        return [choice.text], [choice.held_out_text] if choice.held_out_text and recipe.eval.limit else []
    if choice.data is None and found.learns == "answers":
        train, held_out = tasks(recipe.task, recipe.eval.limit, recipe.run.seed, say)
        return [_answered(t) for t in train], [_answered(t) for t in held_out]
    if choice.data is None:
        problem = f"{label(recipe.method['name'])} learns from {found.learns}, and these tasks have none"
        raise UserError("task", problem, f"give {spelled('task.data')}")
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
