"""Rows laid end to end, without padding between them and without computing a shared beginning twice.

Rows of one group begin with the same prompt. A *prompt group* is that prompt, once, followed by the
rest of each row; a token of a rest sees the prompt and what comes before it in its own rest, at
the positions it would have alone. Where rests begin alike too, what they share is there once
(prompt_group.py: a tree), and answers that are the same are one. Prompts of different groups often begin
alike as well (a system message, worked examples): that beginning, the *shared prefix*, stands once before
all prompt groups, and every token sees it. So the model's work is the number of *different* tokens, and
every row's result is what it would be by itself. This is the only place that knows that the distribution
of token t is read off the token before it.

    row 0: P P P a b        packed   P P P a d        b and e are only predicted,
    row 1: P P P d e        position 0 1 2 3 3        never fed
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from posttrain.learner import packed_attention
from posttrain.learner.prompt_group import (
    EVEN,
    WHOLE_PROMPT_GROUP,
    PromptGroup,
    branches,
    grouped,
    is_half,
    sees,
)
from posttrain.models.attention import (
    WORTH,
    Heads,
    causal_attention,
    common,
    hidden_states,
    masked_attention,
)
from posttrain.models.masks import Bands, additive, aligned
from posttrain.types import Batch

_recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


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
    prompt_groups: list[PromptGroup]
    source: Int[torch.Tensor, "M"]
    """The packed index whose hidden state predicts it, of each token that is asked about."""
    target: Int[torch.Tensor, "M"]
    row: Int[torch.Tensor, "R"]
    column: Int[torch.Tensor, "R"]
    asks: Int[torch.Tensor, "R"]
    """For each trained token, which of those it is: rows that are alike so far ask the same."""
    shared_prefix: int = 0
    """Tokens before the first prompt group, which all prompt groups begin with."""
    compiled: bool = True
    """Whether packed_attention.py may attend; not if differentiated twice."""
    _tables: dict[int | None, packed_attention.SpanTable] = field(default_factory=dict)
    _masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)
    _bands: Bands = field(default_factory=Bands)

    @property
    def spare(self) -> int:
        """Tokens after the last that make their number even, and those of every prompt group."""
        needed = max(f.stop + f.spare for f in (PromptGroup(0, self.shared_prefix, ()), *self.prompt_groups))
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
        """Attention within each prompt group and to the shared prefix (see attention.Layout)."""
        groups = self.prompt_groups
        if self.compiled and packed_attention.suits(query, value, softcap, groups, self.shared_prefix):
            if window not in self._tables:  # the same for every layer
                table = packed_attention.SpanTable.of(groups, self.positions, self.shared_prefix, window)
                self._tables[window] = table
            return packed_attention.attention(query, key, value, self._tables[window], scale, window)
        if self.shared_prefix:
            groups = [PromptGroup(0, self.shared_prefix, ()), *groups]
        # Of one that is empty all that its rows are fed is the shared prefix.
        groups = [group for group in groups if group.start < group.stop]
        sizes, end = [group.stop - group.start for group in groups], groups[-1].stop
        # Of slices the backward pass would make gradients as large as the whole, as many as there are groups.
        cut = [torch.split(x[:, :, :end], sizes, dim=2) for x in (query, key, value)]
        how: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
        parts = []
        for number, (group, n) in enumerate(zip(groups, sizes, strict=True)):
            seen = self.shared_prefix if number else 0
            heads, stop = [x[number] for x in cut], group.stop + group.spare
            whole = group.is_plain(seen, window) or seen + n <= WHOLE_PROMPT_GROUP
            if whole and is_half(query) and query.device.type == "cpu" and stop <= query.shape[2]:
                # Nobody sees, or asks for, the tokens after the prompt group that fill up.
                heads = [x[:, :, group.start : stop] for x in (query, key, value)]
            before = [x[0] for x in cut[1:]] if seen else []
            attend = partial(self._group, number, group, seen, how)
            # Else each would keep the prefix's keys and values again, of short ones more than of its own.
            again = seen > n and self.compiled and torch.is_grad_enabled()
            parts.append(_recomputed(attend, *heads, *before) if again else attend(*heads, *before))
        parts.append(query.new_zeros(*query.shape[:2], query.shape[2] - end, value.shape[3]))
        return torch.cat(parts, dim=2)

    def _group(self, number: int, group: PromptGroup, seen: int, how: dict[str, Any], *heads: Heads) -> Heads:
        """Attention of a group's tokens; heads: its own, then keys and values of the prefix that it sees."""
        query, key, value, *before = heads
        n = group.stop - group.start
        if before:
            key, value = (torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True))
        if group.is_plain(seen, how["window"]):
            return causal_attention(query, key, value, self._bands, **how | {"window": None})[:, :, :n]
        if seen + n <= WHOLE_PROMPT_GROUP:
            scale, softcap, window = how["scale"], how["softcap"], how["window"]
            mask = self._mask(number, group, seen, query.shape[2] - n, window, query)
            return masked_attention(query, key, value, mask, scale=scale, softcap=softcap)[:, :, :n]
        parts = []
        for branch in branches(group, seen):
            attend = partial(self._branch, branch, seen, how)
            # Else each would keep the prompt's keys and values again for the backward pass.
            again = self.compiled and torch.is_grad_enabled()
            parts.append((partial(_recomputed, attend) if again else attend)(query, key, value))
        return torch.cat(parts, dim=2)

    def _branch(self, branch: tuple[int, int, int], seen: int, how: dict[str, Any], *heads: Heads) -> Heads:
        """Attention of a group's tokens from start to stop, which see its first `shared`."""
        (shared, start, stop), (query, key, value) = branch, heads
        if shared < start:
            key, value = (torch.cat([x[:, :, :shared], x[:, :, start:stop]], dim=2) for x in (key, value))
        else:
            key, value = key[:, :, :stop], value[:, :, :stop]
        return causal_attention(query[:, :, start - seen : stop - seen], key, value, self._bands, **how)

    def _mask(
        self, number: int, group: PromptGroup, seen: int, spare: int, window: int | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Who sees whom in a prompt group. The same for every layer, so made once."""
        if (number, spare, window) not in self._masks:
            position = self.positions[group.start : group.stop]
            mask = nn.functional.pad(sees(group, seen, position, window), (0, spare, 0, spare))
            mask[len(position) :, 0] = True  # what sees nothing would be NaN
            width = mask.shape[1]
            mask = nn.functional.pad(mask, (0, aligned(width) - width))
            self._masks[number, spare, window] = additive(mask.to(like.device), like.dtype)[:, :width]
        return self._masks[number, spare, window]


def pack(batch: Batch, *, compiled: bool = True, trees: bool = False) -> Pack:
    """The trained rows of the batch, packed; rows that train nothing take no part.

    What all prompt groups begin with stands once before them, where that saves enough.
    With `trees` nothing that rows of a group begin with is computed twice, where they attend in one call.
    Raises ValueError if no row has a trained token after its first position.
    """
    inputs = {i: batch.tokens[i, : _fed(batch, i)].tolist() for rows in _rows_by_group(batch) for i in rows}
    shared = [(rows, _shared(batch, rows, inputs)) for rows in _rows_by_group(batch)]
    S = _shared_prefix(shared, inputs)
    tokens: list[int] = inputs[shared[0][0][0]][:S] if S else []
    positions: list[int] = list(range(S))
    prompt_groups: list[PromptGroup] = []
    source: list[int] = []
    target: list[int] = []
    where: list[tuple[int, int, int]] = []
    known: dict[tuple[int, int], int] = {}
    for rows, P in shared:
        group, laid = grouped(
            {i: inputs[i][S:] for i in rows}, P - S, len(tokens), trees, WHOLE_PROMPT_GROUP - S
        )
        tokens += laid.tokens
        positions += (S + depth for depth in laid.depths)
        prompt_groups.append(group)
        for i, way in laid.ways.items():
            row_tokens = batch.tokens[i].tolist()
            for t in batch.mask[i].nonzero().flatten().tolist():
                if t == 0:
                    continue  # nothing comes before the first token to predict it
                pair = (t - 1 if t - 1 < S else group.start + way[t - 1 - S], row_tokens[t])
                asked = known.setdefault(pair, len(source)) if trees else len(source)
                if asked == len(source):
                    source.append(pair[0])
                    target.append(pair[1])
                where.append((i, t, asked))
    if not where:
        raise ValueError("nothing to train on: no row has a trained token with a token before it")
    row, column, asks = torch.tensor(where, dtype=torch.long).T
    return Pack(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        prompt_groups=prompt_groups,
        source=torch.tensor(source),
        target=torch.tensor(target),
        row=row,
        column=column,
        asks=asks,
        shared_prefix=S,
        compiled=compiled,
    )


def _shared_prefix(shared: Sequence[tuple[list[int], int]], inputs: dict[int, list[int]]) -> int:
    """Length of the beginning that all prompts share; 0 where that saves too little.

    A long row by itself is plainly causal, for which there are better kernels than for any mask.
    """
    if any(len(rows) == 1 and len(inputs[rows[0]]) > WHOLE_PROMPT_GROUP for rows, _ in shared):
        return 0
    S = common([inputs[rows[0]][:P] for rows, P in shared])
    fed = sum(P + sum(len(inputs[i]) - P for i in rows) for rows, P in shared)
    return S if S * (len(shared) - 1) * WORTH >= fed else 0


def trained_states(model: PreTrainedModel, packed: Pack) -> Float[torch.Tensor, "M D"]:
    """The hidden states that predict the trained tokens of a pack."""
    weight = model.get_input_embeddings().weight
    device, spare = weight.device, packed.spare if is_half(weight) else 0
    tokens, positions = (nn.functional.pad(x, (0, spare)) for x in (packed.tokens, packed.positions))
    hidden = hidden_states(model, tokens[None].to(device), positions[None].to(device), packed)
    return hidden[0, packed.source.to(device)]


def _fed(batch: Batch, i: int) -> int:
    """Tokens of row i that the model must see: all before its last trained one."""
    return int(batch.mask[i].nonzero().max())


def _rows_by_group(batch: Batch) -> list[list[int]]:
    """Rows with something to train on, gathered by group, in order of first appearance."""
    found: dict[int, list[int]] = {}
    for i, trains in enumerate((batch.mask[:, 1:]).any(-1).tolist()):
        if trains:
            found.setdefault(int(batch.group[i]), []).append(i)
    return list(found.values())


def _shared(batch: Batch, rows: Sequence[int], inputs: dict[int, list[int]]) -> int:
    """Length of the rows' common beginning, ending before anything sampled."""
    return common([inputs[i][: int(batch.mask[i].nonzero().min())] for i in rows])


def prompt_groups_of(batch: Batch) -> Iterator[tuple[list[int], int, dict[int, int]]]:
    """(rows, tokens that they begin with, tokens that each is fed) of each group that trains something."""
    for rows in _rows_by_group(batch):
        inputs = {i: batch.tokens[i, : _fed(batch, i)].tolist() for i in rows}
        yield rows, _shared(batch, rows, inputs), {i: len(fed) for i, fed in inputs.items()}


def microbatches(batch: Batch, budget: int, *, whole: bool = False) -> list[list[int]]:
    """Rows cut into microbatches of at most `budget` packed tokens each, in order, by prompt group.

    A prompt group larger than the budget is split, and its prompt is then computed once per part; with
    `whole` none is. A single row, or a whole group, larger than the budget is a microbatch by itself.

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
    for rows, P, fed in prompt_groups_of(batch):
        for n, piece in enumerate([rows] if whole else [[i] for i in rows]):
            own = sum(fed[i] - P for i in piece)
            cost = own + (0 if n else P)  # the prompt once in a microbatch
            if current and used + cost > budget:
                out.append(current)
                current, used, cost = [], 0, P + own
            current += piece
            used += cost
    return [*out, current] if current else out
