"""A group of rows in a packed sequence: what they begin with once, and who of its tokens sees whom.

    branches   the prompt, and behind it the rest of each row, which sees the prompt and itself
    tree       rows that go on alike for a while have that in common too: each token sees those before it on
               its way from the root, and none is computed twice

Answers to one question often begin alike, and of short ones many are the same. A tree attends under a mask; a
group that is too long for one keeps to branches, each of which is plainly causal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

WHOLE_PROMPT_GROUP = 512
"""Up to this many tokens a prompt group attends in one call under a mask; longer ones branch by branch."""

EVEN = 64
"""In 16 bits the model is shown a multiple of so many tokens: for every number of them that it meets, oneDNN
compiles kernels, and keeps them: 10 MiB each for SmolLM2-135M. What fills up is seen by none."""
EVEN_PROMPT_GROUP = 16
"""The same for the tokens that attend at once, 3 MiB for every number of them; not where branch by branch."""


def is_half(x: torch.Tensor) -> bool:
    """Whether these are numbers of 16 bits."""
    return x.dtype.itemsize == 2


@dataclass(frozen=True)
class PromptGroup:
    """Where a shared prompt and its branches lie in the packed sequence."""

    start: int
    prefix: int
    """Tokens of the shared prompt, after the shared prefix."""
    branches: tuple[int, ...]
    """Tokens of each rest, in order; together with the prefix they fill [start, stop)."""
    parents: tuple[int, ...] = ()
    """Of a tree, for each of its tokens the one before it, counted from `start`; -1: none, or the shared
    prefix. All of its tokens are then its prefix."""

    @property
    def stop(self) -> int:
        """One past the last token."""
        return self.start + self.prefix + sum(self.branches)

    @property
    def is_causal(self) -> bool:
        """Whether each token sees all that stand before it."""
        return not (self.branches or self.parents)

    def is_plain(self, seen: int, window: int | None) -> bool:
        """Whether each token sees all that stand before it, and those alone."""
        return self.is_causal and not seen and (window is None or window >= self.stop - self.start)

    @property
    def spare(self) -> int:
        """Tokens after it that make its number even."""
        return (self.start - self.stop) % EVEN_PROMPT_GROUP


def sees(group: PromptGroup, seen: int, position: torch.Tensor, window: int | None) -> torch.Tensor:
    """[tokens of the prompt group, tokens of the shared prefix that it sees and of the prompt group]."""
    before = torch.cat([torch.arange(seen).to(position), position])
    if group.parents:
        ways = np.eye(len(position), dtype=bool)  # with tensors the loop takes ten times as long
        for child, parent in enumerate(group.parents):
            if parent >= 0:
                ways[child] |= ways[parent]
        mask = torch.from_numpy(np.pad(ways, ((0, 0), (seen, 0)), constant_values=True)).to(position.device)
    else:
        branch = torch.repeat_interleave(
            torch.arange(len(group.branches) + 1), torch.tensor([seen + group.prefix, *group.branches])
        ).to(position.device)
        mask = ((branch[seen:, None] == branch) | (branch == 0)) & (before <= position[:, None])
    return mask if window is None else mask & (before > position[:, None] - window)


def branches(group: PromptGroup, seen: int) -> Iterator[tuple[int, int, int]]:
    """(shared, start, stop) of the prefix and of each branch, in order.

    Tokens from start to stop see each other and the first `shared`; the `seen` before the group count too.
    """
    P = seen + group.prefix
    ends = torch.tensor([P, *group.branches]).cumsum(0).tolist()
    for start, stop in zip([seen, *ends[:-1]], ends, strict=True):
        if start < stop:
            yield min(P, start), start, stop


@dataclass
class Laid:
    """What a group puts into a packed sequence."""

    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    """How many tokens of a row stand before each."""
    ways: dict[int, list[int]] = field(default_factory=dict)
    """Of each row, which of the tokens it is."""


def grouped(
    rows: Mapping[int, Sequence[int]],
    prompt: int,
    start: int,
    trees: bool = False,
    most: int = WHOLE_PROMPT_GROUP,
) -> tuple[PromptGroup, Laid]:
    """Rows that begin with the same `prompt` tokens, laid out from `start` on.

    With `trees` as a tree, if that saves anything and has at most so many tokens; and otherwise rows that are
    the same are one branch.

    >>> rows = {0: [7, 8, 1], 1: [7, 8, 2]}
    >>> group, laid = grouped(rows, prompt=1, start=5)
    >>> group.branches, laid.tokens, laid.ways
    ((2, 2), [7, 8, 1, 8, 2], {0: [0, 1, 2], 1: [0, 3, 4]})
    >>> group, laid = grouped(rows, prompt=1, start=5, trees=True)
    >>> group.parents, laid.tokens, laid.ways
    ((-1, 0, 1, 1), [7, 8, 1, 2], {0: [0, 1, 2], 1: [0, 1, 3]})
    """
    if trees and len(rows) > 1 and (tree := _tree(rows, most)):
        parents, laid = tree
        n = len(laid.tokens)
        if n < prompt + sum(len(row) - prompt for row in rows.values()):
            chain = parents == list(range(-1, n - 1))
            return PromptGroup(start, n, (), () if chain else tuple(parents)), laid
    laid, branches = Laid([*next(iter(rows.values()))[:prompt]], [*range(prompt)]), list[int]()
    alike: dict[tuple[int, ...], int] = {}
    for i, row in rows.items():
        rest = row[prompt:]
        if trees and (other := alike.setdefault(tuple(rest), i)) != i:
            laid.ways[i] = laid.ways[other]
            continue
        first = len(laid.tokens)
        laid.ways[i] = [*range(prompt), *range(first, first + len(rest))]
        laid.tokens += rest
        laid.depths += range(prompt, len(row))
        branches.append(len(rest))
    # A row by itself is a prompt with one branch, and plainly causal.
    if len(branches) == 1:
        return PromptGroup(start, len(laid.tokens), ()), laid
    return PromptGroup(start, prompt, tuple(branches)), laid


def _tree(rows: Mapping[int, Sequence[int]], most: int) -> tuple[list[int], Laid] | None:
    """The token before each, and what is laid; None if there are more tokens."""
    parents, laid = list[int](), Laid()
    known: dict[tuple[int, int], int] = {}
    for i, row in rows.items():
        node, laid.ways[i] = -1, []
        for depth, token in enumerate(row):
            place = known.setdefault((node, token), len(parents))
            if place == len(parents):
                if place >= most:
                    return None
                parents.append(node)
                laid.tokens.append(token)
                laid.depths.append(depth)
            node = place
            laid.ways[i].append(node)
    return parents, laid
