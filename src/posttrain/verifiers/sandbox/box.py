"""Run an untrusted program in a sandbox (a box), and kill its whole process tree afterwards.

start   waits for nothing; the program starts in the background
run     waits for the end of the program, at most `Limits.wall_s` of the time in which it could run
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
"""Program of the first process in a box, which imports nothing from the untrusted working directory."""
_OWN_PROCESSES = 8
"""Processes of bubblewrap and the supervisor, added to the cgroup's limit."""
_WORKDIR = "/box"
"""Working directory in a strict box; hosts have no such path."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of a program."""

    wall_s: float = 10.0
    """Seconds until the program is killed, not counting time in which other programs had the processor."""
    memory_mb: int = 512
    """MiB of address space for each process, and with a cgroup of memory for all processes together."""
    processes: int = 32
    """Most processes and threads at the same time."""
    files_mb: int = 64
    """MiB in one file; in a strict box also in all files of the working directory together."""
    output_bytes: int = 1 << 20
    """Bytes of stdout, and of stderr."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "memory_mb", "processes", "files_mb", "output_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended, its output, and its collected files."""

    status: int | None
    """Exit status, 128 + n if signal n ended the program; None if it was killed at a limit."""
    stdout: bytes
    stderr: bytes
    collected: Mapping[str, bytes]
    """Content by name of the files that were asked for and exist."""
    ended: Literal["exit", "signal", "timeout", "output", "memory"]


@dataclass(frozen=True, kw_only=True)
class Box:
    """Start programs at an isolation level, within limits, with access to some paths of the host.

    >>> ran = Box(level="rlimits").run(["/bin/echo", "hello"])
    >>> ran.status, ran.stdout, ran.ended
    (0, b'hello\\n', 'exit')
    """

    level: Level = "strict"
    limits: Limits = Limits()
    readable: tuple[str, ...] = ()
    """Paths of the host that programs may read in addition to the system's and the interpreter's."""

    def start(
        self,
        argv: Sequence[str] = (),
        *,
        files: Mapping[str, bytes] | None = None,
        channel: bool = False,
        stderr: int = subprocess.STDOUT,
        pipes: bool = True,
    ) -> Live:
        """Start a program with pipes for stdin and stdout, in a new working directory that holds `files`.

        Without argv, run the Python modules that the caller sends over the channel. Raises RunError if the
        box cannot be made.
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
    ) -> ProgramResult:
        """Run a program to its end and return its output, with the files named in `collect`.

        Raises RunError if the box does not start.
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
                outputs, end = attend(live, streams, stdin, most, self.limits.wall_s)
                status = live.process.wait() if end == "exit" else None
                memory = live.out_of_memory()
        if not outputs["report"].startswith(b"+"):
            cause = last_line(outputs["stderr"])[:200] or f"status {status}"
            raise RunError("start a box", f"it does not come up: {cause}")
        how: Literal["exit", "signal", "timeout", "output", "memory"] = "memory" if memory else end
        if status is not None and status < 0:
            status = 128 - status
        if how == "exit" and status is not None and status > 128:
            how = "signal"
        collected = _parse_files(outputs["report"][1:], collect)
        return ProgramResult(status, outputs["stdout"], outputs["stderr"], collected, how)

    def _start(
        self,
        spec: dict[str, Any],
        files: Mapping[str, bytes],
        holdings: Holdings,
        *,
        stderr: int,
        pipes: bool,
    ) -> Live:
        strict = self.level == "strict"
        descriptors = [spec[name] for name in ("channel", "report") if name in spec]
        prefix: list[str] = []
        workdir = _WORKDIR
        with ExitStack() as stack:
            try:
                holdings.uid = host.spare_uid(USED) if os.getuid() == 0 else None
                if holdings.uid is not None:
                    USED.add(holdings.uid)
                    prefix = host.as_user(holdings.uid)
                if strict:
                    holdings.group = cgroup.make(
                        self.limits.memory_mb, self.limits.processes + _OWN_PROCESSES
                    )
                    namespaces, opened = self._namespaces(files)
                    prefix = [
                        *(holdings.group.command_prefix() if holdings.group else []),
                        *prefix,
                        *namespaces,
                    ]
                    descriptors += [_close_later(stack, fd) for fd in opened]
                else:
                    holdings.workdir = Path(tempfile.mkdtemp(prefix="posttrain-box-"))
                    workdir = str(holdings.workdir)
                    _fill(holdings.workdir, files, holdings.uid)
                    spec["lifeline"], holdings.lifeline = os.pipe()
                    descriptors.append(_close_later(stack, spec["lifeline"]))
                spec |= self._restrictions(workdir)
                process = subprocess.Popen(
                    [*prefix, *_python(), "-c", _INSIDE, marshal.dumps(spec, 2).hex()],
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    pass_fds=descriptors,
                    cwd="/" if strict else workdir,
                    env=self._environment(workdir),
                    bufsize=0,
                    start_new_session=True,
                )
            except (OSError, subprocess.SubprocessError) as error:
                holdings.release()
                raise RunError(f"start a box of level {self.level!r}", str(error)) from None
            except BaseException:
                holdings.release()
                raise
        return Live(process, holdings)

    def _environment(self, workdir: str) -> dict[str, str]:
        path = f"{host.python_prefix()}/bin:/usr/local/bin:/usr/bin:/bin"
        temporary = "/tmp" if self.level == "strict" else workdir
        return {"PATH": path, "HOME": workdir, "TMPDIR": temporary, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}

    def _paths(self) -> list[str]:
        paths = [host.python_prefix(), *(Path(p) for p in self.readable)]
        for path in paths:
            if not host.reachable(path):
                raise RunError("start a box", f"it cannot be given {path}, which only root can read")
        return [str(p) for p in paths if not p.is_relative_to("/usr")]

    def _namespaces(self, files: Mapping[str, bytes]) -> tuple[list[str], list[int]]:
        """Return the bubblewrap command, and the descriptors from which it reads the files."""
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
        for name in self._paths():  # after the mount of /tmp, which may contain them
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

    def _restrictions(self, workdir: str) -> dict[str, Any]:
        """Return the restrictions that `inside.py` applies to itself before the program starts."""
        limits, strict, root = self.limits, self.level == "strict", os.getuid() == 0
        seconds = math.ceil(limits.wall_s) + 1
        memory, files = limits.memory_mb << 20, limits.files_mb << 20
        # RLIMIT_NPROC counts all processes of a user: without a namespace or an own user ours too.
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
        readable = [*map(str, host.system_paths()), *self._paths()]
        devices = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
        writable = [workdir, "/dev/null", "/dev/zero", "/dev/full"]
        if strict:
            readable.append("/proc")
            writable += ["/dev/shm", "/tmp", "/dev/tty"]
        filtered = seccomp.program(namespaces=strict, shared_user=not strict and not root)
        if filtered is None:
            raise RunError("start a box", f"there is no table of system calls for {os.uname().machine}")
        landlock = {"read": readable + devices, "write": writable}
        return {"rlimits": rlimits, "landlock": landlock, "seccomp": filtered, "alone": root}


def _python() -> list[str]:
    return [host.interpreter() or "python3", "-s", "-S"]


def _close_later(stack: ExitStack, fd: int) -> int:
    stack.callback(os.close, fd)
    return fd


def _parse_files(report: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """Parse the files that a box sent, each as 4 bytes of index in `names`, 8 of length, and content."""
    files: dict[str, bytes] = {}
    while len(report) >= 12:
        index, length = int.from_bytes(report[:4], "big"), int.from_bytes(report[4:12], "big")
        if index < len(names) and 12 + length <= len(report):
            files[names[index]] = report[12 : 12 + length]
        report = report[12 + length :]
    return files


def _fill(directory: Path, files: Mapping[str, bytes], uid: int | None) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755)
    if uid is not None:
        for path in [directory, *directory.rglob("*")]:
            os.chown(path, uid, uid)
