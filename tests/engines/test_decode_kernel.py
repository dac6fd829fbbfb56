"""engines/native/decode_kernel.py: what the compiled attention says, against the formula in float64."""

import math
import subprocess
from pathlib import Path

import pytest
import torch

from posttrain.engines.native import decode_kernel
from posttrain.engines.native.decode_kernel import kernel_for, load, packed_matrix
from posttrain.models import compiled

torch.manual_seed(0)
if load(torch.float32, 32, 1) is None:
    pytest.skip("NOT RUN: no kernel is compiled here, which wants Linux and g++", allow_module_level=True)


def formula(query, keys, values, lengths, scale, window):
    """Row by row and head by head, in float64."""
    B, H, _, D = query.shape
    out = torch.empty(B, H, 1, D, dtype=torch.float64)
    for b in range(B):
        end = int(lengths[b]) + 1
        begin = max(0, end - window) if window else 0
        for h in range(H):
            k = h // (H // keys.shape[1])
            scores = keys[b, k, begin:end].double() @ query[b, h, 0].double() * scale
            out[b, h, 0] = scores.softmax(0) @ values[b, k, begin:end].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "queries", "window"),
    [(8, 2, None), (48, 1, None), (64, 3, None), (64, 3, 7), (128, 4, 16), (256, 5, None)],
)
@pytest.mark.sample("64-3-*", "128-4-16-dtype1", "8-2-*")
def test_it_is_attention_over_each_row_as_far_as_it_goes(dtype, size, queries, window):
    B, K, columns = 5, 2, 50
    query, key, value = (torch.randn(B, n, 1, size).to(dtype) for n in (K * queries, K, K))
    keys, values = (torch.full((B + 2, K, columns, size), math.nan, dtype=dtype) for _ in range(2))
    lengths = torch.tensor([0, 1, 16, 33, 49])
    for b, length in enumerate(lengths.tolist()):  # what lies behind is never read
        keys[b, :, :length] = torch.randn(K, length, size).to(dtype)
        values[b, :, :length] = torch.randn(K, length, size).to(dtype)
    kernel = kernel_for(query, value, None)
    assert kernel is not None
    scale = size**-0.5
    out = kernel(query, key, value, keys, values, lengths, scale=scale, window=window)
    for b, length in enumerate(lengths.tolist()):
        assert torch.equal(keys[b, :, length], key[b, :, 0])
        assert torch.equal(values[b, :, length], value[b, :, 0])
    assert keys[B:].isnan().all()
    wanted = formula(query, keys, values, lengths, scale, window)
    close = {"rtol": 2**-8, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close(out.double(), wanted, **close)


def test_scores_far_apart_and_what_is_no_number(tmp_path):
    """The largest score alone counts, however large; NaN stays NaN."""
    query, key, value = torch.full((1, 1, 1, 32), 30.0), torch.zeros(1, 1, 1, 32), torch.ones(1, 1, 1, 32)
    keys, values = torch.zeros(1, 1, 4, 32), torch.zeros(1, 1, 4, 32)
    keys[0, 0, 1], values[0, 0, 1] = 30.0, 5.0
    kernel = load(torch.float32, 32, 1).attention
    out = kernel(query, key, value, keys, values, torch.tensor([3]), scale=1.0, window=None)
    assert torch.equal(out, torch.full_like(out, 5.0))
    for dtype in (torch.float32, torch.bfloat16):
        broken = [x.to(dtype) for x in (query * math.nan, key, value, keys, values)]
        assert load(dtype, 32, 1).attention(*broken, torch.tensor([3]), scale=1.0, window=None).isnan().all()


def test_a_row_is_the_same_whatever_stands_beside_it():
    query, key, value = torch.randn(4, 6, 1, 64), torch.randn(4, 2, 1, 64), torch.randn(4, 2, 1, 64)
    keys, values, lengths = torch.randn(4, 2, 40, 64), torch.randn(4, 2, 40, 64), torch.tensor([3, 39, 7, 20])
    kernel = load(torch.float32, 64, 3).attention
    together = kernel(query, key, value, keys.clone(), values.clone(), lengths, scale=0.1, window=None)
    for b in range(4):
        own = [x[b : b + 1].clone() for x in (query, key, value)]
        wider = [torch.randn(1, 2, 90, 64) for _ in range(2)]
        for mine, theirs in zip(wider, (keys, values), strict=True):
            mine[:, :, :40] = theirs[b]
        alone = kernel(*own, *wider, lengths[b : b + 1], scale=0.1, window=None)
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize(
    ("size", "dtype", "softcap"),
    [(12, torch.float32, None), (64, torch.float16, None), (64, torch.float32, 30.0)],
)
def test_what_it_was_not_made_for_is_left_to_pytorch(size, dtype, softcap):
    assert kernel_for(torch.zeros(1, 2, 1, size, dtype=dtype), torch.zeros(1, 1, 1, size), softcap) is None


def test_without_a_compiler_or_with_one_that_errs_pytorch_does_it(monkeypatch, tmp_path):
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path))
    for compiler in ("no-such-compiler", "false"):
        monkeypatch.setenv("CXX", compiler)
        assert load.__wrapped__(torch.float32, 32, 1) is None
    monkeypatch.delenv("CXX")
    wrong = tmp_path / "wrong.cpp"
    source = Path(decode_kernel.__file__).with_name("decode.cpp").read_text()
    wrong.write_text(source.replace("scale = 1 / sum", "scale = 2 / sum"))
    monkeypatch.setattr(decode_kernel, "_SOURCE", wrong)
    assert load.__wrapped__(torch.float32, 32, 1) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inner", [32, 64, 70, 104])
def test_a_product_is_the_same_bits_however_many_rows_there_are(dtype, inner):
    """Rows are multiplied some at a time, of a processor's matrix unit up to 16 and twice 16."""
    kernels = load(dtype, 8, 2)
    weight, bias, x = torch.randn(100, inner).to(dtype), torch.randn(100).to(dtype), torch.randn(70, inner)
    if not kernels.multiplies(weight):
        pytest.skip("NOT RUN: this processor has no products of bfloat16")
    packed = kernels.pack(weight)
    matrix, x = packed_matrix(packed, weight, bias), x.to(dtype)
    theirs = x @ weight.T
    out = kernels.linear(x, matrix)
    wanted = x.double() @ weight.double().T + bias.double()
    # A sum of `inner` products in float32, rounded once when it is stored.
    close = {"rtol": 2**-8, "atol": 1e-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.double(), wanted, **close)
    assert all(torch.equal(kernels.linear(x[70 - n :], matrix), out[70 - n :]) for n in range(1, 70))
    assert torch.equal(x @ weight.T, theirs)  # which use the same unit, are left as they were


def test_a_matrix_unit_that_is_not_granted_is_not_used(monkeypatch):
    class Refusing:
        syscall = staticmethod(lambda *_: -1)

    monkeypatch.setattr(compiled, "_machine", lambda: b"flags : fpu amx_bf16 amx_tile")
    monkeypatch.setattr(compiled.ctypes, "CDLL", lambda _: Refusing)
    assert compiled._disabled_units.__wrapped__() == ("-mno-amx-bf16",)
    monkeypatch.undo()
    monkeypatch.setattr(compiled, "_disabled_units", lambda: ("-mno-amx-bf16",))
    others = load.__wrapped__(torch.bfloat16, 8, 2)  # which are tried against PyTorch's when they are loaded
    assert others is not None
    weight, x = torch.randn(50, 64).bfloat16(), torch.randn(20, 64).bfloat16()
    if others.multiplies(weight):
        matrix = packed_matrix(packed := others.pack(weight), weight, None)
        wanted = x.double() @ weight.double().T
        torch.testing.assert_close(others.linear(x, matrix).double(), wanted, rtol=2**-8, atol=1e-5)
        assert len(packed) == 64 * 96  # three registers of 16 of its rows at once


def test_a_build_that_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may compile it after all, and then the two round otherwise."""

    def slow(*asked: object) -> Path:
        raise subprocess.TimeoutExpired("g++", compiled._BUILD_S)

    monkeypatch.setattr(compiled, "_build", slow)
    with pytest.warns(UserWarning, match=r"decode.cpp was not compiled in 600 s; PyTorch computes it"):
        assert compiled.library(Path("decode.cpp"), torch.float32) is None
