"""The order of sequences: a queue of waiting ones, and rows that are refilled as soon as they are empty."""

from collections import deque
from collections.abc import Collection, Iterable

from posttrain.engines.sequence import Sequence

UNIT = 64
"""Columns are a multiple of this. Sequences that start have room for as many tokens, and for a quarter of the
longest one's."""


class Scheduler:
    """First come, first served, within a number of sequences and a number of cached tokens.

    A row holds the sequences whose tokens are equal so far. Each sequence may later need a row of its own,
    with as many columns as the longest running sequence has. So the bound is on sequences × columns.
    Sequences start by their present lengths; when they outgrow the bound, the newest are withdrawn and wait.
    """

    def __init__(self, rows: int, cache_tokens: int) -> None:
        self.rows, self.cache_tokens = rows, cache_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[list[Sequence]] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All running sequences, row by row."""
        return [sequence for row in self.running for sequence in row]

    def columns(self, sequences: Iterable[Sequence]) -> int:
        """Return the columns of the cache that these sequences need for their next tokens, or for all."""
        return self._columns(max(s.longest for s in sequences), max(s.length for s in sequences) + 1)

    def _columns(self, longest: int, needed: int) -> int:
        """Return `longest` if all rows may have that many columns, else `needed` rounded up to few numbers.

        >>> scheduler = Scheduler(4, 4000)
        >>> scheduler._columns(1000, 30), scheduler._columns(2000, 30), scheduler._columns(2000, 1100)
        (1000, 64, 1152)
        """
        fits = self.rows * longest <= self.cache_tokens
        unit = longest if fits else max(UNIT, (1 << needed.bit_length()) // 16)
        return min(longest, -(-needed // unit) * unit)

    def admit(self) -> list[list[Sequence]]:
        """Start waiting sequences in new last rows, the samples of a prompt in one; return these rows."""
        if not self.waiting:
            return []
        sequences = self.sequences
        longest, length = (
            max((getattr(s, name) for s in sequences), default=0) for name in ("longest", "length")
        )
        count = len(sequences)
        started: dict[tuple[int, ...], list[Sequence]] = {}
        while self.waiting and count < self.rows:
            longest, length = max(longest, self.waiting[0].longest), max(length, self.waiting[0].length)
            if count and self._columns(longest, length * 5 // 4 + UNIT) * (count + 1) > self.cache_tokens:
                break
            sequence = self.waiting.popleft()
            started.setdefault(sequence.prompt, []).append(sequence)
            count += 1
        self.running += started.values()
        return [*started.values()]

    def withdraw_newest(self) -> tuple[list[Sequence], list[tuple[int, int]]]:
        """Withdraw the sequences that came last until the next tokens of the others fit the bound.

        Return them, and the copies to make at once (see split_rows).
        """
        running = sorted(self.sequences, key=lambda sequence: sequence.ticket)
        withdrawn: list[Sequence] = []
        while len(running) > 1 and len(running) * self.columns(running) > self.cache_tokens:
            withdrawn.append(running.pop())
        if not withdrawn:
            return [], []
        return withdrawn, self.split_rows(0, {sequence.ticket for sequence in withdrawn})

    def split_rows(self, first: int, tickets: Collection[int]) -> list[tuple[int, int]]:
        """Split the rows from `first` on by the newest tokens of their sequences, leaving out these tickets.

        The last rows fill rows that became empty. Return the copies to make at once: (row, row that takes its
        keys and values). A target is never a source.
        """
        running, copies, split = self.running, [], []
        for row in range(first, len(running)):
            by_token: dict[int, list[Sequence]] = {}
            for sequence in (s for s in running[row] if s.ticket not in tickets):
                by_token.setdefault(sequence.tokens[-1], []).append(sequence)
            running[row], *others = by_token.values() or [[]]
            split += [(row, other) for other in others]
        empty = deque(row for row in range(first, len(running)) if not running[row])
        for row, other in split:
            target = empty.popleft() if empty else len(running)
            running[target : target + 1] = [other]
            copies.append((row, target))
        while empty:
            if last := running.pop():
                copies.append((len(running), target := empty.popleft()))
                running[target] = last
            else:
                empty.pop()
        return copies
