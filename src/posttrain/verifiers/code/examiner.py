"""Run a task's own test in one box, while the submission that it tests runs in another.

The test calls a stand-in for the submission: the arguments go to the grader, which calls the submission in
its box and returns plain data. So the submission cannot reach the values of the test, and its objects
cannot tamper with the test's comparisons.

Each `assert` of the test is counted; with `every` the test continues after one that fails.
"""

import ast
import builtins
import marshal
import os
import sys
from typing import Any

from posttrain.verifiers.code.wire import channel, dump, receive, send


class StopTest(BaseException):
    """Ends the test, because the rest cannot change the verdict."""


class Count:
    """Counts and faults of the test."""

    passed = 0
    total = 0
    first = ""
    """Reason of the first assert that fails."""
    raised = False
    """Whether the program raised in that assert."""
    fatal = ""
    """Reason why the test cannot be used."""
    every = False


NAMES: "dict[str, Any]" = {"__name__": "test"}
"""Global names of the prompt and the test."""


class FromProgram(RuntimeError):  # noqa: N818
    """Stands for an exception of the program whose class the test does not know."""


def candidate(*args: Any, **kwargs: Any) -> Any:
    """Call the submission through the grader."""
    arguments = dump([list(args), kwargs])
    if '["x"' in arguments:
        Count.fatal = "the test passes something other than plain data to the program"
        raise StopTest
    send(f'["call",{arguments}]')
    answer = marshal.loads(receive(channel))
    if "value" in answer:
        return answer["value"]
    if "stop" in answer:
        Count.first = Count.first or answer["stop"]
        raise StopTest
    raise thrown(answer)


def thrown(answer: "dict[str, Any]") -> Exception:
    """Make the program's exception again: of the prompt's class, or of the builtin class it derives from.

    StopIteration is replaced, because with it a program could end the loops of a test.
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
    """Count an assert whose condition has this value."""
    is_true = bool(value)
    Count.total += 1
    Count.passed += is_true
    if not is_true:
        failed(f"line {line} of the test does not hold", False)


def broke_(error: BaseException, line: int) -> None:
    """Count an assert whose condition raised."""
    if isinstance(error, StopTest):
        raise error
    Count.total += 1
    failed(f"line {line} of the test raised {type(error).__name__}", hasattr(error, "from_program"))


def failed(why: str, raised: bool) -> None:
    """Record the first failure; end the test unless `every` is set."""
    if not Count.first:
        Count.first, Count.raised = why, raised
    if not Count.every:
        raise StopTest


class Counted(ast.NodeTransformer):
    """Replaces each assert by calls of `check_` and `broke_`."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Return the counting statement; the condition keeps its scope, so its names mean the same."""
        line = ast.Constant(node.lineno)

        def call(name: str, value: ast.expr) -> "list[ast.stmt]":
            return [ast.Expr(ast.Call(ast.Name(name, ast.Load()), [value, line], []))]

        broken = call("broke_", ast.Name("error_", ast.Load()))
        handler = ast.ExceptHandler(ast.Name("BaseException_", ast.Load()), "error_", broken)
        counted = ast.Try(call("check_", node.test), [handler], [], [])
        return ast.copy_location(counted, node)


def examine(job: "dict[str, Any]") -> None:
    """Run the test. Raises StopTest, or an exception of the test's own code."""
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
    """Report that the box is ready, run the one test that arrives, and send its counts."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)
    send('["here"]')
    job = marshal.loads(receive(channel))
    Count.every = job["every"]
    sys.path += job["path"]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would allocate memory for each processor
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
