"""A method from its name and a recipe's options, of which each is checked and must be read."""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from posttrain.math import advantages, corrections, returns
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.choices import (
    BY_TOKEN,
    CHOICES,
    choices,
    discount,
    function,
    names,
    numbers,
    parameters,
    readable,
)
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import line
from posttrain.nearest import did_you_mean, elsewhere
from posttrain.types import Method, UserError

LEAST: Mapping[str, float] = {
    "cap": 1.0,
    "weight_cap": 1.0,
    "tau_up": 1e-3,
    "tau_down": 1e-3,
    "rho_cap": 1e-3,
    "beta": 1e-6,
    "entropy_bonus": -math.inf,
    "baseline": -math.inf,
    "accept": -math.inf,
    "k": 1,
    "n": 1,
    "alpha": 1e-3,
}
"""The smallest value of a number, where it is not 0. A cap below 1 would cut a fresh sample's ratio, 1; a τ
is divided by; with a ρ or a β of 0 there is nothing to learn."""

MOST: Mapping[str, float] = {
    "gamma": 1.0,
    "lam": 1.0,
    "running_baseline": 0.9999,
    "running_scale": 0.9999,
    "weight_floor": 1.0,
    "floor": 1.0,
    "flipped": 0.499,
    "alpha": 1.0,
}
"""The largest value of a number that has one."""


def build(name: str, options: Mapping[str, Any], *, horizon: int, potentials: bool = False) -> Method:
    """The named method with these options over its published defaults.

    Options are the fields of its dataclass, the names of other functions for its choices, and
    the numbers of the function chosen (clip_low, cap, eps ...). An option that nothing would
    read is an error, and so is a value that is not a number in range. A choice set to what the
    method has already keeps its published numbers. horizon is the most tokens an answer may
    have (for reduce.per_horizon). With `potentials` tokens are paid what a potential gains, and the last one
    what the score is above it, as a verifier pays them: a discount is then put into these rewards.

    Raises UserError for an unknown method, choice or option, and for a bad value.

    >>> build("grpo", {"credit": "centred", "clip_high": 0.3}, horizon=64).credit.__name__
    'centred'
    """
    method = _chosen(name, options)
    if foreign := strangers(name, options):
        reads = f"it reads {', '.join(sorted(readable(method))) or 'no options'}"
        hints = "; ".join(filter(None, foreign.values()))
        # What a choice needs may be near in name and of no use, so all that it could be is there too.
        mend = f"{hints}; {reads}" if hints else reads
        keys = ", ".join(map(repr, foreign))
        raise UserError(f"{name} does not read {keys}", where=f"method.{next(iter(foreign))}", mend=mend)
    for key, given in options.items():
        if key in choices(method):
            continue
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
    gamma = discount(method)
    return (
        _with(method, "shaped", partial(returns.shaped, gamma=gamma)) if potentials and gamma < 1 else method
    )


def strangers(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The options that the method of that name would not read, each with what it may have meant, or nothing.

    Raises UserError for an unknown method or choice.
    """
    method = _chosen(name, options)
    known = readable(method)
    return {
        key: elsewhere(key) or did_you_mean(key, known)
        for key in options
        if key not in known and key not in choices(method)
    }


def _chosen(name: str, options: Mapping[str, Any]) -> Method:
    """The method with the functions that these options choose, and with its own numbers."""
    method = line(name).method
    for key, chosen in options.items():
        if key in choices(method):
            if chosen not in names(key):
                raise UserError(
                    f"unknown {key} {chosen!r}", where=f"method.{key}", mend=f"one of {', '.join(names(key))}"
                )
            if CHOICES[key][chosen] is not function(getattr(method, key)):
                method = _with(method, key, CHOICES[key][chosen])
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
