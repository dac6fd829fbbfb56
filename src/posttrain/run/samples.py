"""The record of samples: which episodes and searches of an update are written down, and what a line says."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from posttrain.curriculum.stream import dice
from posttrain.learner.learner import Update
from posttrain.run.metrics import is_right
from posttrain.search.record import bounded
from posttrain.types import Episode, PerToken, Trajectory

STATES = 400
"""Most states of a recorded tree, besides those on the way that was found."""

Columns = Mapping[int, Mapping[str, PerToken]]
"""What an update made of rows, by their id(): for each name one number a token."""


def drawn(groups: Sequence[Sequence[Episode]], tokens: int, key: str) -> list[int]:
    """The groups that are recorded, in their order: all, or a random share of about so many tokens.

    Each group is as likely, however long it is, and one is there in any case. Which ones depends on the key
    and on the sizes alone, and of two shares by one key the larger holds the smaller.
    """
    size = sum(len(t.tokens) for group in groups for e in group for t in e.trajectories)
    if not tokens or size <= tokens:
        return list(range(len(groups)))
    draw = dice(key).random
    order = sorted((draw(), place) for place in range(len(groups)))
    return sorted(place for _, place in order[: max(1, len(groups) * tokens // size)])


def columns(rows: Sequence[Trajectory], update: Update) -> Columns:
    """What the update made of each of its rows, in their order."""
    batch = update.batch
    known = {
        "logp": update.logp,
        "entropy": update.entropy,
        "advantage": batch.advantage,
        "logp_ref": batch.logp_ref,
        "value": batch.value,
    }
    held = {name: column.cpu() for name, column in known.items() if column is not None}
    always = held.keys() - {"logp", "entropy"}  # what the model said is known of rows that it computed
    return {
        id(row): {name: held[name][i] for name in held if computed or name in always}
        for i, (row, computed) in enumerate(zip(rows, update.computed.tolist(), strict=False))
    }


def lines(
    update: int,
    groups: Sequence[Sequence[Episode]],
    chosen: Sequence[int],
    pieces: Callable[[Sequence[int]], list[str]],
    trained: Columns | None = None,
) -> Iterator[dict[str, Any]]:
    """The lines of the chosen groups, made as they are read; `pieces` spells out tokens."""
    for number in chosen:
        for episode, t in ((e, t) for e in groups[number] for t in e.trajectories):
            start, stop = t.prompt_length, len(t.tokens)
            found = (trained or {}).get(id(t), {})
            line = _line(update, number, episode, t, pieces)
            yield line | {name: _rounded(column[start:stop]) for name, column in found.items()}


def searches(
    name: str, groups: Sequence[Sequence[Episode]], most: int, right: float
) -> Iterator[dict[str, Any]] | None:
    """A line of each group that is a search, made as it is read; None where none is.

    What it came to and spent is told of all, its states of `most` at random; of evaluations, whose names have
    the same beginning, of the same questions each time.
    """
    firsts = [group[0] for group in groups if group and group[0].search]
    draw = dice(name.split("_")[0]).random
    order = sorted((draw(), place) for place in range(len(firsts)))
    shown = {place for _, place in order[:most]}
    made = (search_line(e, right, STATES if place in shown else 0) for place, e in enumerate(firsts))
    return made if firsts else None


def search_line(episode: Episode, right: float, states: int | None = None) -> dict[str, Any]:
    """A search as a line of trees/, with at most so many of its states, or with all."""
    v, found = episode.verdict, dict(episode.search)
    if states is not None:
        found = bounded(found, states) if states else {k: x for k, x in found.items() if k != "states"}
    return {
        "task": episode.task.id,
        "label": v.label,
        "score": v.score,
        "reason": v.reason,
        "solved": not v.failed and is_right(episode, right),
        "answer": episode.response,
        **found,
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
    # Of a double that is a whole number over 1e5 the shortest decimal has five places.
    return ((torch.as_tensor(values, dtype=torch.float64) * 1e5).round() / 1e5).tolist()
