"""The verifier math on a table of golds and responses, and on the golds and fakes that it makes of them."""

import json
from collections import Counter
from pathlib import Path

import pytest

from mathcheck.plugin.math import Math
from posttrain.types import Task

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "math_pairs.jsonl").read_text(encoding="utf-8").splitlines()
]
TASKS = list({json.dumps([p["gold"], p.get("fields", {})]): p for p in PAIRS}.values())


def task(pair: dict[str, object]) -> Task:
    """The task of a row of the table."""
    return Task(id="q", messages=(), answer=str(pair["gold"]), fields=pair.get("fields", {}))  # type: ignore[arg-type]


@pytest.mark.parametrize("first", range(0, len(PAIRS), 100))
def test_the_table(first: int) -> None:
    wrong = []
    for pair in PAIRS[first : first + 100]:
        verdict = Math()(task(pair), pair["response"])
        score = 1.0 if pair["expected"] == "right" else 0.0
        if (verdict.label, verdict.score) != (pair["expected"], score) or not verdict.reason:
            wrong.append((pair, verdict))
    assert not wrong


def test_the_table_is_large_and_has_every_class() -> None:
    labels = Counter(pair["expected"] for pair in PAIRS)
    assert len(PAIRS) >= 500
    assert min(labels["right"], labels["wrong"]) >= 150
    assert min(labels[name] for name in ("no_answer", "unreadable", "too_hard")) >= 5


@pytest.mark.parametrize(
    ("kind", "gold", "right", "wrong"),
    [
        ("number", "0.5", "1/2", "0.51"),
        ("expression", "x+1", "1+x", "x-1"),
        ("set", "1,2", r"\{2,1\}", r"\{1\}"),
        ("tuple", "1,2", "(1,2)", "(2,1)"),
        ("interval", "(1,2)", "1<x<2", "[1,2]"),
        ("equation", "x=3", "2x=6", "2x=5"),
        ("choice", "B", "(B)", "(C)"),
        ("text", "red car", "Red Car", "blue car"),
        ("matrix", "[[1],[2]]", r"\begin{pmatrix}1\\2\end{pmatrix}", "[[2],[1]]"),
        ("unit", "1 m", "100 cm", "100 mm"),
        ("auto", "1/2", "0.5", "2"),
    ],
)
def test_every_type_accepts_and_refuses(kind: str, gold: str, right: str, wrong: str) -> None:
    for math, fields in ((Math(answer_type=kind), {}), (Math(), {"answer_type": kind})):  # type: ignore[arg-type]
        one = Task(id="q", messages=(), answer=gold, fields=fields)
        assert math(one, f"\\boxed{{{right}}}").label == "right"
        assert math(one, f"\\boxed{{{wrong}}}").label == "wrong"


@pytest.mark.parametrize("where", ["auto", "boxed", "after", "tag", "last"])
def test_golds_are_right_and_fakes_are_not(where: str) -> None:
    math = Math(where=where)  # type: ignore[arg-type]
    for pair in TASKS[::3]:
        one = task(pair)
        for gold in math.golds(one):
            assert math(one, gold).score == 1.0, (where, pair, gold)
        fakes = math.fakes(one)
        assert "" in fakes
        for fake in fakes:
            assert math(one, fake).score == 0.0, (where, pair, fake)
