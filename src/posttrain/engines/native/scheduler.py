"""Who runs next: a queue of waiting sequences, and rows that are refilled as soon as they empty."""

from collections import deque

from posttrain.engines.sequence import Sequence


class Scheduler:
    """First come, first served, within a number of rows and a number of cached tokens.

    A row takes as much cache as the longest running sequence may need, so what is bounded is
    rows × longest.
    """

    def __init__(self, rows: int, cache_tokens: int) -> None:
        self.rows, self.cache_tokens = rows, cache_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def admit(self) -> list[Sequence]:
        """The sequences that start now; they take the rows after those that are running."""
        started: list[Sequence] = []
        if not self.waiting:
            return started
        longest = max((s.longest for s in self.running), default=0)
        while self.waiting and len(self.running) < self.rows:
            longest = max(longest, self.waiting[0].longest)
            if self.running and longest * (len(self.running) + 1) > self.cache_tokens:
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            started.append(sequence)
        return started

    def retire(self, row: int) -> int | None:
        """Frees a row; the row that must be moved into it, if any."""
        last = len(self.running) - 1
        self.running[row] = self.running[last]
        self.running.pop()
        return last if row != last else None
