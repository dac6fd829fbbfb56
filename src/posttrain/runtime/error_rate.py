"""When so many episodes cannot be judged that a run must stop."""

from collections.abc import Sequence

from posttrain.types import Episode, RunError


class ErrorRate:
    """Stops a run whose verifier or environment is broken, and keeps the first cause."""

    def __init__(self, limit: float, least: int = 16) -> None:
        self.limit, self.least = limit, least
        self.judged = self.failed = 0
        self.first = ""

    def see(self, episodes: Sequence[Episode]) -> None:
        """Counts these; RunError when the share of failures of all seen so far is above the limit."""
        for episode in episodes:
            self.judged += 1
            if episode.verdict.failed:
                self.failed += 1
                self.first = self.first or f"{episode.verdict.label}: {episode.verdict.reason}"
        if self.judged >= self.least and self.failed > self.limit * self.judged:
            raise RunError(
                f"the verifier or environment failed on {self.failed} of {self.judged} episodes, more than "
                f"the {self.limit:.0%} that rollout.max_error_rate allows; first cause: {self.first}"
            )
