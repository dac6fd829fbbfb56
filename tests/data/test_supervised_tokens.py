"""Every form of supervised and preference data: its tokens and its mask, spelt out by hand."""

import json

import pytest
from transformers import AutoTokenizer

from posttrain.base.chat import Chat
from posttrain.data import Data, load_conversations, load_labelled, load_rankings
from posttrain.plan.dataset_rows import Shaper
from posttrain.types import UserError

_OPEN = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    + _OPEN
)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}"
    "{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    """{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}"""
    "{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + _OPEN
)
"""Shows the reasoning behind the last message of the user alone, as Qwen3 does."""
THINKING = CHATML.replace("m.content", "('[' + m.thinking + ']' if m.thinking else '') + m.content")
"""Knows the key of gpt-oss."""
R1 = CHATML.replace(
    "m.content", "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)"
).replace("assistant\n'", "assistant\n<think>\n'")
"""Knows no key, cuts out a thought in the content and opens one in each prompt, as DeepSeek-R1 does."""

PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "<think>\nhm\n</think>\n\n"


def user(content):
    return {"role": "user", "content": content}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


@pytest.fixture(scope="module")
def tokenizer(tiny):
    """One token a character, and ChatML's marks."""
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def rows(tokenizer, tmp_path):
    """rows(template, record, ...) -> (tokens, trained) of each row of the record."""

    def make(template, record, load=load_conversations, learns="answers", **options):
        (tmp_path / "d.jsonl").write_text(json.dumps(record) + "\n")
        shaper = Shaper(Chat(tokenizer, template=template), 3000, False, **options)
        records = load(Data(path=str(tmp_path / "d.jsonl")))
        [group] = shaper.groups(records, learns, lambda line: None)
        return [(row.tokens, row.sampled) for row in group]

    return make


@pytest.fixture
def spelt(tokenizer):
    """spelt(text, trained text, text, ...) -> the tokens of the parts, each by itself, and the mask."""

    def spell(*parts):
        tokens, trained = [], []
        for number, part in enumerate(parts):
            for mark in ("<|im_start|>", "<|im_end|>"):
                part = part.replace(mark, f"\0{mark}\0")
            ids = [tokenizer.convert_tokens_to_ids(x) for p in part.split("\0") for x in _letters(p)]
            tokens += ids
            trained += [number % 2 == 1] * len(ids)
        assert tokenizer.unk_token_id not in tokens
        return tokens, trained

    return spell


def _letters(part):
    return [part] if part.startswith("<|im_") else list(part)


@pytest.mark.parametrize(
    "turn",
    [
        says("a", reasoning_content="hm"),
        says("a", reasoning="hm"),
        says("a", thinking="hm", reasoning_content="hm"),
        says([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]),
        says("<think>\nhm\n</think>\n\na"),
    ],
    ids=["reasoning_content", "reasoning", "thinking", "parts", "content"],
)
def test_reasoning_is_trained_in_each_of_its_forms(rows, spelt, turn):
    whole = spelt(PROMPT, THOUGHT + "a<|im_end|>", NEXT, THOUGHT + "b<|im_end|>", "\n")
    last = {**turn, "content": turn["content"][:-1] + "b"} if isinstance(turn["content"], str) else None
    turns = [user("q"), turn, user("r"), last or says("b", thinking="hm")]
    assert rows(QWEN3, {"messages": turns}) == [whole]
    assert rows(QWEN3, {"prompt": turns[:1], "completion": turns[1:]}) == [whole]
    opened = PROMPT + "<think>\n", "hm\n</think>\n\na<|im_end|>", "\n"
    assert rows(R1, {"messages": turns[:2]}) == [spelt(*opened)]
    if not isinstance(turn["content"], str) or turn["content"] == "a":
        assert rows(THINKING, {"messages": turns[:2]}) == [spelt(PROMPT, "[hm]a<|im_end|>", "\n")]
        with pytest.raises(UserError, match="the chat template leaves out reasoning_content"):
            rows(CHATML, {"messages": turns})


def test_reasoning_of_a_call_is_trained_with_it(rows, spelt):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        user("q"),
        says("", thinking="hm", tool_calls=[call]),
        {"role": "tool", "content": "7"},
        says("a"),
    ]
    spelling = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    expected = spelt(
        PROMPT,
        THOUGHT + spelling,
        "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n",
        "a<|im_end|>",
        "\n",
    )
    assert rows(QWEN3, {"messages": turns}) == [expected]
    pair = {"chosen": turns, "rejected": [user("q"), says("b")]}
    chosen, rejected = rows(QWEN3, pair, load_rankings, "rankings")
    assert chosen == expected
    assert rejected == spelt(PROMPT, "b<|im_end|>", "\n")


@pytest.mark.parametrize(("off", "on"), [({"weight": 0}, {"weight": 1}), ({"train": False}, {"train": True})])
def test_weights_choose_the_messages_that_are_trained(rows, spelt, off, on):
    first, last = "a<|im_end|>", "b<|im_end|>"
    for marks, parts in (
        ((off, on), (PROMPT + first + NEXT, last, "\n")),
        ((on, off), (PROMPT, first, NEXT + last + "\n")),
        ((on, on), (PROMPT, first, NEXT, last, "\n")),
    ):
        turns = [user("q"), says("a", **marks[0]), user("r"), says("b", **marks[1])]
        assert rows(CHATML, {"messages": turns}) == [spelt(*parts)]
    turns = [user("q"), says("a", **on), user("r"), says("b", **on)]
    assert rows(CHATML, {"messages": turns}, train_on="last") == [spelt(PROMPT + first + NEXT, last, "\n")]


@pytest.mark.parametrize("tool_format", ["auto", "hermes"])
def test_the_last_turn_alone_is_trained_behind_a_prompt(rows, spelt, tokenizer, tool_format):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    result = {"role": "tool", "content": "7"}
    called = says("", tool_calls=[call])
    turns = [user("q"), says("a", reasoning_content="hm"), user("r"), says("b", reasoning_content="hm")]
    expected = spelt(PROMPT + "a<|im_end|>" + NEXT, THOUGHT + "b<|im_end|>", "\n")
    assert rows(QWEN3, {"messages": turns}, train_on="last") == [expected]
    text = tokenizer.apply_chat_template(turns, chat_template=QWEN3, tokenize=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == expected[0]
    # Calls belong to the turn that they lead to, also where their results are shown as the user's.
    turns = [user("q"), called, result, says("a"), user("r"), called, result, says("b")]
    [(tokens, trained)] = rows(QWEN3, {"messages": turns}, train_on="last", tool_format=tool_format)
    [(whole, all_trained)] = rows(QWEN3, {"messages": turns}, tool_format=tool_format)
    assert tokens == whole
    start = len(
        tokenizer.decode(tokens).partition(NEXT)[0].replace("<|im_start|>", "s").replace("<|im_end|>", "e")
    )
    assert trained == [False] * start + all_trained[start:]
    ends = [x for x, t in zip(tokens, trained, strict=True) if t and tokenizer.decode([x]) == "<|im_end|>"]
    assert any(all_trained[:start])
    assert len(ends) == 2


def test_pairs_without_a_prompt_share_their_beginning(rows, spelt):
    expected = [spelt(PROMPT, "a<|im_end|>", "\n"), spelt(PROMPT, "b<|im_end|>", "\n")]
    explicit = {"prompt": "q", "chosen": "a", "rejected": "b"}
    for record in (
        explicit,
        {"chosen": [user("q"), says("a")], "rejected": [user("q"), says("b")]},
        {"chosen": "q\n\na", "rejected": "q\n\nb"},
        {"chosen": "q\r\n \r\na", "rejected": "q\r\n \r\nb"},
    ):
        assert rows(CHATML, record, load_rankings, "rankings") == expected, record
    for chosen, rejected in (("qa", "qb"), ("q\na", "q\nb"), ("q\n\n", "q\n\nb"), ("\n\na", "\n\nb")):
        with pytest.raises(UserError, match=r"^d\.jsonl:1: (there is no prompt, and|.* is empty)"):
            rows(CHATML, {"chosen": chosen, "rejected": rejected}, load_rankings, "rankings")
    with pytest.raises(UserError, match="nor do both sides share exactly their first paragraph"):
        rows(CHATML, {"chosen": "q\n\nx\n\na", "rejected": "q\n\nx\n\nb"}, load_rankings, "rankings")


def test_answers_of_rankings_and_labels_keep_their_reasoning(rows, spelt):
    thought, plain = (PROMPT, THOUGHT + "a<|im_end|>", "\n"), (PROMPT, "b<|im_end|>", "\n")
    answers = [says("a", thinking="hm", score=1, model="m"), says("b", score=0)]
    ranking = {"prompt": "q", "completions": answers}
    assert rows(QWEN3, ranking, load_rankings, "rankings") == [spelt(*thought), spelt(*plain)]
    labelled = {"messages": [user("q"), says("a", thinking="hm")], "label": True}
    assert rows(QWEN3, labelled, load_labelled, "labels") == [spelt(*thought)]


def test_a_developer_is_the_system_and_a_line_says_so(rows, spelt, tmp_path):
    turns = [{"role": "developer", "content": "s"}, user("q"), says("a")]
    expected = spelt("<|im_start|>system\ns<|im_end|>\n" + PROMPT, "a<|im_end|>", "\n")
    assert rows(CHATML, {"messages": turns}) == [expected]
    lines = []
    load_conversations(Data(path=str(tmp_path / "d.jsonl")), say=lines.append)
    assert lines[1:] == [
        "d.jsonl: messages of the role developer are read as system messages (1 of 1 records)"
    ]
