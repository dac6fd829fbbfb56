"""Load answers that were compared or scored, for preferences and reward models.

| fields | item |
|---|---|
| chosen and rejected, with a prompt or with whole conversations | a pair (posttrain.data.pairs) |
| the same with score_chosen and score_rejected, or margin | a pair with scores |
| a prompt, and a list responses, completions, answers or generations | a ranking |
| a prompt, one completion, response, output or answer; label, score, reward or rating | a single answer |

Scores of a ranking are a list scores or ratings (higher is better) or ranks (lower is better), or part of the
entries if those are objects: response, completion, answer, text or content, with overall_score, score, rating
or rank. Of several names the first counts. The prompt is the field prompt, question, problem, instruction,
conversations or messages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.calls import read_tools
from posttrain.data.fields import ANSWER_LISTS, ANSWERS, LABELS, RANKS, SCORES, Fields, kind
from posttrain.data.gather import Data, Form, Log, gather, ignore_line
from posttrain.data.messages import (
    MESSAGE_KEYS,
    Answer,
    add_system,
    answer_messages,
    as_answer,
    check_answer,
    check_prompt,
    comparison_key,
    find_prompt,
    parse_messages,
    prompt_of_answers,
)
from posttrain.data.pairs import is_pair, read_pair, read_scores
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
    """The prompt; ends with a message of the user or of a tool."""
    answers: tuple[Answer, ...]
    """In the order of the record; of a pair the chosen one first. An answer is a text, or else messages."""
    scores: tuple[float, ...]
    """One for each answer, higher is better; (1, 0) for a pair without scores."""
    scored: bool = False
    """Whether the data has the scores, so that their differences have a meaning."""
    source: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools, for the chat template."""


def load_rankings(data: Data, *, least: int = 2, say: Log = ignore_line) -> list[Ranking]:
    """Return the pairs and rankings of the records, each of `least` answers or more.

    Ranks become scores: the worst rank is 0, and each better rank is 1 more. `say` gets one line with the
    forms of the records, and one with what was skipped. Raises UserError at the first faulty record: with
    equal or empty answers, different prompts, or scores that are all equal or not finite.
    """

    def one(fields: Fields) -> tuple[Form, list[Ranking]]:
        fields.calls = True
        if is_pair(fields):
            form, ranking = _ranking_of_pair(fields)
        elif fields.first_existing(*ANSWER_LISTS) is not None:
            form, ranking = _ranking_of_list(fields)
        else:
            expected = f"neither chosen and rejected nor one of {', '.join(ANSWER_LISTS)}"
            raise fields.missing(f"there is {expected}", "chosen", "rejected", *ANSWER_LISTS)
        if len(ranking.answers) < least:
            raise fields.fault(f"the answers to compare are too few: {len(ranking.answers)} of {least}")
        return form, [ranking]

    return gather(data, one, say)


def load_labelled(data: Data, *, say: Log = ignore_line) -> list[Ranking]:
    """Return answers that were judged alone: rankings of one answer, the score of which is its label.

    `label` is true or false, or 1 or 0; `score`, `reward` and `rating` are any number. A pair becomes two,
    "ID/chosen" with 1 and "ID/rejected" with 0; a ranking with scores becomes one per answer: "ID/1", "ID/2"
    and so on. `say` and errors are those of load_rankings.
    """
    return gather(data, _labelled_answers, say)


def _ranking_of_pair(fields: Fields) -> tuple[Form, Ranking]:
    pair = read_pair(fields)
    scores, scored = read_scores(fields)
    ranking = _ranking(fields, pair.messages, pair.answers, scores, scored=scored)
    return Form("pair", f"{fields.form} ({pair.form})"), ranking


def _ranking_of_list(fields: Fields) -> tuple[Form, Ranking]:
    """Return the ranking of a list of answers, with scores in its entries or in a list of their own."""
    name = fields.first_existing(*ANSWER_LISTS) or ANSWER_LISTS[0]
    items, column = fields.items(name), fields.column(name)
    places = [f"entry {number} of {column}" for number in range(1, len(items) + 1)]
    answers = [_answer(fields, item, place) for item, place in zip(items, places, strict=True)]
    score_names = [n for n in (*SCORES, *RANKS) if fields.first_set(n)]
    if score_names:
        inside, values = "", fields.items(score_names[0])
        if len(values) != len(items):
            raise fields.fault(
                f"the numbers of answers and of {score_names[0]} differ: {len(items)} and {len(values)}"
            )
        numbers = [
            fields.checked_number(value, f"entry {at} of {fields.column(score_names[0])}")
            for at, value in enumerate(values, start=1)
        ]
        ranked = score_names[0] in RANKS
    else:
        key = next((k for k in (*_SCORE_OF, *_RANK_OF) if isinstance(items[0], dict) and k in items[0]), None)
        if key is None:
            raise fields.missing(f"there are no scores for {column}", *SCORES, *RANKS)
        inside, ranked = f" (each with {key})", key in _RANK_OF
        numbers = [
            _score_of_entry(fields, item, key, place) for item, place in zip(items, places, strict=True)
        ]
    prompt = _prompt(fields)
    _check_distinct(fields, answers, places)
    if len(numbers) > 1 and len(set(numbers)) == 1:
        raise fields.fault(f"all {'ranks' if ranked else 'scores'} are equal, so no answer is preferred")
    scores = [max(numbers) - number for number in numbers] if ranked else numbers
    ranking = _ranking(fields, prompt, answers, scores, scored=not ranked)
    return Form("ranking", fields.form + inside), ranking


def _answer(fields: Fields, item: Any, place: str) -> Answer:
    """Return an answer: a text, an object with one, or messages that begin and end with the assistant."""
    if isinstance(item, list):
        turns = parse_messages(fields, item, place)
        check_answer(fields, place, turns)
        return as_answer(turns)
    if not isinstance(item, Mapping):
        return fields.checked_text(item, place)
    if {"role", "content"} <= item.keys():
        return _answer(fields, [{key: item[key] for key in MESSAGE_KEYS if key in item}], place)
    key = next((key for key in _TEXT_OF if key in item), None)
    if key is None:
        raise fields.fault(f"{place} has none of {', '.join(_TEXT_OF)}")
    return fields.checked_text(item[key], f"{key} of {place}")


def _score_of_entry(fields: Fields, item: Any, key: str, place: str) -> float:
    if not isinstance(item, dict) or key not in item:
        raise fields.fault(f"{place} has no {key}")
    return fields.checked_number(item[key], f"{key} of {place}")


def _check_distinct(fields: Fields, answers: list[Answer], places: list[str]) -> None:
    earlier: list[tuple[Any, ...]] = []
    for answer, place in zip(map(comparison_key, answers), places, strict=True):
        if answer in earlier:
            raise fields.fault(f"{places[earlier.index(answer)]} and {place} are equal")
        earlier.append(answer)


def _prompt(fields: Fields) -> tuple[Message, ...]:
    """Return the prompt of answers in fields of their own."""
    return add_system(fields, check_prompt(fields, prompt_of_answers(fields)))


def _labelled_answers(fields: Fields) -> tuple[Form, list[Ranking]]:
    fields.calls = True
    if is_pair(fields):
        pair = read_pair(fields)
        sides = zip(("chosen", "rejected"), pair.answers, (1.0, 0.0), strict=True)
        rankings = [_ranking(fields, pair.messages, [a], [score], end=f"/{side}") for side, a, score in sides]
        return Form("pair", f"{fields.form} ({pair.form})"), rankings
    if fields.first_existing(*ANSWERS) is None and fields.first_existing(*ANSWER_LISTS) is not None:
        form, ranking = _ranking_of_list(fields)
        if not ranking.scored:
            raise fields.fault("ranks compare answers and label none", "load them as rankings")
        answers = enumerate(zip(ranking.answers, ranking.scores, strict=True), start=1)
        return form, [
            _ranking(fields, ranking.messages, [text], [score], scored=True, end=f"/{number}")
            for number, (text, score) in answers
        ]
    messages, answer = _prompt_and_answer(fields)
    worth = fields.find(*LABELS)
    if worth is None:
        raise fields.missing(f"there is none of {', '.join(LABELS)}", *LABELS)
    score = _label(fields) if worth == "label" else fields.number(worth)
    rankings = [_ranking(fields, messages, [answer], [score], scored=worth != "label")]
    return Form("labelled answer", fields.form), rankings


def _prompt_and_answer(fields: Fields) -> tuple[tuple[Message, ...], Answer]:
    """Return the prompt and the answer of a record with one answer, or with messages that end with it."""
    name = fields.first_existing(*ANSWERS)
    if name is not None:
        value = fields.objects(name)
        if isinstance(value, (list, dict)):
            turns = [value] if isinstance(value, dict) else value
            return _prompt(fields), _answer(fields, turns, fields.column(name))
        return _prompt(fields), fields.text(name)
    conversation = find_prompt(fields, "messages", "conversations")
    if conversation is None or conversation[-1]["role"] != "assistant" or fields.template is not None:
        raise fields.missing(f"there is none of {', '.join(ANSWERS)}", *ANSWERS)
    if len(conversation) == 1:
        raise fields.fault("there is no prompt before the answer")
    return add_system(fields, check_prompt(fields, conversation[:-1])), as_answer(conversation[-1:])


def _label(fields: Fields) -> float:
    value = fields.raw("label")
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        written = repr(value) if isinstance(value, (int, float)) else kind(value)
        raise fields.fault(f"{fields.column('label')} is neither true nor false: {written}")
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
        tools=read_tools(
            fields, (*messages, *(turn for answer in answers for turn in answer_messages(answer)))
        ),
    )
