"""The interface between the loop and its samplers: groups in, finished groups out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, Protocol

from posttrain.rollout.live_episode import PartialEpisode
from posttrain.rollout.snapshots import Snapshot
from posttrain.types import AnyEpisode, Episode, EpisodeSummary, Sampling, Task
from posttrain.verifiers.protocol import TrainerState


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """A group to be played, with everything that its random draws depend on."""

    number: int
    """Position of the group among all that the run has admitted."""
    task: Task
    size: int
    sampling: Sampling
    epoch: int = 0
    state: TrainerState = field(default_factory=TrainerState)
    """Progress of the run, which a verifier of whole groups receives."""
    round: int = 0
    """Number of its batch: the groups of one round were admitted together."""
    begun: tuple[PartialEpisode, ...] = ()
    """Episodes already started; a sample without an entry starts from the prompt."""
    greedy: bool = False
    """Draw one more answer, the likeliest at each token, for the parts greedy/... of the others' verdicts."""

    def __setstate__(self, state: Sequence[Any]) -> None:
        """Restore the fields in their order; a checkpoint from before the last one has fewer."""
        for name, value in zip_longest((f.name for f in fields(self)), state, fillvalue=False):
            object.__setattr__(self, str(name), value)

    @property
    def key(self) -> str:
        """Key of its random draws: with one seed and one version, equal keys draw equal tokens."""
        return f"{self.epoch}:{self.task.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group that has been played and judged, or was lost."""

    number: int
    """`number` of its `GroupRequest`, which places it in line."""
    episodes: Sequence[Episode] = ()
    """Empty if they stay with their sampler."""
    summaries: Sequence[EpisodeSummary] = ()
    """Summaries of the episodes that stay with their sampler, else empty."""
    place: str = ""
    """Name of the Ray actor that stores the episodes; "" if they are here."""
    lost: bool = False
    """Whether its episodes died with their sampler after it was reported; the group is being played again."""

    @property
    def members(self) -> Sequence[AnyEpisode]:
        """The episodes, or their summaries if they are elsewhere."""
        return self.summaries or self.episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds by activity, and messages, of one worker since it started."""

    busy_s: float = 0.0
    """Seconds with a group, an evaluation or weights to work on."""
    judge_s: float = 0.0
    """Part of `busy_s`: waiting for verifiers, environments and provers."""
    take_s: float = 0.0
    """Part of `busy_s`: reading, loading and verifying weights."""
    alive_s: float = 0.0
    bytes: int = 0
    """Bytes of the messages to and from a Ray actor, without weights; 0 for other workers."""

    def since(self, before: "Work") -> dict[str, float]:
        """Return the seconds of each kind since `before`; since its start for a worker that was restarted.

        >>> Work(busy_s=3.0, judge_s=1.0, alive_s=7.0).since(Work(busy_s=1.0, alive_s=2.0))
        {'sample': 1.0, 'judge': 1.0, 'weights': 0.0, 'wait': 3.0}
        """
        start = before if self.alive_s >= before.alive_s and self.busy_s >= before.busy_s else Work()
        busy, judge = self.busy_s - start.busy_s, self.judge_s - start.judge_s
        take, alive = self.take_s - start.take_s, self.alive_s - start.alive_s
        sample = max(busy - judge - take, 0.0)
        return {"sample": sample, "judge": judge, "weights": take, "wait": alive - busy}


class Sampler(Protocol):
    """Play groups, in this process or elsewhere. No method waits beyond its timeout or a stated deadline."""

    @property
    def oldest_version(self) -> int:
        """Least number (see Snapshot) of the weights that will sample groups admitted from now on.

        -1 before the first.
        """
        ...

    @property
    def reading(self) -> set[int]:
        """Numbers of weights that workers may still read, so their memory must not be written to."""
        ...

    @property
    def restarted(self) -> int:
        """Number of times that a worker was restarted."""
        ...

    def admit(self, requests: Sequence[GroupRequest]) -> None:
        """Admit groups as one batch: sampling of the first starts once all have arrived."""
        ...

    def release(self, numbers: Sequence[int]) -> None:
        """Drop the stored episodes of these groups (see `FinishedGroup.place`)."""
        ...

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        """Return the groups that have finished, at the latest after `timeout_s`.

        A sampler in this thread makes one step instead, or none with timeout_s = 0. Raises RunError with the
        first cause if nothing can be played any more.
        """
        ...

    def publish(self, snapshot: Snapshot) -> None:
        """Offer weights, which workers load between rounds or steps; `oldest_version` rises once all have."""
        ...

    def sleep(self) -> None:
        """Free the memory of engines until weights are published (`engine.sleep`); nothing may be playing."""
        ...

    def evaluate(
        self, requests: Sequence[GroupRequest], on_progress: Callable[[int], None]
    ) -> dict[int, list[Episode]]:
        """Play these groups, and no others, with the newest weights; return their episodes by number."""
        ...

    def unfinished(self) -> list[GroupRequest]:
        """Return the groups that are not finished, with the tokens sampled so far."""
        ...

    def work(self) -> list[Work]:
        """Return the work of each worker, as it last reported (once a second)."""
        ...

    def close(self) -> None:
        """End all workers at once, without waiting for running groups."""
        ...
