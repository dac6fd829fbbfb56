"""How near an unfinished proof is to its end: the potential Φ of each of its states.

    rank   the tactics that close every goal which is left
    0      none: nothing is left
    1      trivial, reflexivity, discriminate, contradiction
    2      or auto, congruence, easy
    3      or tauto, ring, and lia where the header loads it
    4      none of these closes all of them

    Φ = ½ max(0, r₀ - r) / r₀,    r the rank of the state, r₀ that of the bare statement

Φ depends on the state alone, so a tactic that changes nothing earns nothing and undoing returns what was
earned; a goal that is added, however easy, raises no rank. Φ ≤ ½ < 1: a proof beats all that is less.
"""

from collections.abc import Sequence

from posttrain_prove.coq.session import CoqSession

WORST = 4
MOST = 0.5
_TRY_S = 5
_MOST_TURNS = 200
_BY_HAND = ["trivial", "reflexivity", "discriminate", "contradiction"]
_BY_SEARCH = [*_BY_HAND, "auto 8", "congruence", "easy"]
_BY_DECISION = [*_BY_SEARCH, "tauto"]


def ladder(loaded: Sequence[str]) -> list[str]:
    """The tactics of rank 1, 2 and 3, where these further tactics are loaded.

    >>> ladder(["lia"])[0]
    'all: (intros; solve [trivial | reflexivity | discriminate | contradiction]).'
    """
    rungs = [_BY_HAND, _BY_SEARCH, [*_BY_DECISION, *loaded]]
    return [f"all: (intros; solve [{' | '.join(rung)}])." for rung in rungs]


def loaded_by(session: CoqSession) -> list[str]:
    """Which of lia and ring a session knows before the submission has said anything."""
    return [name for name in ("lia", "ring") if f".{name}\n" in session.say(f"Locate Ltac {name}.").output]


def potential(rank: int, first: int) -> float:
    """Φ of a state of this rank, where the bare statement has the rank `first`.

    >>> potential(1, 4), potential(0, 3), potential(4, 3), potential(3, 3)
    (0.375, 0.5, 0.0, 0.0)
    """
    return MOST * max(0, first - rank) / first if first else 0.0


def ranked(
    session: CoqSession, state: int, rungs: Sequence[str], structure: Sequence[str]
) -> tuple[int, list[str]]:
    """The rank of an open proof's state, and the sentences that finish it; leaves the session elsewhere.

    `structure` are the bullets and braces up to this state: they say how to go on from goal to goal.
    """
    for rank, rung in enumerate([None, *rungs]):
        session.say(f"BackTo {state}.")
        said = _finished(session, rung, structure)
        if said is not None:
            return rank, said
    return WORST, []


def _finished(session: CoqSession, rung: str | None, structure: Sequence[str]) -> list[str] | None:
    """What closes all goals, one rung's tactic at a time; None if it does not."""
    said: list[str] = []
    bullets = dict.fromkeys(code for code in reversed(structure) if code[0] in "-+*")
    for _ in range(_MOST_TURNS):
        left = not _nothing_left(session)
        if left and rung is not None and session.say(f"Timeout {_TRY_S} {rung}").accepted:
            said.append(rung)
            left = not _nothing_left(session)
        if left and rung is None:
            return None
        way = next((way for way in ("}", *bullets) if session.say(way).accepted), None)
        if way is None:
            return None if left else said
        said.append(way)
    return None


def _nothing_left(session: CoqSession) -> bool:
    return "Existential" not in session.say("Show Existentials.").output


def pinned(session: CoqSession, spec: str) -> bool:
    """Whether the proof that has just been opened is one of the statement, under no hypothesis."""
    said = f"Succeed (repeat match goal with H : _ |- _ => revert H end; change {spec})."
    return session.say(said).accepted
