"""Agreement and strengths: closed forms, published values, and simulated raters."""

import math
import random
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest

from posttrain_people.agreement import cohen_kappa, krippendorff_alpha
from posttrain_people.strengths import Win, fit_strengths


def wins(rater: str, winner: str, loser: str, count: int) -> list[Win]:
    return [Win(rater, winner, loser)] * count


# ------------------------------------------------------------------ agreement


def test_kappa_of_equal_opposite_and_independent_labels() -> None:
    assert cohen_kappa([(0, 0), (1, 1), (2, 2)]) == 1
    assert cohen_kappa([(0, 1), (1, 0)]) == -1
    assert cohen_kappa([(a, b) for a in (0, 1, 1) for b in (0, 1, 1)]) == 0
    assert cohen_kappa([(0, 0), (0, 0)]) is None, "one label in use: chance agreement is 1"
    assert cohen_kappa([]) is None


def test_alpha_of_krippendorffs_example_is_as_printed() -> None:
    # Krippendorff 2011, section C: four observers, twelve units, missing values; nominal alpha 0.743.
    rows = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, 0, 0, 0],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, 0, 3],
        [0, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, 0],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, 0],
    ]
    units = [[value for value in column if value] for column in zip(*rows, strict=True)]
    value = krippendorff_alpha(units)
    assert value is not None
    assert round(float(value), 3) == 0.743


def slow_alpha(units: Sequence[Sequence[int]]) -> Fraction:
    """Alpha by its definition: every ordered pair of labels, one by one."""
    units = [unit for unit in units if len(unit) > 1]
    flat = [label for unit in units for label in unit]
    observed = sum(
        Fraction(int(a != b), len(unit) - 1)
        for unit in units
        for i, a in enumerate(unit)
        for j, b in enumerate(unit)
        if i != j
    )
    pairs = [(a, b) for i, a in enumerate(flat) for j, b in enumerate(flat) if i != j]
    return 1 - observed / len(flat) / Fraction(sum(a != b for a, b in pairs), len(pairs))


def test_alpha_is_its_definition_on_random_labels() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(20):
        units = [[draw.randrange(3) for _ in range(draw.randrange(5))] for _ in range(12)]
        units += [[0, 1]]
        assert krippendorff_alpha(units) == slow_alpha(units)


def test_alpha_needs_two_labels_of_a_unit_and_two_in_use() -> None:
    assert krippendorff_alpha([[1], [2], []]) is None
    assert krippendorff_alpha([[1, 1], [1, 1]]) is None


# ------------------------------------------------------------------ strengths


@pytest.mark.parametrize(("won", "lost"), [(7, 3), (1, 1), (2, 19)])
def test_two_players_have_the_log_odds_of_their_wins(won: int, lost: int) -> None:
    fit = fit_strengths([*wins("r", "a", "b", won), *wins("r", "b", "a", lost)])
    gap = math.log(won / lost)
    assert fit.strength == pytest.approx({"a": gap / 2, "b": -gap / 2}, abs=1e-9)
    # Fisher information of the difference is n p (1 - p); each strength is half of it.
    p = won / (won + lost)
    half = 0.5 / math.sqrt((won + lost) * p * (1 - p))
    assert fit.error == pytest.approx({"a": half, "b": half}, rel=1e-6)
    assert fit.reliability == {"r": 1.0}


def test_two_raters_of_two_players_have_a_reliability_each() -> None:
    comparisons = [*wins("x", "a", "b", 30), *wins("x", "b", "a", 10)]
    comparisons += [*wins("y", "a", "b", 24), *wins("y", "b", "a", 16)]
    fit = fit_strengths(comparisons)
    log_odds = {"x": math.log(3), "y": math.log(1.5)}
    gap = fit.strength["a"] - fit.strength["b"]
    assert {r: b * gap for r, b in fit.reliability.items()} == pytest.approx(log_odds, abs=1e-4)
    assert sum(fit.reliability.values()) / 2 == pytest.approx(1)


def test_ties_are_half_a_win_for_each() -> None:
    halves = [Win("r", "a", "b", 0.5), Win("r", "b", "a", 0.5)]
    fit = fit_strengths([*wins("r", "a", "b", 2), *halves, *halves])
    assert fit.strength["a"] - fit.strength["b"] == pytest.approx(math.log(3), abs=1e-9)


def simulated(draw: np.random.Generator, count: int) -> list[Win]:
    comparisons = []
    for _ in range(count):
        rater = str(draw.choice([*RELIABILITY]))
        one, other = map(str, draw.choice([*STRENGTH], 2, replace=False))
        p = 1 / (1 + math.exp(-RELIABILITY[rater] * (STRENGTH[one] - STRENGTH[other])))
        winner, loser = (one, other) if draw.random() < p else (other, one)
        comparisons.append(Win(rater, winner, loser))
    return comparisons


STRENGTH = {"a": 1.1, "b": 0.4, "c": -0.3, "d": -1.2}
RELIABILITY = {"careful": 1.9, "usual": 1.0, "coin": 0.1}
"""Their mean is 1, and the strengths' is 0."""


def test_strengths_and_reliabilities_of_simulated_raters_are_found() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    fit = fit_strengths(simulated(np.random.default_rng(seed), 6000))
    for name, value in STRENGTH.items():
        assert abs(fit.strength[name] - value) < 5 * fit.error[name], (name, fit)
        assert 0.01 < fit.error[name] < 0.1
    for name, value in RELIABILITY.items():
        assert fit.reliability[name] == pytest.approx(value, abs=0.25), fit


def test_no_change_of_a_parameter_is_more_likely() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    comparisons = simulated(np.random.default_rng(seed), 400)
    fit = fit_strengths(comparisons)

    def likelihood(strength: dict[str, float], reliability: dict[str, float]) -> float:
        gaps = [reliability[c.rater] * (strength[c.winner] - strength[c.loser]) for c in comparisons]
        return -sum(math.log1p(math.exp(-gap)) for gap in gaps)

    best = likelihood(fit.strength, fit.reliability)
    assert best == pytest.approx(fit.log_likelihood)
    for step in (-1e-3, 1e-3):
        for name in STRENGTH:
            assert likelihood(fit.strength | {name: fit.strength[name] + step}, fit.reliability) < best
        for name in RELIABILITY:
            assert likelihood(fit.strength, fit.reliability | {name: fit.reliability[name] + step}) < best


def test_a_contrary_rater_is_below_zero_and_a_consistent_one_infinite() -> None:
    comparisons = simulated(np.random.default_rng(3), 600)
    against = [Win("contrary", c.loser, c.winner) for c in comparisons[:60] if c.rater == "careful"]
    consistent = [*wins("consistent", "a", "b", 2), *wins("consistent", "b", "d", 2)]
    fit = fit_strengths([*comparisons, *against, *consistent])
    assert fit.reliability["contrary"] < 0
    assert fit.reliability["consistent"] == math.inf
    assert all(math.isfinite(value) for value in (*fit.strength.values(), *fit.error.values()))


def test_a_source_that_never_lost_has_no_strength() -> None:
    with pytest.raises(ValueError, match="from 'b' to 'a'"):
        fit_strengths(wins("r", "a", "b", 3))
