"""Two answers of which one was preferred, in each of the forms that such records have.

| chosen and rejected | the prompt |
|---|---|
| texts | a field of its own: prompt, question, problem, instruction, conversations or messages |
| texts of Human: and Assistant: turns | the turns that both begin with |
| a message, or a list that begins with the assistant's | a field of its own |
| lists of messages | the messages that both begin with |

An answer may go over several turns of the assistant, with calls of tools and their results between them.
"""

from dataclasses import dataclass

from posttrain.data.fields import BESIDE, PAIR, SCORES_OF_PAIR, Fields, kind
from posttrain.data.messages import (
    Answer,
    answer_of,
    answerable,
    asked,
    check_answer,
    compared,
    conversation,
    is_transcript,
    spoken,
    transcript,
    with_system,
)
from posttrain.types import Message

_AGREES = ("prompt", "question", "problem", "instruction")
_SHOWN = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt with its two answers."""

    messages: tuple[Message, ...]
    answers: tuple[Answer, Answer]
    """Chosen, rejected."""
    form: str
    """How the record writes it, for a person."""


def is_pair(fields: Fields) -> bool:
    """Whether the record has one of the two sides."""
    return fields.given(*PAIR) is not None


def paired(fields: Fields) -> Pair:
    """The pair of a record; UserError if a side is missing or empty, they are equal, or prompts differ."""
    for name, other in (PAIR, PAIR[::-1]):
        if not fields.has(name):
            raise fields.missing(f"there is {fields.column(other)} and no {fields.column(name)}", name)
    chosen, rejected = (fields.spelt(name) for name in PAIR)
    if isinstance(chosen, str) and isinstance(rejected, str):
        pair = _texts(fields)
    elif isinstance(chosen, (list, dict)) and isinstance(rejected, (list, dict)):
        pair = _spoken(fields)
    else:
        raise fields.fault(
            f"chosen is {kind(chosen)}, and rejected is {kind(rejected)}",
            "both must be texts, or both messages",
        )
    if compared(pair.answers[0]) == compared(pair.answers[1]):
        raise fields.fault("chosen and rejected are equal")
    messages = with_system(fields, answerable(fields, pair.messages))
    return Pair(messages=messages, answers=pair.answers, form=pair.form)


def preference(fields: Fields) -> tuple[tuple[float, float], bool]:
    """The scores of the two sides, and whether the record gave them; (1, 0) if it did not.

    A margin alone is the score of the chosen side, and the other's is 0.
    """
    names = [fields.given(*names) for names in SCORES_OF_PAIR]
    margin = fields.number("margin") if fields.given("margin") else None
    if names[0] is None and names[1] is None:
        if margin is not None and margin < 0:
            raise fields.fault("margin is negative: the rejected side would be the better")
        return _unequal(fields, (1.0, 0.0) if margin is None else (margin, 0.0)), margin is not None
    if names[0] is None or names[1] is None:
        there, gone = (0, 1) if names[1] is None else (1, 0)
        raise fields.missing(
            f"there is {names[there]} and no {SCORES_OF_PAIR[gone][0]}", *SCORES_OF_PAIR[gone]
        )
    scores = (fields.number(names[0]), fields.number(names[1]))
    if scores[0] < scores[1]:
        raise fields.fault(f"{names[0]} is less than {names[1]}: {scores[0]:g} and {scores[1]:g}")
    if margin is not None and abs(margin - (scores[0] - scores[1])) > 1e-6 * max(1.0, abs(margin)):
        raise fields.fault(
            f"margin is not the difference of the scores: {margin:g}, {scores[0]:g}, {scores[1]:g}"
        )
    return _unequal(fields, scores), True


def _unequal(fields: Fields, scores: tuple[float, float]) -> tuple[float, float]:
    if scores[0] == scores[1]:
        what = "both sides have the same score, so neither is preferred"
        raise fields.fault(what, "leave the pair out, or all such with bad = 'skip'")
    return scores


def _texts(fields: Fields) -> Pair:
    chosen, rejected = (fields.text(name) for name in PAIR)
    if not (is_transcript(chosen) and is_transcript(rejected)):
        prompt = asked(fields, *BESIDE)
        if prompt is not None:
            return Pair(messages=prompt, answers=(chosen, rejected), form="texts")
        if not is_transcript(chosen):
            raise fields.missing(
                "there is no prompt, and chosen is not a text of Human: and Assistant: turns", *BESIDE
            )
    whole = [transcript(fields, fields.text(name), fields.column(name)) for name in PAIR]
    return _agreeing(fields, _shared(fields, whole[0], whole[1], "Human/Assistant turns"))


def _spoken(fields: Fields) -> Pair:
    sides = [spoken(fields, name) for name in PAIR]
    beside = fields.template is not None or fields.given(*BESIDE) is not None
    begun = [side[0]["role"] == "assistant" for side in sides]
    if not (all(begun) and beside) and max(map(len, sides)) > 1:
        return _agreeing(fields, _shared(fields, sides[0], sides[1], "whole conversations"))
    for name, side in zip(PAIR, sides, strict=True):
        check_answer(fields, fields.column(name), side)
    prompt = asked(fields, *BESIDE)
    if prompt is None:
        raise fields.missing("there is no prompt", *BESIDE)
    return Pair(messages=prompt, answers=(answer_of(sides[0]), answer_of(sides[1])), form="messages")


def _shared(fields: Fields, chosen: tuple[Message, ...], rejected: tuple[Message, ...], form: str) -> Pair:
    """Return the pair of two conversations; their prompt is what both begin with."""
    if fields.template is not None:
        raise fields.fault("the config's template makes a prompt, and chosen brings its own")
    for name, messages in zip(PAIR, (chosen, rejected), strict=True):
        if messages[-1]["role"] != "assistant":
            raise fields.fault(
                f"{fields.column(name)} ends with the {messages[-1]['role']}, not the assistant"
            )
    start = _parting(fields, chosen, rejected)
    if start == 0:
        raise fields.fault("there is no prompt before the answer")
    answers = (answer_of(chosen[start:]), answer_of(rejected[start:]))
    return Pair(messages=chosen[:start], answers=answers, form=form)


def _parting(fields: Fields, chosen: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    """Return the number of messages before the first turn of the assistant in which the two differ.

    Results of tools are the assistant's doing: where they differ, it is the call before them. UserError
    where the user or the system says something else, as the answers are then to different questions.
    """
    shorter = min(len(chosen), len(rejected))
    at = next((n for n in range(shorter) if chosen[n] != rejected[n]), shorter)
    if at == shorter:
        if len(chosen) == len(rejected):
            raise fields.fault("chosen and rejected are equal")
        names = [fields.column(name) for name in PAIR]
        part, longer = names if len(chosen) == shorter else names[::-1]
        raise fields.fault(
            f"{part} is the beginning of {longer}, so no turn of it is the worse or the better"
        )
    if {chosen[at]["role"], rejected[at]["role"]} - {"assistant", "tool"}:
        raise fields.fault(f"the prompts of the two sides differ: {_difference(chosen, rejected)}")
    while at and not chosen[at]["role"] == rejected[at]["role"] == "assistant":
        at -= 1
    return at


def _agreeing(fields: Fields, pair: Pair) -> Pair:
    """The pair, whose conversation must contain the prompt that the record gives beside it."""
    name = fields.given(*_AGREES)
    if name is not None:
        beside = conversation(fields, name)
        users = {m["content"].strip() for m in pair.messages if m["role"] == "user"}
        last = len(beside) == 1 and beside[0]["content"].strip() in users
        if not last and pair.messages[-len(beside) :] != beside:
            raise fields.fault(f"{fields.column(name)} is not in the conversation of chosen")
    return pair


def _difference(one: tuple[Message, ...], other: tuple[Message, ...]) -> str:
    """Where two conversations first differ, in a few words."""
    for number, (a, b) in enumerate(zip(one, other, strict=False), start=1):
        if a["role"] != b["role"]:
            return f"turn {number} is the {a['role']}'s in one, the {b['role']}'s in the other"
        x, y = a["content"], b["content"]
        if x != y:
            at = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
            return f"turn {number} at character {at + 1}, {_excerpt(x, at)} against {_excerpt(y, at)}"
    return f"{len(one)} turns against {len(other)}"


def _excerpt(text: str, at: int) -> str:
    begin = max(0, at - _SHOWN // 3)
    cut = text[begin : begin + _SHOWN]
    return repr(("…" if begin else "") + cut + ("…" if begin + _SHOWN < len(text) else ""))
