"""Horn theorems: least proofs are least, splits never share a form, and depths have equal shares."""

import random
import re
from collections import Counter, deque
from itertools import islice

import pytest

from posttrain.curriculum.curriculum import build_supply
from posttrain.recipe.settings import Curriculum
from posttrain.recipe.tasks import TaskChoice, make_tasks
from posttrain.types import UserError
from posttrain_prove.tasks.chaining import Theorem, form_digest, height, least_proofs, write_script
from posttrain_prove.tasks.horn import Horn, draw_theorem, horn


def _searched(made, most):
    """The least number of tactics by trying every move on the first goal, breadth first; None if > most."""
    queue, seen = deque([((made.goal,), 0)]), {(made.goal,)}
    while queue:
        goals, said = queue.popleft()
        if not goals:
            return said
        for premises, conclusion in made.clauses:
            after = (*premises, *goals[1:])
            if conclusion == goals[0] and said + len(after) < most and after not in seen:
                seen.add(after)
                queue.append((after, said + 1))
    return None


def _random_clauses(rng):
    names = range(5)
    return tuple(
        (tuple(rng.sample(names, rng.choice([0, 1, 1, 1, 2, 2]))), rng.choice(names)) for _ in range(7)
    )


def test_the_least_proof_is_what_a_search_over_all_moves_finds():
    rng, proved = random.Random(0), 0
    for _ in range(1500):
        made = Theorem(_random_clauses(rng), 0)
        known = least_proofs(made.clauses)
        if 0 not in known:
            assert _searched(made, 9) is None
        elif known[0][0] < 9:
            proved += 1
            assert _searched(made, 9) == known[0][0] == len(write_script(made))
    assert proved > 450


def test_what_follows_is_the_least_set_closed_under_the_clauses():
    rng = random.Random(1)
    for _ in range(300):
        clauses, true = _random_clauses(rng), set()
        for _ in clauses:
            true |= {conclusion for premises, conclusion in clauses if true.issuperset(premises)}
        assert set(least_proofs(clauses)) == true


def _play(task):
    """The goals left after the task's gold, said to hypotheses that are read from the prompt alone."""
    *lines, bar, goal = task.messages[0]["content"].splitlines()
    assert bar == "======"
    hypotheses = {name: said.split(" -> ") for name, said in (line.split(" : ") for line in lines)}
    assert list(hypotheses) == [f"h{n}" for n in range(1, len(lines) + 1)]
    goals, (opening, *proof) = [goal], task.fields["gold"].splitlines()
    assert [opening] == task.fields["opening"]
    assert len(proof) == task.fields["shortest"]
    for tactic in proof:
        verb, name = re.fullmatch(r"(apply|exact) (h\d+)\.", tactic).groups()
        *premises, conclusion = hypotheses[name]
        assert conclusion == goals.pop()
        assert (verb == "exact") == (not premises)
        goals += reversed(premises)
    return goals


@pytest.mark.parametrize(
    "spec",
    [
        Horn(train=300, held_out=70),
        Horn(low=1, high=14, second=0.1, train=140, held_out=28),
        Horn(facts=3, low=3, high=5, loops=0.9, hypotheses=9, train=60, held_out=30),
        Horn(variables=26, hypotheses=40, high=20, second=0.0, loops=0.0, train=95, held_out=19),
    ],
    ids=["usual", "deep", "facts", "large"],
)
def test_depths_are_as_said_in_equal_shares_and_golds_end_every_goal(spec):
    for split, size in (("train", spec.train), ("held_out", spec.held_out)):
        made = horn(split, spec)
        assert len(made) == len({task.id for task in made}) == size
        shares = Counter(task.fields["depth"] for task in made)
        assert set(shares) == set(range(spec.low, spec.high + 1))
        assert max(shares.values()) - min(shares.values()) <= 1
        for task in made:
            assert not _play(task)
            lines = task.messages[0]["content"].splitlines()
            assert len(set(lines[:-2])) == spec.hypotheses
            assert sum("->" not in line for line in lines[:-2]) == spec.facts
            assert task.fields["difficulty"] == task.fields["depth"] <= task.fields["shortest"] - 1
            if spec.second == 0:
                assert task.fields["shortest"] == task.fields["depth"] + 1


def test_the_chain_is_the_depth_it_was_made_for():
    spec = Horn(low=1, high=10)
    for index in range(200):
        made, _ = draw_theorem("train", spec, index)
        assert height(made) == 1 + index % 10


def _renamed(made, rng):
    """The same theorem with other names, orders, repetitions and a hypothesis that nothing needs."""
    other = rng.sample(range(100), 26)
    clauses = [
        (tuple(rng.sample([other[p] for p in premises], len(premises))), other[conclusion])
        for premises, conclusion in made.clauses
    ]
    clauses += [((other[0],), 100), ((other[1],), other[1]), rng.choice(clauses)]
    rng.shuffle(clauses)
    return Theorem(tuple(clauses), other[made.goal])


def test_no_theorem_is_in_both_splits_whatever_its_names_sizes_and_seeds():
    rng, forms = random.Random(2), {"train": set(), "held_out": set()}
    small = {"variables": 4, "hypotheses": 4, "low": 1, "high": 2}
    for split, seen in forms.items():
        for spec in (Horn(), Horn(seed=1), Horn(**small), Horn(seed=7, **small)):
            for index in range(100):
                if (found := draw_theorem(split, spec, index)) is None:
                    continue
                made, digest = found
                assert digest == form_digest(made) == form_digest(_renamed(made, rng))
                seen.add(digest)
    assert min(map(len, forms.values())) > 150
    assert not forms["train"] & forms["held_out"]


def test_a_theorem_is_one_of_its_split_once():
    small = Horn(variables=4, hypotheses=4, low=1, high=2, train=20, held_out=2)
    for split in ("train", "held_out"):
        seen = [form_digest(_read(task)) for task in horn(split, small)]
        assert len(set(seen)) == len(seen)
    with pytest.raises(UserError, match="there are not 100000 Horn theorems of depth 1 to 1"):
        horn("train", Horn(variables=3, hypotheses=3, low=1, high=1, train=100_000))


def _read(task):
    *lines, _, goal = task.messages[0]["content"].splitlines()
    said = [line.split(" : ")[1].split(" -> ") for line in lines]
    return Theorem(tuple((tuple(map(ord, premises)), ord(last)) for *premises, last in said), ord(goal))


def test_the_same_theorems_everywhere_and_others_from_another_seed():
    first = horn("train", Horn(), limit=50)
    assert first == horn("train", Horn(), limit=80)[:50] == horn("train", Horn(held_out=3), limit=50)
    assert first != horn("train", Horn(seed=1), limit=50)
    assert [task.id for task in islice(first, 2)] == ["horn-train-0", "horn-train-1"]
    assert first[0].fields["gold"] == "intros.\napply h6.\napply h10.\nexact h12."


def test_a_recipe_asks_them_and_a_curriculum_goes_by_their_depth():
    choice = TaskChoice(horn=Horn(train=70, held_out=14))
    train, held_out = make_tasks(choice, limit=7, seed=0)
    assert (len(train), [task.fields["depth"] for task in held_out]) == (70, list(range(2, 9)))
    order = build_supply(Curriculum(kind="order", field="depth"), train, seed=0)
    taken = [order.take()[1].fields["depth"] for _ in train]
    assert taken == sorted(taken)
    assert make_tasks(choice, limit=0, seed=0)[1] == []


@pytest.mark.parametrize(
    "options",
    [
        {"low": 0},
        {"low": 3, "high": 2},
        {"variables": 27},
        {"facts": 0},
        {"second": 1.5},
        {"loops": -0.1},
        {"loops": 1.0},
        {"template": "Prove it."},
        {"held_out": -1},
        {"train": 0},
        {"high": 15},
        {"variables": 4},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        Horn(**options)


def test_more_than_there_are_is_an_error():
    with pytest.raises(UserError, match=r"200 Horn theorems in 'held_out', not 201"):
        horn("held_out", Horn(), limit=201)
    with pytest.raises(UserError, match="0 Horn theorems in 'held_out', not any"):
        horn("held_out", Horn(held_out=0))
