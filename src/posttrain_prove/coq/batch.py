"""Judge many short proofs with one run of Coq's compiler and one of its checker.

Starting Coq takes longer than a short proof. So proofs that consist of tactics alone are compiled in one
file, each in its own module, and each is pinned to its statement as in check.py:

    Spec_*.v        Definition spec0 : Type := statement.                     ...
    Submission.v    Module P0. Theorem NAME : statement. tactics Qed. End P0.  ...
    Check.v         Definition chk0 : Spec_*.spec0 := @Submission.P0.NAME. Print Assumptions chk0.  ...
    coqchk -o on all of these

If all are closed under the global context, each is proved. If anything else is printed, nothing is
concluded: the batch is cut in halves, and a proof that remains alone is left to the caller.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from posttrain.verifiers.sandbox import Box
from posttrain_prove.coq import check
from posttrain_prove.coq.check import CLOSED, SPEC, CoqProblem
from posttrain_prove.coq.screen import find_refusal
from posttrain_prove.coq.script import split_sentences


def parse_tactics(text: str) -> str | None:
    """Return the tactics of a script without `Proof` and `Qed`; None if it holds anything else.

    >>> parse_tactics("Proof. intros. - auto. Qed.")
    'intros. - auto.'
    >>> [parse_tactics(text) for text in ("intros. Admitted.", "Lemma a : True. Qed.", "admit.", "auto")]
    [None, None, None, None]
    """
    script, error = split_sentences(text)
    if script and script[0].code == "Proof.":
        script = script[1:]
    if script and script[-1].code == "Qed.":
        script = script[:-1]
    if error or not script or find_refusal(script) or not all(s.is_proof_step for s in script):
        return None
    return text[script[0].start : script[-1].end]


def judge_batch(box: Box, proofs: Sequence[tuple[CoqProblem, str]]) -> list[bool]:
    """Return which scripts of tactics prove their problems; False means that the script must be judged alone.

    All problems must have the same header and no definitions. The box's wall time is meant for one proof.
    """
    if len(proofs) < 2:
        return [False] * len(proofs)
    limits = replace(box.limits, wall_s=box.limits.wall_s * len(proofs))
    if _is_each_proved(replace(box, limits=limits), proofs):
        return [True] * len(proofs)
    half = len(proofs) // 2
    return judge_batch(box, proofs[:half]) + judge_batch(box, proofs[half:])


def _is_each_proved(box: Box, proofs: Sequence[tuple[CoqProblem, str]]) -> bool:
    """Return True only if Coq proves all of these."""
    header = f"{proofs[0][0].header}\n"
    specs, modules, checks = [], [], [f"Require {SPEC}. Require Submission."]
    for n, (problem, text) in enumerate(proofs):
        specs.append(f"Definition spec{n} : Type := {problem.statement}.")
        theorem = f"Theorem {problem.name} : {problem.statement}.\n{text}\nQed."
        modules.append(f"Module P{n}.\n{theorem}\nEnd P{n}.")
        checks.append(f"Definition chk{n} : {SPEC}.spec{n} := @Submission.P{n}.{problem.name}.")
        checks.append(f"Print Assumptions chk{n}.")
    files: dict[str, bytes] = {}
    output = ""
    for stem, lines in ((SPEC, [header, *specs]), ("Submission", [header, *modules]), ("Check", checks)):
        available = {} if stem == "Submission" else files  # compile the submission alone
        result = check.run_coqc(box, stem, "\n".join(lines) + "\n", available)
        if not (vo := check.vo_file(result, stem)):
            return False
        files |= vo
        output = result.stdout.decode("utf-8", "replace")
    if re.split(r"\n+", output.strip()) != [CLOSED] * len(proofs):
        return False
    kernel = check.run_coqchk(box, files)
    if kernel.ended != "exit" or kernel.status != 0:
        return False
    return check.judge_axioms(CLOSED, check.decode_output(kernel), ()).label == "proved"
