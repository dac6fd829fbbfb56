"""Limit the processor time of a block of Python, so that a slow response gets a verdict and no timeout."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 0.05


class OverTimeError(BaseException):
    """The processor time is used up. Not an Exception, so that `except Exception` does not swallow it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise OverTimeError in a block that takes more processor time, independently of the machine's load.

    Only the main thread can be interrupted, which runs the verdicts of a worker; in other threads only the
    pool's deadline holds.

    >>> try:
    ...     with within(0.05):
    ...         while True:
    ...             pass
    ... except OverTimeError as error:
    ...     print(error)
    it takes more than 0.05 s
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    finished = False

    def stop(number: int, frame: FrameType | None) -> None:
        if not finished:
            raise OverTimeError(f"it takes more than {seconds:g} s")

    report = sys.unraisablehook

    def report_others(args: "sys.UnraisableHookArgs") -> None:
        if not isinstance(args.exc_value, OverTimeError):
            report(args)

    before = signal.signal(signal.SIGVTALRM, stop)
    # Python drops, and reports, exceptions raised in a finaliser or a callback of the garbage collector:
    # so it is raised again and again, and dropped ones are not reported.
    sys.unraisablehook = report_others
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        finished = True
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
        sys.unraisablehook = report
