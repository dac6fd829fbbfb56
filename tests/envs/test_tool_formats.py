"""Formats: what each reads as calls and as words, one class for each fault, linear time, no exception."""

import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.envs.tools.call import MOST_OF_A_CALL, Call, Tool, arguments_of
from posttrain.envs.tools.formats import FORMATS

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
    with pytest.raises(ValueError, match="^" + why.replace("(", r"\(")):
        arguments_of(PAIR, Call("pair", given))


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
    assert arguments_of(tool, Call("f", good)) == good
    for name, bad, why in (
        ("x", ["c"], "'x' has an entry that must be one of a, b"),
        ("y", "1", "'y' fits none of 2 forms"),
        ("z", {}, "'z' has no 'n'"),
        ("z", {"n": "1"}, "'z' has a 'n' that must be number, not string"),
    ):
        with pytest.raises(ValueError, match=why):
            arguments_of(tool, Call("f", {name: bad}))


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
