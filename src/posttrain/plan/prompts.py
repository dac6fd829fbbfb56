"""What the policy will be shown, checked before weights are read: prompts with room, replies that show."""

import hashlib
import json
import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.envs.protocol import Env, Start, Turn, guarded_reply, guarded_start, suited
from posttrain.envs.tools.template_support import Shown
from posttrain.envs.tools.tool_use import ToolUse
from posttrain.plan.model_info import ModelInfo, Say
from posttrain.plan.resolve import Resolved, without
from posttrain.process.workers import Failed, Workers
from posttrain.types import Message, Task, UserError

_MARKER = 'posttrain says "marker"\nin two lines'
"""What a template must show of a reply as it stands."""
_READ = (".json", ".jinja", ".model", ".txt")
"""Files of a model that its tokens depend on."""
_AT_ONCE = 4096
"""Prompts that are tokenised together."""


def check_prompts(
    resolved: Resolved, policy: ModelInfo, say: Say, checked: Path | None = None
) -> tuple[Resolved, int]:
    """Return the longest first prompt, in tokens, and what is left without prompts that cannot be shown.

    Such a prompt is refused by the template, is empty, or has no room for an answer: it is left out where its
    data has bad = "skip", and else a UserError. Where the file `checked` is of these prompts, tokenizer and
    template, they are not rendered again.
    """
    recipe, env = resolved.recipe, suited(resolved.env, policy.chat)
    room, tasks = recipe.sampling.max_new_tokens, (*resolved.train, *resolved.held_out)
    shown = [_shown(env, task) for task in tasks]
    digest = _digest(shown, policy)
    longest = _known(checked, digest)
    if longest is None or longest + room > policy.context:
        skips = [data is not None and data.bad == "skip" for data in (recipe.task.data, recipe.task.held_out)]
        faults: dict[int, UserError] = {}
        longest = _longest(tasks, shown, room, policy, faults)
        count = len(resolved.train)
        for n, fault in faults.items():
            if not skips[n >= count]:
                raise fault
        if faults:
            own, held = (
                {n - least: fault for n, fault in faults.items() if least <= n < most}
                for least, most in ((0, count), (count, len(tasks)))
            )
            train = without(resolved.train, own, "it can show", say)
            held_out = without(resolved.held_out, held, "it can show", say)
            resolved = replace(resolved, train=train, held_out=held_out)
            digest = _digest([start for n, start in enumerate(shown) if n not in faults], policy)
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
    """UserError if the template does not show what the environment says, or alters it.

    How it shows tools is noted. Replies are tried on the first game: an environment that breaks there is no
    matter of the template, and is counted when it does so in the run.
    """
    env, limits = resolved.env, resolved.recipe.rollout
    if env is None:
        return
    if isinstance(env, ToolUse):
        shown = env.suited(policy.chat).shown
        policy.notes.append(str(shown))
        check_stops(resolved.recipe.sampling.stop, shown)
        return
    task = resolved.train[0]
    if env.trusted:
        turns = _first_turns(env, task, operator.call)
    else:
        with Workers(1, deadline_s=limits.deadline_s, memory_mb=limits.memory_mb) as workers:
            turns = _first_turns(env, task, partial(call_in, workers))
    for messages in turns:
        try:
            policy.chat.extend([], [{**message, "content": _MARKER} for message in messages])
        except UserError as error:
            problem = f"what the environment replies cannot be shown: {error.problem}"
            raise UserError("model.chat_template", problem, error.fix) from None


def check_stops(stops: Sequence[str], shown: Shown) -> None:
    """UserError for a stop string that ends a call inside of its text, where the form cannot tell."""
    closing = shown.called.closing
    if shown.format != "plain" or not any(stop.endswith(closing) and "\n" not in stop for stop in stops):
        return
    raise UserError(
        "sampling.stop",
        f"a call that holds {closing!r} in its text would be cut there and made",
        f"leave {closing!r} out: a response ends with its turn",
    )


def call_in(workers: Workers, call: Callable[..., Any], *given: Any) -> Any:
    """What the call returns in a worker process; a Failed if nothing."""
    workers.submit(call, *given)
    while not (found := workers.poll(0.05)):
        pass
    [(_, outcome)] = found
    return outcome if isinstance(outcome, Failed) else outcome.value


def _first_turns(env: Env, task: Task, call: Callable[..., Any]) -> list[Sequence[Message]]:
    """What is replied to the first response, whatever that may be; nothing where it breaks or ends."""
    start = call(guarded_start, env, task)
    if not isinstance(start, Start):
        return []
    turns = [call(guarded_reply, env, start.state, response) for response in ("", task.answer or "5")]
    return [turn.messages for turn in turns if isinstance(turn, Turn) and turn.messages]


def _shown(env: Env | None, task: Task) -> Start:
    """What a task begins with; of an environment that is not ours, as if that were its question."""
    start = guarded_start(env, task) if env and (env.trusted or isinstance(env, ToolUse)) else None
    return start if isinstance(start, Start) else Start(state=None, messages=task.messages)


def _longest(
    tasks: Sequence[Task],
    shown: Sequence[Start],
    room: int,
    policy: ModelInfo,
    faults: dict[int, UserError],
) -> int:
    """Return the tokens of the longest prompt without a fault; add the faults of others to `faults`."""
    most = 0
    for start in range(0, len(tasks), _AT_ONCE):
        part = range(start, min(start + _AT_ONCE, len(tasks)))
        with suppress(UserError):
            longest = policy.chat.longest([shown[n].messages for n in part], shown[0].tools)
            if longest + room <= policy.context:
                most = max(most, longest)
                continue
        for n in part:  # one by one it is found whose fault it is
            try:
                most = max(most, _length(tasks[n], shown[n], room, policy))
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


def _digest(shown: Sequence[Start], policy: ModelInfo) -> str:
    """Of all that the tokens of these prompts depend on."""
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(file for file in policy.path.iterdir() if file.suffix in _READ):
        found.update(file.read_bytes())
    found.update(json.dumps([policy.chat.template, policy.chat.parse_special]).encode())
    for start in shown:
        found.update(json.dumps([*map(dict, start.messages), *map(dict, start.tools)]).encode())
    return found.hexdigest()


def _known(checked: Path | None, digest: str) -> int | None:
    """The longest of the prompts with this digest, if it was found before."""
    try:
        kept = json.loads(checked.read_bytes()) if checked is not None else {}
        return int(kept["longest"]) if kept["prompts"] == digest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
