"""Filters and the adaptive entropy bonus through the learner: the columns that it fills, and resuming."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.methods.build import build
from posttrain.types import Batch

Make = Callable[..., Any]
STEPS = {"one step": Steps(), "several": Steps(epochs=2, minibatches=2)}


def learner(llama: Make, name: str = "grpo", steps: Steps = Steps(), **options: Any) -> Learner:  # noqa: B008 - frozen
    return Learner(
        llama(0), build(name, options, horizon=16), optim=Optim(lr=0.01), steps=steps, temperature=0.9, seed=5
    )


def weights(made: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in made.model.parameters()])


@pytest.fixture
def batch(rows_of: Make) -> Batch:
    rows: Batch = rows_of(K=4, seed=3, dtype=torch.float32)
    return rows


@pytest.mark.parametrize("steps", ["one step", pytest.param("several", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "neutral",
    [
        {"filter": "top_entropy", "top_share": 1.0},
        {"filter": "clip_cov", "cov_share": 0.0},
        {"filter": "low_second_moment", "max_second_moment": 1e9},
        {"kl_from_old": 1.0, "kl_from_old_share": 0.0},
    ],
    ids=lambda options: str(next(iter(options.values()))),
)
def test_the_neutral_setting_is_the_plain_method_bit_for_bit(
    neutral: dict[str, Any], steps: str, llama: Make, batch: Batch
) -> None:
    """Where rows are scored before the update, from the same anchor."""
    plain, other = (learner(llama, steps=STEPS[steps], **options) for options in ({}, neutral))
    anchored = steps == "several" or "logp_old" in other.method.needs
    for _ in range(2):
        plain.update(replace(batch, logp_old=plain.score(batch).logp) if anchored else batch)
        other.update(batch)
    assert torch.equal(weights(plain), weights(other))


def test_a_filter_sees_the_entropy_before_the_first_step(llama: Make, batch: Batch) -> None:
    made = learner(llama, filter="top_entropy", top_share=0.3, steps=Steps(epochs=2))
    entropy = made.score(batch).entropy
    done = made.update(batch)
    assert done.batch.entropy is not None
    assert done.batch.filter_mask is not None
    assert torch.equal(done.batch.entropy, entropy)
    assert float(entropy[done.batch.filter_mask].min()) > float(
        entropy[batch.mask & ~done.batch.filter_mask].max()
    )
    kept, tokens = int(done.batch.filter_mask.sum()), int(batch.mask.sum())
    assert kept == 1 + int(0.3 * (tokens - 1))
    assert done.metrics["filter/kept"] == pytest.approx(kept / tokens)
    assert "filter/kept" not in learner(llama).update(batch).metrics


def test_draws_are_those_of_the_seed_and_the_update(llama: Make, batch: Batch) -> None:
    def dropped(made: Learner) -> torch.Tensor:
        kept = made.update(batch).batch.filter_mask
        assert kept is not None
        return batch.mask & ~kept

    options = {"filter": "clip_cov", "cov_low": 0.0, "cov_high": 100.0, "cov_share": 0.2}
    one, other = learner(llama, **options), learner(llama, **options)
    first = dropped(one)
    assert torch.equal(first, dropped(other))
    assert not torch.equal(first, dropped(one)), "the next update draws again"
    another = learner(llama, **options)
    another.seed = 6
    assert not torch.equal(first, dropped(another))


def test_resuming_keeps_alpha(llama: Make, batch: Batch) -> None:
    options = {"entropy_bonus": 0.02, "entropy_target": 3.0, "entropy_step": 0.01}
    whole, begun, resumed = (learner(llama, **options) for _ in range(3))
    for made in (whole, begun):
        assert made.update(batch).metrics["state/alpha"] == pytest.approx(0.03)
    resumed.restore(begun.tensors(), begun.state())
    ends = [made.update(batch).metrics for made in (whole, resumed)]
    assert ends[0] == ends[1]
    assert ends[0]["state/alpha"] == pytest.approx(0.04)
    assert ends[0]["state/entropy"] == ends[0]["entropy"]
    assert torch.equal(weights(whole), weights(resumed))


def test_the_bonus_that_is_steered_is_the_fixed_one_while_the_entropy_is_below(
    llama: Make, batch: Batch
) -> None:
    fixed = learner(llama, entropy_bonus=0.05)
    steered = learner(llama, entropy_bonus=0.05, entropy_target=9.0)
    above = learner(llama, entropy_bonus=0.05, entropy_target=0.01)
    for made in (fixed, steered, above):
        made.update(batch)
    assert torch.equal(weights(fixed), weights(steered))
    assert torch.equal(weights(fixed), weights(above)), "nothing was measured before the first update"
    after = replace(batch, reward=torch.zeros_like(batch.reward))  # no advantage: the bonus alone moves
    assert above.update(after).metrics["grad_norm"] == 0.0
    assert steered.update(after).metrics["grad_norm"] > 0.0
