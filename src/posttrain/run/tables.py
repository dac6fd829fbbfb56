"""Lists for programs: the groups of an update and the lines of metrics of a run, with a few properties."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, SupportsIndex, overload

from posttrain.base.name_hints import did_you_mean
from posttrain.base.verdict import LARGEST, number
from posttrain.types import Episode, Trajectory, Verdict


class Metrics(list[dict[str, Any]]):
    """The lines of metrics.jsonl, in order; indexed by a metric's name, its values in the lines that have it.

    >>> metrics = Metrics([{"update": 1, "reward/mean": 0.5}, {"update": 2, "reward/mean": 1.0}])
    >>> metrics["reward/mean"], metrics[0]["update"], metrics.last["reward/mean"]
    ([0.5, 1.0], 1, 1.0)
    """

    @overload  # type: ignore[override]
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> "Metrics": ...
    @overload
    def __getitem__(self, key: str) -> list[Any]: ...
    def __getitem__(self, key: int | slice | str) -> Any:
        """Return a line, some lines, or the values of a metric; raise KeyError if no line has it."""
        if isinstance(key, slice):
            return Metrics(super().__getitem__(key))
        if not isinstance(key, str):
            return super().__getitem__(key)
        if not any(key in line for line in self):
            near = did_you_mean(key, self.last) or f"there are {', '.join(self.last)}"
            raise KeyError(f"no line has {key!r}; {near}")
        return [line[key] for line in self if key in line]

    def __repr__(self) -> str:
        return f"<Metrics of {len(self)} lines; .last: {self.last}>"

    @property
    def last(self) -> dict[str, Any]:
        """The newest value of each metric."""
        return {key: value for line in self for key, value in line.items()}

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame of the lines; raise ImportError without pandas."""
        import pandas  # type: ignore[import-untyped]  # nothing else here needs it

        return pandas.DataFrame(list(self))


class Groups(list[Sequence[Any]]):
    """The groups of an update: the episodes of each task, or the rows (Trajectory) of each record.

    A list of lists: a program may remove groups and episodes, and add others.
    """

    @overload
    def __getitem__(self, key: SupportsIndex) -> Sequence[Any]: ...
    @overload
    def __getitem__(self, key: slice) -> "Groups": ...
    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        result = super().__getitem__(key)
        return Groups(result) if isinstance(key, slice) else result

    def __repr__(self) -> str:
        worth = f"; rewards {self.rewards}" if self else ""
        return f"<Groups of {', '.join(str(len(group)) for group in self) or 'nothing'}{worth}>"

    @property
    def rewards(self) -> list[list[float]]:
        """The total reward of each episode or row."""
        return [[_row(member).total_reward for member in group] for group in self]

    def reward(self, worth: Callable[[Episode], float]) -> "Groups":
        """Return the same episodes with the reward worth(episode), paid with the last token of the policy.

        Raises TypeError for a reward that is not a number, and ValueError for one that is not finite.
        """
        if not callable(worth):
            raise TypeError(
                "reward() takes a function of an episode, as lambda episode: len(episode.response)"
            )
        return Groups(
            [_with_score(e, _checked_reward(worth(e))) for e in group] for group in self._episodes()
        )

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row per episode: its group, task, response, reward, label ..."""
        import pandas

        keys = ("sample", "response", "reward", "length", "stop", "turns")
        return pandas.DataFrame(
            {"group": n, "task": e.task.id, "label": e.verdict.label} | {key: getattr(e, key) for key in keys}
            for n, group in enumerate(self._episodes())
            for e in group
        )

    def _episodes(self) -> "Groups":
        if any(not isinstance(member, Episode) for group in self for member in group):
            raise TypeError("these are rows of data, not episodes: they have no verdict and no response")
        return self


def check_groups(groups: object) -> None:
    """Raise TypeError for a value that is not groups as Session.sample returns them."""
    place, members = "", [groups]
    if isinstance(groups, Sequence) and not isinstance(groups, str):
        place, members = " in a list", [group for group in groups if not isinstance(group, Sequence)]
    if members:
        kind = type(members[0]).__name__
        raise TypeError(f"groups are lists of lists of episodes, or a Batch, and not a {kind}{place}")


def _checked_reward(worth: Any) -> float:
    reward = number(worth)
    if reward is None:
        problem = f"a reward is a number of at most {LARGEST:g}, and the function gave {worth!r:.60}"
        raise ValueError(problem) if isinstance(worth, Real) else TypeError(problem)
    return reward


def _row(member: Episode | Trajectory) -> Trajectory:
    return member.trajectory if isinstance(member, Episode) else member


def _with_score(episode: Episode, score: float) -> Episode:
    if episode.verdict.failed:  # it may be incomplete
        return episode
    first, *others = (_with_reward(t, score) for t in episode.trajectories)
    verdict = Verdict(score=score, label="scored")
    return replace(episode, trajectory=first, branches=tuple(others), verdict=verdict)


def _with_reward(t: Trajectory, score: float) -> Trajectory:
    last = max((place for place, sampled in enumerate(t.sampled) if sampled), default=None)
    return replace(t, reward=[score if place == last else 0.0 for place in range(len(t.tokens))])
