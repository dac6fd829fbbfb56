"""Check the prompts and the replies of environments that the policy will see, before weights are read."""

import hashlib
import json
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.envs.protocol import Env, Start, Turn, for_template, guarded_reply, guarded_start
from posttrain.envs.tools.template_support import Shown
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.plan.model_info import ModelInfo, Say
from posttrain.plan.resolve import Resolved, skip_tasks
from posttrain.process.workers import Failed, Workers
from posttrain.recipe.config import in_source
from posttrain.types import Message, Task, UserError

_MARKER = 'posttrain says "marker"\nin two lines'
"""A reply that the template must show unchanged."""
_TOKENIZER_FILES = (".json", ".jinja", ".model", ".txt")
"""Suffixes of the model files that tokens depend on."""
_BATCH = 4096
"""Number of prompts that are tokenised together."""


def check_prompts(
    resolved: Resolved, policy: ModelInfo, say: Say, checked: Path | None = None
) -> tuple[Resolved, int]:
    """Return the tasks whose prompts are valid, and the tokens of the longest first prompt (`_check_source`).

    The file `checked` gets the name of its source before its own, if there are several.
    """
    parts, longest = [], 0
    for number, part in enumerate(resolved.parts):
        several = resolved.sources and checked is not None
        file = checked.with_name(f"{checked.name}.{part.name}") if checked and several else checked
        with in_source(number, len(resolved.parts)):
            part, length = _check_source(part, policy, say, file)
        parts.append(part)
        longest = max(longest, length)
    return resolved.with_parts(parts), longest


def check_evaluation(resolved: Resolved, policy: ModelInfo, say: Say) -> tuple[Resolved, int]:
    """Do the same for the sources of [[eval.task]]; 0 tokens if there are none."""
    parts, longest = [], 0
    for number, part in enumerate(resolved.evaluated):
        with in_source(number, len(resolved.evaluated), "eval.task"):
            part, length = _check_source(part, policy, say, None)
            _check_replies(part, policy)
        parts.append(part)
        longest = max(longest, length)
    return replace(resolved, evaluated=tuple(parts)), longest


def _check_source(
    resolved: Resolved, policy: ModelInfo, say: Say, checked: Path | None
) -> tuple[Resolved, int]:
    """Return the tasks of one source whose prompts are valid, and the tokens of the longest first prompt.

    A prompt is invalid if the template refuses it, if it is empty, or if it leaves no room for an answer. It
    is left out if its data has bad = "skip"; otherwise it raises UserError. If the file `checked` has the
    digest of these prompts, tokenizer and template, they are not rendered again.
    """
    recipe, env = resolved.recipe, for_template(resolved.env, policy.chat)
    room, tasks = recipe.sampling.max_new_tokens, (*resolved.train, *resolved.held_out)
    starts = [_start(env, task) for task in tasks]
    digest = _digest(starts, policy)
    longest = _read_longest(checked, digest)
    if longest is None or longest + room > policy.context:
        skips = [
            data is not None and data.bad == "skip" for data in (recipe.source.data, recipe.source.held_out)
        ]
        faults: dict[int, UserError] = {}
        longest = _longest(tasks, starts, room, policy, faults)
        count = len(resolved.train)
        for n, fault in faults.items():
            if not skips[n >= count]:
                raise fault
        if faults:
            train_faults = {n: fault for n, fault in faults.items() if n < count}
            other_faults = {n - count: fault for n, fault in faults.items() if n >= count}
            train = skip_tasks(resolved.train, train_faults, "it can show", say)
            held_out = skip_tasks(resolved.held_out, other_faults, "it can show", say)
            resolved = replace(resolved, train=train, held_out=held_out)
            digest = _digest([start for n, start in enumerate(starts) if n not in faults], policy)
        if checked is not None:
            checked.write_text(json.dumps({"prompts": digest, "longest": longest}), encoding="utf-8")
    if longest + room > recipe.engine.cache_tokens:
        raise UserError(
            "engine.cache_tokens",
            f"the longest prompt has {longest} tokens, and with {room} new ones that is more than the "
            f"cache of {recipe.engine.cache_tokens}",
            "raise it",
        )
    return resolved, longest


def check_replies(resolved: Resolved, policy: ModelInfo) -> None:
    """Raise UserError if the template drops or changes the replies of an environment.

    The form in which tools are shown is added to the policy's notes. Replies are tried on the first task; an
    environment that fails there is not reported here, but counted in the run.
    """
    for number, part in enumerate(resolved.parts):
        with in_source(number, len(resolved.parts)):
            _check_replies(part, policy)


def _check_replies(resolved: Resolved, policy: ModelInfo) -> None:
    env, limits = resolved.env, resolved.recipe.rollout
    tasks = resolved.train or resolved.held_out
    if env is None or not tasks:
        return
    if isinstance(env, ToolUse):
        form = env.suited(policy.chat).shown
        policy.notes.append(str(form))
        check_stops(resolved.recipe.sampling.stop, form)
        return
    task = tasks[0]
    if env.trusted:
        turns = _first_turns(env, task, operator.call)
    else:
        with Workers(1, deadline_s=limits.deadline_s, memory_mb=limits.memory_mb) as workers:
            turns = _first_turns(env, task, partial(_call_in, workers))
    for messages in turns:
        try:
            policy.chat.extend([], [{**message, "content": _MARKER} for message in messages])
        except UserError as error:
            problem = f"what the environment replies cannot be shown: {error.problem}"
            raise UserError("model.chat_template", problem, error.fix) from None


def check_stops(stops: Sequence[str], form: Shown) -> None:
    """Raise UserError for a stop string that ends a call inside its text, if the format cannot tell."""
    closing = form.called.closing
    if form.format != "plain" or not any(stop.endswith(closing) and "\n" not in stop for stop in stops):
        return
    raise UserError(
        "sampling.stop",
        f"a call that holds {closing!r} in its text would be cut there and made",
        f"leave {closing!r} out: a response ends with its turn",
    )


def _call_in(workers: Workers, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of the call in a worker process, or a Failed."""
    workers.submit(call, *arguments)
    while not (results := workers.poll(0.05)):
        pass
    [(_, outcome)] = results
    return outcome if isinstance(outcome, Failed) else outcome.value


def _first_turns(env: Env, task: Task, call: Callable[..., Any]) -> list[Sequence[Message]]:
    """Return the replies to a first response; empty if the environment fails or the episode ends."""
    start = call(guarded_start, env, task)
    if not isinstance(start, Start):
        return []
    turns = [call(guarded_reply, env, start.state, response) for response in ("", task.answer or "5")]
    return [turn.messages for turn in turns if isinstance(turn, Turn) and turn.messages]


def _start(env: Env | None, task: Task) -> Start:
    """Return the start of a task; for an environment that is not trusted, the task's own messages."""
    start = guarded_start(env, task) if env and (env.trusted or isinstance(env, ToolUse)) else None
    return start if isinstance(start, Start) else Start(state=None, messages=task.messages)


def _longest(
    tasks: Sequence[Task],
    starts: Sequence[Start],
    room: int,
    policy: ModelInfo,
    faults: dict[int, UserError],
) -> int:
    """Return the tokens of the longest valid prompt; add the faults of the others to `faults`."""
    most = 0
    for first in range(0, len(tasks), _BATCH):
        part = range(first, min(first + _BATCH, len(tasks)))
        with suppress(UserError):
            longest = policy.chat.longest([starts[n].messages for n in part], starts[0].tools)
            if longest + room <= policy.context:
                most = max(most, longest)
                continue
        for n in part:  # one by one, to find which prompts are invalid
            try:
                most = max(most, _length(tasks[n], starts[n], room, policy))
            except UserError as fault:
                faults[n] = fault
    return most


def _length(task: Task, start: Start, room: int, policy: ModelInfo) -> int:
    try:
        length = len(policy.chat.render(start.messages, start.tools))
    except UserError as error:
        raise UserError(task.source, f"task {task.id!r}: {error}") from None
    if length + room > policy.context:
        raise UserError(
            task.source,
            f"the prompt of task {task.id!r} has {length} tokens, and with {room} new ones that is more "
            f"than {policy.narrowest}'s context of {policy.context}",
            "leave it out, or lower sampling.max_new_tokens",
        )
    return length


def _digest(starts: Sequence[Start], policy: ModelInfo) -> str:
    """Return a digest of all that the tokens of these prompts depend on."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(file for file in policy.path.iterdir() if file.suffix in _TOKENIZER_FILES):
        digest.update(file.read_bytes())
    digest.update(
        json.dumps([policy.chat.template, policy.chat.parse_special, policy.chat.template_args]).encode()
    )
    for start in starts:
        digest.update(json.dumps([*map(dict, start.messages), *map(dict, start.tools)]).encode())
    return digest.hexdigest()


def _read_longest(checked: Path | None, digest: str) -> int | None:
    """Return the longest length that the file records for prompts with this digest, if it does."""
    try:
        record = json.loads(checked.read_bytes()) if checked is not None else {}
        return int(record["longest"]) if record["prompts"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
