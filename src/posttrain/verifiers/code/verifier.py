"""The verifier `code`: run the program in a response on the task's cases."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from posttrain.types import RunError, Task, UserError, Verdict
from posttrain.verifiers import sandbox
from posttrain.verifiers.code.grade import FRESH, TEST_LIMITS, grade_program
from posttrain.verifiers.code.problem import Problem, defines, read_problem
from posttrain.verifiers.code.runners import PYTHON, RUNNERS, TAGS
from posttrain.verifiers.code.talk import START_S
from posttrain.verifiers.fences import program
from posttrain.verifiers.protocol import Verifier

_BUSY = 20.0
"""Factor on the limits in `budget_s`, for a loaded machine."""


@dataclass(frozen=True, kw_only=True)
class Code(Verifier):
    """1 if the program in the response passes all cases of the task; otherwise 0, or the share that passes.

    The program is the last complete fenced block that defines the task's function; otherwise the last block
    in the task's language, the last block, or the whole response. It runs in a box without the expected
    outputs and without the grader. docs/verifiers/code.md describes the three kinds of tasks.

    Labels: PASS, WRONG, RUNTIME_ERROR, COMPILE_ERROR, TIMEOUT, MEMORY, OUTPUT_LIMIT, FORBIDDEN (the
    program tried something that the box denies, or wrote on the grader's channel); without a score
    INFRA_ERROR.
    """

    place: ClassVar[int] = 4
    name: str = "code"
    language: str = PYTHON
    """Language of tasks that do not name one: python, or for stdio tasks bash, c or cpp."""
    level: sandbox.Level = "strict"
    """Isolation of the program: strict, landlock or rlimits. A host without this level is an error."""
    partial: bool = False
    """Score the share of cases that pass, and 0 for FORBIDDEN; otherwise all or nothing."""
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.language != PYTHON and self.language not in RUNNERS:
            raise ValueError(f"language is one of {', '.join([PYTHON, *RUNNERS])}, not {self.language!r}")
        if self.level not in sandbox.LEVELS:
            raise ValueError(f"level is one of {', '.join(sandbox.LEVELS)}, not {self.level!r}")

    def __call__(self, task: Task, response: str) -> Verdict:
        """Run the program; the reason names the first case that fails."""
        problem = self._problem(task)
        code = program(response, *TAGS[problem.language], accepts=partial(defines, problem))
        if not code.strip():
            return Verdict(score=0.0, label="COMPILE_ERROR", reason="there is no program")
        try:
            outcome = grade_program(problem, code, self.level, every=self.partial)
        except (RunError, OSError) as error:
            return Verdict(score=None, label="INFRA_ERROR", reason=str(error)[:300])
        score = float(outcome.label == "PASS")
        if self.partial and outcome.total and outcome.label != "FORBIDDEN":
            score = outcome.passed / outcome.total
        return Verdict(score=score, label=outcome.label, reason=outcome.reason)

    def golds(self, task: Task) -> list[str]:
        """Return the task's own solution, if there is one, plain and fenced."""
        gold = self._gold(task)
        return [] if gold is None else [gold, f"A solution:\n```\n{gold.rstrip()}\n```\n"]

    def fakes(self, task: Task) -> list[str]:
        """Return the empty response, a sentence, and a program that does nothing."""
        problem = self._problem(task)
        entry = problem.entry_point.split(".")[0]
        idle = f"def {entry}(*args, **kwargs):\n    pass\n" if entry else "pass\n"
        return ["", "I do not know.", idle if problem.language == PYTHON else ""]

    def check(self, task: Task) -> None:
        """Raise UserError if the fields do not state a problem, or its language is not supported."""
        self._problem(task)

    def budget_s(self, task: Task) -> float:
        """Return far more than the sum of the limits, so that a slow host ends no program."""
        problem = self._problem(task)
        steps = len(problem.cases) or TEST_LIMITS + FRESH + 1
        return 120.0 + _BUSY * (START_S + 2 * problem.time_limit_s) * (steps + 1)

    def require(self) -> None:
        """Raise UserError if this host does not support the isolation level."""
        sandbox.require(self.level, where=f"verifier.{self.name}.level")

    def _problem(self, task: Task) -> Problem:
        problem = read_problem(task, self.language)
        if problem.language == PYTHON:
            return problem
        if problem.language not in RUNNERS:
            raise UserError(
                task.source,
                f"task {task.id!r} is in {problem.language!r}",
                f"languages are {', '.join([PYTHON, *RUNNERS])}",
            )
        if problem.kind != "stdio":
            raise UserError(
                task.source,
                f"task {task.id!r} is of kind {problem.kind!r} in {problem.language}",
                "functions can be called in python only",
            )
        return problem

    def _gold(self, task: Task) -> str | None:
        for name in ("canonical_solution", "solution", "gold"):
            gold = task.fields.get(name)
            if isinstance(gold, str) and gold.strip():
                return gold
        return None
