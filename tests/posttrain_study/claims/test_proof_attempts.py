"""Whole proofs sampled in the world of sequents: gold proofs, what rewards pay, and the policy's table."""

import pytest
import torch

from posttrain.methods.build import build
from posttrain_prove.tasks.formula import parse_formula
from posttrain_prove.tasks.propositional import Propositional
from posttrain_study.claims.proof_attempts import (
    ACTIONS,
    LONGEST,
    TOKENS,
    ProofAttempt,
    ProofPolicy,
    gold_proofs,
    outcome,
)
from posttrain_study.claims.sequents import Guide, TreeLearner, new_llama, sequent_of
from posttrain_study.claims.tactic_rewards import closed_goals, fewer_goals, still_provable, tactics


@pytest.fixture(scope="module")
def proofs():
    guide = Guide(new_llama(0), 0, prior=False)
    return gold_proofs("train", Propositional(low=4, high=8, train=20), guide)


def test_gold_rules_prove_each_goal_in_as_many_rules_as_its_size(proofs):
    assert len(proofs) > 15
    for gold in proofs:
        for size, goal in gold.parts:
            attempt = ProofAttempt(goal, [goal])
            while attempt.pending:
                attempt.apply(ACTIONS.index(gold.rules[attempt.goals[-1]]))
            assert (attempt.proved, len(attempt.rules)) == (True, size)
            assert sum(outcome(attempt)) == sum(fewer_goals(attempt)) == 1
            assert sum(still_provable(attempt)) == sum(tactics(attempt)) == size
        assert gold.parts[-1] == (gold.length, gold.theorem)


def test_tactics_that_lead_in_a_circle_are_accepted_and_paid():
    implication, goal = parse_formula("A -> B"), parse_formula("A")
    attempt = ProofAttempt(sequent := sequent_of([implication], goal), [sequent])
    while attempt.pending:
        attempt.apply(ACTIONS.index("use 0"))
    assert (len(attempt.rules), attempt.proved, attempt.refused) == (LONGEST, False, False)
    assert set(attempt.sequents) == {sequent}
    assert sum(tactics(attempt)) == LONGEST
    assert sum(outcome(attempt)) == sum(closed_goals(attempt)) == 0
    assert sum(fewer_goals(attempt)) == 1 - len(attempt.goals) == -LONGEST


def test_refused_rule_ends_an_attempt_and_leaves_its_goal():
    sequent = sequent_of([parse_formula("A \\/ B")], parse_formula("B"))
    attempt = ProofAttempt(sequent, [sequent])
    attempt.apply(ACTIONS.index("split"))
    assert (attempt.refused, attempt.pending, attempt.goals) == (True, False, [sequent])
    assert tactics(attempt) == still_provable(attempt) == [-1]
    assert fewer_goals(attempt) == [0]


def test_policy_trains_on_the_probabilities_that_it_samples_by(proofs):
    policy = ProofPolicy(TreeLearner(new_llama(1), 1), build("grpo", {}, horizon=LONGEST), 1e-3)
    theorem = proofs[0].theorem
    draw = torch.Generator().manual_seed(0)
    attempts = policy.attempts([theorem] * 64, draw)
    policy.rows = {s: n for n, s in enumerate({s: None for a in attempts for s in a.sequents})}
    guide = Guide(policy.model, 0)
    guide.read(list(policy.rows))
    logp = torch.stack([torch.from_numpy(guide.memory[s][0][TOKENS]) for s in policy.rows])
    torch.testing.assert_close(policy.log_table().double(), logp.log_softmax(-1), atol=1e-5, rtol=1e-5)
    before = policy.log_table()[policy.rows[theorem]].detach()
    first = attempts[0].rules[0]
    policy.learn_from(attempts, [[float(a.rules[0] == first)] * len(a.rules) for a in attempts], 64)
    assert policy.log_table()[policy.rows[theorem], first] > before[first]
