"""Asynchrony is a schedule, not a race: what must come out bit for bit, and how old it may be."""

import importlib
import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.learner.learner import Learner
from posttrain.loop import saving
from posttrain.rollout.episode_runner import EpisodeRunner
from posttrain.rollout.local import LocalSampler
from posttrain.rollout.protocol import GroupRequest
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.worker import RolloutWorker
from posttrain.types import Sampling, Task

# Three steps: on some processors all answers have two tokens, and weights must change within them.
STEPS = {"max_lag": 2, "pace": "steps", "swap": "within", "steps_per_update": 3}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def samples(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "samples").glob("0*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_without_lag_it_is_the_synchronous_run_wherever_the_sampler_is(ahead, trained):
    here, run = trained(ahead)
    for place in ("thread", "process"):
        there, other = trained(ahead, place, place=place)
        assert same(here, there), place
        assert samples(run) == samples(other), place
    assert all(line["lag/max"] == 0 for line in lines(run)[1:])


@pytest.mark.full
def test_two_samplers_without_lag_sample_with_the_newest_weights(ahead, trained):
    """Two engines compute in other batches than one: equal up to rounding at best."""
    _, run = trained(ahead, samplers=2)
    assert all(line["lag/max"] == 0 for line in lines(run)[1:])


@pytest.mark.full
def test_one_step_off_is_the_same_in_a_process_and_however_long_anything_takes(ahead, trained, monkeypatch):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    expected, run = trained(ahead, max_lag=1, place="here")
    assert [line["lag/mean"] for line in lines(run)[1:]] == [0.0] + [1.0] * 5
    assert same(expected, trained(ahead, "process", max_lag=1, place="process")[0])
    step, update, hear = Rollouts.step, Learner.update, time.sleep

    def slow(call: Any, most: float) -> Any:
        def wrapped(*args: Any) -> Any:
            if dice.random() < 0.3:
                hear(dice.uniform(0, most))
            return call(*args)

        return wrapped

    monkeypatch.setattr(Rollouts, "step", slow(step, 0.02))
    monkeypatch.setattr(Learner, "update", slow(update, 0.2))
    for n in range(4):
        found, _ = trained(ahead, f"slow{n}", max_lag=1, place="thread")
        assert same(expected, found), f"run {n}"


@pytest.mark.parametrize("how", [STEPS, STEPS | {"max_lag": 3, "cache": "keep"}, STEPS | {"swap": "between"}])
def test_by_steps_it_is_the_same_twice_and_reaches_the_bound(ahead, trained, how):
    one, run = trained(ahead, **how)
    other, _ = trained(ahead, "again", **how)
    assert same(one, other)
    lags = [line["lag/max"] for line in lines(run)[1:]]
    assert max(lags) == how["max_lag"]
    mixed = [row for row in samples(run) if len(set(row["version"])) > 1]
    assert bool(mixed) == (how["swap"] == "within"), "weights change within answers, or between rounds"
    spans = [[b - a for a, b in zip(r["version"], r["version"][1:], strict=False)] for r in mixed]
    assert all(step >= 0 for row in spans for step in row), "versions only rise within an answer"


def test_killed_with_tokens_in_flight_a_run_goes_on_exactly(ahead, write, tmp_path, launcher, thorough):
    """Several kills, at any moment; the recipe asks for a checkpoint after each update."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    recipe = write(ahead, {"async": STEPS, "checkpoint": {"every": 1}})

    def run(name: str, *more: str) -> Any:
        words = ["train", recipe, "--run-dir", tmp_path / name, "--quiet", *more]
        return launcher.start(*words, output=tmp_path / f"{name}.txt")

    began = time.monotonic()
    assert run("whole").wait() == 0
    whole_s, kills, code = time.monotonic() - began, 0, None
    while code != 0:
        resumed = ["--resume"] if (tmp_path / "killed" / "config.toml").exists() else []
        started = run("killed", *resumed)
        if kills < (5 if thorough else 2):
            time.sleep(dice.uniform(0.3, 1.0) * whole_s)
            started.kill()
            kills += 1
        code = started.wait()
        assert code in (0, -9), started.output.read_text()
    last = Path("checkpoints", "step_000006", "model", "model.safetensors")
    assert same(load_file(tmp_path / "whole" / last), load_file(tmp_path / "killed" / last))
    assert samples(tmp_path / "whole") == samples(tmp_path / "killed")
    assert any(len(set(row["version"])) > 1 for row in samples(tmp_path / "whole")), "tokens were in flight"


def test_checkpoints_and_evaluations_change_nothing(ahead, trained):
    for how in (STEPS, {"max_lag": 1, "place": "thread"}):
        plain, _ = trained(ahead | {"eval": {"limit": 0}}, f"plain{how['max_lag']}", **how)
        often = {"eval": {"limit": 3, "every": 1}, "checkpoint": {"every": 1}}
        assert same(plain, trained(ahead | often, f"often{how['max_lag']}", **how)[0])


def test_after_a_swap_each_token_is_one_policys_view_of_all_before_it(ahead, trained, monkeypatch):
    """With recompute; what is kept instead is nobody's, which is why the mismatch leaves it out."""
    worst = {}
    for cache in ("recompute", "keep"):
        gaps: list[float] = []
        turn = LocalSampler.poll

        def looked(self: Any, timeout_s: float, turn: Any = turn, gaps: list[float] = gaps) -> Any:
            done = turn(self, timeout_s)
            engine = self.worker.rollouts.engine
            for each in done:
                for e in each.episodes:
                    t = e.trajectory
                    logits = engine.runner.score(tuple(t.tokens))[:-1] / 2.0  # the temperature
                    own = logits.float().log_softmax(-1).gather(-1, torch.tensor(t.tokens[1:])[:, None])
                    logps = [0.0, *own[:, 0].tolist()]
                    newest = [i for i, v in enumerate(t.version) if t.sampled[i] and v == engine.version]
                    if len({v for v, s in zip(t.version, t.sampled, strict=True) if s}) > 1:
                        gaps += [abs(logps[i] - t.logp_policy[i]) for i in newest]
            return done

        monkeypatch.setattr(LocalSampler, "poll", looked)
        trained(ahead | {"optim": {"lr": 0.02}}, cache, **(STEPS | {"cache": cache}))
        monkeypatch.setattr(LocalSampler, "poll", turn)
        assert gaps
        worst[cache] = max(gaps)
    assert worst["recompute"] < 1e-4
    assert worst["keep"] > 1000 * worst["recompute"]


def test_a_method_that_takes_old_tokens_for_fresh_ones_is_refused(ahead, run_cli, write, tmp_path):
    said = run_cli("validate", write(ahead | {"method": {"name": "grpo"}}, {"async": {"max_lag": 1}}))
    assert said.code == 2
    assert "async.max_lag" in said.err
    assert "method.correction" in said.err


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"max_lag": -1}, "max_lag must be 0 or more"),
        ({"place": "here", "samplers": 2, "max_lag": 1}, "room for one sampler"),
        ({"place": "process", "pace": "steps", "max_lag": 1}, "pace = 'steps' is kept in the loop's thread"),
        ({"swap": "within"}, "async.max_lag is 0"),
        ({"cache": "keep", "max_lag": 1}, "async.swap is 'between'"),
        ({"deadline_s": 3.0}, "the sampler is in the loop's own thread"),
    ],
)
def test_choices_that_nothing_reads_or_nobody_can_keep_are_named(ahead, run_cli, write, how, words):
    said = run_cli("validate", write(ahead, {"async": how}))
    assert said.code == 2
    assert words in said.err
    assert "recipe.toml:" in said.err


@pytest.mark.full
def test_sigterm_ends_a_run_whose_samplers_are_at_work_and_it_can_be_resumed(
    ahead, write, tmp_path, launcher
):
    recipe = write(ahead, {"async": {"max_lag": 1, "place": "process"}, "run": {"updates": 200}})
    run = tmp_path / "run"
    words = ["train", recipe, "--run-dir", run, "--quiet"]
    started = launcher.start(*words, output=tmp_path / "first.txt")
    metrics = run / "metrics.jsonl"
    started.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3)
    started.kill(signal.SIGTERM)
    assert started.wait() == 1
    assert "go on with --resume" in started.output.read_text()
    done = len(lines(run))
    again = launcher.start(*words, "--resume", output=tmp_path / "second.txt")
    again.until(lambda: metrics.read_text().count("\n") > done)
    again.kill(signal.SIGTERM)
    assert again.wait() == 1
    rows = lines(run)
    assert [row["update"] for row in rows] == list(range(len(rows)))
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(run).encode() in reading(p)]
    assert not left, "no sampler outlives its learner"


def reading(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.parent.name != str(os.getpid()) else b""
    except OSError:
        return b""


@pytest.mark.parametrize(
    "how",
    [
        {"max_lag": 4, "samplers": 2, "swap": "within", "place": "process"},
        {"max_lag": 3, "swap": "within", "cache": "keep", "place": "thread"},
        {"max_lag": 2, "place": "thread"},
    ],
)
@pytest.mark.sample("how1")
def test_by_the_clock_no_token_is_older_than_the_bound(ahead, trained, how):
    _, run = trained(ahead | {"eval": {"limit": 3, "every": 2}}, **how)
    rows = lines(run)
    assert [row["update"] for row in rows] == list(range(7))
    assert all(0 <= row["lag/max"] <= how["max_lag"] for row in rows[1:])
    assert all(row["version"] == sorted(row["version"]) for row in samples(run))


GAME = """
from dataclasses import dataclass
from posttrain.envs.protocol import Start, Turn
from posttrain.types import Verdict


@dataclass(frozen=True)
class Game:
    trusted = False
    max_turns = 2

    def start(self, task):
        return Start(state=0, messages=task.messages)

    def reply(self, state, response):
        if state:
            score = len(set(response)) / 10
            return Turn(state=2, done=True, verdict=Verdict(score=score, label="scored", reason=""))
        return Turn(state=1, messages=({"role": "user", "content": "3+2="},))


def make():
    return Game()
"""
SEATS = GAME.replace("messages=task.messages)", "messages=task.messages, seats=2)").replace(
    """        if state:
            score = len(set(response)) / 10
            return Turn(state=2, done=True, verdict=Verdict(score=score, label="scored", reason=""))
        return Turn(state=1, messages=({"role": "user", "content": "3+2="},))
""",
    """        if state == 2:
            each = (Verdict(score=len(set(x)) / 10, label="scored", reason="") for x in (response, "ab"))
            return Turn(state=3, done=True, verdict=tuple(each))
        return Turn(state=state + 1, messages=({"role": "user", "content": "3+2="},), seat=1 - state)
""",
)


@pytest.fixture(params=["one seat", "two seats"])
def played(ahead, tmp_path, request):
    """The same in an environment of the user's, in worker processes, of two turns; or of three at two
    seats."""
    (tmp_path / "game.py").write_text(GAME if request.param == "one seat" else SEATS)
    assert SEATS != GAME
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a in (2, 3, 4) for b in (2, 3, 4))
    )
    data = {"path": str(tmp_path / "sums.jsonl")}
    task = {"data": data, "held_out": data, "env": {"factory": f"{tmp_path / 'game.py'}:make"}}
    tables = {key: value for key, value in ahead.items() if key != "verifier"} | {"task": task}
    return tables | {"rollout": ahead["rollout"] | {"workers": 1}}


@pytest.mark.sample("one seat")
def test_in_an_environment_too_evaluations_change_nothing_and_a_resume_is_exact(
    played, trained, run_cli, write, tmp_path, thorough
):
    plain, run = trained(played | {"eval": {"limit": 0}}, **STEPS)
    assert any(row["turns"] == 2 for row in samples(run))
    assert {row["seat"] for row in samples(run)} == (
        {0, 1} if "seats=2" in (tmp_path / "game.py").read_text() else {0}
    )
    often = played | {"eval": {"limit": 3, "every": 1}, "checkpoint": {"every": 1, "keep": 0}}
    found, other = trained(often, "often", **STEPS)
    assert same(plain, found)
    for update in (2, 4) if thorough else (4,):
        again = tmp_path / f"again{update}"
        shutil.copytree(other, again)
        for later in range(update + 1, 7):
            shutil.rmtree(again / "checkpoints" / f"step_{later:06d}")
        words = ["--run-dir", again, "--resume", "--quiet"]
        said = run_cli("train", write(often, {"async": STEPS}, f"again{update}"), *words)
        assert said.code == 0, said.err
        assert same(plain, load_file(again / "checkpoints" / "step_000006" / "model" / "model.safetensors"))


@pytest.mark.parametrize("kind", ["none", "band", "bandit"])
def test_a_checkpoint_has_taken_what_is_under_way(ahead, trained, kind):
    tables = ahead | {"curriculum": {"kind": kind}, "checkpoint": {"every": 1, "keep": 0}}
    if kind == "bandit":
        tables["task"] = {"arithmetic": {"low": 2, "high": 12, "held_out": 3, "template": "{a}+{b}="}}
    _, run = trained(tables, **(STEPS | {"steps_per_update": 1}))
    under_way = 0
    for folder in sorted((run / "checkpoints").iterdir())[:-1]:
        state = json.loads((folder / "state.json").read_text())["progress"]
        flight = saving.load_flight(folder)
        assert state["admitted"] == flight["line"]["admitted"] == state["taken"]
        assert state["admitted"] == 3 * state["update"] + len(flight["line"]["line"])
        under_way += len(flight["requests"])
    assert under_way


@pytest.mark.full
def test_the_schedules_that_sleep_are_played(monkeypatch):
    """benchmarks/async/sleep.py puts an engine, a learner and a chat of its own into the real loop."""
    place = Path(__file__).parents[2] / "benchmarks" / "async"
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", str(place))
    sleep = importlib.import_module("sleep")
    for name, value in {"GROUPS": 2, "SIZE": 2, "TRAIN": 0.01}.items():
        monkeypatch.setattr(sleep, name, value)
    told = sleep.measured(replace(sleep.MODES["lag 4, swaps within"], samplers=1), 9)
    assert 0 < told["samplers/busy"] <= 1
    assert 0 < told["lag/mean"] <= told["lag/max"] <= 4


# ---------------------------------------------------------------------- what cannot be put aside


class Patient(EpisodeRunner):
    """Groups that take three steps each; no engine, and no answers."""

    def __init__(self, *, can_pause: bool) -> None:
        self.can_pause, self.steps, self.left, self.only = can_pause, 0, dict[int, int](), None

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def open(self, request: GroupRequest) -> int:
        number = len(self.left) + 10 * self.steps
        self.left[number] = 3
        return number

    def step(self):
        self.steps += 1
        for number in self.left if self.only is None else self.only & self.left.keys():
            self.left[number] -= 1
        done = [number for number, left in self.left.items() if not left]
        return [(number, []) for number in done if not self.left.pop(number)]

    def receive(self, answers) -> None: ...
    def pause(self) -> None: ...
    def unpause(self) -> None: ...
    def close(self) -> None: ...
    def parts(self):
        return {}

    def run_only(self, groups) -> None:
        self.only = groups

    def run_all(self) -> None:
        self.only = None


@pytest.mark.parametrize("can_pause", [True, False])
def test_an_evaluation_waits_for_programs_whose_clock_goes_on(can_pause):
    worker = RolloutWorker(Patient(can_pause=can_pause), swap="within", in_order=False)

    def asked(number: int) -> GroupRequest:
        task = Task(id=str(number), messages=({"role": "user", "content": "1?"},))
        return GroupRequest(number=number, task=task, size=1, sampling=Sampling(), epoch=0)

    worker.admit([asked(0)])
    worker.turn()
    worker.evaluate([asked(100)])
    worker.admit([asked(1)])
    order = []
    while not worker.idle:
        order += [group.number for group in worker.turn()]
        order += worker.pop_evaluated()
    assert order == ([100, 0, 1] if can_pause else [0, 100, 1])
