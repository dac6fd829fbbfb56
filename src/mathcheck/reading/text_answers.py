"""Read answers that are words or letters: text, and the options of multiple-choice questions."""

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


def unwrap(text: str) -> str:
    r"""Return the text without \text{...} and layout.

    >>> unwrap(r"\textbf{(B)}\ 7 ")
    '(B) 7'
    """
    return " ".join(_LAYOUT.sub(" ", _WRAPPED.sub(r"\1", text)).split())


def read_text(text: str) -> Words:
    r"""Return the text in small letters and single spaces, without quotes. Raises UnreadableError.

    >>> read_text(r"\text{No  Solution}.").text
    'no solution'
    """
    folded = unwrap(text.replace("*", " ")).casefold().strip(_AROUND)
    if not folded:
        raise UnreadableError("it is blank")
    return Words(folded)


def read_phrase(text: str) -> str | None:
    r"""Return the set, in LaTeX, that words such as "no solution" mean; None for other words."""
    try:
        return _PHRASES.get(read_text(text).text)
    except UnreadableError:
        return None


def read_choice(text: str) -> Letters:
    """Return the letters that the answer chooses. Raises UnreadableError if there are none.

    A whole answer may be A, (a), A. with its text, or A and C. In a sentence those capital letters count
    that are in brackets, after a word such as "is" or "option", or at the end, unless they are denied.

    >>> sorted(read_choice("(b)").letters), sorted(read_choice("It is not A, it is C.").letters)
    (['B'], ['C'])
    """
    text = unwrap(text.replace("*", " "))
    option = _WHOLE_OPTION.fullmatch(text)
    if option and not _LISTED.fullmatch(text) and not _NEXT_OPTION.search(text, option.end(1) + 1):
        return Letters(frozenset({option.group(1).upper()}))
    letters: set[str] = set()
    for match in _OPTION.finditer(text):
        bracket, letter, closing = match.groups()
        if not bracket and not closing and letter in "AI" and _MORE_WORDS.match(text, match.end()):
            continue
        before, last = (
            text[max(0, match.start() - 30) : match.start()],
            not re.search(r"\w", text[match.end() :]),
        )
        is_chosen = bracket or closing or last or not before.strip() or _INTRODUCED.search(before)
        is_chosen = is_chosen or _AFFIRMED.match(text, match.end())
        denial = _DENIED.match(text, match.end())
        # The question may be which option is wrong: "A is wrong" denies A only next to other options.
        is_denied = denial and (
            denial[1] in (None, "not") or len({option_[1] for option_ in _OPTION.findall(text)}) > 1
        )
        if is_chosen and not _NEGATED.search(before) and not is_denied:
            letters.add(letter)
    if not letters:
        raise UnreadableError("it names no option")
    return Letters(frozenset(letters))


def is_option(text: str) -> bool:
    r"""Return whether a gold is one option: B, (B), \text{B}; a single capital letter up to J.

    >>> is_option(r"\text{(B)}"), is_option("X")
    (True, False)
    """
    return re.fullmatch(r"\(?[A-J]\)?\.?", unwrap(text)) is not None


def is_text(text: str) -> bool:
    r"""Return whether a gold is words: letters in a row, and no digits or signs except in a date.

    >>> is_text(r"\text{no solution}"), is_text("June 20"), is_text("2x"), is_text("x")
    (True, True, False, False)
    """
    bare = unwrap(text)
    if _ALL_TEXT.fullmatch(text.strip()):
        return True
    if _DATE.fullmatch(bare) and not any(c in text for c in "\\^_"):
        return True
    return re.fullmatch(r"[^\W\d_]{2,}(?:[\s'’-]+[^\W\d_]+)*[.]?", bare) is not None
