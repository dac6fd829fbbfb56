"""Comparisons over seeds: Student's t against its integral, and verdicts that noise does not win."""

import math
import random
import statistics

import pytest

from posttrain.evaluation.seeds import LEVEL, compare_seeds, mean_interval, paired_t, t_bound, t_tails


def integrated(t: float, df: int) -> float:
    """P(|T| > t) by Simpson's rule on the density, over x = tan(u)."""
    log_c = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(df * math.pi) / 2
    steps, begin = 20_000, math.atan(t)
    h = (math.pi / 2 - begin) / steps
    total = 0.0
    for k in range(steps + 1):
        x = math.tan(min(begin + k * h, math.pi / 2 - 1e-12))
        density = math.exp(log_c - (df + 1) / 2 * math.log1p(x * x / df)) * (1 + x * x)
        total += density * (1 if k in (0, steps) else 4 if k % 2 else 2)
    return 2 * total * h / 3


@pytest.mark.parametrize("df", [2, 3, 4, 7, 12])
def test_t_tails_are_the_integral_of_the_density(df: int) -> None:
    for t in (0.3, 1.0, 2.5, 6.0):
        assert t_tails(t, df) == pytest.approx(integrated(t, df), rel=1e-5)
        assert t_tails(-t, df) == t_tails(t, df)
    assert t_tails(t_bound(df), df) == pytest.approx(LEVEL, rel=1e-9)


def test_t_with_one_degree_of_freedom_is_cauchy() -> None:
    for t in (0.1, 1.0, 30.0):
        assert t_tails(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi)


def test_interval_excludes_0_just_where_p_is_below_the_level() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draws = random.Random(seed)
    for _ in range(200):
        n = draws.randint(3, 6)
        result = paired_t([draws.gauss(1.5, 1.0) for _ in range(n)])
        assert (result["low"] > 0 or result["high"] < 0) == (result["p"] < LEVEL)


def test_mean_interval_of_a_known_sample() -> None:
    # t(0.975, 4) = 2.776445, s = √2.5.
    interval = mean_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert interval["high"] == pytest.approx(3 + 2.776445 * math.sqrt(2.5 / 5), rel=1e-6)


def test_equal_settings_are_seldom_told_apart() -> None:
    """Of five equal settings the best is chosen after the fact, and Holm's correction still holds it down."""
    draws = random.Random(7)
    wrong = 0
    for _ in range(400):
        values = [{seed: draws.gauss(0.0, 1.0) for seed in range(5)} for _ in range(5)]
        wrong += any(
            row["against"] and row["against"]["real"] for row in compare_seeds(values, 1)["settings"]
        )
    assert wrong / 400 < 0.12


def test_pairing_by_seed_finds_what_means_alone_hide() -> None:
    noise = [0.0, 3.0, -2.0]
    worse = dict(enumerate(noise))
    better = {seed: x + 1.0 + 0.01 * seed for seed, x in worse.items()}
    result = compare_seeds([worse, better], 1)
    assert result["best"] == 1
    assert result["settings"][0]["against"]["real"] is True
    assert result["settings"][0]["low"] < statistics.fmean(better.values()) < result["settings"][0]["high"]
    assert compare_seeds([worse, better], -1)["best"] == 0


def test_two_seeds_decide_nothing_and_fewer_seeds_do_not_win() -> None:
    result = compare_seeds([{0: 1.0, 1: 1.0}, {0: 0.0, 1: 0.1}, {0: 9.0}], 1)
    assert result["best"] == 0, "a lucky seed alone is not the best mean"
    assert [row["against"] and row["against"]["real"] for row in result["settings"]] == [None, None, None]
    assert compare_seeds([{}, {}], 1)["best"] is None


def test_settings_with_one_best_mean_are_tied() -> None:
    first, second = {0: 0.1, 1: 0.2, 2: 0.3}, {0: 0.3, 1: 0.1, 2: 0.2}  # equal means but for rounding
    result = compare_seeds([first, {0: 0.0, 1: 0.0, 2: 0.1}, second], 1)
    assert result["best"] is None
    assert [row["tied"] for row in result["settings"]] == [True, False, True]
    assert result["settings"][1]["against"]["difference"] < 0, "the others are compared with the first"
    near = compare_seeds([first, second | {0: 0.3001}], 1)
    assert near["best"] == 1
    assert not any(row["tied"] for row in near["settings"])
    fewer = compare_seeds([first, {0: 0.2}], 1)
    assert fewer["best"] == 0, "a lucky seed alone ties nothing"


def test_equal_differences_are_judged_by_their_signs() -> None:
    """A t without spread would be infinite: three seeds with one problem more would look certain."""
    row = compare_seeds([{0: 0.5, 1: 0.6, 2: 0.7}, {0: 0.75, 1: 0.85, 2: 0.95}], 1)["settings"][0]
    assert (row["against"]["p"], row["against"]["real"]) == (0.25, False)
    assert paired_t([0.0, 0.0, 0.0])["p"] == 1.0
