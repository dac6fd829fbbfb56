"""Whether a text proves a statement, as Coq's compiler and its independent checker say.

    given(problem)    Given.v: header and definitions of the task           -> Given.vo     once a task
    spec(problem)     Spec_*.v: Definition spec : Type := statement.        -> Spec_*.vo    once a task
    accepted(...)     Submission.v: what was submitted, alone in its box    -> Submission.vo
                      Check.v: Definition chk : Spec_*.spec := @Submission.NAME. Print Assumptions chk.
                      coqchk -o on all of these

The statement is pinned by the type of `chk`: the submission's notations, coercions, sections and modules
do not reach Check.v, which requires it without importing it. The submission cannot know the name of the
spec, which is made up again in each process.
"""

import functools
import re
import secrets
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from posttrain.types import RunError, UserError
from posttrain.verifiers.sandbox import Box, Ran

_NONCE = secrets.token_hex(8)
SPEC = f"Spec_{_NONCE}"
CLOSED = "Closed under the global context"
CLOSES = "closed under the global context"
_MOST_COMPILED = 256
_compiled_before: dict[tuple[str | bytes, ...], bytes] = {}
_FINDLIB = "/etc/ocamlfind.conf"
"""By which Debian's Coq finds its own plugins."""


@dataclass(frozen=True, slots=True)
class CoqProblem:
    """What is to be proved, and what may be used for it."""

    name: str
    statement: str
    header: str = ""
    definitions: str = ""
    """Declarations of the task's own, which the statement speaks of."""

    @property
    def preamble(self) -> str:
        """What every file about this problem begins with."""
        return f"{self.header}\n{'Require Import Given.' if self.definitions else ''}\n"


@dataclass(frozen=True, slots=True)
class CoqOutcome:
    """The class of a submission, why, and how many bytes into its text it fails, if that is known."""

    label: str
    reason: str
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Programs:
    """Where Coq is on this machine."""

    coqc: str
    coqtop: str
    coqchk: str
    readable: tuple[str, ...]
    """What a box must be able to read for them."""


@functools.cache
def programs() -> Programs:
    """Coq's programs; UserError if they are not installed."""
    found = {name: shutil.which(name) for name in ("coqc", "coqtop", "coqchk")}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise UserError(
            "",
            f"{' and '.join(missing)} cannot be found, and proofs in Coq are checked by them",
            "install Coq: apt-get install --no-install-recommends coq",
        )
    paths = {name: str(path) for name, path in found.items()}
    library = subprocess.run(
        [paths["coqc"], "-where"], capture_output=True, text=True, timeout=60, check=True
    )
    homes = {Path(library.stdout.strip()), *(Path(path).resolve().parent for path in paths.values())}
    outside = sorted(str(home) for home in homes if not home.is_relative_to("/usr"))
    settings = [path for path in (_FINDLIB,) if Path(path).exists()]
    return Programs(**paths, readable=(*outside, *settings))


def command(program: str, *rest: str) -> list[str]:
    """How a program of Coq's is called in a box: no start-up file, only the box's own directory."""
    return [program, "-q", "-w", "none", "-Q", ".", "", *rest]


def given(box: Box, problem: CoqProblem) -> dict[str, bytes]:
    """The compiled definitions of the task, as files; UserError if they are not Coq."""
    if not problem.definitions:
        return {}
    return _ours(box, "Given", f"{problem.header}\n{problem.definitions}\n", {}, "definitions")


def spec(box: Box, problem: CoqProblem) -> dict[str, bytes]:
    """The compiled statement and definitions, as files; UserError if they are not Coq."""
    files = given(box, problem)
    text = f"{problem.preamble}Definition spec : Type := {problem.statement}.\n"
    return files | _ours(box, SPEC, text, files, "statement")


def _ours(box: Box, stem: str, text: str, files: dict[str, bytes], what: str) -> dict[str, bytes]:
    """The compiled file of a text that the task holds, which is kept for its next submissions."""
    # Equal definitions compile to files that Coq takes for different ones: they are part of the key.
    key: tuple[str | bytes, ...] = (stem, text, *files.values())
    if key in _compiled_before:
        return {f"{stem}.vo": _compiled_before[key]}
    ran = compiled(box, stem, text, files)
    if files := made(ran, stem):
        if len(_compiled_before) >= _MOST_COMPILED:
            _compiled_before.clear()
        _compiled_before[key] = files[f"{stem}.vo"]
        return files
    said = _error(ran)
    if not said:
        raise RunError("coqc", f"it fails in its box ({ran.ended}): {_last_words(ran)}")
    raise UserError("", f"Coq does not read the {what} of the task: {said}", f"mend its {what} or header")


def accepted(box: Box, problem: CoqProblem, text: str, axioms: tuple[str, ...]) -> CoqOutcome:
    """proved, or why not. UserError if the task is not Coq, RunError if the box does not work."""
    files = spec(box, problem)
    theirs = {name: content for name, content in files.items() if name == "Given.vo"}
    ran = compiled(box, "Submission", text, theirs)
    if not (submitted := made(ran, "Submission")):
        return _failure(box, ran, text)
    check = (
        f"Require {SPEC}. Require Submission.\n"
        f"Definition chk : {SPEC}.spec := @Submission.{problem.name}.\nPrint Assumptions chk.\n"
    )
    files |= submitted
    ran = compiled(box, "Check", check, files)
    if not (ours := made(ran, "Check")):
        failed = _failure(box, ran)
        return failed if failed.label == "timeout" else _unlike(problem, failed.reason)
    again = checked(box, files | ours)
    if again.ended != "exit" or again.status != 0:
        return _failure(box, again)
    return assumed(ran.stdout.decode("utf-8", "replace"), printed(again), axioms)


def _unlike(problem: CoqProblem, said: str) -> CoqOutcome:
    return CoqOutcome("wrong_statement", f"{problem.name} is not a proof of the statement: {said}")


def assumed(printed: str, summary: str, axioms: tuple[str, ...]) -> CoqOutcome:
    """proved, or what the proof or its file rests on, by `Print Assumptions` and by `coqchk -o`."""
    parts = _summary(summary)
    if "Set is predicative" not in summary or len(parts) < 4:
        return CoqOutcome("forbidden", "coqchk does not find the usual theory")
    everywhere, *unsafe = parts
    unchecked = [name for part in unsafe for name in part if not name.startswith("Coq.")]
    if unchecked:
        return CoqOutcome("forbidden", f"{unchecked[0]} was not checked by the kernel")
    own = [name for name in everywhere if name.startswith(("Submission.", "Check."))]
    if own:
        return CoqOutcome("assumes", f"{own[0].removeprefix('Submission.')} is assumed, not proved")
    if printed.strip() == CLOSED:
        return CoqOutcome("proved", CLOSES)
    lines = printed.splitlines()
    used = [line.split()[0] for line in lines[1:] if line[:1].strip()]
    strange = [line for line in lines[1:] if re.search(r"\b(relies|is assumed|are assumed)\b", line)]
    if lines[:1] != ["Axioms:"] or not used or strange:
        return CoqOutcome("assumes", f"it is not closed: {(strange or lines or ['?'])[0]}")
    for name in used:
        full = [axiom for axiom in everywhere if axiom == name or axiom.endswith(f".{name}")]
        if not full or not set(full) <= set(axioms):
            return CoqOutcome("assumes", f"it uses the axiom {(full or [name])[0]}")
    return CoqOutcome("proved", f"it uses {', '.join(used)}, as is allowed")


def _summary(text: str) -> list[list[str]]:
    """The lists of what `coqchk -o` prints: axioms, then what was not checked in three ways or more."""
    lists: list[list[str]] = []
    for line in text.splitlines():
        if re.match(r"\* (Axioms|Constants/Inductives|Inductives)\b", line):
            lists.append([])
        elif line.startswith("    ") and lists:
            lists[-1].append(line.strip())
    return lists


def compiled(box: Box, stem: str, text: str, files: dict[str, bytes]) -> Ran:
    """The compiler's run over a text of that file name, beside compiled files; it collects the .vo."""
    argv = command(programs().coqc, "-noglob", f"{stem}.v")
    return box.run(
        argv, files={**files, f"{stem}.v": text.encode("utf-8", "replace")}, collect=(f"{stem}.vo",)
    )


def made(ran: Ran, stem: str) -> dict[str, bytes]:
    """The compiled file that a run of the compiler leaves; nothing if it did not end well."""
    name = f"{stem}.vo"
    well = ran.ended == "exit" and ran.status == 0 and name in ran.collected
    return {name: ran.collected[name]} if well else {}


def checked(box: Box, files: dict[str, bytes]) -> Ran:
    """The independent checker's run over these compiled files, and what it prints of their assumptions."""
    own = [argument for name in files for argument in ("-norec", name.removesuffix(".vo"))]
    return box.run([programs().coqchk, "-silent", "-o", "-Q", ".", "", *own], files=files)


def printed(ran: Ran) -> str:
    """All that a program has printed."""
    return (ran.stdout + ran.stderr).decode("utf-8", "replace")


def _failure(box: Box, ran: Ran, text: str = "") -> CoqOutcome:
    """The class of a compilation that did not end well; RunError if that is the box's fault."""
    if ran.ended == "timeout":
        return CoqOutcome("timeout", "Coq's time is used up")
    if ran.ended in ("output", "memory"):
        return CoqOutcome(
            "error", {"output": "it prints too much", "memory": "it takes too much memory"}[ran.ended]
        )
    said = ran.stderr.decode("utf-8", "replace")
    places = re.findall(r'^File "[^"\n]*", line (\d+), characters (\d+)', said, re.MULTILINE)
    at = _place(text, *map(int, places[-1])) if places and text else None
    error = _error(ran)
    if not error:
        works(box)
    return CoqOutcome("error", error or "Coq ended without a word", at)


def _place(text: str, line: int, column: int) -> int:
    """Where a line and a byte of it are in a text, in bytes."""
    before = text.encode("utf-8", "replace").split(b"\n")[: line - 1]
    return sum(len(each) + 1 for each in before) + column


def _error(ran: Ran) -> str:
    """Coq's error in one line; empty if it names none."""
    said = (ran.stderr + b"\n" + ran.stdout).decode("utf-8", "replace")
    return error_in(said)


def error_in(said: str) -> str:
    """The error that Coq prints, in one line; empty if there is none.

    >>> error_in("Toplevel input, characters 0-3:\\n> foo.\\nError: The reference foo\\nwas not found.\\n")
    'The reference foo was not found.'
    """
    match = re.search(r"^(?:Fatal )?Error: *(.*)", said, re.MULTILINE | re.DOTALL)
    if match is None:
        return ""
    line = " ".join(match.group(1).split())
    return line if len(line) <= 300 else f"{line[:300]}..."


def works(box: Box) -> None:
    """Nothing; RunError if not even a file that proves True comes through, so nobody's proof is to blame."""
    ran = compiled(box, "Works", "Lemma works : True. Proof. exact I. Qed.\n", {})
    if not made(ran, "Works"):
        raise RunError("coqc", f"it does not work in its box ({ran.ended}): {_last_words(ran)}")


def _last_words(ran: Ran) -> str:
    return " ".join(ran.stderr[-300:].decode("utf-8", "replace").split())
