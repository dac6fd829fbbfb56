"""Keys and values of the running sequences, and of prompts that waiting samples need.

Sequences with the same tokens share a row. Rows 0 ... B-1 are always the occupied ones, so the cache of a
layer is a plain slice without gathering. The last row overwrites a row that becomes empty. Rows × columns
never exceeds the bound: few long sequences or many short ones. Each layer has one block of memory, which is
divided into fewer and longer rows as sequences grow.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy
import numpy.typing
import torch
from jaxtyping import Int

from posttrain.engines.native.decode_kernel import kernel_for
from posttrain.models.attention import Heads, Sinks, causal_attention, masked_attention
from posttrain.models.experts import Routes
from posttrain.models.loading import on_device
from posttrain.models.masks import Bands, additive
from posttrain.models.recurrent import Hidden, Reads

PADDING = 32
"""Prompts whose lengths round up to the same multiple of this attend in one call."""

ROUTES = -1
"""Number under which a cache holds the experts of tokens as it does the keys of a layer, [layers with
experts, tokens, experts of a token], without values. They are shared, copied and dropped with the keys."""
Prompt = tuple[int, ...]
Layers = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of one prompt, [key heads, tokens, head size], by number of the attention call."""


class Cache:
    """Keys and values of every attention layer, [rows, key heads, columns, head size]."""

    def __init__(self, rows: int, tokens: int) -> None:
        """rows: largest number of rows; tokens: bound on rows × columns, and on the prompts stored apart."""
        self.max_rows, self.tokens = rows, tokens
        self.rows = self.columns = 0
        self.reallocations = 0
        """Number of times that the blocks were reallocated."""
        self._block_tokens = 0
        self._blocks: dict[tuple[int, int], torch.Tensor] = {}
        """Memory of a layer's keys (0) and values (1), by (layer, 0 or 1)."""
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.states: set[int] = set()
        """Numbers of the layers with a state (models/recurrent.py): its two parts are in `keys` and `values`,
        without columns."""
        self.prompts: dict[Prompt, Layers] = {}
        self.turns: dict[str, tuple[Prompt, Layers]] = {}
        """By episode: the tokens computed so far (prompt and answer but the last token) and their layers."""
        self.latest: tuple[Prompt, Layers] = ((), {})
        """The prompt that ran last, stored beyond the bound: the next prompts may start as it does."""

    def reserve(self, rows: int, columns: int, longest: int = 0, occupied: int | None = None) -> None:
        """Divide the blocks into at least this many rows of this many columns; occupied rows stay the same.

        Blocks that are too small are reallocated: within the bound, for all rows of `longest` columns.
        occupied: number of rows that sequences have; every row by default.
        """
        if rows <= self.rows and columns <= self.columns:
            return
        self.columns = min(-(-columns // 64) * 64, self.tokens // rows)
        self.rows = min(self.max_rows, self.tokens // self.columns)
        needed = min(self.tokens, self.max_rows * max(self.columns, longest))
        if grows := needed > self._block_tokens:
            self._block_tokens, self.reallocations = needed, self.reallocations + 1
        for half, store in enumerate((self.keys, self.values)):
            for layer in store.keys() - self.states:
                old = store[layer]
                part = old[: self.rows, :, : self.columns][:occupied]
                # Rows of another width overlap the present ones.
                part = part if grows else part.clone()
                store[layer] = new = self._allocate(layer, half, old[0], again=grows)
                new[: part.shape[0], :, : part.shape[2]] = part

    def _allocate(self, layer: int, half: int, row: torch.Tensor, *, again: bool) -> torch.Tensor:
        """Return the rows of a layer's keys (half 0) or values (1), of which `row` is one of any length.

        again: allocate their block in any case. States have no columns, and a row for each sequence.
        """
        if layer in self.states:
            return row.new_zeros(min(self.max_rows, self.tokens), *row.shape)
        heads, _, size = row.shape
        if again or (layer, half) not in self._blocks:
            self._blocks[layer, half] = row.new_zeros(self._block_tokens * heads * size)
        block = self._blocks[layer, half]
        return block[: self.rows * self.columns * heads * size].view(self.rows, heads, self.columns, size)

    def place(self, prompts: Sequence[Prompt], first: int) -> None:
        """Copy computed prompts into the rows from `first` on; prompts of one length are copied together."""
        by_length: dict[int, list[int]] = {}
        for n, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(n)
        for length, members in by_length.items():
            layers = [self.prompts[prompts[n]] for n in members]
            rows = on_device([first + n for n in members], layers[0][0][0].device)  # device of the keys
            for layer, pair in layers[0].items():
                if layer not in self.keys:
                    self.keys[layer], self.values[layer] = (
                        self._allocate(layer, half, x, again=False) for half, x in enumerate(pair)
                    )
                for store, part in (self.keys, 0), (self.values, 1):
                    target = self._filled(layer, store[layer], length)
                    target.index_copy_(0, rows, torch.stack([pairs[layer][part] for pairs in layers]))

    def _filled(self, layer: int, tensor: torch.Tensor, length: int) -> torch.Tensor:
        """Return the part of a layer's rows that `length` tokens fill: their columns, or the whole state."""
        return tensor if layer in self.states else tensor[:, :, :length]

    def unshare(self, prompt: Prompt) -> Layers:
        """Copy the keys and values of a prompt to memory of their own if they are views of a larger block."""
        layers = self.prompts[prompt]
        for layer, pair in layers.items():
            if pair[0].untyped_storage().nbytes() > pair[0].nbytes:
                layers[layer] = pair[0].clone(), pair[1].clone()
        return layers

    def copy(self, rows: list[tuple[int, int]], length: int) -> None:
        """Copy `length` columns from row to row, (source, target); a target must not be a source."""
        if not rows:
            return
        tensors = [pair for store in (self.keys, self.values) for pair in store.items()]
        source, target = on_device([list(pair) for pair in zip(*rows, strict=True)], tensors[0][1].device)
        for layer, tensor in tensors:
            columns = self._filled(layer, tensor, length)
            columns.index_copy_(0, target, columns.index_select(0, source))

    def routes(self, row: int, start: int, stop: int) -> numpy.typing.NDArray[numpy.int16]:
        """Return the experts of tokens `start` to `stop` of a row, [tokens, layers, experts of a token]."""
        return self.keys[ROUTES][row, :, start:stop].transpose(0, 1).clone().cpu().numpy()

    def keep_turn(self, episode: str, tokens: Prompt, row: int) -> None:
        """Store keys and values of these tokens of a row for a later turn; drop the oldest over the bound.

        Not where layers have states, which go on from their newest token alone.
        """
        if self.states:
            return
        self.turns.pop(episode, None)
        turn = slice(len(tokens))
        self.turns[episode] = (
            tokens,
            {
                layer: (keys[row, :, turn].clone(), self.values[layer][row, :, turn].clone())
                for layer, keys in self.keys.items()
            },
        )
        total = sum(len(tokens) for tokens, _ in self.turns.values())
        while total > self.tokens:
            total -= len(self.turns.pop(next(iter(self.turns)))[0])

    def excess(self) -> list[Prompt]:
        """Return the prompts to drop so that the rest fits the bound; the newest prompts are needed last."""
        total, dropped = sum(map(len, self.prompts)), []
        for prompt in reversed(self.prompts):
            if total <= self.tokens:
                break
            total -= len(prompt)
            dropped.append(prompt)
        return dropped


class PromptLayout:
    """Several prompts end to end, each attending only to itself; their keys and values go to the cache.

    Tokens whose keys and values exist are not run again: each prompt may start with such tokens. Otherwise
    the prefix that all prompts share runs once, before them.
    """

    def __init__(
        self,
        cache: Cache,
        prompts: list[Prompt],
        shared_prefix: int = 0,
        computed: list[tuple[int, Layers]] | None = None,
    ) -> None:
        """shared_prefix: its length, less than any prompt's.

        computed: for each prompt the number of computed tokens and the layers that hold them.
        """
        self.cache, self.prompts, self.shared_prefix = cache, prompts, shared_prefix
        self.computed = computed or [(shared_prefix, {})] * len(prompts)
        self.parts = [prompts[0][:shared_prefix]] * bool(shared_prefix) + [
            p[n:] for p, (n, _) in zip(prompts, self.computed, strict=True)
        ]
        """Runs of tokens to compute, in order."""
        self.starts = [0] * bool(shared_prefix) + [n for n, _ in self.computed]
        """Position of the first token of each part."""
        self._bands, self._calls = Bands(), 0
        self._together: list[tuple[list[int], torch.Tensor]] = []
        for prompt in prompts:
            cache.prompts[prompt] = {}

    def inputs(self, device: torch.device) -> Int[torch.Tensor, "2 N"]:
        """Return the tokens to run, concatenated, and their positions."""
        tokens = [t for part in self.parts for t in part]
        starts = zip(self.starts, self.parts, strict=True)
        return on_device([tokens, [start + i for start, part in starts for i in range(len(part))]], device)

    def rows(
        self, layers: int, like: torch.Tensor, heads: int, size: int
    ) -> tuple[Cache, Int[torch.Tensor, "N 2"]]:
        """Allocate a row for each prompt, copy its computed tokens there, and return the rows of each token.

        A token of the shared prefix belongs to all rows. The keys and values of the prompts become views of
        them.
        """
        P, longest = len(self.prompts), max(map(len, self.prompts))
        rows = Cache(P, P * longest)
        beginnings: dict[tuple[int, int], list[int]] = {}
        for n, (start, before) in enumerate(self.computed):
            if before:
                beginnings.setdefault((id(before), start), []).append(n)
        for layer in range(layers):
            both = like.new_empty(2, P, heads, longest, size)
            for (_, start), members in beginnings.items():
                for x, computed in zip(both, self.computed[members[0]][1][layer], strict=True):
                    x[members, :, :start] = computed[:, :start]
            rows.keys[layer], rows.values[layer] = both
            for prompt, *views in zip(self.prompts, *both, strict=True):
                key, value = (x[:, : len(prompt)] for x in views)
                self.cache.prompts[prompt][layer] = key, value
        owners = [(0, P)] * bool(self.shared_prefix) + [(n, n + 1) for n in range(P)]
        rows_of = [owner for owner, part in zip(owners, self.parts, strict=True) for _ in part]
        return rows, torch.tensor(rows_of)

    def _join_alike(self, device: torch.device) -> None:
        """Group the parts that attend in one call, and index where each token's result is among the results.

        Such parts see the same tokens before them and have equal lengths up to PADDING. Each group has the
        places of its tokens, [parts, length]; a shorter part repeats its last place, and those results are
        not used.
        """
        groups: dict[tuple[int, int, int], list[int]] = {}
        for n, (part, start) in enumerate(zip(self.parts, self.starts, strict=True)):
            before = 0 if self.shared_prefix else id(self.computed[n][1])
            groups.setdefault((start, before, -(-len(part) // PADDING) * PADDING), []).append(n)
        begins = list(accumulate(map(len, self.parts), initial=0))
        order, end = [0] * begins[-1], 0
        for (*_, length), members in groups.items():
            places = []
            for n in members:
                span = range(begins[n], begins[n + 1])
                order[begins[n] : begins[n + 1]] = range(end, end + len(span))
                places.append([*span, *[span[-1]] * (length - len(span))])
                end += length
            self._together.append((members, on_device(places, device)))
        self._order = on_device(order, device)

    def keep_routes(self, routes: Routes) -> None:
        """Store the experts of the tokens that ran with those of each prompt's computed tokens."""
        parts = torch.split(routes, [*map(len, self.parts)], dim=1)
        shared, parts = parts[: len(parts) - len(self.prompts)], parts[-len(self.prompts) :]
        for prompt, part, (start, before) in zip(self.prompts, parts, self.computed, strict=True):
            first = [before[ROUTES][0][:, :start]] if before else [*shared]
            keys = torch.cat([*first, part], dim=1)
            self.cache.prompts[prompt][ROUTES] = keys, keys[..., :0]

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
        """Apply causal attention within each prompt (see attention.Layout)."""
        layer, self._calls = self._calls, self._calls + 1
        if not self._together:
            self._join_alike(query.device)
        first, outputs = len(self.parts) - len(self.prompts), []
        for members, places in self._together:
            q, k, v = (x[0][:, places].transpose(0, 1) for x in (query, key, value))
            start = self.starts[members[0]]
            if start:
                before = (
                    (x[0, :, :start] for x in (key, value))
                    if self.shared_prefix
                    else (x[:, :start] for x in self.computed[members[0]][1][layer])
                )
                k, v = (
                    torch.cat([x.expand(len(members), *x.shape), y], dim=2)
                    for x, y in zip(before, (k, v), strict=True)
                )
            out = causal_attention(
                q, k, v, self._bands, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
            outputs.append(out.transpose(0, 1).flatten(1, 2))
            for n, part_k, part_v in zip(members, k, v, strict=True):
                if n >= first:
                    prompt = self.prompts[n - first]
                    pair = part_k[:, : len(prompt)].clone(), part_v[:, : len(prompt)].clone()
                    self.cache.prompts[prompt][layer] = pair
        return torch.cat(outputs, dim=1)[None, :, self._order]

    def read(self, layer: Reads, hidden: Hidden) -> Hidden:
        """Read each prompt from its first token on, and store the states after it (see attention.Layout)."""
        number, self._calls = self._calls, self._calls + 1
        assert not any(self.starts), "a layer with a state reads prompts from their first token on"
        self.cache.states.add(number)
        outputs, parts = [], torch.split(hidden, [*map(len, self.parts)], dim=1)
        for prompt, part in zip(self.prompts, parts, strict=True):
            out, states = layer(part, keeps=True)
            assert states is not None
            outputs.append(out)
            self.cache.prompts[prompt][number] = states[0][0], states[1][0]
        return torch.cat(outputs, dim=1)


class TokenLayout:
    """One new token for each running sequence, attending to all tokens of its row."""

    def __init__(self, cache: Cache, lengths: torch.Tensor, columns: int, *, compiled: bool = False) -> None:
        """lengths: tokens in each row, which is the position of the new one; columns: more than any length.

        compiled: use decode_kernel where available.
        """
        self.cache, self.lengths, self.columns, self.compiled = cache, lengths, columns, compiled
        self.row = torch.arange(len(lengths), device=lengths.device)
        self._masks: dict[int | None, torch.Tensor] = {}
        self._calls = 0

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
        """Apply attention of the newest tokens to their rows (see attention.Layout)."""
        layer, self._calls = self._calls, self._calls + 1
        B, H, _, D = query.shape
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.compiled and (kernel := kernel_for(query, value, softcap, sinks)):
            return kernel(query, key, value, keys, values, self.lengths, scale=scale, window=window)
        keys[self.row, :, self.lengths] = key[:, :, 0]
        values[self.row, :, self.lengths] = value[:, :, 0]
        keys, values = keys[:B, :, : self.columns], values[:B, :, : self.columns]
        mask = self._mask(window, query.dtype)
        if sinks is not None:
            return masked_attention(query, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks)
        # Query heads that share a key head have the same position: as queries of one head they read
        # its keys once.
        shared = query.reshape(B, key.shape[1], H // key.shape[1], D)
        out = masked_attention(shared, keys, values, mask, scale=scale, softcap=softcap)
        return out.reshape(B, H, 1, values.shape[-1])

    def keep_routes(self, routes: Routes) -> None:
        """Store the experts of the newest tokens."""
        self.cache.keys[ROUTES][self.row, :, self.lengths] = routes.transpose(0, 1)

    def read(self, layer: Reads, hidden: Hidden) -> Hidden:
        """Read the newest token of each row, and replace its state (see attention.Layout)."""
        number, self._calls = self._calls, self._calls + 1
        inputs, sums = self.cache.keys[number][: len(hidden)], self.cache.values[number][: len(hidden)]
        out, states = layer(hidden, (inputs, sums))
        assert states is not None
        sums.copy_(states[1])
        return out

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        if window not in self._masks:
            ago = self.lengths[:, None] - torch.arange(self.columns, device=self.lengths.device)
            visible = (ago >= 0) & (ago < (window or self.columns + 1))
            self._masks[window] = additive(visible, dtype)[:, None, None]
        return self._masks[window]
