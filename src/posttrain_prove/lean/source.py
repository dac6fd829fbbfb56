"""Read a response as Lean source: find its code, check its words, and write the modules made from it.

Comments of the response never reach Lean. They are blanked first, and the text that is searched for forbidden
words is exactly the text that is compiled, strings included: a comment that we read unlike Lean does can cost
a proof but not hide a word.
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from posttrain.verifiers.fences import answer_bounds

HEADER, GUARD, SPEC, SUBMISSION, CHECK = "PtHeader", "PtGuard", "PtSpec", "PtSubmission", "PtCheck"
"""The modules: the header; reserved names; the statement; the response; and our check, which decides."""
TACTICS = "PtTactics"
"""The module that a header with prelude "tactics" imports: our logic, Lean's tactics and notation."""
TACTICS_TEXT = "\n".join(
    Path(__file__).with_name(f"{part}.lean").read_text(encoding="utf-8")
    for part in ("tactics", "order", "linear", "omega")
)
STATEMENT = f"{SPEC}.statement"

# With these words a development runs its own code while Lean reads it, or reads a file that imports it.
# All else (axioms, another statement, a shadowed name) is judged by Lean's answers.
_FORBIDDEN = (
    r"import|initialize|unsafe|implemented_by|extern|macro|macro_rules|syntax|notation3?|infix[lr]?|prefix|postfix",
    r"elab|elab_rules|binder_predicate|unif_hint|d?simproc(?:_decl)?|run_(?:cmd|elab|meta|tac)|by_elab|eval%",
    r"include_str|set_premise_selector|set_library_suggestions|add_aesop_rules|#eval!?|#html|#widget",
    r"declare_\w+|builtin_\w+|register_\w+|Pt(?:Header|Guard|Spec|Submission|Check|Tactics)",
)
# A number ends before a letter in Lean ("5macro" is two tokens), an identifier does not.
_FORBIDDEN_WORD = re.compile(rf"(?<![^\W\d])(?:{'|'.join(_FORBIDDEN)})(?![\w'!?])")
_HOLE_WORD = re.compile(r"(?<![^\W\d])(?:sorry|admit|sorryAx)(?![\w'!?])")
# The kernel knows these by name alone: the types of literals, and arithmetic on them. Without Lean's library
# a response could give them another meaning: with an empty type String, "a" is a proof of False.
RESERVED = (
    "Nat", "Nat.zero", "Nat.succ", "Nat.add", "Nat.sub", "Nat.mul", "Nat.div", "Nat.mod", "Nat.gcd",
    "Nat.beq", "Nat.ble", "Nat.land", "Nat.lor", "Nat.xor", "Nat.shiftLeft", "Nat.shiftRight", "Nat.pow",
    "Nat.log2", "String", "String.mk", "String.ofList", "Char", "Char.ofNat", "Lean.reduceBool",
    "Lean.reduceNat",
)  # fmt: skip
_ATTRIBUTES = re.compile(
    r"simp|ext|refl|symm|trans|congr|gcongr|norm_cast|push_cast|simps|reducible|irreducible|semireducible"
    r"|inline|instance|elab_as_elim|grind|fun_prop|field_simps|mono|coe"
)
_OPTIONS = re.compile(
    r"maxHeartbeats|maxRecDepth|maxSynthPendingDepth|synthInstance\.\w+|autoImplicit|relaxedAutoImplicit"
    r"|exponentiation\.threshold|genCtorIdx|(?:linter|pp|trace)(?:\.\w+)+"
)
_TOKEN = re.compile(r"""'\\?"'|"(?:[^"\\]|\\.)*(?:"|\\?\Z)|--[^\n]*|/-""", re.DOTALL)
_BRACKET = re.compile(r"/-|-/")
_IMPORT = re.compile(r"\s*(?:prelude\b|import[ \t]+[\w.]+)[ \t]*")
_SCOPE = re.compile(r"(?:open|universe|universes|set_option|variable|noncomputable section)\b")
_DECLARES = r"\b(?:theorem|lemma|def|abbrev|axiom|opaque|instance|example)\s"


@dataclass(frozen=True)
class LeanCode:
    """The Lean code of a response without comments, and where it begins in the response.

    >>> LeanCode.of("So:\\n```lean\\nrfl -- done\\n```").text
    'rfl        \\n'
    """

    text: str
    begin: int

    @staticmethod
    def of(response: str) -> "LeanCode":
        """Return the last block fenced as lean, or of any fence, or the text behind the thought."""
        begin, end = answer_bounds(response, "lean", "lean4")
        return LeanCode(blank_comments(response[begin:end]), begin)


def blank_comments(text: str) -> str:
    """Replace each comment by blanks, so that places stay; strings are kept.

    >>> blank_comments('a /- b /- c -/ d -/ "--"')
    'a                   "--"'
    """
    parts: list[str] = []
    at = 0
    while (token := _TOKEN.search(text, at)) is not None:
        parts.append(text[at : token.start()])
        at = token.end()
        if token[0] == "/-":
            at = _end_of_comment(text, at)
        is_string = token[0][0] in "\"'"
        parts.append(token[0] if is_string else re.sub(r"[^\n]", " ", text[token.start() : at]))
    return "".join(parts) + text[at:]


def _end_of_comment(text: str, at: int) -> int:
    depth = 1
    for bracket in _BRACKET.finditer(text, at):
        depth += 1 if bracket[0] == "/-" else -1
        if depth == 0:
            return bracket.end()
    return len(text)


def find_forbidden(text: str) -> tuple[Literal["forbidden", "incomplete", ""], str, int]:
    """Return label, text and place of the first word that code may not use, or ("", "", -1).

    >>> find_forbidden("exact h; sorry"), find_forbidden("run_cmd x"), find_forbidden("exact run_cmd'")
    (('incomplete', 'sorry', 9), ('forbidden', 'run_cmd', 0), ('', '', -1))
    """
    if word := _FORBIDDEN_WORD.search(text):
        return "forbidden", word[0], word.start()
    for option in re.finditer(r"set_option", text):
        name = re.compile(r"\s+(\S+)").match(text, option.end())
        if name is None or not _OPTIONS.fullmatch(name[1]):
            return "forbidden", f"set_option {name[1] if name else ''}", option.start()
    for opening in re.finditer(r"@\[|attribute\b", text):
        block = re.compile(r"\s*\[?([^\[\]]*)\]").match(text, opening.end())
        names = block[1].split(",") if block else [""]
        words = [re.sub(r"^(?:(?:local|scoped)\s+)?[-←↓↑]?", "", n.strip()).split(" ")[0] for n in names]
        if not all(_ATTRIBUTES.fullmatch(word) for word in words):
            return "forbidden", f"attribute {', '.join(words)}", opening.start()
    if hole := _HOLE_WORD.search(text):
        return "incomplete", hole[0], hole.start()
    return "", "", -1


@dataclass(frozen=True)
class Header:
    """A task's header: its text, the lines that hold only in their own file, and its imports.

    >>> Header.of("import Mathlib\\nopen Nat\\ndef two := 2").scope
    ('open Nat',)
    """

    text: str
    prelude: bool
    scope: tuple[str, ...]
    imports: tuple[str, ...]
    has_tactics: bool = True
    """Whether tactics are available: those of Lean's library, ours, or some that a prelude declares."""

    @staticmethod
    def of(text: str, prelude: bool | Literal["tactics"] = False) -> "Header":
        """Parse a header; `prelude` adds that word at the start if missing, "tactics" also our imports."""
        text = blank_comments(text).strip()
        if prelude and not re.match(r"prelude\b", text):
            text = f"prelude\n{text}"
        if prelude == "tactics":
            text = re.sub(
                r"prelude\b", f"prelude\nimport {TACTICS}\nset_option autoImplicit false", text, count=1
            )
        lines = text.splitlines()
        is_prelude = bool(re.match(r"prelude\b", text))
        return Header(
            text=text + "\n",
            prelude=is_prelude,
            has_tactics=not is_prelude or prelude == "tactics" or "tactic_parser" in text,
            scope=tuple(line for line in lines if _SCOPE.match(line)),
            imports=tuple(" ".join(line.split()) for line in lines if _IMPORT.fullmatch(line)),
        )

    @property
    def has_own_tactics(self) -> bool:
        """Whether it imports our logic and tactics."""
        return f"import {TACTICS}" in self.imports

    @property
    def base(self) -> str:
        """The module with the header and, if it has its own logic, the reserved names."""
        return GUARD if self.prelude else HEADER

    def module(self, body: str, imports: Sequence[str] = (), scope: bool = True) -> str:
        """Write a file that imports these modules (default: the header) and opens the header's scope."""
        first = ["prelude"] if self.prelude else []
        lines = [*first, *(f"import {m}" for m in imports or [self.base]), *(self.scope if scope else ())]
        return "\n".join([*lines, body])


def statement_forms(statement: str) -> tuple[str, str]:
    """Return how a statement may follow a theorem's name: as a type, or as binders, colon and type."""
    return f" : (\n{statement}\n)", statement if statement.startswith(".{") else f" {statement}"


def write_queries(header: Header, names: Sequence[str]) -> str:
    """Write a file with one line for each name, which is an error if the header lacks the name."""
    return header.module("\n".join(f"#check @_root_.{name}" for name in names), [HEADER], scope=False)


def write_guard(header: Header, names: Sequence[str]) -> str:
    """Write the module that declares these names, so that no response can."""
    return header.module("\n".join(f"axiom {name} : Prop" for name in names), [HEADER], scope=False)


def write_specification(header: Header, form: str) -> str:
    """Write the module that has the statement as an axiom, and shows that it is a proposition."""
    again = f"theorem {SPEC}.again : type_of% @{STATEMENT} := @{STATEMENT}"
    return header.module(f"axiom {STATEMENT}{form}\n{again}\n")


def classify(header: Header, name: str, text: str) -> Literal["development", "term", "script"]:
    """Classify a response: it declares the name, is a term (begins with :=, by, fun ...), or is tactics."""
    last = re.escape(name.rsplit(".", 1)[-1])
    if re.search(rf"{_DECLARES}\s*(?:[^\s:({{\[]*\.)?{last}(?![\w'!?.])", text):
        return "development"
    if not header.has_tactics or re.match(r"\s*(?::=|by\b|fun\b|λ|⟨|@)", text):
        return "term"
    return "script"


def write_command(header: Header, name: str, form: str, text: str) -> str:
    """Write a response as the commands after the header: a development, or a theorem with its proof."""
    sort = classify(header, name, text)
    if sort == "development":
        return _blank_imports(header, text)
    if sort == "term":
        term = re.sub(r"^(\s*):=", r"\1  ", text)
        return f"theorem {name}{form} :=\n{term}"
    return f"theorem {name}{form} := by\n{textwrap.indent(textwrap.dedent(text), '  ')}"


def write_submission(header: Header, name: str, form: str, text: str) -> tuple[str, int]:
    """Write a response's module, and count the lines before the response's own."""
    module = header.module(write_command(header, name, form, text))
    return module + "\n", module.count("\n") - text.count("\n")


def _blank_imports(header: Header, text: str) -> str:
    """Blank the first lines of a development that repeat imports of the header."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if line.strip() and " ".join(line.split()) not in header.imports:
            break
        lines[i] = ""
    return "\n".join(lines)


def write_check(header: Header, name: str, nonce: str) -> str:
    """Write the module that decides: what the name is, whether it proves the statement, and its axioms."""
    theorem = f"{CHECK}_{nonce}"
    lines = [
        f"#print _root_.{name}",
        f"theorem {theorem} : type_of% @{STATEMENT} := @_root_.{name}",
        f"#print axioms {theorem}",
    ]
    return header.module("\n".join(lines), [header.base, SPEC, SUBMISSION], scope=False)
