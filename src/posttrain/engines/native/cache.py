"""Keys and values of the running sequences, and of prompts that samples still wait for.

Sequences that have come to the same text share a row; rows 0 ... B-1 are always the occupied ones, so a
layer's cache is a plain slice without gathering. A row that none is left in is overwritten by the last.
Rows × columns never exceeds the bound given: few long sequences or many short ones.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from jaxtyping import Int

from posttrain.engines.native.decode_kernel import kernel_for
from posttrain.models.attention import Heads, causal_attention, masked_attention
from posttrain.models.loading import on_device
from posttrain.models.masks import Bands, additive

PADDING = 32
"""Prompts attend together if their lengths are the same but for so many tokens."""

Prompt = tuple[int, ...]
Layers = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of one prompt, [key heads, tokens, head size], by number of the attention in a pass."""


class Cache:
    """[rows, key heads, columns, head size] for the keys and the values of every attention."""

    def __init__(self, rows: int, tokens: int) -> None:
        """rows: the most there may be; tokens: bound on rows × columns, and on the prompts kept apart."""
        self.most_rows, self.tokens = rows, tokens
        self.rows = self.columns = 0
        self.moves = 0
        """How often the rows have been given other memory."""
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.prompts: dict[Prompt, Layers] = {}
        self.kept: dict[str, tuple[Prompt, Layers]] = {}
        """By episode, what was computed of it so far: a prompt and its answer but for the last token."""
        self.latest: tuple[Prompt, Layers] = ((), {})
        """The prompt that ran last, kept beyond the bound: the next ones may begin as it does."""

    def reserve(self, rows: int, columns: int) -> None:
        """Makes room for this many rows of this many columns, keeping what the rows hold."""
        if rows <= self.rows and columns <= self.columns:
            return
        self.columns = min(-(-columns // 64) * 64, self.tokens // rows)
        self.rows = min(self.most_rows, self.tokens // self.columns)
        self.moves += 1
        for store in (self.keys, self.values):
            for layer, old in store.items():
                new = old.new_zeros(self.rows, old.shape[1], self.columns, old.shape[3])
                kept = old[: self.rows, :, : self.columns]
                new[: kept.shape[0], :, : kept.shape[2]] = kept
                store[layer] = new

    def place(self, prompts: Sequence[Prompt], first: int) -> None:
        """Copies computed prompts into the rows from `first` on, those of one length at once."""
        alike: dict[int, list[int]] = {}
        for n, prompt in enumerate(prompts):
            alike.setdefault(len(prompt), []).append(n)
        for length, members in alike.items():
            layers = [self.prompts[prompts[n]] for n in members]
            rows = on_device([first + n for n in members], layers[0][0][0].device)  # where its first keys are
            for layer, both in layers[0].items():
                if layer not in self.keys:
                    shapes = [(self.rows, x.shape[0], self.columns, x.shape[2]) for x in both]
                    self.keys[layer], self.values[layer] = map(both[0].new_zeros, shapes)
                for store, part in (self.keys, 0), (self.values, 1):
                    held = store[layer][:, :, :length]
                    held.index_copy_(0, rows, torch.stack([each[layer][part] for each in layers]))

    def own(self, prompt: Prompt) -> Layers:
        """Gives a prompt's keys and values memory of their own, if they are views of what several have."""
        layers = self.prompts[prompt]
        for layer, both in layers.items():
            if both[0].untyped_storage().nbytes() > both[0].nbytes:
                layers[layer] = both[0].clone(), both[1].clone()
        return layers

    def copy(self, rows: list[tuple[int, int]], length: int) -> None:
        """Copies `length` columns from row to row, (source, target); no target is a source."""
        if not rows:
            return
        tensors = [*self.keys.values(), *self.values.values()]
        source, target = on_device([list(each) for each in zip(*rows, strict=True)], tensors[0].device)
        for tensor in tensors:
            held = tensor[:, :, :length]
            held.index_copy_(0, target, held.index_select(0, source))

    def keep(self, episode: str, tokens: Prompt, row: int) -> None:
        """Copies a row's keys and values of these tokens for a later turn; beyond the bound the oldest go."""
        self.kept.pop(episode, None)
        self.kept[episode] = (
            tokens,
            {
                layer: (
                    keys[row, :, : len(tokens)].clone(),
                    self.values[layer][row, :, : len(tokens)].clone(),
                )
                for layer, keys in self.keys.items()
            },
        )
        held = sum(len(tokens) for tokens, _ in self.kept.values())
        while held > self.tokens:
            held -= len(self.kept.pop(next(iter(self.kept)))[0])

    def excess(self) -> list[Prompt]:
        """The prompts to drop so that the others keep within the bound; the newest are used the latest."""
        held, dropped = sum(map(len, self.prompts)), []
        for prompt in reversed(self.prompts):
            if held <= self.tokens:
                break
            held -= len(prompt)
            dropped.append(prompt)
        return dropped


class PromptLayout:
    """Several prompts end to end, each seeing only itself; their keys and values go to the cache.

    What has run before is not run again: each prompt may begin with tokens whose keys and values are held.
    What all of them begin with, the shared prefix, stands once before them if nothing is held.
    """

    def __init__(
        self,
        cache: Cache,
        prompts: list[Prompt],
        shared_prefix: int = 0,
        held: list[tuple[int, Layers]] | None = None,
    ) -> None:
        """shared_prefix: its length, less than any prompt's; held: of each prompt how much, and where."""
        self.cache, self.prompts, self.shared_prefix = cache, prompts, shared_prefix
        self.held = held or [(shared_prefix, {})] * len(prompts)
        self.parts = [prompts[0][:shared_prefix]] * bool(shared_prefix) + [
            p[n:] for p, (n, _) in zip(prompts, self.held, strict=True)
        ]
        """What is run, in order."""
        self.starts = [0] * bool(shared_prefix) + [n for n, _ in self.held]
        """The position of each part's first token."""
        self._bands, self._calls = Bands(), 0
        self._together: list[tuple[list[int], torch.Tensor]] = []
        for prompt in prompts:
            cache.prompts[prompt] = {}

    def fed(self, device: torch.device) -> Int[torch.Tensor, "2 N"]:
        """The tokens that are run, one behind the other, and their positions."""
        tokens = [t for part in self.parts for t in part]
        starts = zip(self.starts, self.parts, strict=True)
        return on_device([tokens, [start + i for start, part in starts for i in range(len(part))]], device)

    def rows(
        self, layers: int, like: torch.Tensor, heads: int, size: int
    ) -> tuple[Cache, Int[torch.Tensor, "N 2"]]:
        """A row for each prompt, in which what is held of it stands, and whose a token that is run is.

        A shared prefix is written to all of them. The prompts' keys and values are views of these rows.
        """
        P, longest = len(self.prompts), max(map(len, self.prompts))
        rows = Cache(P, P * longest)
        beginnings: dict[tuple[int, int], list[int]] = {}
        for n, (start, before) in enumerate(self.held):
            if before:
                beginnings.setdefault((id(before), start), []).append(n)
        for layer in range(layers):
            both = like.new_empty(2, P, heads, longest, size)
            for (_, start), members in beginnings.items():
                for x, held in zip(both, self.held[members[0]][1][layer], strict=True):
                    x[members, :, :start] = held[:, :start]
            rows.keys[layer], rows.values[layer] = both
            for prompt, *own in zip(self.prompts, *both, strict=True):
                key, value = (x[:, : len(prompt)] for x in own)
                self.cache.prompts[prompt][layer] = key, value
        owners = [(0, P)] * bool(self.shared_prefix) + [(n, n + 1) for n in range(P)]
        of = [owner for owner, part in zip(owners, self.parts, strict=True) for _ in part]
        return rows, torch.tensor(of)

    def _join_alike(self, device: torch.device) -> None:
        """Finds the parts that attend in one call, and of each token where what those calls find of it lies.

        They see the same beforehand and are of one length, but for less than PADDING tokens. With them come
        places of their tokens, [parts, length]; where a part is shorter, the last one's: nobody sees those.
        """
        alike: dict[tuple[int, int, int], list[int]] = {}
        for n, (part, start) in enumerate(zip(self.parts, self.starts, strict=True)):
            before = 0 if self.shared_prefix else id(self.held[n][1])
            alike.setdefault((start, before, -(-len(part) // PADDING) * PADDING), []).append(n)
        begins = list(accumulate(map(len, self.parts), initial=0))
        order, found = [0] * begins[-1], 0
        for (*_, length), members in alike.items():
            places = []
            for n in members:
                own = range(begins[n], begins[n + 1])
                order[begins[n] : begins[n + 1]] = range(found, found + len(own))
                places.append([*own, *[own[-1]] * (length - len(own))])
                found += length
            self._together.append((members, on_device(places, device)))
        self._order = on_device(order, device)

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
        """Causal attention within each prompt (see attention.Layout)."""
        layer, self._calls = self._calls, self._calls + 1
        if not self._together:
            self._join_alike(query.device)
        first, found = len(self.parts) - len(self.prompts), []
        for members, places in self._together:
            q, k, v = (x[0][:, places].transpose(0, 1) for x in (query, key, value))
            start = self.starts[members[0]]
            if start:
                before = (
                    (x[0, :, :start] for x in (key, value))
                    if self.shared_prefix
                    else (x[:, :start] for x in self.held[members[0]][1][layer])
                )
                k, v = (
                    torch.cat([x.expand(len(members), *x.shape), y], dim=2)
                    for x, y in zip(before, (k, v), strict=True)
                )
            out = causal_attention(q, k, v, self._bands, scale=scale, window=window, softcap=softcap)
            found.append(out.transpose(0, 1).flatten(1, 2))
            for n, own_k, own_v in zip(members, k, v, strict=True):
                if n >= first:
                    prompt = self.prompts[n - first]
                    own = own_k[:, : len(prompt)].clone(), own_v[:, : len(prompt)].clone()
                    self.cache.prompts[prompt][layer] = own
        return torch.cat(found, dim=1)[None, :, self._order]


class TokenLayout:
    """One new token for each running sequence, seeing all that its row holds."""

    def __init__(self, cache: Cache, lengths: torch.Tensor, columns: int, *, compiled: bool = False) -> None:
        """lengths: tokens already in each row, the new one's position; columns: more than any of them.

        compiled: by decode_kernel, where that can be had.
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
    ) -> Heads:
        """Attention of the newest tokens over their rows (see attention.Layout)."""
        layer, self._calls = self._calls, self._calls + 1
        B, H, _, D = query.shape
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if self.compiled and (kernel := kernel_for(query, value, softcap)):
            return kernel(query, key, value, keys, values, self.lengths, scale=scale, window=window)
        keys[self.row, :, self.lengths] = key[:, :, 0]
        values[self.row, :, self.lengths] = value[:, :, 0]
        keys, values = keys[:B, :, : self.columns], values[:B, :, : self.columns]
        # Query heads that share a key head stand at the same position: they are as many queries of
        # one head, and the keys are read once for all of them.
        shared = query.reshape(B, key.shape[1], H // key.shape[1], D)
        mask = self._mask(window, query.dtype)
        out = masked_attention(shared, keys, values, mask, scale=scale, softcap=softcap)
        return out.reshape(B, H, 1, values.shape[-1])

    def _mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        if window not in self._masks:
            ago = self.lengths[:, None] - torch.arange(self.columns, device=self.lengths.device)
            seen = (ago >= 0) & (ago < (window or self.columns + 1))
            self._masks[window] = additive(seen, dtype)[:, None, None]
        return self._masks[window]
