"""What holds for every method: no garbage is read, and no order, padding or split of a step matters."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.math import advantages
from posttrain.methods.build import BY_TOKEN, CHOICES, build, choices, numbers
from posttrain.methods.distillation import Distillation
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import METHODS, line
from posttrain.types import Batch, Method, Outputs, Trajectory

HORIZON = 16
WITH_LOSS = [name for name, row in METHODS.items() if row.has_loss]
KL_AND_ENTROPY = {"kl_in_loss": 0.1, "kl_in_reward": 0.05, "entropy_bonus": 0.01}


def extras(name: str) -> dict[str, Any]:
    """Every penalty and bonus that a method of the policy-gradient family can have besides."""
    method = METHODS[name].method
    found = {k: v for k, v in KL_AND_ENTROPY.items() if k in numbers(method)}
    if getattr(method, "kl_target", 0):  # one penalty follows a target, and it is not this one
        found.pop("kl_in_reward")
    return found


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every line of the table as published, with all its extras, and with every other choice there is."""
    out: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in WITH_LOSS}
    for name in WITH_LOSS:
        if extras(name):
            out[f"{name} + kl and entropy"] = (name, extras(name))
    for name, only in {
        "grpo": set(CHOICES),
        "ppo": {"estimator", "value_loss", "credit"},
        "sft": set(CHOICES),
        "gkd": set(CHOICES),
        "expert_iteration": {"keep", "repeats", "balance"},
        "dpo": set(CHOICES),
        "reward": set(CHOICES),
        "process_reward": set(CHOICES),
    }.items():
        for choice in (c for c in choices(METHODS[name].method) if c in only):
            for value in CHOICES[choice]:
                whole = choice == "credit" and value not in {f.__name__ for f in BY_TOKEN}
                if name == "ppo" and (whole or value == "against_greedy"):
                    continue
                more: dict[str, dict[str, Any]] = {
                    "kl": {"kl_in_loss": 0.1},
                    "control": {"kl_target": 0.1, "kl_in_reward": 0.1},
                    "geometric_rejected": {"weight_floor": 0.9, "weight_cap": 1.1},
                }
                if name == "grpo":
                    more["optimal_by_token"] = {"returns": "to_go"}
                if name == "grpo" and choice == "returns" and value != "total":
                    more["returns"] = {"credit": "centred"}
                out[f"{name}, {value}"] = (name, {choice: value} | more.get(value, more.get(choice, {})))
    out["grpo, masked"] = ("grpo", {"off_policy_mask": 0.05})
    out["grpo, kl_cov"] = ("grpo", {"kl_from_old": 1.0, "kl_from_old_share": 0.3})
    out["grpo, clip_cov in a band"] = ("grpo", {"filter": "clip_cov", "cov_low": 0.0, "cov_share": 0.3})
    out["ppo, steered"] = ("ppo", {"entropy_bonus": 0.1, "entropy_target": 0.5, "filter": "top_entropy"})
    out["reinforce, overlong"] = ("reinforce", {"overlong_buffer": 2})
    carried = {"baseline": 0.3, "running_baseline": 0.9, "running_scale": 0.5}
    return out | {"reinforce, carried": ("reinforce", carried)}


def extra_penalty(name: str) -> bool:
    """Whether a method as published moves the policy where no advantage does."""
    return any(getattr(METHODS[name].method, key, 0) for key in ("kl_from_old", "kl_in_loss", "pulls"))


VARIANTS = variants()
WITH_EXTRAS = ("reinforce", "ppo", "grpo", "gspo", "distill")
"""Of the methods with penalties and bonuses, those that `make test` tries with them."""
every_method = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, marks=pytest.mark.full if name not in WITH_EXTRAS and " + " in variant else ())
        for variant, (name, _) in VARIANTS.items()
    ],
)
Update = Callable[..., tuple[Batch, Outputs]]
Gradients = Callable[..., tuple[torch.Tensor, ...]]


def method_of(variant: str) -> Method:
    name, options = VARIANTS[variant]
    return build(name, options, horizon=HORIZON)


def columns(x: Batch | Outputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same with every float column changed."""
    changed = {}
    for f in fields(x):
        value = getattr(x, f.name)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            changed[f.name] = change(value)
    return replace(x, **changed)


def close(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@every_method
def test_every_method_learns_something_from_this_update(
    variant: str, update: Update, gradients: Gradients
) -> None:
    """Else the tests below would compare zeros with zeros."""
    batch, out = update(seed=1)
    method = method_of(variant)
    total, d_logp, d_entropy, d_value, d_divergence = gradients(method, batch, out)
    assert bool(total.isfinite())
    assert bool(d_logp.isfinite().all())
    assert bool(d_value[batch.mask].any()) == bool(method.needs & {"value", "head"})
    assert bool(d_divergence[batch.mask].any()) == (method.compare is not None)
    assert bool(d_logp[batch.mask].any()) == (
        "head" not in method.needs and not isinstance(method, Distillation)
    )
    assert bool(d_entropy[batch.mask].all()) == ("entropy_bonus" in VARIANTS[variant][1])


@every_method
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.sample("nan-*")
def test_garbage_outside_the_mask_changes_no_bit(
    variant: str, poison: float, update: Update, gradients: Gradients
) -> None:
    """In the data, in the model's outputs and in the advantages: of value and of gradient."""
    batch, out = update(seed=2)

    def spoilt(filler: float) -> tuple[torch.Tensor, ...]:
        bad = [columns(x, lambda v: torch.where(batch.mask, v, filler)) for x in (batch, out)]
        return gradients(method_of(variant), *bad, spoil=filler)

    clean, dirty = spoilt(0.0), spoilt(poison)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
    assert not any(g[~batch.mask].any() for g in dirty[1:])


@every_method
def test_what_is_watched_reads_no_garbage_either(variant: str, update: Update) -> None:
    batch, out = update(seed=2)
    method, seen = method_of(variant), []
    for filler in (0.0, math.nan):
        bad, said = (columns(x, lambda v, f=filler: torch.where(batch.mask, v, f)) for x in (batch, out))
        seen.append(method.watch(said, method.prepare(replace(bad, state=method.start))))
    assert seen[0].keys() == seen[1].keys()
    for key in seen[0]:
        assert not seen[0][key].requires_grad
        assert torch.equal(seen[0][key][batch.mask], seen[1][key][batch.mask]), key


def uncut(method: Method, batch: Batch, order: list[int]) -> list[list[int]]:
    """Rows in this order, together where a loss is about several of them."""
    if method.unit != "group":
        return [[i] for i in order]
    groups = dict.fromkeys(int(batch.group[i]) for i in order)
    return [[i for i in order if int(batch.group[i]) == g] for g in groups]


def test_a_group_that_is_cut_has_another_loss(update: Update, gradients: Gradients) -> None:
    """Which is why no group is: the split above would otherwise be no condition."""
    batch, out = update(seed=1)
    for name in ("dpo", "reward", "reward_ranking"):
        method = method_of(name)
        alone = [[i] for i in range(len(batch))]
        assert gradients(method, batch, out, alone)[0] == 0 != gradients(method, batch, out)[0]


@every_method
@given(data=st.data())
@settings(max_examples=4, deadline=None)
@pytest.mark.sample(
    "pretrain",
    "sft",
    "reinforce",
    "ppo",
    "grpo",
    "gspo",
    "klq",
    "dpo",
    "kto",
    "reward",
    "process_reward",
    "expert_iteration",
    "distill",
    "online_dpo",
    "reinforce_pp",
    "max_rl",
    "orpo",
    "*, *",
)
def test_any_split_of_a_step_adds_up_to_the_same_gradient(
    variant: str, data: st.DataObject, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=data.draw(st.integers(0, 50), label="seed"))
    order = data.draw(st.permutations(range(len(batch))), label="order")
    method = method_of(variant)
    units = uncut(method, batch, order)
    cuts = data.draw(st.sets(st.integers(1, len(units) - 1)), label="cuts")
    edges = [0, *sorted(cuts), len(units)]
    parts = [[i for unit in units[a:b] for i in unit] for a, b in pairwise(edges)]
    close(gradients(method, batch, out, parts), gradients(method, batch, out))


@every_method
def test_the_order_of_rows_only_permutes_the_gradient(
    variant: str, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=3)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(8))
    method = method_of(variant)
    total, *straight = gradients(method, batch, out)
    moved = gradients(method, batch.rows(order), columns(out, lambda v: v[order]))
    close(moved, (total, *(g[order] for g in straight)))


@every_method
def test_padding_on_the_right_changes_nothing(variant: str, update: Update, gradients: Gradients) -> None:
    batch, out = update(seed=4)
    T = batch.mask.shape[1]

    def wider(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value, value.new_full((len(value), 5), 3)], -1)

    wide = replace(
        columns(batch, wider),
        tokens=wider(batch.tokens),
        version=wider(batch.version),
        turn_state=wider(batch.turn_state),
        mask=torch.cat([batch.mask, torch.zeros(len(batch), 5, dtype=torch.bool)], -1),
    )
    method = method_of(variant)
    total, *padded = gradients(method, wide, columns(out, wider))
    close((total, *(g[:, :T] for g in padded)), gradients(method, batch, out))


@every_method
def test_a_row_without_a_trained_token_does_not_exist(
    variant: str, update: Update, gradients: Gradients
) -> None:
    """A failed episode is masked out. Its reward of 0 must not enter the baseline of its group either."""
    batch, out = update(seed=5)
    failed = torch.tensor([0, 3, 3, 6])
    ghosts = batch.rows(failed)
    both = replace(
        batch,
        **{
            f.name: torch.cat([getattr(batch, f.name), getattr(ghosts, f.name)])
            for f in fields(batch)
            if isinstance(getattr(batch, f.name), torch.Tensor)
        },
    )
    both = replace(both, mask=torch.cat([batch.mask, torch.zeros_like(ghosts.mask)]))
    method = method_of(variant)
    got = gradients(method, both, columns(out, lambda v: torch.cat([v, v[failed]])))
    close((got[0], *(g[: len(batch)] for g in got[1:])), gradients(method, batch, out))
    assert not any(g[len(batch) :].any() for g in got[1:])


@every_method
def test_an_update_without_a_trained_token_is_an_error(
    variant: str, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=6)
    with pytest.raises(ValueError, match="nothing to train on"):
        gradients(method_of(variant), replace(batch, mask=torch.zeros_like(batch.mask)), out)


@every_method
def test_without_an_anchor_the_policy_itself_is_the_anchor(
    variant: str, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=7)
    method = method_of(variant)
    if "logp_old" in method.needs:
        return
    anchored = replace(batch, logp_old=out.logp)
    for a, b in zip(
        gradients(method, replace(batch, logp_old=None), out), gradients(method, anchored, out), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "name", [n for n in WITH_LOSS if METHODS[n].method.least_group > 1 and not extra_penalty(n)]
)
@pytest.mark.parametrize("reward", [0.1, 1.0, 0.0])
def test_a_task_whose_answers_are_all_alike_teaches_nothing(
    name: str, reward: float, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=8, K=7)
    alike = torch.zeros_like(batch.reward)
    alike[:, 1] = reward  # position 1 is trained in every row
    batch = columns(replace(batch, reward=alike), torch.Tensor.float)
    method = build(name, {}, horizon=HORIZON)
    _, d_logp, _, d_value, *_ = gradients(method, batch, columns(out, torch.Tensor.float))
    assert not d_logp.any()
    assert not d_value.any()
    if method.unit == "group":
        assert not method.weight(batch).any()


WAYS = [[0.1] * 15, [1.5], [0.7, 0.8], [1 / 7, 1 / 3 - 1 / 7, 0.9 - 1 / 3, 1.5 - 0.9]]
NOTHING = [[0.0], [0.1, 0.6, -0.7], [1 / 7, 5 / 7 - 1 / 7, -5 / 7], [-0.3, 0.1, 0.1, 0.1]]


def paid(ways: list[list[float]]) -> Batch:
    """Four answers of 16 tokens to one task, paid in these parts."""
    rows = [
        Trajectory(
            tokens=[7, *[i] * 16],
            sampled=[False] + [True] * 16,
            logp_gen=[-1.0] * 17,
            logp_policy=[-1.0] * 17,
            version=[0] * 17,
            reward=[0.0] + [0.0] * (16 - len(parts)) + parts,
            turn_state={1: 1},
        )
        for i, parts in enumerate(ways)
    ]
    return Batch.of(rows, group=[0] * len(rows))


COMPARES = [n for n in WITH_LOSS if METHODS[n].loop == "online" and METHODS[n].method.least_group > 1]
COMPARES.remove("otb")  # it compares the rewards to go
COMPARING = [c for c in CHOICES["credit"] if c not in ("raw", "against_greedy", "optimal_by_token")]


@pytest.mark.parametrize("ways", [WAYS, NOTHING], ids=["1.5", "0"])
def test_answers_of_one_worth_are_alike_however_they_were_paid(ways: list[list[float]]) -> None:
    batch = paid(ways)
    batch = replace(batch, logp_old=batch.logp_gen)
    for name in [*COMPARES, "reinforce_pp"]:
        method = build(
            name, {"returns": "total", "kl_in_reward": 0} if name == "reinforce_pp" else {}, horizon=16
        )
        weight = method.weight(ready := method.prepare(replace(batch, state=method.start)))
        assert extra_penalty(name) or not weight.any(), name
        assert ready.advantage is None or not ready.advantage.any()
    for credit in COMPARING:
        ready = build("grpo", {"credit": credit}, horizon=16).prepare(batch)
        assert ready.advantage is not None
        assert not ready.advantage.any(), credit
    scaled = build("reinforce", {"running_scale": 0.9}, horizon=16)
    assert scaled.update_state(replace(batch, state=scaled.start), {})["variance"] == 0.0
    for keep in CHOICES["keep"]:
        method = build("expert_iteration", {"keep": keep, "accept": min(map(sum, ways))}, horizon=16)
        assert bool((method.weight(method.prepare(batch))[:, 1:] > 0).all()), keep


@every_method
def test_what_is_trained_on_has_the_type_of_the_losses(
    variant: str, update: Update, gradients: Gradients
) -> None:
    """Rewards are float64; advantages, targets and losses are what the model computes in."""
    batch, out = (columns(x, torch.Tensor.float) for x in update(seed=6))
    batch, method = replace(batch, reward=batch.reward.double()), method_of(variant)
    ready = method.prepare(replace(batch, state=method.start))
    found = [x for x in (ready.advantage, ready.target) if x is not None] + [method.loss(out, ready)]
    assert {x.dtype for x in found} == {torch.float32}
    assert {x.dtype for x in gradients(method, batch, out)} == {torch.float32}


def test_an_answer_that_the_policy_has_left_is_pushed_no_further_down(
    update: Update, gradients: Gradients
) -> None:
    """DeepSeek-V3.2: no gradient where A < 0 and the mean of log π_gen/π is above δ; all else as it was."""
    batch, out = update(seed=3)
    free, held = (build("rloo", {"off_policy_mask": d}, horizon=HORIZON) for d in (0.0, 0.05))
    A = free.prepare(batch).advantage
    assert A is not None
    left = []
    for i, row in enumerate(batch.mask):
        gap = [float(batch.logp_gen[i, t] - out.logp[i, t]) for t in row.nonzero().flatten()]
        left.append(bool((A[i] < 0).any()) and sum(gap) / len(gap) > 0.05)
    assert 0 < sum(left) < int((A < 0).any(-1).sum())
    wanted = gradients(free, batch, out)[1]
    wanted[torch.tensor(left)] = 0.0
    assert torch.equal(gradients(held, batch, out)[1], wanted)
    seen = held.watch(out, held.prepare(batch))["correction/masked"]
    assert seen[batch.mask].tolist() == torch.tensor(left)[:, None].expand_as(A)[batch.mask].double().tolist()
    both = build("rloo", {"off_policy_mask": 0.05, "kl_in_loss": 0.1}, horizon=HORIZON)
    assert bool(gradients(both, batch, out)[1][torch.tensor(left)].any()), "the KL still pulls it"


def test_a_token_without_an_advantage_is_not_looked_at_however_far_its_ratio_went(
    update: Update, gradients: Gradients
) -> None:
    """exp(200) is infinite in float32, and infinite times 0 not a number."""
    batch, out = (columns(x, torch.Tensor.float) for x in update(seed=1))
    alone = torch.zeros_like(batch.mask)
    alone[0, 1] = True
    batch = replace(batch, reward=torch.where(alone, 1.0, 0.0), logp_old=out.logp - 200 * ~alone)
    for function in CHOICES["surrogate"]:
        for name, options in (
            ("reinforce_to_go", {"ratio": "by_token"}),
            ("trpo", {"returns": "to_go", "credit": "raw"}),
        ):
            method = build(name, {**options, "surrogate": function}, horizon=HORIZON)
            total, d_logp, *_ = gradients(method, batch, out)
            assert bool(total.isfinite()), function
            assert bool(d_logp.isfinite().all()), function


@pytest.mark.parametrize("name", WITH_LOSS)
def test_which_columns_are_asked_for(name: str, update: Update, gradients: Gradients) -> None:
    """A method gets by on the columns that it asks for; the others may be absent."""
    batch, out = update(seed=9)
    published = line(name).method.needs
    family = isinstance(line(name).method, PolicyGradient)
    for options, wanted in [
        ({}, set()),
        ({"entropy_bonus": 0.1}, set()),
        ({"kl_in_loss": 0.1}, {"logp_ref"}),
        ({"kl_in_reward": 0.1}, {"logp_ref", "logp_old"}),
    ]:
        if options and (not family or extra_penalty(name)):
            continue
        method = build(name, options, horizon=HORIZON)
        assert method.needs == published | wanted
        every = ("logp_ref", "logp_old", "value")
        missing = {column: None for column in every if column not in method.needs}
        total, *_ = gradients(method, replace(batch, **missing), out)
        assert bool(total.isfinite())
    assert line("sft").method.needs == frozenset()
    assert line("ppo").method.needs == {"value"}
    assert line("impala").method.needs == {"value", "logp_old"}
    assert line("klq").method.needs == {"value", "logp_old", "logp_ref"}
    assert line("dpo").method.needs == line("ipo").method.needs == {"logp_ref"}
    assert line("simpo").method.needs == line("orpo").method.needs == frozenset()
    assert line("kto").method.needs == {"logp_old", "logp_ref"}
    assert line("reward").method.needs == line("process_reward").method.needs == {"head"}


def test_every_choice_there_is_is_tried_here() -> None:
    tried = {(choice, str(value)) for _, options in VARIANTS.values() for choice, value in options.items()}
    tried |= {
        (choice, name) for choice in choices(METHODS["es"].method) for name in CHOICES[choice]
    }  # no loss
    assert {(choice, name) for choice, found in CHOICES.items() for name in found} <= tried | {
        ("credit", f.__name__) for f in (advantages.raw,)
    }
