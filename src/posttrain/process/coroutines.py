"""Event loops in which the coroutines of user code run to their end."""

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
    """An event loop, and the thread that runs it where the thread that asks cannot."""

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
"""By process and thread that asks, and whether that runs a loop already."""


def awaited(value: object) -> object:
    """Return what a function of the user's returned, or what its coroutine returns.

    Every coroutine of a thread runs in one event loop, so that a client or a lock that the user's module
    keeps, which its first use binds to a loop, serves all calls. Tasks that a call leaves stay in that loop.
    """
    if not inspect.iscoroutine(value):
        return value
    coroutine: Coroutine[Any, Any, object] = value
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop(beside=False).runner.run(coroutine)
    # A notebook's thread runs a loop already, which cannot be waited for in it.
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop(beside=True).runner.get_loop())
    try:
        return future.result()
    except BaseException:  # Ctrl-C too, behind which the call must not go on
        future.cancel()
        raise


def _loop(*, beside: bool) -> _Loop:
    """The loop of this thread, or of one that this thread has next to it."""
    key = (os.getpid(), get_ident(), beside)
    if key not in _LOOPS or _LOOPS[key].runner.get_loop().is_closed():
        runner, thread = asyncio.Runner(loop_factory=asyncio.new_event_loop), None
        if beside:
            thread = Thread(target=runner.get_loop().run_forever, name="coroutines", daemon=True)
            thread.start()
        _LOOPS[key] = _Loop(runner, thread)
    return _LOOPS[key]


@atexit.register
def close_loops() -> None:
    """Close the event loops of this process; those that it got by a fork are its parent's."""
    for key in [key for key in _LOOPS if key[0] == os.getpid()]:
        with suppress(RuntimeError):  # no thread can be started any more, which an executor's end would be
            _LOOPS.pop(key).close()
