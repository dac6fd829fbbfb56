"""Every method as the difference to its neighbour, and the table that `posttrain methods` prints.

This dict is the registry: to add a method, add a line.
"""

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from posttrain.math import advantages, kl, ratios, reduce, surrogate
from posttrain.methods.imitation import Imitation
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.types import Method, UserError

GRPO = PolicyGradient(advantages.normalised, ratios.by_token, surrogate.clipped, reduce.per_sequence)
REINFORCE = replace(GRPO, credit=advantages.raw, surrogate=surrogate.score, reduction=reduce.per_row)
RLOO = replace(REINFORCE, credit=advantages.leave_one_out)
DR_GRPO = replace(GRPO, credit=advantages.centred, reduction=reduce.per_horizon)
DAPO = replace(GRPO, surrogate=partial(surrogate.clipped, clip_high=0.28), reduction=reduce.per_token)
GSPO = replace(
    GRPO,
    ratio=ratios.by_sequence,
    surrogate=partial(surrogate.clipped, clip_low=3e-4, clip_high=4e-4),
)
CISPO = replace(DAPO, surrogate=surrogate.truncated)
SFT = Imitation(reduce.per_token)


@dataclass(frozen=True)
class Line:
    """One row of the table: a method and what a reader wants to know before choosing it."""

    method: Method
    title: str
    source: str
    loop: str = "online"
    """online (samples from the policy) or offline (learns from a dataset)."""


METHODS: Mapping[str, Line] = {
    "sft": Line(SFT, "supervised fine-tuning", "seed 002, eq. 2.2", loop="offline"),
    "reinforce": Line(REINFORCE, "REINFORCE, no baseline", "Williams 1992"),
    "rloo": Line(RLOO, "REINFORCE, leave one out", "arXiv:2402.14740"),
    "grpo": Line(GRPO, "group-relative policy optimisation", "arXiv:2402.03300"),
    "dr_grpo": Line(DR_GRPO, "GRPO without its two divisions", "arXiv:2503.20783"),
    "dapo": Line(DAPO, "GRPO by token, clipped higher", "arXiv:2503.14476"),
    "gspo": Line(GSPO, "GRPO with one ratio a sequence", "arXiv:2507.18071"),
    "cispo": Line(CISPO, "truncated ratios, no token dropped", "arXiv:2506.13585"),
}

CHOICES: Mapping[str, ModuleType] = {
    "credit": advantages,
    "ratio": ratios,
    "surrogate": surrogate,
    "reduction": reduce,
    "kl": kl,
}
"""Which file of math/ each choice of a method is taken from."""

LEAST: Mapping[str, float] = {"cap": 1.0, "entropy_bonus": -math.inf}
"""The smallest value of a number, where it is not 0. A cap below 1 would cut a fresh sample's ratio, 1."""

WITHIN_GROUP = (
    advantages.centred,
    advantages.normalised,
    advantages.normalised_sample,
    advantages.leave_one_out,
    advantages.over_mean,
)
"""Credits that compare the episodes of a task with one another."""

NOT_CHOICES = frozenset({"weighted_sum", "exact"})


def names(choice: str) -> list[str]:
    """The functions that a choice can be set to.

    >>> names("kl")
    ['k1', 'k2', 'k3']
    """
    module = CHOICES[choice]
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
        and name not in NOT_CHOICES
    ]


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
    for key, value in options.items():
        if key in CHOICES and hasattr(method, key):
            if value not in names(key):
                raise UserError(
                    f"unknown {key} {value!r}", where=f"method.{key}", mend=f"one of {', '.join(names(key))}"
                )
            chosen = vars(CHOICES[key])[value]
            if chosen is not _function(getattr(method, key)):
                method = _with(method, key, chosen)
    for key, value in options.items():
        if key in CHOICES and hasattr(method, key):
            continue
        if key not in readable(method):
            raise UserError(
                f"{name} does not read {key!r}",
                where=f"method.{key}",
                mend=f"it reads {', '.join(sorted(readable(method)))}",
            )
        number = _checked(key, value)
        if key in _numbers(method):
            method = _with(method, key, number)
        else:
            owner = next(c for c in CHOICES if hasattr(method, c) and key in _parameters(method, c))
            method = _with(method, owner, partial(getattr(method, owner), **{key: number}))
    if "kl" in options and not _numbers(method)["kl_in_loss"]:
        raise UserError(
            "nothing reads kl while kl_in_loss is 0",
            where="method.kl",
            mend="set method.kl_in_loss, or leave method.kl out",
        )
    if hasattr(method, "reduction") and "horizon" in _parameters(method, "reduction"):
        method = _with(method, "reduction", partial(method.reduction, horizon=horizon))
    return method


def line(name: str) -> Line:
    """The table's line of this name; UserError with the known names if there is none."""
    if name not in METHODS:
        raise UserError(f"unknown method {name!r}", where="method.name", mend=f"one of {', '.join(METHODS)}")
    return METHODS[name]


def least_group(method: Method) -> int:
    """The fewest episodes of a task that the method's credit can say anything of.

    >>> least_group(REINFORCE), least_group(GRPO)
    (1, 2)
    """
    return 2 if _function(getattr(method, "credit", advantages.raw)) in WITHIN_GROUP else 1


def readable(method: Method) -> set[str]:
    """Every option that this method, as chosen, would read."""
    choices = {c for c in CHOICES if hasattr(method, c)}
    numbers = {p for c in choices for p in _parameters(method, c)} - {"horizon"}
    return choices | numbers | set(_numbers(method))


def described(method: Method) -> dict[str, str]:
    """The method's choices and numbers as text, for the table, the plan and the report.

    >>> described(METHODS["dapo"].method)["surrogate"]
    'clipped(clip_low=0.2, clip_high=0.28)'
    """
    out = {}
    for c in CHOICES:
        if hasattr(method, c) and (c != "kl" or _numbers(method)["kl_in_loss"]):
            chosen = getattr(method, c)
            numbers = ", ".join(f"{k}={v:g}" for k, v in _parameters(method, c).items() if v is not None)
            out[c] = _function(chosen).__name__ + (f"({numbers})" if numbers else "")
    return out | {key: f"{value:g}" for key, value in _numbers(method).items() if value}


def spelled(method: Method) -> dict[str, str]:
    """The method's choices as its line spells them: only the numbers that are not the function's own.

    >>> spelled(METHODS["dapo"].method)["surrogate"]
    'clipped(clip_high=0.28)'
    """
    out = {}
    for c in CHOICES:
        if c != "kl" and hasattr(method, c):
            chosen = getattr(method, c)
            set_here = chosen.keywords if isinstance(chosen, partial) else {}
            numbers = ", ".join(f"{k}={v:g}" for k, v in set_here.items())
            out[c] = _function(chosen).__name__ + (f"({numbers})" if numbers else "")
    return out


def _checked(key: str, value: Any) -> float:
    least = LEAST.get(key, 0.0)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and value >= least and abs(value) <= sys.float_info.max:
        return float(value)
    wanted = "a number" if least == -math.inf else f"a number, {least:g} or more"
    raise UserError(f"{key} is {value!r}", where=f"method.{key}", mend=f"give {wanted}")


def _with(method: Method, key: str, value: Any) -> Method:
    return replace(method, **{key: value})  # type: ignore[type-var]


def _numbers(method: Method) -> dict[str, float]:
    return {k: v for k, v in vars(method).items() if isinstance(v, float)}


def _function(chosen: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(chosen, partial):
        chosen = chosen.func
    return chosen


def _parameters(method: Method, choice: str) -> dict[str, Any]:
    """Numbers that the chosen function takes, with the values it would be called with."""
    signature = inspect.signature(getattr(method, choice))
    takes = {"eps", "clip_low", "clip_high", "cap", "horizon"}
    return {
        name: None if p.default is p.empty else p.default
        for name, p in signature.parameters.items()
        if name in takes
    }
