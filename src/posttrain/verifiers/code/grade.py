"""Run a program on its cases in boxes, one case at a time, and read only plain data back.

grade_program waits for the boxes. Each step has the time limit of the problem, not counting time in which
other programs had the processor.
"""

import re
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from posttrain.types import RunError
from posttrain.verifiers.code import decoding
from posttrain.verifiers.code.caller import Caller, class_of, outcome
from posttrain.verifiers.code.compare import OutputComparison, equal_text, equal_value
from posttrain.verifiers.code.problem import Problem, asserts, preamble, sources
from posttrain.verifiers.code.runners import PYTHON, RUNNERS, LanguageRunner
from posttrain.verifiers.code.talk import START_S, ProgramEndedError, receive, send, start
from posttrain.verifiers.sandbox import Box, Level, Limits, host
from posttrain.verifiers.sandbox.live import Clock, attend

_BUILD_S = 10.0
TEST_LIMITS = 10
"""All calls of one test together may take this many times the time limit of one call."""
FRESH = 32
"""First calls of a test that get a box each; the rest share one, because a test may make thousands."""
_EXAMINER = Limits(wall_s=10.0, memory_mb=1024, output_bytes=1 << 24)
_NUMPY = re.compile(r"^\s*(?:import|from)\s+numpy\b", re.MULTILINE)
"""Finds tests that import numpy, as EvalPlus does; only their examiner gets the package."""


@dataclass(frozen=True)
class Outcome:
    """Result of one case or one program."""

    label: str
    reason: str
    passed: int = 0
    total: int = 0


def grade_program(problem: Problem, code: str, level: Level, *, every: bool) -> Outcome:
    """Run a program on its cases; without `every` stop at the first case that fails.

    Raises RunError if the program is not at fault: no box can be made, or the compiler or the test is broken.
    """
    if "\0" in code:
        return Outcome("COMPILE_ERROR", "the program holds a null character")
    box = Box(
        level=level,
        limits=Limits(
            wall_s=problem.time_limit_s,
            memory_mb=problem.memory_limit_mb,
            output_bytes=problem.output_limit_bytes,
        ),
    )
    if problem.language != PYTHON:
        return _build_and_run(problem, code, box, every)
    if problem.kind == "stdio":
        return _judge_cases(problem, every, lambda case: _judge_stdio(problem, code, case, box))
    if problem.kind == "call":
        return _judge_calls(problem, code, box, every)
    return _judge_asserts(problem, code, box, every)


def _judge_cases(problem: Problem, every: bool, judge: Callable[[dict[str, Any]], Outcome]) -> Outcome:
    """Judge the cases and sum them up: PASS, or the first failure."""
    passed, failure = 0, None
    for number, case in enumerate(problem.cases, start=1):
        result = judge(case)
        if result.label == "PASS":
            passed += 1
            continue
        failure = failure or Outcome(result.label, f"case {number}: {result.reason}")
        if not every or result.label == "COMPILE_ERROR":
            break
    total = len(problem.cases)
    if failure is None:
        return Outcome("PASS", f"all {total} cases", total, total)
    return replace(failure, passed=passed, total=total)


def _judge_stdio(problem: Problem, code: str, case: dict[str, Any], box: Box) -> Outcome:
    try:
        ran = run_python(box, code, _encode(case.get("stdin", "")), box.limits.wall_s)
    except ProgramEndedError as ended:
        return Outcome(ended.label, ended.reason)
    return _judge_process(
        ran.how, ran.status, ran.out_of_memory, ran.outputs, case["stdout"], problem.compare
    )


@dataclass(frozen=True)
class PythonRun:
    """Result of a Python program."""

    how: Literal["exit", "timeout", "output"]
    status: int | None
    """Exit status, -n if signal n ended the program; None if it was killed at a limit."""
    out_of_memory: bool
    """Whether the kernel killed a process in the box because memory ran out."""
    outputs: dict[str, bytes]
    """Content of "stdout" and of "stderr"."""


def run_python(box: Box, code: str, stdin: bytes, wall_s: float) -> PythonRun:
    """Run Python code as the main program of an interpreter in a new box.

    Raises Ended if it does not compile, RunError if the box does not start.
    """
    nonce, most = secrets.token_hex(8), box.limits.output_bytes
    job = {"kind": "stdio", "sources": [code], "stdin": stdin, "nonce": nonce}
    with start(box, "harness.py") as live:
        try:
            send(live, job)
            first = decoding.message(receive(live, most, Clock(live, wall_s + START_S)))
        except (ProgramEndedError, decoding.Garbled) as ended:
            late = isinstance(ended, ProgramEndedError) and ended.label == "TIMEOUT"
            raise ProgramEndedError("TIMEOUT" if late else "COMPILE_ERROR", "it does not compile") from None
        # After "compiled" only the program could write to the channel, so the rest is not read.
        if first[:2] != ["compiled", nonce]:
            try:
                raise ProgramEndedError("COMPILE_ERROR", outcome(first)[1])
            except decoding.Garbled:
                raise ProgramEndedError("COMPILE_ERROR", "it does not compile") from None
        streams = {"stdout": live.process.stdout, "stderr": live.process.stderr}
        outputs, end = attend(live, streams, b"", {"stdout": most, "stderr": most}, wall_s)
        status = live.process.wait() if end == "exit" else None
        return PythonRun(end, status, live.out_of_memory(), outputs)


def _build_and_run(problem: Problem, code: str, box: Box, every: bool) -> Outcome:
    """Judge a program in another language: build it once, start it for each case."""
    runner = RUNNERS[problem.language]
    files = {runner.file: _encode(code)}
    if runner.build:
        limits = replace(box.limits, wall_s=_BUILD_S, memory_mb=max(box.limits.memory_mb, 1024))
        builder = Box(level=box.level, limits=limits)
        main, message = _build(builder, runner, files)
        if main is None:
            executable, message_of_empty = _build(
                builder, runner, {runner.file: b"int main(void) { return 0; }\n"}
            )
            if executable is None:
                raise RunError("build an empty program", message_of_empty)
            return Outcome("COMPILE_ERROR", message)
        files = {"main": main}

    def judge(case: dict[str, Any]) -> Outcome:
        ran = box.run(runner.run, files=files, stdin=_encode(case.get("stdin", "")))
        end = "exit" if ran.ended == "signal" else ran.ended
        outputs = {"stdout": ran.stdout, "stderr": ran.stderr}
        return _judge_process(
            end, ran.status, ran.ended == "memory", outputs, case["stdout"], problem.compare
        )

    return _judge_cases(problem, every, judge)


def _build(box: Box, runner: LanguageRunner, files: dict[str, bytes]) -> tuple[bytes | None, str]:
    """Build a source and return (executable or None, first line of the compiler's messages)."""
    ran = box.run(runner.build, files=files, collect=("main",))
    lines = ran.stderr.decode("utf-8", "replace").strip().splitlines()
    main = ran.collected.get("main") if ran.status == 0 else None
    return main, decoding.line(lines[0]) if lines else "it does not build"


def _judge_process(
    how: str,
    status: int | None,
    out_of_memory: bool,
    outputs: dict[str, bytes],
    expected: str,
    compare: OutputComparison,
) -> Outcome:
    """Classify a process that has ended; if it succeeded, compare its output with the expected one."""
    if how == "timeout":
        return Outcome("TIMEOUT", "it did not end in time")
    if how == "output":
        return Outcome("OUTPUT_LIMIT", "it wrote too much")
    if status is not None and status < 0:
        status = 128 - status
    if status != 0 or out_of_memory:
        last_lines = outputs["stderr"].decode("utf-8", "replace").strip().splitlines()[-1:]
        message = decoding.line(last_lines[0]) if last_lines else f"it ended with status {status}"
        label = "RUNTIME_ERROR"
        if out_of_memory or message.startswith("MemoryError") or "[Errno 12]" in message:
            label = "MEMORY"
        elif status == 128 + signal.SIGXCPU:
            label = "TIMEOUT"
        elif message.startswith("PermissionError") or "[Errno 30]" in message:
            label = "FORBIDDEN"
        return Outcome(label, message)
    output = outputs["stdout"].decode("utf-8", "surrogateescape")
    if equal_text(output, expected, compare):
        return Outcome("PASS", "the output is the expected one")
    return Outcome("WRONG", f"it wrote {output[:60]!r}, and {expected[:60]!r} is expected")


def _judge_calls(problem: Problem, code: str, box: Box, every: bool) -> Outcome:
    """Judge a function by calling it on each case, each time in a new box."""
    caller = Caller([code], problem.entry_point, box, typed=True)
    try:
        return _judge_cases(problem, every, lambda case: _judge_call(caller, case, problem.compare))
    finally:
        caller.close()


def _judge_call(caller: Caller, case: dict[str, Any], compare: OutputComparison) -> Outcome:
    try:
        answer = caller.call(case.get("args", []), case.get("kwargs", {}))
    except ProgramEndedError as ended:
        return Outcome(ended.label, ended.reason)
    if "raised" in answer:
        return Outcome(*class_of(answer))
    value = answer["value"]
    if equal_value(value, case["expected"], compare):
        return Outcome("PASS", "the value is the expected one")
    expected = decoding.shown(case["expected"])
    return Outcome("WRONG", f"it returned {decoding.shown(value)}, and {expected} is expected")


def _judge_asserts(problem: Problem, code: str, box: Box, every: bool) -> Outcome:
    """Judge by the task's own test, which runs in one box and calls the submission in another."""
    caller = Caller(sources(problem, code), problem.entry_point, box, FRESH)
    calls: list[dict[str, Any]] = []
    try:
        counts = _run_test(problem, caller, box.level, every, calls)
    except (ProgramEndedError, decoding.Garbled, decoding.Unplain) as error:
        if not calls:
            raise RunError("the task's test", f"it does not run: {error}") from None
        counts = None  # the gold passes this test, so what the program returned has broken it
    finally:
        caller.close()
    stopped = next((call["ended"] for call in calls if "ended" in call), None)
    passed, total, first, raised, fatal = counts or (
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
        written = asserts(problem.test)
        if total or not written:
            return Outcome("PASS", f"all {total} asserts hold", max(total, 1), max(total, 1))
        first = "none of the test's asserts was reached"
    # Asserts that were not reached count as failed: a program gains nothing by ending the test early.
    total = max(total, asserts(problem.test), passed + 1)
    if stopped is not None:
        return Outcome(stopped.label, stopped.reason, passed, total)
    if raised:
        fault = next(call for call in reversed(calls) if "raised" in call)
        return replace(Outcome(*class_of(fault)), passed=passed, total=total)
    return Outcome("WRONG", decoding.line(fatal or first), passed, total)


def _run_test(
    problem: Problem, caller: Caller, level: Level, every: bool, calls: list[dict[str, Any]]
) -> list[Any]:
    """Run the test; return the examiner's counts, and append each call of the program to `calls`."""
    job = {"preamble": preamble(problem), "test": problem.test, "entry_point": problem.entry_point}
    path = host.packages("numpy") if _NUMPY.search(f"{job['preamble']}\n{problem.test}") else ()
    with start(Box(level=level, limits=_EXAMINER, readable=path), "examiner.py") as examiner:
        send(examiner, {**job, "every": every, "path": path})
        while True:
            clock = Clock(examiner, _EXAMINER.wall_s)
            message = decoding.message(receive(examiner, _EXAMINER.output_bytes, clock))
            if message[0] == "done":
                counts: list[Any] = decoding.decode(message[1])
                return counts
            args, kwargs = decoding.decode(message[1])
            try:
                if caller.spent_s > TEST_LIMITS * problem.time_limit_s:
                    raise ProgramEndedError(
                        "TIMEOUT", f"all calls together took {TEST_LIMITS} times its time"
                    )
                answer = caller.call(args, kwargs)
                calls.append(answer)
            except ProgramEndedError as ended:
                calls.append({"ended": ended})
                fault = {"raised": "RuntimeError", "said": ended.reason, "builtin": "RuntimeError"}
                answer = fault if every else {"stop": ended.reason}
            send(examiner, answer)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
