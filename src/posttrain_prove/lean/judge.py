"""What Lean makes of a task and of a response: each file in a box of its own, and only ours says what counts.

1. Ours, once for each task: the header, and the statement as a module.
2. What the response says is compiled to a module; any error ends it there.
3. A file of ours imports both and asks Lean whether the name is a theorem, whether it proves the
   statement, and on which axioms that rests. What the response prints is in no answer: errors come
   first, then exactly the two answers that were asked for, each at its line, of a name made up for it.
4. Where the toolchain has a checker, the kernel replays all of it, where nothing of it can run.
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
_TRIED = f"""prelude
import {TACTICS}
theorem tried (p q : Prop) : p ∧ q → q ∧ p := by
  intro h
  exact ⟨h.2, h.1⟩
"""
_KEPT = 64


@dataclass(frozen=True)
class Means:
    """With what is judged: a Lean, how well it is held, and what it may use."""

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
        """What Lean makes of a module, with compiled ones beside it; our own have the time they need."""
        wall_s = SETUP_S if ours else self.budget
        return self.tool.compile(Box(level=self.level), self.memory_mb, wall_s, module, text, beside)

    def require(self) -> None:
        """Nothing; UserError if no Lean starts in a box of this level."""
        self.tool.require()
        tried = self.compile(HEADER, "prelude\n", {}, ours=True)
        if tried.olean is None:
            raise UserError("", f"Lean does not start in a box of level {self.level!r}: {_first(tried)}")

    def replays(self, modules: Mapping[str, bytes]) -> bool:
        """Whether the kernel accepts these modules once more; True where the toolchain has no checker."""
        if not self.tool.checker:
            return True
        return self.tool.replays(self.box, [name.removesuffix(".olean") for name in modules], modules)


@dataclass(frozen=True)
class Prepared:
    """What is ours of a task: header, how the statement follows a name, compiled modules, axioms."""

    header: Header
    form: str
    modules: Mapping[str, bytes]
    axioms: frozenset[str]
    """Of those allowed, the ones that the header has; a response's own of that name is none of them."""


@functools.lru_cache(maxsize=_KEPT)
def prepare(means: Means, axioms: tuple[str, ...], header: Header, statement: str) -> Prepared:
    """What is ours of a task; UserError if its header or its statement does not compile."""
    modules, known = header_modules(means, axioms, header)
    complaints = []
    for form in source.forms(statement):
        made = means.compile(SPEC, source.specification(header, form), modules, ours=True)
        if made.olean is not None:
            return Prepared(header, form, {**modules, f"{SPEC}.olean": made.olean}, known)
        complaints.append(_first(made))
    why = f"{complaints[0]}; with binders: {complaints[1]}"
    raise UserError("", f"the statement does not compile: {why}")


@functools.lru_cache(maxsize=_KEPT)
def header_modules(
    means: Means, axioms: tuple[str, ...], header: Header
) -> tuple[Mapping[str, bytes], frozenset[str]]:
    """The header's compiled modules, and which of these axioms it has."""
    under = tactics(means) if header.ours else {}
    made = means.compile(HEADER, header.text, under, ours=True)
    if made.olean is None and not made.errors:
        raise RunError("Lean", f"it does not get through the header: {_first(made)}")
    if made.olean is None:
        raise UserError("", f"the header does not compile: {_first(made)}")
    modules = {**under, f"{HEADER}.olean": made.olean}
    names = [*axioms, *(RESERVED if header.prelude else ())]
    asked = source.which(header, names)
    answers = means.compile(CHECK, asked, modules, ours=True)
    before = asked.count("\n") + 1 - len(names)
    absent = {m.line - before - 1 for m in answers.errors}
    if answers.ended != "done" or min(absent, default=0) < 0:
        raise UserError("", f"the header cannot be imported: {_first(answers)}")
    missing = [name for n, name in enumerate(names) if n in absent]
    if header.prelude:
        taken = source.guard(header, [name for name in missing if name in RESERVED])
        made = means.compile(GUARD, taken, modules, ours=True)
        if made.olean is None:
            raise RunError("Lean", f"what is reserved does not compile: {_first(made)}")
        modules[f"{GUARD}.olean"] = made.olean
    if not means.replays(modules):
        raise RunError(
            "Lean", "its kernel does not accept the header when it is replayed; is the checker for this Lean?"
        )
    return modules, frozenset(axioms) - frozenset(missing)


@functools.lru_cache(maxsize=_KEPT)
def tactics(means: Means) -> Mapping[str, bytes]:
    """The compiled module of our logic and tactics; UserError if one tactic that is tried does not work."""
    made = means.compile(TACTICS, TACTICS_TEXT, {}, ours=True)
    modules = {f"{TACTICS}.olean": made.olean or b""}
    tried = made if made.olean is None else means.compile(CHECK, _TRIED, modules, ours=True)
    if tried.olean is None:
        raise UserError(
            "",
            f'this Lean does not know the tactics of prelude "tactics": {_first(tried)}',
            "pip install 'posttrain[lean]', which brings the version for which they are written",
        )
    return modules


def judge(means: Means, ours: Prepared, name: str, text: str) -> Verdict:
    """The verdict on a response's code, which has no comments and says nothing that is forbidden."""
    written, before = source.submission(ours.header, name, ours.form, text)
    made = means.compile(SUBMISSION, written, ours.modules)
    if made.olean is None:
        return _failed(made, means, before)
    modules = {**ours.modules, f"{SUBMISSION}.olean": made.olean}
    nonce = secrets.token_hex(8)
    question = source.check(ours.header, name, nonce)
    answer = means.compile(CHECK, question, modules)
    verdict = _answered(answer, means, question, name, ours.axioms)
    if verdict.score and not means.replays({**modules, f"{CHECK}.olean": answer.olean or b""}):
        return refused("error", "the kernel does not accept it when it is replayed")
    return verdict


def refused(label: str, reason: str) -> Verdict:
    """The verdict on what is no proof."""
    return Verdict(score=0.0, label=label, reason=" ".join(reason.split())[:300])


def _answered(
    answer: LeanOutcome, means: Means, question: str, name: str, allowed: frozenset[str]
) -> Verdict:
    """The verdict, from Lean's answers to the last three lines of our question."""
    lines = question.split("\n")
    asks, claims, rests = len(lines) - 2, len(lines) - 1, len(lines)
    if answer.ended != "done" or any("deterministic) timeout" in m.text for m in answer.errors):
        return _failed(answer, means, 0)
    wrong = {m.line: m.text for m in reversed(answer.errors)}
    if asks in wrong:
        return refused("wrong_statement", f"there is no theorem {name}")
    said = [m for m in answer.messages if m.severity == "information"]
    answered = [m.line for m in said]
    if set(wrong) - {claims} or (answered[:1] != [asks] if claims in wrong else answered != [asks, rests]):
        return refused("error", f"the check fails: {_first(answer)}")
    if not _THEOREM.match(said[0].text):
        return refused("wrong_statement", f"{name} is no theorem but: {said[0].text}")
    if claims in wrong:
        return refused("wrong_statement", f"{name} does not prove the statement: {wrong[claims]}")
    ours = lines[-1].split()[-1]
    if said[1].text == f"'{ours}' does not depend on any axioms":
        return Verdict(score=1.0, label="proved", reason=f"{name} is proved, without axioms")
    listed = re.fullmatch(rf"'{ours}' depends on axioms: \[([^\[\]]*)\]", said[1].text)
    if listed is None:
        return refused("error", f"the check fails: {said[1].text}")
    axioms = {axiom.strip() for axiom in listed[1].split(",")}
    if "sorryAx" in axioms:
        return refused("incomplete", f"{name} has a hole")
    if axioms - allowed:
        return refused("assumes", f"{name} rests on {', '.join(sorted(axioms - allowed))}")
    return Verdict(score=1.0, label="proved", reason=f"{name} is proved, from {', '.join(sorted(axioms))}")


def _failed(made: LeanOutcome, means: Means, before: int) -> Verdict:
    """The verdict on a response that Lean does not get through; `before` is the lines before its own."""
    if made.ended == "timeout":
        return refused("timeout", f"Lean has not done with it within {means.budget:g} s")
    if made.ended == "memory":
        return refused("error", f"Lean needs more than {means.memory_mb} MB for it")
    if made.ended in ("crash", "output") or not made.errors:
        return refused("error", f"Lean ends without an answer: {made.note}")
    # Without Init, Lean says of most failures that it cannot put a hole in their place either.
    told = [m for m in made.errors if not m.text.startswith("internal exception")] or made.errors
    first = min(told, key=lambda m: (m.line, m.column))
    if "deterministic) timeout" in first.text:
        return refused("timeout", _placed(first, before))
    goals_left = all(m.text.startswith("unsolved goals") for m in told)
    return refused("incomplete" if goals_left else "error", _placed(first, before))


def _placed(message: Message, before: int) -> str:
    return f"line {max(message.line - before, 1)}: {message.text}"


def _first(made: LeanOutcome) -> str:
    """The first thing that Lean has against a file of ours."""
    return _placed(made.errors[0], 0) if made.errors else made.note or made.ended
