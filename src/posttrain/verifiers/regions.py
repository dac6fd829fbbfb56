"""Where in a response the answer stands: after a marker, in the last box, or between tags.

Each function returns the text of that place, or None if there is no such place, in time
linear in the length of the response. What stands in a thought is no answer.
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
    """The part of the response in which the answer is looked for."""
    response = spoken(response)
    if where == "after":
        return after(response, marker)
    if where == "boxed":
        return boxed(response)
    if where == "tag":
        return tagged(response, tag)
    return response


def spoken(response: str) -> str:
    """Return what follows the last thought, up to a <think> that is not closed.

    A </think> ends a thought if a <think> before it is not closed yet, or if it is the first of these tags:
    then the prompt has opened the thought. Any other </think> is a mention, and part of the answer.

    >>> spoken("<think>6? no</think>7"), spoken("so 6</think>7"), spoken("<think>maybe 6"), spoken("7")
    ('7', '7', '', '7')
    >>> spoken("<think>6?</think>7, as I said before </think>")
    '7, as I said before </think>'
    """
    return response[slice(*speech(response))]


def speech(response: str) -> tuple[int, int]:
    """Return where the text of `spoken` begins and ends."""
    begin, open_thoughts, first = 0, 0, True
    for tag in _THOUGHT.finditer(response):
        if tag.group() == "<think>":
            open_thoughts += 1
        elif open_thoughts or first:
            begin, open_thoughts = tag.end(), max(0, open_thoughts - 1)
        first = False
    unclosed = response.find("<think>", begin)
    return begin, unclosed if unclosed >= 0 else len(response)


def placed(answer: str, where: Where, marker: str, tag: str) -> str:
    """A response that has the answer in that part."""
    if where == "after":
        return f"{marker}{answer}"
    if where == "boxed":
        return f"\\boxed{{{answer}}}"
    if where == "tag":
        return f"<{tag}>{answer}</{tag}>"
    return answer


def after(response: str, marker: str) -> str | None:
    """What follows the last marker, to the end of the first line that is not blank.

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


def boxed(response: str) -> str | None:
    r"""Return what stands in the last \boxed{...} whose braces are balanced, or behind a \boxed without any.

    Without braces the box holds the number, command or letter behind it, up to the end of the formula,
    sentence or line.

    >>> boxed(r"\boxed{6} no, \boxed{\frac{1}{2}} and \boxed{3"), boxed(r"$\boxed 7$."), boxed(r"\boxed up")
    ('\\frac{1}{2}', '7', None)
    """
    open_at: list[tuple[int, bool]] = []  # where each open brace's content starts; whether it is a box
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


def tagged(response: str, tag: str) -> str | None:
    """Return what stands between the last <tag> that is closed and the first </tag> behind it.

    >>> tagged("<think>2</think><answer> 7 </answer></answer>", "answer")
    ' 7 '
    """
    start = response.rfind(f"<{tag}>", 0, max(response.rfind(f"</{tag}>"), 0))
    begin = start + len(tag) + 2
    return None if start < 0 else response[begin : response.find(f"</{tag}>", begin)]
