"""advantages: equal to loops in exact fractions, and invariant to what must not matter."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.math import advantages, pass_at_k

Credit = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
GROUPED = [advantages.centred, advantages.normalised, advantages.normalised_sample, advantages.leave_one_out]
BATCH = [
    advantages.batch_normalised,
    advantages.batch_normalised_sample,
    advantages.centred_batch_normalised,
]
ALL = [advantages.raw, *GROUPED, *BATCH, advantages.over_mean]
SEVERAL = [1, 2, 3, 4]
by_name = pytest.mark.parametrize("credit", ALL, ids=lambda f: f.__name__)
by_grouped_name = pytest.mark.parametrize("credit", GROUPED, ids=lambda f: f.__name__)

# At least two rows a group, group numbers apart and out of order; rewards in eighths are exact in floats.
GROUPS = st.lists(
    st.tuples(st.integers(0, 8), st.integers(2, 5)), min_size=1, max_size=4, unique_by=lambda pair: pair[0]
).flatmap(lambda sizes: st.permutations([g * 1000 - 3 for g, k in sizes for _ in range(k)]))
ROWS = GROUPS.flatmap(
    lambda group: st.tuples(
        st.just(group), st.lists(st.integers(-16, 16), min_size=len(group), max_size=len(group))
    )
).map(lambda pair: (torch.tensor(pair[0]), [Fraction(n, 8) for n in pair[1]]))


def tensor(rewards: list[Fraction]) -> torch.Tensor:
    return torch.tensor([float(r) for r in rewards], dtype=torch.float64)


def slowly(name: str, rewards: list[Fraction], group: list[int]) -> list[float]:
    """The advantages by the formulas of the papers, one row after the other, means in exact fractions."""
    answers = []
    for i, reward in enumerate(rewards):
        others = [r for j, r in enumerate(rewards) if j != i and group[j] == group[i]]
        mine = rewards if name.startswith("batch_normalised") else [reward, *others]
        if name == "centred_batch_normalised":
            reward, mine = centred(i, rewards, group), [centred(j, rewards, group) for j in range(len(group))]
        answers.append(one(name, reward, mine, others))
    return answers


def centred(i: int, rewards: list[Fraction], group: list[int]) -> Fraction:
    same = [r for j, r in enumerate(rewards) if group[j] == group[i]]
    return rewards[i] - sum(same, Fraction(0)) / len(same)


def one(
    name: str, reward: Fraction, mine: list[Fraction], others: list[Fraction], eps: float = 1e-6
) -> float:
    K, mean = len(mine), sum(mine, Fraction(0)) / len(mine)
    squares = sum(((r - mean) ** 2 for r in mine), Fraction(0))
    match name:
        case "raw":
            return float(reward)
        case "centred":
            return float(reward - mean)
        case "leave_one_out":
            return float(reward - sum(others, Fraction(0)) / len(others))
        case "normalised_sample" | "batch_normalised_sample":
            return float(reward - mean) / (math.sqrt(squares / (K - 1)) + eps)
        case "normalised" | "batch_normalised" | "centred_batch_normalised":
            return float(reward - mean) / (math.sqrt(squares / K) + eps)
        case "over_mean":
            return float(reward - mean) / (float(mean) + eps) if mean > 0 else 0.0
    raise AssertionError(f"no formula for {name}")


@by_name
@given(rows=ROWS)
@settings(max_examples=40, deadline=None)
def test_every_credit_equals_the_papers_formula(
    credit: Credit, rows: tuple[torch.Tensor, list[Fraction]]
) -> None:
    group, rewards = rows
    wanted = slowly(credit.__name__, rewards, group.tolist())
    assert credit(tensor(rewards), group).tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@by_name
@given(rows=ROWS, data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_order_of_rows_and_the_numbers_of_groups_do_not_matter(
    credit: Credit, rows: tuple[torch.Tensor, list[Fraction]], data: st.DataObject
) -> None:
    group, rewards = rows
    order = torch.tensor(data.draw(st.permutations(range(len(group)))))
    returns = tensor(rewards)
    torch.testing.assert_close(credit(returns[order], 7 - 2 * group[order]), credit(returns, group)[order])


@pytest.mark.parametrize("credit", [*GROUPED, *BATCH], ids=lambda f: f.__name__)
@given(rows=ROWS, shift=st.integers(-80, 80))
@settings(max_examples=25, deadline=None)
def test_adding_a_constant_to_every_reward_changes_nothing(
    credit: Credit, rows: tuple[torch.Tensor, list[Fraction]], shift: int
) -> None:
    group, rewards = rows
    shifted = [r + Fraction(shift, 8) for r in rewards]
    torch.testing.assert_close(credit(tensor(shifted), group), credit(tensor(rewards), group))


@by_grouped_name
def test_a_shift_of_one_group_alone_changes_nothing(credit: Credit) -> None:
    group = torch.tensor([4, 9, 4, 9, 4])
    returns = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(credit(returns + (group == 9) * 5.0, group), credit(returns, group))


@pytest.mark.parametrize(
    "credit",
    [advantages.normalised, advantages.normalised_sample, *BATCH, advantages.over_mean],
    ids=lambda f: f.__name__,
)
@given(rows=ROWS, scale=st.sampled_from([0.25, 3.0, 1000.0]))
@settings(max_examples=25, deadline=None)
def test_the_unit_of_reward_cancels(
    credit: Callable[..., torch.Tensor], rows: tuple[torch.Tensor, list[Fraction]], scale: float
) -> None:
    group, rewards = rows
    returns = tensor(rewards)
    torch.testing.assert_close(
        credit(returns * scale, group, eps=0.0), credit(returns, group, eps=0.0), rtol=1e-9, atol=1e-9
    )


@given(rows=ROWS)
@settings(max_examples=40, deadline=None)
def test_how_the_grouped_credits_differ_from_each_other(rows: tuple[torch.Tensor, list[Fraction]]) -> None:
    group, rewards = rows
    returns, K = tensor(rewards), torch.tensor([group.tolist().count(g) for g in group.tolist()])
    centred = advantages.centred(returns, group)
    torch.testing.assert_close(advantages.leave_one_out(returns, group), centred * K / (K - 1))
    torch.testing.assert_close(
        advantages.normalised(returns, group, eps=0.0),
        advantages.normalised_sample(returns, group, eps=0.0) * (K / (K - 1)).sqrt(),
    )


@pytest.mark.parametrize(
    "credit", [*GROUPED, advantages.batch_normalised, advantages.over_mean], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e-20, 12345.678, 0.0])
@pytest.mark.parametrize("K", [2, 3, 6, 7, 16, 49])
def test_equal_rewards_give_exactly_zero(credit: Credit, reward: float, K: int) -> None:
    """In float32 the mean of K times 0.1 need not be 0.1; the advantage is 0 nevertheless."""
    returns = torch.full((K,), reward)
    assert not credit(returns, torch.full((K,), 5)).any()


def test_the_mean_of_equal_numbers_does_differ_from_them() -> None:
    """Without this the test above would prove nothing."""
    assert any(
        bool((torch.zeros(1).index_add(0, torch.zeros(K, dtype=torch.long), x) / K != x).any())
        for K in range(2, 50)
        for x in [torch.full((K,), 0.1)]
    )


@by_grouped_name
def test_only_the_group_that_varies_is_credited(credit: Credit) -> None:
    group = torch.tensor([2, 1, 2, 1, 2, 1])
    out = credit(torch.tensor([0.1, 1.0, 0.1, 0.0, 0.1, 0.0]), group)
    assert (out != 0).tolist() == [False, True] * 3


def test_leave_one_out_refuses_a_group_of_one() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        advantages.leave_one_out(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))


@pytest.mark.parametrize("credit", GROUPED[:3], ids=lambda f: f.__name__)
def test_a_group_of_one_learns_nothing(credit: Credit) -> None:
    assert credit(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]))[2] == 0


def test_over_mean_estimates_the_gradient_of_the_log_likelihood() -> None:
    """With S successes of K: a success gets K/S - 1, a failure -1; without success all get 0."""
    for S in range(1, 4):
        returns = torch.tensor([1.0] * S + [0.0] * (4 - S), dtype=torch.float64)
        wanted = [4 / S - 1] * S + [-1.0] * (4 - S)
        group = torch.zeros(4, dtype=torch.long)
        assert advantages.over_mean(returns, group, eps=0.0).tolist() == pytest.approx(wanted)
    assert not advantages.over_mean(torch.zeros(4), group).any()
    assert not advantages.over_mean(torch.tensor([-1.0, 0.0, -1.0, 0.0]), group).any()


@by_name
def test_a_nan_return_is_not_hidden(credit: Credit) -> None:
    returns = torch.tensor([math.nan, 1.0, 0.0])
    assert credit(returns, torch.zeros(3, dtype=torch.long))[0].isnan()


@by_name
def test_returns_are_not_changed_in_place(credit: Credit) -> None:
    returns = torch.tensor([1.0, 0.0])
    credit(returns, torch.zeros(2, dtype=torch.long)).add_(1)
    assert returns.tolist() == [1.0, 0.0]


# ---------------------------------------------------------------- by part

Parts = list[list[int | None]]
"""Each part of the reward of every row, in eighths; None where a row lacks it."""
PARTED = GROUPS.flatmap(
    lambda group: st.tuples(
        st.just(group),
        st.lists(
            st.lists(st.none() | st.integers(-16, 16), min_size=len(group), max_size=len(group)),
            min_size=3,
            max_size=3,
        ),
        st.tuples(*[st.sampled_from([-1.0, 0.25, 1.0, 3.0])] * 3),
    )
)


def by_part(group: list[int], parts: Parts, weights: Sequence[float], eps: float = 1e-6) -> torch.Tensor:
    """The credit of these parts; the whole rewards are not read."""
    columns = [[math.nan if x is None else x / 8 for x in part] for part in parts]
    return advantages.normalised_by_part(
        torch.zeros(len(group), dtype=torch.float64),
        torch.tensor(group),
        torch.tensor(columns, dtype=torch.float64).T,
        torch.tensor(weights, dtype=torch.float64),
        eps=eps,
    )


def slowly_by_part(group: list[int], parts: Parts, weights: Sequence[float]) -> list[float]:
    """GDPO one row after the other, with the whitening of the paper, which subtracts the mean."""
    total = [0.0] * len(group)
    for part, weight in zip(parts, weights, strict=True):
        for i, x in enumerate(part):
            if x is not None:
                same = [Fraction(y, 8) for j, y in enumerate(part) if group[j] == group[i] and y is not None]
                total[i] += weight * one("normalised", Fraction(x, 8), same, [])
    mean = math.fsum(total) / len(total)
    sigma = math.sqrt(math.fsum((x - mean) ** 2 for x in total) / len(total))
    return [(x - mean) / (sigma + 1e-6) for x in total]


@given(drawn=PARTED)
@settings(max_examples=25, deadline=None)
def test_by_part_equals_the_papers_formula_with_parts_missing(
    drawn: tuple[list[int], Parts, Sequence[float]],
) -> None:
    assert by_part(*drawn).tolist() == pytest.approx(slowly_by_part(*drawn), rel=1e-6, abs=1e-6)


@given(drawn=PARTED, n=st.integers(0, 2), scale=st.integers(1, 50), shift=st.integers(-80, 80))
@settings(max_examples=15, deadline=None)
def test_the_unit_and_the_zero_of_one_part_cancel(
    drawn: tuple[list[int], Parts, Sequence[float]], n: int, scale: int, shift: int
) -> None:
    group, parts, weights = drawn
    moved = [*parts]
    moved[n] = [None if x is None else scale * x + shift for x in parts[n]]
    torch.testing.assert_close(
        by_part(group, moved, weights, eps=0.0), by_part(group, parts, weights, eps=0.0), rtol=1e-7, atol=1e-7
    )


def test_the_unit_of_one_part_matters_to_the_credit_of_their_sum() -> None:
    """Else the test above would say nothing of GDPO: measured in points, correctness alone is heard."""
    group = torch.zeros(4, dtype=torch.long)
    right, format_ = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    small, large = (advantages.normalised(unit * right + format_, group) for unit in (1.0, 100.0))
    assert small.tolist() == pytest.approx([1.4142, 0.0, 0.0, -1.4142], abs=1e-4)
    assert large.tolist() == pytest.approx([1.01, 0.99, -0.99, -1.01], abs=1e-3)


def test_a_group_that_differs_in_both_parts_is_told_from_one_that_differs_in_one() -> None:
    """The paper's example: sums (0, 1) and (0, 2) are ±1 to GRPO, and before whitening ±1 and ±2 here."""
    group = [0, 0, 1, 1]
    parts: Parts = [[0, 0, 0, 8], [0, 8, 0, 8]]
    sums = torch.tensor([0.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    assert advantages.normalised(sums, torch.tensor(group), eps=0.0).tolist() == [-1.0, 1.0, -1.0, 1.0]
    A = by_part(group, parts, [1.0, 1.0], eps=0.0)
    rms = math.sqrt((1 + 1 + 4 + 4) / 4)
    assert (A * rms).tolist() == pytest.approx([-1.0, 1.0, -2.0, 2.0])


@given(rows=ROWS)
@settings(max_examples=20, deadline=None)
def test_a_single_part_is_normalised_and_whitened_to_the_bit(
    rows: tuple[torch.Tensor, list[Fraction]],
) -> None:
    group, rewards = rows
    R = tensor(rewards).float()
    once = advantages.normalised(R, group)
    alone = advantages.normalised_by_part(R, group, R[:, None], torch.ones(1))
    assert torch.equal(alone, advantages.centred_batch_normalised(once, group))
    whitened = advantages.batch_normalised(once, group)
    torch.testing.assert_close(alone, whitened, rtol=1e-5, atol=1e-6)


def test_a_group_whose_parts_agree_gets_exactly_zero_beside_others() -> None:
    """So that such rows need not be computed; a part that only one row of a group has says nothing."""
    group = [0, 0, 0, 1, 1, 1, 2, 2, 2]
    parts: Parts = [[1, 1, 1, 0, 8, 3, None, None, 5], [7, 7, 7, None, None, None, 3, 3, 3]]
    A = by_part(group, parts, [1.0, 0.3])
    assert (A != 0).tolist() == [False] * 3 + [True] * 3 + [False] * 3
    everywhere_absent: Parts = [parts[0], [None] * 9]
    assert torch.equal(by_part(group, everywhere_absent, [1.0, 5.0]), by_part(group, [parts[0]], [1.0]))


# ---------------------------------------------------------------- pass at k


def best_of(rewards: list[Fraction], k: int) -> Fraction:
    """E[max of k of them], over all subsets."""
    chosen = [max(subset) for subset in combinations(rewards, k)]
    return sum(chosen, Fraction(0)) / len(chosen)


@given(
    rewards=st.lists(st.integers(-16, 16).map(lambda n: Fraction(n, 8)), min_size=5, max_size=7),
    k=st.sampled_from(SEVERAL),
)
@settings(max_examples=60, deadline=None)
def test_pass_at_k_is_the_mean_over_all_subsets(rewards: list[Fraction], k: int) -> None:
    """A second group beside the first, in between its rows, changes nothing."""
    wanted = []
    for i, own in enumerate(rewards):
        others = rewards[:i] + rewards[i + 1 :]
        subsets = [max([own, *rest]) for rest in combinations(others, k - 1)]
        wanted.append(float(k * (sum(subsets, Fraction(0)) / len(subsets) - best_of(others, k))))
    both = torch.stack([tensor(rewards), tensor(rewards[::-1]) * 3 + 1], dim=1).flatten()
    group = torch.tensor([7, -1]).repeat(len(rewards))
    got = pass_at_k.pass_at_k(both, group, k=k)
    assert got[::2].tolist() == pytest.approx(wanted, abs=1e-12)
    assert got[1::2].tolist() == pytest.approx([3 * A for A in wanted[::-1]], abs=1e-12)


@given(rows=ROWS)
@settings(max_examples=40, deadline=None)
def test_pass_at_1_is_leave_one_out(rows: tuple[torch.Tensor, list[Fraction]]) -> None:
    group, rewards = rows
    returns = tensor(rewards)
    torch.testing.assert_close(
        pass_at_k.pass_at_k(returns, group, k=1), advantages.leave_one_out(returns, group)
    )


CHANCES = {
    "a success or none": [(Fraction(0), Fraction(7, 10)), (Fraction(1), Fraction(3, 10))],
    "three rewards": [
        (Fraction(-1, 2), Fraction(1, 5)),
        (Fraction(0), Fraction(1, 2)),
        (Fraction(2), Fraction(3, 10)),
    ],
}


@pytest.mark.parametrize("chances", CHANCES.values(), ids=CHANCES)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("K", [4, 5])
def test_pass_at_k_is_unbiased_for_the_best_of_k(
    chances: list[tuple[Fraction, Fraction]], k: int, K: int
) -> None:
    """Over every group of K answers: E[1/K Σ_i A_i ∇log p(y_i)] = ∇E[max of k], in a softmax's logits.

    ∇_j log p(y) = [y = j] - p_j. The right side is differentiated by the product rule over the k draws.
    """
    values, p = [v for v, _ in chances], [float(q) for _, q in chances]
    n = len(p)

    def score(y: int, j: int) -> float:
        return (y == j) - p[j]

    wanted = [0.0] * n
    for draws in product(range(n), repeat=k):
        chance, best = math.prod(p[y] for y in draws), float(max(values[y] for y in draws))
        for j in range(n):
            wanted[j] += chance * best * sum(score(y, j) for y in draws)
    got, group = [0.0] * n, torch.zeros(K, dtype=torch.long)
    for draws in product(range(n), repeat=K):
        A = pass_at_k.pass_at_k(tensor([values[y] for y in draws]), group, k=k).tolist()
        chance = math.prod(p[y] for y in draws)
        for j in range(n):
            got[j] += chance * sum(a * score(y, j) for a, y in zip(A, draws, strict=True)) / K
    assert got == pytest.approx(wanted, abs=1e-12)
    assert max(map(abs, wanted)) > 0.01


@pytest.mark.parametrize("k", SEVERAL)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 12345.678])
def test_pass_at_k_of_equal_rewards_is_exactly_zero_and_a_constant_changes_nothing(
    k: int, reward: float
) -> None:
    group = torch.zeros(6, dtype=torch.long)
    assert not pass_at_k.pass_at_k(torch.full((6,), reward), group, k=k).any()
    returns = torch.tensor([0.0, 1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(
        pass_at_k.pass_at_k(returns + reward, group, k=k), pass_at_k.pass_at_k(returns, group, k=k)
    )


@pytest.mark.parametrize("k", SEVERAL)
@given(rewards=st.lists(st.integers(-4, 4), min_size=5, max_size=7))
@settings(max_examples=25, deadline=None)
def test_pass_at_k_normalised_is_normalised_over_all_subsets(k: int, rewards: list[int]) -> None:
    """Each answer is credited with the mean advantage of the groups of k answers that it is in."""
    group = torch.zeros(len(rewards), dtype=torch.long)
    subsets = list(combinations(range(len(rewards)), k))
    best = torch.tensor([max(rewards[i] for i in s) for s in subsets], dtype=torch.float64)
    A = advantages.normalised(best, torch.zeros(len(best), dtype=torch.long))
    wanted = [float(A[[i in s for s in subsets]].mean()) for i in range(len(rewards))]
    got = pass_at_k.pass_at_k_normalised(torch.tensor(rewards, dtype=torch.float64), group, k=k)
    assert got.tolist() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(("right", "wrong", "k"), [(1, 7, 4), (3, 5, 2), (6, 2, 3)])
def test_pass_at_k_normalised_is_the_papers_closed_form(right: int, wrong: int, k: int) -> None:
    n = right + wrong
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    sigma = math.sqrt(mean * (1 - mean))
    lost = (1 - mean - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)) / sigma if sigma else 0.0
    R = torch.tensor([1.0] * right + [0.0] * wrong, dtype=torch.float64)
    got = pass_at_k.pass_at_k_normalised(R, torch.zeros(n, dtype=torch.long), k=k, eps=0.0 if sigma else 1.0)
    won = (1 - mean) / sigma if sigma else 0.0
    assert got.tolist() == pytest.approx([won] * right + [lost] * wrong)


def test_pass_at_k_normalised_refuses_a_group_without_one_more_and_is_zero_for_equal_rewards() -> None:
    with pytest.raises(ValueError, match="k = 3 needs at least 4"):
        pass_at_k.pass_at_k_normalised(torch.zeros(3), torch.zeros(3, dtype=torch.long), k=3)
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    returns = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 0.0])
    assert not pass_at_k.pass_at_k_normalised(returns, group)[:3].any()


def test_a_task_that_hardly_varies_is_not_blown_up_by_the_batchs_deviation() -> None:
    """As it is by its own: and one that does not vary at all gets exactly 0 beside others."""
    group = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])
    R = torch.tensor([0.1, 0.1, 0.1, 0.5, 0.501, 0.499, 1.0, 0.0, 0.3])
    A = advantages.centred_batch_normalised(R, group)
    assert not A[:3].any()
    assert float(A[3:6].abs().max()) < 0.01
    assert float(advantages.normalised(R, group)[3:6].abs().max()) > 1


def test_pass_at_k_credits_a_second_success_less_than_a_first() -> None:
    """With k = K - 1 and two successes, either is beaten only by the other."""
    group = torch.zeros(4, dtype=torch.long)
    first = pass_at_k.pass_at_k(torch.tensor([1.0, 0.0, 0.0, 0.0]), group, k=3)
    both = pass_at_k.pass_at_k(torch.tensor([1.0, 1.0, 0.0, 0.0]), group, k=3)
    assert first.tolist() == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert both.tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0])


def test_pass_at_k_refuses_a_group_without_one_more_and_hides_no_nan() -> None:
    group = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    pass_at_k.pass_at_k(torch.zeros(7), group, k=2)
    with pytest.raises(ValueError, match="k = 3 needs at least 4"):
        pass_at_k.pass_at_k(torch.zeros(7), group, k=3)
    found = pass_at_k.pass_at_k(torch.tensor([math.nan, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0]), group, k=2)
    assert found[0].isnan()
    assert found[3:].isfinite().all()
