"""The verifiers of grammars, patterns and sections: limits hold, and nothing near a fit is one."""

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.process.cpu_limit import OverTimeError, within
from posttrain.types import Task, UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.self_test import self_test
from posttrain.verifiers.structure.grammar import Grammar
from posttrain.verifiers.structure.patterns import Format, Regex

SUMS = """
start: term (("+" | "-") term)*
term: NUMBER | "(" start ")"
%import common.INT -> NUMBER
%ignore " "
"""
AMBIGUOUS = 'start: start start | "a"'


def task(answer: str | None = None, **fields: Any) -> Task:
    return Task(id="q", messages=(), answer=answer, fields=fields, source="d.jsonl:3")


@pytest.mark.parametrize("parser", ["lalr", "earley"])
@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("1", "right"),
        (" 1 + (2-3)\n", "right"),
        ("So:\n```\n1 + 2\n```\n", "right"),
        ("```\n1 +\n```\n```\n1\n```", "right"),
        ("```\n1\n```\n```\n1 +\n```", "wrong"),
        ("1 +", "wrong"),
        ("(1", "wrong"),
        ("1)", "wrong"),
        ("1 2", "wrong"),
        ("1 + 2 = 3", "wrong"),
        ("it is 1", "wrong"),
        ("１", "wrong"),
        ("1\n+ 2", "wrong"),
        ("1\0", "wrong"),
        ("\ud800", "wrong"),
        ("", "no_answer"),
        (" \n", "no_answer"),
        ("```\n\n```", "no_answer"),
        ("1" * 1001, "over_limit"),
    ],
)
def test_a_response_fits_or_does_not(parser: Any, response: str, label: str) -> None:
    verdict = Grammar(grammar=SUMS, parser=parser, max_characters=1000)(task(), response)
    assert (verdict.label, verdict.score) == (label, float(label == "right")), verdict.reason
    assert len(verdict.reason) < 300


def test_where_says_what_is_read() -> None:
    fenced = "so\n```\n1\n```"
    labels = {
        where: [Grammar(grammar=SUMS, where=where)(task(), text).label for text in ("1", fenced)]  # type: ignore[arg-type]
        for where in ("all", "fenced", "auto")
    }
    assert labels == {"all": ["right", "wrong"], "fenced": ["no_answer", "right"], "auto": ["right", "right"]}
    assert Grammar(grammar=SUMS)(task(), "<think>\n```\nx\n```\n</think>1").label == "right"
    assert Grammar(grammar=SUMS)(task(), "<think>\n```\n1\n```\n</think>x").label == "wrong"


def test_earley_takes_what_lalr_cannot() -> None:
    palindromes = 'start: "a" start "a" | "b" start "b" | "a" | "b"'
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        Grammar(grammar='start: x "c" | y "c"\nx: "a"\ny: "a"').check(task())
    assert Grammar(grammar=palindromes, parser="earley")(task(), "abbbbba").label == "right"
    assert Grammar(grammar=palindromes, parser="earley")(task(), "abbbbab").label == "wrong"


def test_a_slow_response_is_judged_and_not_given_up() -> None:
    slow = Grammar(grammar=AMBIGUOUS, parser="earley", time_limit_s=0.3)
    assert slow(task(), "a" * 5).label == "right"
    begin = time.thread_time()
    assert slow(task(), "a" * 1000).label == "over_limit"
    backtracks = Grammar(grammar="start: /(a|aa)+b/", time_limit_s=0.3)
    assert backtracks(task(), "a" * 60).label == "over_limit"
    assert time.thread_time() - begin < 5


def test_the_processors_time_is_limited_again_and_again() -> None:
    for _ in range(3):
        with pytest.raises(OverTimeError), within(0.05):
            max(iter(lambda: 0, 1))
    with within(5.0):
        pass


def test_a_limit_that_falls_into_a_finaliser_is_raised_again_and_nothing_is_reported() -> None:
    class Lingers:
        def __del__(self) -> None:
            end = time.thread_time() + 0.1
            while time.thread_time() < end:
                pass

    def linger_and_loop() -> None:
        Lingers()  # dropped here
        max(iter(lambda: 0, 1))

    reported: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, reported.append
    try:
        with pytest.raises(OverTimeError), within(0.05):
            linger_and_loop()
        assert sys.unraisablehook == reported.append
    finally:
        sys.unraisablehook = hook
    assert not reported


@pytest.mark.parametrize(
    "grammar",
    [
        "",
        " ",
        "start: nothing",
        'other: "a"',
        "start: /(/",
        "start: /a*/",
        "%import .x.y\nstart: y",
        "start: (" * 99,
        7,
    ],
)
def test_a_grammar_that_is_none_is_an_error_of_the_data(grammar: Any) -> None:
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        Grammar().check(task(grammar=grammar))


def test_a_grammar_comes_from_the_task_or_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sums.lark"
    file.write_text(SUMS)
    verifier = Grammar(grammar=str(file))
    assert verifier == Grammar(grammar=SUMS)
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    assert verifier(task(grammar='start: "x"'), "x").label == "right"
    with pytest.raises(ValueError, match="cannot be read"):
        Grammar(grammar=str(tmp_path / "nothing.lark"))
    for options in ({"max_characters": 0}, {"time_limit_s": 0.0}):
        with pytest.raises(ValueError):
            Grammar(grammar=SUMS, **options)


@pytest.mark.parametrize("unit", ["1+", "(", "a", "```\n", "\n1", " "])
def test_a_million_characters_are_judged_at_once(unit: str) -> None:
    begin = time.thread_time()
    assert Grammar(grammar=SUMS)(task(), unit * (10**6 // len(unit))).score == 0.0
    assert time.thread_time() - begin < 3


def test_a_hundred_thousand_are_read() -> None:
    deep = Grammar(grammar='start: "(" start ")" | "x"')
    assert deep(task(), "(" * 40_000 + "x" + ")" * 40_000).label == "right"
    assert Grammar(grammar=SUMS)(task(), "1+" * 49_999 + "1").label == "right"


@pytest.mark.parametrize("where", ["all", "fenced", "auto"])
def test_the_self_test_passes_in_workers(where: Any) -> None:
    verifier = Grammar(grammar=SUMS, where=where)
    verifier.require()
    assert verifier.golds(task("1 + 1"))
    assert verifier.golds(task("1 +")) == []
    with Pool(workers=1, deadline_s=20.0) as pool:
        self_test(verifier, [task("1 + 1"), task()], pool)


# ---------------------------------------------------------------------- patterns.py

GOOD = "<think>3 + 4</think>\n<answer>7</answer>"


@pytest.mark.parametrize(
    "response",
    [
        "",
        "7",
        GOOD + GOOD,
        GOOD + "!",
        "So " + GOOD,
        "<answer>7</answer><think>3 + 4</think>",
        "<think><answer>7</answer></think>",
        "<think>3 + 4<answer>7</think></answer>",
        "<think>3 + 4</think><answer>7",
        "<think>3 + 4<answer>7</answer>",
        "<think></think><answer>7</answer>",
        "<think> \n</think><answer>7</answer>",
        "<think>3 + 4</think><answer>\u00a0</answer>",
        "<Think>3 + 4</Think><answer>7</answer>",
        "<think >3 + 4</think><answer>7</answer>",
        "<think>3 + 4</think ><answer>7</answer>",
        "< think>3 + 4</think><answer>7</answer>",
        "<think>I write <answer> now</think><answer>7</answer>",
        "<think>3 + 4</think></think><answer>7</answer>",
        "</think>3 + 4<think><answer>7</answer>",
        "<think>3 + 4</think>.<answer>7</answer>",
        "＜think＞3 + 4＜/think＞<answer>7</answer>",
    ],
)
def test_sections_stand_in_order_and_once(response: str) -> None:
    verdict = Format()(task(), response)
    assert (verdict.score, verdict.label) == (0.0, "bad_format")
    assert Format()(task(), GOOD).score == 1.0
    assert Format()(task(), f"\n {GOOD} \n").score == 1.0


def test_a_pattern_has_a_deadline_that_holds_and_its_neighbours_are_judged() -> None:
    slow = Regex(pattern=r"(\w+\s?)+!$")
    stuck = "word " * 12 + "x" * 40 + "?"
    begin = time.monotonic()
    with Pool(workers=1, deadline_s=5.0) as pool:
        verdicts = pool.judge(slow, [(task(), text) for text in ("a!", stuck, "b!", stuck[:-1] + "!", "c")])
    assert [v.label for v in verdicts] == ["right", "timeout", "right", "right", "no_answer"]
    assert verdicts[1].score is None
    assert time.monotonic() - begin < 120
