"""divergences: closed forms, limits, gradients and bounds over a small vocabulary, in float64."""

import math
from itertools import pairwise

import pytest
import torch

from posttrain.batch import Divergence
from posttrain.math import kl, tokens
from posttrain.math.divergences import forward_kl, jensen_shannon, of_top, reverse_kl, top_and_rest

V, SEEDS = 7, range(4)
EVERY = (reverse_kl, forward_kl, jensen_shannon)


def policies(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy at three states, and the log-probabilities of a reference there."""
    g = torch.Generator().manual_seed(seed)
    logits, reference = (1.5 * torch.randn(3, V, generator=g, dtype=torch.float64) for _ in range(2))
    return logits, reference.log_softmax(-1)


def slow(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_they_are_the_sums_over_the_vocabulary(seed: int) -> None:
    logits, reference = policies(seed)
    logp = logits.log_softmax(-1)
    for state in range(3):
        p, q = logp[state].exp().tolist(), reference[state].exp().tolist()
        for mix in (0.1, 0.5, 0.8):
            m = [mix * b + (1 - mix) * a for a, b in zip(p, q, strict=True)]
            expected = mix * slow(q, m) + (1 - mix) * slow(p, m)
            assert float(jensen_shannon(logp, reference, mix)[state]) == pytest.approx(expected, abs=1e-14)
        assert float(reverse_kl(logp, reference)[state]) == pytest.approx(slow(p, q), abs=1e-14)
        assert float(forward_kl(logp, reference)[state]) == pytest.approx(slow(q, p), abs=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ends_of_jensen_shannon_are_the_two_kls(seed: int) -> None:
    """To first order in what is left of the mixture."""
    logits, reference = policies(seed)
    logp, small = logits.log_softmax(-1), 1e-6
    torch.testing.assert_close(
        jensen_shannon(logp, reference, small) / small, forward_kl(logp, reference), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(
        jensen_shannon(logp, reference, 1 - small) / small, reverse_kl(logp, reference), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_jensen_shannon_is_symmetric_at_one_half_and_at_most_ln_2(seed: int) -> None:
    logits, reference = policies(seed)
    logp = logits.log_softmax(-1)
    torch.testing.assert_close(jensen_shannon(logp, reference), jensen_shannon(reference, logp))
    apart = torch.tensor([[0.0, -40.0], [-40.0, 0.0]], dtype=torch.float64).log_softmax(-1)
    far = jensen_shannon(apart[:1], apart[1:])
    assert float(far) == pytest.approx(math.log(2), abs=1e-12)


@pytest.mark.parametrize("divergence", EVERY)
@pytest.mark.parametrize("seed", SEEDS)
def test_equal_policies_are_0_apart_with_gradient_0(divergence: Divergence, seed: int) -> None:
    logits = policies(seed)[0].requires_grad_()
    logp = logits.log_softmax(-1)
    value = divergence(logp, logp.detach()).sum()
    assert abs(float(value.detach())) < 1e-14
    assert float(torch.autograd.grad(value, logits)[0].abs().max()) < 1e-14


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_by_the_logits_are_those_of_the_closed_forms(seed: int) -> None:
    """π (log π/π_ref - KL), π - π_ref, and (1 - β) π (log π/m - its mean)."""
    start, reference = policies(seed)
    logits = start.requires_grad_()
    logp = logits.log_softmax(-1)
    p, q, mix = logp.exp().detach(), reference.exp(), 0.3
    gap, log_m = (logp - reference).detach(), (mix * q + (1 - mix) * p).log()
    to_m = logp.detach() - log_m
    closed = {
        reverse_kl: p * (gap - (p * gap).sum(-1, keepdim=True)),
        forward_kl: p - q,
        jensen_shannon: (1 - mix) * p * (to_m - (p * to_m).sum(-1, keepdim=True)),
    }
    for divergence, expected in closed.items():
        numbers = {"mix": mix} if divergence is jensen_shannon else {}
        value = divergence(logp, reference, **numbers).sum()
        found = torch.autograd.grad(value, logits, retain_graph=True)[0]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reverse_kls_gradient_is_the_mean_of_what_a_drawn_token_says(seed: int) -> None:
    """Rao and Blackwell: E[(log π - log π_ref) ∇log π] over the draw, and of less variance, none."""
    start, reference = policies(seed)
    logits = start.requires_grad_()
    logp = logits.log_softmax(-1)
    exact = torch.autograd.grad(reverse_kl(logp, reference).sum(), logits, retain_graph=True)[0]
    score = torch.eye(V, dtype=torch.float64)[None] - logp.exp().detach()[:, None]  # [state, drawn, logit]
    gap = (logp - reference).detach()
    drawn = (logp.exp().detach() * gap)[:, :, None] * score
    torch.testing.assert_close(drawn.sum(1), exact, rtol=1e-10, atol=1e-13)
    spread = (gap[:, :, None] * score - exact[:, None]).square().sum(-1) * logp.exp().detach()
    assert float(spread.sum()) > 0.1


@pytest.mark.parametrize("divergence", EVERY)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_top_and_the_rest_are_less_apart_the_fewer_they_are(divergence: Divergence, seed: int) -> None:
    """By the data processing inequality, strictly here; with one token in the rest it is the whole."""
    logits, reference = policies(seed)
    logp = logits.log_softmax(-1)
    values = [divergence(*top_and_rest(logp, reference, k)) for k in range(1, V)]
    for few, more in pairwise(values):
        assert (few < more + 1e-14).all()
    assert (values[0] < 0.99 * values[-1]).all()
    torch.testing.assert_close(values[-1], divergence(logp, reference), rtol=1e-13, atol=1e-14)
    for k in (0, V, V + 1):
        assert all(map(torch.equal, top_and_rest(logp, reference, k), (logp, reference)))


@pytest.mark.parametrize("divergence", EVERY)
@pytest.mark.parametrize("k", [1, 3])
def test_the_top_and_the_rest_are_sums_over_outcomes_with_their_gradient(
    divergence: Divergence, k: int
) -> None:
    """By an enumeration of the outcomes in Python, and by finite differences of the policy's logits."""
    logits, reference = policies(5)
    p, q = logits.softmax(-1), reference.exp()
    for state in range(3):
        top = sorted(range(V), key=lambda v: -float(q[state, v]))[:k]
        outcomes = [[v] for v in top] + [[v for v in range(V) if v not in top]]
        coarse = [torch.stack([table[state, o].sum() for o in outcomes]).log() for table in (p, q)]
        found = of_top(divergence, k)(logits[state].log_softmax(-1), reference[state])
        torch.testing.assert_close(found, divergence(*coarse), rtol=1e-12, atol=1e-14)
    inputs = logits.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: of_top(divergence, k)(z.log_softmax(-1), reference), [inputs])


def test_tokens_that_neither_gives_a_chance_are_no_rest_and_no_nan() -> None:
    """As masked ids, whose logits are the lowest number."""
    logits, reference = policies(1)
    lowest = torch.finfo(torch.float64).min
    logits, reference = (x.index_fill(-1, torch.tensor([2, 5]), lowest) for x in (logits, reference))
    logits, reference = logits.requires_grad_(), reference.log_softmax(-1)
    value = of_top(reverse_kl, V - 2)(logits.log_softmax(-1), reference)
    whole = reverse_kl(logits.log_softmax(-1), reference)
    torch.testing.assert_close(value, whole, rtol=1e-12, atol=1e-14)
    assert torch.autograd.grad(value.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("k", [1, 3, V - 1])
def test_the_likeliest_tokens_of_a_server_are_enough(k: int) -> None:
    """Their table differs in how the rest is divided alone, also where the tokens come in any order."""
    hidden, weight, hidden_ref, weight_ref = heads(2)
    logq = (hidden_ref @ weight_ref).log_softmax(-1)
    logp, top = logq.topk(k, dim=-1)
    order = torch.randperm(k, generator=torch.Generator().manual_seed(k))
    targets = torch.arange(9) % V
    for divergence in EVERY:
        served = tokens.against_top(
            top[:, order], logp[:, order], of_top(divergence, k), V, torch.device("cpu")
        )
        local = tokens.Against(hidden_ref, lambda h: h @ weight_ref, of_top(divergence, k))
        values = [
            tokens.compare_from_hidden(hidden, lambda h: h @ weight, targets, against, vocabulary=V)
            for against in (served, local)
        ]
        torch.testing.assert_close(*values, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------- from hidden states


def heads(seed: int, V_ref: int = V) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = (9, 5), (5, V), (9, 4), (4, V_ref)
    hidden, weight, hidden_ref, weight_ref = (
        torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes
    )
    return hidden, weight, hidden_ref, weight_ref


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("divergence", EVERY)
def test_from_hidden_states_in_chunks_it_is_the_whole_tables_number_and_gradient(
    rows: int, divergence: Divergence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "CHUNK_BYTES", 12 * V * rows)
    hidden, weight, hidden_ref, weight_ref = heads(1)
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    targets = torch.arange(9) % V
    against = tokens.Against(hidden_ref, lambda h: h @ weight_ref, divergence)
    found = tokens.compare_from_hidden(
        leaves[0], lambda h: h @ leaves[1], targets, against, 0.7, vocabulary=V
    )
    again = [x.clone().requires_grad_() for x in (hidden, weight)]
    logp = (again[0] @ again[1] / 0.7).log_softmax(-1)
    reference = (hidden_ref @ weight_ref / 0.7).log_softmax(-1)
    expected = (
        logp.gather(-1, targets[:, None])[:, 0],
        -(logp.exp() * logp).sum(-1),
        divergence(logp, reference),
    )
    mixed = torch.linspace(-1, 1, 9, dtype=torch.float64)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(
        torch.autograd.grad(sum((x * mixed).sum() for x in found), leaves),
        torch.autograd.grad(sum((x * mixed).sum() for x in expected), again),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_a_padded_vocabulary_is_compared_over_the_common_tokens() -> None:
    hidden, weight, hidden_ref, weight_ref = heads(2, V_ref=V + 3)
    against = tokens.Against(hidden_ref, lambda h: h @ weight_ref, kl.exact)
    targets = torch.zeros(9, dtype=torch.long)
    found = tokens.compare_from_hidden(hidden, lambda h: h @ weight, targets, against, vocabulary=V)[2]
    expected = kl.exact((hidden @ weight).log_softmax(-1), (hidden_ref @ weight_ref)[:, :V].log_softmax(-1))
    torch.testing.assert_close(found, expected)
