"""The verifier of programs against programs that want to fool or to harm it, and against odd honest ones.

Each program is judged at each isolation level, and the host is compared with what it was before.
"""

import itertools
import os
import random
import runpy
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from posttrain.types import Task
from posttrain.verifiers.code import grade, talk
from posttrain.verifiers.code.caller import Caller
from posttrain.verifiers.code.verifier import Code
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.sandbox import LEVELS, Box, Level, available, host
from posttrain.verifiers.sandbox.live import USED

HERE = Path(__file__).parent / "adversarial"
TAMPERING, RESOURCES, ESCAPES, HONEST = (
    runpy.run_path(str(HERE / f"{name}.py")) for name in ("tampering", "resources", "escapes", "honest")
)
CASES = [([1, 2], 3), ([5, 5], 10)]
PROMPT = "def plus(x, y):\n    return x + y\n\n\ndef f(a, b):\n    '''The sum of two numbers.'''\n"
TESTS = {
    "assert": "def check(candidate):\n    for n in range(5):\n        assert candidate(n, 3) == n + 3\n"
    "    assert abs(candidate(0.5, 0.25) - 0.75) < 1e-6\n",
    "mapped": "def check(candidate):\n    assert all(map(lambda n: candidate(n, 1) == n + 1, range(5)))\n",
    "looped": "def check(candidate):\n    for x in candidate(1, 2):\n        assert x == 3\n",
    "raises": "def check(candidate):\n    try:\n        candidate(1, 2)\n        assert False\n"
    "    except ValueError:\n        pass\n    assert True\n",
    "sets": "def check(candidate):\n    assert candidate(1, 2) == {frozenset({1}), frozenset({2})}\n",
}
FIELDS: dict[str, dict[str, Any]] = {
    "io": {"cases": [{"stdin": f"{a} {b}\n", "stdout": f"{c}\n"} for (a, b), c in CASES]},
    "much": {"cases": [{"stdout": "\n".join(map(str, range(140000)))}]},
    "long": {"cases": [{"stdout": "1" + "0" * 4998 + "7"}]},
    "unicode": {"cases": [{"stdin": "żółw 🐢\n", "stdout": "🐢 włóż\n"}]},
    "float": {"cases": [{"stdout": "0.3"}], "compare": "float:1e-6"},
    "call": {"entry_point": "f", "cases": [{"args": a, "expected": e} for a, e in CASES]},
    "method": {"entry_point": "Solution.add", "cases": [{"args": a, "expected": e} for a, e in CASES]},
    "table": {"entry_point": "f", "cases": [{"expected": {"1": 2}}]},
    "pair": {"entry_point": "f", "cases": [{"expected": [1, [2, "x"]]}]},
    **{name: {"prompt": PROMPT, "entry_point": "f", "test": test} for name, test in TESTS.items()},
}
GIVEN = [level for level in LEVELS if not available()[level]]
SHORT, LONG = 0.5, 3.0


def task(kind: str, limit: float) -> Task:
    """The task of a kind, with a limit of time."""
    fields = FIELDS[kind]
    of = "assert" if "test" in fields else "call" if "entry_point" in fields else "stdio"
    return Task(id=kind, messages=(), source="here:1", fields={"kind": of, "time_limit_s": limit, **fields})


def verdict(level: Level, kind: str, source: str, limit: float) -> str:
    """The class of a program, which must not be a failure of ours, with a reason that can be written."""
    found = Code(level=level)(task(kind, limit), f"```python\n{source}\n```")
    assert found.score == float(found.label == "PASS")
    assert found.reason.isprintable() or found.label == "PASS", found.reason
    found.reason.encode()
    return found.label if found.label == "PASS" else f"{found.label} ({found.reason})"


def is_one_of(found: str, expected: str) -> bool:
    """Whether a class is among those expected."""
    return found.split(" ")[0] in expected.split("|")


# ---------------------------------------------------------------------- the host


def state() -> dict[str, set[str]]:
    """What a program could leave on a host."""
    groups = [
        p for place in ("", "memory", "pids") for p in Path("/sys/fs/cgroup", place).glob("posttrain-*")
    ]
    mine = f"posttrain-{os.getpid()}-"
    return {
        "processes": {str(p.pid) for p in psutil.Process().children(recursive=True) if runs(p)} | strangers(),
        "files": {str(p) for place in ("/tmp", "/dev/shm", "/var/tmp") for p in ours(Path(place))},
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "groups": {str(p) for p in groups if p.name.startswith(mine)},
        "shared memory": set(Path("/proc/sysvipc/shm").read_text().splitlines()),
    }


def ours(place: Path) -> list[Path]:
    """Files of boxes, and of users that only boxes have."""
    found = []
    for path in place.iterdir():
        try:
            if path.name.startswith("posttrain-box-") or path.lstat().st_uid > 500_000_000:
                found.append(path)
        except FileNotFoundError:
            continue
    return found


def runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that has stays in the list until its parent asks for it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def strangers() -> set[str]:
    """Processes of the users that only boxes of this process have."""
    found, own = set(), host.own_uids() if os.getuid() == 0 else ()
    for process in psutil.process_iter():
        try:
            uid = process.uids().real
            if uid in USED or uid in own:
                found.add(str(process.pid))
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module", autouse=True)
def _the_host_is_as_before() -> Iterator[None]:
    talk.end_all()
    before, memory = state(), psutil.virtual_memory().shared
    yield
    talk.end_all()
    until = time.monotonic() + 60
    while time.monotonic() < until and any(state()[k] - before[k] for k in before):
        time.sleep(0.1)
    assert {k: v - before[k] for k, v in state().items() if v - before[k]} == {}
    # Memory that outlives processes is that of files in memory; others use this machine, too.
    assert psutil.virtual_memory().shared < memory + (200 << 20)


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What a program should not reach, under the names by which the escapes know it."""
    place = Path("/tmp", f"posttrain-test-{os.getpid()}")
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    (place / "secret").write_text("a secret")
    abstract = f"\0posttrain-test-{os.getpid()}"
    with (
        socket.socket(socket.AF_UNIX) as first,
        socket.socket(socket.AF_UNIX) as second,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as third,
        subprocess.Popen(["sleep", "1000"]) as sentinel,
    ):
        for listener, address in ((first, abstract), (second, str(place / "s")), (third, str(place / "d"))):
            listener.bind(address)
        for path in (place / "s", place / "d"):
            path.chmod(0o777)
        first.listen()
        second.listen()
        yield {
            "SECRET": repr(str(place / "secret")),
            "SOURCE": repr(grade.__file__),
            "ABSTRACT": repr(abstract),
            "SOCKET": repr(str(place / "s")),
            "DATAGRAM": repr(str(place / "d")),
            "SENTINEL": str(sentinel.pid),
        }
        assert sentinel.poll() is None
        sentinel.kill()
    assert sorted(p.name for p in place.iterdir()) == ["d", "s", "secret"]
    for path in place.iterdir():
        path.unlink()
    place.rmdir()


# ---------------------------------------------------------------------- the programs


def pairs(programs: dict[str, Any]) -> list[Any]:
    """Each level with each program."""
    return [pytest.param(level, name, id=f"{level}-{name}") for level in GIVEN for name in programs]


@pytest.mark.parametrize(("level", "name"), pairs(TAMPERING["PROGRAMS"]))
@pytest.mark.sample(f"{GIVEN[0]}-*")
def test_tampering(level: Level, name: str) -> None:
    kind, expected, source = TAMPERING["PROGRAMS"][name]
    found = verdict(level, kind, source, SHORT if "TIMEOUT" in expected else LONG)
    assert is_one_of(found, expected), found


@pytest.mark.parametrize(("level", "name"), pairs(RESOURCES["PROGRAMS"]))
@pytest.mark.sample(f"{GIVEN[0]}-*")
def test_resources(level: Level, name: str) -> None:
    kind, expected, source = RESOURCES["PROGRAMS"][name]
    expected = expected if isinstance(expected, str) else expected[level]
    if name == "processes" and level == "strict" and not os.access("/sys/fs/cgroup/memory", os.W_OK):
        expected = "MEMORY|WRONG"  # no control group can be made
    found = verdict(level, kind, source, SHORT if "TIMEOUT" in expected else LONG)
    assert is_one_of(found, expected), found


@pytest.mark.parametrize(("level", "name"), pairs(ESCAPES["PROGRAMS"]))
@pytest.mark.sample(every=2)
def test_escapes(level: Level, name: str, on_the_host: dict[str, str]) -> None:
    kind, by_level, source = ESCAPES["PROGRAMS"][name]
    expected = by_level[level]
    if expected == "-":
        pytest.skip("would harm the host at this level")
    for word, value in on_the_host.items():
        source = source.replace(word, value)
    found = verdict(level, kind, source, LONG if expected else 2 * SHORT)
    assert is_one_of(found, expected) if expected else not is_one_of(found, "INFRA_ERROR"), found


@pytest.mark.parametrize(("level", "name"), pairs(HONEST["PROGRAMS"]))
@pytest.mark.sample(f"{GIVEN[0]}-*")
def test_honest(level: Level, name: str) -> None:
    kind, source = HONEST["PROGRAMS"][name]
    expected = HONEST["REFUSED"].get(name, {}).get(level, "PASS")
    found = verdict(level, kind, source, LONG)
    assert is_one_of(found, expected), found


def test_there_are_many_and_each_once() -> None:
    sets = [TAMPERING["PROGRAMS"], RESOURCES["PROGRAMS"], ESCAPES["PROGRAMS"], HONEST["PROGRAMS"]]
    sources = [program[-1] for programs in sets for program in programs.values()]
    assert len(sources) >= 200
    assert len(
        set(zip(sources, itertools.chain(*[[p[0] for p in s.values()] for s in sets]), strict=True))
    ) == len(sources)


# ---------------------------------------------------------------------- under load


@pytest.mark.full
def test_the_verdicts_are_the_same_under_load() -> None:
    """Sixteen judges at once, on however few processors, say what one alone says."""
    names = ["always_equal", "exit_0", "stolen_nonce", "stop_iteration"]
    chosen = [(*TAMPERING["PROGRAMS"][n][::2], LONG, TAMPERING["PROGRAMS"][n][1]) for n in names]
    chosen += [(*HONEST["PROGRAMS"][n], LONG, "PASS") for n in ("body", "open_0", "heavy")]
    chosen += [(*RESOURCES["PROGRAMS"][n][::2], SHORT, "TIMEOUT") for n in ("sleep", "loop")]
    level = GIVEN[0]
    alone = [verdict(level, kind, source, limit) for kind, source, limit, _ in chosen]
    assert [is_one_of(f, e) for f, (*_, e) in zip(alone, chosen, strict=True)] == [True] * len(chosen)
    numbered = [
        (number, (task(kind, limit), f"{source}\n# {turn}"))
        for turn in range(16)
        for number, (kind, source, limit, _) in enumerate(chosen)
    ]
    random.Random(0).shuffle(numbered)
    with Pool(workers=16, deadline_s=300.0) as pool:
        verdicts = pool.judge(Code(level=level), [pair for _, pair in numbered])
    said = {(number, v.label) for (number, _), v in zip(numbered, verdicts, strict=True)}
    assert said == {(number, found.split(" ")[0]) for number, found in enumerate(alone)}


# ---------------------------------------------------------------------- which call it is

FILE = """
def f():
    try:
        seen = int(open(PATH).read())
    except OSError:
        seen = 0
    try:
        open(PATH, "w").write(str(seen + 1))
    except OSError:
        return 0
    return seen
"""
COUNTERS = {
    **{
        name: f"import os\nPATH = {path}{FILE}"
        for name, path in (
            ("working directory", "'count'"),
            ("TMPDIR", "os.environ['TMPDIR'] + '/count'"),
            ("HOME", "os.environ['HOME'] + '/count'"),
            ("/tmp", "'/tmp/count'"),
            ("/var/tmp", "'/var/tmp/count'"),
            ("/dev/shm", "'/dev/shm/count'"),
        )
    },
    "System V memory": """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
def f():
    place = libc.shmat(libc.shmget(77, 8, 0o1666), None, 0)
    if place is None or place == 2**64 - 1:
        return 0
    count = ctypes.cast(place, ctypes.POINTER(ctypes.c_long))
    count[0] += 1
    return count[0]
""",
    "a process that stays": """
import os, time
def f():
    if os.fork() == 0:
        os.setsid()
        time.sleep(60)
    try:
        return sum(name.isdigit() for name in os.listdir("/proc"))
    except OSError:
        return 0
""",
    "its own number": "import os\ndef f(): return os.getpid()",
    "its user": "import os\ndef f(): return [os.getuid(), open('/proc/self/uid_map').read().split()[0]]",
    "the process that loads it": """
import os
count = [0]
fork = os.fork
def counted():
    count[0] += 1
    return fork()
os.fork = counted
def f(): return count[0]
""",
}
ONLY_STRICT = {"its own number", "its user", "a process that stays"}
"""Of the host, where there are no namespaces."""


@pytest.mark.parametrize("level", [level for level in GIVEN if level != "rlimits"])
@pytest.mark.parametrize("channel", COUNTERS)
def test_a_program_cannot_tell_how_many_calls_came_before(level: Level, channel: str) -> None:
    if channel in ONLY_STRICT and level != "strict":
        pytest.skip("a box of this level has no namespaces")
    caller = Caller([COUNTERS[channel]], "f", Box(level=level))
    try:
        said = [caller.call([], {}) for _ in range(4)]
    finally:
        caller.close()
    assert said[0].keys() == {"value"}
    assert said == [said[0]] * 4


@pytest.mark.skipif(os.getuid() != 0, reason="only boxes of root's have users of their own")
def test_users_of_boxes_do_not_count_upwards() -> None:
    drawn = [host.spare_uid() for _ in range(50)]
    assert drawn != sorted(drawn)
    assert all(uid not in {host.spare_uid({uid}) for _ in range(50)} for uid in drawn[:3])


@pytest.mark.parametrize("kind", ["call", "assert"])
def test_a_program_that_answers_in_the_order_of_its_cases_is_wrong(kind: str) -> None:
    fields: dict[str, Any] = {"entry_point": "f"}
    if kind == "call":
        fields["cases"] = [{"args": [], "expected": n} for n in range(3)]
    else:
        fields["test"] = "def check(candidate):\n    for n in range(3):\n        assert candidate() == n\n"
    verdict = Code(level=GIVEN[0])(
        Task(id="t", messages=(), fields=fields | {"kind": kind}), COUNTERS["TMPDIR"]
    )
    assert (verdict.score, verdict.label) == (0.0, "WRONG")


def test_a_test_of_many_calls_shares_a_box_after_the_first_of_them() -> None:
    caller = Caller([COUNTERS["TMPDIR"]], "f", Box(level=GIVEN[0]), fresh=2)
    try:
        assert [caller.call([], {})["value"] for _ in range(5)] == [0, 0, 0, 1, 2]
    finally:
        caller.close()


@pytest.mark.full
def test_loading_a_program_again_and_again_is_not_the_time_of_its_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
    test = "def check(candidate):\n    for n in range(18):\n        assert candidate(n) == n\n"
    fields = {"kind": "assert", "entry_point": "f", "test": test, "time_limit_s": 5.0}
    monkeypatch.setattr(grade, "TEST_LIMITS", 1)
    assert 5.0 < 18 * 0.3
    assert (
        Code(level=GIVEN[0])(Task(id="t", messages=(), fields=fields), wait + "def f(n): return n").label
        == "PASS"
    )
