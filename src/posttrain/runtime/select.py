"""Which groups an update learns from: functions from a finished group to keep or drop."""

from collections.abc import Callable, Mapping, Sequence

from posttrain.types import Episode

Select = Callable[[Sequence[Episode]], bool]


def every(group: Sequence[Episode]) -> bool:
    """Keeps every group that has an episode with a verdict."""
    return any(not e.verdict.failed for e in group)


def varied(group: Sequence[Episode]) -> bool:
    """Keeps a group whose rewards differ: one whose rewards are equal has no advantage to learn from.

    Source: dynamic sampling, DAPO, arXiv:2503.14476, section 3.2.
    """
    return len({e.trajectory.total_reward for e in group if not e.verdict.failed}) > 1


SELECT: Mapping[str, Select] = {"all": every, "varied": varied}
