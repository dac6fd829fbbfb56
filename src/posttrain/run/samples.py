"""The record of samples: choose the episodes and searches of an update to write, and make their lines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from posttrain.curriculum.stream import dice
from posttrain.learner.learner import Update
from posttrain.run.metrics import is_right
from posttrain.search.record import bounded
from posttrain.types import Episode, PerToken, Trajectory

STATES = 400
"""Most states of a recorded tree, besides those of the solution."""

Columns = Mapping[int, Mapping[str, PerToken]]
"""Columns that an update computed, by the id() of a row and by name: one number per token."""


def draw_groups(groups: Sequence[Sequence[Episode]], tokens: int, key: str) -> list[int]:
    """Return the places of the groups to record, in order: all, or a random share of about `tokens` tokens.

    All groups are equally likely, whatever their length, and at least one is drawn. The draw depends on the
    key and the sizes alone; for one key a larger share contains a smaller one.
    """
    size = sum(len(t.tokens) for group in groups for e in group for t in e.trajectories)
    if not tokens or size <= tokens:
        return list(range(len(groups)))
    draw = dice(key).random
    order = sorted((draw(), place) for place in range(len(groups)))
    return sorted(place for _, place in order[: max(1, len(groups) * tokens // size)])


def columns(rows: Sequence[Trajectory], update: Update) -> Columns:
    """Return the columns that the update computed for each of its rows; `rows` are in their order."""
    batch = update.batch
    optional = {
        "logp": update.logp,
        "entropy": update.entropy,
        "advantage": batch.advantage,
        "logp_ref": batch.logp_ref,
        "value": batch.value,
    }
    computed = {name: column.cpu() for name, column in optional.items() if column is not None}
    of_all = computed.keys() - {"logp", "entropy"}  # the model computes these for rows that it trains on
    return {
        id(row): {name: computed[name][i] for name in computed if trained or name in of_all}
        for i, (row, trained) in enumerate(zip(rows, update.computed.tolist(), strict=False))
    }


def lines(
    update: int,
    groups: Sequence[Sequence[Episode]],
    places: Sequence[int],
    pieces: Callable[[Sequence[int]], list[str]],
    trained: Columns | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the lines of the groups at these places; `pieces` spells out tokens."""
    for number in places:
        for episode, t in ((e, t) for e in groups[number] for t in e.trajectories):
            start, stop = t.prompt_length, len(t.tokens)
            computed = (trained or {}).get(id(t), {})
            line = _line(update, number, episode, t, pieces)
            yield line | {name: _rounded(column[start:stop]) for name, column in computed.items()}


def searches(
    name: str, groups: Sequence[Sequence[Episode]], most: int, right: float
) -> Iterator[dict[str, Any]] | None:
    """Yield a line for each group that is a search; return None without searches.

    All lines have the result and the cost. The states are in `most` lines, drawn at random;
    evaluations, whose names begin alike, draw the same questions each time.
    """
    firsts = [group[0] for group in groups if group and group[0].search]
    draw = dice(name.split("_")[0]).random
    order = sorted((draw(), place) for place in range(len(firsts)))
    detailed = {place for _, place in order[:most]}
    rows = (search_line(e, right, STATES if place in detailed else 0) for place, e in enumerate(firsts))
    return rows if firsts else None


def search_line(episode: Episode, right: float, states: int | None = None) -> dict[str, Any]:
    """Return the line of a search in trees/, with at most `states` of its states, or all."""
    v, tree = episode.verdict, dict(episode.search)
    if states is not None:
        tree = bounded(tree, states) if states else {k: x for k, x in tree.items() if k != "states"}
    return {
        "task": episode.task.id,
        "label": v.label,
        "score": v.score,
        "reason": v.reason,
        "solved": not v.failed and is_right(episode, right),
        "answer": episode.response,
        **tree,
    }


def _line(
    update: int,
    group: int,
    episode: Episode,
    t: Trajectory,
    pieces: Callable[[Sequence[int]], list[str]],
) -> dict[str, Any]:
    v = episode.verdict
    start = t.prompt_length
    return {
        "update": update,
        **({"dataset": episode.task.dataset} if episode.task.dataset else {}),
        "task": episode.task.id,
        "group": group,
        "sample": episode.sample,
        "seat": episode.seat,
        "prompt": "".join(pieces(t.tokens[:start])),
        "answer": episode.task.answer,
        "pieces": pieces(t.tokens[start:]),
        "sampled": t.sampled[start:],
        "logp_gen": _rounded(t.logp_gen[start:]),
        "logp_policy": _rounded(t.logp_policy[start:]),
        "reward": _rounded(t.reward[start:]),
        "version": t.version[start:],
        "score": v.score,
        "label": v.label,
        "reason": v.reason,
        "parts": dict(v.parts),
        "stop": episode.stop,
        "turns": episode.turns,
    }


def _rounded(values: Sequence[float] | torch.Tensor) -> list[float]:
    # The shortest decimal of a double that is a whole number over 1e5 has five places.
    return ((torch.as_tensor(values, dtype=torch.float64) * 1e5).round() / 1e5).tolist()
