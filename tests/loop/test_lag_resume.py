"""Exact resume of runs that sample ahead: which choices keep it, and which are named because they do not."""

import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.curriculum.stream import Stream
from posttrain.learner.learner import Learner
from posttrain.loop.group_source import GroupSource
from posttrain.recipe import config
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.rollout.protocol import FinishedGroup, GroupRequest
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.worker import RolloutWorker
from posttrain.run.journal import Journal, Progress
from posttrain.run.resume import find_inexact_keys
from posttrain.types import Sampling, Task
from posttrain.verifiers.protocol import TrainerState

ONE_STEP_OFF = {"max_lag": 1, "place": "here"}
STEPS = {"max_lag": 2, "pace": "steps", "swap": "within", "steps_per_update": 4}
VARIED = {"rollout": {"groups": 3, "group_size": 3, "select": "varied", "max_rounds": 3}}
BAND = {"curriculum": {"kind": "band", "keep": 0.5}}
BANDIT = {
    "curriculum": {"kind": "bandit"},
    "task": {"arithmetic": {"low": 2, "high": 12, "held_out": 3, "template": "{a}+{b}="}},
}
REPLAY = {
    "method": {"name": "decoupled_ppo"},
    "rollout": {"groups": 3, "group_size": 4, "replay": 2, "replay_lag": 2},
}
REMAX = {"method": {"name": "remax", "correction": "token_truncated"}}
PARTS = {
    "method": {"name": "gdpo", "correction": "token_truncated"},
    "verifier": {"number": {}, "regex": {"pattern": "[1-4]"}},
    "rollout": {"groups": 3, "group_size": 4, "replay": 2, "replay_lag": 2},
}
GAME = {
    "task": {"guess": {"high": 9, "max_turns": 3}, "games": {"train": 7, "held_out": 2}},
    "verifier": None,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one-step-off": ({}, ONE_STEP_OFF),
    "one-step-off, selected, a band of tasks": (VARIED | BAND, ONE_STEP_OFF),
    "one-step-off, a bandit": (BANDIT, ONE_STEP_OFF),
    "one-step-off, replay of parts of the reward": (PARTS, ONE_STEP_OFF),
    "one-step-off, a game": (GAME, ONE_STEP_OFF),
    "by steps": ({}, STEPS),
    "by steps, selected, a band of tasks": (VARIED | BAND, STEPS),
    "by steps, replay": (REPLAY, STEPS),
    "by steps, a window, a greedy answer": (REMAX, STEPS | {"window": 3}),
    "by steps, between rounds": ({}, STEPS | {"swap": "between"}),
}


def weights(run: Path) -> bytes:
    newest = max((run / "checkpoints").glob("step_*"))
    return (newest / "model" / "model.safetensors").read_bytes()


def rollouts(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run / "samples").glob("*.jsonl")}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample("*bandit", "*game", "by steps, sel*", "by steps, a window*")
def test_resume_from_a_checkpoint_ahead_is_exact(ahead, trained, run_cli, write, tmp_path, case):
    over, how = CASES[case]
    tables = ahead | over | {"run": {"updates": 4, "threads": 1}, "checkpoint": {"every": 1, "keep": 0}}
    tables = {name: table for name, table in tables.items() if table is not None}
    _, run = trained(tables, **how)
    resumed = tmp_path / "resumed"
    shutil.copytree(run, resumed)
    for update in (3, 4):
        shutil.rmtree(resumed / "checkpoints" / f"step_{update:06d}")
    recipe = write(tables, {"async": how}, "resumed")
    result = run_cli("train", recipe, "--run-dir", resumed, "--resume", "--quiet")
    assert result.code == 0, result.err
    assert "will not end with the weights" not in result.err
    assert weights(resumed) == weights(run)
    assert rollouts(resumed) == rollouts(run)


def test_one_step_off_killed_at_random_resumes_exactly(ahead, write, launcher, tmp_path, thorough):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    tables = ahead | {"checkpoint": {"every": 1}, "eval": {"limit": 0}}
    tables["sampling"] = {"max_new_tokens": 40, "temperature": 2.0}
    recipe = write(tables, {"async": {"max_lag": 1, "place": "thread"}})

    def start(name: str, *more: str) -> Any:
        words = ["train", recipe, "--run-dir", tmp_path / name, "--quiet", *more]
        return launcher.start(*words, output=tmp_path / f"{name}.txt")

    def saved() -> int:
        return max(
            (int(p.name[5:11]) for p in (tmp_path / "killed" / "checkpoints").glob("step_*")), default=0
        )

    assert start("whole").wait() == 0
    resume: list[str] = []
    for update in (1, 3, 4) if thorough else (1, 4):
        run = start("killed", *resume)
        run.until(lambda update=update: saved() >= update)
        time.sleep(dice.uniform(0.0, 0.1))
        run.kill()
        assert run.wait() in (0, -9), run.output.read_text()
        resume = ["--resume"]
    assert start("killed", *resume).wait() == 0, (tmp_path / "killed.txt").read_text()
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert rollouts(tmp_path / "killed") == rollouts(tmp_path / "whole")


def test_one_step_off_selects_alike_at_any_speed(ahead, trained, monkeypatch, thorough):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice, tables = random.Random(seed), ahead | VARIED | BAND
    _, expected = trained(tables, **ONE_STEP_OFF)

    def slow(call: Any, most: float) -> Any:
        def wrapped(*args: Any) -> Any:
            if dice.random() < 0.3:
                time.sleep(dice.uniform(0, most))
            return call(*args)

        return wrapped

    monkeypatch.setattr(Rollouts, "step", slow(Rollouts.step, 0.02))
    monkeypatch.setattr(Learner, "update", slow(Learner.update, 0.2))
    monkeypatch.setattr(RolloutWorker, "load_snapshot", slow(RolloutWorker.load_snapshot, 0.5))
    for n in range(2 if thorough else 1):
        _, run = trained(tables, f"slow{n}", max_lag=1, place="thread")
        assert rollouts(run) == rollouts(expected)
        assert weights(run) == weights(expected)


class SlowSampler:
    """Finish one group a poll; then take the newest weights, `delay` polls later."""

    restarted = 0

    def __init__(self, delay: int) -> None:
        self.delay, self.oldest_version = delay, 0
        self.newest, self.since = 0, 0
        self.rounds: list[tuple[int, ...]] = []
        self.playing: list[GroupRequest] = []

    def admit(self, requests: list[GroupRequest]) -> None:
        self.rounds.append(tuple(each.number for each in requests))
        self.playing += requests

    def poll(self, timeout_s: float) -> list[FinishedGroup]:
        if not timeout_s:
            return []
        done = [FinishedGroup(number=self.playing.pop(0).number)] if self.playing else []
        if not self.playing and self.newest > self.oldest_version:
            self.since += 1
            if self.since > self.delay:
                self.oldest_version, self.since = self.newest, 0
        return done

    def publish(self, version: int) -> None:
        self.newest = version

    def unfinished(self) -> list[GroupRequest]:
        return list(self.playing)


def source_of(sampler: SlowSampler, journal: Journal) -> GroupSource:
    return GroupSource(
        sampler,  # type: ignore[arg-type]
        Stream([Task(id=str(n), messages=(), answer="") for n in range(64)], seed=0),
        {"": Sampling()},
        Asynchrony(max_lag=1, place="process"),
        journal,
        count=2,
        size=1,
        state=lambda number: TrainerState(),
        left=lambda: 20,
    )


@pytest.fixture
def journal() -> Journal:
    return Journal(None, Progress(), lambda kind, data: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_one_step_off_admits_alike_however_slow(journal: Journal, delay: int) -> None:
    """The second update drops a group: another replaces it in a round of its own, after the next update's."""
    sampler = SlowSampler(delay)
    source, keeps = source_of(sampler, journal), iter([True, True, False, True, True])
    source.begin(0)
    for version in (0, 1):
        source.collect(lambda group: next(keeps), 2, version)
        source.feed(version)
        source.hold(version + 1)
        sampler.publish(version + 1)
    assert sampler.rounds == [(0, 1, 2, 3), (4, 5), (6,)]


@pytest.mark.parametrize("delay", [0, 1, 5])
def test_one_step_off_saves_no_unfinished_group(journal: Journal, delay: int) -> None:
    sampler = SlowSampler(delay)
    source = source_of(sampler, journal)
    source.begin(0)
    source.collect(lambda group: True, 1, 0)
    source.hold(1)
    sampler.publish(1)
    for _ in range(2):
        flight = source.flight(1)
        assert flight["requests"] == []
        assert sorted(flight["finished"]) == flight["line"]["line"]
        source.feed(1)  # what is being played at the next save is awaited as well
    assert sampler.oldest_version == 1


@pytest.mark.parametrize(
    ("how", "key"),
    [
        ({}, ""),
        ({"max_lag": 1}, ""),
        (STEPS, ""),
        ({"max_lag": 2}, "async.max_lag"),
        ({"max_lag": 1, "swap": "within"}, "async.swap"),
        ({"max_lag": 1, "window": 2}, "async.window"),
        (STEPS | {"cache": "keep"}, "async.cache"),
    ],
)
def test_keys_that_lose_exact_resume_are_named(ahead, write, how, key):
    recipe = config.read(write(ahead, {"async": how})).recipe
    assert [*find_inexact_keys(recipe)] == ([key] if key else [])
    timed = replace(recipe, rollout=replace(recipe.rollout, episode_s=1.0))
    assert "rollout.episode_s" in find_inexact_keys(timed)


def test_resume_by_the_clock_says_that_it_is_not_exact(ahead, trained, run_cli, write):
    tables = ahead | {"run": {"updates": 2, "threads": 1}, "checkpoint": {"every": 1, "keep": 0}}
    how = {"max_lag": 2, "place": "thread"}
    _, run = trained(tables, **how)
    shutil.rmtree(run / "checkpoints" / "step_000002")
    result = run_cli("train", write(tables, {"async": how}), "--run-dir", run, "--resume")
    assert result.code == 0, result.err
    assert "note: async.max_lag: this run will not end with the weights of an uninterrupted one" in result.err
