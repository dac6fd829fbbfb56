"""Try many tactics in one file of Lean: a theorem for each trial, and what Lean reports about it.

    theorem _PtStep_3 (p q : Prop) : p ∧ q → q ∧ p :=
    by
      (intro h
      )
      (exact h.2
      )
      trace_state                                      the goals, as a policy reads them
      set_option pp.all true in trace_state            the same goals in full, for the key

The brackets keep a tactic from being read as part of the one before it, and make a command an error. Messages
are assigned to theorems by their lines.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.search.protocol import Refused
from posttrain.verifiers.sandbox import Box
from posttrain_prove.lean.judge import BoxedLean, compile_header
from posttrain_prove.lean.one_move import NAME
from posttrain_prove.lean.source import Header
from posttrain_prove.lean.toolchain import LeanOutcome, Message

FLAGS = (
    "-j2",
    "-Dweak.Elab.async=false",
    "-Dweak.maxErrors=0",
    "-Dweak.linter.all=false",
    "-Dpp.maxSteps=100000",
    "-Dpp.deepTerms=true",
)
"""Compile in order, while a second thread reports each theorem at once; report every error, goals in full."""
OPEN, CLOSE = "focus (", ")"
"""Lines around tactics for one goal alone; no move may be either, as their brackets do not match."""
_FILE = "PtSteps"
_MOST_REASON = 300
_WHY = {
    "timeout": ("timeout", "Lean takes too long"),
    "memory": ("memory", "Lean exceeds its memory limit"),
    "output": ("output", "Lean prints too much"),
    "crash": ("died", "Lean ends without an answer"),
    "done": ("died", "Lean reports nothing"),
}
_NUMBER = re.compile(r"(?<![\w!?'])\?([mu])\.(\d+)")
_HOLE = re.compile(r"(?<![\w!?'])\?\w")
_PLAIN = re.compile(r"^internal exception|^\(kernel\)")


@dataclass(frozen=True, slots=True)
class Trial:
    """A statement, as it follows a name, and tactics for it.

    A tactic that ends in OPEN focuses a goal; all later tactics work in that goal.
    """

    form: str
    moves: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Goals:
    """The open goals: the text for a policy, and a key for each goal."""

    text: str
    keys: tuple[str, ...]
    independent: bool
    """Whether no goal has a hole that another may fill."""


@dataclass(frozen=True, slots=True)
class TrialLines:
    """Line numbers of a trial, from 1: its first, that of its `by`, and those of its two reports."""

    first: int
    by: int
    goals: int
    key: int


def run_trials(
    lean: BoxedLean,
    axioms: tuple[str, ...],
    header: Header,
    trials: Sequence[Trial],
    seconds: float,
    heartbeats: int,
    most: int,
) -> list[Goals | Refused]:
    """Return the result of each trial. A file of `most` is split if `seconds` are not enough."""
    results: dict[int, Goals | Refused] = {}
    numbers = list(range(len(trials)))
    queue = [numbers[at : at + most] for at in range(0, len(numbers), most)]
    beside, _ = compile_header(lean, axioms, header)
    while queue:
        part = queue.pop()
        text, places = write_file(header, [trials[number] for number in part], heartbeats)
        box = Box(level=lean.level)
        outcome: LeanOutcome = lean.tool.compile(box, lean.memory_mb, seconds, _FILE, text, beside, FLAGS)
        answers, last = parse_results(outcome.messages, places)
        # The last trial with a message may have more to come.
        decided = len(part) if outcome.end == "done" else last
        for number, answer in zip(part[:decided], answers, strict=False):
            if answer is not None:
                results[number] = answer
        undecided = [number for number in part if number not in results]
        if undecided and len(part) == 1:
            label, why = _WHY[outcome.end]
            results[undecided[0]] = Refused(label, f"{why} {outcome.note}".strip())
        elif undecided:
            # At fault is the last trial with a message or the next one; without messages, any of them.
            cuts = (0, 1, 2) if last >= 0 else (0, (len(undecided) + 1) // 2)
            ends = (*cuts[1:], len(undecided))
            pieces = [undecided[at:end] for at, end in zip(cuts, ends, strict=True)]
            queue += [piece for piece in reversed(pieces) if piece]
    return [results[number] for number in numbers]


def write_file(header: Header, trials: Sequence[Trial], heartbeats: int) -> tuple[str, list[TrialLines]]:
    """Write the file that tries these, and return where each trial stands in it.

    Each move adds `heartbeats` to the limit, so that a long proof leaves its last move enough.
    """
    parts: list[str] = [header.module("")]
    line = parts[0].count("\n") + 1
    places = []
    for number, trial in enumerate(trials):
        head = f"set_option maxHeartbeats {heartbeats * (len(trial.moves) + 1)} in\n"
        head += f"theorem {NAME}_{number}{trial.form} :=\nby\n"
        opens_goal = [move.endswith(OPEN) for move in trial.moves]
        lines = zip(trial.moves, opens_goal, strict=True)
        body = "".join(f"  {move}\n" if opens else _write_move(move) for move, opens in lines)
        by = line + head.count("\n") - 1
        goals = by + 1 + body.count("\n")
        places.append(TrialLines(line, by, goals, goals + 1))
        ends = f"  {CLOSE}\n" * sum(opens_goal)
        parts.append(f"{head}{body}  trace_state\n  set_option pp.all true in trace_state\n{ends}")
        line = goals + 2 + sum(opens_goal)
    return "".join(parts), places


def _write_move(move: str) -> str:
    """Write a move in brackets; its later lines stand below the first, which has a bracket before it."""
    lines = "\n   ".join(move.split("\n"))
    return f"  ({lines}\n  )\n"


def parse_results(
    messages: Sequence[Message], places: Sequence[TrialLines]
) -> tuple[list[Goals | Refused | None], int]:
    """Return the result of each trial, None if undecided, and the last trial with a message, or -1."""
    groups: list[list[Message]] = [[] for _ in places]
    number = 0
    for message in sorted(messages, key=lambda m: m.line):
        while number + 1 < len(places) and places[number + 1].first <= message.line:
            number += 1
        if places and message.line >= places[0].first:
            groups[number].append(message)
    last = max((n for n, group in enumerate(groups) if group), default=-1)
    return [_parse_result(group, place) for group, place in zip(groups, places, strict=True)], last


def _parse_result(messages: Sequence[Message], place: TrialLines) -> Goals | Refused | None:
    errors = [m for m in messages if m.severity == "error"]
    failures = [m for m in errors if not (m.line == place.by and m.text.startswith("unsolved goals"))]
    reports = {m.line: m.text for m in messages if m.severity == "information" and m.line >= place.goals}
    if place.goals not in reports or place.key not in reports or failures:
        # Without Init, Lean adds to most failures that it cannot put a hole in their place.
        failures = [m for m in failures if not _PLAIN.match(m.text)] or failures or errors
        if not failures:
            return None
        first = min(failures, key=lambda m: (m.line, m.column))
        label = "timeout" if "deterministic) timeout" in first.text else "error"
        return Refused(label, " ".join(first.text.split())[:_MOST_REASON])
    if any(m.severity == "warning" and "sorry" in m.text for m in messages) and len(errors) == len(failures):
        return Refused("forbidden", "it has a hole without a goal")
    text, full = reports[place.goals].strip(), reports[place.key].strip()
    goals = number_holes(full).split("\n\n") if full not in ("", "no goals") else []
    independent = not _HOLE.search(full)
    return Goals(text if goals else "", tuple(_digest(goal) for goal in goals), independent)


def number_holes(goals: str) -> str:
    """Number the holes of goals in order of appearance, as Lean's own numbers vary.

    >>> number_holes("⊢ ?m.71 = f ?m.9 ?m.71")
    '⊢ ?m.0 = f ?m.1 ?m.0'
    """
    numbers: dict[str, int] = {}
    return _NUMBER.sub(lambda m: f"?{m[1]}.{numbers.setdefault(m[0], len(numbers))}", goals)


def _digest(goal: str) -> str:
    return hashlib.blake2b(goal.encode(), digest_size=16).hexdigest()
