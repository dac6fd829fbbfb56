"""The self-test finds verifiers and answers that would have wasted a run."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from mathcheck.plugin.number import Number
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.answers import Exact
from posttrain.verifiers.combine.combined import Combined, Part
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.self_test import self_test
from posttrain.verifiers.structure.patterns import Format, Regex


@pytest.fixture(scope="module")
def pool():
    with Pool(workers=1, deadline_s=5.0) as pool:
        yield pool


def tasks(*answers: str | None) -> list[Task]:
    return [
        Task(id=f"t{i}", messages=(), answer=answer, source=f"d.jsonl:{i}")
        for i, answer in enumerate(answers, 1)
    ]


GOOD = [
    Exact(),
    Number(),
    Number(where="boxed"),
    Format(),
    Regex(pattern=r"\d"),
    Combined(parts=(Part(verifier=Number(where="tag")), Part(verifier=Format(), weight=0.2))),
    Combined(parts=(Part(verifier=Number()), Part(verifier=Regex(pattern=r"\."), weight=-0.1))),
]


@pytest.mark.parametrize("verifier", GOOD)
def test_good_verifiers_pass(verifier, pool):
    self_test(verifier, tasks("7", "1,234", "-3"), pool)


@pytest.mark.parametrize("answer", ["seven", None, ""])
def test_the_first_bad_answer_is_named_wherever_it_is(answer, pool):
    many = tasks(*["7"] * 50, answer, "eight")
    with pytest.raises(UserError, match=r"^d\.jsonl:51: "):
        self_test(Number(), many, pool, limit=2)


@dataclass(frozen=True)
class Refuses(Number):
    """Gives its golds nothing."""

    def __call__(self, task: Task, response: str) -> Verdict:
        return Verdict(score=0.0, label="wrong", reason="no")


@dataclass(frozen=True)
class Accepts(Number):
    """Gives everything all."""

    def __call__(self, task: Task, response: str) -> Verdict:
        return Verdict(score=1.0, label="right", reason="yes")


@dataclass(frozen=True)
class Raises(Number):
    """Raises on its fakes."""

    best: ClassVar[float] = 1.0

    def __call__(self, task: Task, response: str) -> Verdict:
        if not response:
            raise IndexError("empty")
        return super().__call__(task, response)


@pytest.mark.parametrize(
    ("verifier", "says"),
    [
        (Refuses(), "gives 0, not 1, to the response 'It is 7'"),
        (Accepts(), "accepts with 1 the response ''"),
        (Raises(), "fails on the response ''.*IndexError: empty"),
        (Regex(pattern="x*"), "accepts with 1 the response ''"),
        (Combined(parts=(Part(verifier=Number()), Part(verifier=Accepts(name="b")))), "'b' accepts"),
        (Combined(parts=(Part(verifier=Number()), Part(verifier=Regex(pattern="x*")))), "'regex' accepts"),
        (
            Combined(parts=(Part(verifier=Number(where="after")), Part(verifier=Exact(where="all")))),
            "no response satisfies number and exact together",
        ),
    ],
)
def test_bad_verifiers_are_named_with_the_response(verifier, says, pool):
    with pytest.raises(UserError, match=says):
        self_test(verifier, tasks("7"), pool)


@dataclass(frozen=True)
class Slow(Number):
    """Accept anything for task t9, or refuse its gold; runs in worker processes, as a prover does."""

    trusted: ClassVar[bool] = False
    refuses: bool = False

    def __call__(self, task: Task, response: str) -> Verdict:
        if task.id != "t9":
            return super().__call__(task, response)
        return Verdict(score=float(not self.refuses), label="fixed", reason="")


def test_an_untrusted_verifier_judges_every_gold_and_fakes_of_few_tasks(pool):
    many = tasks(*["7"] * 12)
    self_test(Slow(), many, pool)
    with pytest.raises(UserError, match=r"^d\.jsonl:9: .*gives 0, not 1, to"):
        self_test(Slow(refuses=True), many, pool)
    with pytest.raises(UserError, match=r"^d\.jsonl:9: .*accepts with 1"):
        self_test(Slow(), many[8:], pool)


def test_an_answer_that_spells_a_tag_is_an_error_of_the_data(pool):
    with pytest.raises(UserError, match=r"^d\.jsonl:1: "):
        self_test(Format(), tasks("</answer>"), pool)
