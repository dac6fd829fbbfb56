"""Rows laid end to end, without padding between them and without computing a shared beginning twice.

Rows of one group begin with the same prompt. A *prompt group* is that prompt, once, followed by the
rest of each row; a token of a rest sees the prompt and the tokens before it in its own rest, at
the positions it would have alone. Where rests begin alike too, their common part is there once
(prompt_group.py: a tree), and equal answers are one. Prompts of different groups often begin
alike as well (a system message, worked examples): that beginning, the *shared prefix*, stands once before
all prompt groups, and every token sees it. So the model computes each *different* token once, and
every row's result is what it would be by itself. Only this module knows that the hidden state of token t - 1
predicts token t.

    row 0: P P P a b        packed   P P P a d        b and e are only predicted,
    row 1: P P P d e        position 0 1 2 3 3        never fed
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from posttrain.learner import packed_attention, varlen
from posttrain.learner.prompt_group import (
    EVEN,
    WHOLE_PROMPT_GROUP,
    PromptGroup,
    branches,
    is_half,
    pack_group,
    rows_read,
    sees,
)
from posttrain.models.attention import (
    WORTH,
    Heads,
    Layout,
    Sinks,
    causal_attention,
    common,
    hidden_states,
    masked_attention,
)
from posttrain.models.experts import UNKNOWN, Routes, fill_routes, replay
from posttrain.models.masks import Bands, additive, aligned
from posttrain.models.recurrent import Hidden, Reads
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
    """The packed index whose hidden state predicts each target."""
    target: Int[torch.Tensor, "M"]
    row: Int[torch.Tensor, "R"]
    column: Int[torch.Tensor, "R"]
    asks: Int[torch.Tensor, "R"]
    """For each trained token, its index in `target`: rows that are equal up to a token share it."""
    shared_prefix: int = 0
    """Number of tokens before the first prompt group, with which all prompt groups begin."""
    routes: Routes | None = None
    """The experts that each token is sent to; None: the model's routers choose."""
    compiled: bool = True
    """True if kernels may be used (packed_attention.py, varlen.py): they have no second derivatives."""
    _tables: dict[int | None, packed_attention.SpanTable] = field(default_factory=dict)
    _span_keys: varlen.SpanKeys | None = None
    _masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)
    _bands: Bands = field(default_factory=Bands)
    _rows_read: tuple[list[torch.Tensor], torch.Tensor] | None = None

    @property
    def spare(self) -> int:
        """Number of filling tokens at the end, for a length that is a multiple of EVEN (prompt_group.py).

        It also covers the spare tokens of every prompt group.
        """
        groups = (PromptGroup(0, self.shared_prefix, ()), *self.prompt_groups)
        needed = max(group.stop + group.spare for group in groups)
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
        sinks: Sinks | None = None,
    ) -> Heads:
        """Attend within each prompt group and to the shared prefix (see attention.Layout)."""
        groups = self.prompt_groups
        if self.compiled and packed_attention.suits(query, value, softcap, sinks, groups, self.shared_prefix):
            if window not in self._tables:  # one table serves all layers
                table = packed_attention.SpanTable.of(groups, self.positions, self.shared_prefix, window)
                self._tables[window] = table
            return packed_attention.attention(query, key, value, self._tables[window], scale, window)
        if self.compiled and varlen.suits(query, value, softcap):
            if self._span_keys is None:
                place = query.shape[2], query.device
                self._span_keys = varlen.SpanKeys.of(groups, self.shared_prefix, *place)
            if self._span_keys.are_few(query.shape[2]):
                return varlen.attention(query, key, value, self._span_keys, scale, window, sinks)
        if self.shared_prefix:
            groups = [PromptGroup(0, self.shared_prefix, ()), *groups]
        # A group is empty if the shared prefix is all that its rows need.
        groups = [group for group in groups if group.start < group.stop]
        sizes, end = [group.stop - group.start for group in groups], groups[-1].stop
        # For each group the gradient of a slice would be as large as the full tensor; that of a split is not.
        splits = [torch.split(x[:, :, :end], sizes, dim=2) for x in (query, key, value)]
        options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        parts = []
        for number, (group, n) in enumerate(zip(groups, sizes, strict=True)):
            prefix = self.shared_prefix if number else 0
            heads, stop = [x[number] for x in splits], group.stop + group.spare
            in_one_call = group.is_plain(prefix, window) or prefix + n <= WHOLE_PROMPT_GROUP
            if in_one_call and is_half(query) and query.device.type == "cpu" and stop <= query.shape[2]:
                # The group's own tokens do not see the spare ones after it, whose outputs are cut off.
                heads = [x[:, :, group.start : stop] for x in (query, key, value)]
            before = [x[0] for x in splits[1:]] if prefix else []
            attend = partial(self._attend_group, number, group, prefix, options)
            # Recompute a group that is shorter than the prefix: it would save the prefix's keys and values.
            recompute = prefix > n and self.compiled and torch.is_grad_enabled()
            parts.append(_recomputed(attend, *heads, *before) if recompute else attend(*heads, *before))
        parts.append(query.new_zeros(*query.shape[:2], query.shape[2] - end, value.shape[3]))
        return torch.cat(parts, dim=2)

    def _attend_group(
        self, number: int, group: PromptGroup, prefix: int, options: dict[str, Any], *heads: Heads
    ) -> Heads:
        """Attend within a group; heads: query, key and value, then the prefix's keys and values, if any."""
        query, key, value, *before = heads
        n = group.stop - group.start
        if before:
            key, value = (torch.cat(pair, dim=2) for pair in zip(before, (key, value), strict=True))
        if group.is_plain(prefix, options["window"]):
            return causal_attention(query, key, value, self._bands, **options | {"window": None})[:, :, :n]
        if prefix + n <= WHOLE_PROMPT_GROUP:
            how = dict(options)
            mask = self._mask(number, group, prefix, query.shape[2] - n, how.pop("window"), query)
            return masked_attention(query, key, value, mask, **how)[:, :, :n]
        parts = []
        for branch in branches(group, prefix):
            attend = partial(self._attend_branch, branch, prefix, options)
            # Recompute each branch: it would save the prompt's keys and values for the backward pass.
            recompute = self.compiled and torch.is_grad_enabled()
            parts.append((partial(_recomputed, attend) if recompute else attend)(query, key, value))
        return torch.cat(parts, dim=2)

    def _attend_branch(
        self, branch: tuple[int, int, int], prefix: int, options: dict[str, Any], *heads: Heads
    ) -> Heads:
        """Attend from a group's tokens start to stop to its first `shared` tokens and to themselves."""
        (shared, start, stop), (query, key, value) = branch, heads
        if shared < start:
            key, value = (torch.cat([x[:, :, :shared], x[:, :, start:stop]], dim=2) for x in (key, value))
        else:
            key, value = key[:, :, :stop], value[:, :, :stop]
        part = query[:, :, start - prefix : stop - prefix]
        return causal_attention(part, key, value, self._bands, **options)

    def read(self, layer: Reads, hidden: Hidden) -> Hidden:
        """Let a layer with a state read each row from its first token on (see attention.Layout).

        What rows share is read once for each row.
        """
        if not self._rows_read:
            self._rows_read = rows_read(self.prompt_groups, self.shared_prefix, hidden.shape[1])
        pieces, of_token = self._rows_read
        # Each piece is about as large as the pack, and all of them may be many times that.
        recompute = len(pieces) > 1 and self.compiled and torch.is_grad_enabled()

        def read(hidden: Hidden, places: torch.Tensor) -> torch.Tensor:
            return layer(hidden[0, places])[0].flatten(0, 1)

        out = []
        for places in pieces:
            inputs = hidden, places.to(hidden.device)
            out.append(_recomputed(read, *inputs) if recompute else read(*inputs))
        return torch.cat(out)[None, of_token.to(hidden.device)]

    def _mask(
        self, number: int, group: PromptGroup, prefix: int, spare: int, window: int | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention mask of a prompt group, which all layers share."""
        if (number, spare, window) not in self._masks:
            position = self.positions[group.start : group.stop]
            mask = nn.functional.pad(sees(group, prefix, position, window), (0, spare, 0, spare))
            mask[len(position) :, 0] = True  # a row that sees no token would be NaN
            width = mask.shape[1]
            mask = nn.functional.pad(mask, (0, aligned(width) - width))
            self._masks[number, spare, window] = additive(mask.to(like.device), like.dtype)[:, :width]
        return self._masks[number, spare, window]


def pack(batch: Batch, *, compiled: bool = True, trees: bool = False) -> Pack:
    """Return the rows with trained tokens, packed.

    The tokens that all prompt groups begin with stand once before them, if that saves enough.
    With `trees` the common beginnings of a group's rows are computed once, if the group attends in one call.

    Tokens that the batch has `observed` are predicted like trained ones. Python runs for each row and not for
    each token: in a pass without gradients a GPU waits for its pack.

    Raises ValueError if no row has a trained token after its first position.
    """
    grouped = [*_grouped(batch)]
    if not grouped:
        raise ValueError("nothing to train on: no row has a trained token with a token before it")
    inputs = {i: row for _, _, group_inputs in grouped for i, row in group_inputs.items()}
    prompts = [(rows, P) for rows, P, _ in grouped]
    S = _shared_prefix(prompts, inputs)
    tokens: list[int] = inputs[prompts[0][0][0]][:S] if S else []
    positions = [np.arange(S)]
    prompt_groups: list[PromptGroup] = []
    mask = batch.predicted.numpy()
    packed_at = np.zeros(mask.shape, np.int64)
    packed_at[:, :S] = np.arange(S)
    for rows, P in prompts:
        group, packed = pack_group(
            {i: inputs[i][S:] for i in rows}, P - S, len(tokens), trees, WHOLE_PROMPT_GROUP - S
        )
        tokens += packed.tokens
        positions.append(S + np.array(packed.depths, np.int64))
        prompt_groups.append(group)
        for i, path in packed.paths.items():
            packed_at[i, S : S + len(path)] = group.start + np.array(path, np.int64)
    in_order = np.array([i for rows, _ in prompts for i in rows])
    number, before = mask[in_order, 1:].nonzero()  # no token comes before the first to predict it
    row, column = in_order[number], before + 1
    source, target = packed_at[row, before], batch.tokens.numpy()[row, column]
    asks = np.arange(len(row))
    if trees:  # number the different predictions by their first appearance
        _, first, asks = np.unique(source << 32 | target, return_index=True, return_inverse=True)
        order = first.argsort()
        asks, first = order.argsort()[asks], first[order]
        source, target = source[first], target[first]
    return Pack(
        tokens=torch.from_numpy(np.array(tokens, np.int64)),
        positions=torch.from_numpy(np.concatenate(positions)),
        prompt_groups=prompt_groups,
        source=torch.from_numpy(source),
        target=torch.from_numpy(target),
        row=torch.from_numpy(row),
        column=torch.from_numpy(column),
        asks=torch.from_numpy(asks),
        shared_prefix=S,
        routes=_pack_routes(batch, {i: packed_at[i, : len(row)] for i, row in inputs.items()}, len(tokens)),
        compiled=compiled,
    )


def _pack_routes(batch: Batch, places: dict[int, NDArray[np.int64]], count: int) -> Routes | None:
    """Return the experts of each of `count` packed tokens; of those that rows share, of the first that knows.

    places: by row, the packed index of each of its tokens.
    """
    if batch.routes is None:
        return None
    out = batch.routes.new_full((count, *batch.routes.shape[2:]), UNKNOWN)
    for i, indices in reversed(places.items()):
        routes, here = batch.routes[i, : len(indices)], torch.from_numpy(indices)
        out[here] = routes.where(routes != UNKNOWN, out[here])
    return out.transpose(0, 1).contiguous()


def _shared_prefix(prompts: Sequence[tuple[list[int], int]], inputs: dict[int, list[int]]) -> int:
    """Return the length of the beginning that all prompts share; 0 if it saves too little.

    Also 0 with a long row by itself: it is plainly causal, and causal kernels are faster than masked ones.
    """
    if any(len(rows) == 1 and len(inputs[rows[0]]) > WHOLE_PROMPT_GROUP for rows, _ in prompts):
        return 0
    S = common([inputs[rows[0]][:P] for rows, P in prompts])
    total = sum(P + sum(len(inputs[i]) - P for i in rows) for rows, P in prompts)
    return S if S * (len(prompts) - 1) * WORTH >= total else 0


class PackedTokens(Layout, Protocol):
    """The tokens of a pass and their layout: a pack, or a rank's share of one."""

    tokens: Int[torch.Tensor, "N"]
    positions: Int[torch.Tensor, "N"]
    source: Int[torch.Tensor, "M"]
    routes: Routes | None

    @property
    def spare(self) -> int: ...


def trained_states(
    model: PreTrainedModel, packed: PackedTokens, *, replays: bool = True
) -> Float[torch.Tensor, "M D"]:
    """Return the hidden states that predict the trained tokens of a pack, or of a share of one.

    replays: send tokens to the experts that the pack names, if any. They are those of the policy.
    """
    weight = model.get_input_embeddings().weight
    device, spare = weight.device, packed.spare if is_half(weight) else 0
    tokens, positions = (nn.functional.pad(x, (0, spare)) for x in (packed.tokens, packed.positions))
    routes = packed.routes if replays else None
    replay(model, None if routes is None else fill_routes(routes, spare).to(device))
    source = packed.source.to(device)  # before the layers are launched: a later copy waits for them
    hidden = hidden_states(model, tokens[None].to(device), positions[None].to(device), packed)
    return hidden[0, source]


def _grouped(batch: Batch) -> Iterator[tuple[list[int], int, dict[int, list[int]]]]:
    """Yield (rows, length of their common beginning, inputs by row) of each group with trained tokens.

    Groups come in order of first appearance. Inputs are the tokens that the model must see, all before the
    last trained one of a row; the common beginning ends before any trained token.
    """
    mask = batch.predicted.numpy()
    first, last = mask.argmax(1), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    groups: dict[int, list[int]] = {}
    for i in np.flatnonzero(mask[:, 1:].any(1)).tolist():
        groups.setdefault(int(batch.group[i]), []).append(i)
    for rows in groups.values():
        inputs = {i: batch.tokens[i, : last[i]].tolist() for i in rows}
        yield rows, common([inputs[i][: first[i]] for i in rows]), inputs


def prompt_groups_of(batch: Batch) -> Iterator[tuple[list[int], int, dict[int, int]]]:
    """Yield (rows, prompt tokens, input tokens by row) of each group with trained tokens."""
    for rows, P, inputs in _grouped(batch):
        yield rows, P, {i: len(tokens) for i, tokens in inputs.items()}


def microbatches(batch: Batch, budget: int, *, keep_groups: bool = False) -> list[list[int]]:
    """Return the row numbers of microbatches of at most `budget` packed tokens, in order, by prompt group.

    A prompt group larger than the budget is split, and its prompt is then computed once per part; with
    `keep_groups` no group is split. A single row, or a group that is kept, may exceed the budget.

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
    for rows, P, lengths in prompt_groups_of(batch):
        for n, piece in enumerate([rows] if keep_groups else [[i] for i in rows]):
            rest = sum(lengths[i] - P for i in piece)
            cost = rest + (0 if n else P)  # the prompt once in a microbatch
            if current and used + cost > budget:
                out.append(current)
                current, used, cost = [], 0, P + rest
            current += piece
            used += cost
    return [*out, current] if current else out
