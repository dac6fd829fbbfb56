"""A box: a program started where it can harm nothing and nobody, and everything of it ended after.

start   waits for      nothing; the program comes up by itself
run     waits for      the program, within `Limits.wall_s` of time in which it could run
"""

import marshal
import math
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.process.child import last_line
from posttrain.types import RunError
from posttrain.verifiers.sandbox import cgroup, host, seccomp
from posttrain.verifiers.sandbox.host import Level
from posttrain.verifiers.sandbox.live import USED, Holdings, Live, attend

_INSIDE = (
    "import sys; sys.path[:] = filter(None, sys.path)\n" + Path(__file__).with_name("inside.py").read_text()
)
"""Nothing is imported from the working directory, which holds the program's files."""
_OWN_PROCESSES = 8
"""Of bubblewrap and the supervisor, in a group's count of processes."""
_WORKDIR = "/box"
"""Of a strict box, as the program in it sees it; a name that no host has."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use."""

    wall_s: float = 10.0
    """Seconds, not counting those in which others had the processor."""
    memory_mb: int = 512
    """Of address space for each process; where a cgroup can be made, of memory for all together."""
    processes: int = 32
    """Processes and threads."""
    files_mb: int = 64
    """Written, in one file and in all together where the working directory is a file system of its own."""
    output_bytes: int = 1 << 20
    """Of stdout and of stderr, each."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "memory_mb", "processes", "files_mb", "output_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True)
class Ran:
    """How a program ended, and what it left."""

    status: int | None
    """Its exit status, 128 + n if signal n ended it; None if we ended it."""
    stdout: bytes
    stderr: bytes
    collected: Mapping[str, bytes]
    ended: Literal["exit", "signal", "timeout", "output", "memory"]


@dataclass(frozen=True, kw_only=True)
class Box:
    """How programs are held: the level, the limits, and what they may read of the host.

    >>> ran = Box(level="rlimits").run(["/bin/echo", "hello"])
    >>> ran.status, ran.stdout, ran.ended
    (0, b'hello\\n', 'exit')
    """

    level: Level = "strict"
    limits: Limits = Limits()
    readable: tuple[str, ...] = ()
    """Paths of the host that can be read besides the system's own and the interpreter's."""

    def start(
        self,
        argv: Sequence[str] = (),
        *,
        files: Mapping[str, bytes] | None = None,
        channel: bool = False,
        stderr: int = subprocess.STDOUT,
        pipes: bool = True,
    ) -> Live:
        """A program whose stdin and stdout are ours; without argv it is Python that comes on the channel.

        The working directory is fresh and holds `files`. RunError if the box cannot be made.
        """
        spec: dict[str, Any] = {"argv": list(argv)}
        if not channel:
            return self._start(spec, files or {}, Holdings(), stderr=stderr, pipes=pipes)
        ours, theirs = socket.socketpair()
        spec["channel"] = theirs.fileno()
        with theirs:
            return self._start(spec, files or {}, Holdings(channel=ours), stderr=stderr, pipes=pipes)

    def run(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        collect: Sequence[str] = (),
    ) -> Ran:
        """What a program did. Of the files it leaves, only those named in `collect` come back.

        RunError if the box does not come up.
        """
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb", buffering=0) as report:
            spec = {"argv": list(argv), "collect": list(collect), "report": writer}
            try:
                live = self._start(spec, files or {}, Holdings(), stderr=subprocess.PIPE, pipes=True)
            finally:
                os.close(writer)
            streams = {"stdout": live.process.stdout, "stderr": live.process.stderr, "report": report}
            most = dict.fromkeys(streams, self.limits.output_bytes)
            most["report"] = (self.limits.files_mb + 1) << 20
            with live:
                read, how = attend(live, streams, stdin, most, self.limits.wall_s)
                status = live.process.wait() if how == "exit" else None
                memory = live.out_of_memory()
        if not read["report"].startswith(b"+"):
            why = last_line(read["stderr"])[:200] or f"status {status}"
            raise RunError("start a box", f"it does not come up: {why}")
        ended: Literal["exit", "signal", "timeout", "output", "memory"] = "memory" if memory else how
        if status is not None and status < 0:
            status = 128 - status
        if ended == "exit" and status is not None and status > 128:
            ended = "signal"
        kept = _unpacked(read["report"][1:], collect)
        return Ran(status, read["stdout"], read["stderr"], kept, ended)

    def _start(
        self, spec: dict[str, Any], files: Mapping[str, bytes], kept: Holdings, *, stderr: int, pipes: bool
    ) -> Live:
        strict = self.level == "strict"
        given = [spec[name] for name in ("channel", "report") if name in spec]
        prefix: list[str] = []
        where = _WORKDIR
        with ExitStack() as theirs:
            try:
                kept.uid = host.spare_uid(USED) if os.getuid() == 0 else None
                if kept.uid is not None:
                    USED.add(kept.uid)
                    prefix = host.as_user(kept.uid)
                if strict:
                    kept.group = cgroup.make(self.limits.memory_mb, self.limits.processes + _OWN_PROCESSES)
                    namespaces, opened = self._namespaces(files)
                    prefix = [*(kept.group.entered() if kept.group else []), *prefix, *namespaces]
                    given += [_closed_after(theirs, fd) for fd in opened]
                else:
                    kept.workdir = Path(tempfile.mkdtemp(prefix="posttrain-box-"))
                    where = str(kept.workdir)
                    _fill(kept.workdir, files, kept.uid)
                    spec["lifeline"], kept.lifeline = os.pipe()
                    given.append(_closed_after(theirs, spec["lifeline"]))
                spec |= self._restrictions(where)
                process = subprocess.Popen(
                    [*prefix, *_python(), "-c", _INSIDE, marshal.dumps(spec, 2).hex()],
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    pass_fds=given,
                    cwd="/" if strict else where,
                    env=self._environment(where),
                    bufsize=0,
                    start_new_session=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                kept.release()
                raise RunError(f"start a box of level {self.level!r}", str(error)) from None
            except BaseException:
                kept.release()
                raise
        return Live(process, kept)

    def _environment(self, where: str) -> dict[str, str]:
        path = f"{host.python_prefix()}/bin:/usr/local/bin:/usr/bin:/bin"
        temporary = "/tmp" if self.level == "strict" else where
        return {"PATH": path, "HOME": where, "TMPDIR": temporary, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}

    def _paths(self) -> list[str]:
        mine = [host.python_prefix(), *(Path(p) for p in self.readable)]
        for path in mine:
            if not host.reachable(path):
                raise RunError("start a box", f"it cannot be given {path}, which only root can read")
        return [str(p) for p in mine if not p.is_relative_to("/usr")]

    def _namespaces(self, files: Mapping[str, bytes]) -> tuple[list[str], list[int]]:
        """The command that makes namespaces with their mounts, and descriptors it reads files from."""
        bwrap = host.path_of("bwrap")
        if bwrap is None:
            raise RunError("start a box", "bubblewrap is not installed, and a strict box needs it")
        size = str(self.limits.files_mb << 20)
        command = [bwrap, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
        command += ["--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session"]
        command += ["--uid", "1000", "--gid", "1000", "--hostname", "box", "--cap-drop", "ALL"]
        for path in host.system_paths():
            if path.is_symlink():
                command += ["--symlink", os.readlink(path), str(path)]
            else:
                command += ["--ro-bind", str(path), str(path)]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for name in ("/dev/shm", "/tmp", _WORKDIR):
            command += ["--size", size, "--tmpfs", name]
        for name in self._paths():  # after /tmp, which may hold them
            command += ["--ro-bind", name, name]
        opened = []
        for name, content in files.items():
            fd = os.memfd_create("file")
            opened.append(fd)
            view = memoryview(content)
            while len(view):
                view = view[os.write(fd, view) :]
            os.lseek(fd, 0, os.SEEK_SET)
            command += ["--perms", "0755", "--file", str(fd), f"{_WORKDIR}/{name}"]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", _WORKDIR]
        return command, opened

    def _restrictions(self, where: str) -> dict[str, Any]:
        """What `inside.py` gives up before the program starts."""
        limits, strict, root = self.limits, self.level == "strict", os.getuid() == 0
        seconds = math.ceil(limits.wall_s) + 1
        memory, files = limits.memory_mb << 20, limits.files_mb << 20
        # Without a namespace or a user of its own, a box counts with all processes of our user.
        processes = limits.processes + (0 if strict or root else host.tasks_of_user())
        rlimits = [
            ["RLIMIT_AS", memory, memory],
            ["RLIMIT_CPU", seconds, seconds + 1],
            ["RLIMIT_NPROC", processes, processes],
            ["RLIMIT_FSIZE", files, files],
            ["RLIMIT_NOFILE", 256, 256],
            ["RLIMIT_CORE", 0, 0],
        ]
        if self.level == "rlimits":
            return {"rlimits": rlimits, "alone": root}
        read = [*map(str, host.system_paths()), *self._paths()]
        devices = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
        write = [where, "/dev/null", "/dev/zero", "/dev/full"]
        if strict:
            read.append("/proc")
            write += ["/dev/shm", "/tmp", "/dev/tty"]
        filtered = seccomp.program(namespaces=strict, shared_user=not strict and not root)
        if filtered is None:
            raise RunError("start a box", f"there is no table of system calls for {os.uname().machine}")
        landlock = {"read": read + devices, "write": write}
        return {"rlimits": rlimits, "landlock": landlock, "seccomp": filtered, "alone": root}


def _python() -> list[str]:
    return [host.interpreter() or "python3", "-s", "-S"]


def _closed_after(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _unpacked(report: bytes, wanted: Sequence[str]) -> dict[str, bytes]:
    """The files that a box has sent: for each its place in `wanted` and its length, then its content."""
    found: dict[str, bytes] = {}
    while len(report) >= 12:
        place, length = int.from_bytes(report[:4], "big"), int.from_bytes(report[4:12], "big")
        if place < len(wanted) and 12 + length <= len(report):
            found[wanted[place]] = report[12 : 12 + length]
        report = report[12 + length :]
    return found


def _fill(directory: Path, files: Mapping[str, bytes], uid: int | None) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755)
    if uid is not None:
        for path in [directory, *directory.rglob("*")]:
            os.chown(path, uid, uid)
