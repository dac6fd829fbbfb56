"""What a session is made of, its loop first (online.py, offline.py), and whom it tells."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from posttrain.learner.learner import Learner, Update
from posttrain.report.condition import Condition
from posttrain.runtime.record.journal import Journal
from posttrain.runtime.record.rundir import RunDir
from posttrain.runtime.record.tables import Groups
from posttrain.types import Batch


class Loop(Protocol):
    """What differs between learning online and from data."""

    learner: Learner
    journal: Journal
    updates: int

    @property
    def held_out(self) -> Sequence[Any]:
        """What is evaluated on."""
        ...

    @property
    def publishes(self) -> bool:
        """Whether somebody samples by the learner's weights."""
        ...

    def begin(self) -> None:
        """Before anything is sampled."""
        ...

    def sample(self) -> Groups:
        """The groups of the next update, which has then begun; empty if selection keeps none."""
        ...

    def abandon(self) -> None:
        """Nothing is trained on what was sampled last."""
        ...

    def batch(self, groups: Sequence[Any]) -> Batch:
        """These groups as rows."""
        ...

    def feed(self) -> None:
        """What is done before the learner is busy."""
        ...

    def count(self, update: Update | None) -> None:
        """What is counted after it; None: the learner's step was not an update of rows known here."""
        ...

    def publish(self) -> None:
        """Weights to whoever samples."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Metrics of what is held out."""
        ...

    def flight(self) -> Mapping[str, Any]:
        """What is under way, for a checkpoint."""
        ...

    def line(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of an update with those of how fast it was."""
        ...

    def check_end(self) -> None:
        """RunError if the whole run has trained nothing."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a session is made of; made by build.py."""

    loop: Loop
    run_dir: RunDir
    state: Callable[[], Mapping[str, Any]]
    """How far the loop is, as a checkpoint holds it."""
    checkpoint: Callable[[Mapping[str, Any], Mapping[str, Any]], Path]
    """checkpoint(state, what is under way) writes one; where it lies."""
    ahead: bool = False
    """Whether something is under way between updates too."""
    stop_when: Condition | None = None
    save_every: int = 0
    evaluate_every: int = 0
    closing: ExitStack = field(default_factory=ExitStack)
    """What ends with the session."""

    def before(self) -> Mapping[str, Any] | None:
        """The state, if it is all that the next update hangs on."""
        return None if self.ahead else self.state()


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
