"""Formats: what each reads as calls and as words, one class for each fault, linear time, no exception."""

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.engines.sequence import new_sequence
from posttrain.envs.tools.call import MOST_OF_A_CALL, Tool, WrittenCall, arguments_of
from posttrain.envs.tools.formats import FORMATS
from posttrain.envs.tools.template_support import Shown
from posttrain.types import Request, Sampling

PAIR = Tool(
    "pair",
    "Takes two.",
    {
        "type": "object",
        "properties": {"text": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["text"],
    },
)
GIVEN = {"text": 'a "b"\n{c} ✓', "count": 3}
MARKED = [name for name in FORMATS if name != "llama3"]
"""Those that find a call anywhere in a response."""
MARKS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "```", "~~~", "[TOOL_CALLS]", "[ARGS]",
    "<call pair>", "<call", "</call>", "<function=pair>", "</function>", "<parameter=text>", "</parameter>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", '{"name": "pair", "parameters": {}}',
    "<|python_tag|>", "{", "}", '"', "\n", "\\u", "NaN", "1e999", ";", " ", "x",
]  # fmt: skip


def read(name, text):
    """The words and the calls of a response, each with its arguments or its fault."""
    words, calls = FORMATS[name].read(text)
    return words, [call.fault or arguments_of(PAIR, call) for call in calls]


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40), count=st.integers(-9, 9))
def test_what_is_written_is_read(name, text, count):
    text = text.replace("<", "(").replace("\r", "").strip()
    if name == "qwen_xml":
        text = text.strip("\n")
    said = FORMATS[name].write(PAIR, {"text": text, "count": count})
    assert read(name, said)[1] == [{"text": text, "count": count}]


@pytest.mark.parametrize("name", MARKED)
def test_calls_stand_among_words(name):
    call = FORMATS[name].write(PAIR, GIVEN)
    words, calls = read(name, f"First this. {call}\n{call}")
    assert words.startswith("First this.")
    assert calls == [GIVEN, GIVEN]
    assert read(name, "No call at all.") == ("No call at all.", [])


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_thought_or_quoted_is_no_call(name):
    call = FORMATS[name].write(PAIR, GIVEN)
    assert read(name, f"<think>\n{call}")[1] == [], "a thought that has no end"
    assert read(name, f"so {call} so\n</think>\n7") == (f"so {call} so\n</think>\n7", []), (
        "one begun in the prompt"
    )
    assert read(name, f"<think>{call}</think>\n{call}")[1] == [GIVEN]
    for fence in ("```", "~~~", "  ````python"):
        assert read(name, f"{fence}\n{call}\n")[1] == [], "a block that has no end"
        closed = fence.split("p")[0].strip()
        assert read(name, f"{fence}\n{call}\n{closed}\n{call}")[1] == [GIVEN]


@pytest.mark.parametrize("name", MARKED)
def test_a_call_that_was_cut_off_is_malformed(name):
    call = FORMATS[name].write(PAIR, GIVEN)
    for end in range(call.index("pair") + 5, len(call) - (30 if name == "deepseek" else 1)):
        _, calls = FORMATS[name].read(call[:end])
        assert [each.fault for each in calls] == ["malformed"], call[:end]


def test_the_only_argument_of_a_plain_call_is_its_text():
    tool = Tool("say", "", {"properties": {"text": {"type": "string"}}})
    said = FORMATS["plain"].write(tool, {"text": "1 < 2"})
    assert said == "<call say>1 < 2</call>"
    [call] = FORMATS["plain"].read(said)[1]
    assert arguments_of(tool, call) == {"text": "1 < 2"}
    assert [call.fault for call in FORMATS["plain"].read("<call>x</call><call 'a'>x</call>")[1]] == [
        "malformed"
    ] * 2


def test_llama_writes_objects_and_nothing_before_them():
    call = FORMATS["llama3"].write(PAIR, GIVEN)
    assert read("llama3", f"{call}; {call}")[1] == [GIVEN, GIVEN]
    assert read("llama3", f"<|python_tag|>{call}")[1] == [GIVEN]
    assert read("llama3", f"I say {call}")[1] == []
    assert read("llama3", call[:-9])[1] == ["malformed"]
    assert read("llama3", '{"name": "Bob"}') == ('{"name": "Bob"}', []), "an answer in JSON"
    assert read("llama3", "{1, 2}") == ("{1, 2}", [])


def test_mistral_and_deepseek_have_two_ways():
    first, second = (f'{{"name": "pair", "arguments": {{"text": "{text}"}}}}' for text in "ab")
    both = f"[TOOL_CALLS][{first}, {second}]"
    assert read("mistral", both)[1] == [{"text": "a"}, {"text": "b"}]
    assert read("mistral", '[TOOL_CALLS]pair[ARGS]{"text": "a"}[TOOL_CALLS]pair[ARGS]{"text": "b"}')[1] == [
        {"text": "a"},
        {"text": "b"},
    ]
    newer = '<｜tool▁call▁begin｜>pair<｜tool▁sep｜>{"text": "a"}<｜tool▁call▁end｜>'
    assert read("deepseek", newer)[1] == [{"text": "a"}]


def hermes(body):
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "calls", "faulty"),
    [
        ("hermes", hermes('{"name": "edit", "arguments": {"text": "write </tool_call> here"}}'),
         [("edit", {"text": "write </tool_call> here"})], False),
        ("hermes", hermes('{"name": "search", "parameters": {"query": "a"}}'), [], True),
        ("hermes", hermes('{"name": "search"}'), [], True),
        ("hermes", hermes('{"name": "add", "arguments": {"a": 1, "b": 2}}') + "\n"
         + hermes('{"name": "add", "arguments": {"a": 3, "b": 4}}'),
         [("add", {"a": 1, "b": 2}), ("add", {"a": 3, "b": 4})], False),
        ("plain", '<call python>\nprint("</call>")\n</call>', [("python", 'print("</call>")')], False),
        # siblings
        ("hermes", hermes('{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}'),
         [("f", {"a": 1}), ("g", {})], False),
        ("hermes", hermes('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]'),
         [("f", {}), ("g", {})], False),
        ("hermes", hermes('{"name": "f", "arguments": "{\\"a\\": \\"</tool_call>\\"}"}'),
         [("f", {"a": "</tool_call>"})], False),
        ("hermes", hermes('{"name": "f", "arguments": "a"}'), [], True),
        ("hermes", hermes('{"name": "f", "arguments": {}} and more'), [], True),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>', [], True),
        ("qwen_xml",
         hermes("<function=f>\n<parameter=a>\n</tool_call></parameter>\n</parameter>\n</function>"),
         [("f", {"a": "</tool_call></parameter>"})], False),
        ("qwen_xml", hermes("<function=f>\n</function>\n<function=g>\n</function>"),
         [("f", {}), ("g", {})], False),
        ("qwen_xml", hermes("<function=f>\n<parameter=a>\nprint('</parameter>'"), [], True),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": "[TOOL_CALLS]"}}] and words',
         [("f", {"a": "[TOOL_CALLS]"})], False),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123[ARGS]{"a": "[ARGS]"}', [("f", {"a": "[ARGS]"})], False),
        ("mistral", '[TOOL_CALLS][{"name": "f", "parameters": {}}]', [], True),
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "<｜tool▁call▁end｜>"}<｜tool▁call▁end｜>',
         [("f", {"a": "<｜tool▁call▁end｜>"})], False),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
         '{"a": "```<｜tool▁call▁end｜>"}\n```<｜tool▁call▁end｜>',
         [("f", {"a": "```<｜tool▁call▁end｜>"})], False),
        ("llama3", '{"name": "f", "parameters": "{\\"a\\": 1}"}', [("f", {"a": 1})], False),
        ("llama3", '<|python_tag|>{"name": "f"}', [], True),
        ("plain", '<call f>{"a": "</call> <call g>x</call>"}</call>',
         [("f", '{"a": "</call> <call g>x</call>"}')], False),
        ("plain", '<call f>{\n "a": "</call>"\n}</call>', [("f", '{\n "a": "</call>"\n}')], False),
        ("plain", '<call python>print("</call>")</call>', [("python", 'print("</call>")')], False),
        ("plain", '<call python>print("</call> ")</call>', [("python", 'print("</call> ")')], False),
        ("plain", '<call python>s = "</call> "\nprint(s)\n</call>',
         [("python", 's = "</call> "\nprint(s)')], False),
        ("plain", "<call f>1</call> <call python>\n2\n</call>", [("f", "1"), ("python", "2")], False),
        ("plain", "<call python>\r\n1\r\n</call>\r\n", [("python", "1")], False),
    ],
)  # fmt: skip
def test_calls_end_where_their_arguments_do(form, text, calls, faulty):
    found = FORMATS[form].read(text)[1]
    assert [(call.name, call.arguments) for call in found if not call.fault] == calls
    assert any(call.fault for call in found) == faulty


@pytest.mark.parametrize("program", ['print("</call>")', 'print("</call> ")\nprint(2)', "a = '</call>'\nb"])
def test_a_cut_program_is_not_a_call(program):
    """Wherever it is cut, also behind a mark that it holds, and whatever call comes next."""
    said = FORMATS["plain"].write(Tool("python", "", {"properties": {"code": {}}}), {"code": program})
    for end in range(len("<call python>"), len(said)):
        for next_call in ("", "\n<call f>7</call>"):
            calls = FORMATS["plain"].read(said[:end] + next_call)[1]
            assert [call.name for call in calls if not call.fault and call.name != "f"] == [], said[:end]


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "qwen_xml"])
def test_texts_of_json_arguments_hold_any_mark(form):
    marks = [mark for mark in MARKS if mark != "</think>"]  # ends a thought that the prompt began
    for mark in [*marks, "</function>", "\n</call>\n", '"}</tool_call>']:
        assert read(form, FORMATS[form].write(PAIR, {"text": mark, "count": 1})) == (
            read(form, FORMATS[form].write(PAIR, {"text": "", "count": 1}))[0],
            [{"text": mark, "count": 1}],
        ), mark


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "pair", "arguments": {"text": "a"}}',
        '{"name": "pair", "parameters": {"text": "a"}}',
        '[{"parameters": {"text": "a"}, "name": "pair"}]',
        '<|python_tag|>{"name": "pair", "parameters": {"text": "a"}}',
        '[{"type": "function", "function": {"name": "pair", "arguments": "{\\"text\\": \\"a\\"}"}}]',
        '{"content": null, "tool_calls": [{"function": {"name": "pair", "arguments": "{}"}}]}',
        '<tool_call>{"name": "pair", "arguments": {}}</tool_call>',
        '[TOOL_CALLS][{"name": "pair", "arguments": {}}]',
        "<call pair>{}</call>",
    ],
)
@pytest.mark.parametrize("form", list(FORMATS))
def test_a_call_in_another_form_is_malformed(form, text):
    words, calls = Shown(form).read(f"<think>so</think> {text}", [PAIR])
    assert words in ("", "<think>so</think>")
    if any(not call.fault for call in FORMATS[form].read(text)[1]):
        assert not calls[0].fault, "it is the form's own"
        return
    assert [call.fault for call in calls] == ["malformed"]
    assert FORMATS[form].write(PAIR, {"text": "text", "count": 1}) in calls[0].reason or form == "qwen_xml"


@pytest.mark.parametrize(
    "text",
    [
        'The record is {"name": "pair", "arguments": {"text": "a"}}.',
        '{"name": "Bob", "arguments": {"text": "a"}}',
        '{"name": "pair", "age": 3}',
        '[1, 2, {"name": "pair"}]',
        '{"function": 3}',
        '```json\n{"name": "pair", "arguments": {}}\n```',
        '<think>{"name": "pair", "arguments": {}}</think> 7',
        "A call is written between <tool_call> and </tool_call>.",
        "{1, 2}",
    ],
)
@pytest.mark.parametrize("form", ["plain", "llama3", "deepseek"])
def test_prose_that_holds_json_is_not_a_call(form, text):
    assert Shown(form).read(text, [PAIR]) == (text, [])


def test_one_class_for_each_fault():
    def fault(body):
        [call] = FORMATS["hermes"].read(f"<tool_call>{body}</tool_call>")[1]
        return call.fault, call.reason

    assert fault("{")[0] == "malformed"
    assert fault('{"name": "pair", "arguments": {"count": NaN}}') == ("malformed", "NaN is not JSON")
    assert fault('{"name": "pair", "arguments": {"count": 1e999}}')[0] == "malformed"
    assert fault('{"name": "pair", "arguments": {"text": "\\ud800"}}')[0] == "malformed"
    assert fault('{"name": "pair", "arguments": [1]}') == ("arguments", "arguments must be an object")
    assert fault('["pair"]')[0] == "malformed"
    assert fault("[" * 3000) == ("malformed", "it is nested too deeply")
    assert fault('{"name": "pair", "arguments": {"text": "' + "a" * MOST_OF_A_CALL + '"}}')[0] == "too_large"
    assert fault("1" * 5000)[0] == "malformed"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "'text' is missing"),
        ({"text": 1}, "'text' must be string, not integer"),
        ({"text": "a", "count": "3"}, "'count' must be integer, not string"),
        ({"text": "a", "count": True}, "'count' must be integer, not boolean"),
        ({"text": "a", "more": 1}, "there is no argument 'more'; there are text, count"),
    ],
)
def test_arguments_that_do_not_fit(given, why):
    with pytest.raises(ValueError, match=r"^" + why.replace("(", r"\(")):
        arguments_of(PAIR, WrittenCall("pair", given))


def test_a_schema_is_kept_to():
    schema = {
        "properties": {
            "x": {"type": "array", "items": {"enum": ["a", "b"]}},
            "y": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "z": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]},
        }
    }
    tool = Tool("f", "", schema)
    good = {"x": ["a"], "y": None, "z": {"n": 1}}
    assert arguments_of(tool, WrittenCall("f", good)) == good
    for name, bad, why in (
        ("x", ["c"], "'x' has an entry that must be one of a, b"),
        ("y", "1", "'y' fits none of 2 forms"),
        ("z", {}, "'z' has no 'n'"),
        ("z", {"n": "1"}, "'z' has a 'n' that must be number, not string"),
    ):
        with pytest.raises(ValueError, match=why):
            arguments_of(tool, WrittenCall("f", {name: bad}))


@given(st.lists(st.sampled_from(MARKS), max_size=30).map("".join))
def test_no_response_raises(text):
    for name, form in FORMATS.items():
        words, calls = form.read(text)
        assert isinstance(words, str), name
        for call in calls:
            if not call.fault:
                with suppress(ValueError):
                    arguments_of(PAIR, call)


@pytest.mark.parametrize("name", FORMATS)
def test_reading_takes_linear_time(name):
    call = FORMATS[name].write(PAIR, GIVEN)
    slowest = 0.0
    for piece in (
        call,
        call[:-3],
        call[:9],
        "<think>",
        "```\n",
        "`",
        '{"name":',
        "<parameter=a>",
        "</think>",
    ):
        took = []
        for size in (50_000, 500_000):
            begin = time.process_time()
            FORMATS[name].read(piece * (size // len(piece)))
            took.append(time.process_time() - begin)
        slowest = max(slowest, took[1] / max(took[0], 0.02))
    assert slowest < 40, "ten times the text takes about ten times as long, and not a hundred times"


def test_ten_thousand_calls_are_each_read():
    call = FORMATS["hermes"].write(PAIR, GIVEN)
    assert len(FORMATS["hermes"].read(call * 10_000)[1]) == 10_000


@pytest.mark.parametrize("form", MARKED)
def test_a_call_cut_by_a_stop_string_is_malformed(form):
    """Engines end an answer at a stop string wherever it stands, and at end tokens alone without one."""
    call = FORMATS[form].write(PAIR, {"text": f"{FORMATS[form].closing or 'no'}", "count": 1})
    stops = (FORMATS[form].closing,) if FORMATS[form].closing else ('"no',)

    def answer(stop):
        sampling = Sampling(max_new_tokens=len(call) + 1, stop=stop)
        sequence = new_sequence(0, Request(prompt=(1,), sampling=sampling, seed=0), 1 << 20, 1 << 20)
        for character in [*map(ord, call), 0]:
            sequence.append(character, 0.0, 0.0, 0)
            if ended := sequence.check_end(lambda tokens: "".join(map(chr, tokens)), {0}):
                return ended
        raise AssertionError("no end")

    assert (answer(()).text, answer(()).stop) == (call, "eos")
    assert (answer(stops).text, answer(stops).stop) == (call[: call.index(stops[0]) + len(stops[0])], "stop")
    assert read(form, answer(stops).text)[1] == ["malformed"]
