"""What runs a task's own test inside a box of its own, apart from the submission it tests.

The test calls the submission by a stand-in: the arguments go to the grader, which has the call made
in the submission's box and hands back plain data. So the test's values never lie where the
submission can reach them, and the submission's objects never meet the test's comparisons.

Each `assert` of the test is counted, and with `every` the test goes on after one that fails.
"""

import ast
import builtins
import marshal
import os
import sys
from typing import Any

from posttrain.verifiers.code.wire import channel, dump, receive, send


class StopTest(BaseException):
    """Ends the test: what is left of it cannot change the verdict."""


class Count:
    """How the test goes."""

    passed = 0
    total = 0
    first = ""
    """Why the first assert that does not hold does not."""
    raised = False
    """Whether it was the program that raised there."""
    fatal = ""
    """Why the test cannot be used."""
    every = False


NAMES: "dict[str, Any]" = {"__name__": "test"}
"""Those of the prompt and the test."""


class FromProgram(RuntimeError):  # noqa: N818
    """What the program raised, if it is no exception that the test could know."""


def candidate(*args: Any, **kwargs: Any) -> Any:
    """The submission, as the test sees it."""
    said = dump([list(args), kwargs])
    if '["x"' in said:
        Count.fatal = "the test passes something other than plain data to the program"
        raise StopTest
    send(f'["call",{said}]')
    answer = marshal.loads(receive(channel))
    if "value" in answer:
        return answer["value"]
    if "stop" in answer:
        Count.first = Count.first or answer["stop"]
        raise StopTest
    raise thrown(answer)


def thrown(answer: "dict[str, Any]") -> Exception:
    """The exception that the program raised: of the prompt's class, or of the builtin one it derives from.

    Not StopIteration, with which a program could end the loops of a test.
    """
    for name in (answer["raised"], answer["builtin"]):
        kind = NAMES.get(name) or getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            continue
        if issubclass(kind, (StopIteration, StopAsyncIteration)):
            break
        try:
            error: Exception = kind(answer["said"])
        except Exception:  # a class that takes other arguments
            error = kind.__new__(kind)
        vars(error)["from_program"] = True
        return error
    error = FromProgram(answer["said"])
    vars(error)["from_program"] = True
    return error


def check_(value: object, line: int) -> None:
    """An assert whose claim has this value."""
    held = bool(value)
    Count.total += 1
    Count.passed += held
    if not held:
        failed(f"line {line} of the test does not hold", False)


def broke_(error: BaseException, line: int) -> None:
    """An assert whose claim raised."""
    if isinstance(error, StopTest):
        raise error
    Count.total += 1
    failed(f"line {line} of the test raised {type(error).__name__}", hasattr(error, "from_program"))


def failed(why: str, raised: bool) -> None:
    """Keeps the first failure, which ends the test unless all of it is wanted."""
    if not Count.first:
        Count.first, Count.raised = why, raised
    if not Count.every:
        raise StopTest


class Counted(ast.NodeTransformer):
    """Puts calls of `check_` and `broke_` in place of each assert."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """The statement that counts; the claim stays where it is, so that its names mean the same."""
        line = ast.Constant(node.lineno)

        def said(name: str, value: ast.expr) -> "list[ast.stmt]":
            return [ast.Expr(ast.Call(ast.Name(name, ast.Load()), [value, line], []))]

        broken = said("broke_", ast.Name("error_", ast.Load()))
        handler = ast.ExceptHandler(ast.Name("BaseException_", ast.Load()), "error_", broken)
        counted = ast.Try(said("check_", node.test), [handler], [], [])
        return ast.copy_location(counted, node)


def examine(job: "dict[str, Any]") -> None:
    """Runs the test; it ends by itself or with what an assert, or its own code, raises."""
    NAMES.update(check_=check_, broke_=broke_, BaseException_=BaseException)
    exec(compile(job["preamble"], "prompt.py", "exec"), NAMES)
    NAMES[job["entry_point"].split(".")[0]] = candidate
    NAMES["candidate"] = candidate
    tree = ast.fix_missing_locations(Counted().visit(ast.parse(job["test"])))
    exec(compile(tree, "test.py", "exec"), NAMES)
    check = NAMES.get("check")
    if callable(check) and "def check" in job["test"]:
        check(candidate)


def main() -> None:
    """Says that it is there, runs the one test that comes, and says how it went."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    send('["here"]')
    job = marshal.loads(receive(channel))
    Count.every = job["every"]
    sys.path += job["path"]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would take memory for each processor
    try:
        examine(job)
    except StopTest:
        pass
    except BaseException as error:
        if not Count.first:
            Count.first = f"the test raised {type(error).__name__}: {str(error)[:200]}"
            Count.raised = hasattr(error, "from_program")
        Count.total += 1
    send(f'["done",{dump([Count.passed, Count.total, Count.first, Count.raised, Count.fatal])}]')
    sys.exit(0)


if __name__ == "__main__":
    main()
