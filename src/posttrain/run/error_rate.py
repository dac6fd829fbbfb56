"""When so many episodes cannot be judged that a run must stop."""

from collections.abc import Sequence

from posttrain.types import AnyEpisode, RunError

WINDOW = 512
"""Episodes that the rate is of: with far fewer a limit of 0.2 would be met by chance where one in ten fails,
with more a verifier that breaks late would go on for long."""


class ErrorRate:
    """Stops a run whose verifier or environment is broken, and keeps the first cause.

    The rate is that of the latest episodes, so what went well before makes up for nothing.
    """

    def __init__(self, limit: float, least: int = 16, recent: str = "") -> None:
        """least: episodes before which nothing is stopped; recent: the window as it was."""
        self.limit, self.least = limit, least
        self.recent = recent
        """The latest episodes: "x" for one that failed and "." for any other."""
        self.first = ""

    def see(self, episodes: Sequence[AnyEpisode]) -> None:
        """Counts these; RunError when the share of failures among the latest is above the limit."""
        for episode in episodes:
            if episode.verdict.failed:
                self.first = self.first or f"{episode.verdict.label}: {episode.verdict.reason}"
            self.recent = (self.recent + ("x" if episode.verdict.failed else "."))[-WINDOW:]
        seen, failed = len(self.recent), self.recent.count("x")
        if seen >= self.least and failed > self.limit * seen:
            raise RunError(
                "judge",
                f"the verifier or environment failed on {failed} of the last {seen} episodes, more than "
                f"the {self.limit:.0%} that rollout.max_error_rate allows; first cause: {self.first}",
            )
