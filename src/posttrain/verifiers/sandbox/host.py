"""What this host can do to hold a program: the isolation levels, and why one is not available.

strict     namespaces of its own (user, mount, PID, network, IPC, UTS) made by bubblewrap, started
           by a real uid that is not 0; Landlock; seccomp; resource limits; a cgroup where one
           can be made
landlock   Landlock, seccomp and resource limits, under another uid where we are root
rlimits    resource limits, under another uid where we are root
"""

import ctypes
import functools
import importlib.util
import itertools
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Literal

from posttrain.types import RunError, UserError
from posttrain.verifiers.sandbox import seccomp

Level = Literal["strict", "landlock", "rlimits"]
LEVELS: tuple[Level, ...] = ("strict", "landlock", "rlimits")
"""From the strongest to the weakest."""
_LANDLOCK_CREATE = 444
_TRIAL_S = 30.0
OTHER_UID = 1_000_000_000
"""The first of a range of user numbers that nobody has; each box of root's takes another."""


@functools.cache
def available() -> dict[Level, str]:
    """For each level "" where this host gives it, otherwise the reason why not. Linux only.

    >>> set(available()) == set(LEVELS)
    True
    """
    if sys.platform != "linux":
        return dict.fromkeys(LEVELS, f"boxes are made on Linux, and this is {sys.platform}")
    python = "" if interpreter() else "no Python 3.9 or newer can be read by a user other than root"
    if os.getuid() == 0 and path_of("setpriv") is None:
        python = "setpriv, of util-linux, is not installed"
    landlock = python or ("" if _landlock_version() > 0 else "this kernel has no Landlock")
    if not landlock and seccomp.program(namespaces=False, shared_user=False) is None:
        landlock = f"there is no table of system calls for {os.uname().machine}"
    return {"strict": landlock or _bubblewrap(), "landlock": landlock, "rlimits": python}


def require(least: Level, where: str = "") -> None:
    """Nothing; UserError if this host cannot hold a program at least that well."""
    reason = available()[least]
    if reason:
        weaker = [level for level in LEVELS[LEVELS.index(least) + 1 :] if not available()[level]]
        fix = "see posttrain doctor"
        if "bubblewrap" in reason:
            fix = "install it with: apt-get install bubblewrap"
        if weaker:
            fix += f"; or accept less with level = {weaker[0]!r}"
        raise UserError(where, f"the isolation level {least!r} is not available: {reason}", fix)


@functools.cache
def interpreter() -> str | None:
    """The Python that runs in boxes: ours if another user can read it, or the system's; None if neither."""
    ours = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if ours.exists() and reachable(ours):
        return str(ours)
    systems = Path("/usr/bin/python3")
    if not (systems.exists() and reachable(systems)):
        return None
    program = "import sys; sys.exit(sys.version_info < (3, 9))"
    ran = subprocess.run([systems, "-I", "-c", program], capture_output=True, check=False)
    return str(systems) if ran.returncode == 0 else None


def reachable(path: Path) -> bool:
    """Whether a box can be given this path: we may read it, and where we are root everyone may.

    >>> reachable(Path("/usr/bin")), reachable(Path("/no such path"))
    (True, False)
    """
    if os.getuid() != 0 or not path.exists():
        return os.access(path, os.R_OK)
    path = path.resolve()
    wanted = 0o005 if path.is_dir() else 0o004
    folders = all(parent.stat().st_mode & 0o001 for parent in path.parents)
    return folders and path.stat().st_mode & wanted == wanted


def own_uids() -> range:
    """Return the user numbers that boxes of this process draw theirs from, and those of others do not.

    Where a user namespace maps few numbers, as in rootless containers, they are among those, and two
    processes may draw from the same.
    """
    mapped = 0
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        mapped = max(mapped, first + count)
    begin, slices = (OTHER_UID, 1 << 16) if mapped > 2 * OTHER_UID else (mapped // 2, 64)
    span = max(1, (min(mapped, 2 * OTHER_UID) - begin) // slices)
    mine = begin + os.getpid() % slices * span
    return range(mine, mine + span)


def spare_uid(taken: Container[int] = ()) -> int:
    """A user number that nobody has, for a box of root's; not one of those taken in this process.

    It is drawn at random, as a program that knew how many boxes came before could tell the cases apart that
    it is judged by.
    """
    own = own_uids()
    return next(uid for uid in (secrets.choice(own) for _ in itertools.count()) if uid not in taken)


def tasks_of_user() -> int:
    """Processes and threads that our user has now."""
    total = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                total += len(os.listdir(entry / "task"))
    return total


@functools.cache
def path_of(program: str) -> str | None:
    """Where a program of the system lies; None if it is not installed."""
    return shutil.which(program, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin") or shutil.which(program)


def as_user(uid: int) -> list[str]:
    """The command that runs another as a user, and a group, of that number; RunError if there is none."""
    setpriv = path_of("setpriv")
    if setpriv is None:
        raise RunError(
            "start a box", "setpriv, of util-linux, is not installed, and boxes cannot be started as root"
        )
    return [setpriv, "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--"]


@functools.cache
def system_paths() -> tuple[Path, ...]:
    """What every program needs to start, as it lies on this host: read only in a box."""
    names = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
    return tuple(Path(name) for name in names if os.path.lexists(name))


@functools.cache
def python_prefix() -> Path:
    """Where the interpreter of boxes has its library."""
    found = interpreter()
    return Path(found or sys.executable).resolve().parent.parent


@functools.cache
def packages(name: str) -> tuple[str, ...]:
    """The directory of our packages that holds this one, for a box's Python; none if its version is another.

    >>> packages("no such package")
    ()
    """
    found, python = importlib.util.find_spec(name), interpreter()
    if found is None or found.origin is None or python is None:
        return ()
    program = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    same = subprocess.run([python, "-I", "-c", program], capture_output=True, check=False).returncode == 0
    where = Path(found.origin).parent.parent
    return (str(where),) if same and reachable(where) else ()


@functools.cache
def _landlock_version() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_LANDLOCK_CREATE, None, 0, 1))


def _bubblewrap() -> str:
    """Why bubblewrap cannot make namespaces here, or empty."""
    bwrap = path_of("bwrap")
    if bwrap is None:
        return "bubblewrap is not installed"
    command = as_user(spare_uid()) if os.getuid() == 0 else []
    command += [bwrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    try:
        ran = subprocess.run(command, capture_output=True, timeout=_TRIAL_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"bubblewrap does not run: {error}"
    said = ran.stderr.decode("utf-8", "replace").strip().splitlines()
    return "" if ran.returncode == 0 else f"bubblewrap makes no namespaces here: {said[-1] if said else '?'}"
