"""How a run searches: `[search]`."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from posttrain.search.best_first import beam, best_first, best_of_n
from posttrain.search.drive import Make
from posttrain.search.protocol import Budget
from posttrain.search.puct import puct, rmax


@dataclass(frozen=True, kw_only=True)
class SearchChoice:
    """How moves are searched, of a proof, of an answer's steps: a tree for each task."""

    strategy: Literal["best_first", "beam", "best_of_n", "puct", "rmax"] = "best_first"
    """best_first: the likeliest move that was not followed (BFS-Prover); beam; best_of_n: plain sampling,
    move by move; puct: AlphaZero's rule, without values by what is likely; rmax: what leads to new states."""
    moves: int = 128
    """Moves that a search may draw, repeated ones included."""
    tokens: int = 0
    """Tokens of these moves; 0: any number."""
    depth: int = 32
    """Moves from the start to a state."""
    width: int = 8
    """Moves that a state says at a time. With best_first, puct and rmax it may say more later."""
    keep: int = 8
    """States that a beam keeps at each depth."""
    alpha: float = 0.5
    """A way of L moves has the score Σ log π / L^alpha."""
    c: float = 1.25
    """How much puct goes by what is likely, against what it has found."""
    timeout_s: int = 2
    """Seconds that one tactic may take in Coq; Lean counts what it does, and goes by no clock."""
    separator: str = "\n"
    """What ends a step of an answer, where moves are such steps."""

    def __post_init__(self) -> None:
        Budget(moves=self.moves, tokens=self.tokens, depth=self.depth)
        if min(self.width, self.keep, self.timeout_s) < 1:
            raise ValueError("width, keep and timeout_s must be 1 or more")
        if min(self.alpha, self.c) < 0:
            raise ValueError("alpha and c must be 0 or more")
        if not self.separator:
            raise ValueError("separator must not be empty")

    @property
    def budget(self) -> Budget:
        """What a search may spend."""
        return Budget(moves=self.moves, tokens=self.tokens, depth=self.depth)

    def make(self) -> Make:
        """Begins a search from a root and a budget."""
        width = self.width
        made: dict[str, Make] = {
            "best_first": partial(best_first, width=width, alpha=self.alpha),
            "beam": partial(beam, width=width, keep=self.keep, alpha=self.alpha),
            "best_of_n": partial(best_of_n, width=width),
            "puct": partial(puct, width=width, c=self.c, values=False),
            "rmax": partial(rmax, width=width),
        }
        return made[self.strategy]

    def unread(self) -> dict[str, str]:
        """Keys that nothing reads beside the others, each with the reason."""
        read = {"alpha": ("best_first", "beam"), "keep": ("beam",), "c": ("puct",)}
        return {
            key: f"search.strategy is {self.strategy!r}"
            for key, by in read.items()
            if self.strategy not in by
        }
