"""A profile: time by parts, with the work that was done in each, and what this machine can do at best.

A part's own time is what no part within it has, so a part is the sum of its parts and of its rest by
construction. Who opens and closes parts is in profile_parts.py.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

WHOLE = "an update"
MEASURE_S = 0.4
"""Seconds for which one thing is measured."""
READ = 256 << 20
"""Bytes that are read to see how fast memory is, more than a processor's cache holds; on a GPU 16 times."""


@dataclass
class Part:
    """What was spent under one name, and the parts within it."""

    name: str
    rest: float = 0.0
    """Seconds that no part within it has."""
    calls: int = 0
    tokens: int = 0
    flop: float = 0.0
    bytes: float = 0.0
    parts: dict[str, "Part"] = field(default_factory=dict)

    def told(self, updates: int, peak: "Peak", whole: float = 0.0) -> dict[str, Any]:
        """As plain numbers, of a mean update: work with that of its parts, and the share of the possible."""
        seconds, flop, read = (self._sum(what) / updates for what in ("rest", "flop", "bytes"))
        whole = whole or seconds
        return {
            "name": self.name,
            "seconds": seconds,
            "share": seconds / whole if whole else 0.0,
            "rest": self.rest / updates,
            "calls": self.calls / updates,
            "tokens": self.tokens / updates,
            "flop": flop,
            "flop_of_peak": flop / seconds / peak.flop if flop and seconds else None,
            "bytes": read,
            "bytes_of_peak": read / seconds / peak.bytes if read and seconds else None,
            "parts": [part.told(updates, peak, whole) for part in self.parts.values()],
        }

    def _sum(self, what: str) -> float:
        own: float = getattr(self, what)
        return own + sum(part._sum(what) for part in self.parts.values())


class Clock:
    """What passes counts for the innermost part that is open; a GPU is waited for before each look.

    sealed: parts of which neither what is within nor what work they do is looked at.
    """

    def __init__(self, device: torch.device, sealed: tuple[str, ...] = ("canary",)) -> None:
        self.device, self.sealed = device, sealed
        self.reset()

    def reset(self) -> None:
        """Forgets everything; the whole is open."""
        self.whole = Part(WHOLE)
        self.open = [self.whole]
        self._last = self._now()

    @property
    def now(self) -> str:
        """The innermost part that is open."""
        return self.open[-1].name

    def enter(self, name: str) -> int:
        """Opens a part, unless it is the innermost already; what `leave` is told to close it again."""
        depth, top = len(self.open), self.open[-1]
        if top.name != name and top.name not in self.sealed:
            self._tick()
            part = top.parts.setdefault(name, Part(name))
            part.calls += 1
            self.open.append(part)
        return depth

    def leave(self, depth: int) -> None:
        """Closes what was opened then, with all that is still open within it."""
        if len(self.open) > depth:
            self._tick()
            del self.open[depth:]

    def add(self, tokens: int = 0, flop: float = 0.0, read: float = 0.0) -> None:
        """Counts work for the innermost part."""
        top = self.open[-1]
        if top.name not in self.sealed:
            top.tokens, top.flop, top.bytes = top.tokens + tokens, top.flop + flop, top.bytes + read

    def credit(self, name: str, seconds: float, flop: float, read: float) -> None:
        """So much of the innermost part's time, which just passed, was of a part within it."""
        top = self.open[-1]
        if top.name not in self.sealed:
            self._tick()
            top.rest -= seconds
            part = top.parts.setdefault(name, Part(name))
            part.calls, part.rest = part.calls + 1, part.rest + seconds
            part.flop, part.bytes = part.flop + flop, part.bytes + read

    def stop(self) -> None:
        """Ends the whole: what passes from now on counts for nothing in it."""
        self._tick()
        self.open = [Part("afterwards")]

    def _tick(self) -> None:
        now = self._now()
        self.open[-1].rest += now - self._last
        self._last = now

    def _now(self) -> float:
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass(frozen=True)
class Peak:
    """The most that this machine was seen to do in a second."""

    flop: float
    bytes: float
    """Read from memory."""


def measured(device: torch.device, dtype: torch.dtype) -> Peak:
    """FLOP/s of square products in this type and bytes/s of a sum, the best of some, with the threads of now.

    Products grow until one takes a hundredth of a second. No global random numbers are drawn.
    """
    clock, best, n = Clock(device), 0.0, 128
    while True:
        n, generator = 2 * n, torch.Generator().manual_seed(0)
        one, other = (torch.rand(n, n, generator=generator).to(device, dtype) for _ in range(2))
        seconds = _quickest(clock, lambda one=one, other=other: torch.mm(one, other))  # type: ignore[misc]
        best = max(best, 2.0 * n**3 / seconds)
        if seconds > 0.01 or n >= 1 << 14:
            break
    del one, other
    words = torch.ones(READ * (16 if device.type == "cuda" else 1) // 8, dtype=torch.int64, device=device)
    return Peak(best, words.nbytes / _quickest(clock, words.sum))


def _quickest(clock: Clock, run: Callable[[], object]) -> float:
    """The seconds of the quickest of at least three calls."""
    run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < MEASURE_S and len(times) < 1000):
        begin = clock._now()
        run()
        times.append(clock._now() - begin)
    return min(times)
