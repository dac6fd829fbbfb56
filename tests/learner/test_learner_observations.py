"""ECHO: the tokens of the environment are learnt next to the policy gradient, and counted nowhere else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.math.masked import observations
from posttrain.methods.build import build
from posttrain.methods.table import METHODS
from posttrain.types import Batch

Make = Callable[..., Any]
WEIGHT = 0.3


def made(
    llama: Make, weight: float, name: str = "grpo", dtype: torch.dtype = torch.float64, **steps: Any
) -> Learner:
    method = build(name, {"observation_weight": weight} if weight else {}, horizon=16)
    policy = llama(0).to(dtype)
    critic = CriticModel(policy) if "value" in method.needs else None
    return Learner(
        policy, method, critic=critic, optim=Optim(lr=0.01), temperature=0.9, steps=Steps(**steps), seed=3
    )


def gradient(learner: Learner, batch: Batch) -> torch.Tensor:
    """The gradient of a step on these rows, which is then forgotten."""
    learner.forward_backward(batch)
    masters = [m for part in learner._trained for m in part.masters.masters]
    flat = torch.cat([(m.zeros() if m.grad is None else m.grad).flatten() for m in masters])
    learner.forget_gradients()
    return flat


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("equal", [False, True], ids=["advantages", "no advantage"])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_the_added_gradient_is_that_of_fine_tuning_on_observations(
    name: str, equal: bool, llama: Make, rows_of: Make, by_hand: Make, flat_gradient: Make
) -> None:
    """λ times the mean of -log π over them, however the step is cut, and without any advantage too."""
    batch = rows_of(K=4, seed=3)
    if equal:
        batch = replace(batch, reward=torch.zeros_like(batch.reward))
    cut = [gradient(made(llama, WEIGHT, name, microbatch_tokens=n), batch) for n in (1, 17, 4096)]
    without = gradient(made(llama, 0.0, name), batch)
    assert (float(without.norm()) == 0) == equal
    plain, seen = llama(0).double().eval(), observations(batch.mask, batch.length)
    assert 3 < int(seen.sum()) < int(batch.length.sum() - batch.mask.sum())
    logp, _ = by_hand(plain, replace(batch, mask=seen), 0.9)
    (-WEIGHT * logp.sum() / seen.sum()).backward()
    expected = flat_gradient(plain)
    assert float(expected.norm()) > 1e-3
    for added in cut:
        assert float((added - without - expected).norm() / expected.norm()) < 1e-9


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_no_other_metric_counts_observations(name: str, llama: Make, rows_of: Make) -> None:
    """Nor the outputs: all are those of an update without, but for the loss and what follows from it."""
    batch = rows_of(K=4, seed=3)
    without, added = (made(llama, weight, name).update(batch) for weight in (0.0, WEIGHT))
    changed = {"loss", "grad_norm", "value/grad_norm", "observation/loss"}
    assert set(added.metrics) - set(without.metrics) == {"observation/loss"}
    kept = set(without.metrics) - changed
    assert {"entropy", "kl/old", "clip/fraction", "kl/mismatch", "ess", "advantage/zero"} <= kept
    for key in kept:
        assert added.metrics[key] == pytest.approx(without.metrics[key], rel=1e-9, abs=1e-12), key
    torch.testing.assert_close(added.logp, without.logp, rtol=0, atol=1e-12)
    torch.testing.assert_close(added.entropy, without.entropy, rtol=0, atol=1e-12)
    assert torch.equal(added.computed, without.computed)
    assert added.metrics["loss"] - without.metrics["loss"] == pytest.approx(
        WEIGHT * added.metrics["observation/loss"], rel=1e-9
    )
    assert added.metrics["observation/loss"] > 0.5, "random weights are surprised"


def test_a_weight_of_0_is_the_method_itself(rows_of: Make) -> None:
    method = build("grpo", {"observation_weight": 0.0}, horizon=16)
    assert method == METHODS["grpo"].method
    batch = rows_of(K=4, seed=3)
    ready = method.prepare(batch)
    assert ready.observed is None
    assert ready.predicted is batch.mask


def test_answers_of_one_turn_are_trained_to_the_bit_as_without(llama: Make, rows_of: Make) -> None:
    batch = rows_of(K=4, seed=5, turns=1, dtype=torch.float32)
    batch = replace(batch, length=batch.mask.shape[1] - batch.mask.flip(1).int().argmax(1))  # without tails
    ends = []
    for weight in (0.0, WEIGHT):
        learner = made(llama, weight, dtype=torch.float32, epochs=2, minibatches=2)
        metrics = [learner.update(batch).metrics for _ in range(2)]
        ends.append((metrics, [p.detach().clone() for p in learner.model.parameters()]))
    (plain, expected), (metrics, weights) = ends
    assert metrics == plain
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@pytest.mark.full
def test_an_environment_that_follows_from_the_actions_is_learnt(llama: Make, rows_of: Make) -> None:
    """No advantage anywhere: the cross-entropy falls towards the entropy of what is said, 0."""
    batch = rows_of(K=2, seed=3, groups=2, dtype=torch.float32)
    batch = replace(batch, reward=torch.zeros_like(batch.reward))
    learner = made(llama, 1.0, dtype=torch.float32)
    losses = [learner.update(batch).metrics["observation/loss"] for _ in range(60)]
    assert losses[0] > 1
    assert losses[-1] < 0.1


def test_a_loss_of_ones_own_has_no_observations(llama: Make, rows_of: Make) -> None:
    batch = rows_of(K=4, seed=3)
    norms = []
    for weight in (0.0, WEIGHT):
        learner = made(llama, weight)
        losses = learner.forward_backward(batch, lambda out, batch: -out.logp)
        assert "observation/loss" not in losses.metrics
        norms.append(losses.norms)
    assert norms[0] == norms[1]
