"""One file of Lean in which many ways are tried: a theorem for each, and what Lean says of it.

    theorem _PtStep_3 (p q : Prop) : p ∧ q → q ∧ p :=
    by
      (intro h
      )
      (exact h.2
      )
      trace_state                                      the goals, as they are shown
      set_option pp.all true in trace_state            and once more with nothing left out, for the key

The brackets keep a tactic from being read as a part of what stands before it, and a command from being read
as anything but an error. What is said of a theorem is told by its lines.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.search.protocol import Refused
from posttrain_prove.lean.one_move import NAME
from posttrain_prove.lean.source import Header
from posttrain_prove.lean.toolchain import Message

FLAGS = (
    "-j2",
    "-Dweak.Elab.async=false",
    "-Dweak.maxErrors=0",
    "-Dweak.linter.all=false",
    "-Dpp.maxSteps=100000",
    "-Dpp.deepTerms=true",
)
"""One theorem after the other, and a second thread that tells of each as soon as it is done; every error;
goals that are printed whole."""
OPEN, CLOSE = "focus (", ")"
"""Lines around what is said of one goal alone; no move may be either, as their brackets do not match."""
_KEPT = 300
_NUMBER = re.compile(r"(?<![\w!?'])\?([mu])\.(\d+)")
_HOLE = re.compile(r"(?<![\w!?'])\?\w")
_PLAIN = re.compile(r"^internal exception|^\(kernel\)")


@dataclass(frozen=True, slots=True)
class Trial:
    """A statement, as it follows a name, and the tactics that are said of it.

    One that ends in OPEN brings a goal into focus, in which all is said that follows.
    """

    form: str
    moves: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Goals:
    """What is left to prove: as it is shown, and of each goal the key."""

    shown: str
    keys: tuple[str, ...]
    apart: bool
    """Whether no goal has a hole that another may fill."""


@dataclass(frozen=True, slots=True)
class TrialLines:
    """The lines of a trial: its first, that of its `by`, those of its two reports; from 1."""

    first: int
    by: int
    shown: int
    whole: int


def file_text(header: Header, trials: Sequence[Trial], heartbeats: int) -> tuple[str, list[TrialLines]]:
    """The file in which these are tried, and where each stands in it.

    A move more is given as many heartbeats more, so that it is not late for the length of the way to it.
    """
    parts: list[str] = [header.module("")]
    line = parts[0].count("\n") + 1
    places = []
    for number, trial in enumerate(trials):
        begun = f"set_option maxHeartbeats {heartbeats * (len(trial.moves) + 1)} in\n"
        begun += f"theorem {NAME}_{number}{trial.form} :=\nby\n"
        inside = [move.endswith(OPEN) for move in trial.moves]
        lines = zip(trial.moves, inside, strict=True)
        body = "".join(f"  {move}\n" if opens else f"  ({move}\n  )\n" for move, opens in lines)
        by = line + begun.count("\n") - 1
        shown = by + 1 + body.count("\n")
        places.append(TrialLines(line, by, shown, shown + 1))
        ends = f"  {CLOSE}\n" * sum(inside)
        parts.append(f"{begun}{body}  trace_state\n  set_option pp.all true in trace_state\n{ends}")
        line = shown + 2 + sum(inside)
    return "".join(parts), places


def told(
    messages: Sequence[Message], places: Sequence[TrialLines]
) -> tuple[list[Goals | Refused | None], int]:
    """What is said of each trial, None where it decides nothing; and the last that is spoken of, or -1."""
    of: list[list[Message]] = [[] for _ in places]
    number = 0
    for message in sorted(messages, key=lambda m: m.line):
        while number + 1 < len(places) and places[number + 1].first <= message.line:
            number += 1
        if places and message.line >= places[0].first:
            of[number].append(message)
    last = max((n for n, said in enumerate(of) if said), default=-1)
    return [_one(said, place) for said, place in zip(of, places, strict=True)], last


def _one(said: Sequence[Message], place: TrialLines) -> Goals | Refused | None:
    errors = [m for m in said if m.severity == "error"]
    wrong = [m for m in errors if not (m.line == place.by and m.text.startswith("unsolved goals"))]
    reports = {m.line: m.text for m in said if m.severity == "information" and m.line >= place.shown}
    if place.shown not in reports or place.whole not in reports or wrong:
        # Without Init, Lean says of most failures that it cannot put a hole in their place either.
        wrong = [m for m in wrong if not _PLAIN.match(m.text)] or wrong or errors
        if not wrong:
            return None
        first = min(wrong, key=lambda m: (m.line, m.column))
        label = "timeout" if "deterministic) timeout" in first.text else "error"
        return Refused(label, " ".join(first.text.split())[:_KEPT])
    if any(m.severity == "warning" and "sorry" in m.text for m in said) and len(errors) == len(wrong):
        return Refused("forbidden", "it has a hole that no goal stands for")
    shown, whole = reports[place.shown].strip(), reports[place.whole].strip()
    goals = numbered(whole).split("\n\n") if whole not in ("", "no goals") else []
    apart = not _HOLE.search(whole)
    return Goals(shown if goals else "", tuple(_digest(goal) for goal in goals), apart)


def numbered(goals: str) -> str:
    """Goals with their holes numbered in the order in which they stand there: Lean numbers them at will.

    >>> numbered("⊢ ?m.71 = f ?m.9 ?m.71")
    '⊢ ?m.0 = f ?m.1 ?m.0'
    """
    seen: dict[str, int] = {}
    return _NUMBER.sub(lambda m: f"?{m[1]}.{seen.setdefault(m[0], len(seen))}", goals)


def _digest(goal: str) -> str:
    return hashlib.blake2b(goal.encode(), digest_size=16).hexdigest()
