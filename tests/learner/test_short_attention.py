"""Attention by products of matrices: the formula, its gradient, and where it is used."""

import pytest
import torch

from posttrain.learner import pack as packing
from posttrain.learner.pack import pack
from posttrain.learner.short_attention import MOST, short_attention, suits
from posttrain.models.attention import additive
from posttrain.types import Batch, Trajectory


def drawn(seed: int, queries: int, keys: int, heads: int = 6, shared: int = 2, size: int = 16):
    g = torch.Generator().manual_seed(seed)
    shapes = ((heads, queries, size), (shared, keys, size), (shared, keys, size))
    return [torch.randn(1, *shape, generator=g).bfloat16().requires_grad_() for shape in shapes]


def seen(queries: int, keys: int) -> torch.Tensor:
    """Causal, where the first keys come before all queries; the third query does not see the second key."""
    mask = torch.ones(queries, keys).tril(keys - queries).bool()
    mask[2, 1] = False
    return mask


def slow(query, key, value, mask, scale):
    """Head by head, query by query, in float64."""
    groups = query.shape[1] // key.shape[1]
    out = []
    for h in range(query.shape[1]):
        q, k, v = (x[0, n].double() for x, n in ((query, h), (key, h // groups), (value, h // groups)))
        rows = [((q[t] @ k[mask[t]].T) * scale).softmax(-1) @ v[mask[t]] for t in range(len(q))]
        out.append(torch.stack(rows))
    return torch.stack(out)[None]


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (7, 12), (130, 160)])
def test_it_is_the_formula_and_so_is_its_gradient(queries, keys):
    heads, mask, scale = drawn(queries, queries, keys), seen(queries, keys), 0.3
    out = short_attention(*heads, additive(mask, torch.bfloat16), scale)
    wanted = slow(*heads, mask, scale)
    g = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(out, heads, g.to(out))
    # Products of bfloat16 are rounded to 8 bits.
    torch.testing.assert_close(out.double(), wanted, rtol=0.02, atol=0.02)
    for got, exact in zip(found, torch.autograd.grad(wanted, heads, g), strict=True):
        error = (got - exact).float().norm() / exact.float().norm()
        assert error < 0.015


def test_what_is_not_seen_changes_no_bit():
    queries, keys = 6, 9
    query, key, value = drawn(0, queries, keys)
    mask = torch.ones(queries, keys).bool()
    mask[:, 4] = False
    outs = []
    for number in (1.0, 1e30):
        with torch.no_grad():
            other = [x.clone() for x in (key, value)]
            for x in other:
                x[:, :, 4] = number
            outs.append(short_attention(query, *other, additive(mask, torch.bfloat16), 0.3))
    assert torch.equal(*outs)


def test_it_is_for_few_tokens_in_16_bits_without_a_softcap():
    query, key, value = drawn(0, 4, 4)
    assert suits(query, key, value, None)
    assert not suits(query, key, value, 30.0)
    assert not suits(query.float(), key.float(), value.float(), None)
    assert not suits(query, key.expand(1, 2, 4, 16).repeat(1, 1, MOST, 1), value, None)


def test_a_pack_attends_by_it_alike_whatever_stands_beside_a_family(monkeypatch):
    """Families with a stem and without, and rows by themselves, all within rounding of PyTorch's."""
    calls: list[int] = []

    def counted(*given):
        calls.append(given[0].shape[2])
        return short_attention(*given)

    monkeypatch.setattr(packing, "short_attention", counted)

    def row(prompt: list[int], answer: list[int]) -> Trajectory:
        return Trajectory.given(prompt + answer, len(prompt))

    rows = [row([1, 2, 3, k], [4 + n, 5, 6][: n + 1]) for k in (7, 8) for n in range(3)] + [row([9], [1, 2])]
    batch = Batch.of(rows, group=[0, 0, 0, 1, 1, 1, 2])
    found = []
    for short in (True, False):
        packed = pack(batch, short=short)
        heads = drawn(3, len(packed.tokens) + packed.spare, len(packed.tokens) + packed.spare)
        out = packed.attend(*heads, scale=0.25, window=None, softcap=None)
        loss = (out.float() * torch.arange(out.numel()).view(out.shape).cos()).sum()
        found.append([out, *torch.autograd.grad(loss, heads)])
    assert calls
    for got, wanted in zip(*found, strict=True):
        assert (got.float() - wanted.float()).norm() / wanted.float().norm() < 0.015
