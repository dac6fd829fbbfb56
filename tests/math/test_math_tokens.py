"""tokens: log-probabilities and entropies equal log_softmax and its autograd, and logits stay in chunks."""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from posttrain.math import tokens

Pair = tuple[torch.Tensor, torch.Tensor]


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> Pair:
    """By the definition, through autograd."""
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def example(seed: int, N: int = 6, V: int = 11, dtype: torch.dtype = torch.float64) -> Pair:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, V, generator=g, dtype=torch.float64) * 3
    return logits.to(dtype), torch.randint(V, (N,), generator=g)


def gradients(
    pick: Callable[..., Pair], logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> Pair:
    """Of a sum with a weight of its own for every log-probability and every entropy."""
    x = logits.clone().requires_grad_()
    a, b = torch.randn(2, len(logits), generator=torch.Generator().manual_seed(77), dtype=torch.float64)
    logp, entropy = pick(x, targets, temperature)
    together = torch.autograd.grad((a * logp + b * entropy).sum(), x, retain_graph=True)[0]
    return together, torch.autograd.grad((a * logp).sum(), x)[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_pick_equals_log_softmax_with_both_gradients(seed: int, temperature: float) -> None:
    logits, targets = example(seed)
    for got, wanted in zip(
        (*tokens.pick(logits, targets, temperature), *gradients(tokens.pick, logits, targets, temperature)),
        (*plain(logits, targets, temperature), *gradients(plain, logits, targets, temperature)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_gradcheck_in_float64(temperature: float) -> None:
    logits, targets = example(seed=4, N=3, V=5)
    assert torch.autograd.gradcheck(
        lambda z: tokens.pick(z, targets, temperature), logits.requires_grad_(), raise_exception=True
    )


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    logits, targets = example(seed=4, N=3, V=5)
    logits.requires_grad_()
    (first,) = torch.autograd.grad(tokens.pick(logits, targets)[0].exp().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.square().sum(), logits)


def test_the_closed_form_against_the_definition_without_any_autograd() -> None:
    """∂logp/∂z_v = (1[v = y] - p_v)/τ and ∂H/∂z_v = -p_v (log p_v + H)/τ."""
    z, y, tau = [0.3, -1.0, 2.0], 2, 0.7
    total = math.fsum(math.exp(v / tau) for v in z)
    p = [math.exp(v / tau) / total for v in z]
    H = -math.fsum(q * math.log(q) for q in p)
    x = torch.tensor([z], dtype=torch.float64, requires_grad=True)
    logp, entropy = tokens.pick(x, torch.tensor([y]), tau)
    assert logp.item() == pytest.approx(math.log(p[y]))
    assert entropy.item() == pytest.approx(H)
    d_logp = torch.autograd.grad(logp.sum(), x, retain_graph=True)[0][0].tolist()
    assert d_logp == pytest.approx([((v == y) - p[v]) / tau for v in range(3)])
    d_entropy = torch.autograd.grad(entropy.sum(), x)[0][0].tolist()
    assert d_entropy == pytest.approx([-p[v] * (math.log(p[v]) + H) / tau for v in range(3)])


def test_low_precision_logits_are_read_in_float32() -> None:
    """The result is that of the same numbers in float32; only the gradient is rounded on its way back."""
    logits, targets = example(seed=5, N=8, V=300, dtype=torch.bfloat16)
    x = logits.clone().requires_grad_()
    logp, entropy = tokens.pick(x, targets, 0.7)
    wide = logits.float().requires_grad_()
    wanted = tokens.pick(wide, targets, 0.7)
    assert logp.dtype == entropy.dtype == torch.float32
    assert torch.equal(logp, wanted[0])
    assert torch.equal(entropy, wanted[1])
    (got,) = torch.autograd.grad((logp + entropy).sum(), x)
    (exact,) = torch.autograd.grad((wanted[0] + wanted[1]).sum(), wide)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, exact.bfloat16())


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(torch.float32, torch.float32), (torch.float64, torch.float64)]
)
def test_precision_of_the_answer(dtype: torch.dtype, wanted: torch.dtype) -> None:
    logp, entropy = tokens.pick(*example(seed=6, dtype=dtype))
    assert logp.dtype == entropy.dtype == wanted


def test_logits_are_left_as_they_were() -> None:
    logits, targets = example(seed=7, dtype=torch.float32)
    before = logits.clone()
    x = logits.requires_grad_()
    logp, _ = tokens.pick(x, targets, 0.5)
    logp.sum().backward()
    assert torch.equal(logits.detach(), before)


def test_huge_logits_neither_overflow_nor_lose_the_likely_token() -> None:
    logits = torch.tensor([[3e4, 0.0, -3e4], [-3e4, -3e4, -3e4]], requires_grad=True)
    logp, entropy = tokens.pick(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(logp, torch.tensor([0.0, -math.log(3)]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, math.log(3)]))
    (gradient,) = torch.autograd.grad((logp + entropy).sum(), logits)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("weight", [0.5, -3.0, 1e6])
@pytest.mark.parametrize("chunks", [False, True], ids=["whole", "chunked"])
def test_entropy_gradient_leaves_out_excluded_tokens(weight: float, chunks: bool) -> None:
    """At a logit of -inf it is 0, and at the others that of a vocabulary without it."""
    logits, _ = example(seed=9, N=4, V=9)
    left, targets = [0, 2, 3, 7], torch.tensor([2, 0, 3, 1])
    wanted = logits[:, left].requires_grad_()
    log_p, entropy = plain(wanted, targets, 0.7)
    (slope,) = torch.autograd.grad((weight * entropy + log_p).sum(), wanted)
    masked = torch.full_like(logits, -torch.inf).index_copy(1, torch.tensor(left), wanted.detach())
    masked.requires_grad_()
    rows = torch.tensor(left)[targets]
    if chunks:
        found = tokens.pick_from_hidden(masked, lambda h: h + 0.0, rows, 0.7, vocabulary=9)
    else:
        found = tokens.pick(masked, rows, 0.7)
    torch.testing.assert_close(found, (log_p.detach(), entropy.detach()))
    (got,) = torch.autograd.grad((weight * found[1] + found[0]).sum(), masked)
    torch.testing.assert_close(got[:, left], slope)
    others = [v for v in range(9) if v not in left]
    assert not got[:, others].any()


def test_probabilities_of_all_tokens_sum_to_one_and_give_the_entropy() -> None:
    logits, _ = example(seed=8, N=1, V=9)
    every = torch.arange(9)
    logp, entropy = tokens.pick(logits.expand(9, 9), every, 1.3)
    assert logp.exp().sum().item() == pytest.approx(1.0)
    assert -(logp.exp() * logp).sum().item() == pytest.approx(entropy[0].item())


# ---------------------------------------------------------------- from hidden states, in chunks

N, D, V = 23, 4, 50


def hidden_example(
    seed: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=g, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=g, dtype=torch.float64).to(dtype)
    return hidden, weight, torch.randint(V, (N,), generator=g)


class Head:
    """A linear output head that records how many rows it was given."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.rows: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(hidden))
        return hidden @ self.weight.T


def chunked(
    rows: int, monkeypatch: pytest.MonkeyPatch, hidden: torch.Tensor, head: Head, targets: torch.Tensor
) -> Pair:
    monkeypatch.setattr(tokens, "CHUNK_BYTES", 4 * V * rows)
    return tokens.pick_from_hidden(hidden, head, targets, 0.8, vocabulary=V)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 22, 23, 24, 1000])
def test_any_chunk_size_gives_the_values_and_gradients_of_pick(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the hidden states and into the head's weight; 0 bytes still takes one row at a time."""
    hidden, weight, targets = hidden_example(seed=1)
    answers = []
    for whole in (True, False):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        head = Head(w)
        out = tokens.pick(head(h), targets, 0.8) if whole else chunked(rows, monkeypatch, h, head, targets)
        scale = torch.linspace(-1, 2, N, dtype=torch.float64)
        gradient = torch.autograd.grad((scale * out[0] - scale.square() * out[1]).sum(), (h, w))
        answers.append((*out, *gradient))
    for got, wanted in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [True, False])
def test_the_head_sees_every_row_once_forward_and_never_more_than_a_chunk(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, targets = hidden_example(seed=2)
    head = Head(weight.requires_grad_(training))
    with torch.set_grad_enabled(training):
        logp, _ = chunked(5, monkeypatch, hidden, head, targets)
    assert head.rows == [5, 5, 5, 5, 3]
    if training:
        logp.sum().backward()
        assert sum(head.rows) == 2 * N
        assert max(head.rows) == 5


def test_no_logits_are_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as wide as the vocabulary is saved by the graph; a graph of plain pick does save it."""
    hidden, weight, targets = hidden_example(seed=3)
    kept: list[torch.Size] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.shape)
        return x

    weight.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        tokens.pick(Head(weight)(hidden), targets)
    assert (N, V) in kept
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        chunked(5, monkeypatch, hidden, Head(weight), targets)
    assert all(V not in shape or shape == weight.T.shape or shape == weight.shape for shape in kept)


class Live(TorchDispatchMode):
    """Counts the most bytes that were alive at once, of what operations made while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in self.known | inputs:
                    self._follow(storage)
        return out

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

        def gone() -> None:
            self.known.discard(key)
            self.bytes -= size

        weakref.finalize(storage, gone)


def peak(N: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Most bytes alive during a forward and backward pass over N positions in chunks of rows."""
    V, D = 2000, 2
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).requires_grad_()
    weight = torch.randn(V, D, generator=g).requires_grad_()
    targets = torch.randint(V, (N,), generator=g)
    monkeypatch.setattr(tokens, "CHUNK_BYTES", 4 * V * rows)
    with Live() as live:
        logp, entropy = tokens.pick_from_hidden(hidden, lambda h: h @ weight.T, targets, vocabulary=V)
        torch.autograd.grad((logp + entropy).sum(), (hidden, weight))
    return live.peak


def test_peak_memory_is_that_of_a_chunk_whatever_the_number_of_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_chunk = 4 * 2000 * 16
    sizes = [peak(n, 16, monkeypatch) for n in (16, 128, 512)]
    print("peak in chunks of logits:", [round(s / one_chunk, 2) for s in sizes])
    assert all(one_chunk <= s < 6 * one_chunk for s in sizes)
    assert sizes[2] < sizes[1] * 1.25
    assert peak(512, 512, monkeypatch) > 3 * 512 * 2000 * 4, "the meter must see logits where they do exist"


def test_no_position_is_an_error() -> None:
    with pytest.raises(ValueError, match="no position"):
        tokens.pick_from_hidden(torch.zeros(0, 2), lambda h: h, torch.zeros(0, dtype=torch.long))


def test_the_head_may_be_a_module_with_a_bias_in_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(D, V).bfloat16()
    hidden, _, targets = hidden_example(seed=4, dtype=torch.bfloat16)
    whole = tokens.pick(head(hidden), targets)[0]
    monkeypatch.setattr(tokens, "CHUNK_BYTES", 4 * V * 7)
    parts = tokens.pick_from_hidden(hidden, head, targets, vocabulary=V)[0]
    torch.testing.assert_close(parts, whole, atol=0.05, rtol=0.0)
    parts.sum().backward()
    assert head.bias.grad is not None
    # Σ_v ∂logp/∂z_v = 0 at every position, so the bias's gradient sums to 0 up to bf16 rounding.
    assert abs(head.bias.grad.float().sum().item()) < 0.3
    assert all(p.grad is not None and bool(p.grad.any()) for p in head.parameters())


def test_order_of_positions_only_permutes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = hidden_example(seed=5)
    for rows, order in itertools.product((4, 100), (torch.arange(N).flip(0), torch.arange(N).roll(5))):
        straight = chunked(rows, monkeypatch, hidden, Head(weight), targets)
        permuted = chunked(rows, monkeypatch, hidden[order], Head(weight), targets[order])
        for a, b in zip(straight, permuted, strict=True):
            torch.testing.assert_close(a[order], b)


@pytest.mark.parametrize("compared", [False, True])
def test_sums_over_chunks_are_exact_in_bfloat16(monkeypatch: pytest.MonkeyPatch, compared: bool) -> None:
    """40 chunks: the weight's gradient is off by a fifth of what autograd's sum in bfloat16 is off by."""
    g = torch.Generator().manual_seed(3)
    hidden = (torch.randn(640, 24, generator=g) + 1).bfloat16()
    weight = torch.randn(50, 24, generator=g).bfloat16() / 5
    targets = torch.randint(50, (640,), generator=g)
    other = tokens.Against(hidden, lambda h: h @ weight.T / 2, lambda p, q: (p.exp() * (p - q)).sum(-1))

    def gradient(dtype: torch.dtype, rows: int, wide: bool) -> tuple[torch.Tensor, torch.Tensor]:
        h, w = (x.detach().to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
        monkeypatch.setattr(tokens, "CHUNK_BYTES", (12 if compared else 4) * 50 * rows)
        options: dict[str, Any] = {"vocabulary": 50, "weights": [w] if wide else []}
        if compared:
            out = tokens.compare_from_hidden(h, lambda h: h @ w.T, targets, other, **options)
        else:
            out = tokens.pick_from_hidden(h, lambda h: h @ w.T, targets, **options)
        sum(x.double().sum() * (n + 1) for n, x in enumerate(out)).backward()
        assert h.grad is not None
        assert w.grad is not None
        return h.grad.double(), w.grad.double()

    exact = gradient(torch.float64, 640, wide=False)
    summed, wide = (gradient(torch.bfloat16, 16, wide=wide) for wide in (False, True))
    assert wide[0].equal(summed[0]), "the states' gradients are those of the same chunks"
    off = [float((weight - exact[1]).norm() / exact[1].norm()) for _, weight in (summed, wide)]
    print("off by", off)
    assert off[1] < off[0] / 2.5
    assert off[1] < 4e-3  # one rounding to bfloat16
    whole = gradient(torch.float64, 16, wide=True)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(whole, exact, strict=True))


def test_a_result_without_a_gradient_is_left_out_of_wide_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entropy's gradient is not made of zeros: a GPU would be waited for, to see that they are."""
    monkeypatch.setattr(tokens, "CHUNK_BYTES", 4 * 11 * 2)
    weight = torch.randn(11, 3, requires_grad=True)
    hidden, targets = torch.randn(6, 3, requires_grad=True), torch.arange(6)
    seen = []
    backward = tokens._Pick.backward
    monkeypatch.setattr(tokens._Pick, "backward", lambda ctx, *g: (seen.append(g[1]), backward(ctx, *g))[1])
    logp, _ = tokens.pick_from_hidden(
        hidden, lambda h: h @ weight.T, targets, vocabulary=11, weights=[weight]
    )
    logp.sum().backward()
    assert seen == [None] * 3
