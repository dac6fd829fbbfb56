"""A limit of processor time on a piece of Python, so that a slow response is judged and not given up."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 0.05


class OverTimeError(BaseException):
    """The processor time is used up; not an Exception, so that nobody who catches those swallows it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises OverTimeError in what takes more processor time; it does not depend on how busy the computer is.

    Only the main thread can be interrupted, which is the one that judges in a worker; elsewhere there
    is no limit but the pool's deadline.

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
    over = False

    def stop(number: int, frame: FrameType | None) -> None:
        if not over:
            raise OverTimeError(f"it takes more than {seconds:g} s")

    report = sys.unraisablehook

    def dropped(lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, OverTimeError):
            report(lost)

    before = signal.signal(signal.SIGVTALRM, stop)
    # Python drops, and reports, what is raised inside a finaliser or a call-back of its garbage collector:
    # so it is raised again and again, and that one was dropped is no news.
    sys.unraisablehook = dropped
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
        sys.unraisablehook = report
