"""Formulas of propositional logic, printed in the notation of Coq or Lean, and parsed in Coq's."""

import re
from typing import Literal, NamedTuple


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
        """Print the formula as Coq does."""
        return _print_formula(self)


FALSE = Formula("False")
ProverName = Literal["coq", "lean"]
"""The prover in whose language a theorem and its proof are written."""
_LEAN = {"->": "→", "/\\": "∧", "\\/": "∨", "~": "¬"}
"""Lean's connectives associate and bind among each other as Coq's do."""


def print_formula(formula: Formula, prover: ProverName) -> str:
    r"""Print a formula in the notation of a prover.

    >>> A, B = Formula("A"), Formula("B")
    >>> print_formula(Formula("->", (A, Formula("~", (Formula("\\/", (A, B)),)))), "lean")
    'A → ¬ (A ∨ B)'
    """
    text = str(formula)
    for sign, symbol in _LEAN.items() if prover == "lean" else ():
        text = text.replace(sign, symbol)
    return text


_LEVELS = {"~": 75, "/\\": 80, "\\/": 85, "->": 99}
"""Levels of Coq's notations, all right-associative: the greater the level, the weaker the binding."""


def _print_formula(formula: Formula, most: int = 200) -> str:
    """Print a formula, with brackets if its level is above `most`."""
    level = _LEVELS.get(formula.sign, 0)
    if not formula.parts:
        return formula.sign
    *left, right = formula.parts
    before = "".join(f"{_print_formula(part, level - 1)} " for part in left)
    text = f"{before}{formula.sign} {_print_formula(right, level)}"
    return f"({text})" if level > most else text


_PIECE = re.compile(r"\s*(->|/\\|\\/|~|\(|\)|[A-Z]\w*)")


def parse_formula(text: str) -> Formula | None:
    r"""Parse a formula in Coq's notation; return None if the text is not one.

    >>> for each in ("A -> ~ (A \\/ B)", "A /\\ B -> False", "((A))", "A -> ", "A B", "(A"):
    ...     print(parse_formula(each))
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
        formula, rest = _parse_tokens(pieces, 99)
    except IndexError:
        return None
    return None if rest else formula


def _parse_tokens(pieces: list[str], most: int) -> tuple[Formula, list[str]]:
    """Return a formula of notations up to a level, and the remaining tokens. Raises IndexError."""
    if not pieces:
        raise IndexError
    token, *rest = pieces
    if token == "~":
        inner, rest = _parse_tokens(rest, _LEVELS["~"])
        left = Formula("~", (inner,))
    elif token == "(":
        left, rest = _parse_tokens(rest, 99)
        if rest.pop(0) != ")":
            raise IndexError
    elif token[0].isupper():
        left = Formula(token)
    else:
        raise IndexError
    while rest and rest[0] in _LEVELS and _LEVELS[rest[0]] <= most and rest[0] != "~":
        sign = rest[0]
        right, rest = _parse_tokens(rest[1:], _LEVELS[sign])
        left = Formula(sign, (left, right))
    return left, rest
