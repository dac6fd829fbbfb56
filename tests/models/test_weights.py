"""A digest that nothing can change unseen, and numbers that are none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.models import fingerprint as module
from posttrain.models.fingerprint import combined, digest, fingerprint, finite


def named(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(5, 7, generator=g)),
        ("norm", torch.ones(7)),
        ("zeros", torch.zeros(4, 4, dtype=torch.bfloat16)),
        ("experts", torch.randn(2, 3, 5, generator=g).half()),
        ("scale", torch.tensor(1.0)),
        ("codes", torch.arange(10, dtype=torch.uint8)),
        ("wide", torch.randn(3, generator=g, dtype=torch.float64)),
        ("long", torch.randn(3000, generator=g)),
        ("none", torch.zeros(0, 3)),
    ]


def test_it_is_the_same_in_any_order_and_any_memory_layout() -> None:
    before = digest(named())
    assert digest(reversed(named())) == before
    assert digest((n, x.T.contiguous().T if x.ndim == 2 else x) for n, x in named()) == before
    assert len(before) == 16
    assert combined(fingerprint(n, x) for n, x in named()) == before


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_single_bit_changes_it(data: st.DataObject) -> None:
    tensors = named()
    which = data.draw(st.integers(0, len(tensors) - 2))
    name, tensor = tensors[which]
    raw = tensor.clone().contiguous().view(-1).view(torch.uint8)
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    tensors[which] = (name, raw.view(tensor.dtype).view(tensor.shape))
    assert digest(tensors) != digest(named())


@given(st.integers(2, 6), st.integers(2, 6), st.data())
@settings(max_examples=100, deadline=None)
def test_values_that_change_places_change_it(rows: int, columns: int, data: st.DataObject) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    order = data.draw(st.permutations(range(x.numel())))
    y = x.view(-1)[order].view(x.shape)
    assert (digest([("x", x)]) == digest([("x", y)])) == torch.equal(x, y)


def test_signs_that_change_places_change_it() -> None:
    x = torch.tensor([[1.5, -1.5, 2.0], [-1.5, 1.5, 3.0]])
    swaps = [x, x[[1, 0]], x[:, [1, 0, 2]], -x]
    assert len({digest([("x", s)]) for s in swaps}) == 4


def test_a_rectangle_whose_corners_change_places_changes_it() -> None:
    """Every row and every column keeps its sum: [[1, 0], [0, 1]] and [[0, 1], [1, 0]]."""
    for n in (2, 3, 64, 1024, 1500):
        x = torch.zeros(n, n)
        x[0, 0] = x[n - 1, n - 1] = 1
        y = torch.zeros(n, n)
        y[0, n - 1] = y[n - 1, 0] = 1
        assert digest([("x", x)]) != digest([("x", y)])


def test_names_shapes_and_types_are_part_of_it() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    others = [
        [("x", x)],
        [("y", x)],
        [("x", x.view(6, 4))],
        [("x", x.view(24))],
        [("x", x.view(torch.int32))],
        [("x", x[:3])],
        [("x", torch.cat([x, torch.zeros(1, 6)]))],
        [("x", x), ("y", torch.zeros(0))],
        [("x", x), ("y", torch.zeros(1))],
        [("x", torch.zeros_like(x))],
    ]
    assert len({digest(other) for other in others}) == len(others)
    a, b = torch.ones(2), torch.zeros(2)
    assert digest([("a", a), ("b", b)]) != digest([("a", b), ("b", a)])


def test_negative_zero_is_another_bit_pattern() -> None:
    assert digest([("x", torch.tensor([0.0]))]) != digest([("x", torch.tensor([-0.0]))])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_counts_wherever_a_tensor_begins_and_ends(dtype: torch.dtype) -> None:
    """Words are of 8 bytes: a tensor may begin between two, and leave a part of one at its end."""
    size = dtype.itemsize
    store = torch.randint(256, (3 * 8192 + 64,), dtype=torch.uint8, generator=torch.manual_seed(0))
    for first, n in [(0, 1), (1, 1), (1, 9), (3, 1024), (5, 8192 // size), (7, 2 * 8192 // size + 3)]:
        lies = store.view(dtype)[first : first + n]
        before = fingerprint("x", lies)
        assert before == fingerprint("x", lies.clone())
        raw = lies.clone().view(torch.uint8)
        for place in {0, 1, len(raw) // 2, max(len(raw) - 9, 0), len(raw) - 2, len(raw) - 1} & set(
            range(len(raw))
        ):
            for bit in (0, 7):
                raw[place] ^= 1 << bit
                assert fingerprint("x", raw.view(dtype)) != before
                raw[place] ^= 1 << bit
        assert fingerprint("x", raw.view(dtype)) == before


def test_a_processor_and_a_gpu_find_the_same() -> None:
    """Their sums are made by other kernels, in other pieces: learner and sampler may be on either."""
    words = torch.randint(-(2**63), 2**63 - 1, (40, 1024), generator=torch.manual_seed(1))
    weight = module._odd(1024, words.device)
    assert module._row_sums(words).equal((words * weight).sum(1))
    by_hand = [sum(int(w) * int(o) for w, o in zip(row, weight, strict=True)) for row in words[:3]]
    assert [s % 2**64 for s in module._row_sums(words[:3]).tolist()] == [s % 2**64 for s in by_hand]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_none_is_found_anywhere(dtype: torch.dtype, bad: float) -> None:
    for n in (1, 2, 15, 64, 65, 1000, 70_001):
        whole = torch.randn(n, 2, generator=torch.manual_seed(n)).to(dtype)
        for numbers in (whole[:, 0].clone(), whole[:, 1], whole):
            assert finite(numbers)
            for place in {0, n // 2, n - 1}:
                kept = numbers[place].clone()
                numbers[place] = bad
                assert not finite(numbers)
                numbers[place] = kept


def test_what_has_no_fractions_or_no_numbers_is_finite() -> None:
    for numbers in (torch.tensor(3), torch.tensor([True, False]), torch.zeros(0), torch.zeros(3, 0)):
        assert finite(numbers)
    assert finite(torch.tensor([torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max]))
    assert not finite(torch.tensor(torch.nan))
    assert not finite(torch.tensor([1 + 1j, complex(0, torch.inf)]))
