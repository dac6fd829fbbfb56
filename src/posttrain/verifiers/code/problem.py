"""Read a programming problem from the fields of a task: what to run, on which cases, and how to compare."""

import ast
import builtins
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args

from posttrain.base.name_hints import did_you_mean
from posttrain.types import Task, UserError
from posttrain.verifiers.code.compare import OutputComparison

Kind = Literal["stdio", "call", "assert"]
_MODULES = {
    "bisect",
    "cmath",
    "collections",
    "copy",
    "datetime",
    "decimal",
    "fractions",
    "functools",
    "heapq",
} | {"itertools", "math", "operator", "random", "re", "statistics", "string", "sys"}
"""Modules that a test may use without importing them, because it was written to run after a program."""
_LEAST_MB = 16
"""Least memory limit: with less, Python does not start."""
_Wrong = Callable[..., UserError]
_FIELDS: dict[str, tuple[str, ...]] = {
    "stdio": ("stdin", "stdout"),
    "call": ("args", "kwargs", "expected"),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A programming problem with its limits."""

    kind: Kind
    language: str
    cases: tuple[dict[str, Any], ...]
    """Cases of the kinds stdio and call."""
    entry_point: str
    prompt: str
    """For assert: code before the submission, and before the test."""
    test: str
    """For assert: assert statements, or a function check(candidate)."""
    time_limit_s: float
    memory_limit_mb: int
    output_limit_bytes: int
    compare: OutputComparison


def read_problem(task: Task, language: str) -> Problem:
    """Read a task's fields. Raises UserError naming the field that is missing or wrong."""
    fields = task.fields

    def wrong(fault: str, fix: str = "") -> UserError:
        return UserError(task.source, f"task {task.id!r}: {fault}", fix)

    def number(name: str, default: float, least: float = 0.01) -> float:
        value = fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
            raise wrong(f"{name} must be a number that is at least {least:g}, not {value!r}")
        return value

    kind = _kind(fields.get("kind") or ("assert" if "test" in fields or "test_list" in fields else ""), wrong)
    entry, test = fields.get("entry_point", ""), ""
    cases: tuple[dict[str, Any], ...] = ()
    if kind == "assert":
        test = _test(fields, wrong)
        entry = entry or called(test)
    else:
        cases = _cases(fields.get("cases"), kind, wrong)
    if kind != "stdio" and not (isinstance(entry, str) and entry):
        raise wrong("entry_point must name the function", did_you_mean("entry_point", fields))
    prompt = fields.get("prompt", "") if kind == "assert" else ""
    try:
        compare = OutputComparison.parsed(fields.get("compare", "lines" if kind == "stdio" else "exact"))
    except ValueError as error:
        raise wrong(str(error)) from None
    return Problem(
        kind=kind,
        language=str(fields.get("language", language)),
        cases=cases,
        entry_point=entry,
        prompt=prompt if isinstance(prompt, str) else "",
        test=test,
        time_limit_s=number("time_limit_s", 2.0),
        memory_limit_mb=int(number("memory_limit_mb", 512, _LEAST_MB)),
        output_limit_bytes=int(number("output_limit_bytes", 1 << 20, 1)),
        compare=compare,
    )


def sources(problem: Problem, code: str) -> list[str]:
    """Return the sources to try; the first that compiles is run.

    In them the submission continues the prompt, or follows it. They are compiled in the box alone.

    >>> task = Task(id="q", messages=(), fields={"prompt": "def f(x):\\n", "entry_point": "f",
    ...     "test": "assert f(1) == 1"})
    >>> print(sources(read_problem(task, "python"), "    return x")[0])
    def f(x):
        return x
    >>> sources(read_problem(task, "python"), "def f(y): return y")[0]
    'def f(x):\\n\\n\\ndef f(y): return y'
    """
    if problem.kind != "assert" or not problem.prompt:
        return [code]
    follows = [f"{problem.prompt}\n\n{code}", f"{_imports(problem.prompt)}\n\n{code}", code]
    return follows if defines(problem, code) else [problem.prompt + code, *follows]


def defines(problem: Problem, code: str) -> bool:
    """Return whether a line of the program seems to define the function that is called."""
    entry = re.escape(problem.entry_point.split(".")[0])
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{entry}\b|^{entry}[ \t]*=(?!=)"
    return bool(entry) and re.search(pattern, code, re.MULTILINE) is not None


def preamble(problem: Problem) -> str:
    """Return the code to run before the test: the prompt if it compiles, otherwise its imports.

    Imports are added of modules that the test uses without importing them.
    """
    return _preamble(problem.prompt, problem.test)


@lru_cache(maxsize=64)  # a test may have a megabyte, and it judges every response to its task
def _preamble(prompt: str, test: str) -> str:
    before = prompt if _tree(prompt) else _imports(prompt)
    names = {node.id for node in ast.walk(ast.parse(f"{before}\n{test}")) if isinstance(node, ast.Name)}
    missing = names & _MODULES - _defined(before) - _defined(test)
    return "\n".join([before, *(f"import {name}" for name in sorted(missing))])


@lru_cache(maxsize=64)
def asserts(test: str) -> int:
    """Return the number of assert statements in a test."""
    return sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(test)))


def _imports(prompt: str) -> str:
    return "\n".join(line for line in prompt.splitlines() if line.startswith(("import ", "from ")))


def _tree(source: str) -> ast.Module | None:
    """Parse a program; None if it is not Python, or too large to parse."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defined(source: str) -> set[str]:
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _kind(kind: object, wrong: _Wrong) -> Kind:
    for choice in get_args(Kind):
        if kind == choice:
            return cast("Kind", choice)
    raise wrong(f"kind is stdio, call or assert, not {kind!r}")


def _test(fields: Mapping[str, Any], wrong: _Wrong) -> str:
    test, setup = fields.get("test", fields.get("test_list")), fields.get("test_setup_code", "")
    if isinstance(test, list) and all(isinstance(line, str) for line in test):
        test = "\n".join(test)
    if not isinstance(test, str) or not test.strip():
        raise wrong("test must hold asserts", did_you_mean("test", fields))
    test = f"{setup}\n{test}" if isinstance(setup, str) and setup.strip() else test
    if (tree := _tree(test)) is None:
        raise wrong("its test is not Python")
    if not any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree)):
        raise wrong("its test asserts nothing")
    return test


def called(test: str) -> str:
    """Return the first name that a test calls and that is neither a builtin nor defined in the test."""
    if (tree := _tree(test)) is None:
        return ""
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    defined = {*vars(builtins), *_defined(test)}
    return next((f.id for f in calls if isinstance(f, ast.Name) and f.id not in defined), "")


def _cases(cases: object, kind: Kind, wrong: _Wrong) -> tuple[dict[str, Any], ...]:
    if not isinstance(cases, list) or not cases:
        raise wrong("cases must be a list with at least one case")
    required = _FIELDS[kind][-1]
    for number, case in enumerate(cases, start=1):
        if not isinstance(case, dict) or required not in case:
            raise wrong(f"case {number} has no {required!r}")
        unknown = sorted(set(case) - set(_FIELDS[kind]))
        if unknown:
            fix = did_you_mean(unknown[0], _FIELDS[kind])
            raise wrong(f"case {number} has a field {unknown[0]!r} that nothing reads", fix)
        if kind == "stdio" and not all(isinstance(v, str) for v in case.values()):
            raise wrong(f"case {number}: stdin and stdout are strings")
        if kind == "call" and not (
            isinstance(case.get("args", []), list) and isinstance(case.get("kwargs", {}), dict)
        ):
            raise wrong(f"case {number}: args is a list and kwargs a table")
    return tuple(cases)
