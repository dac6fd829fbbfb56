"""The exact bias and variance of each on-policy line of the methods table, and the choice that causes bias.

The lines are read from METHODS, so a new one is measured automatically. A method's choices are tried one by
one in REINFORCE, which is unbiased: the choices that bend it are the reason that the sentence gives.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from jaxtyping import Float

from posttrain.math import advantages, kl, returns
from posttrain.math.choice import function_of, name_of, takes
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.build import build
from posttrain.methods.distillation import Distillation
from posttrain.methods.preference import Preference
from posttrain.methods.q_learning import SoftQ
from posttrain.methods.table import LEARNED, METHODS, REINFORCE, label, line
from posttrain.types import Method
from posttrain_study.truth import estimators, exact
from posttrain_study.truth.comparison import EXACT, Gradient, TruthRow, error, sine, verdict
from posttrain_study.truth.world import World, short

Choice = Mapping[str, Any]
SIZE = 4
"""Number of answers in a group."""
SECTION = "Methods, one step on fresh samples"

REASONS: Mapping[str, str] = {
    "centred": "a mean that contains the answer itself takes its share of the gradient",
    "normalised": "a deviation made of the rewards that it divides is no baseline",
    "normalised_sample": "a deviation made of the rewards that it divides is no baseline",
    "batch_normalised": "a deviation made of the rewards that it divides is no baseline",
    "batch_normalised_sample": "a deviation made of the rewards that it divides is no baseline",
    "centred_batch_normalised": "a deviation made of the rewards that it divides is no baseline",
    "normalised_by_part": "a deviation made of the rewards that it divides is no baseline",
    "over_mean": "dividing by the mean makes rare rewards count more, as ∇log J does",
    "pass_at_k": "it follows the best of k answers and not their mean",
    "pass_at_k_normalised": "it follows the best of k answers and not their mean, over its deviation",
    "every": "the mean over kept answers follows ∇log of the chance to be kept, and not ∇J",
    "per_token": "the number of tokens that it divides by is itself drawn",
    "per_group_token": "the number of tokens that it divides by is itself drawn",
    "per_sequence": "1/length makes a token of a short answer weigh more",
    "per_horizon": "it divides by the longest answer there may be, a constant",
    "by_sequence": "the mean over an answer's tokens divides by its length",
    "by_sequence_token": "the mean over an answer's tokens divides by its length",
    "by_bounded_sequence": "the mean over an answer's tokens divides by its length",
    "by_trajectory": "the answer's ratio on each of its tokens counts the answer once a token",
    "to_go": "with γ below 1 a token does not answer for all that comes after it",
    "optimal_by_token": "the baseline contains the answer's own return, with a weight that depends on it",
    "total_by_token": "answers are compared token by token, so long ones weigh more in the baseline",
    "top_entropy": "tokens at which the policy is decided are not trained",
    "clip_cov": "some tokens whose advantage and probability go together are not trained",
    "low_second_moment": "tokens that have moved far from their sampler are not trained",
    "turn_weight": "an answer of one turn is credited as a turn once more, so 1 + turn_weight times",
    "k1": "as a loss it has a gradient that averages to 0",
    "k2": "a penalty token by token does not see that a token changes which ones come next",
    "exact": "a penalty token by token does not see that a token changes which ones come next",
    "k3": "on average its gradient is that of the other direction, KL(π_ref ‖ π)",
    "unbiased_k1": "a penalty token by token does not see that a token changes which ones come next",
    "unbiased_k3": "a penalty token by token does not see that a token changes which ones come next",
    "forward_k1": "its gradient is that of the other direction, KL(π_ref ‖ π)",
    "forward_k3": "its gradient is that of the other direction, KL(π_ref ‖ π)",
}
"""Why a choice bends the gradient, by the name of its function or number."""

BECAUSE: Mapping[str, str] = {
    "raw": "the score of each answer times its own return is the policy-gradient theorem itself",
    "to_go": "what came before a token is no merit of it, and averages to 0",
    "against_greedy": "the greedy answer is the same whatever is drawn",
    "leave_one_out": "the baseline of an answer is made of the others",
    "monte_carlo": "whatever the critic says is a baseline that knows nothing of the token",
    "n_step": "with the true V, every look ahead has the same mean",
    "td": "with the true V, every look ahead has the same mean",
    "gae": "with the true V, every look ahead has the same mean",
    "decoupled_gae": "with the true V, every look ahead has the same mean",
    "vtrace": "on fresh samples no weight is truncated, and the true V completes the return",
}
"""Why an unbiased method is unbiased, by the name of its estimator or credit."""

JOINT = "none of its choices bends REINFORCE by itself: it is what the method makes of them"
"""Sentence for a biased method none of whose choices is biased alone."""

NO_CHOICES = "it is of no known family, whose choices could be tried one by one"
"""Sentence for a method that is not made of choices."""

FROM_PAIRS = "it is told which answer is better and not by how much"
"""Sentence for a method that learns from pairs."""


def measure_methods(names: Mapping[str, Method]) -> Iterator[TruthRow]:
    """Yield error, sine and variance of each of these methods, with groups of four."""
    world = short()
    blame = _BiasFinder(world)
    for name, method in names.items():
        truth, value = target(world, method), critic(world, method)
        estimate = world.estimate(method, SIZE, value=value)
        label = verdict(estimate.mean, truth)
        why = blame.sentence(method, label)
        along = float(estimate.mean @ truth / (estimate.mean @ estimate.mean))
        for quantity, number in (
            ("error", error(estimate.mean, truth)),
            ("sine", sine(estimate.mean, truth)),
            ("variance", estimate.variance * along**2),
        ):
            yield TruthRow(SECTION, name, quantity, number, label, why)


def target(world: World, method: Method) -> Gradient:
    """Return the gradient that the method claims to estimate: of J, less its KL, plus its entropy bonus.

    Of distillation: of the divergences of an answer's states, which are taken as they are.
    """
    if isinstance(method, Distillation):
        return -world.policy.gradient(exact.distance(world, method.token_divergence))
    if isinstance(method, SoftQ | Preference):
        return exact.regularised_gradient(world, method.beta)
    beta = sum(getattr(method, key, 0.0) for key in ("kl_in_reward", "kl_in_loss"))
    bonus, weight = getattr(method, "entropy_bonus", 0.0), getattr(method, "reward_weight", 1.0)
    return exact.regularised_gradient(world, beta, bonus, weight)


def critic(world: World, method: Method) -> Float[torch.Tensor, "N L"] | None:
    """Return the true V of the rewards of the method's tokens, if it has a critic."""
    if "value" not in method.needs:
        return None
    beta = method.beta if isinstance(method, SoftQ) else getattr(method, "kl_in_reward", 0.0)
    gap = kl.k1(world.cached_logp(world.policy), world.cached_logp(world.reference))
    return exact.state_values(world.with_rewards(world.reward - beta * gap))


class _BiasFinder:
    """Find which of a method's choices bend the gradient when REINFORCE makes them alone."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._results: dict[tuple[Any, ...], tuple[Gradient, Gradient]] = {}

    def sentence(self, method: Method, verdict: str) -> str:
        """Return why the method is biased, or why it is not, depending on its verdict."""
        if isinstance(method, Preference):
            return FROM_PAIRS
        if not hasattr(method, "reduction"):
            return NO_CHOICES
        if verdict != "unbiased":
            reasons = [REASONS.get(name, f"{name} weighs tokens otherwise") for name in self.choices(method)]
            return "; ".join(dict.fromkeys(reasons)) or JOINT
        keys = (
            ["estimator", "credit"] if getattr(method, "returns", None) is not returns.to_go else ["returns"]
        )
        keys = ["estimator"] if isinstance(method, ActorCritic) else keys
        name = next((name_of(getattr(method, key)) for key in keys if hasattr(method, key)), "raw")
        return BECAUSE.get(name, f"{name} is a baseline that knows nothing of the token")

    def choices(self, method: Method) -> list[str]:
        """Return the names of the functions and numbers that bend it."""
        values = {f.name: getattr(method, f.name) for f in fields(method)}  # type: ignore[arg-type]
        by_place = "credit" in values and takes(function_of(values["credit"]), "step")
        credit: Choice = {"credit": values.get("credit")} | ({"returns": returns.to_go} if by_place else {})
        guilty = []
        turns: Choice = {"credit": advantages.leave_one_out, "turn_weight": values.get("turn_weight")}
        if values.get("turn_weight") and self.bend(REINFORCE, turns):
            guilty.append("turn_weight")
        for key in ("returns", "estimator", "credit"):
            choice: Choice = credit if key == "credit" else {key: values.get(key)}
            if key in values and self.bend(LEARNED if key == "estimator" else REINFORCE, choice):
                guilty.append(name_of(values[key]))
        guilty += [name_of(values[key]) for key in ("keep",) if key in values]
        paid: Choice = {key: values[key] for key in ("returns", "credit") if key in values}
        if self.turn(REINFORCE, paid) and not self.turn(REINFORCE, credit):
            guilty.append(name_of(values["returns"]))
        # The effect of a ratio depends on the divisor of the reduction, so both are tried together.
        shape: Choice = {key: values[key] for key in ("ratio", "reduction") if key in values}
        if self.bend(REINFORCE, shape):
            alone = {"reduction": shape["reduction"]}
            guilty.append(name_of(shape["reduction" if self.bend(REINFORCE, alone) else "ratio"]))
        if "filter" in values and self.bend(REINFORCE, {"filter": values["filter"]}):
            guilty.append(name_of(values["filter"]))
        penalty: Choice = {key: values[key] for key in ("kl", "kl_in_loss") if values.get("kl_in_loss")}
        for choice in ({"surrogate": values["surrogate"]} if "surrogate" in values else {}, penalty):
            if choice and self.bend(REINFORCE, choice):
                guilty.append(name_of(next(iter(choice.values()))))
        return guilty

    def bend(self, host: Method, choice: Choice) -> bool:
        """Return whether the host with this choice points elsewhere, or has another length."""
        return error(*self._try_choice(host, choice)) > EXACT

    def turn(self, host: Method, choice: Choice) -> bool:
        """Return whether the host with this choice points elsewhere."""
        return sine(*self._try_choice(host, choice)) > EXACT

    def _try_choice(self, host: Method, choice: Choice) -> tuple[Gradient, Gradient]:
        """Return (mean estimate of the host with this choice, gradient that it claims to estimate)."""
        key = tuple(sorted((k, repr(v)) for k, v in choice.items()))
        if key not in self._results:
            method = replace(host, **choice)  # type: ignore[type-var]
            estimate = self.world.estimate(method, SIZE, value=critic(self.world, method))
            self._results[key] = estimate.mean, target(self.world, method)
        return self._results[key]


def rows(method: str | None = None) -> list[TruthRow]:
    """Return the complete table, or the rows of one method, which may be defined in a user's file.

    Raises UserError for an unknown method.
    """
    lines = METHODS if method is None else {method: line(method)}
    online = {name: row for name, row in lines.items() if row.loop == "online" and row.has_loss}
    built = {label(name): build(row, {}, horizon=short().length) for name, row in online.items()}
    return [*measure_methods(built), *([] if method else estimators.everything())]
