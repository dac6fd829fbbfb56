"""Many short proofs in one run of Coq's compiler and of its checker.

Starting Coq takes longer than a short proof. So proofs that are tactics and nothing else are compiled in one
file, each in a module of its own, and pinned one by one as a proof alone is (check.py):

    Spec_*.v        Definition spec0 : Type := statement.                     ... of all of them
    Submission.v    Module P0. Theorem NAME : statement. tactics Qed. End P0.  ...
    Check.v         Definition chk0 : Spec_*.spec0 := @Submission.P0.NAME. Print Assumptions chk0.  ...
    coqchk -o on all of these

If all are closed under the global context, each is proved. If anything is not as it should be, nothing is
concluded: the batch is cut in two, and what is left of it is judged alone.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from posttrain.verifiers.sandbox import Box
from posttrain_prove.coq import check
from posttrain_prove.coq.check import CLOSED, SPEC, CoqProblem
from posttrain_prove.coq.screen import refusal
from posttrain_prove.coq.script import sentences


def tactics(text: str) -> str | None:
    """The tactics of a script, without `Proof` and `Qed`; None if it holds anything else.

    >>> tactics("Proof. intros. - auto. Qed.")
    'intros. - auto.'
    >>> tactics("intros. Admitted."), tactics("Lemma a : True. Qed."), tactics("admit."), tactics("auto")
    (None, None, None, None)
    """
    found, wrong = sentences(text)
    if found and found[0].code == "Proof.":
        found = found[1:]
    if found and found[-1].code == "Qed.":
        found = found[:-1]
    if wrong or not found or refusal(found) or not all(s.is_proof_step for s in found):
        return None
    return text[found[0].start : found[-1].end]


def proved(box: Box, proofs: Sequence[tuple[CoqProblem, str]]) -> list[bool]:
    """Which of these scripts of tactics prove their problems; False where they must be judged alone to know.

    All problems must have one header, and no definitions. The box's time is one proof's.
    """
    if len(proofs) < 2:
        return [False] * len(proofs)
    if _proved(replace(box, limits=replace(box.limits, wall_s=box.limits.wall_s * len(proofs))), proofs):
        return [True] * len(proofs)
    half = len(proofs) // 2
    return proved(box, proofs[:half]) + proved(box, proofs[half:])


def _proved(box: Box, proofs: Sequence[tuple[CoqProblem, str]]) -> bool:
    """Whether all of them are, for certain."""
    header = f"{proofs[0][0].header}\n"
    specs, modules, checks = [], [], [f"Require {SPEC}. Require Submission."]
    for n, (problem, text) in enumerate(proofs):
        specs.append(f"Definition spec{n} : Type := {problem.statement}.")
        theorem = f"Theorem {problem.name} : {problem.statement}.\n{text}\nQed."
        modules.append(f"Module P{n}.\n{theorem}\nEnd P{n}.")
        checks.append(f"Definition chk{n} : {SPEC}.spec{n} := @Submission.P{n}.{problem.name}.")
        checks.append(f"Print Assumptions chk{n}.")
    files: dict[str, bytes] = {}
    printed = ""
    for stem, lines in ((SPEC, [header, *specs]), ("Submission", [header, *modules]), ("Check", checks)):
        known = {} if stem == "Submission" else files  # what was submitted is compiled alone
        ran = check.compiled(box, stem, "\n".join(lines) + "\n", known)
        if not (made := check.made(ran, stem)):
            return False
        files |= made
        printed = ran.stdout.decode("utf-8", "replace")
    if re.split(r"\n+", printed.strip()) != [CLOSED] * len(proofs):
        return False
    checked = check.checked(box, files)
    if checked.ended != "exit" or checked.status != 0:
        return False
    return check.assumed(CLOSED, check.printed(checked), ()).label == "proved"
