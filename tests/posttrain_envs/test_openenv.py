"""Environments behind a server of OpenEnv, over its own client: `make test-openenv` has the library."""

import importlib.util
import json
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.types import RunError, UserError
from posttrain_envs.openenv import OpenEnv, openenv_tasks

THERE = importlib.util.find_spec("openenv") is not None
needs = pytest.mark.skipif(not THERE, reason="openenv is not installed: make test-openenv")


@pytest.fixture(scope="module")
def url():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = [sys.executable, str(Path(__file__).with_name("openenv_server.py")), str(port)]
    process = subprocess.Popen(served)
    try:
        while True:
            with socket.socket() as asked:
                if asked.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="http"):
        OpenEnv(url="localhost:8000")
    with pytest.raises(ValueError, match="max_turns"):
        OpenEnv(url="http://localhost:8000", max_turns=0)
    if not THERE:
        with pytest.raises(UserError, match=r"^task\.openenv: "):
            openenv_tasks(OpenEnv(url="http://localhost:8000"), 1, 0)


@needs
def test_a_game_is_its_seed_and_its_moves(url):
    env = OpenEnv(url=url, observation="text", reset={"most": 12})
    for task in openenv_tasks(env, 4, 0):
        secret = random.Random(task.fields["seed"]).randint(1, 9)
        start = env.start(task)
        assert start.messages[-1]["content"] == f"{env.rules}\n\n1 to 12"
        wrong = secret % 9 + 1
        first = env.reply(start.state, "nothing")
        assert (first.messages[0]["content"], first.reward) == ("no number", -0.1)
        second = env.reply(first.state, f" {wrong}\n")
        assert second.messages[0]["content"] == ("higher" if wrong < secret else "lower")
        assert env.reply(first.state, str(wrong)) == second, "a turn depends on nothing but what was said"
        last = env.reply(second.state, str(secret))
        assert last.done
        assert (last.verdict.label, last.reward, last.verdict.score) == ("ended", 1.0, 0.9)


@needs
def test_what_is_shown_is_all_of_it_where_no_key_is_named(url):
    env = OpenEnv(url=url)
    [task] = openenv_tasks(env, 1, 0)
    shown = env.start(task).messages[-1]["content"].partition("\n\n")[2]
    assert json.loads(shown)["text"] == "1 to 9"


@needs
def test_faults_have_a_class_each_and_are_not_scored(url):
    [task] = openenv_tasks(OpenEnv(url=url), 1, 0)
    refused = OpenEnv(url=url, action="nonsense")
    turn = refused.reply(refused.start(task).state, "5")
    assert (turn.done, turn.verdict.label, turn.verdict.score) == (True, "invalid", 0.0)
    broken = OpenEnv(url=url)
    with pytest.raises(RunError, match=r"the server at .* fails: .*it broke"):
        broken.reply(broken.start(task).state, "break")
    with pytest.raises(UserError, match=r"an observation has no 'said', but .*text") as error:
        openenv_tasks(OpenEnv(url=url, observation="said"), 1, 0)
    assert error.value.key == "task.openenv.observation"
    with pytest.raises(UserError, match="does not begin a game"):
        openenv_tasks(OpenEnv(url="http://127.0.0.1:9"), 1, 0)


@needs
def test_a_run_plays_it(url, tiny, tmp_path):
    import posttrain

    posttrain.train(
        model=str(tiny),
        task={
            "openenv": {"url": url, "observation": "text", "max_turns": 3},
            "games": {"train": 8, "held_out": 0},
        },
        sampling={"max_new_tokens": 4},
        rollout={"groups": 2, "group_size": 2, "deadline_s": 60.0},
        updates=1,
        dir=tmp_path / "run",
    )
    found = [
        json.loads(line)
        for path in (tmp_path / "run" / "samples").iterdir()
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    assert len(found) == 4
    assert {line["label"] for line in found} <= {"ended", "truncated"}
    assert all(line["score"] is not None for line in found)
