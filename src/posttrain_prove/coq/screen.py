"""Refuse submissions to Coq by the words in them.

This gives an attack its name and saves the time to run it. Soundness does not depend on it: what passes is
compiled in a box and judged by its type, its assumptions and `coqchk`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain_prove.coq.script import Sentence, strip_prefixes


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first sentence that is not allowed, and why."""

    index: int
    label: Literal["forbidden", "assumes", "incomplete"]
    why: str


_FORBIDDEN = (
    (r"Redirect\b", "writes files"),
    (r"(?:Recursive\s+|Separate\s+)?Extraction\b|Set\s+Extraction\b", "writes files"),
    (r"Print\s+(?:Sorted\s+)?Universes\b.*\"", "writes files"),
    (r"Load\b", "reads files"),
    (r"Cd\b|Pwd\b|(?:Add|Remove)\s+(?:Rec\s+)?(?:LoadPath|ML\s+Path)\b", "changes where files are found"),
    (r"Declare\s+ML\s+Module\b|Ltac2\s+@\s*external\b", "loads machine code"),
    (r"(?:Drop|Quit|BackTo|Back|Reset)\b", "drives the session, not the proof"),
    (
        r"(?:Set|Unset)\s+(?:Guard\s+Checking|Positivity\s+Checking|Universe\s+Checking|Definitional\s+UIP)\b",
        "turns off a check of the kernel",
    ),
    (r"From\s+(?!Coq\b)\S+\s+.*\bRequire\b", "requires a library that is not Coq's"),
)
_ASSUMES = r"(?:Axioms?|Parameters?|Conjectures?|Primitive|Declare\s+Module)\b"
_SECTION_ONLY = r"(?:Variables?|Hypothes[ie]s|Context)\b"
_GIVES_UP = re.compile(r"(?<![\w'.])(?:admit|give_up|Admitted|Admit\s+Obligations)(?![\w'])")
_UNCHECKED = re.compile(r"(?<![\w'.])bypass_check(?![\w'])")
_PREFIXES = re.compile(r"(?:Fail|Succeed|Instructions)\s+")


def find_refusal(parts: Sequence[Sentence]) -> Refusal | None:
    """Return the first sentence that is not allowed; None if all are.

    >>> from posttrain_prove.coq.script import split_sentences
    >>> find_refusal(split_sentences("intros. (* admit. *) admit. Redirect.")[0])
    Refusal(index=1, label='incomplete', why='admit proves nothing')
    >>> find_refusal(split_sentences("Section S. Variable n : nat. End S. Variable f : False.")[0])
    Refusal(index=3, label='assumes', why='Variable f : False. assumes what is to be proved')
    """
    open_blocks: list[str] = []
    for index, sentence in enumerate(parts):
        code = _strip_command(sentence.code)
        if _UNCHECKED.search(sentence.code):
            return Refusal(index, "forbidden", "bypass_check turns off a check of the kernel")
        for pattern, why in _FORBIDDEN:
            if re.match(pattern, code):
                return Refusal(index, "forbidden", f"{_shorten(code)} {why}")
        in_section = open_blocks[-1:] == ["Section"]
        if re.match(_ASSUMES, code) and "Module Type" not in open_blocks:
            return Refusal(index, "assumes", f"{_shorten(code)} assumes what is to be proved")
        if re.match(_SECTION_ONLY, code) and not in_section:
            return Refusal(index, "assumes", f"{_shorten(code)} assumes what is to be proved")
        if gives_up := _GIVES_UP.search(code):
            return Refusal(index, "incomplete", f"{gives_up.group()} proves nothing")
        _track_blocks(code, open_blocks)
    return None


def _track_blocks(code: str, open_blocks: list[str]) -> None:
    """Update the list of open sections and modules."""
    if match := re.match(r"(Section|Module\s+Type|Module)\s+(?!Import\b|Export\b)\w", code):
        if ":=" not in code:
            open_blocks.append(" ".join(match.group(1).split()))
    elif re.match(r"End\s+\w", code) and open_blocks:
        open_blocks.pop()


def _strip_command(code: str) -> str:
    """Strip attributes, modifiers and `Fail`-like words from a command."""
    while True:
        shorter = strip_prefixes(code)
        if match := _PREFIXES.match(shorter):
            shorter = shorter[match.end() :]
        if shorter == code:
            return code
        code = shorter


def _shorten(code: str) -> str:
    return code if len(code) <= 60 else f"{code[:60]}..."
