"""Whole distributions of the policy against those of a reference, through the learner's own passes."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Optim
from posttrain.learner.reference import Reference
from posttrain.math import divergences, reduce
from posttrain.methods.build import build
from posttrain.methods.table import GKD
from posttrain.types import Batch, PerToken

Make = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("float64")


def with_prompts(batch: Batch, seed: int) -> Batch:
    """The batch with a prompt of its own length for each row's teacher; the second row's is missing."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (len(batch),), generator=g)
    lengths[1] = 0
    prompts = torch.randint(23, (len(batch), 9), generator=g)
    return replace(batch, teacher_prompt=prompts, teacher_prompt_length=lengths)


def by_hand(policy: Any, teacher: Any, batch: Batch, divergence: Any, temperature: float) -> PerToken:
    """The divergence at each trained token, row by row, by transformers' own forward passes."""
    out = torch.zeros_like(batch.logp_gen)
    for i, length in enumerate(batch.length.tolist()):
        places = batch.mask[i, :length].nonzero().flatten().tolist()
        if not places:
            continue
        tokens, shift, own = batch.tokens[i, :length], 0, batch.tokens[i, :length]
        if batch.teacher_prompt is not None:
            prompt = batch.teacher_prompt[i, : batch.teacher_prompt_length[i]]
            own = torch.cat([prompt, tokens[places[0] :]])
            shift = len(prompt) - places[0]
            if not len(prompt):
                continue
        logp = (policy(tokens[None]).logits[0] / temperature).log_softmax(-1)
        told = (teacher(own[None]).logits[0] / temperature).log_softmax(-1)
        for t in places:
            out[i, t] = divergence(logp[t - 1 : t], told[t + shift - 1 : t + shift])[0]
    return out


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("budget", [1, 40, 4096])
def test_a_step_has_the_loss_and_the_gradient_of_plain_forward_passes(
    told: bool, budget: int, llama: Make, rows_of: Make
) -> None:
    batch = rows_of(K=4, seed=3)
    # Equal rows are one state for the policy, and two for a teacher who is told more.
    first, second = (batch.group == batch.group[2]).nonzero().flatten()[:2].tolist()
    for column in (batch.tokens, batch.mask, batch.length):
        column[second] = column[first]
    batch = with_prompts(batch, seed=1) if told else batch
    plain, reference = llama(0).double(), llama(1).double()
    learner = Learner(
        copy.deepcopy(plain),
        GKD,
        reference=copy.deepcopy(reference),
        temperature=0.9,
        steps=Steps(microbatch_tokens=budget),
    )
    metrics = learner.forward_backward(batch).metrics
    grads = {m.name: m.grad for m in learner.masters.masters}

    taught = batch.mask
    if batch.teacher_prompt_length is not None:
        taught = taught & (batch.teacher_prompt_length > 0)[:, None]
    expected = by_hand(plain, reference, batch, divergences.jensen_shannon, 0.9)
    loss = (expected * reduce.per_token(taught)).sum()
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-9)
    loss.backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-7, atol=1e-10)


def with_teachers(batch: Batch, count: int = 2) -> Batch:
    """The batch with a teacher for each group, in turn; the first two rows of one group have others."""
    numbers = torch.unique(batch.group, return_inverse=True)[1] % count
    numbers[:2] = torch.tensor([1, 0])
    return replace(batch, teacher=numbers)


@pytest.mark.sample("40-True")
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("budget", [1, 40, 4096])
def test_rows_of_several_teachers_have_the_gradients_of_each_added_up(
    told: bool, budget: int, llama: Make, rows_of: Make
) -> None:
    """The teachers differ in size, and the microbatches hold rows of one or of both."""
    batch = with_teachers(rows_of(K=4, seed=3))
    batch = with_prompts(batch, seed=1) if told else batch
    teachers = [llama(1).double(), llama(2, hidden_size=24, vocab_size=29).double()]

    def learner(reference: Any, *others: Any) -> Learner:
        steps = Steps(microbatch_tokens=budget)
        return Learner(llama(0).double(), GKD, reference=reference, teachers=others, steps=steps)

    def taught(part: Batch) -> int:
        trained = (
            part.mask
            if part.teacher_prompt_length is None
            else part.mask & (part.teacher_prompt_length > 0)[:, None]
        )
        return int(trained.sum())

    both = learner(*copy.deepcopy(teachers))
    loss = both.forward_backward(batch).metrics["loss"]
    expected, sums = 0.0, [torch.zeros_like(m.grad) for m in both.masters.masters]
    for n, teacher in enumerate(teachers):
        part = batch.rows((batch.teacher == n).nonzero().flatten())
        alone, share = learner(teacher), taught(part) / taught(batch)
        expected += share * alone.forward_backward(replace(part, teacher=None)).metrics["loss"]
        sums = [total + share * m.grad for total, m in zip(sums, alone.masters.masters, strict=True)]
    assert loss == pytest.approx(expected, rel=1e-9)
    for m, total in zip(both.masters.masters, sums, strict=True):
        torch.testing.assert_close(m.grad, total, rtol=1e-7, atol=1e-10)


def test_one_of_several_teachers_for_all_rows_is_a_reference_bit_for_bit(llama: Make, rows_of: Make) -> None:
    batch, results = rows_of(K=3, seed=3), []
    for reference, others, number in ((1, (), None), (1, (2,), 0), (2, (1,), 1)):
        models = [llama(seed).double() for seed in (reference, *others)]
        learner = Learner(llama(0).double(), GKD, reference=models[0], teachers=models[1:])
        column = None if number is None else torch.full((len(batch),), number)
        metrics = learner.forward_backward(replace(batch, teacher=column)).metrics
        results.append([metrics["loss"], *(m.grad for m in learner.masters.masters)])
    for other in results[1:]:
        assert other[0] == results[0][0]
        assert all(torch.equal(a, b) for a, b in zip(other[1:], results[0][1:], strict=True))


def test_the_drawn_tokens_are_judged_by_the_teacher_of_their_row(llama: Make, rows_of: Make) -> None:
    """As `distill` reads them; the policy without its adapter is one of the teachers."""
    batch = with_teachers(rows_of(K=3, seed=4), count=3)
    teachers = [llama(1).double(), None, llama(2).double()]
    learner = Learner(llama(0).double(), GKD, reference=teachers[0], teachers=teachers[1:], lora=Lora(rank=2))
    logp = learner.score_reference(batch).logp
    for n, teacher in enumerate(teachers):
        rows = (batch.teacher == n).nonzero().flatten()
        alone = (
            Learner(teacher or llama(0).double(), GKD, reference=llama(0).double())
            .score(batch.rows(rows))
            .logp
        )
        torch.testing.assert_close(logp[rows], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.sample("40")
@pytest.mark.parametrize("budget", [1, 40, 4096])
def test_the_likeliest_tokens_of_a_teacher_are_worth_the_teacher_over_them(
    budget: int, llama: Make, rows_of: Make
) -> None:
    """Whether a model gives them in each pass, or they stand in the batch; and k = V is the whole."""
    batch, teacher, steps = rows_of(K=4, seed=3), llama(1).double(), Steps(microbatch_tokens=budget)
    logits = teacher(batch.tokens).logits.detach().roll(1, dims=1)  # of the token at each place
    logp, top = logits.log_softmax(-1).topk(6)
    served = replace(batch, teacher_top=top, teacher_logp=logp)
    results = []
    for rows, k in ((batch, 6), (served, 6), (batch, 23), (batch, 0)):
        learner = Learner(
            llama(0).double(), GKD, reference=copy.deepcopy(teacher), refresh=Reference(top_k=k), steps=steps
        )
        loss = learner.forward_backward(rows).metrics["loss"]
        results.append([torch.tensor(loss), *(m.grad for m in learner.masters.masters)])
    top_k, of_server, all_tokens, whole = results
    torch.testing.assert_close(of_server, top_k, rtol=1e-7, atol=1e-10)
    assert all(map(torch.equal, all_tokens, whole))
    assert float(top_k[0]) < float(whole[0])


def test_a_batch_without_the_tokens_of_a_served_teacher_is_refused(llama: Make, rows_of: Make) -> None:
    learner = Learner(llama(0).double(), GKD, brings_reference=True, refresh=Reference(top_k=6))
    with pytest.raises(ValueError, match=r"make it with session.batch\(groups\)"):
        learner.forward_backward(rows_of(K=3, seed=3))


def test_the_model_without_its_adapter_is_a_reference_like_any(llama: Make, rows_of: Make) -> None:
    """Also where the adapter is on the output head."""
    batch, lora = rows_of(K=3, seed=3), Lora(rank=2, targets=("q_proj", "lm_head"), init="gaussian")
    found = []
    for reference in (None, llama(0).double()):
        learner = Learner(llama(0).double(), GKD, reference=reference, lora=lora)
        with torch.no_grad():
            for n, p in enumerate(p for name, p in learner.model.named_parameters() if "lora_B" in name):
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(n))
        metrics = learner.forward_backward(batch).metrics
        found.append([metrics["loss"], *(m.grad for m in learner.masters.masters)])
    assert found[0][0] > 0.01
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_a_teacher_that_is_told_nothing_and_is_the_policy_has_nothing_to_teach(
    llama: Make, rows_of: Make
) -> None:
    """Its prompts are the rows' own, so that every divergence is 0, as is the gradient."""
    batch = rows_of(K=3, seed=4)
    starts = torch.where(batch.mask.any(-1), batch.mask.to(torch.uint8).argmax(-1), batch.length)
    batch = replace(batch, teacher_prompt=batch.tokens, teacher_prompt_length=starts)
    learner = Learner(llama(0).double(), GKD, reference=llama(0).double())
    metrics = learner.forward_backward(batch).metrics
    assert abs(metrics["loss"]) < 1e-12
    assert max(float(m.grad.abs().max()) for m in learner.masters.masters if m.grad is not None) < 1e-12


def test_the_exact_kl_of_a_policy_gradient_is_the_penalty_and_the_metric(llama: Make, rows_of: Make) -> None:
    """With rewards of 0 the penalty alone is left, β KL(π ‖ π_ref) at each state."""
    batch = rows_of(K=4, seed=5)
    batch = replace(batch, reward=torch.zeros_like(batch.reward))
    method = build("grpo", {"kl": "exact", "kl_in_loss": 0.3, "reduction": "per_token"}, horizon=16)
    plain, reference = llama(0).double(), llama(1).double()
    learner = Learner(copy.deepcopy(plain), method, reference=copy.deepcopy(reference))
    metrics = learner.update(batch).metrics
    exact = by_hand(plain, reference, batch, divergences.reverse_kl, 1.0)
    mean = float(exact.sum().detach() / batch.mask.sum())
    assert metrics["loss"] == pytest.approx(0.3 * mean, rel=1e-9)
    assert metrics["kl/ref"] == pytest.approx(mean, rel=1e-9)


@pytest.mark.full
def test_distillation_brings_the_policy_to_the_teacher(llama: Make, rows_of: Make) -> None:
    """On the states that it is given the divergence falls to a hundredth."""
    batch = rows_of(K=3, seed=6)
    learner = Learner(llama(0).double(), GKD, reference=llama(1).double(), optim=Optim(lr=0.01))
    losses = [learner.update(batch).metrics["loss"] for _ in range(150)]
    assert losses[-1] < 0.01 * losses[0]


def test_rows_that_a_teacher_is_told_nothing_about_are_not_trained(llama: Make, rows_of: Make) -> None:
    batch = with_prompts(rows_of(K=3, seed=7), seed=2)
    learner = Learner(llama(0).double(), GKD, reference=llama(1).double())
    computed = learner.update(batch).computed
    assert not computed[1]
    others = batch.mask.any(-1)
    others[1] = False
    assert computed[others].all()
    nothing = replace(batch, teacher_prompt_length=torch.zeros_like(batch.teacher_prompt_length))
    before = {n: p.clone() for n, p in learner.model.named_parameters()}
    learner.update(nothing)
    assert all(torch.equal(p, before[n]) for n, p in learner.model.named_parameters())


def test_a_critic_beside_an_adapter_does_not_hide_the_reference(llama: Make, rows_of: Make) -> None:
    """The reference is then the policy's own net, which has a critic, without its adapter."""
    policy = llama(0).double()
    method = build("ppo", {"kl": "exact", "kl_in_loss": 0.3}, horizon=16)
    learner = Learner(policy, method, critic=CriticModel(policy), lora=Lora(rank=2, init="gaussian"))
    metrics = [learner.update(rows_of(K=3, seed=3)).metrics for _ in range(2)]
    assert metrics[0]["kl/ref"] == pytest.approx(0.0, abs=1e-12)
    assert metrics[1]["kl/ref"] > 0
