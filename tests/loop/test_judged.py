"""How well scores agree with a judge: by hand, against slow formulas, and in their limits."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from posttrain.plan.dataset_rows import marked
from posttrain.run.agreement import BINS, agreement, calibration_error, correlation
from posttrain.types import Batch, PerToken

SEED = 5105


def judged(groups: Sequence[Sequence[tuple[float, float, int]]]) -> tuple[Batch, PerToken, list[int]]:
    """Answers as (what the judge says, what the model says, tokens), by question: batch, scores, lengths."""
    rows = [marked([1] * n, {n: worth}) for group in groups for worth, _, n in group]
    batch = Batch.of(rows, [i for i, group in enumerate(groups) for _ in group])
    score = torch.full(batch.mask.shape, math.nan)
    score[batch.mask] = torch.tensor([s for group in groups for _, s, _ in group])
    return batch, score, [n for group in groups for _, _, n in group]


def test_by_hand() -> None:
    right = [(1.0, 0.9, 3), (0.0, 0.6, 5)]  # margin 0.3, the preferred is the shorter
    wrong = [(0.0, 2.0, 4), (3.0, 0.5, 7)]  # margin -1.5, the preferred is the longer
    tied = [(2.0, 1.0, 2), (1.0, 1.0, 2)]  # margin 0, as long
    sure = [(1.0, 5.0, 6), (0.0, 1.0, 2)]  # margin 4, the preferred is the longer
    found = agreement(*judged([right, wrong, tied, sure]))
    confidence = [1 / (1 + math.exp(-m)) for m in (0.3, 1.5, 0.0, 4.0)]
    # Each lies in a bin of its own.
    gaps = [abs(c - r) for c, r in zip(confidence, (1.0, 0.0, 0.5, 1.0), strict=True)]
    assert found == pytest.approx(
        {
            "accuracy": 2.5 / 4,
            "pairs": 4.0,
            "accuracy_margin_0_0.5": 1.5 / 2,
            "accuracy_margin_1_2": 0.0,
            "accuracy_margin_2": 1.0,
            "accuracy_shorter": 1.0,
            "accuracy_longer": 0.5,
            "calibration_error": sum(gaps) / 4,
            "length_bias": (0.3 * -2 + -1.5 * 3 + 4.0 * 4) / math.sqrt((0.09 + 2.25 + 16) * (4 + 9 + 16)),
        }
    )


def test_a_model_that_says_the_same_of_everything_is_right_half_the_time() -> None:
    found = agreement(*judged([[(1.0, 7.0, 3), (0.0, 7.0, 4)], [(0.0, 7.0, 3), (1.0, 7.0, 9)]]))
    assert found["accuracy"] == found["accuracy_margin_0_0.5"] == 0.5
    assert found["calibration_error"] == 0.0
    assert found["length_bias"] == 0.0


def test_what_is_said_with_a_margin_is_told_apart_by_it() -> None:
    def pair(margin: float) -> list[tuple[float, float, int]]:
        return [(1.0, margin, 2), (0.0, 0.0, 2)]

    at_bounds = [pair(m) for m in (0.5, -0.5, 1.0, 2.0, -2.0, -2.0)]
    found = agreement(*judged(at_bounds))
    assert {k: v for k, v in found.items() if "margin" in k} == pytest.approx(
        {"accuracy_margin_0.5_1": 0.5, "accuracy_margin_1_2": 1.0, "accuracy_margin_2": 1 / 3}
    )


@pytest.mark.parametrize(("sign", "name"), [(1.0, "longer"), (-1.0, "shorter")])
def test_a_model_that_counts_words_shows_it(sign: float, name: str) -> None:
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    groups = []
    for _ in range(40):
        a, b = dice.sample(range(2, 30), 2)
        groups.append([(dice.random(), sign * a, a), (dice.random(), sign * b, b)])
    found = agreement(*judged(groups))
    assert found["length_bias"] == pytest.approx(sign)
    other = {"longer": "shorter", "shorter": "longer"}[name]
    assert (found[f"accuracy_{name}"], found[f"accuracy_{other}"]) == (1.0, 0.0)
    # Lengths that say nothing of the scores leave no bias, whatever the scores are worth.
    even = [[(1.0, s, 4), (0.0, 0.0, 2)] for s in (1.0, -1.0)]
    assert agreement(*judged(even))["length_bias"] == pytest.approx(0.0)


def test_neither_the_order_nor_the_origin_of_scores_matters() -> None:
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    groups = [
        [(float(w), dice.gauss(0, 1), dice.randint(1, 9)) for w in dice.sample(range(9), 3)] for _ in range(6)
    ]
    usual = agreement(*judged(groups))
    moved = [[(w, s + 4.0, n) for w, s, n in dice.sample(group, len(group))] for group in reversed(groups)]
    assert agreement(*judged(moved)) == pytest.approx(usual, abs=1e-5)
    assert usual["pairs"] == 18.0
    slow = [float(a[1] > b[1]) for group in groups for a in group for b in group if a[0] > b[0]]
    assert usual["accuracy"] == pytest.approx(sum(slow) / 18)


def test_without_pairs_there_is_nothing_to_say() -> None:
    assert agreement(*judged([[(1.0, 0.3, 2)], [(1.0, 0.1, 2), (1.0, 0.9, 2)]])) == {}


def test_the_calibration_error_against_a_slow_formula() -> None:
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    confidence = [dice.uniform(0.5, 1.0) for _ in range(300)] + [0.5, 1.0]
    right = [float(dice.random() < 0.7) for _ in confidence]
    bins: dict[int, list[int]] = {}
    for i, c in enumerate(confidence):
        bins.setdefault(min(int((c - 0.5) / 0.5 * BINS), BINS - 1), []).append(i)
    slow = sum(
        abs(sum(confidence[i] for i in held) / len(held) - sum(right[i] for i in held) / len(held))
        * len(held)
        for held in bins.values()
    ) / len(confidence)
    said = calibration_error(torch.tensor(confidence, dtype=torch.float64), torch.tensor(right))
    assert said == pytest.approx(slow, abs=1e-9)
    assert len(bins) == BINS


def test_a_correlation_needs_both() -> None:
    assert correlation(torch.zeros(2), torch.ones(2)) == 0.0
    assert correlation(torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])) == 0.0
