"""A program against its cases: in boxes, one at a time, with only plain data coming back.

graded   waits for   the boxes; each step has the problem's time limit, not counting time in
                     which others had the processor
"""

import re
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from posttrain.types import RunError
from posttrain.verifiers.code import plain
from posttrain.verifiers.code.caller import Caller, class_of, outcome
from posttrain.verifiers.code.compare import Compare, equal_text, equal_value
from posttrain.verifiers.code.problem import Problem, asserts, preamble, sources
from posttrain.verifiers.code.runners import PYTHON, RUNNERS, Runner
from posttrain.verifiers.code.talk import START_S, Ended, receive, send, start
from posttrain.verifiers.sandbox import Box, Level, Limits, host
from posttrain.verifiers.sandbox.live import Clock, attend

_BUILD_S = 10.0
TEST_LIMITS = 10
"""All calls of one test together may take this many times what one may."""
FRESH = 32
"""Calls of one test that are made in boxes of their own; a test may make thousands."""
_EXAMINER = Limits(wall_s=10.0, memory_mb=1024, output_bytes=1 << 24)
_NUMPY = re.compile(r"^\s*(?:import|from)\s+numpy\b", re.MULTILINE)
"""In a task's own test, as those of EvalPlus have it; what the program is given is its own box's."""


@dataclass(frozen=True)
class Outcome:
    """How one case, or one program, did."""

    label: str
    reason: str
    passed: int = 0
    total: int = 0


def graded(found: Problem, code: str, level: Level, *, every: bool) -> Outcome:
    """The class of a program, and how many of its cases it passes; `every` runs all of them.

    RunError if a box cannot be made or does what no program can make it do.
    """
    if "\0" in code:
        return Outcome("COMPILE_ERROR", "the program holds a null character")
    box = Box(
        level=level,
        limits=Limits(
            wall_s=found.time_limit_s,
            memory_mb=found.memory_limit_mb,
            output_bytes=found.output_limit_bytes,
        ),
    )
    if found.language != PYTHON:
        return _build_and_run(found, code, box, every)
    if found.kind == "stdio":
        return _over(found, every, lambda case: _stdio_python(found, code, case, box))
    if found.kind == "call":
        return _calls(found, code, box, every)
    return _asserts(found, code, box, every)


def _over(found: Problem, every: bool, judge: Callable[[dict[str, Any]], Outcome]) -> Outcome:
    """One outcome of many cases: PASS, or the first failure."""
    passed, first = 0, None
    for number, case in enumerate(found.cases, start=1):
        one = judge(case)
        if one.label == "PASS":
            passed += 1
            continue
        first = first or Outcome(one.label, f"case {number}: {one.reason}")
        if not every or one.label == "COMPILE_ERROR":
            break
    total = len(found.cases)
    if first is None:
        return Outcome("PASS", f"all {total} cases", total, total)
    return replace(first, passed=passed, total=total)


def _stdio_python(found: Problem, code: str, case: dict[str, Any], box: Box) -> Outcome:
    try:
        ran = played(box, code, _bytes(case.get("stdin", "")), box.limits.wall_s)
    except Ended as ended:
        return Outcome(ended.label, ended.reason)
    return _of_process(ran.how, ran.status, ran.memory, ran.read, case["stdout"], found.compare)


@dataclass(frozen=True)
class Played:
    """How a program in Python ended, and what it wrote."""

    how: Literal["exit", "timeout", "output"]
    status: int | None
    """Its exit status, -n if signal n ended it; None if we ended it."""
    memory: bool
    """Whether the kernel killed something in its box for want of memory."""
    read: dict[str, bytes]
    """What it wrote to stdout and to stderr."""


def played(box: Box, code: str, stdin: bytes, wall_s: float) -> Played:
    """What a program does as the main one of an interpreter, in a box of its own.

    Ended if it does not compile, RunError if there is no box.
    """
    nonce, most = secrets.token_hex(8), box.limits.output_bytes
    job = {"kind": "stdio", "sources": [code], "stdin": stdin, "nonce": nonce}
    with start(box, "harness.py") as live:
        try:
            send(live, job)
            first = plain.message(receive(live, most, Clock(live, wall_s + START_S)))
        except (Ended, plain.Garbled) as ended:
            late = isinstance(ended, Ended) and ended.label == "TIMEOUT"
            raise Ended("TIMEOUT" if late else "COMPILE_ERROR", "it does not compile") from None
        # What comes on the channel after "compiled" is the program's own affair, and is not read.
        if first[:2] != ["compiled", nonce]:
            try:
                raise Ended("COMPILE_ERROR", outcome(first)[1])
            except plain.Garbled:
                raise Ended("COMPILE_ERROR", "it does not compile") from None
        streams = {"stdout": live.process.stdout, "stderr": live.process.stderr}
        read, how = attend(live, streams, b"", {"stdout": most, "stderr": most}, wall_s)
        status = live.process.wait() if how == "exit" else None
        return Played(how, status, live.out_of_memory(), read)


def _build_and_run(found: Problem, code: str, box: Box, every: bool) -> Outcome:
    """A program in another language: built once, started for each case."""
    runner = RUNNERS[found.language]
    files = {runner.file: _bytes(code)}
    if runner.build:
        limits = replace(box.limits, wall_s=_BUILD_S, memory_mb=max(box.limits.memory_mb, 1024))
        builder = Box(level=box.level, limits=limits)
        main, said = _built(builder, runner, files)
        if main is None:
            empty, why = _built(builder, runner, {runner.file: b"int main(void) { return 0; }\n"})
            if empty is None:
                raise RunError("build an empty program", why)
            return Outcome("COMPILE_ERROR", said)
        files = {"main": main}

    def judge(case: dict[str, Any]) -> Outcome:
        ran = box.run(runner.run, files=files, stdin=_bytes(case.get("stdin", "")))
        how = "exit" if ran.ended == "signal" else ran.ended
        read = {"stdout": ran.stdout, "stderr": ran.stderr}
        return _of_process(how, ran.status, ran.ended == "memory", read, case["stdout"], found.compare)

    return _over(found, every, judge)


def _built(box: Box, runner: Runner, files: dict[str, bytes]) -> tuple[bytes | None, str]:
    """What is built of a source, None if nothing is; and the first line that is said about it."""
    ran = box.run(runner.build, files=files, collect=("main",))
    said = ran.stderr.decode("utf-8", "replace").strip().splitlines()
    main = ran.collected.get("main") if ran.status == 0 else None
    return main, plain.line(said[0]) if said else "it does not build"


def _of_process(
    how: str, status: int | None, memory: bool, read: dict[str, bytes], expected: str, compare: Compare
) -> Outcome:
    """The class of a process that has ended, whose output is compared if it ended well."""
    if how == "timeout":
        return Outcome("TIMEOUT", "it did not end in time")
    if how == "output":
        return Outcome("OUTPUT_LIMIT", "it wrote too much")
    if status is not None and status < 0:
        status = 128 - status
    if status != 0 or memory:
        last = read["stderr"].decode("utf-8", "replace").strip().splitlines()[-1:]
        said = plain.line(last[0]) if last else f"it ended with status {status}"
        label = "RUNTIME_ERROR"
        if memory or said.startswith("MemoryError") or "[Errno 12]" in said:
            label = "MEMORY"
        elif status == 128 + signal.SIGXCPU:
            label = "TIMEOUT"
        elif said.startswith("PermissionError") or "[Errno 30]" in said:
            label = "FORBIDDEN"
        return Outcome(label, said)
    output = read["stdout"].decode("utf-8", "surrogateescape")
    if equal_text(output, expected, compare):
        return Outcome("PASS", "the output is the expected one")
    return Outcome("WRONG", f"it wrote {output[:60]!r}, and {expected[:60]!r} is expected")


def _calls(found: Problem, code: str, box: Box, every: bool) -> Outcome:
    """A function called on each case, each in a box of its own."""
    caller = Caller([code], found.entry_point, box, typed=True)
    try:
        return _over(found, every, lambda case: _one_call(caller, case, found.compare))
    finally:
        caller.close()


def _one_call(caller: Caller, case: dict[str, Any], compare: Compare) -> Outcome:
    try:
        answer = caller.call(case.get("args", []), case.get("kwargs", {}))
    except Ended as ended:
        return Outcome(ended.label, ended.reason)
    if "raised" in answer:
        return Outcome(*class_of(answer))
    value = answer["value"]
    if equal_value(value, case["expected"], compare):
        return Outcome("PASS", "the value is the expected one")
    expected = plain.shown(case["expected"])
    return Outcome("WRONG", f"it returned {plain.shown(value)}, and {expected} is expected")


def _asserts(found: Problem, code: str, box: Box, every: bool) -> Outcome:
    """A task's own test, in a box of its own, calling the submission in another."""
    caller = Caller(sources(found, code), found.entry_point, box, FRESH)
    calls: list[dict[str, Any]] = []
    try:
        done = _run_test(found, caller, box.level, every, calls)
    except (Ended, plain.Garbled, plain.Unplain) as error:
        if not calls:
            raise RunError("the task's test", f"it does not run: {error}") from None
        done = None  # the test is sound, as its gold passes: what the program returned broke it
    finally:
        caller.close()
    stopped = next((call["ended"] for call in calls if "ended" in call), None)
    passed, total, first, raised, fatal = done or (
        0,
        1,
        "the test does not end on what it returned",
        False,
        "",
    )
    if fatal and len(calls) == 0:
        raise RunError("the task's test", f"it cannot be used: {fatal}")
    if not calls:
        raise RunError("the task's test", f"it never calls the program{first and ': '}{first}")
    if stopped is None and not fatal and passed == total:
        written = asserts(found.test)
        if total or not written:
            return Outcome("PASS", f"all {total} asserts hold", max(total, 1), max(total, 1))
        first = "none of the test's asserts was reached"
    # Those that were never reached count as failed, so that ending the test early gains nothing.
    total = max(total, asserts(found.test), passed + 1)
    if stopped is not None:
        return Outcome(stopped.label, stopped.reason, passed, total)
    if raised:
        fault = next(call for call in reversed(calls) if "raised" in call)
        return replace(Outcome(*class_of(fault)), passed=passed, total=total)
    return Outcome("WRONG", plain.line(fatal or first), passed, total)


def _run_test(
    found: Problem, caller: Caller, level: Level, every: bool, calls: list[dict[str, Any]]
) -> list[Any]:
    """How the test went, as the examiner tells it; each call of the program is added to `calls`."""
    job = {"preamble": preamble(found), "test": found.test, "entry_point": found.entry_point}
    path = host.packages("numpy") if _NUMPY.search(f"{job['preamble']}\n{found.test}") else ()
    with start(Box(level=level, limits=_EXAMINER, readable=path), "examiner.py") as examiner:
        send(examiner, {**job, "every": every, "path": path})
        while True:
            clock = Clock(examiner, _EXAMINER.wall_s)
            said = plain.message(receive(examiner, _EXAMINER.output_bytes, clock))
            if said[0] == "done":
                done: list[Any] = plain.decoded(said[1])
                return done
            args, kwargs = plain.decoded(said[1])
            try:
                if caller.spent_s > TEST_LIMITS * found.time_limit_s:
                    raise Ended("TIMEOUT", f"all calls together took {TEST_LIMITS} times its time")
                answer = caller.call(args, kwargs)
                calls.append(answer)
            except Ended as ended:
                calls.append({"ended": ended})
                broken = {"raised": "RuntimeError", "said": ended.reason, "builtin": "RuntimeError"}
                answer = broken if every else {"stop": ended.reason}
            send(examiner, answer)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
