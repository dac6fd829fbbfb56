"""A limit of processor time on what runs in this process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 0.05


class OutOfTime(BaseException):
    """The time is over; not an Exception, so that nobody who catches those swallows it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the body after so many seconds of processor time.

    Processor time, so that a verdict does not depend on how busy the machine is. Works in the main
    thread only, as signals do; elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over = False

    def ring(number: int, frame: FrameType | None) -> None:
        if not over:
            raise OutOfTime

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, _AGAIN_S)  # again, should the first be caught
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
