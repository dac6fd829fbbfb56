"""Every method as the difference to its neighbour, and the table that `posttrain methods` prints.

This dict is the registry: to add a method, add a line.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from posttrain.math import advantages, control, corrections, ratios, reduce, returns, surrogate, value
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.choices import (
    BY_TOKEN,
    CHOICES,
    choices,
    function,
    names,
    numbers,
    parameters,
    readable,
)
from posttrain.methods.imitation import Imitation
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.q_learning import SoftQ
from posttrain.types import Method, UserError

GRPO = PolicyGradient(advantages.normalised, ratios.by_token, surrogate.clipped, reduce.per_sequence)
REINFORCE = replace(GRPO, credit=advantages.raw, surrogate=surrogate.score, reduction=reduce.per_row)
TO_GO = replace(REINFORCE, returns=returns.to_go)
RUNNING = replace(REINFORCE, running_baseline=0.9)
OPO = replace(REINFORCE, returns=returns.total_by_token, credit=advantages.centred)
RLOO = replace(REINFORCE, credit=advantages.leave_one_out)
REINFORCE_PP = replace(
    GRPO,
    returns=returns.to_go,
    credit=advantages.batch_normalised,
    reduction=reduce.per_token,
    kl_in_reward=0.01,
)
GRPO_TRAJECTORY = replace(GRPO, ratio=ratios.by_trajectory)
DR_GRPO = replace(GRPO, credit=advantages.centred, reduction=reduce.per_horizon)
DAPO = replace(GRPO, surrogate=partial(surrogate.clipped, clip_high=0.28), reduction=reduce.per_token)
GSPO = replace(
    GRPO,
    ratio=ratios.by_sequence,
    surrogate=partial(surrogate.clipped, clip_low=3e-4, clip_high=4e-4),
)
GSPO_TOKEN = replace(GSPO, ratio=ratios.by_sequence_token)
CISPO = replace(DAPO, surrogate=surrogate.truncated)
SAPO = replace(GRPO, surrogate=surrogate.soft_gated)
MAX_RL = replace(GRPO, credit=advantages.over_mean)
PASS_AT_K = replace(RLOO, credit=advantages.pass_at_k)

LEARNED = ActorCritic(
    advantages.raw, ratios.by_token, surrogate.score, reduce.per_row, psi=returns.monte_carlo
)
A2C = replace(LEARNED, psi=returns.n_step)
IMPALA = replace(A2C, psi=returns.vtrace)
PPO = replace(
    LEARNED,
    psi=returns.gae,
    credit=advantages.batch_normalised,
    surrogate=surrogate.clipped,
    reduction=reduce.per_token,
    value_loss=value.clipped,
)
PPO_TRAJECTORY = replace(PPO, ratio=ratios.by_trajectory, reduction=reduce.per_sequence)
PPO_PENALTY = replace(
    PPO, surrogate=surrogate.unclipped, kl_from_old=1.0, kl_target=0.01, control=control.doubling
)
DECOUPLED = replace(PPO, correction=partial(corrections.token_truncated, weight_cap=5.0))
TRPO = replace(RLOO, surrogate=surrogate.unclipped)
TRPO_PENALTY = replace(TRPO, kl_from_old=1.0)

KLQ = SoftQ(reduce.per_token)
KLQ_OFFLINE = replace(KLQ, lam=0.0)
SFT = Imitation(reduce.per_token)


@dataclass(frozen=True)
class Line:
    """One row of the table: a method and what a reader wants to know before choosing it."""

    method: Method
    title: str
    source: str
    loop: str = "online"
    """online (samples from the policy) or offline (learns from a dataset)."""
    step: str = "adamw"
    """adamw, or trust_region: the natural gradient under a bound of the KL."""


METHODS: Mapping[str, Line] = {
    "sft": Line(SFT, "supervised fine-tuning", "seed 002, eq. 2.2", loop="offline"),
    "reinforce": Line(REINFORCE, "REINFORCE, no baseline", "Williams 1992"),
    "reinforce_to_go": Line(TO_GO, "REINFORCE, a token earns what comes after it", "seed 004"),
    "reinforce_running": Line(RUNNING, "REINFORCE, running average as baseline", "Williams 1992"),
    "reinforce_critic": Line(LEARNED, "REINFORCE, learned baseline", "Sutton et al. 2000"),
    "opo": Line(OPO, "REINFORCE, baseline of least variance by length", "arXiv:2505.23585"),
    "rloo": Line(RLOO, "REINFORCE, leave one out", "arXiv:2402.14740"),
    "reinforce_pp": Line(
        REINFORCE_PP, "REINFORCE++: whitened over the batch, KL in the reward", "arXiv:2501.03262"
    ),
    "a2c": Line(A2C, "advantage actor-critic, n steps", "arXiv:1602.01783"),
    "impala": Line(IMPALA, "actor-critic with V-trace, for older samples", "arXiv:1802.01561"),
    "ppo": Line(PPO, "proximal policy optimisation, GAE", "arXiv:1707.06347"),
    "ppo_trajectory": Line(PPO_TRAJECTORY, "PPO with one ratio an answer", "seed 000"),
    "ppo_penalty": Line(
        PPO_PENALTY, "PPO with an adaptive KL penalty for clipping", "arXiv:1707.06347, section 4"
    ),
    "decoupled_ppo": Line(DECOUPLED, "PPO: behaviour, proximal and current policy", "arXiv:2505.24298"),
    "trpo": Line(TRPO, "trust region, natural gradient", "arXiv:1502.05477", step="trust_region"),
    "trpo_penalty": Line(TRPO_PENALTY, "trust region as a fixed penalty", "arXiv:1502.05477"),
    "grpo": Line(GRPO, "group-relative policy optimisation", "arXiv:2402.03300"),
    "grpo_trajectory": Line(GRPO_TRAJECTORY, "GRPO with one ratio an answer", "seed 000"),
    "dr_grpo": Line(DR_GRPO, "GRPO without its two divisions", "arXiv:2503.20783"),
    "dapo": Line(DAPO, "GRPO by token, clipped higher", "arXiv:2503.14476"),
    "gspo": Line(GSPO, "GRPO with a length-normalised ratio a sequence", "arXiv:2507.18071"),
    "gspo_token": Line(GSPO_TOKEN, "GSPO, gradient token by token", "arXiv:2507.18071, eq. 14"),
    "cispo": Line(CISPO, "truncated ratios, no token dropped", "arXiv:2506.13585"),
    "sapo": Line(SAPO, "GRPO with soft gates for clipping", "arXiv:2511.20347"),
    "max_rl": Line(MAX_RL, "GRPO over the mean: the likelihood of success", "arXiv:2602.02710"),
    "pass_at_k": Line(PASS_AT_K, "gradient of pass@k, leave one out", "arXiv:2505.15201"),
    "klq": Line(KLQ, "KL-regularised Q-learning on tokens", "arXiv:2508.17000"),
    "klq_offline": Line(
        KLQ_OFFLINE, "the same from answers that have a reward", "arXiv:1702.08892", "offline"
    ),
}

LEAST: Mapping[str, float] = {
    "cap": 1.0,
    "weight_cap": 1.0,
    "tau_up": 1e-3,
    "tau_down": 1e-3,
    "rho_cap": 1e-3,
    "beta": 1e-6,
    "entropy_bonus": -math.inf,
    "baseline": -math.inf,
    "k": 1,
    "n": 1,
}
"""The smallest value of a number, where it is not 0. A cap below 1 would cut a fresh sample's ratio, 1; a τ
is divided by; with a ρ or a β of 0 there is nothing to learn."""

MOST: Mapping[str, float] = {
    "gamma": 1.0,
    "lam": 1.0,
    "running_baseline": 0.9999,
    "running_scale": 0.9999,
    "weight_floor": 1.0,
}
"""The largest value of a number that has one."""


def build(name: str, options: Mapping[str, Any], *, horizon: int) -> Method:
    """The named method with these options over its published defaults.

    Options are the fields of its dataclass, the names of other functions for its choices, and
    the numbers of the function chosen (clip_low, cap, eps ...). An option that nothing would
    read is an error, and so is a value that is not a number in range. A choice set to what the
    method has already keeps its published numbers. horizon is the most tokens an answer may
    have (for reduce.per_horizon).

    Raises UserError for an unknown method, choice or option, and for a bad value.

    >>> build("grpo", {"credit": "centred", "clip_high": 0.3}, horizon=64).credit.__name__
    'centred'
    """
    method = line(name).method
    for key, chosen in options.items():
        if key in choices(method):
            if chosen not in names(key):
                raise UserError(
                    f"unknown {key} {chosen!r}", where=f"method.{key}", mend=f"one of {', '.join(names(key))}"
                )
            if CHOICES[key][chosen] is not function(getattr(method, key)):
                method = _with(method, key, CHOICES[key][chosen])
    for key, given in options.items():
        if key in choices(method):
            continue
        if key not in readable(method):
            raise UserError(
                f"{name} does not read {key!r}",
                where=f"method.{key}",
                mend=f"it reads {', '.join(sorted(readable(method)))}",
            )
        if key in numbers(method):
            method = _with(method, key, _checked(key, given, float))
        else:
            owner = next(c for c in choices(method) if key in parameters(method, c))
            number = _checked(key, given, type(parameters(method, owner)[key]))
            method = _with(method, owner, partial(getattr(method, owner), **{key: number}))
    for key, what, mend in _contradictions(method, options):
        raise UserError(what, where=f"method.{key}", mend=mend)
    if "horizon" in parameters(method, "reduction"):
        method = _with(method, "reduction", partial(vars(method)["reduction"], horizon=horizon))
    if (buffer := getattr(method, "overlong_buffer", 0.0)) > horizon:
        raise UserError(
            f"overlong_buffer is {buffer:g}, and the longest answer has {horizon} tokens",
            where="method.overlong_buffer",
            mend="give fewer",
        )
    if getattr(method, "overlong_buffer", 0.0):
        method = _with(method, "horizon", horizon)
    return method


def _contradictions(method: Method, options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, mend) of options that exclude one another, or that nothing reads as others are."""
    found = numbers(method)
    if "kl" in options and not found["kl_in_loss"]:
        yield "kl", "nothing reads kl while kl_in_loss is 0", "set method.kl_in_loss, or leave method.kl out"
    if not isinstance(method, PolicyGradient):
        return
    if "control" in options and not method.kl_target:
        yield "control", "nothing reads control while kl_target is 0", "set method.kl_target too"
    if method.kl_target and bool(method.kl_in_reward) == bool(method.kl_from_old):
        what = "two penalties could follow" if method.kl_in_reward else "no penalty follows"
        yield "kl_target", f"{what} the target", "set one of method.kl_in_reward and method.kl_from_old"
    off_policy = isinstance(method, ActorCritic) and method.off_policy
    if off_policy and method.correction is not corrections.uncorrected:
        yield (
            "correction",
            "vtrace weighs its advantages already",
            "leave correction out, or take another psi",
        )
    if (method.baseline or method.running_baseline) and function(method.credit) is not advantages.raw:
        key = "baseline" if method.baseline else "running_baseline"
        yield (
            key,
            f"{function(method.credit).__name__} has a baseline of its own",
            "set method.credit to 'raw'",
        )
    by_token = isinstance(method, ActorCritic) or function(method.returns) is not returns.total
    if by_token and function(method.credit) not in BY_TOKEN:
        yield (
            "credit",
            f"{function(method.credit).__name__} compares whole answers, and here each token is credited",
            f"take {', '.join(f.__name__ for f in BY_TOKEN)}",
        )


def line(name: str) -> Line:
    """The table's line of this name; UserError with the known names if there is none."""
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}", where="method.name", mend=f"one of {', '.join(METHODS)}")
    return METHODS[name]


def _checked(key: str, given: Any, kind: type) -> float | int:
    least, most = LEAST.get(key, 0.0), MOST.get(key, sys.float_info.max)
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if (
        is_number
        and given >= least
        and -sys.float_info.max <= given <= most
        and (kind is float or given == int(given))
    ):
        return float(given) if kind is float else int(given)
    wanted = "a number" if kind is float else "a whole number"
    wanted += f", {least:g} or more" if least > -math.inf else ""
    wanted += f", at most {most:g}" if key in MOST else ""
    raise UserError(f"{key} is {given!r}", where=f"method.{key}", mend=f"give {wanted}")


def _with(method: Method, key: str, chosen: Any) -> Method:
    return replace(method, **{key: chosen})  # type: ignore[type-var]
