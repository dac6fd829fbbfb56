"""evals.numbers: every estimate against the enumeration of what it estimates."""

from itertools import combinations, product

import numpy
import pytest

from posttrain.evaluation.suites.numbers import (
    Ratio,
    Z,
    estimate,
    holm,
    majority,
    paired_difference,
    ratios,
    sign_test,
    summary,
    tango,
    wilson,
)
from posttrain.evaluation.suites.suite import Metric
from posttrain.evaluation.suites.table import SUITES


def line(name: str, sample: int = 0, score: float | None = 0.0, **more):
    return {"id": name, "sample": sample, "score": score, "label": "x", "stop": "eos", "parts": {}} | more


def enumerated(*found: Ratio) -> list[list[float]]:
    """Each ratio on all nⁿ resamples of the problems."""
    n = len(found[0].of)
    return [
        [sum(r.of[i] for i in drawn) / sum(r.per[i] for i in drawn) for r in found]
        for drawn in product(range(n), repeat=n)
    ]


@pytest.mark.parametrize(
    "ratio",
    [
        Ratio([1, 0, 0, 1, 0], [1] * 5),
        Ratio([0.5, 0.25, 1.0, 0.0], [1] * 4),
        Ratio([2, 1, 0, 3], [3, 1, 2, 3]),
    ],
)
def test_the_bootstrap_is_that_of_all_resamples(ratio: Ratio) -> None:
    every = numpy.array(enumerated(ratio))[:, 0]
    found = estimate(ratio)
    assert found.value == pytest.approx(sum(ratio.of) / sum(ratio.per))
    assert found.error == pytest.approx(every.std(), rel=0.03)
    within = wilson(sum(ratio.of), 5) if len(every) == 5**5 else numpy.percentile(every, [2.5, 97.5])
    assert [found.low, found.high] == pytest.approx(list(within), abs=0.05)


def test_answers_to_one_problem_stay_together() -> None:
    # 4 answers to each of 25 problems, all alike: as much is known as of 25 answers, and not of 100.
    lines = [line(str(p), s, float(p % 2)) for p in range(25) for s in range(4)]
    together = summary(SUITES["gsm8k"], lines)["metrics"]["accuracy"]
    alone = summary(SUITES["gsm8k"], [each for each in lines if not each["sample"]])["metrics"]["accuracy"]
    assert together["error"] == alone["error"] == pytest.approx((12 * 13) ** 0.5 / 25 / 25**0.5, rel=0.03)


def test_a_paired_difference_resamples_both_on_the_same_problems() -> None:
    first, second = Ratio([1, 0, 1, 0, 0], [1] * 5), Ratio([1, 1, 1, 0, 1], [1] * 5)
    every = numpy.diff(numpy.array(enumerated(first, second)))[:, 0]
    found = paired_difference(first, second)
    assert found.value == pytest.approx(0.4)
    assert found.error == pytest.approx(every.std(), rel=0.03)
    assert found.error < 0.8 * (estimate(first).error ** 2 + estimate(second).error ** 2) ** 0.5


@pytest.mark.parametrize("ratio", [Ratio([1.0] * 10, [1.0] * 10), Ratio([3.0] * 10, [3.0] * 10)])
def test_where_nothing_varies_the_interval_is_not_empty(ratio: Ratio) -> None:
    found = estimate(ratio)
    assert (found.low, found.high) == wilson(10, 10)
    assert found.low < 0.8


def variance_under(delta: float, better: int, worse: int, n: int) -> float:
    """n² times that of the difference at the likeliest share q of the worse, found by trying shares."""
    q = numpy.linspace(max(0.0, -delta), (1 - delta) / 2, 200_001)[1:-1]
    same = numpy.log(numpy.maximum(1 - 2 * q - delta, 1e-300)) * (n - better - worse)
    q = q[numpy.argmax(better * numpy.log(q + delta) + worse * numpy.log(q) + same)]
    return float(n * (2 * q + delta - delta**2))


@pytest.mark.parametrize(("better", "worse", "n"), [(9, 3, 50), (1, 0, 100), (12, 2, 20), (3, 5, 8)])
def test_tango_s_bounds_are_where_the_score_test_rejects(better: int, worse: int, n: int) -> None:
    low, high = tango(better, worse, n)
    assert low < (better - worse) / n < high
    for bound in (low, high):
        score = (better - worse - n * bound) / variance_under(bound, better, worse, n) ** 0.5
        assert abs(score) == pytest.approx(Z, rel=1e-3)
    assert tango(worse, better, n) == pytest.approx((-high, -low))


@pytest.mark.parametrize(("better", "worse"), [(0.01, 0.0), (0.02, 0.01), (0.15, 0.1)])
def test_the_interval_of_a_difference_covers_it_also_where_few_problems_change(
    better: float, worse: float
) -> None:
    seed, n, runs = 11, 100, 2000
    print(f"seed {seed}")
    draws, covered = numpy.random.default_rng(seed), 0
    for up, down, _ in draws.multinomial(n, [better, worse, 1 - better - worse], size=runs):
        low, high = tango(int(up), int(down), n)
        covered += low <= better - worse <= high
    assert covered / runs >= 0.935


def test_a_difference_of_right_or_wrong_is_tango_s_and_never_without_width() -> None:
    ones = [1.0] * 100
    first, second = Ratio([1.0] * 50 + [0.0] * 50, ones), Ratio([1.0] * 51 + [0.0] * 49, ones)
    for found, wanted in (
        (paired_difference(first, second), tango(1, 0, 100)),
        (paired_difference(first, first), tango(0, 0, 100)),
        (paired_difference(Ratio([0.5] * 100, ones), Ratio([0.5] * 100, ones)), tango(0, 0, 100)),
    ):
        assert (found.low, found.high) == wanted
        assert found.low < found.value < found.high


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (3, 0), (5, 2), (4, 4), (1, 6)])
def test_the_sign_test_counts_all_splits_at_least_as_uneven(better: int, worse: int) -> None:
    n = better + worse
    splits = [sum(signs) for signs in product((0, 1), repeat=n)]
    extreme = sum(abs(2 * up - n) >= abs(better - worse) for up in splits)
    assert sign_test(better, worse) == pytest.approx(extreme / len(splits))


@pytest.mark.parametrize("ps", [[0.01, 0.04, 0.03], [0.5], [0.02, 0.02, 0.02, 0.9], [0.4, 0.6]])
def test_holm_is_the_closure_of_bonferroni(ps: list[float]) -> None:
    places = range(len(ps))
    sets = [each for size in places for each in combinations(places, size + 1)]
    wanted = [max(min(1.0, len(s) * min(ps[i] for i in s)) for s in sets if place in s) for place in places]
    assert holm(ps) == pytest.approx(wanted)


def test_of_several_answers_pass_at_k_and_the_majority_are_counted() -> None:
    lines = [
        *(line("a", s, float(s < 2), key="7" if s < 2 else "8" if s == 2 else None) for s in range(4)),
        *(line("b", s, float(s == 0), key=str(s)) for s in range(4)),
    ]
    found = {name: ratio.value for name, ratio in ratios(SUITES["gsm8k"], lines).items()}
    assert found == pytest.approx(
        {"accuracy": 3 / 8, "pass@2": (5 / 6 + 1 / 2) / 2, "pass@4": 1.0, "majority@4": (1 + 1 / 4) / 2}
    )
    assert majority([None, None], [False, True]) == 0.0


def test_errors_and_cut_off_answers_are_counted_apart_and_stay_in_the_denominator() -> None:
    lines = [
        line("a", score=1.0),
        line("b", score=None, label="died"),
        line("c", stop="length"),
        line("d", stop="context"),
    ]
    found = summary(SUITES["gsm8k"], lines)
    assert found["metrics"]["accuracy"]["value"] == 0.25
    assert (found["answers"], found["errors"], found["cut_off"]) == (4, 1, 2)
    assert found["labels"]["died"] == 1


def test_a_metric_of_parts_is_a_ratio_of_sums() -> None:
    lines = [
        line("a", parts={"strict": 1, "instructions": 3}),
        line("b", parts={"strict": 1, "instructions": 1}),
    ]
    [metric] = [
        m for m in SUITES["ifeval"].metrics if m == Metric("instruction_strict", "strict", "instructions")
    ]
    assert ratios(SUITES["ifeval"], lines)[metric.name].value == 0.5
