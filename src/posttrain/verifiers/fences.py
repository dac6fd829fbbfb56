"""Fenced blocks of a response, as Markdown writes them.

A block begins with a line of at least three backticks or tildes, with an optional language behind them; it
ends with a line of as many of them or more and nothing else. Either is indented by at most three spaces, or
so much more as the text of the list item that it stands in; a block in a quote has a `>` before each line.
A block that is not closed is not one, nor is one in a thought. Time is linear in the length of the response.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from posttrain.verifiers.regions import speech, spoken

# Possessive, because spaces could otherwise be matched in quadratically many ways.
_OPEN = re.compile(r"(?:(`{3,}+)[ \t]*+([^`]*)|(~{3,}+)[ \t]*+(.*))", re.DOTALL)
_CLOSE = re.compile(r"(`{3,}+|~{3,}+)[ \t]*+")
_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])(?:[ \t]|$)")
_QUOTE = re.compile(r"(?: {0,3}> ?)*+")
_TAB = 4
_INSET = 3
"""Spaces before a fence beyond where the text of its list item begins."""
_MOST_ITEMS = 8
"""List items that one line may begin, as `- 1. text` begins two."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block: where its lines begin and end, its language in small letters, and where its fence stands."""

    begin: int
    end: int
    language: str
    indent: int
    """Columns of blanks before the fence, which its lines have too."""
    quotes: int
    """Marks of a quote before the fence, which its lines have too."""
    line: int
    """Where the line of the opening fence begins."""

    def text(self, response: str) -> str:
        """Its lines, without the quote and as many blanks before each as stand before its fence."""
        lines = response[self.begin : self.end]
        if not self.indent and not self.quotes:
            return lines
        quote = _quote(self.quotes)
        return "\n".join(_without(quote.sub("", line, count=1), self.indent) for line in lines.split("\n"))


def blocks(response: str) -> list[Block]:
    """The complete blocks behind the thought, in their order.

    >>> [block.language for block in blocks("```coq\\nauto.\\n```\\nNo more goals:\\n~~~\\n~~~")]
    ['coq', '']
    """
    return _scan(response)[0]


def _scan(response: str) -> tuple[list[Block], Block | None]:
    """The complete blocks, and one that is not closed."""
    found: list[Block] = []
    block: Block | None = None
    mark, base, quote = "", 0, _quote(0)
    items: list[int] = []  # the columns at which the texts of the list items begin that a line may be in
    quotes, paragraph = 0, False
    at, last = speech(response)
    if "```" not in response and "~~~" not in response:
        return found, None
    for line in response[at:last].split("\n"):
        text = line.removesuffix("\r")
        if block and (prefix := quote.match(text)):
            column, rest = _inset(text[prefix.end() :])
            closed = _CLOSE.fullmatch(rest) if column <= base + _INSET else None
            if closed and closed[1][0] == mark[0] and len(closed[1]) >= len(mark):
                found.append(Block(block.begin, at, block.language, block.indent, block.quotes, block.line))
                block = None
            at += len(line) + 1
            continue
        block = None  # a quote that has ended, and a block in it that was not closed
        before = _QUOTE.match(text)
        text = text[before.end() :] if before else text
        if (now := before[0].count(">") if before else 0) != quotes:
            quotes, paragraph = now, False
            items.clear()
        column, rest = _inset(text)
        if not paragraph or _ITEM.match(rest) or _OPEN.fullmatch(rest):  # or it goes on with a paragraph
            while rest and items and column < items[-1]:
                items.pop()
        paragraph = bool(rest)
        for _ in range(_MOST_ITEMS):
            base = items[-1] if items else 0
            item = _ITEM.match(rest) if column <= base + _INSET else None
            if item is None:
                break
            blanks, rest = _inset(rest[item.end(1) :])
            column += len(item[1])
            items.append(column + (blanks if 1 <= blanks <= _TAB and rest else 1))
            column += blanks
        opened = _OPEN.fullmatch(rest) if column <= base + _INSET else None
        if opened:
            mark, paragraph = opened[1] or opened[3], False
            said = (opened[2] or opened[4] or "").split(maxsplit=1)
            begin, language = at + len(line) + 1, said[0].casefold() if said else ""
            block, quote = Block(begin, last, language, column, quotes, at), _quote(quotes)
        at += len(line) + 1
    return found, block


def _quote(marks: int) -> re.Pattern[str]:
    """The beginning of a line in so many quotes."""
    return re.compile(rf"(?: {{0,3}}> ?){{{marks}}}" if marks else "")


def _inset(text: str) -> tuple[int, str]:
    """The columns of blanks at the beginning of a line, and the rest."""
    rest = text.lstrip(" \t")
    return len(text[: len(text) - len(rest)].expandtabs(_TAB)), rest


def _without(line: str, columns: int) -> str:
    """A line without so many columns of blanks, or as many as it has.

    >>> _without("\\t\\tx", 4), _without("\\tx", 3), _without(" x", 3)
    ('\\tx', ' x', 'x')
    """
    column = at = 0
    while column < columns and at < len(line) and line[at] in " \t":
        column += 1 if line[at] == " " else _TAB - column % _TAB
        at += 1
    return " " * (column - columns) + line[at:]


def last_block(
    response: str, *languages: str, wanted: Callable[[str], bool] = lambda text: False
) -> Block | None:
    """The last complete block of these languages or of none that is `wanted`.

    Where none is, the last one of these languages, or else the last of all.
    """
    return _last(blocks(response), response, languages, wanted)


def _last(
    found: Sequence[Block], response: str, languages: Collection[str], wanted: Callable[[str], bool]
) -> Block | None:
    ranks: tuple[Callable[[Block], bool], ...] = (
        lambda block: block.language in ("", *languages) and wanted(block.text(response)),
        lambda block: block.language in languages,
        lambda block: True,
    )
    return next((block for fits in ranks for block in reversed(found) if fits(block)), None)


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

    A fence may also stand alone: it closes a block that began before the response, or opens one that nothing
    closes. And blocks may stand in a text of the program, if it is the whole response.

    >>> response = "So:\\n```python\\nprint(1)\\n```\\nwhich writes\\n```\\n1\\n```\\nand ```x"
    >>> program(response), program(response, "python"), program("    return 1")
    ('1\\n', 'print(1)\\n', '    return 1')
    >>> program("print(1)\\n```"), program("So:\\n```python\\nprint(1)")
    ('print(1)\\n', 'print(1)')
    """
    complete, cut = _scan(response)
    block = _last(complete, response, languages, wanted)
    if block and wanted(block.text(response)):
        return block.text(response)
    first = complete[0] if complete else cut
    if first is None:
        return spoken(response)
    tail = cut.text(response) if cut else ""
    head = response[speech(response)[0] : first.line]
    if wanted(tail):
        return tail
    if wanted(head):
        # Of fences that are not in pairs the first one closes.
        odd = cut or any(_OPEN.fullmatch(_inset(line)[1]) for line in first.text(response).split("\n"))
        return head if odd and not first.language else spoken(response)
    if block:
        return block.text(response)
    return tail if first.language or tail.strip() else head
