"""Forms that an answer must have before one of reasoning-gym's scorers judges it.

Some scorers run the answer as a program (`eval`, and sympy's parser, which is one too), some give full marks
to text that is not an answer, or to an answer among others. For those generators `refusal` rejects wrong
answers before the scorer runs. An answer that passes may still be wrong.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Rule = Callable[[str, str, Mapping[str, Any]], bool]
"""(answer, gold, metadata) -> whether the scorer may judge; gold is empty if the task has none."""

_MOST = 2000
"""Characters of an answer that should be short."""
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_NAMES = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
    *("exp", "log", "ln", "sqrt", "pi", "Abs", "erf", "C", "E"),
}
_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def refusal(generator: str, answer: str, gold: str | None, metadata: Mapping[str, Any]) -> str:
    """Return why this answer is wrong whatever the scorer would say; "" if the scorer should judge it.

    >>> refusal("complex_arithmetic", "nan", "3.0 + 4.0i", {}), refusal("complex_arithmetic", "3+4i", "", {})
    ('it does not have the form that complex_arithmetic requires', '')
    """
    rule = _RULES.get(generator)
    try:
        if rule is None or rule(answer.strip(), (gold or "").strip(), metadata):
            return ""
    except (ValueError, OverflowError, RecursionError, MemoryError):
        pass  # a number has thousands of digits
    return f"it does not have the form that {generator} requires"


def _all(pattern: str) -> Rule:
    """Return the rule that the whole answer matches this pattern."""
    compiled = re.compile(pattern)
    return lambda answer, gold, metadata: compiled.fullmatch(answer) is not None


def _same(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """Require the gold itself, for a scorer that accepts anything."""
    return answer.casefold() == gold.casefold()


def _number(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """Require the gold's number, for a scorer that reads the first one, without its sign."""
    number = answer.replace(",", "").strip("$% ").removesuffix(".")
    return re.fullmatch(_NUMBER, number) is not None and Fraction(number) == Fraction(gold)


def _numbers(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """Require a list of the gold's numbers, for a scorer with a tolerance of 1, which NaN satisfies."""
    numbers, gold_numbers = (re.findall(_NUMBER, text) for text in (answer, gold))
    form = re.fullmatch(rf"""\[(?:\s*(['"]?){_NUMBER}\1\s*(?:,|(?=\])))*\]""", answer) is not None
    return form and [*map(Fraction, numbers)] == [*map(Fraction, gold_numbers)]


def _words(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """Require the gold's words in any order, with words that join them."""
    words, gold_words = (re.findall(r"\w+", text.casefold()) for text in (answer, gold))
    fillers = {"and", "is", "a", "an"}
    return sorted(w for w in words if w not in fillers) == sorted(w for w in gold_words if w not in fillers)


def _as_long(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """Require as many words as the gold has, for a scorer that reads no further."""
    words, gold_words = (re.split(r"[\s,]+", text) for text in (answer, gold))
    return len(words) == len(gold_words)


def _shaped(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """Require the gold except its numbers, for scorers that read the first of several."""
    form, gold_form = (
        re.sub(r"\s|°|(?<=day)s", "", re.sub(_NUMBER, "0", text.casefold())) for text in (answer, gold)
    )
    return form == gold_form


def _literal(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """Require the gold, a literal, or text that Python cannot parse at all, but no program."""
    if answer == gold:
        return True
    try:
        ast.literal_eval(answer)
    except (SyntaxError, MemoryError, RecursionError):
        return True  # eval fails on it as well
    except (ValueError, TypeError):
        return False
    return True


def _formula(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """Require numbers, variables and functions of mathematics: no other name, and no attributes."""
    variables = {metadata.get("variable"), *metadata.get("variables", ())}
    plain = re.fullmatch(r"[\w\s.+\-*/^(),]*", answer, re.ASCII) is not None
    dotted = re.search(r"[^\W\d]\s*\.|\.\s*[^\W\d]", answer) is not None
    names = set(re.findall(r"[^\W\d]\w*", answer))
    return plain and not dotted and len(answer) <= _MOST and names <= _NAMES | variables


def _sum_of(target: str | int) -> Rule:
    """Return the rule that the answer uses exactly the task's numbers and equals the target."""

    def rule(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
        if len(answer) > _MOST or not re.fullmatch(r"[\d\s.+\-*/()]*", answer, re.ASCII):
            return False
        result = metadata[target] if isinstance(target, str) else target
        try:
            used: list[Fraction] = []
            value = _value(ast.parse(answer, mode="eval").body, used)
        except (SyntaxError, ZeroDivisionError):
            return False
        return value == result and sorted(used) == sorted(metadata["numbers"])

    return rule


def _value(node: ast.expr, used: list[Fraction]) -> Fraction:
    """Return the exact value of an arithmetic expression. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and math.isfinite(node.value):
        used.append(Fraction(node.value))
        return used[-1]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _value(node.operand, used) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("it is not an arithmetic expression")


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("string_insertion", "binary_matrix", "spiral_matrix", "n_queens"), _literal),
    **dict.fromkeys(
        ("polynomial_multiplication", "simple_integration", "intermediate_integration"), _formula
    ),
    **dict.fromkeys(("time_intervals", "advanced_geometry"), _shaped),
    "countdown": _sum_of("target"),
    "puzzle24": _sum_of(24),
    "complex_arithmetic": _all(r"[\d\s.+\-()ijIJ]+"),
    "game_of_life_halting": _same,
    "gsm_symbolic": _number,
    "number_sorting": _numbers,
    "knights_knaves": _words,
    **dict.fromkeys(("letter_jumble", "word_sorting"), _as_long),
    "kakurasu": _all(r"[01\s,\[\]]+"),
    "survo": _all(r"[-\d\s]+"),
    "sokoban": _all(r"[LRUDlrud\s]+"),
    "quantum_lock": _all(r"[ABCabc\s,→>\-\[\]]+"),
    "polynomial_equations": _all(rf"(?:{_NUMBER}\s*(?:,\s*|$))+"),
    "fraction_simplification": _all(
        r"\$?\s*(?:\d+\s*/\s*\d+|\\d?frac\s*\{\s*\d+\s*\}\s*\{\s*\d+\s*\})\s*\$?"
    ),
}
