"""The tactics of a response in Lean, one by one, and where each ends."""

import re
import textwrap
from dataclasses import dataclass

from posttrain_prove.lean.source import Header, kind


@dataclass(frozen=True)
class LeanScript:
    """The tactics of a response."""

    text: str
    begin: int
    """Where in the response's code the text begins, with the blanks that were put before it."""
    declared: str = ""
    """What a development has before the tactics: up to the `by` of its theorem."""

    @property
    def margin(self) -> str:
        """The blanks before each tactic."""
        first = next(line for line in self.text.split("\n") if line.strip())
        return first[: len(first) - len(first.lstrip())]


def script(header: Header, name: str, text: str) -> LeanScript | None:
    """The tactics of a response, where there is nothing after them; None if it has none of its own.

    >>> script(Header.of(""), "t", "theorem t : p := by\\n  exact h")
    LeanScript(text='\\n  exact h', begin=19, declared='theorem t : p := by')
    """
    sort = kind(header, name, text)
    if sort == "script":
        return LeanScript(text, 0)
    begin = 0
    if sort == "development":
        declared = rf"\b(?:theorem|lemma)\s+{re.escape(name)}(?![\w'!?.])"
        begin = max((found.end() for found in re.finditer(declared, text)), default=len(text))
    opened = (
        re.compile(r":=\s*by\b").search if sort == "development" else re.compile(r"\s*(?::=\s*)?by\b").match
    )
    found = opened(text, begin)
    if found is None or not text[found.end() :].strip():
        return None
    rest = text[found.end() :]
    if re.search(r"^\S", rest.split("\n", 1)[-1], re.MULTILINE):
        return None
    # Tactics that begin on the line of the "by" stand at the column that they have there.
    pad = 0 if not rest.split("\n")[0].strip() else found.end() - (text.rfind("\n", 0, found.end()) + 1)
    declared = text[: found.end()] if sort == "development" else ""
    return LeanScript(" " * pad + rest, found.end() - pad, declared)


@dataclass(frozen=True)
class Tactic:
    """One tactic of a script, and where it ends in the script."""

    text: str
    end: int


def tactics(script: str) -> list[Tactic]:
    """The tactics of a script: each begins on a line that is indented no deeper than the first.

    A line that begins with |, <;> or a closing bracket goes on with the tactic before.

    >>> [t.text for t in tactics("  intro n\\n  cases n with\\n  | zero => rfl\\n    skip\\n  simp")]
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
