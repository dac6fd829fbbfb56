"""Boxes: what a program finds in one, how it ends, and that nothing of it stays, however its owner ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from posttrain.process.tree import below
from posttrain.types import RunError, UserError
from posttrain.verifiers.sandbox import LEVELS, Box, Level, Limits, available, cgroup, host, require, seccomp
from posttrain.verifiers.sandbox.live import Clock, remove_tree, scheduled

GIVEN = [level for level in LEVELS if not available()[level]]
LIMITS = Limits(wall_s=5.0)


@pytest.fixture
def _afresh() -> object:
    """What is known of the host is asked again, before and after."""

    def clear() -> None:
        for known in (available, host.path_of, host.interpreter, host.python_prefix, host._landlock_version):
            known.cache_clear()

    clear()
    yield
    clear()


# ---------------------------------------------------------------------- what a program finds, and leaves


@pytest.mark.parametrize("level", GIVEN)
def test_a_program_gets_its_files_and_stdin_and_only_what_is_named_comes_back(level: Level) -> None:
    script = "cat a; cat; echo out > b; echo more > c; ln -s /etc/passwd d; mkdir e; mkfifo f; echo bad >&2"
    script += "; exit 3"
    ran = Box(level=level, limits=LIMITS).run(
        ["/bin/sh", "-c", script],
        files={"a": b"A" * 10**5},
        stdin=b"B" * 10**5,
        collect=("b", "d", "e", "f", "g"),
    )
    assert (ran.status, ran.ended, ran.stderr) == (3, "exit", b"bad\n")
    assert ran.stdout == b"A" * 10**5 + b"B" * 10**5
    assert dict(ran.collected) == {"b": b"out\n"}


@pytest.mark.parametrize("level", GIVEN)
def test_a_program_has_no_environment_and_no_descriptors_of_ours(level: Level) -> None:
    os.environ["POSTTRAIN_SECRET"] = "s3cret"
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    try:
        program = (
            "import os\nfor n in range(3, 1024):\n    try: print(n, os.fstat(n))\n    except OSError: pass\n"
            "names = sorted(set(os.environ) - {'LC_CTYPE', 'PWD'})\n"
            "print(names, os.getcwd() == os.environ['HOME'], os.getuid())"
        )
        ran = Box(level=level, limits=LIMITS).run([str(host.interpreter()), "-S", "-c", program])
    finally:
        del os.environ["POSTTRAIN_SECRET"]
        os.close(reader)
        os.close(writer)
    names, _, rest = ran.stdout.decode().partition("]")
    assert names == "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR'", ran
    assert rest.split()[0] == "True"
    assert int(rest.split()[1]) > 0


@pytest.mark.parametrize("level", GIVEN)
@pytest.mark.parametrize(
    ("script", "ended", "status"),
    [
        ("exit 0", "exit", 0),
        ("exec sh -c 'kill -6 $$'", "signal", 134),
        ("sleep 60", "timeout", None),
        ("exec >&- 2>&-; sleep 60", "timeout", None),
        ("(setsid sleep 60 &) ; echo done", "exit", 0),
        ("sleep 60 & sleep 60 & exit 4", "exit", 4),
        ("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", "output", None),
        ("exec /no/such/program", "exit", 127),
    ],
)
def test_how_a_program_ends(level: Level, script: str, ended: str, status: int | None) -> None:
    limits = Limits(wall_s=0.6 if ended == "timeout" else 60.0, output_bytes=1 << 16)
    begin = time.monotonic()
    ran = Box(level=level, limits=limits).run(["/bin/sh", "-c", script])
    assert ran.ended == ended
    if ended != "signal":  # a shell that is the first process of a namespace cannot be killed by itself
        assert ran.status == status
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("level", GIVEN)
def test_a_program_that_does_not_exist_is_its_own_fault_and_a_broken_box_is_ours(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Box(level=level, limits=LIMITS).run(["/no/such"]).status == 127
    monkeypatch.setattr(host, "interpreter", lambda: "/bin/false")
    with pytest.raises(RunError, match=r"^start a box: "):
        Box(level=level, limits=LIMITS).run(["/bin/true"])


@pytest.mark.parametrize("level", GIVEN)
def test_files_of_a_program_are_not_imported_on_the_way_in(level: Level) -> None:
    files = dict.fromkeys(("ctypes.py", "resource.py", "struct.py", "types.py"), b"import os; os._exit(0)")
    ran = Box(level=level, limits=LIMITS).run(["/bin/echo", "here"], files=files)
    assert (ran.stdout, ran.status) == (b"here\n", 0)


def test_limits_that_mean_nothing_are_refused() -> None:
    for name in ("wall_s", "memory_mb", "processes", "files_mb", "output_bytes"):
        for value in (0, -1, float("inf"), float("nan")):
            with pytest.raises(ValueError, match=name):
                Limits(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("level", GIVEN)
def test_a_box_that_is_closed_at_once_leaves_nothing(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def seen(pid: int) -> list[int]:
        states.append(stat_of(pid)[0])
        return below(pid)

    monkeypatch.setattr("posttrain.process.tree.below", seen)
    before = boxed()
    for _ in range(15):
        live = Box(level=level).start(["/bin/sleep", "1000"])
        time.sleep(0.002)
        live.close()
        live.close()
    assert gone(before)
    # One that is about to have a child would have it after it was asked for its children.
    if level == "strict":
        assert states
        assert set(states) <= {"T", "Z"}


def test_waiting_for_a_processor_does_not_count_and_waiting_for_oneself_does() -> None:
    with Box(level=GIVEN[0], limits=Limits(wall_s=60)).start(
        ["/bin/sh", "-c", "while :; do :; done"]
    ) as live:
        clock = Clock(live, 0.4)
        time.sleep(0.6)
        ran = sum(ran for ran, _ in scheduled(live.process.pid).values())
        used = clock.used()
        assert 0 < used <= time.monotonic() - live.started_at
        assert ran <= used + 0.3
    crowd = "for n in 1 2 3 4 5 6 7 8 9; do while :; do :; done & done; wait"
    with Box(level=GIVEN[0], limits=Limits(wall_s=60)).start(["/bin/sh", "-c", crowd]) as live:
        clock = Clock(live, 0.3)
        begin = time.monotonic()
        while not clock.late():
            time.sleep(0.02)
        assert time.monotonic() - begin < 60


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    script = "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\nos.mkdir('x', 0)"
    subprocess.run([sys.executable, "-c", script], cwd=top, check=True)
    remove_tree(top)
    assert not top.exists()


# ---------------------------------------------------------------------- the end of its owner


def boxed() -> set[int]:
    """Processes that run in boxes."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"What runs first inside a box" in words or b"posttrain-sleeper" in words:
                found.add(int(entry.name))
    return found


def stat_of(pid: int) -> list[str]:
    """A process's state, its parent, and what else /proc says of it after its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def gone(before: set[int]) -> bool:
    """Whether there are no more of them than before, within a minute; other tests have theirs."""
    mine = {pid for pid in boxed() - before if of_this_test(pid)}
    until = time.monotonic() + 60
    while mine and time.monotonic() < until:
        time.sleep(0.05)
        mine &= boxed()
    return not mine


def of_this_test(pid: int) -> bool:
    """Whether a box is ours or an orphan, rather than of a test that runs beside this one."""
    others = boxed()
    while pid in others:
        try:
            pid = int(stat_of(pid)[1])
        except OSError:
            return False
    return pid in (1, os.getpid())


@pytest.mark.parametrize("level", GIVEN)
@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_killing_the_owner_ends_its_boxes_and_removes_what_they_were_made_of(
    level: Level, after_s: float
) -> None:
    program = textwrap.dedent(
        f"""
        import time
        from posttrain.verifiers.sandbox import Box
        script = "(setsid sh -c 'exec -a posttrain-sleeper sleep 1000' &) ; (sleep 1000) & touch here; wait"
        lives = [Box(level={level!r}).start(["/bin/bash", "-c", script]) for _ in range(3)]
        time.sleep({after_s})
        places = [str(live._holdings.workdir) for live in lives if live._holdings.workdir]
        groups = [str(d) for live in lives if live._holdings.group for d in live._holdings.group.directories]
        print(*places, "|", *groups, flush=True)
        time.sleep(1000)
        """
    )
    before = boxed()
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    places, _, groups = owner.stdout.readline().partition("|")
    assert places or groups or os.getuid() != 0
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    cgroup.sweep.cache_clear()
    cgroup.sweep()  # as the next process that makes a box does
    assert gone(before)
    cgroup.sweep.cache_clear()
    cgroup.sweep()
    until = time.monotonic() + 60
    left = [*places.split(), *groups.split()]
    while any(map(os.path.exists, left)) and time.monotonic() < until:
        time.sleep(0.05)
        cgroup.sweep.cache_clear()
        cgroup.sweep()
    assert not [path for path in left if os.path.exists(path)]


def test_the_processes_below_one_are_found() -> None:
    with subprocess.Popen(["/bin/sh", "-c", "sleep 60 & sleep 60; :"]) as process:
        until = time.monotonic() + 60
        while len(below(process.pid)) < 3 and time.monotonic() < until:
            time.sleep(0.02)
        found = below(process.pid)
        for pid in reversed(found):
            os.kill(pid, signal.SIGKILL)
    assert len(found) == 3


# ---------------------------------------------------------------------- what the host gives


@pytest.mark.usefixtures("_afresh")
def test_without_bubblewrap_the_next_level_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = host.path_of
    monkeypatch.setattr(host, "path_of", lambda name: None if name == "bwrap" else real(name))
    monkeypatch.setattr(host, "_landlock_version", lambda: 7)
    assert available()["strict"] == "bubblewrap is not installed"
    with pytest.raises(UserError) as caught:
        require("strict", where="verifier.code.level")
    assert "verifier.code.level" in str(caught.value)
    assert "apt-get install bubblewrap" in str(caught.value)
    assert "'landlock'" in str(caught.value)
    with pytest.raises(RunError):
        Box(level="strict").run(["/bin/true"])


@pytest.mark.usefixtures("_afresh")
def test_without_landlock_only_rlimits_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_landlock_version", lambda: -1)
    found = available()
    assert found["strict"] == found["landlock"] == "this kernel has no Landlock"
    assert found["rlimits"] == ""
    with pytest.raises(UserError, match="level = 'rlimits'"):
        require("landlock")


@pytest.mark.usefixtures("_afresh")
def test_without_a_python_there_is_no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "interpreter", lambda: None)
    assert all(available().values())
    with pytest.raises(UserError, match="rlimits"):
        require("rlimits")


def test_an_unknown_processor_gets_no_box_that_needs_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "program", lambda **_: None)
    for level in ("strict", "landlock"):
        with pytest.raises(RunError, match=r"^start a box: "):
            Box(level=level).run(["/bin/true"])  # type: ignore[arg-type]


def test_users_of_boxes_are_nobodys_and_not_taken() -> None:
    taken: set[int] = set()
    for _ in range(50):
        taken.add(host.spare_uid(taken))
    assert len(taken) == 50
    assert min(taken) > 9_999


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("level", GIVEN)
def test_another_user_than_root_gets_the_same_levels(level: Level, tmp_path: Path) -> None:
    """Where our source and an interpreter with our libraries can be read by everyone."""
    python = host.interpreter()
    paths = [str(Path(host.__file__).parents[3]), *(p for p in sys.path if p.endswith("site-packages"))]
    if not all(host.reachable(Path(p)) for p in paths):
        pytest.skip("our source cannot be read by others")
    program = textwrap.dedent(
        f"""
        from posttrain.types import Task
        from posttrain.verifiers.code.verifier import Code
        from posttrain.verifiers.sandbox import available
        assert not available()[{level!r}], available()
        task = Task(id="t", messages=(), source="", fields={{"kind": "stdio", "cases": [{{"stdout": "7"}}]}})
        for source in SOURCES:
            print(Code(level={level!r})(task, source).label, flush=True)
        """
    )
    held = ["print(7)", "import subprocess\nsubprocess.run(['sh', '-c', 'setsid sleep 99 & echo 7'])"]
    refused = [
        "import os\ntry: os.chmod(HOME, 0)\nexcept OSError: print(7)",
        "import os\ntry: os.kill(OWNER, 0)\nexcept OSError: print(7)",
        "import resource\ntry: resource.prlimit(OWNER, 0, (1, 1))\nexcept OSError: print(7)",
        "try: open(HOME + '/x', 'w')\nexcept OSError: print(7)",
    ]
    sources = held if level == "rlimits" else held + refused
    home = Path("/tmp", f"posttrain-test-home-{os.getpid()}")
    home.mkdir()
    os.chown(home, 54321, 54321)
    begin = "import os, sys\nHOME, OWNER = os.environ['HOME'], os.getpid()\n"
    begin += f"SOURCES = [s.replace('HOME', repr(HOME)).replace('OWNER', str(OWNER)) for s in {sources!r}]\n"
    try:
        ran = subprocess.run(
            [*host.as_user(54321), str(python), "-c", begin + program],
            env={
                "PYTHONPATH": ":".join(paths),
                "HOME": str(home),
                "PATH": os.environ["PATH"],
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        remove_tree(home)
    if "ImportError" in ran.stderr or "ModuleNotFoundError" in ran.stderr:
        pytest.skip("the system's Python cannot load our libraries")
    assert ran.stdout.split() == ["PASS"] * len(sources), ran.stderr
