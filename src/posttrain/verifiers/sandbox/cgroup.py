"""Limit the memory and the number of processes of a whole box by a cgroup.

Groups are made if the hierarchy is writable, usually as root; otherwise only the limits of each process
apply. Versions 1 (one hierarchy per resource) and 2 are supported. A group's name holds the pid of the
process that made it; groups whose process has ended are removed by the next process that makes one.
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
_undeleted: list[Path] = []
"""Groups that could not be removed because a process was still in them; tried again later."""


@dataclass(frozen=True)
class Cgroup:
    """Directories of one group, one per hierarchy."""

    directories: tuple[Path, ...]

    def command_prefix(self) -> list[str]:
        """Return the command prefix that runs a program in the group; outside if it cannot be entered."""
        script = 'while [ "$1" != -- ]; do echo 0 > "$1"; shift; done 2>/dev/null; shift; exec "$@"'
        return ["/bin/sh", "-c", script, "sh", *(str(d / "cgroup.procs") for d in self.directories), "--"]

    def ran_out(self) -> bool:
        """Return whether the kernel has killed a process in the group because memory ran out."""
        for directory in self.directories:
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError):
                    words = (directory / name).read_text().split()
                    counts = dict(zip(words[::2], words[1::2], strict=False))
                    if int(counts.get("oom_kill", 0)) > 0:
                        return True
        return False

    def remove(self) -> None:
        """Remove the group; wait briefly for its processes to end."""
        until = time.monotonic() + _WAIT_S
        for directory in self.directories:
            while not _remove(directory):
                if time.monotonic() > until:
                    _undeleted.append(directory)
                    break
                time.sleep(0.002)


def make(memory_mb: int, processes: int) -> Cgroup | None:
    """Make a group with these limits; return None if that is not possible."""
    sweep()
    _undeleted[:] = [directory for directory in _undeleted if not _remove(directory)]
    name = f"{_PREFIX}{os.getpid()}-{next(_serial)}"
    limits_by_kind = {
        "memory": {"memory.limit_in_bytes": memory_mb << 20, "memory.memsw.limit_in_bytes": memory_mb << 20},
        "pids": {"pids.max": processes},
    }
    if (_ROOT / "cgroup.controllers").exists():
        limits = {"memory.max": memory_mb << 20, "memory.swap.max": 0, "pids.max": processes}
        places = [(_ROOT / name, limits)]
    else:
        places = [
            (_ROOT / kind / name, limits)
            for kind, limits in limits_by_kind.items()
            if (_ROOT / kind).is_dir()
        ]
    directories: list[Path] = []
    for directory, limits in places:
        try:
            directory.mkdir()
        except OSError:
            continue
        directories.append(directory)
        for file, limit in limits.items():
            with contextlib.suppress(OSError):
                (directory / file).write_text(str(limit))
    return Cgroup(tuple(directories)) if directories else None


@functools.cache
def sweep() -> None:
    """Kill and remove the groups of processes that no longer exist; only once in this process."""
    for place in (_ROOT, _ROOT / "memory", _ROOT / "pids"):
        with contextlib.suppress(OSError):
            for directory in place.glob(f"{_PREFIX}*-*"):
                owner = directory.name.removeprefix(_PREFIX).partition("-")[0]
                if owner.isdigit() and not Path("/proc", owner).exists():
                    for pid in (directory / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                    _remove(directory)


def _remove(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:  # a process is still in it
        return False
    return True
