"""Build a method from its name and a recipe's options: the functions that it chooses, and their numbers.

A choice is a function of math/ by its name in CHOICES, or the user's own as "file.py:function".
Options are parsed as strictly as the rest of a recipe, and every option must have an effect.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from types import ModuleType
from typing import Any

from posttrain.base.name_hints import did_you_mean, translate_name
from posttrain.base.table_reader import Where, parse
from posttrain.base.usercode import load_edited, refuse_memory
from posttrain.math import (
    advantages,
    control,
    corrections,
    divergences,
    evolution,
    filters,
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
from posttrain.math.choice import (
    COLUMNS,
    GIVEN,
    as_choice,
    function_of,
    misfit,
    name_of,
    needs_of,
    numbers_of,
    takes,
)
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.policy_gradient import PolicyGradient, RewardPart
from posttrain.methods.table import Line, Named, label, line
from posttrain.types import Method, UserError

Functions = Mapping[str, Callable[..., Any]]


def _public(module: ModuleType, exclude: tuple[str, ...] = ()) -> Functions:
    """Return the public functions that a file of math/ defines, by name."""
    return {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__
        if not name.startswith("_") and name not in exclude
    }


def _functions(module: ModuleType, names: str) -> Functions:
    return {name: getattr(module, name) for name in names.split()}


_OF_TOKENS = ("credit_rows", "credit_tokens", "credit_turns")
"""Functions of math/advantages.py that apply a credit."""

CHOICES: Mapping[str, Functions] = {
    "returns": _functions(returns, "total total_by_token to_go"),
    "estimator": _functions(returns, "monte_carlo td n_step gae decoupled_gae vtrace"),
    "credit": {**_public(advantages, _OF_TOKENS), **_public(pass_at_k)},
    "ratio": _public(ratios),
    "surrogate": _public(surrogate),
    "correction": _public(corrections),
    "value_loss": _public(value),
    "implicit": _functions(preference, "log_ratio mean_log_ratio mean_logp log_odds"),
    "divergence": _functions(preference, "reverse_kl forward_kl jensen_shannon alpha_divergence"),
    "pair_loss": _functions(preference, "logistic squared hinge exponential smoothed robust"),
    "item_loss": _functions(reward, "regression classification"),
    "keep": _functions(selection, "every best"),
    "repeats": _functions(selection, "distinct counted"),
    "balance": _functions(selection, "unbalanced by_task"),
    "reduction": _public(reduce, ("of_step", "weighted_sum", "per_group")),
    "shaping": _functions(evolution, "standardised centred_ranks unshaped"),
    "noise": _functions(evolution, "mirrored independent"),
    "kl": _public(kl, ("of_event",)),
    "token_divergence": _functions(divergences, "reverse_kl forward_kl jensen_shannon"),
    "control": _public(control, ("stepwise",)),
    "filter": _public(filters, ("top_covariance", "covariances", "uniform_draws")),
}
"""The functions of math/ that each choice of a method can be set to, by name."""

BY_TOKEN = tuple(f for f in CHOICES["credit"].values() if needs_of(f).by_token)
"""Credits that can be applied token by token."""

OF_ANSWERS = (ratios.by_sequence, ratios.by_bounded_sequence, ratios.by_trajectory)
"""Ratios whose gradient at one token moves all tokens of the answer."""


def build(
    spec: Named,
    options: Mapping[str, Any],
    *,
    horizon: int,
    potentials: bool = False,
    parts: tuple[RewardPart, ...] = (),
) -> Method:
    """Return the method with these options in place of its published defaults.

    spec: a name of the table, "file.py:METHOD", or the method itself. Options are the fields of its
    dataclass, functions for its choices (or their names), and the numbers of the chosen functions
    (clip_low, cap, eps ...); {name = ..., NUMBER = ...} is a choice with its numbers. A choice set to
    the method's own function keeps its published numbers. horizon: the most tokens of an answer (for
    reduce.per_horizon). potentials: tokens are paid the gain in a potential, and the last one the score minus
    the potential; a discount is then put into these rewards (math/returns.py: shaped). parts: of the reward,
    for a credit that compares them one by one.

    Raises UserError for an unknown method, choice or option, and for a bad value.

    >>> build("grpo", {"credit": "centred", "clip_high": 0.3}, horizon=64).surrogate
    clipped(clip_low=0.2, clip_high=0.3)
    """
    if isinstance(spec, str):
        refuse_memory(spec, "give it again to posttrain.train or Session, with resume=True")
    return _complete(method(spec, **options).method, horizon, potentials, parts)


def method(spec: Named = "grpo", /, **options: Any) -> Line:
    """Return a line of the table with other choices and numbers, checked like a recipe's; errors as of build.

    >>> method("grpo", surrogate="score", credit="raw").method.surrogate.__name__
    'score'
    """
    built, tables = _choose(spec, options)
    if unread := _unread(built, options):
        reads = f"it reads {', '.join(sorted(readable(built))) or 'no options'}"
        several = len(unread) > 1
        hints = "; ".join(f"{k!r}: {hint}" if several else hint for k, hint in unread.items() if hint)
        # The nearest name, or another option's, may not be what the user needs, so the list of all follows.
        number_names = _numbers_of(CHOICES)
        if not all(_translation(built, key) and key not in number_names for key in unread):
            hints = f"{hints}; {reads}" if hints else reads
        problem = f"{label(spec)} does not read {', '.join(map(repr, unread))}"
        raise UserError(f"method.{next(iter(unread))}", problem, hints)
    flat: dict[str, dict[str, Any]] = {}
    for key, setting in options.items():
        if key not in choices(built):
            flat.setdefault(_owner(built, key, tables), {})[key] = setting
    built = _with(built, _parse(numbers_of(type(built)), flat.pop("", {}), ("method",)))
    for owner in {**flat, **tables}:
        function = as_choice(getattr(built, owner))
        numbers = _parse(type(function), flat.get(owner, {}), ("method",))
        numbers |= _parse(type(function), tables.get(owner, {}), ("method", owner))
        built = _with(built, {owner: replace(function, **numbers)} if numbers else {})
    for key, problem, fix in _contradictions(built, options):
        raise UserError(f"method.{key}", problem, fix)
    return replace(line(spec), method=built)


def _complete(method: Method, horizon: int, potentials: bool, parts: tuple[RewardPart, ...]) -> Method:
    """Return the method with the run's facts: the length of the longest answer, and the kind of rewards."""
    if parts and credits_parts(method):
        method = _with(method, {"reward_parts": parts})
    for c in choices(method):
        if "horizon" in parameters(method, c):
            function: Any = as_choice(getattr(method, c))
            method = _with(method, {c: replace(function, horizon=horizon)})
    if buffer := getattr(method, "overlong_buffer", 0.0):
        if buffer > horizon:
            problem = f"overlong_buffer is {buffer:g}, and the longest answer has {horizon} tokens"
            raise UserError("method.overlong_buffer", problem, "give fewer")
        method = _with(method, {"horizon": horizon})
    gamma = _discount(method)
    return _with(method, {"shaped": partial(returns.shaped, gamma=gamma)} if potentials and gamma < 1 else {})


def unread_options(spec: Named, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the options that the method does not read, each with a suggestion or "".

    Raises UserError for an unknown method or choice.
    """
    return _unread(_choose(spec, options)[0], options)


def _unread(method: Method, options: Mapping[str, Any]) -> dict[str, str]:
    names = {*readable(method), *choices(method)}
    return {k: _translation(method, k) or did_you_mean(k, names) for k in options if k not in names}


def _translation(method: Method, option: str) -> str:
    """Return what another trainer's name is here; "" for other names, and if the method cannot read it."""
    hint = translate_name(option)
    keys = re.findall(r"\bmethod\.(\w+)", hint)
    names = {*readable(method), "name", *_numbers_of(choices(method))}
    return hint if not keys or names & {*keys} else ""


def _numbers_of(keys: Iterable[str]) -> set[str]:
    """Return the names of the numbers of all functions of these choices."""
    return {number for key in keys for f in CHOICES[key].values() for number in vars(as_choice(f))}


def _choose(spec: Named, options: Mapping[str, Any]) -> tuple[Method, dict[str, dict[str, Any]]]:
    """Return (the method with the functions that the options choose, the numbers in tables by choice)."""
    method, tables = line(spec).method, dict[str, dict[str, Any]]()
    for key, setting in options.items():
        if key not in choices(method):
            continue
        if isinstance(setting, Mapping):
            tables[key] = {k: v for k, v in setting.items() if k != "name"}
            setting = setting.get("name", getattr(method, key))
        function = _function(key, setting)
        if function is not function_of(getattr(method, key)):
            method = _with(method, {key: function})
        names = parameters(method, key).keys() - {"horizon"}
        for number in tables.get(key, {}).keys() - names:
            fix = did_you_mean(number, names) or f"it reads {', '.join(sorted(names)) or 'no numbers'}"
            problem = f"{name_of(function)} does not read {number!r}"
            raise UserError(f"method.{key}.{number}", problem, fix)
    return method, tables


def _function(key: str, setting: Any) -> Callable[..., Any]:
    """Return the function that a choice is set to; UserError for an unknown name or an unfit function."""
    if isinstance(setting, str) and ":" in setting:
        setting = load_edited(setting, f"method.{key}")
    elif not callable(setting):
        if setting not in [*CHOICES[key]]:  # not "in CHOICES[key]": the value may be a list
            fix = f"one of {', '.join(CHOICES[key])}, or your own as 'file.py:function'"
            raise UserError(f"method.{key}", f"unknown {key} {setting!r}", fix)
        return CHOICES[key][setting]
    columns = COLUMNS if key == "filter" else GIVEN
    if reason := misfit(setting, next(iter(CHOICES[key].values())), columns):
        raise UserError(f"method.{key}", f"{name_of(setting)} does not fit {key}: {reason}")
    function: Callable[..., Any] = setting
    return function


def _owner(method: Method, key: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the choice that reads this number, or "" if the method does; UserError if several do."""
    owners = [c for c in choices(method) if key in parameters(method, c) and key not in tables.get(c, {})]
    labels = [f"{name_of(getattr(method, c))}, the {c}" for c in owners]
    labels += ["the method itself"] * (key in numbers(method))
    if len(labels) == 1:
        return owners[0] if owners else ""
    problem = f"{key} is a number of {', and of '.join(labels)}" if labels else f"{key} is given twice"
    fix = f"write {owners[0]} = {{{key} = ...}}" if owners else "leave one out"
    raise UserError(f"method.{key}", problem, fix)


def _parse(kind: type, values: Mapping[str, Any], within: tuple[str, ...]) -> dict[str, Any]:
    """Return the numbers as the strict parser of recipes reads them."""
    if not values:
        return {}
    parsed = parse(kind, values, Where(within=within))
    return {key: getattr(parsed, key) for key in values}


def _contradictions(method: Method, options: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (key, problem, fix) for options that exclude each other, or have no effect because of another."""
    if "kl" in options and not numbers(method)["kl_in_loss"]:
        yield "kl", "nothing reads kl while kl_in_loss is 0", "set method.kl_in_loss, or leave method.kl out"
    if not isinstance(method, PolicyGradient):
        return
    credit = name_of(method.credit)
    if "control" in options and not method.kl_target:
        yield "control", "nothing reads control while kl_target is 0", "set method.kl_target too"
    if method.kl_target and bool(method.kl_in_reward) == bool(method.kl_from_old):
        problem = "two penalties could follow" if method.kl_in_reward else "no penalty follows"
        yield "kl_target", f"{problem} the target", "set one of method.kl_in_reward and method.kl_from_old"
    if "entropy_step" in options and not method.entropy_target:
        yield "entropy_step", "nothing reads entropy_step while entropy_target is 0", "set entropy_target too"
    if method.entropy_target and method.entropy_bonus < 0:
        problem = "it is where α begins, which entropy_target keeps at 0 or more"
        yield "entropy_bonus", problem, "set 0 or more, or leave entropy_target out"
    if method.kl_from_old_share < 1 and not method.kl_from_old:
        problem = "nothing reads kl_from_old_share while kl_from_old is 0"
        yield "kl_from_old_share", problem, "set method.kl_from_old too, as to 1"
    ratio = function_of(method.ratio)
    if function_of(method.filter) is not filters.every_token and ratio in OF_ANSWERS:
        problem = f"{ratio.__name__} is one ratio for a whole answer, and moves the dropped tokens too"
        yield "filter", problem, "set method.ratio to 'by_token' or 'by_sequence_token'"
    band = parameters(method, "filter")
    if band.get("cov_low", 0.0) > band.get("cov_high", math.inf):
        problem = f"no covariance lies between {band['cov_low']:g} and {band['cov_high']:g}"
        yield "cov_low", problem, "set it below method.cov_high"
    off_policy = isinstance(method, ActorCritic) and method.off_policy
    if off_policy and method.correction is not corrections.uncorrected:
        fix = "leave correction out, or take another estimator"
        yield "correction", "vtrace weighs its advantages already", fix
    if (method.baseline or method.running_baseline) and function_of(method.credit) is not advantages.raw:
        key = "baseline" if method.baseline else "running_baseline"
        yield key, f"{credit} has a baseline of its own", "set method.credit to 'raw'"
    by_token = isinstance(method, ActorCritic) or function_of(method.returns) is not returns.total
    critic = isinstance(method, ActorCritic)
    tokenwise = [f.__name__ for f in BY_TOKEN if not (critic and takes(f, "greedy"))]
    if by_token and (not needs_of(method.credit).by_token or credits_parts(method)):
        problem = f"{credit} compares whole answers, and here each token is credited"
        yield "credit", problem, f"take {', '.join(tokenwise)}"
    if critic and method.asks_greedy:
        problem = f"{credit} subtracts the greedy answer's reward, and the critic is the baseline already"
        yield "credit", problem, f"take {', '.join(tokenwise)}"
    if not by_token and takes(function_of(method.credit), "step"):
        problem = f"{credit} compares tokens at one place, and here whole answers are credited"
        yield "credit", problem, "set method.returns to 'to_go'"
    if method.asks_greedy and (method.running_scale or method.reward_weight != 1):
        key = "running_scale" if method.running_scale else "reward_weight"
        yield key, f"{credit} subtracts the greedy answer's reward, which is not scaled", "leave it out"
    if function_of(method.filter) is not filters.every_token and method.pulls:
        problem = (
            f"{name_of(method.surrogate)} has a loss at tokens without an advantage, so dropped ones too"
        )
        yield "filter", problem, "take another surrogate, or leave method.filter out"
    if "turn_gamma" in options and not method.turn_weight:
        yield "turn_gamma", "nothing reads turn_gamma while turn_weight is 0", "set method.turn_weight too"
    if method.turn_weight and method.least_group < 2:
        problem = f"{credit} compares nothing, and turn_weight compares turns that began in one state"
        yield "turn_weight", problem, "take a credit that compares answers, as 'normalised' or 'centred'"
    if method.turn_weight and credits_parts(method):
        problem = f"{credit} compares the parts of an answer's reward, and a turn's return has none"
        yield "turn_weight", problem, "take a credit of whole rewards, as 'normalised' or 'centred'"
    if method.turn_weight and function_of(method.returns) is not returns.total:
        problem = f"it adds to the advantage of an episode, and {name_of(method.returns)} credits tokens"
        yield "turn_weight", problem, "leave method.returns out"


def _with(method: Method, changes: Mapping[str, Any]) -> Method:
    return replace(method, **changes) if changes else method  # type: ignore[type-var]


# ---------------------------------------------------------------------- the parts of a method


def choices(method: Method) -> list[str]:
    """Return the choices that a method has and reads."""
    unread: frozenset[str] = getattr(method, "unread", frozenset())
    return [c for c in CHOICES if c in vars(method) and c not in unread]


def numbers(method: Method) -> dict[str, float]:
    """Return the numbers among a method's own fields."""
    unread: frozenset[str] = getattr(method, "unread", frozenset())
    return {k: v for k, v in vars(method).items() if isinstance(v, float) and k not in unread}


def credits_parts(method: Method) -> bool:
    """Return whether the method's credit compares the parts of the reward one by one."""
    return isinstance(method, PolicyGradient) and takes(function_of(method.credit), "parts")


def parameters(method: Method, choice: str) -> dict[str, Any]:
    """Return the numbers of the chosen function with their values."""
    return dict(vars(as_choice(vars(method)[choice]))) if choice in vars(method) else {}


def readable(method: Method) -> set[str]:
    """Return every option that the method reads with its present choices."""
    of_choices = {p for c in choices(method) for p in parameters(method, c)} - {"horizon"}
    return {*choices(method), *of_choices, *numbers(method)}


def described(method: Method) -> dict[str, str]:
    """Return the method's choices and numbers as text, for the table, the plan and the report.

    As in {'surrogate': 'clipped(clip_low=0.2, clip_high=0.28)', 'reduction': 'per_token'}.
    """
    out = {}
    for c in choices(method):
        if _has_effect(method, c):
            fixed = ", ".join(f"{k}={v:g}" for k, v in parameters(method, c).items() if v is not None)
            out[c] = name_of(vars(method)[c]) + (f"({fixed})" if fixed else "")
    defaults = {f.name: f.default for f in fields(method)}  # type: ignore[arg-type]
    values = {key: number for key, number in numbers(method).items() if number or defaults[key]}
    # Every policy gradient has these, and they have no effect.
    idle = [key for key in ("reward_weight", "kl_from_old_share") if values.get(key) == 1]
    idle += ["entropy_step"] if "entropy_step" in values and not values.get("entropy_target") else []
    idle += ["turn_gamma"] if "turn_gamma" in values and not values.get("turn_weight") else []
    values = {key: number for key, number in values.items() if key not in idle}
    return out | {key: f"{number:g}" for key, number in values.items()}


def _has_effect(method: Method, choice: str) -> bool:
    """Return False for an estimator without a penalty, and for a default that does nothing."""
    if choice in ("kl", "control"):
        return bool(numbers(method)["kl_in_loss" if choice == "kl" else "kl_target"])
    idle = (returns.total, corrections.uncorrected, preference.reverse_kl, filters.every_token)
    return vars(method)[choice] not in idle


def _discount(method: Method) -> float:
    """Return γ of the method's credit; 1 if it does not discount."""
    owner = next((c for c in ("estimator", "returns") if c in choices(method)), "")
    return float(parameters(method, owner).get("gamma", vars(method).get("gamma", 1.0)))
