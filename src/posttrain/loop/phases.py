"""The phases of a session, and the verbs that may be called in each (see session.py)."""

from enum import Enum, auto
from typing import NamedTuple


class Phase(Enum):
    """The state of a session that decides which verbs may be called."""

    NEW = auto()
    READY = auto()
    SAMPLED = auto()
    PARTIAL = auto()
    UPDATED = auto()
    GRADIENTS = auto()
    CUT = auto()
    CLOSED = auto()


class Verb(NamedTuple):
    """When a verb may be called."""

    phases: frozenset[Phase]
    otherwise: str = ""
    """The problem in all other phases; by default that of the phase (FIRST)."""


_ALWAYS = frozenset(Phase) - {Phase.CUT, Phase.CLOSED}
_BETWEEN = frozenset({Phase.NEW, Phase.READY})
_WITHOUT_GRADIENTS = _ALWAYS - {Phase.GRADIENTS}
VERBS = {
    "sample": Verb(_BETWEEN | {Phase.SAMPLED}),
    "batch": Verb(_ALWAYS),
    "update": Verb(_WITHOUT_GRADIENTS),
    "forward_backward": Verb(_ALWAYS),
    "optim_step": Verb(frozenset({Phase.GRADIENTS}), "there are no gradients: call forward_backward() first"),
    "publish": Verb(_WITHOUT_GRADIENTS),
    "evaluate": Verb(_ALWAYS),
    "save": Verb(_BETWEEN),
    "step": Verb(_ALWAYS),
    "finish": Verb(_ALWAYS),
}
_MOVED = "the weights have moved since the sampler took them: call publish() first"
FIRST = {
    Phase.SAMPLED: "an update is running: save after update() and publish(), or give it up with sample()",
    Phase.PARTIAL: _MOVED,
    Phase.UPDATED: _MOVED,
    Phase.GRADIENTS: "gradients were added and no step was made of them: call optim_step() first",
}
"""The problem with calling other verbs first, by phase."""
