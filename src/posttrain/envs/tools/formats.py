"""How calls are written: each format reads them out of a response, and shows one.

Reading never raises and takes time linear in the response. What stands in a thought (`<think>`) or in a
fenced block is words. A call of JSON ends where its JSON does, whatever marks its texts hold; one that is not
closed, as it was cut off, is malformed.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.envs.tools.call import MOST_OF_A_CALL, Tool, WrittenCall, from_json, json_at

FormatName = Literal["auto", "hermes", "llama3", "mistral", "deepseek", "qwen_xml", "plain"]

_ASIDE = r"(?P<think><think>)|(?P<fence>^ {0,3}(?P<mark>`{3,}+(?=[^`\n]*$)|~{3,}+))"
_THOUGHT = "</think>"


@dataclass(frozen=True)
class CallFormat:
    """One way to write calls.

    >>> said, [call] = FORMATS["hermes"].read('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    >>> said, call.name, call.arguments
    ('', 'f', {'x': 1})
    """

    opening: str
    """Regular expression of the mark before a call."""
    closing: str
    """The mark behind it; "" where a call ends with its JSON."""
    calls: Callable[[str, str, int], tuple[Sequence[WrittenCall], int]]
    """(response, opening mark, its end) -> the calls behind the mark and where they end, mark included.

    No calls if that is words; ValueError if it is wrong: then it ends at the next mark.
    """
    write: Callable[[Tool, Mapping[str, Any] | str], str]
    """A call as a policy writes it; arguments that are a text stay one."""
    leading: bool = False
    """Whether a response is calls from its beginning on, or has none."""

    def read(self, response: str) -> tuple[str, list[WrittenCall]]:
        """The response without its calls, and those, in order.

        >>> FORMATS["hermes"].read("```\\n<tool_call>\\n```")[1]
        []
        """
        scan = re.compile(f"{_ASIDE}|(?P<call>{self.opening})", re.MULTILINE)
        words, calls = list[str](), list[WrittenCall]()
        begin, at = 0, _behind_thought(response)
        while found := scan.search(response, at):
            if self.leading and response[at : found.start()].strip():
                break
            if found["call"] is None:
                at = _behind(response, found)
                continue
            made, at = self._calls(response, found["call"], found.end())
            if made:
                words.append(response[begin : found.start()])
                calls += made
                begin = at
        return "".join([*words, response[begin:]]).strip(), calls

    def _calls(self, response: str, opening: str, at: int) -> tuple[Sequence[WrittenCall], int]:
        """The calls, or the fault, behind an opening mark, and where that ends."""
        try:
            calls, end = self.calls(response, opening, at)
        except ValueError as error:
            why, mark = str(error)[:200], re.compile(re.escape(self.closing) or self.opening)
            found = mark.search(response, at)
            if found is None and self.closing:
                why = f"the call is not closed by {self.closing}"
            end = len(response) if found is None else found.end() if self.closing else found.start()
            calls = [malformed(why)]
        if calls and (size := end - at - len(self.closing)) > MOST_OF_A_CALL:
            why = f"a call of {size} characters; {MOST_OF_A_CALL} are read"
            calls = [WrittenCall("", fault="too_large", reason=why)]
        return calls, end


def malformed(why: str) -> WrittenCall:
    """What was meant to be a call and is none."""
    return WrittenCall("", fault="malformed", reason=why)


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


def _named(value: Any, key: str = "arguments") -> WrittenCall:
    """The call that an object with a name and arguments is; ValueError if it is not one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or key not in value:
        raise ValueError(f'a call is an object with "name" and "{key}"')
    arguments = value[key]
    if isinstance(arguments, str):  # JSON in JSON, as OpenAI's API writes it
        try:
            arguments = from_json(arguments)
        except ValueError as error:
            return WrittenCall(
                value["name"], fault="arguments", reason=f"{key} are text that is not JSON: {error}"
            )
    if not isinstance(arguments, dict):
        return WrittenCall(value["name"], fault="arguments", reason=f"{key} must be an object")
    return WrittenCall(value["name"], arguments)


def _all_named(value: Any) -> list[WrittenCall]:
    """The calls that an object, or a list of them, is."""
    return [_named(each) for each in (value if isinstance(value, list) else [value])]


_BLANK = re.compile(r"\s*+")


def _behind_blank(text: str, at: int) -> int:
    """Where the blanks end that begin here."""
    found = _BLANK.match(text, at)
    return found.end() if found else at


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that stands here, behind blanks, and where the blanks behind it end."""
    at = _behind_blank(text, at)
    # An error counts the lines before it, so that it is given no more than one call.
    value, end = json_at(text[at : at + MOST_OF_A_CALL + 1])
    return value, _behind_blank(text, at + end)


def _closed(text: str, at: int, mark: str) -> int:
    """Where the closing mark ends that stands here; ValueError if it does not."""
    if not text.startswith(mark, at):
        raise ValueError(f"a call ends with {mark}, not with {text[at : at + 20]!r}")
    return at + len(mark)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------- JSON between two tags


def _hermes(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """An object, a list of them, or several one behind the other."""
    value, at = _json_at(text, at)
    calls = _all_named(value)
    while text.startswith("{", at):
        value, at = _json_at(text, at)
        calls += _all_named(value)
    return calls, _closed(text, at, "</tool_call>")


def _write_hermes(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    return f"<tool_call>\n{_json({'name': tool.name, 'arguments': arguments})}\n</tool_call>"


# ---------------------------------------------------------------------- a bare object, as Llama 3 writes it

_PYTHON_TAG = "<|python_tag|>"


def _llama3(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """Objects one behind the other, with semicolons between them or not.

    One without parameters is words, unless it stands behind Llama's mark of a call.
    """
    marked, found = opening == _PYTHON_TAG, list[WrittenCall]()
    at -= 0 if marked else len(opening)
    while rest := re.compile(r"[\s;]*+(?=[^\s;])").match(text, at):
        try:
            value, at = _json_at(text, rest.end())
            if not found and not marked and isinstance(value, dict) and "parameters" not in value:
                return [], len(text)
            found.append(_named(value, "parameters"))
        except ValueError as error:
            found.append(malformed(str(error)[:200]))
            break
    return found, len(text)


def _write_llama3(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    return _json({"name": tool.name, "parameters": arguments})


# ---------------------------------------------------------------------- a list, as Mistral writes it

_MISTRAL_NAME = re.compile(r"\s*+([^\s\[{]{1,200}+)\s*+(?:\[CALL_ID\][^\s\[]{0,200}+\s*+)?\[ARGS\]")


def _mistral(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """`[{"name", "arguments"}, ...]`, or as newer models write it `name[ARGS]{...}`."""
    name = _MISTRAL_NAME.match(text, at)
    value, end = _json_at(text, name.end() if name else at)
    return _all_named({"name": name[1], "arguments": value} if name else value), end


def _write_mistral(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    return f"[TOOL_CALLS][{_json({'name': tool.name, 'arguments': arguments})}]"


# ---------------------------------------------------------------------- DeepSeek's tokens around each call

_DEEPSEEK_HEAD = re.compile(
    r"\s*+([^<\n]{0,200}+)<｜tool▁sep｜>(?:(?<=function<｜tool▁sep｜>)(.{0,200}+)\n\s*+```(?:json)?\n)?"
)


def _deepseek(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """`function<sep>name` and a fenced block, or `name<sep>{...}` as from V3.1 on."""
    head = _DEEPSEEK_HEAD.match(text, at)
    if head is None:
        raise ValueError("a call has a name, <｜tool▁sep｜> and arguments")
    if head[2] is None and head[1].strip() == "function":
        raise ValueError("the arguments are not in a block of JSON")
    value, end = _json_at(text, head.end())
    if head[2] is not None:
        end = _behind_blank(text, _closed(text, end, "```"))
    name = head[1] if head[2] is None else head[2]
    return [_named({"name": name.strip(), "arguments": value})], _closed(text, end, "<｜tool▁call▁end｜>")


def _write_deepseek(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    call = f"function<｜tool▁sep｜>{tool.name}\n```json\n{_json(arguments)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


# ---------------------------------------------------------------------- Qwen's parameters, without types

_FUNCTION = re.compile(r"\s*+<function=([^>\n]{1,200})>\s*+")
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>\n?")
_PARAMETER_END = re.compile(r"\n?</parameter>\s*+(?=<parameter=|</function>)")


def _qwen_xml(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """A parameter ends where another one or the end of its function follows: its text may hold any mark."""
    calls = list[WrittenCall]()
    while (function := _FUNCTION.match(text, at)) or not calls:
        if function is None:
            raise ValueError("a call holds <function=...> ... </function>")
        given, at = dict[str, str](), function.end()
        while name := _PARAMETER.match(text, at):
            end = _PARAMETER_END.search(text, name.end(), name.end() + MOST_OF_A_CALL + 1)
            if end is None:
                raise ValueError("a parameter ends with </parameter>, before another or </function>")
            given[name[1].strip()], at = text[name.end() : end.start()], end.end()
        at = _behind_blank(text, _closed(text, at, "</function>"))
        calls.append(WrittenCall(function[1].strip(), given, typed=False))
    return calls, _closed(text, at, "</tool_call>")


def _write_qwen_xml(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):
        given = f"{arguments}\n"
    else:
        texts = {name: value if isinstance(value, str) else _json(value) for name, value in arguments.items()}
        given = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    return f"<tool_call>\n<function={tool.name}>\n{given}</function>\n</tool_call>"


# ---------------------------------------------------------------------- ours, for models that have none

_PLAIN = r"<call\b[^>\n]{0,80}>?"
_PLAIN_LINE_END = re.compile(rf"</call>(?=\s|\Z|{_PLAIN})")
_PLAIN_CLOSE = r"^[ \t]*+</call>[ \t\r]*+$"
_PLAIN_BLOCK_END = re.compile(rf"{_PLAIN_CLOSE}|^[ \t]*+(?={_PLAIN})", re.MULTILINE)
_PLAIN_NEXT = re.compile(rf"{_PLAIN_CLOSE}|{_PLAIN}", re.MULTILINE)


def _plain(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """The text of the only argument, or an object of all."""
    found = re.fullmatch(r"<call ([\w.-]{1,64})>", opening)
    body, end = _plain_body(text, at)
    if found is None:
        return [malformed("a call begins with <call NAME>")], end
    if body is None:
        why = "the call is not closed by </call>"
        if text.find("</call>", at, end) >= 0:
            why += " at the end of its line, or on a line by itself"
        return [malformed(why)], end
    return [WrittenCall(found[1], body.strip(), typed=False)], end


def _plain_body(text: str, at: int) -> tuple[str | None, int]:
    """What a call holds, None if it is not closed, and where the call ends.

    JSON ends where it does. A text ends at a mark on a line by itself, or at the last mark of its first line
    that no text follows directly. A mark in a text is neither, as a rule, so that a program that was cut off
    at a mark that it holds does not run.
    """
    begin = _behind_blank(text, at)
    if text.startswith("{", begin):
        try:
            _, end = _json_at(text, begin)
            return text[begin:end], _closed(text, end, "</call>")
        except ValueError:
            pass
    line_end = line if (line := text.find("\n", at)) >= 0 else len(text)
    if first := _PLAIN_LINE_END.search(text, at, line_end):
        *_, last = _PLAIN_LINE_END.finditer(text, first.start(), _before_call(text, first.end(), line_end))
        if not (block := _PLAIN_NEXT.search(text, last.end())) or block[0].lstrip().startswith("<call"):
            return text[at : last.start()], last.end()
    else:
        block = _PLAIN_BLOCK_END.search(text, line_end)
    if block is None:
        return None, len(text)
    return (text[at : block.start()] if block[0].strip() else None), block.end()


def _before_call(text: str, at: int, end: int) -> int:
    """Where the next call begins, or the end."""
    found = re.compile(_PLAIN).search(text, at, end)
    return found.start() if found else end


def _write_plain(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    only: Any = arguments
    if len(tool.properties) == 1 and not isinstance(arguments, str):
        only = next(iter(arguments.values()), "")
    text = only if isinstance(only, str) else _json(only)
    line = "\n" if "\n" in text or "</call>" in text else ""
    return f"<call {tool.name}>{line}{text}{line}</call>"


FORMATS: dict[str, CallFormat] = {
    "qwen_xml": CallFormat("<tool_call>", "</tool_call>", _qwen_xml, _write_qwen_xml),
    "hermes": CallFormat("<tool_call>", "</tool_call>", _hermes, _write_hermes),
    "llama3": CallFormat(
        r'<\|python_tag\|>|\{(?=\s*+"(?:name|type)"\s*+:)',
        "",
        _llama3,
        _write_llama3,
        leading=True,
    ),
    "mistral": CallFormat(r"\[TOOL_CALLS\]", "", _mistral, _write_mistral),
    "deepseek": CallFormat("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek, _write_deepseek),
    "plain": CallFormat(_PLAIN, "</call>", _plain, _write_plain),
}
"""By their names."""


# ---------------------------------------------------------------------- calls in a form that is not asked for


def _openai(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """Calls as the messages of OpenAI's API hold them, alone or in a list; anything else is words."""
    try:
        value, _ = _json_at(text, at - len(opening))
        value = value.get("tool_calls", value) if isinstance(value, dict) else value
        calls = list[WrittenCall]()
        for each in value if isinstance(value, list) else [value]:
            function = each.get("function", each) if isinstance(each, dict) else {}
            calls.append(_named(function, "parameters" if "parameters" in function else "arguments"))
    except (ValueError, TypeError):  # of a function that is a number, say
        return [], len(text)
    return calls, len(text)


_OPENAI = CallFormat(r"[\[{]", "", _openai, _write_hermes, leading=True)


def call_in_another_form(response: str, tools: Collection[str]) -> tuple[str, str, str] | None:
    """(form, tool, other words) of a call of one of these tools in any form; None if there is not one."""
    for form, reader in {**FORMATS, "openai": _OPENAI}.items():
        words, calls = reader.read(response)
        if tool := next((call.name for call in calls if not call.fault and call.name in tools), ""):
            return form, tool, words
    return None
