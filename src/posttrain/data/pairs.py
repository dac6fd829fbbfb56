"""Pairs of answers, one of which was preferred, in all forms of records.

| chosen and rejected | the prompt |
|---|---|
| texts | a field of its own: prompt, question, problem, instruction, conversations or messages |
| texts without such a field | the paragraph that both begin with |
| texts of Human: and Assistant: turns | the turns that both begin with |
| a message, or a list that begins with the assistant's | a field of its own |
| lists of messages | the messages that both begin with |

An answer may have several turns of the assistant, with calls of tools and their results between them.
"""

import re
from dataclasses import dataclass

from posttrain.data.fields import PAIR, SCORES_OF_PAIR, SEPARATE_PROMPTS, Fields, kind
from posttrain.data.messages import (
    Answer,
    add_system,
    as_answer,
    check_answer,
    check_prompt,
    comparison_key,
    find_prompt,
    is_transcript,
    parse_transcript,
    prompt_of_answers,
    read_conversation,
    read_messages,
)
from posttrain.types import Message

_AGREES = ("prompt", "question", "problem", "instruction")
_SHOWN = 24
_BLANK_LINE = re.compile(r"\n\s*\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt with its two answers."""

    messages: tuple[Message, ...]
    answers: tuple[Answer, Answer]
    """The chosen one, then the rejected one."""
    form: str
    """The form of the record, for a person."""


def is_pair(fields: Fields) -> bool:
    """Return whether the record has a chosen or a rejected answer."""
    return fields.first_set(*PAIR) is not None


def read_pair(fields: Fields) -> Pair:
    """Return the pair of a record.

    Raises UserError if a side is missing or empty, if the sides are equal, or if their prompts differ.
    """
    for name, other in (PAIR, PAIR[::-1]):
        if not fields.has(name):
            raise fields.missing(f"there is {fields.column(other)} and no {fields.column(name)}", name)
    preferred, rejected = (fields.as_written(name) for name in PAIR)
    if isinstance(preferred, str) and isinstance(rejected, str):
        pair = _pair_of_texts(fields)
    elif isinstance(preferred, (list, dict)) and isinstance(rejected, (list, dict)):
        pair = _pair_of_messages(fields)
    else:
        raise fields.fault(
            f"chosen is {kind(preferred)}, and rejected is {kind(rejected)}",
            "both must be texts, or both messages",
        )
    if comparison_key(pair.answers[0]) == comparison_key(pair.answers[1]):
        raise fields.fault("chosen and rejected are equal")
    messages = add_system(fields, check_prompt(fields, pair.messages))
    return Pair(messages=messages, answers=pair.answers, form=pair.form)


def read_scores(fields: Fields) -> tuple[tuple[float, float], bool]:
    """Return the scores of the two sides, (1, 0) by default, and whether the record has them.

    A margin alone is the score of the chosen side, with 0 for the other.
    """
    names = [fields.first_set(*names) for names in SCORES_OF_PAIR]
    margin = fields.number("margin") if fields.first_set("margin") else None
    if names[0] is None and names[1] is None:
        if margin is not None and margin < 0:
            raise fields.fault("margin is negative: the rejected side would be the better")
        return _check_unequal(fields, (1.0, 0.0) if margin is None else (margin, 0.0)), margin is not None
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
    return _check_unequal(fields, scores), True


def _check_unequal(fields: Fields, scores: tuple[float, float]) -> tuple[float, float]:
    if scores[0] == scores[1]:
        problem = "both sides have the same score, so neither is preferred"
        raise fields.fault(problem, "leave the pair out, or all such with bad = 'skip'")
    return scores


def _pair_of_texts(fields: Fields) -> Pair:
    preferred, rejected = (fields.text(name) for name in PAIR)
    if not (is_transcript(preferred) and is_transcript(rejected)):
        prompt = find_prompt(fields, *SEPARATE_PROMPTS)
        if prompt is not None:
            return Pair(messages=prompt, answers=(preferred, rejected), form="texts")
        if not is_transcript(preferred):
            return _pair_of_paragraphs(fields, preferred, rejected)
    conversations = [parse_transcript(fields, fields.text(name), fields.column(name)) for name in PAIR]
    return _check_prompt_field(
        fields, _pair_of_conversations(fields, conversations[0], conversations[1], "Human/Assistant turns")
    )


def _pair_of_paragraphs(fields: Fields, preferred: str, rejected: str) -> Pair:
    """Return the pair of two texts whose first paragraph is their prompt.

    Raises UserError unless they share one paragraph: of several, some may be of the answers.
    """
    common = preferred[: _first_difference(preferred, rejected)].rstrip(" \t")
    breaks = list(_BLANK_LINE.finditer(common))
    answers = (preferred[breaks[0].end() :], rejected[breaks[0].end() :]) if len(breaks) == 1 else ("", "")
    prompt = preferred[: breaks[0].start()].strip() if breaks else ""
    if not (prompt and answers[0].strip() and answers[1].strip()):
        problem = "there is no prompt, and chosen is not a text of Human: and Assistant: turns"
        problem += ", nor do both sides share exactly their first paragraph"
        raise fields.missing(problem, *SEPARATE_PROMPTS)
    message: Message = {"role": "user", "content": prompt}
    return Pair(messages=(message,), answers=answers, form="texts, the paragraph that both share as prompt")


def _pair_of_messages(fields: Fields) -> Pair:
    sides = [read_messages(fields, name) for name in PAIR]
    has_prompt = fields.template is not None or fields.first_set(*SEPARATE_PROMPTS) is not None
    begins_with_answer = [side[0]["role"] == "assistant" for side in sides]
    if not (all(begins_with_answer) and has_prompt) and max(map(len, sides)) > 1:
        return _check_prompt_field(
            fields, _pair_of_conversations(fields, sides[0], sides[1], "whole conversations")
        )
    for name, side in zip(PAIR, sides, strict=True):
        check_answer(fields, fields.column(name), side)
    answers = (as_answer(sides[0]), as_answer(sides[1]))
    return Pair(messages=prompt_of_answers(fields), answers=answers, form="messages")


def _pair_of_conversations(
    fields: Fields, preferred: tuple[Message, ...], rejected: tuple[Message, ...], form: str
) -> Pair:
    """Return the pair of two conversations; the messages that both begin with are the prompt."""
    if fields.template is not None:
        raise fields.fault("the config's template makes a prompt, and chosen brings its own")
    for name, messages in zip(PAIR, (preferred, rejected), strict=True):
        if messages[-1]["role"] != "assistant":
            raise fields.fault(
                f"{fields.column(name)} ends with the {messages[-1]['role']}, not the assistant"
            )
    start = _prompt_length(fields, preferred, rejected)
    if start == 0:
        raise fields.fault("there is no prompt before the answer")
    answers = (as_answer(preferred[start:]), as_answer(rejected[start:]))
    return Pair(messages=preferred[:start], answers=answers, form=form)


def _prompt_length(fields: Fields, preferred: tuple[Message, ...], rejected: tuple[Message, ...]) -> int:
    """Return the number of messages before the first turn of the assistant in which the two differ.

    Results of tools depend on the assistant: where they differ, the difference is the call before them.
    Raises UserError where messages of the user or the system differ, since the answers are then to different
    questions.
    """
    shorter = min(len(preferred), len(rejected))
    at = next((n for n in range(shorter) if preferred[n] != rejected[n]), shorter)
    if at == shorter:
        if len(preferred) == len(rejected):
            raise fields.fault("chosen and rejected are equal")
        names = [fields.column(name) for name in PAIR]
        part, longer = names if len(preferred) == shorter else names[::-1]
        raise fields.fault(
            f"{part} is the beginning of {longer}, so neither has a turn that is better or worse"
        )
    if {preferred[at]["role"], rejected[at]["role"]} - {"assistant", "tool"}:
        raise fields.fault(f"the prompts of the two sides differ: {_difference(preferred, rejected)}")
    while at and not preferred[at]["role"] == rejected[at]["role"] == "assistant":
        at -= 1
    return at


def _check_prompt_field(fields: Fields, pair: Pair) -> Pair:
    """Return the pair. Raises UserError if the prompt field is not in its conversation."""
    name = fields.first_set(*_AGREES)
    if name is not None:
        prompt = read_conversation(fields, name)
        users = {m["content"].strip() for m in pair.messages if m["role"] == "user"}
        last = len(prompt) == 1 and prompt[0]["content"].strip() in users
        if not last and pair.messages[-len(prompt) :] != prompt:
            raise fields.fault(f"{fields.column(name)} is not in the conversation of chosen")
    return pair


def _difference(one: tuple[Message, ...], other: tuple[Message, ...]) -> str:
    """Describe where two conversations first differ."""
    for number, (a, b) in enumerate(zip(one, other, strict=False), start=1):
        if a["role"] != b["role"]:
            return f"turn {number} is the {a['role']}'s in one, the {b['role']}'s in the other"
        x, y = a["content"], b["content"]
        if x != y:
            at = _first_difference(x, y)
            return f"turn {number} at character {at + 1}, {_excerpt(x, at)} against {_excerpt(y, at)}"
    return f"{len(one)} turns against {len(other)}"


def _first_difference(one: str, other: str) -> int:
    """Return the place of the first character in which two texts differ."""
    places = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in places if a != b), min(len(one), len(other)))


def _excerpt(text: str, at: int) -> str:
    begin = max(0, at - _SHOWN // 3)
    cut = text[begin : begin + _SHOWN]
    return repr(("…" if begin else "") + cut + ("…" if begin + _SHOWN < len(text) else ""))
