"""control: β follows a target as the two papers have it."""

import math

import pytest

from posttrain.math import control


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(0.0, 0.5), (0.0066, 0.5), (0.0067, 1.0), (0.01, 1.0), (0.015, 1.0), (0.0151, 2.0), (9.0, 2.0)],
)
def test_doubling_leaves_a_band_of_one_and_a_half(kl: float, factor: float) -> None:
    assert control.doubling(0.3, kl, 0.01) == pytest.approx(0.3 * factor, rel=1e-15)


@pytest.mark.parametrize(
    ("kl", "error"),
    [(6.0, 0.0), (6.6, 0.1), (5.4, -0.1), (7.2, 0.2), (100.0, 0.2), (0.0, -0.2), (-3.0, -0.2)],
)
def test_proportional_moves_with_the_error_within_a_fifth(kl: float, error: float) -> None:
    assert control.proportional(0.2, kl, 6.0) == pytest.approx(0.2 * (1 + 0.1 * error))
    assert control.proportional(0.2, kl, 6.0, gain=0.5) == pytest.approx(0.2 * (1 + 0.5 * error))


@pytest.mark.parametrize("rule", [control.doubling, control.proportional], ids=lambda f: f.__name__)
@pytest.mark.parametrize("start", [1e-4, 50.0])
def test_a_policy_that_yields_to_the_penalty_is_brought_to_the_target(rule: object, start: float) -> None:
    """KL = 0.02/β: the β that the rule settles at keeps the KL within its band."""
    assert callable(rule)
    beta = start
    for _ in range(2000):
        beta = rule(beta, 0.02 / beta, 0.05)
    assert 1 / 1.5 <= (0.02 / beta) / 0.05 <= 1.5
    assert math.isfinite(beta)
    again = rule(beta, 0.02 / beta, 0.05)
    assert again == pytest.approx(beta)
