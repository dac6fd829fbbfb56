"""What a response's length does to its score: linear, cosine, or a soft limit before a hard one."""

import math
from dataclasses import dataclass, fields
from typing import Literal

_READ = {
    "linear": {"penalty"},
    "overlong": {"penalty", "buffer"},
    "cosine": {"right", "wrong", "exceeded", "right_at"},
}


@dataclass(frozen=True, kw_only=True)
class Length:
    """A score's change with the length n of the response.

    - `linear`: score − penalty · min(n / most, 1).
    - `overlong`: score − penalty · min(max((n − (most − buffer)) / buffer, 0), 1): nothing up to
      most − buffer, then a ramp. DAPO, arXiv:2503.14476, eq. 13; lengths there are tokens.
    - `cosine`: the score is replaced. It runs along half a cosine wave from the first number of `right`, or
      of `wrong`, at n = 0 to the second one at `most`, and is `exceeded` from there on. Demystifying Long
      Chain-of-Thought Reasoning, arXiv:2502.03373, section 4.2, whose numbers are the defaults.

    >>> soft = Length(shape="overlong", most=100, buffer=20)
    >>> [soft.shaped(1.0, "x" * n, best=1.0) for n in (80, 90, 100, 500)]
    [1.0, 0.5, 0.0, 0.0]
    >>> cosine = Length(shape="cosine", most=100)
    >>> [round(cosine.shaped(1.0, "x" * n, best=1.0), 2) for n in (0, 50, 99, 100)]
    [2.0, 1.5, 1.0, -10.0]
    """

    shape: Literal["linear", "cosine", "overlong"]
    """How the score depends on the length."""
    most: int
    """The length at which the penalty is full, or from which a response is too long (cosine)."""
    unit: Literal["characters", "words"] = "characters"
    """What is counted; a word is what stands between white space."""
    penalty: float = 1.0
    """For linear and overlong: the most that is taken off."""
    buffer: int = 0
    """For overlong: how far below `most` the ramp begins."""
    right: tuple[float, float] = (2.0, 1.0)
    """For cosine: what a right response gets at length 0, and towards `most`."""
    wrong: tuple[float, float] = (-10.0, 0.0)
    """For cosine: the same of any other response."""
    exceeded: float = -10.0
    """For cosine: what a response gets that is as long as `most`, or longer."""
    right_at: float | None = None
    """For cosine: the least score that is right; without it, the best one."""

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most must be 1 or more, not {self.most}")
        if self.shape == "overlong" and not 1 <= self.buffer <= self.most:
            raise ValueError(f"buffer must lie between 1 and most ({self.most}), not {self.buffer}")
        if not 0 <= self.penalty < math.inf:
            raise ValueError(f"penalty must be 0 or more, not {self.penalty}")
        numbers = (*self.right, *self.wrong, self.exceeded, self.right_at or 0.0)
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError("right, wrong, exceeded and right_at must be finite")
        read = _READ[self.shape] | {"shape", "most", "unit"}
        idle = [f.name for f in fields(self) if f.name not in read and getattr(self, f.name) != f.default]
        if idle:
            raise ValueError(f"{idle[0]} is not read where shape is {self.shape}")

    def shaped(self, score: float, response: str, best: float | None) -> float:
        """The score of a response, with its length; `best` is the score that is right without `right_at`."""
        n = self.size(response)
        if self.shape == "linear":
            return score - self.penalty * min(n / self.most, 1.0)
        if self.shape == "overlong":
            free = self.most - self.buffer
            return score - self.penalty * min(max((n - free) / self.buffer, 0.0), 1.0)
        if n >= self.most:
            return self.exceeded
        least = best if self.right_at is None else self.right_at
        first, last = self.right if least is not None and score >= least else self.wrong
        return last + 0.5 * (first - last) * (1 + math.cos(math.pi * n / self.most))

    @property
    def asks_best(self) -> bool:
        """Whether the best score must be known, to tell right from wrong."""
        return self.shape == "cosine" and self.right_at is None

    def size(self, response: str) -> int:
        """The length of a response in this unit.

        >>> Length(shape="linear", most=9, unit="words").size(" two words ")
        2
        """
        return len(response.split()) if self.unit == "words" else len(response)

    def spares(self, response: str) -> bool:
        """Whether a response keeps its score whole."""
        return self.shape == "overlong" and self.size(response) <= self.most - self.buffer
