"""NEFTune in the learner: the promises hold with it, and nothing but a step is noisy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Optim
from posttrain.methods.table import SFT
from posttrain.types import Batch

Make = Callable[..., Any]


def noisy(
    llama: Make, alpha: float = 40.0, tokens: int = 0, seed: int = 0, lora: Lora | None = None
) -> Learner:
    """A learner in float64."""
    steps = Steps(neftune_alpha=alpha, microbatch_tokens=tokens)
    optim = Optim(lr=0.01, max_grad_norm=0)
    return Learner(llama(0).double(), SFT, optim=optim, steps=steps, seed=seed, lora=lora or Lora())


def flat(learner: Learner) -> torch.Tensor:
    return torch.cat([w.flatten() for _, w in learner.weights()]).detach()


@pytest.mark.usefixtures("float64")
def test_noisy_steps_are_the_same_however_they_are_cut(llama: Make, rows_of: Make) -> None:
    ends = []
    for alpha, tokens in ((40.0, 1000), (40.0, 1), (40.0, 14), (0.0, 1000)):
        learner = noisy(llama, alpha, tokens)
        for seed in range(3):
            learner.update(rows_of(seed))
        ends.append(flat(learner))
    for end in ends[1:3]:
        torch.testing.assert_close(end, ends[0], rtol=1e-7, atol=1e-9)
    assert float((ends[3] - ends[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("lora", [Lora(), Lora(rank=2)], ids=["full", "lora"])
def test_a_resumed_learner_has_the_noise_that_it_would_have_had(
    lora: Lora, llama: Make, rows_of: Make
) -> None:
    through, first, second = (noisy(llama, lora=lora) for _ in range(3))
    for seed in range(4):
        through.update(rows_of(seed))
    for seed in range(2):
        first.update(rows_of(seed))
    second.restore(first.tensors(), first.state())
    for seed in range(2, 4):
        second.update(rows_of(seed))
    assert torch.equal(flat(second), flat(through))


def test_scores_assessments_and_canaries_have_none(llama: Make, rows_of: Make) -> None:
    batch: Batch = rows_of(0)
    on, off = noisy(llama), noisy(llama, alpha=0.0)
    assert torch.equal(on.score(batch).logp, off.score(batch).logp)
    assert on.assess(batch) == off.assess(batch)
    assert on.canary([1, 2, 3]) == off.canary([1, 2, 3])
    plain = off.score(batch).logp
    assert torch.equal(off.update(batch).logp, plain)
    assert not torch.equal(on.update(batch).logp, plain)


def test_seeds_and_steps_have_noise_of_their_own(
    llama: Make, rows_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rows_of(0)
    assert not torch.equal(noisy(llama, seed=0).update(batch).logp, noisy(llama, seed=1).update(batch).logp)
    still = noisy(llama)
    monkeypatch.setattr(still.policy, "step", lambda rate: still.masters.zero_grad())
    assert not torch.equal(still.update(batch).logp, still.update(batch).logp)


def test_a_negative_alpha_is_refused() -> None:
    with pytest.raises(ValueError, match="neftune_alpha"):
        Steps(neftune_alpha=-1.0)
