"""Environments in the format of the library verifiers, from 0.4 on: its own harness plays, by our endpoint.

    [task.own]      function = "posttrain_envs.verifiers_library:tasks"   what a taskset asks
    [task.agent]    function = "posttrain_envs.verifiers_library:play"    an episode, by its harness

Nothing of an environment is read or written again: data, system prompts, tools and rewards are the library's.
An episode is what its `Env` makes of one task, whose model is ours; the tokens are kept as they were sampled,
as of any agent, and the reward is the mean of its traces' rewards. What goes wrong there is an error of the
episode, and no reward of 0. Source: github.com/PrimeIntellect-ai/verifiers, `verifiers.v1`.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any, cast

from posttrain.base.libraries import library, require
from posttrain.process.coroutines import awaited
from posttrain.process.interpreter import asked
from posttrain.types import Task, UserError

WHERE = "task.own.options"
_LIBRARY = "verifiers.v1"
_SHOWN = "The environment asks for itself."
"""The prompt of a task that has none: its harness, or its user, begins."""


def tasks(*, taskset: str, config: Mapping[str, Any] | None = None, limit: int = 1000) -> list[Task]:
    """The first `limit` tasks of a taskset, which is imported in a process of its own.

    taskset: the module or Hub id of an installed package that exports it. config: the environment's own
    table, as `{"agent": {"max_turns": 4}}`; without it the harness `null` plays, a chat with the
    taskset's tools, in a process on this machine. UserError for what cannot be loaded.
    """
    require("verifiers", WHERE)
    table = _table(taskset, config or {})
    found = asked(_listed, table, limit, name=WHERE)
    if not found:
        raise UserError(WHERE, f"the taskset {taskset!r} has no tasks")
    return [
        Task(
            id=f"{taskset}-{n}",
            messages=({"role": "user", "content": prompt or _SHOWN},),
            fields={"taskset": taskset, "index": n, "config": table},
            source=taskset,
        )
        for n, prompt in enumerate(found)
    ]


def play(task: Mapping[str, Any], base_url: str) -> float:
    """The reward of an episode. RuntimeError with what went wrong in it, if anything did."""
    return cast(float, awaited(_played(task["config"], task["index"], base_url)))


def _table(taskset: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The environment's table, with what is said of it."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **config.get("agent", {})}
    return {**config, "taskset": {**config.get("taskset", {}), "id": taskset}, "agent": agent}


def _environment(table: Mapping[str, Any]) -> Any:
    """What the library makes of a table."""
    vf = library(_LIBRARY)
    loaders = library(f"{_LIBRARY}.utils.loaders")
    kind = loaders.environment_class(table["taskset"]["id"], table.get("id", ""))
    config = library(f"{_LIBRARY}.utils.generic").concrete_type(kind, vf.EnvConfig, origin=vf.Env)
    return kind(config.model_validate(table))


def _listed(table: Mapping[str, Any], limit: int) -> list[str]:
    """The prompts of an environment's first tasks, as text."""
    return [str(task.data.prompt_text or "") for task in islice(_environment(table).taskset, limit)]


async def _played(table: Mapping[str, Any], index: int, base_url: str) -> float:
    vf, env = library(_LIBRARY), _environment(table)
    task = next(islice(env.taskset, index, None))
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    wrong = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if wrong or not episode.ok:
        raise RuntimeError(wrong[0].message if wrong else "the episode did not end well")
    rewards = [float(trace.reward) for trace in episode.traces]
    return sum(rewards) / len(rewards)
