"""The problems of a suite as a source of tasks: the table [task.suite]."""

from dataclasses import dataclass

from posttrain.data.protocol import Games
from posttrain.evaluation.suites.suite import Suite, read
from posttrain.evaluation.suites.table import suite_of
from posttrain.types import Task, UserError
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class SuiteTasks:
    """The problems of a suite of `posttrain eval`, to evaluate on in [[eval.task]]; none are trained on."""

    name: str
    """gsm8k, math500, humaneval or another suite whose answers are drawn."""
    path: str | None = None
    """A file of its problems, in place of its data set of the Hub."""

    @property
    def suite(self) -> Suite:
        """Return the suite; raise UserError for one that draws no answers, or needs another prompt."""
        try:
            suite = suite_of(self.name)
        except UserError as error:
            raise UserError("task.suite.name", error.problem, error.fix) from None
        if suite.verifier is None or suite.shots or not suite.chat:
            problem = f"{self.name} is asked with examples or by likelihood, as no policy is"
            raise UserError("task.suite.name", problem, f"posttrain eval RUN --suite {self.name}")
        return suite

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return no tasks to train on, and the first `limit` problems."""
        return [], [problem.task for problem in read(self.suite, self.path, None, limit)]

    def scorer(self) -> Verifier | None:
        """Return the judge of the suite."""
        return self.suite.verifier
