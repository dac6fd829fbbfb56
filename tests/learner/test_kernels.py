"""The compiled parts of a training step, against their formulas in float64, in both types they are built for:
attention of packed tokens, what is picked of logits, norms, gates and rotations."""

import copy
import ctypes
import math

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from posttrain.learner import kernels, packed_attention
from posttrain.learner.learner import Learner
from posttrain.learner.pack import pack
from posttrain.learner.packed_attention import SpanTable, TokenSpan, attention
from posttrain.math import tokens
from posttrain.methods.build import build
from posttrain.types import Batch, Trajectory

if kernels.load(torch.float32) is None:
    pytest.skip("NOT RUN: no kernel is compiled here, which wants Linux and g++", allow_module_level=True)

TYPES = [torch.float32, torch.bfloat16]
ERROR = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
"""Of a whole tensor, by its norm: rounding of 24 and of 8 bits, of sums of a hundred products."""


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(dtype).requires_grad_()


def near(found: torch.Tensor, wanted: torch.Tensor, most: float) -> None:
    error = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(10.0)
    assert error <= most


def everyone(spans: list[TokenSpan], N: int, window: int | None) -> torch.Tensor:
    """[N, N]: who sees whom, token by token."""
    out = torch.zeros(N, N, dtype=torch.bool)
    for span in spans:
        keys = [*range(span.prefix), *range(span.start, span.stop)]
        for i, token in enumerate(range(span.start, span.stop)):
            for place, key in enumerate(keys):
                if span.sees is not None:
                    out[token, key] = span.sees[i, place]
                else:
                    out[token, key] = place <= span.prefix + i and place > span.prefix + i - (window or N)
    return out


def slow(query, key, value, seen, scale):
    """Head by head, in float64; 0 for who sees nobody."""
    groups, out = query.shape[1] // key.shape[1], []
    for h in range(query.shape[1]):
        q, k, v = (x[0, n].double() for x, n in ((query, h), (key, h // groups), (value, h // groups)))
        scores = (q @ k.T * scale).masked_fill(~seen, -1e300)
        out.append((scores.softmax(-1) * seen) @ v)
    return torch.stack(out)[None]


CASES = {
    "alone": ([TokenSpan(0, 1)], 1, None),
    "rows": ([TokenSpan(0, 50), TokenSpan(50, 133)], 140, None),
    "windows": ([TokenSpan(0, 50), TokenSpan(50, 133)], 136, 7),
    "shared": ([TokenSpan(0, 27), TokenSpan(27, 60, 27), TokenSpan(60, 93, 27)], 93, None),
    "trees": (
        [
            TokenSpan(0, 9),
            TokenSpan(9, 60, 9, torch.rand(51, 60, generator=torch.Generator().manual_seed(3)) < 0.3),
        ],
        64,
        None,
    ),
    "long": ([TokenSpan(0, 300)], 300, 200),
    "many": ([TokenSpan(7 * n, 7 * n + 7) for n in range(13)], 91, None),
}
for _span in CASES["trees"][0]:
    if _span.sees is not None:
        _span.sees[:, 0] = True  # each sees somebody


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "shared", "size"), [(6, 2, 32), (3, 3, 64), (2, 1, 96)])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_the_formula_and_so_is_its_gradient(case, heads, shared, size, dtype):
    spans, N, window = CASES[case]
    given = [drawn(n, 1, h, N, size, dtype=dtype) for n, h in enumerate((heads, shared, shared))]
    out = attention(*given, SpanTable(spans), 0.3, window)
    exact = [x.detach().double().requires_grad_() for x in given]
    wanted = slow(*exact, everyone(spans, N, window), 0.3)
    grad = drawn(9, *out.shape, dtype=dtype).detach()
    near(out, wanted, ERROR[dtype])
    found = torch.autograd.grad(out, given, grad)
    for got, right in zip(found, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
        near(got, right, ERROR[dtype])


def test_heads_lie_in_memory_as_transformers_leaves_them():
    """Token by token or head by head: the same bits, and what is found lies token by token."""
    spans = [TokenSpan(0, 40)]
    by_head = [drawn(n, 1, h, 40, 32, dtype=torch.bfloat16) for n, h in enumerate((4, 2, 2))]
    by_token = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in by_head]
    outs = [attention(*given, SpanTable(spans), 0.2, None) for given in (by_head, by_token)]
    assert torch.equal(*outs)
    assert outs[0].transpose(1, 2).is_contiguous()


def test_what_is_not_seen_changes_no_bit_nor_do_threads():
    g = torch.Generator().manual_seed(0)
    sees = (torch.rand(70, 70, generator=g) < 0.4).fill_diagonal_(True)
    sees[:, 11] = False
    spans, before = [TokenSpan(0, 70, 0, sees)], torch.get_num_threads()
    results = []
    for number, threads in ((0.0, 1), (1e30, 1), (0.0, 2)):
        given = [drawn(n, 1, h, 70, 32, dtype=torch.bfloat16) for n, h in enumerate((4, 2, 2))]
        with torch.no_grad():
            for x in given[1:]:
                x[:, :, 11] = number
        torch.set_num_threads(threads)
        try:
            out = attention(*given, SpanTable(spans), 0.2, None)
            grads = torch.autograd.grad(out.float().sin().sum(), given)
        finally:
            torch.set_num_threads(before)
        own = [g[:, :, [t for t in range(70) if t != 11]] for g in grads]
        rows = [t for t in range(70) if t != 11]  # 11 sees itself no more, as nobody does
        results.append([out[:, :, rows], *own])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_a_pack_attends_by_it_within_rounding_of_pytorch():
    """Prompt groups with a shared prefix, trees, and rows by themselves, with a window and without."""

    def row(prompt: list[int], answer: list[int]) -> Trajectory:
        return Trajectory.given(prompt + answer, len(prompt))

    rows = [row([1, 2, 3, k], [4 + n // 2, 5 + n, 6][: n + 1]) for k in (7, 8) for n in range(3)]
    batch = Batch.of([*rows, row([1, 2, 3, 9], [1, 2])], group=[0, 0, 0, 1, 1, 1, 2])
    for trees in (True, False):
        for window in (None, 3):
            found = []
            for compiled in (True, False):
                packed = pack(batch, compiled=compiled, trees=trees)
                N = len(packed.tokens) + packed.spare
                heads = [drawn(n, 1, h, N, 32, dtype=torch.bfloat16) for n, h in enumerate((4, 2, 2))]
                out = packed.attend(*heads, scale=0.25, window=window, softcap=None)
                loss = (out.float() * torch.arange(out.numel()).view(out.shape).cos()).sum()
                found.append([out, *torch.autograd.grad(loss, heads)])
                assert bool(packed._tables) == compiled
            for got, wanted in zip(*found, strict=True):
                near(got, wanted, 0.015)


def test_what_it_is_for():
    query, value = drawn(0, 1, 4, 5, 32, dtype=torch.bfloat16), drawn(1, 1, 2, 5, 32, dtype=torch.bfloat16)
    assert packed_attention.suits(query, value, None, None, [], 0)
    assert not packed_attention.suits(query, value, 30.0, None, [], 0)
    assert not packed_attention.suits(query, value, None, torch.zeros(query.shape[1]), [], 0)
    assert packed_attention.suits(query.float(), value.float(), None, None, [], 0)
    assert not packed_attention.suits(query.double(), value.double(), None, None, [], 0)
    assert not packed_attention.suits(query[..., :16], value[..., :16], None, None, [], 0)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("scale", "temperature"), [(1.0, 1.0), (30.0, 0.7), (1e-3, 2.0)])
def test_what_is_picked_is_the_formula_and_so_is_its_gradient(scale, temperature, dtype):
    logits = (scale * drawn(0, 9, 1300).detach()).to(dtype).requires_grad_()
    with torch.no_grad():
        logits[3, 5] = -math.inf  # a token that cannot be drawn
    targets = torch.arange(9) * 100
    weights = drawn(1, 2, 9).detach()
    exact = logits.detach().double().clamp_min(-1e9).requires_grad_()  # 0 · infinity is no number
    wanted = tokens.pick(exact, targets, temperature)
    found = kernels._PickKernel.apply(logits, targets, temperature)
    for got, right in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)
    sides = []
    for x, outs in ((logits, found), (exact, wanted)):
        loss = (weights[0].to(outs[0]) * outs[0]).sum() + (weights[1].to(outs[1]) * outs[1]).sum()
        sides.append(torch.autograd.grad(loss, x)[0])
    assert sides[0][3, 5] == 0
    near(sides[0], sides[1], 1e-5 if dtype == torch.float32 else 4e-3)


def test_what_is_kept_has_32_bits_whatever_the_default_is(monkeypatch):
    rooms, default = {}, torch.get_default_dtype()
    assert kernels.load(torch.bfloat16) is not None
    monkeypatch.setattr(kernels, "call", lambda name, like, *given: rooms.update({name: given}))
    x = drawn(0, 2, 40, dtype=torch.bfloat16).detach()
    torch.set_default_dtype(torch.bfloat16)  # as another thread does that loads a model
    try:
        kernels.pick(x, torch.tensor([1, 1]))
        kernels.norm(x, x[0], 1e-5)
        attention(*[x.reshape(1, 1, 5, 16)] * 3, SpanTable([TokenSpan(0, 5)]), 0.3, None)
    finally:
        torch.set_default_dtype(default)
    kept = [*rooms["pick_forward"][-4:], rooms["norm_forward"][-1], rooms["attention_forward"][-2]]
    assert {each.dtype for each in kept} == {torch.float32}


def test_no_number_stays_none():
    logits = drawn(0, 2, 40, dtype=torch.bfloat16).detach()
    logits[0, 7] = math.nan
    logp, entropy = kernels.pick(logits, torch.tensor([1, 1]))
    assert logp.isnan().tolist() == entropy.isnan().tolist() == [True, False]


def test_only_one_of_both_is_asked_for():
    for which in (0, 1):
        sides = []
        for picks in (kernels.pick, tokens.pick):
            logits = drawn(0, 3, 50, dtype=torch.bfloat16)
            out = picks(logits, torch.tensor([1, 2, 3]))[which]
            sides.append(torch.autograd.grad(out.sum(), logits)[0])
        near(*sides, 4e-3)


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_and_gates_are_the_formulas_and_so_are_their_gradients(dtype):
    x, w = drawn(0, 2, 37, 70, dtype=dtype), drawn(1, 70, dtype=dtype)
    up, grad = drawn(2, 2, 37, 70, dtype=dtype), drawn(3, 2, 37, 70).detach()
    exact = [each.detach().double().requires_grad_() for each in (x, w, up)]
    quotient = exact[0] * (exact[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    for found, given, wanted, right in (
        (kernels.norm(x, w, 1e-5), (x, w), quotient * exact[1], exact[:2]),
        (kernels.gate(x, up), (x, up), torch.nn.functional.silu(exact[0]) * exact[2], [exact[0], exact[2]]),
    ):
        near(found, wanted, ERROR[dtype])
        grads = torch.autograd.grad(found, given, grad.to(dtype))
        for got, one in zip(grads, torch.autograd.grad(wanted, right, grad.double()), strict=True):
            near(got, one, ERROR[dtype])


@pytest.mark.parametrize(("H", "K", "D"), [(9, 3, 64), (4, 4, 6), (1, 1, 130)])
def test_rotations_are_the_bits_of_transformers_and_so_are_their_gradients(H, K, D):
    """Cosines of both halves may differ (several kinds of position), and one row of them serve several."""
    heads = [drawn(i, 2, 37, n, D, dtype=torch.bfloat16).transpose(1, 2) for i, n in enumerate((H, K))]
    angles = [drawn(i, 1, 37, D, dtype=torch.bfloat16).detach() for i in (2, 3)]
    grads = [drawn(i, 2, n, 37, D, dtype=torch.bfloat16).detach() for i, n in ((4, H), (5, K))]
    sides = []
    for rotate in (kernels.rotate, apply_rotary_pos_emb):
        found = rotate(*heads, *angles)
        sides.append([*found, *torch.autograd.grad(found, heads, grads)])
    assert all(map(torch.equal, *sides))


def test_sums_over_many_rows_are_the_same_bits_with_any_number_of_threads():
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            x, w = drawn(0, 333, 64, dtype=torch.bfloat16), drawn(1, 64, dtype=torch.bfloat16)
            found.append(torch.autograd.grad(kernels.norm(x, w, 1e-5).float().sin().sum(), (x, w)))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_a_reference_says_the_same_of_the_same_weights(llama, rows_of):
    """Bit for bit, so that a KL begins at 0: it computes by what the policy computes by."""
    model = llama(0, head_dim=32).bfloat16()
    reference = copy.deepcopy(model)
    learner = Learner(model, build("grpo", {"kl_in_loss": 0.1}, horizon=8), reference=reference)
    kinds = [{type(m).forward.__qualname__ for m in each.modules()} for each in (model, reference)]
    assert kinds[0] == kinds[1]
    assert any(name.startswith("_compiled_norm") for name in kinds[0])
    batch = rows_of(seed=0)
    assert torch.equal(learner.score(batch).logp, learner.score_reference(batch).logp)


def test_without_a_compiler_or_with_kernels_that_err_pytorch_does_it(monkeypatch, tmp_path):
    logits = drawn(0, 3, 50, dtype=torch.bfloat16)
    wanted = tokens.pick(logits, torch.tensor([1, 2, 3]))
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "load", kernels.load.__wrapped__)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not kernels.suits(logits)
    assert all(map(torch.equal, kernels.pick(logits, torch.tensor([1, 2, 3])), wanted))
    monkeypatch.delenv("CXX")
    wrong = tmp_path / "wrong.cpp"
    source = kernels._SOURCE.read_text()
    wrong.write_text(
        source.replace("const float warmth = 1 / temperature", "const float warmth = temperature")
    )
    monkeypatch.setattr(kernels, "_SOURCE", wrong)
    assert kernels.load(torch.bfloat16) is None


def test_a_structure_is_as_large_as_the_source_says():
    assert ctypes.sizeof(packed_attention._Heads) == 24
    assert ctypes.sizeof(packed_attention._Backward) == 3 * 24 + 8


def test_the_gradient_by_logits_takes_their_place_and_comes_the_same_twice():
    hidden, weight = (drawn(seed, n, 32, dtype=torch.bfloat16) for seed, n in ((0, 9), (1, 50)))
    targets, asked = torch.arange(9), (hidden, weight)
    logp, _ = tokens.pick_from_hidden(hidden, lambda h: h @ weight.T, targets, picks=kernels.pick)
    first = torch.autograd.grad(logp.sum(), asked, retain_graph=True)
    second = torch.autograd.grad(logp.sum(), asked)
    logits = (hidden @ weight.T).detach().requires_grad_()  # a leaf, which is left as it is
    before = logits.detach().clone()
    (by_logits,) = torch.autograd.grad(kernels.pick(logits, targets)[0].sum(), logits)
    assert torch.equal(logits, before)
    for found in (first, second):
        assert torch.equal(found[0], by_logits @ weight)
        assert torch.equal(found[1], by_logits.T @ hidden)
