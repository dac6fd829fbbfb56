"""Filters, KL-Cov and the adaptive entropy bonus as parts of a method."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.math import filters
from posttrain.methods.build import build, described
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.types import Batch, Outputs, RunError, UserError

HORIZON = 16
Update = Callable[..., tuple[Batch, Outputs]]
Gradients = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


def policy_gradient(name: str, **options: Any) -> PolicyGradient:
    method = build(name, options, horizon=HORIZON)
    assert isinstance(method, PolicyGradient)
    return method


def refused(name: str, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        build(name, options, horizon=HORIZON)
    return str(error.value)


def prepared(method: PolicyGradient, batch: Batch) -> Batch:
    return method.prepare(replace(batch, state=dict(method.start)))


# ---------------------------------------------------------------- filters


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo_token", "reinforce_to_go", "ppo"])
def test_dropped_tokens_lose_their_policy_loss_alone(name: str, update: Update, gradients: Gradients) -> None:
    """The others keep theirs to the bit, so the divisor is that of all tokens; KL and entropy stay."""
    batch, out = update(seed=3)
    options = {"kl_in_loss": 0.3, "entropy_bonus": 0.1}
    kept = filters.top_entropy(batch.mask, entropy=batch.entropy, top_share=0.4)
    assert 0 < int(kept.sum()) < int(batch.mask.sum())
    plain, bare = (policy_gradient(name, **o) for o in (options, {}))
    held, held_bare = (policy_gradient(name, filter="top_entropy", top_share=0.4, **o) for o in (options, {}))
    whole, part = gradients(bare, batch, out)[1], gradients(held_bare, batch, out)[1]
    assert torch.equal(part, torch.where(kept, whole, 0.0))
    assert bool(whole[batch.mask & ~kept].any())
    penalties = gradients(plain, batch, out)[1] - whole
    torch.testing.assert_close(gradients(held, batch, out)[1] - part, penalties, rtol=1e-9, atol=1e-12)
    assert torch.equal(gradients(held, batch, out)[2], gradients(plain, batch, out)[2])
    assert torch.equal(gradients(held, batch, out)[3], gradients(plain, batch, out)[3])


def test_a_filter_is_asked_with_the_columns_that_it_names(update: Update) -> None:
    batch, _ = update(seed=1)
    said: dict[str, Any] = {}

    def told(mask, everywhere, advantage, logp_gen, uniform, entropy, logp_old, least=0.5):  # type: ignore[no-untyped-def]
        said.update(advantage=advantage, logp_gen=logp_gen, uniform=uniform, entropy=entropy, old=logp_old)
        return mask & (uniform >= least)

    method = policy_gradient("grpo", filter=told, least=0.25)
    assert method.needs == {"logp_old", "entropy", "uniform"}
    assert described(method)["filter"] == "told(least=0.25)"
    ready = prepared(method, batch)
    assert torch.equal(said["old"], batch.logp_old)
    assert torch.equal(said["advantage"], prepared(policy_gradient("grpo"), batch).advantage)
    assert ready.filter_mask is not None
    assert torch.equal(ready.filter_mask, batch.mask & (batch.uniform >= 0.25))


def test_a_filter_needs_no_column_that_it_does_not_name() -> None:
    assert policy_gradient("grpo").needs == frozenset()
    assert policy_gradient("grpo", filter="top_entropy").needs == {"entropy"}
    assert policy_gradient("grpo", filter="low_second_moment").needs == {"logp_old"}
    assert policy_gradient("ppo", filter="clip_cov").needs == {"logp_old", "uniform", "value"}


def test_mistakes_with_filters_name_their_key(tmp_path: Path) -> None:
    for name in ("gspo", "gmpo", "vespo"):
        assert refused(name, filter="top_entropy").startswith("method.filter: by_")
    assert refused("m2po", ratio="by_sequence").startswith("method.filter: by_sequence is one ratio")
    assert policy_gradient("gspo", ratio="by_sequence_token", filter="top_entropy").needs == {"entropy"}
    band = refused("grpo", filter="clip_cov", cov_low=3, cov_high=2)
    assert band.startswith("method.cov_low: no covariance lies between 3 and 2")
    assert refused("grpo", filter="top_entropy", top_share=1.5).startswith("method.top_share: ")
    assert refused("grpo", top_share=0.2).startswith("method.top_share: grpo does not read 'top_share'")
    code = tmp_path / "mine.py"
    code.write_text("def mine(mask, everywhere, entropies):\n    return mask\n")
    assert "mine does not fit filter" in refused("grpo", filter=f"{code}:mine")
    # What a filter may ask for, a surrogate may not.
    code.write_text("def other(log_ratio, advantage, entropy):\n    return log_ratio\n")
    assert "other does not fit surrogate" in refused("grpo", surrogate=f"{code}:other")


@pytest.mark.parametrize("answer", [lambda mask: mask.double(), lambda mask: mask[0], lambda mask: None])
def test_a_filter_that_returns_no_mask_is_an_error_of_one_line(answer: Any, update: Update) -> None:
    batch, _ = update(seed=1)
    method = policy_gradient("grpo", filter=lambda mask, everywhere: answer(mask))
    with pytest.raises(RunError, match=r"a filter returns a tensor of \[12, 7\] truth values") as error:
        prepared(method, batch)
    assert "\n" not in str(error.value)


def test_names_of_other_trainers_lead_to_the_keys() -> None:
    for other, key in {
        "top_entropy_quantile": "top_share",
        "use_adaptive_entropy": "entropy_target",
        "entropy_coef_delta": "entropy_step",
        "clip_cov_ratio": "cov_share",
        "kl_cov_ratio": "kl_from_old_share",
        "m2_threshold": "max_second_moment",
    }.items():
        message = refused("grpo", **{other: 0.2})
        assert f"method.{key}" in message or f"did you mean '{key}'" in message, message
    assert "filter = 'clip_cov'" in refused("clip_cov")


# ---------------------------------------------------------------- KL-Cov


def test_kl_cov_pulls_the_tokens_of_the_largest_covariance_alone(
    update: Update, gradients: Gradients
) -> None:
    """In plain Python: d/dlogp of β k3 is β (r - 1) at ⌈share · n⌉ tokens, over the divisor of all."""
    batch, out = update(seed=4)
    assert batch.logp_old is not None
    share, beta = 0.3, 0.7
    plain = policy_gradient("dapo")
    held = policy_gradient("dapo", kl_from_old=beta, kl_from_old_share=share)
    A = prepared(plain, batch).advantage
    assert A is not None
    places = batch.mask.nonzero().tolist()
    mean_A = sum(float(A[i, t]) for i, t in places) / len(places)
    mean_old = sum(float(batch.logp_old[i, t]) for i, t in places) / len(places)
    of = {(i, t): (float(A[i, t]) - mean_A) * (float(batch.logp_old[i, t]) - mean_old) for i, t in places}
    top = sorted(of, key=lambda place: -of[place])[: -int(-share * len(places) // 1)]
    wanted = gradients(plain, batch, out)[1].clone()
    for i, t in top:
        r = float((out.logp[i, t] - batch.logp_old[i, t]).exp())
        wanted[i, t] += beta * (r - 1) / len(places)
    torch.testing.assert_close(gradients(held, batch, out)[1], wanted, rtol=1e-9, atol=1e-12)


def test_kl_cov_of_no_token_is_the_plain_method_and_of_all_the_plain_penalty(
    update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=5)
    none = policy_gradient("grpo", kl_from_old=1.0, kl_from_old_share=0.0)
    every, usual = (policy_gradient("grpo", kl_from_old=1.0, **o) for o in ({"kl_from_old_share": 1}, {}))
    for one, other in ((none, policy_gradient("grpo")), (every, usual)):
        for a, b in zip(gradients(one, batch, out), gradients(other, batch, out), strict=True):
            assert torch.equal(a, b)
    assert "kl_from_old_share" not in described(every)
    assert refused("grpo", kl_from_old_share=0.1).startswith(
        "method.kl_from_old_share: nothing reads kl_from_old_share while kl_from_old is 0"
    )


# ---------------------------------------------------------------- the adaptive entropy bonus


def test_alpha_follows_the_target_by_hand(update: Update, gradients: Gradients) -> None:
    """Below 0.5 nats it rises by 0.25, at it and above it falls, and never below 0."""
    batch, out = update(seed=2)
    method = policy_gradient("grpo", entropy_bonus=0.25, entropy_target=0.5, entropy_step=0.25)
    batch = replace(batch, state=dict(method.start))
    trace, paid = [], []
    for entropy in (0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.3):
        slope = gradients(method, batch, out)[2][batch.mask]
        paid.append(bool(slope.any()))
        batch = replace(batch, state=method.update_state(batch, {"entropy": entropy}))
        trace.append(batch.state["alpha"])
    assert trace == [0.5, 0.75, 0.5, 0.25, 0.0, 0.0, 0.25]
    # No bonus is paid while the last entropy was above the target, or α is 0.
    assert paid == [True, True, True, True, False, False, False]
    fixed = gradients(policy_gradient("grpo", entropy_bonus=0.25), batch, out)
    last = gradients(method, replace(batch, state={"alpha": 0.25, "entropy": 0.5}), out)
    assert all(torch.equal(a, b) for a, b in zip(fixed, last, strict=True))


def test_every_token_is_weighed_where_the_entropy_is_steered(update: Update) -> None:
    """Also those without an advantage, whose entropy counts, and while α is 0."""
    batch, _ = update(seed=2)
    batch = replace(batch, reward=torch.zeros_like(batch.reward))
    method = policy_gradient("grpo", entropy_target=0.5)
    assert torch.equal(method.weight(prepared(method, batch)) > 0, batch.mask)


def test_the_entropy_of_a_tabular_policy_goes_to_the_target(update: Update) -> None:
    """Exact policy gradients on a bandit, which without a bonus are soon sure of the best arm."""
    batch, _ = update(seed=0)
    reward = torch.tensor([1.0, 0.6, 0.3, 0.0], dtype=torch.float64)

    def end(method: PolicyGradient) -> float:
        z, state, seen = torch.zeros(4, dtype=torch.float64), dict(method.start), []
        for _ in range(800):
            p, log_p = z.softmax(-1), z.log_softmax(-1)
            seen.append(float(-(p @ log_p)))
            slope = p * (reward - p @ reward)
            slope += method._alpha(replace(batch, state=state)) * -p * (log_p + seen[-1])
            z = z + slope
            if method.entropy_target:
                state = dict(method.update_state(replace(batch, state=state), {"entropy": seen[-1]}))
        return sum(seen[-200:]) / 200

    assert end(policy_gradient("reinforce")) < 0.1
    for target in (0.4, 1.2):
        steered = end(policy_gradient("reinforce", entropy_target=target, entropy_step=0.01))
        assert steered == pytest.approx(target, abs=0.05)


def test_mistakes_with_the_target_name_their_key() -> None:
    assert refused("grpo", entropy_step=0.1).startswith("method.entropy_step: nothing reads entropy_step")
    assert refused("grpo", entropy_bonus=-0.1, entropy_target=0.5).startswith("method.entropy_bonus: ")
    assert refused("grpo", entropy_target=-0.5).startswith("method.entropy_target: ")
    assert "entropy_step" not in described(policy_gradient("grpo"))
    text = described(policy_gradient("grpo", entropy_target=0.3))
    assert (text["entropy_target"], text["entropy_step"]) == ("0.3", "0.005")
