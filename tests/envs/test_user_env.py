"""Environments of the user's: found by name, checked before the run, and never able to end it."""

import os
import pickle
import random
from pathlib import Path

import pytest
import torch

from posttrain.envs.protocol import Start, Turn, broken_turn, guarded_reply, guarded_start
from posttrain.envs.user import load_env
from posttrain.process.interpreter import AWAY_ENV
from posttrain.process.workers import Failed, Returned, Workers
from posttrain.types import Task, UserError, Verdict

MODULE = """
import os, time
from dataclasses import dataclass
from posttrain.envs.protocol import Start, Turn
from posttrain.types import Verdict

@dataclass(frozen=True)
class Count:
    n: int

class Counting:
    def __init__(self, upto): self.upto = upto
    def start(self, task): return Start(state=Count(0), messages=task.messages)
    def reply(self, state, response):
        if response == "hang":
            while True: pass
        if response == "die": os._exit(1)
        if response == "raise": raise ValueError("odd")
        if response != str(state.n + 1):
            return Turn(state=state, done=True, verdict=Verdict(score=0.0, label="wrong"))
        if state.n + 1 == self.upto:
            return Turn(state=state, reward=1.0, done=True, verdict=Verdict(score=1.0, label="right"))
        return Turn(state=Count(state.n + 1), messages=({"role": "user", "content": "next"},))

def counting(upto=3): return Counting(upto)
def meddling():
    import random, torch
    torch.set_num_threads(7)
    torch.manual_seed(1)
    random.seed(1)
    os.environ["OMP_NUM_THREADS"] = "7"
    os.chdir("/")
    return Counting(1)
def broken(): raise RuntimeError("no game today")
def nothing(): return None
class Half:
    def start(self, task): return None
def half(): return Half()
class Odd:
    def start(self): return None
    def reply(self, state, response): return None
def odd(): return Odd()
class Later(Counting):
    async def reply(self, state, response): return None
def later(): return Later(1)
number = 3
"""
TASK = Task(id="c", messages=({"role": "user", "content": "Count."},))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("user") / "counting_env.py"
    path.write_text(MODULE)
    return str(path)


def test_a_users_environment_is_made_with_its_options(file):
    env = load_env(f"{file}:counting", {"upto": 2})
    assert not env.trusted
    start = guarded_start(env, TASK)
    first = guarded_reply(env, start.state, "1")
    last = guarded_reply(env, first.state, "2")
    assert (first.done, last.done, last.reward, last.verdict.label) == (False, True, 1.0, "right")
    assert pickle.loads(pickle.dumps(env)) == env
    assert not hasattr(env, "max_turns")


def test_how_long_a_users_environment_goes_on_is_known(tmp_path):
    (tmp_path / "slow_env.py").write_text(
        "class E:\n    max_turns, reply_s = 3, 2.5\n"
        "    def start(self, task): return None\n    def reply(self, state, said): return None\n"
    )
    env = load_env(f"{tmp_path / 'slow_env.py'}:E")
    assert (env.max_turns, env.reply_s, hasattr(env, "suited")) == (3, 2.5, False)
    assert pickle.loads(pickle.dumps(env)) == env


def test_it_runs_in_a_worker_with_a_deadline(file):
    env = load_env(f"{file}:counting")
    with Workers(1, deadline_s=4.0) as workers:
        outcomes = {}
        asked = {workers.submit(guarded_start, env, TASK): "start"}
        state = env.start(TASK).state
        asked |= {workers.submit(guarded_reply, env, state, r): r for r in ("1", "hang", "die", "raise", "2")}
        while len(outcomes) < len(asked):
            outcomes |= {asked[ticket]: outcome for ticket, outcome in workers.poll(timeout_s=30.0)}
    assert outcomes["start"].value == Start(state=state, messages=TASK.messages)
    assert isinstance(state, bytes), "its classes are known in workers alone"
    assert outcomes["1"].value.state not in (state, None)
    assert isinstance(outcomes["hang"], Failed)
    assert (outcomes["hang"].label, outcomes["die"].label) == ("timeout", "died")
    assert isinstance(outcomes["raise"], Returned)
    assert outcomes["raise"].value.verdict == Verdict(score=None, label="raised", reason="ValueError: odd")
    assert outcomes["2"].value.verdict.score == 0.0


def test_one_that_changes_its_process_changes_nothing_of_the_run(file):
    def ours():
        drawn = torch.random.get_rng_state().tolist(), random.getstate()
        return torch.get_num_threads(), dict(os.environ), Path.cwd(), drawn

    before = ours()
    env = load_env(f"{file}:meddling")
    with Workers(1, deadline_s=60.0) as workers:
        workers.submit(guarded_start, env, TASK)
        [(_, start)] = workers.poll(timeout_s=60.0)
        workers.submit(guarded_reply, env, start.value.state, "1")
        [(_, turn)] = workers.poll(timeout_s=60.0)
    assert turn.value.verdict.label == "right"
    assert ours() == before


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("countin", {}, "did you mean 'counting'"),
        ("number", {}, "not a function but int"),
        ("counting", {"upt": 3}, "did you mean 'upto'"),
        ("counting", {"upto": {1, 2}}, "not plain data"),
        ("counting", {"upto": float("nan")}, "not plain data"),
        ("broken", {}, "RuntimeError: no game today"),
        ("nothing", {}, r"a NoneType, which has no start\(task\)"),
        ("half", {}, r"a Half, which has no reply\(state, response\)"),
        ("odd", {}, r"its start cannot be called as start\(task\)"),
        ("later", {}, "reply is an async function"),
    ],
)
def test_an_unusable_environment_is_refused_before_the_run(file, name, options, says, monkeypatch):
    monkeypatch.setenv(AWAY_ENV, "1")  # in this process: how errors come from another one, tests/base says
    with pytest.raises(UserError, match=says):
        load_env(f"{file}:{name}", options)


class Returning:
    """Returns what it is told, whatever that is."""

    trusted = True

    def __init__(self, what):
        self.what = what

    def start(self, task):
        return self.what

    def reply(self, state, response):
        return self.what


MESSAGE = {"role": "user", "content": "go"}
END = Verdict(score=1.0, label="right")


@pytest.mark.parametrize(
    ("turn", "label"),
    [
        (None, "bad_turn"),
        ((1, 2), "bad_turn"),
        (Turn(state=1), "bad_turn"),
        (Turn(state=1, messages=(MESSAGE,), verdict=END), "bad_turn"),
        (Turn(state=1, done=True), "bad_turn"),
        (Turn(state=1, done=True, verdict=1.0), "bad_turn"),
        (Turn(state=1, done=True, verdict=END, messages=(MESSAGE,)), "bad_turn"),
        (Turn(state=1, messages="go"), "bad_turn"),
        (Turn(state=1, messages=("go",)), "bad_turn"),
        (Turn(state=1, messages=({"role": "user"},)), "bad_turn"),
        (Turn(state=1, messages=({"role": "user", "content": None},)), "bad_turn"),
        (Turn(state=1, messages=({"role": "assistant", "content": "go"},)), "bad_turn"),
        (Turn(state=1, messages=(MESSAGE,), reward=float("nan")), "not_a_number"),
        (Turn(state=1, done=True, verdict=END, reward=float("inf")), "not_a_number"),
        (Turn(state=1, messages=(MESSAGE,), reward="1"), "not_a_number"),
    ],
)
def test_a_turn_that_makes_no_sense_ends_the_episode_without_a_score(turn, label):
    ended = guarded_reply(Returning(turn), "before", "x")
    assert (ended.state, ended.done, ended.messages, ended.reward) == ("before", True, (), None)
    assert (ended.verdict.score, ended.verdict.label) == (None, label)
    assert ended.verdict.reason


@pytest.mark.parametrize(
    "start", [None, Start(state=1, messages=()), Start(state=1, messages=({"content": "go"},))]
)
def test_a_start_that_makes_no_sense_is_a_failure(start):
    verdict = guarded_start(Returning(start), TASK)
    assert (verdict.score, verdict.label) == (None, "bad_turn")


def test_the_boundary_lets_an_interrupt_through_and_nothing_else():
    class Interrupting(Returning):
        def reply(self, state, response):
            raise KeyboardInterrupt

        def start(self, task):
            raise ValueError("bad\ntask")

    with pytest.raises(KeyboardInterrupt):
        guarded_reply(Interrupting(None), 1, "x")
    assert guarded_start(Interrupting(None), TASK).reason == "ValueError: bad"
    assert broken_turn(1, "died", "gone").verdict.failed
