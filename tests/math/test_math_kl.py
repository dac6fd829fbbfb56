"""kl: the table of kl.py's docstring, proven by enumerating the vocabulary in float64."""

import math
from collections.abc import Callable

import pytest
import torch

from posttrain.math import kl

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SEEDS = range(6)
V = 7


def policies(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits with a gradient, and the log-probabilities of π and of a reference."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(V, generator=g, dtype=torch.float64).mul(1.5).requires_grad_()
    reference = torch.randn(V, generator=g, dtype=torch.float64).mul(1.5).log_softmax(-1)
    return logits, logits.log_softmax(-1), reference


def divergence(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def gradient_of_divergence(seed: int, *, backwards: bool) -> torch.Tensor:
    """∇KL(π ‖ ref), or ∇KL(ref ‖ π), by autograd through the sum over the vocabulary."""
    logits, logp, ref = policies(seed)
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
