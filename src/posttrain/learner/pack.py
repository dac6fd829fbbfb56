"""Rows laid end to end, without padding between them and without computing a shared beginning twice.

Rows of one group begin with the same prompt. A *family* is that prompt, once, followed by the
rest of each row; a token of a rest sees the prompt and what comes before it in its own rest, at
the positions it would have alone. Prompts of different groups often begin alike as well (a system
message, worked examples): that beginning, the *stem*, stands once before all families, and every
token sees it. So the model's work is the number of *different* tokens, and every row's result is
what it would be by itself. This is the only place that knows that the distribution of token t is
read off the token before it.

    row 0: P P P a b        packed   P P P a d        b and e are only predicted,
    row 1: P P P d e        position 0 1 2 3 3        never fed
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner.short_attention import short_attention, suits
from posttrain.models.attention import (
    WORTH,
    Bands,
    Heads,
    additive,
    causal_attention,
    common,
    hidden_states,
    masked_attention,
)
from posttrain.types import Batch

WHOLE_FAMILY = 512
"""Up to this many tokens a family is attended to in one call under a mask; longer ones branch by branch."""

EVEN = 64
"""In 16 bits the model is shown a multiple of so many tokens: for every number of them that it meets, oneDNN
compiles kernels, and keeps them: 10 MiB each for SmolLM2-135M. What fills up is seen by none."""
EVEN_FAMILY = 16
"""The same for the tokens that attend at once, 3 MiB for every number of them; not where branch by branch."""


def _half(x: torch.Tensor) -> bool:
    return x.dtype.itemsize == 2


@dataclass(frozen=True)
class Family:
    """Where a shared prompt and its branches lie in the packed sequence."""

    start: int
    prefix: int
    """Tokens of the shared prompt, after the stem."""
    branches: tuple[int, ...]
    """Tokens of each rest, in order; together with the prefix they fill [start, stop)."""

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.prefix + sum(self.branches)

    @property
    def spare(self) -> int:
        """Tokens after it that make its number even."""
        return (self.start - self.stop) % EVEN_FAMILY


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
    stem: int = 0
    """Tokens before the first family, which all families begin with."""
    short: bool = True
    """Whether few tokens attend by short_attention.py where it is quicker; not if differentiated twice."""
    _masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)
    _bands: Bands = field(default_factory=Bands)

    @property
    def spare(self) -> int:
        """Tokens after the last that make their number even, and those of every family."""
        needed = max(f.stop + f.spare for f in (Family(0, self.stem, ()), *self.families))
        return needed + -needed % EVEN - len(self.tokens)

    def attend(
        self,
        query: Heads,
        key: Heads,
        value: Heads,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Heads:
        """Attention within each family and to the stem (see attention.Layout)."""
        parts = []
        stem = Family(0, self.stem, ())
        for number, family in enumerate([stem, *self.families] if self.stem else self.families):
            if family.start == family.stop:
                continue  # all that its rows are fed is the stem
            n, seen = family.stop - family.start, self.stem if family is not stem else 0
            plain = not (family.branches or seen) and (window is None or window >= n)
            whole = plain or seen + n <= WHOLE_FAMILY
            # Nobody sees, or asks for, the tokens after the family that fill up.
            even = whole and _half(query) and family.stop + family.spare <= query.shape[2]
            spare = family.spare if even else 0
            span = slice(family.start, family.stop + spare)
            q, k, v = query[:, :, span], key[:, :, span], value[:, :, span]
            if seen:
                k, v = (torch.cat([x[:, :, :seen], y], dim=2) for x, y in ((key, k), (value, v)))
            if self.short and whole and suits(q, k, v, softcap):
                mask = self._mask(number, family, seen, spare, window, q)
                parts.append(short_attention(q, k, v, mask, scale)[:, :, :n])
            elif plain:
                out = causal_attention(q, k, v, self._bands, scale=scale, window=None, softcap=softcap)
                parts.append(out[:, :, :n])
            elif whole:
                mask = self._mask(number, family, seen, spare, window, q)
                parts.append(masked_attention(q, k, v, mask, scale=scale, softcap=softcap)[:, :, :n])
            else:
                how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
                branches = _branches(family, seen, q, k, v)
                parts += [causal_attention(*part, self._bands, **how) for part in branches]
        rest = query.shape[2] - self.families[-1].stop
        parts.append(query.new_zeros(*query.shape[:2], rest, value.shape[3]))
        return torch.cat(parts, dim=2)

    def _mask(
        self, number: int, family: Family, seen: int, spare: int, window: int | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Who sees whom in a family. The same for every layer, so made once."""
        if (number, spare, window) not in self._masks:
            position = self.positions[family.start : family.stop]
            mask = nn.functional.pad(_family_mask(family, seen, position, window), (0, spare, 0, spare))
            mask[len(position) :, 0] = True  # what sees nothing would be NaN
            self._masks[number, spare, window] = additive(mask.to(like.device), like.dtype)
        return self._masks[number, spare, window]


def _family_mask(family: Family, seen: int, position: torch.Tensor, window: int | None) -> torch.Tensor:
    """[tokens of the family, tokens of the stem that it sees and of the family]."""
    branch = torch.repeat_interleave(
        torch.arange(len(family.branches) + 1), torch.tensor([seen + family.prefix, *family.branches])
    ).to(position.device)
    before = torch.cat([torch.arange(seen).to(position), position])
    mask = ((branch[seen:, None] == branch) | (branch == 0)) & (before <= position[:, None])
    return mask if window is None else mask & (before > position[:, None] - window)


def _branches(
    family: Family, seen: int, query: Heads, key: Heads, value: Heads
) -> Iterator[tuple[Heads, Heads, Heads]]:
    """Queries of the prefix and of each branch, in order, with keys and values of all that they may see."""
    P = seen + family.prefix
    ends = torch.tensor([P, *family.branches]).cumsum(0).tolist()
    for start, stop in zip([seen, *ends[:-1]], ends, strict=True):
        if start == stop:
            continue
        k, v = (x[:, :, :stop] if stop == P else _joined(x, P, start, stop) for x in (key, value))
        yield query[:, :, start - seen : stop - seen], k, v


def _joined(x: Heads, shared: int, start: int, stop: int) -> Heads:
    return torch.cat([x[:, :, :shared], x[:, :, start:stop]], dim=2)


def pack(batch: Batch, *, stem: bool = True, short: bool = True) -> Pack:
    """The trained rows of the batch, packed; rows that train nothing take no part.

    With `stem` what all families begin with stands once before them, where that saves enough.
    Raises ValueError if no row has a trained token after its first position.
    """
    inputs = {i: batch.tokens[i, : _fed(batch, i)].tolist() for rows in _families(batch) for i in rows}
    shared = [(rows, _shared(batch, rows, inputs)) for rows in _families(batch)]
    S = _stem(shared, inputs) if stem else 0
    tokens: list[int] = inputs[shared[0][0][0]][:S] if S else []
    positions: list[int] = list(range(S))
    families: list[Family] = []
    source: list[int] = []
    where: list[tuple[int, int]] = []
    for rows, P in shared:
        start = len(tokens)
        tokens += inputs[rows[0]][S:P]
        positions += range(S, P)
        branches = []
        for i in rows:
            rest = inputs[i][P:]
            # Where token 0 of this row would stand if it did not share the stem, or the prompt.
            prompt, first = start - S, len(tokens) - P
            tokens += rest
            positions += range(P, P + len(rest))
            branches.append(len(rest))
            for t in batch.mask[i].nonzero().flatten().tolist():
                if t == 0:
                    continue  # nothing comes before the first token to predict it
                source.append(t - 1 + (0 if t - 1 < S else prompt if t - 1 < P else first))
                where.append((i, t))
        # A row by itself is a prompt with one branch, and plainly causal.
        alone = len(rows) == 1
        families.append(
            Family(start, P - S + branches[0], ()) if alone else Family(start, P - S, tuple(branches))
        )
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
        stem=S,
        short=short,
    )


def _stem(shared: Sequence[tuple[list[int], int]], inputs: dict[int, list[int]]) -> int:
    """Length of the beginning that all prompts share; 0 where that saves too little.

    A long row by itself is plainly causal, for which there are better kernels than for any mask.
    """
    if any(len(rows) == 1 and len(inputs[rows[0]]) > WHOLE_FAMILY for rows, _ in shared):
        return 0
    S = common([inputs[rows[0]][:P] for rows, P in shared])
    fed = sum(P + sum(len(inputs[i]) - P for i in rows) for rows, P in shared)
    return S if S * (len(shared) - 1) * WORTH >= fed else 0


def trained_states(model: PreTrainedModel, packed: Pack) -> Float[torch.Tensor, "M D"]:
    """The hidden states that predict the trained tokens of a pack."""
    weight = model.get_input_embeddings().weight
    device, spare = weight.device, packed.spare if _half(weight) else 0
    tokens, positions = (nn.functional.pad(x, (0, spare)) for x in (packed.tokens, packed.positions))
    hidden = hidden_states(model, tokens[None].to(device), positions[None].to(device), packed)
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
    return common([inputs[i][: int(batch.mask[i].nonzero().min())] for i in rows])


def families_of(batch: Batch) -> Iterator[tuple[list[int], int, dict[int, int]]]:
    """(rows, tokens that they begin with, tokens that each is fed) of each group that trains something."""
    for rows in _families(batch):
        inputs = {i: batch.tokens[i, : _fed(batch, i)].tolist() for i in rows}
        yield rows, _shared(batch, rows, inputs), {i: len(fed) for i, fed in inputs.items()}


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
    for rows, P, fed in families_of(batch):
        opened = False
        if whole:
            cost = P + sum(fed[i] - P for i in rows)
            if current and used + cost > budget:
                out.append(current)
                current, used = [], 0
            current += rows
            used += cost
            continue
        for i in rows:
            cost = fed[i] - (P if opened else 0)
            if current and used + cost > budget:
                out.append(current)
                current, used, cost = [], 0, fed[i]
            current.append(i)
            used += cost
            opened = True
    return [*out, current] if current else out
