"""A group of rows in a packed sequence: their common beginning once, and which tokens see which.

    branches   the prompt, then the rest of each row, which sees the prompt and itself
    tree       rests that begin alike share those tokens too: each token sees the tokens on its path from the
               root, and none is computed twice

Answers to one question often begin alike, and many short ones are equal. A tree attends under a mask; a
group that is too long for a mask uses branches, each of which is plainly causal.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Int

from posttrain.models.attention import common

WHOLE_PROMPT_GROUP = 512
"""The most tokens of a prompt group that attends in one call, under a mask; longer ones attend by branch."""

EVEN = 64
"""In 16 bits the model's input is filled up to a multiple of this number of tokens: oneDNN compiles and keeps
kernels for every length, 10 MiB each for SmolLM2-135M. No token sees the filling ones."""
EVEN_PROMPT_GROUP = 16
"""The same for the tokens that attend in one call, at 3 MiB for every length."""


def is_half(x: torch.Tensor) -> bool:
    """Return whether the tensor has numbers of 16 bits."""
    return x.dtype.itemsize == 2


@dataclass(frozen=True)
class PromptGroup:
    """The place of a prompt and its branches, or of a tree, in the packed sequence."""

    start: int
    prefix: int
    """Number of tokens of the prompt, after the shared prefix; of a tree, of all tokens."""
    branches: tuple[int, ...]
    """Number of tokens of each rest, in order; together with the prompt they fill [start, stop)."""
    parents: tuple[int, ...] = ()
    """For each token of a tree the index of the token before it, from `start`; -1: no token, or the shared
    prefix."""

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.prefix + sum(self.branches)

    @property
    def is_causal(self) -> bool:
        """True if each token sees all tokens of the group before it, apart from windows."""
        return not (self.branches or self.parents)

    def is_plain(self, shared: int, window: int | None) -> bool:
        """Return whether each token sees exactly the group's tokens before it, and no shared prefix."""
        return self.is_causal and not shared and (window is None or window >= self.stop - self.start)

    @property
    def spare(self) -> int:
        """Number of filling tokens after the group, to a multiple of EVEN_PROMPT_GROUP."""
        return (self.start - self.stop) % EVEN_PROMPT_GROUP


def sees(group: PromptGroup, shared: int, position: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return the mask [group's tokens, shared prefix and group's tokens]: True where a token sees another.

    shared: the length of the shared prefix; position: [group's tokens].
    """
    before = torch.cat([torch.arange(shared).to(position), position])
    if group.parents:
        visible = np.eye(len(position), dtype=bool)  # with tensors the loop takes ten times as long
        for child, parent in enumerate(group.parents):
            if parent >= 0:
                visible[child] |= visible[parent]
        mask = torch.from_numpy(np.pad(visible, ((0, 0), (shared, 0)), constant_values=True)).to(
            position.device
        )
    else:
        branch = torch.repeat_interleave(
            torch.arange(len(group.branches) + 1), torch.tensor([shared + group.prefix, *group.branches])
        ).to(position.device)
        mask = ((branch[shared:, None] == branch) | (branch == 0)) & (before <= position[:, None])
    return mask if window is None else mask & (before > position[:, None] - window)


def branches(group: PromptGroup, shared: int) -> Iterator[tuple[int, int, int]]:
    """Yield (visible, start, stop) of the prompt and of each branch, in order.

    Tokens from start to stop see each other and the first `visible` tokens. Indices count from the start of
    the shared prefix, whose length is `shared`.
    """
    P = shared + group.prefix
    ends = torch.tensor([P, *group.branches]).cumsum(0).tolist()
    for start, stop in zip([shared, *ends[:-1]], ends, strict=True):
        if start < stop:
            yield min(P, start), start, stop


@dataclass
class PackedGroup:
    """The tokens of a group in a packed sequence."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """For each token, the number of tokens before it in its row."""
    paths: dict[int, list[int]] = field(default_factory=dict)
    """For each row, the indices of its tokens in `tokens`."""


def pack_group(
    rows: Mapping[int, list[int]],
    prompt: int,
    start: int,
    trees: bool = False,
    most: int = WHOLE_PROMPT_GROUP,
) -> tuple[PromptGroup, PackedGroup]:
    """Pack rows that begin with the same `prompt` tokens, from `start` on.

    With `trees` as a tree, if that saves tokens and has at most `most`; otherwise equal rows are one branch.
    Without `trees` each row is a branch.

    >>> rows = {0: [7, 8, 1], 1: [7, 8, 2]}
    >>> group, packed = pack_group(rows, prompt=1, start=5)
    >>> group.branches, packed.tokens, packed.paths
    ((2, 2), [7, 8, 1, 8, 2], {0: [0, 1, 2], 1: [0, 3, 4]})
    >>> group, packed = pack_group(rows, prompt=1, start=5, trees=True)
    >>> group.parents, packed.tokens, packed.paths
    ((-1, 0, 1, 1), [7, 8, 1, 2], {0: [0, 1, 2], 1: [0, 1, 3]})
    """
    if trees and len(rows) > 1 and (tree := _pack_tree(rows, most)):
        parents, packed = tree
        n = len(packed.tokens)
        if n < prompt + sum(len(row) - prompt for row in rows.values()):
            chain = parents == list(range(-1, n - 1))
            return PromptGroup(start, n, (), () if chain else tuple(parents)), packed
    packed, branches = PackedGroup([*next(iter(rows.values()))[:prompt]], [*range(prompt)]), list[int]()
    row_of: dict[tuple[int, ...], int] = {}
    for i, row in rows.items():
        rest = row[prompt:]
        if trees and (other := row_of.setdefault(tuple(rest), i)) != i:
            packed.paths[i] = packed.paths[other]
            continue
        first = len(packed.tokens)
        packed.paths[i] = [*range(prompt), *range(first, first + len(rest))]
        packed.tokens += rest
        packed.depths += range(prompt, len(row))
        branches.append(len(rest))
    # A single branch with its prompt is plainly causal.
    if len(branches) == 1:
        return PromptGroup(start, len(packed.tokens), ()), packed
    return PromptGroup(start, prompt, tuple(branches)), packed


def _pack_tree(rows: Mapping[int, list[int]], most: int) -> tuple[list[int], PackedGroup] | None:
    """Return (the index of each token's parent, the packed tokens), or None for more than `most` tokens."""
    parents, packed = list[int](), PackedGroup()
    earlier: list[tuple[list[int], int]] = []  # sorted: a row shares the most with one of its neighbours
    for i, row in rows.items():
        at = bisect(earlier, (row, i))
        near = [(common([row, other]), n) for other, n in earlier[max(0, at - 1) : at + 1]]
        shared, n = max(near, default=(0, i))
        path = packed.paths[n][:shared] if shared else []
        new = range(len(parents), len(parents) + len(row) - shared)
        if new.stop > most:
            return None
        parents += [(path or [-1])[-1], *new][: len(new)]
        packed.tokens += row[shared:]
        packed.depths += range(shared, len(row))
        packed.paths[i] = [*path, *new]
        earlier.insert(at, (row, i))
    return parents, packed


def rows_read(
    groups: Sequence[PromptGroup], shared: int, count: int
) -> tuple[list[Int[torch.Tensor, "S L"]], Int[torch.Tensor, "N"]]:
    """Return the tokens of each row of a pack of `count` tokens from its first on, and where each token is.

    Rows come in pieces of at most `count` tokens, or of one row, in the order of their lengths. In a piece
    they are as long as the longest: shorter ones repeat their last token. shared: the length of the shared
    prefix. The second result indexes all pieces, row after row; tokens of no row are at 0.

    >>> pieces, of_token = rows_read([PromptGroup(1, 1, (1, 2))], 1, 6)
    >>> [places.tolist() for places in pieces], of_token.tolist()
    ([[[0, 1, 2]], [[0, 1, 3, 4]]], [0, 1, 2, 5, 6, 0])
    """
    rows = [row for group in groups for rest in _rows(group) if (row := [*range(shared), *rest])]
    pieces: list[list[list[int]]] = []
    for row in sorted(rows or [[*range(shared)]], key=len):
        if not pieces or (len(pieces[-1]) + 1) * len(row) > count:
            pieces.append([])
        pieces[-1].append(row)
    of_token, end, places = [-1] * count, 0, []
    for piece in pieces:
        longest = len(piece[-1])
        for row in piece:
            for t, token in enumerate(row):
                of_token[token] = end + t if of_token[token] < 0 else of_token[token]
            end += longest
        places.append(torch.tensor([[*row, *row[-1:] * (longest - len(row))] for row in piece]))
    return places, torch.tensor(of_token).clamp(min=0)


def _rows(group: PromptGroup) -> Iterator[list[int]]:
    """Yield the tokens of each row of a group, from its first after the shared prefix on."""
    if group.parents:
        for leaf in sorted({*range(len(group.parents))} - {*group.parents}):
            row, node = [], leaf
            while node >= 0:
                row.append(group.start + node)
                node = group.parents[node]
            yield row[::-1]
        return
    prompt, first = [*range(group.start, group.start + group.prefix)], group.start + group.prefix
    for length in group.branches or (0,):
        yield [*prompt, *range(first, first + length)]
        first += length
