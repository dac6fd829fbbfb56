"""How calls are written: each format reads them out of a response, and shows one.

Reading never raises and takes time linear in the response. What stands in a thought (`<think>`) or in a
fenced block is words. A call ends where its mark does: one that is not closed, as it was cut off, is
malformed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.envs.tools.call import MOST_OF_A_CALL, Call, Tool, from_json

FormatName = Literal["auto", "hermes", "llama3", "mistral", "deepseek", "qwen_xml", "plain"]

_ASIDE = r"(?P<think><think>)|(?P<fence>^ {0,3}(?P<mark>`{3,}+(?=[^`\n]*$)|~{3,}+))"
_THOUGHT = "</think>"


@dataclass(frozen=True)
class Format:
    """One way to write calls.

    >>> said, [call] = FORMATS["hermes"].read('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    >>> said, call.name, call.arguments
    ('', 'f', {'x': 1})
    """

    opening: str
    """Regular expression of the mark before a call."""
    closing: str
    """The mark behind it; "" where the next call, or the end of the response, ends it."""
    calls: Callable[[str, str], Sequence[Call]]
    """The calls of an opening and what stands behind it; none if that is words, ValueError if it is wrong."""
    write: Callable[[Tool, Mapping[str, Any]], str]
    """A call as a policy writes it."""
    leading: bool = False
    """Whether a response is calls from its beginning on, or has none."""

    def read(self, response: str) -> tuple[str, list[Call]]:
        """The response without its calls, and those, in order.

        >>> FORMATS["hermes"].read("```\\n<tool_call>\\n```")[1]
        []
        """
        opening = re.compile(self.opening)
        scan = re.compile(f"{_ASIDE}|(?P<call>{self.opening})", re.MULTILINE)
        words, calls = list[str](), list[Call]()
        begin, at = 0, _behind_thought(response)
        while found := scan.search(response, at):
            if self.leading and response[at : found.start()].strip():
                break
            if found["call"] is None:
                at = _behind(response, found)
                continue
            if self.closing:
                end = response.find(self.closing, found.end())
            else:
                following = None if self.leading else opening.search(response, found.end())
                end = following.start() if following else len(response)
            made = self._calls(found["call"], response[found.end() : end if end >= 0 else None], end >= 0)
            at = end + len(self.closing) if end >= 0 else len(response)
            if made:
                words.append(response[begin : found.start()])
                calls += made
                begin = at
        return "".join([*words, response[begin:]]).strip(), calls

    def _calls(self, opening: str, body: str, closed: bool) -> Sequence[Call]:
        if len(body) > MOST_OF_A_CALL:
            why = f"a call of {len(body)} characters; {MOST_OF_A_CALL} are read"
            return [Call("", fault="too_large", reason=why)]
        if not closed:
            return [malformed(f"the call is not closed by {self.closing}")]
        try:
            return self.calls(opening, body)
        except ValueError as error:
            return [malformed(str(error)[:200])]


def malformed(why: str) -> Call:
    """What was meant to be a call and is none."""
    return Call("", fault="malformed", reason=why)


def _behind_thought(response: str) -> int:
    """Where a thought ends that was opened in the prompt."""
    end, begin = response.find(_THOUGHT), response.find("<think>")
    return end + len(_THOUGHT) if end >= 0 and not 0 <= begin < end else 0


def _behind(response: str, found: re.Match[str]) -> int:
    """Where the thought or the block ends that begins here; the end where none does."""
    if found["think"]:
        end = response.find(_THOUGHT, found.end())
        return end + len(_THOUGHT) if end >= 0 else len(response)
    mark = found["mark"]
    close = re.compile(rf"\n {{0,3}}{mark[0]}{{{len(mark)},}}+[ \t]*+$", re.MULTILINE)
    closed = close.search(response, found.end())
    return closed.end() if closed else len(response)


def _named(value: Any, key: str = "arguments") -> Call:
    """The call that an object with a name and arguments is; ValueError if it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError(f'a call is an object with "name" and "{key}"')
    arguments = value.get(key, {})
    if not isinstance(arguments, dict):
        why = f"{key} must be an object"
        return Call(value["name"], fault="arguments", reason=why)
    return Call(value["name"], arguments)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------- JSON between two tags


def _hermes(opening: str, body: str) -> list[Call]:
    return [_named(from_json(body))]


def _write_hermes(tool: Tool, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{_json({'name': tool.name, 'arguments': arguments})}\n</tool_call>"


# ---------------------------------------------------------------------- a bare object, as Llama 3 writes it


def _llama3(opening: str, body: str) -> list[Call]:
    """Objects one behind the other, with semicolons between them or not; one without parameters is words."""
    text, found, at = opening.removeprefix("<|python_tag|>") + body, list[Call](), 0
    decoder = json.JSONDecoder()
    while rest := re.compile(r"[\s;]*+(?=[^\s;])").match(text, at):
        try:
            value, end = decoder.raw_decode(text, rest.end())
            if not found and isinstance(value, dict) and "parameters" not in value:
                return []
            found.append(_named(from_json(text[rest.end() : end]), "parameters"))
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            return [*found, malformed(why[:200])]
        at = end
    return found


def _write_llama3(tool: Tool, arguments: Mapping[str, Any]) -> str:
    return _json({"name": tool.name, "parameters": arguments})


# ---------------------------------------------------------------------- a list, as Mistral writes it


def _mistral(opening: str, body: str) -> list[Call]:
    """`[{"name", "arguments"}, ...]`, or as newer models write it `name[ARGS]{...}`."""
    name, args, rest = body.partition("[ARGS]")
    if args and not name.lstrip().startswith("["):
        return [_named({"name": name.partition("[CALL_ID]")[0].strip(), "arguments": from_json(rest)})]
    value = from_json(body)
    return [_named(each) for each in (value if isinstance(value, list) else [value])]


def _write_mistral(tool: Tool, arguments: Mapping[str, Any]) -> str:
    return f"[TOOL_CALLS][{_json({'name': tool.name, 'arguments': arguments})}]"


# ---------------------------------------------------------------------- DeepSeek's tokens around each call

_DEEPSEEK_BLOCK = re.compile(r"\s*```(?:json)?\n(.*)\n```\s*", re.DOTALL)


def _deepseek(opening: str, body: str) -> list[Call]:
    """`function<sep>name` and a fenced block, or `name<sep>{...}` as from V3.1 on."""
    head, sep, tail = body.partition("<｜tool▁sep｜>")
    if not sep:
        raise ValueError("a call has a name, <｜tool▁sep｜> and arguments")
    if head.strip() == "function":
        head, _, tail = tail.partition("\n")
        block = _DEEPSEEK_BLOCK.fullmatch(tail)
        if block is None:
            raise ValueError("the arguments are not in a block of JSON")
        tail = block[1]
    return [_named({"name": head.strip(), "arguments": from_json(tail)})]


def _write_deepseek(tool: Tool, arguments: Mapping[str, Any]) -> str:
    call = f"function<｜tool▁sep｜>{tool.name}\n```json\n{_json(arguments)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


# ---------------------------------------------------------------------- Qwen's parameters, without types

_FUNCTION = re.compile(r"\s*<function=([^>\n]{1,200})>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{1,200})>\n?")


def _qwen_xml(opening: str, body: str) -> list[Call]:
    found = _FUNCTION.fullmatch(body)
    if found is None:
        raise ValueError("a call holds <function=...> ... </function>")
    given, at, text = dict[str, str](), 0, found[2].rstrip()
    while at < len(text):
        name, end = _PARAMETER.match(text, at), text.find("</parameter>", at)
        if name is None or end < name.end() - 1:
            raise ValueError("a function holds <parameter=...> ... </parameter> and nothing else")
        given[name[1].strip()] = text[name.end() : end].removesuffix("\n")
        at = end + len("</parameter>")
    return [Call(found[1].strip(), given, typed=False)]


def _write_qwen_xml(tool: Tool, arguments: Mapping[str, Any]) -> str:
    texts = {name: value if isinstance(value, str) else _json(value) for name, value in arguments.items()}
    given = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    return f"<tool_call>\n<function={tool.name}>\n{given}</function>\n</tool_call>"


# ---------------------------------------------------------------------- ours, for models that have none


def _plain(opening: str, body: str) -> list[Call]:
    """The text of the only argument, or an object of all."""
    found = re.fullmatch(r"<call ([\w.-]{1,64})>", opening)
    if found is None:
        raise ValueError("a call begins with <call NAME>")
    return [Call(found[1], body.strip(), typed=False)]


def _write_plain(tool: Tool, arguments: Mapping[str, Any]) -> str:
    only = next(iter(arguments.values()), "") if len(tool.properties) == 1 else arguments
    return f"<call {tool.name}>{only if isinstance(only, str) else _json(only)}</call>"


FORMATS: dict[str, Format] = {
    "qwen_xml": Format("<tool_call>", "</tool_call>", _qwen_xml, _write_qwen_xml),
    "hermes": Format("<tool_call>", "</tool_call>", _hermes, _write_hermes),
    "llama3": Format(
        r'<\|python_tag\|>|\{(?=\s*+"(?:name|type)"\s*+:)',
        "",
        _llama3,
        _write_llama3,
        leading=True,
    ),
    "mistral": Format(r"\[TOOL_CALLS\]", "", _mistral, _write_mistral),
    "deepseek": Format("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek, _write_deepseek),
    "plain": Format(r"<call\b[^>\n]{0,80}>?", "</call>", _plain, _write_plain),
}
"""By their names."""
