"""The verifier of programs."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from posttrain.types import RunError, Task, UserError, Verdict
from posttrain.verifiers import sandbox
from posttrain.verifiers.code.grade import FRESH, TEST_LIMITS, graded
from posttrain.verifiers.code.problem import Problem, defines, problem
from posttrain.verifiers.code.runners import PYTHON, RUNNERS, TAGS
from posttrain.verifiers.code.talk import START_S
from posttrain.verifiers.fences import program
from posttrain.verifiers.protocol import Verifier

_BUSY = 20.0
"""On a loaded machine a program may take this many times its limit before it is given up."""


@dataclass(frozen=True, kw_only=True)
class Code(Verifier):
    """1 if the program in the response does what the task's cases ask; otherwise 0, or a share of it.

    The program is the last complete fenced block of the response that defines the function asked for; or
    the last one in the task's language, the last of all, or the whole response. It runs in a box that holds
    neither expected outputs nor anything of the grader; see docs/verifiers/code.md for the three kinds of
    tasks.

    Labels: PASS, WRONG, RUNTIME_ERROR, COMPILE_ERROR, TIMEOUT, MEMORY, OUTPUT_LIMIT, FORBIDDEN (it
    was refused something that only the host may do, or wrote on the grader's channel); without a
    score INFRA_ERROR.
    """

    place: ClassVar[int] = 4
    name: str = "code"
    language: str = PYTHON
    """Of tasks that name none: python, or for stdio tasks bash, c or cpp."""
    level: sandbox.Level = "strict"
    """The least isolation to accept: strict, landlock or rlimits; a host that gives less is refused."""
    partial: bool = False
    """Score the share of cases that pass, and 0 for what is FORBIDDEN; otherwise all or nothing."""
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.language != PYTHON and self.language not in RUNNERS:
            raise ValueError(f"language is one of {', '.join([PYTHON, *RUNNERS])}, not {self.language!r}")
        if self.level not in sandbox.LEVELS:
            raise ValueError(f"level is one of {', '.join(sandbox.LEVELS)}, not {self.level!r}")

    def __call__(self, task: Task, response: str) -> Verdict:
        """PASS where every case passes; the reason names the first that does not."""
        found = self._problem(task)
        code = program(response, *TAGS[found.language], wanted=partial(defines, found))
        if not code.strip():
            return Verdict(score=0.0, label="COMPILE_ERROR", reason="there is no program")
        try:
            outcome = graded(found, code, self.level, every=self.partial)
        except (RunError, OSError) as error:
            return Verdict(score=None, label="INFRA_ERROR", reason=str(error)[:300])
        score = float(outcome.label == "PASS")
        if self.partial and outcome.total and outcome.label != "FORBIDDEN":
            score = outcome.passed / outcome.total
        return Verdict(score=score, label=outcome.label, reason=outcome.reason)

    def golds(self, task: Task) -> list[str]:
        """The task's own solution, if it has one, plain and in a fence."""
        gold = self._gold(task)
        return [] if gold is None else [gold, f"A solution:\n```\n{gold.rstrip()}\n```\n"]

    def fakes(self, task: Task) -> list[str]:
        """Nothing, and a program that does nothing."""
        found = self._problem(task)
        entry = found.entry_point.split(".")[0]
        idle = f"def {entry}(*args, **kwargs):\n    pass\n" if entry else "pass\n"
        return ["", "I do not know.", idle if found.language == PYTHON else ""]

    def check(self, task: Task) -> None:
        """UserError if the fields do not state a problem, or its language is none of ours."""
        self._problem(task)

    def budget_s(self, task: Task) -> float:
        """Far more than the limits add up to, so that a program's slowness is never the host's fault."""
        found = self._problem(task)
        steps = len(found.cases) or TEST_LIMITS + FRESH + 1
        return 120.0 + _BUSY * (START_S + 2 * found.time_limit_s) * (steps + 1)

    def require(self) -> None:
        """UserError if this host does not give the isolation level."""
        sandbox.require(self.level, where=f"verifier.{self.name}.level")

    def _problem(self, task: Task) -> Problem:
        found = problem(task, self.language)
        if found.language == PYTHON:
            return found
        if found.language not in RUNNERS:
            raise UserError(
                task.source,
                f"task {task.id!r} is in {found.language!r}",
                f"languages are {', '.join([PYTHON, *RUNNERS])}",
            )
        if found.kind != "stdio":
            raise UserError(
                task.source,
                f"task {task.id!r} is of kind {found.kind!r} in {found.language}",
                "functions can be called in python only",
            )
        return found

    def _gold(self, task: Task) -> str | None:
        for name in ("canonical_solution", "solution", "gold"):
            gold = task.fields.get(name)
            if isinstance(gold, str) and gold.strip():
                return gold
        return None
