"""The offline loop: rows of a dataset → update, until the last one.

take      consumes the next rows of the epoch's order; waits for nothing
update    one update is `batch_size` rows; the learner cuts it as its memory asks
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.learner.learner import Learner
from posttrain.math import masked
from posttrain.runtime.journal import Journal, stop_requested
from posttrain.runtime.stream import Stream
from posttrain.types import Batch, RunError, Trajectory


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What one update of the offline loop is made of."""

    batch_size: int = 32
    """Conversations in an update."""
    max_length: int = 0
    """Tokens after which a conversation is cut; 0: the model's context."""

    def __post_init__(self) -> None:
        if self.max_length < 0:
            raise ValueError(f"max_length must be 0 (the model's context) or more, not {self.max_length}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {self.batch_size}")


@dataclass
class OfflineRun:
    """The parts that the offline loop drives; made by runtime.local."""

    learner: Learner
    stream: Stream[Trajectory]
    settings: Dataset
    held_out: Sequence[Trajectory]
    journal: Journal
    save: Callable[[], None]
    updates: int
    save_every: int
    evaluate_every: int

    def __post_init__(self) -> None:
        self.stream.taken = self.journal.progress.taken

    def run(self) -> dict[str, float]:
        """Trains to the last update; the metrics of the last evaluation.

        Raises RunError after saving when SIGTERM or Ctrl-C asks it to stop.
        """
        progress, last = self.journal.progress, dict[str, float]()
        with stop_requested() as stopped:
            if progress.update == 0 and self.held_out:
                last = self._evaluate()
                self._log(last)
            while progress.update < self.updates:
                rows = [self.stream.take()[1] for _ in range(self.settings.batch_size)]
                with self.journal.timed("train"):
                    update = self.learner.update(Batch.of(rows, list(range(len(rows)))))
                progress.update, progress.taken = progress.update + 1, self.stream.taken
                trained = int(update.batch.mask.sum())
                progress.tokens += trained
                metrics = update.metrics | {
                    "length/mean": trained / len(rows),
                    "speed/train_tokens": trained / self.journal.phases["train"],
                }
                final = progress.update == self.updates
                due = self.evaluate_every and progress.update % self.evaluate_every == 0
                if self.held_out and (final or due):
                    last = self._evaluate()
                    metrics |= last
                self._log(metrics)
                if final or stopped() or (self.save_every and progress.update % self.save_every == 0):
                    with self.journal.timed("checkpoint"):
                        self.save()
                if stopped() and not final:
                    raise RunError(
                        f"stopped on request after update {progress.update} of {self.updates}; "
                        "all of it is saved, go on with --resume"
                    )
        return last

    def _evaluate(self) -> dict[str, float]:
        """Mean negative log-likelihood of the held-out rows' trained tokens, in nats, and its exponential."""
        with self.journal.timed("eval"):
            batch = Batch.of(list(self.held_out), list(range(len(self.held_out))))
            loss = -float(masked.mean(self.learner.score(batch).logp, batch.mask))
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    def _log(self, metrics: dict[str, float]) -> None:
        self.journal.log(self.learner.step_count, self.learner.update_count, metrics)
