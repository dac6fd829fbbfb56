"""Control of a coefficient by a target.

A KL's: functions from (β, measured KL, target) to the next β. The entropy bonus's: `stepwise`.
"""


def doubling(beta: float, kl: float, target: float) -> float:
    """2β above 1.5 times the target, β/2 below the target over 1.5, else β.

    Source: the adaptive penalty of PPO, arXiv:1707.06347, section 4.

    >>> doubling(0.1, kl=0.02, target=0.01), doubling(0.1, kl=0.01, target=0.01)
    (0.2, 0.1)
    """
    if kl > 1.5 * target:
        return 2 * beta
    return beta / 2 if kl < target / 1.5 else beta


def proportional(beta: float, kl: float, target: float, gain: float = 0.1) -> float:
    """β (1 + gain · e), e = kl/target - 1 clipped to ±0.2: a step changes β by at most gain/5 of itself.

    Source: Ziegler et al., arXiv:1909.08593, section 2.2, whose gain is 0.1.

    >>> round(proportional(0.1, kl=12.0, target=6.0), 6)
    0.102
    """
    return beta * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))


def stepwise(alpha: float, entropy: float, target: float, step: float) -> float:
    """α + step below the target, else α - step, at least 0.

    Source: Skywork-OR1, arXiv:2505.22312, whose step is 0.005; TRL bounds α above as well.

    >>> stepwise(0.5, entropy=0.1, target=0.2, step=0.25), stepwise(0.1, entropy=0.3, target=0.2, step=0.25)
    (0.75, 0.0)
    """
    return alpha + step if entropy < target else max(alpha - step, 0.0)
