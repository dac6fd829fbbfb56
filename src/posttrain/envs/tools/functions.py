"""Functions as tools: what a policy is told of one, and calls of it, each in a copy of the process.

A call may raise, hang, die, take all memory, write without end or start processes: it comes to a result of
one line, and everything of it is ended. What it changes is gone with the copy.
"""

import inspect
import json
import os
import random
import select
import sys
import time
import types
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from posttrain.base.usercode import cause, load_named
from posttrain.envs.tools.call import Bounds, Result, Tool
from posttrain.errors import RunError, UserError, how_it_ended
from posttrain.process.interpreter import asked
from posttrain.process.tree import PR_SET_CHILD_SUBREAPER, below, isolate, kill_session, prctl

MOST_PROCESSES = 64
"""A call may have so many, itself included."""
_LOOK_S = 0.02
_END_S = 10.0
_PLAIN = (str, int, float, bool, list, dict, tuple, type(None), Any)


@dataclass(frozen=True)
class Function:
    """A function named "module:function" or "path/to/file.py:function", called with `given` besides."""

    tool: Tool
    name: str
    given: Mapping[str, Any] = field(default_factory=dict)
    first: Mapping[str, Any] | None = None
    """Arguments of a call that makes what later ones share."""

    @property
    def keeper(self) -> str:
        """Itself."""
        return self.tool.name

    def ready(self) -> None:
        """Loads the function, and what its calls share."""
        found = load_named(self.name)
        if self.first is not None:
            found(**self.given, **self.first)

    def __call__(
        self, arguments: Mapping[str, Any], kept: Any, bounds: Bounds, seed: str
    ) -> tuple[Result, Any]:
        """What the function returns, as text; nothing is kept."""
        return forked(partial(load_named(self.name), **self.given, **arguments), bounds, seed), None


@cache
def described(name: str) -> Tool:
    """What the hints and the docstring of a function say of it; UserError for one that no policy could call.

    The function is loaded in a process of its own.
    """
    return Tool(**asked(_described, name, name=name))


def _described(name: str) -> dict[str, Any]:
    """The same as plain data. A docstring is Google's: a description, and each argument under Args."""
    from transformers.utils.chat_template_utils import get_json_schema

    found = load_named(name)
    if not inspect.isfunction(found) or inspect.iscoroutinefunction(found):
        problem = "it is an async function" if inspect.iscoroutinefunction(found) else "it is no function"
        raise UserError(name, problem, "name a function that is written with 'def'")
    for each in inspect.signature(found).parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            problem = f"its parameter {str(each)!r} has no name that a call could give"
            raise UserError(name, problem, "give it parameters that are called by their names")
    for parameter, hint in typing.get_type_hints(found).items():
        if parameter != "return" and not _is_plain(hint):
            problem = (
                f"its parameter {parameter!r} is {getattr(hint, '__name__', hint)}, which JSON does not have"
            )
            raise UserError(name, problem, "take str, int, float, bool, list, dict or a Literal of them")
    try:
        told = get_json_schema(found)["function"]
        json.dumps(told, allow_nan=False)
    except Exception as error:
        fix = "give each parameter a hint, and a line under 'Args:' in the docstring"
        raise UserError(name, f"no policy can be told what it does: {cause(error)}", fix) from None
    return {key: told[key] for key in ("name", "description", "parameters")}


def _is_plain(hint: Any) -> bool:
    """Whether JSON has values of this type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return all(isinstance(each, str | int | float | bool | None) for each in arguments)
    if origin in (typing.Union, types.UnionType, list, dict, tuple):
        return all(_is_plain(each) for each in arguments if each is not ...)
    return hint in _PLAIN


# ---------------------------------------------------------------------- a call in a copy of the process


def forked(call: Callable[[], Any], bounds: Bounds, seed: str = "") -> Result:
    """What a call comes to in a copy of this process; draws of `random` are fixed by the seed.

    RunError if a copy cannot be made, or what it has started cannot be ended. This process must have one
    thread.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a call leaves becomes ours, to be ended
    before = _children()
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        raise RunError("start a tool", str(error)) from None
    if not pid:
        _run_child(call, bounds, seed, writer)
    os.close(writer)
    most = 4 * bounds.max_chars + 2  # of UTF-8; one more than can be shown, so that it is known to be cut
    try:
        written, why = _read(reader, pid, most, bounds.deadline_s)
    finally:
        os.close(reader)
        status = _kill(pid, before)
        prctl(PR_SET_CHILD_SUBREAPER, 0)
    if why is not None:
        return why
    told, text = written[:1], written[1:].decode("utf-8", "replace")
    if told == b"+":
        return bounds.cut(text)
    if told == b"-":
        return Result(f"raised: {text}", "raised")
    how = how_it_ended(os.waitstatus_to_exitcode(status))
    return Result(f"died: the tool ended its process ({how})", "died")


def _run_child(call: Callable[[], Any], bounds: Bounds, seed: str, writer: int) -> typing.NoReturn:
    """In the copy: the call, and what it returns or raises on the pipe."""
    try:
        isolate(bounds.memory_mb)
        os.dup2(writer, 3)
        os.closerange(4, 4096)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(random.getrandbits(32))
        try:
            value = call()
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            body = b"+" + text.encode("utf-8", "replace")
        except BaseException as error:  # sys.exit too
            body = b"-" + cause(error).encode("utf-8", "replace")
        view = memoryview(len(body).to_bytes(8, "big") + body)
        while len(view):
            view = view[os.write(3, view) :]
    finally:
        os._exit(0)


def _read(reader: int, pid: int, most: int, deadline_s: float) -> tuple[bytes, Result | None]:
    """What the copy writes, at most so many bytes of it; or why there is nothing to read."""
    data, until = bytearray(), time.monotonic() + deadline_s
    while len(data) < 8 + min(most, int.from_bytes(data[:8], "big") if len(data) >= 8 else most):
        left = until - time.monotonic()
        if left <= 0:
            return b"", Result(f"timeout: no result within {deadline_s:g} s", "timeout")
        if len(below(pid)) > MOST_PROCESSES:
            return b"", Result(f"died: the tool started more than {MOST_PROCESSES} processes", "died")
        if select.select([reader], [], [], min(left, _LOOK_S))[0]:
            part = os.read(reader, 8 + most - len(data))
            if not part:  # nobody is left who could write
                break
            data += part
    return bytes(data[8:]), None


def _kill(pid: int, before: set[int]) -> int:
    """The wait status of a copy, after it and all that it has started were killed; RunError if that fails."""
    until, status, quiet = time.monotonic() + _END_S, 0, 0
    alive = {pid}
    while quiet < 2:  # one look may miss a process whose parent is just ending
        for each in alive:
            kill_session(each)
            with suppress(ChildProcessError):
                gone = os.waitpid(each, 0)[1]
                status = gone if each == pid else status
        if time.monotonic() > until:
            raise RunError("end a tool", "it goes on starting processes, and cannot be ended")
        alive = _children(before)
        quiet = 0 if alive else quiet + 1
    return status


def _children(besides: Collection[int] = ()) -> set[int]:
    """What runs below this process, without these and what is below them."""
    return set(below(os.getpid(), besides)[1:]) if sys.platform == "linux" else set()
