"""The admission rule under the simulator that predicts schedules, and what the loop makes of free slots."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.curriculum.stream import Stream
from posttrain.loop.group_source import GroupSource
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.rollout.protocol import FinishedGroup, GroupRequest
from posttrain.run.journal import Journal, Progress
from posttrain.types import Sampling, Task
from posttrain.verifiers.protocol import TrainerState

FILE = Path(__file__).parents[2] / "benchmarks" / "async" / "simulate.py"


@pytest.fixture(scope="module")
def simulator() -> Any:
    """The names of benchmarks/async/simulate.py."""
    return runpy.run_path(str(FILE))


def setting(simulator: Any, **changes: Any) -> Any:
    small = {"groups": 6, "size": 3, "replicas": 3, "mean": 60, "cut": 300, "a": 0.01, "b": 0.001}
    return simulator["Setting"](**{**small, "fixed": 0.5, "load": 0.1, "updates": 15, **changes})


@pytest.mark.parametrize("swap", ["within", "between"])
@pytest.mark.parametrize(("max_lag", "window"), [(0, 1), (1, 1), (3, 1), (6, 1), (2, 4), (2, 9)])
def test_nothing_is_older_than_the_bound_and_nothing_is_dropped(
    simulator: Any, swap: str, max_lag: int, window: int
) -> None:
    s = setting(simulator, max_lag=max_lag, window=window, swap=swap, size=4)
    found = simulator["run"](s)
    assert found.max_lag <= found.bound
    assert len(set(found.trained)) == len(found.trained) == 15 * 6
    if window == 1:
        assert found.trained == list(range(15 * 6))
        assert found.max_lag == max_lag  # sampling is quick here: the lag goes as far as it may


def test_without_lag_an_update_takes_its_answers_its_training_and_its_weights(simulator: Any) -> None:
    # Lengths without a spread: 6 rows on each of 3 replicas, 50 steps of 0.01 + 6 · 0.001 seconds.
    found = simulator["run"](setting(simulator, mean=50, sigma=0.0, per_token=0.001))
    assert found.step == pytest.approx(50 * 0.016 + 0.5 + 0.001 * 18 * 50 + 0.1)


def test_a_lag_hides_training_behind_sampling(simulator: Any) -> None:
    slow = setting(simulator, fixed=3.0)
    steps = [simulator["run"](replace(slow, max_lag=lag)).step for lag in (0, 1, 4)]
    assert steps[0] > steps[1] >= steps[2] >= 3.0


def test_parts_of_an_update_are_trained_as_they_arrive(simulator: Any) -> None:
    whole = setting(simulator, groups=8, window=8, fixed=2.0)
    parts = replace(whole, part=2, publish_every=4)
    assert simulator["run"](parts).step < simulator["run"](whole).step


class Far:
    """A sampler elsewhere: it tells what it has done only when it is heard."""

    def __init__(self) -> None:
        self.oldest_version = 0
        self.told = 0
        self.admitted: list[int] = []
        self.restarted = 0

    def admit(self, requests: list[GroupRequest]) -> None:
        self.admitted += [each.number for each in requests]

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        self.oldest_version = self.told
        return [FinishedGroup(number=n, episodes=[]) for n in self.admitted if n < 6]


def test_slots_that_are_free_are_given_out_before_the_learner_is_busy() -> None:
    """Groups that wait to be trained, and others that are played, must not keep them from being heard of."""
    far = Far()
    tasks = [Task(id=str(n), messages=(), answer="") for n in range(64)]
    source = GroupSource(
        far,  # type: ignore[arg-type]
        Stream(tasks, seed=0),
        {"": Sampling()},
        Asynchrony(max_lag=3, samplers=1, place="process"),
        Journal(None, Progress(), lambda kind, data: None),  # type: ignore[arg-type]
        count=2,
        size=1,
        state=lambda number: TrainerState(),
        left=lambda: 20,
    )
    source.begin(0)
    for version in range(1, 4):
        kept, _ = source.collect(lambda group: True, 1, version - 1)
        source.admission.hold([group.number for group in kept], version)
        far.told = version  # taken at once, but nobody has listened yet
        source.feed(version)
        assert len(far.admitted) == 8 + 2 * version
