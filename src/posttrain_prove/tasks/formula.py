"""Formulas of propositional logic: written and read as Coq prints them."""

import re
from typing import NamedTuple


class Formula(NamedTuple):
    r"""An atom, which has no parts, or a connective of one or two formulas.

    >>> A, B = Formula("A"), Formula("B")
    >>> print(Formula("->", (A, Formula("~", (Formula("\\/", (A, B)),)))))
    A -> ~ (A \/ B)
    """

    sign: str
    r"""->, /\\, \\/ or ~; without parts False, or the name of an atom."""
    parts: tuple["Formula", ...] = ()

    def __str__(self) -> str:
        """As Coq prints it."""
        return _printed(self)


FALSE = Formula("False")
_LEVELS = {"~": 75, "/\\": 80, "\\/": 85, "->": 99}
"""Of Coq's notations, all of which associate to the right: the greater, the less they bind."""


def _printed(formula: Formula, most: int = 200) -> str:
    """With brackets if its level is above `most`."""
    level = _LEVELS.get(formula.sign, 0)
    if not formula.parts:
        return formula.sign
    *left, right = formula.parts
    before = "".join(f"{_printed(part, level - 1)} " for part in left)
    text = f"{before}{formula.sign} {_printed(right, level)}"
    return f"({text})" if level > most else text


_PIECE = re.compile(r"\s*(->|/\\|\\/|~|\(|\)|[A-Z]\w*)")


def parsed(text: str) -> Formula | None:
    r"""The formula that a text says, in Coq's notation; None if it says none.

    >>> for each in ("A -> ~ (A \\/ B)", "A /\\ B -> False", "((A))", "A -> ", "A B", "(A"):
    ...     print(parsed(each))
    A -> ~ (A \/ B)
    A /\ B -> False
    A
    None
    None
    None
    """
    pieces, at = [], 0
    while match := _PIECE.match(text, at):
        pieces.append(match.group(1))
        at = match.end()
    if text[at:].strip():
        return None
    try:
        formula, rest = _read(pieces, 99)
    except IndexError:
        return None
    return None if rest else formula


def _read(pieces: list[str], most: int) -> tuple[Formula, list[str]]:
    """A formula of notations up to a level, and what stands behind it. IndexError if there is none."""
    if not pieces:
        raise IndexError
    first, *rest = pieces
    if first == "~":
        inner, rest = _read(rest, _LEVELS["~"])
        left = Formula("~", (inner,))
    elif first == "(":
        left, rest = _read(rest, 99)
        if rest.pop(0) != ")":
            raise IndexError
    elif first[0].isupper():
        left = Formula(first)
    else:
        raise IndexError
    while rest and rest[0] in _LEVELS and _LEVELS[rest[0]] <= most and rest[0] != "~":
        sign = rest[0]
        right, rest = _read(rest[1:], _LEVELS[sign])
        left = Formula(sign, (left, right))
    return left, rest
