"""Conversations in the ways that records write them: lists of messages, and transcripts in one text."""

import re
from collections.abc import Mapping
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.calls import NOTHING, Calls
from posttrain.data.fields import BESIDE, SYSTEM, Fields, kind
from posttrain.data.prompt_template import filled
from posttrain.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
Answer = str | tuple[Message, ...]
"""A text, or the assistant's turns with what tools and users said between them."""
_WEIGHTS = ("weight", "train", "training")
"""What OpenAI and Axolotl call the mark of messages that are not trained."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
}
_TURN = re.compile(r"(?:\A\s*|\r?\n\r?\n)(Human|Assistant):")
_OPEN_END = re.compile(r"\r?\n\r?\nAssistant:\s*\Z")


def asked(fields: Fields, *names: str) -> tuple[Message, ...] | None:
    """The conversation that a template makes, or else the first of these fields; None if it has none."""
    if fields.template is not None:
        return ({"role": "user", "content": filled(fields.template, fields.record)},)
    name = fields.given(*names) or fields.first(*names)
    return None if name is None else conversation(fields, name)


def asked_beside(fields: Fields) -> tuple[Message, ...]:
    """The prompt of answers that stand beside it; UserError if there is none."""
    if (found := asked(fields, *BESIDE)) is None:
        raise fields.missing("there is no prompt", *BESIDE)
    return found


def conversation(fields: Fields, name: str) -> tuple[Message, ...]:
    """A field as messages: a list of them as it stands, a text as what the user says.

    A text that begins with Human: and ends with an open Assistant: is a transcript. To `instruction`
    belongs `input`, after a blank line.
    """
    column = fields.column(name)
    value = fields.record.fields[column]
    if isinstance(value, dict) and "messages" in value:
        return said(fields, fields.objects(name)["messages"], f"messages of {column}", "role")
    if name in ("messages", "conversations") or isinstance(fields.record.fields[column], list):
        return said(fields, fields.objects(name), column, "from" if name == "conversations" else "role")
    text = fields.text(name)
    if is_transcript(text) and _OPEN_END.search(text):
        return transcript(fields, _OPEN_END.sub("", text), column)
    if name == "instruction" and fields.has("input"):
        extra = fields.spelt("input")
        if extra is not None and not isinstance(extra, str):
            raise fields.fault(f"input is {kind(extra)}, not text")
        text = f"{text}\n\n{extra}" if extra and extra.strip() else text
    return ({"role": "user", "content": text},)


def with_system(fields: Fields, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The conversation behind the system message of the config, or of a field beside it, if there is one."""
    own = messages[0]["content"] if messages[0]["role"] == "system" else None
    if fields.system is not None:
        if own is not None:
            raise fields.fault(
                "the conversation has a system message, and the config gives another",
                "leave system out of the config",
            )
        return ({"role": "system", "content": fields.system}, *messages)
    name = fields.given(*SYSTEM) if fields.template is None else None
    text = fields.record.fields[fields.column(name)] if name else None
    if name is None or not isinstance(text, str) or not text.strip():
        return messages
    fields.raw(name)
    if own is None:
        return ({"role": "system", "content": text}, *messages)
    if own.strip() != text.strip():
        raise fields.fault(f"the conversation has a system message, and {fields.column(name)} gives another")
    return messages


def answerable(fields: Fields, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The prompt, if somebody other than the assistant has the last word in it; UserError if not."""
    end = messages[-1]["role"]
    if end not in ("user", "tool"):
        raise fields.fault(f"the prompt ends with the {end}, which leaves nothing to answer")
    return messages


def spoken(fields: Fields, name: str) -> tuple[Message, ...]:
    """A field that holds a message, or a list of them."""
    value = fields.objects(name)
    return said(fields, [value] if isinstance(value, dict) else value, fields.column(name), "role")


def said(fields: Fields, turns: Any, field: str, who: str) -> tuple[Message, ...]:
    """The messages of a list of turns, each of which says who spoke and what.

    `who` is role (beside content) or from (beside value); the other is taken if the first turn has that
    one alone.
    """
    if not isinstance(turns, list):
        raise fields.fault(f"{field} is {kind(turns)}, not a list of messages")
    if not turns:
        raise fields.fault(f"{field} is empty")
    other = "role" if who == "from" else "from"
    if isinstance(turns[0], dict) and who not in turns[0] and other in turns[0]:
        who = other
    what = "value" if who == "from" else "content"
    messages: list[Message] = []
    calls = Calls(fields)
    for number, turn in enumerate(turns, start=1):
        place = f"message {number} of {field}"
        if not isinstance(turn, dict):
            raise fields.fault(f"{place} is {kind(turn)}, not an object")
        if fields.calls and turn.get("tool_calls"):
            turn = {**turn, what: turn.get(what) or ""}
        for key in (who, what):
            if key not in turn:
                raise fields.fault(f"{place} has no {key!r}", did_you_mean(key, turn))
        text = _joined(fields, turn[what], place)
        for key, value in ((who, turn[who]), (what, text)):
            if not isinstance(value, str):
                raise fields.fault(f"{key} of {place} is {kind(value)}, not text")
        role = _role(fields, turn[who], place, who)
        more = calls.of(turn, role, place) if fields.calls else {}
        if role == "assistant" and isinstance(turn.get("reasoning_content"), str):
            more |= {"reasoning_content": turn["reasoning_content"]} if turn["reasoning_content"] else {}
        says = bool(text.strip() or more)
        weight = _weight(fields, turn, role, place)
        more |= weight if fields.calls else {}
        known = (who, what, *more, *_WEIGHTS)
        extra = [key for key, value in turn.items() if key not in known and value not in _NOTHING]
        if extra:
            raise fields.fault(f"{place} has {extra[0]!r}, which is not understood")
        if role == "system" and number > 1:
            raise fields.fault(f"{place} is a system message, which must come first")
        if says:
            text = NOTHING if role == "tool" and not text.strip() else text
            messages.append({"role": role, "content": text, **more})
        elif role != "system" or len(turns) == 1:
            raise fields.fault(f"{place} is empty")
    return tuple(messages)


def _weight(fields: Fields, turn: Mapping[str, Any], role: str, place: str) -> dict[str, int]:
    """Return {"weight": 0} for an assistant's message that is marked as not trained, else nothing."""
    name = next((name for name in _WEIGHTS if turn.get(name) is not None), None)
    if name is None:
        return {}
    value = turn[name]
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        fix = "only 0 and 1 are understood: a message is trained or it is not"
        raise fields.fault(f"{name} of {place} is {value!r:.40}", fix)
    if role != "assistant" and value and name != "weight":
        what = f"{place} is to be trained, and is the {role}'s"
        raise fields.fault(what, f"leave {name} out: only what the assistant says is trained")
    return {"weight": 0} if role == "assistant" and not value else {}


def answer_of(turns: tuple[Message, ...]) -> Answer:
    """Return the text of one plain message, or else the turns."""
    return turns[0]["content"] if len(turns) == 1 and turns[0].keys() == {"role", "content"} else turns


def turns_of(answer: Answer) -> tuple[Message, ...]:
    """Return an answer as messages that begin with the assistant's."""
    return ({"role": "assistant", "content": answer},) if isinstance(answer, str) else answer


def compared(answer: Answer) -> tuple[Any, ...]:
    """Return what two answers that say the same share, however much white space is around it."""
    return tuple({**turn, "content": turn["content"].strip()} for turn in turns_of(answer))


def check_answer(fields: Fields, place: str, turns: tuple[Message, ...]) -> None:
    """Raise UserError unless the assistant has the first and the last word."""
    for verb, turn in (("begins", turns[0]), ("ends", turns[-1])):
        if turn["role"] != "assistant":
            raise fields.fault(f"{place} {verb} with the {turn['role']}, not the assistant")


def _joined(fields: Fields, content: Any, place: str) -> Any:
    """The text of content in parts, {"type": "text", "text": ...}; anything else as it stands."""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise fields.fault(
                f"{place} has a part of type {part.get('type')!r}, and only text is understood"
            )
    return "".join(part["text"] for part in content)


def _role(fields: Fields, name: str, place: str, who: str) -> str:
    # A developer's message is what newer APIs call a system message, also when a policy is served.
    known = _SPEAKERS if who == "from" else {role: _SPEAKERS[role] for role in ROLES}
    if name not in known:
        hint = did_you_mean(name, known) or f"it must be one of {', '.join(known)}"
        raise fields.fault(f"{who} of {place} is {name!r}", hint)
    return known[name]


def is_transcript(text: str) -> bool:
    """Whether a text begins as Human: ... does.

    >>> is_transcript("\\n\\nHuman: Hello\\n\\nAssistant: Hi"), is_transcript("Is Human: a word?")
    (True, False)
    """
    return text.lstrip().startswith("Human:")


def transcript(fields: Fields, text: str, field: str) -> tuple[Message, ...]:
    """The turns of a text of Human: and Assistant: paragraphs, each without the white space around it.

    UserError if it begins otherwise, if a turn is empty, or if somebody speaks twice in a row.
    """
    before, *parts = _TURN.split(text)
    if before or not parts or parts[0] != "Human":
        raise fields.fault(f"{field} does not begin with Human:")
    roles = ["user" if speaker == "Human" else "assistant" for speaker in parts[::2]]
    turns = [turn.strip() for turn in parts[1::2]]
    for number, turn in enumerate(turns, start=1):
        if not turn:
            raise fields.fault(f"turn {number} of {field}, by the {roles[number - 1]}, is empty")
        if roles[number - 2 : number - 1] == [roles[number - 1]]:
            raise fields.fault(f"in {field} the {roles[number - 1]} speaks twice in a row: turn {number}")
    return tuple({"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True))
