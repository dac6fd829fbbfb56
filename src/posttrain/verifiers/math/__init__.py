"""The verifier `math`: answers read by a bounded grammar of our own and compared as mathematics.

text → places (where the answer stands) → lexer, parser, reader (what it says) → answers (is it the gold)
"""

from posttrain.verifiers.math.verifier import Math

__all__ = ["Math"]
