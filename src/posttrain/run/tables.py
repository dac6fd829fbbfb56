"""What a program looks at: the groups of an update and the lines of a run, as lists that know more."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, SupportsIndex, overload

from posttrain.base.name_hints import did_you_mean
from posttrain.base.verdict import LARGEST, number
from posttrain.types import Episode, Trajectory, Verdict


class Metrics(list[dict[str, Any]]):
    """The lines of metrics.jsonl, in their order; by a metric's name its values, where a line has one.

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
        """A line, some lines, or the values of a metric; KeyError for one that no line has."""
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
        """A pandas.DataFrame of the lines; ImportError where pandas is not installed."""
        import pandas  # type: ignore[import-untyped]  # nothing else here needs it

        return pandas.DataFrame(list(self))


class Groups(list[Sequence[Any]]):
    """What an update learns from: of each task its episodes, or of each record its rows (Trajectory).

    A list of lists: groups and episodes may be left out, and put in from elsewhere.
    """

    @overload
    def __getitem__(self, key: SupportsIndex) -> Sequence[Any]: ...
    @overload
    def __getitem__(self, key: slice) -> "Groups": ...
    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        """A group, or some groups."""
        found = super().__getitem__(key)
        return Groups(found) if isinstance(key, slice) else found

    def __repr__(self) -> str:
        worth = f"; rewards {self.rewards}" if self else ""
        return f"<Groups of {', '.join(str(len(group)) for group in self) or 'nothing'}{worth}>"

    @property
    def rewards(self) -> list[list[float]]:
        """What each episode or row is worth: Σ of its rewards."""
        return [[_row(each).total_reward for each in group] for group in self]

    def reward(self, worth: Callable[[Episode], float]) -> "Groups":
        """The same episodes with other rewards: worth(episode), paid with the last token of the policy's.

        TypeError for what is no number, ValueError for what is not finite.
        """
        if not callable(worth):
            raise TypeError(
                "reward() takes a function of an episode, as lambda episode: len(episode.response)"
            )
        return Groups([_paid(each, _number(worth(each))) for each in group] for group in self._episodes())

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with a row an episode: its group, task, response, reward, label and so on."""
        import pandas

        keys = ("sample", "response", "reward", "length", "stop", "turns")
        return pandas.DataFrame(
            {"group": n, "task": e.task.id, "label": e.verdict.label} | {key: getattr(e, key) for key in keys}
            for n, group in enumerate(self._episodes())
            for e in group
        )

    def _episodes(self) -> "Groups":
        if any(not isinstance(each, Episode) for group in self for each in group):
            raise TypeError("these are rows of data, not episodes: they have no verdict and no response")
        return self


def check_groups(given: object) -> None:
    """TypeError for what are no groups, as Session.sample gives them."""
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    strange = [each for each in given if not isinstance(each, Sequence)] if listed else [given]  # type: ignore[attr-defined]
    if strange:
        what = f"groups are lists of lists of episodes, or a Batch, and not a {type(strange[0]).__name__}"
        raise TypeError(f"{what}{' in a list' if listed else ''}")


def _number(worth: Any) -> float:
    found = number(worth)
    if found is None:
        what = f"a reward is a number of at most {LARGEST:g}, and the function gave {worth!r:.60}"
        raise ValueError(what) if isinstance(worth, Real) else TypeError(what)
    return found


def _row(each: Episode | Trajectory) -> Trajectory:
    return each.trajectory if isinstance(each, Episode) else each


def _paid(episode: Episode, score: float) -> Episode:
    if episode.verdict.failed:  # it may have been broken off in the middle
        return episode
    first, *others = (_paid_row(t, score) for t in episode.trajectories)
    verdict = Verdict(score=score, label="scored")
    return replace(episode, trajectory=first, branches=tuple(others), verdict=verdict)


def _paid_row(t: Trajectory, score: float) -> Trajectory:
    last = max((place for place, sampled in enumerate(t.sampled) if sampled), default=None)
    rewards: Mapping[int | None, float] = {last: score}
    return replace(t, reward=[rewards.get(place, 0.0) for place in range(len(t.tokens))])
