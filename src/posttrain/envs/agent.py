"""An agent that knows nothing of posttrain: a function or a program that asks the OpenAI chat API.

play   waits for   the agent, which has the deadline of the worker process that it runs in
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
from posttrain.errors import how_it_ended
from posttrain.process.child import Child
from posttrain.process.coroutines import awaited
from posttrain.process.interpreter import asked
from posttrain.types import Task, UserError

_TOLD = 300
"""Characters of what a program writes last before it fails."""


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent of yours plays the tasks of data, by calls of the OpenAI chat API."""

    function: str = ""
    """module:function or path/to/file.py:function, called with a task (a dict) and the base URL of the
    episode. It returns a score, or the text that the verifier judges, or None: then its last answer is."""
    command: tuple[str, ...] = ()
    """Or a program: the task is JSON on its standard input, the base URL in OPENAI_BASE_URL."""
    at_once: int = 16
    """Agents that run at the same time, each in a process of its own."""
    deadline_s: float = 300.0
    """Seconds of an episode; one that takes longer is not scored."""
    max_calls: int = 32
    """Calls of an episode that are answered."""
    format: FormatName = "auto"
    """How calls of the agent's tools are written; auto: as the chat template writes them, or plain."""

    def __post_init__(self) -> None:
        if bool(self.function) == bool(self.command):
            raise ValueError("give either function or command")
        if not 0 < self.deadline_s < math.inf:
            raise ValueError(f"deadline_s must be positive, not {self.deadline_s}")
        if min(self.at_once, self.max_calls) < 1:
            raise ValueError("at_once and max_calls must be 1 or more")

    def check(self) -> None:
        """UserError for a function that takes no task and URL, or a program that is not there."""
        if self.command:
            if shutil.which(program := self.command[0]) is None:
                problem = f"there is no program {program!r}"
                raise UserError("task.agent.command", problem, "give its path")
            return
        told = asked(signature, self.function, name=self.function)
        if not told["callable"]:
            problem = f"{self.function} is {told['type']}, which cannot be called"
            raise UserError("task.agent.function", problem)
        parameters = told["parameters"]
        if parameters is None:
            return
        taken = [p for p in parameters if p[1].startswith("POSITIONAL")]
        many = any(p[1] == "VAR_POSITIONAL" for p in parameters)
        needed = [p for p in parameters if not p[2] and not p[1].startswith("VAR")]
        if len(needed) > 2 or (len(taken) < 2 and not many) or any(p[1] == "KEYWORD_ONLY" for p in needed):
            takes = ", ".join(p[3] for p in parameters)
            problem = f"{self.function} takes ({takes}), and is called with (task, base_url)"
            raise UserError("task.agent.function", problem, "write def play(task, base_url): ...")


def record(task: Task) -> dict[str, Any]:
    """A task as agents are given it: all that the data held, and id, messages and answer.

    >>> record(Task(id="a", messages=({"role": "user", "content": "2?"},), answer="2", fields={"level": 3}))
    {'level': 3, 'id': 'a', 'messages': [{'role': 'user', 'content': '2?'}], 'answer': '2'}
    """
    messages = [dict(message) for message in task.messages]
    return {**task.fields, "id": task.id, "messages": messages, "answer": task.typed_answer}


def play(agent: Agent, task: Mapping[str, Any], base_url: str) -> float | str | None:
    """What the agent returns of one episode; whatever it raises. Runs in a worker process."""
    told = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "posttrain"}
    os.environ |= told  # for clients that look there
    if agent.command:
        _run(agent.command, json.dumps(task, ensure_ascii=False, default=str), told)
        return None
    found = awaited(load_named(agent.function)(task, base_url))
    if isinstance(found, bool | int | float):
        if not math.isfinite(score := float(found)):
            raise ValueError(f"its score is {score}")
        return score
    if found is None or isinstance(found, str):
        return found
    raise TypeError(f"it returned {type(found).__name__}, and not a score, a text or None")


def _run(command: tuple[str, ...], task: str, told: Mapping[str, str]) -> None:
    """Runs a program to its end; RuntimeError with the last that it wrote if it fails."""
    pipe = subprocess.PIPE
    with Child(command, session=False, stdin=pipe, stderr=pipe, env={**os.environ, **told}) as program:
        program.communicate(task.encode())
    if code := program.code:
        last = program.last_words()[-_TOLD:] or "it wrote nothing"
        raise RuntimeError(f"the program ended with {how_it_ended(code)}: {last}")
