"""filters: which tokens are kept, against slow formulas, and on however many ranks the rows lie."""

import itertools
import math
import threading
from collections.abc import Callable
from functools import partial

import numpy
import pytest
import torch

from posttrain.math import filters
from posttrain.math.masked import Mask

SEEDS = range(5)


def numbers(seed: int, rows: int = 6, columns: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """(numbers of either sign, NaN outside the mask; the mask)."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=g) < 0.7
    mask[0, 0] = True
    x = torch.randn(rows, columns, generator=g, dtype=torch.float64)
    return torch.where(mask, x, math.nan), mask


class Threads:
    """Sums over ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = threading.Barrier(size, timeout=20), list[torch.Tensor]()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.parts.append(x)
        self.barrier.wait()
        total = torch.stack(self.parts[:]).sum(0)
        if self.barrier.wait() == 0:
            self.parts.clear()
        self.barrier.wait()
        return total

    def max(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def on_ranks(rows: list[list[int]], select: Callable[..., Mask]) -> Mask:
    """select(rows, everywhere) on each rank; the masks one below the other, in the order of the rows."""
    ranks, out = Threads(len(rows)), [torch.empty(0)] * len(rows)

    def run(rank: int) -> None:
        out[rank] = select(torch.tensor(rows[rank], dtype=torch.long), ranks)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = torch.tensor([row for part in rows for row in part])
    return torch.cat(out)[order.argsort()]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 1 / 3, 0.5, 0.95, 1.0])
def test_top_entropy_is_numpys_quantile(seed: int, share: float) -> None:
    x, mask = numbers(seed)
    entropy = x.abs()
    kept = filters.top_entropy(mask, entropy=entropy, top_share=share)
    bound = numpy.quantile(entropy[mask].numpy(), 1 - share) - 1e-12  # it rounds where it is a token's own
    assert torch.equal(kept, mask & (entropy >= bound))


def test_the_share_of_all_is_every_token_and_none_is_the_largest() -> None:
    x, mask = numbers(0)
    assert torch.equal(filters.top_entropy(mask, entropy=x, top_share=1.0), mask)
    [place] = filters.top_entropy(mask, entropy=x, top_share=0.0).nonzero().tolist()
    assert x[tuple(place)] == x[mask].max()


def test_equal_entropies_share_their_fate() -> None:
    entropy, mask = torch.tensor([[1.0, 1.0, 1.0, 0.0, -0.0]]), torch.ones(1, 5, dtype=torch.bool)
    kept = filters.top_entropy(mask, entropy=entropy, top_share=0.2)
    assert kept.tolist() == [[True, True, True, False, False]]
    assert bool(filters.top_entropy(mask, entropy=entropy, top_share=0.8).all()), "0.0 and -0.0 are equal"


@pytest.mark.parametrize("seed", range(20))
def test_m2po_drops_the_fewest_of_eight_tokens(seed: int) -> None:
    """Every set of tokens that satisfies the bound, tried."""
    g = torch.Generator().manual_seed(seed)
    old, gen = (torch.randn(2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(2, 4, dtype=torch.bool)
    squares = (old - gen).square().flatten().tolist()
    for bound in (0.0, 0.01, 0.3, 1.0, 10.0):
        kept = filters.low_second_moment(mask, logp_old=old, logp_gen=gen, max_second_moment=bound)
        chosen = [x for x, keep in zip(squares, kept.flatten().tolist(), strict=True) if keep]
        fitting = [
            n
            for n in range(1, 9)
            if any(math.fsum(c) <= bound * n for c in itertools.combinations(squares, n))
        ]
        assert len(chosen) == max(fitting, default=0), seed
        assert sorted(chosen) == sorted(squares)[: len(chosen)]


def test_fresh_samples_lose_no_token_to_m2po() -> None:
    x, mask = numbers(1)
    assert torch.equal(
        filters.low_second_moment(mask, logp_old=x, logp_gen=x.clone(), max_second_moment=0.0), mask
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_mean_of_the_covariances_is_the_covariance(seed: int) -> None:
    (A, mask), (logp, _) = numbers(seed), numbers(seed + 100)
    logp = torch.where(mask, logp.nan_to_num(), math.nan)
    found = filters.covariances(A, logp, mask)[mask]
    wanted = numpy.cov(A[mask].numpy(), logp[mask].numpy(), ddof=0)[0, 1]
    assert float(found.mean()) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.5, 1.0])
def test_kl_cov_takes_the_top_of_the_sorted_list(share: float) -> None:
    (A, mask), (logp, _) = numbers(2), numbers(3)
    mask = mask & ~logp.isnan()
    of = filters.covariances(A, logp, mask)
    pulled = filters.top_covariance(A, logp, mask, share)
    count = math.ceil(share * int(mask.sum()))
    assert sorted(of[pulled].tolist(), reverse=True) == sorted(of[mask].tolist(), reverse=True)[:count]
    assert not bool((pulled & ~mask).any())


def band(seed: int = 4, **options: float) -> tuple[Mask, Mask, torch.Tensor, Callable[[torch.Tensor], Mask]]:
    """(mask, tokens within the bounds, covariances, the filter as a function of the draws)."""
    (A, mask), (logp, _) = numbers(seed, rows=30), numbers(seed + 1, rows=30)
    mask = mask & ~logp.isnan()
    of = filters.covariances(A, logp, mask)
    low, high = options.get("cov_low", 1.0), options.get("cov_high", 5.0)
    within = mask & (of >= low) & (of <= high)
    return (
        mask,
        within,
        of,
        lambda u: filters.clip_cov(mask, advantage=A, logp_old=logp, uniform=u, **options),
    )


def test_clip_cov_drops_its_share_of_the_update_on_average_and_only_within_the_bounds() -> None:
    mask, within, _, select = band(cov_low=0.2, cov_high=2.0, cov_share=0.05)
    assert 0 < int(within.sum()) < int(mask.sum())
    g = torch.Generator().manual_seed(0)
    dropped = []
    for _ in range(200):
        kept = select(torch.rand(mask.shape, generator=g, dtype=torch.float64))
        assert not bool((mask & ~kept & ~within).any())
        dropped.append(int((mask & ~kept).sum()))
    mean = 0.05 * int(mask.sum())
    deviation = math.sqrt(mean * (1 - mean / int(within.sum())) / 200)
    assert abs(sum(dropped) / 200 - mean) < 4 * deviation, "seed 0"


def test_a_share_of_none_is_every_token_and_a_share_too_large_is_all_of_the_band() -> None:
    mask, within, _, select = band(cov_share=0.0)
    assert torch.equal(select(torch.zeros(mask.shape, dtype=torch.float64)), mask)
    mask, within, _, select = band(cov_share=1.0, cov_low=0.2)
    assert torch.equal(select(torch.rand(mask.shape, dtype=torch.float64)), mask & ~within)


def test_draws_depend_on_the_row_and_not_on_its_place() -> None:
    g = torch.Generator().manual_seed(7)
    tokens, group = torch.randint(50, (8, 6), generator=g), torch.tensor([3, 3, 3, 3, 9, 9, 9, 9])
    mask = torch.rand(8, 6, generator=g) < 0.6
    mask[:, 0], mask[:, 1] = False, True
    whole = filters.uniform_draws(tokens, mask, group, (0, 1))
    assert bool(((whole > 0) == mask).all())
    assert len(set(whole[mask].tolist())) == int(mask.sum())
    order = torch.randperm(8, generator=g)
    wider = torch.nn.functional.pad(tokens, (0, 3), value=5)
    moved = filters.uniform_draws(
        wider[order], torch.nn.functional.pad(mask, (0, 3))[order], group[order], (0, 1)
    )
    assert torch.equal(moved[:, :6], whole[order])
    for other in ((0, 2), (1, 1)):
        assert not bool((filters.uniform_draws(tokens, mask, group, other) == whole)[mask].any())
    assert not bool((filters.uniform_draws(tokens, mask, group + 1, (0, 1)) == whole)[mask].any())


@pytest.mark.parametrize("rows", [[[4, 1, 0], [2, 3, 5]], [[5], [], [0, 1, 2, 3, 4]]], ids=["two", "three"])
def test_ranks_keep_the_tokens_of_one_process(rows: list[list[int]]) -> None:
    """The second rank of three has no rows at all."""
    (x, mask), (y, _), (z, _) = (numbers(seed) for seed in (5, 6, 7))
    mask = mask & ~y.isnan() & ~z.isnan()
    u = torch.rand(mask.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    columns = {"advantage": x, "logp_old": y, "logp_gen": z, "entropy": x.abs(), "uniform": u}
    of: dict[str, tuple[Callable[..., Mask], tuple[str, ...]]] = {
        "entropy": (partial(filters.top_entropy, top_share=0.3), ("entropy",)),
        "moment": (partial(filters.low_second_moment, max_second_moment=0.5), ("logp_old", "logp_gen")),
        "clip": (
            partial(filters.clip_cov, cov_share=0.2, cov_low=0.0),
            ("advantage", "logp_old", "uniform"),
        ),
        "pulled": (
            lambda mask, everywhere, **two: filters.top_covariance(
                mask=mask, share=0.3, everywhere=everywhere, **two
            ),
            ("advantage", "logp_old"),
        ),
    }
    for name, (function, names) in of.items():
        alone = function(mask, filters.HERE, **{n: columns[n] for n in names})
        assert 0 < int(alone.sum()) < int(mask.sum()), name

        def select(
            part: torch.Tensor,
            ranks: Threads,
            function: Callable[..., Mask] = function,
            names: tuple[str, ...] = names,
        ) -> Mask:
            return function(mask[part], ranks, **{n: columns[n][part] for n in names})

        assert torch.equal(on_ranks(rows, select), alone), name


@pytest.mark.parametrize("natural", [True, False], ids=["natural gradient", "gradient"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_covariance_is_the_change_of_entropy_to_the_first_order(seed: int, natural: bool) -> None:
    """A softmax over separate logits: ΔH = -η Cov(log π, A) + O(η²), and -η Cov(log π, π A).

    What is left over falls fourfold as η is halved.
    """
    g = torch.Generator().manual_seed(seed)
    z, A = torch.randn(2, 5, generator=g, dtype=torch.float64)
    p = z.softmax(-1)
    A = A - p @ A  # the advantage of the exact policy gradient
    step = A if natural else p * A

    def entropy(z: torch.Tensor) -> float:
        return float(-(z.softmax(-1) * z.log_softmax(-1)).sum())

    cov = float(p @ (p.log() * step) - (p @ p.log()) * (p @ step))
    rest = [entropy(z + eta * step) - entropy(z) + eta * cov for eta in (1e-3, 5e-4)]
    assert rest[0] / rest[1] == pytest.approx(4.0, rel=0.1)
    assert (entropy(z + 1e-6 * step) - entropy(z)) / 1e-6 == pytest.approx(-cov, abs=1e-4)
