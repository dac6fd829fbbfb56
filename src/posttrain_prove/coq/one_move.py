"""Parse one move of a proof in Coq: a single tactic, or a sketch of several tactics with holes.

    assert (h : 0 + n = n). { hole. } rewrite h.      a lemma without its proof, and its use

`hole.` stands for a proof, and is sent to Coq as `shelve.`, which closes a goal for now; `Unshelve.` after
the last tactic returns every shelved goal, behind the goals that are still open.
"""

import re
from dataclasses import dataclass

from posttrain.search.protocol import HOLE, Refused
from posttrain_prove.coq.screen import find_refusal
from posttrain_prove.coq.script import Sentence, find_submission, is_tactic, split_sentences, strip_selector

_HOLE = "hole."
_SHELVES = re.compile(r"\bshelve")


@dataclass(frozen=True, slots=True)
class CoqMove:
    """A move as it is sent to Coq."""

    sentences: tuple[str, ...]
    template: str = ""
    """The move as it stands in the proof, with HOLE for each part left out; "" if it is the last sentence."""
    holes: int = 0


def parse_move(move: str) -> CoqMove | Refused:
    """Parse a move that is one tactic; refuse commands and anything else that may not be sent to Coq.

    >>> parse_move("apply h3").sentences, parse_move("2: split.").sentences
    (('apply h3.',), ('2: split.',))
    >>> [parse_move(each).label for each in ("Abort.", "all: Abort.", "admit.", "auto. auto.", "- auto", "")]
    ['forbidden', 'forbidden', 'forbidden', 'form', 'form', 'form']
    >>> parse_move("Abort.").reason, parse_move("").reason
    ('it is a command', 'it is not a tactic')
    """
    text = move.strip()
    text = text if text.endswith(".") else f"{text}."
    parts, error = split_sentences(text)
    if error or len(parts) != 1 or parts[0].is_structure:
        return Refused("form", error or "a move is one tactic")
    if refused := _find_refusal(parts):
        return refused
    return CoqMove((_sentence_text(parts[0]),))


def parse_sketch(move: str) -> CoqMove | Refused:
    """Parse a sketch, or a single move. Braces must match, and bullets are refused.

    >>> sketch = parse_sketch("assert True. { hole. } exact H.")
    >>> sketch.sentences
    ('assert True.', '{', 'shelve.', '}', 'exact H.', 'Unshelve.')
    >>> sketch.template.split(HOLE)
    ['assert True.\\n{\\n', '\\n}\\nexact H.']
    >>> [parse_sketch(s).label for s in ("- pose.", "{ pose.", "} {", "2: hole.", "admit.", "pose. Qed.")]
    ['form', 'form', 'form', 'form', 'forbidden', 'forbidden']
    """
    text = find_submission(move)[0].strip()
    text = text if text.endswith((".", "}")) else f"{text}."
    parts, error = split_sentences(text)
    if error or not parts:
        return Refused("form", error or "it has no tactics")
    if len(parts) == 1 and not parts[0].code.endswith(_HOLE):
        return parse_move(move)
    if refused := _find_refusal([sentence for sentence in parts if not sentence.is_structure]):
        return refused
    depth, least = 0, 0
    for sentence in parts:
        depth += sentence.code.endswith("{") - (sentence.code == "}")
        least = min(least, depth)
    if depth or least or any(sentence.is_structure and sentence.code[-1] not in "{}" for sentence in parts):
        return Refused("form", "braces must match, and bullets are not allowed")
    if any(sentence.code.endswith(_HOLE) and sentence.code != _HOLE for sentence in parts):
        return Refused("form", "hole. takes no goal selector, and stands alone")
    if any(_SHELVES.search(sentence.code) for sentence in parts):
        return Refused("shelved", "use hole. to leave out a goal")
    holes = [sentence.code == _HOLE for sentence in parts]
    texts = [_sentence_text(sentence) for sentence in parts]
    commands = ["shelve." if hole else text for hole, text in zip(holes, texts, strict=True)]
    template = "\n".join(HOLE if hole else text for hole, text in zip(holes, texts, strict=True))
    return CoqMove((*commands, *["Unshelve."] * any(holes)), template, sum(holes))


def _find_refusal(parts: list[Sentence]) -> Refused | None:
    """Return why these sentences may not be sent to Coq; None if they may."""
    for sentence in parts:
        if not is_tactic(sentence.code):
            command = strip_selector(sentence.code)[:1].isupper()
            return (
                Refused("forbidden", "it is a command") if command else Refused("form", "it is not a tactic")
            )
    refused = find_refusal(parts)
    return Refused("forbidden", refused.why) if refused else None


def parse_proof(text: str) -> list[str]:
    return [_sentence_text(sentence) for sentence in split_sentences(text)[0]]


def _sentence_text(sentence: Sentence) -> str:
    """Return a sentence without its comments; a sentence without comments keeps its strings."""
    return sentence.code if "(*" in sentence.text else " ".join(sentence.text.split())


def remove_lemma(text: str, number: int) -> str | None:
    """Return a proof without its lemma of this index, from 0; None if there are fewer lemmas.

    >>> remove_lemma("assert (A).\\n{\\nauto.\\n}\\n{\\nexact H.\\n}", 0)
    '{\\nexact H.\\n}'
    >>> remove_lemma("auto.", 0) is None
    True
    """
    proof = parse_proof(text)
    places = [n for n, sentence in enumerate(proof) if sentence.startswith("assert ")]
    if number >= len(places):
        return None
    at = places[number]
    end = at + 1
    if proof[end : end + 1] == ["{"]:
        depth = 1
        while depth:
            end += 1
            depth += proof[end].endswith("{") - (proof[end] == "}")
        end += 1
    return "\n".join([*proof[:at], *proof[end:]])
