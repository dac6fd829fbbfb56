"""What an answer must be before one of reasoning-gym's scorers is asked.

Some scorers run the answer as a program (`eval`, and sympy's parser, which is one too), some pay fully for
what does not answer, or for an answer among others. For those generators `refused` says why an answer is
wrong without them. What passes may still be wrong.
"""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Rule = Callable[[str, str, Mapping[str, Any]], bool]
"""(answer, gold, metadata) -> whether the scorer may be asked; gold is empty where the task has none."""

_MOST = 2000
"""Characters of an answer to what is short."""
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


def refused(generator: str, answer: str, gold: str | None, metadata: Mapping[str, Any]) -> str:
    """Why this answer is wrong, whatever the generator's scorer would say; empty if it is to be asked.

    >>> refused("complex_arithmetic", "nan", "3.0 + 4.0i", {}), refused("complex_arithmetic", "3+4i", "", {})
    ('it has not the form that complex_arithmetic asks for', '')
    """
    rule = _RULES.get(generator)
    try:
        if rule is None or rule(answer.strip(), (gold or "").strip(), metadata):
            return ""
    except (ValueError, OverflowError, RecursionError, MemoryError):
        pass  # numbers of thousands of digits
    return f"it has not the form that {generator} asks for"


def _all(pattern: str) -> Rule:
    """The whole answer is of this pattern."""
    compiled = re.compile(pattern)
    return lambda answer, gold, metadata: compiled.fullmatch(answer) is not None


def _same(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """It is the gold, for a scorer that takes anything."""
    return answer.casefold() == gold.casefold()


def _number(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """It is the gold's number, for a scorer that takes the first one, without its sign."""
    said = answer.replace(",", "").strip("$% ").removesuffix(".")
    return re.fullmatch(_NUMBER, said) is not None and Fraction(said) == Fraction(gold)


def _numbers(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """A list of the gold's numbers, for a scorer with a tolerance of 1, which NaN keeps."""
    said, wanted = (re.findall(_NUMBER, text) for text in (answer, gold))
    form = re.fullmatch(rf"""\[(?:\s*(['"]?){_NUMBER}\1\s*(?:,|(?=\])))*\]""", answer) is not None
    return form and [*map(Fraction, said)] == [*map(Fraction, wanted)]


def _words(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """The gold's words in some order, with those that join them."""
    said, wanted = (re.findall(r"\w+", text.casefold()) for text in (answer, gold))
    fillers = {"and", "is", "a", "an"}
    return sorted(w for w in said if w not in fillers) == sorted(w for w in wanted if w not in fillers)


def _as_long(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """As many words as the gold, for a scorer that reads no further."""
    said, wanted = (re.split(r"[\s,]+", text) for text in (answer, gold))
    return len(said) == len(wanted)


def _shaped(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """The gold but for its numbers, for scorers that read the first of several."""
    said, wanted = (
        re.sub(r"\s|°|(?<=day)s", "", re.sub(_NUMBER, "0", text.casefold())) for text in (answer, gold)
    )
    return said == wanted


def _literal(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """No program: the gold, a literal, or nothing that Python reads at all."""
    if answer == gold:
        return True
    try:
        ast.literal_eval(answer)
    except (SyntaxError, MemoryError, RecursionError):
        return True  # of which eval makes nothing either
    except (ValueError, TypeError):
        return False
    return True


def _formula(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
    """Numbers, variables and functions of mathematics: no other name, and nothing has an attribute."""
    variables = {metadata.get("variable"), *metadata.get("variables", ())}
    plain = re.fullmatch(r"[\w\s.+\-*/^(),]*", answer, re.ASCII) is not None
    dotted = re.search(r"[^\W\d]\s*\.|\.\s*[^\W\d]", answer) is not None
    names = set(re.findall(r"[^\W\d]\w*", answer))
    return plain and not dotted and len(answer) <= _MOST and names <= _NAMES | variables


def _sum_of(target: str | int) -> Rule:
    """An expression of exactly the task's numbers that comes to the target."""

    def rule(answer: str, gold: str, metadata: Mapping[str, Any]) -> bool:
        if len(answer) > _MOST or not re.fullmatch(r"[\d\s.+\-*/()]*", answer, re.ASCII):
            return False
        wanted = metadata[target] if isinstance(target, str) else target
        try:
            used: list[Fraction] = []
            value = _value(ast.parse(answer, mode="eval").body, used)
        except (SyntaxError, ZeroDivisionError):
            return False
        return value == wanted and sorted(used) == sorted(metadata["numbers"])

    return rule


def _value(node: ast.expr, used: list[Fraction]) -> Fraction:
    """What a sum comes to, exactly; ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and math.isfinite(node.value):
        used.append(Fraction(node.value))
        return used[-1]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _value(node.operand, used) * (-1 if isinstance(node.op, ast.USub) else 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("it is no sum")


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
