"""Which expression of a line of prose is the answer."""

import re
from collections import deque

from mathcheck.denials import ends_value, is_negated, refuse_changed
from mathcheck.reading.cursor import CONSTANTS, FUNCTIONS, pieces
from mathcheck.reading.lexer import CLOSERS, JOINING, OPENERS, Token
from mathcheck.reading.tree import UnreadableError, word_set
from mathcheck.reading.units import unit_named
from mathcheck.scalars import LARGE

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
"""Before "also": it may be 7, but it could also be 8."""
_ARTICLES = frozenset({"a", "A", "I"})
_LEAD = re.compile(
    r"\b(?:answer|answers|result|solution|solutions)\s*(?:is|are|:|=)+[\s:*]*(?=\S)", re.IGNORECASE
)
_PROSE_SIGNS = frozenset({".", "'"})


def last_line(text: str) -> str | None:
    r"""The last line that has a letter or digit; of a long one, its end.

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


def behind_lead(line: str) -> str:
    """What follows the last "the answer is"; the whole line if nothing does.

    >>> behind_lead("So the answer is: 7."), behind_lead("7 is it")
    ('7.', '7 is it')
    """
    leads = list(_LEAD.finditer(line))
    return line[leads[-1].end() :] if leads else line


def has_prose(tokens: list[Token]) -> bool:
    """Whether words stand outside every bracket that belong to a sentence, not to mathematics."""
    depth = 0
    for token in tokens:
        depth += token.kind == "sign" and token.text in OPENERS
        depth -= token.kind == "sign" and token.text in CLOSERS
        if (
            depth == 0
            and token.kind in ("word", "text")
            and (token.text.lower() in PROSE or token.text in ("And", "Or"))
        ):
            return True
    return False


def last_expression(tokens: list[Token], *, equation: bool = False) -> list[Token]:
    """The last expression of a line of prose; empty if there is none.

    Words part expressions, but for units and and/or. One that stands behind a negation (not 7,
    rather than 7) is passed over; one behind "or" comes with what is before it. Of 3 + 4 = 7 it is
    the side behind the last =, unless an equation is looked for.
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
            ors = "or" in words or hedged
            if words == {"to"} and all(token.text.lower() == "from" for token in tokens[:earlier_start]):
                raise UnreadableError("'to' makes a range of it")
            direct = all(token.text in ("and", "or", ",", ";") for token in between)
            if (
                len(between) > MOST_LABEL_TOKENS * (1 + hedged)
                or not (ors or direct)
                or is_negated(tokens, earlier_start)
            ):
                break
            if any(token.text == "." for token in between):
                break
            start, number = earlier_start, number - 1
        refuse_changed(tokens, start, end)
        found = _joined(tokens, start, end)
        return found if equation else _last_side(found)
    return []


def ratios(tokens: list[Token]) -> list[Token]:
    """The tokens with 3 to 4 as 3 : 4.

    Not where a colon stands behind anything but a word, nor where words speak of a range: from 3 to 4, 3 to
    4 hours.
    """
    if any(t.text == ":" and i and not _is_long_word(tokens[i - 1]) for i, t in enumerate(tokens)):
        return tokens
    colons = {i for i, token in enumerate(tokens) if token.text == "to" and _parts_values(tokens, i)}
    words = [i for i, t in enumerate(tokens) if t.kind in ("word", "text") and i not in colons]
    for i in list(colons):
        before = [tokens[j].text.lower() for j in words if j < i and _is_long_word(tokens[j])][-1:]
        behind = [j for j in words if j > i][:1]
        counted = any(ends_value(tokens[j - 1]) and not _is_prose(tokens[j]) for j in behind)
        if before in (["from"], ["between"]) or counted:
            colons.remove(i)
    return [Token("sign", ":", t.spaced) if i in colons else t for i, t in enumerate(tokens)]


def _parts_values(tokens: list[Token], i: int) -> bool:
    """Whether a word stands between two values."""
    if tokens[i].kind not in ("word", "text") or not 0 < i < len(tokens) - 1:
        return False
    behind = tokens[i + 1]
    begins = behind.kind in ("number", "command") or (behind.kind == "sign" and behind.text in ("(", "{"))
    return begins and ends_value(tokens[i - 1])


def _is_long_word(token: Token) -> bool:
    return token.kind in ("word", "text") and len(token.text) > 1


def _is_prose(token: Token) -> bool:
    return token.text in JOINING or token.text.lower() in PROSE


def _last_side(tokens: list[Token]) -> list[Token]:
    """What stands behind the last = outside brackets; all of it where it is a list, or nothing does."""
    depth, at = 0, 0
    for i, token in enumerate(tokens):
        if token.kind == "sign":
            depth += (token.text in OPENERS) - (token.text in CLOSERS)
        if depth == 0 and (token.text in JOINING or (token.kind == "sign" and token.text in (",", ";"))):
            if i + 1 < len(tokens):
                return tokens
        elif depth == 0 and token.kind == "sign" and token.text == "=":
            at = i + 1
    return tokens[at:] or tokens


def _joined(tokens: list[Token], start: int, end: int) -> list[Token]:
    """The tokens of an answer, without the words that name what is counted and what dangles at its ends."""
    found = [tokens[i] for i in range(start, end) if _is_math(tokens, i) or tokens[i].text in JOINING]
    prose = len(found) < len(tokens)
    while (
        found
        and found[-1].kind == "sign"
        and (found[-1].text in OPENERS or (prose and found[-1].text == "!"))
    ):
        found.pop()
    while found and found[0].kind == "sign" and found[0].text in CLOSERS:
        found.pop(0)
    return found


def _chunks(tokens: list[Token]) -> list[tuple[int, int]]:
    """The runs of mathematics that hold a value."""
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
    return token.kind in ("number", "word") or (
        token.kind == "command" and token.text not in ("cup", "in", "cap", "setminus", "to", "ldots", "dots")
    )


def _is_math(tokens: list[Token], i: int) -> bool:
    token = tokens[i]
    if token.kind in ("number", "command", "begin", "end", "row"):
        return True
    if token.kind == "sign":
        return token.text not in _PROSE_SIGNS and not _is_dash(tokens, i)
    if token.kind not in ("word", "text") or token.text in JOINING or token.text.lower() in PROSE:
        return False
    if _follows_value(tokens, i) and (unit_named(token.text) is not None or _counts(token.text)):
        return token.text != "in" or i + 1 == len(tokens) or tokens[i + 1].text in (".", ",", "^")
    return token.kind == "word" and _is_variable(tokens, i)


def _is_variable(tokens: list[Token], i: int) -> bool:
    """Whether a run of letters is a function or variables rather than a word."""
    token, before = tokens[i], tokens[i - 1] if i else None
    after = tokens[i + 1] if i + 1 < len(tokens) else None
    if len(token.text) == 1:
        possessive = before is not None and before.text == "'"
        article = (
            token.text in _ARTICLES and after is not None and after.kind == "word" and len(after.text) > 1
        )
        return not possessive and not article
    if token.text in FUNCTIONS or token.text in CONSTANTS:
        return True
    attached = before is not None and not token.spaced and _is_math(tokens, i - 1)
    attached = attached or (after is not None and after.text in ("^", "_", "(") and not after.spaced)
    vowel = any(letter in "aeiouAEIOU" for letter in token.text)
    return pieces(token.text) is not None and len(token.text) <= 4 and (attached or not vowel)


def _counts(word: str) -> bool:
    return word.lower() in LARGE or word.lower() in ("percent", "degree", "degrees")


def _follows_value(tokens: list[Token], i: int) -> bool:
    if i == 0:
        return False
    before = tokens[i - 1]
    unit = before.kind in ("word", "text") and (unit_named(before.text) is not None or _counts(before.text))
    return (
        before.kind in ("number", "command")
        or before.text in (")", "}", "$", "/")
        or (unit and _follows_value(tokens, i - 1))
    )


def _is_dash(tokens: list[Token], i: int) -> bool:
    """Whether a minus is a dash or hyphen of prose: behind a word, with space on both sides or on none."""
    if tokens[i].text != "-" or i == 0 or i + 1 == len(tokens):
        return False
    return tokens[i].spaced == tokens[i + 1].spaced and not _is_math(tokens, i - 1)
