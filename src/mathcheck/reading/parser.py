r"""Expressions: a bounded grammar from tokens to a tree.

    expression   term (+ - ± ∓ term)*
    term         sign* power (· / or nothing, power)*        1/2x is (1/2)x
    power        postfix (^ sign* power)                      -x^2 is -(x^2)
    postfix      atom ! % °
    atom         number, mixed number, letter, constant, function, (...), {...}, |...|, \frac, \sqrt, \binom

A run of letters is read as known names and single letters: 2xy, 2pi, xsin(x). Functions without
brackets take the product that follows: \sin 2x cos x is sin(2x) cos x.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from mathcheck.reading.cursor import CONSTANTS, FUNCTIONS, MOST_DEPTH, Cursor, pieces
from mathcheck.reading.lexer import BASES, GREEK, Token
from mathcheck.reading.tree import (
    Call,
    Constant,
    Expr,
    Numeral,
    Symbol,
    TooHardError,
    UnreadableError,
    add,
    mul,
    neg,
)
from mathcheck.reading.units import find_unit

MOST_DIVISIONS = 20
UNKNOWN_BASE = Symbol("base of log")
"""\\log without a base: an identity must hold in any base."""

_TWO_ARGUMENTS = {"frac": "div", "binom": "binomial", "dbinom": "binomial", "tbinom": "binomial"}
_BEGINNINGS = {*FUNCTIONS, *CONSTANTS, *GREEK, *_TWO_ARGUMENTS, "surd", "lfloor", "lceil"}
_CLOSED_BY = {"(": ")", "{": "}", "[": "]", "{{": "}}"}
_INVERTED = {name: f"a{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")}
_MINUS_ONE = neg(Numeral(Fraction(1)))


class Parser(Cursor):
    """Parse one expression at the front of the tokens.

    Words after a number are left in `rest` for the reader of units, unless `units` is False.
    """

    def __init__(self, tokens: Sequence[Token], *, units: bool = True) -> None:
        super().__init__(tokens)
        self._bars = 0
        self._units = units

    def expression(self) -> Expr:
        """Parse a sum of terms. Raises UnreadableError or TooHardError."""
        sign = self.take("±", "∓")
        total = self._term()
        if sign is not None:
            total = Call(_sign_name(sign), (total,))
        while sign := self.take("+", "-", "±", "∓"):
            term = self._term()
            if sign in "±∓":
                total = Call(_sign_name(sign), (total, term))
            else:
                total = add(total, term if sign == "+" else neg(term))
        return total

    def _term(self) -> Expr:
        product, divisions = self._signed(), 0
        while True:
            if self.take("*"):
                product = mul(product, self._signed())
            elif self.take("/"):
                divisions += 1
                if divisions > MOST_DIVISIONS:
                    raise TooHardError(f"more than {MOST_DIVISIONS} divisions in a row")
                product = Call("div", (product, self._signed()))
            elif self._begins_atom():
                product = mul(product, self._power())
            else:
                return product

    def _signed(self) -> Expr:
        """Parse a power with signs before it. Every bracket passes through here and is counted."""
        sign = self.take("-", "+")
        if sign is None:
            return self.deeper(self._power)
        inner = self.deeper(self._signed)
        return neg(inner) if sign == "-" else inner

    def _power(self) -> Expr:
        base = self._postfix(self._atom())
        if not self.take("^"):
            return base
        if self._degree_mark():
            return self._postfix(Call("degree", (base,)))
        return self._postfix(Call("pow", (base, self._exponent())))

    def _exponent(self) -> Expr:
        """Parse the exponent after ^; x^10 has the exponent 10, as in plain text."""
        return self._group() if self.at_sign("{") else self._signed()

    def _degree_mark(self) -> bool:
        if self.take_command("circ", "degree"):
            return True
        if [token.text for token in self.rest[:3]] not in (["{", "circ", "}"], ["{", "degree", "}"]):
            return False
        for _ in range(3):
            self.next()
        return True

    def _postfix(self, expr: Expr) -> Expr:
        for _ in range(MOST_DEPTH):
            sign = self.take("!", "%")
            if sign is not None:
                expr = Call("factorial" if sign == "!" else "percent", (expr,))
            elif self.take_command("degree"):
                expr = Call("degree", (expr,))
            else:
                return expr
        raise TooHardError("too many signs behind one another")

    # ------------------------------------------------------------------ atoms

    def _begins_atom(self) -> bool:
        token, before = self.here, self.before
        if token is None or before is None:
            return False
        if token.kind == "sign":
            return token.text in ("(", "{") or (token.text == "|" and self._bars == 0)
        if token.kind == "word":
            return not self._is_outside(token)
        if token.kind == "number":
            return before.kind != "number" and (before.kind != "word" or token.spaced)
        return token.kind == "command" and token.text in _BEGINNINGS

    def _is_outside(self, token: Token) -> bool:
        """Return whether a word is a unit or what is counted, and not a factor."""
        if len(token.text) == 1 or token.text in _BEGINNINGS:
            return False
        if pieces(token.text) is None:
            return True
        if not self._units:
            return False
        vowel = any(letter in "aeiouAEIOU" for letter in token.text)
        before = self.before
        product = before is not None and before.kind in ("word", "command") and before.text not in CONSTANTS
        unit = find_unit(token.text) is not None and not product  # in \mu mg, mg is m times g
        return unit or (token.spaced and len(token.text) > 2 and vowel)

    def _atom(self) -> Expr:
        token = self.next()
        if token.kind == "number":
            return self._numeral(token)
        if token.kind == "word":
            names = pieces(token.text)
            if names is None:
                raise UnreadableError(f"{token.text[:20]!r} is a word")
            self.spell(names)
            return self._named(names[0], latex=False)
        if token.kind == "command":
            return self._command(token.text)
        if token.is_sign(*_CLOSED_BY):
            self.back()
            return self._subscripted(self._group())
        if token.is_sign("|"):
            self._bars += 1
            inner = self.expression()
            self._bars -= 1
            self.need("|")
            return Call("abs", (inner,))
        raise UnreadableError(f"{token.text[:20]!r} is not expected there")

    def _numeral(self, token: Token) -> Expr:
        if token.value is None:
            raise TooHardError("a number has too many digits")
        if self.at_sign("_"):  # 1011_2, which is not compared by value
            return Call("in base", (Numeral(token.value), Constant(self._base())))
        part = self.take_mixed_part() if token.text.isdigit() else None
        return Numeral(token.value + (part.value if part else 0))

    def _named(self, name: str, *, latex: bool) -> Expr:
        if name in FUNCTIONS:
            return self.deeper(lambda: self._function(name, latex=latex))
        if name in CONSTANTS and not self.at_sign("_"):
            return CONSTANTS[name]
        return Symbol(name + self._subscript())

    def _command(self, name: str) -> Expr:
        if name in _TWO_ARGUMENTS:
            return Call(_TWO_ARGUMENTS[name], (self._argument(), self._argument()))
        if name == "surd":
            return Call("sqrt", (self.deeper(self._atom),))
        if name in ("lfloor", "lceil"):
            inner = self.expression()
            if not self.take_command(f"r{name[1:]}"):
                raise UnreadableError(f"\\{name} is not closed")
            return Call("floor" if name == "lfloor" else "ceil", (inner,))
        if name in _BEGINNINGS:
            return self._named(name, latex=True)
        raise UnreadableError(f"\\{name[:20]} is not in the grammar")

    def _subscripted(self, inner: Expr) -> Expr:
        """Return {1011}_2 as 1011_2, and {x}_1 as x_1."""
        if self.at_sign("_") and isinstance(inner, Numeral):
            return Call("in base", (inner, Constant(self._base())))
        if self.at_sign("_") and isinstance(inner, Symbol) and "_" not in inner.name:
            return Symbol(inner.name + self._subscript())
        return inner

    def _base(self) -> str:
        """Parse the base of a numeral: _2, _{2}, _{(2)}, _{two} and _{base 2} are equal."""
        name = re.sub(r"^_(?:base)?|[()]", "", self._subscript().lower())
        return f"_{BASES.get(name, name)}"

    def _subscript(self) -> str:
        """Parse _1, _{12} or _n as a part of a name; "" without a subscript."""
        if not self.take("_"):
            return ""
        if not self.take("{"):
            return f"_{self.next().text}"
        parts = []
        while not self.take("}"):
            parts.append(self.next().text)
        return "_" + "".join(parts)

    def _function(self, name: str, *, latex: bool) -> Expr:
        """Parse the power, base or index of a function, and its argument."""
        if name == "sqrt":
            return self._root(latex=latex)
        base: Expr = UNKNOWN_BASE
        power: Expr | None = None
        for _ in range(2):
            if name == "log" and self.take("_"):
                base = self._argument(digits=True)
            elif power is None and self.take("^"):
                power = self._exponent()
        if name == "log" and base == UNKNOWN_BASE and power is None:
            base = self._attached_base() or base
        argument = self._function_argument()
        if name == "log":
            call = Call("log", (argument, base))
        elif name in _INVERTED and power == _MINUS_ONE:
            return Call(_INVERTED[name], (argument,))
        else:
            call = Call(FUNCTIONS[name], (argument,))
        return call if power is None else Call("pow", (call, power))

    def _attached_base(self) -> Expr | None:
        """Parse the base 2 of log2(8); None for a log without an attached base."""
        ahead = self.rest[:2]
        if len(ahead) < 2 or ahead[0].kind != "number" or ahead[0].spaced or ahead[1].text != "(":
            return None
        return self._numeral(self.next())

    def _root(self, *, latex: bool) -> Expr:
        index: Expr | None = None
        if self.take("["):
            index = self.expression()
            self.need("]")
        argument = self._argument() if latex else self.deeper(self._atom)
        return Call("sqrt", (argument,)) if index is None else Call("root", (argument, index))

    def _argument(self, *, digits: bool = False) -> Expr:
        r"""Parse {...}, or the one digit, letter or command that LaTeX takes; with `digits`, a numeral."""
        digit = None if digits else self.take_digit()
        if digit is not None:
            return digit
        token = self.here
        if token is not None and token.kind == "word" and len(token.text) > 1:  # \frac ab is a/b
            self.next()
            self.spell(list(token.text))
            self.back()
        return self.deeper(self._atom)

    def _function_argument(self) -> Expr:
        """Parse a bracket, or the product up to the next sign or function."""
        if self.at_sign("(", "{"):
            return self._group()
        product = self._signed()
        while self._begins_atom() and not self._begins_function():
            product = mul(product, self._power())
        return product

    def _begins_function(self) -> bool:
        token = self.here
        if token is None or token.kind not in ("word", "command"):
            return False
        return (pieces(token.text) or [token.text])[0] in FUNCTIONS

    def _group(self) -> Expr:
        """Parse an expression in brackets."""
        opening = self.next().text
        bars, self._bars = self._bars, 0
        inner = self.deeper(self.expression)
        self.need(_CLOSED_BY[opening])
        self._bars = bars
        return inner


def _sign_name(sign: str) -> str:
    return "plus_minus" if sign == "±" else "minus_plus"
