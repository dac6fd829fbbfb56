"""Verdicts of code that need not keep to the types: made plain, or failed."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch

from posttrain.base.verdict import number, sound
from posttrain.envs.protocol import Turn, guarded_reply
from posttrain.types import Task, Verdict
from posttrain.verifiers.function import to_verdict
from posttrain.verifiers.pool import judge_safely
from posttrain.verifiers.protocol import Verifier


class Odd(str):
    """Text of a class of the user's."""


def test_a_sound_verdict_holds_plain_numbers_and_text_whatever_it_was_made_of():
    given = Verdict(
        score=np.float32(0.5),
        label=Odd("half"),
        reason=np.str_("why"),
        parts={Odd("a"): torch.tensor(1.5), 2: np.int64(3), "yes": True},
        progress=[(np.int64(4), np.array(0.25))],
        seconds=np.float64(2.0),
    )
    verdict = sound(given)
    assert verdict == Verdict(
        score=0.5,
        label="half",
        reason="why",
        parts={"a": 1.5, "2": 3.0, "yes": 1.0},
        progress=((4, 0.25),),
        seconds=2.0,
    )
    plain = [verdict.score, *verdict.parts.values(), verdict.progress[0][1], verdict.seconds]
    assert {type(number) for number in plain} == {float}
    assert {type(text) for text in (verdict.label, verdict.reason, *verdict.parts)} == {str}
    assert type(verdict.progress[0][0]) is int
    assert sound(verdict) == verdict


def test_a_verdict_of_a_class_of_the_users_becomes_one_of_ours():
    class Mine(Verdict):
        pass

    assert type(sound(Mine(score=1.0, label="right"))) is Verdict


UNSOUND = {
    "score": (Verdict(score=Decimal("0.5"), label="x"), "not_a_number"),
    "label": (Verdict(score=1.0, label=None), "raised"),
    "reason": (Verdict(score=None, label="x", reason=ValueError("no")), "raised"),
    "part": (Verdict(score=1.0, label="x", parts={"a": "1"}), "not_a_number"),
    "part that is not finite": (Verdict(score=1.0, label="x", parts={"a": math.nan}), "not_a_number"),
    "parts": (Verdict(score=1.0, label="x", parts=[1.0]), "raised"),
    "potential": (Verdict(score=1.0, label="x", progress=((1, math.inf),)), "not_a_number"),
    "step": (Verdict(score=1.0, label="x", progress=(1,)), "raised"),
}


@pytest.mark.parametrize("part", UNSOUND)
def test_a_verdict_that_is_not_sound_is_a_failure_wherever_it_comes_from(part):
    """From a function, from a verifier, and at the end of an episode."""
    verdict, label = UNSOUND[part]

    class Says(Verifier):
        name = "says"

        def __call__(self, task, response):
            return verdict

    class Ends:
        def reply(self, state, response):
            return Turn(state=state, done=True, verdict=verdict)

    said = judge_safely(Says(), Task(id="q", messages=()), "x")
    for found in (sound(verdict), to_verdict(verdict), said, guarded_reply(Ends(), 0, "x").verdict):
        assert (found.score, found.label, found.parts, found.progress) == (None, label, {}, ())
        assert found.reason


def test_what_losses_cannot_square_is_no_score() -> None:
    for value in (1e16, -1e39, 10**50, 10**400, np.float64(1e300)):
        assert number(value) is None
        assert to_verdict(value).label == to_verdict({"a": value}).label == "not_a_number"
    assert sound(Verdict(score=-1e39, label="x", reason="")).score is None
    assert to_verdict({"a": 9e14, "b": 9e14}).label == "not_a_number"
    assert to_verdict(-1e15).score == -1e15
