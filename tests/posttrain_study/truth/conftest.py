"""Worlds of posttrain_study/truth, made once, and the gradient with which the learner would move."""

import copy
from collections.abc import Callable

import pytest
import torch

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner
from posttrain.types import Batch, Method
from posttrain_study.truth import world
from posttrain_study.truth.world import World

Taken = Callable[[World, Method], tuple[Callable[[Batch], torch.Tensor], torch.Tensor | None]]


@pytest.fixture(scope="session")
def even() -> World:
    """27 answers of one length."""
    return world.even()


@pytest.fixture(scope="session")
def uneven() -> World:
    """15 answers of one, two and three tokens, at a temperature other than 1."""
    return world.uneven()


@pytest.fixture(scope="session")
def short() -> World:
    """4 answers, for groups of many."""
    return world.short()


@pytest.fixture(params=["uneven", pytest.param("even", marks=pytest.mark.full)])
def either(request: pytest.FixtureRequest) -> World:
    """Each of the two worlds with many answers; `make test` takes the one whose lengths differ."""
    found: World = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def taken() -> Taken:
    """(world, method) -> (batch -> gradient with which Learner.update would move, its critic's values)."""

    def make(of: World, method: Method) -> tuple[Callable[[Batch], torch.Tensor], torch.Tensor | None]:
        model = copy.deepcopy(of.policy.model)
        critic = None
        if "value" in method.needs:
            critic = CriticModel(model, copy.deepcopy(of.old.model))
            torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
        learner = Learner(
            model,
            method,
            reference=of.reference.model,
            critic=critic,
            temperature=of.temperature,
            microbatch_tokens=4,
        )
        kept = []

        def move(loss: float) -> dict[str, float]:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            kept.append(torch.cat([g.flatten() for g in grads]))
            model.zero_grad()
            return {}

        learner._move = move  # type: ignore[method-assign]

        def gradient(batch: Batch) -> torch.Tensor:
            learner.method_state = dict(method.start)
            learner.update(batch)
            return kept.pop()

        everything = of.batch(tuple(range(len(of.answers))))
        value = None if critic is None else learner.score(everything).value
        return gradient, None if value is None else value[:, len(of.prompt) :]

    return make
