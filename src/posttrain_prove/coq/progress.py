"""Measure how near an unfinished proof is to its end: the potential Φ of each of its states.

    rank   the tactics that close every open goal
    0      none is needed: no goal is open
    1      trivial, reflexivity, discriminate, contradiction
    2      or auto, congruence, easy
    3      or tauto, ring, and lia where the header loads it
    4      none of these closes all goals

    Φ = ½ max(0, r₀ - r) / r₀,    r the rank of the state, r₀ that of the bare statement

Φ depends on the state alone, so a tactic that changes nothing earns nothing, and undoing a tactic returns
what it earned. An additional goal raises no rank if the same tactics close it. Φ ≤ ½ < 1: a proof scores
higher than any unfinished one.
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
    """Return the tactics of rank 1, 2 and 3, with these loaded tactics among the last.

    >>> ladder(["lia"])[0]
    'all: (intros; solve [trivial | reflexivity | discriminate | contradiction]).'
    """
    rungs = [_BY_HAND, _BY_SEARCH, [*_BY_DECISION, *loaded]]
    return [f"all: (intros; solve [{' | '.join(rung)}])." for rung in rungs]


def find_loaded_tactics(session: CoqSession) -> list[str]:
    """Return which of lia and ring a session knows before the submission is sent."""
    return [name for name in ("lia", "ring") if f".{name}\n" in session.say(f"Locate Ltac {name}.").output]


def potential(rank: int, first: int) -> float:
    """Φ = ½ max(0, first - rank) / first, where the bare statement has the rank `first`.

    >>> potential(1, 4), potential(0, 3), potential(4, 3), potential(3, 3)
    (0.375, 0.5, 0.0, 0.0)
    """
    return MOST * max(0, first - rank) / first if first else 0.0


def rank_state(
    session: CoqSession, state: int, rungs: Sequence[str], structure: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the rank of a state, and the sentences that finish its proof; the session moves elsewhere.

    `structure` has the bullets and braces up to this state, by which the proof moves from goal to goal.
    """
    for rank, rung in enumerate([None, *rungs]):
        session.say(f"BackTo {state}.")
        finish = _find_finish(session, rung, structure)
        if finish is not None:
            return rank, finish
    return WORST, []


def _find_finish(session: CoqSession, rung: str | None, structure: Sequence[str]) -> list[str] | None:
    """Return what closes all goals, one tactic of a rung at a time; None if they stay open."""
    finish: list[str] = []
    bullets = dict.fromkeys(code for code in reversed(structure) if code[0] in "-+*")
    for _ in range(_MOST_TURNS):
        is_open = not _has_no_goals(session)
        if is_open and rung is not None and session.say(f"Timeout {_TRY_S} {rung}").accepted:
            finish.append(rung)
            is_open = not _has_no_goals(session)
        if is_open and rung is None:
            return None
        step = next((step for step in ("}", *bullets) if session.say(step).accepted), None)
        if step is None:
            return None if is_open else finish
        finish.append(step)
    return None


def _has_no_goals(session: CoqSession) -> bool:
    return "Existential" not in session.say("Show Existentials.").output


def is_pinned(session: CoqSession, spec: str) -> bool:
    """Return whether the proof that was just opened proves the statement, without hypotheses."""
    check = f"Succeed (repeat match goal with H : _ |- _ => revert H end; change {spec})."
    return session.say(check).accepted
