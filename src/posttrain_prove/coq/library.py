"""Tasks from the theorems of Coq's standard library, read from the installed files.

A theorem is stated at its place: a proof may use all that its file declares before it, and nothing after. As
a task for the verifier `coq`, the file's Require, Import, Open Scope and Set are the header, and the other
sentences before the theorem are the definitions, which are compiled to a module and imported. What is local
to a file is therefore not available, and these theorems are left out and counted:

    section    it stands in a section, and depends on the section's assumptions
    module     it stands in a module
    local      it names a Local definition; or outside of sections something else before it is Local, a
               module of the file is imported, or any module or a flag set behind a declaration
    statement  no proposition can be cut out: it names universes, holds a string, or has no colon
    proof      the proof is a term, begins with `Proof with` or `Proof using`, is given up, or is missing
    prelude    it stands in a file of Init, which Coq itself loads first
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
from posttrain_prove.coq.script import Sentence, split_sentences, strip_prefixes
from posttrain_prove.coq.task import is_header

_THEOREM = re.compile(
    r"(?:Theorem|Lemma|Fact|Remark|Corollary|Proposition|Property)\s+([^\W\d][\w']*)\s*(.*)\.$"
)
_OPENS = re.compile(r"(Section|Module)(?:\s+(Type|Import|Export))?\s+([\w']+)")
_REQUIRES = re.compile(r"(?:From\s+\S+\s+)?Require\b")
_ENDS = re.compile(r"(?:Qed|Defined|Save|Admitted|Abort)\b")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
REASONS = ("section", "module", "local", "statement", "proof", "prelude")
"""Reasons for which theorems are left out."""


@dataclass(frozen=True, kw_only=True)
class CoqLibrary:
    """Files of Coq's standard library to take theorems from.

    The split is by file, as a file's lemmas prove each other.
    """

    files: tuple[str, ...] = ("Arith/*.v", "Bool/*.v", "NArith/*.v", "Vectors/*.v")
    """Files to train on, relative to `coqc -where`/theories; * stands for anything but /."""
    held_out_files: tuple[str, ...] = ()
    """Files to evaluate on only, even if `files` has them; no theorem stated there is trained on."""
    most: int = 0
    """The largest number of tactics in the library's own proof; 0 sets no bound."""
    shown: int = 10
    """Number of sentences before a theorem that its prompt shows; a proof may use every earlier one."""
    leave_out: tuple[str, ...] = ()
    """Theorems to leave out, as "Bool/Bool.v:andb_comm"."""
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
    """Return the theorems of a split, by file and in the order of each file.

    `fields` holds what the verifier `coq` needs, `gold` the library's own proof, `file`, and `tactics`, which
    is also `difficulty`: the number of sentences of that proof without bullets and braces. Raises UserError
    if a file does not exist or no theorem remains.
    """
    held_out = _find_files(spec.held_out_files)
    excluded = {_join_words(theorem.statement) for file in held_out for theorem in read_statements(file)[0]}
    tasks = []
    for file in held_out if split == "held_out" else _find_files(spec.files):
        if split == "train" and file in held_out:
            continue
        for theorem in read_statements(file)[0]:
            task = _task(file, theorem, spec)
            is_held_out = split == "train" and _join_words(theorem.statement) in excluded
            is_long = spec.most and task.fields["tactics"] > spec.most
            if not is_held_out and not is_long and task.id not in spec.leave_out:
                tasks.append(task)
    if not tasks:
        raise UserError("", f"no theorem of Coq's library is in {split!r}", "name more files")
    return tasks


def proofs(files: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return (theorem, tactics) for all theorems of some files, for supervised fine-tuning.

    The theorem is "Theorem name : statement."; the tactics are the library's sentences, with bullets and
    braces, after the sentence that introduces the binders.
    """
    theorems = [theorem for file in _find_files(files) for theorem in read_statements(file)[0]]
    return [(f"Theorem {t.name} : {t.statement}.", _proof_script(t)) for t in theorems]


@dataclass(frozen=True, slots=True)
class Statement:
    """A theorem of a file, with the sentences before it."""

    name: str
    statement: str
    """The proposition, its binders as `forall`."""
    opening: str
    """The sentence that introduces those binders, for which the library's proof has none; or ""."""
    header: str
    """The file's Require, Import, Open Scope and Set, a line each."""
    before: tuple[str, ...]
    """The other sentences of the file before it."""
    proof: tuple[str, ...]
    """The sentences between `Proof.` and `Qed.`"""
    line: int


@functools.cache
def find_library() -> Path:
    """Return the directory of the standard library. Raises UserError if Coq is not installed."""
    coqc = check.find_programs().coqc
    run = subprocess.run([coqc, "-where"], capture_output=True, text=True, timeout=60)
    return Path(run.stdout.strip()) / "theories"


def read_statements(file: str) -> tuple[list[Statement], Counter[str]]:
    """Return the theorems of a file such as "Bool/Bool.v", and how many are left out for each of REASONS.

    Raises UserError if the file does not exist.
    """
    try:
        text = (find_library() / file).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(str(find_library()), f"the standard library has no file {file!r}") from error
    theorems: list[Statement] = []
    left_out: Counter[str] = Counter()
    script, _ = split_sentences(text)
    reader = _Reader(file.startswith("Init/"))
    at = 0
    while at < len(script):
        match = _THEOREM.match(strip_prefixes(script[at].code))
        if not match:
            reader.read(script[at])
            at += 1
            continue
        end = next((n for n in range(at + 1, len(script)) if _ENDS.match(script[n].code)), len(script) - 1)
        result = reader.theorem(match, script[at : end + 1], 1 + text.count("\n", 0, script[at].start))
        if isinstance(result, Statement):
            theorems.append(result)
        else:
            left_out[result] += 1
        for sentence in script[at : end + 1]:
            reader.keep(sentence)
        at = end + 1
    return theorems, left_out


class _Reader:
    """The state of reading a file sentence by sentence."""

    def __init__(self, prelude: bool) -> None:
        self.prelude = prelude
        self.open: list[str] = []
        """Section or Module, for each open block."""
        self.modules: set[str] = set()
        self.local = False
        """Whether something that is local to the file may be in use."""
        self.hidden: set[str] = set()
        """Names that are local to the file."""
        self.header: list[str] = []
        self.before: list[str] = []

    def read(self, sentence: Sentence) -> None:
        """Read a sentence that states no theorem."""
        code = strip_prefixes(sentence.code)
        if opens := _OPENS.match(code):
            self.modules.add(opens.group(3))
            self.local |= opens.group(2) == "Import" and not self.open
            if ":=" not in code:  # a module defined by := has no End
                self.open.append(opens.group(1))
        elif re.match(r"End\s+[\w']+", code) and self.open:
            self.open.pop()
        elif code.startswith("Open Scope") and code == sentence.code:
            pass  # importing the definitions opens it
        elif not self.open and is_header(sentence):
            imported = re.match(r"(?:Import|Export)\s+([\w']+)", code)
            if imported and imported.group(1) in self.modules:
                self.local = True
            elif self.before and not _REQUIRES.match(code):
                self.local = True  # in the header it could change the meaning of the sentences before
            else:
                self.header.append(sentence.code)
                return
        elif not self.open and re.match(r"#\[\s*local\b|Local\b", sentence.code):
            if declaration := re.match(r"(?:Definition|Fixpoint|Ltac)\s+([\w']+)", code):
                self.hidden.add(declaration.group(1))
            else:
                self.local = True
        self.keep(sentence)

    def keep(self, sentence: Sentence) -> None:
        self.before.append(sentence.text)

    def theorem(self, match: re.Match[str], script: Sequence[Sentence], line: int) -> Statement | str:
        """Return the theorem that the first sentence states, with its proof, or a reason to leave it out."""
        proof = [sentence.code for sentence in script[1:-1]]
        proposition = _parse_proposition(match.group(2))
        if self.open:
            return "section" if "Section" in self.open else "module"
        if self.prelude or self.local:
            return "prelude" if self.prelude else "local"
        if proposition is None:
            return "statement"
        if proof[:1] == ["Proof."]:
            proof = proof[1:]
        if self.hidden & set(re.findall(r"[\w']+", " ".join(sentence.code for sentence in script))):
            return "local"
        has_end = re.match(r"(?:Qed|Defined)\b", script[-1].code)
        if not has_end or not proof or any(re.match(r"(?:Proof|Next|Obligation)\b", code) for code in proof):
            return "proof"
        if strip_prefixes(script[0].code) != script[0].code and re.match(r".*\bProgram\b", script[0].code):
            return "proof"
        texts = tuple(sentence.text for sentence in script[-1 - len(proof) : -1])
        header, before = "\n".join(self.header), tuple(self.before)
        return Statement(match.group(1), *proposition, header, before, texts, line)


def _parse_proposition(text: str) -> tuple[str, str] | None:
    """Return what follows a theorem's name as (proposition, introduction of its binders), or None.

    >>> _parse_proposition("n (m : nat) : n + m = m + n")
    ('forall n (m : nat), n + m = m + n', 'intros n m.')
    >>> _parse_proposition(": True"), _parse_proposition("@{u} : True")
    (('True', ''), None)
    """
    depth = 0
    if '"' in text or text.startswith("@"):
        return None
    for place, letter in enumerate(text):
        depth += _BRACKETS.get(letter, 0)
        if letter == ":" and depth == 0:
            binders, statement = text[:place].strip(), text[place + 1 :].strip()
            if not binders:
                return statement, ""
            # Within brackets the names stand before the colon; the type after it may have brackets too.
            names = re.findall(r"[^\W\d][\w']*", re.sub(r":(?:[^(){}]|\([^()]*\))*", " ", binders))
            is_plain = re.fullmatch(r"[\w'(){}:\s,<>=~*+/\\\[\]%.@|&-]*", binders) and "`" not in binders
            return (f"forall {binders}, {statement}", f"intros {' '.join(names)}.") if is_plain else None
    return None


def _find_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that match the patterns, each once. Raises UserError for a pattern without a match."""
    files: dict[str, None] = {}
    for pattern in patterns:
        paths = sorted(find_library().glob(pattern)) if pattern.endswith(".v") else []
        if not paths:
            raise UserError(
                str(find_library()), f"Coq's library has no file {pattern!r}", 'name one as "Bool/Bool.v"'
            )
        files |= dict.fromkeys(str(path.relative_to(find_library())) for path in paths)
    return list(files)


def _proof_script(theorem: Statement) -> tuple[str, ...]:
    return (theorem.opening, *theorem.proof) if theorem.opening else theorem.proof


def _join_words(statement: str) -> str:
    return " ".join(statement.split())


def _task(file: str, theorem: Statement, spec: CoqLibrary) -> Task:
    context = theorem.before[len(theorem.before) - min(spec.shown, len(theorem.before)) :]
    parts = [theorem.header, *context, f"Theorem {theorem.name} : {theorem.statement}."]
    text = "\n".join(part for part in parts if part)
    gold = "\n".join(_proof_script(theorem))
    tactics = sum(not sentence.is_structure for sentence in split_sentences(gold)[0])
    return Task(
        id=f"{file}:{theorem.name}",
        messages=({"role": "user", "content": spec.template.replace("{theorem}", text)},),
        fields={
            "name": theorem.name,
            "statement": theorem.statement,
            "header": theorem.header,
            "definitions": "\n".join(theorem.before),
            "opening": [theorem.opening] if theorem.opening else [],
            "gold": gold,
            "file": file,
            "tactics": tactics,
            "difficulty": tactics,
        },
        source=f"{file}:{theorem.line}",
    )
