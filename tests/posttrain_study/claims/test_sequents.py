"""The world of value_in_search: its rules against a decision procedure, and its proofs against Coq."""

import shutil
from dataclasses import replace

import pytest

from posttrain_prove.coq.verifier import Coq
from posttrain_prove.tasks.propositional import Propositional, propositional
from posttrain_study.claims.sequents import (
    Guide,
    is_closed,
    is_provable,
    moves_of,
    new_llama,
    premises_of,
    search_all,
    theorem_of,
)
from posttrain_study.claims.value_in_search import BEST_FIRST

THEOREMS = propositional("train", Propositional(low=4, high=12, train=40))


def test_rules_are_sound_and_some_rule_keeps_a_provable_sequent_provable():
    ahead, visited = [theorem_of(task) for task in THEOREMS], set()
    while ahead and len(visited) < 1500:
        sequent = ahead.pop(0)
        if sequent in visited or is_closed(sequent) or len(sequent[0]) > 6:
            continue
        visited.add(sequent)
        ways = [premises_of(sequent, move)[0] for move in moves_of(sequent)]
        proved = [all(map(is_provable, premises)) for premises in ways]
        assert is_provable(sequent) == any(proved)
        ahead += [premise for premises in ways for premise in premises]
    assert {is_provable(sequent) for sequent in visited} == {True, False}


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("coqtop"), reason="Coq is not installed")
@pytest.mark.parametrize("value", ["none", "model"])
def test_coq_accepts_the_proofs_of_searches(value):
    guide, choice = Guide(new_llama(0), 0, value=value), replace(BEST_FIRST, values=value == "model")
    trees = search_all(THEOREMS[:12], guide, replace(choice, moves=256))
    proofs = [(tree.root.task, tree.end.text) for tree in trees if tree.end]
    assert len(proofs) > 8
    judge = Coq()
    for task, text in proofs:
        verdict = judge(task, "\n".join([*task.fields["opening"], text]))
        assert verdict.score == 1, (verdict.reason, text)
