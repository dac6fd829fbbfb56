"""online: the exact table of a policy is what its outputs say of sampled answers; experiments on it."""

import torch

from posttrain.methods.build import build
from posttrain_study.claims.gae_lambda import train
from posttrain_study.claims.online import (
    PrefixPolicy,
    Routine,
    batch_of,
    best_answers,
    improve,
    log_probs,
    reference,
    sample,
)
from posttrain_study.claims.replay import groups_of, joined
from posttrain_study.claims.tiny import COUNT, LENGTH, LONGEST, QUESTIONS, gold_of


def test_the_table_agrees_with_the_outputs_of_rows() -> None:
    network, method = reference(0), build("rloo", {}, horizon=LONGEST)
    table = log_probs(network)
    torch.testing.assert_close(table.exp().sum(1), torch.ones(QUESTIONS, dtype=torch.float64))
    answers = torch.randint(COUNT, (QUESTIONS, 50), generator=torch.Generator().manual_seed(0))
    batch = batch_of(torch.arange(QUESTIONS), answers, torch.zeros(answers.shape))
    logp = (PrefixPolicy(network, method, 0.0).outputs(batch).logp * batch.mask).sum(1)
    torch.testing.assert_close(logp.double(), table.gather(1, answers).flatten(), atol=1e-5, rtol=0)


def test_groups_ask_each_question_before_one_is_asked_again() -> None:
    logp, chance = log_probs(reference(0)), torch.Generator().manual_seed(0)
    batch = sample(
        logp, LENGTH.double().expand(QUESTIONS, -1), Routine(1, groups=20, size=2, least=1), chance
    )
    questions = (batch.tokens[::2, 0] * 3 + batch.tokens[::2, 1]).bincount(minlength=QUESTIONS)
    assert set(questions.tolist()) == {2, 3}
    reward = batch.reward.sum(1)  # of the letters, which the end mark is not one of
    ends = batch.tokens.gather(1, batch.length[:, None] - 1)[:, 0] == 3
    assert torch.equal(reward, (batch.mask.sum(1) - ends.long()).double())
    assert reward.min() >= 1


def test_the_best_answers_have_the_share_that_is_asked_for() -> None:
    logp, gold = log_probs(reference(0)), gold_of(0)
    right = best_answers(logp, gold, 0.05)
    assert ((right * logp.exp()).sum(1) >= 0.05).all()
    assert (gold.masked_fill(right == 0, 9).amin(1) > gold.masked_fill(right == 1, -9).amax(1)).all()


def test_replayed_groups_are_the_rows_that_were_sampled() -> None:
    gold, policy = gold_of(0), PrefixPolicy(reference(0), build("grpo", {}, horizon=LONGEST), 0.0)
    batch = sample(log_probs(policy.network), gold, Routine(1, 4, 8), torch.Generator().manual_seed(0))
    again = joined(groups_of(policy, batch, 3))
    for name in ("mask", "reward", "length", "group"):
        torch.testing.assert_close(getattr(again, name), getattr(batch, name), check_dtype=False)
    torch.testing.assert_close(policy.outputs(again).logp[again.mask], again.logp_gen[again.mask].float())
    assert set(again.version[again.mask].tolist()) == {3}


def test_a_reference_that_follows_each_update_leaves_no_penalty() -> None:
    start, gold, plan = reference(0), gold_of(0), Routine(3)
    ends = {}
    for weight, refresh in ((0.0, 0), (9.0, 1), (9.0, 2)):
        method = build("grpo", {"kl_in_loss": weight}, horizon=LONGEST)
        ends[weight, refresh] = log_probs(
            improve(start, method, gold, plan, 0, refresh_every=refresh).network
        )
    torch.testing.assert_close(ends[9.0, 1], ends[0.0, 0])
    assert not torch.allclose(ends[9.0, 2], ends[0.0, 0])


def test_the_policy_stands_still_while_the_critic_warms_up() -> None:
    path = train("learnt", 12, 0.95, (0.3, 0.1), 0, name="ppo", warmup=10)
    assert path[0] == path[1] == path[2] != path[3]
