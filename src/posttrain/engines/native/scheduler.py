"""The order of sequences: a queue of waiting ones, and rows that are refilled as soon as they are empty."""

from collections import deque
from collections.abc import Collection

from posttrain.engines.sequence import Sequence


class Scheduler:
    """First come, first served, within a number of sequences and a number of cached tokens.

    A row holds the sequences whose tokens are equal so far. Each sequence may later need a row of its own,
    with as much cache as the longest running sequence. So the bound is on sequences × longest.
    """

    def __init__(self, rows: int, cache_tokens: int) -> None:
        self.rows, self.cache_tokens = rows, cache_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[list[Sequence]] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All running sequences, row by row."""
        return [sequence for row in self.running for sequence in row]

    def admit(self) -> list[list[Sequence]]:
        """Start waiting sequences in new last rows, the samples of a prompt in one; return these rows."""
        if not self.waiting:
            return []
        sequences = self.sequences
        longest, count = max((s.longest for s in sequences), default=0), len(sequences)
        started: dict[tuple[int, ...], list[Sequence]] = {}
        while self.waiting and count < self.rows:
            longest = max(longest, self.waiting[0].longest)
            if count and longest * (count + 1) > self.cache_tokens:
                break
            sequence = self.waiting.popleft()
            started.setdefault(sequence.prompt, []).append(sequence)
            count += 1
        self.running += started.values()
        return [*started.values()]

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
