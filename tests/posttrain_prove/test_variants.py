"""Variants of a theorem: provable, each of another form, and the theorem itself held out."""

import pytest

from posttrain.data.protocol import Games
from posttrain.types import UserError
from posttrain_prove.tasks.formula import parse_formula
from posttrain_prove.tasks.intuitionistic import Prover, by_introductions
from posttrain_prove.tasks.propositional import form
from posttrain_prove.tasks.variants import Variants

THEOREM = r"((A -> B) -> A) -> (A -> C /\ B) -> ~ ~ (C \/ A)"


def formula_of(task):
    return parse_formula(task.fields["statement"].partition(" : Prop, ")[2])


def test_variants_are_provable_and_never_the_theorem():
    spec = Variants(theorem=THEOREM, train=60)
    train, [theorem] = spec.make(1, 0, Games())
    assert str(formula_of(theorem)) == THEOREM
    formulas = [formula_of(task) for task in train]
    assert len(formulas) == 60
    prove, forms = Prover(), {form(formula) for formula in formulas}
    assert len(forms) == 60
    assert form(formula_of(theorem)) not in forms
    assert all(prove(formula) and not by_introductions(formula) for formula in formulas)
    assert train == spec.make(1, 0, Games())[0]
    assert train != Variants(theorem=THEOREM, train=60, seed=1).make(1, 0, Games())[0]


@pytest.mark.parametrize("theorem", [r"A \/ ~ A", "((A -> B) -> A) -> A", "A -> B"])
def test_a_theorem_without_a_proof_is_refused(theorem):
    with pytest.raises(UserError, match="not provable"):
        Variants(theorem=theorem).make(1, 0, Games())


@pytest.mark.parametrize("theorem", ["", "False -> False", "A B"])
def test_a_theorem_that_is_no_formula_is_refused(theorem):
    with pytest.raises(ValueError, match="theorem must"):
        Variants(theorem=theorem)
