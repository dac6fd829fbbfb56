"""Weights to a vLLM server by NCCL: sockets in its place, and a stand-in for the server (conftest.py)."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from posttrain.engines.vllm import weight_sinks
from posttrain.engines.vllm.connection import ServedConfig, nccl_obstacle
from posttrain.engines.vllm.nccl import NcclGroup
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.models.fingerprint import digest
from posttrain.rollout.snapshots import LearnerWeights, Snapshot, load_snapshot
from posttrain.types import RunError

NCCL = {"weight_transfer_config": {"backend": "nccl"}}
CPU, GPU = torch.device("cpu"), torch.device("cuda")
SYNC = ["chunk", "finish", "draw"]


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
@pytest.mark.sample("qwen3")
def test_workers_get_the_tensors_of_save_pretrained(
    lab, serve, connect, over_tcp, tmp_path, family: str
) -> None:
    """Names, order, types, shapes and bytes, of a tied head too, on each of two workers."""
    model, held = lab.tiny(family), copy.deepcopy(lab.tiny(family, seed=1))
    with lab.StandIn(held, workers=2, **NCCL) as server:
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
    assert over_tcp[0].rows == [sum(x.nbytes for _, x in sent)]


def test_sync_is_one_transfer(lab, serve, connect, over_tcp) -> None:
    """The group is joined once; with weights of another version the server draws from these."""
    server = serve(**NCCL)
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


def test_server_that_keeps_old_weights_fails_the_canary(lab, serve, connect, over_tcp) -> None:
    """The digest cannot show it: no server reports what it received."""
    server = serve(**NCCL)
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
    lab, serve, connect, over_tcp, monkeypatch, path: str, fault: Any, words: str
) -> None:
    monkeypatch.setattr(weight_sinks, "_CHUNK_BYTES", 5000)
    server, model = serve(**NCCL), lab.tiny("llama")
    engine = connect(server, model, deadline_s=1.0 if "hangs" in fault else 60.0)
    server.faults[path] = fault
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


def test_run_follows_one_that_ended_within_a_sync(lab, serve, connect, over_tcp) -> None:
    """The server still waits for chunks; what came of them is replaced."""
    server, model = serve(**NCCL), lab.tiny("llama", seed=1)
    weights = list(model.named_parameters())
    with pytest.raises(KeyError):
        connect(server, model).load(weights[:-1], 1)
    assert server.updating
    load_snapshot(connect(server, model), snapshot(lab, model, 1))
    assert digest(server.model.named_parameters()) == digest(weights)


@pytest.mark.parametrize(
    ("how", "config", "device", "problem"),
    [
        ({}, {}, GPU, None),
        (NCCL, {}, CPU, "it needs a GPU of the sampler, whose device is cpu"),
        (NCCL, {"sleep": True}, GPU, "with engine.sleep"),
        ({"weight_transfer_config": {"backend": "ipc"}}, {}, GPU, "its backend is ipc"),
        (
            NCCL | {"parallel_config": {"data_parallel_hybrid_lb": True}},
            {},
            GPU,
            "to some of its data-parallel workers alone",
        ),
    ],
)
def test_server_without_nccl_is_known(serve, how, config, device, problem) -> None:
    obstacle = nccl_obstacle(ServedConfig(url=(server := serve(**how)).url, **config), device)
    assert obstacle is None if problem is None else problem in obstacle and server.url in obstacle


def test_gpu_needs_a_torch_with_nccl(serve, monkeypatch) -> None:
    config = ServedConfig(url=serve(**NCCL).url)
    for available in (True, False):
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda available=available: available)
        assert ("this PyTorch was built without it" in str(nccl_obstacle(config, GPU))) != available
        assert NcclGroup.obstacle(CPU)


# ---------------------------------------------------------------------- runs


def test_run_by_nccl_is_the_run_by_files(fleet, run_cli, write, tmp_path, request) -> None:
    """And a run whose sampler has no GPU says that it sends files to a server that was started for NCCL."""
    results = []
    for name in ("files", "nccl"):
        [server], tables = fleet(1, **NCCL)
        if name == "nccl":
            request.getfixturevalue("over_tcp")
        out = run_cli("train", write(tables, {"run": {"updates": 1}}), "--run-dir", tmp_path / name)
        assert out.code == 0, out.err
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        keys = ("update", "reward/mean", "loss", "grad_norm")
        results.append([[line.get(key) for key in keys] for line in lines])
        note = f"note: engine.url: weights pass by files: the vLLM server at {server.url}: gets no weights by"
        assert (note in out.out + out.err) == (name == "files")
        sync = ["load", "draw"] * 2 if name == "files" else ["join", *SYNC * 2]
        assert server.order == ["draw", *sync]
    assert results[0] == results[1]
