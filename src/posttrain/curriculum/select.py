"""Selection: which finished groups an update trains on, as functions from a group to keep or drop."""

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
    """Keep each group that has an episode with a verdict."""
    return any(not e.verdict.failed for e in group)


def varied(group: Sequence[AnyEpisode]) -> bool:
    """Keep a group whose rewards differ: if all are equal, advantages are 0.

    Source: dynamic sampling, DAPO, arXiv:2503.14476, section 3.2.
    """
    return len({e.reward for e in group if not e.verdict.failed}) > 1


def accepted(group: Sequence[AnyEpisode], least: float = 1.0) -> bool:
    """Keep a group with an answer whose reward is at least this, which can be imitated."""
    return any(e.reward >= worth([least]) for e in group if not e.verdict.failed)


def by_seat(group: Sequence[P]) -> list[list[P]]:
    """Split a group of games into its seats, each a group; other groups stay one.

    Two seats of a game are two tasks: the reward of one says nothing about the other. A group without
    episodes, whose episodes are on another rank, becomes one group without episodes.
    """
    seats = sorted({episode.seat for episode in group})
    return [[episode for episode in group if episode.seat == seat] for seat in seats] or [[]]


SELECTIONS: Mapping[str, Select] = dict(zip(SELECT, (every, varied, accepted), strict=True))

WHY_NOT: Mapping[str, str] = {
    "all": "every group is kept that has enough verdicts",
    "varied": "every group's rewards were equal",
    "accepted": "no answer was good enough to be imitated",
}
"""Reasons why a run kept no group, for the message that ends it."""


def selection(name: str, accept: float) -> Select:
    """Return the selection of this name or "file.py:function"; `accept`: least reward worth imitating.

    Raises UserError for a function that cannot be loaded, or that cannot be called with a group.
    """
    if ":" in name:
        select: Select = load_edited(name, "rollout.select")
        if problem := misfit(select, every):
            raise UserError("rollout.select", f"{name} selects nothing: {problem}")
        return select
    return partial(accepted, least=accept) if name == "accepted" else SELECTIONS[name]
