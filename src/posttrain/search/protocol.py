"""What a search is: it asks three questions, and never calls anything.

    Propose(state)       moves that the policy says in a state         answered by an engine
    Apply(state, move)   where a move leads, or why it leads nowhere   answered by Steps
    Value(state)         how likely the state is to end well           answered by the policy, when asked that

A search is a generator that yields questions and is sent their answers, so it is pure: the same answers make
the same tree, whatever runs beside it. What a state proposes depends on it and on what it has said, so the
answers are the same too, and a search that was cut short is made again by beginning it again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from posttrain.types import Message, Task, Verdict

HOLE = "\0"
"""Stands in a move where the proof of a part goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a search stands: the moves said from the root, and what they came to.

    It holds nothing that is open, so it can be pickled, and reached again by saying its moves.
    """

    task: Task
    moves: tuple[str, ...] = ()
    shown: tuple[Message, ...] = ()
    """What the policy reads: the last message asks for the next move."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """The schemas of functions that it is told of."""
    said: str = ""
    """What it has said of its answer, behind which it goes on."""
    key: str = ""
    """Equal keys are one node: nothing that comes after may depend on anything else."""
    parts: tuple["State", ...] = ()
    """Goals that can be proved apart, each as a state of its own that shows nothing of the others; empty if
    there is one, or if what is said of one may bear on another. A part that is done proves itself alone."""
    around: tuple[str, str] = ("", "")
    """What stands before and behind the proof of a part, where those of all parts stand in their order."""
    taken: str = ""
    """The last move as it stands in the answer, with HOLE for each part that it leaves out; the parts that it
    leaves open come before those in `parts`. Without it, it stands there as in `moves`."""
    done: bool = False
    """Whether nothing is left to say. A verifier then judges the whole."""
    text: str = ""
    """Then the answer, as the verifier reads it. A prover's states hold it as far as it has come."""
    verdict: Verdict | None = None
    """What an environment, which judges itself, has said of that end."""
    held: Any = None
    """What an environment holds there."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A move that leads nowhere, or a task that cannot be begun, and why."""

    label: str
    """A class to count: error, forbidden, timeout, died, output, repeated, ..."""
    reason: str = ""
    """One line for a person."""


@dataclass(frozen=True, slots=True)
class Move:
    """What a policy has said in a state."""

    text: str
    logp: float
    """Its log-probability under the policy that said it, at the temperature at which it was drawn."""
    tokens: tuple[int, ...] = ()
    logp_gen: tuple[float, ...] = ()
    """Of each token, under what it was drawn from."""
    logp_policy: tuple[float, ...] = ()
    version: tuple[int, ...] = ()
    ended: bool = True
    """Whether it came to its end, and was not cut off by its length."""
    sketch: bool = False
    """Whether it was said where a sketch was asked for."""

    @property
    def counted(self) -> float:
        """log π as a search counts it: of a sketch the mean of its tokens', as its length says nothing of
        what it leaves to do."""
        return self.logp / max(len(self.tokens), 1) if self.sketch else self.logp


class Transitions(Protocol):
    """Where moves lead. Pure like an `Env`: no clock, no draw, nothing kept that a state does not hold.

    Batched, as a prover answers faster than one can ask. A move that leads nowhere is Refused, with its
    class; whatever happens to a prover (it dies, hangs, floods), every question is answered.
    """

    can_sketch: ClassVar[bool] = False
    """Whether a move may be a sketch: many moves at once, with holes."""
    stop: tuple[str, ...] = ()
    """Strings that end a move, besides the policy's own end."""

    def begin(self, tasks: Sequence[Task]) -> list[State | Refused]:
        """The state in which each task begins."""
        ...

    def apply(self, asked: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """Where each move leads from its state."""
        ...

    def lemma(self, state: State) -> Task | None:
        """Return a state as a task of its own, with what is known in it; None if it cannot be one."""
        return None

    def trim(self, end: State) -> State:
        """An end without what its answer does not need, as lemmas nothing uses; itself if nothing tells."""
        return end

    def close(self) -> None:
        """Ends what it has started."""
        return


# ---------------------------------------------------------------------- questions


@dataclass(frozen=True, slots=True)
class Propose:
    """Moves in a state: those with the numbers first ... first + count - 1 of all that it may ever say.

    What it has said is not said again, where the engine can exclude it; moves that are asked for together
    may be alike.
    """

    state: State
    first: int
    count: int
    said: tuple[Move, ...] = ()
    sketch: bool = False
    """Whether a sketch is asked for: many moves at once, with holes."""


@dataclass(frozen=True, slots=True)
class Apply:
    asked: tuple[tuple[State, str], ...]


@dataclass(frozen=True, slots=True)
class StateValue:
    """How likely these states are to end well."""

    states: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class ValueTarget:
    """What the policy should have said of these states' values, each by whether it ends well."""

    states: tuple[State, ...]
    ends: tuple[bool, ...]


Question = Propose | Apply | StateValue | ValueTarget
"""Answered by list[Move], list[State | Refused], list[float] and list[Move]."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a search may spend; whichever is used up first ends it."""

    moves: int = 128
    """Moves that are drawn, repeated ones included."""
    tokens: int = 0
    """Of these moves, which are drawn many at a time: one that goes beyond is not followed; 0: any."""
    depth: int = 64
    """Moves from the root to a state."""
    seconds: float = 0.0
    """From when the search begins, whatever is searched beside it; 0: any."""
    late: Callable[[], bool] | None = field(default=None, compare=False)
    """Whether the seconds are over, as whoever runs the search says; nobody asks a clock without it."""

    def __post_init__(self) -> None:
        if self.moves < 1 or self.depth < 1 or min(self.tokens, self.seconds) < 0:
            raise ValueError("moves and depth must be 1 or more, tokens and seconds 0 (any) or more")
