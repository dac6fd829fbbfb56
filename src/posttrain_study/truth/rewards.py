"""Rows on rewards: Bradley and Terry's likelihood on a graph of comparisons, and the best of n answers.

The likelihood is the loss of the methods table's reward model, whose head is here a separate number for
each answer. The best of n is not a method: its probabilities follow from those of single answers.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from posttrain.methods.table import REWARD
from posttrain.types import Outputs
from posttrain_study.truth import exact, preferences
from posttrain_study.truth.comparison import TruthRow, error
from posttrain_study.truth.world import World


def fit_scores(world: World, wins: preferences.Judge) -> exact.Answers:
    """Return the scores that minimise the reward model's loss; i was preferred to j wins[i, j] times."""
    batch = preferences.comparison_batch(world)
    end = torch.zeros_like(batch.mask).scatter(1, batch.length[:, None] - 1, True)
    pairs = torch.stack([wins[i, j] for i, j in preferences.ordered_pairs(world)])
    rows = torch.tensor(preferences.ordered_pairs(world)).flatten()

    def loss(scores: torch.Tensor) -> torch.Tensor:
        out = Outputs(
            logp=torch.zeros_like(batch.reward),
            entropy=torch.zeros_like(batch.reward),
            value=torch.where(end, scores[rows][:, None], torch.nan),
        )
        return preferences.expected_loss(REWARD, replace(batch, mask=end), out, pairs / pairs.sum())

    minimum = preferences.find_minimum(loss, torch.zeros(len(world.answers), dtype=torch.float64))
    return minimum - minimum[0]


def zermelo(wins: preferences.Judge) -> exact.Answers:
    """The same scores by Zermelo's iteration, e^s_i = Σ_j wins_ij / Σ_j (wins_ij + wins_ji)/(e^s_i + e^s_j).

    Source: Zermelo 1929; Hunter 2004, "MM algorithms for generalized Bradley-Terry models".
    """
    strength, met = torch.ones(len(wins), dtype=torch.float64), wins + wins.T
    for _ in range(5000):
        strength = wins.sum(1) / (met / (strength[:, None] + strength[None, :])).sum(1)
        strength = strength / strength[0]
    return strength.log()


def likelihood(world: World) -> Iterator[TruthRow]:
    """Yield rows on the reward model's minimum on a graph of comparisons, against its closed form."""
    section = (
        "Bradley and Terry's likelihood: a reward model's scores, of who was preferred to whom how often"
    )
    two = torch.zeros(4, 4, dtype=torch.float64)
    two[0, 1], two[1, 0] = 7.0, 3.0
    tree = two.clone()
    tree[1, 2], tree[2, 1], tree[1, 3], tree[3, 1] = 1.0, 4.0, 5.0, 2.0
    cycle = tree.clone()
    cycle[2, 3], cycle[3, 2], cycle[3, 0], cycle[0, 3] = 6.0, 1.0, 2.0, 2.0
    first, second, third = (math.log(odds) for odds in (3 / 7, 4.0, 2 / 5))
    cases = (
        ("two answers", two, [0.0, first], "the logarithm of the odds, here 7 wins to 3"),
        ("a tree of four", tree, [0.0, first, first + second, first + third], "their sums along the edges"),
        ("with a cycle", cycle, zermelo(cycle).tolist(), "Zermelo's iteration: no edge decides alone"),
    )
    for name, wins, truth, why in cases:
        scores = fit_scores(world, wins)[: len(truth)]
        yield TruthRow(
            section, name, "off", error(scores, torch.tensor(truth, dtype=torch.float64)), "-", why
        )


def best_of(p: exact.Answers, reward: exact.Answers, n: int) -> exact.Answers:
    """P(y is the best of n draws) = F(y)^n - F(below y)^n, F the probability of a reward that is not higher.

    Of answers of equal reward the later one in the list counts as the higher.

    >>> best_of(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), n=2)
    tensor([0.7500, 0.2500])
    """
    order = torch.argsort(reward, stable=True)
    F = p[order].cumsum(0)
    below = torch.cat([F.new_zeros(1), F[:-1]])
    return torch.zeros_like(p).index_put((order,), F**n - below**n)


def tilted_policy(p: exact.Answers, reward: exact.Answers, nats: float) -> exact.Answers:
    """p exp(R/β)/Z with β such that KL to p is `nats`: at that KL no distribution has more reward."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        candidate = (p.log() + reward * middle).softmax(0)
        low, high = (middle, high) if divergence(candidate, p) < nats else (low, middle)
    return (p.log() + reward * low).softmax(0)


def divergence(q: exact.Answers, p: exact.Answers) -> float:
    """KL(q ‖ p); an answer of probability 0 under q adds 0."""
    return float(torch.xlogy(q, q / p).sum())


def choosing(world: World) -> Iterator[TruthRow]:
    """Yield the gain of the best of n answers, and its KL from the policy."""
    section = "The best of n answers"
    level = torch.full((4096,), 1 / 4096, dtype=torch.float64)
    rising = torch.arange(1, 4097, dtype=torch.float64) / 4096
    cases = [
        (n, "", exact.chances(world), world.returns, "below the bound: two draws may be the same answer")
        for n in (2, 4, 16)
    ] + [
        (n, ", of 4096 answers", level, rising, "draws are hardly ever alike: the bound is the KL")
        for n in (4, 16)
    ]
    for n, of, p, R, why in cases:
        q = best_of(p, R, n)
        nats = divergence(q, p)
        quantities = {
            "gain": float((q - p) @ R),
            "most": float((tilted_policy(p, R, nats) - p) @ R),
            "KL": nats,
            "bound": math.log(n) - (n - 1) / n,
        }
        for quantity, number in quantities.items():
            yield TruthRow(section, f"n = {n}{of}", quantity, number, "-", why)
