"""A control group around a box: the memory and the processes of all of it together.

Made where the hierarchy can be written, which is for root; elsewhere the limits of each process
are all there is. Version 1 (one hierarchy a resource) and version 2 are both understood. A group is
named for the process that made it; those of processes that are gone are removed by the next.
"""

import contextlib
import functools
import itertools
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "posttrain-"
_WAIT_S = 0.2
_serial = itertools.count()
_left: list[Path] = []
"""Groups of ours whose last process had not gone when they were to be removed."""


@dataclass(frozen=True)
class Cgroup:
    """The directories of one group, one a hierarchy."""

    directories: tuple[Path, ...]

    def entered(self) -> list[str]:
        """The command that runs another in the group; where it may not be entered, outside."""
        script = 'while [ "$1" != -- ]; do echo 0 > "$1"; shift; done 2>/dev/null; shift; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *(str(d / "cgroup.procs") for d in self.directories), "--"]

    def ran_out(self) -> bool:
        """Whether the kernel has killed a process of it for want of memory."""
        for directory in self.directories:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    words = (directory / name).read_text().split()
                    counts = dict(zip(words[::2], words[1::2], strict=False))
                    if int(counts.get("oom_kill", 0)) > 0:
                        return True
        return False

    def remove(self) -> None:
        """Removes it once its processes are gone, which is waited for briefly."""
        until = time.monotonic() + _WAIT_S
        for directory in self.directories:
            while not _removed(directory):
                if time.monotonic() > until:
                    _left.append(directory)
                    break
                time.sleep(0.002)


def make(memory_mb: int, processes: int) -> Cgroup | None:
    """A new group with these limits, or None where none can be made."""
    sweep()
    _left[:] = [directory for directory in _left if not _removed(directory)]
    name = f"{_PREFIX}{os.getpid()}-{next(_serial)}"
    wanted = {
        "memory": {"memory.limit_in_bytes": memory_mb << 20, "memory.memsw.limit_in_bytes": memory_mb << 20},
        "pids": {"pids.max": processes},
    }
    if (_ROOT / "cgroup.controllers").exists():
        limits = {"memory.max": memory_mb << 20, "memory.swap.max": 0, "pids.max": processes}
        places = [(_ROOT / name, limits)]
    else:
        places = [(_ROOT / kind / name, limits) for kind, limits in wanted.items() if (_ROOT / kind).is_dir()]
    made: list[Path] = []
    for directory, limits in places:
        try:
            directory.mkdir()
        except OSError:
            continue
        made.append(directory)
        for file, limit in limits.items():
            with contextlib.suppress(OSError):
                (directory / file).write_text(str(limit))
    return Cgroup(tuple(made)) if made else None


@functools.cache
def sweep() -> None:
    """Ends the groups of processes that were killed before they could; once in a process."""
    for place in (_ROOT, _ROOT / "memory", _ROOT / "pids"):
        with contextlib.suppress(OSError):
            for directory in place.glob(f"{_PREFIX}*-*"):
                owner = directory.name.removeprefix(_PREFIX).partition("-")[0]
                if owner.isdigit() and not Path("/proc", owner).exists():
                    for pid in (directory / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                    _removed(directory)


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process is still in it
        return False
    return True
