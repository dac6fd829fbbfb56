"""What the loop asks of whoever plays episodes, wherever that is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from posttrain.samplers.live_episode import PartialEpisode
from posttrain.samplers.snapshots import Snapshot
from posttrain.types import AnyEpisode, Episode, EpisodeSummary, Sampling, Task
from posttrain.verifiers.protocol import TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """One group to be played, and all that its draws depend on."""

    number: int
    """The n-th group that was ever admitted: its place in line."""
    task: Task
    size: int
    sampling: Sampling
    epoch: int = 0
    state: TrainerState = field(default_factory=TrainerState)
    """For a verifier that wants to know how far the run is."""
    round: int = 0
    """Groups of one round were admitted together."""
    begun: tuple[PartialEpisode, ...] = ()
    """Its episodes as far as they have come; what is not here starts from the prompt."""

    @property
    def key(self) -> str:
        """Of its random draws."""
        return f"{self.epoch}:{self.task.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group that has been played and judged, or was lost."""

    number: int
    """Under which it was admitted."""
    episodes: Sequence[Episode] = ()
    """Empty where they are not in this process."""
    summaries: Sequence[EpisodeSummary] = ()
    """Then what is said of them."""
    place: str = ""
    """Of the sampler that keeps the episodes, if one does."""
    lost: bool = False
    """It was lost with its sampler after it had been finished, and is played again."""

    @property
    def members(self) -> Sequence[AnyEpisode]:
        """The episodes, or what is said of them."""
        return self.summaries or self.episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker has done since it began."""

    busy_s: float = 0.0
    """Seconds in which it had something to do."""
    judge_s: float = 0.0
    """Of these, those in which it waited for verifiers, environments and provers."""
    take_s: float = 0.0
    """Of these, those in which it read weights, loaded and proved them."""
    alive_s: float = 0.0
    bytes: int = 0
    """Messages between it and the learner, both ways, where they go over a network; weights aside."""

    def since(self, before: "Work") -> dict[str, float]:
        """The seconds of each kind that came after; of a worker that was started again, all of its own.

        >>> Work(busy_s=3.0, judge_s=1.0, alive_s=7.0).since(Work(busy_s=1.0, alive_s=2.0))
        {'sample': 1.0, 'judge': 1.0, 'weights': 0.0, 'wait': 3.0}
        """
        then = before if self.alive_s >= before.alive_s and self.busy_s >= before.busy_s else Work()
        busy, judge = self.busy_s - then.busy_s, self.judge_s - then.judge_s
        take, alive = self.take_s - then.take_s, self.alive_s - then.alive_s
        sample = max(busy - judge - take, 0.0)
        return {"sample": sample, "judge": judge, "weights": take, "wait": alive - busy}


class Sampler(Protocol):
    """Plays groups somewhere. No function waits for longer than it is told to, or than a stated deadline."""

    @property
    def oldest_version(self) -> int:
        """The version that everything admitted from now on is drawn by, at least; -1 before the first."""
        ...

    @property
    def reading(self) -> set[int]:
        """Versions that it may still have to read: what they lie in is not to be written to."""
        ...

    @property
    def restarted(self) -> int:
        """How many workers had to be started again."""
        ...

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        """Takes these together: none is drawn from before all are in."""
        ...

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        """The groups that are finished. One in this thread takes a step, given time; others are waited for.

        Raises RunError, with the first cause, where nothing can be played any more.
        """
        ...

    def publish(self, snapshot: Snapshot) -> None:
        """Offers weights, which are taken at the next boundary; `oldest_version` says when they are."""
        ...

    def evaluate(
        self, requests: Sequence[GroupRequest], on_progress: Callable[[int], None]
    ) -> dict[int, list[Episode]]:
        """The episodes of these groups by number, drawn apart from all others, by the newest weights."""
        ...

    def unfinished(self) -> list[GroupRequest]:
        """What is still being played, with every token drawn so far."""
        ...

    def work(self) -> list[Work]:
        """What each worker has done, as last heard."""
        ...

    def close(self) -> None:
        """Ends it, whatever it is doing."""
        ...
