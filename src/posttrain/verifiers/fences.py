"""Fenced blocks of a response, as Markdown writes them.

A block begins with a line of at least three backticks or tildes, indented by at most three spaces, with an
optional language behind them; it ends with a line of as many of them or more and nothing else. A block
that is not closed is none, nor is one in a thought. Time is linear in the length of the response.
"""

import re

from posttrain.verifiers.regions import speech

# Possessive, because spaces could otherwise be matched in quadratically many ways.
_OPEN = re.compile(r" {0,3}(?:(`{3,}+)[ \t]*+([^`]*)|(~{3,}+)[ \t]*+(.*))", re.DOTALL)
_CLOSE = re.compile(r" {0,3}(`{3,}+|~{3,}+)[ \t]*+")


def fenced(response: str, language: str = "") -> tuple[int, int] | None:
    """Where the last complete block's lines begin and end, of this language if one is named; None if none is.

    >>> response = "So:\\n```coq\\nauto.\\n```\\nthat is auto."
    >>> response[slice(*fenced(response))]
    'auto.\\n'
    """
    found: tuple[int, int] | None = None
    mark, wanted, begin = "", False, 0
    at, last = speech(response)
    if "```" not in response and "~~~" not in response:
        return None
    for line in response[at:last].split("\n"):
        text = line.removesuffix("\r")
        if not mark:
            opened = _OPEN.fullmatch(text)
            if opened:
                mark, begin = opened[1] or opened[3], at + len(line) + 1
                said = (opened[2] or opened[4] or "").split(maxsplit=1)
                wanted = not language or (bool(said) and said[0].casefold() == language)
        elif (closed := _CLOSE.fullmatch(text)) and closed[1][0] == mark[0] and len(closed[1]) >= len(mark):
            found = (begin, at) if wanted else found
            mark = ""
        at += len(line) + 1
    return found


def last_fenced(response: str, language: str = "") -> str | None:
    """What stands in the last complete block, of this language if one is named; None if there is none.

    >>> last_fenced("```json\\n{}\\n```\\nor\\n```\\n[]\\n```")
    '[]'
    >>> last_fenced("```json\\n{}\\n```\\n```\\n", "json")
    '{}'
    """
    found = fenced(response, language)
    return None if found is None else response[slice(*found)].replace("\r\n", "\n").removesuffix("\n")


def program(response: str) -> str:
    """The last complete block of what a response says behind its thought; all of that where there is none.

    >>> program("So:\\n```python\\nprint(1)\\n```\\nor\\n```\\nprint(2)\\n```\\nand ```x")
    'print(2)\\n'
    >>> program("    return 1")
    '    return 1'
    """
    return response[slice(*(fenced(response) or speech(response)))]
