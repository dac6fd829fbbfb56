"""Preferences and judged steps: every form that is understood, and every mistake named with its line."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.data import (
    Data,
    load_conversations,
    load_labelled,
    load_rankings,
    load_steps,
    load_tasks,
)
from posttrain.types import UserError

LOADERS = {"rankings": load_rankings, "labelled": load_labelled, "steps": load_steps}


def jsonl(folder: Path, *records: object) -> str:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


SYSTEM = {"role": "system", "content": "s"}
TEXTS = {"prompt": "2 + 3?", "chosen": "5", "rejected": "6"}
HH = {
    "chosen": "\n\nHuman: Hello\n\nAssistant:  Hi.\n\nA line.\n\nHuman: 2 + 3?\n\nAssistant: 5",
    "rejected": "\n\nHuman: Hello\n\nAssistant:  Hi.\n\nA line.\n\nHuman: 2 + 3?\n\nAssistant: 6 ",
}
HELLO = [user("Hello"), bot("Hi.\n\nA line."), user("2 + 3?")]
WHOLE = {"chosen": [*HELLO, bot("5")], "rejected": [*HELLO, bot("6")]}
ULTRA = {
    "prompt": "2 + 3?",
    "prompt_id": "x",
    "messages": [user("2 + 3?"), bot("5")],
    "chosen": [user("2 + 3?"), bot("5")],
    "rejected": [user("2 + 3?"), bot("6")],
    "score_chosen": 8.5,
    "score_rejected": 7,
}
KWISE = {"prompt": "2 + 3?", "responses": ["4", "5", "6"], "scores": [1, 3.5, 2]}
FEEDBACK = {
    "instruction": "2 + 3?",
    "completions": [
        {"response": "5", "overall_score": 8.0, "model": "a"},
        {"response": "6", "overall_score": 2.5, "model": "b"},
    ],
}

COMPARED = [
    # record, prompt, answers, scores, whether the data gave them, the form that is said
    (TEXTS, [user("2 + 3?")], "56", (1, 0), False, "1 pair in the form prompt, chosen, rejected (texts)"),
    (
        {**without(TEXTS, "prompt"), "question": "2 + 3?", "margin": 3},
        [user("2 + 3?")],
        "56",
        (3, 0),
        True,
        "1 pair in the form question, chosen, rejected, margin (texts)",
    ),
    (
        {**without(TEXTS, "prompt"), "instruction": "Add.", "input": "2 3"},
        [user("Add.\n\n2 3")],
        "56",
        (1, 0),
        False,
        "1 pair in the form instruction, input, chosen, rejected (texts)",
    ),
    (
        {**TEXTS, "prompt": [SYSTEM, user("2 + 3?")], "score_chosen": None, "score_rejected": None},
        [SYSTEM, user("2 + 3?")],
        "56",
        (1, 0),
        False,
        "1 pair in the form prompt, chosen, rejected (texts)",
    ),
    (HH, HELLO, "56", (1, 0), False, "1 pair in the form chosen, rejected (Human/Assistant turns)"),
    (
        {
            "prompt": "\n\nHuman: Hello\n\nAssistant: Hi.\n\nHuman: 2?\n\nAssistant:",
            "chosen": "5",
            "rejected": "6",
        },
        [user("Hello"), bot("Hi."), user("2?")],
        "56",
        (1, 0),
        False,
        "1 pair in the form prompt, chosen, rejected (texts)",
    ),
    (WHOLE, HELLO, "56", (1, 0), False, "1 pair in the form chosen, rejected (whole conversations)"),
    (
        ULTRA,
        [user("2 + 3?")],
        "56",
        (8.5, 7),
        True,
        "1 pair in the form prompt, chosen, rejected, score_chosen, score_rejected (whole conversations)",
    ),
    (
        {
            "prompt": HELLO,
            "chosen": [bot("5")],
            "rejected": [bot("6")],
            "chosen_rating": 5,
            "rejected_rating": 1,
        },
        HELLO,
        "56",
        (5, 1),
        True,
        "1 pair in the form prompt, chosen, rejected, chosen_rating, rejected_rating (messages)",
    ),
    (
        {
            "conversations": [{"from": "human", "value": "2 + 3?"}],
            "chosen": {"from": "gpt", "value": "5"},
            "rejected": {"from": "gpt", "value": "6"},
        },
        [user("2 + 3?")],
        "56",
        (1, 0),
        False,
        "1 pair in the form conversations, chosen, rejected (messages)",
    ),
    (KWISE, [user("2 + 3?")], "456", (1, 3.5, 2), True, "1 ranking in the form prompt, responses, scores"),
    (
        {**without(KWISE, "scores"), "ranks": [3, 1, 2]},
        [user("2 + 3?")],
        "456",
        (0, 2, 1),
        False,
        "1 ranking in the form prompt, responses, ranks",
    ),
    (
        FEEDBACK,
        [user("2 + 3?")],
        "56",
        (8, 2.5),
        True,
        "1 ranking in the form instruction, completions (each with overall_score)",
    ),
    (
        {
            "prompt": "\n\nHuman: 2?\n\nAssistant: ",
            "answers": [{"answer": "5", "rank": 2.0}, {"answer": "6", "rank": 1.0}],
        },
        [user("2?")],
        "56",
        (0, 1),
        False,
        "1 ranking in the form prompt, answers (each with rank)",
    ),
    (
        {"instruction": "2?", "generations": ["5", "6"], "ratings": [4, 4.5]},
        [user("2?")],
        "56",
        (4, 4.5),
        True,
        "1 ranking in the form instruction, generations, ratings",
    ),
]


@pytest.mark.parametrize(("record", "messages", "answers", "scores", "scored", "says"), COMPARED)
def test_every_form_becomes_a_ranking(tmp_path, record, messages, answers, scores, scored, says):
    lines: list[str] = []
    [found] = load_rankings(Data(path=jsonl(tmp_path, record)), say=lines.append)
    assert (list(found.messages), found.answers) == (messages, tuple(answers))
    assert (found.scores, found.scored) == (scores, scored)
    assert (found.id, found.source) == ("d.jsonl:1", "d.jsonl:1")
    assert lines == [f"d.jsonl: {says}"]


JUDGED = [
    # record, (id, answer, score), whether the data gave the scores
    ({"prompt": "2?", "completion": "5", "label": True}, [("d.jsonl:1", "5", 1.0)], False),
    ({"prompt": [user("2?")], "completion": [bot("5")], "label": False}, [("d.jsonl:1", "5", 0.0)], False),
    ({"id": "a", "prompt": "2?", "response": "5", "label": 1}, [("a", "5", 1.0)], False),
    ({"prompt": "2?", "response": "5", "score": -2.5}, [("d.jsonl:1", "5", -2.5)], True),
    ({"instruction": "2?", "output": "5", "reward": 3}, [("d.jsonl:1", "5", 3.0)], True),
    ({"question": "2?", "answer": "5", "rating": 3}, [("d.jsonl:1", "5", 3.0)], True),
    ({"messages": [user("2?"), bot("5")], "label": 0}, [("d.jsonl:1", "5", 0.0)], False),
    ({"prompt": "2?", "completion": "5", "label": None, "score": 2}, [("d.jsonl:1", "5", 2.0)], True),
    (
        {"id": 7, "prompt": "2?", "chosen": "5", "rejected": "6"},
        [("7/chosen", "5", 1.0), ("7/rejected", "6", 0.0)],
        False,
    ),
    (
        {"id": 7, "prompt": "2?", "responses": ["5", "6"], "scores": [4, 4.5]},
        [("7/1", "5", 4.0), ("7/2", "6", 4.5)],
        True,
    ),
]


@pytest.mark.parametrize(("record", "expected", "scored"), JUDGED)
def test_every_form_becomes_labelled_answers(tmp_path, record, expected, scored):
    found = load_labelled(Data(path=jsonl(tmp_path, record)))
    assert [(one.id, *one.answers, *one.scores) for one in found] == expected
    assert {one.scored for one in found} == {scored}
    assert all(one.messages == (user("2?"),) for one in found)


SHEPHERD = {
    "input": "What is 2 + 3 - 1? Step 1: 2 + 3 = 5 ки\nStep 2: 5 - 1 = 3 ки\nStep 3: The answer is: 3 ки",
    "label": "What is 2 + 3 - 1? Step 1: 2 + 3 = 5 +\nStep 2: 5 - 1 = 3 -\nStep 3: The answer is: 3 -",
    "task": "GSM8K",
}
SHEPHERD_STEPS = ("Step 1: 2 + 3 = 5", "Step 2: 5 - 1 = 3", "Step 3: The answer is: 3")


def prm800k(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"question": {"problem": "2 + 3?", "ground_truth_answer": "5"}, "label": {"steps": list(steps)}}


def rated(*ratings: int | None, chosen: int | None = 0, human: object = None) -> dict[str, Any]:
    offered = [{"text": f"step rated {r}, {i}", "rating": r, "flagged": None} for i, r in enumerate(ratings)]
    return {"completions": offered, "chosen_completion": chosen, "human_completion": human}


LISTS = {"prompt": "2 + 3?", "completions": ["a", "b"], "labels": [True, False]}
STEPPED = [
    # record, steps, labels, the form that is said
    (LISTS, ("a", "b"), (1.0, 0.0), "1 solution in the form prompt, completions, labels"),
    (
        {"problem": "2 + 3?", "steps": ["a", "b", "c"], "labels": [1, 0.25, None], "response": "a\nb\nc"},
        ("a", "b", "c"),
        (1.0, 0.25, None),
        "1 solution in the form problem, steps, labels",
    ),
    ({**LISTS, "response": "a\n\nb "}, ("a", "b"), (1.0, 0.0), None),
    ({**LISTS, "response": "ab"}, ("a", "b"), (1.0, 0.0), None),
    (SHEPHERD, SHEPHERD_STEPS, (1.0, 0.0, 0.0), "1 solution in the form input, label (Math-Shepherd)"),
    (
        {
            "input": SHEPHERD["input"].replace("ки", "ки ?"),
            "label": SHEPHERD["label"].replace(" +\n", " ки +\n").replace(" -\n", " ки - \n\n") + "\n",
        },
        SHEPHERD_STEPS,
        (1.0, 0.0, 0.0),
        None,
    ),
    (
        prm800k(rated(-1, 0, chosen=1), rated(1), rated(None), rated(-1, 1), rated(1)),
        ("step rated 0, 1", "step rated 1, 0", "step rated None, 0", "step rated -1, 0"),
        (1.0, 1.0, None, 0.0),
        "1 solution in the form question, label (PRM800K)",
    ),
    (
        prm800k(rated(-1, -1, chosen=None, human={"text": "by hand", "rating": None}), rated(1)),
        ("by hand", "step rated 1, 0"),
        (1.0, 1.0),
        None,
    ),
    # Where nothing was chosen the solution ends, even if what it offers first is right.
    (
        prm800k(rated(1), rated(0, 1, chosen=None), rated(1)),
        ("step rated 1, 0", "step rated 0, 0"),
        (1.0, 1.0),
        None,
    ),
]


@pytest.mark.parametrize(("record", "steps", "labels", "says"), STEPPED)
def test_every_form_becomes_steps(tmp_path, record, steps, labels, says):
    lines: list[str] = []
    [found] = load_steps(Data(path=jsonl(tmp_path, record)), say=lines.append)
    question = "What is 2 + 3 - 1?" if "input" in record else "2 + 3?"
    assert (found.messages, found.steps, found.labels) == ((user(question),), steps, labels)
    assert len(lines) == 1
    assert says is None or lines == [f"d.jsonl: {says}"]


def test_the_same_pair_in_every_form_is_the_same_pair(tmp_path):
    """Transcripts, whole conversations, and answers beside a prompt differ in nothing but their form."""
    beside = {"prompt": HELLO, "chosen": "5", "rejected": "6"}
    messages = {"prompt": HELLO, "chosen": [bot("5")], "rejected": bot("6")}
    nearly = {**HH, "rejected": HH["rejected"].rstrip()}
    found = load_rankings(Data(path=jsonl(tmp_path, nearly, WHOLE, beside, messages)))
    assert len({(one.messages[-1]["content"], len(one.messages), one.answers) for one in found}) == 1
    assert all(one.messages == found[0].messages for one in found)


def test_config_options_reach_every_loader(tmp_path):
    odd = {"q": "2 + 3?", "good": "5", "ill": "6", "a": "1"}
    names = {"prompt": "q", "chosen": "good", "rejected": "ill"}
    lines: list[str] = []
    [pair] = load_rankings(Data(path=jsonl(tmp_path, odd), columns=names, system="s"), say=lines.append)
    assert (list(pair.messages), pair.answers) == ([SYSTEM, user("2 + 3?")], ("5", "6"))
    assert lines == ["d.jsonl: 1 pair in the form q (as prompt), good (as chosen), ill (as rejected) (texts)"]
    names = {"chosen": "good", "rejected": "ill"}
    [pair] = load_rankings(Data(path=jsonl(tmp_path, odd), columns=names, template="{q}{a}"))
    assert list(pair.messages) == [user("2 + 3?1")]
    [one] = load_labelled(Data(path=jsonl(tmp_path, JUDGED[0][0]), system="s"))
    assert list(one.messages) == [SYSTEM, user("2?")]
    for record in (LISTS, SHEPHERD, prm800k(rated(1))):
        [steps] = load_steps(Data(path=jsonl(tmp_path, record), system="s"))
        assert steps.messages[0] == SYSTEM
    path = jsonl(tmp_path, *({**TEXTS, "prompt": f"p{i}"} for i in range(30)))
    asked = [
        one.messages[0]["content"]
        for one in load_rankings(Data(path=path, seed=1, limit=7), say=lines.append)
    ]
    assert lines[-1].endswith("30 pairs in the form prompt, chosen, rejected (texts); used: 7")
    assert asked != [f"p{i}" for i in range(7)]
    halves = load_labelled(Data(path=path, seed=1, limit=7))
    assert [one.messages[0]["content"] for one in halves] == [p for p in asked for _ in "ab"]


def test_mixed_forms_are_counted_apart(tmp_path):
    lines: list[str] = []
    load_rankings(Data(path=jsonl(tmp_path, KWISE, TEXTS, TEXTS)), say=lines.append)
    assert lines == [
        "d.jsonl: 2 pairs in the form prompt, chosen, rejected (texts); "
        "1 ranking in the form prompt, responses, scores"
    ]


def test_pairs_are_prompts_to_ask_and_chosen_answers_to_learn(tmp_path):
    """The stages of a pipeline read one data set: SFT its chosen answers, RL its prompts."""
    for record in (HH, WHOLE, ULTRA, TEXTS):
        path = jsonl(tmp_path, record)
        [pair] = load_rankings(Data(path=path))
        lines: list[str] = []
        [task] = load_tasks(Data(path=path), say=lines.append)
        [learnt] = load_conversations(Data(path=path), say=lines.append)
        assert task.messages == pair.messages
        assert task.answer is None
        assert learnt.messages == (*pair.messages, bot("5"))
        assert ["task" in lines[0], "conversation" in lines[1]] == [True, True]
    [task] = load_tasks(Data(path=jsonl(tmp_path, {**ULTRA, "id": 3}), template="Q: {prompt}"))
    assert (task.id, task.messages) == ("3", (user("Q: 2 + 3?"),))


def test_what_is_at_fault_can_be_skipped_and_is_counted(tmp_path):
    records = [
        TEXTS,
        {**TEXTS, "rejected": "5 "},
        {**TEXTS, "chosen": " "},
        {**TEXTS, "rejected": " 5"},
        {**WHOLE, "rejected": [user("Hallo"), *WHOLE["rejected"][1:]]},
        {**WHOLE, "rejected": [*WHOLE["rejected"][:2], user("Hello"), bot("6")]},
        TEXTS,
    ]
    path = jsonl(tmp_path, *records)
    lines: list[str] = []
    found = load_rankings(Data(path=path, bad="skip"), say=lines.append)
    assert [one.id for one in found] == ["d.jsonl:1", "d.jsonl:7"]
    assert lines == [
        "d.jsonl: 2 pairs in the form prompt, chosen, rejected (texts)",
        "d.jsonl: 5 of 7 records skipped: 2 × chosen and rejected are equal (first d.jsonl:2), "
        "2 × the prompts of the two sides differ (first d.jsonl:5), 1 × chosen is empty (first d.jsonl:3)",
    ]
    with pytest.raises(UserError, match=r"^d\.jsonl:2: "):
        load_rankings(Data(path=path))
    for loader in LOADERS.values():
        with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
            loader(Data(path=jsonl(tmp_path, {"x": 1}, {"prompt": ""}), bad="skip"))


def test_an_id_given_twice_is_skipped_the_second_time(tmp_path):
    path = jsonl(tmp_path, *({**TEXTS, "id": i} for i in ("a", "b", "a")))
    assert [one.id for one in load_rankings(Data(path=path, bad="skip"))] == ["a", "b"]
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        load_labelled(Data(path=path))


def test_tasks_and_conversations_skip_too(tmp_path):
    path = jsonl(tmp_path, {"prompt": "a?", "answer": "b"}, {"prompt": ""}, {"prompt": "c?"})
    lines: list[str] = []
    assert [t.id for t in load_tasks(Data(path=path, bad="skip"), say=lines.append)] == [
        "d.jsonl:1",
        "d.jsonl:3",
    ]
    assert lines[1] == "d.jsonl: 1 of 3 records skipped: 1 × prompt is empty (first d.jsonl:2)"
    assert [c.id for c in load_conversations(Data(path=path, bad="skip"))] == ["d.jsonl:1"]


def test_a_file_that_is_not_json_is_never_skipped(tmp_path):
    path = Path(jsonl(tmp_path, TEXTS))
    path.write_text(path.read_text() + '{"prompt": NaN}\n')
    with pytest.raises(UserError, match=r"^d\.jsonl:2: "):
        load_rankings(Data(path=str(path), bad="skip"))


def test_a_ranking_may_have_to_have_more_answers(tmp_path):
    path = jsonl(tmp_path, KWISE)
    assert len(load_rankings(Data(path=path), least=3)) == 1
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_rankings(Data(path=path), least=4)


def test_typed_columns_are_read_like_json(tmp_path):
    pq.write_table(pa.Table.from_pylist([ULTRA, ULTRA]), tmp_path / "d.parquet")
    lines: list[str] = []
    found = load_rankings(Data(path=str(tmp_path / "d.parquet")), say=lines.append)
    assert [(one.answers, one.scores) for one in found] == [(("5", "6"), (8.5, 7.0))] * 2
    assert lines[0].startswith("d.parquet: 2 pairs in the form prompt, chosen, rejected, score_chosen")
    pq.write_table(
        pa.table({"prompt": ["a"], "responses": [["b", "c"]], "scores": [[1.0, float("nan")]]}),
        tmp_path / "d.parquet",
    )
    with pytest.raises(UserError, match=r"^d\.parquet:1: "):
        load_rankings(Data(path=str(tmp_path / "d.parquet")))


TOOL = {"role": "tool", "content": "5"}


@pytest.mark.parametrize(
    ("record", "prompt", "chosen", "rejected"),
    [
        # the prompt is beside the sides
        (
            {"prompt": "2 + 3?", "chosen": [bot("Hm?"), user("Go on."), bot("5")], "rejected": [bot("6")]},
            [user("2 + 3?")],
            (bot("Hm?"), user("Go on."), bot("5")),
            "6",
        ),
        # it is what both begin with
        (
            {**WHOLE, "rejected": [HELLO[0], bot("What?"), user("No."), bot("6")]},
            HELLO[:1],
            (*HELLO[1:], bot("5")),
            (bot("What?"), user("No."), bot("6")),
        ),
        ({**WHOLE, "rejected": [HELLO[0], bot("6")]}, HELLO[:1], (*HELLO[1:], bot("5")), "6"),
        ({**HH, "rejected": "\n\nHuman: Hello\n\nAssistant: 6"}, HELLO[:1], (*HELLO[1:], bot("5")), "6"),
        (
            {**ULTRA, "chosen": [user("2 + 3?"), bot("Hm?"), user("Go on."), bot("5")]},
            [user("2 + 3?")],
            (bot("Hm?"), user("Go on."), bot("5")),
            "6",
        ),
    ],
)
def test_sides_of_a_pair_may_have_several_turns(tmp_path, record, prompt, chosen, rejected):
    path = jsonl(tmp_path, record)
    [pair] = load_rankings(Data(path=path))
    assert (list(pair.messages), pair.answers) == (prompt, (chosen, rejected))
    labelled = load_labelled(Data(path=path))
    assert [(one.answers, one.scores) for one in labelled] == [((chosen,), (1.0,)), ((rejected,), (0.0,))]
    [learnt] = load_conversations(Data(path=path))
    assert learnt.messages == (*prompt, *chosen)
    [task] = load_tasks(Data(path=path))
    assert list(task.messages) == prompt


def test_preference_data_of_openai_are_pairs(tmp_path):
    tool = {"type": "function", "function": {"name": "add"}}
    record = {
        "input": {"messages": [SYSTEM, user("2 + 3?")], "tools": [tool], "parallel_tool_calls": True},
        "preferred_output": [bot("5")],
        "non_preferred_output": [bot("6")],
    }
    path = jsonl(tmp_path, record)
    lines: list[str] = []
    [pair] = load_rankings(Data(path=path), say=lines.append)
    assert (list(pair.messages), pair.answers) == ([SYSTEM, user("2 + 3?")], ("5", "6"))
    assert [each["function"]["name"] for each in pair.tools] == ["add"]
    assert "input (as prompt)" in lines[0]
    [learnt] = load_conversations(Data(path=path))
    assert (learnt.messages, learnt.tools) == ((SYSTEM, user("2 + 3?"), bot("5")), pair.tools)
    bad = {**record, "input": {"messages": []}}
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_rankings(Data(path=jsonl(tmp_path, bad)))


def test_sides_that_differ_in_a_result_begin_with_its_call(tmp_path):
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}
    sides = [[*HELLO, called, {**TOOL, "content": text}, bot(text)] for text in "56"]
    [pair] = load_rankings(Data(path=jsonl(tmp_path, {"chosen": sides[0], "rejected": sides[1]})))
    assert list(pair.messages) == HELLO
    assert [[turn["content"] for turn in answer] for answer in pair.answers] == [
        ["", "5", "5"],
        ["", "6", "6"],
    ]
    assert "tool_calls" in pair.answers[0][0]
    [alone] = load_labelled(
        Data(path=jsonl(tmp_path, {"prompt": HELLO, "completion": sides[0][3:], "label": 1}))
    )
    assert alone.answers == pair.answers[:1]
    strange = {"chosen": sides[0], "rejected": sides[1], "tools": [{"name": "sub"}]}
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_rankings(Data(path=jsonl(tmp_path, strange)))


def other_prompt(*turns: dict[str, str]) -> dict[str, Any]:
    return {**WHOLE, "rejected": [*turns, bot("6")]}


BAD: list[tuple[str, dict[str, Any], str]] = [
    # sides
    ("rankings", {**TEXTS, "rejected": " 5\n"}, "chosen and rejected are equal"),
    ("rankings", {**HH, "rejected": HH["chosen"] + " "}, "chosen and rejected are equal"),
    ("rankings", {**WHOLE, "rejected": WHOLE["chosen"]}, "chosen and rejected are equal"),
    ("labelled", {**TEXTS, "rejected": "5"}, "chosen and rejected are equal"),
    ("rankings", {**TEXTS, "chosen": ""}, "chosen is empty"),
    ("rankings", {**TEXTS, "rejected": " \n"}, "rejected is empty"),
    ("rankings", {**TEXTS, "rejected": None}, "chosen is text, and rejected is null; both must be texts"),
    ("rankings", {**TEXTS, "chosen": 3}, "chosen is a number, and rejected is text"),
    ("rankings", {**TEXTS, "chosen": [bot("5")]}, "chosen is a list, and rejected is text"),
    ("rankings", without(TEXTS, "rejected"), "there is chosen and no rejected; it has prompt, chosen"),
    ("rankings", {**without(TEXTS, "chosen"), "choosen": "5"}, "'choosen': did you mean 'chosen'?"),
    ("rankings", {**without(TEXTS, "rejected"), "rejcted": "6"}, "'rejcted': did you mean 'rejected'?"),
    ("rankings", {**WHOLE, "chosen": []}, "chosen is empty"),
    ("rankings", {**WHOLE, "chosen": [*HELLO, bot(" ")]}, "message 4 of chosen is empty"),
    ("rankings", {**WHOLE, "chosen": HELLO}, "chosen ends with the user, not the assistant"),
    (
        "rankings",
        {**WHOLE, "chosen": [*HELLO, {"role": "bot", "content": "5"}]},
        "role of message 4 of chosen",
    ),
    (
        "rankings",
        {"prompt": "2?", "chosen": [user("5")], "rejected": [bot("6")]},
        "chosen begins with the user, not the assistant",
    ),
    # prompts
    ("rankings", without(TEXTS, "prompt"), "there is no prompt, and chosen is not a text of Human:"),
    ("rankings", {**without(TEXTS, "prompt"), "promt": "a"}, "'promt': did you mean 'prompt'?"),
    ("rankings", {"chosen": [bot("5")], "rejected": [bot("6")]}, "there is no prompt"),
    ("rankings", {**TEXTS, "prompt": " "}, "prompt is empty"),
    ("rankings", {**TEXTS, "prompt": None}, "prompt is null, not text"),
    ("rankings", {**TEXTS, "prompt": [user("a"), bot("b")]}, "the prompt ends with the assistant"),
    ("rankings", {**TEXTS, "prompt": [SYSTEM]}, "the prompt ends with the system"),
    (
        "rankings",
        {"chosen": [bot("a"), bot("5")], "rejected": [bot("a"), bot("6")]},
        "ends with the assistant",
    ),
    ("rankings", other_prompt(*HELLO[:2], user("2 + 3")), "turn 3 at character 6, '2 + 3?' against '2 + 3'"),
    ("rankings", other_prompt(), "turn 1 is the user's in one, the assistant's in the other"),
    ("rankings", {**WHOLE, "rejected": HELLO[:2]}, "rejected is the beginning of chosen"),
    ("rankings", {**WHOLE, "rejected": WHOLE["rejected"][:3]}, "rejected ends with the user"),
    (
        "rankings",
        {**TEXTS, "chosen": [bot("5"), user("?")], "rejected": [bot("6")]},
        "chosen ends with the user",
    ),
    ("rankings", other_prompt(SYSTEM, *HELLO), "turn 1 is the user's in one, the system's in the other"),
    ("rankings", {**WHOLE, "prompt": "2 + 4?"}, "prompt is not in the conversation of chosen"),
    ("rankings", {**WHOLE, "prompt": [user("2 + 4?")]}, "prompt is not in the conversation of chosen"),
    ("rankings", {**ULTRA, "messages": "x", "question": 4, "prompt": None}, "question is a number, not text"),
    # transcripts
    (
        "rankings",
        {**HH, "chosen": "\n\nAssistant: 5"},
        "there is no prompt, and chosen is not a text of Human:",
    ),
    ("rankings", {**HH, "rejected": "\n\nAssistant: 5"}, "rejected does not begin with Human:"),
    (
        "rankings",
        {**HH, "rejected": "Hm.\n\nHuman: a\n\nAssistant: b"},
        "rejected does not begin with Human:",
    ),
    ("rankings", {**HH, "chosen": HH["chosen"][:-1]}, "turn 4 of chosen, by the assistant, is empty"),
    (
        "rankings",
        {**HH, "chosen": HH["chosen"].replace("Hello", "")},
        "turn 1 of chosen, by the user, is empty",
    ),
    ("rankings", {**HH, "chosen": HH["chosen"] + "\n\nHuman: a"}, "chosen ends with the user"),
    (
        "rankings",
        {**HH, "chosen": HH["chosen"] + "\n\nAssistant: a"},
        "the assistant speaks twice in a row: turn 5",
    ),
    ("rankings", {**HH, "rejected": HH["rejected"].replace("3?", "4?")}, "turn 3 at character 5"),
    ("rankings", {"chosen": "Human: a", "rejected": "Human: b"}, "chosen ends with the user"),
    # scores of pairs
    ("rankings", {**ULTRA, "score_rejected": 8.5}, "both sides have the same score"),
    ("rankings", {**ULTRA, "score_rejected": 9}, "score_chosen is less than score_rejected: 8.5 and 9"),
    ("rankings", {**ULTRA, "score_chosen": "8"}, "score_chosen is text, not a number"),
    ("rankings", {**ULTRA, "score_chosen": True}, "score_chosen is a boolean, not a number"),
    ("rankings", {**ULTRA, "score_chosen": 10**400}, "score_chosen is not finite"),
    ("rankings", {**ULTRA, "score_rejected": None}, "there is score_chosen and no score_rejected"),
    ("rankings", {**without(ULTRA, "score_rejected"), "score_rejectd": 1}, "did you mean 'score_rejected'?"),
    ("rankings", {**TEXTS, "margin": -1}, "margin is negative"),
    ("rankings", {**TEXTS, "margin": 0}, "both sides have the same score"),
    ("rankings", {**TEXTS, "margin": [1]}, "margin is a list, not a number"),
    ("rankings", {**ULTRA, "margin": 2}, "margin is not the difference of the scores: 2, 8.5, 7"),
    # rankings
    ("rankings", {"a\nb": 1}, "it has a b"),
    ("rankings", {"x": 1}, "there is neither chosen and rejected nor one of responses"),
    ("rankings", {"prompt": "a", "respones": ["b"]}, "'respones': did you mean 'responses'?"),
    ("rankings", {**KWISE, "responses": "4"}, "responses is text, not a list"),
    ("rankings", {**KWISE, "responses": []}, "responses is empty"),
    ("rankings", {**KWISE, "responses": ["5"], "scores": [1]}, "too few: 1 of 2"),
    ("rankings", {**KWISE, "responses": ["4", " ", "6"]}, "entry 2 of responses is empty"),
    ("rankings", {**KWISE, "responses": ["4", None, "6"]}, "entry 2 of responses is null, not text"),
    (
        "rankings",
        {**KWISE, "responses": ["4", "6 ", "6"]},
        "entry 2 of responses and entry 3 of responses are equal",
    ),
    ("rankings", {**KWISE, "scores": [1, 2]}, "the numbers of answers and of scores differ: 3 and 2"),
    ("rankings", {**KWISE, "scores": [2, 2.0, 2]}, "all scores are equal"),
    ("rankings", {**KWISE, "scores": [1, 2, "3"]}, "entry 3 of scores is text, not a number"),
    ("rankings", {**KWISE, "scores": [1, 2, 10**400]}, "entry 3 of scores is not finite"),
    ("rankings", {**KWISE, "scores": 3}, "scores is a number, not a list"),
    ("rankings", {**without(KWISE, "scores"), "scroes": [1, 2, 3]}, "'scroes': did you mean 'scores'?"),
    ("rankings", {**without(KWISE, "scores"), "ranks": [1, 1, 1]}, "all ranks are equal"),
    ("rankings", without(KWISE, "scores"), "there are no scores for responses"),
    ("rankings", without(KWISE, "prompt"), "there is no prompt"),
    ("rankings", {**KWISE, "prompt": [bot("a")]}, "the prompt ends with the assistant"),
    (
        "rankings",
        {"instruction": "a", "completions": [{"overall_score": 1}]},
        "entry 1 of completions has none of",
    ),
    (
        "rankings",
        {"instruction": "a", "completions": [{"response": "b", "score": 1}, {"response": "c"}]},
        "entry 2 of completions has no score",
    ),
    (
        "rankings",
        {"instruction": "a", "completions": [{"response": "b", "score": None}]},
        "score of entry 1 of completions is null, not a number",
    ),
    (
        "rankings",
        {**KWISE, "responses": [[bot("4")], [user("5")], [bot("6")]]},
        "entry 2 of responses begins with the user",
    ),
    # answers alone
    ("labelled", {"prompt": "a", "completion": "b", "label": 2}, "label is neither true nor false: 2"),
    ("labelled", {"prompt": "a", "completion": "b", "label": 0.5}, "label is neither true nor false: 0.5"),
    ("labelled", {"prompt": "a", "completion": "b", "label": "yes"}, "label is neither true nor false: text"),
    ("labelled", {"prompt": "a", "completion": "b", "label": None}, "label is neither true nor false: null"),
    ("labelled", {"prompt": "a", "completion": "b", "lable": True}, "'lable': did you mean 'label'?"),
    ("labelled", {"prompt": "a", "completion": "b"}, "there is none of label, score, reward, rating"),
    ("labelled", {"prompt": "a", "completion": "b", "score": "high"}, "score is text, not a number"),
    ("labelled", {"prompt": "a", "completion": "", "label": True}, "completion is empty"),
    ("labelled", {"prompt": "a", "completion": 3, "label": True}, "completion is a number, not text"),
    (
        "labelled",
        {"prompt": "a", "completion": [user("b")], "label": True},
        "completion begins with the user",
    ),
    ("labelled", {"completion": "b", "label": True}, "there is no prompt"),
    ("labelled", {"prompt": "a", "compltion": "b", "label": True}, "'compltion': did you mean 'completion'?"),
    ("labelled", {"messages": [user("a")], "label": True}, "there is none of completion"),
    ("labelled", {"messages": [bot("a")], "label": True}, "there is no prompt before the answer"),
    ("labelled", {**without(KWISE, "scores"), "ranks": [1, 2, 3]}, "ranks compare answers and label none"),
    # steps
    ("steps", {"x": 1}, "there are no steps"),
    ("steps", {**without(LISTS, "completions"), "stpes": ["a"]}, "'stpes': did you mean 'steps'?"),
    ("steps", {**without(LISTS, "labels"), "lables": [True]}, "'lables': did you mean 'labels'?"),
    ("steps", without(LISTS, "prompt"), "there is no prompt"),
    ("steps", {**LISTS, "labels": [True]}, "the numbers of steps and labels differ: 2 and 1"),
    ("steps", {**LISTS, "labels": [True, 1.5]}, "label 2 is not from 0 to 1: 1.5"),
    ("steps", {**LISTS, "labels": [-1, 1]}, "label 1 is not from 0 to 1: -1"),
    ("steps", {**LISTS, "labels": ["+", "-"]}, "label 1 is text, not a number"),
    ("steps", {**LISTS, "labels": [None, None]}, "no step has a label"),
    ("steps", {**LISTS, "labels": []}, "labels is empty"),
    ("steps", {**LISTS, "labels": True}, "labels is a boolean, not a list"),
    ("steps", {**LISTS, "completions": []}, "completions is empty"),
    ("steps", {**LISTS, "completions": ["a", ""]}, "step 2 is empty"),
    ("steps", {**LISTS, "completions": ["a", 2]}, "step 2 is a number, not text"),
    ("steps", {**LISTS, "completions": "a"}, "completions is text, not a list"),
    ("steps", {**LISTS, "response": "a\nc"}, "do not join to the response; step 2 is not in it"),
    ("steps", {**LISTS, "response": "a, b"}, "do not join to the response; between two steps belongs"),
    ("steps", {**LISTS, "prompt": [user("a"), bot("b")]}, "the prompt ends with the assistant"),
    ("steps", {**SHEPHERD, "input": "What? Step 1: a"}, "input has no mark ки"),
    ("steps", {**SHEPHERD, "input": SHEPHERD["input"] + " more"}, "input continues after the last ки"),
    ("steps", {**SHEPHERD, "input": "What? 5 ки"}, "input has no 'Step 1:'"),
    ("steps", {"input": "Step 1: a ки", "label": "Step 1: a +"}, "there is no question before 'Step 1:'"),
    ("steps", {"input": "What? Step 1: a ки ки", "label": "What? Step 1: a + -"}, "step 2 is empty"),
    ("steps", {**SHEPHERD, "label": SHEPHERD["label"][:-1]}, "label does not repeat step 3"),
    ("steps", {**SHEPHERD, "label": SHEPHERD["label"].replace("5 -", "4 -")}, "label does not repeat step 2"),
    ("steps", {**SHEPHERD, "label": SHEPHERD["label"] + " +"}, "label continues after the last step"),
    ("steps", {**SHEPHERD, "label": ["+", "-", "-"]}, "label is a list, not text"),
    ("steps", without(prm800k(rated(1)), "label"), "there is question and no label"),
    ("steps", without(prm800k(rated(1)), "question"), "there is label and no question"),
    (
        "steps",
        {**prm800k(rated(1)), "label": [1]},
        "question is an object, and label a list; both must be objects",
    ),
    ("steps", {**prm800k(rated(1)), "question": {"problem": None}}, "problem of question is null, not text"),
    ("steps", prm800k(), "steps of label is empty"),
    ("steps", prm800k(rated()), "completions of step 1 is empty"),
    ("steps", prm800k(rated(2)), "rating of step 1 is none of -1, 0 and 1: 2"),
    (
        "steps",
        prm800k(rated(1), rated(1, chosen=1)),
        "chosen_completion of step 2 is none of its completions: 1",
    ),
    (
        "steps",
        prm800k(rated(1), rated(chosen=None, human={"text": ""})),
        "human_completion of step 2 is empty",
    ),
    ("steps", prm800k(rated(None)), "no step has a label"),
    ("steps", {**prm800k(rated(1)), "label": {"steps": [3]}}, "step 1 is a number, not an object"),
]


@pytest.mark.parametrize(
    ("loader", "record", "says"), BAD, ids=[f"{n}-{case[0]}" for n, case in enumerate(BAD)]
)
def test_a_record_at_fault_is_named_with_its_line(tmp_path, loader, record, says):
    good = {"rankings": TEXTS, "labelled": JUDGED[0][0], "steps": LISTS}[loader]
    with pytest.raises(UserError) as error:
        LOADERS[loader](Data(path=jsonl(tmp_path, good, record)))
    assert str(error.value).startswith("d.jsonl:2: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_cannot_replace_the_prompt_of_a_conversation(tmp_path):
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_rankings(Data(path=jsonl(tmp_path, {**WHOLE, "a": "x"}), template="{a}"))


def test_two_system_messages_are_one_too_many(tmp_path):
    record = {**TEXTS, "prompt": [SYSTEM, user("a")]}
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_rankings(Data(path=jsonl(tmp_path, record), system="t"))


def read(loader: Any, path: str) -> tuple[list[Any], str]:
    """What a loader makes of a file, or the line with which it refuses."""
    try:
        return loader(Data(path=path)), ""
    except UserError as error:
        return [], str(error)


GOOD = [c[0] for c in COMPARED] + [c[0] for c in JUDGED] + [c[0] for c in STEPPED]
NAMES = sorted({name for record in GOOD for name in record})
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", " ", "a", "b", "ки", "+", "\n\nHuman: a\n\nAssistant: b", "user", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "from", "value", "text", "rating", "response", "score", "steps"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(GOOD),
    st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3),
    st.lists(st.sampled_from(NAMES), max_size=2),
)
def test_whatever_happens_to_a_good_record_it_is_read_or_refused(tmp_path_factory, record, changed, removed):
    path = jsonl(tmp_path_factory.mktemp("fuzz"), without({**record, **changed}, *removed))
    for loader in LOADERS.values():
        items, refused = read(loader, path)
        assert bool(items) != bool(refused)
        assert not refused or (refused.startswith("d.jsonl:1: ") and "\n" not in refused)
        for item in items:
            assert item.messages[-1]["role"] in ("user", "tool")
            said, worth = (item.steps, item.labels) if loader is load_steps else (item.answers, item.scores)
            assert len(said) == len(worth) > 0
            assert all(text.strip() for text in said)
            assert loader is not load_rankings or len(set(item.scores)) > 1


def test_a_bootstrap_draws_records_again_and_leaves_others_out(tmp_path: Path) -> None:
    lines = [{"prompt": f"q{n}", "chosen": "a", "rejected": "b"} for n in range(40)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = {r.id for r in load_rankings(Data(path=str(file)))}
    drawn = [[r.id for r in load_rankings(Data(path=str(file), bootstrap=seed))] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 40
    assert len(whole) == 40
    assert 15 < len(set(drawn[0])) < 35  # 1 - 1/e of them are expected


# ---------------------------------------------------------------------- whole conversations as sides

TALKS = {"chosen": "\n\nHuman: Hi\n\nAssistant: a", "rejected": "\n\nHuman: Hi\n\nAssistant: b"}


def test_a_prompt_beside_whole_conversations_must_be_theirs_and_is_not_said_twice(tmp_path):
    [pair] = load_rankings(Data(path=jsonl(tmp_path, TALKS | {"prompt": "Hi"})))
    assert (pair.messages, pair.answers) == (({"role": "user", "content": "Hi"},), ("a", "b"))
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_rankings(Data(path=jsonl(tmp_path, TALKS | {"prompt": "Ho"})))
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        load_rankings(Data(path=jsonl(tmp_path, TALKS | {"q": "Hi"}), template="{q}"))


def test_turns_may_end_as_on_windows(tmp_path):
    record = {name: text.replace("\n", "\r\n") for name, text in TALKS.items()}
    [pair] = load_rankings(Data(path=jsonl(tmp_path, record)))
    assert (pair.messages, pair.answers) == (({"role": "user", "content": "Hi"},), ("a", "b"))


def test_sides_that_are_null_are_no_pair(tmp_path):
    record = {"prompt": "q", "completion": "r", "label": True, "chosen": None, "rejected": None}
    assert len(load_labelled(Data(path=jsonl(tmp_path, record)))) == 1
