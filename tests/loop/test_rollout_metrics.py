"""What is said of an update's episodes: coverage, and how much its answers differ."""

from dataclasses import replace

import pytest

from posttrain.curriculum.select import selection
from posttrain.recipe.settings import SELECT
from posttrain.run.metrics import pass_at_powers, rollout_metrics, success_rate
from posttrain.types import Episode, Task, Trajectory, Verdict


def episode(score: float | None, *said: int) -> Episode:
    n = len(said)
    trajectory = Trajectory(
        tokens=[9, *said],
        sampled=[False] + [True] * n,
        logp_gen=[0.0] * (n + 1),
        logp_policy=[0.0] * (n + 1),
        version=[0] * (n + 1),
        reward=[0.0] * n + [score or 0.0],
    )
    label = "timeout" if score is None else "scored"
    verdict = Verdict(score=score, label=label)
    task = Task(id="t", messages=())
    return Episode(task=task, sample=0, trajectory=trajectory, verdict=verdict, response="", stop="eos")


def group(right: int, wrong: int, failed: int = 0) -> list[Episode]:
    scores = [1.0] * right + [0.0] * wrong + [None] * failed
    return [episode(score, n) for n, score in enumerate(scores)]


def test_pass_at_k_is_the_mean_over_all_groups_that_are_large_enough():
    groups = [group(1, 3), group(0, 4), group(2, 0, failed=2), group(0, 0, failed=4)]
    found = {k: v for k, v in rollout_metrics(groups, 0, 1.0).items() if k.startswith("pass@")}
    assert found == {
        "pass@1": pytest.approx((0.25 + 0 + 1) / 3),
        "pass@2": pytest.approx((0.5 + 0 + 1) / 3),
        "pass@4": pytest.approx((1 + 0) / 2),
    }
    assert list(pass_at_powers([group(0, 9)], 1.0)) == ["pass@1", "pass@2", "pass@4", "pass@8"]
    assert pass_at_powers([], 1.0) == {}


def test_pass_at_one_is_the_accuracy_where_groups_are_as_large():
    found = rollout_metrics([group(3, 1), group(1, 3), group(0, 4)], 0, 1.0)
    assert found["pass@1"] == pytest.approx(found["accuracy"])
    assert found["pass@1"] < found["pass@2"] < found["pass@4"]


def test_answers_are_distinct_by_what_the_policy_chose():
    same, none = [episode(1.0, 5, 6)] * 4, [episode(None, 5)]
    half = [episode(0.0, 5), episode(1.0, 5), episode(0.0, 5, 5), episode(0.0, 5, 5), episode(None, 7)]
    assert rollout_metrics([same], 0, 1.0)["distinct"] == 0.25
    assert rollout_metrics([half], 0, 1.0)["distinct"] == 0.5
    assert rollout_metrics([same, half, none], 0, 1.0)["distinct"] == pytest.approx(0.375)


def test_a_success_rate_is_of_those_that_were_judged():
    assert success_rate(group(1, 3, failed=2), 1.0) == 0.25
    assert success_rate(group(0, 0, failed=2), 1.0) is None
    assert success_rate(group(0, 2), 0.0) == 1.0


def test_metrics_and_selections_count_episodes_not_rows():
    """An agent's answers in two conversations each, and the same in one."""

    def apart(score: float, first: int, *others: int) -> Episode:
        [last] = episode(score, *others).trajectories
        return replace(episode(score, first), branches=(last,))

    answers = [(1.0, 4, 5, 6), (1.0, 4, 5, 6), (0.0, 4, 5, 7), (0.0, 8, 5, 6)]
    whole, split = ([make(*each) for each in answers] for make in (episode, apart))
    assert rollout_metrics([split], 0, 1.0) == rollout_metrics([whole], 0, 1.0)
    assert rollout_metrics([split], 0, 1.0)["distinct"] == 0.75
    for name in SELECT:
        for part in (slice(None), slice(2), slice(2, None)):
            assert selection(name, 1.0)(split[part]) == selection(name, 1.0)(whole[part])
