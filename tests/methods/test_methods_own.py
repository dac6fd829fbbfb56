"""A method of one's own: functions as choices, their numbers, and what they say of themselves."""

import math
import pickle
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

from posttrain.math import surrogate
from posttrain.math.choice import AtLeast, Between, as_choice, choice, kind_of
from posttrain.methods.build import build, described, readable
from posttrain.methods.table import GRPO, METHODS, Line, line
from posttrain.types import Batch, Method, UserError

A = torch.tensor([[1.0, -1.0]])
X = torch.tensor([[0.3, -0.4]])


@choice(compares="group")
def quantile(returns, group, *, q: Between(0, 1) = 0.75):  # type: ignore[no-untyped-def, valid-type]
    """The return, less the q-quantile of its group."""
    out = torch.empty_like(returns)
    for g in group.unique():
        out[group == g] = returns[group == g] - returns[group == g].quantile(q)
    return out


def soft_clip(log_ratio, advantage, *, width: AtLeast(1e-3) = 0.2, twice: bool = False, n: int = 1):  # type: ignore[no-untyped-def, valid-type]
    """-(1 + w tanh((r - 1)/w)) A."""
    return -(1 + width * torch.tanh((log_ratio.exp() - 1) / width)) * advantage * (1 + twice) * n


def told(options: dict[str, Any], name: Any = "grpo") -> str:
    with pytest.raises(UserError) as error:
        build(name, options, horizon=16)
    return str(error.value)


def test_a_choice_is_its_function_with_other_numbers() -> None:
    kind = kind_of(surrogate.clipped)
    one = kind(clip_high=0.28)
    assert repr(one) == "clipped(clip_low=0.2, clip_high=0.28)"
    assert torch.equal(one(X, A), surrogate.clipped(X, A, clip_high=0.28))
    assert vars(as_choice(partial(surrogate.clipped, clip_high=0.28))) == vars(one)
    assert {one, kind(clip_high=0.28), kind()} == {one, kind()}
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError):
        one.clip_low = 1.0  # type: ignore[attr-defined]


def test_numbers_of_one_s_own_functions_are_options_with_their_ranges() -> None:
    method = build("grpo", {"credit": quantile, "q": 0.5, "surrogate": soft_clip, "width": 0.1}, horizon=16)
    text = described(method)
    assert text["credit"] == "quantile(q=0.5)"
    assert text["surrogate"] == "soft_clip(width=0.1, twice=0, n=1)"
    assert {"q", "width", "twice", "n"} <= readable(method)
    made: Any = method
    assert torch.equal(made.surrogate(X, A), soft_clip(X, A, width=0.1))
    own = {"credit": quantile, "surrogate": soft_clip}
    assert told({**own, "q": 2.0}).startswith("method.q: expected a number less than or equal")
    assert "greater than or equal to 0.001" in told({**own, "width": 0})
    assert "valid boolean" in told({**own, "twice": 1})
    assert "valid integer" in told({**own, "n": 0.5})
    assert "greater than or equal to 0" in told({**own, "n": -1}), "what is not said is 0 or more"
    assert "did you mean 'width'" in told({**own, "widht": 0.1})


def test_a_group_of_one_is_too_few_for_what_says_that_it_compares() -> None:
    assert build("grpo", {"credit": quantile}, horizon=16).least_group == 2
    assert build("grpo", {"credit": lambda returns, group: returns}, horizon=16).least_group == 1

    @choice(compares="group", group=lambda numbers: numbers["m"] + 2)
    def several(log_ratio, advantage, m: int = 3):  # type: ignore[no-untyped-def]
        return -advantage * log_ratio

    assert build("reinforce", {"surrogate": several}, horizon=16).least_group == 5, "whichever choice it is"
    assert build("reinforce", {"surrogate": several, "m": 1}, horizon=16).least_group == 3
    assert "compares whole answers" in told({"returns": "to_go", "credit": quantile})
    assert "compares tokens at one place" in told({"credit": "optimal_by_token"})
    by_token = choice(compares="group", by_token=True)(lambda returns, group: returns - returns.mean())
    assert build("grpo", {"returns": "to_go", "credit": by_token}, horizon=16).least_group == 2


def credit_with_width(returns, group, *, width: float = 0.5):  # type: ignore[no-untyped-def]
    """Collides with soft_clip's number."""
    return returns * width


def test_a_number_of_two_choices_is_refused_and_given_beside_its_own() -> None:
    own = {"credit": credit_with_width, "surrogate": soft_clip}
    said = told({**own, "width": 0.1})
    assert said.startswith(
        "method.width: width is a number of credit_with_width, the credit, and of soft_clip,"
    )
    assert said.endswith("write credit = {width = ...}")
    apart = {"credit": credit_with_width, "surrogate": {"name": soft_clip, "width": 0.1}}
    method: Any = build("grpo", {**apart, "width": 0.3}, horizon=16)
    assert (method.credit.width, method.surrogate.width) == (0.3, 0.1)
    both: Any = build("grpo", {**apart, "credit": {"name": credit_with_width, "width": 0.7}}, horizon=16)
    assert (both.credit.width, both.surrogate.width) == (0.7, 0.1)
    assert "width is given twice" in told({"surrogate": {"name": soft_clip, "width": 0.1}, "width": 0.2})


def test_a_table_gives_numbers_to_what_is_chosen_already() -> None:
    method: Any = build("gspo", {"surrogate": {"clip_high": 0.1}}, horizon=16)
    assert (method.surrogate.clip_low, method.surrogate.clip_high) == (3e-4, 0.1)
    assert told({"surrogate": {"clip_hihg": 0.1}}).startswith(
        "method.surrogate.clip_hihg: clipped does not read 'clip_hihg'; did you mean 'clip_high'?"
    )
    assert told({"surrogate": {"cap": 2, "name": "clipped"}}).endswith("it reads clip_high, clip_low")
    assert told({"surrogate": {"clip_low": -1}}).startswith("method.surrogate.clip_low: expected a number")
    assert "does not read 'horizon'" in told({"reduction": {"name": "per_horizon", "horizon": 3}})


@pytest.mark.parametrize(
    ("key", "function", "why"),
    [
        (
            "credit",
            lambda returns: returns,
            "positional arguments; it is called with (returns, group)",
        ),
        ("surrogate", lambda log_ratio, advantage, more: 0, "missing a required argument: 'more'"),
        ("ratio", lambda logp, logp_old: 0, "it is called with (logp, logp_old, mask, advantage)"),
        ("kl", lambda *, logp: 0, "too many positional arguments"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused_at_once(key: str, function: Any, why: str) -> None:
    said = told({key: function, "kl_in_loss": 0.1})
    assert said.startswith(f"method.{key}: <lambda> does not fit {key}: ")
    assert why in said


def test_a_horizon_that_a_function_asks_for_is_the_run_s() -> None:
    def per_square(mask, group, everywhere, *, horizon):  # type: ignore[no-untyped-def]
        return mask.double() / horizon**2

    method: Any = build("grpo", {"reduction": per_square}, horizon=16)
    assert method.reduction.horizon == 16
    assert "horizon" not in readable(method)


def test_an_object_that_can_be_called_needs_no_name() -> None:
    """TRL's issue 6313: what has no __name__ is a function all the same."""

    class Tilted:
        def __call__(self, log_ratio, advantage, slope: float = 2.0):  # type: ignore[no-untyped-def]
            return -slope * advantage * log_ratio

    for one in (Tilted(), partial(soft_clip, width=0.5)):
        method: Any = build("reinforce", {"surrogate": one}, horizon=16)
        assert torch.equal(method.surrogate(X, A), one(X, A))
    assert (
        described(build("reinforce", {"surrogate": Tilted()}, horizon=16))["surrogate"] == "Tilted(slope=2)"
    )
    fixed = build("reinforce", {"surrogate": partial(soft_clip, width=0.5)}, horizon=16)
    assert described(fixed)["surrogate"].startswith("soft_clip(width=0.5")


# ---------------------------------------------------------------- whole methods


@dataclass(frozen=True)
class Tempered(Method):
    """Σ weight · (-t log π)."""

    t: Annotated[float, Between(0.5, 2)] = 1.0
    shift: float = 0.0

    def weight(self, batch: Batch) -> torch.Tensor:
        """One."""
        return batch.mask.double()


def test_a_method_of_one_s_own_is_a_line_and_its_numbers_are_options() -> None:
    found = line(Tempered())
    assert (found.title, found.loop) == ("Σ weight · (-t log π).", "online")
    made: Any = build(Tempered(), {"t": 2, "shift": 0.5}, horizon=16)
    assert (made.t, made.shift) == (2.0, 0.5)
    assert "less than or equal to 2" in told({"t": 3}, Tempered())
    assert told({"x": 1}, Tempered()).startswith("method.x: Tempered does not read 'x'")
    given = Line(Tempered(), "tempered", "me", loop="offline")
    assert line(given) is given
    assert "tempered does not read 'x'" in told({"x": 1}, given)
    for wrong in (3, Tempered, soft_clip, math):
        assert "is not a method; name a Line" in told({}, wrong)


def test_a_changed_line_is_a_method(tmp_path: Path) -> None:
    mine = replace(GRPO, credit=quantile, surrogate=partial(soft_clip, width=0.4))
    made: Any = build(mine, {"q": 0.25}, horizon=16)
    assert (made.credit.q, made.surrogate.keywords) == (0.25, {"width": 0.4})
    again: Any = build(mine, {"width": 0.3}, horizon=16)
    assert again.surrogate.width == 0.3
    assert METHODS["grpo"].method is GRPO
