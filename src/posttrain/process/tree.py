"""Trees of processes: what is below one, how it is killed, and what ends a process with its parent."""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def below(pid: int, besides: Collection[int] = ()) -> list[int]:
    """Return a process and all that it and its children have started, as the host numbers them.

    besides: processes that are left out, with what is below them.
    """
    found = [pid]
    for process in found:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{process}/task"):
                with suppress(OSError), open(f"/proc/{process}/task/{task}/children") as children:
                    found += [child for child in map(int, children.read().split()) if child not in besides]
    return found


def kill_tree(pid: int, stop_s: float = 1.0) -> None:
    """Kill a child of this process and all below it, whatever sessions they lead.

    It is stopped before it is asked for its children, as it could have another one meanwhile. That waits at
    most `stop_s` seconds: a process that is traced never stops.
    """
    with suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + stop_s
    how = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
    while sys.platform == "linux" and time.monotonic() < until and os.waitid(os.P_PID, pid, how) is None:
        time.sleep(0.0001)
    for each in reversed(below(pid)):
        with suppress(OSError):
            os.kill(each, signal.SIGKILL)


def kill_session(pid: int) -> None:
    """Kill a child that has not been waited for, and the session that it leads or is about to lead."""
    for kill in (os.killpg, os.kill):  # the group at once, so that none of it forks its way out
        with suppress(OSError):
            kill(pid, signal.SIGKILL)


@contextmanager
def adopting() -> Iterator[None]:
    """Within it, what is left without its parent below this process becomes its child."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def isolate(memory_mb: int | None) -> None:
    """Give this process its own session, no terminal, a limit of memory, and its parent's death."""
    os.setsid()
    end_with_parent()
    if sys.platform == "linux" and memory_mb is not None:
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[5]) * os.sysconf("SC_PAGESIZE")
        limit(resource.RLIMIT_DATA, used + memory_mb * 2**20)
    limit(resource.RLIMIT_CORE, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)


def limit(what: int, most: int) -> None:
    """Limit a resource of this process, at most to what it is limited to."""
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def _prctl(option: int, value: int) -> None:
    """Set something of this process in Linux; nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
