"""Samplers that die, hang, or are sent something else: no group is lost, and none is counted twice."""

import json
import os
import pickle
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.envs.protocol import Start, Turn
from posttrain.recipe import config
from posttrain.runtime import build
from posttrain.runtime.sampling import WorkerFactory, build_native_engine, build_sampler
from posttrain.runtime.weight_sync import Publisher
from posttrain.samplers.pool import SamplerPool
from posttrain.samplers.protocol import GroupRequest
from posttrain.samplers.remote import ProcessChannel, ThreadChannel
from posttrain.samplers.rollouts import Rollouts
from posttrain.samplers.snapshots import SharedMemoryStore
from posttrain.types import RunError, Task, Trajectory, Verdict


class Set:
    """A learner that publishes to samplers in processes, with nobody who trains."""

    def __init__(self, recipe: Path, logs: Path) -> None:
        self.chosen = build.plan(config.read(recipe).recipe, print)
        self.asked, self.recipe, self.logs = self.chosen.resolved, self.chosen.resolved.recipe, logs
        self.learner = build.build_learner(self.chosen, {})
        self.store = SharedMemoryStore()
        canary = self.chosen.policy.chat.render(self.asked.train[0].messages)[-8:]
        self.publisher = Publisher(self.learner, canary, self.store)
        self.pools: list[SamplerPool] = []

    def pool(self, count: int = 1, made: WorkerFactory | None = None, **limits: Any) -> SamplerPool:
        """Samplers that hold the weights."""
        made = made or WorkerFactory(self.recipe, 1)
        pool = SamplerPool(lambda n: ProcessChannel(made, self.logs / f"{n}.log"), count, **limits)
        self.pools.append(pool)
        return pool

    def thread(self) -> SamplerPool:
        """A sampler that serves in a thread of this process, as one in a process does."""
        pool = SamplerPool(lambda n: ThreadChannel(WorkerFactory(self.recipe, 0)), 1)
        self.pools.append(pool)
        return pool

    def requests(self, count: int, first: int = 0) -> list[GroupRequest]:
        """Groups as the loop admits them."""
        tasks = self.asked.train
        return [
            GroupRequest(
                number=first + n, task=tasks[n % len(tasks)], size=4, epoch=n, sampling=self.recipe.sampling
            )
            for n in range(count)
        ]

    def close(self) -> None:
        for pool in self.pools:
            pool.close()
        self.publisher.close()


@pytest.fixture
def made(ahead, write, tmp_path):
    found = Set(write(ahead), tmp_path / "samplers")
    yield found
    found.close()


def all_of(pool: SamplerPool, count: int) -> dict[int, Any]:
    """The groups by number; each comes once."""
    found: dict[int, Any] = {}
    while len(found) < count:
        for each in pool.poll(0.2):
            assert each.number not in found
            found[each.number] = [e.trajectory for e in each.episodes]
    return found


def until_live(pool: SamplerPool, version: int) -> None:
    """Listens until every sampler draws from this version."""
    while min(worker.live for worker in pool.workers) < version:
        pool.poll(0.2)


def forever(pool: SamplerPool) -> None:
    """Listens to a pool that never ends by itself."""
    while True:
        pool.poll(0.2)


def expected(made: Set, requests: list[GroupRequest]) -> dict[int, Any]:
    """The same groups, played in this thread."""
    sampler = build_sampler(made.asked, made.chosen.policy, made.logs)
    try:
        made.publisher.publish(sampler)
        sampler.admit(requests)
        found: dict[int, Any] = {}
        while len(found) < len(requests):
            found |= {x.number: [e.trajectory for e in x.episodes] for x in sampler.poll(1.0)}
        return found
    finally:
        sampler.close()


def tokens(groups: dict[int, Any]) -> dict[int, Any]:
    return {n: [t.tokens for t in group] for n, group in groups.items()}


def test_a_killed_sampler_is_replaced_and_its_groups_are_played_again(made):
    requests = made.requests(12)
    pool = made.pool(2)
    made.publisher.publish(pool)
    pool.admit(requests)
    first = pool.poll(30.0)
    pool.workers[0].channel.kill()
    found = {x.number: [e.trajectory for e in x.episodes] for x in first}
    found |= all_of(pool, 12 - len(found))
    assert tokens(found) == tokens(expected(made, requests)), "the same answers, whoever gave them"
    assert pool.restarted == 1
    assert "killed by SIGKILL" in pool.restarts[0]
    assert pool.evaluate(made.requests(3), lambda done: None).keys() == {0, 1, 2}


@pytest.mark.full
def test_one_that_hangs_is_found_killed_and_replaced(made):
    requests = made.requests(6)
    pool = made.pool(deadline_s=60.0)
    made.publisher.publish(pool)
    until_live(pool, 0)
    assert "serve" in pool.workers[0].channel.stack(), "what it was doing can be told"
    pool.deadline_s = 2.0
    hung = pool.workers[0].channel.pid
    os.kill(hung, signal.SIGSTOP)
    pool.admit(requests)
    while not pool.restarted:
        pool.poll(0.2)
    pool.deadline_s = 60.0
    assert "no sign of life for 2 s" in pool.restarts[0]
    assert not os.path.exists(f"/proc/{hung}")
    assert tokens(all_of(pool, 6)) == tokens(expected(made, requests))


def test_a_sampler_that_goes_on_dying_stops_the_run_with_the_first_cause(made):
    pool = made.pool(max_restarts=1)
    made.publisher.publish(pool)
    pool.admit(made.requests(3))

    def killed_whenever_it_starts() -> None:
        while True:
            pool.workers[0].channel.kill()
            pool.poll(0.2)

    with pytest.raises(RunError, match=r"^sample: "):
        killed_whenever_it_starts()


def test_one_that_cannot_begin_says_why(made):
    broken = replace(made.recipe, model=replace(made.recipe.model, path="/nowhere/at/all"))
    pool = made.pool(made=WorkerFactory(broken, 1), max_restarts=0)
    with pytest.raises(RunError, match=r"^sample: "):
        forever(pool)


class Told:
    """The channel of a sampler that says what a test has it say."""

    bytes = 0

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.says: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> list[Any]:
        says, self.says = self.says, []
        return says

    def wait(self, others: Any, timeout_s: float) -> None:
        pass


def test_one_that_is_slow_to_start_draws_by_the_weights_it_was_sent_first():
    """Counted as the newest it would be given groups too early, which were too old when their turn came."""
    slow, quick = Told(), Told()
    pool = SamplerPool([slow, quick].__getitem__, 2)
    oldest = [pool.oldest_version]
    for version in (2, 3):
        pool.publish(SimpleNamespace(version=version))
        quick.says = [("live", version)]
        pool.poll(0.0)
        oldest.append(pool.oldest_version)
    for version in (2, 3):
        slow.says = [("ready",), ("live", version)]
        pool.poll(0.0)
        oldest.append(pool.oldest_version)
    assert oldest == [-1, 2, 2, 2, 3]
    assert [snapshot.version for _, snapshot in slow.sent] == [2, 3]


def test_one_flipped_bit_where_the_weights_lie_is_refused(made):
    pool = made.thread()
    made.publisher.publish(pool)
    until_live(pool, 0)
    snapshot = made.publisher.snapshot(1)
    bits = torch.from_file(snapshot.place.path, shared=True, size=snapshot.place.size, dtype=torch.uint8)
    bits[len(bits) // 2] ^= 1
    pool.publish(snapshot)
    with pytest.raises(RunError, match=r"^sampler 0: "):
        forever(pool)


def test_weights_of_another_learner_are_refused(made):
    pool = made.thread()
    made.publisher.publish(pool)
    until_live(pool, 0)
    pool.publish(replace(made.publisher.snapshot(1), run="one that has ended"))
    with pytest.raises(RunError, match=r"^sampler 0: "):
        forever(pool)


def test_memory_of_superseded_weights_is_written_again_and_never_under_a_reader(made):
    pool = made.thread()
    for version in range(12):
        made.learner.update_count = version
        made.publisher.publish(pool)
        if version % 3 == 2:
            until_live(pool, version)
    until_live(pool, 11)
    assert len(made.store._open) <= 3
    size = sum(t.numel() * t.element_size() for _, t in made.publisher._weights())
    assert made.store.bytes >= 12 * size


def test_a_killed_learner_leaves_no_sampler(ahead, write, tmp_path, launcher):
    recipe = write(ahead, {"async": {"place": "process"}, "run": {"updates": 500}})
    run = tmp_path / "run"
    started = launcher.start("train", recipe, "--run-dir", run, "--quiet", output=tmp_path / "out.txt")
    metrics = run / "metrics.jsonl"
    started.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    assert samplers_of(run)
    started.kill()
    assert started.wait() == -9
    end = time.monotonic() + 60
    while samplers_of(run):
        assert time.monotonic() < end, "a sampler is left"
        time.sleep(0.05)
    assert json.loads(metrics.read_text().splitlines()[0])["update"] == 0


def samplers_of(run: Path) -> list[str]:
    """Processes that serve this run."""
    found = []
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = words.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "posttrain.samplers.remote" in text and str(run) in text:
            found.append(words.parent.name)
    return found


def test_an_episode_travels_in_few_bytes_and_loses_not_a_bit():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for n in (2, 7, 1000):
        logp = torch.tensor([-dice.expovariate(1.0) for _ in range(n)]).tolist()
        sampled = [t > 0 and dice.random() < 0.9 for t in range(n)]
        row = Trajectory(
            tokens=[dice.randrange(50_000) for _ in range(n)],
            sampled=sampled,
            logp_gen=logp,
            logp_policy=[-dice.expovariate(1.0) for _ in range(n)] if n == 7 else logp,
            version=[(3 * t) // n for t in range(n)],
            reward=[0.1 if s and dice.random() < 0.01 else 0.0 for s in sampled],
        )
        sent = pickle.dumps(row)
        assert pickle.loads(sent) == row
    assert len(sent) / n < 16


@dataclass(frozen=True)
class Slow:
    """An environment of two turns, each of which takes a while in a worker process."""

    trusted = False
    max_turns = 2

    def start(self, task: Task) -> Start:
        return Start(state=0, messages=task.messages)

    def reply(self, state: int, response: str) -> Turn:
        begin = time.monotonic()
        time.sleep(0.2)
        if state:
            said = Verdict(score=1.0, label="right", reason=f"{begin} {time.monotonic()}")
            return Turn(state=state, done=True, verdict=said)
        return Turn(state=1, messages=({"role": "user", "content": "Go on"},))


@pytest.mark.full
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.sample("True")
def test_replies_of_an_environment_are_worked_out_side_by_side(made, exact):
    engine = build_native_engine(made.recipe, made.chosen.policy)
    rollouts = Rollouts(
        engine, made.chosen.policy.chat, env=Slow(), workers=2, context=400, exact=exact, deadline_s=60.0
    )
    try:
        tasks = made.asked.train[:2] * 4
        sampling = replace(made.recipe.sampling, max_new_tokens=3)
        groups = rollouts.run([replace(t, id=f"{n}") for n, t in enumerate(tasks)], 1, sampling)
    finally:
        rollouts.close()
    spans = [tuple(map(float, e.verdict.reason.split())) for g in groups for e in g]
    assert len(spans) == 8
    assert max(sum(a <= t < b for a, b in spans) for t, _ in spans) >= 2, "not one after the other"
    assert all(e.turns == 2 for g in groups for e in g)
