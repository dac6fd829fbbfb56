"""Samplers that die, hang, or receive damaged weights: no group is lost or returned twice."""

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
from posttrain.loop import build
from posttrain.loop.sampling import WorkerFactory, build_native_engine, build_sampler
from posttrain.loop.weight_sync import Publisher
from posttrain.models.fingerprint import NamedTensors
from posttrain.plan.plan import plan_run
from posttrain.recipe import config
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.protocol import GroupRequest
from posttrain.rollout.remote import ProcessChannel, ThreadChannel
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.snapshots import GatherOnlyStore, LearnerWeights, SharedMemoryStore
from posttrain.types import RunError, Task, Trajectory, Verdict


class Publishing:
    """A learner that publishes its weights to pools of samplers, and does not train."""

    def __init__(self, recipe: Path, logs: Path) -> None:
        self.plan = plan_run(config.read(recipe).recipe, print)
        self.resolved, self.recipe, self.logs = self.plan.resolved, self.plan.resolved.recipe, logs
        self.learner = build.build_learner(self.plan, {})
        self.learner.loan = None  # samplers load copies from the store
        self.store = SharedMemoryStore()
        canary = self.plan.policy.chat.render(self.resolved.train[0].messages)[-8:]
        self.publisher = Publisher(self.learner, canary, self.store)
        self.pools: list[SamplerPool] = []

    def pool(self, count: int = 1, make: WorkerFactory | None = None, **limits: Any) -> SamplerPool:
        """Return a pool of samplers in processes, which this closes."""
        make = make or WorkerFactory(self.recipe, 1)
        pool = SamplerPool(lambda n: ProcessChannel(make, self.logs / f"{n}.log"), count, **limits)
        self.pools.append(pool)
        return pool

    def thread(self) -> SamplerPool:
        """Return a pool of one sampler in a thread, which this closes."""
        pool = SamplerPool(lambda n: ThreadChannel(WorkerFactory(self.recipe, 0)), 1)
        self.pools.append(pool)
        return pool

    def requests(self, count: int, first: int = 0) -> list[GroupRequest]:
        """Return requests of groups, numbered from `first`."""
        tasks = self.resolved.train
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
def publishing(ahead, write, tmp_path):
    publishing = Publishing(write(ahead), tmp_path / "samplers")
    yield publishing
    publishing.close()


def all_of(pool: SamplerPool, count: int) -> dict[int, Any]:
    """Poll until `count` groups have finished, each once, and return their trajectories by number."""
    groups: dict[int, Any] = {}
    while len(groups) < count:
        for group in pool.poll(0.2):
            assert group.number not in groups
            groups[group.number] = [e.trajectory for e in group.episodes]
    return groups


def until_live(pool: SamplerPool, version: int) -> None:
    """Poll until every sampler samples with this version or a newer one."""
    while min(worker.live for worker in pool.workers) < version:
        pool.poll(0.2)


def forever(pool: SamplerPool) -> None:
    """Poll until that raises."""
    while True:
        pool.poll(0.2)


def expected(publishing: Publishing, requests: list[GroupRequest]) -> dict[int, Any]:
    """Play the same groups in this thread and return their trajectories by number."""
    sampler = build_sampler(publishing.resolved, publishing.plan.policy, publishing.logs, publishing.learner)
    try:
        publishing.publisher.publish(sampler)
        sampler.admit(requests)
        groups: dict[int, Any] = {}
        while len(groups) < len(requests):
            groups |= {g.number: [e.trajectory for e in g.episodes] for g in sampler.poll(1.0)}
        return groups
    finally:
        sampler.close()


def tokens(groups: dict[int, Any]) -> dict[int, Any]:
    return {n: [t.tokens for t in group] for n, group in groups.items()}


@pytest.mark.parametrize("samplers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_killed_sampler_is_replaced_and_its_groups_replayed(publishing, samplers):
    requests = publishing.requests(12)
    pool = publishing.pool(samplers)
    publishing.publisher.publish(pool)
    pool.admit(requests)
    first = pool.poll(30.0)
    pool.workers[0].channel.kill()
    groups = {g.number: [e.trajectory for e in g.episodes] for g in first}
    groups |= all_of(pool, 12 - len(groups))
    assert tokens(groups) == tokens(expected(publishing, requests)), "the same answers from any sampler"
    assert pool.restarted == 1
    assert "killed by SIGKILL" in pool.restarts[0]
    assert pool.evaluate(publishing.requests(3), lambda done: None).keys() == {0, 1, 2}


@pytest.mark.full
def test_sampler_that_hangs_is_killed_and_replaced(publishing):
    requests = publishing.requests(6)
    pool = publishing.pool(deadline_s=60.0)
    publishing.publisher.publish(pool)
    until_live(pool, 0)
    assert "serve" in pool.workers[0].channel.stack(), "its stack can be read"
    pool.deadline_s = 2.0
    hung = pool.workers[0].channel.pid
    os.kill(hung, signal.SIGSTOP)
    pool.admit(requests)
    while not pool.restarted:
        pool.poll(0.2)
    pool.deadline_s = 60.0
    assert "no sign of life for 2 s" in pool.restarts[0]
    assert not os.path.exists(f"/proc/{hung}")
    assert tokens(all_of(pool, 6)) == tokens(expected(publishing, requests))


def test_sampler_that_keeps_dying_stops_the_run(publishing):
    pool = publishing.pool(max_restarts=1)
    publishing.publisher.publish(pool)
    pool.admit(publishing.requests(3))

    def kill_whenever_it_starts() -> None:
        while True:
            pool.workers[0].channel.kill()
            pool.poll(0.2)

    with pytest.raises(RunError, match=r"^sample: "):
        kill_whenever_it_starts()


@pytest.mark.full
def test_sampler_that_cannot_start_stops_the_run(publishing):
    broken = replace(publishing.recipe, model=replace(publishing.recipe.model, path="/nowhere/at/all"))
    pool = publishing.pool(make=WorkerFactory(broken, 1), max_restarts=0)
    with pytest.raises(RunError, match=r"^sample: "):
        forever(pool)


class ScriptedChannel:
    """The channel of a sampler whose messages a test sets."""

    bytes = 0

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages

    def wait(self, others: Any, timeout_s: float) -> None:
        pass

    def end(self) -> str:
        return "ended"


def test_oldest_version_counts_a_sampler_that_is_starting():
    """Counted with the newest version, groups would be admitted too early and be too old when trained on."""
    slow, quick = ScriptedChannel(), ScriptedChannel()
    pool = SamplerPool([slow, quick].__getitem__, 2)
    oldest = [pool.oldest_version]
    for version in (2, 3):
        pool.publish(SimpleNamespace(number=version))
        quick.messages = [("live", version)]
        pool.poll(0.0)
        oldest.append(pool.oldest_version)
    for version in (2, 3):
        slow.messages = [("ready",), ("live", version)]
        pool.poll(0.0)
        oldest.append(pool.oldest_version)
    assert oldest == [-1, 2, 2, 2, 3]
    assert [snapshot.number for _, snapshot in slow.sent] == [2, 3]


@pytest.mark.parametrize("when", ["falling asleep", "asleep"])
def test_a_sampler_that_ends_is_replaced_by_one_that_sleeps(when: str) -> None:
    """Until weights are published: the learner trains in the memory that it would take."""
    channels = [ScriptedChannel(), ScriptedChannel(), ScriptedChannel()]
    starts = iter((0, 1, 2))
    pool = SamplerPool(lambda _: channels[next(starts)], 2)
    pool.publish(SimpleNamespace(number=3))
    for channel in channels:
        channel.messages = [("ready",), ("live", 3)]
    pool.poll(0.0)
    ended = [("failed", "out of memory")]
    channels[0].messages = [("asleep",), *ended] if when == "asleep" else ended
    channels[1].messages, channels[2].messages = [("asleep",)], [("ready",), ("asleep",)]
    pool.sleep()
    pool.poll(0.0)
    assert channels[2].sent == [("sleep",)]
    assert (pool.oldest_version, pool.restarted) == (-1, 1)
    pool.publish(SimpleNamespace(number=4))
    assert [kind for kind, *_ in channels[2].sent] == ["sleep", "offer"]


def test_pool_without_workers_gathers_weights_as_often_as_rank_0() -> None:
    """Gathering is a message of all ranks: of a sampler in the loop's thread at a load, else in the store."""
    gathered = []

    def weights() -> NamedTensors:
        yield "w", torch.zeros(1)
        gathered.append("w")

    pool, store = SamplerPool(ScriptedChannel, 0), GatherOnlyStore(lambda: None)
    pool.publish(SimpleNamespace(number=0, place=LearnerWeights(weights)))
    assert len(gathered) == 1
    for number, count in ((1, 3), (2, 4)):
        pool.publish(SimpleNamespace(number=number, place=store.put(number, weights)))
        assert len(gathered) == count


def test_pool_without_workers_sleeps_as_that_of_rank_0() -> None:
    """All ranks must then publish again."""
    pool, versions = SamplerPool(ScriptedChannel, 0), []
    for number in (3, 4):
        versions.append(pool.oldest_version)
        pool.publish(SimpleNamespace(number=number, place=LearnerWeights(lambda: ())))
        versions.append(pool.oldest_version)
        pool.sleep()
    assert versions == [-1, 3, -1, 4]
    assert pool.evaluate([], lambda _: None) == {}


def test_groups_of_each_rank_are_dealt_among_all_its_samplers():
    """Rank r of R plays groups r, r + R ...: modulo 2 samplers, those of rank 0 of 2 would all be one's."""
    for rank, ranks in ((0, 1), (0, 2), (1, 2), (2, 3)):
        channels = [ScriptedChannel(), ScriptedChannel()]
        pool = SamplerPool(channels.__getitem__, 2, stride=ranks)
        pool.admit([SimpleNamespace(number=rank + ranks * n) for n in range(6)])
        dealt = [[request.number for _, part in channel.sent for request in part] for channel in channels]
        assert dealt == [[rank + ranks * n for n in range(start, 6, 2)] for start in range(2)]


def test_weights_with_a_flipped_bit_are_refused(publishing):
    pool = publishing.thread()
    publishing.publisher.publish(pool)
    until_live(pool, 0)
    snapshot = publishing.publisher.snapshot(1)
    bits = torch.from_file(snapshot.place.path, shared=True, size=snapshot.place.size, dtype=torch.uint8)
    bits[len(bits) // 2] ^= 1
    pool.publish(snapshot)
    with pytest.raises(RunError, match=r"^sampler 0: "):
        forever(pool)


def test_weights_of_another_learner_are_refused(publishing):
    pool = publishing.thread()
    publishing.publisher.publish(pool)
    until_live(pool, 0)
    pool.publish(replace(publishing.publisher.snapshot(1), run="of a learner that has ended"))
    with pytest.raises(RunError, match=r"^sampler 0: "):
        forever(pool)


def test_memory_of_weights_is_reused_but_never_under_a_reader(publishing):
    pool = publishing.thread()
    for version in range(12):
        publishing.learner.update_count = version
        publishing.publisher.publish(pool)
        if version % 3 == 2:
            until_live(pool, version)
    until_live(pool, 11)
    assert len(publishing.store._open) <= 3
    size = sum(t.numel() * t.element_size() for _, t in publishing.publisher._weights())
    assert publishing.store.bytes >= 12 * size


def test_killed_learner_leaves_no_sampler(ahead, write, tmp_path, launcher):
    recipe = write(ahead, {"async": {"place": "process"}, "run": {"updates": 500}})
    run = tmp_path / "run"
    command = launcher.start("train", recipe, "--run-dir", run, "--quiet", output=tmp_path / "out.txt")
    metrics = run / "metrics.jsonl"
    command.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    assert samplers_of(run)
    command.kill()
    assert command.wait() == -9
    end = time.monotonic() + 60
    while samplers_of(run):
        assert time.monotonic() < end, "a sampler is left"
        time.sleep(0.05)
    assert json.loads(metrics.read_text().splitlines()[0])["update"] == 0


def samplers_of(run: Path) -> list[str]:
    """Return the ids of the processes that serve samplers of this run."""
    pids = []
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = words.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "posttrain.rollout.remote" in text and str(run) in text:
            pids.append(words.parent.name)
    return pids


def test_trajectory_pickles_small_and_without_loss():
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
    """An environment of two turns, each of which takes 0.2 s in a worker process."""

    trusted = False
    max_turns = 2

    def start(self, task: Task) -> Start:
        return Start(state=0, messages=task.messages)

    def reply(self, state: int, response: str) -> Turn:
        begin = time.monotonic()
        time.sleep(0.2)
        if state:
            verdict = Verdict(score=1.0, label="right", reason=f"{begin} {time.monotonic()}")
            return Turn(state=state, done=True, verdict=verdict)
        return Turn(state=1, messages=({"role": "user", "content": "Go on"},))


@pytest.mark.full
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.sample("True")
def test_replies_of_an_environment_overlap(publishing, exact):
    engine = build_native_engine(publishing.recipe, publishing.plan.policy)
    rollouts = Rollouts(
        engine, publishing.plan.policy.chat, env=Slow(), workers=2, context=400, exact=exact, deadline_s=60.0
    )
    try:
        tasks = publishing.resolved.train[:2] * 4
        sampling = replace(publishing.recipe.sampling, max_new_tokens=3)
        groups = rollouts.run([replace(t, id=f"{n}") for n, t in enumerate(tasks)], 1, sampling)
    finally:
        rollouts.close()
    spans = [tuple(map(float, e.verdict.reason.split())) for g in groups for e in g]
    assert len(spans) == 8
    assert max(sum(a <= t < b for a, b in spans) for t, _ in spans) >= 2, "replies overlap"
    assert all(e.turns == 2 for g in groups for e in g)
