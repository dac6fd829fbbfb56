"""Weight sync: the sampler has the learner's weights, or the run stops and names what differs."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from posttrain.engines.native.engine import NativeEngine
from posttrain.learner.lora import base
from posttrain.loop import build
from posttrain.loop.sampling import build_native_engine, check_weight_store
from posttrain.loop.weight_sync import Publisher
from posttrain.models.nf4 import NF4Linear
from posttrain.plan.memory import check_host
from posttrain.plan.plan import plan_run
from posttrain.recipe import config
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.rollout import snapshots
from posttrain.rollout.snapshots import MachineStore, load_snapshot
from posttrain.types import Request, RunError, Sampling, UserError

CANARY = list(range(5, 29))


def sync_weights(learner: Any, engine: Any, version: int, canary: list[int]) -> str:
    """Load the learner's weights into the engine; return their digest."""
    snapshot = Publisher(learner, canary).snapshot(version)
    load_snapshot(engine, snapshot)
    return snapshot.place.digest


class Faulty:
    """An engine with one fault in how it loads weights."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Drops(Faulty):
    def load(self, weights, version, **how):
        return self.engine.load(list(weights)[1:], version)


class Renames(Faulty):
    def load(self, weights, version, **how):
        (name, tensor), *rest = weights
        return self.engine.load([(f"{name}x", tensor), *rest], version)


class Reshapes(Faulty):
    def load(self, weights, version, **how):
        (name, tensor), *rest = weights
        return self.engine.load([(name, tensor[:-1]), *rest], version)


class Flips(Faulty):
    """Flips one bit of one tensor before it is loaded."""

    def load(self, weights, version, **how):
        copies = [(name, tensor.clone()) for name, tensor in weights]
        first = copies[0][1]
        bits = first.view(-1).view(torch.int32 if first.dtype == torch.float32 else torch.int16)
        bits[7] ^= 1
        return self.engine.load(copies, version)


class Swaps(Faulty):
    """Exchanges the weights of two layers; all numbers stay the same."""

    def load(self, weights, version, **how):
        tensors = dict(weights)
        one, two = (f"model.layers.{n}.self_attn.q_proj.weight" for n in (0, 1))
        return self.engine.load([*(tensors | {one: tensors[two], two: tensors[one]}).items()], version)


class KeepsOld(Faulty):
    """Reports the new weights as loaded, and keeps the old ones."""

    def load(self, weights, version, **how):
        old = [(n, p.clone()) for n, p in self.first]
        digest = self.engine.load(weights, version)
        self.engine.load(old, version)
        return digest


class Perturbs(Faulty):
    """Loads the weights, and changes one of them afterwards."""

    change = 1.0

    def load(self, weights, version, **how):
        digest = self.engine.load(weights, version)
        self.engine.runner._parameters["model.norm.weight"].mul_(1 + self.change)
        return digest


class Poisons(Perturbs):
    change = float("nan")


class Forgets(Faulty):
    """Decodes with an empty KV cache; its prefill is right."""

    def poll(self):
        runner = self.engine.runner
        decode = runner.decode

        def forgetful(*arguments):
            for values in runner.cache.values.values():
                values.zero_()
            return decode(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner, "decode", forgetful)
            return self.engine.poll()


class WrongVersion(Faulty):
    def load(self, weights, version, **how):
        return self.engine.load(weights, version - 1)


FAULTS: dict[type[Faulty], str] = {
    Drops: "did not take version 1: the weights handed over lack model.embed_tokens.weight",
    Renames: "did not take version 1: the weights handed over hold model.embed_tokens.weightx",
    Reshapes: "did not take version 1: model.embed_tokens.weight has shape",
    Flips: "holds other weights than the learner sent as version 1: digest",
    Swaps: "holds other weights than the learner sent as version 1: digest",
    KeepsOld: "weight sync: after version 1 the sampler's log-probabilities differ",
    Perturbs: "weight sync: after version 1 the sampler's log-probabilities differ",
    Poisons: "the model's logits hold NaN",
    Forgets: "weight sync: after version 1 the sampler's log-probabilities differ",
    WrongVersion: "says that it holds version 0, and was sent 1",
}


@pytest.fixture
def sides(online, write, make_model):
    """sides(tables, tied=...) -> a learner whose weights have changed, and an engine with the old ones."""

    def make(over: dict[str, Any], *, tied: bool = False):
        torch.manual_seed(3)
        tables = {"model": {"path": str(model_dir(make_model, tied))}} | over
        plan = plan_run(config.read(write(online, tables)).recipe, print)
        learner = build.build_learner(plan, {})
        engine = build_native_engine(plan.resolved.recipe, plan.policy)
        for master in learner.masters.masters:
            if master.parameter.ndim > 1 and "lora_A" not in master.name:
                before = master.numbers()
                master.set(before + 0.1 * torch.randn_like(before))
        return learner, engine

    return make


_made: dict[bool, Path] = {}


def model_dir(make_model, tied: bool) -> Path:
    """Return the model of all tests; its weights are large enough that a step of them shows."""
    if tied not in _made:
        _made[tied] = make_model(tied=tied, initializer_range=0.2)
    return _made[tied]


KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "adapter": {"lora": {"rank": 4}},
    "adapter in bfloat16": {"lora": {"rank": 4, "dora": True}, "model": {"dtype": "bfloat16"}},
    "adapter over 4 bits": {"lora": {"rank": 4}, "model": {"quantize": "nf4"}},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(every=2)
def test_sync_weights_gives_the_engine_the_learners_weights(sides, kind, tied, make_model):
    over = {k: dict(v) for k, v in KINDS[kind].items()}
    over["model"] = over.get("model", {}) | {"path": str(model_dir(make_model, tied))}
    learner, engine = sides(over, tied=tied)
    models = learner.model, engine.runner.model
    packed = [any(isinstance(m, NF4Linear) for m in model.modules()) for model in models]
    assert packed == ["4 bits" in kind, False]
    before = engine.score(CANARY)
    digest = sync_weights(learner, engine, 1, CANARY)
    after, ours = engine.score(CANARY), learner.canary(CANARY)
    exact = 0.15 if "bfloat16" in kind else 1e-4
    assert max(abs(a - b) for a, b in zip(after, ours, strict=True)) < exact
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) > 0.5, "the weights had changed"
    assert engine.version == 1
    assert sync_weights(learner, engine, 2, CANARY) == digest, "the same weights have the same digest"
    if not learner.lora.rank:
        with torch.no_grad():
            base(learner.model).get_input_embeddings().weight[3, 3] += 1.0
        assert sync_weights(learner, engine, 3, CANARY) != digest


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.sample("bfloat16-*")
def test_fault_in_loading_weights_is_named(sides, fault, kind):
    learner, engine = sides(KINDS[kind] and {"model": {**KINDS[kind]["model"], "path": str(_made[False])}})
    faulty = fault(engine)
    faulty.first = [(n, p.clone()) for n, p in engine_weights(learner)]
    with pytest.raises(RunError) as raised:
        sync_weights(learner, faulty, 1, CANARY)
    assert FAULTS[fault] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_rounding_may_move_one_scored_token_but_not_most(sides):
    """SmolLM2 in bfloat16 has −3.55 and −4.06 at the third token of a text, where float32 has −4.03."""
    learner, engine = sides({})

    class Rounds(Faulty):
        moved: ClassVar[list[int]] = [2]

        def score(self, tokens):
            return [x + 5.0 * (n in self.moved) for n, x in enumerate(self.engine.score(tokens))]

    sync_weights(learner, Rounds(engine), 1, CANARY)
    Rounds.moved = list(range(len(CANARY)))
    with pytest.raises(RunError, match=r"^weight sync: "):
        sync_weights(learner, Rounds(engine), 2, CANARY)


def test_rounding_may_move_one_decoded_token_but_not_all(sides, monkeypatch, make_model):
    """SmolLM2 in bfloat16, after SFT, decoded −4.54 where the learner had −3.83, once in six syncs."""
    learner, engine = sides({"model": {"path": str(model_dir(make_model, False)), "dtype": "bfloat16"}})
    exact, error = snapshots._score_by_decoding, [0.0, 0.7, 0.3, 0.1]

    def score(*asked):
        logps, others = exact(*asked)
        return [x + moved for x, moved in zip(logps, error, strict=True)], others

    monkeypatch.setattr(snapshots, "_score_by_decoding", score)
    sync_weights(learner, engine, 1, CANARY)
    error[:] = [0.0, 8.0, 8.0, 8.0]
    with pytest.raises(RunError, match=r"^weight sync: "):
        sync_weights(learner, engine, 2, CANARY)


@pytest.mark.parametrize("length", [1, 2])
def test_canary_may_be_short(sides, length):
    learner, engine = sides({})
    assert len(sync_weights(learner, engine, 1, CANARY[:length])) > 8
    with pytest.raises(RunError, match=r"^weight sync: "):
        sync_weights(learner, Forgets(engine), 2, CANARY[:length])


def test_canary_is_decoded_beyond_a_stop_token(sides):
    """Only tokens after an answer's first one are sampled with the KV cache."""
    learner, engine = sides({})
    sync_weights(learner, engine, 1, CANARY)
    [(_, first)] = answer(engine, CANARY)
    engine.stop_tokens = frozenset(first.tokens[:1])
    [(_, ended)] = answer(engine, CANARY)
    assert len(ended.tokens) == 1
    with pytest.raises(RunError, match=r"^weight sync: "):
        sync_weights(learner, Forgets(engine), 2, CANARY)


def answer(engine, prompt):
    """Return the engine's most likely answer to a prompt, as [(ticket, completion)]."""
    engine.submit(Request(prompt=tuple(prompt), sampling=Sampling(temperature=0.0, max_new_tokens=2)))
    done = []
    while engine.busy:
        done += engine.poll()
    return done


def engine_weights(learner):
    """Return weights of the learner's names and shapes, all zero."""
    return [(name, torch.zeros_like(tensor)) for name, tensor in learner.weights()]


def test_failed_weight_sync_ends_the_run_and_can_be_resumed(
    run_cli, online, write, tmp_path, monkeypatch, able
):
    original_load = NativeEngine.load

    def load(self, weights, version, **how):
        return original_load(self, list(weights)[:-1] if version == 2 else weights, version)

    monkeypatch.setattr(NativeEngine, "load", load)
    run = tmp_path / "run"
    done = run_cli("train", write(online, {"model": {"path": str(able)}}), "--run-dir", run, "--quiet")
    assert done.code == 1
    [line] = done.err.splitlines()
    assert line.startswith(
        "error: weight sync: the sampler did not take version 2: the weights handed over lack"
    )
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_000001"]
    assert (run / "report.html").exists()
    monkeypatch.undo()
    assert run_cli("train", tmp_path / "recipe.toml", "--run-dir", run, "--quiet", "--resume").code == 0


def test_adapter_is_merged_one_matrix_at_a_time(sides):
    learner, engine = sides({"lora": {"rank": 4}})
    alive, most = [], 0

    class Counts(Faulty):
        def load(self, weights, version, **how):
            def counted():
                nonlocal most
                for name, tensor in weights:
                    alive.append(weakref.ref(tensor))
                    most = max(most, sum(ref() is not None and "proj" in name for ref in alive))
                    yield name, tensor

            return self.engine.load(counted(), version)

    parameters = {id(p) for p in learner.model.parameters()}
    sync_weights(learner, Counts(engine), 1, CANARY)
    remaining = sum(ref() is not None and id(ref()) not in parameters for ref in alive)
    assert len(alive) > 10
    assert remaining <= 1
    assert most - sum(ref() is not None for ref in alive) <= 2, "the matrix before it may still be alive"


class Threads:
    """Ranks as threads of this process, of which only the messages between them are real."""

    def __init__(self, rank: int, meeting: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.size, self.meeting, self.values = rank, len(values), meeting, values

    def gather(self, value: Any, label: str = "") -> list[Any]:
        self.values[self.rank] = value
        self.meeting.wait(60)
        gathered = list(self.values)
        self.meeting.wait(60)
        return gathered


def test_a_machine_holds_one_copy_for_all_its_ranks(monkeypatch) -> None:
    """The second rank of a machine writes nothing, and what it still reads is not overwritten."""
    machines = ["a", "a", "b"]
    name = threading.local()
    monkeypatch.setattr("posttrain.rollout.snapshots.machine.identity", lambda: name.here)
    values: list[Any] = [None] * len(machines)
    meeting = threading.Barrier(len(machines))
    # What the samplers of each rank still read when a version is published.
    reading: list[list[set[int]]] = [[set()] * 4, [set(), {0}, {0, 1}, set()], [set()] * 4]

    def publish(rank: int) -> tuple[list[str], list[bool], int]:
        name.here = machines[rank]
        store = MachineStore(Threads(rank, meeting, values))
        places, still_whole = [], []
        for version in range(4):
            store.retain(reading[rank][version])
            place = store.put(version, lambda v=version: iter([("w", torch.full((1000,), float(v)))]))
            places.append(place)
            [(_, tensor)] = list(place.open())
            still_whole.append(bool((tensor == version).all()))
            still_whole += [bool((dict(places[v].open())["w"] == v).all()) for v in reading[rank][version]]
            meeting.wait(60)
        paths = [place.path for place in places]
        copied = getattr(store._store, "bytes", 0)
        meeting.wait(60)
        store.close()
        return paths, still_whole, copied

    with ThreadPoolExecutor(len(machines)) as pool:
        one, two, three = pool.map(publish, range(len(machines)))
    assert all(one[1] + two[1] + three[1])
    assert (one[2], two[2], three[2]) == (16000, 0, 16000)
    assert one[0] == two[0]
    assert not {*one[0]} & {*three[0]}
    assert (len({*one[0]}), len({*three[0]})) == (3, 1)


@pytest.mark.parametrize(
    ("published", "offloaded", "key"), [(3, 0, "async.place"), (1, 2, "train.cpu_offload")]
)
def test_what_a_machine_keeps_for_its_gpus_must_fit(published: int, offloaded: int, key: str) -> None:
    check_host(published, offloaded, 3)
    with pytest.raises(UserError) as refused:
        check_host(published, offloaded, 2)
    assert refused.value.key == key


def test_a_cluster_without_shared_memory_is_refused_before_weights(monkeypatch) -> None:
    """Docker gives a container 64 MB: Ray takes its temporary folder up to 10 GB, and refuses more."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    room = SimpleNamespace(free=64 << 20)
    monkeypatch.setattr("posttrain.rollout.cluster.shutil.disk_usage", lambda path: room)
    monkeypatch.setattr("posttrain.rollout.cluster.Path.is_dir", lambda path: True)

    def check(size: int, address: str = "", place: str = "ray") -> None:
        ahead = Asynchrony(place=place, address=address, max_lag=1)
        check_weight_store(SimpleNamespace(async_=ahead), size)

    seven = 2 * 7_600_000_000
    with pytest.raises(
        UserError, match=r"^async\.place: .* needs 42\.7 GiB of shared memory, and /dev/shm has 0\.1"
    ):
        check(seven)
    check(1 << 30)
    check(seven, address="HOST:6379")
    check(seven, place="process")
    room.free = 64 << 30
    check(seven)
