"""Which groups an update learns from: functions from what is known of a finished group to keep or drop."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from posttrain.base.usercode import load_edited
from posttrain.math.choice import misfit
from posttrain.recipe.settings import SELECT
from posttrain.types import AnyEpisode, Episode, UserError, worth

Select = Callable[[Sequence[AnyEpisode]], bool]
P = TypeVar("P", Episode, AnyEpisode)


def every(group: Sequence[AnyEpisode]) -> bool:
    """Keeps every group that has an episode with a verdict."""
    return any(not e.verdict.failed for e in group)


def varied(group: Sequence[AnyEpisode]) -> bool:
    """Keeps a group whose rewards differ: one whose rewards are equal has no advantage to learn from.

    Source: dynamic sampling, DAPO, arXiv:2503.14476, section 3.2.
    """
    return len({e.reward for e in group if not e.verdict.failed}) > 1


def accepted(group: Sequence[AnyEpisode], least: float = 1.0) -> bool:
    """Keeps a group with an answer whose reward is at least this: one without has nothing to imitate."""
    return any(e.reward >= worth([least]) for e in group if not e.verdict.failed)


def by_seat(group: Sequence[P]) -> list[list[P]]:
    """The seats of a group of games, each a group of its own; all others are one.

    Two seats of a game are two tasks: what one of them earns says nothing of what the other could have. A
    group without episodes, which another rank has, is one without episodes.
    """
    seats = sorted({each.seat for each in group})
    return [[each for each in group if each.seat == seat] for seat in seats] or [[]]


SELECTIONS: Mapping[str, Select] = dict(zip(SELECT, (every, varied, accepted), strict=True))

WHY_NOT: Mapping[str, str] = {
    "all": "every group is kept that has enough verdicts",
    "varied": "every group's rewards were equal",
    "accepted": "no answer was good enough to be imitated",
}
"""Why a run may be left without a group, for the message that ends it."""


def selection(name: str, accept: float) -> Select:
    """The selection of this name, or "file.py:function"; `accept` is the least reward worth imitating.

    Raises UserError for a function that cannot be had, or that cannot be called with a group.
    """
    if ":" in name:
        found: Select = load_edited(name, "rollout.select")
        if wrong := misfit(found, every):
            raise UserError("rollout.select", f"{name} selects nothing: {wrong}")
        return found
    return partial(accepted, least=accept) if name == "accepted" else SELECTIONS[name]
