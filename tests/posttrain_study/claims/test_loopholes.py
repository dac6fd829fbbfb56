"""claims on loopholes: a table policy of texts, verdicts by more and more cases, and when an alarm rings."""

import pytest
import torch

from posttrain.types import Task, Verdict
from posttrain_study.claims.alarm_timing import RUNS, Monitor, departure, first_ring, mean_open, share_open
from posttrain_study.claims.format_regex import REGEX, rewards, sums, tables_of
from posttrain_study.claims.text_world import follow_texts, scores_of


def test_a_policy_begins_with_the_chances_of_its_world() -> None:
    world = sums(0)
    chances = world.chances(world.policy(0.05))
    assert torch.allclose(chances, world.manners[:, None] * world.contents)
    assert torch.allclose(chances.sum((1, 2)), torch.ones(len(world.tasks), dtype=torch.float64))


def test_a_reward_is_learnt_and_its_expectation_is_exact() -> None:
    world = sums(0)
    tables = tables_of(world)
    path = follow_texts(world, tables["right"], tables, seed=0, updates=40, lr=0.05)
    assert path["right"][0] == pytest.approx(
        float(0.2 + 0.3 * world.manners[1] - 0.2 * world.manners[3:].sum())
    )
    assert path["right"][-1] > path["right"][0] + 0.3


def test_a_text_that_failed_by_fewer_cases_is_not_judged_again() -> None:
    world, calls = sums(0), list[str]()

    def strict(task: Task, text: str) -> Verdict:
        calls.append(text)
        return Verdict(score=float("..." not in text), label="")

    by_regex = world.judge(rewards()[REGEX])
    scores = scores_of(world.judge(strict, passed=by_regex))  # type: ignore[arg-type]
    assert all("<think>" in text for text in calls)
    expected = scores_of(by_regex)
    expected[:, 4] = 0.0
    assert torch.equal(scores, expected)


def test_the_gap_is_read_where_the_first_alarm_rings() -> None:
    run = {
        "reward": [0.5, 0.6, 0.8, 1.0],
        "truth": [0.5, 0.5, 0.5, 0.5],
        "rings": {"both": {"Tampering": 3, "Form pays": 2}, "reward alone": {}},
    }
    assert (departure(run), first_ring(run, "both")) == (2, 2)
    assert share_open(run, "both") == pytest.approx(0.6)
    assert (first_ring(run, "reward alone"), share_open(run, "reward alone")) == (None, 1.0)
    closed = {**run, "truth": [0.5, 0.5, 0.5, 0.9], "rings": {"both": {}}}
    assert mean_open({**dict.fromkeys(RUNS, closed), "tests": run}, "both") == pytest.approx(0.6)


def test_a_monitor_rings_by_the_auditor_alone() -> None:
    monitor = Monitor([Task(id="q", messages=())], seed=0)
    for update in range(1, 41):
        share = update / 40
        right = [(0, "7", Verdict(score=0.2, label="scored"), 1.0)] * round(20 * (1 - share))
        wrong = [(0, "8", Verdict(score=1.0, label="scored"), 0.0)] * round(20 * share)
        monitor.see(update, right + wrong, None)
    assert list(monitor.rings["both"]) == list(monitor.rings["auditor"]) == ["Auditor disagrees"]
    assert monitor.rings["reward alone"] == monitor.rings["held-out accuracy"] == {}
