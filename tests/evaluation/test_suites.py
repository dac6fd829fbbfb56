"""evals: what each suite asks, word for word, who judges it, and what changes a fingerprint."""

import json
from dataclasses import replace

import pytest

from mathcheck.plugin.number import Number
from posttrain.base.chat import Chat
from posttrain.evaluation.suites.numbers import ratios
from posttrain.evaluation.suites.run import SuiteProtocol, _line
from posttrain.evaluation.suites.suite import Shots, fingerprint, read
from posttrain.evaluation.suites.table import SUITES, suite_of
from posttrain.types import Completion, Sampling, UserError, Verdict
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.sandbox import host

from ..conftest import TEMPLATE, tiny_tokenizer

SCHOOL = [
    {"question": f"What is {n} plus {n}?", "answer": f"Add <<{n}+{n}={2 * n}>>them.\n#### {2 * n:,}"}
    for n in range(600, 620)
]
FUNCTION = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\ndef total(xs: List[int]) -> int:\n    """The sum."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
SENTENCE = {
    "task_id": 11,
    "text": "Write a function that doubles a number.",
    "test_list": ["assert float(double(2)) == 4", "assert double(0) == 0"],
    "test_setup_code": "",
}
PLUS = {
    "task_id": 11,
    "prompt": "Write a function that doubles a number.",
    "test_list": SENTENCE["test_list"],
    "test_imports": ["import math"],
    "test": "from math import inf\n\ndef is_floats(x):\n    return isinstance(x, np.ndarray)\n\n"
    "def same(out, exp):\n    assert out == exp or is_floats(exp)\nfor x in (0, 1, 5):\n"
    "    same(double(x), 2 * x)\n",
}
if host.packages("numpy"):  # as EvalPlus has it; elsewhere boxes have another Python
    PLUS["test"] = f"import numpy as np\n{PLUS['test']}"
CASES = json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}])
MMLU = {"question": " Which? ", "subject": "us_history", "choices": ["a", "b", "c", "d"], "answer": 2}


def problem(records, name, row):
    [found] = read(suite_of(name), str(records(row, name="asked")), None, None)
    return found


def said(found) -> str:
    [message] = found.task.messages
    return str(message["content"])


def test_five_solved_examples_stand_before_a_question_others_for_each(records):
    asked, solved = records(*SCHOOL[:3], name="a"), records(*SCHOOL[3:], name="b")
    found = read(suite_of("gsm8k_5shot"), str(asked), str(solved), None)
    for each, own in zip(found, SCHOOL, strict=False):
        blocks = said(each).split("\n\n")
        assert len(blocks) == 6
        assert blocks[-1] == f"Question: {own['question']}\nAnswer:"
        assert set(blocks[:5]) <= {f"Question: {s['question']}\nAnswer: {s['answer']}" for s in SCHOOL[3:]}
        assert each.question == own["question"]
    assert len({said(each).rpartition("\n\n")[0] for each in found}) == 3
    first = read(suite_of("gsm8k_5shot"), str(asked), str(solved), 1)
    assert first == found[:1], "a limit takes the first and changes nothing of them"
    assert found[0].task.answer == "1,200"


def test_a_letter_is_asked_behind_examples_of_the_same_subject(records):
    other = MMLU | {"subject": "biology", "question": "Other?"}
    found = problem(records, "mmlu", MMLU)
    head = "The following are multiple choice questions (with answers) about us history.\n\n"
    block = "Which?\nA. a\nB. b\nC. c\nD. d\nAnswer:"
    assert said(found) == head + block
    assert (found.choices, found.gold) == ((" A", " B", " C", " D"), 2)
    shots = Shots(SUITES["mmlu_5shot"].shots.source, 1, by="subject")
    dev, file = records(other, MMLU, name="dev"), records(MMLU, name="test")
    [found] = read(replace(suite_of("mmlu_5shot"), shots=shots), str(file), str(dev), None)
    assert said(found) == f"{head}{block} C\n\n{block}"
    with pytest.raises(UserError, match=r"^test\.jsonl:1: "):
        read(suite_of("mmlu_5shot"), str(file), str(dev), None)


def test_choices_are_whole_answers(records):
    row = {
        "id": "Q1",
        "question": "Why?",
        "choices": {"text": ["x", "y"], "label": ["1", "2"]},
        "answerKey": "2",
    }
    found = problem(records, "arc_challenge", row)
    assert (found.task.id, said(found), found.choices, found.gold) == (
        "Q1",
        "Question: Why?\nAnswer:",
        (" x", " y"),
        1,
    )
    with pytest.raises(UserError, match=r"^asked\.jsonl:1: "):
        problem(records, "arc_easy", row | {"answerKey": "C"})
    scene = {"activity_label": "Baking", "ctx_a": "[header] A cook [title] stirs.", "ctx_b": "then he"}
    found = problem(records, "hellaswag", scene | {"endings": ["[step] eats.", "sleeps  [x]."], "label": "0"})
    assert said(found) == "Baking: A cook. stirs. Then he"
    assert found.choices == ("  eats.", " sleeps .")


SCENE = {"activity_label": "Baking", "ctx_a": "A cook", "ctx_b": "eats", "label": "0"}
ARC = {"question": "Why?", "answerKey": "A"}


@pytest.mark.parametrize(
    ("suite", "row", "message"),
    [
        ("mmlu", MMLU | {"choices": list("abcde")}, "'choices' must be 4, one a letter, and there are 5"),
        ("hellaswag", SCENE | {"endings": ["x", "[title]"]}, "choice number 1 is empty"),
        ("arc_easy", ARC | {"choices": {"text": ["", "y"], "label": ["A", "B"]}}, "choice number 0 is empty"),
        ("arc_easy", ARC | {"choices": {"text": ["x", "y"], "label": None}}, "two lists as long"),
        ("arc_easy", ARC | {"choices": {"text": None, "label": ["A", "B"]}}, "two lists as long"),
        ("arc_easy", ARC | {"choices": {"text": ["x"], "label": ["A", "B"]}}, "two lists as long"),
        ("mbpp", SENTENCE | {"test_imports": "import math"}, "'test_imports' must be a list of lines"),
        ("mbpp", SENTENCE | {"test_imports": 7}, "'test_imports' must be a list of lines"),
    ],
)
def test_a_record_that_cannot_be_asked_is_named_with_its_line(records, suite, row, message):
    with pytest.raises(UserError, match=rf"asked\.jsonl:1: .*{message}"):
        problem(records, suite, row)


def test_one_s_own_problems_are_called_by_their_id_alone(records):
    rows = [
        {"prompt": "?", "answer": "1", "question_id": 7, "key": "k"},
        {"id": "b", "prompt": "!", "key": "k"},
    ]
    found = read(suite_of("own"), str(records(*rows, name="asked")), None, None)
    assert [each.task.id for each in found] == ["0", "b"]
    assert found[0].task.fields == {"question_id": 7, "key": "k"}


def test_a_table_of_one_s_own_is_read_as_training_reads_it(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("id,question,answer\n1,12,12.50\n2,7,4\n")
    found = read(suite_of("own"), str(file), None, None)
    assert [(said(each), each.task.answer) for each in found] == [("12", "12.50"), ("7", "4")]


def test_an_answer_without_a_verdict_counts_with_all_its_instructions(records):
    row = {"prompt": "?", "instruction_id_list": ["a:b", "c:d", "e:f"], "kwargs": [{}, {}, {}]}
    found = problem(records, "ifeval", row)
    asking = SuiteProtocol(suite_of("ifeval"), Chat(tiny_tokenizer()), Sampling(), 1, 0, 100)
    answer = Completion(tokens=[], logp_gen=[], logp_policy=[], version=[], text="", stop="eos")
    none = Verdict(score=None, label="died")
    some = Verdict(score=1.0, label="right", parts={"instructions": 1, "strict": 1, "loose": 1})
    lines = [
        _line(asking, found, 0, [], answer, "", none),
        _line(asking, replace(found, task=replace(found.task, id="b"), counts={}), 0, [], answer, "", some),
    ]
    assert ratios(suite_of("ifeval"), lines)["instruction_strict"].value == 1 / 4


@pytest.fixture(scope="module")
def pool():
    with Pool(workers=1, deadline_s=60.0) as pool:
        yield pool


@pytest.mark.parametrize(
    ("suite", "row", "answer"),
    [
        ("humaneval", FUNCTION, "Here:\n```python\ndef total(xs):\n    return sum(xs)\n```"),
        ("humaneval_text", FUNCTION, "    return sum(xs)\n"),
        ("mbpp", SENTENCE, "```python\ndef double(x):\n    return 2 * x\n```"),
        ("mbpp_plus", PLUS, "```python\ndef double(x):\n    return 2 * x\n```"),
        ("stdio", {"question_content": "Double it.", "public_test_cases": CASES}, "print(2 * int(input()))"),
        ("stdio", {"question": "?", "cases": [{"stdin": "2", "stdout": "4"}]}, "print(2 * int(input()))"),
    ],
)  # fmt: skip
def test_a_program_is_judged_by_what_it_does(pool, records, suite, row, answer):
    found = problem(records, suite, row)
    verifier = SUITES[suite].verifier
    verifier.check(found.task)
    other = answer.replace("sum", "max").replace("2 *", "3 *")
    right, wrong = pool.judge(verifier, [(found.task, answer), (found.task, other)])
    assert right.label == "PASS", right.reason
    assert wrong.label != "PASS"


def test_a_file_is_read_up_to_the_limit(records) -> None:
    file = records({"prompt": "1?"}, {"prompt": "2?"})
    file.write_text(file.read_text() + "{\n")
    assert [problem.task.id for problem in read(suite_of("own"), str(file), None, 2)] == ["0", "1"]
    for limit in (3, None):
        with pytest.raises(UserError, match=r"records\.jsonl:3"):
            read(suite_of("own"), str(file), None, limit)


def test_every_suite_is_read_and_its_faults_have_a_line(records):
    for name, suite in SUITES.items():
        file = records({"nothing": 1}, name="nothing")
        shots = str(records(*SCHOOL[:5], name="shots")) if suite.shots else None
        with pytest.raises(UserError, match=r"^nothing\.jsonl:1: "):
            read(suite, str(file), shots, None)
        assert suite.name == name
        assert suite.source or name in ("stdio", "own")
    with pytest.raises(UserError, match=r"^--suite: "):
        suite_of("gms8k")
    with pytest.raises(UserError, match=r"^own: "):
        read(
            suite_of("own"), str(records({"id": "x", "prompt": "?"}, {"id": "x", "prompt": "!"})), None, None
        )


def test_a_fingerprint_changes_with_whatever_moves_a_number(records):
    suite, chat = suite_of("gsm8k"), Chat(tiny_tokenizer())
    problems = read(suite, str(records(*SCHOOL[:4])), None, None)
    base = fingerprint(suite, problems, chat, suite.sampling, 1)
    assert fingerprint(suite, problems, Chat(tiny_tokenizer()), suite.sampling, 1) == base
    louder = Chat(tiny_tokenizer(), template=TEMPLATE.replace("\\n' + m['content']", "\\n ' + m['content']"))
    fewer, other = (
        problems[:3],
        [replace(problems[0], task=replace(problems[0].task, answer="0")), *problems[1:]],
    )
    judged = replace(suite, verifier=Number(tolerance=0.5))
    shown = replace(suite, shots=Shots(suite.source, 5, seed=1))
    changed = {
        "template": fingerprint(suite, problems, louder, suite.sampling, 1),
        "problems, prompts": fingerprint(suite, fewer, chat, suite.sampling, 1),
        "prompts": fingerprint(suite, other, chat, suite.sampling, 1),
        "decoding": fingerprint(suite, problems, chat, Sampling(temperature=0.5), 1),
        "judge": fingerprint(judged, problems, chat, suite.sampling, 1),
        "shots": fingerprint(shown, problems, chat, suite.sampling, 1),
    }
    for parts, found in changed.items():
        assert ", ".join(key for key in base if found[key] != base[key]) == parts
