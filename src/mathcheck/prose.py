"""Find the expression of a line of prose that is the answer."""

import re
from collections import deque
from dataclasses import replace

from mathcheck.reading.cursor import CONSTANTS, FUNCTIONS, pieces
from mathcheck.reading.lexer import CLOSERS, JOINING, OPENERS, Token
from mathcheck.reading.tree import UnreadableError, word_set
from mathcheck.reading.units import find_unit
from mathcheck.scalars import FRACTIONS, LARGE

LONGEST_LINE = 1000
_WINDOW = 10_000
MOST_LABEL_TOKENS = 4

PROSE = word_set(
    "not it is the so was are be to of on at we he she they that this these than but if then thus hence no "
    "yes an by as do does for from has have had its all any you your my our can will would which who also "
    "only just both each get gets got let mr mrs ms dr st"
)
"""Words of up to four letters that are never a product of variables."""
_HEDGES = word_set("maybe perhaps possibly")
_POSSIBLE = word_set("could may might")
"""Words before "also", as in: it may be 7, but it could also be 8."""
_ARTICLES = frozenset({"a", "A", "I"})
_LEAD = re.compile(
    r"\b(?:answer|answers|result|solution|solutions)\s*(?:is|are|:|=)+[\s:*]*(?=\S)", re.IGNORECASE
)
_PROSE_SIGNS = frozenset({".", "'"})
_NEGATIONS = word_set("never than without except nor neither")
_CHANGING = FRACTIONS | word_set("dozen squared cubed factorial or nor minus plus")
"""Words after an expression that give it another value."""
_TIMES = word_set("half twice double triple")
"""Words right before a number that change it; elsewhere they may be part of its name: the ordered triple (1,
2, 3)."""
_COMPARED = word_set("less more fewer greater")
_OF = _TIMES | word_set("root logarithm reciprocal opposite negative")
"""Words before "of" or "of the" that change the expression after it."""


def last_line(text: str) -> str | None:
    r"""Return the last line that has a letter or digit; of a long line, its end.

    >>> last_line("First 7.\n\n So it is 8.\n $$ \n")
    ' So it is 8.'
    """
    for start in range(len(text) - _WINDOW, -_WINDOW, -_WINDOW):
        last = deque(re.finditer(r"\w", text[max(0, start) : start + _WINDOW]), maxlen=1)
        if last:
            at = max(0, start) + last[0].start()
            end = text.find("\n", at)
            line = text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else len(text)]
            return line if len(line) <= LONGEST_LINE else line[-LONGEST_LINE:].partition(" ")[2] or None
    return None


def text_after_lead(line: str) -> str:
    """Return the text after the last "the answer is", or the whole line.

    >>> text_after_lead("So the answer is: 7."), text_after_lead("7 is it")
    ('7.', '7 is it')
    """
    leads = list(_LEAD.finditer(line))
    return line[leads[-1].end() :] if leads else line


def has_prose(tokens: list[Token]) -> bool:
    """Return whether words of a sentence, and not of mathematics, stand outside every bracket."""
    depth = 0
    for token in tokens:
        depth += token.nesting
        in_sentence = token.text.lower() in PROSE or token.text in ("And", "Or")
        if depth == 0 and token.is_word and in_sentence:
            return True
    return False


def last_expression(tokens: list[Token], *, equation: bool = False) -> list[Token]:
    """Return the last expression of a line of prose, or [].

    Words separate expressions, except units and and/or. An expression after a negation (not 7, rather than
    7) is skipped; one after "or" is returned with the expression before it. Of 3 + 4 = 7 the side after the
    last = is returned, unless an equation is expected.
    """
    chunks = _chunks(tokens)
    for number in range(len(chunks) - 1, -1, -1):
        start, end = chunks[number]
        if is_negated(tokens, start):
            continue
        while number > 0:
            earlier_start, earlier_end = chunks[number - 1]
            between = tokens[earlier_end:start]
            words = {token.text.lower() for token in between}
            hedged = not words.isdisjoint(_HEDGES) or ("also" in words and not words.isdisjoint(_POSSIBLE))
            alternative = "or" in words or hedged
            if words == {"to"} and all(token.text.lower() == "from" for token in tokens[:earlier_start]):
                raise UnreadableError("'to' makes it a range")
            adjacent = all(token.text in ("and", "or", ",", ";") for token in between)
            if not (alternative or adjacent) or len(between) > MOST_LABEL_TOKENS * (1 + hedged):
                break
            if is_negated(tokens, earlier_start) or any(token.text == "." for token in between):
                break
            start, number = earlier_start, number - 1
        check_context(tokens, start, end)
        expression = _expression_tokens(tokens, start, end)
        return expression if equation else _last_side(expression)
    return []


def join_ratios(tokens: list[Token]) -> list[Token]:
    """Return the tokens with 3 to 4 as 3 : 4.

    They stay as they are where a colon stands after anything but a word, and where words indicate a range:
    from 3 to 4, 3 to 4 hours.
    """
    if any(t.text == ":" and i and not _is_long_word(tokens[i - 1]) for i, t in enumerate(tokens)):
        return tokens
    colons = {i for i, token in enumerate(tokens) if token.text == "to" and _is_between_values(tokens, i)}
    words = [i for i, t in enumerate(tokens) if t.is_word and i not in colons]
    for i in list(colons):
        before = [tokens[j].text.lower() for j in words if j < i and _is_long_word(tokens[j])][-1:]
        behind = [j for j in words if j > i][:1]
        counted = any(ends_value(tokens[j - 1]) and not _is_prose(tokens[j]) for j in behind)
        if before in (["from"], ["between"]) or counted:
            colons.remove(i)
    return [Token("sign", ":", t.spaced) if i in colons else t for i, t in enumerate(tokens)]


def _is_between_values(tokens: list[Token], i: int) -> bool:
    """Return whether a word stands between two values."""
    if not tokens[i].is_word or not 0 < i < len(tokens) - 1:
        return False
    behind = tokens[i + 1]
    begins = behind.kind in ("number", "command") or behind.is_sign("(", "{")
    return begins and ends_value(tokens[i - 1])


def _is_long_word(token: Token) -> bool:
    return token.is_word and len(token.text) > 1


def _is_prose(token: Token) -> bool:
    return token.text in JOINING or token.text.lower() in PROSE


def _last_side(tokens: list[Token]) -> list[Token]:
    """Return the tokens after the last = outside brackets; all tokens of a list, or if none follow."""
    depth, at = 0, 0
    for i, token in enumerate(tokens):
        depth += token.nesting
        if depth == 0 and (token.text in JOINING or token.is_sign(",", ";")):
            if i + 1 < len(tokens):
                return tokens
        elif depth == 0 and token.is_sign("="):
            at = i + 1
    return tokens[at:] or tokens


def _expression_tokens(tokens: list[Token], start: int, end: int) -> list[Token]:
    """Return the tokens of an answer, without words for what is counted and without dangling brackets."""
    expression = [tokens[i] for i in range(start, end) if _is_math(tokens, i) or tokens[i].text in JOINING]
    dangling = (*OPENERS, "!") if len(expression) < len(tokens) else OPENERS
    while expression and expression[-1].is_sign(*dangling):
        expression.pop()
    while expression and expression[0].is_sign(*CLOSERS):
        expression.pop(0)
    return expression


def _chunks(tokens: list[Token]) -> list[tuple[int, int]]:
    """Return the bounds of the runs of mathematics that hold a value."""
    runs: list[tuple[int, int]] = []
    start: int | None = None
    for i in range(len(tokens) + 1):
        if i < len(tokens) and _is_math(tokens, i):
            start = i if start is None else start
        elif start is not None:
            if any(_is_value(token) for token in tokens[start:i]):
                runs.append((start, i))
            start = None
    return runs


def _is_value(token: Token) -> bool:
    operator = token.text in ("cup", "in", "cap", "setminus", "to", "ldots", "dots")
    return token.kind in ("number", "word") or (token.kind == "command" and not operator)


def _is_math(tokens: list[Token], i: int) -> bool:
    token = tokens[i]
    if token.kind in ("number", "command", "begin", "end", "row"):
        return True
    if token.kind == "sign":
        return token.text not in _PROSE_SIGNS and not _is_dash(tokens, i)
    if not token.is_word or _is_prose(token):
        return False
    if _is_unit(token.text) and _follows_value(tokens, i):
        return token.text != "in" or i + 1 == len(tokens) or tokens[i + 1].text in (".", ",", "^")
    return token.kind == "word" and _is_variable(tokens, i)


def _is_variable(tokens: list[Token], i: int) -> bool:
    """Return whether a run of letters is a function or a product of variables, and not a word."""
    token, before = tokens[i], tokens[i - 1] if i else None
    after = tokens[i + 1] if i + 1 < len(tokens) else None
    if len(token.text) == 1:
        possessive = before is not None and before.text == "'"
        if token.text not in _ARTICLES or after is None:
            return not possessive
        return not possessive and not (after.kind == "word" and len(after.text) > 1)
    if token.text in FUNCTIONS or token.text in CONSTANTS:
        return True
    attached = before is not None and not token.spaced and _is_math(tokens, i - 1)
    attached = attached or (after is not None and after.text in ("^", "_", "(") and not after.spaced)
    vowel = any(letter in "aeiouAEIOU" for letter in token.text)
    return pieces(token.text) is not None and len(token.text) <= 4 and (attached or not vowel)


def _is_unit(word: str) -> bool:
    return find_unit(word) is not None or word.lower() in {*LARGE, "percent", "degree", "degrees"}


def _follows_value(tokens: list[Token], i: int) -> bool:
    if i == 0:
        return False
    before = tokens[i - 1]
    if before.kind in ("number", "command") or before.text in (")", "}", "$", "/"):
        return True
    return before.is_word and _is_unit(before.text) and _follows_value(tokens, i - 1)


def _is_dash(tokens: list[Token], i: int) -> bool:
    """Return whether a minus is a dash or hyphen: after a word, with space on both sides or on neither."""
    if tokens[i].text != "-" or i == 0 or i + 1 == len(tokens):
        return False
    return tokens[i].spaced == tokens[i + 1].spaced and not _is_math(tokens, i - 1)


# ------------------------------------------------------------- words that deny or change an expression


def check_context(tokens: list[Token], start: int, end: int) -> None:
    """Raise UnreadableError if words around an expression deny it or give it another value."""
    behind = [token.text.lower() for token in tokens[end : end + 2]]
    denied = behind[:1] == ["not"] and len(tokens) == end + 1
    denied |= behind[:1] in (["is"], ["are"]) and behind[1:] in (["wrong"], ["incorrect"], ["false"], ["not"])
    if denied or (behind[:1] and behind[0] in _CHANGING) or behind == ["and", "a"]:
        raise UnreadableError(f"{behind[0]!r} stands behind it")
    if behind[:1] and behind[0] in _COMPARED and behind[1:] == ["than"] and _begins_value(tokens, end + 2):
        raise UnreadableError("it is a part of another value")
    equation = any(token.text == "=" for token in tokens[start:end])
    before = [token.text.lower() for token in reversed(tokens[max(0, start - 3) : start])]
    if not equation and (
        before[:1] in (["plus"], ["times"]) or before[:2] == ["of", "out"] or _is_share(tokens, start)
    ):
        raise UnreadableError(f"{before[0]!r} stands before it")
    changing = _TIMES if tokens[start].kind == "number" else frozenset[str]()
    if before[:1] == ["of"] or before[:2] == ["the", "of"]:
        before, changing = before[before.index("of") + 1 :], _OF
    if before[:1] and (
        before[0] in {*changing, "minus", "negative"} or before[:2] in (["least", "at"], ["most", "at"])
    ):
        raise UnreadableError(f"{before[0]!r} stands before it")


def _is_share(tokens: list[Token], start: int) -> bool:
    """Return whether a share of the expression is named, as in 2 of 3 and 20% of 50."""
    before = tokens[start - 2] if start > 1 and tokens[start - 1].text == "of" else None
    return before is not None and (ends_value(before) or before.text in ("%", "percent"))


def _begins_value(tokens: list[Token], at: int) -> bool:
    """Return whether the token at `at` is a number or a variable, as in 5 less than x."""
    token = tokens[at] if at < len(tokens) else None
    return token is not None and (token.kind in ("number", "command") or token.text in "bcdfghjkmnpqrstwxyz")


def join_signs(tokens: list[Token]) -> list[Token]:
    """Return the tokens with negative 3 and minus 3 as -3, unless a value stands before them."""
    result = list(tokens)
    for i, token in enumerate(tokens[:-1]):
        begins = tokens[i + 1].kind in ("number", "command") and not (i and ends_value(tokens[i - 1]))
        if begins and token.text.lower() in ("negative", "minus"):
            # A minus without space before its number is not read as a dash.
            result[i : i + 2] = Token("sign", "-", token.spaced), replace(tokens[i + 1], spaced=False)
    return result


def ends_value(token: Token) -> bool:
    """Return whether a value may end with this token."""
    return token.kind == "number" or token.is_sign(")", "}")


def is_negated(tokens: list[Token], start: int) -> bool:
    """Return whether the word right before a chunk denies it, or "not" is among the three words before it."""
    words = []
    for token in reversed(tokens[max(0, start - 4) : start]):
        if not token.is_word and token.text != "'":
            break
        words.append(token.text.lower())
    near = (words[:1] and words[0] in _NEGATIONS) or words[:2] in (["of", "instead"], ["but", "anything"])
    return (
        bool(near)
        or "not" in words
        or "cannot" in words
        or any(words[i : i + 2] == ["t", "'"] for i in range(len(words) - 1))
    )
