"""Coq's text, cut as Coq cuts it: sentences, with their comments and strings known for what they are."""

import re
from dataclasses import dataclass

from posttrain.verifiers.fences import answered

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
    """One command, tactic, bullet or brace, and where it stands in the text."""

    text: str
    code: str
    """The text in one line, with every comment a blank and every string empty."""
    start: int
    end: int

    @property
    def is_structure(self) -> bool:
        """Whether it is a bullet or a brace, which does nothing to a goal."""
        return _BULLET.fullmatch(self.code) is not None

    @property
    def is_proof_step(self) -> bool:
        """Whether it is a tactic, a bullet or a brace, and no command."""
        return self.is_structure or is_tactic(self.code)


def sentences(text: str) -> tuple[list[Sentence], str]:
    """The sentences of a text, and what is wrong with its end; empty if nothing is.

    >>> found, wrong = sentences('intros n. (* a. "*)". b *) - exact "x. y". 2:{ auto. }')
    >>> [s.code for s in found], wrong
    (['intros n.', '-', 'exact "".', '2:{', 'auto.', '}'], '')
    >>> sentences("split. auto")[1]
    'the last sentence has no full stop'
    """
    found: list[Sentence] = []
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
                found.append(Sentence(bullet.group(), "".join(bullet.group().split()), bullet.start(), at))
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
            at = _after_comment(text, at)
            if at < 0:
                return found, "a comment is not closed"
            code.append(" ")
        elif token == '"':
            at = text.find('"', at) + 1
            if at == 0:
                return found, "a string is not closed"
            code.append('""')
        elif begin is not None and len(token) != 2 and (at == len(text) or text[at] in _BLANK):
            found.append(Sentence(text[begin:at], " ".join("".join([*code, token]).split()), begin, at))
            begin, code = None, []
        else:
            code.append(token)
        if begin is None:
            code = []
    return found, "" if begin is None else "the last sentence has no full stop"


def declares(sentence: Sentence, name: str) -> bool:
    """Whether a sentence declares a constant of that name.

    >>> [s] = sentences("#[local] Lemma (* sic *) t : True.")[0]
    >>> declares(s, "t"), declares(s, "u")
    (True, False)
    """
    return re.match(rf"{_DECLARATION}\s+{re.escape(name)}(?![\w'])", unprefixed(sentence.code)) is not None


def is_tactic(code: str) -> bool:
    """Whether a sentence is a tactic, for some goals or the first, and no command.

    >>> is_tactic("2: apply h."), is_tactic("(auto)."), is_tactic("Abort."), is_tactic("2: Show.")
    (True, True, False, False)
    """
    return _TACTIC.match(unselected(code)) is not None


def unselected(code: str) -> str:
    """A sentence's code without the goals that it is for.

    >>> unselected("all: auto."), unselected("2-3: Show.")
    ('auto.', 'Show.')
    """
    return _SELECTOR.sub("", code, count=1)


def unprefixed(code: str) -> str:
    """A sentence's code without its attributes and modifiers.

    >>> unprefixed("#[global] Time Lemma t : True.")
    'Lemma t : True.'
    """
    at = 0
    while match := _PREFIX.match(code, at):
        at = match.end()
    return code[at:]


def submission(response: str) -> tuple[str, int]:
    """The last complete block fenced as coq, or of all, or all behind the thought, and where it begins.

    >>> submission("So:\\n```coq\\nauto.\\n```\\nthat is auto.\\n")
    ('auto.\\n', 11)
    """
    found = answered(response, "coq", "rocq")
    return response[slice(*found)], found[0]


def _after_comment(text: str, at: int) -> int:
    """The place after the comment that is open at a place; -1 if it is not closed."""
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
