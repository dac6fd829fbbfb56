"""table: every option does what its name says, and one that nothing would read is a clear error."""

import inspect
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from posttrain.math import advantages, kl, ratios, reduce, surrogate
from posttrain.methods.imitation import Imitation
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import CHOICES, METHODS, build, described, least_group, line, names, readable
from posttrain.types import Batch, Outputs, UserError

ONLINE = [name for name, row in METHODS.items() if row.loop == "online"]
MASK = torch.tensor([[True, True, False], [True, False, False]])


def policy_gradient(name: str, options: dict[str, Any], horizon: int = 16) -> PolicyGradient:
    method = build(name, options, horizon=horizon)
    assert isinstance(method, PolicyGradient)
    return method


def refused(name: str, options: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        build(name, options, horizon=16)
    return str(error.value)


@pytest.mark.parametrize("name", METHODS)
def test_without_options_the_line_of_the_table_is_built(name: str) -> None:
    method, published = build(name, {}, horizon=16), METHODS[name].method
    if name == "dr_grpo":
        assert isinstance(method, PolicyGradient)
        assert replace(method, reduction=reduce.per_horizon) == published
    else:
        assert method == published
    assert described(method).keys() == described(published).keys()


def test_the_published_numbers() -> None:
    """What the papers used, read off the built methods."""
    assert described(build("grpo", {}, horizon=16)) == {
        "credit": "normalised(eps=1e-06)",
        "ratio": "by_token",
        "surrogate": "clipped(clip_low=0.2, clip_high=0.2)",
        "reduction": "per_sequence",
    }
    assert described(build("rloo", {}, horizon=16)) == {
        "credit": "leave_one_out",
        "ratio": "by_token",
        "surrogate": "score",
        "reduction": "per_row",
    }
    assert described(build("reinforce", {}, horizon=16))["credit"] == "raw"
    dr = described(build("dr_grpo", {}, horizon=16))
    assert (dr["credit"], dr["reduction"]) == ("centred", "per_horizon(horizon=16)")
    dapo = described(build("dapo", {}, horizon=16))
    assert (dapo["surrogate"], dapo["reduction"]) == ("clipped(clip_low=0.2, clip_high=0.28)", "per_token")
    gspo = described(build("gspo", {}, horizon=16))
    assert (gspo["ratio"], gspo["surrogate"]) == (
        "by_sequence",
        "clipped(clip_low=0.0003, clip_high=0.0004)",
    )
    cispo = described(build("cispo", {}, horizon=16))
    assert (cispo["surrogate"], cispo["reduction"]) == ("truncated(cap=1.28)", "per_token")
    assert described(build("sft", {}, horizon=16)) == {"reduction": "per_token"}


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_can_be_set_to_each_of_its_functions(name: str, choice: str) -> None:
    for value in names(choice):
        options: dict[str, Any] = {choice: value} | ({"kl_in_loss": 0.1} if choice == "kl" else {})
        method = build(name, options, horizon=16)
        assert described(method)[choice].split("(")[0] == value
        changed = {c for c in CHOICES if getattr(method, c) != getattr(METHODS[name].method, c)}
        assert changed <= {choice, "reduction"}, "a choice changed another one"


@pytest.mark.parametrize("reduction", ["per_token", "per_sequence", "per_row", "per_horizon"])
def test_supervised_fine_tuning_chooses_what_its_mean_is_over(reduction: str) -> None:
    method = build("sft", {"reduction": reduction}, horizon=16)
    assert isinstance(method, Imitation)
    wanted = {
        "per_token": reduce.per_token(MASK),
        "per_sequence": reduce.per_sequence(MASK),
        "per_row": reduce.per_row(MASK),
        "per_horizon": reduce.per_horizon(MASK, 16),
    }[reduction]
    batch = _batch()
    assert torch.equal(method.weight(batch), wanted)
    assert method.prepare(batch) is batch
    assert (
        method.loss(Outputs(logp=-torch.ones(2, 3), entropy=torch.zeros(2, 3)), batch).tolist()
        == [[1] * 3] * 2
    )


def _batch() -> Batch:
    zeros = torch.zeros(2, 3)
    return Batch(
        tokens=zeros.long(),
        mask=MASK,
        length=torch.tensor([2, 1]),
        group=torch.tensor([0, 0]),
        reward=zeros,
        logp_gen=zeros,
        logp_policy=zeros,
        version=zeros.long(),
    )


def test_numbers_reach_the_function_that_reads_them() -> None:
    x, A = torch.tensor([[0.5, -0.5]]), torch.tensor([[1.0, -1.0]])
    clipped = policy_gradient("grpo", {"clip_low": 0.05, "clip_high": 0.4}).surrogate
    assert torch.equal(clipped(x, A), surrogate.clipped(x, A, clip_low=0.05, clip_high=0.4))
    one_side = policy_gradient("dapo", {"clip_low": 0.1}).surrogate
    assert torch.equal(one_side(x, A), surrogate.clipped(x, A, clip_low=0.1, clip_high=0.28))
    capped = policy_gradient("cispo", {"cap": 1.1}).surrogate
    assert torch.equal(capped(x, A), surrogate.truncated(x, A, cap=1.1))
    dual = policy_gradient("grpo", {"surrogate": "dual_clipped", "cap": 2, "clip_high": 0.3}).surrogate
    assert torch.equal(dual(x, A), surrogate.dual_clipped(x, A, clip_high=0.3, cap=2.0))
    R, group = torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long)
    credit = policy_gradient("grpo", {"eps": 0.5}).credit
    assert torch.equal(credit(R, group), advantages.normalised(R, group, eps=0.5))
    both = policy_gradient("grpo", {"eps": 0.5, "credit": "over_mean"}).credit
    assert torch.equal(both(R, group), advantages.over_mean(R, group, eps=0.5)), "in any order of the keys"
    method = policy_gradient(
        "grpo", {"kl_in_loss": 1, "kl_in_reward": 0.2, "entropy_bonus": -0.3, "kl": "k2"}
    )
    assert (method.kl_in_loss, method.kl_in_reward, method.entropy_bonus) == (1.0, 0.2, -0.3)
    assert method.kl is kl.k2


def test_the_horizon_is_the_runs_own() -> None:
    for horizon in (4, 64):
        method = policy_gradient("dr_grpo", {}, horizon=horizon)
        assert torch.equal(method.reduction(MASK), reduce.per_horizon(MASK, horizon))
    assert "does not read 'horizon'" in refused("dr_grpo", {"horizon": 5})


def test_naming_a_choice_that_is_already_made_keeps_its_published_numbers() -> None:
    assert build("dapo", {"surrogate": "clipped"}, horizon=16) == METHODS["dapo"].method
    gspo = described(build("gspo", {"surrogate": "clipped", "clip_high": 0.1}, horizon=16))
    assert gspo["surrogate"] == "clipped(clip_low=0.0003, clip_high=0.1)"
    changed = described(build("gspo", {"surrogate": "dual_clipped"}, horizon=16))
    assert changed["surrogate"] == "dual_clipped(clip_low=0.2, clip_high=0.2, cap=3)"


def test_building_changes_no_line_of_the_table() -> None:
    before = {name: described(row.method) for name, row in METHODS.items()}
    for name in ONLINE:
        build(name, {"surrogate": "dual_clipped", "cap": 9.0, "kl_in_loss": 1.0}, horizon=3)
    assert before == {name: described(row.method) for name, row in METHODS.items()}


# ---------------------------------------------------------------- mistakes


def test_an_unknown_method_is_told_the_known_ones() -> None:
    message = refused("ppo", {})
    assert message.startswith("method.name: unknown method 'ppo'; ")
    assert all(name in message for name in METHODS)
    with pytest.raises(UserError, match="grpo"):
        line("gropo")


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(
    "value", ["nonsense", "_scaled", "weighted_sum", "exact", "torch", "", 3, None, ["k1"]]
)
def test_an_unknown_choice_is_told_the_known_ones(choice: str, value: object) -> None:
    message = refused("grpo", {choice: value, "kl_in_loss": 0.1})
    assert message.startswith(f"method.{choice}: unknown {choice} {value!r}; one of ")
    assert all(name in message for name in names(choice))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("grpo", "clip_hihg"),
        ("grpo", "cap"),
        ("reinforce", "clip_low"),
        ("reinforce", "eps"),
        ("rloo", "eps"),
        ("dr_grpo", "eps"),
        ("cispo", "clip_high"),
        ("sft", "clip_low"),
        ("sft", "credit"),
        ("sft", "kl"),
        ("sft", "kl_in_loss"),
        ("grpo", "needs"),
        ("grpo", "prepare"),
        ("grpo", "returns"),
        ("grpo", "mask"),
    ],
)
def test_an_option_that_nothing_reads_is_told_what_is_read(name: str, key: str) -> None:
    message = refused(name, {key: 0.3})
    assert message.startswith(f"method.{key}: {name} does not read {key!r}; it reads ")
    listed = message.split("it reads ")[1].split(", ")
    assert listed == sorted(readable(METHODS[name].method))
    assert key not in listed


def test_a_number_is_read_only_by_the_function_that_was_chosen() -> None:
    assert "does not read 'eps'" in refused("grpo", {"credit": "centred", "eps": 0.1})
    assert "does not read 'clip_low'" in refused("grpo", {"surrogate": "score", "clip_low": 0.1})
    assert "cap" in readable(build("grpo", {"surrogate": "truncated"}, horizon=16))


def test_an_estimator_that_no_penalty_uses_is_an_error() -> None:
    for options in ({"kl": "k1"}, {"kl": "k3", "kl_in_loss": 0.0}, {"kl": "k2", "kl_in_reward": 0.1}):
        assert refused("grpo", options).startswith("method.kl: nothing reads kl while kl_in_loss is 0")


@pytest.mark.parametrize(
    "key", ["clip_low", "clip_high", "eps", "kl_in_loss", "kl_in_reward", "entropy_bonus"]
)
@pytest.mark.parametrize("value", ["0.2", None, True, [0.2], math.nan, math.inf, 10**400, {"x": 1}])
def test_a_value_that_is_no_number_is_an_error(key: str, value: object) -> None:
    assert refused("grpo", {key: value}).startswith(f"method.{key}: {key} is {value!r}; give a number")


@pytest.mark.parametrize("key", ["clip_low", "clip_high", "eps", "kl_in_loss", "kl_in_reward"])
def test_a_negative_distance_or_penalty_is_an_error(key: str) -> None:
    assert "0 or more" in refused("grpo", {key: -0.1})


@pytest.mark.parametrize(("name", "extra"), [("cispo", {}), ("grpo", {"surrogate": "dual_clipped"})])
def test_a_cap_that_would_cut_the_on_policy_ratio_is_an_error(name: str, extra: dict[str, Any]) -> None:
    assert "1 or more" in refused(name, {"cap": 0.5, **extra})


# ---------------------------------------------------------------- the table as text


@pytest.mark.parametrize("name", METHODS)
def test_every_line_describes_itself_and_every_choice_is_documented(name: str) -> None:
    row = METHODS[name]
    assert row.title
    assert row.source
    assert row.loop in ("online", "offline")
    text = described(row.method)
    assert set(text) <= set(CHOICES) | set(readable(row.method))
    for choice in CHOICES:
        for value in names(choice):
            assert inspect.getdoc(vars(CHOICES[choice])[value])


def test_numbers_are_described_where_they_are_not_zero() -> None:
    text = described(build("grpo", {"kl_in_loss": 0.04, "kl": "k2", "entropy_bonus": 1e-3}, horizon=16))
    assert (text["kl"], text["kl_in_loss"], text["entropy_bonus"]) == ("k2", "0.04", "0.001")
    assert "kl_in_reward" not in text
    assert "kl" not in described(build("grpo", {"kl_in_reward": 0.04}, horizon=16))


def test_names_are_the_public_functions_and_nothing_imported() -> None:
    assert "fill" not in names("ratio")
    assert "group_mean" not in names("credit")
    assert "weighted_sum" not in names("reduction")
    assert all(callable(vars(module)[n]) for c, module in CHOICES.items() for n in names(c))
    assert ratios.by_token.__name__ in names("ratio")


def test_a_credit_that_compares_needs_a_group() -> None:
    """least_group says so in the table: with a single answer these would learn nothing, or raise."""
    for name in ONLINE:
        method = METHODS[name].method
        assert isinstance(method, PolicyGradient)
        compares = method.credit is not advantages.raw
        assert least_group(METHODS[name].method) == (2 if compares else 1)
