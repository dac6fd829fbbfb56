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

from posttrain.math import advantages, kl, ratios, surrogate
from posttrain.methods.table import METHODS, build, least_group, line, names
from posttrain.types import Batch, Method, Outputs

HORIZON = 16
KL_AND_ENTROPY = {"kl_in_loss": 0.1, "kl_in_reward": 0.05, "entropy_bonus": 0.01}


def variants() -> dict[str, tuple[str, dict[str, Any]]]:
    """Every line of the table as published, with all its extras, and with every other choice there is."""
    out: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in METHODS}
    for name, row in METHODS.items():
        if row.loop == "online":
            out[f"{name} + kl and entropy"] = (name, KL_AND_ENTROPY)
    for choice in ("credit", "ratio", "surrogate", "reduction"):
        out |= {f"grpo, {value}": ("grpo", {choice: value}) for value in names(choice)}
    out |= {f"grpo, {value}": ("grpo", {"kl": value, "kl_in_loss": 0.1}) for value in names("kl")}
    out |= {f"sft, {value}": ("sft", {"reduction": value}) for value in names("reduction")}
    return out


VARIANTS = variants()
every_method = pytest.mark.parametrize("variant", VARIANTS)
Update = Callable[..., tuple[Batch, Outputs]]
Gradients = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


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
    total, d_logp, d_entropy = gradients(method_of(variant), batch, out)
    assert bool(total.isfinite())
    assert bool(d_logp.isfinite().all())
    assert bool(d_logp[batch.mask].any())
    assert bool(d_entropy[batch.mask].all()) == ("entropy_bonus" in VARIANTS[variant][1])


@every_method
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
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
    assert not dirty[1][~batch.mask].any()
    assert not dirty[2][~batch.mask].any()


@every_method
def test_what_is_watched_reads_no_garbage_either(variant: str, update: Update) -> None:
    batch, out = update(seed=2)
    method, seen = method_of(variant), []
    for filler in (0.0, math.nan):
        bad, said = (columns(x, lambda v, f=filler: torch.where(batch.mask, v, f)) for x in (batch, out))
        seen.append(method.watch(said, method.prepare(bad)))
    assert seen[0].keys() == seen[1].keys()
    for key in seen[0]:
        assert not seen[0][key].requires_grad
        assert torch.equal(seen[0][key][batch.mask], seen[1][key][batch.mask]), key


@every_method
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_any_split_of_a_step_adds_up_to_the_same_gradient(
    variant: str, data: st.DataObject, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=data.draw(st.integers(0, 50), label="seed"))
    order = data.draw(st.permutations(range(len(batch))), label="order")
    cuts = data.draw(st.sets(st.integers(1, len(batch) - 1)), label="cuts")
    edges = [0, *sorted(cuts), len(batch)]
    parts = [order[a:b] for a, b in pairwise(edges)]
    method = method_of(variant)
    close(gradients(method, batch, out, parts), gradients(method, batch, out))


@every_method
def test_the_order_of_rows_only_permutes_the_gradient(
    variant: str, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=3)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(8))
    method = method_of(variant)
    total, *straight = gradients(method, batch, out)
    moved = gradients(method, batch.rows(order), Outputs(logp=out.logp[order], entropy=out.entropy[order]))
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
    close((got[0], got[1][: len(batch)], got[2][: len(batch)]), gradients(method, batch, out))
    assert not got[1][len(batch) :].any()


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


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if least_group(row.method) > 1])
@pytest.mark.parametrize("reward", [0.1, 1.0, 0.0])
def test_a_task_whose_answers_are_all_alike_teaches_nothing(
    name: str, reward: float, update: Update, gradients: Gradients
) -> None:
    batch, out = update(seed=8, K=7)
    alike = torch.zeros_like(batch.reward)
    alike[:, 1] = reward  # position 1 is trained in every row
    batch = columns(replace(batch, reward=alike), torch.Tensor.float)
    _, d_logp, _ = gradients(build(name, {}, horizon=HORIZON), batch, columns(out, torch.Tensor.float))
    assert not d_logp.any()


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if row.loop == "online"])
def test_which_columns_are_asked_for(name: str, update: Update, gradients: Gradients) -> None:
    """A method gets by on the columns that it asks for; the others may be absent."""
    batch, out = update(seed=9)
    for options, wanted in [
        ({}, set()),
        ({"entropy_bonus": 0.1}, set()),
        ({"kl_in_loss": 0.1}, {"logp_ref"}),
        ({"kl_in_reward": 0.1}, {"logp_ref", "logp_old"}),
    ]:
        method = build(name, options, horizon=HORIZON)
        assert method.needs == wanted
        missing = {column: None for column in ("logp_ref", "logp_old") if column not in wanted}
        total, _, _ = gradients(method, replace(batch, **missing), out)
        assert bool(total.isfinite())
    assert line("sft").method.needs == frozenset()


def test_the_choices_tried_here_are_all_there_are() -> None:
    assert names("credit") == [
        f.__name__
        for f in (
            advantages.raw,
            advantages.centred,
            advantages.normalised,
            advantages.normalised_sample,
            advantages.leave_one_out,
            advantages.batch_normalised,
            advantages.over_mean,
        )
    ]
    assert set(names("ratio")) == {"by_token", "by_sequence", "by_sequence_token", "by_trajectory"}
    assert set(names("surrogate")) == {"score", "unclipped", "clipped", "dual_clipped", "truncated"}
    assert set(names("reduction")) == {"per_token", "per_sequence", "per_horizon", "per_row"}
    assert [vars(kl)[k] for k in names("kl")] == [kl.k1, kl.k2, kl.k3]
    assert all(hasattr(ratios, n) for n in names("ratio"))
    assert all(hasattr(surrogate, n) for n in names("surrogate"))
