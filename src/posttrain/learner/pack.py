"""Rows laid end to end, without padding and without computing a shared prompt twice.

Rows of one group begin with the same prompt. A *family* is that prompt, once, followed by the
rest of each row; a token of a rest sees the prompt and what comes before it in its own rest, at
the positions it would have alone. So the model's work is the number of *different* tokens, and
every row's result is what it would be by itself. This is the only place that knows that the
distribution of token t is read off the token before it.

    row 0: P P P a b        packed   P P P a d        b and e are only predicted,
    row 1: P P P d e        position 0 1 2 3 3        never fed
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from transformers import PreTrainedModel

from posttrain.attention import Heads, hidden_states, masked_attention
from posttrain.types import Batch

WHOLE_FAMILY = 512
"""Up to this many tokens a family is attended to in one call under a mask; longer ones branch by branch."""


@dataclass(frozen=True)
class Family:
    """Where a shared prompt and its branches lie in the packed sequence."""

    start: int
    prefix: int
    """Tokens of the shared prompt."""
    branches: tuple[int, ...]
    """Tokens of each rest, in order; together with the prefix they fill [start, stop)."""

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.prefix + sum(self.branches)


@dataclass
class Pack:
    """Some rows of a batch as one sequence, with the layout of its attention.

    >>> from posttrain.types import Batch, Trajectory
    >>> def row(*tokens):
    ...     n = len(tokens)
    ...     return Trajectory(tokens=list(tokens), sampled=[i >= 3 for i in range(n)], logp_gen=[0.0] * n,
    ...                       logp_policy=[0.0] * n, version=[0] * n, reward=[0.0] * n)
    >>> p = pack(Batch.of([row(1, 1, 1, 5, 6), row(1, 1, 1, 7, 8)], group=[0, 0]))
    >>> p.tokens, p.positions
    (tensor([1, 1, 1, 5, 7]), tensor([0, 1, 2, 3, 3]))
    >>> p.source, p.target
    (tensor([2, 3, 2, 4]), tensor([5, 6, 7, 8]))
    """

    tokens: Int[torch.Tensor, "N"]
    positions: Int[torch.Tensor, "N"]
    families: list[Family]
    source: Int[torch.Tensor, "M"]
    """For each trained token, the packed index whose hidden state predicts it."""
    target: Int[torch.Tensor, "M"]
    row: Int[torch.Tensor, "M"]
    column: Int[torch.Tensor, "M"]
    _masks: dict[tuple[int, int | None], torch.Tensor | None] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        query: Heads,
        key: Heads,
        value: Heads,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Heads:
        """Attention within each family (see attention.Layout)."""
        parts = []
        for number, family in enumerate(self.families):
            span = slice(family.start, family.stop)
            q, k, v = query[:, :, span], key[:, :, span], value[:, :, span]
            T = family.stop - family.start
            if T <= WHOLE_FAMILY or not family.branches:
                mask = self._mask(number, window, q.device)
                parts.append(
                    masked_attention(q, k, v, mask, scale=scale, softcap=softcap, causal=mask is None)
                )
                continue
            parts.extend(_by_branch(family, q, k, v, scale=scale, window=window, softcap=softcap))
        return torch.cat(parts, dim=2)

    def _mask(self, number: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Who sees whom in a family; None for plainly causal. The same for every layer, so made once."""
        if (number, window) not in self._masks:
            family = self.families[number]
            position = self.positions[family.start : family.stop]
            plain = not family.branches and (window is None or window >= len(position))
            self._masks[number, window] = None if plain else _family_mask(family, position, window).to(device)
        return self._masks[number, window]


def _family_mask(family: Family, position: torch.Tensor, window: int | None) -> torch.Tensor:
    branch = torch.repeat_interleave(
        torch.arange(len(family.branches) + 1), torch.tensor([family.prefix, *family.branches])
    ).to(position.device)
    same = (branch[:, None] == branch[None, :]) | (branch[None, :] == 0)
    ago = position[:, None] - position[None, :]
    return same & (ago >= 0) & (ago < (window or len(position) + 1))


def _by_branch(
    family: Family,
    query: Heads,
    key: Heads,
    value: Heads,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> list[Heads]:
    """Attention of the prefix and of each branch (over prefix and branch), in order."""
    P, device = family.prefix, query.device
    ends = torch.tensor([P, *family.branches]).cumsum(0).tolist()
    out = []
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        if start == stop:
            continue
        if start == 0:
            k, v = key[:, :, :stop], value[:, :, :stop]
        else:
            k, v = (torch.cat([x[:, :, :P], x[:, :, start:stop]], dim=2) for x in (key, value))
        n, total = stop - start, k.shape[2]
        plain = n == total and (window is None or window >= total)
        ago = torch.arange(total - n, total, device=device)[:, None] - torch.arange(total, device=device)
        mask = None if plain else (ago >= 0) & (ago < (window or total + 1))
        q = query[:, :, start:stop]
        out.append(masked_attention(q, k, v, mask, scale=scale, softcap=softcap, causal=plain))
    return out


def pack(batch: Batch) -> Pack:
    """The trained rows of the batch, packed; rows that train nothing take no part.

    Raises ValueError if no row has a trained token after its first position.
    """
    tokens: list[int] = []
    positions: list[int] = []
    families: list[Family] = []
    source: list[int] = []
    where: list[tuple[int, int]] = []
    for rows in _families(batch):
        inputs = {i: batch.tokens[i, : _fed(batch, i)].tolist() for i in rows}
        P = _shared(batch, rows, inputs)
        start = len(tokens)
        tokens += inputs[rows[0]][:P]
        positions += range(P)
        branches = []
        for i in rows:
            rest = inputs[i][P:]
            first = len(tokens) - P
            tokens += rest
            positions += range(P, P + len(rest))
            branches.append(len(rest))
            for t in batch.mask[i].nonzero().flatten().tolist():
                if t == 0:
                    continue  # nothing comes before the first token to predict it
                source.append(start + t - 1 if t - 1 < P else first + t - 1)
                where.append((i, t))
        # A row by itself is a prompt with one branch, and plainly causal.
        alone = len(rows) == 1
        families.append(Family(start, P + branches[0], ()) if alone else Family(start, P, tuple(branches)))
    if not where:
        raise ValueError("nothing to train on: no row has a trained token with a token before it")
    row, column = torch.tensor(where, dtype=torch.long).T
    return Pack(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        families=families,
        source=torch.tensor(source),
        target=batch.tokens[row, column],
        row=row,
        column=column,
    )


def trained_states(model: PreTrainedModel, packed: Pack) -> Float[torch.Tensor, "M D"]:
    """The hidden states that predict the trained tokens of a pack."""
    device = next(model.parameters()).device
    hidden = hidden_states(model, packed.tokens[None].to(device), packed.positions[None].to(device), packed)
    return hidden[0, packed.source.to(device)]


def _fed(batch: Batch, i: int) -> int:
    """Tokens of row i that the model must see: all before its last trained one."""
    return int(batch.mask[i].nonzero().max())


def _families(batch: Batch) -> list[list[int]]:
    """Rows with something to train on, gathered by group, in order of first appearance."""
    found: dict[int, list[int]] = {}
    for i, trains in enumerate((batch.mask[:, 1:]).any(-1).tolist()):
        if trains:
            found.setdefault(int(batch.group[i]), []).append(i)
    return list(found.values())


def _shared(batch: Batch, rows: Sequence[int], inputs: dict[int, list[int]]) -> int:
    """Length of the rows' common beginning, ending before anything sampled."""
    limit = min(min(len(inputs[i]), int(batch.mask[i].nonzero().min())) for i in rows)
    first = inputs[rows[0]]
    for t in range(limit):
        if any(inputs[i][t] != first[t] for i in rows):
            return t
    return limit


def microbatches(batch: Batch, budget: int, *, whole: bool = False) -> list[list[int]]:
    """Rows cut into microbatches of at most `budget` packed tokens each, in order, by family.

    A family larger than the budget is split, and its prompt is then computed once per part; with `whole`
    no family is. A single row, or a whole family, larger than the budget is a microbatch by itself.

    >>> from posttrain.types import Batch, Trajectory
    >>> def row(n):
    ...     return Trajectory(tokens=[1] * n, sampled=[i >= 3 for i in range(n)], logp_gen=[0.0] * n,
    ...                       logp_policy=[0.0] * n, version=[0] * n, reward=[0.0] * n)
    >>> microbatches(Batch.of([row(5), row(5), row(5)], group=[0, 0, 1]), budget=6)
    [[0, 1], [2]]
    """
    out: list[list[int]] = []
    current: list[int] = []
    used = 0
    for rows in _families(batch):
        inputs = {i: batch.tokens[i, : _fed(batch, i)].tolist() for i in rows}
        P = _shared(batch, rows, inputs)
        opened = False
        if whole:
            cost = P + sum(len(inputs[i]) - P for i in rows)
            if current and used + cost > budget:
                out.append(current)
                current, used = [], 0
            current += rows
            used += cost
            continue
        for i in rows:
            cost = len(inputs[i]) - (P if opened else 0)
            if current and used + cost > budget:
                out.append(current)
                current, used, cost = [], 0, len(inputs[i])
            current.append(i)
            used += cost
            opened = True
    return [*out, current] if current else out
