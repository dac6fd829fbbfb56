"""Parse the body of a request of the OpenAI chat API.

Fields that would change the sampling and that no engine supports are refused by name, so that no client
believes they had an effect. Fields about the client itself are ignored.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from starlette.exceptions import HTTPException

from posttrain.envs.tools.call import Tool, from_json
from posttrain.types import Sampling, UserError

MOST_ANSWERS = 128
MOST_STOPS = 16
MOST_ALTERNATIVES = 20
_PASSED_OVER = {"user", "metadata", "store", "service_tier", "parallel_tool_calls"}
_PASSED_OVER |= {"safety_identifier", "prompt_cache_key", "verbosity"}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "priority"), (0,)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "typical_p"), (1,)),
    "logit_bias": ({},),
    **dict.fromkeys(("functions", "stop_token_ids", "bad_words", "documents"), ([],)),
    **dict.fromkeys(("echo", "ignore_eos", "use_beam_search", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("add_special_tokens", "continue_final_message", "return_token_ids"), (False,)),
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True,)),
    "spaces_between_special_tokens": (True,),
    **dict.fromkeys(("function_call", "tool_choice"), ("auto", "none")),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
}
"""Fields that are refused, with the values that have no effect; null has none either."""
_NEUTRAL_FOR_TOKENS = {
    **_NEUTRAL,
    **dict.fromkeys(("n", "best_of", "top_p"), (1,)),
    "top_k": (0, -1),
    "min_p": (0,),
    "stop": ([], ""),
    "logprobs": (False,),
}
"""The same for a prompt of tokens, after which one answer is drawn from the whole distribution."""


class RefusedError(HTTPException):
    """A request that is not served: the status, the problem and its field."""

    def __init__(
        self, problem: str, *, field: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(status, problem)
        self.field, self.code = field, code

    def body(self) -> dict[str, Any]:
        """Return the error in the form of the API."""
        kind = "invalid_request_error" if self.status_code < 500 else "server_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.field, "code": self.code}}


def template_refusal(error: UserError) -> RefusedError:
    """Return the refusal of messages that the chat template does not show."""
    return RefusedError(str(error), field=error.key if error.key.startswith("messages[") else "messages")


def answer_room(prompt: Sequence[int], context: int, field: str = "messages", least: int = 1) -> int:
    """Return the tokens left for an answer. Raise RefusedError at `field` if they are fewer than `least`."""
    if (room := context - len(prompt)) >= least:
        return room
    problem = f"the prompt has {len(prompt)} tokens, and the model reads {context}"
    raise RefusedError(problem, field=field, code="context_length_exceeded")


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a message of the assistant."""

    name: str
    arguments: str
    """JSON with sorted keys, or the text that stood in its place."""
    id: str = field(default="", compare=False)


@dataclass(frozen=True)
class ChatMessage:
    """A message of a request. Fields that do not change the prompt are not compared."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    answers: str = field(default="", compare=False)
    """Id of the call that a tool's message answers."""
    name: str = field(default="", compare=False)
    others: Mapping[str, Any] = field(default_factory=dict)
    """Fields that only some templates show, as `reasoning_content`."""


def _join(content: Any, info: ValidationInfo) -> Any:
    """Join the parts of a message, each of which must be text; a message with tool calls needs none."""
    if content is None and info.data.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("a part of a message is text")
    return "".join(map(str, parts))


def _check_caller(calls: list[Any], info: ValidationInfo) -> list[Any]:
    if calls and info.data.get("role") != "assistant":
        raise ValueError("only the assistant calls tools")
    return calls


def _list_stops(stops: Any) -> tuple[str, ...]:
    """Return the strings that end an answer, from one string or a list."""
    stops = [stops] if isinstance(stops, str) and stops else stops or []
    texts = isinstance(stops, list) and all(stop and isinstance(stop, str) for stop in stops)
    if not texts or len(stops) > MOST_STOPS:
        raise ValueError(f"expected a text, or a list of at most {MOST_STOPS} texts")
    return tuple(stops)


def refuse_unserved(others: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise RefusedError for a field that would have an effect elsewhere; neutral: values that have none."""
    for name in sorted(others.keys() - _PASSED_OVER):
        allowed = neutral.get(name, ())
        if others[name] not in allowed:
            except_for = f", other than as {json.dumps(allowed[0])}" if allowed else ""
            problem = f"{name} is not served here{except_for}"
            raise RefusedError(problem, field=name, code="unsupported_parameter")


class _Body(BaseModel):
    """An object of a request, whose types are not converted; null counts as absent."""

    model_config = ConfigDict(strict=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return {k: v for k, v in body.items() if v is not None} if isinstance(body, dict) else body


_Parsed = TypeVar("_Parsed", bound=_Body)


class _CalledFunction(_Body):
    name: str
    arguments: Any = Field(default_factory=dict)


class _Call(_Body):
    function: _CalledFunction
    id: Any = ""

    def read(self) -> ToolCall:
        name = self.id if isinstance(self.id, str) else ""
        return ToolCall(self.function.name, canonical_json(self.function.arguments), name)


class _Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Checked, since the template writes it between its marks, where another word could form a mark."""
    tool_calls: Annotated[list[_Call], AfterValidator(_check_caller)] = []
    content: Annotated[str, BeforeValidator(_join)] = Field(default=None, validate_default=True)
    tool_call_id: str = ""
    name: str = ""

    def read(self) -> ChatMessage:
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            # An answer may end in blanks, which many clients strip.
            content=self.content.strip() if self.role == "assistant" else self.content,
            calls=tuple(call.read() for call in self.tool_calls),
            answers=self.tool_call_id,
            name=self.name,
            others={key: value for key, value in (self.model_extra or {}).items() if value},
        )


class _Schema(_Body):
    properties: dict[str, dict[str, Any]] = {}


class _Function(_Body):
    name: str = Field(min_length=1)
    description: str = ""
    parameters: _Schema = _Schema()


class _Tool(_Body):
    function: _Function


class Question(_Body):
    """A parsed request for answers."""

    turns: list[_Message] = Field(alias="messages", min_length=1)
    functions: list[_Tool] = Field(default=[], alias="tools")
    tool_choice: Any = "auto"
    count: int = Field(default=1, alias="n", ge=1, le=MOST_ANSWERS)
    stop: Annotated[tuple[str, ...], BeforeValidator(_list_stops)] = ()
    """Strings that end an answer; the answer does not contain them."""
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, ge=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**63)
    """-1 keeps all tokens too."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: Any = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    template_args: dict[str, Any] = Field(default={}, alias="chat_template_kwargs")
    """Variables of the chat template, for this request."""
    model: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.turns[-1].role == "assistant":
            raise RefusedError("the last message is the assistant's own", field="messages")
        if self.top_logprobs and not self.logprobs:
            raise RefusedError("top_logprobs needs logprobs = true", field="top_logprobs")
        others = (self.model_extra or {}) | {"tool_choice": self.tool_choice}
        refuse_unserved(others, {**_NEUTRAL, "best_of": (self.count,)})
        return self

    @cached_property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages of the conversation so far."""
        return tuple(turn.read() for turn in self.turns)

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call."""
        offered = () if self.tool_choice == "none" else [tool.function for tool in self.functions]
        schemas = [{"type": "object", **function.parameters.model_dump()} for function in offered]
        return tuple(Tool(f.name, f.description, schema) for f, schema in zip(offered, schemas, strict=True))

    @property
    def usage(self) -> bool:
        """Return True if a stream ends with the usage."""
        return isinstance(self.stream_options, dict) and self.stream_options.get("include_usage") is True

    def sampling(self, room: int) -> Sampling:
        """Return how to draw, if the prompt leaves `room` tokens."""
        limit = self.max_completion_tokens or self.max_tokens or room
        # A top_p of 0 keeps the fewest of the most likely tokens: one.
        top_p, top_k = (self.top_p, max(self.top_k, 0)) if self.top_p else (1.0, 1)
        sampling = Sampling(temperature=self.temperature, top_p=top_p, top_k=top_k, min_p=self.min_p)
        return replace(sampling, stop=self.stop, max_new_tokens=min(limit, room))


class TokenPrompt(_Body):
    """A parsed request of /v1/completions, with a prompt of tokens."""

    tokens: list[Annotated[int, Field(ge=0)]] = Field(alias="prompt", min_length=1)
    """Token ids; text is tokenized by /tokenize."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)
    """Number of likeliest tokens to return for each token of the prompt, as in vLLM; None returns nothing."""
    max_tokens: int = Field(default=16, ge=0)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    model: Any = None
    stream: Literal[False] = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_unserved(self.model_extra or {}, _NEUTRAL_FOR_TOKENS)
        return self


class TextToTokenize(_Body):
    """A parsed request of /tokenize; what spells a special token in the text is plain text too."""

    text: str = Field(alias="prompt")
    model: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_unserved(self.model_extra or {}, _NEUTRAL)
        return self


class Feedback(_Body):
    """What a reader thinks of an answer, or which of two is the better one."""

    prompt: list[_Message] = Field(min_length=1)
    completion: str = ""
    label: bool | None = None
    model: str = ""
    chosen: str = ""
    rejected: str = ""
    chosen_model: str = ""
    rejected_model: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        roles = [message.role for message in self.prompt]
        if roles[-1] != "user" or {"system", "developer"} & {*roles[1:]}:
            raise ValueError("the prompt begins with the system's message, if any, and ends with the user's")
        answers = (self.chosen, self.rejected) if self.label is None else (self.completion,)
        if not all(text.strip() for text in (*answers, *(message.content for message in self.prompt))):
            raise ValueError("a message or an answer is empty")
        if self.label is None and self.chosen.strip() == self.rejected.strip():
            raise ValueError("the answers are equal")
        return self

    def record(self) -> dict[str, Any]:
        """Return the line of a dataset: prompt, completion and label, or prompt, chosen and rejected."""
        messages = [message.read() for message in self.prompt]
        record: dict[str, Any] = {"prompt": [{"role": m.role, "content": m.content} for m in messages]}
        if self.label is None:
            models = {"chosen_model": self.chosen_model, "rejected_model": self.rejected_model}
            return record | {"chosen": self.chosen, "rejected": self.rejected, **models}
        return record | {"completion": self.completion, "label": self.label, "model": self.model}


def parse_feedback(body: bytes) -> Feedback:
    """Return the feedback in these bytes. Raise RefusedError if it could not be trained on."""
    return _parse(body, Feedback)


def parse_question(body: bytes) -> Question:
    """Return the request in these bytes. Raise RefusedError if it is malformed, or not served.

    >>> parse_question(b'{"messages": [{"role": "user", "content": "2 + 2?"}], "max_tokens": 4}').count
    1
    """
    return _parse(body, Question)


def parse_token_prompt(body: bytes) -> TokenPrompt:
    """Return the request of /v1/completions in these bytes. Raise RefusedError as parse_question."""
    return _parse(body, TokenPrompt)


def parse_text(body: bytes) -> TextToTokenize:
    """Return the request of /tokenize in these bytes. Raise RefusedError as parse_question."""
    return _parse(body, TextToTokenize)


def _parse(body: bytes, kind: type[_Parsed]) -> _Parsed:
    try:
        return kind.model_validate(from_json(body.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
        field = "".join(steps).removeprefix(".")
        problem = f"{field or 'the body'}: {first['msg'].removeprefix('Value error, ')}"
        raise RefusedError(problem, field=field or None) from None
    except ValueError:
        raise RefusedError("the body is not JSON") from None


def canonical_json(arguments: Any) -> str:
    """Return arguments as JSON in one spelling for equal values; text that is not JSON stays as it is.

    >>> canonical_json('{"b": 1, "a": 2}'), canonical_json({"a": 2, "b": 1}), canonical_json('{"x":NaN}')
    ('{"a": 2, "b": 1}', '{"a": 2, "b": 1}', '{"x":NaN}')
    """
    try:
        values = from_json(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(values, ensure_ascii=False, sort_keys=True, allow_nan=False)
    except (ValueError, RecursionError):
        return str(arguments)
