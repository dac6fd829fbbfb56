"""A rate of requests that holds over all processes of this machine."""

import fcntl
import hashlib
import os
import tempfile
import time
from pathlib import Path

_LONGEST_S = 3600.0
"""A turn further away than this is from before the clock was set."""


def turn(key: str, per_minute: float, wait_s: float) -> float | None:
    """Seconds to wait for one's turn, which is thereby taken; None if it is not within wait_s.

    Turns are 60 / per_minute seconds apart for all who ask with the same key and are the same user.
    They are kept in a locked file, which the system frees when its holder is killed.
    """
    name = hashlib.blake2b(key.encode("utf-8", "replace"), digest_size=8).hexdigest()
    path = Path(tempfile.gettempdir()) / f"posttrain-rate-{os.getuid()}-{name}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        now = time.time()
        mine = max(now, _read(descriptor, now))
        if mine - now > wait_s:
            return None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, repr(mine + 60.0 / per_minute).encode(), 0)
        return mine - now
    finally:
        os.close(descriptor)


def _read(descriptor: int, now: float) -> float:
    """When the next turn is; now, if the file says nothing that makes sense."""
    try:
        stored = float(os.pread(descriptor, 64, 0))
    except ValueError:
        return now
    return stored if stored - now <= _LONGEST_S else now
