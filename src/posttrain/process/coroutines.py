"""Run the coroutines of user code to their end, in event loops that persist between calls."""

import asyncio
import atexit
import inspect
import os
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread, get_ident
from typing import Any


@dataclass(frozen=True)
class _Loop:
    """An event loop, and the thread that runs it if the calling thread cannot."""

    runner: asyncio.Runner
    thread: Thread | None = None

    def close(self) -> None:
        """Cancel the loop's tasks and close it."""
        if self.thread:
            loop = self.runner.get_loop()
            loop.call_soon_threadsafe(loop.stop)
            self.thread.join()
        self.runner.close()


_LOOPS: dict[tuple[int, int, bool], _Loop] = {}
"""Loops by process, calling thread, and whether the loop runs in a thread of its own."""


def run_coroutine(value: object) -> object:
    """Return the value of a user's function: the value itself, or the result of a coroutine.

    Every coroutine of a thread runs in one event loop, because a client or a lock in the user's module is
    bound to a loop at its first use, and must serve all calls. Tasks that a call leaves stay in that loop.
    """
    if not inspect.iscoroutine(value):
        return value
    coroutine: Coroutine[Any, Any, object] = value
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop(in_thread=False).runner.run(coroutine)
    # The thread runs a loop already, as in a notebook, and cannot wait for it.
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop(in_thread=True).runner.get_loop())
    try:
        return future.result()
    except BaseException:  # Ctrl-C too, after which the call must not continue
        future.cancel()
        raise


def _loop(*, in_thread: bool) -> _Loop:
    """Return the event loop of this thread, or the one that it has in a thread of its own."""
    key = (os.getpid(), get_ident(), in_thread)
    if key not in _LOOPS or _LOOPS[key].runner.get_loop().is_closed():
        runner, thread = asyncio.Runner(loop_factory=asyncio.new_event_loop), None
        if in_thread:
            thread = Thread(target=runner.get_loop().run_forever, name="coroutines", daemon=True)
            thread.start()
        _LOOPS[key] = _Loop(runner, thread)
    return _LOOPS[key]


@atexit.register
def close_loops() -> None:
    """Close the event loops of this process, but not those inherited by a fork from its parent."""
    for key in [key for key in _LOOPS if key[0] == os.getpid()]:
        with suppress(RuntimeError):  # at exit no thread can be started, which closing an executor does
            _LOOPS.pop(key).close()
