"""What a session drives: one of two loops (online.py, offline.py)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from posttrain.learner.learner import Learner, Update
from posttrain.learner.ranks import Ranks
from posttrain.runtime.record.journal import Journal
from posttrain.runtime.record.tables import Groups
from posttrain.types import Batch


class Loop(Protocol):
    """What differs between learning online and from data."""

    learner: Learner
    journal: Journal
    updates: int
    ranks: Ranks

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

    def trained(self, update: Update | None) -> None:
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
