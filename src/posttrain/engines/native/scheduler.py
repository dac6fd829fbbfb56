"""Who runs next: a queue of waiting sequences, and rows that are refilled as soon as they empty."""

from collections import deque
from collections.abc import Collection

from posttrain.engines.sequence import Sequence


class Scheduler:
    """First come, first served, within a number of sequences and a number of cached tokens.

    A row holds the sequences that have come to the same text. However their draws part them, each finds room
    for a row of its own, which takes as much cache as the longest running sequence may need: what is bounded
    is sequences × longest.
    """

    def __init__(self, rows: int, cache_tokens: int) -> None:
        self.rows, self.cache_tokens = rows, cache_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[list[Sequence]] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All that are running, row by row."""
        return [sequence for row in self.running for sequence in row]

    def admit(self) -> list[list[Sequence]]:
        """The rows that start now, behind those that are running: the samples of each prompt in one."""
        if not self.waiting:
            return []
        running = self.sequences
        longest, count = max((s.longest for s in running), default=0), len(running)
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

    def part(self, first: int, ended: Collection[int]) -> list[tuple[int, int]]:
        """Parts the rows from `first` on by the newest tokens of their sequences, without those that ended.

        The last rows fill those that all have left. What is to be copied, all at once: (row, the row that
        takes its keys and values); none is both.
        """
        running, copies, apart = self.running, [], []
        for row in range(first, len(running)):
            alike: dict[int, list[Sequence]] = {}
            for sequence in (s for s in running[row] if s.ticket not in ended):
                alike.setdefault(sequence.tokens[-1], []).append(sequence)
            running[row], *others = alike.values() or [[]]
            apart += [(row, other) for other in others]
        empty = deque(row for row in range(first, len(running)) if not running[row])
        for row, other in apart:
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
