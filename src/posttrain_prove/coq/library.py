"""Theorems of Coq's standard library, read where it is installed; nothing of it is carried along.

A theorem is asked at its own place: all that its file says before it may be used, and nothing after it. As a
task for the verifier `coq` the file's Require, Import, Open Scope and Set are the header, and the rest that
stands before it the definitions, which are compiled to a module of their own and imported. So what a file
keeps to itself is not at hand, and these theorems are left out and counted:

    section    it stands in one, and speaks of what is assumed there
    module     it stands in one
    local      it says the name of a Local definition; or outside of sections something else before it is
               Local, a module of the file is imported, or any module or a flag set behind a declaration
    statement  no proposition can be cut out of it: it names universes, holds a string, or has no colon
    proof      it is given by a term, with `Proof with` or `Proof using`, given up, or not there
    prelude    it stands in a file of Init, which Coq itself has read before
"""

import functools
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.data.protocol import Games
from posttrain.types import Task, UserError
from posttrain_prove.coq import check
from posttrain_prove.coq.script import Sentence, sentences, unprefixed
from posttrain_prove.coq.task import is_header

_THEOREM = re.compile(
    r"(?:Theorem|Lemma|Fact|Remark|Corollary|Proposition|Property)\s+([^\W\d][\w']*)\s*(.*)\.$"
)
_OPENS = re.compile(r"(Section|Module)(?:\s+(Type|Import|Export))?\s+([\w']+)")
_REQUIRES = re.compile(r"(?:From\s+\S+\s+)?Require\b")
_ENDS = re.compile(r"(?:Qed|Defined|Save|Admitted|Abort)\b")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
REASONS = ("section", "module", "local", "statement", "proof", "prelude")
"""Why theorems are left out."""


@dataclass(frozen=True, kw_only=True)
class CoqLibrary:
    """Which files of Coq's standard library are asked; split by file, as a file's lemmas prove each other."""

    files: tuple[str, ...] = ("Arith/*.v", "Bool/*.v", "NArith/*.v", "Vectors/*.v")
    """Files to train on, as they lie in `coqc -where`/theories; * stands for anything but /."""
    held_out_files: tuple[str, ...] = ()
    """Files to evaluate on only, whatever `files` says; nor is a theorem trained on that is stated there."""
    most: int = 0
    """The most tactics that the library's own proof has; 0 sets no bound."""
    shown: int = 10
    """How many of the sentences before a theorem its prompt shows; all of them may be used."""
    leave_out: tuple[str, ...] = ()
    """Theorems that are not asked, as "Bool/Bool.v:andb_comm"."""
    template: str = (
        "Prove this theorem in Coq.\n\n```coq\n{theorem}\n```\n\n"
        "Answer with the tactics that follow the statement, in one ```coq block."
    )
    """{theorem} is what the file requires, the sentences shown, and the statement."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ValueError("files must name one at least")
        if self.most < 0 or self.shown < 0:
            raise ValueError(f"most and shown must be 0 or more, not {self.most} and {self.shown}")
        if "{theorem}" not in self.template:
            raise ValueError("the template must use {theorem}")

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        held_out = coq_library("held_out", self)[:limit] if limit and self.held_out_files else []
        return coq_library("train", self), held_out


def coq_library(split: Literal["train", "held_out"], spec: CoqLibrary) -> list[Task]:
    """The theorems of a split, by file and in the order of each file.

    `fields` holds what the verifier `coq` needs, `gold` the library's own proof, `file`, and `tactics`, which
    is also `difficulty`: the sentences of that proof without bullets and braces. Raises UserError if there is
    no such file or no theorem.
    """
    held_out = _files(spec.held_out_files)
    kept_back = {_words(each.statement) for file in held_out for each in statements(file)[0]}
    tasks = []
    for file in held_out if split == "held_out" else _files(spec.files):
        if split == "train" and file in held_out:
            continue
        for each in statements(file)[0]:
            task = _task(file, each, spec)
            known = split == "train" and _words(each.statement) in kept_back
            long = spec.most and task.fields["tactics"] > spec.most
            if not known and not long and task.id not in spec.leave_out:
                tasks.append(task)
    if not tasks:
        raise UserError("", f"no theorem of Coq's library is in {split!r}", "name more files")
    return tasks


def proofs(files: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """(theorem, tactics) of all theorems of some files, for supervised fine-tuning.

    The theorem is as "Theorem name : statement."; tactics are sentences as the library has them, with bullets
    and braces, behind what introduces the binders.
    """
    made = [each for file in _files(files) for each in statements(file)[0]]
    return [(f"Theorem {each.name} : {each.statement}.", _script(each)) for each in made]


@dataclass(frozen=True, slots=True)
class Statement:
    """A theorem of a file, and what stands before it."""

    name: str
    statement: str
    """The proposition, its binders as `forall`."""
    opening: str
    """What introduces those binders, which the library's proof takes for granted; empty if there is none."""
    header: str
    """The file's Require, Import, Open Scope and Set, a line each."""
    before: tuple[str, ...]
    """The other sentences of the file up to it."""
    proof: tuple[str, ...]
    """The sentences between `Proof.` and `Qed.`"""
    line: int


@functools.cache
def library() -> Path:
    """Where the standard library is installed; UserError if Coq is not."""
    ran = subprocess.run([check.programs().coqc, "-where"], capture_output=True, text=True, timeout=60)
    return Path(ran.stdout.strip()) / "theories"


def statements(file: str) -> tuple[list[Statement], Counter[str]]:
    """The theorems of a file, as "Bool/Bool.v", and how many are left out for each of REASONS.

    Raises UserError for a file that is not there.
    """
    try:
        text = (library() / file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(str(library()), f"the standard library has no file {file!r}") from error
    found: list[Statement] = []
    left_out: Counter[str] = Counter()
    said, _ = sentences(text)
    reader = _Reader(file.startswith("Init/"))
    at = 0
    while at < len(said):
        match = _THEOREM.match(unprefixed(said[at].code))
        if not match:
            reader.read(said[at])
            at += 1
            continue
        end = next((n for n in range(at + 1, len(said)) if _ENDS.match(said[n].code)), len(said) - 1)
        made = reader.theorem(match, said[at : end + 1], 1 + text.count("\n", 0, said[at].start))
        if isinstance(made, Statement):
            found.append(made)
        else:
            left_out[made] += 1
        for sentence in said[at : end + 1]:
            reader.keep(sentence)
        at = end + 1
    return found, left_out


class _Reader:
    """What has been read of a file."""

    def __init__(self, prelude: bool) -> None:
        self.prelude = prelude
        self.open: list[str] = []
        """Section or Module, for each that is open."""
        self.modules: set[str] = set()
        self.local = False
        """Whether something is at work that stays in the file."""
        self.hidden: set[str] = set()
        """Names that stay in the file."""
        self.header: list[str] = []
        self.before: list[str] = []

    def read(self, sentence: Sentence) -> None:
        """Takes in a sentence that states no theorem."""
        code = unprefixed(sentence.code)
        if opens := _OPENS.match(code):
            self.modules.add(opens.group(3))
            self.local |= opens.group(2) == "Import" and not self.open
            if ":=" not in code:  # what is given by := has no end
                self.open.append(opens.group(1))
        elif re.match(r"End\s+[\w']+", code) and self.open:
            self.open.pop()
        elif code.startswith("Open Scope") and code == sentence.code:
            pass  # whoever imports what stands before has it open
        elif not self.open and is_header(sentence):
            own = re.match(r"(?:Import|Export)\s+([\w']+)", code)
            if own and own.group(1) in self.modules:
                self.local = True
            elif self.before and not _REQUIRES.match(code):
                self.local = True  # said before what now stands before it, it could change its meaning
            else:
                self.header.append(sentence.code)
                return
        elif not self.open and re.match(r"#\[\s*local\b|Local\b", sentence.code):
            if named := re.match(r"(?:Definition|Fixpoint|Ltac)\s+([\w']+)", code):
                self.hidden.add(named.group(1))
            else:
                self.local = True
        self.keep(sentence)

    def keep(self, sentence: Sentence) -> None:
        """Puts a sentence to what stands before."""
        self.before.append(sentence.text)

    def theorem(self, match: re.Match[str], said: Sequence[Sentence], line: int) -> Statement | str:
        """The theorem that a sentence states, with its proof; or the reason to leave it out."""
        proof = [sentence.code for sentence in said[1:-1]]
        asked = _proposition(match.group(2))
        if self.open:
            return "section" if "Section" in self.open else "module"
        if self.prelude or self.local:
            return "prelude" if self.prelude else "local"
        if asked is None:
            return "statement"
        if proof[:1] == ["Proof."]:
            proof = proof[1:]
        if self.hidden & set(re.findall(r"[\w']+", " ".join(sentence.code for sentence in said))):
            return "local"
        ended = re.match(r"(?:Qed|Defined)\b", said[-1].code)
        if not ended or not proof or any(re.match(r"(?:Proof|Next|Obligation)\b", code) for code in proof):
            return "proof"
        if unprefixed(said[0].code) != said[0].code and re.match(r".*\bProgram\b", said[0].code):
            return "proof"
        texts = tuple(sentence.text for sentence in said[-1 - len(proof) : -1])
        return Statement(match.group(1), *asked, "\n".join(self.header), tuple(self.before), texts, line)


def _proposition(said: str) -> tuple[str, str] | None:
    """What follows a theorem's name as one proposition, and what introduces its binders; None if unknown.

    >>> _proposition("n (m : nat) : n + m = m + n"), _proposition(": True"), _proposition("@{u} : True")
    (('forall n (m : nat), n + m = m + n', 'intros n m.'), ('True', ''), None)
    """
    depth = 0
    if '"' in said or said.startswith("@"):
        return None
    for place, letter in enumerate(said):
        depth += _BRACKETS.get(letter, 0)
        if letter == ":" and depth == 0:
            binders, statement = said[:place].strip(), said[place + 1 :].strip()
            if not binders:
                return statement, ""
            # Within brackets the names stand before the colon; a type of its own may hold brackets too.
            names = re.findall(r"[^\W\d][\w']*", re.sub(r":(?:[^(){}]|\([^()]*\))*", " ", binders))
            plain = re.fullmatch(r"[\w'(){}:\s,<>=~*+/\\\[\]%.@|&-]*", binders) and "`" not in binders
            return (f"forall {binders}, {statement}", f"intros {' '.join(names)}.") if plain else None
    return None


def _files(patterns: Sequence[str]) -> list[str]:
    """The files that patterns name, each once; UserError for a pattern that names none."""
    found: dict[str, None] = {}
    for pattern in patterns:
        paths = sorted(library().glob(pattern)) if pattern.endswith(".v") else []
        if not paths:
            raise UserError(
                str(library()), f"Coq's library has no file {pattern!r}", 'name one as "Bool/Bool.v"'
            )
        found |= dict.fromkeys(str(path.relative_to(library())) for path in paths)
    return list(found)


def _script(each: Statement) -> tuple[str, ...]:
    return (each.opening, *each.proof) if each.opening else each.proof


def _words(statement: str) -> str:
    return " ".join(statement.split())


def _task(file: str, each: Statement, spec: CoqLibrary) -> Task:
    shown = each.before[len(each.before) - min(spec.shown, len(each.before)) :]
    parts = [each.header, *shown, f"Theorem {each.name} : {each.statement}."]
    theorem = "\n".join(part for part in parts if part)
    tactics = sum(not sentence.is_structure for sentence in sentences("\n".join(_script(each)))[0])
    return Task(
        id=f"{file}:{each.name}",
        messages=({"role": "user", "content": spec.template.replace("{theorem}", theorem)},),
        fields={
            "name": each.name,
            "statement": each.statement,
            "header": each.header,
            "definitions": "\n".join(each.before),
            "opening": [each.opening] if each.opening else [],
            "gold": "\n".join(_script(each)),
            "file": file,
            "tactics": tactics,
            "difficulty": tactics,
        },
        source=f"{file}:{each.line}",
    )
