"""Fenced blocks of a response, as Markdown writes them.

A block begins with a line of at least three backticks or tildes, indented by at most three spaces, with an
optional language behind them; it ends with a line of as many of them or more and nothing else. A block
that is not closed is none, nor is one in a thought. Time is linear in the length of the response.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.verifiers.regions import speech, spoken

# Possessive, because spaces could otherwise be matched in quadratically many ways.
_OPEN = re.compile(r" {0,3}(?:(`{3,}+)[ \t]*+([^`]*)|(~{3,}+)[ \t]*+(.*))", re.DOTALL)
_CLOSE = re.compile(r" {0,3}(`{3,}+|~{3,}+)[ \t]*+")


@dataclass(frozen=True, slots=True)
class Block:
    """A complete block: where its lines begin and end, its language in small letters, its indentation."""

    begin: int
    end: int
    language: str
    indent: int

    def text(self, response: str) -> str:
        """Its lines, without as many blanks before each as stand before its fence."""
        lines = response[self.begin : self.end]
        return re.sub(rf"^ {{1,{self.indent}}}", "", lines, flags=re.MULTILINE) if self.indent else lines


def blocks(response: str) -> list[Block]:
    """The complete blocks behind the thought, in their order.

    >>> [block.language for block in blocks("```coq\\nauto.\\n```\\nNo more goals:\\n~~~\\n~~~")]
    ['coq', '']
    """
    found: list[Block] = []
    mark, language, indent, begin = "", "", 0, 0
    at, last = speech(response)
    if "```" not in response and "~~~" not in response:
        return found
    for line in response[at:last].split("\n"):
        text = line.removesuffix("\r")
        if not mark:
            opened = _OPEN.fullmatch(text)
            if opened:
                mark, begin = opened[1] or opened[3], at + len(line) + 1
                said = (opened[2] or opened[4] or "").split(maxsplit=1)
                language, indent = said[0].casefold() if said else "", text.index(mark)
        elif (closed := _CLOSE.fullmatch(text)) and closed[1][0] == mark[0] and len(closed[1]) >= len(mark):
            found.append(Block(begin, at, language, indent))
            mark = ""
        at += len(line) + 1
    return found


def last_block(
    response: str, *languages: str, wanted: Callable[[str], bool] = lambda text: False
) -> Block | None:
    """The last complete block of these languages or of none that is `wanted`.

    Where none is, the last one of these languages, or else the last of all.
    """
    found = blocks(response)[::-1]
    ranks: tuple[Callable[[Block], bool], ...] = (
        lambda block: block.language in ("", *languages) and wanted(block.text(response)),
        lambda block: block.language in languages,
        lambda block: True,
    )
    return next((block for fits in ranks for block in found if fits(block)), None)


def answered(response: str, *languages: str) -> tuple[int, int]:
    """Where the lines of the last block begin and end; what is said behind the thought if there is none.

    >>> response = "So:\\n```coq\\nauto.\\n```\\nthat is auto."
    >>> response[slice(*answered(response))]
    'auto.\\n'
    """
    found = last_block(response, *languages)
    return (found.begin, found.end) if found else speech(response)


def last_fenced(response: str) -> str | None:
    """What stands in the last block, as one text without its last line's end; None if there is none.

    >>> last_fenced("```json\\n{}\\n```\\nor\\n```\\n[]\\n```")
    '[]'
    """
    found = last_block(response)
    return None if found is None else found.text(response).replace("\r\n", "\n").removesuffix("\n")


def program(response: str, *languages: str, wanted: Callable[[str], bool] = lambda text: False) -> str:
    """The program that a response gives: the text of that block; all that is said where there is no block.

    >>> response = "So:\\n```python\\nprint(1)\\n```\\nwhich writes\\n```\\n1\\n```\\nand ```x"
    >>> program(response), program(response, "python"), program("    return 1")
    ('1\\n', 'print(1)\\n', '    return 1')
    """
    block = last_block(response, *languages, wanted=wanted)
    return block.text(response) if block else spoken(response)
