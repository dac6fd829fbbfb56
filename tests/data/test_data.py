"""Data: every shape that is understood, and every mistake named with its line."""

import gzip
import json
import os
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import (
    Data,
    Records,
    load_conversations,
    load_labelled,
    load_rankings,
    load_tasks,
    read_hub,
    read_records,
    records,
)
from posttrain.data.documents import text_field
from posttrain.data.fields import Fields
from posttrain.data.records import Record, iterate_records
from posttrain.types import UserError
from posttrain.verifiers.function import Function
from posttrain.verifiers.protocol import gold_answer

GSM8K = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}


def jsonl(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


SHAPES = [
    # record, messages of the task, answer, other fields
    ({"prompt": "a?", "answer": "b"}, [user("a?")], "b", {}),
    ({"prompt": "a?"}, [user("a?")], None, {}),
    ({"prompt": "a?", "answer": 7}, [user("a?")], "7", {}),
    ({"prompt": "a?", "answer": 0.5, "level": 3}, [user("a?")], "0.5", {"level": 3}),
    ({"prompt": "a?", "completion": "b"}, [user("a?")], "b", {}),
    ({"prompt": "a?", "completion": "b", "answer": "c"}, [user("a?")], "c", {"completion": "b"}),
    ({"prompt": [user("a?")], "answer": "b"}, [user("a?")], "b", {}),
    ({"prompt": "a?", "answer": None}, [user("a?")], None, {}),
    ({"prompt": "a? #### 1", "answer": "x #### 1"}, [user("a? #### 1")], "x #### 1", {}),
    (GSM8K, [user("Two and two?")], "4", {"completion": GSM8K["answer"]}),
    ({"question": "a?", "answer": "b"}, [user("a?")], "b", {}),
    ({"messages": [user("a?")], "answer": "b", "id": 5}, [user("a?")], "b", {}),
    (
        {"messages": [{"role": "system", "content": "s"}, user("a?")], "prompt": "no"},
        [{"role": "system", "content": "s"}, user("a?")],
        None,
        {"prompt": "no"},
    ),
    ({"messages": [user("a?") | {"name": None}]}, [user("a?")], None, {}),
    ({"instruction": "Add.", "input": "1 2", "output": "3"}, [user("Add.\n\n1 2")], "3", {}),
    ({"instruction": "Add.", "input": "", "output": "3"}, [user("Add.")], "3", {}),
    ({"instruction": "Add.", "output": "3"}, [user("Add.")], "3", {}),
    ({"conversations": [{"from": "human", "value": "a?"}]}, [user("a?")], None, {}),
    (
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "a?"},
                {"from": "gpt", "value": "b"},
                {"from": "observation", "value": "c"},
                {"from": "chatgpt", "value": "d"},
                {"from": "user", "value": "e?"},
            ]
        },
        [
            {"role": "system", "content": "s"},
            user("a?"),
            {"role": "assistant", "content": "b"},
            {"role": "tool", "content": "c"},
            {"role": "assistant", "content": "d"},
            user("e?"),
        ],
        None,
        {},
    ),
    ({"conversations": [user("a?")]}, [user("a?")], None, {}),
    ({"messages": [{"from": "human", "value": "a?"}]}, [user("a?")], None, {}),
    ({"problem": "a?", "answer": "b", "level": 5}, [user("a?")], "b", {"level": 5}),
    ({"question": "a?", "problem": "p"}, [user("a?")], None, {"problem": "p"}),
    (
        {"prompt": "\n\nHuman: a?\n\nAssistant: b\n\nHuman: c?\n\nAssistant:"},
        [user("a?"), {"role": "assistant", "content": "b"}, user("c?")],
        None,
        {},
    ),
    ({"prompt": "Human: or not?"}, [user("Human: or not?")], None, {}),
    (
        {"prompt": "a?", "chosen": "b", "rejected": "c", "answer": 3, "level": 1},
        [user("a?")],
        "3",
        {"level": 1, "completion": "b"},
    ),
]


@pytest.mark.parametrize(("record", "messages", "answer", "fields"), SHAPES)
def test_every_shape_becomes_a_task(tmp_path, record, messages, answer, fields):
    [task] = load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", record)))
    assert (list(task.messages), task.answer, dict(task.fields)) == (messages, answer, fields)
    assert task.source == "d.jsonl:1"
    assert task.id == str(record.get("id", "d.jsonl:1"))


ASSISTANT = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"prompt": "a?", "completion": "b"}, [user("a?"), ASSISTANT]),
        ({"prompt": "a?", "answer": "b"}, [user("a?"), ASSISTANT]),
        ({"messages": [user("a?"), ASSISTANT]}, [user("a?"), ASSISTANT]),
        ({"prompt": [user("a?")], "completion": "b"}, [user("a?"), ASSISTANT]),
        ({"instruction": "a?", "output": "b"}, [user("a?"), ASSISTANT]),
        (
            {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
            [user("a?"), ASSISTANT],
        ),
        (GSM8K, [user("Two and two?"), {"role": "assistant", "content": GSM8K["answer"]}]),
    ],
)
def test_every_shape_becomes_a_conversation(tmp_path, record, messages):
    [conversation] = load_conversations(Data(path=jsonl(tmp_path / "d.jsonl", record)))
    assert list(conversation.messages) == messages


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (GSM8K, "1 task in the form question, answer"),
        ({"id": 1, "prompt": "a?", "level": 3}, "1 task in the form prompt"),
        ({"instruction": "a", "input": "b", "output": "c"}, "1 task in the form instruction, input, output"),
        ({"messages": [user("a?")], "answer": "b"}, "1 task in the form messages, answer"),
        ({"conversations": [{"from": "human", "value": "a?"}]}, "1 task in the form conversations"),
    ],
)
def test_the_form_that_was_recognised_is_said(tmp_path, record, says):
    lines: list[str] = []
    load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", record)), say=lines.append)
    assert lines == [f"d.jsonl: {says}"]


def test_the_form_is_said_in_the_names_of_the_data(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"q": "a?", "answer": "b"}, {"q": "c?", "answer": "d"})
    lines: list[str] = []
    load_tasks(Data(path=path, columns={"question": "q"}, limit=1), say=lines.append)
    load_conversations(Data(path=path, template="Say {q}"), say=lines.append)
    assert lines == [
        "d.jsonl: 1 task in the form q (as question), answer; read up to the limit",
        "d.jsonl: 2 conversations in the form a template, answer",
    ]


def test_columns_and_templates_and_system(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"problem": "p?", "gold": 3, "a": 1, "b": 2, "note": "n"})
    [task] = load_tasks(
        Data(path=path, columns={"question": "problem", "answer": "gold"}, system="Be brief.")
    )
    assert task.messages == ({"role": "system", "content": "Be brief."}, user("p?"))
    assert (task.answer, dict(task.fields)) == ("3", {"a": 1, "b": 2, "note": "n"})
    [task] = load_tasks(Data(path=path, template="What is {a} + {b}? {{{note}}}", columns={"answer": "gold"}))
    assert task.messages == (user("What is 1 + 2? {n}"),)
    assert task.answer == "3"


def test_order_limit_and_seed(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", *({"prompt": f"p{i}"} for i in range(50)))
    plain = load_tasks(Data(path=path))
    assert [t.messages[0]["content"] for t in plain] == [f"p{i}" for i in range(50)]
    assert load_tasks(Data(path=path, limit=7)) == plain[:7]
    mixed = load_tasks(Data(path=path, seed=3))
    assert mixed != plain
    assert sorted(mixed, key=lambda t: t.messages[0]["content"]) == sorted(
        plain, key=lambda t: t.messages[0]["content"]
    )
    assert load_tasks(Data(path=path, seed=3, limit=5)) == mixed[:5]
    assert load_tasks(Data(path=path, seed=4)) != mixed


def test_files_of_every_kind_hold_the_same(tmp_path):
    records = [{"prompt": f"p{i}: é\u2028\U0001f600", "answer": str(i)} for i in range(4)]
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    written = {
        "a.jsonl": text.encode(),
        "b.jsonl": text.rstrip().encode(),
        "c.txt": b"\xef\xbb\xbf" + text.replace("\n", "\r\n\n").encode(),
        "d.json": json.dumps(records, indent=2).encode(),
        "e.json": b" \n" + json.dumps(records).encode() + b"\n",
        "f.jsonl.gz": gzip.compress(text.encode()),
        "g.json.gz": gzip.compress(json.dumps(records).encode()),
        "h.json": json.dumps(records).replace("\U0001f600", "\\ud83d\\ude00").encode(),
    }
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
    table = pa.Table.from_pylist(records)
    pq.write_table(table, tmp_path / "i.parquet")
    with pa.ipc.new_stream(tmp_path / "j.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in [*written, "i.parquet", "j.arrow"]:
        assert [record.fields for record in read_records(str(tmp_path / name))] == records, name


def test_records_know_their_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "a"}\n\n\n{"prompt": "b"}')
    assert [r.source for r in read_records(str(tmp_path / "a.jsonl"))] == ["a.jsonl:2", "a.jsonl:5"]
    (tmp_path / "b.json").write_text('[\n {"prompt": "a"}, {"prompt":\n "b"}\n\n , {"prompt": "c"}]')
    assert [r.source for r in read_records(str(tmp_path / "b.json"))] == [
        "b.json:2",
        "b.json:2:19",
        "b.json:5",
    ]


def test_an_array_on_one_line_is_tasks_with_an_id_each(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": "a"}, {"prompt": "b"}]))
    tasks = load_tasks(Data(path=str(tmp_path / "a.json")))
    assert [task.id for task in tasks] == [task.source for task in tasks] == ["a.json:1", "a.json:1:19"]


BAD = [
    # name, bytes, line of the error, what it says
    ("empty.jsonl", b"", "", "no records"),
    ("blank.jsonl", b"\n \n\r\n", "", "no records"),
    ("none.json", b"[]", "", "no records"),
    ("zip.jsonl", gzip.compress(b""), "", "no records"),
    ("cut.jsonl", b'{"prompt": "a"}\n{"prompt": "b', ":2", "cut off"),
    ("cut1.jsonl", b'{"prompt": "a"', ":1", "cut off"),
    ("cut2.jsonl", b'{"prompt": "a"}\n{"prompt":', ":2", "cut off"),
    ("cut3.json", b'[{"prompt": "a"},\n{"prompt": "b"', ":2", "cut off"),
    ("cut4.json", b'[{"prompt": "a"}\n', ":2", "cut off"),
    ("comma.json", b'[{"prompt": "a"}\n{"prompt": "b"}]', ":2", "comma"),
    ("after.json", b'[{"prompt": "a"}] x', "", "something follows"),
    ("words.jsonl", b'{"prompt": "a"}\nhello\n{"prompt": "b"}\n', ":2", "not JSON"),
    ("single.jsonl", b"{'prompt': 'a'}\n", ":1", "not JSON"),
    ("comma.jsonl", b'{"prompt": "a",}\n', ":1", "not JSON"),
    ("two.jsonl", b'{"prompt": "a"} {"prompt": "b"}\n', ":1", "not JSON"),
    ("nan.jsonl", b'{"prompt": "a"}\n{"prompt": "a", "x": NaN}\n', ":2", "NaN is not JSON"),
    ("inf.jsonl", b'{"prompt": "a", "x": [-Infinity]}\n', ":1", "-Infinity is not JSON"),
    ("big.jsonl", b'{"prompt": "a", "x": 1e999}\n', ":1", "1e999 is too large"),
    ("long.jsonl", b'{"prompt": "a", "x": ' + b"1" * 5000 + b"}\n", ":1", "Exceeds the limit"),
    ("twice.jsonl", b'{"prompt": "a", "answer": "1", "answer": "2"}\n', ":1", "'answer' is given twice"),
    ("deep2.jsonl", b'{"prompt": "a", "x": {"y": 1, "y": 2}}\n', ":1", "'y' is given twice"),
    ("half.jsonl", b'{"prompt": "a\\ud83d"}\n', ":1", "\\ud83d is half of a surrogate pair"),
    ("half2.jsonl", b'{"prompt": "a", "x": [{"\\udc00": 1}]}\n', ":1", "half of a surrogate pair"),
    ("half3.json", b'[{"prompt": "\\uDE00\\uD83D"}]', ":1", "half of a surrogate pair"),
    ("list.jsonl", b'{"prompt": "a"}\n["a"]\n', ":2", "a list, not an object"),
    ("text.jsonl", b'"a"\n', ":1", "a string, not an object"),
    ("null.jsonl", b"null\n", ":1", "null, not an object"),
    ("number.jsonl", b"3\n", ":1", "a number, not an object"),
    ("bool.jsonl", b"true\n", ":1", "a boolean, not an object"),
    ("numbers.json", b"[\n3]", ":2", "a number, not an object"),
    ("nest.jsonl", b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n", ":1", "nested too deeply"),
    ("latin.jsonl", '{"prompt": "é"}\n'.encode("latin-1"), ":1", "not UTF-8 (byte 0xe9)"),
    ("line.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', ":2", "not UTF-8"),
    ("wide.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), ":1", "not UTF-8 (UTF-16)"),
    ("nul.jsonl", b'{"prompt": "\x00"}\n', ":1", "not JSON"),
    ("cut.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99)[:-20], "", "cut off"),
    ("bad.jsonl.gz", b"\x1f\x8bnot gzip at all", "", "damaged"),
    ("crc.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n')[:-8] + b"\0" * 8, "", "damaged"),
    (
        "one.json",
        b'{"n": 1,\n "data": [{"prompt": "a"}]}',
        "",
        "its records are in 'data', write that list alone",
    ),
    ("bad.parquet", b"PAR1 and nothing more", "", "Parquet file cannot be read"),
    ("bad.arrow", b"\xff\xff\xff\xff and nothing more", "", "Arrow file cannot be loaded"),
]


@pytest.mark.parametrize(("name", "data", "line", "says"), BAD, ids=[case[0] for case in BAD])
def test_a_file_that_cannot_be_read_is_named_with_the_line(tmp_path, name, data, line, says):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as error:
        read_records(str(tmp_path / name))
    assert f"{name}{line}: " in str(error.value)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


BAD_RECORDS = [
    ({"promt": "a?"}, "'promt': did you mean 'prompt'?"),
    ({"Question": "a?"}, "'Question': did you mean 'question'?"),
    ({"rows": [{"prompt": "a"}]}, "if its records are in 'rows', write that list alone"),
    ({"x": 1}, "there is none of messages, prompt"),
    ({}, "it has no fields"),
    ({"prompt": ""}, "prompt is empty"),
    ({"prompt": " \n"}, "prompt is empty"),
    ({"prompt": None}, "prompt is null, not text"),
    ({"prompt": 3}, "prompt is a number, not text"),
    ({"prompt": {"text": "a"}}, "prompt is an object, not text"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt": "a?", "id": True}, "id is a boolean"),
    ({"prompt": "a?", "id": ""}, "id is empty"),
    ({"question": "", "answer": "1"}, "question is empty"),
    ({"instruction": "a", "input": 3}, "input is a number, not text"),
    ({"messages": "a?"}, "messages is text, not a list"),
    ({"messages": []}, "messages is empty"),
    ({"messages": ["a?"]}, "message 1 of messages is text, not an object"),
    ({"messages": [{"content": "a"}]}, "message 1 of messages has no 'role'"),
    ({"messages": [{"role": "user", "contents": "a"}]}, "has no 'content'; did you mean 'contents'?"),
    ({"messages": [{"role": "user", "content": None}]}, "content of message 1 of messages is null"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "is a list, not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of type 'image'"),
    ({"messages": [{"role": "system", "content": ""}]}, "message 1 of messages is empty"),
    (
        {"messages": [{"role": "system", "content": "Be brief."}, user("a")], "system": "Be rude."},
        "gives another",
    ),
    ({"prompt": "a?", "completion": [user("b")]}, "completion ends with the user, not the assistant"),
    ({"messages": [user("a"), {"role": "assitant", "content": "b"}]}, "did you mean 'assistant'?"),
    ({"messages": [{"role": "martian", "content": "b"}]}, "must be one of system, developer, user"),
    ({"messages": [user("")]}, "message 1 of messages is empty"),
    (
        {"messages": [user("a"), {"role": "system", "content": "b"}]},
        "a system message, which must come first",
    ),
    ({"messages": [{**user("a"), "tool_calls": [{}]}]}, "'tool_calls', which is not understood"),
    ({"messages": [ASSISTANT]}, "ends with no message to answer"),
    ({"messages": [user("a"), ASSISTANT, ASSISTANT]}, "ends with no message to answer"),
    (
        {"messages": [user("a"), {**ASSISTANT, "thinking": "x", "reasoning": "y"}]},
        "has different reasoning in reasoning and in thinking",
    ),
    (
        {"messages": [user("a"), {**ASSISTANT, "thinking": ["x"]}]},
        "thinking of message 2 of messages is a list",
    ),
    ({"messages": [{**user("a"), "thinking": "x"}]}, "has 'thinking', which is not understood"),
    ({"conversations": [{"from": "human", "content": "a"}]}, "has no 'value'"),
    ({"conversations": [{"from": "robot", "value": "a"}]}, "from of message 1 of conversations is 'robot'"),
]


@pytest.mark.parametrize(("record", "says"), BAD_RECORDS)
def test_a_record_that_is_no_task_is_named_with_its_line(tmp_path, record, says):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "fine"}, record)
    with pytest.raises(UserError) as error:
        load_tasks(Data(path=path))
    assert str(error.value).startswith("d.jsonl:2: ")
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"prompt": "a?"}, "no answer to learn"),
        ({"prompt": "a?", "completions": "b"}, "did you mean 'completions'?"),
        ({"prompt": "a?", "completion": " "}, "no answer to learn"),
        ({"messages": [user("a?")]}, "no answer to learn"),
        ({"messages": [ASSISTANT]}, "no message of a user precedes the assistant's"),
        (
            {"messages": [{"role": "system", "content": "s"}, ASSISTANT]},
            "no message of a user precedes the assistant's",
        ),
    ],
)
def test_a_record_that_is_no_conversation_is_named_with_its_line(tmp_path, record, says):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "a?", "completion": "b"}, record)
    with pytest.raises(UserError) as error:
        load_conversations(Data(path=path))
    assert str(error.value).startswith("d.jsonl:2: ")
    assert says in str(error.value)


def test_ids_are_compared_among_all_records(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", *({"prompt": "a", "id": i} for i in (1, 2, "1")))
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        load_tasks(Data(path=path, limit=2, seed=0))


def test_records_behind_the_limit_are_not_read(tmp_path):
    good = [{"prompt": f"p{i}", "answer": i} for i in range(5)]
    text = "".join(json.dumps(record) + "\n" for record in good) + "this is not JSON"
    (tmp_path / "d.jsonl").write_text(text)
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(text.encode())[:-6])  # its end is cut off
    for name in ("d.jsonl", "d.jsonl.gz"):
        lines: list[str] = []
        found = load_tasks(Data(path=str(tmp_path / name), limit=3), say=lines.append)
        assert [task.answer for task in found] == ["0", "1", "2"]
        assert lines[0] == f"{name}: 3 tasks in the form prompt, answer; read up to the limit"
        for options in ({}, {"limit": 3, "seed": 0}):  # a shuffle takes from all records
            with pytest.raises(UserError, match=r"6: it is not JSON|cut off"):
                load_tasks(Data(path=str(tmp_path / name), **options))
    table = pa.Table.from_pylist(good * 1000)
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=1000, compression="none")
    whole = (tmp_path / "d.parquet").read_bytes()
    opened = iterate_records(str(tmp_path / "d.parquet"))
    assert next(opened).fields == good[0]
    assert len(load_tasks(Data(path=str(tmp_path / "d.parquet"), limit=2))) == 2
    (tmp_path / "d.parquet.gz").write_bytes(gzip.compress(whole))
    assert len(read_records(str(tmp_path / "d.parquet.gz"))) == 5000


@contextmanager
def peak_below(size):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


def test_a_large_file_costs_what_is_kept_of_it(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", *({"prompt": f"p{i}", "answer": i} for i in range(1000)))
    os.truncate(path, 3 << 30)  # behind the records is a hole
    with peak_below(2 << 20):
        assert len(load_tasks(Data(path=path, limit=1000))) == 1000
    (tmp_path / "d.csv").write_text("prompt,answer\n" + "".join(f"What is {i}?,{i}\n" for i in range(5_000)))
    with peak_below(1 << 17):
        answers = (record.fields["answer"] for record in iterate_records(str(tmp_path / "d.csv")))
        assert sum(answers) == sum(range(5_000))


def test_records_skipped_do_not_count_towards_the_limit(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "a"}, {"prompt": ""}, {"prompt": "b"}, {"prompt": ""})
    lines: list[str] = []
    found = load_tasks(Data(path=path, limit=2, bad="skip"), say=lines.append)
    assert [task.id for task in found] == ["d.jsonl:1", "d.jsonl:3"]
    assert lines[1] == "d.jsonl: 1 of 3 records skipped: 1 × prompt is empty (first d.jsonl:2)"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"columns": {"answer": "anser"}},
            "d.jsonl:1: there is no field 'anser' (for answer); did you mean 'answer'",
        ),
        ({"columns": {"question": "zzz"}}, "it has prompt, answer, a, s"),
        ({"template": "{promt}?"}, "there is no field 'promt' for the template; did you mean 'prompt'?"),
        ({"template": "{a:d}"}, "the template cannot be filled in"),
        ({"template": "{s}"}, "'s', which the template wants, is null"),
        ({"split": "train"}, "a file has no split"),
        ({"subset": "main"}, "a file has no subset"),
    ],
)
def test_options_that_do_not_fit_the_data_are_named(tmp_path, options, says):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "p", "answer": "1", "a": "x", "s": None})
    with pytest.raises(UserError) as error:
        load_tasks(Data(path=path, **options))
    assert says in str(error.value)


def test_a_message_of_a_developer_is_a_system_message(tmp_path):
    turns = [{"role": "developer", "content": "Be brief."}, user("a?"), {"role": "assistant", "content": "b"}]
    for name, keys in (("messages", ("role", "content")), ("conversations", ("from", "value"))):
        record = {name: [dict(zip(keys, turn.values(), strict=True)) for turn in turns]}
        [found] = load_conversations(Data(path=jsonl(tmp_path / "d.jsonl", record)))
        assert found.messages[0] == {"role": "system", "content": "Be brief."}
    two = {"messages": [{"role": "system", "content": "s"}, *turns]}
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_conversations(Data(path=jsonl(tmp_path / "d.jsonl", two)))


@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}])
def test_a_message_of_weight_0_is_marked(tmp_path, mark):
    said = {"role": "assistant", "content": "b"}
    turns = [user("a?") | {"weight": 0}, said | mark, user("c?"), said | {"weight": 1, "train": True}]
    path = jsonl(tmp_path / "d.jsonl", {"messages": turns})
    [found] = load_conversations(Data(path=path))
    assert found.messages == (user("a?"), said | {"weight": 0}, user("c?"), said)
    [task] = load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", {"messages": turns[:3]})))
    assert task.messages == (user("a?"), said, user("c?"))


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (
            {"role": "assistant", "content": "b", "weight": 0.5},
            "weight of message 2 of messages is 0.5; only 0",
        ),
        ({"role": "assistant", "content": "b", "train": "no"}, "train of message 2 of messages is 'no'"),
        ({"role": "user", "content": "b", "train": True}, "is to be trained, and is the user's"),
        ({"role": "user", "content": "b", "reasoning_content": "c"}, "'reasoning_content', which is not"),
    ],
)
def test_marks_that_cannot_be_kept_are_refused(tmp_path, turn, says):
    path = jsonl(tmp_path / "d.jsonl", {"messages": [user("a?"), turn]})
    with pytest.raises(UserError) as error:
        load_conversations(Data(path=path))
    assert says in str(error.value)


def test_two_system_messages_are_one_too_many(tmp_path):
    record = {"messages": [{"role": "system", "content": "s"}, user("a")]}
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", record), system="t"))


def test_a_template_that_is_filled_with_nothing_is_an_empty_prompt(tmp_path):
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", {"a": " "}), template="{a}"))


@pytest.mark.parametrize(
    "options",
    [
        {"path": " "},
        {"limit": 0},
        {"bad": "ignore"},
        {"system": " "},
        {"columns": {"promt": "x"}},
        {"template": "no field"},
        {"template": "{a"},
        {"template": "{}"},
        {"template": "{0}"},
        {"template": "{a.b}"},
        {"template": "{a[0]}"},
        {"template": "{a}", "columns": {"prompt": "x"}},
    ],
)
def test_impossible_options_of_data_are_refused(options):
    with pytest.raises(ValueError):
        Data(**{"path": "d.jsonl", **options})


def test_paths_that_lead_nowhere(tmp_path):
    jsonl(tmp_path / "train.jsonl", {"prompt": "a"})
    for path, says in (
        (tmp_path, "it is a directory; name a file in it: train.jsonl"),
        (tmp_path / "trian.jsonl", "no such file; did you mean 'train.jsonl'?"),
        (tmp_path / "x" / "y.jsonl", "no such file"),
        ("zzz.jsonl", "no such file"),
        ("gsm8k", "as owner/name"),
        ("x" * 5000, "no such file"),
        ("a\0b", "no such file"),
        ("~nobody-of-this-name/d.jsonl", "no such file"),
    ):
        with pytest.raises(UserError) as error:
            read_records(str(path))
        assert says in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = Path(jsonl(tmp_path / "d.jsonl", {"prompt": "a"}))
    path.chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        read_records(str(path))


def test_a_missing_number_in_parquet_is_null_and_matters_where_it_is_read(tmp_path):
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "score": [1.0, float("nan")]})
    pq.write_table(table, tmp_path / "d.parquet")
    path = str(tmp_path / "d.parquet")
    assert [record.fields["score"] for record in read_records(path)] == [1.0, None]
    assert len(load_tasks(Data(path=path))) == 2
    with pytest.raises(UserError, match=r"^d\.parquet:2: "):
        load_labelled(Data(path=path))


def test_a_missing_number_in_a_list_or_object_is_null(tmp_path):
    rows = {"prompt": ["a"], "marks": [[1.0, float("nan")]], "info": [{"level": float("nan")}]}
    pq.write_table(pa.table(rows), tmp_path / "d.parquet")
    missing = {"marks": [1.0, None], "info": {"level": None}}
    [task] = load_tasks(Data(path=str(tmp_path / "d.parquet")))
    assert task.fields == missing
    rows = [{"prompt": "a", "marks": (1.0, float("nan")), "info": {"level": pandas.NA}, "at": pandas.NaT}]
    [task] = load_tasks(Data(path=Records.of(rows)))
    assert task.fields == {"marks": (1.0, None), "info": {"level": None}, "at": None}


@pytest.mark.parametrize(
    ("value", "name"), [(1.0, "1"), (3e15, "3000000000000000"), (0, "0"), ("1.0", "1.0")]
)
def test_an_id_that_pandas_made_a_float_is_a_whole_number(tmp_path, value, name):
    frame = pandas.DataFrame({"prompt": ["a", "b"], "id": [value, None]})
    tasks = load_tasks(Data(path=Records.of(frame.to_dict("records"))))
    assert [task.id for task in tasks] == [name, "data:2"]
    for bad in (1.5, float("inf"), True):
        with pytest.raises(UserError, match=r"^data:1: "):
            load_tasks(Data(path=Records.of([{"prompt": "a", "id": bad}])))


def test_an_answer_keeps_its_type_for_functions(tmp_path):
    jsonl(tmp_path / "d.jsonl", {"prompt": "a", "answer": 42})
    (tmp_path / "d.csv").write_text("prompt,answer\na,42\n")
    pq.write_table(pa.table({"prompt": ["a"], "answer": [42]}), tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.csv", "d.parquet"):
        [task] = load_tasks(Data(path=str(tmp_path / name)))
        assert (task.answer, task.typed_answer, type(task.typed_answer)) == ("42", 42, int), name
    for record, typed in (
        ({"prompt": "a", "answer": True}, True),
        ({"prompt": "a", "answer": 0}, 0),
        ({"prompt": "a", "answer": 0.5}, 0.5),
        ({"prompt": "a", "answer": "42"}, "42"),
        ({"prompt": "a", "answer": [1, "b"]}, [1, "b"]),
        ({"prompt": "a", "answer": {"low": 1}}, {"low": 1}),
        ({"prompt": "a", "completion": 42}, 42),
        ({"question": "a", "answer": "6 * 7 #### 42"}, "42"),
        ({"prompt": "a", "answer": None}, None),
    ):
        [task] = load_tasks(Data(path=Records.of([record])))
        assert (task.typed_answer, type(task.typed_answer)) == (typed, type(typed))
        [again] = load_tasks(Data(path=Records.of([task, {"prompt": "b"}])))[:1]
        assert again.typed_answer == task.typed_answer


def test_a_function_gets_the_answer_of_the_data_and_a_line_says_so(tmp_path):
    record, lines = {"prompt": "a", "answer": {"any": [7, 8]}}, []
    [task] = load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", record)), say=lines.append)
    assert "answer is an object: a reward function gets it as it is" in lines[1]
    assert lines[1].endswith("(1 of 1 records)")

    def judge(response, answer):
        return response == str(answer["any"].pop())

    function = Function(function=judge, name="judge")
    function.check_all([task])
    for _ in range(2):  # a function that changes its arguments changes a copy
        assert function(task, "8").score == 1.0
    with pytest.raises(UserError, match=r"^d\.jsonl:1: the answer of task .* is not text or a number"):
        gold_answer(task)


def test_the_last_message_of_the_assistant_is_the_answer_to_a_task(tmp_path):
    chat = [user("1 + 1?"), {"role": "assistant", "content": "2"}, user("And 2 + 3?")]
    last = {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}
    shares = [{"from": {"user": "human"}.get(m["role"], "gpt"), "value": m["content"]} for m in [*chat, last]]
    prompt = {"messages": chat}, {"prompt": chat}, {"conversations": shares[:-1]}
    whole = {"messages": [*chat, last]}, {"prompt": [*chat, last]}, {"conversations": shares}
    for asked, answered in zip(prompt, whole, strict=True):
        for answer, completion in (({}, {}), ({"answer": 5}, {"completion": "5"})):
            lines: list[str] = []
            data = Data(path=jsonl(tmp_path / "d.jsonl", answered | answer))
            [task] = load_tasks(data, say=lines.append)
            [expected] = load_tasks(Data(path=Records.of([asked | {"answer": "5"} | answer])))
            assert task.messages == expected.messages
            assert task.typed_answer == expected.typed_answer
            assert task.fields == completion
            assert sum("the assistant's last message" in line for line in lines) == 1


# ---------------------------------------------------------------------- as data sets of the Hub have it

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "record",
    [
        {"system": "Be brief.", "question": "q"},
        {"system_prompt": "Be brief.", "prompt": "q"},
        {"system": "Be brief.", "conversations": [{"from": "human", "value": "q"}]},
        {"system": "Be brief.", "messages": [SYSTEM, user("q")]},
        {"system": "Be brief.", "question": "q", "chosen": "a", "rejected": "b"},
    ],
    ids=str,
)
def test_a_system_message_beside_the_prompt_is_part_of_it(tmp_path, record):
    [task] = load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", record)))
    assert task.messages == (SYSTEM, user("q"))


def test_a_blank_system_message_is_none(tmp_path):
    blank = {"messages": [{"role": "system", "content": ""}, user("q")], "system": " "}
    assert load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", blank)))[0].messages == (user("q"),)


def test_columns_that_others_show_in_the_prompt_are_named(tmp_path):
    said = []
    path = jsonl(
        tmp_path / "d.jsonl",
        {"prompt": "a", "tools": [{}]},
        {"prompt": "b", "tools": [], "history": [1], "images": ["a.png"]},
    )
    load_tasks(Data(path=path), say=said.append)
    named = "tools (1), history (1), images (1)"
    assert said[1] == f"d.jsonl: not part of the prompts, though other trainers show it: {named}"
    said.clear()
    load_tasks(Data(path=path, template="{prompt}"), say=said.append)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("record", "columns", "asked", "learnt"),
    [
        ({"prompt": "P", "body": "B", "answer": "3"}, {"question": "body"}, "B", "3"),
        ({"prompt": "P", "answer": "3", "best": "X"}, {"answer": "best"}, "P", "X"),
        ({"prompt": "P", "response": "S", "best": "X"}, {"answer": "best"}, "P", "X"),
        (
            {"problem": "P", "solution": "S", "messages": [user("m"), {"role": "assistant", "content": "n"}]},
            {"problem": "problem"},
            "P",
            "S",
        ),
    ],
    ids=["prompt", "answer", "beside", "problem"],
)
def test_what_the_config_names_comes_before_what_is_found(tmp_path, record, columns, asked, learnt):
    [found] = load_conversations(Data(path=jsonl(tmp_path / "d.jsonl", record), columns=columns))
    assert [m["content"] for m in found.messages] == [asked, learnt]


def test_a_label_is_that_which_the_config_names(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "p", "response": "r", "score": 0.1, "helpfulness": 4})
    [found] = load_labelled(Data(path=path, columns={"reward": "helpfulness"}))
    assert found.scores == (4.0,)


def test_a_column_named_for_nothing_that_is_read_is_an_error(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": "p", "answer": "3", "best": "X"})
    with pytest.raises(UserError, match="columns takes 'best' for margin, which is not read of a task"):
        load_tasks(Data(path=path, columns={"margin": "best"}))


@pytest.mark.parametrize(
    ("record", "learnt"),
    [
        ({"prompt": "q", "response": "r", "helpfulness": 4}, "r"),
        ({"instruction": "q", "context": "", "response": "r"}, "r"),
        ({"instruction": "q", "completion": "r"}, "r"),
        ({"question": "q", "output": "r"}, "r"),
        ({"problem": "q", "solution": "s", "answer": "3"}, "s"),
        ({"prompt": [user("q")], "completion": [{"role": "assistant", "content": "r"}]}, "r"),
        ({"prompt": "q", "completion": {"role": "assistant", "content": "r"}, "messages": None}, "r"),
        ({"prompt": "q", "completion": "r", "chosen": None, "rejected": None, "id": None}, "r"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "answer": "r"}, "r"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_answers_of_many_names_are_learnt(tmp_path, record, learnt):
    [found] = load_conversations(Data(path=jsonl(tmp_path / "d.jsonl", record)))
    assert found.messages == (user("q"), {"role": "assistant", "content": learnt})


def test_a_verifier_finds_the_answer_and_what_stands_beside_it(tmp_path):
    [task] = load_tasks(
        Data(path=jsonl(tmp_path / "d.jsonl", {"problem": "q", "solution": "s", "answer": "3"}))
    )
    assert task.answer == "3"
    assert task.fields["solution"] == "s"
    [task] = load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", {"prompt": "q", "output": "5\n"})))
    assert (task.answer, task.fields["output"]) == (None, "5\n")


@pytest.mark.parametrize(
    "field",
    [
        {"solution": ["a", "b"]},
        {"solution": {"code": "x"}},
        {"output": ["2"]},
        {"output": True},
        {"response": [user("a"), {"role": "assistant", "content": "b"}]},
        {"solution": ""},
    ],
    ids=str,
)
def test_what_verifiers_read_stays_as_it_is(tmp_path, field):
    record = {"prompt": "q", "answer": "3", "input": "1", **field}
    path = jsonl(tmp_path / "d.jsonl", record)
    [task] = load_tasks(Data(path=path))
    assert (task.messages, task.answer) == ((user("q"),), "3")
    assert task.fields.items() >= {"input": "1", **field}.items()
    [task] = load_tasks(Data(path=path, template="{prompt}"))
    assert (task.answer, task.fields["input"]) == ("3", "1")


def test_a_blank_worked_answer_leaves_the_short_one_to_learn(tmp_path):
    record = {"problem": "q", "solution": " ", "answer": "3"}
    [found] = load_conversations(Data(path=jsonl(tmp_path / "d.jsonl", record)))
    assert found.messages[-1]["content"] == "3"


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        ({"prompt": None, "question": "q", "answer": "w #### 4"}, "4"),
        ({"messages": None, "prompt": "q", "completion": "r"}, "r"),
        ({"messages": None, "instruction": "q", "output": "r"}, "r"),
    ],
    ids=["question", "prompt", "instruction"],
)
def test_a_prompt_that_is_null_is_not_there(tmp_path, record, answer):
    [task] = load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", record)))
    assert (task.messages, task.answer) == ((user("q"),), answer)


def test_the_system_message_of_the_config_takes_the_place_of_a_column(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"system": "Be rude.", "question": "q"})
    [task] = load_tasks(Data(path=path, system="Be brief."))
    assert task.messages == (SYSTEM, user("q"))
    [task] = load_tasks(Data(path=path, template="{system} {question}"))
    assert task.messages == (user("Be rude. q"),)


def test_a_template_leaves_what_follows_the_mark_as_the_answer(tmp_path):
    [task] = load_tasks(Data(path=jsonl(tmp_path / "d.jsonl", GSM8K), template="{question} Think."))
    assert (task.messages, task.answer) == ((user("Two and two? Think."),), "4")
    assert task.fields["completion"] == GSM8K["answer"]


def test_a_column_that_is_null_everywhere_was_read(tmp_path):
    record = {"prompt": "q", "chosen": "a", "rejected": "b", "m": None}
    assert len(load_rankings(Data(path=jsonl(tmp_path / "d.jsonl", record), columns={"margin": "m"}))) == 1


def test_a_completion_of_several_messages_goes_on_with_the_prompt(tmp_path):
    turns = [{"role": "assistant", "content": "a"}, user("b"), {"role": "assistant", "content": "c"}]
    [found] = load_conversations(Data(path=jsonl(tmp_path / "d.jsonl", {"prompt": "q", "completion": turns})))
    assert found.messages == (user("q"), *turns)


def test_a_template_is_filled_with_text_only(tmp_path):
    path = jsonl(tmp_path / "d.jsonl", {"prompt": [user("q")]})
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_tasks(Data(path=path, template="{prompt}"))
    path = jsonl(tmp_path / "e.jsonl", {"nums": [1, 2], "target": 3})
    assert load_tasks(Data(path=path, template="{nums} to {target}"))[0].messages == (user("[1, 2] to 3"),)


def test_a_data_set_of_the_hub_library_is_read_for_real(tmp_path, monkeypatch):
    """The library takes a local folder for a data set, so nothing needs to be reached."""
    folder = tmp_path / "sums"
    folder.mkdir()
    jsonl(folder / "train.jsonl", GSM8K, GSM8K)
    jsonl(folder / "test.jsonl", GSM8K)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    records = read_hub(str(folder), split="train")
    assert [r.fields for r in records] == [GSM8K, GSM8K]
    assert records[1].source == f"{folder}:2"
    with pytest.raises(UserError, match="cannot be loaded"):
        read_hub(str(folder), split="validation")


def test_a_name_of_the_hub_that_cannot_be_had_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as error:
        load_tasks(Data(path="nobody-here/nothing-there", subset="main", split="test"))
    assert str(error.value).startswith("nobody-here/nothing-there:main: the data set cannot be loaded: ")
    assert "\n" not in str(error.value)


def outcome(path: Path) -> bool:
    """Whether there are tasks, or one line that names the file; anything else is raised."""
    try:
        return bool(load_tasks(Data(path=str(path))))
    except UserError as error:
        return "d.jsonl" in str(error) and "\n" not in str(error)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,\\unptrom 0123456789eEdD8\n').map(str.encode))
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "d.jsonl"
    path.write_bytes(data)
    assert outcome(path)


RECORD = json.dumps({"messages": [user("a?")], "answer": "7", "id": "x", "level": [1.5, None]})


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(RECORD) - 1), st.integers(0, 3), st.binary(max_size=2))
def test_whatever_happens_to_a_good_record_it_is_read_or_refused(tmp_path_factory, at, removed, added):
    path = tmp_path_factory.mktemp("fuzz") / "d.jsonl"
    good = RECORD.encode()
    path.write_bytes(good[:at] + added + good[at + removed :] + b"\n")
    assert outcome(path)


def test_values_separated_by_commas_or_tabs_are_records(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(
        b"\xef\xbb\xbfprompt,answer,code,score,good,note\r\n"
        b'"1, 2 or\n3?",3,007,0.5,true,\r\n\r\nhi,-4,12,1,False,x\r\n'
    )
    one, two = read_records(str(file))
    assert one.fields == {
        "prompt": "1, 2 or\n3?",
        "answer": 3,
        "code": "007",
        "score": 0.5,
        "good": True,
        "note": None,
    }
    assert (two.fields["answer"], two.fields["code"], two.fields["good"]) == (-4, "12", False)
    assert (one.source, two.source) == ("a.csv:2", "a.csv:5")
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(b"prompt\tanswer\n1+1=\t2\n"))
    assert [r.fields for r in read_records(str(tmp_path / "a.tsv.gz"))] == [{"prompt": "1+1=", "answer": 2}]
    tasks = load_tasks(Data(path=str(file)))
    assert [task.answer for task in tasks] == ["3", "-4"]


def test_an_answer_is_the_text_of_its_cell_and_its_column_still_one_of_numbers(tmp_path):
    file = tmp_path / "prices.csv"
    file.write_text("prompt,answer,yes\na,12.50,True\nb,,\nc,3,false\nd,4.0,false\n")
    assert [task.answer for task in load_tasks(Data(path=str(file)))] == ["12.50", None, "3", "4.0"]
    said = load_tasks(Data(path=str(file), columns={"answer": "yes"}))
    assert [task.answer for task in said] == ["True", None, "false", "false"]
    records = list(read_records(str(file)))
    assert [Fields(record, {}).number("answer") for record in records if record.fields["answer"]] == [
        12.5,
        3,
        4,
    ]
    (tmp_path / "ids.csv").write_text("id,prompt\n1.10,a\n1.20,b\n")
    assert [task.id for task in load_tasks(Data(path=str(tmp_path / "ids.csv")))] == ["1.10", "1.20"]


def table(folder, text, name="d.csv"):
    (folder / name).write_text(text)
    return Data(path=str(folder / name))


def test_where_a_text_is_wanted_a_number_of_a_table_is_the_text_of_its_cell(tmp_path):
    pair = load_rankings(table(tmp_path, "prompt,chosen,rejected\n2+3?,5,6.0\n1,2,03\n"))
    assert [each.answers for each in pair] == [("5", "6.0"), ("2", "03")]
    pair = load_rankings(table(tmp_path, "prompt,chosen,rejected\n2+3?,5,6.50\n"))
    assert pair[0].answers == ("5", "6.50")
    label = load_labelled(table(tmp_path, "question,completion,label\n12,3.10,true\n7,4,false\n"))
    assert [(r.messages[0]["content"], r.answers, r.scores) for r in label] == [
        ("12", ("3.10",), (1.0,)),
        ("7", ("4",), (0.0,)),
    ]
    learnt = load_conversations(table(tmp_path, "prompt,completion\nIs it?,True\nWas it?,False\n"))
    assert [each.messages[1]["content"] for each in learnt] == ["True", "False"]
    asked = load_tasks(table(tmp_path, "instruction,input,output\nDouble:,007,14\nHalve:,7,3.50\n"))
    assert [(t.messages[0]["content"], t.answer) for t in asked] == [
        ("Double:\n\n007", "14"),
        ("Halve:\n\n7", "3.50"),
    ]
    asked = load_tasks(table(tmp_path, "instruction,input\nDouble:,7\nHalve:,8\n"))
    assert [task.messages[0]["content"] for task in asked] == ["Double:\n\n7", "Halve:\n\n8"]
    assert text_field(read_records(table(tmp_path, "text\n4.50\n").path)[0]) == "4.50"
    (tmp_path / "d.jsonl").write_text('{"prompt": "2+3?", "chosen": 5, "rejected": 6}\n')
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_rankings(Data(path=str(tmp_path / "d.jsonl")))


def test_a_cell_may_be_long_and_the_name_in_capitals(tmp_path):
    long = "a, " * 100_000
    for name, separator in (("d.CSV", ","), ("d.Tsv", "\t")):
        [task] = load_tasks(table(tmp_path, f'prompt{separator}answer\n"{long}"{separator}2\n', name))
        assert (task.messages[0]["content"], task.answer) == (long, "2")
    (tmp_path / "d.CSV.GZ").write_bytes(gzip.compress(b"prompt,answer\n1+1=,2\n"))
    assert [r.fields for r in read_records(str(tmp_path / "d.CSV.GZ"))] == [{"prompt": "1+1=", "answer": 2}]


@pytest.mark.parametrize(("given", "text"), [(42.0, "42"), (-0.5, "-0.5"), (1e300, "1e+300"), (True, "true")])
def test_an_answer_that_is_no_text_becomes_one(given, text):
    assert Fields(Record({"answer": given}, "d.jsonl:1"), {}).answer("answer") == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1\n", "a.csv:2: 1 columns, and 2 have names"),
        ("a,b\r\r1,2\r1\r", "a.csv:4: 1 columns, and 2 have names"),
        ("a,a\n1,2\n", "a.csv:1: the first row must name each column"),
        ('a,b\n"1,2\n', "a.csv:2: it is not CSV"),
        ("a,b\n", "the file has no records"),
        ("a;b\n1,5;2\n", "a.csv:1: its columns seem to be separated by ';', not ','"),
        ("", "a.csv"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, text, said):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(UserError, match=said):
        read_records(str(tmp_path / "a.csv"))


def test_a_directory_that_save_to_disk_wrote_is_read(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "two"))
    found = read_records(str(tmp_path / "one"))
    assert [r.fields for r in found] == list(rows)
    assert found[1].source == "one:2"
    assert [r.fields for r in read_records(str(tmp_path / "two"))] == list(rows)
    assert len(read_records(str(tmp_path / "two"), split="test")) == 1
    with pytest.raises(UserError, match="there is no split 'dev'; it has train, test"):
        read_records(str(tmp_path / "two"), split="dev")
    with pytest.raises(UserError, match="has no splits"):
        read_records(str(tmp_path / "one"), split="test")


def test_images_and_sounds_are_not_decoded(tmp_path):
    """Nothing here could decode them: the bytes are no image."""
    import datasets

    damaged = {"bytes": b"no image", "path": None}
    features = {
        "prompt": datasets.Value("string"),
        "image": datasets.Image(),
        "images": datasets.List(datasets.Image()),
        "info": datasets.Json(),
    }
    row = {"prompt": "a", "image": damaged, "images": [damaged], "info": {"unit": None}}
    rows = datasets.Dataset.from_list([row, row], features=datasets.Features(features))
    rows.save_to_disk(str(tmp_path / "saved"))
    for data in (
        Data(path=str(tmp_path / "saved")),
        Data(path=Records.of(rows)),
        Data(path=Records.of(rows.to_iterable_dataset())),
        Data(path=Records.of(rows.with_format("numpy"))),
    ):
        lines: list[str] = []
        tasks = load_tasks(data, say=lines.append)
        assert [task.fields for task in tasks] == [{k: v for k, v in row.items() if k != "prompt"}] * 2
        assert lines[1].endswith(
            "not part of the prompts, though other trainers show it: images (2), image (2)"
        )


def test_a_line_of_more_than_any_model_reads_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MOST_LINE", 100)
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "1+1=", "answer": "2"}\n' + json.dumps({"prompt": "x" * 100})
    )
    with pytest.raises(UserError, match=r"^a\.jsonl:2: "):
        read_records(str(tmp_path / "a.jsonl"))
