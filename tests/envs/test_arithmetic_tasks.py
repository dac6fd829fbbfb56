"""Arithmetic: right answers, splits that never meet, and the same problems everywhere."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mathcheck.plugin.number import Number
from posttrain.data.arithmetic import Arithmetic, arithmetic
from posttrain.types import UserError


def test_the_two_splits_of_the_demo():
    spec = Arithmetic()
    held, train = arithmetic("held_out", spec), arithmetic("train", spec)
    assert len(held) == 200
    assert (
        held[0].messages[0]["content"]
        == f"What is {held[0].id.replace('+', ' + ')}? Answer with just the number."
    )
    ids = [task.id for task in held + train]
    assert len(ids) == len(set(ids))
    kept_back = {tuple(sorted(task.fields["operands"])) for task in held}
    assert not any(tuple(sorted(task.fields["operands"])) in kept_back for task in train)
    mirrored = {f"{a}+{b}" for a, b in product(range(2, 50), repeat=2) if tuple(sorted((a, b))) in kept_back}
    assert set(ids) == {f"{a}+{b}" for a, b in product(range(2, 50), repeat=2)} - (
        mirrored - {t.id for t in held}
    )


@settings(max_examples=60, deadline=None)
@given(
    operands=st.integers(2, 4),
    low=st.integers(-9, 5),
    width=st.integers(0, 12),
    operators=st.lists(st.sampled_from("+-*"), min_size=1, max_size=3, unique=True),
    seed=st.integers(0, 1000),
    held_out=st.integers(1, 30),
)
def test_answers_are_right_and_splits_never_meet(operands, low, width, operators, seed, held_out):
    spec = Arithmetic(
        operands=operands, low=low, high=low + width, operators=tuple(operators), seed=seed, held_out=held_out
    )
    held = arithmetic("held_out", spec)
    assert len(held) == min(held_out, spec.size)
    try:
        train = arithmetic("train", spec, limit=min(20, max(1, spec.size // 2)))
    except UserError:
        assert (
            spec.size <= 200 * held_out
        )  # few problems, of which the held-out ones and their mirrors are many
        train = []
    assert not {t.id for t in held} & {t.id for t in train}
    for task in held + train:
        text = task.messages[0]["content"].removeprefix("What is ").partition("?")[0]
        assert task.answer == str(eval(text))
        assert len(task.fields["operands"]) == operands
        assert set(task.fields["operators"]) <= set(operators)
        assert all(low <= n <= low + width for n in task.fields["operands"])
        Number().check(task)


def test_the_same_problems_for_any_limit_and_others_for_another_seed():
    spec = Arithmetic(high=99)
    assert arithmetic("train", spec, limit=50) == arithmetic("train", spec)[:50]
    assert arithmetic("held_out", spec, limit=50) == arithmetic("held_out", spec)[:50]
    assert arithmetic("held_out", spec) != arithmetic("held_out", Arithmetic(high=99, seed=1))


def test_problems_beyond_counting_are_drawn_without_a_list():
    spec = Arithmetic(operands=4, high=999, operators=("+", "-", "*"))
    assert spec.size > 10**12
    tasks = arithmetic("train", spec, limit=100)
    assert len({task.id for task in tasks}) == 100
    with pytest.raises(UserError, match="set a limit"):
        arithmetic("train", spec)


def test_templates_show_the_problem_or_its_operands():
    spec = Arithmetic(template="{b} and {a}: {{sum}}?")
    task = arithmetic("held_out", spec, limit=1)[0]
    a, b = task.fields["operands"]
    assert task.messages[0]["content"] == f"{b} and {a}: {{sum}}?"


@pytest.mark.parametrize(
    "options",
    [
        {"operands": 1},
        {"operands": 27},
        {"low": 5, "high": 4},
        {"operators": ()},
        {"operators": ("/",)},
        {"operators": ("+", "+")},
        {"held_out": -1},
        {"template": "What is it?"},
        {"template": "{a}"},
        {"template": "{a} + {c}"},
        {"template": "{expression"},
        {"template": "{}"},
    ],
)
def test_impossible_problems_are_refused(options):
    with pytest.raises(ValueError):
        Arithmetic(**options)


def test_a_split_without_enough_problems_is_refused():
    for split, spec, limit in (
        ("train", Arithmetic(high=3, held_out=4), None),
        ("train", Arithmetic(), 2305),
        ("held_out", Arithmetic(), 201),
        ("held_out", Arithmetic(held_out=0), None),
    ):
        with pytest.raises(UserError, match="arithmetic problems"):
            arithmetic(split, spec, limit=limit)
