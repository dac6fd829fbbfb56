r"""Numbers in running text, read exactly.

A number is a whole numeric expression, never a part of one:

- ASCII digits with an optional decimal point: 7, 0.5, .5; a trailing full stop is punctuation.
- Thousands in groups of three, parted by commas, blanks, apostrophes or underscores: 1,234,567.5, 1 234 567.
  Any other comma separates numbers: "3,4" is two.
- A sign in front (+, -, −, –, － or ﹣; also "negative 5"), unless it joins two values: "x = -5" is -5.
- A currency sign ($, £, €, ¥), a % and a unit are ignored: "$5" is 5, "9 cm^2" is 9, "50%" is 50, never 0.5.
- Fractions and mixed numbers of whole numbers: 3/4, \frac{3}{4}, ¾, 2 1/2, 2\frac12, 2 and a half.
- Powers: 10^3, 2^{10}, 10³, and a power of ten times a number: 1.5e-3, 1.5 × 10^3, 1.5 \times 10^{3}.
- Thousand, million and so on behind a number, as a word or a letter: 5 million, 10k, $1.2M.

Any other expression is *unreadable*: a root or function of a number (\sqrt{5}, f(5)), a sum, product or
quotient that is not worked out (3 + 4, 2x, x/2), a range or ratio (3-5, 3 to 5, 3:4), a time, date or version
(12:30, 3/4/2024, 1.2.3), hex and binary literals, a numeral with its base, a tuple, a fraction over 0, and
anything longer than 1000 characters or with a power over 1000. A verifier treats it as a wrong answer, never
as one of its parts, and looks for no number before it. Digits behind a letter belong to a name (x2, a_5),
which is not a number. An expression ends with its line.
"""

from mathcheck.numerals.texts import last_number, numbers, part_numbers, whole_number

__all__ = ["last_number", "numbers", "part_numbers", "whole_number"]
