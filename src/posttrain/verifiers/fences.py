"""Find the fenced code blocks of a response, by the rules of Markdown.

A block begins with a line of at least three backticks or tildes, optionally followed by a language. It ends
with a line of at least as many of the same character and nothing else. Both fences are indented by at most
three spaces, counted from the text of the enclosing list item; in a quote each line begins with `>`. Blocks
that are not closed and blocks in a thought do not count. Time is linear in the length of the response.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from posttrain.verifiers.regions import remove_thought, speech

# Possessive, because spaces could otherwise be matched in quadratically many ways.
_OPEN = re.compile(r"(?:(`{3,}+)[ \t]*+([^`]*)|(~{3,}+)[ \t]*+(.*))", re.DOTALL)
_CLOSE = re.compile(r"(`{3,}+|~{3,}+)[ \t]*+")
_ITEM = re.compile(r"([-*+]|\d{1,9}[.)])(?:[ \t]|$)")
_QUOTE = re.compile(r"(?: {0,3}> ?)*+")
_TAB = 4
_INSET = 3
"""Most spaces before a fence, counted from where the text of its list item begins."""
_MOST_ITEMS = 8
"""Most list items that one line may begin; `- 1. text` begins two."""


@dataclass(frozen=True, slots=True)
class Block:
    """Place and language of a block; `begin` and `end` bound its lines, and `language` is in lower case."""

    begin: int
    end: int
    language: str
    indent: int
    """Columns of white space before the fence, removed from its lines."""
    quotes: int
    """Quote marks (`>`) before the fence, removed from its lines."""
    line: int
    """Start of the line of the opening fence."""

    def text(self, response: str) -> str:
        """Return the lines, without the quote marks and the indent of the fence."""
        lines = response[self.begin : self.end]
        if not self.indent and not self.quotes:
            return lines
        quote = _quote(self.quotes)
        return "\n".join(_without(quote.sub("", line, count=1), self.indent) for line in lines.split("\n"))


def blocks(response: str) -> list[Block]:
    """Return the complete blocks after the thought, in their order.

    >>> [block.language for block in blocks("```coq\\nauto.\\n```\\nNo more goals:\\n~~~\\n~~~")]
    ['coq', '']
    """
    return _scan(response)[0]


def _scan(response: str) -> tuple[list[Block], Block | None]:
    """Return the complete blocks, and a last one that is not closed."""
    closed_blocks: list[Block] = []
    block: Block | None = None
    mark, base, quote = "", 0, _quote(0)
    items: list[int] = []  # for each open list item: the column where its text begins
    quotes, paragraph = 0, False
    at, last = speech(response)
    if "```" not in response and "~~~" not in response:
        return closed_blocks, None
    for line in response[at:last].split("\n"):
        text = line.removesuffix("\r")
        if block and (prefix := quote.match(text)):
            column, rest = _inset(text[prefix.end() :])
            closed = _CLOSE.fullmatch(rest) if column <= base + _INSET else None
            if closed and closed[1][0] == mark[0] and len(closed[1]) >= len(mark):
                closed_blocks.append(
                    Block(block.begin, at, block.language, block.indent, block.quotes, block.line)
                )
                block = None
            at += len(line) + 1
            continue
        block = None  # the quote has ended, and the block in it was not closed
        before = _QUOTE.match(text)
        text = text[before.end() :] if before else text
        if (depth := before[0].count(">") if before else 0) != quotes:
            quotes, paragraph = depth, False
            items.clear()
        column, rest = _inset(text)
        # Any other line may continue a paragraph, and stays in the list item.
        if not paragraph or _ITEM.match(rest) or _OPEN.fullmatch(rest):
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
            info = (opened[2] or opened[4] or "").split(maxsplit=1)
            begin, language = at + len(line) + 1, info[0].casefold() if info else ""
            block, quote = Block(begin, last, language, column, quotes, at), _quote(quotes)
        at += len(line) + 1
    return closed_blocks, block


def _quote(marks: int) -> re.Pattern[str]:
    """Return the pattern for the beginning of a line inside this many quotes."""
    return re.compile(rf"(?: {{0,3}}> ?){{{marks}}}" if marks else "")


def _inset(text: str) -> tuple[int, str]:
    """Return the columns of white space at the beginning of a line, and the rest."""
    rest = text.lstrip(" \t")
    return len(text[: len(text) - len(rest)].expandtabs(_TAB)), rest


def _without(line: str, columns: int) -> str:
    """Remove up to this many columns of white space from a line.

    >>> _without("\\t\\tx", 4), _without("\\tx", 3), _without(" x", 3)
    ('\\tx', ' x', 'x')
    """
    column = at = 0
    while column < columns and at < len(line) and line[at] in " \t":
        column += 1 if line[at] == " " else _TAB - column % _TAB
        at += 1
    return " " * (column - columns) + line[at:]


def last_block(
    response: str, *languages: str, accepts: Callable[[str], bool] = lambda text: False
) -> Block | None:
    """Return the last complete block in one of these languages or in none whose text `accepts` accepts.

    Otherwise return the last block in one of these languages, or else the last block.
    """
    return _last(blocks(response), response, languages, accepts)


def _last(
    complete: Sequence[Block], response: str, languages: Collection[str], accepts: Callable[[str], bool]
) -> Block | None:
    ranks: tuple[Callable[[Block], bool], ...] = (
        lambda block: block.language in ("", *languages) and accepts(block.text(response)),
        lambda block: block.language in languages,
        lambda block: True,
    )
    return next((block for fits in ranks for block in reversed(complete) if fits(block)), None)


def answer_bounds(response: str, *languages: str) -> tuple[int, int]:
    """Return the bounds of the last block's lines; without a block, those of the text after the thought.

    >>> response = "So:\\n```coq\\nauto.\\n```\\nthat is auto."
    >>> response[slice(*answer_bounds(response))]
    'auto.\\n'
    """
    block = last_block(response, *languages)
    return (block.begin, block.end) if block else speech(response)


def last_fenced(response: str) -> str | None:
    """Return the text of the last block without the final newline; None without a block.

    >>> last_fenced("```json\\n{}\\n```\\nor\\n```\\n[]\\n```")
    '[]'
    """
    block = last_block(response)
    return None if block is None else block.text(response).replace("\r\n", "\n").removesuffix("\n")


def program(response: str, *languages: str, accepts: Callable[[str], bool] = lambda text: False) -> str:
    """Return the program: the text of `last_block`, or without a block the text after the thought.

    A fence may also be single: it closes a block that began in the prompt, or opens one that is never closed.
    If the whole response is a program, blocks may be part of its strings.

    >>> response = "So:\\n```python\\nprint(1)\\n```\\nwhich writes\\n```\\n1\\n```\\nand ```x"
    >>> program(response), program(response, "python"), program("    return 1")
    ('1\\n', 'print(1)\\n', '    return 1')
    >>> program("print(1)\\n```"), program("So:\\n```python\\nprint(1)")
    ('print(1)\\n', 'print(1)')
    """
    complete, cut = _scan(response)
    block = _last(complete, response, languages, accepts)
    if block and accepts(block.text(response)):
        return block.text(response)
    first = complete[0] if complete else cut
    if first is None:
        return remove_thought(response)
    tail = cut.text(response) if cut else ""
    head = response[speech(response)[0] : first.line]
    if accepts(tail):
        return tail
    if accepts(head):
        # With an odd number of fences the first one closes a block that began in the prompt.
        odd = cut or any(_OPEN.fullmatch(_inset(line)[1]) for line in first.text(response).split("\n"))
        return head if odd and not first.language else remove_thought(response)
    if block:
        return block.text(response)
    return tail if first.language or tail.strip() else head
