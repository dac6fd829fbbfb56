"""Programs as children: what they write, when they are late, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from posttrain.process.child import Child
from posttrain.process.fork import call_in_fork
from posttrain.process.workers import Failed, Returned

PIPE = subprocess.PIPE


def python(code: str) -> list[str]:
    """A command that runs this."""
    return [sys.executable, "-c", textwrap.dedent(code)]


def wait_until_gone(file: Path) -> None:
    """Waits until the process whose number a file holds has ended."""
    until = time.monotonic() + 60
    while psutil.pid_exists(pid := int(file.read_text())) and psutil.Process(pid).status() != "zombie":
        assert time.monotonic() < until
        time.sleep(0.01)


def wait_for(file: Path) -> None:
    """Waits until a file holds something."""
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("session", [True, False])
def test_what_a_program_reads_and_writes_is_whole(session):
    data = os.urandom(1 << 20)
    with Child(["cat"], session=session, stdin=PIPE, stdout=PIPE) as child:
        assert child.communicate(data, deadline_s=60) == data
    assert child.code == 0


def test_a_flood_of_stderr_keeps_its_last_line_alone():
    code = "import sys; sys.stderr.write('x\\n' * 3_000_000); raise SystemExit('no luck')"
    with Child(python(code), session=True, stderr=PIPE) as child:
        child.communicate(deadline_s=60)
    assert (child.code, child.last_words()) == (1, "no luck")
    assert len(child.errors) == 1 << 16


def test_a_program_that_does_not_read_has_its_deadline_all_the_same():
    with Child(["sleep", "100"], session=True, stdin=PIPE) as child, pytest.raises(TimeoutError):
        child.communicate(b"x" * (1 << 20), deadline_s=0.5)
    assert child.code == -signal.SIGKILL


@pytest.mark.parametrize("floods", [False, True])
def test_who_holds_the_pipes_of_an_ended_program_is_not_waited_for(floods):
    """Neither if it says nothing, nor if it never stops."""
    behind = "while True: os.write(1, b'x' * 4096)" if floods else "time.sleep(20)"
    code = f"""
        import os, time
        os.write(1, b"here")
        if not os.fork():
            {behind}
    """
    begin = time.monotonic()
    with Child(python(code), session=True, stdout=PIPE) as child:
        assert child.communicate(deadline_s=60).startswith(b"here")
    assert time.monotonic() - begin < 15


def test_a_kill_reaches_those_below_that_have_left_the_session(tmp_path):
    code = f"""
        import os, time
        if not os.fork():
            os.setsid()
            if not os.fork():
                open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
        time.sleep(100)
    """
    with Child(python(code), session=False) as child:
        wait_for(tmp_path / "pid")
    assert child.code == -signal.SIGKILL
    wait_until_gone(tmp_path / "pid")


def test_a_kill_reaches_the_session_of_a_program_that_has_ended(tmp_path):
    code = f"""
        import os, time
        if not os.fork():
            open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
            time.sleep(100)
    """
    with Child(python(code), session=True) as child:
        assert child.wait(60) == 0
        wait_for(tmp_path / "pid")
    wait_until_gone(tmp_path / "pid")


def test_a_program_may_end_by_itself_within_a_grace():
    child = Child(["cat"], session=True, stdin=PIPE)
    assert child.close(grace_s=60) == 0
    child = Child(python("import time; time.sleep(100)"), session=True, stdin=PIPE)
    assert child.close(grace_s=0.1) == -signal.SIGKILL
    assert child.close() == -signal.SIGKILL, "again"


def test_what_cannot_be_started_is_an_error_of_the_system():
    with pytest.raises(FileNotFoundError):
        Child(["no-such-program"], session=True)


def test_a_call_in_a_copy_returns_text_or_why_there_is_none():
    def outcome(call, **more):
        return call_in_fork(
            call, kind="test", most_bytes=100, deadline_s=more.pop("deadline_s", 60.0), **more
        )

    assert outcome(lambda: "é") == Returned("é")
    assert outcome(lambda: "x" * 10**6) == Returned("x" * 100)
    assert outcome(lambda: 1 / 0) == Failed("raised", "ZeroDivisionError: division by zero")
    assert outcome(lambda: os._exit(3)) == Failed("died", "the test ended its process (exit status 3)")
    late = outcome(lambda: time.sleep(100), deadline_s=0.2)
    assert late == Failed("timeout", "no result within 0.2 s")
    assert outcome(lambda: str(len(bytearray(10**9))), memory_mb=100) == Failed("raised", "MemoryError")
    before = psutil.Process().children(recursive=True)

    def leaves() -> str:
        if not os.fork():
            os.setsid()
            time.sleep(100)
        return "left"

    assert outcome(leaves) == Returned("left")
    assert psutil.Process().children(recursive=True) == before
