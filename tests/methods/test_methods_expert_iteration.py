"""Expert iteration: which answers are imitated, what they weigh, where that leads, and pass@k."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, product
from math import comb
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.math import reduce, selection
from posttrain.math.coverage import coverage
from posttrain.methods.imitation import ExpertIteration
from posttrain.methods.table import EXPERT
from posttrain.types import Batch, Outputs, Trajectory

BEST = replace(EXPERT, keep=selection.best)
Row = tuple[int, list[int], float]
"""A task, an answer's tokens, and its reward."""


def batch_of(rows: list[Row]) -> Batch:
    """Answers behind a prompt of two tokens."""
    made = []
    for task, answer, reward in rows:
        n = 2 + len(answer)
        paid = [0.0] * (n - 1) + [reward] if answer else [0.0] * n
        trained = [False, False] + [True] * len(answer)
        zero = [0.0] * n
        made.append(
            Trajectory(
                tokens=[20, 21 + task, *answer],
                sampled=trained,
                logp_gen=[-0.5 * s for s in trained],
                logp_policy=[-0.5 * s for s in trained],
                version=[0] * n,
                reward=paid if answer else zero,
            )
        )
    return Batch.of(made, [task for task, _, _ in rows])


def kept(method: ExpertIteration, batch: Batch) -> list[bool]:
    """Which rows are imitated; the others have no weight."""
    prepared = method.prepare(batch)
    assert prepared.advantage is not None
    weight = method.weight(prepared)
    assert not weight[~batch.mask].any()
    chosen = (prepared.advantage > 0).any(-1)
    assert torch.equal(chosen, (weight > 0).any(-1))
    assert torch.equal(prepared.advantage, (chosen[:, None] & batch.mask).float())
    return chosen.tolist()


def weights(method: ExpertIteration, batch: Batch) -> list[float]:
    """What each answer weighs: each of its tokens alike."""
    return method.weight(method.prepare(batch)).amax(-1).tolist()


# ---------------------------------------------------------------- which answers


def test_a_task_is_imitated_where_it_is_right_and_each_answer_once() -> None:
    rows: list[Row] = [
        (0, [1, 2], 1.0),
        (0, [1, 2], 1.0),  # said before
        (0, [1, 3], 0.0),
        (0, [4], 1.0),
        (1, [1, 2], 1.0),  # said before, of another task
        (1, [], 0.0),  # nobody could judge it
        (2, [5], 0.5),
    ]
    batch = batch_of(rows)
    assert kept(EXPERT, batch) == [True, False, False, True, True, False, False]
    assert weights(EXPERT, batch) == pytest.approx([0.25, 0, 0, 0.25, 0.5, 0, 0])
    assert weights(replace(EXPERT, balance=selection.unbalanced), batch) == pytest.approx(
        [1 / 3, 0, 0, 1 / 3, 1 / 3, 0, 0]
    )
    assert kept(replace(EXPERT, accept=0.5), batch)[-1]
    counted = replace(EXPERT, repeats=selection.counted)
    assert kept(counted, batch) == [True, True, False, True, True, False, False]
    assert weights(counted, batch) == pytest.approx([1 / 6, 1 / 6, 0, 1 / 6, 1 / 2, 0, 0])
    assert kept(replace(EXPERT, accept=-1.0), batch) == [True, False, True, True, True, False, True]


def test_of_equal_answers_one_that_is_accepted_stands_for_all() -> None:
    """A judge may be of two minds: the best verdict counts, and the first of these stands."""
    assert kept(EXPERT, batch_of([(0, [1], 0.0), (0, [1], 1.0), (0, [1], 1.0)])) == [False, True, False]
    assert kept(BEST, batch_of([(0, [1], 1.0), (0, [1], 2.0)])) == [False, True]


def test_best_of_n_is_the_best_that_is_accepted() -> None:
    rows: list[Row] = [
        (0, [1], 1.0),
        (0, [2], 3.0),
        (0, [3], 2.0),
        (1, [1], 0.5),
        (2, [1], 1.5),
        (2, [2], 1.5),
    ]
    assert kept(BEST, batch_of(rows)) == [False, True, False, False, True, True]
    assert kept(replace(BEST, accept=-9.0), batch_of(rows)) == [False, True, False, True, True, True]


def test_rewards_of_steps_that_add_up_to_the_bound_reach_it() -> None:
    """Ten times 0.1 are 0.9999999999999999 or 1.0, by the order of addition."""
    batch = batch_of([(0, [1] * 10, 1.0)])
    batch = replace(batch, reward=torch.full_like(batch.reward, 0.1))
    for ulp in (-1e-15, 0.0, 1e-15):
        assert kept(EXPERT, replace(batch, reward=batch.reward * (1 + ulp))) == [True]
    assert kept(EXPERT, replace(batch, reward=batch.reward * 0.999)) == [False]


ROWS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(st.integers(0, 2), max_size=3),
        st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    ),
    min_size=1,
    max_size=14,
).filter(lambda rows: any(answer for _, answer, _ in rows))


@given(rows=ROWS, accept=st.sampled_from([-1.0, 0.0, 1.0, 3.0]), best=st.booleans())
def test_the_choice_is_that_of_a_loop(rows: list[Row], accept: float, best: bool) -> None:
    """Of equal answers the first of those with the highest reward."""
    wanted, said = [False] * len(rows), set()
    for n in sorted(range(len(rows)), key=lambda n: -rows[n][2]):
        task, answer, reward = rows[n]
        wanted[n] = bool(answer) and reward >= accept and (task, *answer) not in said
        said |= {(task, *answer)} if wanted[n] else set()
    if best:
        top: dict[int, float] = {}
        for (task, _, reward), among in zip(rows, wanted, strict=True):
            top[task] = max(reward, top.get(task, reward)) if among else top.get(task, -9.0)
        wanted = [w and r == top[t] for (t, _, r), w in zip(rows, wanted, strict=True)]
    assert kept(replace(BEST if best else EXPERT, accept=accept), batch_of(rows)) == wanted


# ---------------------------------------------------------------- what they weigh


@pytest.mark.parametrize(
    "reduction", [reduce.per_token, reduce.per_sequence, reduce.per_row], ids=lambda f: f.__name__
)
@given(rows=ROWS)
def test_balanced_tasks_weigh_the_same_and_nothing_else_changes(
    reduction: Callable[..., torch.Tensor], rows: list[Row]
) -> None:
    """Each answer of a task is multiplied by the same, and all of a task by the same as those of another."""
    batch = EXPERT.prepare(batch_of(rows))
    plain = replace(EXPERT, reduction=reduction, balance=selection.unbalanced).weight(batch)
    even = replace(EXPERT, reduction=reduction).weight(batch)
    chosen = plain.any(-1)
    assert chosen.tolist() == even.any(-1).tolist()
    factor = even.sum(-1)[chosen] / plain.sum(-1)[chosen]
    torch.testing.assert_close(even[chosen], plain[chosen] * factor[:, None])
    tasks = batch.group[chosen]
    for g in tasks.unique():
        of_task = factor[tasks == g]
        torch.testing.assert_close(of_task, of_task[:1].expand_as(of_task))
        torch.testing.assert_close(of_task.sum(), factor.new_tensor(len(tasks) / len(tasks.unique())))


def test_equally_good_answers_share_what_any_one_of_them_would_have() -> None:
    rows: list[Row] = [(0, [1], 2.0), (0, [2, 3], 2.0), (0, [3], 2.0), (1, [4], 1.0)]
    together = torch.tensor(weights(BEST, batch_of(rows)))
    alone = []
    for chosen in range(3):
        paid: list[Row] = [(t, a, r + (n == chosen)) for n, (t, a, r) in enumerate(rows)]
        alone.append(torch.tensor(weights(BEST, batch_of(paid))))
    torch.testing.assert_close(together, torch.stack(alone).mean(0))


def test_an_update_without_a_trained_token_is_an_error_and_one_without_a_kept_answer_is_none() -> None:
    with pytest.raises(ValueError, match="nothing to train on"):
        EXPERT.prepare(batch_of([(0, [], 0.0)]))
    assert kept(EXPERT, batch_of([(0, [1], 0.0), (1, [2], 0.9)])) == [False, False]


# ---------------------------------------------------------------- in the learner


@pytest.fixture
def learner(make_model: Callable[..., Path]) -> Callable[..., Learner]:
    """learner(steps...) -> one of a tiny model, with expert iteration."""

    def make(**steps: int) -> Learner:
        model = AutoModelForCausalLM.from_pretrained(make_model(num_hidden_layers=1))
        return Learner(model, EXPERT, optim=Optim(lr=0.01), steps=Steps(**steps), total_steps=9)

    return make


def held(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: p.clone() for name, p in learner.masters.tensors().items()}


@pytest.mark.parametrize("steps", [{}, {"epochs": 2, "minibatches": 3}], ids=str)
def test_an_update_of_wrong_answers_alone_is_skipped(
    learner: Callable[..., Learner], steps: dict[str, int]
) -> None:
    """Also after one that moved: the momentum moves nothing by itself."""
    made = learner(**steps)
    right = batch_of([(0, [30, 31], 1.0), (0, [32], 0.0), (1, [33], 0.0), (2, [34], 0.0)])
    before = held(made)
    first = made.update(right)
    assert first.computed.tolist() == [True, False, False, False]
    after = held(made)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    nothing = made.update(replace(right, reward=torch.zeros_like(right.reward)))
    assert made.update_count == 2
    assert not nothing.computed.any()
    assert nothing.metrics["loss"] == nothing.metrics["grad_norm"] == 0.0
    assert all(torch.equal(after[name], p) for name, p in held(made).items())


def test_what_is_imitated_gets_likelier_and_nothing_else_is_read(learner: Callable[..., Learner]) -> None:
    made = learner(epochs=4)
    rows: list[Row] = [(0, [30, 31], 1.0), (0, [32, 33], 0.0)]
    before = made.score(batch_of(rows)).logp.sum(-1)
    made.update(batch_of(rows))
    after = made.score(batch_of(rows)).logp.sum(-1)
    assert after[0] > before[0] + 0.1
    alone = learner(epochs=4)
    alone.update(batch_of(rows[:1]))
    assert all(torch.equal(held(made)[name], p) for name, p in held(alone).items())


# ---------------------------------------------------------------- where it leads

ANSWERS, RIGHT = 6, (1, 2, 5)


def loss_of(method: ExpertIteration, rows: list[Row], logp: torch.Tensor) -> torch.Tensor:
    """Σ weight · loss where the answers are single tokens of these log-probabilities, task by task."""
    batch = method.prepare(batch_of(rows))
    column = torch.zeros(batch.mask.shape, dtype=logp.dtype)
    column[:, 2] = torch.stack([logp[task, answer[0]] for task, answer, _ in rows])
    out = Outputs(logp=column, entropy=torch.zeros_like(column))
    return reduce.weighted_sum(method.loss(out, batch), method.weight(batch).to(column), batch.mask)


@pytest.mark.parametrize(
    ("repeats", "wanted"), [(selection.distinct, (1 / 3,) * 3), (selection.counted, (3 / 6, 1 / 6, 2 / 6))]
)
def test_the_end_of_a_round_is_its_right_answers_and_there_it_stays(
    repeats: Callable[..., torch.Tensor], wanted: tuple[float, ...]
) -> None:
    """Wrong answers go; right ones end alike, or as often as they were given."""
    method = replace(EXPERT, repeats=repeats)
    torch.manual_seed(0)
    logits = torch.randn(1, ANSWERS, dtype=torch.float64, requires_grad=True)
    rows: list[Row] = [(0, [y], float(y in RIGHT)) for y in (0, 1, 1, 1, 2, 3, 4, 5, 5)]
    optimiser = torch.optim.SGD([logits], lr=2.0)
    for _ in range(400):
        optimiser.zero_grad()
        loss_of(method, rows, logits.log_softmax(-1)).backward()
        optimiser.step()
    found = logits.detach().softmax(-1)[0]
    assert found[list(RIGHT)].tolist() == pytest.approx(wanted, abs=0.01)
    at = torch.full((1, ANSWERS), -60.0, dtype=torch.float64)
    at[0, list(RIGHT)] = torch.tensor(wanted, dtype=torch.float64).log()
    at.requires_grad_()
    loss_of(method, rows, at.log_softmax(-1)).backward()
    assert at.grad is not None
    assert at.grad.abs().max() < 1e-6


def test_the_expected_step_follows_the_log_of_the_success_rate() -> None:
    """The mean over kept answers, given that there are any: exactly ∇log p, whatever p is, if all count."""
    torch.manual_seed(1)
    logits, K = torch.randn(4, dtype=torch.float64, requires_grad=True), 3
    right = torch.tensor([True, False, True, False])
    p = logits.softmax(-1)[right].sum()
    [wanted] = torch.autograd.grad(p.log(), logits, retain_graph=True)
    logp, chances = logits.log_softmax(-1)[None], logits.softmax(-1).detach()
    counted = replace(EXPERT, repeats=selection.counted)
    total, weight_of_all = torch.zeros_like(wanted), 0.0
    for group in product(range(4), repeat=K):
        if any(right[list(group)]):
            chance = float(chances[list(group)].prod())
            loss = loss_of(counted, [(0, [y], float(right[y])) for y in group], logp)
            total -= chance * torch.autograd.grad(loss, logits, retain_graph=True)[0]
            weight_of_all += chance
    torch.testing.assert_close(weight_of_all, 1 - (1 - float(p.detach())) ** K)
    torch.testing.assert_close(total / weight_of_all, wanted, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------- coverage


@given(n=st.integers(1, 12), data=st.data())
def test_coverage_counts_the_subsets_with_a_right_answer(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    some = [any(i < c for i in subset) for subset in combinations(range(n), k)]
    assert coverage(c, n, k) == pytest.approx(sum(some) / len(some))


@pytest.mark.parametrize("p", [Fraction(0), Fraction(1, 9), Fraction(1, 2), Fraction(1)])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (8, 1), (8, 4), (8, 8), (5, 2)])
def test_coverage_is_unbiased_for_pass_at_k(p: Fraction, n: int, k: int) -> None:
    found = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * Fraction(coverage(c, n, k)) for c in range(n + 1))
    assert float(found) == pytest.approx(float(1 - (1 - p) ** k))


@pytest.mark.parametrize(("right", "sampled", "k"), [(0, 4, 5), (5, 4, 1), (-1, 4, 1), (0, 4, 0), (0, 0, 1)])
def test_too_few_answers_say_nothing_of_pass_at_k(right: int, sampled: int, k: int) -> None:
    with pytest.raises(ValueError, match="there is no pass@"):
        coverage(right, sampled, k)
