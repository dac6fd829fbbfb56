"""Read conversations in the forms that records have: lists of messages, and transcripts in one text."""

import re
from collections.abc import Mapping
from typing import Any

from posttrain.base.name_hints import did_you_mean
from posttrain.data.calls import NOTHING, Calls
from posttrain.data.fields import SEPARATE_PROMPTS, SYSTEMS, Fields, kind
from posttrain.data.prompt_template import fill_template
from posttrain.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
Answer = str | tuple[Message, ...]
"""A text, or the assistant's turns with messages of tools and users between them."""
_WEIGHTS = ("weight", "train", "training")
"""The keys of OpenAI and Axolotl that mark messages as not trained."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The keys of DeepSeek and vLLM, of OpenRouter, and of gpt-oss and Ollama for what precedes an answer."""
MESSAGE_KEYS = ("role", "content", "tool_calls", *_THOUGHTS)
"""The keys of a message that an assistant wrote."""
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


def find_prompt(fields: Fields, *names: str) -> tuple[Message, ...] | None:
    """Return the conversation of the template, or of the first of these fields; None without any."""
    if fields.template is not None:
        return ({"role": "user", "content": fill_template(fields.template, fields.record)},)
    name = fields.find(*names)
    return None if name is None else read_conversation(fields, name)


def prompt_of_answers(fields: Fields) -> tuple[Message, ...]:
    """Return the prompt of answers in fields of their own. Raises UserError without one."""
    if (prompt := find_prompt(fields, *SEPARATE_PROMPTS)) is None:
        raise fields.missing("there is no prompt", *SEPARATE_PROMPTS)
    return prompt


def read_conversation(fields: Fields, name: str) -> tuple[Message, ...]:
    """Return a field as messages: a list of messages as it stands, a text as a message of the user.

    A text that begins with Human: and ends with an open Assistant: is a transcript. `input` is appended to
    `instruction` after a blank line.
    """
    column = fields.column(name)
    value = fields.record.fields[column]
    if isinstance(value, dict) and "messages" in value:
        return parse_messages(fields, fields.objects(name)["messages"], f"messages of {column}")
    if name in ("messages", "conversations") or isinstance(fields.record.fields[column], list):
        role_key = "from" if name == "conversations" else "role"
        return parse_messages(fields, fields.objects(name), column, role_key)
    text = fields.text(name)
    if is_transcript(text) and _OPEN_END.search(text):
        return parse_transcript(fields, _OPEN_END.sub("", text), column)
    if name == "instruction" and fields.has("input"):
        extra = fields.as_written("input")
        if extra is not None and not isinstance(extra, str):
            raise fields.fault(f"input is {kind(extra)}, not text")
        text = f"{text}\n\n{extra}" if extra and extra.strip() else text
    return ({"role": "user", "content": text},)


def add_system(fields: Fields, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the conversation behind the system message of the config or of a field, if there is one."""
    present = messages[0]["content"] if messages[0]["role"] == "system" else None
    if fields.system is not None:
        if present is not None:
            raise fields.fault(
                "the conversation has a system message, and the config gives another",
                "leave system out of the config",
            )
        return ({"role": "system", "content": fields.system}, *messages)
    name = fields.first_set(*SYSTEMS) if fields.template is None else None
    text = fields.record.fields[fields.column(name)] if name else None
    if name is None or not isinstance(text, str) or not text.strip():
        return messages
    fields.raw(name)
    if present is None:
        return ({"role": "system", "content": text}, *messages)
    if present.strip() != text.strip():
        raise fields.fault(f"the conversation has a system message, and {fields.column(name)} gives another")
    return messages


def check_prompt(fields: Fields, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the prompt. Raises UserError if its last message is neither of a user nor of a tool."""
    end = messages[-1]["role"]
    if end not in ("user", "tool"):
        raise fields.fault(f"the prompt ends with the {end}, which leaves nothing to answer")
    return messages


def read_messages(fields: Fields, name: str) -> tuple[Message, ...]:
    """Return the messages of a field: a single message, or a list."""
    value = fields.objects(name)
    return parse_messages(fields, [value] if isinstance(value, dict) else value, fields.column(name))


def parse_messages(fields: Fields, turns: Any, field: str, role_key: str = "role") -> tuple[Message, ...]:
    """Return the messages of a list of turns, each of which has a role and a text.

    role_key: "role" (the text is `content`) or "from" (the text is `value`); the other is taken if the first
    turn has that one alone.
    """
    if not isinstance(turns, list):
        raise fields.fault(f"{field} is {kind(turns)}, not a list of messages")
    if not turns:
        raise fields.fault(f"{field} is empty")
    other_key = "role" if role_key == "from" else "from"
    if isinstance(turns[0], dict) and role_key not in turns[0] and other_key in turns[0]:
        role_key = other_key
    text_key = "value" if role_key == "from" else "content"
    messages: list[Message] = []
    calls = Calls(fields)
    for number, turn in enumerate(turns, start=1):
        place = f"message {number} of {field}"
        if not isinstance(turn, dict):
            raise fields.fault(f"{place} is {kind(turn)}, not an object")
        if fields.calls and turn.get("tool_calls"):
            turn = {**turn, text_key: turn.get(text_key) or ""}
        for key in (role_key, text_key):
            if key not in turn:
                raise fields.fault(f"{place} has no {key!r}", did_you_mean(key, turn))
        text, thought = _join_parts(fields, turn[text_key], place)
        for key, value in ((role_key, turn[role_key]), (text_key, text)):
            if not isinstance(value, str):
                raise fields.fault(f"{key} of {place} is {kind(value)}, not text")
        role = _role_of(fields, turn[role_key], place, role_key)
        more = calls.read_extra(turn, role, place) if fields.calls else {}
        more |= _reasoning(fields, turn, thought, place) if role == "assistant" else {}
        has_content = bool(text.strip() or more)
        weight = _weight(fields, turn, role, place)
        more |= weight if fields.calls else {}
        read_keys = (role_key, text_key, *more, *_WEIGHTS, *(_THOUGHTS if role == "assistant" else ()))
        extra = [key for key, value in turn.items() if key not in read_keys and value not in _NOTHING]
        if extra:
            raise fields.fault(f"{place} has {extra[0]!r}, which is not understood")
        if role == "system" and number > 1:
            raise fields.fault(f"{place} is a system message, which must come first")
        if has_content:
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
        problem = f"{place} is to be trained, and is the {role}'s"
        raise fields.fault(problem, f"leave {name} out: only what the assistant says is trained")
    return {"weight": 0} if role == "assistant" and not value else {}


def _reasoning(fields: Fields, turn: Mapping[str, Any], thought: str, place: str) -> dict[str, str]:
    """Return {"reasoning_content": ...} from any of its keys, or from parts of the content; else nothing."""
    values = {name: turn[name] for name in _THOUGHTS if turn.get(name) not in _NOTHING}
    values |= {"the content": thought} if thought else {}
    for name, value in values.items():
        if not isinstance(value, str):
            raise fields.fault(f"{name} of {place} is {kind(value)}, not text")
    if len(set(values.values())) > 1:
        problem = f"{place} has different reasoning in {' and in '.join(values)}"
        raise fields.fault(problem, "keep one of them")
    value = next(iter(values.values()), "")
    return {"reasoning_content": value} if value.strip() else {}


def as_answer(turns: tuple[Message, ...]) -> Answer:
    """Return the text of a single plain message, or else the turns."""
    return turns[0]["content"] if len(turns) == 1 and turns[0].keys() == {"role", "content"} else turns


def answer_messages(answer: Answer) -> tuple[Message, ...]:
    """Return an answer as messages that begin with the assistant's."""
    return ({"role": "assistant", "content": answer},) if isinstance(answer, str) else answer


def comparison_key(answer: Answer) -> tuple[Any, ...]:
    """Return a key that equal answers share, without the white space around their texts."""
    return tuple({**turn, "content": turn["content"].strip()} for turn in answer_messages(answer))


def check_answer(fields: Fields, place: str, turns: tuple[Message, ...]) -> None:
    """Raise UserError unless the first and the last turn are of the assistant."""
    for verb, turn in (("begins", turns[0]), ("ends", turns[-1])):
        if turn["role"] != "assistant":
            raise fields.fault(f"{place} {verb} with the {turn['role']}, not the assistant")


def _join_parts(fields: Fields, content: Any, place: str) -> tuple[Any, str]:
    """Return the text of content in parts, {"type": "text", "text": ...}, and that of its thinking parts.

    Any other content is returned unchanged.
    """
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content, ""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in content:
        name = part.get("type")
        if name not in texts or not isinstance(part.get(name), str):
            raise fields.fault(f"{place} has a part of type {name!r}, and only text is understood")
        texts[name].append(part[name])
    return "".join(texts["text"]), "".join(texts["thinking"])


def _role_of(fields: Fields, name: str, place: str, role_key: str) -> str:
    # Newer APIs call a system message a developer's message, also when a policy is served.
    if name == "developer":
        fields.notes.add("messages of the role developer are read as system messages")
    roles = _SPEAKERS if role_key == "from" else {role: _SPEAKERS[role] for role in ROLES}
    if name not in roles:
        hint = did_you_mean(name, roles) or f"it must be one of {', '.join(roles)}"
        raise fields.fault(f"{role_key} of {place} is {name!r}", hint)
    return roles[name]


def is_transcript(text: str) -> bool:
    """Return whether a text begins with "Human:".

    >>> is_transcript("\\n\\nHuman: Hello\\n\\nAssistant: Hi"), is_transcript("Is Human: a word?")
    (True, False)
    """
    return text.lstrip().startswith("Human:")


def parse_transcript(fields: Fields, text: str, field: str) -> tuple[Message, ...]:
    """Return the turns of a text of Human: and Assistant: paragraphs, without white space around them.

    Raises UserError if it begins otherwise, if a turn is empty, or if one side speaks twice in a row.
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
