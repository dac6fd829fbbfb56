"""A search is a generator that yields questions and is sent their answers.

    Propose(state)       moves that the policy draws in a state        answered by an engine
    Apply(state, move)   where a move leads, or why it leads nowhere   answered by Transitions
    StateValue(state)    probability that the state ends well          answered by the policy or a model

A search calls nothing, so it is pure: the same answers make the same tree, whatever else is running. What a
state proposes depends on the state and its earlier moves alone. So the answers are the same too, and an
interrupted search can simply start again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from posttrain.types import Message, Task, Verdict

HOLE = "\0"
"""Stands in a move for the proof of a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a search stands: the moves from the root, and the state that they lead to.

    It holds no open resource, so it can be pickled, and reached again by applying its moves.
    """

    task: Task
    moves: tuple[str, ...] = ()
    shown: tuple[Message, ...] = ()
    """Messages that the policy reads: the last one asks for the next move."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the functions that the policy may call."""
    answer: str = ""
    """The answer so far, which the policy continues."""
    key: str = ""
    """States with equal keys are one node: what follows must depend on nothing else."""
    parts: tuple["State", ...] = ()
    """Goals that can be proved separately, each as a state that shows nothing of the others. Empty if there
    is one goal, or if a move for one may affect another. A part that is done needs no further proof."""
    around: tuple[str, str] = ("", "")
    """Text before and after the proof of a part, where the proofs of all parts follow each other in order."""
    taken: str = ""
    """The last move as it stands in the answer, with HOLE for each part that it leaves out; the parts without
    a hole come first in `parts`. Empty: as in `moves`."""
    done: bool = False
    """Whether the answer is complete; a verifier then judges it."""
    text: str = ""
    """The answer of a state that is done, as the verifier reads it; for a prover the answer so far."""
    verdict: Verdict | None = None
    """Verdict of an environment, which judges its episodes itself, on a state that is done."""
    env_state: Any = None
    """State that the environment holds in a search over its turns."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A move that leads nowhere, or a task that cannot be started, and the reason."""

    label: str
    """A class to count: error, forbidden, timeout, died, output, repeated, ..."""
    reason: str = ""
    """One line for a person."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move that a policy drew in a state."""

    text: str
    logp: float
    """Log-probability under the policy that drew it, at the temperature of the draw."""
    tokens: tuple[int, ...] = ()
    logp_gen: tuple[float, ...] = ()
    """Log-probability of each token under the distribution that it was drawn from."""
    logp_policy: tuple[float, ...] = ()
    version: tuple[int, ...] = ()
    complete: bool = True
    """False if the move was cut off at its maximum length."""
    sketch: bool = False
    """Whether it answers a request for a sketch."""

    @property
    def counted(self) -> float:
        """log π as a search counts it; of a sketch the mean over its tokens, as its length means little."""
        return self.logp / max(len(self.tokens), 1) if self.sketch else self.logp


class Transitions(Protocol):
    """Where moves lead. Pure like an `Env`: no clock, no randomness, no memory outside the state.

    Calls are batched, since a prover answers many questions faster than one by one. A move that leads nowhere
    is Refused, with its class. Every question is answered, even if a prover dies, hangs or prints without
    end.
    """

    can_sketch: ClassVar[bool] = False
    """Whether a move may be a sketch: many moves at once, with holes."""
    judges: ClassVar[bool] = True
    """Whether an end is known to be right, so that a search is over there; else values compare all ends."""
    stop: tuple[str, ...] = ()
    """Strings that end a move, in addition to the policy's end of sequence."""

    def begin(self, tasks: Sequence[Task]) -> list[State | Refused]:
        """Return the initial state of each task."""
        ...

    def apply(self, pairs: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """Return where each move leads from its state."""
        ...

    def lemma(self, state: State) -> Task | None:
        """Return a state as a task of its own, with its hypotheses; None if it cannot be one."""
        return None

    def trim(self, end: State) -> State:
        """Return an end without parts that its answer does not need, as unused lemmas."""
        return end

    def close(self) -> None:
        """Stop what was started, as processes."""
        return


# ---------------------------------------------------------------------- questions


@dataclass(frozen=True, slots=True)
class Propose:
    """A request for moves number first ... first + count - 1 of a state.

    The engine excludes moves drawn before if it can. Moves of one request may be equal.
    """

    state: State
    first: int
    count: int
    previous: tuple[Move, ...] = ()
    """Moves that were drawn here before."""
    sketch: bool = False
    """Whether to ask for a sketch: many moves at once, with holes."""


@dataclass(frozen=True, slots=True)
class Apply:
    asked: tuple[tuple[State, str], ...]


@dataclass(frozen=True, slots=True)
class StateValue:
    """A request for the probability that each state ends well."""

    states: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class ValueTarget:
    """A request for the tokens that state correct values: for each state whether it ends well."""

    states: tuple[State, ...]
    ends: tuple[bool, ...]


Question = Propose | Apply | StateValue | ValueTarget
"""Answered by list[Move], list[State | Refused], list[float] and list[Move]."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of a search; the first one that is reached ends it."""

    moves: int = 128
    """Moves that are drawn, repeated ones included."""
    tokens: int = 0
    """Tokens of these moves, drawn several at a time; a move beyond the limit is not followed. 0: any."""
    depth: int = 64
    """Moves from the root to a state."""
    seconds: float = 0.0
    """Seconds from the start of the search, other concurrent searches included; 0: any."""
    late: Callable[[], bool] | None = field(default=None, compare=False)
    """Return True if the seconds are over; set by the driver, and no clock is read without it."""

    def __post_init__(self) -> None:
        if self.moves < 1 or self.depth < 1 or min(self.tokens, self.seconds) < 0:
            raise ValueError("moves and depth must be 1 or more, tokens and seconds 0 (any) or more")
