"""A method from its name and a recipe's options: what it chooses, and the numbers of what is chosen.

A choice is a function of math/, by name, or one's own, as "file.py:function"; CHOICES says what there is.
Options are read as strictly as the rest of a recipe, and each must be read by something.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from types import ModuleType
from typing import Any

from posttrain.base.name_hints import did_you_mean, elsewhere
from posttrain.base.table_reader import Where, parse
from posttrain.base.usercode import load_edited, refuse_memory
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
    selection,
    surrogate,
    value,
)
from posttrain.math.choice import as_choice, function_of, misfit, name_of, needs_of, numbers_of
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import Line, Named, label, line
from posttrain.types import Method, UserError

Functions = Mapping[str, Callable[..., Any]]


def _public(module: ModuleType, leave_out: tuple[str, ...] = ()) -> Functions:
    """The functions that a file of math/ defines, by name."""
    return {
        name: found
        for name, found in vars(module).items()
        if inspect.isfunction(found) and found.__module__ == module.__name__
        if not name.startswith("_") and name not in leave_out
    }


def _named(module: ModuleType, names: str) -> Functions:
    return {name: getattr(module, name) for name in names.split()}


CHOICES: Mapping[str, Functions] = {
    "returns": _named(returns, "total total_by_token to_go"),
    "estimator": _named(returns, "monte_carlo td n_step gae vtrace"),
    "credit": {**_public(advantages, ("credit_rows", "credit_tokens")), **_public(pass_at_k)},
    "ratio": _public(ratios),
    "surrogate": _public(surrogate),
    "correction": _public(corrections),
    "value_loss": _public(value),
    "implicit": _named(preference, "log_ratio mean_log_ratio mean_logp log_odds"),
    "divergence": _named(preference, "reverse_kl forward_kl jensen_shannon alpha_divergence"),
    "pair_loss": _named(preference, "logistic squared hinge exponential smoothed robust"),
    "item_loss": _named(reward, "regression classification"),
    "keep": _named(selection, "every best"),
    "repeats": _named(selection, "distinct counted"),
    "balance": _named(selection, "unbalanced by_task"),
    "reduction": _public(reduce, ("of_step", "weighted_sum", "per_group")),
    "kl": _public(kl, ("exact",)),
    "control": _public(control),
}
"""What each choice of a method can be set to: functions of math/, by name."""

BY_TOKEN = tuple(f for f in CHOICES["credit"].values() if needs_of(f).by_token)
"""Credits that make sense where each token is credited by itself."""


def build(named: Named, options: Mapping[str, Any], *, horizon: int, potentials: bool = False) -> Method:
    """The named method with these options over its published defaults.

    named: a name of the table, "file.py:METHOD", or the thing itself. Options are the fields of its
    dataclass, functions for its choices (by name, or themselves), and the numbers of the functions chosen
    (clip_low, cap, eps ...); {name = ..., NUMBER = ...} is a choice with its own numbers. A choice set to
    what the method has already keeps its published numbers. horizon is the most tokens an answer may
    have (for reduce.per_horizon). With `potentials` tokens are paid what a potential gains, and the last one
    what the score is above it, as a verifier pays them: a discount is then put into these rewards.

    Raises UserError for an unknown method, choice or option, and for a bad value.

    >>> build("grpo", {"credit": "centred", "clip_high": 0.3}, horizon=64).surrogate
    clipped(clip_low=0.2, clip_high=0.3)
    """
    if isinstance(named, str):
        refuse_memory(named, "give it again to posttrain.train or Session, with resume=True")
    return _of_run(method(named, **options).method, horizon, potentials)


def method(named: Named = "grpo", /, **options: Any) -> Line:
    """A line of the table with other choices and numbers, checked as a recipe's are; errors as of build.

    >>> method("grpo", surrogate="score", credit="raw").method.surrogate.__name__
    'score'
    """
    made, apart = _chosen(named, options)
    if foreign := _strange(made, options):
        reads = f"it reads {', '.join(sorted(readable(made))) or 'no options'}"
        several = len(foreign) > 1
        hints = "; ".join(f"{k!r}: {hint}" if several else hint for k, hint in foreign.items() if hint)
        # What a choice needs may be near in name and of no use, so all that it could be is there too.
        fix = f"{hints}; {reads}" if hints else reads
        problem = f"{label(named)} does not read {', '.join(map(repr, foreign))}"
        raise UserError(f"method.{next(iter(foreign))}", problem, fix)
    flat: dict[str, dict[str, Any]] = {}
    for key, given in options.items():
        if key not in choices(made):
            flat.setdefault(_owner(made, key, apart), {})[key] = given
    made = _with(made, _read(numbers_of(type(made)), flat.pop("", {}), ("method",)))
    for owner in {**flat, **apart}:
        chosen = as_choice(getattr(made, owner))
        read = _read(type(chosen), flat.get(owner, {}), ("method",))
        read |= _read(type(chosen), apart.get(owner, {}), ("method", owner))
        made = _with(made, {owner: replace(chosen, **read)} if read else {})
    for key, problem, fix in _contradictions(made, options):
        raise UserError(f"method.{key}", problem, fix)
    return replace(line(named), method=made)


def _of_run(method: Method, horizon: int, potentials: bool) -> Method:
    """The method with what only a run knows: the length of the longest answer, and what its rewards are."""
    for c in choices(method):
        if "horizon" in parameters(method, c):
            chosen: Any = as_choice(getattr(method, c))
            method = _with(method, {c: replace(chosen, horizon=horizon)})
    if buffer := getattr(method, "overlong_buffer", 0.0):
        if buffer > horizon:
            problem = f"overlong_buffer is {buffer:g}, and the longest answer has {horizon} tokens"
            raise UserError("method.overlong_buffer", problem, "give fewer")
        method = _with(method, {"horizon": horizon})
    gamma = _discount(method)
    return _with(method, {"shaped": partial(returns.shaped, gamma=gamma)} if potentials and gamma < 1 else {})


def strangers(named: Named, options: Mapping[str, Any]) -> dict[str, str]:
    """The options that the method would not read, each with what it may have meant, or nothing.

    Raises UserError for an unknown method or choice.
    """
    return _strange(_chosen(named, options)[0], options)


def _strange(method: Method, options: Mapping[str, Any]) -> dict[str, str]:
    known = {*readable(method), *choices(method)}
    called = {key: elsewhere(key) for key in options if key not in known}
    # To a name that another method reads nothing is to be said but what this one reads.
    hints = {k: hint if hint != f"it is method.{k} here" else "" for k, hint in called.items()}
    return {k: hint or did_you_mean(k, known) for k, hint in hints.items()}


def _chosen(named: Named, options: Mapping[str, Any]) -> tuple[Method, dict[str, dict[str, Any]]]:
    """The method with the functions that these options choose and its own numbers; those given in tables."""
    method, apart = line(named).method, dict[str, dict[str, Any]]()
    for key, given in options.items():
        if key not in choices(method):
            continue
        chosen = given
        if isinstance(given, Mapping):
            apart[key] = {k: v for k, v in given.items() if k != "name"}
            chosen = given.get("name", getattr(method, key))
        found = _function(key, chosen)
        if found is not function_of(getattr(method, key)):
            method = _with(method, {key: found})
        known = parameters(method, key).keys() - {"horizon"}
        for number in apart.get(key, {}).keys() - known:
            fix = did_you_mean(number, known) or f"it reads {', '.join(sorted(known)) or 'no numbers'}"
            problem = f"{name_of(found)} does not read {number!r}"
            raise UserError(f"method.{key}.{number}", problem, fix)
    return method, apart


def _function(key: str, chosen: Any) -> Callable[..., Any]:
    """The function that a choice is set to; UserError for a name of none, and for one that does not fit."""
    if isinstance(chosen, str) and ":" in chosen:
        chosen = load_edited(chosen, f"method.{key}")
    elif not callable(chosen):
        if chosen not in [*CHOICES[key]]:  # it may be anything, a list too
            known = f"one of {', '.join(CHOICES[key])}, or your own as 'file.py:function'"
            raise UserError(f"method.{key}", f"unknown {key} {chosen!r}", known)
        return CHOICES[key][chosen]
    if wrong := misfit(chosen, next(iter(CHOICES[key].values()))):
        raise UserError(f"method.{key}", f"{name_of(chosen)} is no {key}: {wrong}")
    found: Callable[..., Any] = chosen
    return found


def _owner(method: Method, key: str, apart: Mapping[str, Mapping[str, Any]]) -> str:
    """The choice that reads a number of this name, or "" if the method does; UserError if several would."""
    owners = [c for c in choices(method) if key in parameters(method, c) and key not in apart.get(c, {})]
    told = [f"{name_of(getattr(method, c))}, the {c}" for c in owners]
    told += ["the method itself"] * (key in numbers(method))
    if len(told) == 1:
        return owners[0] if owners else ""
    problem = f"{key} is a number of {', and of '.join(told)}" if told else f"{key} is given twice"
    fix = f"write {owners[0]} = {{{key} = ...}}" if owners else "leave one out"
    raise UserError(f"method.{key}", problem, fix)


def _read(kind: type, given: Mapping[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
    """The numbers, as the strict reader of recipes lets them through."""
    if not given:
        return {}
    found = parse(kind, given, Where(within=within))
    return {key: getattr(found, key) for key in given}


def _contradictions(method: Method, options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, mend) of options that exclude one another, or that nothing reads as others are."""
    found = numbers(method)
    if "kl" in options and not found["kl_in_loss"]:
        yield "kl", "nothing reads kl while kl_in_loss is 0", "set method.kl_in_loss, or leave method.kl out"
    if not isinstance(method, PolicyGradient):
        return
    credit = name_of(method.credit)
    if "control" in options and not method.kl_target:
        yield "control", "nothing reads control while kl_target is 0", "set method.kl_target too"
    if method.kl_target and bool(method.kl_in_reward) == bool(method.kl_from_old):
        what = "two penalties could follow" if method.kl_in_reward else "no penalty follows"
        yield "kl_target", f"{what} the target", "set one of method.kl_in_reward and method.kl_from_old"
    off_policy = isinstance(method, ActorCritic) and method.off_policy
    if off_policy and method.correction is not corrections.uncorrected:
        fix = "leave correction out, or take another estimator"
        yield "correction", "vtrace weighs its advantages already", fix
    if (method.baseline or method.running_baseline) and function_of(method.credit) is not advantages.raw:
        key = "baseline" if method.baseline else "running_baseline"
        yield key, f"{credit} has a baseline of its own", "set method.credit to 'raw'"
    by_token = isinstance(method, ActorCritic) or function_of(method.returns) is not returns.total
    if by_token and not needs_of(method.credit).by_token:
        what = f"{credit} compares whole answers, and here each token is credited"
        yield "credit", what, f"take {', '.join(f.__name__ for f in BY_TOKEN)}"


def _with(method: Method, changed: Mapping[str, Any]) -> Method:
    return replace(method, **changed) if changed else method  # type: ignore[type-var]


# ---------------------------------------------------------------------- what a method is made of


def choices(method: Method) -> list[str]:
    """The choices that a method has and reads."""
    unread: frozenset[str] = getattr(method, "unread", frozenset())
    return [c for c in CHOICES if c in vars(method) and c not in unread]


def numbers(method: Method) -> dict[str, float]:
    """The numbers among a method's own fields."""
    unread: frozenset[str] = getattr(method, "unread", frozenset())
    return {k: v for k, v in vars(method).items() if isinstance(v, float) and k not in unread}


def parameters(method: Method, choice: str) -> dict[str, Any]:
    """Numbers that the chosen function takes, with the values it would be called with."""
    return dict(vars(as_choice(vars(method)[choice]))) if choice in vars(method) else {}


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
            out[c] = name_of(vars(method)[c]) + (f"({fixed})" if fixed else "")
    usual = {f.name: f.default for f in fields(method)}  # type: ignore[arg-type]
    told = {key: number for key, number in numbers(method).items() if number or usual[key]}
    if told.get("reward_weight") == 1:
        del told["reward_weight"]  # a weight that does nothing, of every policy gradient
    return out | {key: f"{number:g}" for key, number in told.items()}


def _shown(method: Method, choice: str) -> bool:
    """Whether a choice says anything: not an estimator without a penalty, nor a default that does nothing."""
    if choice in ("kl", "control"):
        return bool(numbers(method)["kl_in_loss" if choice == "kl" else "kl_target"])
    return vars(method)[choice] not in (returns.total, corrections.uncorrected, preference.reverse_kl)


def _discount(method: Method) -> float:
    """γ of what credits the method's tokens; 1 for a method that discounts nothing."""
    owner = next((c for c in ("estimator", "returns") if c in choices(method)), "")
    return float(parameters(method, owner).get("gamma", vars(method).get("gamma", 1.0)))
