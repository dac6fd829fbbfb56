"""Split a response in Lean into its tactics."""

import re
import textwrap
from dataclasses import dataclass

from posttrain_prove.lean.source import Header, classify


@dataclass(frozen=True)
class LeanScript:
    """The tactics of a response."""

    text: str
    begin: int
    """Place of the text's first character in the response's code; blanks added before the text count."""
    declaration: str = ""
    """In a development, the text before the tactics: up to the `by` of its theorem."""

    @property
    def margin(self) -> str:
        first = next(line for line in self.text.split("\n") if line.strip())
        return first[: len(first) - len(first.lstrip())]


def find_script(header: Header, name: str, text: str) -> LeanScript | None:
    """Return the tactics of a response; None if it has none, or text follows them.

    >>> find_script(Header.of(""), "t", "theorem t : p := by\\n  exact h")
    LeanScript(text='\\n  exact h', begin=19, declaration='theorem t : p := by')
    """
    form = classify(header, name, text)
    if form == "script":
        return LeanScript(text, 0)
    if form == "development":
        pattern = rf"\b(?:theorem|lemma)\s+{re.escape(name)}(?![\w'!?.])"
        begin = max((match.end() for match in re.finditer(pattern, text)), default=len(text))
        match = re.compile(r":=\s*by\b").search(text, begin)
    else:
        match = re.compile(r"\s*(?::=\s*)?by\b").match(text)
    if match is None or not text[match.end() :].strip():
        return None
    proof = text[match.end() :]
    if re.search(r"^\S", proof.split("\n", 1)[-1], re.MULTILINE):
        return None
    # Tactics that begin on the line of the "by" stand at the column that they have there.
    pad = 0 if not proof.split("\n")[0].strip() else match.end() - (text.rfind("\n", 0, match.end()) + 1)
    declaration = text[: match.end()] if form == "development" else ""
    return LeanScript(" " * pad + proof, match.end() - pad, declaration)


@dataclass(frozen=True)
class Tactic:
    """One tactic of a script, with its end in the script."""

    text: str
    end: int


def split_tactics(script: str) -> list[Tactic]:
    """Split a script into tactics: each begins on a line that is indented no deeper than the first.

    A line that begins with |, <;> or a closing bracket continues the tactic before.

    >>> [t.text for t in split_tactics("  intro n\\n  cases n with\\n  | zero => rfl\\n    skip\\n  simp")]
    ['intro n', 'cases n with\\n| zero => rfl\\n  skip', 'simp']
    """
    blocks: list[list[str]] = []
    ends: list[int] = []
    margin, at = -1, 0
    for line in script.splitlines(keepends=True):
        at += len(line)
        words = line.strip()
        if not words:
            continue
        indent = len(line) - len(line.lstrip())
        margin = indent if margin < 0 else margin
        if not blocks or (indent <= margin and not words.startswith(("|", "<;>", ")", "]", "}", "⟩"))):
            blocks.append([])
            ends.append(at)
        blocks[-1].append(line)
        ends[-1] = at - (len(line) - len(line.rstrip()))
    texts = [textwrap.dedent("".join(block)).strip() for block in blocks]
    return [Tactic(text, end) for text, end in zip(texts, ends, strict=True)]
