"""testing: every line of the table keeps what it promises, and a method that does not is told what."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch

import posttrain
from posttrain.math import ratios, reduce, surrogate
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.table import DPO, GRPO, METHODS, PPO, REINFORCE
from posttrain.testing import check_method
from posttrain.types import Batch, Method, Outputs

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))]


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.has_loss])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_line_of_the_table_keeps_its_promises(name: str, seed: int) -> None:
    report = check_method(name, seed=seed)
    assert (len(report.kept), report.broken) == (7, ())


def microbatch_mean(log_ratio: Any, advantage: Any) -> Any:
    return -(advantage - advantage.mean()) * log_ratio


def wrong_sign(log_ratio: Any, advantage: Any) -> Any:
    return advantage * log_ratio


def root_of_zero(log_ratio: Any, advantage: Any) -> Any:
    return -advantage * log_ratio / (log_ratio - log_ratio)


def silent(log_ratio: Any, advantage: Any) -> Any:
    return 0 * log_ratio


def unmasked(logp: Any, logp_old: Any, mask: Any, advantage: Any) -> Any:
    return (logp - logp_old).sum(-1, keepdim=True).expand_as(logp)


def undeclared(returns: Any, group: Any) -> Any:
    out = torch.empty_like(returns)
    for g in group.unique():
        out[group == g] = returns[group == g] - returns[group == g].mean()
    return out


def of_the_row_before(returns: Any, group: Any) -> Any:
    return returns - torch.cat([returns[:1], returns[:-1]])


def forgetful(mask: Any, group: Any, everywhere: Any) -> Any:
    return reduce.per_row(mask).cumsum(0)


def raising(returns: Any, group: Any) -> Any:
    raise RuntimeError("no wages")


@dataclass(frozen=True)
class Garbage(Method):
    """Reads the prompt's numbers into its loss, as 0 times them, which NaN survives."""

    def weight(self, batch: Batch) -> torch.Tensor:
        """The mean over rows."""
        return reduce.per_row(batch.mask)

    def loss(self, out: Outputs, batch: Batch) -> torch.Tensor:
        """-log π R, and nothing of the rest."""
        return -out.logp * batch.reward.sum(-1, keepdim=True)


class Forgetful(PolicyGradient):
    """Carries a number, and leaves none for the next update."""

    @property
    def start(self) -> dict[str, float]:
        """One number."""
        return {"mean": 0.0}

    def update_state(self, batch: Batch, last: Any) -> dict[str, float]:
        """Nothing."""
        return {}


class Blind(PolicyGradient):
    """Cannot say what it watches."""

    def watch(self, out: Outputs, batch: Batch) -> dict[str, torch.Tensor]:
        """A number that nobody made."""
        return {"seen": batch.columns["seen"]}  # type: ignore[attr-defined]


def chosen(method: Method) -> dict[str, Any]:
    """Its choices and numbers."""
    return {f.name: getattr(method, f.name) for f in fields(method)}  # type: ignore[arg-type]


BROKEN: dict[str, tuple[Method, str]] = {
    "a mean of the microbatch": (replace(GRPO, surrogate=microbatch_mean), "split invariance"),
    "the wrong sign": (replace(GRPO, surrogate=wrong_sign), "right answers become likelier"),
    "division by nothing": (replace(GRPO, surrogate=root_of_zero), "finite: a loss or gradient is infinite"),
    "no gradient at all": (replace(GRPO, surrogate=silent), "finite: no token has a gradient"),
    "a ratio of the whole row": (replace(REINFORCE, ratio=unmasked), "no gradient where nothing is trained"),
    "garbage": (Garbage(), "what is masked changes no bit"),
    "a credit that compares and does not say so": (replace(REINFORCE, credit=undeclared), "the least group"),
    "a credit of the row before": (replace(REINFORCE, credit=of_the_row_before), "the order of rows"),
    "weights by the place in the step": (replace(REINFORCE, reduction=forgetful), "the order of rows"),
    "a critic's loss upside down": (
        replace(PPO, value_loss=lambda value, target, value_old: -((value - target) ** 2)),
        "right answers become likelier: a step adds .* to the value of a right answer",
    ),
    "a state that is not carried on": (
        Forgetful(**chosen(GRPO)),
        "finite: watch or update_state has no number",
    ),
    "a loss of pairs that overflows": (
        replace(DPO, pair_loss=lambda margin, beta: torch.log1p(torch.exp(-beta * margin))),
        "finite: a loss or gradient is infinite or not a number where scores are large",
    ),
    "a penalty of pairs upside down": (
        replace(DPO, pair_loss=lambda margin, beta: beta * margin),
        "right answers become likelier",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_broken_promise_is_named(case: str, seed: int) -> None:
    method, promise = BROKEN[case]
    with pytest.raises(AssertionError, match="breaks a promise: ") as error:
        check_method(method, seed=seed)
    assert re.search(f"breaks a promise: {promise}", str(error.value))
    report = check_method(method, seed=seed, raises=False)
    assert report.broken
    assert "broken: " in str(report)


def test_what_raises_is_said_by_its_choices() -> None:
    with pytest.raises(
        AssertionError, match=r"^grpo with credit = raising raises RuntimeError: no wages \(seed 0"
    ):
        check_method(posttrain.method("grpo", credit=raising))
    assert check_method(posttrain.method("grpo")).method == "grpo"


def test_what_it_watches_is_asked_for() -> None:
    with pytest.raises(AssertionError, match="raises AttributeError"):
        check_method(Blind(**chosen(GRPO)))


def test_what_compares_and_says_so_keeps_the_promise() -> None:
    said = posttrain.choice(compares="group")(lambda returns, group: undeclared(returns, group))
    assert not check_method(replace(REINFORCE, credit=said)).broken


C: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "clipped": (
        surrogate.clipped,
        lambda log_ratio, advantage: torch.where(
            torch.where(advantage > 0, log_ratio.exp() < 1.2, log_ratio.exp() > 0.8),
            log_ratio.exp() * advantage,
            0.0,
        ),
    ),
    "score": (surrogate.score, lambda log_ratio, advantage: advantage),
}


@pytest.mark.parametrize("name", C)
def test_the_gradient_of_a_surrogate_is_compared_with_its_formula(name: str) -> None:
    function, formula = C[name]
    mine = replace(GRPO, surrogate=function)
    assert len(check_method(mine, gradient=formula).kept) == 8
    with pytest.raises(AssertionError, match="that is given: autograd finds another one, by up to"):
        check_method(mine, gradient=lambda log_ratio, advantage: 1.01 * formula(log_ratio, advantage))


def test_the_gradient_of_a_whole_step_is_compared_with_its_formula() -> None:
    def slope(batch: Batch, out: Outputs) -> torch.Tensor:
        assert batch.advantage is not None
        ratio = ratios.by_token(out.logp, batch.logp_old, batch.mask).exp()
        return -reduce.per_token(batch.mask) * ratio * batch.advantage

    mine = replace(PPO, surrogate=surrogate.unclipped)
    assert "the gradient that is given" in check_method(mine, gradient=slope).kept
    report = check_method(PPO, gradient=slope, raises=False)
    assert [promise for promise, _ in report.broken] == ["the gradient that is given"], "it clips"
