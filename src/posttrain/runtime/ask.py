"""What a recipe asks, checked as far as it can be without a model: the method, the tasks and who judges."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data import load_conversations, load_tasks
from posttrain.envs.guess import guess_tasks
from posttrain.envs.maze import layout_tasks, maze_tasks
from posttrain.envs.protocol import Env
from posttrain.envs.tasks.arithmetic import arithmetic
from posttrain.envs.tasks.coq_exercises import coq_exercises
from posttrain.methods.choices import corrects, least_group
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import Line, build, line
from posttrain.runtime.recipe import Recipe
from posttrain.types import Method, Task, UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.self_test import self_test


@dataclass(frozen=True)
class Asked:
    """What a recipe asks, known without a model: the method, the tasks and who judges them."""

    recipe: Recipe
    line: Line
    method: Method
    train: Sequence[Any]
    """Tasks, or conversations for an offline method."""
    held_out: Sequence[Any]
    verifier: Verifier | None
    env: Env | None

    @property
    def online(self) -> bool:
        """Whether the policy is sampled from."""
        return self.line.loop == "online"


def ask(recipe: Recipe) -> Asked:
    """The method, tasks and judge of a recipe, each checked as far as it can be without a model.

    Raises UserError for an impossible combination, and for the first fault of the data.
    """
    found = line(str(recipe.method.get("name", "")))
    options = {k: v for k, v in recipe.method.items() if k != "name"}
    task, sampling = recipe.task, recipe.sampling
    env = task.environment() if found.loop == "online" else None
    turns = getattr(env, "max_turns", 1) if env else 1
    method = build(str(recipe.method["name"]), options, horizon=sampling.max_new_tokens * turns)
    _check_parts(recipe, found, method)
    verifier = recipe.verifier.build() if found.loop == "online" else None
    if found.loop == "online":
        _check_online(recipe, method, verifier, env)
        train, held_out = _tasks(recipe)
        if verifier is not None:
            verifier.require()
            judging = recipe.rollout
            with Pool(
                workers=judging.workers, deadline_s=judging.deadline_s, memory_mb=judging.memory_mb
            ) as pool:
                self_test(verifier, [*train, *held_out], pool)
        return Asked(recipe, found, method, train, held_out, verifier, env)
    if task.guess or task.maze or task.env:
        raise UserError("an offline method learns from data, and plays no games", where="task")
    if recipe.steps.minibatches > recipe.batch.batch_size:
        raise UserError(
            f"{recipe.steps.minibatches} minibatches cannot be dealt from {recipe.batch.batch_size} rows",
            where="steps.minibatches",
            mend="give at most batch.batch_size",
        )
    train, held_out = _conversations(recipe)
    if "value" in method.needs:
        _check_rewards(str(recipe.method["name"]), train)
    return Asked(recipe, found, method, train, held_out, None, None)


def _check_rewards(name: str, conversations: Sequence[Any]) -> None:
    """UserError for the first answer whose reward is missing or no number."""
    for each in conversations:
        reward = getattr(each, "reward", None)
        number = isinstance(reward, (int, float)) and not isinstance(reward, bool)
        if reward is not None and not (number and math.isfinite(reward)):
            raise UserError(f"the reward is {reward!r}", where=each.source, mend="a finite number")
        if reward is None:
            raise UserError(
                f"{name} learns from rewards, and the answer of {each.id!r} has none",
                where=each.source,
                mend='give each record a field "reward"',
            )


def _check_parts(recipe: Recipe, found: Line, method: Method) -> None:
    """UserError for a part that this method does not have, or cannot be given."""
    name = recipe.method["name"]
    read = {
        "critic": "value" in method.needs,
        "reference": "logp_ref" in method.needs,
        "trust": found.step == "trust_region",
        "optim": found.step == "adamw",
    }
    for table, reads in read.items():
        # Given at all, were it with the very defaults: a table of one's own is another object.
        if not reads and getattr(recipe, table) is not getattr(Recipe, table):
            raise UserError(f"[{table}] is never read by {name}", where=table, mend="leave the table out")
    if found.step == "trust_region":
        if recipe.model.dtype != "float32":
            raise UserError(
                f"{name} multiplies with the Fisher matrix, which is noise in {recipe.model.dtype}",
                where="model.dtype",
                mend="set it to 'float32'",
            )
        if recipe.steps.gradient_checkpointing:
            raise UserError(
                f"{name} has no gradient checkpointing",
                where="steps.gradient_checkpointing",
                mend="leave it out",
            )
    if getattr(method, "kl_from_old", 0.0) and recipe.steps.epochs * recipe.steps.minibatches == 1:
        raise UserError(
            f"{name} holds the policy near the start of an update, and one step starts there",
            where="steps.epochs",
            mend="take several epochs or minibatches; PPO's own are 4 epochs",
        )
    if recipe.steps.target_kl and not isinstance(method, PolicyGradient):
        raise UserError(f"{name} does not measure the KL", where="steps.target_kl", mend="leave it out")
    if recipe.reference.refresh_every and recipe.lora.rank:
        raise UserError(
            "with an adapter the reference is the model without it, and cannot follow",
            where="reference.refresh_every",
            mend="leave [reference] or [lora] out",
        )
    if recipe.rollout.replay and not corrects(method):
        raise UserError(
            f"{name} takes every token for one that the present policy drew, and replayed ones are older",
            where="rollout.replay",
            mend="set method.correction, for example to 'token_truncated', or take method.name = 'impala'",
        )


def _check_online(recipe: Recipe, method: Method, verifier: Verifier | None, env: Env | None) -> None:
    size, name = recipe.rollout.group_size, recipe.method["name"]
    least = least_group(method)
    if size < least:
        raise UserError(
            f"{name} compares the episodes of a task, and a group of {size} has none to compare",
            where="rollout.group_size",
            mend=f"give {least} or more, or take method.name = 'reinforce'",
        )
    if recipe.steps.minibatches > recipe.rollout.groups:
        raise UserError(
            f"{recipe.steps.minibatches} minibatches cannot be dealt from {recipe.rollout.groups} groups",
            where="steps.minibatches",
            mend="give at most rollout.groups",
        )
    if recipe.rollout.select == "varied" and size < 2:
        raise UserError("one episode a task never varies", where="rollout.select", mend="set it to 'all'")
    if getattr(method, "overlong_buffer", 0.0) and env is not None and not hasattr(env, "max_turns"):
        raise UserError(
            "the environment does not say how long an episode may be",
            where="method.overlong_buffer",
            mend="give it a field max_turns, or leave overlong_buffer out",
        )
    if recipe.sampling.greedy:
        raise UserError(
            "a policy that always takes its likeliest token has nothing to learn from",
            where="sampling.temperature",
            mend="0.7 to 1.0 is usual",
        )
    if (verifier is None) == (env is None):
        raise UserError(
            "nobody says what a good answer is"
            if verifier is None
            else "the environment gives the rewards, and a verifier is named beside it",
            where="verifier",
            mend="add for example [verifier.number]" if verifier is None else "leave [verifier] out",
        )


def _tasks(recipe: Recipe) -> tuple[list[Task], list[Task]]:
    choice, limit = recipe.task, recipe.eval.limit
    if choice.arithmetic is not None:
        spec = choice.arithmetic
        held_out = arithmetic("held_out", spec, limit=min(limit, spec.held_out)) if limit else []
        return arithmetic("train", spec), held_out
    if choice.coq is not None:
        held = coq_exercises("held_out", choice.coq)[:limit] if limit and choice.coq.held_out else []
        return coq_exercises("train", choice.coq), held
    if choice.data is not None:
        held = load_tasks(choice.held_out)[:limit] if choice.held_out is not None and limit else []
        return load_tasks(choice.data), held
    n, seed = choice.games, recipe.run.seed
    if choice.guess is not None:
        games = guess_tasks(n.train + n.held_out, high=choice.guess.high, seed=seed)
    elif choice.maze_layout:
        games = layout_tasks(n.train + n.held_out, layout=choice.maze_layout)
    else:
        games = maze_tasks(n.train + n.held_out, size=choice.maze_size, seed=seed)
    return games[: n.train], games[n.train :][:limit]


def _conversations(recipe: Recipe) -> tuple[list[Any], list[Any]]:
    choice = recipe.task
    if choice.data is None:
        train, held_out = _tasks(recipe)
        return [_answered(t) for t in train], [_answered(t) for t in held_out]
    held = load_conversations(choice.held_out)[: recipe.eval.limit] if choice.held_out is not None else []
    return load_conversations(choice.data), held


def _answered(task: Task) -> Task:
    """The task with its answer, or its proof, as the assistant's turn, for supervised fine-tuning."""
    return Task(
        id=task.id,
        messages=(*task.messages, {"role": "assistant", "content": task.answer or task.fields["gold"]}),
        source=task.source,
    )
