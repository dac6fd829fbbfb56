"""The greedy answer of a task: drawn and judged with the others, and seen by nothing but their credit."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from posttrain.api.opening import prepare
from posttrain.loop import build
from posttrain.loop.session import LoopSession
from posttrain.models.pretrained import silent
from posttrain.recipe import config
from posttrain.rollout.protocol import GroupRequest
from posttrain.run.rundir import RunDir
from posttrain.types import Sampling


def opened(recipe: Path, run: Path) -> LoopSession:
    """A session of this recipe in this directory."""
    directory = RunDir(run, resume=False)
    found, plan = prepare(config.read(recipe), directory, title="test", resume=False, say=silent)
    parts = build.build_session_parts(
        plan, directory, resume=False, config=found.tables, show=lambda phase, numbers: None, say=silent
    )
    session = LoopSession(parts, ())
    session._open_parts.closing.callback(directory.close)
    return session


@pytest.fixture
def tables(online: dict[str, Any], able: Path) -> dict[str, Any]:
    """ReMax on sums of one digit, by a model that says many things."""
    return online | {"model": online["model"] | {"path": str(able)}, "method": {"name": "remax"}}


def test_the_group_is_the_one_of_a_method_without_and_knows_what_greed_earns(tables, write, tmp_path):
    """Draws depend on seed, task and sample, so one more sample changes none of them."""
    with opened(write(tables | {"method": {"name": "rloo"}}, name="plain"), tmp_path / "plain") as s:
        plain = [[e.trajectory.tokens for e in group] for group in s.sample()]
    with opened(write(tables), tmp_path / "run") as s:
        groups = s.sample()
        assert [[e.trajectory.tokens for e in group] for group in groups] == plain
        greedy = Sampling(temperature=0.0, max_new_tokens=3)
        requests = [
            GroupRequest(number=n, task=group[0].task, size=1, sampling=greedy)
            for n, group in enumerate(groups)
        ]
        alone = s._open_parts.loop.sampler.evaluate(requests, lambda done: None)
        batch = s.batch(groups)
        for n, group in enumerate(groups):
            [wanted] = alone[n]
            for e in group:
                assert e.verdict.parts["greedy/reward"] == wanted.reward
                assert e.verdict.parts["greedy/tokens"] == wanted.length
            rows = batch.greedy[4 * n : 4 * n + 4]
            assert (rows == wanted.reward).all()
        update = s.update(batch)
        R = batch.reward.sum(-1, keepdim=True)
        credited = (R - batch.greedy).where(batch.mask, 0.0).float()
        assert (update.batch.advantage == credited).all()
        s.publish()
        answers = [answer for [answer] in alone.values()]
        assert s.metrics["greedy/reward"] == [pytest.approx(sum(e.reward for e in answers) / 3)]
        assert s.metrics["greedy/tokens"] == [pytest.approx(sum(e.length for e in answers) / 3)]
        rewards = [e.reward for group in groups for e in group]
        assert s.metrics["reward/mean"] == [pytest.approx(sum(rewards) / 12)]


def test_an_answer_that_greed_had_no_verdict_beside_is_worth_nothing(tables, write, tmp_path):
    """Nothing is known to compare it with; the others of the update are as they were."""
    with opened(write(tables), tmp_path / "run") as s:
        groups = s.sample()
        for e in groups[0]:
            for name in [name for name in e.verdict.parts if name.startswith("greedy/")]:
                del e.verdict.parts[name]
        batch = s.batch(groups)
        assert batch.greedy[:4].isnan().all()
        advantage = s.update(batch).batch.advantage
        assert not advantage[:4].any()
        assert not math.isnan(float(advantage.sum()))


def test_samples_say_what_the_greedy_answer_earned_and_hold_no_row_of_it(tables, write, run_cli, tmp_path):
    said = run_cli("train", write(tables), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    lines = [json.loads(x) for x in (tmp_path / "run/samples/000001.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines] == [0, 1, 2, 3] * 3
    assert all({"greedy/reward", "greedy/tokens"} <= line["parts"].keys() for line in lines)
