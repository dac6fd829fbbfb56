"""Find the answer in a response: after a marker, in the last box, or between tags.

The functions return the text at that place, or None, in time linear in the length of the response. Thoughts
(<think>...</think>) are removed first.
"""

import re
from typing import Literal

Where = Literal["all", "after", "boxed", "tag"]

_BRACES = re.compile(
    r"""\\boxed\s{0,9}\{|\\[{}]|[{}]
    |\\boxed\s{0,9}(?P<bare>(?=[-+−.]?\s?(?:[0-9]|\\[A-Za-z]|[A-Za-z](?:[$.,;)\]]|\s*(?:$|[-+*/^_=\n]))))
        (?:(?!\\boxed|\\[)\]]|[.!?](?:\s|$))[^{}$\n]|\{(?:[^{}]|\{[^{}]*\})*\})+)""",
    re.VERBOSE,
)
_THOUGHT = re.compile("</?think>")


def region(response: str, where: Where, marker: str, tag: str) -> str | None:
    """Return the part of the response that holds the answer; None if the place is missing."""
    response = remove_thought(response)
    if where == "after":
        return after(response, marker)
    if where == "boxed":
        return box_content(response)
    if where == "tag":
        return tag_content(response, tag)
    return response


def remove_thought(response: str) -> str:
    """Return the text after the last thought, up to a <think> that is not closed.

    A </think> ends a thought if an earlier <think> is still open, or if it is the first of these tags: then
    the prompt opened the thought. Any other </think> is ordinary text of the answer.

    >>> [remove_thought(text) for text in ("<think>6? no</think>7", "so 6</think>7", "<think>maybe 6", "7")]
    ['7', '7', '', '7']
    >>> remove_thought("<think>6?</think>7, as I said before </think>")
    '7, as I said before </think>'
    """
    return response[slice(*speech(response))]


def speech(response: str) -> tuple[int, int]:
    """Return the bounds of the text of `spoken`: (begin, end)."""
    begin, open_thoughts, first = 0, 0, True
    for tag in _THOUGHT.finditer(response):
        if tag.group() == "<think>":
            open_thoughts += 1
        elif open_thoughts or first:
            begin, open_thoughts = tag.end(), max(0, open_thoughts - 1)
        first = False
    unclosed = response.find("<think>", begin)
    return begin, unclosed if unclosed >= 0 else len(response)


def place_answer(answer: str, where: Where, marker: str, tag: str) -> str:
    """Return a response with the answer at that place."""
    if where == "after":
        return f"{marker}{answer}"
    if where == "boxed":
        return f"\\boxed{{{answer}}}"
    if where == "tag":
        return f"<{tag}>{answer}</{tag}>"
    return answer


def after(response: str, marker: str) -> str | None:
    """Return the text after the last marker, to the end of the first line that is not blank.

    >>> after("3 + 4 = 7 #### 7", "####")
    ' 7'
    >>> after("Answer:\\n 7\\nNext question", "Answer:")
    ' 7'
    """
    at = response.rfind(marker)
    if at < 0:
        return None
    rest = response[at + len(marker) :]
    start = len(rest) - len(rest.lstrip())
    end = rest.find("\n", start)
    begin = rest.rfind("\n", 0, start) + 1
    return rest[begin : end if end >= 0 else len(rest)]


def box_content(response: str) -> str | None:
    r"""Return the content of the last \boxed{...} with balanced braces, or of a \boxed without braces.

    Without braces the content is the number, command or letter that follows, up to the end of the formula,
    sentence or line.

    >>> box_content(r"\boxed{6} no, \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    >>> box_content(r"$\boxed 7$."), box_content(r"\boxed up")
    ('7', None)
    """
    open_at: list[tuple[int, bool]] = []  # for each open brace: start of its content, whether it opens a box
    last: tuple[int, int] | None = None
    for brace in _BRACES.finditer(response):
        text = brace.group()
        if brace["bare"] is not None:
            if last is None or brace.start("bare") > last[0]:
                last = brace.span("bare")
            continue
        if text in (r"\{", r"\}"):  # printed braces do not nest
            continue
        if text != "}":
            open_at.append((brace.end(), text != "{"))
        elif open_at:
            start, is_box = open_at.pop()
            if is_box and (last is None or start > last[0]):
                last = (start, brace.start())
    return None if last is None else response[last[0] : last[1]]


def tag_content(response: str, tag: str) -> str | None:
    """Return the text between the last <tag> that is closed and the first </tag> after it.

    >>> tag_content("<think>2</think><answer> 7 </answer></answer>", "answer")
    ' 7 '
    """
    start = response.rfind(f"<{tag}>", 0, max(response.rfind(f"</{tag}>"), 0))
    begin = start + len(tag) + 2
    return None if start < 0 else response[begin : response.find(f"</{tag}>", begin)]
