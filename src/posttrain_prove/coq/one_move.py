"""What one move of a proof in Coq may be: one tactic, and no command; or a sketch, of several with holes.

    assert (h : 0 + n = n). { hole. } rewrite h.      a lemma, whose proof is left out, and what comes of it

`hole.` stands for a proof, and is said to Coq as `shelve.`, which closes a goal for now; `Unshelve.` behind
the last tactic brings all of them back, behind the goals that are still open.
"""

import re
from dataclasses import dataclass

from posttrain.search.protocol import HOLE, Refused
from posttrain_prove.coq.screen import refusal
from posttrain_prove.coq.script import Sentence, is_tactic, sentences, submission, unselected

_HOLE = "hole."
_SHELVES = re.compile(r"\bshelve")


@dataclass(frozen=True, slots=True)
class Said:
    """A move as Coq is told it."""

    sentences: tuple[str, ...]
    taken: str = ""
    """As it stands in the proof, with HOLE for each that it leaves out; without it, as the last sentence."""
    holes: int = 0


def allowed(said: str) -> Said | Refused:
    """The tactic that a move is; a class and a reason if it is none, or none that may be said.

    >>> allowed("apply h3").sentences, allowed("2: split.").sentences
    (('apply h3.',), ('2: split.',))
    >>> [allowed(each).label for each in ("Abort.", "all: Abort.", "admit.", "auto. auto.", "- auto", "")]
    ['forbidden', 'forbidden', 'forbidden', 'form', 'form', 'form']
    >>> allowed("Abort.").reason, allowed("").reason
    ('it is a command', 'it is no tactic')
    """
    text = said.strip()
    text = text if text.endswith(".") else f"{text}."
    found, wrong = sentences(text)
    if wrong or len(found) != 1 or found[0].is_structure:
        return Refused("form", wrong or "a move is one tactic")
    if unfit := _unfit(found):
        return unfit
    return Said((_told(found[0]),))


def parse_sketch(said: str) -> Said | Refused:
    """The tactics that a sketch is, or a move; braces must match, and there are no bullets.

    >>> sketch = parse_sketch("assert True. { hole. } exact H.")
    >>> sketch.sentences
    ('assert True.', '{', 'shelve.', '}', 'exact H.', 'Unshelve.')
    >>> sketch.taken.split(HOLE)
    ['assert True.\\n{\\n', '\\n}\\nexact H.']
    >>> [parse_sketch(s).label for s in ("- pose.", "{ pose.", "} {", "2: hole.", "admit.", "pose. Qed.")]
    ['form', 'form', 'form', 'form', 'forbidden', 'forbidden']
    """
    text = submission(said)[0].strip()
    text = text if text.endswith((".", "}")) else f"{text}."
    found, wrong = sentences(text)
    if wrong or not found:
        return Refused("form", wrong or "it says nothing")
    if len(found) == 1 and not found[0].code.endswith(_HOLE):
        return allowed(said)
    if unfit := _unfit([each for each in found if not each.is_structure]):
        return unfit
    depth, least = 0, 0
    for each in found:
        depth += each.code.endswith("{") - (each.code == "}")
        least = min(least, depth)
    if depth or least or any(each.is_structure and each.code[-1] not in "{}" for each in found):
        return Refused("form", "braces must match, and bullets are none")
    if any(each.code.endswith(_HOLE) and each.code != _HOLE for each in found):
        return Refused("form", "hole. is for the first goal, and stands alone")
    if any(_SHELVES.search(each.code) for each in found):
        return Refused("shelved", "a goal is left out by hole.")
    holes = [each.code == _HOLE for each in found]
    told = ["shelve." if hole else _told(each) for hole, each in zip(holes, found, strict=True)]
    taken = "\n".join(HOLE if hole else _told(each) for hole, each in zip(holes, found, strict=True))
    return Said((*told, *["Unshelve."] * any(holes)), taken, sum(holes))


def _unfit(found: list[Sentence]) -> Refused | None:
    """Why these may not be said."""
    for each in found:
        if not is_tactic(each.code):
            command = unselected(each.code)[:1].isupper()
            return Refused("forbidden", "it is a command") if command else Refused("form", "it is no tactic")
    unfit = refusal(found)
    return Refused("forbidden", unfit.why) if unfit else None


def said_in(text: str) -> list[str]:
    """The sentences of a proof."""
    return [_told(each) for each in sentences(text)[0]]


def _told(sentence: Sentence) -> str:
    """A sentence without its comments; where it has none, with its strings."""
    return sentence.code if "(*" in sentence.text else " ".join(sentence.text.split())


def without_lemma(text: str, number: int) -> str | None:
    """A proof without its lemma of that number, counted from 0; None if it has not so many.

    >>> without_lemma("assert (A).\\n{\\nauto.\\n}\\n{\\nexact H.\\n}", 0)
    '{\\nexact H.\\n}'
    >>> without_lemma("auto.", 0) is None
    True
    """
    said = said_in(text)
    places = [n for n, each in enumerate(said) if each.startswith("assert ")]
    if number >= len(places):
        return None
    at = places[number]
    end = at + 1
    if said[end : end + 1] == ["{"]:
        depth = 1
        while depth:
            end += 1
            depth += said[end].endswith("{") - (said[end] == "}")
        end += 1
    return "\n".join([*said[:at], *said[end:]])
