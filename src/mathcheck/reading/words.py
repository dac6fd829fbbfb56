"""Answers that are words or letters: text, and the options of a multiple-choice question."""

import re

from mathcheck.reading.tree import Letters, UnreadableError, Words

_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|emph|textsc|operatorname)\s{0,9}\{([^{}]*)\}"
)
_ALL_TEXT = re.compile(r"\\text(?:bf|it|rm)?\s?\{\s*[A-Za-z]{2}[^{}]*\}[.]?")
_LAYOUT = re.compile(r"\\[,;:!>\s{}]|[$~{}]|\\(?:left|right|quad|qquad)\b")
_OPTION = re.compile(r"(?<![A-Za-z\\'’])(\(?)([A-Z])([).:\]]?)(?![A-Za-z0-9'’])")
_WHOLE_OPTION = re.compile(
    r"\W*(?:(?:option|choice|answer)s?\W+)?\(?([A-Za-z])(?:[).:\]](?!\s+(?:is|or|and|but)\b)(?:\s.*)?|\W*)",
    re.IGNORECASE | re.DOTALL,
)
_NEXT_OPTION = re.compile(r"(?<![A-Za-z])\(?[A-J][).:](?:\s|$)")
_LISTED = re.compile(r"\W*[A-Z](?:\W+(?:and\W+)?[A-Z])*\W*")
_INTRODUCED = re.compile(
    r"(?:\b(?:is|be|option|choice|answer|choose|pick|select|letter|not|and|or|nor|both|either|between|than)|[:=,/])\W*$",
    re.IGNORECASE,
)
_NEGATED = re.compile(
    r"(?:\b(?:not|cannot|than|except|neither|nor|(?:any|every)thing but)|n't|n’t|instead of)\s+"
    r"(?:be\s+)?(?:(?:option|choice)\s+)?$",
    re.IGNORECASE,
)
_DENIED = re.compile(r"\W*\s(?:is|are)(?:n't|n’t|\s+(not|wrong|incorrect|false))\b", re.IGNORECASE)
_AFFIRMED = re.compile(
    r"\s+is\s+(?:right|correct|the\s+(?:(?:right|correct|best)\s+)?(?:answer|option|choice))\b", re.IGNORECASE
)
_MORE_WORDS = re.compile(r"\s+(?!(?:and|or|is|because|since|but|maybe|perhaps|possibly)\b)[a-z]")
_AROUND = " .,;:!?()`'\"\\“”‘’"
_PHRASES = dict.fromkeys(
    ("no solution", "no solutions", "no real solution", "no real solutions", "none", "empty set"),
    r"\emptyset",
) | dict.fromkeys(("all real numbers", "all reals", "any real number"), r"\Reals")


_MONTHS = "January February March April May June July August September October November December"
_DATE = re.compile(rf"(?:{'|'.join(_MONTHS.split())}) \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?")


def unwrapped(text: str) -> str:
    r"""The text without \text{...} and layout.

    >>> unwrapped(r"\textbf{(B)}\ 7 ")
    '(B) 7'
    """
    return " ".join(_LAYOUT.sub(" ", _WRAPPED.sub(r"\1", text)).split())


def words(text: str) -> Words:
    r"""The text folded: small letters, single spaces, no quotes around it; UnreadableError if it is blank.

    >>> words(r"\text{No  Solution}.").text
    'no solution'
    """
    folded = unwrapped(text.replace("*", " ")).casefold().strip(_AROUND)
    if not folded:
        raise UnreadableError("it is blank")
    return Words(folded)


def phrase(text: str) -> str | None:
    r"""The set that words such as "no solution" stand for, in LaTeX; None if they stand for none."""
    try:
        return _PHRASES.get(words(text).text)
    except UnreadableError:
        return None


def choice(text: str) -> Letters:
    """The letters chosen; raises UnreadableError if there are none.

    A whole answer may be A, (a), A. with its text, or A and C. In a sentence those capital letters
    count that stand in brackets, behind a word such as "is" or "option", or at the end, unless denied.

    >>> sorted(choice("(b)").letters), sorted(choice("It is not A, it is C.").letters)
    (['B'], ['C'])
    """
    text = unwrapped(text.replace("*", " "))
    whole = _WHOLE_OPTION.fullmatch(text)
    if whole and not _LISTED.fullmatch(text) and not _NEXT_OPTION.search(text, whole.end(1) + 1):
        return Letters(frozenset({whole.group(1).upper()}))
    letters: set[str] = set()
    for found in _OPTION.finditer(text):
        bracket, letter, closing = found.groups()
        if not bracket and not closing and letter in "AI" and _MORE_WORDS.match(text, found.end()):
            continue
        before, last = (
            text[max(0, found.start() - 30) : found.start()],
            not re.search(r"\w", text[found.end() :]),
        )
        marked = bracket or closing or last or not before.strip() or _INTRODUCED.search(before)
        marked = marked or _AFFIRMED.match(text, found.end())
        said = _DENIED.match(text, found.end())
        # What is asked may be which one is wrong: only beside others does that deny a letter.
        denied = said and (said[1] in (None, "not") or len({each[1] for each in _OPTION.findall(text)}) > 1)
        if marked and not _NEGATED.search(before) and not denied:
            letters.add(letter)
    if not letters:
        raise UnreadableError("it names no option")
    return Letters(frozenset(letters))


def is_option(text: str) -> bool:
    r"""Whether a gold is one option: B, (B), \text{B}; a single capital letter up to J.

    >>> is_option(r"\text{(B)}"), is_option("X")
    (True, False)
    """
    return re.fullmatch(r"\(?[A-J]\)?\.?", unwrapped(text)) is not None


def is_text(text: str) -> bool:
    r"""Whether a gold is words: at least two letters in a row, and no digits or signs but of a date.

    >>> is_text(r"\text{no solution}"), is_text("June 20"), is_text("2x"), is_text("x")
    (True, True, False, False)
    """
    bare = unwrapped(text)
    if _ALL_TEXT.fullmatch(text.strip()):
        return True
    if _DATE.fullmatch(bare) and not any(c in text for c in "\\^_"):
        return True
    return re.fullmatch(r"[^\W\d_]{2,}(?:[\s'’-]+[^\W\d_]+)*[.]?", bare) is not None
