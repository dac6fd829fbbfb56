"""The error rate: it stops a run in which too many episodes cannot be judged."""

from collections.abc import Sequence

from posttrain.types import AnyEpisode, RunError

WINDOW = 512
"""Number of latest episodes in the rate.

With far fewer, a limit of 0.2 would be exceeded by chance if one in ten fails; with more, a verifier that
fails late would stop the run late.
"""


class ErrorRate:
    """Stop a run whose verifier or environment fails too often; keep the first cause.

    Only the latest episodes count, so earlier successes do not hide later failures.
    """

    def __init__(self, limit: float, least: int = 16, recent: str = "") -> None:
        """least: episodes before a run is stopped; recent: the window of a resumed run."""
        self.limit, self.least = limit, least
        self.recent = recent
        """The latest episodes: "x" for one that failed and "." for any other."""
        self.first = ""

    def see(self, episodes: Sequence[AnyEpisode]) -> None:
        """Count these episodes; raise RunError if failures among the latest exceed the limit."""
        for episode in episodes:
            if episode.verdict.failed:
                self.first = self.first or f"{episode.verdict.label}: {episode.verdict.reason}"
            self.recent = (self.recent + ("x" if episode.verdict.failed else "."))[-WINDOW:]
        count, failed = len(self.recent), self.recent.count("x")
        if count >= self.least and failed > self.limit * count:
            raise RunError(
                "judge",
                f"the verifier or environment failed on {failed} of the last {count} episodes, more than "
                f"the {self.limit:.0%} that rollout.max_error_rate allows; first cause: {self.first}",
            )
