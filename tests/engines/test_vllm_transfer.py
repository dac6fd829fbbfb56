"""Weights to a vLLM server from a GPU: NCCL by sockets, CUDA IPC by tensors of this process (conftest.py)."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from posttrain.engines.vllm import weight_sinks
from posttrain.engines.vllm.connection import ServedConfig, transfer_backend
from posttrain.engines.vllm.ipc import CudaIpc
from posttrain.engines.vllm.nccl import NcclGroup
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.models.fingerprint import digest
from posttrain.rollout.snapshots import LearnerWeights, Snapshot, load_snapshot
from posttrain.types import RunError

NCCL = {"weight_transfer_config": {"backend": "nccl"}}
IPC = {"weight_transfer_config": {"backend": "ipc"}}
CPU, GPU = torch.device("cpu"), torch.device("cuda")
SYNC = ["chunk", "finish", "draw"]


@pytest.fixture(params=["nccl", "ipc"])
def way(request) -> dict[str, Any]:
    """What a server says that was started for one of both."""
    request.getfixturevalue({"nccl": "over_tcp", "ipc": "over_memory"}[request.param])
    return {"weight_transfer_config": {"backend": request.param}}


@pytest.fixture
def connect(lab) -> Iterator[Callable[..., ServerEngine]]:
    """connect(server, model, ...) -> an engine of this model's shape, without weights."""
    engines = []

    def make(server: Any, model: PreTrainedModel, **config: Any) -> ServerEngine:
        engines.append(
            ServerEngine(
                model,
                dtype=torch.float32,
                decode=lab.spell,
                stop_tokens=[],
                config=ServedConfig(**{"url": server.url, "rows": 8, "cache_tokens": 512} | config),
                context=512,
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def snapshot(lab, model: PreTrainedModel, version: int) -> Snapshot:
    row = [*lab.prompt_of(8, 3), *[9] * 4]
    logps = lab.full_logits(model, row).log_softmax(-1)
    return Snapshot(
        version=version,
        number=version,
        run="",
        place=LearnerWeights(model.named_parameters),
        canary=tuple(row),
        logps=tuple(float(logps[t - 1, row[t]]) for t in range(1, len(row))),
        tolerance=0.01,
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.sample("*qwen3*")
def test_workers_get_the_tensors_of_save_pretrained(lab, serve, connect, way, tmp_path, family: str) -> None:
    """Names, order, types, shapes and bytes, of a tied head too, on each of two workers by NCCL."""
    model, held = lab.tiny(family), copy.deepcopy(lab.tiny(family, seed=1))
    with lab.StandIn(held, workers=2 if way == NCCL else 1, **way) as server:
        engine = connect(server, model)
        received = engine.load(model.named_parameters(), 1)
    model.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    [sent] = server.received
    extra = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert {name for name, _ in sent} == files.keys() | extra
    assert len(sent) == len(dict(sent))
    assert all(files[name].equal(x) and files[name].dtype == x.dtype for name, x in sent if name in files)
    assert received == digest(model.named_parameters()) == digest(held.named_parameters())
    assert server.calls.count("/update_weights") == 1


def test_sync_is_one_transfer(lab, serve, connect, way) -> None:
    """The group is joined once; with weights of another version the server draws from these."""
    server = serve(**way)
    engine = connect(server, lab.tiny("llama"))
    for version, seed in ((1, 1), (2, 2)):
        server.calls.clear()
        load_snapshot(engine, snapshot(lab, lab.tiny("llama", seed=seed), version))
        calls = [call.strip("/") for call in server.calls]
        ours = ["start_weight_update", "update_weights", "finish_weight_update"]
        assert [call for call in calls if call in ours] == ours
        first, last = calls.index("start_weight_update"), calls.index("finish_weight_update")
        assert calls.index("pause") < first
        assert calls[last + 1 : last + 3] == ["reset_prefix_cache", "resume"]
        assert "collective_rpc" not in calls
    assert server.order == ["draw", "join", *SYNC, *SYNC]


def test_weights_that_lack_one_leave_no_update_open(lab, serve, connect, way) -> None:
    model = lab.tiny("llama")
    engine = connect(serve(**way), model)
    with pytest.raises(KeyError):
        engine.load([*model.named_parameters()][:-1], 1)
    with pytest.raises(RuntimeError, match="load some first"):
        engine.score([1, 2])
    load_snapshot(engine, snapshot(lab, model, 2))


@pytest.mark.parametrize("size", [1, 5000, 10**6])
def test_chunks_are_the_rows_that_vllm_expects(lab, serve, connect, over_tcp, monkeypatch, size: int) -> None:
    monkeypatch.setattr(weight_sinks, "_CHUNK_BYTES", size)
    server, model = serve(workers=2, **NCCL), lab.tiny("llama", seed=1)
    connect(server, model).load(model.named_parameters(), 1)
    tensors = dict(model.named_parameters())
    assert {name: x.nbytes for name, x in server.received[0]} == {n: x.nbytes for n, x in tensors.items()}
    assert server.calls.count("/update_weights") == len(over_tcp[0].rows)
    assert len(over_tcp[0].rows) == {1: len(tensors), 10**6: 1}.get(size, len(over_tcp[0].rows))
    assert min([*over_tcp[0].rows[:-1], size]) == size
    assert digest(server.model.named_parameters()) == digest(model.named_parameters())


@pytest.mark.parametrize("size", [1, 5000, 10**6])
def test_chunks_are_lent_in_the_same_memory(lab, serve, connect, over_memory, monkeypatch, size: int) -> None:
    """In other memory only for a tensor that is larger than it; it is freed with the last chunk."""
    monkeypatch.setattr(weight_sinks, "_CHUNK_BYTES", size)
    server, model = serve(**IPC), lab.tiny("llama", seed=1)
    connect(server, model).load(model.named_parameters(), 1)
    tensors = [(name, x.detach()) for name, x in model.named_parameters()]
    assert [name for name, _ in server.received[0]] == [name for name, _ in tensors]
    assert all(x.equal(y) for (_, x), (_, y) in zip(server.received[0], tensors, strict=True))
    [*sizes] = over_memory[0].sizes.values()
    assert sizes == sorted(set(sizes))
    assert len(sizes) < server.calls.count("/update_weights") or size == 10**6
    assert not lab.LENT.keys() & over_memory[0].sizes.keys()


def test_server_on_another_gpu_names_it(lab, serve, connect, over_memory) -> None:
    server, model = serve(**IPC), lab.tiny("llama")
    server.gpu = "90cc-other"
    engine = connect(server, model)
    with pytest.raises(RunError) as error:
        engine.load(model.named_parameters(), 1)
    assert "IPC handle not found for GPU UUID 90cc-other" in str(error.value)
    assert str(error.value).endswith("without --weight-transfer-config it gets files")
    server.gpu = over_memory[0].gpu
    load_snapshot(engine, snapshot(lab, model, 2))


def test_server_that_keeps_old_weights_fails_the_canary(lab, serve, connect, way) -> None:
    """The digest cannot show it: no server reports what it received."""
    server = serve(**way)
    engine = connect(server, lab.tiny("llama"))
    server.kept = {name for name, _ in server.model.named_parameters()}
    with pytest.raises(RunError, match="log-probabilities differ"):
        load_snapshot(engine, snapshot(lab, lab.tiny("llama", seed=1), 1))


@pytest.mark.parametrize(
    ("path", "fault", "words"),
    [
        ("/update_weights", [None, "dies"], "closed the connection at /update_weights"),
        ("/update_weights", [None, "hangs"], "has not answered /update_weights within 1 s"),
        ("/update_weights", [None, (500, {"error": {"message": "no room"}})], "status 500: no room"),
        ("/init_weight_transfer_engine", "dies", "closed the connection at /init_weight_transfer_engine"),
        ("/finish_weight_update", "dies", "closed the connection at /finish_weight_update"),
    ],
)
def test_server_that_is_lost_within_a_transfer_is_named(
    lab, serve, connect, way, monkeypatch, path: str, fault: Any, words: str
) -> None:
    monkeypatch.setattr(weight_sinks, "_CHUNK_BYTES", 5000)
    server, model = serve(**way), lab.tiny("llama")
    engine = connect(server, model, deadline_s=1.0 if "hangs" in fault else 60.0)
    server.faults[path] = copy.copy(fault)
    with pytest.raises(RunError) as error:
        engine.load(model.named_parameters(), 1)
    assert server.url in str(error.value)
    assert words in str(error.value)
    assert engine.version == -1


@pytest.mark.parametrize("how", ["fails", "waits"])
def test_group_that_cannot_be_joined_is_named(lab, serve, connect, over_tcp, monkeypatch, how: str) -> None:
    server, model = serve(**NCCL), lab.tiny("llama")
    engine = connect(server, model)
    monkeypatch.setattr(weight_sinks, "CONNECT_S", 0.0)
    monkeypatch.setattr(server, "join", lambda info: None)

    def join(size: int) -> None:
        if how == "waits":
            server.over.wait()
            return
        raise RuntimeError("NCCL Error 5: invalid usage")

    monkeypatch.setattr(over_tcp[0], "join", join)
    engine.server.deadline_s = 0.4  # of the wait alone: the client has its own
    with pytest.raises(RunError) as error:
        engine.load(model.named_parameters(), 1)
    words = {"fails": "NCCL Error 5: invalid usage", "waits": "does not take weights within 0.4 s"}[how]
    assert words in str(error.value)
    assert str(error.value).endswith("without --weight-transfer-config it gets files")


def test_run_follows_one_that_ended_within_a_sync(lab, serve, connect, way) -> None:
    """The server still waits for chunks; what came of them is replaced."""
    server, model = serve(**way), lab.tiny("llama", seed=1)
    weights = list(model.named_parameters())

    def killed() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights[:-1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect(server, model).load(killed(), 1)
    assert server.updating
    load_snapshot(connect(server, model), snapshot(lab, model, 1))
    assert digest(server.model.named_parameters()) == digest(weights)


@pytest.mark.parametrize(
    ("how", "config", "device", "problem"),
    [
        ({}, {}, GPU, ""),
        (IPC, {}, GPU, None),
        (IPC, {"sleep": True}, GPU, None),
        (NCCL, {}, CPU, "by nccl: it needs a GPU of the sampler, whose device is cpu"),
        (NCCL, {"sleep": True}, GPU, "by nccl: with engine.sleep"),
        (
            NCCL | {"parallel_config": {"data_parallel_hybrid_lb": True}},
            {},
            GPU,
            "to some of its data-parallel",
        ),
        (IPC, {}, CPU, "by ipc: it needs a GPU of the sampler, whose device is cpu"),
        (IPC | {"insecure": False}, {}, GPU, "start it with VLLM_ALLOW_INSECURE_SERIALIZATION=1"),
        (IPC | {"workers": 2}, {}, GPU, "it has workers on other GPUs"),
        ({"weight_transfer_config": {"backend": "sparse_nccl"}}, {}, GPU, "by sparse_nccl: it is not known"),
    ],
)
def test_server_that_gets_files_is_known(serve, how, config, device, problem: str | None) -> None:
    """problem: none of a server that was started for nothing else, None of one that gets no files."""
    backend, note = transfer_backend(ServedConfig(url=(server := serve(**how)).url, **config), device)
    assert backend == ("ipc" if problem is None else "")
    assert (problem or "") in note
    assert (server.url in note) == bool(problem)


def test_gpu_needs_a_torch_with_nccl(serve, monkeypatch) -> None:
    config = ServedConfig(url=serve(**NCCL).url)
    for available in (True, False):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda available=available: available)
        backend, note = transfer_backend(config, GPU)
        assert (backend, "this PyTorch was built without it" in note) == (
            ("", "nccl")[available],
            not available,
        )
        assert NcclGroup.obstacle(CPU)


def test_lent_memory_is_in_segments_that_do_not_grow(monkeypatch) -> None:
    """Those that grow cannot be opened by a process that is no child, where Linux restricts ptrace."""
    get, put = torch._C._accelerator_getAllocatorSettings, torch._C._accelerator_setAllocatorSettings
    before, settings, empty = get(), "max_split_size_mb:512,expandable_segments:True", torch.empty
    seen = []
    monkeypatch.setattr(torch, "empty", lambda *a, **b: (seen.append(get()), empty(*a, **b))[1])
    put(settings)
    try:
        assert CudaIpc(CPU).empty(3).nbytes == 3
        assert seen == [f"{settings},expandable_segments:False"]
        assert get() == settings
    finally:
        put(before)


# ---------------------------------------------------------------------- runs


def test_run_from_a_gpu_is_the_run_by_files(fleet, run_cli, write, tmp_path, request) -> None:
    """And a run whose sampler has no GPU says that it sends files to a server that was started otherwise.

    By CUDA IPC the server sleeps while the learner trains.
    """
    results = []
    for name, how, sleeps in (
        ("files", IPC, False),
        ("nccl", NCCL, False),
        ("ipc", IPC, True),
    ):
        [server], tables = fleet(1, **how)
        by_files = name == "files"
        if not by_files:
            request.getfixturevalue({"nccl": "over_tcp", "ipc": "over_memory"}[name])
        recipe = write(tables, {"run": {"updates": 1}, "engine": {"sleep": sleeps}})
        out = run_cli("train", recipe, "--run-dir", tmp_path / name)
        assert out.code == 0, out.err
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        keys = ("update", "reward/mean", "loss", "grad_norm")
        results.append([[line.get(key) for key in keys] for line in lines])
        note = f"note: engine.url: weights pass by files: the vLLM server at {server.url}: gets no weights by"
        assert (note in out.out + out.err) == by_files
        if sleeps:
            first = ["wake weights", "join", "chunk", "finish", "wake kv_cache", "draw"]
            next_ = [call for call in first if call != "join"]
            assert server.order == ["draw", "sleep", "wake", "draw", "sleep", *first, "sleep", *next_]
        else:
            sync = ["load", "draw"] * 2 if by_files else ["join", *SYNC * 2]
            assert server.order == ["draw", *sync]
    assert results[0] == results[1] == results[2]
