"""Environments in the format of the library verifiers, from 0.4 on: its harness plays with our endpoint.

    [task.own]      function = "posttrain_envs.verifiers_library:tasks"   the tasks of a taskset
    [task.agent]    function = "posttrain_envs.verifiers_library:play"    an episode, by its harness

Data, system prompts, tools and rewards are the library's. Its `Env` plays an episode of one task with our
model; as for any agent, the tokens are stored as they were sampled, and the reward is the mean of its traces'
rewards. A failure in the library is an error of the episode, not a reward of 0.

Source: github.com/PrimeIntellect-ai/verifiers, `verifiers.v1`.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Any, cast

from posttrain.base.libraries import library, require
from posttrain.process.coroutines import run_coroutine
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import Task, UserError

WHERE = "task.own.options"
_LIBRARY = "verifiers.v1"
_NO_PROMPT = "The environment asks for itself."
"""Prompt of a task that has none; its harness, or its user, begins."""


def tasks(*, taskset: str, config: Mapping[str, Any] | None = None, limit: int = 1000) -> list[Task]:
    """Return the first `limit` tasks of a taskset, which is imported in a process of its own.

    taskset: the module or Hub id of an installed package that exports it. config: the environment's table,
    such as `{"agent": {"max_turns": 4}}`; without it the harness `null` plays, a chat with the taskset's
    tools, in a process on this machine. Raises UserError if the taskset cannot be loaded.
    """
    require("verifiers", WHERE)
    table = _table(taskset, config or {})
    prompts = call_in_fresh_process(_prompts, table, limit, name=WHERE)
    if not prompts:
        raise UserError(WHERE, f"the taskset {taskset!r} has no tasks")
    return [
        Task(
            id=f"{taskset}-{n}",
            messages=({"role": "user", "content": prompt or _NO_PROMPT},),
            fields={"taskset": taskset, "index": n, "config": table},
            source=taskset,
        )
        for n, prompt in enumerate(prompts)
    ]


def play(task: Mapping[str, Any], base_url: str) -> float:
    """Play an episode and return its reward. Raises RuntimeError with the first error of the episode."""
    return cast(float, run_coroutine(_play_episode(task["config"], task["index"], base_url)))


def _table(taskset: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment's table with the taskset's id and the defaults."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **config.get("agent", {})}
    return {**config, "taskset": {**config.get("taskset", {}), "id": taskset}, "agent": agent}


def _environment(table: Mapping[str, Any]) -> Any:
    """Make an environment from its table."""
    vf = library(_LIBRARY)
    loaders = library(f"{_LIBRARY}.utils.loaders")
    kind = loaders.environment_class(table["taskset"]["id"], table.get("id", ""))
    config = library(f"{_LIBRARY}.utils.generic").concrete_type(kind, vf.EnvConfig, origin=vf.Env)
    return kind(config.model_validate(table))


def _prompts(table: Mapping[str, Any], limit: int) -> list[str]:
    """Return the prompts of an environment's first tasks, as text."""
    return [str(task.data.prompt_text or "") for task in islice(_environment(table).taskset, limit)]


async def _play_episode(table: Mapping[str, Any], index: int, base_url: str) -> float:
    vf, env = library(_LIBRARY), _environment(table)
    task = next(islice(env.taskset, index, None))
    client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
    async with env.serving():
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        raise RuntimeError(errors[0].message if errors else "the episode did not end well")
    rewards = [float(trace.reward) for trace in episode.traces]
    return sum(rewards) / len(rewards)
