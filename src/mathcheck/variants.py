"""Answers made from a gold, by which a verifier is tested before it is used."""

from fractions import Fraction

from mathcheck.exact import UndefinedError, exact
from mathcheck.quantities import Rules, is_percent, is_worked_out
from mathcheck.reading.tree import (
    Answer,
    Letters,
    Many,
    Matrix,
    Region,
    Relation,
    Scalar,
    TooHardError,
    symbols,
)


def placed(answer: str, where: str, marker: str, tag: str) -> str:
    """A response that has the answer at the place where it is looked for."""
    if where == "after":
        return f"{marker} {answer}"
    if where == "tag":
        return f"<{tag}>{answer}</{tag}>"
    if where == "last":
        return f"The answer is {answer}"
    return f"So it is \\boxed{{{answer}}}"


def near_misses(text: str, gold: Answer, rules: Rules) -> list[str]:
    """Answers that look like the gold and are wrong."""
    fakes = ["I do not know", "?", f"not {text}"]
    if isinstance(gold, Letters):
        other = next(letter for letter in "ABC" if letter not in gold.letters)
        return [*fakes, other, f"{other} or {min(gold.letters)}"]
    if isinstance(gold, Scalar):
        return [*fakes, *_other_values(text, gold, rules)]
    if isinstance(gold, Many):
        return [*fakes, *_other_lists(text, gold)]
    if isinstance(gold, Region | Matrix | Relation):
        return [*fakes, "10061"]
    return [*fakes, f"{text} {text}", f"{text} or not"]


def _other_values(text: str, gold: Scalar, rules: Rules) -> list[str]:
    if symbols(gold.expr):
        return [f"2 ({text}) + 1"]
    try:
        value = exact(gold.expr)
    except (UndefinedError, TooHardError):
        return []
    if value is None:
        return []
    reach = abs(value) * rules.tolerance if rules.relative else rules.tolerance
    near = value + 1 + 2 * reach
    fakes = [str(near), f"{value} or {near}", f"{value} + {near}"]
    if is_percent(gold.expr) and value:
        fakes += [str(100 * value), *([str(value)] if rules.kind == "unit" else [])]
    if not rules.unsimplified and rules.kind != "expression" and is_worked_out(gold.expr):
        fakes.append(f"{value - 1} + 1")
    if gold.unit is not None:
        fakes.append(
            f"{value} \\text{{ kPa}}" if ("m", -1) not in gold.unit.dimension else f"{value} \\text{{ kg}}"
        )
    return fakes


def _other_lists(text: str, gold: Many) -> list[str]:
    fakes = ["10061"]
    if gold.brackets == "" and text:
        fakes.append(f"{text}, 10061")
    values = [exact(item.expr) if isinstance(item, Scalar) else None for item in gold.items]
    known = [value for value in values if value is not None]
    if gold.brackets == "()" and len(known) == len(values) > 1 and known[::-1] != known:
        fakes.append("(" + ", ".join(str(Fraction(value)) for value in reversed(known)) + ")")
    return fakes
