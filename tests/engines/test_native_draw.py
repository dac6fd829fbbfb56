"""Drawing: the generator's known answers, the distribution drawn from, and the edges of inversion."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from posttrain.engines.native import draw as module
from posttrain.engines.native.cuda_graphs import Replay
from posttrain.engines.native.decode_kernel import load
from posttrain.engines.native.draw import CapturedDraws, _invert, filtered, stream_key, uniforms
from posttrain.types import RunError, Sampling

LAST = 1 - 2.0**-53


@pytest.fixture(params=["PyTorch", "compiled", "captured"])
def draw(request):
    """What draws: by PyTorch, by the kernel, and in a step that is recorded."""
    if request.param == "captured":
        return lambda *args, **options: module.draw(*args, **options, captured=captured_draws(1 << 12))
    kernels = load(torch.float32, 64, 1) if request.param == "compiled" else None
    if request.param == "compiled" and kernels is None:
        pytest.skip("NOT RUN: no kernel is compiled here, which wants Linux and g++")
    return partial(module.draw, kernels=kernels)


def captured_draws(most: int, shapes: list[object] | None = None) -> CapturedDraws:
    """Draws whose replays run the step again, as a graph would."""

    def record(step: Replay) -> Replay:
        step()
        if shapes is not None:
            shapes.append(step)
        return step

    return CapturedDraws(most, torch.device("cpu"), record)


def test_captured_draws_are_those_of_draw_bit_for_bit() -> None:
    """Also where several draws share a row, and where fewer follow more and read what those left."""
    g, V, shapes = torch.Generator().manual_seed(0), 300, list[object]()
    captured = captured_draws(13, shapes)
    for count in (13, 5, 13, 1, 8, 7, 2):
        rows = sorted(torch.randint(count, (count,), generator=g).tolist()) if count % 2 else None
        logits = 3 * torch.randn(count, V, generator=g)
        u = torch.rand(count, generator=g, dtype=torch.float64).tolist()
        for temperatures in ([1.0], [0.7, 0.0], [0.0, 1.3, 1e-30]):
            sampling = [Sampling(temperature=temperatures[n % len(temperatures)]) for n in range(count)]
            want = module.draw(logits, sampling, u, rows=rows)
            assert module.draw(logits, sampling, u, rows=rows, captured=captured) == want
    assert len(shapes) == 8  # of 13, 8, 2 and 1 draws, with greedy ones and without


@pytest.mark.parametrize("shares", [{}, {1: {0: 0.5}}], ids=["filtered", "excluded"])
def test_draws_of_fewer_tokens_are_not_captured(shares: dict[int, dict[int, float]]) -> None:
    sampling = [Sampling(), Sampling() if shares else Sampling(top_k=2)]
    captured = captured_draws(2)
    options = torch.zeros(2, 5), sampling, [0.3, 0.9], shares
    assert module.draw(*options, captured=captured) == module.draw(*options)
    assert captured.logits is None


def test_captured_draws_find_logits_that_are_nan() -> None:
    captured = captured_draws(4)
    with pytest.raises(RunError, match="NaN"):
        module.draw(torch.full((2, 5), torch.nan), [Sampling()] * 2, [0.1, 0.2], captured=captured)
    assert module.draw(torch.zeros(1, 5), [Sampling()], [0.5], captured=captured)[0] == [2]


def expected_uniform(word: int) -> float:
    return (word >> 11) / 2**53


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]),
    ],
)
def test_uniform_is_splitmix64(key: int, words: list[int]) -> None:
    got = uniforms([key] * len(words), range(len(words)))
    assert got.tolist() == [expected_uniform(w) for w in words]


def test_uniform_accepts_any_64_bit_key_and_stays_below_one() -> None:
    for key in (0, 2**63, 2**64 - 1):
        drawn = uniforms([key] * 2000, range(2000))
        assert bool(((drawn >= 0) & (drawn < 1)).all())


def test_streams_differ_in_seed_task_and_sample_and_never_change() -> None:
    keys = {
        stream_key(seed, task, sample)
        for seed in range(12)
        for task in ("", "1", "a", "a\x00", "é", "\ud800")
        for sample in range(12)
    }
    assert len(keys) == 12 * 6 * 12
    # What a seed means must not change between releases: runs are resumed and repeated.
    assert stream_key(0, "add-3-4", 0) == 553817320235681090


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.6),
        Sampling(top_k=7),
        Sampling(top_p=0.8),
        Sampling(min_p=0.1),
        Sampling(temperature=1.7, top_k=20, top_p=0.9, min_p=0.05),
    ],
)
@pytest.mark.parametrize("V", [50, 700])
@pytest.mark.sample("*-50-*", "*-700-sampling5")
def test_draws_follow_the_distribution(lab, draw, sampling: Sampling, V: int) -> None:
    N = 4000
    logits = 2 * torch.randn(V, generator=torch.Generator().manual_seed(V))
    logits[[0, V // 2, V - 1]] = -torch.inf
    p = lab.filtered(logits.double(), sampling)
    u = uniforms([stream_key(7, "chi", V)] * N, range(N)).tolist()
    tokens, gen, policy = draw(logits.expand(N, V), [sampling] * N, u)
    seen = np.bincount(tokens, minlength=V)
    assert not seen[p == 0].any()
    likely = p * N >= 5
    groups = [*zip(seen[likely], p[likely] * N, strict=True), (seen[~likely].sum(), p[~likely].sum() * N)]
    groups = [(s, e) for s, e in groups if e > 0]
    chi2 = sum((s - e) ** 2 / e for s, e in groups)
    free = len(groups) - 1
    assert chi2 < free + 4 * math.sqrt(2 * free), (chi2, free)
    assert np.allclose(gen, np.log(p[tokens]), atol=1e-5)
    whole = (logits.double() / sampling.temperature).log_softmax(-1)
    assert np.allclose(policy, whole[tokens], atol=1e-5)


@pytest.mark.parametrize("V", [1, 2, 3, 255, 256, 257, 511, 512, 700])
def test_inversion_is_a_search_in_the_running_sum(draw, V: int) -> None:
    g = torch.Generator().manual_seed(V)
    N = 400
    logits = 3 * torch.randn(N, V, generator=g)
    u = torch.rand(N, generator=g, dtype=torch.float64)
    tokens, _, _ = draw(logits, [Sampling()] * N, u.tolist())
    compared = 0
    for row in range(N):
        running = logits[row].double().softmax(-1).numpy().cumsum()
        target = float(u[row]) * running[-1]
        if np.abs(running - target).min() > 1e-6:
            assert tokens[row] == np.searchsorted(running, target, side="right")
            compared += 1
    assert compared > 0.99 * N


@pytest.mark.parametrize("V", [1, 2, 255, 256, 257, 600, 1024])
def test_a_token_of_probability_zero_is_never_drawn(draw, V: int) -> None:
    edges = [0.0, 2.0**-53, 0.5, LAST]
    for live in {0, V // 2, V - 1}:
        logits = torch.full((len(edges), V), -torch.inf)
        logits[:, live] = 1.0
        tokens, gen, policy = draw(logits, [Sampling()] * len(edges), edges)
        assert tokens == [live] * len(edges)
        assert gen == policy == [0.0] * len(edges)
    if V > 2:  # mass at both ends, none between
        logits = torch.full((2, V), -torch.inf)
        logits[:, 0] = logits[:, -1] = 0.0
        assert draw(logits, [Sampling()] * 2, [0.0, LAST])[0] == [0, V - 1]
        assert draw(logits, [Sampling()] * 2, [0.5 - 2.0**-53, 0.5])[0] == [0, V - 1]
        # ... and the other way round: zeros at both ends.
        logits = torch.zeros(2, V).index_fill(1, torch.tensor([0, V - 1]), -torch.inf)
        assert draw(logits, [Sampling()] * 2, [0.0, LAST])[0] == [1, V - 2]


def test_masses_so_small_that_sums_round_are_still_drawn_within_the_support(draw) -> None:
    g = torch.Generator().manual_seed(0)
    V = 1500
    for spread in (1.0, 10.0, 40.0, 80.0):
        logits = spread * torch.randn(64, V, generator=g)
        logits[torch.rand(64, V, generator=g) < 0.7] = -torch.inf
        u = [0.0, LAST, 2.0**-53, 1 - 2.0**-24] * 16
        tokens = draw(logits, [Sampling()] * 64, u)[0]
        weight = (logits - logits.amax(-1, keepdim=True)).exp()
        assert bool((weight[torch.arange(64), tokens] > 0).all())


def test_a_target_just_before_a_block_does_not_hit_the_zeros_at_its_start() -> None:
    # Before the fifth block the running sum is 2 - 2^-52; with the block it rounds to 3, and 3 - 1 is
    # more than it was. A target of 2 - 2^-52 therefore lies before the block, by one rounding error.
    sums = [1.0, 1 - 2.0**-24, 2.0**-24 - 2.0**-48, 2.0**-48 - 2.0**-52, 1.0]
    met = 0
    for more in (0.125, 0.25, 0.375, 0.5, 0.625, 0.75):
        weight = torch.zeros(1, 6 * 256)
        for block, mass in enumerate([*sums, more]):
            weight[0, block * 256 + 100] = mass
        middle = round((2**54 - 2) / (3 + more))
        for m in range(middle - 2, middle + 3):
            u = torch.tensor([m * 2.0**-53], dtype=torch.float64)
            met += float(u) * (3 + more) == 2 - 2.0**-52
            assert int(_invert(weight, u)) % 256 == 100
    assert met


def test_greedy_takes_the_highest_and_says_so_at_temperature_one(draw) -> None:
    logits = 4 * torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    sampling = [
        Sampling(temperature=0.0, top_k=k, top_p=p) for k, p in [(0, 1), (3, 1), (0, 0.2), (9, 0.5), (1, 1)]
    ]
    tokens, gen, policy = draw(logits, sampling, [LAST] * 5)
    assert tokens == logits.argmax(-1).tolist()
    assert gen == [0.0] * 5
    assert np.allclose(policy, logits.double().log_softmax(-1).amax(-1))


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e-6])
def test_a_vanishing_temperature_is_greedy_and_finite(draw, temperature: float) -> None:
    logits = torch.tensor([[1.0, 30.0, -20.0, 29.0]])
    tokens, gen, policy = draw(logits, [Sampling(temperature=temperature)], [0.999])
    assert (tokens, gen, policy) == ([1], [0.0], [0.0])


def test_large_logits_over_a_low_temperature_lose_no_digits(draw) -> None:
    logits = torch.tensor([[1000.0, 1000.0 - 2.0**-10, 999.0]])
    sampling = Sampling(temperature=1e-3)
    _, gen, policy = draw(logits, [sampling], [0.99])
    [expected] = (logits.double() / sampling.temperature).log_softmax(-1)[:, 1].tolist()
    assert policy == gen == [pytest.approx(expected, abs=1e-6)]


@pytest.mark.parametrize("V", [5, 300])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_numbers_stop_the_run(draw, V: int, bad: float) -> None:
    logits = torch.zeros(2, V)
    for rows in (logits.clone().index_fill_(1, torch.tensor([1]), bad), torch.full((2, V), bad)):
        with pytest.raises(RunError, match=r"^sample: "):
            draw(torch.cat([logits, rows]), [Sampling()] * 4, [0.5] * 4)


@pytest.mark.full
def test_filters_equal_sorting_and_counting_row_by_row(lab) -> None:
    g = torch.Generator().manual_seed(5)
    samplings = [
        Sampling(top_k=k, top_p=p, min_p=m)
        for k in (0, 1, 5, 3000, 9999)
        for p in (1.0, 0.999, 0.5, 1e-9)
        for m in (0, 0.02)
    ]
    # 3 spreads: nuclei of a few tokens, of more than the first candidates, and of most of the vocabulary.
    for spread in (4.0, 1.0, 0.1):
        logits = spread * torch.randn(len(samplings), 3500, generator=g)
        kept = filtered(logits.exp(), samplings)
        for row, sampling in enumerate(samplings):
            expected = lab.filtered(logits[row].double(), sampling) > 0
            # Rounding may move the end of a large nucleus by a token.
            assert abs(int((kept[row] > 0).sum()) - expected.sum()) <= (sampling.top_p < 1)
            assert ((kept[row].numpy() > 0) != expected).sum() <= (sampling.top_p < 1)
            assert torch.equal(kept[row][kept[row] > 0], logits[row].exp()[kept[row] > 0])


def test_equal_probabilities_stay_or_go_together() -> None:
    weight = torch.tensor([[2.0, 1.0, 2.0, 1.0, 1.0]]).repeat(4, 1)
    kept = filtered(weight, [Sampling(top_k=1), Sampling(top_k=3), Sampling(top_p=0.2), Sampling(top_p=0.6)])
    twos, everything = [2.0, 0.0, 2.0, 0.0, 0.0], weight[0].tolist()
    assert kept.tolist() == [twos, everything, twos, everything]


def test_a_row_is_drawn_alike_whoever_stands_beside_it(draw) -> None:
    g = torch.Generator().manual_seed(8)
    logits = 2 * torch.randn(30, 3000, generator=g)
    samplings = [
        Sampling(temperature=t, top_k=k, top_p=p, min_p=m)
        for t, k, p, m in zip(
            [0, 0.5, 1, 2, 1] * 6, [0, 9, 0] * 10, [1, 0.5, 0.9, 0.999, 1] * 6, [0, 0.1] * 15, strict=True
        )
    ]
    u = torch.rand(30, generator=g, dtype=torch.float64).tolist()
    together = draw(logits, samplings, u)
    for row in range(30):
        alone = draw(logits[row : row + 1], [samplings[row]], [u[row]])
        assert alone == tuple([column[row]] for column in together)


def test_draws_of_one_row_are_those_of_as_many_copies_of_it(draw) -> None:
    logits = 3 * torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    rows = [0, 0, 0, 1, 2, 2, 2, 2]
    warmth = [0.7, 0.7, 1.3, 1.0, 0.0, 1.0, 1.0, 0.5]
    sampling = [Sampling(temperature=each, top_k=5 if n == 6 else 0) for n, each in enumerate(warmth)]
    u = [0.1, 0.9, 0.9, 0.5, 0.3, 0.2, 0.2, 0.99]
    excluded = {5: {7: 0.001}}
    shared, apart = draw(logits, sampling, u, excluded, rows=rows), draw(logits[rows], sampling, u, excluded)
    assert shared == apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_draws_what_pytorch_draws(dtype: torch.dtype) -> None:
    kernels, N, V = load(dtype, 64, 1), 300, 5000
    if kernels is None:
        pytest.skip("NOT RUN: no kernel is compiled here, which wants Linux and g++")
    g = torch.Generator().manual_seed(11)
    logits = (3 * torch.randn(N, V, generator=g)).to(dtype)
    sampling = [Sampling(temperature=n % 4 / 2) for n in range(N)]
    u = torch.rand(N, generator=g, dtype=torch.float64).tolist()
    tokens, gen, policy = module.draw(logits, sampling, u, kernels=kernels)
    wanted = module.draw(logits, sampling, u)
    # A number may fall within the rounding of a boundary: 5000 boundaries, each wrong by some 1e-7.
    same = [n for n in range(N) if tokens[n] == wanted[0][n]]
    assert len(same) > 0.98 * N
    for mine, theirs in ((gen, wanted[1]), (policy, wanted[2])):
        assert np.allclose([mine[n] for n in same], [theirs[n] for n in same], atol=2e-5)
