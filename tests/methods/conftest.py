"""A small update in float64 that has everything in it, for the tests of methods."""

from collections.abc import Callable
from typing import Any

import pytest

from posttrain import testing


@pytest.fixture(scope="session")
def update() -> Callable[..., Any]:
    """update(seed) -> rows of three tasks and what a model says of them."""
    return testing.update


@pytest.fixture(scope="session")
def gradients() -> Callable[..., Any]:
    """gradients(method, batch, out, parts) -> Σ weight · loss, and its gradients by logp, entropy, value."""
    return testing.gradients
