"""The first program inside a box: drop every right that the untrusted program does not need, then run it.

The text of this file is passed to an interpreter (3.9 or newer) that cannot import posttrain. It imports
little of the standard library, because each judged program pays for the start-up.

Its one argument is a marshalled dictionary:

    rlimits     [[resource, soft limit, hard limit] ...], set here, inside the user namespace
    landlock    {"read": [paths], "write": [paths]}: nothing else can be opened
    seccomp     the filter of `seccomp.program`
    lifeline    a descriptor that closes when the owner of the box dies. If it is there, this process
                stays as the supervisor, and kills every process that the program leaves
    alone       whether all processes of this user belong to this box
    report      a descriptor: "+" is written when the box is ready, and later the collected files
    collect     [names] of files to read when the program has ended
    argv        the program; if empty, Python modules arrive on the channel and run in this process
    channel     the descriptor of the channel
"""

import ctypes
import marshal
import os
import resource
import sys
import time

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER = 38, 22, 36
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_SIGNALS, _ABSTRACT_SOCKETS = 2, 1
libc = ctypes.CDLL(None, use_errno=True)


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


class LandlockRuleset(ctypes.Structure):
    """struct landlock_ruleset_attr."""

    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class Beneath(ctypes.Structure):
    """struct landlock_path_beneath_attr."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def must(result: int, operation: str) -> int:
    """Return the result of a C library call. Raises OSError if it is negative."""
    if result < 0:
        raise OSError(ctypes.get_errno(), operation)
    return result


def give_up(
    rlimits: "list[tuple[str, int, int]]", paths: "dict[str, list[str]] | None", refused: "bytes | None"
) -> None:
    """Restrict this process irrevocably to the limits and the paths, and deny the refused system calls."""
    for name, soft, hard in rlimits:
        resource.setrlimit(getattr(resource, name), (soft, hard))
    must(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    if paths is not None:
        landlock(paths)
    if refused is not None:
        code = ctypes.create_string_buffer(refused)
        program = Program(len(refused) // 8, ctypes.addressof(code))
        must(libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def landlock(paths: "dict[str, list[str]] | None") -> bool:
    """Deny all paths but these, and network and signals where the kernel can; without paths only signals.

    Return whether signals to processes outside are denied.
    """
    version = libc.syscall(_CREATE, None, 0, 1)
    if paths is None and version < 6:
        return False
    must(version, "landlock")
    files = (1 << 13) - 1
    if version >= 2:
        files |= 1 << 13  # moving files between directories
    if version >= 3:
        files |= 1 << 14  # truncating them
    if version >= 5:
        files |= 1 << 15  # ioctl on devices
    network = 3 if version >= 4 else 0  # TCP bind and connect
    scoped = _SIGNALS | _ABSTRACT_SOCKETS if version >= 6 else 0
    if paths is None:
        files, network, scoped = 0, 0, _SIGNALS

    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = must(
        libc.syscall(_CREATE, ctypes.byref(LandlockRuleset(files, network, scoped)), size, 0), "landlock"
    )
    of_a_file = _EXECUTE | _WRITE | _READ | files >> 14 << 14
    for kind, names in (paths or {}).items():
        allowed = files if kind == "write" else _EXECUTE | _READ | _LIST
        for name in names:
            try:
                fd = os.open(name, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            rights = allowed if os.path.isdir(name) else allowed & of_a_file
            must(libc.syscall(_ADD, rules, 1, ctypes.byref(Beneath(rights, fd)), 0), name)
            os.close(fd)
    must(libc.syscall(_RESTRICT, rules, 0), "landlock")
    os.close(rules)
    return bool(version >= 6)


def supervise(lifeline: int, alone: bool) -> None:
    """Fork and return in the child. The parent kills what the child leaves, and ends with its status."""
    import select
    import signal

    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    confined = alone or only_signals_within()
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (wake, waker, lifeline):
            os.close(fd)
        return
    os.closerange(0, 3)  # so that the readers of the program's output see its end
    os.closerange(max(wake, waker, lifeline) + 1, 1024)
    status = None
    while status is None:
        if lifeline in select.select([lifeline, wake], [], [], 1.0)[0]:
            sweep(confined)
            os.execv("/bin/rm", ["rm", "-rf", "--", os.getcwd()])
        while status is None:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == child:
                status = wait_status
    sweep(confined)
    leave(status)


def only_signals_within() -> bool:
    """Restrict signals to descendants; return whether that worked."""
    try:
        must(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
        if not landlock(None):
            return False
        os.kill(os.getppid(), 0)
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def sweep(confined: bool) -> None:
    """Kill every descendant. Orphans become children of this process, so none is missed."""
    while True:
        if confined:  # all at once, so that none escapes by forking
            kill(-1)
        else:
            for child in children():
                kill(child)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def kill(pid: int) -> None:
    """Kill a process; ignore that it has ended."""
    try:
        os.kill(pid, 9)
    except OSError:
        return


def children() -> "list[int]":
    """Return the pids of the children of this process."""
    pids, me = [], str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[1] == me:
                pids.append(int(name))
    return pids


def leave(status: int) -> None:
    """Exit with the status of another process."""
    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def collect(names: "list[str]", report: int) -> None:
    """Fork and return in the child. The parent sends the files of these names when the child has ended."""
    import stat

    child = os.fork()
    if child == 0:
        return
    os.closerange(0, 3)
    status = os.waitpid(child, 0)[1]
    for place, name in enumerate(names):
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            with open(fd, "rb") as file:
                content = file.read()
        except OSError:
            continue
        view = memoryview(place.to_bytes(4, "big") + len(content).to_bytes(8, "big") + content)
        while len(view):
            view = view[os.write(report, view) :]
    leave(status)


def receive(channel: int) -> bytes:
    """Read one message from the channel: eight bytes of length, then the content."""

    def exactly(count: int) -> bytes:
        parts = b""
        while len(parts) < count:
            part = os.read(channel, min(count - len(parts), 1 << 20))
            if not part:
                os._exit(0)
            parts += part
        return parts

    return exactly(int.from_bytes(exactly(8), "big"))


def become(argv: "list[str]") -> None:
    """Replace this process by the program."""
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot start {argv[0]}: {error}\n")
        os._exit(127)


def play(channel: int) -> None:
    """Run the modules that arrive on the channel; the last one is the main program."""
    modules = marshal.loads(receive(channel))
    for name, source in modules:
        module = type(sys)(name)
        if name != "__main__":
            sys.modules[name] = module
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)
        module.__dict__.update(channel=channel, receive=receive)


def main() -> None:
    """Apply the restrictions and run the program. The order matters: none can be lifted later."""
    spec = marshal.loads(bytes.fromhex(sys.argv[1]))
    sys.argv = ["main.py"]
    if "lifeline" in spec:
        supervise(spec["lifeline"], spec["alone"])
    give_up(spec["rlimits"], spec.get("landlock"), spec.get("seccomp"))
    if "report" in spec:
        os.set_inheritable(spec["report"], False)
        os.write(spec["report"], b"+")  # fails, and ends the box, if the reader is gone
        if spec["collect"]:
            collect(spec["collect"], spec["report"])
    if spec["argv"]:
        become(spec["argv"])
    play(spec["channel"])


if __name__ == "__main__":
    main()
