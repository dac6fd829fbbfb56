"""Rows dealt to ranks, so that each computes about as many tokens; what comes of them goes back.

A step's targets and weights are fixed before its rows are cut into microbatches, so where a row is computed
changes no gradient. The longest parts go first, each to the rank on which it ends soonest: one that already
has rows of the same group computes their prompt anyway. What a loss compares stays together.

    train phase of UniRL#45 with rows as they came: 28.4 s; longest first: 15.3 s
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Float

from posttrain.learner.pack import prompt_groups_of
from posttrain.learner.ranks import Ranks
from posttrain.types import Batch, PerToken


@dataclass(frozen=True)
class Portion:
    """What is dealt in one piece: a row, or the rows of a group."""

    owner: int
    rows: tuple[int, ...]
    """Their places in the owner's batch."""
    group: int
    shared: int
    """Tokens that all rows of the group begin with, and are computed once on a rank."""
    own: int
    """Tokens behind them."""


def portions(batch: Batch, rank: int, *, whole: bool) -> list[Portion]:
    """The pieces of a rank's rows; rows that train nothing are in none."""
    found = []
    for rows, shared, fed in prompt_groups_of(batch):
        parts = [tuple(rows)] if whole else [(i,) for i in rows]
        for part in parts:
            own = sum(fed[i] - shared for i in part)
            found.append(Portion(rank, part, int(batch.group[part[0]]), shared, own))
    return found


def assign(pieces: Sequence[Portion], ranks: int) -> tuple[list[list[Portion]], list[int]]:
    """(the pieces of each rank, the tokens that each computes), the longest dealt first.

    >>> a, b, c = Portion(0, (0,), 0, 5, 9), Portion(0, (1,), 0, 5, 8), Portion(0, (2,), 1, 0, 6)
    >>> given, tokens = assign([a, b, c], 2)
    >>> [[p.rows[0] for p in each] for each in given], tokens
    ([[0], [1, 2]], [14, 19])
    """
    given: list[list[Portion]] = [[] for _ in range(ranks)]
    has: list[set[int]] = [set() for _ in range(ranks)]
    tokens = [0] * ranks
    for own, shared, part in sorted(
        _parts(pieces, ranks), key=lambda part: (-part[0] - part[1], part[2][0].rows)
    ):
        group, owner = part[0].group, part[0].owner
        costs = [(tokens[r] + own + (0 if group in has[r] else shared), r != owner, r) for r in range(ranks)]
        tokens_then, _, rank = min(costs)
        tokens[rank] = tokens_then
        given[rank] += part
        has[rank].add(group)
    return given, tokens


def _parts(pieces: Sequence[Portion], ranks: int) -> Iterator[tuple[int, int, list[Portion]]]:
    """(own tokens, shared tokens, pieces) of each part of a group that goes to one rank.

    A part is at least a quarter of what a rank should have, and longer than the prompt, which each rank that
    has a part computes.
    """
    prompt_groups: dict[tuple[int, int], list[Portion]] = {}
    for piece in pieces:
        prompt_groups.setdefault((piece.owner, piece.group), []).append(piece)
    total = sum(each[0].shared + sum(p.own for p in each) for each in prompt_groups.values())
    for each in prompt_groups.values():
        least, part, own = max(total / (4 * ranks), each[0].shared), list[Portion](), 0
        for piece in each:
            part, own = [*part, piece], own + piece.own
            if own >= least:
                yield own, piece.shared, part
                part, own = [], 0
        if part:
            yield own, each[0].shared, part


@dataclass
class Deal:
    """One dealing of rows: the rows to compute here, and the way back."""

    ranks: Ranks
    batch: Batch
    """The rows to compute here."""
    extra: Mapping[str, PerToken]
    """Columns that went with them."""
    tokens: Sequence[int]
    """That each rank computes; empty where nothing was dealt."""
    _shape: torch.Size = field(default_factory=torch.Size)
    _came: Sequence[int] = ()
    _went: Sequence[Sequence[int]] = ()

    def back(self, columns: Mapping[str, PerToken]) -> dict[str, PerToken]:
        """Columns of the rows computed here, as columns of the rows that this rank gave away; 0 elsewhere."""
        if not self._went:
            return dict(columns)
        parts, start = [], 0
        for count in self._came:
            parts.append(_packed({k: v[start : start + count] for k, v in columns.items()}))
            start += count
        out = {name: torch.zeros(self._shape, dtype=v.dtype) for name, v in columns.items()}
        for rows, part in zip(self._went, self.ranks.exchange(parts), strict=True):
            found = pickle.loads(part)
            for name in out if rows else ():
                given = torch.from_numpy(found[name])
                width = min(given.shape[1], out[name].shape[1])
                out[name][list(rows), :width] = given[:, :width]
        return out


def deal(ranks: Ranks, batch: Batch, extra: Mapping[str, PerToken], *, whole: bool, balance: bool) -> Deal:
    """The rows that train something, dealt over ranks. `whole`: no group of rows is taken apart."""
    if ranks.size == 1 or not balance:
        return Deal(ranks, batch, extra, ())
    told = ranks.gather((portions(batch, ranks.rank, whole=whole), batch.episode is not None), "rows")
    pieces = [piece for part, _ in told for piece in part]
    given, tokens = assign(pieces, ranks.size)
    mine = [sorted(r for p in each if p.owner == ranks.rank for r in p.rows) for each in given]
    if any(numbers for _, numbers in told):  # a rank whose episodes are rows does not number them
        episode = torch.arange(len(batch)) if batch.episode is None else batch.episode
        batch = replace(batch, episode=ranks.rank + ranks.size * episode)
    held = {each.name: getattr(batch, each.name) for each in fields(batch)}
    columns = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    parts = [
        _packed({k: v[rows] for k, v in {**columns, **extra}.items()}, batch.length[rows]) for rows in mine
    ]
    came = [pickle.loads(part) for part in ranks.exchange(parts)]
    counts = [len(each["length"]) for each in came]
    joined = {name: _stacked([torch.from_numpy(each[name]) for each in came]) for name in came[0]}
    own: dict[str, Any] = {name: joined.pop(name) for name in columns}
    here = replace(batch, **own)
    return Deal(ranks, here, joined, tokens, batch.mask.shape, counts, mine)


def imbalance(tokens: Sequence[int]) -> float:
    """The most tokens of a rank over their mean: 1 is even.

    >>> imbalance([30, 10])
    1.5
    """
    return max(tokens) * len(tokens) / max(sum(tokens), 1)


def _packed(columns: Mapping[str, torch.Tensor], length: torch.Tensor | None = None) -> bytes:
    """Columns as bytes, without what is padding in all of their rows."""
    width = int(length.max()) if length is not None and len(length) else None
    cut = {k: v[:, :width] if v.ndim > 1 else v for k, v in columns.items()}
    # Tokens, versions and numbers of groups are far below 2³¹.
    narrow = {k: v.int() if v.dtype == torch.int64 else v for k, v in cut.items()}
    return pickle.dumps({name: value.contiguous().cpu().numpy() for name, value in narrow.items()})


def _stacked(parts: Sequence[torch.Tensor]) -> Float[torch.Tensor, "..."]:
    """Rows below one another, padded to the longest."""
    if parts[0].dtype == torch.int32:
        parts = [part.long() for part in parts]
    if parts[0].ndim == 1:
        return torch.cat(list(parts))
    width = max(1, *(part.shape[1] for part in parts))
    return torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
