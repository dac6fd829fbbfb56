"""Promises 1 and 2 through the learner: no split of a step matters, and no garbage is read."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.methods.build import build
from posttrain.methods.table import METHODS
from posttrain.types import PROBE, Batch, Method

EXTRAS: dict[str, Any] = {"kl_in_loss": 0.2, "kl_in_reward": 0.1, "entropy_bonus": 0.05}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name, row in METHODS.items() if row.has_loss
} | {f"{name} + kl and entropy": (name, EXTRAS) for name in ("reinforce", "grpo", "gspo", "ppo")}
VARIANTS |= {
    # The rows here are far from their sampler, and by default each of their tokens would be dropped.
    "m2po": ("m2po", {"max_second_moment": 99.0}),
    "kpop": ("kpop", {"max_kl": 99.0, "weight_kl": 99.0}),
    "grpo + exact kl": ("grpo", {"kl": "exact", "kl_in_loss": 0.3}),
    "grpo, entropy": ("grpo", {"filter": "top_entropy", "top_share": 0.4, "entropy_target": 9.0}),
    "grpo, clip_cov": ("grpo", {"filter": "clip_cov", "cov_low": 0.0, "cov_share": 0.3}),
    "grpo, kl_cov": ("grpo", {"kl_from_old": 1.0, "kl_from_old_share": 0.3}),
}
"""What methods are tried with: as published, with every penalty, and with some of the tokens chosen."""
VARIANTS |= {f"{name} + observations": (name, {"observation_weight": 0.3}) for name in ("grpo", "ppo")}
ONE_OF_EACH_LOSS = (
    *("pretrain", "reinforce", "reinforce_pp", "ppo", "grpo", "gspo + kl and entropy", "max_rl", "distill"),
    *("klq", "expert_iteration", "dpo", "orpo", "kto", "online_dpo", "reward", "process_reward"),
    *("gkd", "grpo + exact kl", "grpo, clip_cov"),
)


def every_method(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on every method in `make test-all`, and on one of each kind of loss in `make test`."""
    sampled = pytest.mark.sample(*ONE_OF_EACH_LOSS)(test)
    return pytest.mark.parametrize("variant", list(VARIANTS))(sampled)


Make = Callable[..., Any]


def with_probes(batch: Batch) -> Batch:
    """The batch with two of its rows as probes, of which only methods that ask for probes know."""
    version = batch.version.clone()
    version[(batch.mask.any(-1)).nonzero().flatten()[1:3]] = PROBE
    return replace(batch, version=version)


def parts_of(batch: Batch) -> torch.Tensor:
    """Scores of twenty parts of the reward, more than there are tokens in a row; a sixth are missing."""
    g = torch.Generator().manual_seed(len(batch))
    parts = torch.randint(6, (len(batch), 20), generator=g).double()
    return torch.where(parts == 5, math.nan, parts)


def alike(batch: Batch, short: int) -> Batch:
    """The batch with rows that say what the first of their group says, but for its last `short` tokens."""
    tokens = batch.tokens.clone()
    for group in torch.unique(batch.group).tolist():
        first, *others = (batch.group == group).nonzero().flatten().tolist()
        for i in others:
            same = max(int(min(batch.length[first], batch.length[i])) - short, 0)
            tokens[i, :same] = tokens[first, :same]
    return replace(batch, tokens=tokens)


def method_of(variant: str) -> Method:
    name, options = VARIANTS[variant]
    return build(name, options, horizon=16)


def build_critic(policy: Any, method: Method) -> CriticModel | None:
    """A critic on the policy's backbone, with a head that says something, for a method that needs one."""
    if not method.needs & {"value", "head"}:
        return None
    critic = CriticModel(policy)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-1, 1, critic.head.weight.numel()))
    return critic


class InMemoryData:
    """A learner that says with which gradient it would move, and stays."""

    def __init__(self, llama: Make, method: Method, budget: int = 4096, **steps: Any) -> None:
        policy = llama(0).double()
        self.learner = Learner(
            policy,
            method,
            reference=llama(1).double(),
            critic=build_critic(policy, method),
            temperature=0.9,
            steps=Steps(microbatch_tokens=budget, **steps),
        )
        self.taken: list[torch.Tensor] = []
        self.learner._move = self._hold

    def _hold(self, loss: float) -> dict[str, float]:
        parts = [self.learner.policy, *([self.learner.values] if self.learner.values else [])]
        masters = [m for part in parts for m in part.masters.masters]
        # Where the head alone is read, no loss comes to the output head.
        idle = sum(m.grad is None for m in masters)
        assert idle == ("head" in self.learner.method.needs)
        grads = [m.zeros() if m.grad is None else m.grad for m in masters]
        self.taken.append(torch.cat([g.flatten() for g in grads]))
        for part in parts:
            part.masters.zero_grad()
        return {}

    def gradient(self, batch: Batch) -> torch.Tensor:
        self.learner.method_state = dict(self.learner.method.start)
        self.learner.update_count = 0  # a filter's draws are those of the update
        self.learner.update(batch)
        return self.taken.pop()


def padded(batch: Batch, columns: int) -> Batch:
    """The batch with columns on the right that mean nothing."""

    def wider(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.ndim != 2:
            return x
        filler = False if x.dtype == torch.bool else math.nan if x.is_floating_point() else 5
        return torch.cat([x, x.new_full((len(x), columns), filler)], 1)

    return replace(batch, **{f.name: wider(getattr(batch, f.name)) for f in fields(batch)})


@every_method
@pytest.mark.usefixtures("float64")
@given(data=st.data())
@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
@pytest.mark.sample(every=12)
def test_any_budget_order_and_padding_give_the_same_gradient(
    variant: str, data: st.DataObject, llama: Make, rows_of: Make
) -> None:
    """Budget 1 is a row a pass, without any packing; half of the batches have a system message, and of some
    the rows of a group go on alike, or are the same."""
    rows, system = data.draw(st.integers(0, 30), label="rows"), data.draw(st.sampled_from([0, 8]))
    batch = with_probes(rows_of(K=4, seed=rows, system=system))
    batch = alike(batch, data.draw(st.sampled_from([0, 2, 99]), label="short"))
    held = InMemoryData(llama, method_of(variant))
    whole = held.gradient(batch)
    held.learner.passes.budget = data.draw(st.sampled_from([1, 4, 9, 17, 30]), label="budget")
    order = torch.tensor(data.draw(st.permutations(range(len(batch))), label="order"))
    split = held.gradient(padded(batch.rows(order), data.draw(st.integers(0, 3), label="padding")))
    assert float(whole.norm()) > 1e-3
    assert float((split - whole).norm() / whole.norm()) < 1e-9


@pytest.mark.usefixtures("float64")
def test_parts_of_the_reward_give_one_gradient_however_a_step_is_cut(llama: Make, rows_of: Make) -> None:
    """And another one than their whole."""
    batch = rows_of(K=4, seed=3)
    parted = replace(batch, parts=parts_of(batch))
    held = InMemoryData(llama, method_of("gdpo"))
    whole = held.gradient(parted)
    assert float((held.gradient(batch) - whole).norm() / whole.norm()) > 0.1
    for budget in (1, 30, 60):
        held.learner.passes.budget = budget
        split = held.gradient(parted.rows(torch.arange(len(batch) - 1, -1, -1)))
        assert float((split - whole).norm() / whole.norm()) < 1e-9


@every_method
@pytest.mark.usefixtures("float64")
def test_every_call_of_the_loss_sees_no_more_than_its_rows(
    variant: str, llama: Make, rows_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of the test above are really cut: with budget 1 there is a pass for each trained row.

    Or for each group, where a loss is about its rows together. Metrics are means over tokens, over answers or
    over groups, by what the method's losses are about: they do not depend on the microbatches.
    """
    batch = with_probes(rows_of(K=4, seed=3))
    whole = InMemoryData(llama, method_of(variant)).learner.update(batch).metrics
    method, seen = method_of(variant), []
    kind, real = type(method), type(method).loss

    def loss(self: Any, out: Any, batch: Batch) -> Any:
        seen.append(len(batch))
        return real(self, out, batch)

    monkeypatch.setattr(kind, "loss", loss)
    cut = InMemoryData(llama, method, budget=1).learner.update(batch)
    weighs = (method.weight(cut.batch) != 0).any(-1)
    alone = [1] * int(weighs.sum())
    together = [int((batch.group[weighs] == g).sum()) for g in dict.fromkeys(batch.group[weighs].tolist())]
    assert seen == (together if method.unit == "group" else alone)
    assert len(together) > 1
    assert max(together) > 1
    assert whole == {key: pytest.approx(value, rel=1e-9, abs=1e-12) for key, value in cut.metrics.items()}


@every_method
def test_recomputing_activations_changes_no_gradient(variant: str, llama: Make, rows_of: Make) -> None:
    batch = rows_of(K=4, seed=4)
    plain = InMemoryData(llama, method_of(variant)).gradient(batch)
    assert float(plain.norm()) > 1e-3
    again = InMemoryData(llama, method_of(variant), gradient_checkpointing=True).gradient(batch)
    assert torch.equal(again, plain)


@every_method
def test_garbage_in_masked_slots_changes_no_bit(variant: str, llama: Make, rows_of: Make) -> None:
    """Through update, with columns that the learner fills, in float32."""
    batch = rows_of(K=4, seed=5, dtype=torch.float32)
    garbage = torch.tensor([math.nan, math.inf]).repeat(batch.mask.numel())[: batch.mask.numel()]
    after = []
    for filler in (torch.tensor(0.0), garbage.view_as(batch.mask)):
        spoilt = {
            f.name: torch.where(batch.mask, value, filler.to(value.dtype))
            for f in fields(batch)
            if isinstance(value := getattr(batch, f.name), torch.Tensor) and value.is_floating_point()
        }
        policy = llama(0)
        learner = Learner(
            policy,
            method_of(variant),
            reference=llama(1),
            critic=build_critic(policy, method_of(variant)),
            optim=Optim(lr=0.01),
            steps=Steps(microbatch_tokens=12),
        )
        done = learner.update(replace(batch, **spoilt))
        assert all(math.isfinite(v) for v in done.metrics.values())
        after.append((torch.cat([p.detach().flatten() for p in learner.model.parameters()]), done))
    (clean, expected), (weights, done) = after
    assert torch.equal(weights, clean)
    assert done.metrics == expected.metrics
    assert torch.equal(done.logp, expected.logp)


@every_method
def test_a_batch_with_nothing_to_train_is_an_error(variant: str, llama: Make, rows_of: Make) -> None:
    batch = rows_of(K=4, seed=6, dtype=torch.float32)
    policy = llama(0)
    critic = build_critic(policy, method_of(variant))
    learner = Learner(policy, method_of(variant), reference=llama(1), critic=critic)
    with pytest.raises(ValueError, match="nothing to train on"):
        learner.update(replace(batch, mask=torch.zeros_like(batch.mask)))
    assert learner.step_count == 0


def test_and_it_is_one_where_steps_are_dealt(llama: Make, rows_of: Make) -> None:
    batch = rows_of(K=4, seed=6, dtype=torch.float32)
    learner = Learner(llama(0), method_of("grpo"), steps=Steps(minibatches=2))
    with pytest.raises(ValueError, match="nothing to train on"):
        learner.update(replace(batch, mask=torch.zeros_like(batch.mask)))
