"""Check with Coq's compiler and its independent checker that a text proves a statement.

    compile_definitions   Given.v: header and definitions of the task         -> Given.vo     once per task
    compile_statement     Spec_*.v: Definition spec : Type := statement.      -> Spec_*.vo    once per task
    judge                 Submission.v: the submission, alone in its box      -> Submission.vo
                          Check.v: Definition chk : Spec_*.spec := @Submission.NAME. Print Assumptions chk.
                          coqchk -o on all of these

The statement is pinned by the type of `chk`: the submission's notations, coercions, sections and modules
do not reach Check.v, which requires it without importing it. The submission cannot know the name of the
spec, which is drawn at random in each process.
"""

import functools
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from posttrain.types import RunError, UserError
from posttrain.verifiers.sandbox import Box, ProgramResult

_NONCE = secrets.token_hex(8)
SPEC = f"Spec_{_NONCE}"
CLOSED = "Closed under the global context"
CLOSES = "closed under the global context"
_MOST_COMPILED = 256
_compiled_before: dict[tuple[str | bytes, ...], bytes] = {}
_FINDLIB = "/etc/ocamlfind.conf"
"""Debian's Coq finds its own plugins through this file."""


@dataclass(frozen=True, slots=True)
class CoqProblem:
    """A statement to prove, and what a proof may use."""

    name: str
    statement: str
    header: str = ""
    definitions: str = ""
    """Declarations of the task that the statement refers to."""

    @property
    def preamble(self) -> str:
        """The first lines of every file about this problem."""
        return f"{self.header}\n{'Require Import Given.' if self.definitions else ''}\n"


@dataclass(frozen=True, slots=True)
class CoqOutcome:
    """The label of a submission, the reason, and the byte of its text at which it fails, if known."""

    label: str
    reason: str
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Programs:
    """Paths of Coq's programs on this machine."""

    coqc: str
    coqtop: str
    coqchk: str
    readable: tuple[str, ...]
    """Paths outside /usr that a box must be able to read to run them."""


@functools.cache
def find_programs() -> Programs:
    """Find Coq's programs. Raises UserError if they are not installed."""
    candidates = {name: shutil.which(name) for name in ("coqc", "coqtop", "coqchk")}
    missing = [name for name, path in candidates.items() if path is None]
    if missing:
        raise UserError(
            "",
            f"{' and '.join(missing)} cannot be found, and checking proofs in Coq needs them",
            "install Coq: apt-get install --no-install-recommends coq",
        )
    paths = {name: str(path) for name, path in candidates.items()}
    library = subprocess.run(
        [paths["coqc"], "-where"], capture_output=True, text=True, timeout=60, check=True
    )
    homes = {Path(library.stdout.strip()), *(Path(path).resolve().parent for path in paths.values())}
    outside = sorted(str(home) for home in homes if not home.is_relative_to("/usr"))
    settings = [path for path in (_FINDLIB,) if Path(path).exists()]
    return Programs(**paths, readable=(*outside, *settings))


def command_line(program: str, *rest: str) -> list[str]:
    """Return the command line of a program of Coq: without start-up file, with the box's directory alone."""
    return [program, "-q", "-w", "none", "-Q", ".", "", *rest]


def compile_definitions(box: Box, problem: CoqProblem) -> dict[str, bytes]:
    """Compile the task's definitions and return the files. Raises UserError if they are not Coq."""
    if not problem.definitions:
        return {}
    return _compile_cached(box, "Given", f"{problem.header}\n{problem.definitions}\n", {}, "definitions")


def compile_statement(box: Box, problem: CoqProblem) -> dict[str, bytes]:
    """Compile the statement and the definitions; return the files. Raises UserError if they are not Coq."""
    files = compile_definitions(box, problem)
    text = f"{problem.preamble}Definition spec : Type := {problem.statement}.\n"
    return files | _compile_cached(box, SPEC, text, files, "statement")


def _compile_cached(box: Box, stem: str, text: str, files: dict[str, bytes], role: str) -> dict[str, bytes]:
    """Compile a text of the task, or return the file cached from an earlier submission."""
    # Coq treats two compilations of equal definitions as different files, so they are part of the key.
    key: tuple[str | bytes, ...] = (stem, text, *files.values())
    if key in _compiled_before:
        return {f"{stem}.vo": _compiled_before[key]}
    result = run_coqc(box, stem, text, files)
    if files := vo_file(result, stem):
        if len(_compiled_before) >= _MOST_COMPILED:
            _compiled_before.clear()
        _compiled_before[key] = files[f"{stem}.vo"]
        return files
    error = find_error((result.stderr + b"\n" + result.stdout).decode("utf-8", "replace"))
    if not error:
        raise RunError("coqc", f"it fails in its box ({result.ended}): {_last_words(result)}")
    raise UserError("", f"the {role} of the task does not compile: {error}", f"correct its {role} or header")


def judge(box: Box, problem: CoqProblem, text: str, axioms: tuple[str, ...]) -> CoqOutcome:
    """Judge a file. Raises UserError if the task is not Coq, and RunError if the box does not work."""
    files = compile_statement(box, problem)
    definitions = {name: content for name, content in files.items() if name == "Given.vo"}
    result = run_coqc(box, "Submission", text, definitions)
    if not (submission := vo_file(result, "Submission")):
        return _classify_failure(box, result, text)
    check = (
        f"Require {SPEC}. Require Submission.\n"
        f"Definition chk : {SPEC}.spec := @Submission.{problem.name}.\nPrint Assumptions chk.\n"
    )
    files |= submission
    result = run_coqc(box, "Check", check, files)
    if not (conclusion := vo_file(result, "Check")):
        outcome = _classify_failure(box, result)
        if outcome.label == "timeout":
            return outcome
        reason = f"{problem.name} is not a proof of the statement: {outcome.reason}"
        return CoqOutcome("wrong_statement", reason)
    kernel = run_coqchk(box, files | conclusion)
    if kernel.ended != "exit" or kernel.status != 0:
        return _classify_failure(box, kernel)
    return judge_axioms(result.stdout.decode("utf-8", "replace"), decode_output(kernel), axioms)


def judge_axioms(assumptions: str, summary: str, axioms: tuple[str, ...]) -> CoqOutcome:
    """Judge which axioms a proof and its file depend on, from `Print Assumptions` and `coqchk -o`."""
    parts = _parse_summary(summary)
    if "Set is predicative" not in summary or len(parts) < 4:
        return CoqOutcome("forbidden", "coqchk does not find the usual theory")
    everywhere, *unchecked_lists = parts
    unchecked = [name for part in unchecked_lists for name in part if not name.startswith("Coq.")]
    if unchecked:
        return CoqOutcome("forbidden", f"{unchecked[0]} was not checked by the kernel")
    assumed = [name for name in everywhere if name.startswith(("Submission.", "Check."))]
    if assumed:
        return CoqOutcome("assumes", f"{assumed[0].removeprefix('Submission.')} is assumed, not proved")
    if assumptions.strip() == CLOSED:
        return CoqOutcome("proved", CLOSES)
    lines = assumptions.splitlines()
    axioms_used = [line.split()[0] for line in lines[1:] if line[:1].strip()]
    unexpected = [line for line in lines[1:] if re.search(r"\b(relies|is assumed|are assumed)\b", line)]
    if lines[:1] != ["Axioms:"] or not axioms_used or unexpected:
        return CoqOutcome("assumes", f"it is not closed: {(unexpected or lines or ['?'])[0]}")
    for name in axioms_used:
        full = [axiom for axiom in everywhere if axiom == name or axiom.endswith(f".{name}")]
        if not full or not set(full) <= set(axioms):
            return CoqOutcome("assumes", f"it uses the axiom {(full or [name])[0]}")
    return CoqOutcome("proved", f"it uses {', '.join(axioms_used)}, as is allowed")


def _parse_summary(text: str) -> list[list[str]]:
    """Parse what `coqchk -o` prints: a list of axioms, then three or more lists of what was not checked."""
    lists: list[list[str]] = []
    for line in text.splitlines():
        if re.match(r"\* (Axioms|Constants/Inductives|Inductives)\b", line):
            lists.append([])
        elif line.startswith("    ") and lists:
            lists[-1].append(line.strip())
    return lists


def run_coqc(box: Box, stem: str, text: str, files: dict[str, bytes]) -> ProgramResult:
    """Compile a text under this file name, next to compiled files, and collect the .vo."""
    argv = command_line(find_programs().coqc, "-noglob", f"{stem}.v")
    return box.run(
        argv, files={**files, f"{stem}.v": text.encode("utf-8", "replace")}, collect=(f"{stem}.vo",)
    )


def vo_file(result: ProgramResult, stem: str) -> dict[str, bytes]:
    """Return the compiled file that a run left, or {} if the compiler failed."""
    name = f"{stem}.vo"
    is_complete = result.ended == "exit" and result.status == 0 and name in result.collected
    return {name: result.collected[name]} if is_complete else {}


def run_coqchk(box: Box, files: dict[str, bytes]) -> ProgramResult:
    """Run the independent checker on these compiled files; it prints their assumptions."""
    modules = [argument for name in files for argument in ("-norec", name.removesuffix(".vo"))]
    return box.run([find_programs().coqchk, "-silent", "-o", "-Q", ".", "", *modules], files=files)


def decode_output(result: ProgramResult) -> str:
    return (result.stdout + result.stderr).decode("utf-8", "replace")


def _classify_failure(box: Box, result: ProgramResult, text: str = "") -> CoqOutcome:
    """Classify a compilation that failed. Raises RunError if the box is at fault."""
    if result.ended == "timeout":
        return CoqOutcome("timeout", "Coq's time is used up")
    if result.ended in ("output", "memory"):
        return CoqOutcome(
            "error", {"output": "it prints too much", "memory": "it takes too much memory"}[result.ended]
        )
    stderr = result.stderr.decode("utf-8", "replace")
    places = re.findall(r'^File "[^"\n]*", line (\d+), characters (\d+)', stderr, re.MULTILINE)
    at = _byte_offset(text, *map(int, places[-1])) if places and text else None
    error = find_error((result.stderr + b"\n" + result.stdout).decode("utf-8", "replace"))
    if not error:
        require_working_box(box)
    return CoqOutcome("error", error or "Coq ended without an error message", at)


def _byte_offset(text: str, line: int, column: int) -> int:
    """Return the byte offset of a line and a byte in that line."""
    before = text.encode("utf-8", "replace").split(b"\n")[: line - 1]
    return sum(len(row) + 1 for row in before) + column


def find_error(output: str) -> str:
    """Return the error that Coq prints, in one line, or "".

    >>> find_error("Toplevel input, characters 0-3:\\n> foo.\\nError: The reference foo\\nwas not found.\\n")
    'The reference foo was not found.'
    """
    match = re.search(r"^(?:Fatal )?Error: *(.*)", output, re.MULTILINE | re.DOTALL)
    if match is None:
        return ""
    line = " ".join(match.group(1).split())
    return line if len(line) <= 300 else f"{line[:300]}..."


def require_working_box(box: Box) -> None:
    """Raise RunError if not even a proof of True compiles, so the box is at fault and not a submission."""
    result = run_coqc(box, "Works", "Lemma works : True. Proof. exact I. Qed.\n", {})
    if not vo_file(result, "Works"):
        raise RunError("coqc", f"it does not work in its box ({result.ended}): {_last_words(result)}")


def _last_words(result: ProgramResult) -> str:
    return " ".join(result.stderr[-300:].decode("utf-8", "replace").split())
