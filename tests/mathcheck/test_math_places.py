"""Where the verifier math finds the answer, and what it says of tasks and options that make no sense."""

import pickle

import pytest

from mathcheck.plugin.math import Math, answer_part
from mathcheck.prose import last_expression, last_line
from mathcheck.reading.lexer import normalise, tokenize
from posttrain.types import Task, UserError
from posttrain.verifiers.pool import Pool


def seven(**fields: object) -> Task:
    return Task(id="q", messages=(), answer="7", fields=fields, source="d.jsonl:3")


@pytest.mark.parametrize(
    ("where", "response", "label"),
    [
        ("boxed", r"\boxed{7}", "right"),
        ("boxed", "7", "no_answer"),
        ("boxed", "#### 7", "no_answer"),
        ("boxed", r"\boxed{7", "no_answer"),
        ("boxed", r"\boxed{6} \boxed{7}", "right"),
        ("boxed", r"\boxed{7} \boxed{6}", "wrong"),
        ("boxed", r"\boxed{7} \boxed{6", "right"),
        ("boxed", r"\boxed 7", "right"),
        ("boxed", r"$\boxed 7$, not 6", "right"),
        ("boxed", r"\boxed{6}, no: \boxed 7", "right"),
        ("boxed", r"\boxed 6 or \boxed{7}", "right"),
        ("boxed", r"\boxed{7} in \boxed form", "right"),
        ("boxed", r"\boxed form of 7", "no_answer"),
        ("boxed", r"\boxed 7 or 8", "wrong"),
        ("after", r"#### \boxed 7", "right"),
        ("after", r"#### -\boxed 7", "unreadable"),
        ("tag", "<answer>7</answer></answer>", "right"),
        ("tag", "<answer>6</answer></answer> 7", "wrong"),
        ("boxed", r"<think>6</think>\boxed{7} and I close with </think> here", "right"),
        ("boxed", r"\boxed{7} \boxed{}", "no_answer"),
        ("after", "#### 7", "right"),
        ("after", r"\boxed{7}", "no_answer"),
        ("after", "#### 6\n#### 7", "right"),
        ("after", "#### 7\n8", "right"),
        ("after", "#### ", "no_answer"),
        ("tag", "<answer>7</answer>", "right"),
        ("tag", "<answer>\nIt is 7.\n</answer> 8", "right"),
        ("tag", "7", "no_answer"),
        ("last", r"\boxed{6} so 7", "right"),
        ("last", r"Final answer: $\boxed{7}$.", "right"),
        ("tag", r"<answer>$\boxed{7}$</answer> \boxed{6}", "right"),
        ("after", r"#### \boxed{7}", "right"),
        ("after", r"#### \boxed{}", "no_answer"),
        ("tag", r"<answer>\boxed{}</answer>", "no_answer"),
        ("last", r"7 = \boxed{}", "no_answer"),
        ("after", r"#### -\boxed{7}", "unreadable"),
        ("tag", r"<answer>\boxed{3} + \boxed{7}</answer>", "unreadable"),
        ("last", r"The answer is not \boxed{7}", "no_answer"),
        ("auto", "<think>\\boxed{7} no</think>It is 6.", "wrong"),
        ("auto", "<think>\\boxed{6}</think>It is 7.", "right"),
        ("boxed", "\\boxed{6}</think>\\boxed{7}", "right"),
        ("auto", r"<think>perhaps \boxed{7} but", "no_answer"),
        ("tag", "<think>6</think><answer>7</answer>", "right"),
        ("last", "6\n7\n\n***\n", "right"),
        ("last", "7\n6", "wrong"),
        ("auto", r"#### 6 \boxed{7}", "right"),
        ("auto", "7\n#### 6", "wrong"),
        ("auto", "#### 7\n6", "right"),
        ("auto", "6\n7", "right"),
    ],
)
def test_the_place(where: str, response: str, label: str) -> None:
    assert Math(where=where)(seven(), response).label == label  # type: ignore[arg-type]


def test_marker_and_tag_are_declared() -> None:
    assert Math(where="after", marker="Final:")(seven(), "#### 6 Final: 7").label == "right"
    assert Math(where="tag", tag="final")(seven(), "<answer>6</answer><final>7</final>").label == "right"


@pytest.mark.parametrize(
    ("line", "expression"),
    [
        ("not 7, it is 8", "8"),
        ("it is 8, not 7", "8"),
        ("it isn't 7", ""),
        ("8 rather than 7", "8"),
        ("8 instead of 7", "8"),
        ("7 apples or 8 apples", "7 or 8"),
        ("7 or 8", "7 or 8"),
        ("there are 7 dogs and 8 cats", "8"),
        ("so x = 3 and y = 4", "x = 3 and y = 4"),
        ("9 * 2 = $18 every day", "$ 18"),
        ("a total of 10 cm long", "10 cm"),
        ("14 years since Raymond's birth", "14 years"),
        ("18 in total", "18"),
        ("so 3/4 of it", "3 / 4"),
        ("no answer here", ""),
    ],
)
def test_the_last_expression_of_a_line(line: str, expression: str) -> None:
    found = last_expression(tokenize(normalise(line)))
    if "or" in expression or "and" in expression:
        assert [t.text for t in found if t.text not in (",",)] == expression.split()
    else:
        assert " ".join(t.text for t in found if t.text != ",") == expression


def test_the_last_line_is_the_last_with_a_letter_or_digit() -> None:
    assert last_line("a\nb 7\n$$\n\\]\n") == "b 7"
    assert last_line("$$\n***") is None
    assert answer_part("x\n" + "\n" * 100_000, "last", "####", "answer") == ("x", True)


# ---------------------------------------------------------------------- tasks and options


@pytest.mark.parametrize(
    ("answer", "fields", "said"),
    [
        (r"\frac{1", {}, "cannot be read as auto"),
        (r"\int_0^1 x dx", {}, "cannot be read"),
        ("x+1", {"answer_type": "number"}, "no variables"),
        ("7", {"answer_type": "interval"}, "not an answer of this kind"),
        ("7", {"answer_type": "equation"}, "not an answer of this kind"),
        ("(3, 1)", {"answer_type": "interval"}, "ends before it begins"),
        ("?", {"answer_type": "choice"}, "names no option"),
        ("7", {"answer_type": "numbr"}, "numbr"),
        ("7", {"tolerance": "much"}, "tolerance"),
        ("7", {"tolerance": True}, "tolerance"),
        ("7", {"tolerance_is": "near"}, "tolerance_is"),
        ("7", {"unsimplified": "yes"}, "unsimplified"),
        ("", {}, "is empty"),
        ("7" * 2000, {}, "too many digits"),
        ("(" * 60 + "7" + ")" * 60, {}, "nested deeper"),
    ],
)
def test_a_gold_that_cannot_be_judged_is_an_error_of_the_data(
    answer: str, fields: dict[str, object], said: str
) -> None:
    one = Task(id="q", messages=(), answer=answer, fields=fields, source="d.jsonl:3")
    with pytest.raises(UserError, match=said) as error:
        Math().check(one)
    assert str(error.value).startswith("d.jsonl:3: ")


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"\boxed{\int_0^1 x\,dx}", True),
        (r"The answer is $\int_0^1  x\,dx$.", True),
        (r"\boxed{\int_0^1 x\,dx }", True),
        (r"\boxed{\int_0^2 x\,dx}", False),
        (r"\boxed{\int_0^1 x\,d x}", False),
        (r"\boxed{\int_0^1 x\,dx + 1}", False),
    ],
)
def test_the_same_text_is_right_even_if_unreadable(response: str, right: bool) -> None:
    one = Task(id="q", messages=(), answer=r"\int_0^1 x\,dx", source="d.jsonl:3")
    if right:
        assert Math()(one, response).label == "right"
    else:
        with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
            Math()(one, response)


@pytest.mark.parametrize(("gold", "response"), [("11/2", "1 1/2"), ("12", "1 2"), ("0.333...", "0.333")])
def test_texts_that_differ_within_are_not_the_same(gold: str, response: str) -> None:
    assert Math()(Task(id="q", messages=(), answer=gold), f"\\boxed{{{response}}}").score == 0.0


def test_a_task_without_answer_is_an_error_of_the_data() -> None:
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        Math().check(Task(id="q", messages=(), answer=None, source="d.jsonl:3"))


@pytest.mark.parametrize(
    "option",
    [
        {"marker": " "},
        {"tag": "a b"},
        {"where": "nowhere"},
        {"answer_type": "integer"},
        {"tolerance": -1.0},
        {"tolerance": float("nan")},
        {"tolerance_is": "near"},
    ],
)
def test_bad_options_are_refused(option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        Math(**option)  # type: ignore[arg-type]


def test_a_field_of_the_task_goes_before_the_option() -> None:
    math = Math(tolerance=1.0, unsimplified=True)
    assert math(seven(), r"\boxed{7.5}").label == "right"
    assert math(seven(tolerance=0.1), r"\boxed{7.5}").label == "wrong"
    assert math(seven(), r"\boxed{3+4}").label == "right"
    assert math(seven(unsimplified=False), r"\boxed{3+4}").label == "wrong"


def test_in_a_pool_the_verdicts_are_those_of_this_process() -> None:
    math = pickle.loads(pickle.dumps(Math()))
    pairs = [(seven(), f"\\boxed{{{text}}}") for text in ("7", "8", "9^{9^9}", "(", r"\sqrt{49}")]
    with Pool(workers=2, deadline_s=30.0) as pool:
        told = [(v.label, v.score, v.reason) for v in pool.judge(math, pairs)]
    assert told == [(v.label, v.score, v.reason) for v in (math(*pair) for pair in pairs)]
    assert [label for label, _, _ in told] == ["right", "wrong", "too_hard", "unreadable", "right"]
