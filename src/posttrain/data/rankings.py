"""Answers that were compared or scored, for preferences and reward models.

| fields | what they become |
|---|---|
| chosen and rejected, with a prompt or with whole conversations | a pair (posttrain.data.pairs) |
| the same with score_chosen and score_rejected, or margin | a pair with given scores |
| a prompt, and a list responses, completions, answers or generations | a ranking |
| a prompt, one completion, response, output or answer; label, score, reward or rating | an answer alone |

Scores of a ranking are a list scores or ratings (higher is better) or ranks (lower is better), or stand
in objects that are the list's entries: response, completion, answer, text or content, with overall_score,
score, rating or rank. Of several names the first that is there counts. The prompt is the field prompt,
question, problem, instruction, conversations or messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.calls import tools_of
from posttrain.data.fields import LABELLED, RANKED, RANKS, SCORES, WORTH, Fields, kind
from posttrain.data.gather import Data, Form, Say, gather, silent
from posttrain.data.messages import (
    Answer,
    answer_of,
    answerable,
    asked,
    asked_beside,
    check_answer,
    compared,
    said,
    turns_of,
    with_system,
)
from posttrain.data.pairs import is_pair, paired, preference
from posttrain.types import Message

_TEXT_OF = ("response", "completion", "answer", "text", "content")
_SCORE_OF = ("overall_score", "score", "rating")
_RANK_OF = ("rank",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """A prompt with answers that were compared, or with one answer that was judged alone.

    >>> pair = Ranking(id="7", messages=({"role": "user", "content": "2 + 3?"},), answers=("5", "6"),
    ...                scores=(1.0, 0.0))
    >>> pair.scored
    False
    """

    id: str
    messages: tuple[Message, ...]
    """The prompt; ends with the user or a tool."""
    answers: tuple[Answer, ...]
    """In the order of the record; of a pair the chosen one first. What is no single text is its messages."""
    scores: tuple[float, ...]
    """One for each answer, higher is better; (1, 0) of a pair to which the data gives none."""
    scored: bool = False
    """Whether the data gave the scores, so that their differences mean something."""
    source: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of what can be called, as chat templates are given them."""


def load_rankings(data: Data, *, least: int = 2, say: Say = silent) -> list[Ranking]:
    """The pairs and rankings of the records, each of `least` answers or more.

    Ranks become scores: the worst rank is 0, and each rank better is 1 more. `say` is told in one line
    which forms were recognised, and what was skipped in another. UserError at the first record that is
    none: equal or empty answers, another prompt on each side, scores that are all equal or not finite.
    """

    def one(fields: Fields) -> tuple[Form, list[Ranking]]:
        fields.calls = True
        if is_pair(fields):
            form, ranking = _pair(fields)
        elif fields.first(*RANKED) is not None:
            form, ranking = _several(fields)
        else:
            expected = f"neither chosen and rejected nor one of {', '.join(RANKED)}"
            raise fields.missing(f"there is {expected}", "chosen", "rejected", *RANKED)
        if len(ranking.answers) < least:
            raise fields.fault(f"the answers to compare are too few: {len(ranking.answers)} of {least}")
        return form, [ranking]

    return gather(data, one, say)


def load_labelled(data: Data, *, say: Say = silent) -> list[Ranking]:
    """Answers that were judged alone: rankings of one answer, whose score is its label.

    `label` is true or false, or 1 or 0; `score`, `reward` and `rating` are any number. A pair becomes two,
    "ID/chosen" with 1 and "ID/rejected" with 0; of a ranking with given scores each answer becomes one,
    "ID/1", "ID/2" and so on. `say` and errors are those of load_rankings.
    """
    return gather(data, _labelled, say)


def _pair(fields: Fields) -> tuple[Form, Ranking]:
    pair = paired(fields)
    scores, scored = preference(fields)
    ranking = _ranking(fields, pair.messages, pair.answers, scores, scored=scored)
    return Form("pair", f"{fields.form} ({pair.form})"), ranking


def _several(fields: Fields) -> tuple[Form, Ranking]:
    """The ranking of a list of answers, whose scores are beside them or in a list of their own."""
    name = fields.first(*RANKED) or RANKED[0]
    items, column = fields.items(name), fields.column(name)
    places = [f"entry {number} of {column}" for number in range(1, len(items) + 1)]
    answers = [_answer(fields, item, place) for item, place in zip(items, places, strict=True)]
    given = [n for n in (*SCORES, *RANKS) if fields.given(n)]
    if given:
        inside, values = "", fields.items(given[0])
        if len(values) != len(items):
            raise fields.fault(
                f"the numbers of answers and of {given[0]} differ: {len(items)} and {len(values)}"
            )
        numbers = [
            fields.checked_number(value, f"entry {at} of {fields.column(given[0])}")
            for at, value in enumerate(values, start=1)
        ]
        ranked = given[0] in RANKS
    else:
        key = next((k for k in (*_SCORE_OF, *_RANK_OF) if isinstance(items[0], dict) and k in items[0]), None)
        if key is None:
            raise fields.missing(f"there are no scores for {column}", *SCORES, *RANKS)
        inside, ranked = f" (each with {key})", key in _RANK_OF
        numbers = [_inside(fields, item, key, place) for item, place in zip(items, places, strict=True)]
    prompt = _prompt(fields)
    _distinct(fields, answers, places)
    if len(numbers) > 1 and len(set(numbers)) == 1:
        raise fields.fault(f"all {'ranks' if ranked else 'scores'} are equal, so no answer is preferred")
    scores = [max(numbers) - number for number in numbers] if ranked else numbers
    ranking = _ranking(fields, prompt, answers, scores, scored=not ranked)
    return Form("ranking", fields.form + inside), ranking


def _answer(fields: Fields, item: Any, place: str) -> Answer:
    """An answer: a text, an object with one, or a list of messages that the assistant begins and ends."""
    if isinstance(item, list):
        turns = said(fields, item, place, "role")
        check_answer(fields, place, turns)
        return answer_of(turns)
    if not isinstance(item, Mapping):
        return fields.checked_text(item, place)
    key = next((key for key in _TEXT_OF if key in item), None)
    if key is None:
        raise fields.fault(f"{place} has none of {', '.join(_TEXT_OF)}")
    return fields.checked_text(item[key], f"{key} of {place}")


def _inside(fields: Fields, item: Any, key: str, place: str) -> float:
    if not isinstance(item, dict) or key not in item:
        raise fields.fault(f"{place} has no {key}")
    return fields.checked_number(item[key], f"{key} of {place}")


def _distinct(fields: Fields, answers: list[Answer], places: list[str]) -> None:
    seen: list[tuple[Any, ...]] = []
    for answer, place in zip(map(compared, answers), places, strict=True):
        if answer in seen:
            raise fields.fault(f"{places[seen.index(answer)]} and {place} are equal")
        seen.append(answer)


def _prompt(fields: Fields) -> tuple[Message, ...]:
    """The prompt of answers that stand beside it."""
    return with_system(fields, answerable(fields, asked_beside(fields)))


def _labelled(fields: Fields) -> tuple[Form, list[Ranking]]:
    fields.calls = True
    if is_pair(fields):
        pair = paired(fields)
        sides = zip(("chosen", "rejected"), pair.answers, (1.0, 0.0), strict=True)
        found = [_ranking(fields, pair.messages, [a], [score], end=f"/{side}") for side, a, score in sides]
        return Form("pair", f"{fields.form} ({pair.form})"), found
    if fields.first(*LABELLED) is None and fields.first(*RANKED) is not None:
        form, ranking = _several(fields)
        if not ranking.scored:
            raise fields.fault("ranks compare answers and label none", "load them as rankings")
        answers = enumerate(zip(ranking.answers, ranking.scores, strict=True), start=1)
        return form, [
            _ranking(fields, ranking.messages, [text], [score], scored=True, end=f"/{number}")
            for number, (text, score) in answers
        ]
    messages, answer = _judged(fields)
    worth = fields.given(*WORTH) or fields.first(*WORTH)
    if worth is None:
        raise fields.missing(f"there is none of {', '.join(WORTH)}", *WORTH)
    score = _label(fields) if worth == "label" else fields.number(worth)
    found = [_ranking(fields, messages, [answer], [score], scored=worth != "label")]
    return Form("labelled answer", fields.form), found


def _judged(fields: Fields) -> tuple[tuple[Message, ...], Answer]:
    """The prompt and the answer of a record with one answer, or of messages that end with it."""
    name = fields.first(*LABELLED)
    if name is not None:
        value = fields.objects(name)
        if isinstance(value, (list, dict)):
            turns = [value] if isinstance(value, dict) else value
            return _prompt(fields), _answer(fields, turns, fields.column(name))
        return _prompt(fields), fields.text(name)
    whole = asked(fields, "messages", "conversations")
    if whole is None or whole[-1]["role"] != "assistant" or fields.template is not None:
        raise fields.missing(f"there is none of {', '.join(LABELLED)}", *LABELLED)
    if len(whole) == 1:
        raise fields.fault("there is no prompt before the answer")
    return with_system(fields, answerable(fields, whole[:-1])), answer_of(whole[-1:])


def _label(fields: Fields) -> float:
    value = fields.raw("label")
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        said = repr(value) if isinstance(value, (int, float)) else kind(value)
        raise fields.fault(f"{fields.column('label')} is neither true nor false: {said}")
    return float(value)


def _ranking(
    fields: Fields,
    messages: tuple[Message, ...],
    answers: Sequence[Answer],
    scores: Sequence[float],
    *,
    scored: bool = False,
    end: str = "",
) -> Ranking:
    return Ranking(
        id=fields.id() + end,
        messages=messages,
        answers=tuple(answers),
        scores=tuple(scores),
        scored=scored,
        source=fields.source,
        tools=tools_of(fields, (*messages, *(turn for answer in answers for turn in turns_of(answer)))),
    )
