"""Find out which isolation levels this host supports, and why one is not available.

strict     own namespaces (user, mount, PID, network, IPC, UTS) made by bubblewrap, which runs under a
           real uid that is not 0; Landlock; seccomp; resource limits; a cgroup where one can be made
landlock   Landlock, seccomp and resource limits; if posttrain runs as root, another uid
rlimits    resource limits; if posttrain runs as root, another uid
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
"""Levels from the strongest to the weakest."""
_LANDLOCK_CREATE = 444
_TRIAL_S = 30.0
OTHER_UID = 1_000_000_000
"""First of a range of unused user ids. If posttrain runs as root, each box takes one."""


@functools.cache
def available() -> dict[Level, str]:
    """Return for each level "" if this host supports it, otherwise the reason why not. Linux only.

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
    """Raise UserError if this host does not support the isolation level."""
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
    """Return the Python that runs in boxes: ours if other users can read it, else the system's, else None."""
    our_python = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if our_python.exists() and reachable(our_python):
        return str(our_python)
    system_python = Path("/usr/bin/python3")
    if not (system_python.exists() and reachable(system_python)):
        return None
    program = "import sys; sys.exit(sys.version_info < (3, 9))"
    check = subprocess.run([system_python, "-I", "-c", program], capture_output=True, check=False)
    return str(system_python) if check.returncode == 0 else None


def reachable(path: Path) -> bool:
    """Return whether a box can read this path: this user may, and if this user is root every user may.

    >>> reachable(Path("/usr/bin")), reachable(Path("/no such path"))
    (True, False)
    """
    if os.getuid() != 0 or not path.exists():
        return os.access(path, os.R_OK)
    path = path.resolve()
    mode = 0o005 if path.is_dir() else 0o004
    folders = all(parent.stat().st_mode & 0o001 for parent in path.parents)
    return folders and path.stat().st_mode & mode == mode


def own_uids() -> range:
    """Return the user ids that this process gives to its boxes; other processes use other ranges.

    If a user namespace maps few ids, as in rootless containers, the range lies within these, and two
    processes may share one.
    """
    mapped = 0
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        mapped = max(mapped, first + count)
    begin, slices = (OTHER_UID, 1 << 16) if mapped > 2 * OTHER_UID else (mapped // 2, 64)
    span = max(1, (min(mapped, 2 * OTHER_UID) - begin) // slices)
    mine = begin + os.getpid() % slices * span
    return range(mine, mine + span)


def spare_uid(used: Container[int] = ()) -> int:
    """Return an unused user id for a box, which is not in `used`.

    It is drawn at random: from consecutive ids a program could count the boxes before it, and so tell the
    test cases apart.
    """
    uids = own_uids()
    return next(uid for uid in (secrets.choice(uids) for _ in itertools.count()) if uid not in used)


def tasks_of_user() -> int:
    """Return the number of processes and threads of this user."""
    total = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == os.getuid():
                total += len(os.listdir(entry / "task"))
    return total


@functools.cache
def path_of(program: str) -> str | None:
    """Return the path of a system program; None if it is not installed."""
    return shutil.which(program, path="/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin") or shutil.which(program)


def as_user(uid: int) -> list[str]:
    """Return the command prefix that runs a program under a uid and gid. Raises RunError without setpriv."""
    setpriv = path_of("setpriv")
    if setpriv is None:
        raise RunError(
            "start a box", "setpriv, of util-linux, is not installed, and boxes cannot be started as root"
        )
    return [setpriv, "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--"]


@functools.cache
def system_paths() -> tuple[Path, ...]:
    """Return the directories of this host that every program needs to start; they are read-only in a box."""
    names = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
    return tuple(Path(name) for name in names if os.path.lexists(name))


@functools.cache
def python_prefix() -> Path:
    """Return the installation directory of the interpreter that runs in boxes."""
    path = interpreter()
    return Path(path or sys.executable).resolve().parent.parent


@functools.cache
def packages(name: str) -> tuple[str, ...]:
    """Return the site directory that holds a package; () if the Python of boxes has another version.

    >>> packages("no such package")
    ()
    """
    spec, python = importlib.util.find_spec(name), interpreter()
    if spec is None or spec.origin is None or python is None:
        return ()
    program = f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
    is_same_version = (
        subprocess.run([python, "-I", "-c", program], capture_output=True, check=False).returncode == 0
    )
    directory = Path(spec.origin).parent.parent
    return (str(directory),) if is_same_version and reachable(directory) else ()


@functools.cache
def _landlock_version() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(_LANDLOCK_CREATE, None, 0, 1))


def _bubblewrap() -> str:
    """Return why bubblewrap cannot make namespaces here; "" if it can."""
    bwrap = path_of("bwrap")
    if bwrap is None:
        return "bubblewrap is not installed"
    command = as_user(spare_uid()) if os.getuid() == 0 else []
    command += [bwrap, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    try:
        ran = subprocess.run(command, capture_output=True, timeout=_TRIAL_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"bubblewrap does not run: {error}"
    lines = ran.stderr.decode("utf-8", "replace").strip().splitlines()
    return (
        "" if ran.returncode == 0 else f"bubblewrap makes no namespaces here: {lines[-1] if lines else '?'}"
    )
