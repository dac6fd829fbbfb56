"""Limit the rate of requests of all processes on this machine."""

import fcntl
import hashlib
import os
import tempfile
import time
from pathlib import Path

_LONGEST_S = 3600.0
"""A stored turn further away than this is wrong, because the clock was changed since."""


def turn(key: str, per_minute: float, wait_s: float) -> float | None:
    """Take the next turn and return the seconds until it comes; None, and no turn, if that is over wait_s.

    Turns are 60 / per_minute seconds apart for all processes of a user with the same key. The next turn is in
    a file with a lock, which the system releases if its holder is killed.
    """
    name = hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).hexdigest()
    path = Path(tempfile.gettempdir()) / f"posttrain-rate-{os.getuid()}-{name}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        now = time.time()
        at = max(now, _read(descriptor, now))
        if at - now > wait_s:
            return None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, repr(at + 60.0 / per_minute).encode(), 0)
        return at - now
    finally:
        os.close(descriptor)


def _read(descriptor: int, now: float) -> float:
    """Return the time of the next turn; `now` if the file holds no plausible time."""
    try:
        stored = float(os.pread(descriptor, 64, 0))
    except ValueError:
        return now
    return stored if stored - now <= _LONGEST_S else now
