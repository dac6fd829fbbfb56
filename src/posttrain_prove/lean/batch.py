"""Judge many tactic scripts with one run of Lean for all statements, one for all proofs, one for the check.

Starting Lean takes longer than a short proof. So scripts of tasks that stand on our prelude are compiled in
one file, each in a namespace of its own with a random name, and pinned to their statements as in judge.py:

    PtSpec        axiom s0 : statement ...
    PtSubmission  namespace N0 theorem NAME : statement := by script end N0 ...
    PtCheck       theorem c0 : type_of% @s0 := @N0.NAME   #print axioms c0 ...

Lean continues after an error, and the lines of an error tell whose it is. What fails is judged by its own
errors, the rest is compiled again without it. If anything else is reported, the batch is cut in halves, and a
proof that remains alone is left to the caller.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.types import Verdict
from posttrain.verifiers.sandbox import Box
from posttrain_prove.lean import judge, source
from posttrain_prove.lean.judge import SETUP_S, BoxedLean, classify_failure, compile_header
from posttrain_prove.lean.one_move import find_script_fault
from posttrain_prove.lean.source import CHECK, SPEC, SUBMISSION, Header
from posttrain_prove.lean.toolchain import LeanOutcome, Message
from posttrain_prove.lean.trials import FLAGS

SCRIPT_S = 1.0
"""Seconds that each script adds to the wall time of a run of many: a usual one takes hundredths."""


@dataclass(frozen=True)
class BatchProof:
    """A script for a statement; `form` is how the statement follows a name."""

    name: str
    form: str
    script: str


def is_batchable(header: Header, name: str, text: str) -> bool:
    """Return whether a response is a script that cannot reach beyond its own theorem.

    >>> header = Header.of("", "tactics")
    >>> [is_batchable(header, "t", text) for text in ("intro h\\nexact h", "skip)", "skip\\nend", "def t")]
    [True, False, False, False]
    """
    is_script = header.has_own_tactics and source.classify(header, name, text) == "script"
    return is_script and bool(text.strip()) and not find_script_fault(text)


def find_forms(
    lean: BoxedLean, axioms: tuple[str, ...], header: Header, statements: Sequence[str]
) -> list[str | None]:
    """Return how each statement may follow a name, None if it does not compile either way."""
    forms: list[str | None] = [None] * len(statements)
    for kind in (0, 1):
        places = [n for n, form in enumerate(forms) if form is None]
        if not places:
            break
        candidates = [source.statement_forms(statements[n])[kind] for n in places]
        text, starts = _write_specifications(header, candidates)
        modules, _ = compile_header(lean, axioms, header)
        outcome = _compile(lean, SPEC, text, modules, len(places), ours=True)
        errors = _group(outcome.errors, starts)
        if outcome.end == "done" and errors is not None:
            for place, form, wrong in zip(places, candidates, errors, strict=True):
                forms[place] = None if wrong else form
    return forms


def judge_batch(
    lean: BoxedLean, axioms: tuple[str, ...], header: Header, proofs: Sequence[BatchProof]
) -> list[Verdict | None]:
    """Return the verdict of each proof; None means that it must be judged alone."""
    verdicts = _judge_together(lean, axioms, header, proofs) if proofs else []
    if verdicts is not None:
        return verdicts
    if len(proofs) == 1:
        return [None]
    half = len(proofs) // 2
    return [
        *judge_batch(lean, axioms, header, proofs[:half]),
        *judge_batch(lean, axioms, header, proofs[half:]),
    ]


def _judge_together(
    lean: BoxedLean, axioms: tuple[str, ...], header: Header, proofs: Sequence[BatchProof]
) -> list[Verdict | None] | None:
    """Return the verdicts, or None if Lean's output does not settle them."""
    modules, available = compile_header(lean, axioms, header)
    verdicts: list[Verdict | None] = [None] * len(proofs)
    remaining = list(range(len(proofs)))
    prefix = f"N{secrets.token_hex(8)}"
    outcome = LeanOutcome((), None, "crash")
    for _ in range(2):
        text, starts, befores = _write_proofs(header, prefix, [proofs[n] for n in remaining])
        outcome = _compile(lean, SUBMISSION, text, modules, len(remaining))
        errors = _group(outcome.errors, starts)
        if outcome.end != "done" or errors is None:
            return None
        for n, wrong, before in zip(remaining, errors, befores, strict=True):
            if wrong:
                verdicts[n] = classify_failure(replace(outcome, messages=tuple(wrong)), lean, before)
        remaining = [n for n, wrong in zip(remaining, errors, strict=True) if not wrong]
        if outcome.olean is not None or not remaining:
            break
    if not remaining:
        return verdicts
    if outcome.olean is None:
        return None
    forms = [proofs[n].form for n in remaining]
    specification = _compile(
        lean, SPEC, _write_specifications(header, forms)[0], modules, len(forms), ours=True
    )
    if specification.olean is None:
        return None
    modules = {**modules, f"{SPEC}.olean": specification.olean, f"{SUBMISSION}.olean": outcome.olean}
    question, first = _write_check(header, prefix, [proofs[n] for n in remaining])
    answer = _compile(lean, CHECK, question, modules, len(remaining))
    replies = [m for m in answer.messages if m.severity == "information"]
    if answer.end != "done" or answer.errors or answer.olean is None:
        return None
    if [m.line for m in replies] != [first + 2 * n for n in range(len(remaining))]:
        return None
    for n, place, reply in zip(range(len(remaining)), remaining, replies, strict=True):
        verdicts[place] = judge.judge_axioms(f"{prefix}_{n}", proofs[place].name, reply.text, available)
    boxed = replace(lean, budget=_wall_s(lean, len(remaining)))
    return verdicts if boxed.replays({**modules, f"{CHECK}.olean": answer.olean}) else None


def _compile(
    lean: BoxedLean, module: str, text: str, modules: Mapping[str, bytes], number: int, *, ours: bool = False
) -> LeanOutcome:
    wall_s = SETUP_S if ours else _wall_s(lean, number)
    return lean.tool.compile(Box(level=lean.level), lean.memory_mb, wall_s, module, text, modules, FLAGS)


def _wall_s(lean: BoxedLean, number: int) -> float:
    """Return the seconds of a run of this many scripts: one may use up its budget, the others are short."""
    return lean.budget + SCRIPT_S * number


def _group(errors: Sequence[Message], starts: Sequence[int]) -> list[list[Message]] | None:
    """Return the errors of each part, whose first lines these are; None if an error is before the first."""
    groups: list[list[Message]] = [[] for _ in starts]
    for error in errors:
        owner = sum(start <= error.line for start in starts) - 1
        if owner < 0:
            return None
        groups[owner].append(error)
    return groups


def _write_specifications(header: Header, forms: Sequence[str]) -> tuple[str, list[int]]:
    """Write the statements as axioms, each shown to be a proposition; return the first line of each."""
    text, starts = header.module(""), []
    for n, form in enumerate(forms):
        starts.append(text.count("\n") + 1)
        name = f"{SPEC}.s{n}"
        text += f"axiom {name}{form}\ntheorem {name}.again : type_of% @{name} := @{name}\n"
    return text, starts


def _write_proofs(
    header: Header, prefix: str, proofs: Sequence[BatchProof]
) -> tuple[str, list[int], list[int]]:
    """Write the proofs; return the first line of each, and the number of lines before its script."""
    text, starts, befores = header.module(""), [], []
    for n, proof in enumerate(proofs):
        starts.append(text.count("\n") + 1)
        text += f"namespace {prefix}{n}\n"
        command = source.write_command(header, proof.name, proof.form, proof.script)
        befores.append(text.count("\n") + command.count("\n") - proof.script.count("\n"))
        text += f"{command}\nend {prefix}{n}\n"
    return text, starts, befores


def _write_check(header: Header, prefix: str, proofs: Sequence[BatchProof]) -> tuple[str, int]:
    """Write the file that pins each proof and asks for its axioms; return the line of the first answer."""
    text = header.module("", [header.base, SPEC, SUBMISSION], scope=False)
    first = text.count("\n") + 2
    for n, proof in enumerate(proofs):
        theorem = f"{prefix}_{n}"
        text += f"theorem {theorem} : type_of% @{SPEC}.s{n} := @_root_.{prefix}{n}.{proof.name}\n"
        text += f"#print axioms {theorem}\n"
    return text, first
