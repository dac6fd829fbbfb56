"""What is asked over the wire: a body of the OpenAI chat API as a question.

Fields that would change what is drawn and that no engine here has are refused by name, so that nobody
believes that they were heeded; those that say something about the client are passed over.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.envs.tools.call import Tool, from_json
from posttrain.types import Sampling, UserError

MOST_ANSWERS = 128
MOST_STOPS = 16
ROLES = ("system", "developer", "user", "assistant", "tool")
"""A template writes a role between its marks, where any other word could make one."""
_PASSED_OVER = {"user", "metadata", "store", "service_tier", "parallel_tool_calls"}
_PASSED_OVER |= {"safety_identifier", "prompt_cache_key", "verbosity"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty", "top_logprobs", "min_tokens", "priority"), (0,)
    ),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), (1,)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), ({},)),
    **dict.fromkeys(("functions", "stop_token_ids", "bad_words", "documents"), ([],)),
    **dict.fromkeys(("echo", "ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("add_special_tokens", "continue_final_message", "return_token_ids"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    "spaces_between_special_tokens": (True,),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Fields that are refused, and the values that ask for nothing; null asks for nothing too."""
_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "name"}


class RefusedError(Exception):
    """A request that is not served: the status, and what is wrong with which field."""

    def __init__(
        self, what: str, *, field: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(what)
        self.status, self.field, self.code = status, field, code

    def body(self) -> dict[str, Any]:
        """As the API says it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code}}


def unshown(error: UserError) -> RefusedError:
    """The refusal of messages that the template does not show."""
    return RefusedError(str(error), field=error.key if error.key.startswith("messages[") else "messages")


def room_behind(prompt: Sequence[int], context: int) -> int:
    """Tokens that an answer may have; RefusedError if none."""
    if (room := context - len(prompt)) > 0:
        return room
    what = f"the prompt has {len(prompt)} tokens, and the model reads {context}"
    raise RefusedError(what, field="messages", code="context_length_exceeded")


@dataclass(frozen=True)
class ToolCall:
    """A tool that an assistant calls in a message."""

    name: str
    arguments: str
    """JSON with its keys in order, or what was given in its place."""
    id: str = field(default="", compare=False)


@dataclass(frozen=True)
class ChatMessage:
    """A message of a request, as far as it counts: two are equal that say the same."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    answers: str = field(default="", compare=False)
    """The id of the call that a tool's message is the result of."""
    name: str = field(default="", compare=False)
    others: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only some templates show, as `reasoning_content`."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One request, checked."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...] = ()
    """What the model may call."""
    sampling: Callable[[int], Sampling]
    """How to draw, given the room that the prompt leaves in tokens."""
    stop: tuple[str, ...] = ()
    """What ends an answer and is not told."""
    count: int
    seed: int | None
    stream: bool
    usage: bool
    """Whether a stream ends with what it cost."""
    logprobs: bool
    model: Any = None
    """Who is asked, as the client says."""


def question(body: bytes) -> Question:
    """The request in these bytes; RefusedError for what is none, and for what is not served.

    >>> question(b'{"messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 4}').count
    1
    """
    given = _object(body)
    fields = _Fields(given)
    limit = fields.whole("max_completion_tokens", None, least=1) or fields.whole("max_tokens", None, least=1)
    stops = given.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(s, str) and s for s in stops)
    ):
        raise RefusedError(f"stop is a text, or a list of at most {MOST_STOPS} texts", field="stop")
    top_p, top_k = fields.number("top_p", 1.0), fields.whole("top_k", 0, least=-1) or 0
    if top_p == 0:  # of the most likely tokens the fewest: one
        top_p, top_k = 1.0, 1
    try:
        drawn = Sampling(
            temperature=fields.number("temperature", 1.0),
            top_p=top_p,
            min_p=fields.number("min_p", 0.0),
            top_k=max(top_k, 0),  # clients say -1 for all
            stop=tuple(stops),
        )
    except ValueError as error:
        raise RefusedError(str(error), field=str(error).split()[0]) from None
    options = given.get("stream_options") or {}
    known = _PASSED_OVER | {"messages", "max_tokens", "max_completion_tokens", "stop", "temperature"}
    known |= {"top_p", "min_p", "top_k", "n", "seed", "stream", "stream_options", "logprobs"}
    known |= {"model", "tools", "tool_choice"}
    count = fields.whole("n", 1, least=1, most=MOST_ANSWERS) or 1
    neutral = {**_NEUTRAL, "best_of": (count,)}
    for name in sorted(given.keys() - known):
        allowed = neutral.get(name, ())
        if given[name] is not None and given[name] not in allowed:
            other = f", other than as {json.dumps(allowed[0])}" if allowed else ""
            what = f"{name} is not served here{other}"
            raise RefusedError(what, field=name, code="unsupported_parameter")
    if given.get("tool_choice") not in (None, "auto", "none"):
        raise RefusedError("tool_choice is auto or none", field="tool_choice", code="unsupported_parameter")
    return Question(
        messages=_messages(given.get("messages")),
        tools=() if given.get("tool_choice") == "none" else _tools(given.get("tools") or []),
        sampling=lambda room: replace(drawn, max_new_tokens=min(limit or room, room)),
        stop=drawn.stop,
        count=count,
        seed=fields.whole("seed", None),
        stream=fields.flag("stream"),
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=fields.flag("logprobs"),
        model=given.get("model"),
    )


class _Fields:
    """Fields of an object, each of its type or refused; null is as if it were not there."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given

    def flag(self, name: str) -> bool:
        found = self.given.get(name)
        if found is not None and not isinstance(found, bool):
            raise RefusedError(f"{name} is true or false", field=name)
        return bool(found)

    def number(self, name: str, default: float) -> float:
        found = self.given.get(name)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise RefusedError(f"{name} is a number", field=name)
        if abs(found) > sys.float_info.max:
            raise RefusedError(f"{name} is too large", field=name)
        return float(found)

    def whole(
        self, name: str, default: int | None, *, least: int = -(2**63), most: int = 2**63 - 1
    ) -> int | None:
        found = self.given.get(name)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            between = f"from {least} to {most}" if most < 2**63 - 1 else f"of at least {least}"
            raise RefusedError(f"{name} is a whole number {between}", field=name)
        return found


def _object(body: bytes) -> dict[str, Any]:
    try:
        # The standard's numbers only: NaN is no JSON.
        given = json.loads(body, parse_constant=lambda name: float(f"no{name}"))
    except (ValueError, RecursionError):
        raise RefusedError("the body is no JSON") from None
    if not isinstance(given, dict):
        raise RefusedError("the body is no JSON object")
    return given


def _messages(given: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(given, list) or not given:
        raise RefusedError("messages is a list of at least one message", field="messages")
    found = tuple(_message(each, f"messages[{n}]") for n, each in enumerate(given))
    if found[-1].role == "assistant":
        raise RefusedError("the last message is the assistant's own", field="messages")
    return found


def _message(given: Any, where: str) -> ChatMessage:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise RefusedError(f"a message has a role, one of {', '.join(ROLES)}", field=where)
    calls = given.get("tool_calls") or []
    if calls and given["role"] != "assistant":
        raise RefusedError("an assistant calls tools", field=f"{where}.tool_calls")
    content = given.get("content")
    if isinstance(content, list):  # parts, of which this serves texts
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise RefusedError("a part of a message is text", field=f"{where}.content")
        content = "".join(map(str, parts))
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise RefusedError("the content of a message is text", field=f"{where}.content")
    role = "system" if given["role"] == "developer" else given["role"]
    texts = {key: given.get(key) or "" for key in ("tool_call_id", "name")}
    if not isinstance(calls, list) or not all(isinstance(text, str) for text in texts.values()):
        raise RefusedError("tool_calls is a list, and tool_call_id and name are texts", field=where)
    return ChatMessage(
        role=role,
        # What was drawn may end in blanks, which many clients take away.
        content=content.strip() if role == "assistant" else content,
        calls=tuple(_call(each, f"{where}.tool_calls[{n}]") for n, each in enumerate(calls)),
        answers=texts["tool_call_id"],
        name=texts["name"],
        others={key: given[key] for key in given.keys() - _MESSAGE_FIELDS if given[key]},
    )


def _call(given: Any, where: str) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedError("a call has a function with a name", field=where)
    arguments, number = function.get("arguments", {}), given.get("id", "")
    return ToolCall(function["name"], canonical(arguments), number if isinstance(number, str) else "")


def canonical(arguments: Any) -> str:
    """Arguments as JSON that is equal where they are; a text that is no JSON as it stands.

    >>> canonical('{"b": 1, "a": 2}'), canonical({"a": 2, "b": 1}), canonical('{"x":NaN}')
    ('{"a": 2, "b": 1}', '{"a": 2, "b": 1}', '{"x":NaN}')
    """
    try:
        given = from_json(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(given, ensure_ascii=False, sort_keys=True, allow_nan=False)
    except (ValueError, RecursionError):
        return str(arguments)


def _tools(given: Any) -> tuple[Tool, ...]:
    if not isinstance(given, list):
        raise RefusedError("tools is a list", field="tools")
    return tuple(_tool(each, f"tools[{n}]") for n, each in enumerate(given))


def _tool(given: Any, where: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RefusedError("a tool has a function with a name", field=where)
    description, parameters = function.get("description") or "", function.get("parameters") or {}
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
    fits = isinstance(properties, dict) and all(isinstance(each, dict) for each in properties.values())
    if not isinstance(description, str) or not fits:
        raise RefusedError("a tool's description is text, and its parameters a schema", field=where)
    return Tool(function["name"], description, {"type": "object", "properties": {}} | parameters)
