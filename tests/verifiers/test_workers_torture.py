"""Verifiers that raise, hang and die: each costs its own verdict and nothing else."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import psutil
import pytest

from mathcheck.plugin.number import Number
from posttrain.process.nursery import Nursery
from posttrain.process.worker import MOST_CHILDREN
from posttrain.process.workers import Failed, Returned, Workers
from posttrain.types import RunError, Task, UserError, Verdict
from posttrain.verifiers.combine.combined import Combined, Part
from posttrain.verifiers.function import Function
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.structure.patterns import Format, Regex

REWARDS = """
import ctypes, math, os, random, signal, subprocess, sys, threading, time
from posttrain.process.shared import call_in_shared_process

def reward(response):
    what, _, rest = response.partition(" ")
    return globals()[what](rest)

def good(rest): return float(rest)
def raises(rest): raise ValueError("no such\\nthing")
def hangs(rest):
    while True: pass
def sleeps(rest):
    time.sleep(float(rest)); return 1.0
def stubborn(rest):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try: time.sleep(60)
        except BaseException: pass
def nan(rest): return math.nan
def none(rest): return None
def leaves(rest): os._exit(3)
def exits(rest): sys.exit(0)
def interrupts(rest): raise KeyboardInterrupt
def crashes(rest): ctypes.string_at(0)
def aborts(rest): os.abort()
def recurses(rest): return recurses(rest)
def spams(rest):
    for stream in (sys.stdout, sys.stderr): print("x" * 5_000_000, file=stream, flush=True)
    os.write(1, b"y" * 100_000); return 1.0
def quiet(rest): return float(all(os.readlink(f"/proc/self/fd/{n}") == os.devnull for n in (0, 1, 2)))
def asks(rest): return float(len(sys.stdin.read()))
def hogs(rest): return float(len(bytearray(2 * 10**9)))
def closes(rest): os.closerange(0, 1000); return 1.0
def forks(rest): os.fork(); return 1.0
def shares(rest): call_in_shared_process(time.sleep, 1000); return 1.0
def draws(rest): return random.random()
def who(rest): return float(os.getpid())
def starts(rest):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    open(rest, "w").write(str(child.pid))
    while True: time.sleep(1)
def breeds(rest):
    for _ in range(200):
        if not os.fork():
            time.sleep(1000)
            os._exit(0)
    return 1.0
def daemon(rest):
    if not os.fork():
        os.setsid()
        if os.fork(): os._exit(0)
        open(rest, "w").write(str(os.getpid()))
        time.sleep(1000)
    os.wait()
    return 1.0
def later(rest):
    threading.Timer(0.05, os._exit, [9]).start(); return 1.0
class Rude(Exception):
    def __str__(self): raise RuntimeError("no")
def rude(rest): raise Rude
class Unsendable(Exception):
    def __init__(self, a, b): pass
def unsendable(rest): raise Unsendable(1, 2)
def surrogate(rest): raise ValueError("\\ud800")
def unpicklable(rest):
    from posttrain.types import Verdict
    return Verdict(score=1.0, label="odd", parts={"f": lambda: 0})
"""

FAILURES = [
    ("raises", "raised", "ValueError: no such"),
    ("hangs", "timeout", "nothing within 1.5 s"),
    ("stubborn", "timeout", "nothing within 1.5 s"),
    ("sleeps 60", "timeout", "nothing within 1.5 s"),
    ("nan", "not_a_number", "the function returned float nan, not a finite number"),
    ("none", "not_a_number", "the function returned NoneType, not a finite number"),
    ("leaves", "died", "the worker ended with exit status 3"),
    ("exits", "raised", "SystemExit: 0"),
    ("interrupts", "raised", "KeyboardInterrupt"),
    ("crashes", "died", "the worker was killed by SIGSEGV"),
    ("aborts", "died", "the worker was killed by SIGABRT"),
    ("recurses", "raised", "RecursionError: maximum recursion depth exceeded"),
    ("hogs", "raised", "MemoryError"),
    ("closes", "died", None),
    ("rude", "raised", "Rude"),
    ("unsendable", "raised", "Unsendable"),
    ("surrogate", "raised", "ValueError: ?"),
    ("unpicklable", "not_a_number", "the part 'f' is function, not a finite number"),
    ("absent", "raised", "KeyError: 'absent'"),
]


def task(name: str = "q", answer: str | None = None) -> Task:
    return Task(id=name, messages=({"role": "user", "content": "?"},), answer=answer)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Function:
    file = tmp_path_factory.mktemp("user") / "torture_rewards.py"
    file.write_text(REWARDS)
    return Function(function=f"{file}:reward")


@pytest.fixture(scope="module")
def pool(reward: Function):
    with Pool(workers=2, deadline_s=4.0, memory_mb=512) as pool:
        pool.judge(reward, [(task(), "good 1")])
        yield pool


@pytest.fixture(scope="module")
def hasty(reward: Function):
    """A pool that waits for no more than it must, for calls that have no end."""
    with Pool(workers=2, deadline_s=1.5) as pool:
        pool.judge(reward, [(task(), "good 1")])
        yield pool


def processes() -> int:
    """Processes of ours, the nursery and zombies included."""
    return len(psutil.Process().children(recursive=True))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(found: Callable[[], object]) -> None:
    """Waits until that is so; an error if it is not within a minute."""
    until = time.monotonic() + 60
    while not found():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize(("response", "label", "reason"), FAILURES)
def test_a_broken_call_fails_with_its_cause(pool, hasty, reward, response, label, reason):
    pool = hasty if label == "timeout" else pool
    before, broken, after = pool.judge(reward, [(task(), r) for r in ("good 0.25", response, "good 0.75")])
    assert (before.score, after.score) == (0.25, 0.75)
    assert (broken.score, broken.label) == (None, label)
    assert reason is None or broken.reason.startswith(reason)


def test_a_call_that_prints_says_nothing_to_the_user(pool, reward, capfd):
    verdicts = pool.judge(reward, [(task(), "spams"), (task(), "asks"), (task(), "quiet")])
    assert [v.score for v in verdicts] == [1.0, 0.0, 1.0]
    assert capfd.readouterr() == ("", "")


def test_a_forked_copy_of_a_worker_answers_nobody(pool, reward):
    pairs = [(task(), r) for i in range(20) for r in ("forks", f"good {i}")]
    verdicts = pool.judge(reward, pairs)
    assert [v.score for v in verdicts[1::2]] == [float(i) for i in range(20)]
    assert all(v.score == 1.0 for v in verdicts[::2])


def test_a_thread_left_behind_does_not_blame_the_next_call(reward):
    with Pool(workers=1, deadline_s=60.0) as pool:
        ended = int(pool.judge(reward, [(task(), "who")])[0].score)
        assert pool.judge(reward, [(task(), "later")])[0].score == 1.0
        wait_for(lambda: gone(ended))
        next_calls = pool.judge(reward, [(task(), f"good {n}") for n in range(4)])
        assert [v.score for v in next_calls] == [0.0, 1.0, 2.0, 3.0]


def test_a_killed_worker_takes_the_processes_it_has_started_with_it(reward, tmp_path):
    file = tmp_path / "pid"
    with Pool(workers=1, deadline_s=5.0) as pool:  # in which it has started one, however busy the machine
        assert pool.judge(reward, [(task(), f"starts {file}")])[0].label == "timeout"
    pid = int(file.read_text())
    wait_for(lambda: gone(pid))


def test_a_call_that_leaves_hundreds_of_processes_does_not_fill_the_machine(reward):
    """Every answer counts, and what is left behind ends with the worker: a few calls later, or at the end."""
    others, most = set(psutil.Process().children()), 0
    with Pool(workers=2, deadline_s=60.0) as pool:
        pool.judge(reward, [(task(), "good 1")])
        [nursery] = set(psutil.Process().children()) - others
        for n in range(6):
            verdicts = pool.judge(reward, [(task(), "breeds"), (task(), f"good {n}"), (task(), "breeds")])
            assert [v.score for v in verdicts] == [1.0, float(n), 1.0]
            left = [child.pid for child in nursery.children(recursive=True)]
            most = max(most, len(left))
        assert 200 <= most <= 2 * (MOST_CHILDREN + 200) + 8, "2,400 were started"
    assert all(gone(pid) for pid in left)


def test_a_process_that_has_left_its_session_ends_with_the_pool(reward, tmp_path):
    file = tmp_path / "pid"
    with Pool(workers=1, deadline_s=60.0) as pool:
        assert pool.judge(reward, [(task(), f"daemon {file}")])[0].score == 1.0
        wait_for(lambda: file.exists() and file.read_text())
        assert not gone(int(file.read_text())), "it may serve the calls to come"
    assert gone(int(file.read_text()))


def test_a_pattern_that_takes_for_ever_is_stopped(hasty):
    slow = Regex(pattern="(a|aa)+$")
    fine, stuck = hasty.judge(slow, [(task(), "aaa"), (task(), "a" * 60 + "b")])
    assert (fine.label, stuck.label) == ("right", "timeout")


def test_a_sum_with_a_broken_part_fails(pool, reward):
    both = Combined(parts=(Part(verifier=Number()), Part(verifier=reward)))
    one, two = pool.judge(both, [(task(answer="7"), "good 7"), (task(answer="7"), "raises 7")])
    assert (one.score, one.label, one.parts) == (8.0, "right", {"number": 1.0, "reward": 7.0})
    assert (two.score, two.label) == (None, "raised")


def test_a_hundred_kills_leave_no_process_and_no_descriptor(reward):
    none = processes(), descriptors()
    with Pool(workers=3, deadline_s=5.0) as pool:
        pool.judge(reward, [(task(), f"leaves {n}") for n in range(5)])
        wait_for(lambda: processes() == none[0] + 4)  # three workers and their nursery
        held = descriptors()
        calls = [(task(), f"{what} {n}") for n in range(50) for what in ("leaves", "crashes", "good")]
        verdicts = pool.judge(reward, calls)  # each another response: the same one is judged once
        assert [v.label for v in verdicts] == ["died", "died", "scored"] * 50
        wait_for(lambda: (processes(), descriptors()) == (none[0] + 4, held))
    assert (processes(), descriptors()) == none


def test_verdicts_depend_neither_on_order_nor_on_the_number_of_workers(reward):
    pairs = [
        (task(f"t{i % 5}"), r) for i in range(30) for r in (f"good {i}", "draws", f"draws {i}", "raises")
    ]
    with Pool(workers=1, deadline_s=10.0) as pool:
        alone = [(v.score, v.label, v.reason) for v in pool.judge(reward, pairs)]
    with Pool(workers=4, deadline_s=10.0) as pool:
        backwards = [(v.score, v.label, v.reason) for v in pool.judge(reward, pairs[::-1])]
    assert alone == backwards[::-1]
    assert len({score for score, _, _ in alone}) > 30


def test_tickets_come_back_once_each_and_judge_keeps_those_of_others(pool, reward):
    tickets = {pool.submit(reward, task(), f"good {i}"): float(i) for i in range(10)}
    tickets[pool.submit(Number(), task(answer="7"), "7")] = 1.0
    assert [v.score for v in pool.judge(reward, [(task(), "good 99")])] == [99.0]
    found = {}
    while len(found) < len(tickets):
        for ticket, verdict in pool.poll(timeout_s=10.0):
            assert ticket not in found
            found[ticket] = verdict.score
    assert found == tickets
    assert pool.poll() == []


@pytest.mark.full
def test_poll_waits_no_longer_than_it_is_told(reward):
    with Pool(workers=1, deadline_s=60.0) as pool:
        pool.submit(reward, task(), "sleeps 6")
        assert pool.poll() == []
        assert pool.poll(timeout_s=60.0)[0][1].score == 1.0
        assert pool.poll(timeout_s=60.0) == []


def test_a_late_verdict_is_late_even_if_nobody_looked(hasty, reward):
    hasty.submit(reward, task(), "sleeps 1.7")
    hasty.poll()
    time.sleep(2.5)
    [(_, verdict)] = hasty.poll(timeout_s=60.0)
    assert verdict.label == "timeout"


def test_megabytes_go_both_ways(pool, reward):
    big = [f"good {n}" + " " * 5_000_000 for n in range(3)]
    assert pool.judge(reward, [(task(), response) for response in big])[2].score == 2.0
    with Workers(1, deadline_s=20.0) as workers:
        workers.submit(bytes, 20_000_000)
        [(_, outcome)] = workers.poll(timeout_s=60.0)
        assert isinstance(outcome, Returned)
        assert len(outcome.value) == 20_000_000


@pytest.mark.full
def test_the_deadline_of_a_call_does_not_count_what_it_takes_to_load_it(tmp_path):
    (tmp_path / "heavy.py").write_text("import time; time.sleep(6.0)\ndef reward(response): return 1.0\n")
    slow = Function(function=f"{tmp_path / 'heavy.py'}:reward")
    with Pool(workers=1, deadline_s=3.0) as pool:
        assert pool.judge(slow, [(task(), "x")])[0].score == 1.0


@pytest.mark.full
def test_what_hangs_while_it_is_loaded_is_stopped(tmp_path):
    file = tmp_path / "stuck.py"
    file.write_text(
        "import os, time\nif os.environ.get('HANG'): time.sleep(1000)\ndef reward(response): return 1.0\n"
    )
    stuck = Function(function=f"{file}:reward")
    os.environ["HANG"] = "1"
    try:
        with Workers(1, deadline_s=1.0, start_s=6.0) as workers:
            workers.submit(stuck, task(), "x")
            [(_, outcome)] = workers.poll(timeout_s=60.0)
    finally:
        del os.environ["HANG"]
    assert outcome == Failed("timeout", "not loaded within 6 s", 6.0)


def test_the_loss_of_the_nursery_fails_what_was_under_way_and_no_more(reward):
    others = set(psutil.Process().children())
    with Pool(workers=2, deadline_s=30.0) as pool:
        pool.judge(reward, [(task(), "good 1")])
        for seconds in (20, 21):
            pool.submit(reward, task(), f"sleeps {seconds}")
        pool.poll(timeout_s=0.5)
        [nursery] = set(psutil.Process().children()) - others
        until = time.monotonic() + 60
        while len(orphans := nursery.children()) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        nursery.send_signal(signal.SIGKILL)
        labels = []
        while len(labels) < 2:
            labels += [verdict.label for _, verdict in pool.poll(timeout_s=10.0)]
        assert labels == ["died", "died"]
        assert psutil.wait_procs(orphans, timeout=60.0)[1] == []
        assert pool.judge(reward, [(task(), "good 3")])[0].score == 3.0


def test_workers_that_cannot_start_stop_the_run(reward, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with (
        Pool(workers=1, deadline_s=1.0) as pool,
        pytest.raises(RunError, match=r"^start worker processes: "),
    ):
        pool.judge(reward, [(task(), "good 1")])


def test_worker_that_cannot_be_forked_leaves_no_descriptor(reward, monkeypatch):
    def fork(nursery, serial, channel):
        raise RunError("start worker processes", "the nursery is gone")

    monkeypatch.setattr(Nursery, "fork", fork)
    before = set(os.listdir("/proc/self/fd"))
    with Pool(workers=1, deadline_s=1.0) as pool, pytest.raises(RunError, match=r"^start worker processes: "):
        pool.judge(reward, [(task(), "good 1")])
    assert set(os.listdir("/proc/self/fd")) == before


class Unsendable(Format):
    trusted = False

    def __reduce__(self):
        raise TypeError("holds a lock")


def test_a_verifier_that_cannot_be_sent_is_the_users_mistake(pool):
    with pytest.raises(UserError, match="TypeError: holds a lock"):
        pool.submit(Unsendable(), task(), "x")


class Trusted(Format):
    def __init__(self, act):
        object.__setattr__(self, "act", act)

    def __call__(self, task, response):
        return self.act()


def test_a_trusted_verifier_may_raise_too(pool):
    def interrupt():
        raise KeyboardInterrupt

    def divide():
        return 1 // 0

    [raised] = pool.judge(Trusted(divide), [(task(), "x")])
    [odd] = pool.judge(Trusted(lambda: 1.0), [(task(), "x")])
    assert (raised.score, raised.label) == (None, "raised")
    assert raised.reason == "ZeroDivisionError: integer division or modulo by zero"
    assert (odd.score, odd.label) == (None, "raised")
    with pytest.raises(KeyboardInterrupt):
        pool.judge(Trusted(interrupt), [(task(), "x")])


def test_a_bad_gold_in_the_middle_of_a_run_is_a_failure_not_a_zero(pool):
    [verdict] = pool.judge(Number(), [(task(answer="seven"), "7")])
    assert isinstance(verdict, Verdict)
    assert (verdict.score, verdict.label) == (None, "raised")


PARENT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
from posttrain.types import Task
from posttrain.verifiers.function import Function
from posttrain.verifiers.pool import Pool
import psutil
reward = Function(function=sys.argv[1])
pool = Pool(workers=2, deadline_s=100.0)
for what in ("hangs", "shares"): pool.submit(reward, Task(id="q", messages=()), what)
while len(psutil.Process().children(recursive=True)) < 4: pool.poll(0.1)
time.sleep(0.3)
print(*[p.pid for p in psutil.Process().children(recursive=True)], flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("ending", ["kill", "interrupt"])
def test_workers_die_with_their_parent(reward, ending):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), reward.function],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 4, "the nursery, two workers and the process that they share"
        parent.send_signal(signal.SIGKILL if ending == "kill" else signal.SIGINT)
    until = time.monotonic() + 60
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < until, "a worker outlived its parent"
        time.sleep(0.05)


def test_a_worker_is_forked_from_the_process_that_was_there_before(pool, reward):
    pool.judge(reward, [(task(), f"leaves {n}") for n in range(2)])
    before = psutil.Process().children()
    pool.judge(reward, [(task(), f"leaves {n}") for n in range(2, 12)])
    assert psutil.Process().children() == before


def test_a_module_of_the_users_directory_is_found(tmp_path, monkeypatch):
    (tmp_path / "rewards_nearby.py").write_text("def reward(response): return float(len(response))\n")
    monkeypatch.chdir(tmp_path)
    with Pool(workers=1, deadline_s=5.0) as pool:
        [verdict] = pool.judge(Function(function="rewards_nearby:reward"), [(task(), "abc")])
    assert verdict.score == 3.0


def test_impossible_pools_are_refused():
    for options in ({"workers": 0, "deadline_s": 1.0}, {"workers": 1, "deadline_s": 0.0}):
        with pytest.raises(ValueError):
            Pool(**options)
    with pytest.raises(ValueError):
        Pool(workers=1, deadline_s=1.0, memory_mb=0)
