"""Propositional theorems: provable, not by introductions alone, in splits that share no form."""

import random
from collections import Counter

import pytest

from posttrain.recipe.tasks import TaskChoice, make_tasks
from posttrain.types import UserError
from posttrain_prove.tasks import intuitionistic
from posttrain_prove.tasks.formula import FALSE, Formula, parse_formula
from posttrain_prove.tasks.intuitionistic import Prover, by_introductions, implies
from posttrain_prove.tasks.propositional import Propositional, draw_theorem, form, is_tautology, propositional

A, B, C = map(Formula, "ABC")
SIGNS = ("->", "/\\", "\\/", "~")


def neg(a):
    return Formula("~", (a,))


def both(a, b):
    return Formula("/\\", (a, b))


def either(a, b):
    return Formula("\\/", (a, b))


def drawn(size, rng):
    if size == 0:
        return rng.choice([A, B, C, FALSE])
    sign = rng.choice(SIGNS)
    if sign == "~":
        return neg(drawn(size - 1, rng))
    left = rng.randrange(size)
    return Formula(sign, (drawn(left, rng), drawn(size - 1 - left, rng)))


def _holds(formula, worlds, above, at, seen):
    """Kripke's truth of a formula in a world, where seen[w] are the atoms that hold in w."""
    if not formula.parts:
        return formula.sign in seen[at]
    parts = formula.parts if formula.sign != "~" else (*formula.parts, FALSE)
    if formula.sign == "/\\":
        return all(_holds(part, worlds, above, at, seen) for part in parts)
    if formula.sign == "\\/":
        return any(_holds(part, worlds, above, at, seen) for part in parts)
    return all(
        not _holds(parts[0], worlds, above, w, seen) or _holds(parts[1], worlds, above, w, seen)
        for w in above[at]
    )


@pytest.mark.parametrize(
    ("formula", "choices"),
    [
        (either(A, neg(A)), None),
        (implies(implies(implies(A, B), A), A), None),
        (implies(neg(neg(A)), A), None),
        (implies(implies(A, B), either(neg(A), B)), None),
        (implies(neg(both(A, B)), either(neg(A), neg(B))), None),
        (implies(A, A), 0),
        (implies(A, neg(neg(A))), 0),
        (neg(neg(either(A, neg(A)))), 1),
        (implies(neg(neg(neg(A))), neg(A)), 1),
        (implies(neg(either(A, B)), both(neg(A), neg(B))), 0),
        (implies(FALSE, A), 0),
        (implies(A, either(B, A)), 1),
        (implies(neg(neg(either(A, B))), either(neg(neg(A)), neg(neg(B)))), None),
    ],
    ids=str,
)
def test_known_theorems_and_what_only_classical_logic_proves(formula, choices):
    found = Prover()(formula)
    assert (found and found[0]) == choices


def test_no_model_of_kripke_refutes_what_is_proved_and_a_double_negation_is_classical():
    rng = random.Random(0)
    proved, order = 0, {0: (0, 1, 2, 3), 1: (1, 3), 2: (2, 3), 3: (3,)}
    for _ in range(1500):
        formula = drawn(rng.randrange(3, 9), rng)
        assert (Prover()(neg(neg(formula))) is not None) == is_tautology(formula)  # Glivenko
        if Prover()(formula) is None:
            continue
        proved += 1
        assert is_tautology(formula)
        for _ in range(5):
            first = {atom for atom in "ABC" if rng.random() < 0.2}
            left, right = ({atom for atom in "ABC" if rng.random() < 0.4} | first for _ in range(2))
            seen = {0: first, 1: left, 2: right, 3: left | right | set(rng.choice("ABC"))}
            assert _holds(formula, order, order, 0, seen)
    assert proved > 150


def test_in_what_order_invertible_rules_are_said_changes_nothing(monkeypatch):
    rng, said = random.Random(1), intuitionistic._find_invertible
    made = [found[0] for index in range(150) if (found := draw_theorem("train", Propositional(), index))]
    monkeypatch.setattr(
        intuitionistic,
        "_find_invertible",
        lambda context, goal: said(tuple(rng.sample(context, len(context))), goal),
    )
    for formula, (choices, _), _ in made:
        assert Prover()(formula)[0] == choices


def test_theorems_are_of_their_sizes_in_equal_shares_and_not_trivial():
    spec = Propositional(train=160, held_out=40, low=5, high=12, refuted=0.3)
    for split, size in (("train", 160), ("held_out", 40)):
        made = propositional(split, spec)
        assert len({task.id for task in made}) == size
        shares = Counter(task.fields["connectives"] for task in made)
        assert shares == dict.fromkeys(range(5, 13), size // 8)
        for task in made:
            bar, formula = task.messages[0]["content"].splitlines()
            assert set(bar) == {"="}
            assert task.fields["statement"].endswith(f" : Prop, {formula}")
            assert sum(formula.count(sign) for sign in SIGNS) == task.fields["connectives"]
            assert task.fields["gold"].startswith("\n".join(task.fields["opening"]))
            assert not task.fields["refuted"] or formula.startswith("~")
        assert 0.15 < sum(task.fields["refuted"] for task in made) / size < 0.5
    for index in range(100):
        (formula, _, _), _ = draw_theorem("train", spec, index)
        assert is_tautology(formula)
        assert not by_introductions(formula)


def _varied(formula, rng, names):
    """The same formula with other names and orders, and ~ spelled out by chance."""
    if not formula.parts:
        return names.get(formula, formula)
    parts = [_varied(part, rng, names) for part in formula.parts]
    if formula.sign == "~":
        return neg(*parts) if rng.random() < 0.5 else implies(*parts, FALSE)
    if formula.sign == "->":
        if parts[0].sign == "/\\" and rng.random() < 0.5:
            return implies(parts[0].parts[1], implies(parts[0].parts[0], parts[1]))
        return implies(*parts)
    return Formula(formula.sign, tuple(rng.sample(parts, 2)))


def test_no_theorem_is_in_both_splits_whatever_its_names_sizes_and_seeds():
    rng, forms = random.Random(2), {"train": set(), "held_out": set()}
    for split, seen in forms.items():
        for spec in (Propositional(), Propositional(seed=1), Propositional(atoms=2, low=3, high=5)):
            for index in range(100):
                (formula, _, _), digest = draw_theorem(split, spec, index)
                letters = [*map(Formula, "ABCD")]
                names = dict(zip(letters, rng.sample(letters, 4), strict=True))
                assert digest == form(formula) == form(_varied(formula, rng, names))
                seen.add(digest)
        made = propositional(split, Propositional(low=4, high=5, train=60, held_out=20))
        assert len({task.messages[0]["content"] for task in made}) == len(made)
    assert not forms["train"] & forms["held_out"]
    assert form(implies(A, B)) != form(implies(B, implies(A, C)))


def test_the_same_theorems_everywhere_and_others_from_another_seed():
    first = propositional("train", Propositional(), limit=30)
    assert first == propositional("train", Propositional(), limit=50)[:30]
    assert first != propositional("train", Propositional(seed=1), limit=30)
    assert first[0].messages[0]["content"] == "======\n(D -> D) -> ~ (B /\\ ~ (A \\/ B))"


def test_a_recipe_asks_them():
    choice = TaskChoice(propositional=Propositional(train=16, held_out=8))
    train, held_out = make_tasks(choice, limit=3, seed=0)
    assert (len(train), len(held_out)) == (16, 3)
    assert make_tasks(choice, limit=0, seed=0)[1] == []


@pytest.mark.parametrize(
    "options",
    [
        {"atoms": 0},
        {"atoms": 6},
        {"low": 1},
        {"low": 9, "high": 8},
        {"refuted": 2.0},
        {"template": "Prove it."},
        {"train": 0},
        {"held_out": -1},
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        Propositional(**options)


def test_too_many_or_none_is_an_error():
    with pytest.raises(UserError, match="there are not 500 propositional theorems of 2 to 2 connectives"):
        propositional("train", Propositional(low=2, high=2, train=500))
    with pytest.raises(UserError, match="0 propositional theorems in 'held_out'"):
        propositional("held_out", Propositional(held_out=0))


def test_what_is_printed_is_read_again():
    seed = random.randrange(1000)
    print("seed", seed)
    dice = random.Random(seed)

    def drawn(size: int) -> Formula:
        if not size:
            return FALSE if dice.random() < 0.1 else Formula(dice.choice("ABCD"))
        sign, left = dice.choice(("->", "/\\", "\\/", "~")), dice.randrange(size)
        if sign == "~":
            return Formula(sign, (drawn(size - 1),))
        return Formula(sign, (drawn(left), drawn(size - 1 - left)))

    for _ in range(500):
        formula = drawn(dice.randrange(12))
        assert parse_formula(str(formula)) == formula
        if "(" in str(formula):
            assert parse_formula(str(formula).replace("(", "", 1)) is None
