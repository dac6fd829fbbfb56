"""Decide whether an answer is, as mathematics, the gold one.

>>> equal("1/2", "0.5")
Result(label='right', reason='exactly')
>>> bool(equal("x^2 - 1", "(x - 1)(x + 2)"))
False

A text is read by a bounded grammar (reading), then compared with the gold (answers, and algebra
where SymPy decides). No text is ever evaluated or given to SymPy. posttrain takes mathcheck.plugin from it.
"""

from mathcheck.comparison import AnswerType, GoldError, Result, equal
from mathcheck.numerals import last_number, numbers

__all__ = ["AnswerType", "GoldError", "Result", "equal", "last_number", "numbers"]
