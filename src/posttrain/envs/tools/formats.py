"""Formats of calls: each reads the calls in a response, and writes one.

Reading never raises and takes time linear in the response. Text in a thought (`<think>`) or in a fenced block
is words. A call of JSON ends where its JSON does, whatever marks its texts contain; an unclosed one, such as
one that was cut off, is malformed.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.envs.tools.call import MOST_OF_A_CALL, Tool, WrittenCall, from_json, json_at

FormatName = Literal["auto", "hermes", "llama3", "mistral", "deepseek", "qwen_xml", "plain"]
NATIVE: tuple[FormatName, ...] = ("qwen_xml", "hermes", "llama3", "mistral", "deepseek")
"""Formats that chat templates write, in the order in which they are tried."""

_BLOCK = r"(?P<think><think>)|(?P<fence>^ {0,3}(?P<mark>`{3,}+(?=[^`\n]*$)|~{3,}+))"
_THOUGHT_END = "</think>"


@dataclass(frozen=True)
class CallFormat:
    """A format of calls.

    >>> words, [call] = FORMATS["hermes"].read('<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    >>> words, call.name, call.arguments
    ('', 'f', {'x': 1})
    """

    opening: str
    """Regular expression of the mark before a call."""
    closing: str
    """The mark behind it; "" if a call ends with its JSON."""
    calls: Callable[[str, str, int], tuple[Sequence[WrittenCall], int]]
    """(response, opening mark, its end) -> the calls behind the mark and where they end, mark included.

    Returns no calls if the text is words. Raises ValueError if it is malformed; it then ends at the next
    mark."""
    write: Callable[[Tool, Mapping[str, Any] | str], str]
    """Returns a call as a policy writes it; arguments in one text stay as they are."""
    leading: bool = False
    """Whether a response begins with its calls, or has none."""

    def read(self, response: str) -> tuple[str, list[WrittenCall]]:
        """Return the response without its calls, and the calls in order.

        >>> FORMATS["hermes"].read("```\\n<tool_call>\\n```")[1]
        []
        """
        scan = re.compile(f"{_BLOCK}|(?P<call>{self.opening})", re.MULTILINE)
        words, calls = list[str](), list[WrittenCall]()
        begin, at = 0, _end_of_open_thought(response)
        while match := scan.search(response, at):
            if self.leading and response[at : match.start()].strip():
                break
            if match["call"] is None:
                at = _end_of_block(response, match)
                continue
            new_calls, at = self._calls(response, match["call"], match.end())
            if new_calls:
                words.append(response[begin : match.start()])
                calls += new_calls
                begin = at
        return "".join([*words, response[begin:]]).strip(), calls

    def _calls(self, response: str, opening: str, at: int) -> tuple[Sequence[WrittenCall], int]:
        """Return the calls, or the fault, behind an opening mark, and where they end."""
        try:
            calls, end = self.calls(response, opening, at)
        except ValueError as error:
            reason, mark = str(error)[:200], re.compile(re.escape(self.closing) or self.opening)
            match = mark.search(response, at)
            if match is None and self.closing:
                reason = f"the call is not closed by {self.closing}"
            end = len(response) if match is None else match.end() if self.closing else match.start()
            calls = [malformed(reason)]
        if calls and (size := end - at - len(self.closing)) > MOST_OF_A_CALL:
            reason = f"a call of {size} characters; {MOST_OF_A_CALL} are read"
            calls = [WrittenCall("", fault="too_large", reason=reason)]
        return calls, end


def malformed(why: str) -> WrittenCall:
    return WrittenCall("", fault="malformed", reason=why)


def _end_of_open_thought(response: str) -> int:
    """Return where a thought ends that the prompt opened; 0 without one."""
    end, begin = response.find(_THOUGHT_END), response.find("<think>")
    return end + len(_THOUGHT_END) if end >= 0 and not 0 <= begin < end else 0


def _end_of_block(response: str, match: re.Match[str]) -> int:
    """Return where the thought or fenced block of this match ends, at most the end of the response."""
    if match["think"]:
        end = response.find(_THOUGHT_END, match.end())
        return end + len(_THOUGHT_END) if end >= 0 else len(response)
    mark = match["mark"]
    close = re.compile(rf"\n {{0,3}}{mark[0]}{{{len(mark)},}}+[ \t]*+$", re.MULTILINE)
    closed = close.search(response, match.end())
    return closed.end() if closed else len(response)


def _call_of_object(value: Any, key: str = "arguments") -> WrittenCall:
    """Return the call of an object with a name and arguments. Raises ValueError for any other value."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or key not in value:
        raise ValueError(f'a call is an object with "name" and "{key}"')
    arguments = value[key]
    if isinstance(arguments, str):  # JSON in JSON, as OpenAI's API writes it
        try:
            arguments = from_json(arguments)
        except ValueError as error:
            reason = f"{key} are text that is not JSON: {error}"
            return WrittenCall(value["name"], fault="arguments", reason=reason)
    if not isinstance(arguments, dict):
        return WrittenCall(value["name"], fault="arguments", reason=f"{key} must be an object")
    return WrittenCall(value["name"], arguments)


def _calls_of_json(value: Any) -> list[WrittenCall]:
    """Return the calls of an object, or of a list of objects."""
    return [_call_of_object(item) for item in (value if isinstance(value, list) else [value])]


_BLANK = re.compile(r"\s*+")


def _skip_blanks(text: str, at: int) -> int:
    """Return the position behind the blanks at `at`."""
    match = _BLANK.match(text, at)
    return match.end() if match else at


def _read_json(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value behind blanks at `at`, and the position behind the blanks that follow it."""
    at = _skip_blanks(text, at)
    # A JSONDecodeError counts the lines before it, so the text is cut to one call.
    value, end = json_at(text[at : at + MOST_OF_A_CALL + 1])
    return value, _skip_blanks(text, at + end)


def _skip_mark(text: str, at: int, mark: str) -> int:
    """Return the position behind the closing mark at `at`. Raises ValueError for other text."""
    if not text.startswith(mark, at):
        raise ValueError(f"a call ends with {mark}, not with {text[at : at + 20]!r}")
    return at + len(mark)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------------- JSON between two tags


def _read_hermes(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """Read an object, a list of objects, or several objects in sequence."""
    value, at = _read_json(text, at)
    calls = _calls_of_json(value)
    while text.startswith("{", at):
        value, at = _read_json(text, at)
        calls += _calls_of_json(value)
    return calls, _skip_mark(text, at, "</tool_call>")


def _write_hermes(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    return f"<tool_call>\n{_to_json({'name': tool.name, 'arguments': arguments})}\n</tool_call>"


# ---------------------------------------------------------------------- a bare object, as Llama 3 writes it

_PYTHON_TAG = "<|python_tag|>"


def _read_llama3(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """Read objects in sequence, separated by semicolons or not.

    An object without parameters is words, unless Llama's mark of a call precedes it.
    """
    marked, calls = opening == _PYTHON_TAG, list[WrittenCall]()
    at -= 0 if marked else len(opening)
    while rest := re.compile(r"[\s;]*+(?=[^\s;])").match(text, at):
        try:
            value, at = _read_json(text, rest.end())
            if not calls and not marked and isinstance(value, dict) and "parameters" not in value:
                return [], len(text)
            calls.append(_call_of_object(value, "parameters"))
        except ValueError as error:
            calls.append(malformed(str(error)[:200]))
            break
    return calls, len(text)


def _write_llama3(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    return _to_json({"name": tool.name, "parameters": arguments})


# ---------------------------------------------------------------------- a list, as Mistral writes it

_MISTRAL_NAME = re.compile(r"\s*+([^\s\[{]{1,200}+)\s*+(?:\[CALL_ID\][^\s\[]{0,200}+\s*+)?\[ARGS\]")


def _read_mistral(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """Read `[{"name", "arguments"}, ...]`, or, of newer models, `name[ARGS]{...}`."""
    name = _MISTRAL_NAME.match(text, at)
    value, end = _read_json(text, name.end() if name else at)
    return _calls_of_json({"name": name[1], "arguments": value} if name else value), end


def _write_mistral(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    return f"[TOOL_CALLS][{_to_json({'name': tool.name, 'arguments': arguments})}]"


# ---------------------------------------------------------------------- DeepSeek's tokens around each call

_DEEPSEEK_HEAD = re.compile(
    r"\s*+([^<\n]{0,200}+)<｜tool▁sep｜>(?:(?<=function<｜tool▁sep｜>)(.{0,200}+)\n\s*+```(?:json)?\n)?"
)


def _read_deepseek(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """Read `function<sep>name` and a fenced block, or, from V3.1 on, `name<sep>{...}`."""
    head = _DEEPSEEK_HEAD.match(text, at)
    if head is None:
        raise ValueError("a call has a name, <｜tool▁sep｜> and arguments")
    if head[2] is None and head[1].strip() == "function":
        raise ValueError("the arguments are not in a block of JSON")
    value, end = _read_json(text, head.end())
    if head[2] is not None:
        end = _skip_blanks(text, _skip_mark(text, end, "```"))
    name = head[1] if head[2] is None else head[2]
    call = _call_of_object({"name": name.strip(), "arguments": value})
    return [call], _skip_mark(text, end, "<｜tool▁call▁end｜>")


def _write_deepseek(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    call = f"function<｜tool▁sep｜>{tool.name}\n```json\n{_to_json(arguments)}\n```"
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


# ---------------------------------------------------------------------- Qwen's parameters, without types

_FUNCTION = re.compile(r"\s*+<function=([^>\n]{1,200})>\s*+")
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,200})>\n?")
_PARAMETER_END = re.compile(r"\n?</parameter>\s*+(?=<parameter=|</function>)")


def _read_qwen_xml(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """Read parameters. One ends before another or before the end of its function, whatever its text holds."""
    calls = list[WrittenCall]()
    while (function := _FUNCTION.match(text, at)) or not calls:
        if function is None:
            raise ValueError("a call holds <function=...> ... </function>")
        arguments, at = dict[str, str](), function.end()
        while name := _PARAMETER.match(text, at):
            end = _PARAMETER_END.search(text, name.end(), name.end() + MOST_OF_A_CALL + 1)
            if end is None:
                raise ValueError("a parameter ends with </parameter>, before another or </function>")
            arguments[name[1].strip()], at = text[name.end() : end.start()], end.end()
        at = _skip_blanks(text, _skip_mark(text, at, "</function>"))
        calls.append(WrittenCall(function[1].strip(), arguments, typed=False))
    return calls, _skip_mark(text, at, "</tool_call>")


def _write_qwen_xml(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):
        parameters = f"{arguments}\n"
    else:
        texts = {name: v if isinstance(v, str) else _to_json(v) for name, v in arguments.items()}
        parameters = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in texts.items())
    return f"<tool_call>\n<function={tool.name}>\n{parameters}</function>\n</tool_call>"


# ---------------------------------------------------------------------- plain, for models without a format

_PLAIN = r"<call\b[^>\n]{0,80}>?"
_PLAIN_LINE_END = re.compile(rf"</call>(?=\s|\Z|{_PLAIN})")
_PLAIN_CLOSE = r"^[ \t]*+</call>[ \t\r]*+$"
_PLAIN_BLOCK_END = re.compile(rf"{_PLAIN_CLOSE}|^[ \t]*+(?={_PLAIN})", re.MULTILINE)
_PLAIN_NEXT = re.compile(rf"{_PLAIN_CLOSE}|{_PLAIN}", re.MULTILINE)


def _read_plain(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """Read the text of the only argument, or an object of all arguments."""
    mark = re.fullmatch(r"<call ([\w.-]{1,64})>", opening)
    body, end = _read_plain_body(text, at)
    if mark is None:
        return [malformed("a call begins with <call NAME>")], end
    if body is None:
        why = "the call is not closed by </call>"
        if text.find("</call>", at, end) >= 0:
            why += " at the end of its line, or on a line by itself"
        return [malformed(why)], end
    return [WrittenCall(mark[1], body.strip(), typed=False)], end


def _read_plain_body(text: str, at: int) -> tuple[str | None, int]:
    """Return the text of a call, None if it is not closed, and where the call ends.

    JSON ends where it does. Other text ends at a mark on a line by itself, or at the last mark of its first
    line that no text follows directly. A mark within a text is usually neither, so a program that was cut off
    behind a mark that it contains does not run.
    """
    begin = _skip_blanks(text, at)
    if text.startswith("{", begin):
        try:
            _, end = _read_json(text, begin)
            return text[begin:end], _skip_mark(text, end, "</call>")
        except ValueError:
            pass
    line_end = line if (line := text.find("\n", at)) >= 0 else len(text)
    if first := _PLAIN_LINE_END.search(text, at, line_end):
        *_, last = _PLAIN_LINE_END.finditer(text, first.start(), _next_call(text, first.end(), line_end))
        if not (block := _PLAIN_NEXT.search(text, last.end())) or block[0].lstrip().startswith("<call"):
            return text[at : last.start()], last.end()
    else:
        block = _PLAIN_BLOCK_END.search(text, line_end)
    if block is None:
        return None, len(text)
    return (text[at : block.start()] if block[0].strip() else None), block.end()


def _next_call(text: str, at: int, end: int) -> int:
    """Return where the next call begins, or `end`."""
    match = re.compile(_PLAIN).search(text, at, end)
    return match.start() if match else end


def _write_plain(tool: Tool, arguments: Mapping[str, Any] | str) -> str:
    only: Any = arguments
    if len(tool.properties) == 1 and not isinstance(arguments, str):
        only = next(iter(arguments.values()), "")
    text = only if isinstance(only, str) else _to_json(only)
    line = "\n" if "\n" in text or "</call>" in text else ""
    return f"<call {tool.name}>{line}{text}{line}</call>"


FORMATS: dict[str, CallFormat] = {
    "qwen_xml": CallFormat("<tool_call>", "</tool_call>", _read_qwen_xml, _write_qwen_xml),
    "hermes": CallFormat("<tool_call>", "</tool_call>", _read_hermes, _write_hermes),
    "llama3": CallFormat(
        r'<\|python_tag\|>|\{(?=\s*+"(?:name|type)"\s*+:)',
        "",
        _read_llama3,
        _write_llama3,
        leading=True,
    ),
    "mistral": CallFormat(r"\[TOOL_CALLS\]", "", _read_mistral, _write_mistral),
    "deepseek": CallFormat("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _read_deepseek, _write_deepseek),
    "plain": CallFormat(_PLAIN, "</call>", _read_plain, _write_plain),
}
"""Formats by their names in recipes."""


# ---------------------------------------------------------------------- calls in an unexpected format


def _read_openai(text: str, opening: str, at: int) -> tuple[list[WrittenCall], int]:
    """Read calls as the messages of OpenAI's API have them, alone or in a list; any other text is words."""
    try:
        value, _ = _read_json(text, at - len(opening))
        value = value.get("tool_calls", value) if isinstance(value, dict) else value
        calls = list[WrittenCall]()
        for item in value if isinstance(value, list) else [value]:
            function = item.get("function", item) if isinstance(item, dict) else {}
            calls.append(_call_of_object(function, "parameters" if "parameters" in function else "arguments"))
    except (ValueError, TypeError):  # if a function is a number, for example
        return [], len(text)
    return calls, len(text)


_OPENAI = CallFormat(r"[\[{]", "", _read_openai, _write_hermes, leading=True)


def call_in_another_form(response: str, tools: Collection[str]) -> tuple[str, str, str] | None:
    """Return (form, tool, other words) of a call of one of these tools in any format; None without one."""
    for form, reader in {**FORMATS, "openai": _OPENAI}.items():
        words, calls = reader.read(response)
        if tool := next((call.name for call in calls if not call.fault and call.name in tools), ""):
            return form, tool, words
    return None
