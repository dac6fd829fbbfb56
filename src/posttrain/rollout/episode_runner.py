"""The interface through which a worker plays groups: as rollouts, searches or agents."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from posttrain.engines.protocol import Engine
from posttrain.rollout.live_episode import PartialEpisode
from posttrain.rollout.protocol import GroupRequest
from posttrain.types import Completion, Episode, Sampling, Task


class EpisodeRunner(ABC):
    """Play groups concurrently on one engine."""

    engine: Engine
    steps: int
    """Steps that the engine has made so far."""
    judged_s: float = 0.0
    """Seconds that steps have waited for verifiers, environments and provers."""
    can_pause: bool = True
    """Whether running groups can wait while others are played. If not, evaluations start after they end."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Return whether a group is running."""

    @abstractmethod
    def open(self, request: GroupRequest) -> int:
        """Start a group and return its number; episodes in `request.begun` continue where they stopped."""

    @abstractmethod
    def step(self) -> list[tuple[int, list[Episode]]]:
        """Make one step of the engine and return the groups that are now complete, as (number, episodes)."""

    @abstractmethod
    def receive(self, answers: Sequence[tuple[int, Completion]]) -> None:
        """Take completions that the engine has finished, as (ticket, completion)."""

    @abstractmethod
    def pause(self) -> None:
        """Withdraw all unanswered requests from the engine, with the tokens sampled so far."""

    @abstractmethod
    def unpause(self) -> None:
        """Submit the withdrawn requests again."""

    @abstractmethod
    def run_only(self, groups: set[int]) -> None:
        """Play only these groups until `run_all`. Call `pause` first: it stops the others."""

    @abstractmethod
    def run_all(self) -> None:
        """Continue the groups that `run_only` has left out."""

    @abstractmethod
    def parts(self) -> dict[int, tuple[PartialEpisode, ...]]:
        """Return the state of each group's episodes; an episode not in it starts again from its prompt."""

    @abstractmethod
    def close(self) -> None:
        """End the engine and all processes that were started."""

    def run(
        self,
        tasks: Sequence[Task],
        size: int,
        sampling: Sampling,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[list[Episode]]:
        """Play a group of each task and return them in the order of tasks.

        on_progress: called after each step with the number of complete groups.
        """
        requests = [
            GroupRequest(number=n, task=task, size=size, sampling=sampling) for n, task in enumerate(tasks)
        ]
        numbers = [self.open(request) for request in requests]
        complete: dict[int, list[Episode]] = {}
        while self.busy:
            complete.update(self.step())
            if on_progress:
                on_progress(len(complete))
        return [complete[n] for n in numbers]
