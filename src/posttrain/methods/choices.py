"""What a method is made of, as text and as options: its choices, their numbers, and what it reads."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from types import ModuleType
from typing import Any

from posttrain.math import (
    advantages,
    control,
    corrections,
    kl,
    preference,
    ratios,
    reduce,
    returns,
    reward,
    selection,
    surrogate,
    value,
)
from posttrain.methods.imitation import ExpertIteration
from posttrain.types import Method

Functions = Mapping[str, Callable[..., Any]]


def _public(module: ModuleType, leave_out: tuple[str, ...] = ()) -> Functions:
    """The functions that a file of math/ defines, by name."""
    return {
        name: found
        for name, found in vars(module).items()
        if inspect.isfunction(found) and found.__module__ == module.__name__
        if not name.startswith("_") and name not in leave_out
    }


def _named(*functions: Callable[..., Any]) -> Functions:
    return {f.__name__: f for f in functions}


PSI = _named(returns.monte_carlo, returns.td, returns.n_step, returns.gae, returns.vtrace)

CHOICES: Mapping[str, Functions] = {
    "returns": _named(returns.total, returns.total_by_token, returns.to_go),
    "psi": PSI,
    "credit": _public(advantages),
    "ratio": _public(ratios),
    "surrogate": _public(surrogate),
    "correction": _public(corrections),
    "value_loss": _public(value),
    "implicit": _named(
        preference.log_ratio, preference.mean_log_ratio, preference.mean_logp, preference.log_odds
    ),
    "divergence": _named(
        preference.reverse_kl, preference.forward_kl, preference.jensen_shannon, preference.alpha_divergence
    ),
    "pair_loss": _named(
        preference.logistic,
        preference.squared,
        preference.hinge,
        preference.exponential,
        preference.smoothed,
        preference.robust,
    ),
    "item_loss": _named(reward.regression, reward.classification),
    "keep": _named(selection.every, selection.best),
    "repeats": _named(selection.distinct, selection.counted),
    "balance": _named(selection.unbalanced, selection.by_task),
    "reduction": _public(reduce, ("weighted_sum", "per_group")),
    "kl": _public(kl, ("exact",)),
    "control": _public(control),
}
"""What each choice of a method can be set to: functions of math/, by name."""

WITHIN_GROUP = (
    advantages.centred,
    advantages.normalised,
    advantages.normalised_sample,
    advantages.leave_one_out,
    advantages.over_mean,
    advantages.pass_at_k,
    advantages.pass_at_k_normalised,
    advantages.centred_batch_normalised,
)
"""Credits that compare the episodes of a task with one another."""

BY_TOKEN = (
    advantages.raw,
    advantages.centred,
    advantages.batch_normalised,
    advantages.batch_normalised_sample,
)
"""Credits that make sense where each token is credited by itself."""


def names(choice: str) -> list[str]:
    """The functions that a choice can be set to.

    >>> names("kl")
    ['k1', 'k2', 'k3']
    """
    return list(CHOICES[choice])


def least_group(method: Method) -> int:
    """The fewest episodes of a task that the method can say anything of.

    What is about the best of k needs one more than k, what compares within a group or its answers 2, and
    anything else 1.
    """
    credit = getattr(method, "credit", advantages.raw)
    if function(credit) in (advantages.pass_at_k, advantages.pass_at_k_normalised):
        return int(parameters(method, "credit")["k"]) + 1
    return 2 if function(credit) in WITHIN_GROUP or method.unit == "group" else 1


def corrects(method: Method) -> bool:
    """Whether the method makes up for tokens that an older policy drew.

    A Q learns from anybody's tokens as long as its targets look one step ahead only, and an answer that is
    accepted is imitated whoever gave it.
    """
    if isinstance(method, ExpertIteration):
        return True
    correction = getattr(method, "correction", corrections.uncorrected)
    off_policy = getattr(method, "off_policy", False)
    return correction is not corrections.uncorrected or off_policy or vars(method).get("lam") == 0


def discount(method: Method) -> float:
    """γ of what credits the method's tokens; 1 for a method that discounts nothing."""
    owner = next((c for c in ("psi", "returns") if c in choices(method)), "")
    return float(parameters(method, owner).get("gamma", vars(method).get("gamma", 1.0)))


def readable(method: Method) -> set[str]:
    """Every option that this method, as chosen, would read."""
    within = {p for c in choices(method) for p in parameters(method, c)} - {"horizon"}
    return {*choices(method), *within, *numbers(method)}


def described(method: Method) -> dict[str, str]:
    """The method's choices and numbers as text, for the table, the plan and the report.

    As in {'surrogate': 'clipped(clip_low=0.2, clip_high=0.28)', 'reduction': 'per_token'}.
    """
    out = {}
    for c in choices(method):
        if _shown(method, c):
            fixed = ", ".join(f"{k}={v:g}" for k, v in parameters(method, c).items() if v is not None)
            out[c] = function(vars(method)[c]).__name__ + (f"({fixed})" if fixed else "")
    usual = {f.name: f.default for f in fields(method)}  # type: ignore[arg-type]
    told = {key: number for key, number in numbers(method).items() if number or usual[key]}
    return out | {key: f"{number:g}" for key, number in told.items()}


def _shown(method: Method, choice: str) -> bool:
    """Whether a choice says anything: not an estimator without a penalty, nor a default that does nothing."""
    if choice in ("kl", "control"):
        return bool(numbers(method)["kl_in_loss" if choice == "kl" else "kl_target"])
    return vars(method)[choice] not in (returns.total, corrections.uncorrected, preference.reverse_kl)


def choices(method: Method) -> list[str]:
    """The choices that a method has and reads."""
    unread: frozenset[str] = getattr(method, "unread", frozenset())
    return [c for c in CHOICES if c in vars(method) and c not in unread]


def numbers(method: Method) -> dict[str, float]:
    """The numbers among a method's own fields."""
    unread: frozenset[str] = getattr(method, "unread", frozenset())
    return {k: v for k, v in vars(method).items() if isinstance(v, float) and k not in unread}


def function(chosen: Callable[..., Any]) -> Callable[..., Any]:
    """What is chosen, without the numbers that a partial has fixed."""
    while isinstance(chosen, partial):
        chosen = chosen.func
    return chosen


def parameters(method: Method, choice: str) -> dict[str, Any]:
    """Numbers that the chosen function takes, with the values it would be called with."""
    if choice not in vars(method):
        return {}
    signature = inspect.signature(vars(method)[choice])
    return {
        name: None if p.default is p.empty else p.default
        for name, p in signature.parameters.items()
        if isinstance(p.default, (int, float)) or name == "horizon"
    }
