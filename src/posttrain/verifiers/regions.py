"""Where in a response the answer stands: after a marker, in the last box, or between tags.

Each function returns the text of that place, or None if there is no such place, in time
linear in the length of the response. What stands in a thought is no answer.
"""

import re
from typing import Literal

Where = Literal["all", "after", "boxed", "tag"]

_BRACES = re.compile(r"\\boxed\s{0,9}\{|\\[{}]|[{}]")


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
    """What stands behind the last </think>, and before a <think> that is not closed.

    >>> spoken("<think>6? no</think>7"), spoken("so 6</think>7"), spoken("<think>maybe 6"), spoken("7")
    ('7', '7', '', '7')
    """
    return response[slice(*speech(response))]


def speech(response: str) -> tuple[int, int]:
    """Where what `spoken` returns begins and ends."""
    thought = response.rfind("</think>")
    begin = thought + len("</think>") if thought >= 0 else 0
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
    r"""What stands in the last \boxed{...} whose braces are balanced.

    >>> boxed(r"\boxed{6} no, \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    """
    open_at: list[tuple[int, bool]] = []  # where each open brace's content starts; whether it is a box
    last: tuple[int, int] | None = None
    for brace in _BRACES.finditer(response):
        text = brace.group()
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
    """What stands between the last <tag> that is closed and its </tag>.

    >>> tagged("<think>2</think><answer> 7 </answer>", "answer")
    ' 7 '
    """
    end = response.rfind(f"</{tag}>")
    start = response.rfind(f"<{tag}>", 0, max(end, 0))
    return None if end < 0 or start < 0 else response[start + len(tag) + 2 : end]
