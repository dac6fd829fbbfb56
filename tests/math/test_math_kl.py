"""kl: the table of kl.py's docstring, proven by enumerating the vocabulary in float64."""

import math
from collections.abc import Callable

import pytest
import torch

from posttrain.math import corrections, kl, surrogate

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Weighed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SEEDS = range(6)
V = 7


def policies(seed: int, size: int = V) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with a gradient, and the log-probabilities of π and of a reference."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=g, dtype=torch.float64).mul(1.5).requires_grad_()
    reference = torch.randn(size, generator=g, dtype=torch.float64).mul(1.5).log_softmax(-1)
    return logits, logits.log_softmax(-1), reference


def divergence(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def gradient_of_divergence(seed: int, *, backwards: bool, size: int = V) -> torch.Tensor:
    """∇KL(π ‖ ref), or ∇KL(ref ‖ π), by autograd through the sum over the vocabulary."""
    logits, logp, ref = policies(seed, size)
    value = (ref.exp() * (ref - logp)).sum() if backwards else (logp.exp() * (logp - ref)).sum()
    return torch.autograd.grad(value, logits)[0]


def expected_value(estimator: Estimator, seed: int) -> float:
    _, logp, ref = (x.detach() for x in policies(seed))
    return float((logp.exp() * estimator(logp[None], ref[None])[0]).sum())


def expected_gradient(estimator: Estimator, seed: int) -> torch.Tensor:
    """E_{y~π}[∇ estimator(y)]: the sampling probability is not differentiated."""
    logits, logp, ref = policies(seed)
    value = (logp.detach().exp() * estimator(logp[None], ref[None])[0]).sum()
    return torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_k1_and_k3_are_unbiased_and_k2_is_not(seed: int) -> None:
    _, logp, ref = (x.detach() for x in policies(seed))
    truth = divergence(logp.exp().tolist(), ref.exp().tolist())
    assert expected_value(kl.k1, seed) == pytest.approx(truth, abs=1e-12)
    assert expected_value(kl.k3, seed) == pytest.approx(truth, abs=1e-12)
    assert abs(expected_value(kl.k2, seed) - truth) > 1e-3
    assert float(kl.exact(logp, ref)) == pytest.approx(truth, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_expected_gradients(seed: int) -> None:
    forwards = gradient_of_divergence(seed, backwards=False)
    backwards = gradient_of_divergence(seed, backwards=True)
    assert (forwards - backwards).abs().max() > 0.01, "the two directions must be told apart"
    torch.testing.assert_close(expected_gradient(kl.k1, seed), torch.zeros(V, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient(kl.k2, seed), forwards)
    torch.testing.assert_close(expected_gradient(kl.k3, seed), backwards)


def off_policy(estimator: Weighed, seed: int) -> tuple[float, torch.Tensor]:
    """Σ_y π_old(y) estimator(y) over three tokens, and the sum of its gradients."""
    logits, logp, ref = policies(seed, 3)
    old = torch.randn(3, generator=torch.Generator().manual_seed(seed + 99), dtype=torch.float64).log_softmax(
        -1
    )
    value = (old.exp() * estimator(logp[None], ref[None], old[None])[0]).sum()
    return float(value.detach()), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", [kl.unbiased_k1, kl.unbiased_k3, kl.forward_k1, kl.forward_k3])
def test_weighed_estimators_are_unbiased_on_tokens_of_any_policy(estimator: Weighed, seed: int) -> None:
    """Values and gradients, by enumeration: the two of KL(π ‖ ref), and the two of KL(ref ‖ π)."""
    backwards = estimator in (kl.forward_k1, kl.forward_k3)
    p, q = (x.detach().exp().tolist() for x in policies(seed, 3)[1:])
    value, gradient = off_policy(estimator, seed)
    assert value == pytest.approx(divergence(q, p) if backwards else divergence(p, q), abs=1e-12)
    truth = gradient_of_divergence(seed, backwards=backwards, size=3)
    torch.testing.assert_close(gradient, truth, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", [kl.k1, kl.k2, kl.k3])
def test_plain_estimators_are_biased_on_tokens_of_another_policy(estimator: Estimator, seed: int) -> None:
    p, q = (x.detach().exp().tolist() for x in policies(seed, 3)[1:])
    value, gradient = off_policy(lambda logp, ref, old: estimator(logp, ref), seed)
    assert abs(value - divergence(p, q)) > 1e-3
    for backwards in (False, True):
        gap = gradient - gradient_of_divergence(seed, backwards=backwards, size=3)
        assert float(gap.abs().max()) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_weighed_square_is_unbiased_k3_or_biased(seed: int) -> None:
    def held(logp: torch.Tensor, ref: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return (logp - old).exp().detach() * kl.k2(logp, ref)

    def differentiated(logp: torch.Tensor, ref: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return (logp - old).exp() * kl.k2(logp, ref)

    truth = gradient_of_divergence(seed, backwards=False, size=3)
    torch.testing.assert_close(off_policy(held, seed)[1], off_policy(kl.unbiased_k3, seed)[1])
    assert float((off_policy(differentiated, seed)[1] - truth).abs().max()) > 1e-2


def test_near_the_reference_the_weighed_k3_vary_less() -> None:
    """With π = π_ref their c is 0 on every token, and that of the others only on average."""
    _, logp, _ = policies(0, 3)
    logp = logp.detach()
    old = logp.roll(1)
    for estimator, still in (
        (kl.unbiased_k1, False),
        (kl.unbiased_k3, True),
        (kl.forward_k1, False),
        (kl.forward_k3, True),
    ):
        leaf = logp.clone()[None].requires_grad_()
        (c,) = torch.autograd.grad(estimator(leaf, logp[None], old[None]).sum(), leaf)
        assert (float(c.abs().max()) < 1e-15) == still


@pytest.mark.parametrize(("p", "q"), [(0.3, 0.6), (0.9, 0.999), (1e-9, 0.5), (0.5, 0.5)])
def test_the_divergence_of_an_event_is_that_of_two_tokens(p: float, q: float) -> None:
    got = kl.of_event(*(torch.tensor([[x]], dtype=torch.float64).log() for x in (p, q)))
    assert got.item() == pytest.approx(divergence([p, 1 - p], [q, 1 - q]), abs=1e-12)


def test_the_divergence_of_a_certain_event() -> None:
    one, half = torch.zeros(1, 1), torch.full((1, 1), 0.5).log()
    assert kl.of_event(one, one).item() == kl.of_event(one + 1e-7, one).item() == 0
    assert kl.of_event(one, half).item() == pytest.approx(math.log(2), abs=1e-5)
    assert 5 < kl.of_event(half, one).item() < math.inf


@pytest.mark.parametrize("logp", [-1e-6, -1e-7, -1e-9])
def test_tokens_that_rounding_makes_certain_are_not_rejected(logp: float) -> None:
    """A sampler's log π of 0 is one that float32 cannot tell from -1e-8."""
    old, one, mask = torch.tensor([[logp]]), torch.zeros(1, 1), torch.tensor([[True]])
    assert 0 <= kl.of_event(old, one).item() < 1e-5
    assert 0 <= kl.of_event(one, old).item() < 1e-5
    assert corrections.kl_rejected(old - one, mask, old).item() == pytest.approx(1, abs=1e-5)
    for bounded in (surrogate.kl_bounded, surrogate.kl_masked):
        log_ratio = (one - old).requires_grad_()
        bounded(log_ratio, torch.ones(1, 1), old).sum().backward()
        assert log_ratio.grad.item() == pytest.approx(-1), bounded.__name__


@pytest.mark.parametrize(
    ("estimator", "coefficient"),
    [
        (kl.k1, lambda delta: 1.0),
        (kl.k2, lambda delta: delta),
        (kl.k3, lambda delta: 1 - math.exp(-delta)),
    ],
    ids=["k1", "k2", "k3"],
)
def test_the_stated_coefficients(estimator: Estimator, coefficient: Callable[[float], float]) -> None:
    deltas = [-5.0, -1.0, -1e-6, 0.0, 1e-6, 0.3, 4.0]
    logp = torch.tensor([deltas], dtype=torch.float64) - 2.0
    logp.requires_grad_()
    (got,) = torch.autograd.grad(estimator(logp, torch.full_like(logp, -2.0)).sum(), logp)
    assert got[0].tolist() == pytest.approx([coefficient(d) for d in deltas], abs=1e-12)


def test_k3_is_never_negative_in_float32_and_small_where_the_policies_agree() -> None:
    """exp(x) - 1 - x would lose every digit here; expm1 keeps the sign."""
    delta = torch.logspace(-8, 1, 400)
    for sign in (-1, 1):
        value = kl.k3((sign * delta)[None], torch.zeros(1, 400))
        assert bool((value >= 0).all())
        exact = torch.tensor([math.expm1(-sign * d) + sign * d for d in delta.tolist()])
        torch.testing.assert_close(value[0], exact, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_and_its_gradient_over_any_leading_shape(seed: int) -> None:
    logits, logp, ref = policies(seed)
    value = kl.exact(logp.expand(2, 3, V), ref.expand(2, 3, V))
    assert value.shape == (2, 3)
    torch.testing.assert_close(
        torch.autograd.grad(value[1, 2], logits)[0], gradient_of_divergence(seed, backwards=False)
    )


def test_exact_counts_impossible_tokens_as_nothing_in_value_and_gradient() -> None:
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64).log()
    value = kl.exact(p, q)
    assert value.item() == pytest.approx(0.5 * math.log(2))
    (gradient,) = torch.autograd.grad(value, p)
    assert gradient.tolist() == pytest.approx([0.5 * math.log(2) + 0.5, 0.5, 0.0])
    both_impossible = torch.tensor([1.0, 0.0]).log()
    assert float(kl.exact(both_impossible, both_impossible)) == 0.0


def test_exact_is_infinite_where_the_reference_cannot() -> None:
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log()
    assert float(kl.exact(p, q)) == math.inf
