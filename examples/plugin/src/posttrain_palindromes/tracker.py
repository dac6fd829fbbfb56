"""track.sinks = ["csv"]: rewards as a table, RUN_DIR/rewards.csv."""

from collections.abc import Mapping
from typing import Any


class Csv:
    """A service that a run's metrics go to; made once a run, in a thread of its own."""

    def __init__(self, run: Any) -> None:
        """Open it: `run` has dir, project, name, config and last_step (-1 for a new run)."""
        self._file = (run.dir / "rewards.csv").open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an update."""
        if "reward/mean" in metrics:
            self._file.write(f"{step},{metrics['reward/mean']}\n")

    def close(self) -> None:
        """Write what is left."""
        self._file.close()
