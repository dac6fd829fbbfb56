"""Decide whether an answer equals the gold one as mathematics.

>>> equal("1/2", "0.5")
Result(label='right', reason='exactly')
>>> bool(equal("x^2 - 1", "(x - 1)(x + 2)"))
False

`reading` parses a text by a bounded grammar, `answers` compares the tree with the gold, and `algebra` asks
SymPy where that decides. No text is ever evaluated or passed to SymPy. `plugin` holds what posttrain
registers.
"""

from mathcheck.comparison import AnswerType, GoldError, Result, equal
from mathcheck.numerals import last_number, numbers

__all__ = ["AnswerType", "GoldError", "Result", "equal", "last_number", "numbers"]
