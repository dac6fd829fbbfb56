"""Judge a response with Lean: each file is compiled in its own box, and only our file decides.

1. Once per task: compile the header, and the statement as a module.
2. Compile the response to a module; any error ends the judgement.
3. Compile a file of ours that imports both and asks Lean whether the name is a theorem, whether it proves
   the statement, and on which axioms it depends. Output of the response is in no answer: errors come first,
   then exactly the two answers, each at its line, about a name drawn at random for this file.
4. If the toolchain has a checker, replay all modules through the kernel, where none of their code can run.
"""

import functools
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from posttrain.types import RunError, UserError, Verdict
from posttrain.verifiers.sandbox import Box, Level
from posttrain_prove.lean import source
from posttrain_prove.lean.source import (
    CHECK,
    GUARD,
    HEADER,
    RESERVED,
    SPEC,
    SUBMISSION,
    TACTICS,
    TACTICS_TEXT,
    Header,
)
from posttrain_prove.lean.toolchain import LeanOutcome, Message, Toolchain

SETUP_S = 180.0
"""Seconds for each of our own files: a header may import a large library that is not in memory yet."""
_THEOREM = re.compile(r"(?:@\[[^\]]*\]\s*)?(?:(?:protected|nonrec)\s+)*theorem\s")
_TRIAL = f"""prelude
import {TACTICS}
theorem tried (p q : Prop) : p ∧ q → q ∧ p := by
  intro h
  exact ⟨h.2, h.1⟩
"""
_CACHE_SIZE = 64


@dataclass(frozen=True)
class BoxedLean:
    """A Lean, the isolation of its boxes, and its limits."""

    tool: Toolchain
    level: Level
    memory_mb: int
    budget: float

    @property
    def box(self) -> Box:
        """The box in which the response is compiled and checked."""
        return self.tool.box(Box(level=self.level), self.memory_mb, self.budget)

    def compile(
        self, module: str, text: str, beside: Mapping[str, bytes], *, ours: bool = False
    ) -> LeanOutcome:
        """Compile a module next to compiled ones; our own files have SETUP_S seconds."""
        wall_s = SETUP_S if ours else self.budget
        return self.tool.compile(Box(level=self.level), self.memory_mb, wall_s, module, text, beside)

    def require(self) -> None:
        """Raise UserError if Lean does not start in a box of this level."""
        self.tool.require()
        outcome = self.compile(HEADER, "prelude\n", {}, ours=True)
        if outcome.olean is None:
            complaint = _first_complaint(outcome)
            raise UserError("", f"Lean does not start in a box of level {self.level!r}: {complaint}")

    def replays(self, modules: Mapping[str, bytes]) -> bool:
        """Return whether the kernel accepts these modules again; True if the toolchain has no checker."""
        if not self.tool.checker:
            return True
        return self.tool.replays(self.box, [name.removesuffix(".olean") for name in modules], modules)


@dataclass(frozen=True)
class PreparedTask:
    """The compiled parts of a task: its header, how the statement follows a name, modules, and axioms."""

    header: Header
    form: str
    modules: Mapping[str, bytes]
    axioms: frozenset[str]
    """The allowed axioms that the header declares; a response's own axiom of such a name is not allowed."""


@functools.lru_cache(maxsize=_CACHE_SIZE)
def prepare_task(lean: BoxedLean, axioms: tuple[str, ...], header: Header, statement: str) -> PreparedTask:
    """Compile a task's header and statement. Raises UserError if either does not compile."""
    modules, available = compile_header(lean, axioms, header)
    complaints = []
    for form in source.statement_forms(statement):
        outcome = lean.compile(SPEC, source.write_specification(header, form), modules, ours=True)
        if outcome.olean is not None:
            return PreparedTask(header, form, {**modules, f"{SPEC}.olean": outcome.olean}, available)
        complaints.append(_first_complaint(outcome))
    reasons = f"{complaints[0]}; with binders: {complaints[1]}"
    raise UserError("", f"the statement does not compile: {reasons}")


@functools.lru_cache(maxsize=_CACHE_SIZE)
def compile_header(
    lean: BoxedLean, axioms: tuple[str, ...], header: Header
) -> tuple[Mapping[str, bytes], frozenset[str]]:
    """Return the header's compiled modules, and which of these axioms it declares."""
    logic = compile_tactics(lean) if header.has_own_tactics else {}
    outcome = lean.compile(HEADER, header.text, logic, ours=True)
    if outcome.olean is None and not outcome.errors:
        raise RunError("Lean", f"it fails at the header: {_first_complaint(outcome)}")
    if outcome.olean is None:
        raise UserError("", f"the header does not compile: {_first_complaint(outcome)}")
    modules = {**logic, f"{HEADER}.olean": outcome.olean}
    names = [*axioms, *(RESERVED if header.prelude else ())]
    question = source.write_queries(header, names)
    answers = lean.compile(CHECK, question, modules, ours=True)
    offset = question.count("\n") + 1 - len(names)
    missing_indices = {m.line - offset - 1 for m in answers.errors}
    if answers.end != "done" or min(missing_indices, default=0) < 0:
        raise UserError("", f"the header cannot be imported: {_first_complaint(answers)}")
    missing = [name for n, name in enumerate(names) if n in missing_indices]
    if header.prelude:
        guard = source.write_guard(header, [name for name in missing if name in RESERVED])
        outcome = lean.compile(GUARD, guard, modules, ours=True)
        if outcome.olean is None:
            raise RunError("Lean", f"the reserved names do not compile: {_first_complaint(outcome)}")
        modules[f"{GUARD}.olean"] = outcome.olean
    if not lean.replays(modules):
        raise RunError(
            "Lean", "its kernel does not accept the header when it is replayed; is the checker for this Lean?"
        )
    return modules, frozenset(axioms) - frozenset(missing)


@functools.lru_cache(maxsize=_CACHE_SIZE)
def compile_tactics(lean: BoxedLean) -> Mapping[str, bytes]:
    """Compile the module of our logic and tactics. Raises UserError if a trial proof fails."""
    outcome = lean.compile(TACTICS, TACTICS_TEXT, {}, ours=True)
    modules = {f"{TACTICS}.olean": outcome.olean or b""}
    trial = outcome if outcome.olean is None else lean.compile(CHECK, _TRIAL, modules, ours=True)
    if trial.olean is None:
        raise UserError(
            "",
            f'this Lean does not know the tactics of prelude "tactics": {_first_complaint(trial)}',
            "pip install 'posttrain[lean]', which brings the version for which they are written",
        )
    return modules


def judge(lean: BoxedLean, prepared: PreparedTask, name: str, text: str) -> Verdict:
    """Judge a response's code, which has neither comments nor forbidden words."""
    module, before = source.write_submission(prepared.header, name, prepared.form, text)
    outcome = lean.compile(SUBMISSION, module, prepared.modules)
    if outcome.olean is None:
        return classify_failure(outcome, lean, before)
    modules = {**prepared.modules, f"{SUBMISSION}.olean": outcome.olean}
    nonce = secrets.token_hex(8)
    question = source.write_check(prepared.header, name, nonce)
    answer = lean.compile(CHECK, question, modules)
    verdict = _judge_answer(answer, lean, question, name, prepared.axioms)
    if verdict.score and not lean.replays({**modules, f"{CHECK}.olean": answer.olean or b""}):
        return refuse("error", "the kernel does not accept it when it is replayed")
    return verdict


def refuse(label: str, reason: str) -> Verdict:
    """Return a verdict of score 0."""
    return Verdict(score=0.0, label=label, reason=" ".join(reason.split())[:300])


def _judge_answer(
    answer: LeanOutcome, lean: BoxedLean, question: str, name: str, allowed: frozenset[str]
) -> Verdict:
    """Judge Lean's answers to the last three lines of the question."""
    lines = question.split("\n")
    print_line, theorem_line, axioms_line = len(lines) - 2, len(lines) - 1, len(lines)
    if answer.end != "done" or any("deterministic) timeout" in m.text for m in answer.errors):
        return classify_failure(answer, lean, 0)
    errors = {m.line: m.text for m in reversed(answer.errors)}
    if print_line in errors:
        return refuse("wrong_statement", f"there is no theorem {name}")
    replies = [m for m in answer.messages if m.severity == "information"]
    reply_lines = [m.line for m in replies]
    expected = [print_line] if theorem_line in errors else [print_line, axioms_line]
    unexpected = reply_lines[:1] != expected if theorem_line in errors else reply_lines != expected
    if set(errors) - {theorem_line} or unexpected:
        return refuse("error", f"the check fails: {_first_complaint(answer)}")
    if not _THEOREM.match(replies[0].text):
        return refuse("wrong_statement", f"{name} is not a theorem but: {replies[0].text}")
    if theorem_line in errors:
        return refuse("wrong_statement", f"{name} does not prove the statement: {errors[theorem_line]}")
    return judge_axioms(lines[-1].split()[-1], name, replies[1].text, allowed)


def judge_axioms(theorem: str, name: str, reply: str, allowed: frozenset[str]) -> Verdict:
    """Judge a proof by Lean's reply to `#print axioms theorem`."""
    if reply == f"'{theorem}' does not depend on any axioms":
        return Verdict(score=1.0, label="proved", reason=f"{name} is proved, without axioms")
    match = re.fullmatch(rf"'{theorem}' depends on axioms: \[([^\[\]]*)\]", reply)
    if match is None:
        return refuse("error", f"the check fails: {reply}")
    axioms = {axiom.strip() for axiom in match[1].split(",")}
    if "sorryAx" in axioms:
        return refuse("incomplete", f"{name} has a hole")
    if axioms - allowed:
        return refuse("assumes", f"{name} rests on {', '.join(sorted(axioms - allowed))}")
    return Verdict(score=1.0, label="proved", reason=f"{name} is proved, from {', '.join(sorted(axioms))}")


def classify_failure(outcome: LeanOutcome, lean: BoxedLean, before: int) -> Verdict:
    """Judge a response that Lean does not compile; `before` is the number of lines before its own."""
    if outcome.end == "timeout":
        return refuse("timeout", f"Lean takes longer than {lean.budget:g} s")
    if outcome.end == "memory":
        return refuse("error", f"Lean needs more than {lean.memory_mb} MB")
    if outcome.end in ("crash", "output") or not outcome.errors:
        return refuse("error", f"Lean ends without an answer: {outcome.note}")
    # Without Init, Lean adds to most failures that it cannot put a hole in their place.
    errors = [m for m in outcome.errors if not m.text.startswith("internal exception")] or outcome.errors
    first = min(errors, key=lambda m: (m.line, m.column))
    if "deterministic) timeout" in first.text:
        return refuse("timeout", _format_message(first, before))
    goals_left = all(m.text.startswith("unsolved goals") for m in errors)
    return refuse("incomplete" if goals_left else "error", _format_message(first, before))


def _format_message(message: Message, before: int) -> str:
    return f"line {max(message.line - before, 1)}: {message.text}"


def _first_complaint(outcome: LeanOutcome) -> str:
    """Return Lean's first complaint about a file of ours."""
    return _format_message(outcome.errors[0], 0) if outcome.errors else outcome.note or outcome.end
