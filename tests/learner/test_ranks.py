"""Promise 1 over ranks: in how many processes a step's rows lie changes no gradient. Real processes, gloo."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from posttrain.learner import process_ranks
from posttrain.learner.experts import check_experts
from posttrain.learner.learner import Learner
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.rank_balance import Portion, assign, imbalance
from posttrain.learner.ranks import Parallel, restarts
from posttrain.learner.shards import sharded_modules
from posttrain.methods.build import build
from posttrain.types import RunError, UserError

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def rank_cases() -> ModuleType:
    """The script that ranks run, as a module."""
    spec = importlib.util.spec_from_file_location("rank_cases", HERE / "rank_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launched(ranks: int, *words: str, timeout: int = 280) -> subprocess.CompletedProcess[str]:
    """rank_cases.py on so many ranks of this machine."""
    # A rank that a signal ends says where it was.
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.run(
        [*TORCHRUN, str(ranks), str(HERE / "rank_cases.py"), *words],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


RANKS = [
    (2, 12),
    *(pytest.param(pair, marks=pytest.mark.full) for pair in ((2, 1), (2, 0), (3, 3), (4, 5), (4, 0))),
]
"""How many there are, and of how many methods one is compared; 0: models of experts alone."""


@pytest.fixture(scope="module", params=RANKS, ids=str)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How far ranks are from one process, by case: rank 0 has two thirds of the groups, rank 1 the others."""
    out = tmp_path_factory.mktemp("ranks") / "found.json"
    ranks, every = request.param
    done = launched(ranks, str(out), str(every))
    assert done.returncode == 0, done.stderr[-20000:]
    read: dict[str, Any] = json.loads(out.read_text())
    expected = [f"{name} / {mode}" for name, _, mode in rank_cases().cases(ranks, every)]
    assert list(read) == expected
    return read


@pytest.mark.timeout(600)
def test_every_method_finds_the_gradient_of_one_process(found: dict[str, Any]) -> None:
    """Methods of the table as shards of two, whole on three, or as two models of two shares; and all ways."""
    rounded = rank_cases().ROUNDED
    for name, apart in found.items():
        bound = rounded.get(name.split(" / ")[0], 1e-12)
        assert apart["norm"] > 1e-3, name
        assert apart["gradient"] < bound, name
        assert apart["weights"] < bound, name
        assert apart["logp"] < bound, name
        # Advantages are float32 columns in part, and some metrics sums that nearly cancel.
        assert apart["metrics"] < max(10 * bound, 2e-6), name


STARVED = """
import os, pathlib, subprocess, sys, time
import torch.distributed as dist
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.ranks import Parallel

class Busy:
    def __del__(self, clock=time.monotonic):
        end = clock() + 1
        while clock() < end:
            pass

with join_ranks(Parallel(deadline_s=60)) as ranks:
    kept = dist.distributed_c10d._get_default_group()  # as the mesh of FSDP2 keeps it
    ranks.gather(1)
    all_of_them = os.sched_getaffinity(0)
    one = min(all_of_them)
    for thread in pathlib.Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text().startswith("pt_gloo_runloop"):
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(int(thread.name), {one})
    os.sched_setaffinity(0, {one})  # this thread takes the processor from theirs as soon as it is told
    subprocess.Popen(["taskset", "-c", str(one), "timeout", "1", "sh", "-c", "while :; do :; done"])
    time.sleep(0.3)  # until that is so
    ranks.gather(2)
sys.setswitchinterval(1.5)  # they get the lock when this thread gives it, or after so long
os.sched_setaffinity(0, all_of_them)
Busy()
late = Busy()  # is deleted while Python ends
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE") or not shutil.which("taskset"), reason="needs Linux")
def test_a_rank_whose_threads_got_no_processor_ends_as_any_other(tmp_path: Path) -> None:
    """A thread of gloo that still holds a message when Python ends would abort the rank."""
    script = tmp_path / "starved.py"
    script.write_text(STARVED)
    command = [*TORCHRUN, "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


class Store(dict[str, str]):
    """The store of ranks that speak of themselves, without processes."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        value: str | bytes = self[key]
        return value if isinstance(value, bytes) else value.encode()

    def clone(self) -> "Store":
        return self

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def rank_of(size: int, rank: int, store: Store) -> process_ranks.ProcessRanks:
    """A rank that has met others in this store."""
    found = object.__new__(process_ranks.ProcessRanks)
    found.rank, found.size, found.store, found.deadline_s, found._message_count = rank, size, store, 9.0, 1
    found._collect_count = 0
    found._ended, found._heartbeat = threading.Event(), threading.Thread()
    found._heartbeat.start()
    return found


@pytest.mark.parametrize("lost", ["rank 2 ended: no memory", "rank 2 of 3 was killed or stopped"])
def test_a_rank_that_ended_for_another_names_that_one(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_ranks, "BEAT_S", 0.0)
    assert rank_of(3, 0, Store({"ended/1": lost}))._describe_loss("numbers", "") == lost
    first = rank_of(3, 0, Store({"ended/1": "no disk"}))
    assert first._describe_loss("numbers", "") == "rank 1 ended: no disk"


def test_ranks_follow_a_slow_rank_0_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it writes; the deadline is that of its silence, and its end is named."""
    monkeypatch.setattr(process_ranks, "BEAT_S", 0.01)
    monkeypatch.setattr(process_ranks, "_POLL_S", 0.01)
    store = Store()
    first, second = rank_of(2, 0, store), rank_of(2, 1, store)
    second.deadline_s = 0.3
    ended = threading.Event()

    def beat() -> None:
        for count in itertools.count():
            if ended.wait(0.05):
                return
            store.set("alive/0", str(count))

    beats = threading.Thread(target=beat)
    beats.start()
    slow = threading.Timer(1.0, first.follow, ("the checkpoint",))
    slow.start()
    start = time.monotonic()
    second.follow("the checkpoint")
    assert time.monotonic() - start > 0.9
    ended.set()
    beats.join()
    with pytest.raises(RunError, match="rank 0 of 2 was killed or stopped while the others waited for"):
        second.follow("the checkpoint")
    store["ended/0"] = "no disk"
    with pytest.raises(RunError, match="rank 0 ended: no disk"):
        second.follow("the checkpoint")


def test_rank_0_collects_from_slow_ranks_and_names_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on at once; a value that came before its rank ended counts."""
    monkeypatch.setattr(process_ranks, "_POLL_S", 0.01)
    store, never, label = Store(), threading.Event(), "the checkpoint"
    first, second = rank_of(2, 0, store), rank_of(2, 1, store)
    slow = threading.Timer(0.2, second.collect, ({"b": 2}, label, never))
    slow.start()
    assert first.collect({"a": 1}, label, never) == [{"a": 1}, {"b": 2}]
    assert second.collect({"c": 3}, label, never) == [{"c": 3}]
    store["ended/1"] = "no disk"
    assert first.collect({}, label, never) == [{}, {"c": 3}]
    with pytest.raises(RunError, match=r"^wait for the checkpoint: rank 1 ended: no disk"):
        first.collect({}, label, never)
    del store["ended/1"]
    never.set()
    with pytest.raises(RunError, match="rank 1 of 2 was killed or stopped"):
        first.collect({}, label, never)


@pytest.mark.parametrize("machines", [1, 2])
def test_ranks_of_several_machines_are_told_of_interfaces(
    machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the machine's own name is an address of itself alone, the error says so."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": str(4 // machines)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(process_ranks.socket, "gethostbyname", lambda name: "127.0.1.1")

    def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("connect timed out")

    monkeypatch.setattr(process_ranks, "rendezvous", lost)
    with pytest.raises(UserError, match="did not find one another: connect timed out") as refused:
        process_ranks.ProcessRanks(1.0)
    assert ("GLOO_SOCKET_IFNAME" in refused.value.fix) == (machines == 2)
    assert ("127.0.1.1" in refused.value.fix) == (machines == 2)


SLOW = """
import time
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.ranks import Parallel

with join_ranks(Parallel(deadline_s=4)) as ranks:
    ranks.gather(0)
    if ranks.rank == 0:
        time.sleep(9)
    ranks.follow("the checkpoint")
    assert ranks.tell(5 - ranks.rank) == 5
"""


@pytest.mark.full
def test_a_checkpoint_may_outlast_the_deadline(tmp_path: Path) -> None:
    """Processes with gloo between them: rank 0 takes twice as long as others would wait for a message."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    done = subprocess.run(
        [*TORCHRUN, "2", str(script)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_rank_0_stays_until_others_have_read_why_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torchrun the store ends with it, and nobody would know."""
    monkeypatch.setattr(process_ranks.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(process_ranks, "BEAT_S", 60.0)
    store = Store()
    leaves = threading.Thread(target=rank_of(2, 0, store).close, args=("no disk",))
    leaves.start()
    leaves.join(0.2)
    assert leaves.is_alive()
    assert rank_of(2, 1, store)._from_store("ended") == {0: "no disk"}
    store["ended/1"] = "rank 0 ended: no disk"
    leaves.join()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (KeyboardInterrupt("step_000001 is kept"), "interrupted; step_000001 is kept"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RunError("save", "no disk"), "save: no disk"),
    ],
)
def test_others_are_told_why_a_rank_ends(
    error: BaseException, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(process_ranks, "ProcessRanks", lambda deadline_s: SimpleNamespace(close=told.append))
    with pytest.raises(type(error)), join_ranks(Parallel()):
        raise error
    assert told == [why]


@pytest.mark.parametrize(("before", "after"), [(None, "2"), ("1", "2"), ("0", "0"), ("3", "3")])
def test_nccl_leaves_the_process_to_name_the_lost_rank(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets 1, with which NCCL would end the process; another number is the user's."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no store")

    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    for variable in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(variable, "1")
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(process_ranks, "rendezvous", fail)
    with pytest.raises(UserError, match="no store"), join_ranks(Parallel()):
        pass
    assert os.environ[name] == after


@pytest.mark.parametrize("name", ["LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE"])
def test_a_variable_of_torchrun_that_is_no_number_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(each, "1")
    monkeypatch.setenv(name, "abc")
    with pytest.raises(UserError, match=f"^{name}: 'abc' is not a whole number"), join_ranks(Parallel()):
        pass


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_a_rank_beyond_the_world_waits_for_nobody(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": rank,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"RANK is {rank} of WORLD_SIZE 2"), join_ranks(Parallel()):
        pass


def test_an_empty_count_of_restarts_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "")
    assert restarts() == 0


def test_a_rank_prints_no_warnings_of_pytorchs_cpp_unless_the_user_says_otherwise() -> None:
    """It warns of a rank that is gone with pages of frames, before ours says which it was."""
    said = []
    for env in ({}, {"RANK": "0"}, {"RANK": "0", "TORCH_CPP_LOG_LEVEL": "INFO"}):
        code = "import posttrain, os; print(os.environ.get('TORCH_CPP_LOG_LEVEL'))"
        unset = {k: v for k, v in os.environ.items() if k not in ("RANK", "TORCH_CPP_LOG_LEVEL")}
        done = subprocess.run([sys.executable, "-c", code], env=unset | env, capture_output=True, text=True)
        said.append(done.stdout.strip())
    assert said == ["None", "ERROR", "INFO"]


def test_a_process_alone_shares_nothing(llama: Any) -> None:
    """A recipe for several ranks runs in one process, but for what asks FSDP2 to hold weights."""
    method = build("sft", {}, horizon=16)
    alone = Learner(llama(0), method, parallel=Parallel(shard=True, reshard_after_forward=True))
    assert not sharded_modules(alone.net)
    with pytest.raises(UserError, match=r"^train\.cpu_offload: "):
        Learner(llama(0), method, parallel=Parallel(shard=True, cpu_offload=True))


def test_experts_that_ranks_cannot_divide_are_refused(llama: Any) -> None:
    """Those of a reference too, which may have none."""
    moe = rank_cases().common.make_moe("qwen3_moe")
    check_experts(3, 6, moe, [llama(0)])
    check_experts(4, 1, llama(0))
    for size, ranks, others, why in (
        (2, 3, [], "3 ranks are not a multiple of 2"),
        (4, 4, [], "the 6 experts of a layer are not a multiple of 4"),
        (4, 4, [moe], "the 6 experts of a layer are not a multiple of 4"),
    ):
        policy = rank_cases().common.make_moe("mixtral", num_local_experts=4) if others else moe
        with pytest.raises(UserError, match=f"^train\\.experts: {why}"):
            check_experts(size, ranks, policy, others)
    with pytest.raises(UserError, match=r"^train\.experts: LlamaForCausalLM has no stacks of experts"):
        check_experts(2, 2, llama(0), [moe])


def test_the_longest_goes_first_and_a_prompt_is_shared() -> None:
    rows = [Portion(0, (i,), i, 0, own) for i, own in enumerate([9, 8, 7, 3, 2, 1])]
    given, tokens = assign(rows, 2)
    assert tokens == [15, 15]
    assert imbalance(tokens) == 1.0
    assert sorted(p.rows[0] for each in given for p in each) == [0, 1, 2, 3, 4, 5]
    family = [Portion(0, (i,), 4, 100, 1) for i in range(4)]
    together, cost = assign([*family, Portion(1, (0,), 5, 0, 90)], 2)
    assert [len(each) for each in together] == [4, 1], "a prompt of 100 tokens is computed once"
    assert cost == [104, 90]


def test_the_longest_first_is_within_four_thirds_of_the_best() -> None:
    """Graham's bound, against the best of all ways to deal nine rows to three ranks."""
    g = torch.Generator().manual_seed(0)
    for _ in range(5):
        sizes = torch.randint(1, 60, (9,), generator=g).tolist()
        ways = torch.cartesian_prod(*[torch.arange(3)] * 9)
        loads = torch.stack([(ways == r).long() @ torch.tensor(sizes) for r in range(3)])
        best = int(loads.max(0).values.min())
        _, tokens = assign([Portion(0, (i,), i, 0, size) for i, size in enumerate(sizes)], 3)
        assert sum(tokens) == sum(sizes)
        assert max(tokens) <= (4 / 3 - 1 / 9) * best
