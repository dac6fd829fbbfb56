"""Agents that do not know posttrain: functions or programs that call the OpenAI chat API.

play   waits for   the agent, until the deadline of its worker process
"""

import json
import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.base.usercode import load_named, signature
from posttrain.envs.tools.formats import FormatName
from posttrain.errors import describe_exit
from posttrain.process.child import Child
from posttrain.process.coroutines import run_coroutine
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import Task, UserError

_MOST_STDERR = 300
"""Characters of a failed program's last output that are reported."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent of yours plays the tasks of data, by calls of the OpenAI chat API."""

    function: str = ""
    """module:function or path/to/file.py:function, called with a task (a dict) and the base URL of the
    episode. It returns a score, a text for the verifier to judge, or None to judge its last answer."""
    command: tuple[str, ...] = ()
    """Or a program: it gets the task as JSON on its standard input, and the base URL in OPENAI_BASE_URL."""
    at_once: int = 16
    """Agents that run at the same time, each in its own process."""
    deadline_s: float = 300.0
    """Seconds of an episode; one that takes longer gets no score."""
    max_calls: int = 32
    """Calls of an episode that are answered."""
    format: FormatName = "auto"
    """The format of calls of the agent's tools; auto: that of the chat template, or plain."""

    def __post_init__(self) -> None:
        if bool(self.function) == bool(self.command):
            raise ValueError("give either function or command")
        if not 0 < self.deadline_s < math.inf:
            raise ValueError(f"deadline_s must be positive, not {self.deadline_s}")
        if min(self.at_once, self.max_calls) < 1:
            raise ValueError("at_once and max_calls must be 1 or more")

    def check(self) -> None:
        """Raise UserError for a function that does not take a task and a URL, or a missing program."""
        if self.command:
            if shutil.which(program := self.command[0]) is None:
                problem = f"there is no program {program!r}"
                raise UserError("task.agent.command", problem, "give its path")
            return
        function = call_in_fresh_process(signature, self.function, name=self.function)
        if not function["callable"]:
            problem = f"{self.function} is {function['type']}, which cannot be called"
            raise UserError("task.agent.function", problem)
        parameters = function["parameters"]
        if parameters is None:
            return
        positional = [p for p in parameters if p[1].startswith("POSITIONAL")]
        variadic = any(p[1] == "VAR_POSITIONAL" for p in parameters)
        needed = [p[1] for p in parameters if not p[2] and not p[1].startswith("VAR")]
        if len(needed) > 2 or (len(positional) < 2 and not variadic) or "KEYWORD_ONLY" in needed:
            names = ", ".join(p[3] for p in parameters)
            problem = f"{self.function} takes ({names}), and is called with (task, base_url)"
            raise UserError("task.agent.function", problem, "write def play(task, base_url): ...")


def record(task: Task) -> dict[str, Any]:
    """Return a task as agents get it: all fields of the data, and id, messages and answer.

    >>> record(Task(id="a", messages=({"role": "user", "content": "2?"},), answer="2", fields={"level": 3}))
    {'level': 3, 'id': 'a', 'messages': [{'role': 'user', 'content': '2?'}], 'answer': '2'}
    """
    messages = [dict(message) for message in task.messages]
    return {**task.fields, "id": task.id, "messages": messages, "answer": task.typed_answer}


def play(agent: Agent, task: Mapping[str, Any], base_url: str) -> float | str | None:
    """Return the result of one episode of the agent; raises what the agent raises. Runs in a worker."""
    variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "posttrain"}
    os.environ |= variables  # for clients that read them from the environment
    if agent.command:
        _run(agent.command, json.dumps(task, ensure_ascii=False, default=str), variables)
        return None
    result = run_coroutine(load_named(agent.function)(task, base_url))
    if isinstance(result, bool | int | float):
        if not math.isfinite(score := float(result)):
            raise ValueError(f"its score is {score}")
        return score
    if result is None or isinstance(result, str):
        return result
    raise TypeError(f"it returned {type(result).__name__}, and not a score, a text or None")


def _run(command: tuple[str, ...], task: str, variables: Mapping[str, str]) -> None:
    """Run a program to its end. Raises RuntimeError with its last output if it fails."""
    pipe = subprocess.PIPE
    with Child(command, session=False, stdin=pipe, stderr=pipe, env={**os.environ, **variables}) as program:
        program.communicate(task.encode())
    if code := program.code:
        last = program.last_words()[-_MOST_STDERR:] or "it wrote nothing"
        raise RuntimeError(f"the program ended with {describe_exit(code)}: {last}")
