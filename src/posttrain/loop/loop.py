"""What a session is made of, its loop first (online.py, offline.py), and whom it tells."""

# ruff: noqa: B027  a loop without samplers does nothing for them

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.curriculum.curriculum import Supply
from posttrain.curriculum.stream import Stream
from posttrain.learner.learner import Learner, Update
from posttrain.report.condition import Condition
from posttrain.run.journal import Journal, Progress
from posttrain.run.rundir import RunDir
from posttrain.run.tables import Groups
from posttrain.types import Batch

LoopState = tuple[Mapping[str, Any], Mapping[str, Any]]
"""How far a loop is, and what samplers have in hand, as a checkpoint holds them."""


class Loop(ABC):
    """What differs between learning online and from data.

    A session calls all of it; the functions for samplers do nothing where nothing is sampled.
    """

    learner: Learner
    journal: Journal
    stream: Supply | Stream[Any]
    updates: int
    publishes: bool = False
    """Whether samplers draw by the learner's weights."""

    @property
    def progress(self) -> Progress:
        """How far the loop is."""
        return self.journal.progress

    # ------------------------------------------------------------------ verbs

    @abstractmethod
    def sample(self) -> Groups:
        """Begin the next update and return its groups; empty if selection keeps none."""

    @abstractmethod
    def batch(self, groups: Sequence[Any]) -> Batch:
        """Return these groups as rows."""

    @abstractmethod
    def count(self, update: Update | None) -> None:
        """Count what was trained; None: an optimiser step on gradients, whose rows are not known here."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Return metrics of what is held out; empty if nothing is."""

    def state(self) -> LoopState:
        """Return the state between two updates; samplers are asked for theirs."""
        return self._state(), {}

    def before(self) -> LoopState | None:
        """Return the state before an update; None if samplers are ahead and have a state of their own."""
        return self._state(), {}

    def abandon(self) -> None:
        """Take back the update that `sample` began: nothing is trained on its groups."""
        self.progress.update -= 1

    def line(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an update with its speeds and what ranks have sent."""
        return metrics | self.learner.ranks.sent()

    def _state(self) -> Mapping[str, Any]:
        now = {"progress": asdict(self.progress), "curriculum": self.stream.state()}
        return now | {"microbatch_tokens": self.learner.microbatch_tokens}

    # ------------------------------------------------------------------ for samplers

    def begin(self) -> None:
        """Publish the first weights; samplers then continue what a checkpoint holds of theirs."""

    def feed(self) -> None:
        """Give samplers enough to do while the learner or the disk is busy."""

    def publish(self) -> None:
        """Publish the learner's weights to samplers."""

    def check_end(self) -> None:
        """Raise RunError if the whole run has trained nothing."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a session is made of; made by build.py."""

    loop: Loop
    run_dir: RunDir
    checkpoint: Callable[[Mapping[str, Any], Mapping[str, Any]], Path]
    """checkpoint(*state) writes one; where it lies."""
    stop_when: Condition | None = None
    save_every: int = 0
    evaluate_every: int = 0
    closing: ExitStack = field(default_factory=ExitStack)
    """What ends with the session."""


@dataclass(frozen=True, kw_only=True)
class Callback:
    """What a program is told while a run goes on; each function may be left out.

    One that returns False stops the run: it ends after the update, saved, as if it had no more to make. Any
    object with some of these functions is a callback too.
    """

    on_update: Callable[[Any, Mapping[str, float]], object] | None = None
    """(session, the update's line of metrics)"""
    on_evaluate: Callable[[Any, Mapping[str, float]], object] | None = None
    """(session, metrics of what is held out)"""
    on_save: Callable[[Any, Path], object] | None = None
    """(session, the checkpoint)"""
    on_end: Callable[[Any, BaseException | None], object] | None = None
    """(session, what ended it before its time, or None); what it returns is not looked at."""
