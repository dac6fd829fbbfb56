"""Episodes of earlier updates, to be trained on again: a bounded memory of groups."""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from posttrain.runtime.stream import dice
from posttrain.types import Trajectory

Group = list[Trajectory]


class Replay:
    """The groups of the last `max_lag` updates, from which each update draws some again.

    What is drawn depends on (seed, update) alone. A group may be drawn in several updates, and never twice
    in one.

    >>> row = Trajectory(tokens=[7, 3], sampled=[False, True], logp_gen=[0, -0.1], logp_policy=[0, -0.1],
    ...                  version=[0, 1], reward=[0, 1.0])
    >>> replay = Replay(max_lag=2, seed=0)
    >>> replay.add(1, [[row], [row]])
    >>> len(replay.draw(1, update=2)), len(replay.draw(5, update=3)), len(replay.draw(5, update=4))
    (1, 2, 0)
    """

    def __init__(self, *, max_lag: int, seed: int) -> None:
        self.max_lag, self.seed = max_lag, seed
        self._held: deque[tuple[int, Group]] = deque()

    def add(self, update: int, groups: Sequence[Group]) -> None:
        """Keeps the groups that this update was trained on for the first time."""
        self._held += [(update, group) for group in groups]

    def draw(self, count: int, update: int) -> list[Group]:
        """At most `count` groups of the last max_lag updates before this one, in the order they came."""
        while self._held and update - self._held[0][0] > self.max_lag:
            self._held.popleft()
        if count >= len(self._held):
            return [group for _, group in self._held]
        draw = dice(f"replay/{self.seed}/{update}").random
        # Only random() is the same in every version of Python.
        order = sorted((draw(), place) for place in range(len(self._held)))
        return [self._held[place][1] for place in sorted(place for _, place in order[:count])]

    def state(self) -> list[Any]:
        """What a checkpoint must hold, as JSON."""
        return [[update, [asdict(row) for row in group]] for update, group in self._held]

    def restore(self, state: Sequence[Any]) -> None:
        """Puts back what state() gave."""
        self._held = deque((update, [Trajectory(**row) for row in group]) for update, group in state)
