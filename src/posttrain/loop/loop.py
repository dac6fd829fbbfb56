"""The parts of a session: its loop (online.py and offline.py implement it), and its callbacks."""

# ruff: noqa: B027  a loop without samplers does nothing for them

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.curriculum.curriculum import Supply
from posttrain.curriculum.mixture import Mixture
from posttrain.curriculum.stream import Stream
from posttrain.learner.learner import Learner, Update
from posttrain.loop.saving import CheckpointWriter
from posttrain.plan.teacher_server import TeacherServer
from posttrain.process.machine import peak_tflops
from posttrain.report.condition import Condition
from posttrain.run.journal import Journal, Progress
from posttrain.run.rundir import RunDir
from posttrain.run.tables import Groups
from posttrain.types import Batch

LoopState = tuple[Mapping[str, Any], Mapping[str, Any]]
"""The progress of a loop, and the groups of its samplers, as a checkpoint stores them."""


class Loop(ABC):
    """The difference between training online and from data, behind one interface for a session.

    The functions for samplers do nothing by default, for loops without samplers.
    """

    learner: Learner
    journal: Journal
    stream: Supply | Stream[Any] | Mixture[Any]
    updates: int
    teacher: TeacherServer | None = None
    """The server with the reference; None: the learner has it."""
    publishes: bool = False
    """True if samplers use the learner's weights."""
    sleeps: bool = False
    """As `engine.sleep`: engines free their memory while the learner trains."""

    @property
    def progress(self) -> Progress:
        return self.journal.progress

    # ------------------------------------------------------------------ verbs

    @abstractmethod
    def sample(self) -> Groups:
        """Begin the next update and return its groups; empty if selection keeps none."""

    @abstractmethod
    def batch(self, groups: Sequence[Any]) -> Batch:
        """Return these groups as rows."""

    def add_teacher(self, batch: Batch) -> Batch:
        """Return the batch with the likeliest tokens of a served teacher, if there is one."""
        if self.teacher is None:
            return batch
        with self.journal.timed("reference"):
            return self.teacher.add(batch)

    @abstractmethod
    def count(self, update: Update | None) -> None:
        """Count the rows of an update; None: an optimiser step on gradients, whose rows are unknown here."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return metrics of the held-out tasks or rows; empty if there are none."""

    def state(self) -> LoopState:
        """Return the state between two updates, with that of samplers."""
        return self._state(), {}

    def before(self) -> LoopState | None:
        """Return the state before an update; None if samplers are ahead and have a state of their own."""
        return self._state(), {}

    def abandon(self) -> None:
        """Undo the update that `sample` began: its groups are not trained on."""
        self.progress.update -= 1

    def line(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an update with its speeds and the bytes that ranks sent."""
        seconds, ranks = self.journal.phases["train"], self.learner.ranks
        flops, self.learner.flops = self.learner.flops, 0.0
        rate = flops / (seconds * ranks.size) / 1e12 if seconds else 0.0
        if rate > 0 and not self.learner.trust:  # not NaN; products of a trust region are not counted
            metrics["speed/train_tflops"] = rate
            if peak := peak_tflops(self.learner.net.policy.device):
                metrics["speed/mfu"] = rate / peak
        return metrics | ranks.sent()

    def _state(self) -> Mapping[str, Any]:
        now = {"progress": asdict(self.progress), "curriculum": self.stream.state()}
        return now | {"microbatch_tokens": self.learner.microbatch_tokens}

    # ------------------------------------------------------------------ for samplers

    def begin(self) -> None:
        """Publish the first weights; samplers then continue the groups of a checkpoint."""

    def feed(self) -> None:
        """Give samplers work for the time that the learner or the disk is busy."""

    def make_room(self) -> None:
        """Let samplers free the memory that training needs."""

    def publish(self) -> None:
        """Publish the learner's weights to samplers."""

    def check_end(self) -> None:
        """Raise RunError if the run has trained on nothing."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a session (built by build.py)."""

    loop: Loop
    run_dir: RunDir
    checkpoint: Callable[[Mapping[str, Any], Mapping[str, Any]], Path]
    """Writes a checkpoint of a LoopState, checkpoint(*state), and returns its directory."""
    writer: CheckpointWriter
    """The writer of `checkpoint`, which may write while training continues."""
    stop_when: Condition | None = None
    patience: int = 0
    """Evaluations in turn without a better one after which the run ends, as `run.patience`."""
    best: str = ""
    """Metric of the best evaluation, as `checkpoint.best`; "" for the usual one."""
    max_seconds: float | None = None
    """Time after which the run ends, as `run.max_time`."""
    save_every: int = 0
    evaluate_every: int = 0
    closing: ExitStack = field(default_factory=ExitStack)
    """Closes all that the session opened."""


@dataclass(frozen=True, kw_only=True)
class Callback:
    """Functions that a session calls during a run; each may be left out.

    A function that returns False stops the run after the update, with a checkpoint, as if it were the last.
    Any object with some of these functions is a callback too.
    """

    on_update: Callable[[Any, Mapping[str, float]], object] | None = None
    """(session, the update's line of metrics)"""
    on_evaluate: Callable[[Any, Mapping[str, float]], object] | None = None
    """(session, metrics of the held-out tasks or rows)"""
    on_save: Callable[[Any, Path], object] | None = None
    """(session, directory of the checkpoint, once it is complete)"""
    on_end: Callable[[Any, BaseException | None], object] | None = None
    """(session, the error that ended it early, or None); its return value is ignored."""
