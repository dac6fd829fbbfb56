"""The natural step against the full Fisher matrix of a model small enough to write it down."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.func import functional_call, hessian

from posttrain.learner import trust_region
from posttrain.learner.critic import CriticModel
from posttrain.learner.forward import forward
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Optim
from posttrain.learner.trust_region import Trust, TrustRegion, flat
from posttrain.math import kl, reduce, trust
from posttrain.methods.table import METHODS
from posttrain.types import Batch, RunError

TRPO, GAE = METHODS["trpo"].method, METHODS["trpo_gae"].method
CRITICS = {"none": TRPO, "shared": GAE, "own": GAE}
"""Kinds of critics, with the method that has them."""
Make = Callable[..., Any]
TEMPERATURE = 0.9


def small(llama: Make, seed: int = 0) -> Any:
    """A model of some hundred weights."""
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
    return llama(seed, **sizes, num_key_value_heads=1).double()


def critic_on(model: Any, kind: str, llama: Make) -> CriticModel | None:
    """A critic of this kind that has learnt something: its head is no longer 0."""
    if kind == "none":
        return None
    critic = CriticModel(model, llama(1).to(model.dtype) if kind == "own" else None)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(3))
    return critic


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in learner.model.parameters()])


def region_of(learner: Learner, batch: Batch) -> TrustRegion:
    return TrustRegion(
        learner.model, batch, temperature=TEMPERATURE, microbatch_tokens=learner.microbatch_tokens
    )


def full_fisher(region: TrustRegion) -> torch.Tensor:
    """The Hessian at 0 of the mean KL from the present weights, by differentiating it twice."""

    def distance(step: torch.Tensor) -> torch.Tensor:
        moved = dict(zip(region.named, region._unflat(step), strict=True))
        moved = {name: p.detach() + moved[name] for name, p in region.named.items()}
        total = torch.zeros((), dtype=step.dtype)
        for *_, packed in region.parts:
            before = region.net(packed).detach().log_softmax(-1)
            after = functional_call(region.net, moved, (packed,)).log_softmax(-1)
            total = total + kl.exact(before, after).sum()
        return total / region.count

    size = sum(p.numel() for p in region.parameters)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found: torch.Tensor = hessian(distance)(torch.zeros(size, dtype=torch.float64))
    return found


@pytest.mark.usefixtures("float64")
def test_a_product_is_that_with_the_whole_matrix(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=1, K=3, idle=False)
    learner = Learner(small(llama), TRPO, trust=Trust(), steps=Steps(microbatch_tokens=20))
    region = region_of(learner, batch)
    assert len(region.parts) > 1
    F = full_fisher(region)
    torch.testing.assert_close(F, F.T)
    assert float(torch.linalg.eigvalsh(F).min()) > -1e-12
    v = torch.randn(len(F), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(region.fisher_product(v), F @ v)


@pytest.mark.usefixtures("float64")
def test_the_products_may_see_some_tasks_only_and_the_bound_sees_all(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=1, groups=4, K=3, idle=False)
    learner = Learner(small(llama), TRPO)
    numbers = torch.unique(batch.group)
    some = batch.rows(torch.isin(batch.group, numbers[::2]).nonzero().flatten())
    shared = {"temperature": TEMPERATURE, "microbatch_tokens": 1000}
    half = TrustRegion(learner.model, batch, **shared, fisher_every=2)
    only = TrustRegion(learner.model, some, **shared)
    v = torch.randn(sum(p.numel() for p in half.parameters), dtype=torch.float64)
    torch.testing.assert_close(half.fisher_product(v), only.fisher_product(v))
    assert half.count == int(batch.mask.sum()) > only.count


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", CRITICS)
def test_the_step_is_the_natural_gradient_as_far_as_the_kl_allows(
    kind: str, llama: Make, rows_of: Make
) -> None:
    """With a critic too, whose loss moves the critic alone, by AdamW."""
    batch, method, model = rows_of(seed=1, K=3, idle=False), CRITICS[kind], small(llama)
    config = Trust(max_kl=1e-6, iterations=400, damping=0.1, fisher_every=1)
    learner = Learner(
        model,
        method,
        trust=config,
        temperature=TEMPERATURE,
        critic=critic_on(model, kind, partial(small, llama)),
        critic_optim=Optim(lr=0.01),
    )
    scored = learner.score(batch)
    prepared = method.prepare(replace(batch, logp_old=scored.logp, value=scored.value))
    region = region_of(learner, prepared)
    F = full_fisher(region)
    F += config.damping * torch.eye(len(F), dtype=torch.float64)
    before, moved = weights(learner), dict(learner.tensors().get("critic", {}))
    moved = {name: x.clone() for name, x in moved.items()}
    done = learner.update(batch)
    step = weights(learner) - before
    for name, x in moved.items():
        assert float((learner.tensors()["critic"][name] - x).abs().max()) == pytest.approx(0.01, rel=1e-3)
    # The gradient of the surrogate at the old weights, by plain differentiation.
    for p in learner.model.parameters():
        p.grad = None
    with torch.no_grad():
        region.move(-step)
    out = learner_gradient(learner, method, prepared)
    wanted = torch.linalg.solve(F, -out)
    wanted *= trust.step_length(wanted, F @ wanted, config.max_kl)
    assert done.metrics["trust/share"] == 1.0
    # The solver stops where the residual is 1e-5 of the gradient.
    assert float((step - wanted).norm() / wanted.norm()) < 1e-4
    # So small a step is where the quadratic model holds; its damping leaves some of the bound unused.
    assert 0.0 < done.metrics["trust/kl"] <= config.max_kl


def learner_gradient(learner: Learner, method: Any, batch: Batch) -> torch.Tensor:
    """The gradient of Σ weight · -r A, without a critic's loss."""
    logp = forward(learner.net, batch, TEMPERATURE).logp
    assert batch.logp_old is not None
    assert batch.advantage is not None
    surrogate = -(logp - batch.logp_old).exp() * batch.advantage
    loss = reduce.weighted_sum(surrogate, method.weight(batch).to(logp), batch.mask)
    parameters = list(learner.model.parameters())
    return flat(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)


@pytest.mark.usefixtures("float64")
def test_entropy_of_excluded_tokens_leaves_gain_finite(
    llama: Make, rows_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id without a token, whose logit is -inf: p log p is 0 there."""
    batch = rows_of(seed=1, K=3, idle=False)
    method = replace(TRPO, entropy_bonus=0.1)
    learner = Learner(small(llama), TRPO, temperature=TEMPERATURE)
    prepared = method.prepare(replace(batch, logp_old=learner.score(batch).logp))
    region, head = region_of(learner, prepared), trust_region.output_head
    unused = torch.tensor([min({*range(64)} - {*batch.tokens.flatten().tolist()})])

    def masked(model: Any) -> Any:
        return lambda hidden: head(model)(hidden).index_fill(-1, unused, -torch.inf)

    monkeypatch.setattr(trust_region, "output_head", masked)
    still = torch.zeros(sum(p.numel() for p in region.parameters), dtype=torch.float64)
    assert region.judge(method, method.weight(prepared), still) == (0.0, 0.0)


@pytest.mark.parametrize("max_kl", [1e-4, 1e-2, 0.5])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", CRITICS)
@pytest.mark.sample("none-0-0.0001", "shared-0-0.01", "own-0-0.5")
def test_no_step_exceeds_the_bound_and_each_gains(
    kind: str, seed: int, max_kl: float, llama: Make, rows_of: Make
) -> None:
    """In float32, over several updates; the KL is measured again from outside."""
    model = llama(seed)
    learner = Learner(
        model,
        CRITICS[kind],
        trust=Trust(max_kl=max_kl),
        temperature=TEMPERATURE,
        critic=critic_on(model, kind, llama),
        critic_optim=Optim(lr=0.02),
    )
    shares = []
    for number in range(3):
        batch = rows_of(seed=10 * seed + number, dtype=torch.float32, K=4)
        region = region_of(learner, batch)
        before = [region.net(packed).detach().log_softmax(-1) for *_, packed in region.parts]
        metrics = learner.update(batch).metrics
        after = [region.net(packed).detach().log_softmax(-1) for *_, packed in region.parts]
        distance = sum(float(kl.exact(b, a).sum()) for b, a in zip(before, after, strict=True)) / region.count
        assert distance <= max_kl * (1 + 1e-4)
        assert metrics["trust/kl"] == pytest.approx(distance, rel=1e-3, abs=1e-7)
        assert metrics["trust/gain"] > 0
        shares.append(metrics["trust/share"])
    assert all(shares), "a step that nothing allows would make this test say nothing"


def test_a_step_on_an_adapter_moves_the_adapter_alone(llama: Make, rows_of: Make) -> None:
    learner = Learner(llama(0), TRPO, trust=Trust(), lora=Lora(rank=2, alpha=4.0))
    held = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
    metrics = learner.update(rows_of(seed=1, dtype=torch.float32, K=4)).metrics
    moved = {n for n, p in learner.model.named_parameters() if not torch.equal(p, held[n])}
    assert metrics["trust/share"] > 0
    # B = 0 at the start, so that A has no gradient and no curvature yet.
    assert moved == {n for n in held if "lora_B" in n}


def test_a_critic_warms_up_before_the_first_natural_step(llama: Make, rows_of: Make) -> None:
    model = llama(0)
    learner = Learner(model, GAE, trust=Trust(), critic=CriticModel(model), critic_warmup=1)
    before = weights(learner)
    shares = []
    for seed in range(2):
        metrics = learner.update(rows_of(seed=seed, dtype=torch.float32, K=4)).metrics
        shares.append(metrics.get("trust/share"))
        assert torch.equal(weights(learner), before) == (seed == 0)
    assert learner.critic is not None
    assert learner.critic.head.weight.any()
    assert shares[0] is None
    assert shares[1] > 0


def test_a_gradient_of_the_critic_that_is_not_finite_moves_nothing(llama: Make, rows_of: Make) -> None:
    """Neither the critic nor the policy, whose own gradient is finite."""
    model = llama(0)
    learner = Learner(model, GAE, trust=Trust(), critic=critic_on(model, "shared", llama))
    assert learner.values is not None
    before, head = weights(learner), learner.values.masters.tensors()
    head = {name: x.clone() for name, x in head.items()}
    learner.values.clip = lambda: math.inf  # type: ignore[method-assign]
    with pytest.raises(RunError, match="the weights were left"):
        learner.update(rows_of(seed=1, dtype=torch.float32, K=4))
    assert torch.equal(weights(learner), before)
    assert all(torch.equal(x, head[n]) for n, x in learner.values.masters.tensors().items())
    assert learner.step_count == 0


def test_rewards_that_are_all_alike_move_nothing(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=1, dtype=torch.float32, K=4)
    learner = Learner(llama(0), TRPO, trust=Trust())
    before = weights(learner)
    metrics = learner.update(replace(batch, reward=torch.zeros_like(batch.reward))).metrics
    assert torch.equal(weights(learner), before)
    assert metrics["trust/share"] == 0.0


def test_what_cannot_be_is_refused(llama: Make) -> None:
    with pytest.raises(ValueError, match="float32"):
        Learner(llama(0).bfloat16(), TRPO, trust=Trust())
    with pytest.raises(ValueError, match="float32"):
        Learner(llama(0), TRPO, trust=Trust(), steps=Steps(gradient_checkpointing=True))
    for bad in (
        {"max_kl": 0.0},
        {"damping": -1.0},
        {"shrink": 1.0},
        {"iterations": 0},
        {"fisher_every": 0},
        {"tries": 0},
    ):
        with pytest.raises(ValueError, match="must"):
            Trust(**bad)
