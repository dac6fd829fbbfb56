"""Split Coq's text into sentences as Coq does, aware of comments and strings."""

import re
from dataclasses import dataclass

from posttrain.verifiers.fences import answer_bounds

_NEXT = re.compile(r'\(\*|"|\.+')
_BLANK = " \t\r\n"
_IN_COMMENT = re.compile(r'\(\*|\*\)|"')
_BULLET = re.compile(r"(?:-+|\++|\*+)|(?:(?:\d+|\[\s*\w+\s*\])\s*:\s*)?\{|\}")
_DECLARATION = (
    r"(?:Theorem|Lemma|Fact|Remark|Corollary|Proposition|Property|Example|Definition|Fixpoint|CoFixpoint"
    r"|Instance|Let)"
)
_PREFIX = re.compile(r"(?:#\[[^\]]*\]|Local|Global|Polymorphic|Monomorphic|Program|Time|Timeout\s+\d+)\s*")
_SELECTOR = re.compile(r"(?:\d+(?:\s*[-,]\s*\d+)*|all|par|!)\s*:\s*")
_TACTIC = re.compile(r"(?![A-Z])[\w(\[]")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One command, tactic, bullet or brace, with its place in the text."""

    text: str
    code: str
    """The text in one line; each comment is a blank and each string is empty."""
    start: int
    end: int

    @property
    def is_structure(self) -> bool:
        """Whether it is a bullet or a brace, which leaves goals as they are."""
        return _BULLET.fullmatch(self.code) is not None

    @property
    def is_proof_step(self) -> bool:
        """Whether it is a tactic, a bullet or a brace, and not a command."""
        return self.is_structure or is_tactic(self.code)


def split_sentences(text: str) -> tuple[list[Sentence], str]:
    """Return the sentences of a text, and the error at its end, or "".

    >>> found, wrong = split_sentences('intros n. (* a. "*)". b *) - exact "x. y". 2:{ auto. }')
    >>> [s.code for s in found], wrong
    (['intros n.', '-', 'exact "".', '2:{', 'auto.', '}'], '')
    >>> split_sentences("split. auto")[1]
    'the last sentence has no full stop'
    """
    parts: list[Sentence] = []
    begin: int | None = None
    """Where the sentence began; None between two."""
    code: list[str] = []
    at = 0
    while at < len(text):
        if begin is None:
            if text[at].isspace():
                at += 1
                continue
            bullet = None if text.startswith("*)", at) else _BULLET.match(text, at)
            if bullet:
                at = bullet.end()
                parts.append(Sentence(bullet.group(), "".join(bullet.group().split()), bullet.start(), at))
                continue
            if not text.startswith("(*", at):
                begin = at
        match = _NEXT.search(text, at)
        if match is None:
            code.append(text[at:])
            break
        code.append(text[at : match.start()])
        token, at = match.group(), match.end()
        if token == "(*":
            at = _end_of_comment(text, at)
            if at < 0:
                return parts, "a comment is not closed"
            code.append(" ")
        elif token == '"':
            at = text.find('"', at) + 1
            if at == 0:
                return parts, "a string is not closed"
            code.append('""')
        elif begin is not None and len(token) != 2 and (at == len(text) or text[at] in _BLANK):
            parts.append(Sentence(text[begin:at], " ".join("".join([*code, token]).split()), begin, at))
            begin, code = None, []
        else:
            code.append(token)
        if begin is None:
            code = []
    return parts, "" if begin is None else "the last sentence has no full stop"


def declares(sentence: Sentence, name: str) -> bool:
    """Return whether a sentence declares a constant of this name.

    >>> [s] = split_sentences("#[local] Lemma (* sic *) t : True.")[0]
    >>> declares(s, "t"), declares(s, "u")
    (True, False)
    """
    pattern = rf"{_DECLARATION}\s+{re.escape(name)}(?![\w'])"
    return re.match(pattern, strip_prefixes(sentence.code)) is not None


def is_tactic(code: str) -> bool:
    """Return whether a sentence is a tactic, with or without goal selector, and not a command.

    >>> is_tactic("2: apply h."), is_tactic("(auto)."), is_tactic("Abort."), is_tactic("2: Show.")
    (True, True, False, False)
    """
    return _TACTIC.match(strip_selector(code)) is not None


def strip_selector(code: str) -> str:
    """Strip the goal selector from a sentence's code.

    >>> strip_selector("all: auto."), strip_selector("2-3: Show.")
    ('auto.', 'Show.')
    """
    return _SELECTOR.sub("", code, count=1)


def strip_prefixes(code: str) -> str:
    """Strip attributes and modifiers from a sentence's code.

    >>> strip_prefixes("#[global] Time Lemma t : True.")
    'Lemma t : True.'
    """
    at = 0
    while match := _PREFIX.match(code, at):
        at = match.end()
    return code[at:]


def find_submission(response: str) -> tuple[str, int]:
    """Return the last block fenced as coq, or of any fence, or the text behind the thought; and its start.

    >>> find_submission("So:\\n```coq\\nauto.\\n```\\nthat is auto.\\n")
    ('auto.\\n', 11)
    """
    span = answer_bounds(response, "coq", "rocq")
    return response[slice(*span)], span[0]


def _end_of_comment(text: str, at: int) -> int:
    """Return the end of the comment that is open at `at`; -1 if it is not closed."""
    depth = 1
    while depth:
        match = _IN_COMMENT.search(text, at)
        if match is None:
            return -1
        at = match.end()
        if match.group() == '"':
            at = text.find('"', at) + 1
            if at == 0:
                return -1
        else:
            depth += 1 if match.group() == "(*" else -1
    return at
