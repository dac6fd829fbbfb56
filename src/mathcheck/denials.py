"""Words that deny an expression of a line of prose, or make another value of it."""

from dataclasses import replace

from mathcheck.reading.lexer import Token
from mathcheck.reading.tree import UnreadableError, word_set
from mathcheck.scalars import FRACTIONS

_NEGATIONS = word_set("never than without except nor neither")
_CHANGING = FRACTIONS | word_set("dozen squared cubed factorial or nor minus plus")
"""Behind an expression these make another value of it."""
_TIMES = word_set("half twice double triple")
"""Right before a number; elsewhere they may be of its name, as in the ordered triple (1, 2, 3)."""
_COMPARED = word_set("less more fewer greater")
_OF = _TIMES | word_set("root logarithm reciprocal opposite negative")
"""Before an "of" or "of the" of an expression."""


def refuse_changed(tokens: list[Token], start: int, end: int) -> None:
    """UnreadableError where words around an expression make another value of it, or deny it."""
    behind = [token.text.lower() for token in tokens[end : end + 2]]
    denied = behind[:1] == ["not"] and len(tokens) == end + 1
    denied |= behind[:1] in (["is"], ["are"]) and behind[1:] in (["wrong"], ["incorrect"], ["false"], ["not"])
    if denied or (behind[:1] and behind[0] in _CHANGING) or behind == ["and", "a"]:
        raise UnreadableError(f"{behind[0]!r} stands behind it")
    if behind[:1] and behind[0] in _COMPARED and behind[1:] == ["than"] and _begins_value(tokens, end + 2):
        raise UnreadableError("it is a part of another value")
    equation = any(token.text == "=" for token in tokens[start:end])
    before = [token.text.lower() for token in reversed(tokens[max(0, start - 3) : start])]
    if not equation and (
        before[:1] in (["plus"], ["times"]) or before[:2] == ["of", "out"] or _shares(tokens, start)
    ):
        raise UnreadableError(f"{before[0]!r} stands before it")
    changing = _TIMES if tokens[start].kind == "number" else frozenset[str]()
    if before[:1] == ["of"] or before[:2] == ["the", "of"]:
        before, changing = before[before.index("of") + 1 :], _OF
    if before[:1] and (
        before[0] in {*changing, "minus", "negative"} or before[:2] in (["least", "at"], ["most", "at"])
    ):
        raise UnreadableError(f"{before[0]!r} stands before it")


def _shares(tokens: list[Token], start: int) -> bool:
    """Whether a part of it is meant, as in 2 of 3 and 20% of 50."""
    before = tokens[start - 2] if start > 1 and tokens[start - 1].text == "of" else None
    return before is not None and (ends_value(before) or before.text in ("%", "percent"))


def _begins_value(tokens: list[Token], at: int) -> bool:
    """Whether a number or a variable stands there, as in 5 less than x."""
    token = tokens[at] if at < len(tokens) else None
    return token is not None and (token.kind in ("number", "command") or token.text in "bcdfghjkmnpqrstwxyz")


def signed(tokens: list[Token]) -> list[Token]:
    """The tokens with negative 3 and minus 3 as -3, not behind another value."""
    found = list(tokens)
    for i, token in enumerate(tokens[:-1]):
        begins = tokens[i + 1].kind in ("number", "command") and not (i and ends_value(tokens[i - 1]))
        if begins and token.text.lower() in ("negative", "minus"):
            # Right in front of its number a minus is no dash.
            found[i : i + 2] = Token("sign", "-", token.spaced), replace(tokens[i + 1], spaced=False)
    return found


def ends_value(token: Token) -> bool:
    """Whether a value may end with this token."""
    return token.kind == "number" or (token.kind == "sign" and token.text in (")", "}"))


def is_negated(tokens: list[Token], start: int) -> bool:
    """Whether a word right before a place denies it, or a not among the three before it in the sentence."""
    words = []
    for token in reversed(tokens[max(0, start - 4) : start]):
        if token.kind not in ("word", "text") and token.text != "'":
            break
        words.append(token.text.lower())
    near = (words[:1] and words[0] in _NEGATIONS) or words[:2] in (["of", "instead"], ["but", "anything"])
    return (
        bool(near)
        or "not" in words
        or "cannot" in words
        or any(words[i : i + 2] == ["t", "'"] for i in range(len(words) - 1))
    )
