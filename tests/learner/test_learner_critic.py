"""Critics, references that follow, and an update that stops early: by hand, and put back bit for bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from posttrain.learner.critic import Critic, CriticModel
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import MasterWeights, Optim, learning_rate
from posttrain.learner.reference import Follower, Reference
from posttrain.methods.table import A2C, GRPO, KLQ, LEARNED, PPO, PPO_PENALTY, RLOO
from posttrain.models.rounding import dither
from posttrain.models.tensor_files import read_tensors, write_tensors
from posttrain.types import Batch, RunError

Make = Callable[..., Any]
TEMPERATURE = 0.8
KL = replace(GRPO, kl_in_loss=0.1)
KINDS = ["shared", "own"]


def stirred(model: PreTrainedModel, body: PreTrainedModel | None = None) -> CriticModel:
    """A critic that has learnt something: its head is no longer 0."""
    critic = CriticModel(model, body)
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in critic.head.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=g))
    return critic


def make(llama: Make, kind: str, method: Any = A2C, *, double: bool = False, **parts: Any) -> Learner:
    """A learner with a critic on its own backbone (another one than the policy's) or on the policy's."""
    model, body = llama(0), llama(1) if kind == "own" else None
    if double:
        model, body = model.double(), None if body is None else body.double()
    parts = {"temperature": TEMPERATURE, "critic_optim": Optim(lr=0.01)} | parts
    return Learner(model, method, critic=stirred(model, body), **parts)


def flat(parameters: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in parameters])


def values_by_hand(below: PreTrainedModel, head: nn.Linear, batch: Batch) -> torch.Tensor:
    """w · h_{t-1} + b at every trained token, row by row with transformers' own forward."""
    out = []
    for i in range(len(batch)):
        n, T = int(batch.length[i]), batch.mask.shape[1]
        hidden = below.model(input_ids=batch.tokens[i : i + 1, :n], use_cache=False).last_hidden_state[0]
        V = hidden[:-1] @ head.weight[0] + head.bias
        out.append(nn.functional.pad(torch.where(batch.mask[i, 1:n], V, 0.0), (1, T - n)))
    return torch.stack(out)


# ---------------------------------------------------------------- what a critic says


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_state_before_each_token(kind: str, llama: Make, rows_of: Make) -> None:
    learner = make(llama, kind, double=True, microbatch_tokens=9)
    assert learner.critic is not None
    batch = rows_of(seed=3)
    below = llama(1 if kind == "own" else 0).double().eval()
    with torch.no_grad():
        wanted = values_by_hand(below, learner.critic.head, batch)
    said = learner.score(batch).value
    assert said is not None
    torch.testing.assert_close(said, wanted)
    assert float(wanted[batch.mask].std()) > 0.1
    torch.testing.assert_close(learner.update(batch).batch.value, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_new_head_says_0_and_computes_in_float32(dtype: torch.dtype, llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=3, dtype=torch.float32)
    for own in (False, True):
        model = llama(0).to(dtype)
        critic = CriticModel(model, llama(1).to(dtype) if own else None)
        assert critic.head.weight.dtype == torch.float32
        learner = Learner(model, A2C, critic=critic, critic_optim=Optim(lr=0.01))
        value = learner.score(batch).value
        assert value is not None
        assert not value.any()
        learner.update(batch)
        value = learner.score(batch).value
        assert value is not None
        assert value[batch.mask].any()
        assert not value[~batch.mask].any()


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_asked_for_alone_are_the_same(kind: str, llama: Make, rows_of: Make) -> None:
    """In a first and only pass nobody needs logp_old; with several epochs both come of one pass."""
    batch = rows_of(seed=2, dtype=torch.float32)
    alone = make(llama, kind).update(batch).batch
    beside = make(llama, kind, steps=Steps(epochs=2)).update(batch).batch
    assert alone.logp_old is None
    assert beside.logp_old is not None
    torch.testing.assert_close(alone.value, beside.value)


def test_a_critic_learns_the_returns(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=1, dtype=torch.float32, K=4)
    learner = make(llama, "own", LEARNED, optim=Optim(lr=0.0), critic_optim=Optim(lr=0.02))
    seen = [learner.update(batch).metrics for _ in range(40)]
    assert seen[-1]["value/loss"] < seen[0]["value/loss"] / 4
    assert seen[0]["value/explained"] < 0.2 < 0.7 < seen[-1]["value/explained"]


# ---------------------------------------------------------------- whom it moves


def gradients_by_hand(
    learner: Learner, batch: Batch, below: PreTrainedModel, head: nn.Linear, by_hand: Make, *, shared: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(of all below the head, of the head) of Σ w [-A log π + ½ · ½ (V - target)²], A and target fixed."""
    policy = below if shared else learner.model
    prepared = learner.method.prepare(replace(batch, value=values_by_hand(below, head, batch).detach()))
    weight = learner.method.weight(prepared)
    assert prepared.advantage is not None
    assert prepared.target is not None
    loss = (values_by_hand(below, head, batch) - prepared.target).square() / 4
    if shared:
        loss = loss - prepared.advantage * by_hand(policy, batch, TEMPERATURE)[0]
    (weight * torch.where(batch.mask, loss, 0.0)).sum().backward()
    body = [torch.zeros_like(p) if p.grad is None else p.grad for p in below.parameters()]
    assert head.weight.grad is not None
    assert head.bias.grad is not None
    return torch.cat([g.flatten() for g in body]), torch.cat([head.weight.grad[0], head.bias.grad])


def taken(learner: Learner, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the policy, the critic's body and the head, as the optimisers are given them."""
    found: dict[str, torch.Tensor] = {}
    assert learner.values is not None

    def keep(prefix: str, masters: MasterWeights) -> Callable[[float], None]:
        def step(rate: float) -> None:
            for master in masters.masters:
                assert master.grad is not None
                found[prefix + master.name] = master.grad.clone()

        return step

    policy, critic = "policy ", "critic "
    learner.policy.step = keep(policy, learner.policy.masters)  # type: ignore[method-assign]
    learner.values.step = keep(critic, learner.values.masters)  # type: ignore[method-assign]
    learner.update(batch)

    def joined(prefix: str) -> torch.Tensor:
        chosen = [g.flatten() for n, g in found.items() if n.startswith(prefix)]
        return torch.cat(chosen) if chosen else torch.zeros(0)

    return joined(policy), joined(critic + "body"), joined(critic + "head")


@pytest.mark.usefixtures("float64")
def test_a_shared_critics_gradient_reaches_the_backbone(llama: Make, rows_of: Make, by_hand: Make) -> None:
    still = {"optim": Optim(max_grad_norm=0.0), "critic_optim": Optim(max_grad_norm=0.0)}
    learner, batch = make(llama, "shared", double=True, microbatch_tokens=9, **still), rows_of(seed=3)
    below = llama(0).double().eval()
    head = stirred(below).head
    wanted, of_head = gradients_by_hand(learner, batch, below, head, by_hand, shared=True)
    policy, body, got_head = taken(learner, batch)
    torch.testing.assert_close(policy, wanted)
    torch.testing.assert_close(got_head, of_head)
    assert not len(body)
    without = make(llama, "shared", replace(A2C, value_weight=0.0), double=True, **still)
    assert not torch.allclose(taken(without, batch)[0], policy)


@pytest.mark.usefixtures("float64")
def test_an_own_critic_leaves_the_policys_gradient_alone(llama: Make, rows_of: Make, by_hand: Make) -> None:
    still = {"optim": Optim(max_grad_norm=0.0), "critic_optim": Optim(max_grad_norm=0.0)}
    learner, batch = make(llama, "own", double=True, microbatch_tokens=9, **still), rows_of(seed=3)
    below = llama(1).double().eval()
    head = stirred(below).head
    wanted, of_head = gradients_by_hand(learner, batch, below, head, by_hand, shared=False)
    policy, body, got_head = taken(learner, batch)
    trained = torch.cat(
        [torch.full((p.numel(),), "lm_head" not in n) for n, p in below.named_parameters()]
    ).bool()
    torch.testing.assert_close(body, wanted[trained])
    assert not wanted[~trained].any()
    torch.testing.assert_close(got_head, of_head)
    without = make(llama, "own", replace(A2C, value_weight=0.0), double=True, **still)
    alone, no_body, no_head = taken(without, batch)
    torch.testing.assert_close(alone, policy)
    assert not no_body.any()
    assert not no_head.any()


def test_a_critic_has_an_optimiser_of_its_own(llama: Make, rows_of: Make) -> None:
    """The first step of AdamW moves each weight by the rate; the two gradients are clipped apart."""
    batch = rows_of(seed=3, dtype=torch.float32)
    learner = make(
        llama,
        "own",
        optim=Optim(lr=0.001, max_grad_norm=1e-3),
        critic_optim=Optim(lr=0.05, max_grad_norm=0.0, schedule="linear"),
        total_steps=2,
    )
    assert learner.critic is not None
    assert learner.critic.body is not None
    output = learner.critic.body.get_output_embeddings().weight
    held, before = output.detach().clone(), [flat(x.parameters()) for x in (learner.model, learner.critic)]
    first = learner.update(batch).metrics
    moved = [flat(x.parameters()) - b for x, b in zip((learner.model, learner.critic), before, strict=True)]
    assert float(moved[0].abs().max()) == pytest.approx(0.001, rel=1e-2)
    assert float(moved[1].abs().max()) == pytest.approx(0.05, rel=1e-2)
    assert (first["lr"], first["value/lr"]) == (0.001, 0.05)
    assert min(first["grad_norm"], first["value/grad_norm"]) > 1e-3, "both as they were before clipping"
    assert learner.update(batch).metrics["value/lr"] == 0.025
    # The output head of its backbone is never run, so that it has neither gradient nor moments.
    assert torch.equal(output, held)
    assert not any("lm_head" in name for name in learner.tensors()["critic_optimizer"])


def test_a_critic_beside_an_adapter_trains_the_adapter_and_the_head_alone(llama: Make, rows_of: Make) -> None:
    model = llama(0)
    learner = Learner(
        model,
        PPO,
        critic=CriticModel(model),
        lora=Lora(rank=2),
        optim=Optim(lr=0.01),
        critic_optim=Optim(lr=0.01),
    )
    held = {n: p.detach().clone() for n, p in learner.model.named_parameters()}
    for seed in range(2):
        learner.update(rows_of(seed=seed, dtype=torch.float32))
    moved = {n for n, p in learner.model.named_parameters() if not torch.equal(p, held[n])}
    assert moved == {n for n in held if "lora_" in n}
    assert learner.critic is not None
    assert learner.critic.head.weight.any()


# ---------------------------------------------------------------- a critic that warms up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample("shared-*32", "own-*16")
def test_the_policy_stands_still_while_the_critic_warms_up(
    kind: str, dtype: torch.dtype, llama: Make, rows_of: Make
) -> None:
    """Weights, moments and schedule: after it the policy makes the steps of a shorter run."""
    model, optim = llama(0).to(dtype), Optim(lr=0.01, schedule="linear", warmup_steps=1)
    critic = stirred(model, llama(1).to(dtype) if kind == "own" else None)
    learner = Learner(
        model,
        PPO,
        critic=critic,
        optim=optim,
        critic_optim=replace(optim, lr=0.02),
        critic_warmup=2,
        steps=Steps(minibatches=2, microbatch_tokens=20),
        total_steps=8,
    )
    assert learner.values is not None
    clip, idle = learner.values.clip, []

    def watched() -> float:
        idle.append(all(m.grad is None and m.parameter.grad is None for m in learner.masters.masters))
        return clip()

    learner.values.clip = watched  # type: ignore[method-assign]
    start, states = learner.tensors(), []
    start = {name: {n: x.clone() for n, x in tensors.items()} for name, tensors in start.items()}
    for n in range(4):
        metrics = learner.update(rows_of(seed=n, dtype=torch.float32)).metrics
        tensors = learner.tensors()
        stands = all(torch.equal(x, start["trained"][n]) for n, x in tensors["trained"].items())
        states.append((stands, not tensors["optimizer"], metrics["value/warmup"], "grad_norm" in metrics))
        rates = [learning_rate(optim, s, 4) for s in (2 * n - 4, 2 * n - 3)]
        assert metrics.get("lr") == (pytest.approx(sum(rates) / 2) if n >= 2 else None)
        rates = [learning_rate(replace(optim, lr=0.02), s, 8) for s in (2 * n, 2 * n + 1)]
        assert metrics["value/lr"] == pytest.approx(sum(rates) / 2)
        assert metrics["value/grad_norm"] > 0
        if n == 1:
            assert not any(torch.equal(x, start["critic"][n]) for n, x in tensors["critic"].items())
    assert states == [(True, True, 1.0, False)] * 2 + [(False, False, 0.0, True)] * 2
    assert idle == [True] * 4 + [False] * 4
    assert learner.step_count == 8


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [PPO, KLQ], ids=["ppo", "klq"])
@pytest.mark.sample("ppo-shared", "klq-own")
def test_the_gradient_of_a_warm_up_is_the_critics(method: Any, kind: str, llama: Make, rows_of: Make) -> None:
    """As without it; and in whatever microbatches."""
    batch, parts = rows_of(seed=3), {"optim": Optim(max_grad_norm=0.0), "reference": llama(2).double()}
    parts["critic_optim"] = Optim(max_grad_norm=0.0)
    _, body, head = taken(make(llama, kind, method, double=True, **parts), batch)
    assert head.any()
    for budget in (1, 20, 4096):
        held = {"critic_warmup": 1, "microbatch_tokens": budget}
        warm = taken(make(llama, kind, method, double=True, **parts, **held), batch)
        assert not len(warm[0])
        torch.testing.assert_close(warm[1], body)
        torch.testing.assert_close(warm[2], head)


def test_a_warm_up_is_continued_by_a_resume(llama: Make, rows_of: Make) -> None:
    """To the bit, from before and from after its end."""
    parts = {"critic_warmup": 2, "steps": Steps(minibatches=2), "total_steps": 8}
    parts |= {"optim": Optim(lr=0.01, schedule="linear"), "critic_optim": Optim(lr=0.02, schedule="cosine")}
    straight = make(llama, "shared", **parts)
    for n in range(4):
        straight.update(rows_of(seed=n, dtype=torch.float32))
    for cut in (1, 3):
        first, second = (make(llama, "shared", **parts) for _ in range(2))
        for n in range(cut):
            first.update(rows_of(seed=n, dtype=torch.float32))
        second.restore(first.tensors(), first.state())
        for n in range(cut, 4):
            second.update(rows_of(seed=n, dtype=torch.float32))
        assert second.state() == straight.state()
        for name, tensors in straight.tensors().items():
            assert all(torch.equal(x, second.tensors()[name][n]) for n, x in tensors.items()), name


def test_a_penalty_does_not_follow_a_policy_that_stands_still(llama: Make, rows_of: Make) -> None:
    """KL(π_old ‖ π) is 0 in a warm-up, which would halve β each time."""
    learner = make(llama, "own", PPO_PENALTY, critic_warmup=3, steps=Steps(epochs=2), optim=Optim(lr=1e-6))
    batch = rows_of(seed=1, dtype=torch.float32)
    betas = [learner.update(batch).metrics["state/beta"] for _ in range(4)]
    assert betas == [1.0, 1.0, 1.0, 0.5]


def test_the_halves_of_a_step_warm_up_too(llama: Make, rows_of: Make) -> None:
    learner, batch = make(llama, "shared", critic_warmup=1), rows_of(seed=1, dtype=torch.float32)
    before = flat(learner.model.parameters())
    with pytest.raises(RunError, match=r"^loss: .* from out\.value"):
        learner.forward_backward(batch, lambda out, batch: -out.logp)
    learner.forward_backward(batch)
    assert "lr" not in learner.optim_step()
    assert torch.equal(flat(learner.model.parameters()), before)
    learner.forward_backward(batch, lambda out, batch: -out.logp)
    learner.optim_step()
    assert not torch.equal(flat(learner.model.parameters()), before)


def test_a_method_without_a_critic_has_no_warm_up(llama: Make) -> None:
    with pytest.raises(ValueError, match="needs values"):
        Learner(llama(0), GRPO, critic_warmup=1)


# ---------------------------------------------------------------- an update that stops early


def test_a_target_kl_ends_the_update_when_a_step_finds_it_exceeded(llama: Make, rows_of: Make) -> None:
    batch, optim = rows_of(seed=1, dtype=torch.float32), Optim(lr=0.01)

    def run(target: float) -> tuple[Learner, list[float], float]:
        learner = Learner(llama(0), GRPO, optim=optim, steps=Steps(epochs=6, target_kl=target))
        found, step = [], learner.step

        def watched(rows: Batch) -> Any:
            done = step(rows)
            found.append(done[2]["kl/old"])
            return done

        learner.step = watched  # type: ignore[method-assign]
        return learner, found, learner.update(batch).metrics["steps"]

    _, all_of_them, steps = run(0.0)
    assert steps == len(all_of_them) == 6
    assert all_of_them == sorted(all_of_them)
    assert all_of_them[0] == pytest.approx(0, abs=1e-9)
    for last in range(1, 5):
        target = (all_of_them[last - 1] + all_of_them[last]) / 2
        learner, found, steps = run(target)
        assert steps == len(found) == last + 1, "the step that finds it exceeded is the last"
        assert learner.step_count == last + 1
        assert found == all_of_them[: last + 1]
    assert run(1e9)[2] == 6
    assert run(1e-12)[2] == 2, "the first step of an update finds no distance"


def test_the_count_of_steps_is_shown_where_there_could_be_several(llama: Make, rows_of: Make) -> None:
    batch = rows_of(seed=1, dtype=torch.float32)
    assert "steps" not in Learner(llama(0), GRPO).update(batch).metrics
    assert Learner(llama(0), GRPO, steps=Steps(minibatches=2)).update(batch).metrics["steps"] == 2


# ---------------------------------------------------------------- a reference that follows


def test_an_average_in_bfloat16_loses_no_small_step(llama: Make) -> None:
    """w_n = w + (w_0 - w) keep^n; each step is far below half a unit in bfloat16's last place."""
    model = llama(0).bfloat16()
    start = {n: dither(n, p) for n, p in model.named_parameters()}
    goal = {n: p * 1.01 + 1e-4 for n, p in start.items()}
    follower = Follower(model, Reference(refresh_every=1, keep=0.99))
    naive = {n: p.detach().clone() for n, p in model.named_parameters()}
    for update in range(1, 101):
        follower.after(update, goal.items())
        for n, p in naive.items():
            p.lerp_(goal[n].bfloat16(), 1 - 0.99)
    far, lost = 0.0, 0.0
    for n, p in model.named_parameters():
        wanted = goal[n] + (start[n] - goal[n]) * 0.99**100
        torch.testing.assert_close(follower.average[n], wanted, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(p.float(), wanted, rtol=2**-8, atol=1e-6)
        far += float((follower.average[n] - start[n]).abs().sum())
        lost += float((naive[n].float() - start[n]).abs().sum())
    assert lost < 0.5 * far, "in bfloat16 alone it would hardly have moved"


def test_a_refresh_is_due_every_so_many_updates(llama: Make, rows_of: Make) -> None:
    """keep = 0 copies the policy: the next update's logp_ref is its own logp_old."""
    learner = Learner(
        llama(0),
        KL,
        optim=Optim(lr=0.02),
        steps=Steps(epochs=2),
        reference=llama(0),
        refresh=Reference(refresh_every=2),
    )
    found = []
    for seed in range(5):
        batch = learner.update(rows_of(seed=seed, dtype=torch.float32)).batch
        assert batch.logp_ref is not None
        found.append(torch.equal(batch.logp_ref, batch.logp_old))
    assert found == [True, False, True, False, True]
    fixed = Learner(llama(0), KL, optim=Optim(lr=0.02), reference=llama(0))
    start = flat(fixed.reference.parameters()) if fixed.reference else None
    fixed.update(rows_of(seed=0, dtype=torch.float32))
    assert fixed.follower is None
    assert fixed.reference is not None
    assert torch.equal(flat(fixed.reference.parameters()), start)


def test_a_reference_follows_the_masters_and_not_their_rounded_copy(llama: Make, rows_of: Make) -> None:
    learner = Learner(
        llama(0).bfloat16(),
        KL,
        optim=Optim(lr=1e-5),
        reference=llama(0).bfloat16(),
        refresh=Reference(refresh_every=1, keep=0.5),
    )
    start = {n: p.clone() for n, p in learner.masters.tensors().items()}
    learner.update(rows_of(seed=0, dtype=torch.float32))
    assert learner.follower is not None
    for name, master in learner.masters.tensors().items():
        torch.testing.assert_close(
            learner.follower.average[name], (start[name] + master) / 2, rtol=0, atol=1e-7
        )
        assert name == "lm_head.weight" or not torch.equal(start[name], master)


# ---------------------------------------------------------------- put back


PARTS: dict[str, dict[str, Any]] = {
    "shared": {"method": PPO},
    "own": {"method": PPO},
    "own in bfloat16, with a control": {"method": PPO_PENALTY},
    "shared, with running averages": {"method": replace(PPO, running_scale=0.5)},
    "a reference that follows": {"method": replace(KL, running_baseline=0.5)},
}


def whole(llama: Make, kind: str) -> Learner:
    models = [llama(n).bfloat16() if "bfloat16" in kind else llama(n) for n in (0, 1, 2)]
    parts: dict[str, Any] = {"method": PARTS[kind]["method"]}
    if kind == "a reference that follows":
        parts |= {"reference": models[2], "refresh": Reference(refresh_every=1, keep=0.7)}
    else:
        body = models[1] if kind.startswith("own") else None
        parts |= {"critic": CriticModel(models[0], body), "critic_optim": Optim(lr=0.02)}
    steps = Steps(epochs=2, minibatches=2, microbatch_tokens=15)
    return Learner(models[0], optim=Optim(lr=0.01), steps=steps, total_steps=16, seed=5, **parts)


def bits(learner: Learner) -> dict[str, torch.Tensor]:
    return {f"{part}/{n}": x.clone() for part, held in learner.tensors().items() for n, x in held.items()}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.sample("shared", "own in bfloat16*")
def test_all_that_a_learner_holds_is_put_back_bit_for_bit(
    kind: str, llama: Make, rows_of: Make, tmp_path: Path
) -> None:
    batches = [rows_of(seed, dtype=torch.float32) for seed in range(3)]
    straight, half, other = (whole(llama, kind) for _ in range(3))
    for batch in batches[:2]:
        straight.update(batch)
    half.update(batches[0])
    for name, tensors in half.tensors().items():
        write_tensors(tmp_path / f"{name}.safetensors", tensors)
    other.update(batches[2])
    held = {name: read_tensors(tmp_path / f"{name}.safetensors") for name in half.tensors()}
    other.restore(held, half.state())
    assert other.state() == half.state()
    last = other.update(batches[1])
    wanted, got = bits(straight), bits(other)
    assert wanted.keys() == got.keys()
    assert [n for n in wanted if not torch.equal(wanted[n], got[n])] == []
    assert other.state() == straight.state()
    assert other.state()["method"].keys() == PARTS[kind]["method"].start.keys()
    parts = {n.split("/")[0] for n in wanted}
    assert parts == {"trained", "optimizer"} | (
        {"reference"} if "reference" in kind else {"critic", "critic_optimizer"}
    )
    assert last.metrics


@pytest.mark.parametrize("part", ["critic", "critic_optimizer"])
@pytest.mark.sample("critic_optimizer")
def test_what_is_not_put_back_would_show(part: str, llama: Make, rows_of: Make) -> None:
    """The test above could otherwise pass with a critic that makes no difference."""
    batches = [rows_of(seed, dtype=torch.float32) for seed in range(3)]
    straight, half = whole(llama, "own"), whole(llama, "own")
    fresh = {name: dict(x) for name, x in whole(llama, "own").tensors().items()}
    for batch in batches[:2]:
        straight.update(batch)
    held = {name: {n: x.clone() for n, x in given.items()} for name, given in straight.tensors().items()}
    half.restore({**held, part: fresh[part]}, straight.state())
    for learner in (straight, half):
        learner.update(batches[2])
    assert not torch.equal(flat(straight.critic.parameters()), flat(half.critic.parameters()))


def test_a_checkpoint_without_the_critic_or_of_another_is_refused(llama: Make, rows_of: Make) -> None:
    own, shared = whole(llama, "own"), whole(llama, "shared")
    for learner in (own, shared):
        learner.update(rows_of(seed=0, dtype=torch.float32))
    held = own.tensors()
    for part in ("critic", "critic_optimizer"):
        with pytest.raises(KeyError, match=part):
            own.restore({n: x for n, x in held.items() if n != part}, own.state())
    with pytest.raises(KeyError):
        own.restore(shared.tensors(), shared.state())
    with pytest.raises(KeyError, match="unknown parameter"):
        shared.restore({**held, "critic": shared.tensors()["critic"]}, shared.state())
    follows = whole(llama, "a reference that follows")
    with pytest.raises(KeyError):
        follows.restore({n: x for n, x in follows.tensors().items() if n != "reference"}, follows.state())
    assert follows.follower is not None
    with pytest.raises(KeyError):
        follows.follower.restore({})


# ---------------------------------------------------------------- what does not fit


def test_parts_that_do_not_fit_one_another_are_refused(llama: Make) -> None:
    model = llama(0)
    with pytest.raises(ValueError, match="is given a critic, and no other method is"):
        Learner(model, PPO)
    with pytest.raises(ValueError, match="is given a critic, and no other method is"):
        Learner(model, RLOO, critic=CriticModel(model))
    with pytest.raises(ValueError, match="compares with a reference policy and none was given"):
        Learner(model, KL)
    Learner(llama(0), KL, lora=Lora(rank=2))


@pytest.mark.parametrize(
    ("made", "bad", "said"),
    [
        (Critic, {"lr": -1.0}, "lr must be 0 or more"),
        (Critic, {"max_grad_norm": -1.0}, "max_grad_norm must be 0 or more"),
        (Critic, {"path": "x"}, "reads no path"),
        (Reference, {"refresh_every": -1}, "refresh_every must be 0"),
        (Reference, {"keep": 1.0}, r"keep must lie in \[0, 1\)"),
        (Reference, {"keep": -0.1}, r"keep must lie in \[0, 1\)"),
        (Steps, {"target_kl": -0.1}, "target_kl must be 0"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(made: Any, bad: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        made(**bad)
