"""Rewards of a response judged step by step: at the token that ends the step, and in sum the score."""

import pytest

from posttrain.plan.resolve import resolve_recipe
from posttrain.recipe import config
from posttrain.rollout.live_episode import RunningEpisode
from posttrain.types import Completion, Sampling, Task, Trajectory


class Letters:
    """A tokenizer of one or two letters a token."""

    def decode(self, tokens: list[int]) -> str:
        return "".join("ab" if token == 2 else "c" for token in tokens)


class Chat:
    tokenizer = Letters()


def live(answer: list[int]) -> RunningEpisode:
    found = RunningEpisode(Task(id="q", messages=()), 0, "", Sampling(), [1, 1, 1])
    zeros = [0.0] * len(answer)
    found.append_answer(
        Completion(
            tokens=answer, logp_gen=zeros, logp_policy=zeros, version=[0] * len(answer), text="", stop="eos"
        )
    )
    return found


@pytest.mark.parametrize(
    ("progress", "score", "rewards"),
    [
        ((), 1.0, [0.0, 0.0, 0.0, 0.0, 1.0]),
        # "ab" "c" "ab" "c" and eos, which decodes to a letter here: 2, 3, 5, 6 characters
        (((3, 0.25), (5, 0.5)), 1.0, [0.0, 0.25, 0.25, 0.0, 0.5]),
        # A step that ends within a token is paid with that token.
        (((1, 0.5),), 0.0, [0.5, 0.0, 0.0, 0.0, -0.5]),
        # A step beyond the text is paid at the end.
        (((99, 0.5),), 1.0, [0.0, 0.0, 0.0, 0.0, 1.0]),
        # A step that loses potential pays it back.
        (((2, 0.5), (3, 0.25)), 0.25, [0.5, -0.25, 0.0, 0.0, 0.0]),
    ],
)
def test_each_step_earns_what_its_potential_gains_and_the_sum_is_the_score(progress, score, rewards):
    found = live([2, 1, 2, 1, 1])
    found.pay_score(score, progress, Chat())
    assert found.reward == [0.0, 0.0, 0.0, *rewards]
    assert sum(found.reward) == score


@pytest.mark.parametrize(
    ("name", "gamma", "game", "put_in"),
    [
        ("ppo", 0.9, False, True),
        ("ppo", 1.0, False, False),
        ("grpo", None, False, False),
        ("ppo", 0.9, True, False),
    ],
)
def test_a_discount_is_put_into_what_a_verifier_pays_and_not_into_what_a_game_pays(
    online, write, name, gamma, game, put_in
):
    """A verifier's rewards are advances on a score; a game's are what they are."""
    over = {"method": {"name": name} | ({"gamma": gamma} if gamma else {})}
    if game:
        over |= {"task": {"arithmetic": None, "guess": {"high": 9}}, "verifier": None}
    resolved = resolve_recipe(config.read(write(online, over)).recipe)
    assert (resolved.method.shaped is not None) == put_in


def test_a_reward_that_came_with_no_choice_of_the_policy_is_refused():
    """A selection would count it, and the update would not."""
    zero = [0.0] * 4
    whole = {"tokens": [1, 2, 3, 4], "logp_gen": zero, "logp_policy": zero, "version": [0] * 4}
    mask = [False, True, False, True]
    assert Trajectory(**whole, sampled=mask, reward=[0.0, 0.5, 0.0, 0.5]).total_reward == 1.0
    with pytest.raises(ValueError, match="token 2 has a reward"):
        Trajectory(**whole, sampled=mask, reward=[0.0, 0.5, 0.5, 0.0])
