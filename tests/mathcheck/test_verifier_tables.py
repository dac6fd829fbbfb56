"""Every built-in verifier against responses that it must accept and responses that it must refuse."""

import json
import pickle
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mathcheck.numerals import numbers, whole_number
from mathcheck.plugin.number import Number
from posttrain.types import Task, UserError
from posttrain.verifiers.answers import Exact
from posttrain.verifiers.combine.combined import Combined, Part
from posttrain.verifiers.pool import judge_safely
from posttrain.verifiers.regions import box_content, remove_thought, tag_content
from posttrain.verifiers.structure.patterns import Format, Regex


def task(answer: str | None = "7", **fields: object) -> Task:
    return Task(
        id="q", messages=({"role": "user", "content": "?"},), answer=answer, fields=fields, source="d.jsonl:3"
    )


NUMBER_PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "number_pairs.jsonl").read_text(encoding="utf-8").splitlines()
]

RIGHT = [
    # (verifier, answer, response)
    (Number(), "7", "7"),
    (Number(), "7", "It is 3 + 4 = 7."),
    (Number(), "7", "7.0"),
    (Number(), "7", "7.000,"),
    (Number(), "7", "**7**"),
    (Number(), "7", "$7$"),
    (Number(), "7", "so x=7!"),
    (Number(), "7", "7 apples"),
    (Number(), "7", "7km"),
    (Number(), "7", "答案是7。"),
    (Number(), "7", "007"),
    (Number(), "1234", "1,234"),
    (Number(), "1,234", "1234"),
    (Number(), "1234567.5", "She pays $1,234,567.50."),
    (Number(), "1234", r"1{,}234 or rather \$1\,234"),
    (Number(), "-5", "-5"),
    (Number(), "-5", "−5"),
    (Number(), "-5", "x = -5"),
    (Number(), "-5", "(-5)"),
    (Number(), "-5", "-$5"),
    (Number(), "-5", "$-5"),
    (Number(), "−5", "-5"),
    (Number(), "5", "+5"),
    (Number(), "50", "50%"),
    (Number(), "50", r"50\%"),
    (Number(), "50%", "50"),
    (Number(), "0.5", ".5"),
    (Number(), "0.5", "1/2"),
    (Number(), "3/4", "0.75"),
    (Number(), "-3/4", "-6/8"),
    (Number(), "1500", "1.5e3"),
    (Number(), "0.0015", "1.5E-3"),
    (Number(), "4", "3, 4"),
    (Number(), "4", "3,4"),
    (Number(), "0.3", "0.30"),
    (Number(), "123456789012345678901234567890", "123456789012345678901234567890"),
    (Number(tolerance=0.01), "3.14", "3.15"),
    (Number(tolerance=0.01), "3.14", "3.1415"),
    (Number(where="after"), "18", "16 - 3 = 13 #### 18"),
    (Number(where="after"), "18", "####18"),
    (Number(where="after"), "18", "#### 17\nno\n#### $18.00\nBut 19"),
    (Number(where="after"), "18", "####\n\n18\n"),
    (Number(where="after", marker="Answer:"), "18", "Answer: 18 apples\n19 pears"),
    (Number(where="boxed"), "18", r"\boxed{18}"),
    (Number(where="boxed"), "18", r"\boxed{\text{18}}"),
    (Number(where="boxed"), "18", r"\boxed{18^\circ}"),
    (Number(where="boxed"), "18", r"\boxed{x_1 = 18}"),
    (Number(where="after"), "18", "#### 18!"),
    (Number(where="after", marker="Answer:"), "18", "Answer:\n- 18"),
    (Number(where="boxed"), "-18", r"\boxed{- 18}"),
    (Number(where="boxed"), "-18", r"\boxed{-\text{18}}"),
    (Number(where="boxed"), "-18", r"\boxed{-(18)}"),
    (Number(where="boxed"), "-18", "\\boxed{–18}"),
    (Number(where="boxed"), "1/2", r"\boxed{\dfrac{1}{2}}"),
    (Number(), "-0.5", r"so -\frac12"),
    (Number(), "18", "<think>17 or 19</think>It is 18"),
    (Exact(), "Paris", "<think>Rome?</think>\nParis"),
    (Number(where="boxed"), "18", r"\boxed {18}"),
    (Number(where="boxed"), "18", r"\boxed{17} no, \boxed{18}"),
    (Number(where="boxed"), "18", r"\boxed{18} and \boxed{19"),
    (Number(where="boxed"), "18", r"\boxed{\text{18 \{apples\}}}"),
    (Number(where="boxed"), "18", r"\boxed{\boxed{18}}"),
    (Number(where="boxed"), "18", r"}} { \boxed{18}"),
    (Number(where="boxed"), "1234", r"\boxed{1{,}234}"),
    (Number(where="tag"), "18", "<think>17</think><answer>18</answer>"),
    (Number(where="tag"), "18", "<answer>17</answer><answer> 18 </answer> 19"),
    (Number(where="tag", tag="final"), "18", "<final>18 = 18.0</final>"),
    (Exact(), "Paris", " Paris\n"),
    (Exact(casefold=True), "Straße", "STRASSE"),
    (Exact(where="tag"), "Paris", "It is <answer>Paris</answer>."),
    (Exact(where="after", marker="Answer:"), "a b", "Answer: a b\nand so on"),
    (Exact(where="boxed"), r"\frac{1}{2}", r"so \boxed{\frac{1}{2}}"),
    (Exact(), "\U0001f600 é", "\U0001f600 é"),
    (Regex(pattern=r"^\d+$"), None, "123"),
    (Regex(pattern=r"x = (?P<answer>\S+)"), "7", "x = 6, x = 7"),
    (Format(), "7", "<think>a</think><answer>b</answer>"),
    (Format(), "7", "\n<think>\na < b > c\n</think>\n\n<answer>\n7\n</answer>\n"),
    (Format(tags=("plan", "code", "test")), "7", "<plan>1</plan><code>2</code><test>3</test>"),
]

WRONG = [
    # (verifier, answer, response, label)
    (Number(), "7", "", "no_answer"),
    (Number(), "7", "seven", "no_answer"),
    (Number(), "7", "8", "wrong"),
    (Number(), "7", "7 or 8", "wrong"),
    (Number(), "7", "-7", "wrong"),
    (Number(), "-7", "7", "wrong"),
    (Number(), "7", "70", "wrong"),
    (Number(), "7", "7.1", "wrong"),
    (Number(), "7", "0.7", "wrong"),
    (Number(), "7", "1.5.7", "wrong"),
    (Number(), "7", "x7", "no_answer"),
    (Number(), "5", "8-5", "wrong"),
    (Number(), "5", "8 - 5", "wrong"),
    (Number(), "5", "x-5", "wrong"),
    (Number(), "18", "pages 10–18", "wrong"),
    (Number(), "7", "It is 7, or \\sqrt{7}", "wrong"),
    (Number(), "2024", "3/4/2024", "wrong"),
    (Number(), "3", "3/0", "wrong"),
    (Number(), "4", "3/4", "wrong"),
    (Number(), "0.5", "50%", "wrong"),
    (Number(), "234", "1,234", "wrong"),
    (Number(), "1234", "12,34", "wrong"),
    (Number(), "1234", "1,23", "wrong"),
    (Number(), "5", "1e5", "wrong"),
    (Number(), "1", "1e99999", "wrong"),
    (Number(), "0.3", "0.30000000000000004", "wrong"),
    (Number(), "100000000000000000000", "100000000000000000001", "wrong"),
    (Number(), "7", "٧", "no_answer"),
    (Number(tolerance=0.01), "3.14", "3.1501", "wrong"),
    (Number(where="after"), "18", "18", "no_answer"),
    (Number(where="after"), "18", "18 ####", "no_answer"),
    (Number(where="after"), "18", "#### 18 or 19", "no_answer"),
    (Number(where="after"), "18", "#### eighteen\n18", "no_answer"),
    (Number(where="boxed"), "18", "18", "no_answer"),
    (Number(where="boxed"), "18", r"\boxed{-{18}}", "wrong"),
    (Number(where="boxed"), "18", r"\boxed{- 18}", "wrong"),
    (Number(where="boxed"), "18", r"\boxed{\sqrt{18}}", "wrong"),
    (Number(where="boxed"), "18", r"\boxed{x^{18}}", "wrong"),
    (Number(where="boxed"), "18", r"\boxed{18!}", "wrong"),
    (Number(where="boxed"), "18", r"\boxed{\frac{18}{18}}", "wrong"),
    (Number(), "2", r"so \frac{1}{2}", "wrong"),
    (Number(), "18", "<think>It may be 18", "no_answer"),
    (Exact(), "Paris", "<think>Paris", "no_answer"),
    (Number(where="boxed"), "18", r"\boxed{18", "no_answer"),
    (Number(where="boxed"), "18", r"\boxed{18} or \boxed{19}", "wrong"),
    (Number(where="boxed"), "18", r"\boxed{17, 18}", "no_answer"),
    (Number(where="boxed"), "18", r"\fbox{18}", "no_answer"),
    (Number(where="tag"), "18", "<answer>18", "no_answer"),
    (Number(where="tag"), "18", "18</answer>", "no_answer"),
    (Number(where="tag"), "18", "</answer>18<answer>", "no_answer"),
    (Number(where="tag"), "18", "<answer>18</answer><answer></answer>", "no_answer"),
    (Exact(), "Paris", "", "no_answer"),
    (Exact(), "Paris", "paris", "wrong"),
    (Exact(), "Paris", "Paris.", "wrong"),
    (Exact(), "Paris", "It is Paris", "wrong"),
    (Exact(strip=False), "Paris", "Paris ", "wrong"),
    (Exact(where="tag"), "Paris", "Paris", "no_answer"),
    (Exact(), "1", "1.0", "wrong"),
    (Regex(pattern=r"^\d+$"), None, "12a", "no_answer"),
    (Regex(pattern=r"x = (?P<answer>\S+)"), "7", "x = 7, x = 6", "wrong"),
    (Format(), "7", "", "bad_format"),
    (Format(), "7", "7", "bad_format"),
    (Format(), "7", "<think>a</think>", "bad_format"),
    (Format(), "7", "<answer>b</answer><think>a</think>", "bad_format"),
    (Format(), "7", "<think>a<answer>b</answer></think>", "bad_format"),
    (Format(), "7", "<think>a</think><answer>b</answer>c", "bad_format"),
    (Format(), "7", "c<think>a</think><answer>b</answer>", "bad_format"),
    (Format(), "7", "<think>a</think>c<answer>b</answer>", "bad_format"),
    (Format(), "7", "<think>a</think><answer>b</answer><answer>b</answer>", "bad_format"),
    (Format(), "7", "<think>a</think></think><answer>b</answer>", "bad_format"),
    (Format(), "7", "</think>a<think><answer>b</answer>", "bad_format"),
    (Format(), "7", "<think></think><answer>b</answer>", "bad_format"),
    (Format(), "7", "<think>a</think><answer> </answer>", "bad_format"),
    (Format(), "7", "<THINK>a</THINK><answer>b</answer>", "bad_format"),
    (Format(), "7", "<think >a</think><answer>b</answer>", "bad_format"),
]


@pytest.mark.parametrize(("verifier", "answer", "response"), RIGHT)
def test_accepts(verifier, answer, response):
    verdict = verifier(task(answer), response)
    assert (verdict.score, verdict.label) == (1.0, "good_format" if isinstance(verifier, Format) else "right")


@pytest.mark.parametrize(("verifier", "answer", "response", "label"), WRONG)
def test_refuses(verifier, answer, response, label):
    verdict = verifier(task(answer), response)
    assert (verdict.score, verdict.label) == (0.0, label)
    assert verdict.reason


def test_number_reads_whole_expressions():
    verdicts = [
        (pair, Number(where=pair["where"])(task(pair["gold"]), pair["response"])) for pair in NUMBER_PAIRS
    ]
    wrong = [(pair, verdict) for pair, verdict in verdicts if (verdict.score == 1.0) != pair["right"]]
    assert verdicts
    assert not wrong


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>6</think>7", "7"),
        ("6</think>7", "7"),
        ("<think>5</think>6<think>5</think>7", "7"),
        ("<think>I use <think> here. 6</think>7", "7"),
        ("<think>a<think>b</think>6</think>7", "7"),
        ("<think>6</think>7. I close with </think> in my text.", "7. I close with </think> in my text."),
        ("6</think>7, then </think>", "7, then </think>"),
        ("<think>6</think>7<think>8", "7"),
    ],
)
def test_the_answer_follows_the_last_closed_thought(response, answer):
    assert remove_thought(response) == answer


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ("<answer>7</answer></answer>", "7"),
        ("<answer>6</answer><answer>7</answer></answer></answer>", "7"),
        ("<answer><answer>7</answer></answer>", "7"),
        ("<answer>7</answer> <answer>8", "7"),
        ("</answer>7<answer>", None),
    ],
)
def test_a_tag_ends_at_its_first_close(response, content):
    assert tag_content(response, "answer") == content


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"\boxed 7", "7"),
        (r"$\boxed 42$.", "42"),
        (r"\boxed -7.", "-7"),
        (r"\boxed\frac{1}{2} and 8", r"\frac{1}{2} and 8"),
        (r"$\boxed 2 1/2$", "2 1/2"),
        (r"\boxed{6} no, \boxed 7", "7"),
        (r"\boxed 6 no, \boxed{7}", "7"),
        (r"\boxed x", "x"),
        (r"\boxed{7}, in \boxed form", "7"),
        (r"\boxed{7}. I used \boxed.", "7"),
        (r"in a \boxed a", "a"),
        (r"in \boxed form", None),
    ],
)
def test_a_box_needs_no_braces(response, content):
    assert box_content(response) == content


@pytest.mark.parametrize(
    "answer", ["", " ", None, "seven", "7 apples", "3 or 4", "1/0", "1.2.3", "NaN", "inf"]
)
def test_a_gold_that_is_no_number_is_an_error_of_the_data(answer):
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        Number().check(task(answer))


def test_a_misspelt_answer_is_named():
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        Number().check(task(None, anwser="7"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Number(tolerance=-1),
        lambda: Number(tolerance=float("nan")),
        lambda: Number(marker=" "),
        lambda: Exact(tag="a b"),
        lambda: Exact(tag=""),
        lambda: Regex(pattern="(", name="r"),
        lambda: Regex(pattern="a{99999999999999999999}"),
        lambda: Format(tags=()),
        lambda: Format(tags=("a", "a")),
        lambda: Format(tags=("<a>",)),
        lambda: Part(verifier=Number(), weight=float("inf")),
        lambda: Combined(parts=()),
        lambda: Combined(parts=(Part(verifier=Number()), Part(verifier=Number(where="boxed")))),
    ],
)
def test_impossible_options_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_a_weighted_sum_adds_its_parts_and_keeps_them():
    r1 = Combined(parts=(Part(verifier=Number(where="tag")), Part(verifier=Format(), weight=0.25)))
    verdict = r1(task(), "<think>3 + 4</think><answer>7</answer>")
    assert (verdict.score, verdict.label, verdict.parts) == (1.25, "right", {"number": 1.0, "format": 1.0})
    assert r1.best == 1.25
    assert r1(task(), "<think>3 + 4</think><answer>8</answer>").score == 0.25
    assert r1(task(), "<answer>7</answer>").score == 1.0
    assert r1(task(), "7").score == 0.0
    assert Combined(parts=(Part(verifier=Number()), Part(verifier=Format(), weight=-1.0))).best is None


def test_a_part_that_cannot_judge_fails_the_sum():
    class Broken(Format):
        def __call__(self, task, response):
            return super().__call__(task, response).__class__(score=None, label="timeout", reason="slow")

    both = Combined(parts=(Part(verifier=Number()), Part(verifier=Broken(), weight=0.0)))
    verdict = both(task(), "7")
    assert (verdict.score, verdict.label, verdict.reason) == (None, "timeout", "format: slow")


def test_a_sum_that_overflows_is_not_a_score():
    huge = Combined(
        parts=(Part(verifier=Number(), weight=1e308), Part(verifier=Number(name="two"), weight=1e308))
    )
    assert huge(task(), "7").label == "not_a_number"


BUILT_IN = [
    Exact(),
    Exact(where="tag", casefold=True),
    Exact(where="boxed"),
    Exact(where="after", strip=False),
    Number(),
    Number(where="after"),
    Number(where="boxed"),
    Number(where="tag", tolerance=0.5),
    Format(),
    Combined(parts=(Part(verifier=Number(where="tag")), Part(verifier=Format()))),
    Combined(parts=(Part(verifier=Number(where="boxed")), Part(verifier=Format(), weight=0.5))),
]


@pytest.mark.parametrize("verifier", BUILT_IN)
@pytest.mark.parametrize("answer", ["7", "-12", "1,234.5", "3/4", "50%", "0", "$18"])
def test_own_golds_are_accepted_and_own_fakes_refused(verifier, answer):
    q = task(answer)
    golds, fakes = verifier.golds(q), verifier.fakes(q)
    assert golds
    assert "" in fakes
    assert all(verifier(q, gold).score == verifier.best for gold in golds)
    assert all(verifier(q, fake).score < verifier.best for fake in fakes), fakes


@pytest.mark.parametrize("verifier", BUILT_IN)
def test_verifiers_can_be_pickled_and_are_trusted(verifier):
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    assert verifier.trusted
    assert not Regex(pattern="a").trusted
    assert not Combined(parts=(Part(verifier=Number()), Part(verifier=Regex(pattern="a")))).trusted


@pytest.mark.parametrize("verifier", BUILT_IN)
@settings(max_examples=60, deadline=None)
@given(response=st.text() | st.text(alphabet="0123456789.,/-+eE$% \\boxed{}<>answrthik#"))
def test_any_text_gets_a_score(verifier, response):
    verdict = verifier(task("7"), response)
    assert verdict.score is not None
    assert 0 <= verdict.score <= verifier.best
    assert len(verdict.reason) < 400


LONG = [
    "1" * 10**6,
    "1," * 500_000,
    "1.2" * 300_000,
    "-" * 10**6,
    "1/" * 500_000,
    "1 " * 500_000,
    "111," * 250_000,
    "1e" * 500_000,
    "\\boxed{" * 140_000,
    "\\boxed{1}" * 110_000,
    "}" * 10**6,
    "{" * 10**6,
    "<answer>" * 125_000,
    "</answer>" * 110_000,
    "<answer></answer>" * 60_000,
    "<think>" * 140_000,
    "####" * 250_000,
    " " * 10**6,
    "\n" * 10**6,
    "####" + "\n" * 10**6,
    "\\boxed" + " " * 10**6,
    "\\boxed 7{" * 110_000,
    "3 + " * 250_000,
    "f(3" * 330_000,
    "2 hours " * 125_000,
    "\U0001f600" * 10**6,
    "\ud800" * 10**6,
]


@pytest.mark.parametrize("response", LONG, ids=lambda text: repr(text[:12]))
def test_a_million_characters_take_linear_time(response):
    for verifier in BUILT_IN:
        begin = time.monotonic()
        assert judge_safely(verifier, task(), response).score is not None
        assert time.monotonic() - begin < 60, verifier  # a quadratic reader takes hours


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(0, 10**4))
def test_every_way_to_write_a_number_reads_the_same(whole, thousandths):
    sign = "-" if whole < 0 else ""
    plain = f"{whole}.{thousandths:04d}"
    grouped = f"{sign}{abs(whole):,}.{thousandths:04d}"
    dollars = f"{sign}${abs(whole):,}.{thousandths:04d}"
    values = {
        whole_number(text) for text in (plain, grouped, dollars, plain.replace("-", "−"), f" {plain}. ")
    }
    assert len(values) == 1
    assert None not in values
    assert list(numbers(f"so {grouped}, then")) == list(values)
