"""What a worker asks of whoever plays groups: episodes of a policy, or searches that are guided by one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from posttrain.engines.protocol import Engine
from posttrain.samplers.live_episode import PartialEpisode
from posttrain.samplers.protocol import GroupRequest
from posttrain.types import Completion, Episode, Sampling, Task


class EpisodeRunner(ABC):
    """Plays groups side by side on one engine."""

    engine: Engine
    steps: int
    """Of the engine, so far."""
    judged_s: float = 0.0
    """Seconds that verifiers, environments and provers have taken, as far as a step waited for them."""
    puts_aside: bool = True
    """Whether a group that is going on can wait while others are played."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a group is going on."""

    @abstractmethod
    def open(self, request: GroupRequest) -> int:
        """The number of a new group; what of it has begun elsewhere goes on from there."""

    @abstractmethod
    def step(self) -> list[tuple[int, list[Episode]]]:
        """The groups that are now complete, with their numbers, after one step of the engine."""

    @abstractmethod
    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Takes answers of the engine."""

    @abstractmethod
    def pause(self) -> None:
        """Takes back from the engine all that it has not answered, as far as it has come."""

    @abstractmethod
    def unpause(self) -> None:
        """Asks the engine to go on with what was taken back."""

    @abstractmethod
    def run_only(self, groups: set[int]) -> None:
        """Goes on with these groups alone, for which all others have been parked."""

    @abstractmethod
    def run_all(self) -> None:
        """Goes on with all others where they were left."""

    @abstractmethod
    def parts(self) -> dict[int, tuple[PartialEpisode, ...]]:
        """How far the episodes of each group are; what is not there starts from the prompt."""

    @abstractmethod
    def close(self) -> None:
        """Ends the processes that it has started."""

    def run(
        self,
        tasks: Sequence[Task],
        size: int,
        sampling: Sampling,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[Episode]]:
        """The groups of all these tasks, in their order; `on_progress` is told how many are complete."""
        asked = [
            GroupRequest(number=n, task=task, size=size, sampling=sampling) for n, task in enumerate(tasks)
        ]
        numbers = [self.open(each) for each in asked]
        complete: dict[int, list[Episode]] = {}
        while self.busy:
            complete.update(self.step())
            if on_progress:
                on_progress(len(complete))
        return [complete[n] for n in numbers]
