"""Expert iteration, enumerated: where a round ends, and where rounds tend to."""

import random
from dataclasses import replace

import pytest
import torch

from posttrain.math import reduce, selection
from posttrain.methods.imitation import ExpertIteration
from posttrain.methods.table import EXPERT
from posttrain.types import Outputs
from posttrain_study.truth import TruthRow, exact, rewards
from posttrain_study.truth.answers import group_chances
from posttrain_study.truth.imitation import SIZE, fixed_points, iterate
from posttrain_study.truth.preferences import find_minimum
from posttrain_study.truth.soft import TabularPolicy
from posttrain_study.truth.world import World

COUNTED = replace(EXPERT, repeats=selection.counted)
RIGHT = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)


@pytest.fixture(scope="module")
def table(short: World) -> list[TruthRow]:
    """The sections of this file's questions; the whole table takes as long as all of these tests."""
    return [*fixed_points(short)]


@pytest.mark.parametrize("reduction", [reduce.per_row, reduce.per_sequence, reduce.per_token])
@pytest.mark.parametrize("repeats", [selection.distinct, selection.counted])
@pytest.mark.sample("distinct-per_token", "counted-per_row")
def test_a_round_ends_where_the_methods_own_loss_is_lowest(
    short: World, reduction: object, repeats: object
) -> None:
    """The closed form, against descent on the expectation of the loss through prepare, weight and loss."""
    method = replace(EXPERT, reduction=reduction, repeats=repeats)
    world = short.with_rewards(RIGHT)
    p = exact.chances(world)
    groups = world.groups(SIZE)
    batches = [method.prepare(world.batch(g)) for g in groups]

    def loss(logits: torch.Tensor) -> torch.Tensor:
        logp = replace(start, logits=logits).logp()
        total = logits.square().sum() * 1e-12  # keeps what is never met, and what goes to 0, finite
        for group, batch, chance in zip(groups, batches, group_chances(p, groups), strict=True):
            column = world.column(logp, group)
            out = Outputs(logp=column, entropy=torch.zeros_like(column))
            weight = method.weight(batch).double()
            total = total + chance * reduce.weighted_sum(method.loss(out, batch), weight, batch.mask)
        return total

    start = TabularPolicy.random(world, 1)
    found = replace(start, logits=find_minimum(loss, start.logits)).logp().sum(1).exp()
    torch.testing.assert_close(found, iterate(world, method, p), rtol=0, atol=1e-4)


def test_counted_answers_are_the_policy_given_that_it_is_right(short: World) -> None:
    """π(· | right), in one round and for good, whatever the groups' size: in a simulation too."""
    world, p = short.with_rewards(RIGHT), exact.chances(short)
    wanted = RIGHT * p / (RIGHT @ p)
    for rounds in (1, 2, 8):
        torch.testing.assert_close(iterate(world, COUNTED, p, rounds), wanted)
    seed = 3
    print("seed", seed)
    draw = random.Random(seed)
    seen = torch.zeros(4)
    for _ in range(20_000):
        kept = [y for y in draw.choices(range(4), p.tolist(), k=SIZE) if RIGHT[y]]
        for y in kept:
            seen[y] += 1 / len(kept)
    torch.testing.assert_close((seen / seen.sum()).double(), wanted, rtol=0, atol=0.01)


def test_distinct_answers_tend_to_all_that_are_right_alike(short: World) -> None:
    world, alike = short.with_rewards(RIGHT), RIGHT / 3
    torch.testing.assert_close(iterate(world, EXPERT, alike), alike)
    for start in (exact.chances(short), torch.tensor([0.001, 0.9, 0.049, 0.05], dtype=torch.float64)):
        torch.testing.assert_close(iterate(world, EXPERT, start, 200), alike)


def test_an_answer_that_is_never_drawn_never_comes_back(short: World) -> None:
    p = torch.tensor([0.0, 0.5, 0.25, 0.25], dtype=torch.float64)
    found = iterate(short.with_rewards(RIGHT), EXPERT, p, 50)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.5, 0.5], dtype=torch.float64))


@pytest.mark.parametrize("method", [COUNTED, EXPERT], ids=["counted", "distinct"])
def test_a_mean_over_the_tokens_of_an_answer_drifts_to_the_shortest(
    short: World, method: ExpertIteration
) -> None:
    world, p = short.with_rewards(RIGHT), exact.chances(short)
    shares = [
        float(iterate(world, replace(method, reduction=reduce.per_sequence), p, n)[-1]) for n in (1, 4, 200)
    ]
    assert short.answers[-1] == [1]
    assert shares == sorted(shares)
    assert shares[-1] > 0.99


def test_the_best_of_n_is_imitated_as_its_own_formula_has_it(short: World) -> None:
    p, best = exact.chances(short), replace(EXPERT, keep=selection.best, accept=0.0)
    torch.testing.assert_close(iterate(short, best, p), rewards.best_of(p, short.returns, SIZE))


def test_the_rows_on_fixed_points(table: list[TruthRow]) -> None:
    rows = {(r.name, r.quantity): r.number for r in table if r.section.startswith("Expert iteration")}
    assert rows["counted: 1 round", "off"] < 1e-10
    assert rows["counted: 16 rounds", "off"] < 1e-10
    assert rows["distinct: 16 rounds", "off"] < 0.01 < rows["distinct: 4 rounds", "off"]
    assert rows["distinct, per_sequence: 16 rounds", "off"] > 1
    assert rows["counted, per_sequence: 16 rounds", "shortest"] > 0.999
    assert rows["best of 4, rewards 1, 0.2, 0.5, 0: 4 rounds", "off"] < 1e-10
