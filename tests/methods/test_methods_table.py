"""table: every option does what its name says, and one that nothing would read is a clear error."""

import inspect
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from posttrain.base.name_hints import names_of_other_trainers
from posttrain.math import (
    advantages,
    control,
    corrections,
    kl,
    pass_at_k,
    preference,
    ratios,
    reduce,
    returns,
    reward,
    surrogate,
    value,
)
from posttrain.math.choice import function_of, takes
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.build import (
    BY_TOKEN,
    CHOICES,
    build,
    choices,
    described,
    numbers,
    parameters,
    readable,
)
from posttrain.methods.imitation import ExpertIteration, Imitation
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.preference import Preference
from posttrain.methods.q_learning import SoftQ
from posttrain.methods.reward_model import PairwiseReward, PointwiseReward
from posttrain.methods.table import METHODS, line
from posttrain.types import Batch, Outputs, Trajectory, UserError

ONLINE = [name for name, row in METHODS.items() if row.loop == "online"]
PAIRS = [(name, choice) for name, row in METHODS.items() for choice in choices(row.method)]
LACKED = [(name, c) for name, row in METHODS.items() for c in CHOICES if c not in choices(row.method)]
LEAST, MOST = "expected a number greater than or equal to", "expected a number less than or equal to"
UNFIT = r"(expected .*, got |is (nan|inf), and no option may be|is a number of more than 64 bits)"
MASK = torch.tensor([[True, True, False], [True, False, False]])


def policy_gradient(name: str, options: dict[str, Any], horizon: int = 16) -> PolicyGradient:
    method = build(name, options, horizon=horizon)
    assert isinstance(method, PolicyGradient)
    return method


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("reinforce_to_go", {}),
        ("a2c", {"estimator": "monte_carlo"}),
        ("ppo", {"lam": 1.0, "credit": "raw"}),
        ("impala", {}),
        ("klq", {"lam": 1.0}),
    ],
)
def test_a_discount_is_put_into_rewards_that_are_potentials_and_leaves_others(name, options):
    """Two ways to one score are worth γ² of it, whatever was advanced on it."""
    ways = ([0.0, 0.3, 0.2, 0.5], [0.0, 0.7, -0.2, 0.5])
    rows = [
        Trajectory(
            tokens=[1] * 4,
            sampled=[False, True, True, True],
            logp_gen=[0.0] * 4,
            logp_policy=[0.0] * 4,
            version=[0] * 4,
            reward=list(way),
        )
        for way in ways
    ]
    flat = torch.zeros(2, 4)

    def first(potentials: bool) -> list[float]:
        method = build(name, {"gamma": 0.5, **options}, horizon=4, potentials=potentials)
        batch = replace(Batch.of(rows, [0, 0]), logp_old=flat, logp_ref=flat, value=flat)
        return method.prepare(replace(batch, state=dict(method.start))).advantage[:, 1].tolist()

    assert first(True) == pytest.approx([0.25, 0.25])
    assert first(False) == pytest.approx([0.3 + 0.1 + 0.125, 0.7 - 0.1 + 0.125])


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
    assert (cispo["surrogate"], cispo["reduction"]) == ("truncated(cap=1.28, floor=0)", "per_token")
    assert described(build("sft", {}, horizon=16)) == {"reduction": "per_token"}


PUBLISHED: dict[str, dict[str, str | None]] = {
    "reinforce_to_go": {"returns": "to_go(gamma=1)", "credit": "raw", "surrogate": "score"},
    "reinforce_running": {"credit": "raw", "running_baseline": "0.9"},
    "reinforce_critic": {"estimator": "monte_carlo(gamma=1)", "surrogate": "score", "reduction": "per_row"},
    "opo": {"returns": "total_by_token", "credit": "centred", "reduction": "per_row"},
    "reinforce_pp": {
        "returns": "to_go(gamma=1)",
        "credit": "batch_normalised(eps=1e-06)",
        "surrogate": "clipped(clip_low=0.2, clip_high=0.2)",
        "reduction": "per_token",
        "kl_in_reward": "0.01",
    },
    "reinforce_pp_baseline": {
        "returns": None,
        "credit": "centred_batch_normalised(eps=1e-06)",
        "reduction": "per_token",
        "kl": "k2",
        "kl_in_loss": "0.01",
        "kl_in_reward": None,
    },
    "gmpo": {
        "credit": "normalised(eps=1e-06)",
        "ratio": "by_bounded_sequence(clip_log=0.4)",
        "surrogate": "unclipped",
        "reduction": "per_sequence",
    },
    "pass_at_k_training": {
        "credit": "pass_at_k_normalised(k=2, eps=1e-06)",
        "surrogate": "clipped(clip_low=0.2, clip_high=0.2)",
        "reduction": "per_sequence",
    },
    "a2c": {
        "estimator": "n_step(gamma=1, n=5)",
        "credit": "raw",
        "surrogate": "score",
        "value_loss": "squared",
    },
    "impala": {"estimator": "vtrace(gamma=1, lam=1, rho_cap=1, c_cap=1)", "surrogate": "score"},
    "ppo": {
        "estimator": "gae(gamma=1, lam=0.95)",
        "credit": "batch_normalised(eps=1e-06)",
        "ratio": "by_token",
        "surrogate": "clipped(clip_low=0.2, clip_high=0.2)",
        "value_loss": "clipped(value_clip=0.2)",
        "reduction": "per_token",
        "value_weight": "0.5",
    },
    "ppo_trajectory": {"ratio": "by_trajectory", "reduction": "per_sequence"},
    "ppo_penalty": {
        "surrogate": "unclipped",
        "control": "doubling",
        "kl_from_old": "1",
        "kl_target": "0.01",
    },
    "decoupled_ppo": {"correction": "token_truncated(weight_cap=5)"},
    "m2po": {
        "surrogate": "unclipped",
        "correction": "token_truncated(weight_cap=100)",
        "reduction": "per_token",
        "filter": "low_second_moment(max_second_moment=0.04)",
    },
    "trpo": {"credit": "leave_one_out", "surrogate": "unclipped", "reduction": "per_row"},
    "trpo_gae": {
        "estimator": "gae(gamma=1, lam=0.95)",
        "credit": "raw",
        "surrogate": "unclipped",
        "value_loss": "squared",
        "reduction": "per_row",
    },
    "trpo_penalty": {"surrogate": "unclipped", "kl_from_old": "1"},
    "grpo_trajectory": {"ratio": "by_trajectory", "reduction": "per_sequence"},
    "gspo_token": {"ratio": "by_sequence_token", "surrogate": "clipped(clip_low=0.0003, clip_high=0.0004)"},
    "sapo": {"surrogate": "soft_gated(tau_up=1, tau_down=1.05)", "reduction": "per_sequence"},
    "distill": {
        "returns": "to_go(gamma=0)",
        "credit": "raw",
        "surrogate": "score",
        "reduction": "per_token",
        "kl_in_reward": "1",
        "reward_weight": "0",
    },
    "gigpo": {"credit": "normalised(eps=1e-06)", "turn_weight": "1", "turn_gamma": "0.95"},
    "max_rl": {"credit": "over_mean(eps=1e-06)"},
    "pass_at_k": {"credit": "pass_at_k(k=2)", "surrogate": "score", "reduction": "per_row"},
    "expert_iteration": {
        "keep": "every",
        "repeats": "distinct",
        "balance": "by_task",
        "reduction": "per_row",
        "accept": "1",
    },
    "es": {"shaping": "standardised(eps=1e-08)", "noise": "mirrored", "sigma": "0.001"},
    "klq": {"reduction": "per_token", "beta": "0.1", "gamma": "1", "lam": "0.95"},
    "klq_offline": {"reduction": "per_token", "beta": "0.1", "gamma": "1", "lam": "0"},
    "dpo": {
        "implicit": "log_ratio",
        "pair_loss": "logistic(target_margin=0)",
        "divergence": None,
        "beta": "0.1",
        "pair_weight": "1",
        "sft_weight": None,
    },
    "dpo_sft": {"implicit": "log_ratio", "beta": "0.1", "sft_weight": "1"},
    "dpo_length": {"implicit": "mean_log_ratio", "beta": "5"},
    "cdpo": {"pair_loss": "smoothed(flipped=0.1)", "beta": "0.1"},
    "rdpo": {"pair_loss": "robust(flipped=0.1)", "beta": "0.1"},
    "f_dpo": {"divergence": "jensen_shannon", "pair_loss": "logistic(target_margin=0)"},
    "ipo": {"pair_loss": "squared", "beta": "0.1"},
    "slic": {"pair_loss": "hinge(delta=1)", "implicit": "log_ratio"},
    "simpo": {"implicit": "mean_logp", "pair_loss": "logistic(target_margin=1)", "beta": "2"},
    "orpo": {"implicit": "log_odds", "beta": "1", "pair_weight": "0.1", "sft_weight": "1"},
    "kto": {"beta": "0.1", "desirable_weight": "1", "undesirable_weight": "1"},
    "reward": {"pair_loss": "logistic(target_margin=0)", "margin": None, "centre": None},
    "reward_smoothed": {"pair_loss": "smoothed(flipped=0.1)"},
    "reward_margin": {"pair_loss": "logistic(target_margin=0)", "margin": "1"},
    "reward_regression": {"item_loss": "regression", "reduction": "per_row"},
    "reward_classification": {"item_loss": "classification", "reduction": "per_row"},
    "process_reward": {"item_loss": "classification", "reduction": "per_token"},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_numbers_of_the_others(name: str) -> None:
    found = described(build(name, {}, horizon=16))
    assert {key: found.get(key) for key in PUBLISHED[name]} == PUBLISHED[name]


def test_only_one_choice_of_a_method_reads_a_number_of_this_name() -> None:
    """An option would otherwise go to whichever comes first."""
    for name, choice in PAIRS:
        own = set().union(*(_numbers_of(f) for f in CHOICES[choice].values()))
        method = METHODS[name].method
        for other in choices(method):
            if other != choice:
                assert not own & set().union(*(_numbers_of(f) for f in CHOICES[other].values()))
        assert not own & set(numbers(method)), "nor may a field of the method have it"


def _numbers_of(f: Any) -> set[str]:
    return {n for n, p in inspect.signature(f).parameters.items() if isinstance(p.default, (int, float))}


def with_what_reads_it(name: str, choice: str, chosen: str) -> dict[str, Any]:
    """Options that set a choice, and with it what it is read beside."""
    options: dict[str, Any] = {choice: chosen}
    if choice == "kl":
        options["kl_in_loss"] = 0.1
    if choice == "control":
        options["kl_target"] = 0.5
        found = numbers(METHODS[name].method)
        if not found["kl_in_reward"] and not found["kl_from_old"]:
            options["kl_in_reward"] = 0.1
    return options


@pytest.mark.parametrize(("name", "choice"), PAIRS)
def test_each_choice_can_be_set_to_each_of_its_functions(name: str, choice: str) -> None:
    published = METHODS[name].method
    for chosen in CHOICES[choice]:
        options = with_what_reads_it(name, choice, chosen)
        if twice(name, choice, chosen):
            keys = ("method.correction: ", "method.running_baseline: ", "method.turn_weight: ")
            keys += ("method.reward_weight: ", "method.filter: regressed")
            assert refused(name, options).startswith(keys)
            continue
        if moves_dropped_tokens(name, choice, chosen):
            assert refused(name, options).startswith("method.filter: by_"), chosen
            continue
        if contradicts(name, choice, chosen):
            assert refused(name, options).startswith("method.credit: "), chosen
            continue
        method = build(name, options, horizon=16)
        assert function_of(getattr(method, choice)).__name__ == chosen
        if chosen not in ("total", "uncorrected", "reverse_kl", "every_token"):
            assert described(method)[choice].split("(")[0] == chosen
        changed = {c for c in choices(method) if getattr(method, c) != getattr(published, c)}
        assert changed <= {choice, "reduction"}, "a choice changed another one"


def twice(name: str, choice: str, chosen: str) -> bool:
    """Whether a method would then be corrected twice, have two baselines, or compare nothing."""
    if name == "gigpo":
        alone = ("raw", "batch_normalised", "batch_normalised_sample", "against_greedy", "normalised_by_part")
        return choice == "credit" and chosen in alone
    if (name == "distill" and chosen == "against_greedy") or (name == "m2po" and chosen == "regressed"):
        return True  # rewards that are left out, and a loss at tokens that are
    if name == "reinforce_running":
        return choice == "credit" and chosen != "raw"
    if name == "decoupled_ppo":
        return chosen == "vtrace"
    return name == "impala" and choice == "correction" and chosen != "uncorrected"


def test_a_baseline_beside_a_credit_that_has_one_is_an_error() -> None:
    assert refused("grpo", {"baseline": 0.5}).startswith(
        "method.baseline: normalised has a baseline of its own"
    )
    assert policy_gradient("reinforce", {"baseline": 0.5}).baseline == 0.5


def test_room_for_a_fine_is_within_the_longest_answer() -> None:
    assert "overlong_buffer is 20" in refused("grpo", {"overlong_buffer": 20})
    assert policy_gradient("grpo", {"overlong_buffer": 8}).horizon == 16


def moves_dropped_tokens(name: str, choice: str, chosen: str) -> bool:
    """Whether a filter would then stand beside one ratio for a whole answer."""
    if choice not in ("filter", "ratio"):
        return False
    found = {c: function_of(getattr(METHODS[name].method, c)).__name__ for c in ("filter", "ratio")}
    found[choice] = chosen
    of_answers = ("by_sequence", "by_bounded_sequence", "by_trajectory")
    return found["filter"] != "every_token" and found["ratio"] in of_answers


def contradicts(name: str, choice: str, chosen: str) -> bool:
    """Whether a method would then give credit to tokens by a rule for whole answers, or the reverse."""
    method = METHODS[name].method
    if choice not in ("returns", "credit"):
        return False
    assert isinstance(method, PolicyGradient)
    credit = chosen if choice == "credit" else function_of(method.credit).__name__
    sums = chosen if choice == "returns" else function_of(method.returns).__name__
    if isinstance(method, ActorCritic) and credit == "against_greedy":
        return True  # the critic is the baseline
    if isinstance(method, ActorCritic) or sums != "total":
        return credit not in {f.__name__ for f in BY_TOKEN}
    return credit == "optimal_by_token"  # at one place of several answers


@pytest.mark.parametrize("name", METHODS)
def test_a_choice_that_a_method_lacks_is_told_what_it_reads(name: str) -> None:
    for choice in (c for n, c in LACKED if n == name):
        message = refused(name, {choice: next(iter(CHOICES[choice]))})
        assert message.startswith(f"method.{choice}: {name} does not read {choice!r}; ")
        assert choice not in message.split("it reads ")[1].split(", ")


def test_what_each_kind_of_method_lacks() -> None:
    """Otherwise the test above could be about nothing."""
    has = {name: set(CHOICES) - {c for n, c in LACKED if n == name} for name in METHODS}
    assert has["sft"] == has["klq"] == {"reduction"}
    shared = {"credit", "ratio", "surrogate", "correction", "reduction", "kl", "control", "filter"}
    assert has["grpo"] == has["trpo"] == shared | {"returns"}
    assert has["ppo"] == has["a2c"] == has["trpo_gae"] == shared | {"estimator", "value_loss"}
    assert has["es"] == {"shaping", "noise"}
    assert has["dpo"] == {"implicit", "divergence", "pair_loss"}
    assert has["simpo"] == has["orpo"] == {"implicit", "pair_loss"}  # no reference to diverge from
    assert has["expert_iteration"] == {"keep", "repeats", "balance", "reduction"}
    assert has["reward"] == {"pair_loss"}
    assert has["process_reward"] == has["reward_regression"] == {"item_loss", "reduction"}
    assert has["kto"] == has["reward_ranking"] == set()


@pytest.mark.parametrize("reduction", ["per_token", "per_sequence", "per_row", "per_horizon"])
def test_supervised_fine_tuning_chooses_what_its_mean_is_over(reduction: str) -> None:
    method = build("sft", {"reduction": reduction}, horizon=16)
    assert isinstance(method, Imitation)
    wanted = {
        "per_token": reduce.per_token(MASK),
        "per_sequence": reduce.per_sequence(MASK),
        "per_row": reduce.per_row(MASK),
        "per_horizon": reduce.per_horizon(MASK, horizon=16),
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
    capped = policy_gradient("cispo", {"cap": 1.1, "floor": 0.9}).surrogate
    assert torch.equal(capped(x, A), surrogate.truncated(x, A, cap=1.1, floor=0.9))
    whole, both_on = policy_gradient("gmpo", {"clip_log": 0.2}).ratio, torch.ones(1, 2, dtype=torch.bool)
    wanted = ratios.by_bounded_sequence(x, x - 1, both_on, A, clip_log=0.2)
    assert torch.equal(whole(x, x - 1, both_on, A), wanted)
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
    critic = build(
        "ppo", {"lam": 0.3, "gamma": 0.9, "value_clip": 0.05, "value_weight": 2, "eps": 0.5}, horizon=16
    )
    assert isinstance(critic, ActorCritic)
    assert parameters(critic, "estimator") == {"gamma": 0.9, "lam": 0.3}
    assert torch.equal(critic.value_loss(x, A, x + 1), value.clipped(x, A, x + 1, value_clip=0.05))
    assert (critic.value_weight, parameters(critic, "credit")) == (2.0, {"eps": 0.5})
    mask = torch.ones(1, 2, dtype=torch.bool)
    path = returns.Path(A, mask, x)
    for one, other in zip(critic.estimator(path), returns.gae(path, 0.9, 0.3), strict=True):
        assert torch.equal(one, other)
    looks = build("a2c", {"n": 2}, horizon=16)
    assert parameters(looks, "estimator")["n"] == 2
    assert isinstance(parameters(looks, "estimator")["n"], int)
    kept = policy_gradient("grpo", {"correction": "token_rejected", "weight_floor": 0.7, "weight_cap": 3})
    assert torch.equal(kept.correction(x, mask), corrections.token_rejected(x, mask, 0.7, 3.0))
    steered = policy_gradient("ppo_penalty", {"control": "proportional", "gain": 0.4})
    assert steered.control(1.0, 2.0, 1.0) == control.proportional(1.0, 2.0, 1.0, gain=0.4)
    soft = build("klq", {"beta": 0.5, "lam": 0, "gamma": 1}, horizon=16)
    assert isinstance(soft, SoftQ)
    assert (soft.beta, soft.lam, soft.gamma) == (0.5, 0.0, 1.0)


def test_numbers_reach_the_losses_of_pairs() -> None:
    h = torch.tensor([0.4, -3.0])
    noisy = build("cdpo", {"flipped": 0.3, "beta": 0.7, "sft_weight": 0.2}, horizon=16)
    assert isinstance(noisy, Preference)
    assert (noisy.beta, noisy.sft_weight) == (0.7, 0.2)
    assert torch.equal(noisy.pair_loss(h, 0.7), preference.smoothed(h, 0.7, flipped=0.3))
    wide = build("simpo", {"target_margin": 0.4}, horizon=16)
    assert isinstance(wide, Preference)
    assert torch.equal(wide.pair_loss(h, 2.0), preference.logistic(h, 2.0, target_margin=0.4))
    alpha = build("f_dpo", {"divergence": "alpha_divergence", "alpha": 0.25}, horizon=16)
    assert isinstance(alpha, Preference)
    assert torch.equal(alpha.divergence(h), preference.alpha_divergence(h, alpha=0.25))
    judge = build("reward", {"margin": 0.5, "centre": 0.01, "pair_loss": "hinge", "delta": 2}, horizon=16)
    assert isinstance(judge, PairwiseReward)
    assert (judge.margin, judge.centre) == (0.5, 0.01)
    assert torch.equal(judge.pair_loss(h, 1.0), preference.hinge(h, 1.0, delta=2.0))
    process = build("process_reward", {"item_loss": "regression"}, horizon=16)
    assert isinstance(process, PointwiseReward)
    assert process.item_loss is reward.regression


def test_the_horizon_is_the_runs_own() -> None:
    for horizon in (4, 64):
        method = policy_gradient("dr_grpo", {}, horizon=horizon)
        assert torch.equal(method.reduction(MASK), reduce.per_horizon(MASK, horizon=horizon))
    assert "does not read 'horizon'" in refused("dr_grpo", {"horizon": 5})


def test_naming_a_choice_that_is_already_made_keeps_its_published_numbers() -> None:
    assert build("dapo", {"surrogate": "clipped"}, horizon=16) == METHODS["dapo"].method
    gspo = described(build("gspo", {"surrogate": "clipped", "clip_high": 0.1}, horizon=16))
    assert gspo["surrogate"] == "clipped(clip_low=0.0003, clip_high=0.1)"
    changed = described(build("gspo", {"surrogate": "dual_clipped"}, horizon=16))
    assert changed["surrogate"] == "dual_clipped(clip_low=0.2, clip_high=0.2, cap=3)"
    decoupled = described(build("decoupled_ppo", {"correction": "token_truncated"}, horizon=16))
    assert decoupled["correction"] == "token_truncated(weight_cap=5)"
    other = described(build("decoupled_ppo", {"correction": "sequence_truncated"}, horizon=16))
    assert other["correction"] == "sequence_truncated(weight_cap=2)"


def test_building_changes_no_line_of_the_table() -> None:
    before = {name: described(row.method) for name, row in METHODS.items()}
    for name in ONLINE:
        method = METHODS[name].method
        options = {"surrogate": "dual_clipped", "cap": 9.0, "kl_in_loss": 1.0}
        other = {next(iter(numbers(method)), "mix"): 0.5}
        build(name, options if isinstance(method, PolicyGradient) else other, horizon=3)
    assert before == {name: described(row.method) for name, row in METHODS.items()}


# ---------------------------------------------------------------- mistakes


def test_an_unknown_method_is_told_the_known_ones() -> None:
    message = refused("evolution", {})
    assert message.startswith("method.name: unknown method 'evolution'; ")
    assert all(name in message for name in METHODS)
    assert refused("pppo", {}) == "method.name: unknown method 'pppo'; did you mean 'ppo'?"
    with pytest.raises(UserError, match=r"^method\.name: "):
        line("gropo")
    assert set(names_of_other_trainers("methods").values()) <= METHODS.keys()
    for other, here in (
        ("GRPOTrainer", "grpo"),
        ("opd", "distill"),
        ("GKDTrainer", "gkd"),
        ("Reinforce++", "reinforce_pp"),
    ):
        assert refused(other, {}).endswith(f"did you mean {here!r}?")


@pytest.mark.parametrize(
    ("name", "options"),
    [("minillm", {"gamma": 1.0, "reduction": "per_row"}), ("slic_hf", {}),
     ("raft", {"keep": "best", "accept": 0.5}), ("best_of_n", {"keep": "best"}), ("distillation", {})],
)  # fmt: skip
def test_another_objective_is_not_another_name(name: str, options: dict[str, Any]) -> None:
    """One line says which method is nearest and how it differs; the options that it names exist."""
    message = refused(name, {})
    assert message.startswith(f"method.name: unknown method {name!r}; ")
    assert "did you mean" not in message
    assert "\n" not in message
    [nearest, *_] = [known for known in METHODS if f"'{known}'" in message]
    build(nearest, options, horizon=16)
    assert all(key in message for key in options)
    assert not names_of_other_trainers("other_methods").keys() & names_of_other_trainers("methods").keys()


@pytest.mark.parametrize("choice", CHOICES)
def test_an_unknown_choice_is_told_the_known_ones(choice: str) -> None:
    name = next(n for n, row in METHODS.items() if choice in choices(row.method))
    names = ("nonsense", "_scaled", "_spread", "weighted_sum", "exact_kl", "soft_lambda", "torch", "")
    for chosen in (*names, 3, None, ["k1"]):
        message = refused(name, {choice: chosen, "kl_in_loss": 0.1})
        assert message.startswith(f"method.{choice}: unknown {choice} {chosen!r}; one of ")
        assert all(known in message for known in CHOICES[choice])


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
        ("grpo", "mask"),
        ("grpo", "start"),
        ("grpo", "unread"),
        ("grpo", "estimator"),
        ("grpo", "lam"),
        ("grpo", "value_weight"),
        ("grpo", "weight_cap"),
        ("ppo", "returns"),
        ("ppo", "baseline"),
        ("ppo", "running_baseline"),
        ("ppo", "n"),
        ("a2c", "lam"),
        ("a2c", "value_clip"),
        ("trpo", "clip_low"),
        ("trpo", "max_kl"),
        ("rloo", "k"),
        ("klq", "credit"),
        ("klq", "kl_in_reward"),
        ("sft", "gamma"),
        ("dpo", "flipped"),
        ("dpo", "delta"),
        ("dpo", "alpha"),
        ("dpo", "reduction"),
        ("dpo", "unit"),
        ("ipo", "target_margin"),
        ("cdpo", "target_margin"),
        ("kto", "pair_loss"),
        ("kto", "sft_weight"),
        ("kto", "probes"),
        ("reward", "beta"),
        ("reward", "implicit"),
        ("reward_regression", "margin"),
    ],
)
def test_an_option_that_nothing_reads_is_told_what_is_read(name: str, key: str) -> None:
    message = refused(name, {key: 0.3})
    assert message.startswith(f"method.{key}: {name} does not read {key!r}; ")
    listed = message.split("it reads ")[1].split(", ")
    assert listed == sorted(readable(METHODS[name].method))
    assert key not in listed


def test_a_translated_option_is_followed_by_no_list() -> None:
    assert refused("grpo", {"num_iterations": 2}).endswith("; it is steps.epochs here")
    both = refused("grpo", {"num_iterations": 2, "loss_agg_mode": "x"})
    assert "it reads" not in both
    # Only the nearest name, or what another method reads: the list follows.
    assert "did you mean 'kl_in_loss'?; it reads baseline, " in refused("grpo", {"kl_in_los": 0.1})
    assert "it reads baseline, " in refused("grpo", {"num_iterations": 2, "colour": 1})
    assert refused("reward", {"kl_coef": 0.1}).count("it reads ") == 1


def test_a_number_is_read_only_by_the_function_that_was_chosen() -> None:
    assert "does not read 'eps'" in refused("grpo", {"credit": "centred", "eps": 0.1})
    assert "does not read 'clip_low'" in refused("grpo", {"surrogate": "score", "clip_low": 0.1})
    assert "cap" in readable(build("grpo", {"surrogate": "truncated"}, horizon=16))


def test_an_estimator_that_no_penalty_uses_is_an_error() -> None:
    for options in ({"kl": "k1"}, {"kl": "k3", "kl_in_loss": 0.0}, {"kl": "k2", "kl_in_reward": 0.1}):
        assert refused("grpo", options).startswith("method.kl: nothing reads kl while kl_in_loss is 0")


@pytest.mark.parametrize(
    "options", [{"control": "doubling"}, {"control": "proportional", "kl_in_reward": 0.1, "kl_target": 0}]
)
def test_a_control_that_follows_no_target_is_an_error(options: dict[str, Any]) -> None:
    assert refused("grpo", options).startswith("method.control: nothing reads control while kl_target is 0")


def test_a_target_has_exactly_one_penalty_that_follows_it() -> None:
    for name in ("grpo", "ppo", "trpo"):
        said = refused(name, {"kl_target": 0.1})
        assert said.startswith("method.kl_target: no penalty follows the target; set one of ")
        in_loss = refused(name, {"kl_target": 0.1, "kl_in_loss": 0.1})
        assert in_loss.startswith("method.kl_target: no penalty follows the target")
        for one in ("kl_in_reward", "kl_from_old"):
            method = policy_gradient(name, {"kl_target": 0.1, one: 0.3})
            assert method.start == {"beta": 0.3}
    both = {"kl_target": 0.1, "kl_in_reward": 0.1, "kl_from_old": 0.1}
    for name, options in (("ppo", both), ("ppo_penalty", {"kl_in_reward": 0.1})):
        assert refused(name, options).startswith("method.kl_target: two penalties could follow the target")
    assert "no penalty" in refused("ppo_penalty", {"kl_from_old": 0})
    assert policy_gradient("ppo_penalty", {"kl_target": 0}).start == {}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"credit": "leave_one_out"}),
        ("a2c", {"credit": "normalised"}),
        ("rloo", {"returns": "to_go"}),
        ("grpo", {"returns": "total_by_token"}),
        ("reinforce_to_go", {"credit": "pass_at_k"}),
        ("opo", {"credit": "over_mean"}),
    ],
)
def test_a_credit_over_answers_has_nothing_to_say_of_tokens(name: str, options: dict[str, Any]) -> None:
    message = refused(name, options)
    assert message.startswith("method.credit: ")
    assert "compares whole answers, and here each token is credited" in message
    by_token = "centred, optimal_by_token, batch_normalised, batch_normalised_sample"
    greedy = "" if name in ("ppo", "a2c") else "against_greedy, "
    assert message.endswith(f"take raw, {greedy}{by_token}")


@pytest.mark.parametrize("name", ["ppo", "trpo_gae", "impala"])
def test_a_critic_and_a_greedy_answer_are_two_baselines(name: str) -> None:
    message = refused(name, {"credit": "against_greedy"})
    assert message.startswith("method.credit: against_greedy subtracts the greedy answer's reward")
    assert "against_greedy" not in message.partition("take ")[2]


def test_a_count_is_a_whole_number() -> None:
    for name, key in (("pass_at_k", "k"), ("a2c", "n")):
        for bad in (2.5, 0, -1, True, "2", math.nan, math.inf, None):
            assert re.match(f"method.{key}: {UNFIT}", refused(name, {key: bad})), bad


@pytest.mark.parametrize(
    ("name", "key"), [("ppo", "gamma"), ("ppo", "lam"), ("klq", "lam"), ("klq", "gamma")]
)
def test_a_discount_is_at_most_1(name: str, key: str) -> None:
    for bad in (1.0001, 2, -0.1):
        assert refused(name, {key: bad}).endswith(
            f"{LEAST} 0, got {bad}" if bad < 0 else f"{MOST} 1, got {bad}"
        )
    for good in (0, 0.5, 1):
        build(name, {key: good}, horizon=16)


@pytest.mark.parametrize("key", ["running_baseline", "running_scale"])
def test_an_average_that_never_learns_is_an_error(key: str) -> None:
    assert f"{MOST} 0.9999" in refused("reinforce", {key: 1.0})


def test_bounds_that_would_cut_a_fresh_sample_and_a_temperature_of_nothing_are_errors() -> None:
    rejected = {"correction": "token_rejected"}
    assert f"{LEAST} 1" in refused("grpo", {**rejected, "weight_cap": 0.9})
    assert f"{MOST} 1" in refused("grpo", {**rejected, "weight_floor": 1.1})
    for key in ("tau_up", "tau_down"):
        assert f"{LEAST} 0.001" in refused("sapo", {key: 0})


def test_numbers_of_preferences_have_their_ranges() -> None:
    for name in ("cdpo", "rdpo", "reward_smoothed"):
        assert refused(name, {"flipped": 0.5}).endswith(f"{MOST} 0.499, got 0.5")
    for name in ("dpo", "ipo", "simpo", "orpo", "kto"):
        assert f"{LEAST} 0.000001" in refused(name, {"beta": 0})
    chosen = {"divergence": "alpha_divergence"}
    for alpha in (0, 1.5):
        bound = f"{MOST} 1" if alpha else f"{LEAST} 0.001"
        assert refused("dpo", {**chosen, "alpha": alpha}).endswith(f"{bound}, got {alpha}")
    for name, key in (("dpo", "sft_weight"), ("kto", "desirable_weight"), ("reward", "margin")):
        assert f"{LEAST} 0" in refused(name, {key: -1})


@pytest.mark.parametrize(
    "key",
    ["clip_low", "clip_high", "eps", "kl_in_loss", "kl_in_reward", "kl_from_old", "kl_target", "baseline"],
)
@pytest.mark.parametrize("given", ["0.2", None, True, [0.2], math.nan, math.inf, 10**400, {"x": 1}])
def test_a_value_that_is_no_number_is_an_error(key: str, given: object) -> None:
    assert re.match(f"method.{key}: {UNFIT}", refused("grpo", {key: given}))


@pytest.mark.parametrize("key", ["clip_low", "clip_high", "eps", "kl_in_loss", "kl_in_reward"])
def test_a_negative_distance_or_penalty_is_an_error(key: str) -> None:
    assert f"{LEAST} 0" in refused("grpo", {key: -0.1})


@pytest.mark.parametrize(("name", "extra"), [("cispo", {}), ("grpo", {"surrogate": "dual_clipped"})])
def test_a_cap_that_would_cut_the_on_policy_ratio_is_an_error(name: str, extra: dict[str, Any]) -> None:
    assert f"{LEAST} 1" in refused(name, {"cap": 0.5, **extra})


# ---------------------------------------------------------------- the table as text


@pytest.mark.parametrize("name", METHODS)
def test_every_line_describes_itself_and_every_choice_is_documented(name: str) -> None:
    row = METHODS[name]
    assert row.title
    assert row.source
    assert row.loop in ("online", "offline")
    text = described(row.method)
    assert set(text) <= set(CHOICES) | set(readable(row.method))
    assert row.step in ("adamw", "trust_region", "evolution")
    assert row.learns in ("text", "answers", "rankings", "labels", "steps")
    assert row.method.unit in ("token", "row", "group")
    for choice in CHOICES:
        for chosen in CHOICES[choice]:
            assert inspect.getdoc(CHOICES[choice][chosen])


def test_numbers_are_described_where_they_are_not_zero() -> None:
    text = described(build("grpo", {"kl_in_loss": 0.04, "kl": "k2", "entropy_bonus": 1e-3}, horizon=16))
    assert (text["kl"], text["kl_in_loss"], text["entropy_bonus"]) == ("k2", "0.04", "0.001")
    assert "kl_in_reward" not in text
    assert "kl" not in described(build("grpo", {"kl_in_reward": 0.04}, horizon=16))


def test_names_are_the_public_functions_and_nothing_imported() -> None:
    assert "fill" not in CHOICES["ratio"]
    assert "group_mean" not in CHOICES["credit"]
    assert "weighted_sum" not in CHOICES["reduction"]
    assert all(f.__name__ == n for functions in CHOICES.values() for n, f in functions.items())
    assert ratios.by_token.__name__ in CHOICES["ratio"]
    assert list(CHOICES["estimator"]) == ["monte_carlo", "td", "n_step", "gae", "decoupled_gae", "vtrace"]
    assert list(CHOICES["returns"]) == ["total", "total_by_token", "to_go"]
    assert list(CHOICES["control"]) == ["doubling", "proportional"]
    assert not any(n.startswith("_") for c in CHOICES for n in CHOICES[c])


def test_a_credit_that_compares_needs_a_group() -> None:
    """least_group says so in the table: with a single answer these would learn nothing, or raise."""
    alone = {"raw", "against_greedy", "batch_normalised", "batch_normalised_sample"}
    for name in ONLINE:
        method = METHODS[name].method
        credit = function_of(method.credit).__name__ if isinstance(method, PolicyGradient) else "raw"
        alike = credit in alone and method.unit != "group" and METHODS[name].has_loss
        wanted = 1 if alike else 3 if credit.startswith("pass_at_k") else 2
        assert method.least_group == wanted, name
    for k in (1, 2, 5):
        assert build("pass_at_k", {"k": k}, horizon=16).least_group == k + 1
        assert build("rloo", {"credit": "pass_at_k", "k": k}, horizon=16).least_group == k + 1
    assert build("rloo", {"credit": "raw"}, horizon=16).least_group == 1
    assert METHODS["sft"].method.least_group == 1
    assert METHODS["online_dpo"].method.least_group == 2


@pytest.mark.parametrize("credit", CHOICES["credit"].values(), ids=CHOICES["credit"])
def test_fewer_than_least_group_would_learn_nothing_and_as_many_do_learn(credit: Any) -> None:
    enough = replace(policy_gradient("rloo", {}), credit=credit).least_group
    for size in range(1, 6):
        R, group = torch.arange(1.0, size + 1), torch.zeros(size, dtype=torch.long)
        if credit in (advantages.batch_normalised, advantages.batch_normalised_sample):
            # What it compares with are the episodes of other tasks.
            R, group = torch.tensor([*R.tolist(), 9.0]), torch.tensor([*group.tolist(), 1])
        columns = {"parts": R[:, None], "weights": torch.ones(1), "greedy": torch.zeros_like(R)}
        columns |= {"step": torch.zeros_like(group), "score_norm": torch.ones_like(R)}
        given = partial(credit, **{name: x for name, x in columns.items() if takes(credit, name)})
        if size >= enough:
            assert bool(given(R, group).any())
        elif credit in (advantages.leave_one_out, pass_at_k.pass_at_k, pass_at_k.pass_at_k_normalised):
            with pytest.raises(ValueError, match="in every group"):
                given(R, group)
        else:
            assert not given(R, group).any()


def test_which_methods_may_be_given_older_samples() -> None:
    imitates = {name for name in ONLINE if isinstance(METHODS[name].method, ExpertIteration)}
    own = {"impala", "decoupled_ppo", "gkd", "kpop", "aipo", "m2po"}
    assert {name for name in ONLINE if METHODS[name].method.corrects} == own | imitates
    assert build("grpo", {"correction": "token_truncated"}, horizon=16).corrects
    assert not build("decoupled_ppo", {"correction": "uncorrected"}, horizon=16).corrects
    assert build("ppo", {"estimator": "vtrace"}, horizon=16).corrects
    assert not build("impala", {"estimator": "gae"}, horizon=16).corrects
    assert build("klq", {"lam": 0}, horizon=16).corrects
    assert not build("klq", {"lam": 0.1}, horizon=16).corrects
