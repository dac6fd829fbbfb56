"""Whether an answer is the gold one, kind by kind."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import chain

from mathcheck.identity import Identity, compare, proportional, same_family
from mathcheck.quantities import Rules, same_quantity
from mathcheck.reading.forms import (
    as_tuple,
    assigned,
    both_signs,
    defined,
    elements,
    gold_form,
    is_name,
    is_symbolic,
    leading_names,
    named,
    stem,
    with_name,
)
from mathcheck.reading.reader import interval
from mathcheck.reading.spans import merged
from mathcheck.reading.tree import (
    ANY_INTEGER,
    Answer,
    Expr,
    Many,
    Matrix,
    Region,
    Relation,
    Scalar,
    Span,
    Symbol,
    UnreadableError,
    add,
    names,
    neg,
    renamed,
    symbols,
)
from mathcheck.scalars import as_product

_NEAR = Fraction(1, 20)
_MIRRORED = {">": "<", "≥": "≤"}
_INTEGERS = frozenset("jklmnpqrst")
"""Letters that may stand for any integer."""


def same(given: Answer, gold: Answer, rules: Rules) -> Identity:
    """Whether the given answer is the gold one; raises UnreadableError or TooHardError.

    The gold has been brought into its form by `gold_form`.
    """
    given, gold = _one_integer(given, gold), _one_integer(gold, given)
    if isinstance(gold, Scalar) and isinstance(given, Relation):
        given = with_name(given, gold)
    return _same(given, gold, rules)


def _one_integer(answer: Answer, other: Answer) -> Answer:
    """The answer with that letter renamed that must be any integer, as one of the other is said to be."""
    ours, theirs = names(answer), names(other)
    if ANY_INTEGER.name in ours or ANY_INTEGER.name not in theirs:
        return answer
    letters = (ours - theirs) & _INTEGERS
    return renamed(answer, min(letters), ANY_INTEGER.name) if len(letters) == 1 else answer


def _same(given: Answer, gold: Answer, rules: Rules) -> Identity:
    if isinstance(gold, Scalar):
        return _same_value(given, gold, rules)
    if isinstance(gold, Region):
        return _same_region(given, gold, rules)
    if isinstance(gold, Matrix):
        return _same_matrix(given, gold, rules)
    if isinstance(gold, Relation):
        bare = rules.kind == "auto" or (rules.kind == "equation" and not isinstance(given, Relation))
        value = assigned(gold) if set(gold.signs) == {"="} else None
        if value is not None and bare:
            if value.quantity is not None and value.quantity.unit is not None and _is_measured(given):
                value = value.quantity
            variables = symbols(value.expr) - {ANY_INTEGER.name}
            if not variables or isinstance(both_signs(value), Many):
                return _same_assignment(given, gold, value, rules)
        function = None if value is None else defined(gold) or _called(given, gold)
        if value is not None and function is not None:
            found = _same_function(given, function, value, rules)
            if found is not None:
                return found
        return _same_relation(given, gold, rules)
    if isinstance(gold, Many):
        if gold.brackets in ("", "{}"):
            return _same_set(given, gold, replace(rules, kind="auto"))
        return _same_order(given, gold, rules)
    return Identity(given == gold, "the same" if given == gold else "it is not the answer")


# ---------------------------------------------------------------------- one value


def _same_value(given: Answer, gold: Scalar, rules: Rules) -> Identity:
    if isinstance(given, Relation):
        return _same_as_side(given, gold, rules)
    if isinstance(given, Scalar):
        given = both_signs(given)
    if isinstance(given, Scalar):
        found = same_quantity(given, gold, rules)
        if found.same is False and same_family(given.expr, gold.expr):
            return Identity(True, "but for the constant")
        if found.same:
            return found
        ours = None if _is_measured(gold) else as_product(given, symbols(gold.expr))
        theirs = None if _is_measured(given) else as_product(gold, symbols(given.expr))
        return same_quantity(ours or given, theirs or gold, rules) if ours or theirs else found
    if isinstance(given, Many) and given.brackets in ("", "{}") and given.items:
        found = _every([_same(item, gold, rules) for item in given.items])
        return found if found.same else replace(found, how="it gives several answers")
    return Identity(False, "it is no single value")


def _same_as_side(given: Relation, gold: Scalar, rules: Rules) -> Identity:
    """x = 3, 3 + 4 = 7 and 1/3 ≈ 0.333: the side that is the answer, if the others agree with it."""
    if not set(given.signs) <= {"=", "≈"}:
        return Identity(False, "it is an inequality")
    sides = list(given.sides)
    if named_by := leading_names(sides, gold):
        sides = sides[named_by:]
        signs = list(given.signs[named_by:])
    elif len(sides) == 2 and is_name(sides[1]):
        sides, signs = sides[:1], []
    else:
        signs = list(given.signs)
    if "≈" in signs:  # what follows is only near
        at = signs.index("≈")
        near = [compare(side.expr, sides[at].expr, _NEAR, relative=True) for side in sides[at + 1 :]]
        if "=" in signs[at:] or not all(finding.same for finding in near):
            return Identity(False, "the sides are not near one another")
        sides = sides[: at + 1]
    answer = sides[-1]
    others = [compare(side.expr, answer.expr) for side in sides[:-1]]
    found = _every([_same(answer, gold, rules), *others])
    return found if found.same is not False or not others else Identity(False, "not every side is the answer")


def _same_assignment(given: Answer, gold: Relation, value: Scalar, rules: Rules) -> Identity:
    """Of x = 3 the value, under the same name or none."""
    names = {side.expr for side in gold.sides if isinstance(side.expr, Symbol)}
    items = given.items if isinstance(given, Many) else (given,)
    if symbols(value.expr) - {ANY_INTEGER.name} and not all(isinstance(item, Relation) for item in items):
        return Identity(False, "it is no equation")
    functions = {side.expr for side in gold.sides if side.called}
    for side in (item.sides[0] for item in items if isinstance(item, Relation)):
        plain = isinstance(side.expr, Symbol)
        another = side.expr not in names if plain else side.called and side.expr not in functions
        if another and (plain or functions or len(symbols(side.expr)) == 1):  # f(x) may be an x, f(3) is none
            return Identity(False, "it is the value of something else")
    return _same(given, both_signs(value), rules)


def _is_measured(given: Answer) -> bool:
    """Whether it is a value with a unit, or may be one."""
    side = given.sides[-1] if isinstance(given, Relation) else given
    if not isinstance(side, Scalar):
        return False
    return side.unit is not None or (side.quantity is not None and side.quantity.unit is not None)


def _called(given: Answer, gold: Relation) -> tuple[str, str] | None:
    """The y and x of a gold y = 2x that is answered by y(x) = 2x."""
    function = defined(given) if isinstance(given, Relation) else None
    return function if function and any(side.expr == Symbol(function[0]) for side in gold.sides) else None


def _same_function(given: Answer, function: tuple[str, str], value: Scalar, rules: Rules) -> Identity | None:
    """Of f(x) = x^2 the value, alone or as that of f or y; None if it is another kind of equation."""
    if not isinstance(given, Relation):
        return _same(given, both_signs(value), rules)
    ours = assigned(given) if set(given.signs) == {"="} else None
    other = None if ours is None else defined(given)
    plain = {Symbol("y"), Symbol(function[0])}
    if ours is None or (other is None and plain.isdisjoint(side.expr for side in given.sides)):
        return None
    if other is not None:
        if other[0] != function[0]:
            return Identity(False, "it is another function")
        if other[1] != function[1]:
            if function[1] in symbols(ours.expr):
                return Identity(False, "its argument is another variable")
            ours = renamed(ours, other[1], function[1])
    return _same(ours, both_signs(value), rules)


def _every(findings: Sequence[Identity]) -> Identity:
    """The first that is not the same, else the first not decided, else the last."""
    for wanted in (False, None):
        for finding in findings:
            if finding.same is wanted:
                return finding
    return findings[-1] if findings else Identity(True, "both are empty")


# ---------------------------------------------------------------------- several values


def _same_set(given: Answer, gold: Many, rules: Rules) -> Identity:
    if isinstance(given, Scalar | Relation):
        given = Many((given,), "{}")
    gold_names = named(gold.items)
    if not isinstance(given, Many) or given.brackets not in ("", "{}", "()" if gold_names else ""):
        return Identity(False, "it is no set")
    names = named(given.items)
    if gold_names is not None and given.brackets == "()" and names is None:
        gold = Many(tuple(gold_names[name] for name in sorted(gold_names)), "()")
        return _same_order(given, gold, rules)
    if gold_names is not None:
        if names is None or set(names) != set(gold_names):
            return Identity(False, "it does not give every variable")
        return _every([_same(names[name], value, rules) for name, value in gold_names.items()])
    if names is not None and len({stem(name) for name in names}) > 1:
        return Identity(False, "it names different variables")
    ours, theirs = elements(given.items), [gold_form(item, "auto") for item in elements(gold.items)]
    if not ours or not theirs:
        return Identity(not ours and not theirs, "one is empty" if ours or theirs else "both are empty")

    @cache
    def pair(i: int, j: int) -> Identity:
        return _same(ours[i], theirs[j], rules)

    rows = [_any(pair(i, j) for j in _from(i, len(theirs))) for i in range(len(ours))]
    if not all(row.same for row in rows):
        return _every(rows)
    return _every([*rows, *(_any(pair(i, j) for i in _from(j, len(ours))) for j in range(len(theirs)))])


def _from(start: int, length: int) -> Iterator[int]:
    """All indices, from one on and round."""
    return ((start + i) % length for i in range(length))


def _any(findings: Iterator[Identity]) -> Identity:
    """The first that is the same, else one that is not decided."""
    best = Identity(False, "the elements differ")
    for finding in findings:
        if finding.same:
            return finding
        if finding.same is None:
            best = finding
    return best


def _same_order(given: Answer, gold: Many, rules: Rules) -> Identity:
    if isinstance(given, Matrix) and gold.brackets != ":" and 1 in (len(given.rows), len(given.rows[0])):
        given = Many(tuple(map(Scalar, chain(*given.rows))), "()")
    if isinstance(given, Many) and given.brackets == "{}" and len(given.items) == 1:  # {(2, 3)}
        given = given.items[0]
    try:
        given = as_tuple(given)
    except UnreadableError:
        return Identity(False, "it is no tuple")
    if (given.brackets == ":") != (gold.brackets == ":"):
        return Identity(False, "only one of them is a ratio")
    if len(gold.items) == 2 and rules.kind != "tuple" and {given.brackets, gold.brackets} == {"[]", "()"}:
        return Identity(False, "one may be a closed interval")
    rules, names = replace(rules, kind="auto"), named(given.items)
    items = tuple(names[name] for name in sorted(names)) if names else given.items
    if len(items) != len(gold.items):
        return Identity(False, f"it has {len(items)} entries, not {len(gold.items)}")
    pairs = zip(items, gold.items, strict=True)
    return _every([_same(one, gold_form(other, "auto"), rules) for one, other in pairs])


# ---------------------------------------------------------------------- regions, matrices, relations


def _same_region(given: Answer, gold: Region, rules: Rules) -> Identity:
    if isinstance(given, Many) and given.brackets in ("()", "[]", "(]", "[)") and len(given.items) == 2:
        given = interval(given)
    if isinstance(given, Many) and given.brackets == "{}":
        points = [item.expr for item in given.items if isinstance(item, Scalar)]
        if len(points) == len(given.items):
            given = Region(tuple(Span(point, point, (True, True)) for point in points))
    if not isinstance(given, Region):
        return Identity(False, "it is no interval")
    spans = given.spans if is_symbolic(given) else merged(given)
    if [span.closed for span in spans] != [span.closed for span in gold.spans]:
        return Identity(False, "the intervals or whether they are closed differ")
    pairs = list(zip(spans, gold.spans, strict=True))
    ends = [(a.low, b.low) for a, b in pairs] + [(a.high, b.high) for a, b in pairs]
    return _every([_same_entry(a, b, rules) for a, b in ends])


def _same_entry(given: Expr, gold: Expr, rules: Rules) -> Identity:
    return same_quantity(Scalar(given), Scalar(gold), replace(rules, kind="auto"))


def _same_matrix(given: Answer, gold: Matrix, rules: Rules) -> Identity:
    if not isinstance(given, Matrix):
        if 1 not in (len(gold.rows), len(gold.rows[0])):
            return Identity(False, "it is no matrix")
        entries = Many(tuple(map(Scalar, chain(*gold.rows))), "()")
        return _same_order(given, entries, replace(rules, kind="auto"))
    if [len(row) for row in given.rows] != [len(row) for row in gold.rows]:
        return Identity(False, "the matrices differ in shape")
    cells = zip(chain(*given.rows), chain(*gold.rows), strict=True)
    return _every([_same_entry(a, b, rules) for a, b in cells])


def _same_relation(given: Answer, gold: Relation, rules: Rules) -> Identity:
    if not isinstance(given, Relation):
        return Identity(False, "it is no equation" if set(gold.signs) == {"="} else "it is no inequality")
    if len(gold.signs) != 1 or len(given.signs) != 1:
        pairs = list(zip(given.sides, gold.sides, strict=False))
        if given.signs != gold.signs:
            return Identity(False, "the relations differ")
        return _every([same_quantity(a, b, replace(rules, kind="expression")) for a, b in pairs])
    sign, gold_sign = given.signs[0], gold.signs[0]
    if _MIRRORED.get(sign, sign) != _MIRRORED.get(gold_sign, gold_sign):
        return Identity(False, "the signs differ")
    ours, theirs = _difference(given), _difference(gold)
    return proportional(ours, theirs, positive=gold_sign not in ("=", "≠"))


def _difference(relation: Relation) -> Expr:
    """Left minus right, of > and ≥ right minus left."""
    left, right = (side.expr for side in relation.sides)
    return add(right, neg(left)) if relation.signs[0] in _MIRRORED else add(left, neg(right))
