"""Equations of numbers: that they hold, how Coq prints them, what computation proves, and the splits."""

import random
from itertools import product

import pytest

from posttrain.search.protocol import State
from posttrain.types import UserError
from posttrain_prove.coq.moves import CoqTransitions
from posttrain_prove.tasks.peano import Peano, form_digest, peano, print_term, variables

SPEC = Peano(train=400, held_out=100)


def value(text: str, given: dict[str, int]) -> int:
    """A side as Coq prints it, by Python: S binds as an application does."""
    found = text.replace("S (", "s(")
    for name in "abc":
        while f"S {name}" in found:
            found = found.replace(f"S {name}", f"s({name})")
    return eval(found, {"s": lambda n: n + 1, **given})


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_both_sides_are_equal_everywhere(split):
    for task in peano(split, SPEC):
        left, right = str(task.fields["statement"]).partition(", ")[2].split(" = ")
        for numbers in product((0, 1, 3, 7), repeat=3):
            given = dict(zip("abc", numbers, strict=True))
            assert value(left, given) == value(right, given), task.fields["statement"]


def test_a_side_that_is_wrong_would_be_found():
    assert value("S a + b", {"a": 1, "b": 2}) == 4
    assert value("a + S (b + S a)", {"a": 1, "b": 2}) == 6
    assert value("2 + a", {"a": 1}) == 3


def test_coq_shows_them_so_and_computes_to_the_same_exactly_where_said():
    steps = CoqTransitions()
    try:
        tasks = peano("train", SPEC)[:150]
        for task, state in zip(tasks, steps.begin(tasks), strict=True):
            assert isinstance(state, State)
            assert state.shown == task.messages
            intro = steps.apply([(state, "intros.")])[0]
            assert isinstance(intro, State)
            [to] = steps.apply([(intro, "reflexivity.")])
            assert isinstance(to, State) == task.fields["computed"], task.fields["statement"]
    finally:
        steps.close()


def test_splits_and_seeds_share_no_form_and_sizes_come_in_turn():
    seeds = [Peano(train=400, held_out=100, seed=seed) for seed in (0, 1)]
    train = {str(t.fields["statement"]) for spec in seeds for t in peano("train", spec)}
    held = {str(t.fields["statement"]) for spec in seeds for t in peano("held_out", spec)}
    assert not train & held
    assert len(train) > 400
    sizes = [t.fields["operations"] for t in peano("train", Peano(low=2, high=5))[:8]]
    assert all(size in (at, at + 1) for size, at in zip(sizes, (2, 3, 4, 5) * 2, strict=True))


def test_a_form_is_that_of_any_names_and_of_either_side():
    seed = random.randrange(1000)
    print("seed", seed)
    dice = random.Random(seed)
    left, right = (("a", "b"), ("c",)), (("b",), ("a", "c"))
    names = dict(zip("abc", dice.sample("abc", 3), strict=True))

    def renamed(term):
        return names[term] if isinstance(term, str) else tuple(map(renamed, term))

    assert form_digest(renamed(right), renamed(left)) == form_digest(left, right)
    assert form_digest(left, left) != form_digest(left, right)
    assert variables(left) == {"a", "b", "c"}
    assert print_term(left) == "a + b + S c"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"variables": 6}, "variables"),
        ({"low": 3, "high": 2}, "low"),
        ({"successors": -1}, "successors"),
        ({"template": "x"}, "template"),
    ],
)
def test_what_cannot_be_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        Peano(**given)


def test_too_many_so_small_are_named():
    with pytest.raises(UserError, match="not 900 equations of 1 to 1 operations"):
        peano("train", Peano(low=1, high=1, train=900))


def test_none_need_be_computed():
    assert not any(t.fields["computed"] for t in peano("train", Peano(computed=False, train=60)))
