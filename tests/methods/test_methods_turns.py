"""Credit by turn: which turns are compared, what they are worth, and what stays as it was without it."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.math import advantages, returns
from posttrain.math.diagnose import share_of_shared_turns
from posttrain.methods.build import build, described
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import DR_GRPO, GIGPO, GRPO, RLOO
from posttrain.types import Batch, Outputs, Trajectory, UserError

Update = Callable[..., tuple[Batch, Outputs]]
Gradients = Callable[..., tuple[torch.Tensor, ...]]
Turns = list[tuple[int, float]]
"""The state that each turn begins in, and its reward."""


def episode(turns: Turns, tokens: int = 2) -> Trajectory:
    """Turns of so many tokens, with a token of the environment before each."""
    sampled = [t % (tokens + 1) > 0 for t in range(len(turns) * (tokens + 1))]
    reward = [0.0] * len(sampled)
    for n, (_, paid) in enumerate(turns):
        reward[(n + 1) * (tokens + 1) - 1] = paid
    states = {n * (tokens + 1) + 1: key for n, (key, _) in enumerate(turns)}
    return Trajectory.given([5] * len(sampled), trained=sampled, reward=reward, turn_state=states)


def batch_of(*episodes: Turns, group: list[int] | None = None) -> Batch:
    return Batch.of([episode(turns) for turns in episodes], group or [0] * len(episodes))


def advantage_of(method: PolicyGradient, batch: Batch) -> torch.Tensor:
    advantage = method.prepare(batch).advantage
    assert advantage is not None
    return advantage


def by_turn(method: PolicyGradient, batch: Batch) -> list[list[float]]:
    """What ω adds to each turn, its tokens alike."""
    added = advantage_of(method, batch) - advantage_of(replace(method, turn_weight=0.0), batch)
    found = []
    for row, mask in zip(added, batch.mask, strict=True):
        pairs = row[mask].view(-1, 2)
        assert torch.equal(pairs[:, 0], pairs[:, 1])
        found.append(pairs[:, 0].tolist())
    return found


CENTRED = replace(DR_GRPO, turn_weight=1.0, turn_gamma=0.5)


def test_turns_of_one_state_are_compared_by_their_discounted_returns() -> None:
    """Returns 2 and 1 from state 7; 4 and 2, and once more 8, from state 9; state 3 is seen once."""
    batch = batch_of([(7, 0.0), (9, 4.0)], [(7, 0.0), (9, 2.0)], [(3, 1.0), (9, 8.0)])
    third = 14 / 3
    assert by_turn(CENTRED, batch) == [
        pytest.approx([0.5, 4 - third]),
        pytest.approx([-0.5, 2 - third]),
        pytest.approx([0.0, 8 - third]),
    ]
    half = by_turn(replace(CENTRED, turn_weight=0.5), batch)
    assert half == [pytest.approx([x / 2 for x in row]) for row in by_turn(CENTRED, batch)]
    assert batch.turn_state is not None
    assert float(share_of_shared_turns(batch.turn_state, batch.mask, batch.group)) == pytest.approx(5 / 6)


def test_states_of_other_groups_are_other_states() -> None:
    batch = batch_of([(7, 1.0)], [(7, 0.0)], [(7, 5.0)], group=[0, 0, 4])
    assert by_turn(CENTRED, batch) == [[0.5], [-0.5], [0.0]]
    assert batch.turn_state is not None
    assert float(share_of_shared_turns(batch.turn_state, batch.mask, batch.group)) == pytest.approx(2 / 3)


def test_a_state_seen_once_adds_nothing_whatever_the_credit() -> None:
    alone = batch_of([(1, 0.0), (2, 1.0)], [(3, 0.0), (4, 0.5)])
    credits_ = [advantages.centred, advantages.normalised, advantages.leave_one_out]
    for credit in credits_:
        assert by_turn(replace(CENTRED, credit=credit), alone) == [[0.0, 0.0]] * 2
    pairs = partial(build, "pass_at_k_training", horizon=9)
    method = pairs({"turn_weight": 1.0, "k": 2})  # compares pairs of three
    assert isinstance(method, PolicyGradient)
    twice = batch_of([(1, 0.0)], [(1, 1.0)], [(2, 1.0)])
    assert by_turn(method, twice) == [[0.0]] * 3


def test_a_weight_of_0_is_grpo_bit_for_bit(update: Update, gradients: Gradients) -> None:
    batch, out = update(5)
    plain = gradients(GRPO, replace(batch, turn_state=None), out)
    off = build("gigpo", {"turn_weight": 0.0}, horizon=16)
    assert not off.asks
    assert all(torch.equal(a, b) for a, b in zip(gradients(off, batch, out), plain, strict=True))
    assert not torch.equal(gradients(GIGPO, batch, out)[1], plain[1])
    assert GIGPO.asks == {"states"}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_split_into_microbatches_changes_the_gradient(
    count: int, update: Update, gradients: Gradients
) -> None:
    batch, out = update(6)
    parts = [part.tolist() for part in torch.arange(len(batch)).tensor_split(count)]
    got, whole = gradients(GIGPO, batch, out, parts), gradients(GIGPO, batch, out)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(got, whole, strict=True))


def test_ranks_of_whole_groups_find_the_advantages_of_one_process(update: Update) -> None:
    batch, _ = update(7)
    whole = advantage_of(GIGPO, batch)
    for group in batch.group.unique():
        rows = (batch.group == group).nonzero().flatten()
        torch.testing.assert_close(advantage_of(GIGPO, batch.rows(rows)), whole[rows], rtol=0, atol=1e-12)
    nothing = torch.zeros(0, 1)
    assert advantages.credit_turns(
        advantages.normalised, nothing, nothing.long(), nothing.bool(), torch.zeros(0, dtype=torch.long)
    ).shape == (0, 1)


def test_conversations_of_an_agent_count_their_own_turns() -> None:
    """Each is paid the episode's reward at its end; whichever came first is unknown."""
    rows = [
        episode([(1, 0.0), (2, 1.0)]),
        episode([(3, 1.0)]),
        episode([(1, 0.0), (4, 0.0)]),
        episode([(3, 0.0)]),
    ]
    batch = Batch.of(rows, [0] * 4, [0, 0, 1, 1])
    assert by_turn(CENTRED, batch) == [[0.25, 0.0], [0.5], [-0.25, 0.0], [-0.5]]
    episodes = advantage_of(replace(CENTRED, turn_weight=0.0), batch)
    assert episodes[batch.mask].unique().tolist() == [-0.5, 0.5]


def test_a_penalty_in_the_reward_is_part_of_a_turns_return() -> None:
    """Also that of other conversations, which comes one turn after the last."""
    rows = [episode([(1, 0.0)], tokens=1), episode([(2, 0.0)], tokens=1), episode([(1, 0.0)], tokens=1)]
    batch = Batch.of(rows, [0] * 3, [0, 0, 1])
    gap = torch.tensor([[0.0, 0.2], [0.0, 0.4], [0.0, 0.6]])
    batch = replace(batch, logp_old=gap, logp_ref=torch.zeros_like(gap))
    method = replace(CENTRED, kl_in_reward=1.0)
    added = advantage_of(method, batch) - advantage_of(replace(method, turn_weight=0.0), batch)
    G = [-0.2 - 0.5 * 0.4, -0.6]
    assert added[0, 1].item() == pytest.approx((G[0] - G[1]) / 2)
    assert added[1, 1].item() == 0


def test_returns_of_turns_are_those_of_a_slow_sum() -> None:
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(20, 30, generator=g) < 0.7
    starts = (torch.rand(20, 30, generator=g) < 0.3) & mask
    reward = torch.randn(20, 30, generator=g, dtype=torch.float64)
    found = returns.turns_to_go(returns.Path(reward, mask), starts, gamma=0.8)
    for i in range(20):
        turn = starts[i].cumsum(0).tolist()
        for t in range(30):
            later = [
                0.8 ** (turn[k] - turn[t]) * reward[i, k].item()
                for k in range(30)
                if mask[i, k] and turn[k] >= turn[t]
            ]
            wanted = sum(later) if mask[i, t] and turn[t] else 0.0
            assert found[i, t].item() == pytest.approx(wanted, abs=1e-12)
    parts = torch.tensor([[0.1, 0.6, -0.7]], dtype=torch.float64)
    every = torch.ones(1, 3, dtype=torch.bool)
    assert not returns.turns_to_go(returns.Path(parts, every), torch.tensor([[True, False, False]])).any()


# ---------------------------------------------------------------------- the key's way into the batch


def test_a_key_survives_pickle_and_replay() -> None:
    row, plain = episode([(2**63 - 1, 0.0), (4, 1.0)]), episode([(0, 1.0)])
    plain = replace(plain, turn_state={})
    for trajectory in (row, plain):
        assert pickle.loads(pickle.dumps(trajectory)) == trajectory
    assert len(plain.__reduce__()[1]) == 8, "without keys a pickle is what it was"
    buffer, restored = (ReplayBuffer(max_lag=2, seed=0) for _ in range(2))
    groups = [[(row, ()), (row, ())], [(plain, ())]]
    buffer.add(1, groups)
    restored.restore(buffer.tensors())
    assert restored.draw(9, update=2) == groups
    buffer.add(2, [[(plain, ())]])
    without = ReplayBuffer(max_lag=2, seed=0)
    without.add(1, [[(plain, ())]])
    assert "turn_state" not in without.tensors()


def test_states_are_numbered_in_a_batch_and_absent_without_keys() -> None:
    big = 2**63 - 1
    batch = Batch.of([episode([(big, 0.0), (9, 0.0)]), episode([(9, 0.0)])], [0, 0])
    assert batch.turn_state is not None
    assert batch.turn_state.tolist() == [[0, 1, 0, 0, 2, 0], [0, 2, 0, 0, 0, 0]]
    assert Batch.of([replace(episode([(1, 0.0)]), turn_state={})], [0]).turn_state is None


@pytest.mark.parametrize("place", [0, 3, 99])
def test_a_turn_begins_with_a_token_of_the_policy(place: int) -> None:
    row = episode([(1, 0.0), (2, 0.0)])
    with pytest.raises(ValueError, match=f"a turn begins at token {place}"):
        replace(row, turn_state={place: 1})


def test_rows_without_states_are_refused(update: Update) -> None:
    batch, _ = update(1)
    with pytest.raises(ValueError, match="the rows have no turn_state"):
        GIGPO.prepare(replace(batch, turn_state=None))


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("grpo", {"turn_gamma": 0.9}, "turn_gamma"),
        ("gigpo", {"turn_weight": 0.0, "turn_gamma": 0.9}, "turn_gamma"),
        ("reinforce", {"turn_weight": 1.0}, "turn_weight"),
        ("gigpo", {"credit": "raw"}, "turn_weight"),
        ("gigpo", {"credit": "batch_normalised"}, "turn_weight"),
        ("gigpo", {"credit": "centred", "returns": "to_go"}, "turn_weight"),
        ("gigpo", {"turn_gamma": 1.5}, "turn_gamma"),
        ("gigpo", {"turn_weight": -1.0}, "turn_weight"),
        ("ppo", {"turn_weight": 1.0}, "turn_weight"),
    ],
)
def test_what_cannot_be_combined(name: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as refused:
        build(name, options, horizon=16)
    assert refused.value.key == f"method.{key}"


def test_relatives_take_it_too() -> None:
    for name, method in (("rloo", RLOO), ("dr_grpo", DR_GRPO)):
        made = build(name, {"turn_weight": 0.5}, horizon=16)
        assert described(made).items() - described(build(name, {}, horizon=16)).items() == {
            ("turn_weight", "0.5"),
            ("turn_gamma", "0.95"),
        }
        assert "turn_gamma" not in described(method)
