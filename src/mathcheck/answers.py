"""Compare an answer with the gold, by the type of the gold."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import chain

from mathcheck.identity import Identity, compare, compare_up_to_factor, is_same_family
from mathcheck.quantities import Rules, compare_quantities
from mathcheck.reading.forms import (
    as_tuple,
    assigned_value,
    both_signs,
    defined_function,
    elements,
    gold_form,
    is_name,
    is_symbolic,
    leading_names,
    stem,
    values_by_name,
    with_name,
)
from mathcheck.reading.reader import interval
from mathcheck.reading.spans import merge
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
    rename_variable,
    symbols,
)
from mathcheck.scalars import as_product

_NEAR = Fraction(1, 20)
_MIRRORED = {">": "<", "≥": "≤"}
_INTEGERS = frozenset("jklmnpqrst")
"""Letters that may stand for any integer."""


def compare_answers(answer: Answer, gold: Answer, rules: Rules) -> Identity:
    """Return whether the answer equals the gold. Raises UnreadableError or TooHardError.

    The gold must have been brought into its form by `gold_form`.
    """
    answer, gold = _unify_integer(answer, gold), _unify_integer(gold, answer)
    if isinstance(gold, Scalar) and isinstance(answer, Relation):
        answer = with_name(answer, gold)
    return _compare_any_kind(answer, gold, rules)


def _unify_integer(answer: Answer, other: Answer) -> Answer:
    """Rename the only letter of the answer that can be any integer, if the other has ANY_INTEGER."""
    letters, other_letters = names(answer), names(other)
    if ANY_INTEGER.name in letters or ANY_INTEGER.name not in other_letters:
        return answer
    candidates = (letters - other_letters) & _INTEGERS
    return rename_variable(answer, min(candidates), ANY_INTEGER.name) if len(candidates) == 1 else answer


def _compare_any_kind(answer: Answer, gold: Answer, rules: Rules) -> Identity:
    if isinstance(gold, Scalar):
        return _compare_value(answer, gold, rules)
    if isinstance(gold, Region):
        return _compare_region(answer, gold, rules)
    if isinstance(gold, Matrix):
        return _compare_matrix(answer, gold, rules)
    if isinstance(gold, Relation):
        bare = rules.kind == "auto" or (rules.kind == "equation" and not isinstance(answer, Relation))
        value = assigned_value(gold) if set(gold.signs) == {"="} else None
        if value is not None and bare:
            if value.quantity is not None and value.quantity.unit is not None and _is_measured(answer):
                value = value.quantity
            variables = symbols(value.expr) - {ANY_INTEGER.name}
            if not variables or isinstance(both_signs(value), Many):
                return _compare_assignment(answer, gold, value, rules)
        function = None if value is None else defined_function(gold) or _called_function(answer, gold)
        if value is not None and function is not None:
            identity = _compare_function(answer, function, value, rules)
            if identity is not None:
                return identity
        return _compare_relation(answer, gold, rules)
    if isinstance(gold, Many):
        if gold.brackets in ("", "{}"):
            return _compare_set(answer, gold, replace(rules, kind="auto"))
        return _compare_tuple(answer, gold, rules)
    return Identity(answer == gold, "the same" if answer == gold else "it is not the answer")


# ---------------------------------------------------------------------- one value


def _compare_value(answer: Answer, gold: Scalar, rules: Rules) -> Identity:
    if isinstance(answer, Relation):
        return _compare_sides(answer, gold, rules)
    if isinstance(answer, Scalar):
        answer = both_signs(answer)
    if isinstance(answer, Scalar):
        identity = compare_quantities(answer, gold, rules)
        if identity.same is False and is_same_family(answer.expr, gold.expr):
            return Identity(True, "but for the constant")
        if identity.same:
            return identity
        product = None if _is_measured(gold) else as_product(answer, symbols(gold.expr))
        gold_product = None if _is_measured(answer) else as_product(gold, symbols(answer.expr))
        return (
            compare_quantities(product or answer, gold_product or gold, rules)
            if product or gold_product
            else identity
        )
    if isinstance(answer, Many) and answer.brackets in ("", "{}") and answer.items:
        identity = _all_same([_compare_any_kind(item, gold, rules) for item in answer.items])
        return identity if identity.same else replace(identity, how="it gives several answers")
    return Identity(False, "it is not a single value")


def _compare_sides(answer: Relation, gold: Scalar, rules: Rules) -> Identity:
    """Compare an equation such as x = 3, 3 + 4 = 7 or 1/3 ≈ 0.333 with a value.

    The last side is the answer; the other sides must agree with it.
    """
    if not set(answer.signs) <= {"=", "≈"}:
        return Identity(False, "it is an inequality")
    sides = list(answer.sides)
    if name_count := leading_names(sides, gold):
        sides = sides[name_count:]
        signs = list(answer.signs[name_count:])
    elif len(sides) == 2 and is_name(sides[1]):
        sides, signs = sides[:1], []
    else:
        signs = list(answer.signs)
    if "≈" in signs:
        at = signs.index("≈")
        close = [compare(side.expr, sides[at].expr, _NEAR, relative=True) for side in sides[at + 1 :]]
        if "=" in signs[at:] or not all(comparison.same for comparison in close):
            return Identity(False, "the sides are not near one another")
        sides = sides[: at + 1]
    last = sides[-1]
    others = [compare(side.expr, last.expr) for side in sides[:-1]]
    identity = _all_same([_compare_any_kind(last, gold, rules), *others])
    if identity.same is False and others:
        return Identity(False, "not every side is the answer")
    return identity


def _compare_assignment(answer: Answer, gold: Relation, value: Scalar, rules: Rules) -> Identity:
    """Compare an answer with the value of x = 3; the answer may name x, but no other variable."""
    names = {side.expr for side in gold.sides if isinstance(side.expr, Symbol)}
    items = answer.items if isinstance(answer, Many) else (answer,)
    if symbols(value.expr) - {ANY_INTEGER.name} and not all(isinstance(item, Relation) for item in items):
        return Identity(False, "it is not an equation")
    functions = {side.expr for side in gold.sides if side.called}
    for side in (item.sides[0] for item in items if isinstance(item, Relation)):
        is_variable = isinstance(side.expr, Symbol)
        is_other = side.expr not in names if is_variable else side.called and side.expr not in functions
        # f(x) may define x, f(3) cannot
        if is_other and (is_variable or functions or len(symbols(side.expr)) == 1):
            return Identity(False, "it is the value of something else")
    return _compare_any_kind(answer, both_signs(value), rules)


def _is_measured(answer: Answer) -> bool:
    """Return whether the answer is a value that has, or can be read with, a unit."""
    side = answer.sides[-1] if isinstance(answer, Relation) else answer
    if not isinstance(side, Scalar):
        return False
    return side.unit is not None or (side.quantity is not None and side.quantity.unit is not None)


def _called_function(answer: Answer, gold: Relation) -> tuple[str, str] | None:
    """Return the y and x of the gold y = 2x for the answer y(x) = 2x; None for another answer."""
    function = defined_function(answer) if isinstance(answer, Relation) else None
    return function if function and any(side.expr == Symbol(function[0]) for side in gold.sides) else None


def _compare_function(
    answer: Answer, function: tuple[str, str], value: Scalar, rules: Rules
) -> Identity | None:
    """Compare with the value of f(x) = x^2, alone or as f(x) or y; None for another kind of equation."""
    if not isinstance(answer, Relation):
        return _compare_any_kind(answer, both_signs(value), rules)
    answer_value = assigned_value(answer) if set(answer.signs) == {"="} else None
    answer_function = None if answer_value is None else defined_function(answer)
    names = {Symbol("y"), Symbol(function[0])}
    if answer_value is None:
        return None
    if answer_function is None and names.isdisjoint(side.expr for side in answer.sides):
        return None
    if answer_function is not None:
        if answer_function[0] != function[0]:
            return Identity(False, "it is another function")
        if answer_function[1] != function[1]:
            if function[1] in symbols(answer_value.expr):
                return Identity(False, "its argument is another variable")
            answer_value = rename_variable(answer_value, answer_function[1], function[1])
    return _compare_any_kind(answer_value, both_signs(value), rules)


def _all_same(identities: Sequence[Identity]) -> Identity:
    """Return the first identity that is False, else the first undecided one, else the last."""
    for outcome in (False, None):
        for identity in identities:
            if identity.same is outcome:
                return identity
    return identities[-1] if identities else Identity(True, "both are empty")


# ---------------------------------------------------------------------- several values


def _compare_set(answer: Answer, gold: Many, rules: Rules) -> Identity:
    if isinstance(answer, Scalar | Relation):
        answer = Many((answer,), "{}")
    gold_names = values_by_name(gold.items)
    if not isinstance(answer, Many) or answer.brackets not in ("", "{}", "()" if gold_names else ""):
        return Identity(False, "it is not a set")
    names = values_by_name(answer.items)
    if gold_names is not None and answer.brackets == "()" and names is None:
        gold = Many(tuple(gold_names[name] for name in sorted(gold_names)), "()")
        return _compare_tuple(answer, gold, rules)
    if gold_names is not None:
        if names is None or set(names) != set(gold_names):
            return Identity(False, "it does not give every variable")
        return _all_same([_compare_any_kind(names[name], value, rules) for name, value in gold_names.items()])
    if names is not None and len({stem(name) for name in names}) > 1:
        return Identity(False, "it names different variables")
    items, gold_items = elements(answer.items), [gold_form(item, "auto") for item in elements(gold.items)]
    if not items or not gold_items:
        empty = not items and not gold_items
        return Identity(empty, "both are empty" if empty else "one is empty")

    @cache
    def pair(i: int, j: int) -> Identity:
        return _compare_any_kind(items[i], gold_items[j], rules)

    rows = [_any_same(pair(i, j) for j in _indices_from(i, len(gold_items))) for i in range(len(items))]
    if not all(row.same for row in rows):
        return _all_same(rows)
    columns = [_any_same(pair(i, j) for i in _indices_from(j, len(items))) for j in range(len(gold_items))]
    return _all_same([*rows, *columns])


def _indices_from(start: int, length: int) -> Iterator[int]:
    """Yield all indices below `length`, from `start` on and then from 0."""
    return ((start + i) % length for i in range(length))


def _any_same(identities: Iterator[Identity]) -> Identity:
    """Return the first identity that is True, else an undecided one, else False."""
    best = Identity(False, "the elements differ")
    for identity in identities:
        if identity.same:
            return identity
        if identity.same is None:
            best = identity
    return best


def _compare_tuple(answer: Answer, gold: Many, rules: Rules) -> Identity:
    if isinstance(answer, Matrix) and gold.brackets != ":" and 1 in (len(answer.rows), len(answer.rows[0])):
        answer = Many(tuple(map(Scalar, chain(*answer.rows))), "()")
    if isinstance(answer, Many) and answer.brackets == "{}" and len(answer.items) == 1:  # {(2, 3)}
        answer = answer.items[0]
    try:
        answer = as_tuple(answer)
    except UnreadableError:
        return Identity(False, "it is not a tuple")
    if (answer.brackets == ":") != (gold.brackets == ":"):
        return Identity(False, "only one of them is a ratio")
    if len(gold.items) == 2 and rules.kind != "tuple" and {answer.brackets, gold.brackets} == {"[]", "()"}:
        return Identity(False, "one may be a closed interval")
    rules, names = replace(rules, kind="auto"), values_by_name(answer.items)
    items = tuple(names[name] for name in sorted(names)) if names else answer.items
    if len(items) != len(gold.items):
        return Identity(False, f"it has {len(items)} entries, not {len(gold.items)}")
    pairs = zip(items, gold.items, strict=True)
    return _all_same([_compare_any_kind(a, gold_form(b, "auto"), rules) for a, b in pairs])


# ---------------------------------------------------------------------- regions, matrices, relations


def _compare_region(answer: Answer, gold: Region, rules: Rules) -> Identity:
    if isinstance(answer, Many) and answer.brackets in ("()", "[]", "(]", "[)") and len(answer.items) == 2:
        answer = interval(answer)
    if isinstance(answer, Many) and answer.brackets == "{}":
        points = [item.expr for item in answer.items if isinstance(item, Scalar)]
        if len(points) == len(answer.items):
            answer = Region(tuple(Span(point, point, (True, True)) for point in points))
    if not isinstance(answer, Region):
        return Identity(False, "it is not an interval")
    spans = answer.spans if is_symbolic(answer) else merge(answer)
    if [span.closed for span in spans] != [span.closed for span in gold.spans]:
        return Identity(False, "the intervals or whether they are closed differ")
    pairs = list(zip(spans, gold.spans, strict=True))
    ends = [(a.low, b.low) for a, b in pairs] + [(a.high, b.high) for a, b in pairs]
    return _all_same([_compare_entry(a, b, rules) for a, b in ends])


def _compare_entry(entry: Expr, gold: Expr, rules: Rules) -> Identity:
    return compare_quantities(Scalar(entry), Scalar(gold), replace(rules, kind="auto"))


def _compare_matrix(answer: Answer, gold: Matrix, rules: Rules) -> Identity:
    if not isinstance(answer, Matrix):
        if 1 not in (len(gold.rows), len(gold.rows[0])):
            return Identity(False, "it is not a matrix")
        entries = Many(tuple(map(Scalar, chain(*gold.rows))), "()")
        return _compare_tuple(answer, entries, replace(rules, kind="auto"))
    if [len(row) for row in answer.rows] != [len(row) for row in gold.rows]:
        return Identity(False, "the matrices differ in shape")
    cells = zip(chain(*answer.rows), chain(*gold.rows), strict=True)
    return _all_same([_compare_entry(a, b, rules) for a, b in cells])


def _compare_relation(answer: Answer, gold: Relation, rules: Rules) -> Identity:
    if not isinstance(answer, Relation):
        kind = "equation" if set(gold.signs) == {"="} else "inequality"
        return Identity(False, f"it is not an {kind}")
    if len(gold.signs) != 1 or len(answer.signs) != 1:
        pairs = list(zip(answer.sides, gold.sides, strict=False))
        if answer.signs != gold.signs:
            return Identity(False, "the relations differ")
        return _all_same([compare_quantities(a, b, replace(rules, kind="expression")) for a, b in pairs])
    sign, gold_sign = answer.signs[0], gold.signs[0]
    if _MIRRORED.get(sign, sign) != _MIRRORED.get(gold_sign, gold_sign):
        return Identity(False, "the signs differ")
    difference, gold_difference = _difference(answer), _difference(gold)
    return compare_up_to_factor(difference, gold_difference, positive=gold_sign not in ("=", "≠"))


def _difference(relation: Relation) -> Expr:
    """Return left minus right; for > and ≥ right minus left."""
    left, right = (side.expr for side in relation.sides)
    return add(right, neg(left)) if relation.signs[0] in _MIRRORED else add(left, neg(right))
