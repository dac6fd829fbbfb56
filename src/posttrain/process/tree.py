"""Find and kill trees of processes, and tie a process to its parent and its limits."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def below(pid: int, besides: Collection[int] = ()) -> list[int]:
    """Return the ids of a process and of all its descendants.

    besides: processes to leave out, with their descendants. Systems without /proc are asked through `ps`.
    """
    pids = [pid]
    if sys.platform != "linux":
        children = _children_by_ps()
        for process in pids:
            pids += [child for child in children.get(process, ()) if child not in besides]
        return pids
    for process in pids:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{process}/task"):
                with suppress(OSError), open(f"/proc/{process}/task/{task}/children") as children:
                    pids += [child for child in map(int, children.read().split()) if child not in besides]
    return pids


def _children_by_ps() -> dict[int, list[int]]:
    """Return the children of each process of this machine, `ps` itself left out."""
    children: dict[int, list[int]] = {}
    with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
        for line in ps.communicate()[0].splitlines():
            pid, parent = map(int, line.split())
            if pid != ps.pid:
                children.setdefault(parent, []).append(pid)
    return children


def kill_tree(pid: int, stop_s: float = 1.0) -> None:
    """Kill a child of this process and all its descendants, in whatever sessions.

    The child is stopped before its descendants are listed, so that it starts no others. That waits at
    most `stop_s` seconds: a traced process never stops.
    """
    with suppress(OSError):
        os.kill(pid, signal.SIGSTOP)
    if sys.platform == "linux":  # Python 3.11 and 3.12 have no waitid on macOS
        until = time.monotonic() + stop_s
        events = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
        while time.monotonic() < until and os.waitid(os.P_PID, pid, events) is None:
            time.sleep(0.0001)
    for process in reversed(below(pid)):
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)


def kill_session(pid: int) -> None:
    """Kill a child that has not been waited for, and the session that it leads or is about to lead."""
    for kill in (os.killpg, os.kill):  # the whole group at once, so that no member can fork
        with suppress(OSError):
            kill(pid, signal.SIGKILL)


@contextmanager
def adopt_orphans() -> Iterator[None]:
    """Within the block, orphans among this process's descendants become its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def isolate(memory_mb: int | None) -> None:
    """Give this process its own session, no terminal and a memory limit, and end it with its parent."""
    os.setsid()
    end_with_parent()
    if sys.platform == "linux" and memory_mb is not None:
        limit(resource.RLIMIT_DATA, _data_used() + memory_mb * 2**20)
    limit(resource.RLIMIT_CORE, 0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)


def _data_used() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[5]) * os.sysconf("SC_PAGESIZE")


def limit(kind: int, most: int) -> None:
    """Set a resource limit of this process, not above its present hard limit."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


def _prctl(option: int, value: int) -> None:
    """Call prctl on Linux; do nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
