r"""Whole answers: lists, sets, tuples, intervals, inequalities, equations, matrices and single values.

answer     part ∪ part ...            a union of intervals; \mathbb{R} \ {3} as well
           part , part and part ...   a list; inequalities with or (union) and with and (both)
part       side = side, side < side   a relation; x < 3 with a lone variable is an interval
           (a, b) [a, b) {a, b}       a tuple, interval or set; an interval if it is mixed or has an infinity
           a : b                      a ratio
           matrix, or a value with its unit
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mathcheck.reading.lexer import CLOSERS, JOINING, OPENERS, Token
from mathcheck.reading.spans import intersection, reals_without, solve_inequality
from mathcheck.reading.tree import (
    ALL_REALS,
    Answer,
    Expr,
    Many,
    Matrix,
    Region,
    Relation,
    Scalar,
    Span,
    Symbol,
    TooHardError,
    UnreadableError,
    contains,
)
from mathcheck.scalars import read_scalar

MOST_ITEMS = 64
MOST_ENTRIES = 400
MOST_NESTING = 4
_SIGNS = ("=", "<", ">", "≤", "≥", "≠", "≈")
_INEQUALITIES = frozenset("<>≤≥≠")
_BRACKETED_ARRAYS = {("(", "begin", "end"), ("[", "begin", "end")}
_MATRICES = frozenset({"matrix", "pmatrix", "bmatrix", "Bmatrix", "array", "smallmatrix"})

Tokens = Sequence[Token]


def read(tokens: Tokens, *, units: bool = True, depth: int = 0) -> Answer:
    """Parse tokens as an answer. Raises UnreadableError or TooHardError."""
    tokens = _trim(tokens)
    if not tokens:
        raise UnreadableError("it is blank")
    if depth > MOST_NESTING:
        raise TooHardError(f"brackets nested deeper than {MOST_NESTING}")
    if len(tokens) > 2 and tokens[1].is_command("in"):  # x \in [1, 2]
        pair = read(tokens[2:], units=units, depth=depth + 1)
        return replace(pair, within=True) if isinstance(pair, Many) and pair.brackets == "()" else pair
    tokens = _without_names(tokens)
    unions = _split(tokens, lambda token: _is_union(token, tokens))
    if len(unions) > 1:
        return _union(read(part, units=units, depth=depth + 1) for part in unions)
    operands = _split(tokens, lambda token: token.is_command("setminus", "backslash"))
    if len(operands) == 2:
        return _difference(*(read(part, units=units, depth=depth + 1) for part in operands))
    parts = _split(tokens, lambda token: token.is_sign(",", ";") or _is_joining(token))
    if len(parts) > 1:
        return _list(tokens, parts, units=units, depth=depth)
    return _part(tokens, units=units, depth=depth)


def _without_names(tokens: list[Token]) -> list[Token]:
    """Return the values after (x, y) =, in alphabetical order of x, y, z; other tokens unchanged."""
    end = next((i for i, token in enumerate(tokens) if token.text == "="), 0)
    names, commas = tokens[1 : max(1, end - 1) : 2], tokens[2 : max(2, end - 1) : 2]
    letters = all(len(t.text) == 1 if t.kind == "word" else t.kind == "command" for t in names)
    ordered = [t.text for t in names] == sorted(t.text for t in names)
    if not letters or not commas or any(t.text != "," for t in commas):
        return tokens
    if (tokens[0].text, tokens[end - 1].text) != ("(", ")"):
        return tokens
    return tokens[end + 1 :] if ordered else _reordered(tokens, [t.text for t in names], tokens[end + 1 :])


def _reordered(tokens: list[Token], names: list[str], values: list[Token]) -> list[Token]:
    """Return the values in the order of x, y, z; all tokens if the letters are others, such as (m, b)."""
    parts = _split_at(values[1:-1], ",")
    if not set(names) <= set("xyz") or len(parts) != len(set(names)) or values[0].text != "(":
        return tokens
    inner = [token for name in sorted(names) for token in (tokens[2], *parts[names.index(name)])]
    return [values[0], *inner[1:], values[-1]]


def _is_joining(token: Token) -> bool:
    return token.is_command("land", "lor") or (token.kind == "word" and token.text in JOINING)


def _is_union(token: Token, tokens: Tokens) -> bool:
    if token.kind == "command":
        return token.text in ("cup", "bigcup")
    if token.kind != "word" or token.text not in ("U", "u"):
        return False
    at = next(i for i, other in enumerate(tokens) if other is token)
    return 0 < at < len(tokens) - 1 and tokens[at - 1].text in CLOSERS and tokens[at + 1].text in OPENERS


def _trim(tokens: Tokens) -> list[Token]:
    """Return the tokens without punctuation around them."""
    trimmed = deque(tokens)
    while trimmed and trimmed[0].is_sign(":", "=", ",", ";", "*", "≈"):
        trimmed.popleft()
    while trimmed and trimmed[-1].is_sign(".", ",", ";", ":"):
        trimmed.pop()
    return list(trimmed)


def _split(tokens: Tokens, separates: Callable[[Token], bool]) -> list[list[Token]]:
    """Return the runs of tokens between separators outside every bracket."""
    parts: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += token.nesting + (token.kind == "begin") - (token.kind == "end")
        if depth == 0 and separates(token):
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _split_at(tokens: Tokens, *signs: str) -> list[list[Token]]:
    return _split(tokens, lambda token: token.is_sign(*signs))


def _list(tokens: Tokens, parts: list[list[Token]], *, units: bool, depth: int) -> Answer:
    words = {token.text for token in tokens if _is_joining(token)}
    items = [part for i, part in enumerate(parts) if part or i == 0 or not words]  # "1, 2, and 3"
    if len(items) > MOST_ITEMS:
        raise TooHardError(f"more than {MOST_ITEMS} items")
    answers = [_part(part, units=units, depth=depth + 1) for part in items]
    if any(isinstance(item, Region) for item in answers) and len(words) == 1:
        if words <= {"or", "lor"}:
            return _union(answers)
        return intersection([Region(_region(item)) for item in answers])
    return Many(tuple(answers), "")


def _part(tokens: list[Token], *, units: bool, depth: int) -> Answer:
    if not tokens:
        raise UnreadableError("something is missing between two commas")
    signs = [token for token in _at_top(tokens) if token.kind == "sign"]
    if any(token.text in _SIGNS for token in signs):
        return _relation(tokens, units=units)
    if tokens[0].kind == "command" and len(tokens) == 1:
        if tokens[0].text in ("emptyset", "varnothing"):
            return Many((), "{}")
        if tokens[0].text == "Reals":
            return ALL_REALS
    if any(token.text == ":" for token in signs):
        sides = _split_at(tokens, ":")
        return Many(tuple(_part(side, units=units, depth=depth + 1) for side in sides), ":")
    if len(tokens) > 3 and (tokens[0].text, tokens[1].kind, tokens[-2].kind) in _BRACKETED_ARRAYS:
        tokens = tokens[1:-1]
    if tokens[0].kind == "begin" or (tokens[0].text == "[" and len(tokens) > 1 and tokens[1].text == "["):
        return _matrix(tokens)
    return _bracketed(tokens, units=units, depth=depth) or read_scalar(tokens, units=units)


def _at_top(tokens: Tokens) -> list[Token]:
    """Return the tokens outside every bracket."""
    result: list[Token] = []

    def collect(token: Token) -> bool:
        result.append(token)
        return False

    _split(tokens, collect)
    return result


def _relation(tokens: Tokens, *, units: bool) -> Answer:
    signs = [t.text for t in _at_top(tokens) if t.is_sign(*_SIGNS)]
    sides = _split_at(tokens, *_SIGNS)
    if len(sides) > MOST_ITEMS:
        raise TooHardError(f"more than {MOST_ITEMS} sides")
    relation = Relation(tuple(_side(side, units=units) for side in sides), tuple(signs))
    if _INEQUALITIES.isdisjoint(signs):
        return relation
    return solve_inequality(relation) or relation


def _side(tokens: list[Token], *, units: bool) -> Scalar:
    """Parse a side of a relation, on which f(x), f(2) and f'(x) are functions."""
    texts = [token.text for token in tokens if token.text != "'"]
    called = len(texts) > 3 and (texts[-3], texts[-1]) == ("(", ")") and len(texts[0]) == 1
    called = called and texts[-2].isalnum() and (len(texts[-2]) == 1 or texts[-2].isdigit())
    called = (
        called
        and texts[0].isalpha()
        and (texts[-2].isalpha() or texts[0] not in "xyz")
        and texts[1:-3] in ([], ["^", "{", "-", "1", "}"])
    )
    if called and len(texts) < len(tokens):
        return Scalar(Symbol("".join(token.text for token in tokens)), called=True)
    return replace(read_scalar(tokens, units=units), called=called)


def _bracketed(tokens: list[Token], *, units: bool, depth: int) -> Answer | None:
    """Parse a set, tuple or interval; None if no pair of brackets encloses all, or it holds one value."""
    opening, closing = tokens[0].text, tokens[-1].text
    if not tokens[0].is_sign(*OPENERS) or not tokens[-1].is_sign(*CLOSERS) or _at_top(tokens) != [tokens[-1]]:
        return None
    inner = tokens[1:-1]
    if opening in ("{", "{{") and len(inner) > 2 and inner[0].kind == "word":
        where = [i for i, token in enumerate(inner) if token.is_sign("|", ":")]
        if where and (where[0] == 1 or inner[1].text == "in"):  # {x | x > 3}
            return read(inner[where[0] + 1 :], units=units, depth=depth + 1)
    if opening == "{{" and closing == "}}" and not inner:
        return Many((), "{}")
    parts = _split_at(inner, ",", ";")
    if len(parts) == 1 and opening == "{" and closing == "}":
        return read(inner, units=units, depth=depth)
    if len(parts) == 1 and opening != "{{":
        return None
    if len(parts) > MOST_ITEMS:
        raise TooHardError(f"more than {MOST_ITEMS} items")
    items = tuple(read(part, units=units, depth=depth + 1) for part in parts)
    matched = OPENERS.index(opening) == CLOSERS.index(closing)
    if opening in ("{", "{{"):
        if not matched:
            raise UnreadableError("the brackets do not match")
        return Many(items, "{}")
    pair = Many(items, opening + closing)
    return interval(pair) if not matched or _is_unbounded(items) else pair


def _is_unbounded(items: tuple[Answer, ...]) -> bool:
    return len(items) == 2 and any(
        isinstance(item, Scalar) and contains(item.expr, frozenset({"oo"})) for item in items
    )


def interval(pair: Many) -> Region:
    """Return the interval that two values in brackets denote. Raises UnreadableError.

    >>> from mathcheck.reading.lexer import tokenize
    >>> read(tokenize("(3, oo)")).spans[0].closed, read(tokenize("[1, 2)")).spans[0].closed
    ((False, False), (True, False))
    """
    if pair.brackets not in ("()", "[]", "(]", "[)") or len(pair.items) != 2:
        raise UnreadableError("it is not an interval")
    low, high = (_value(item) for item in pair.items)
    return Region((Span(low, high, (pair.brackets[0] == "[", pair.brackets[1] == "]")),))


def _value(item: Answer) -> Expr:
    if not isinstance(item, Scalar):
        raise UnreadableError("a single value must stand there")
    return item.expr


def _region(answer: Answer) -> tuple[Span, ...]:
    if isinstance(answer, Region):
        return answer.spans
    if isinstance(answer, Many) and answer.brackets == "{}":
        return tuple(Span(_value(item), _value(item), (True, True)) for item in answer.items)
    if isinstance(answer, Many):
        return interval(answer).spans
    if isinstance(answer, Relation) and answer.signs == ("=",):
        value = answer.sides[1].expr
        return (Span(value, value, (True, True)),)
    raise UnreadableError("it is not an interval")


def _union(answers: Iterable[Answer]) -> Region:
    return Region(tuple(span for answer in answers for span in _region(answer)))


def _difference(minuend: Answer, points: Answer) -> Answer:
    if minuend != ALL_REALS or not isinstance(points, Many) or points.brackets != "{}":
        raise UnreadableError("only points can be taken from all real numbers")
    return reals_without([_value(item) for item in points.items])


def _matrix(tokens: list[Token]) -> Matrix:
    if tokens[0].kind == "begin":
        name = tokens[0].text.rstrip("}").rpartition("{")[2].rstrip("*")
        if tokens[-1].kind != "end" or name not in _MATRICES:
            raise UnreadableError(f"{tokens[0].text[:30]} is not in the grammar")
        inner = tokens[1:-1]
        if name == "array" and inner and inner[0].text == "{":  # the alignment of its columns
            end = next((i for i, token in enumerate(inner) if token.text == "}"), len(inner))
            inner = inner[end + 1 :]
        rows = [row for row in _split(inner, lambda token: token.kind == "row") if row]
        cells = [_split_at(row, "&") for row in rows]
    else:
        rows = _split_at(tokens[1:-1], ",")
        bracketed = all(row and row[0].text == "[" and row[-1].text == "]" for row in rows)
        if not bracketed or tokens[-1].text != "]":
            raise UnreadableError("the rows of a matrix stand in brackets")
        cells = [_split_at(row[1:-1], ",") for row in rows]
    if sum(len(row) for row in cells) > MOST_ENTRIES:
        raise TooHardError(f"a matrix of more than {MOST_ENTRIES} entries")
    if not cells or len({len(row) for row in cells}) > 1:
        raise UnreadableError("the rows of the matrix differ in length")
    return Matrix(tuple(tuple(read_scalar(cell, units=False).expr for cell in row) for row in cells))
