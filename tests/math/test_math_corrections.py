"""corrections: weights by loops in plain Python, bounds included, and what they do to an expectation."""

import math
from collections.abc import Callable
from functools import wraps

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.math import corrections
from posttrain.math.choice import takes

Correction = Callable[..., torch.Tensor]
FLOOR, CAP = 0.6, 1.7
OLD, TV, KL = 0.35, 0.1, 0.03
"""π_old of every token of the corrections that ask for it, and their bounds."""
NAMES = [
    "uncorrected",
    "token_truncated",
    "sequence_truncated",
    "token_rejected",
    "tv_rejected",
    "kl_rejected",
    "sequence_rejected",
    "geometric_rejected",
]


def at_old(function: Correction) -> Correction:
    """The correction with OLD for π_old, if it asks for it."""
    if not takes(function, "logp_old"):
        return function

    @wraps(function)
    def bound(log_weight: torch.Tensor, mask: torch.Tensor, **numbers: float) -> torch.Tensor:
        return function(log_weight, mask, torch.full_like(log_weight, math.log(OLD)), **numbers)

    return bound


ALL: list[Correction] = [at_old(vars(corrections)[name]) for name in NAMES]
by_name = pytest.mark.parametrize("function", ALL, ids=NAMES)


def bounds(function: Correction) -> dict[str, float]:
    if function.__name__ in ("tv_rejected", "kl_rejected"):
        own = {"weight_tv": TV} if function.__name__ == "tv_rejected" else {"weight_kl": KL}
        return own | {"weight_cap": CAP}
    rejects = function.__name__.endswith("rejected")
    both = {"weight_floor": FLOOR, "weight_cap": CAP}
    return both if rejects else {"weight_cap": CAP} if function is not corrections.uncorrected else {}


def tv(w: float) -> float:
    """|π_old - π_gen| of a token of weight w."""
    return abs(OLD - min(OLD / w, 1.0))


def kls(w: float) -> tuple[float, float]:
    """The KL of (π_old, 1 - π_old) and (π_gen, 1 - π_gen), in both directions."""
    gen = min(OLD / w, 1 - 1e-15)
    one, other = (OLD, 1 - OLD), (gen, 1 - gen)
    forth, back = (
        math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        for p, q in ((one, other), (other, one))
    )
    return forth, back


def slowly(name: str, w: list[float]) -> list[float]:
    """The weights of one answer's tokens from its π_old/π_gen."""
    whole = math.prod(w)
    match name:
        case "uncorrected":
            return [1.0] * len(w)
        case "token_truncated":
            return [min(x, CAP) for x in w]
        case "sequence_truncated":
            return [min(whole, CAP)] * len(w)
        case "token_rejected":
            return [x if FLOOR <= x <= CAP else 0.0 for x in w]
        case "tv_rejected":
            return [min(x, CAP) if tv(x) <= TV else 0.0 for x in w]
        case "kl_rejected":
            return [min(x, CAP) if max(kls(x)) <= KL else 0.0 for x in w]
        case "sequence_rejected":
            return [whole if FLOOR <= whole <= CAP else 0.0] * len(w)
        case "geometric_rejected":
            return [1.0 if FLOOR <= whole ** (1 / len(w)) <= CAP else 0.0] * len(w)
    raise AssertionError(f"no formula for {name}")


def test_every_public_correction_is_tested_here() -> None:
    found = vars(corrections).items()
    own = {n for n, f in found if getattr(f, "__module__", "") == corrections.__name__}
    assert {n for n in own if not n.startswith("_")} == set(NAMES)


@by_name
@given(
    rows=st.lists(
        st.lists(st.tuples(st.booleans(), st.floats(-1.0, 1.0)), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    garbage=st.sampled_from([math.nan, math.inf, 1e300]),
)
@settings(max_examples=80, deadline=None)
def test_every_correction_is_its_formula(
    function: Correction, rows: list[list[tuple[bool, float]]], garbage: float
) -> None:
    mask = torch.tensor([[on for on, _ in row] for row in rows])
    x = torch.tensor([[x if on else garbage for on, x in row] for row in rows], dtype=torch.float64)
    got = function(x, mask, **bounds(function))
    assert got.dtype == torch.float64
    for i, row in enumerate(rows):
        w = [math.exp(x) for on, x in row if on]
        near_a_bound = any(abs(each - b) < 1e-9 for each in (*w, math.prod(w)) for b in (FLOOR, CAP))
        near_a_bound |= any(abs(tv(x) - TV) < 1e-9 or abs(max(kls(x)) - KL) < 1e-9 for x in w)
        if w and not near_a_bound:
            assert got[i, mask[i]].tolist() == pytest.approx(slowly(function.__name__, w), rel=1e-9)
    assert not got[~mask].any()


@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sampler_that_was_the_policy_is_left_alone_to_the_last_bit(
    function: Correction, dtype: torch.dtype
) -> None:
    mask = torch.tensor([[True, True, True, False], [False, True, False, False]])
    got = function(torch.zeros(2, 4, dtype=dtype), mask)
    assert torch.equal(got, mask.to(dtype))


@by_name
def test_no_weight_exceeds_its_cap_however_far_the_sampler_was(function: Correction) -> None:
    x = torch.tensor([[800.0, -800.0, 3.0], [900.0, 900.0, 900.0], [-900.0, -900.0, -900.0]]).double()
    got = function(x, torch.ones(3, 3, dtype=torch.bool), **bounds(function))
    assert bool(got.isfinite().all())
    assert 0 <= float(got.min()) <= float(got.max()) <= CAP


def test_bounds_are_inclusive() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    x = torch.tensor([[0.5, 2.0, 2.0001]]).log()
    assert (corrections.token_rejected(x, mask, 0.5, 2.0) > 0).tolist() == [[True, True, False]]


def test_the_geometric_mean_drops_no_answer_for_its_length() -> None:
    """A hundred tokens each 1 % off: the product is far out of bounds, and the mean is not."""
    x, mask = torch.full((1, 100), 1.009).log(), torch.ones(1, 100, dtype=torch.bool)
    assert corrections.geometric_rejected(x, mask).all()
    assert not corrections.sequence_rejected(x, mask).any()


def answers(gen: list[list[float]], old: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """log π_old/π_gen of every answer of two binary tokens, and the probability that π_gen draws it."""
    rows, chances = [], []
    for a in (0, 1):
        for b in (0, 1):
            p = [gen[0][a], gen[1 + a][b]]
            q = [old[0][a], old[1 + a][b]]
            rows.append([math.log(y / x) for x, y in zip(p, q, strict=True)])
            chances.append(math.prod(p))
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(chances, dtype=torch.float64)


def test_a_whole_answers_weight_makes_any_expectation_the_policys_own_and_a_tokens_does_not() -> None:
    """E_gen[w f] = E_old[f] over all answers, without a cap that binds; token by token it is another."""
    gen = [[0.7, 0.3], [0.2, 0.8], [0.5, 0.5]]
    old = [[0.4, 0.6], [0.6, 0.4], [0.9, 0.1]]
    x, chance = answers(gen, old)
    mask, f = torch.ones(4, 2, dtype=torch.bool), torch.tensor([1.0, -2.0, 5.0, 0.5]).double()
    truth = float((chance * x.sum(-1).exp() * f).sum())
    whole = corrections.sequence_truncated(x, mask, weight_cap=1e9)[:, 1]
    assert float((chance * whole * f).sum()) == pytest.approx(truth, abs=1e-12)
    token = corrections.token_truncated(x, mask, weight_cap=1e9)[:, 1]
    assert abs(float((chance * token * f).sum()) - truth) > 0.1
    errors = [
        abs(float((chance * corrections.sequence_truncated(x, mask, weight_cap=c)[:, 1] * f).sum()) - truth)
        for c in (0.5, 1.0, 2.0, 4.0, 1e9)
    ]
    assert errors[-1] < 1e-12 < errors[0]
