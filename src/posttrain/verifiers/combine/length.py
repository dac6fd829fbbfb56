"""Change a score by the length of the response: linear, overlong or cosine."""

import math
from dataclasses import dataclass, fields
from typing import Literal

_USED = {
    "linear": {"penalty"},
    "overlong": {"penalty", "buffer"},
    "cosine": {"right", "wrong", "exceeded", "right_at"},
}


@dataclass(frozen=True, kw_only=True)
class Length:
    """Change a score by the length n of the response.

    - `linear`: score − penalty · min(n / most, 1).
    - `overlong`: score − penalty · min(max((n − (most − buffer)) / buffer, 0), 1): nothing up to
      most − buffer, then a ramp. DAPO, arXiv:2503.14476, eq. 13; lengths there are tokens.
    - `cosine`: the score is replaced by (b + (a − b) · (1 + cos(π n / most)) / 2), with (a, b) = `right` for
      a right response and `wrong` for any other; from n = `most` on it is `exceeded`. Demystifying Long
      Chain-of-Thought Reasoning, arXiv:2502.03373, section 4.2, whose numbers are the defaults.

    >>> soft = Length(shape="overlong", most=100, buffer=20)
    >>> [soft.adjust(1.0, "x" * n, best=1.0) for n in (80, 90, 100, 500)]
    [1.0, 0.5, 0.0, 0.0]
    >>> cosine = Length(shape="cosine", most=100)
    >>> [round(cosine.adjust(1.0, "x" * n, best=1.0), 2) for n in (0, 50, 99, 100)]
    [2.0, 1.5, 1.0, -10.0]
    """

    shape: Literal["linear", "cosine", "overlong"]
    """How the score depends on the length."""
    most: int
    """The length at which the penalty is full, or from which a response is too long (cosine)."""
    unit: Literal["characters", "words"] = "characters"
    """Unit of length; words are separated by white space."""
    penalty: float = 1.0
    """For linear and overlong: the largest penalty."""
    buffer: int = 0
    """For overlong: the ramp begins at `most` − `buffer`."""
    right: tuple[float, float] = (2.0, 1.0)
    """For cosine: the score of a right response at length 0, and just below `most`."""
    wrong: tuple[float, float] = (-10.0, 0.0)
    """For cosine: the same for any other response."""
    exceeded: float = -10.0
    """For cosine: the score of a response of length `most` or more."""
    right_at: float | None = None
    """For cosine: the lowest score that counts as right; without it, the verifier's best score."""

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
        used = _USED[self.shape] | {"shape", "most", "unit"}
        idle = [f.name for f in fields(self) if f.name not in used and getattr(self, f.name) != f.default]
        if idle:
            raise ValueError(f"{idle[0]} is not read where shape is {self.shape}")

    def adjust(self, score: float, response: str, best: float | None) -> float:
        """Return the score changed by the response's length; `best` is used where `right_at` is None."""
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
    def needs_best(self) -> bool:
        """Whether the best score must be known, to tell right responses from wrong ones."""
        return self.shape == "cosine" and self.right_at is None

    def size(self, response: str) -> int:
        """Return the length of a response in `unit`.

        >>> Length(shape="linear", most=9, unit="words").size(" two words ")
        2
        """
        return len(response.split()) if self.unit == "words" else len(response)

    def is_free(self, response: str) -> bool:
        """Whether the length leaves the score of this response unchanged."""
        return self.shape == "overlong" and self.size(response) <= self.most - self.buffer
