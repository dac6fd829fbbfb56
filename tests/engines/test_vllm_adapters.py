"""Adapters alone, and names of files, to a vLLM server: stand-ins for it (conftest.py)."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.engines.vllm.connection import ServedConfig, adapter_obstacle
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.learner import lora
from posttrain.learner.learner import Learner
from posttrain.learner.lora import Lora
from posttrain.loop.weight_sync import Publisher
from posttrain.methods.table import SFT
from posttrain.models.fingerprint import digest
from posttrain.rollout.snapshots import SharedMemoryStore, load_snapshot
from posttrain.types import Request, RunError, Sampling

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
CANARY = list(range(20, 28))
CLOSE = 2e-5
"""Nats between W x + s B A x and (W + s B A) x, in float32."""
SYNC = ["adapter", "draw"]
ADAPTED = {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"], "rslora": True}, "optim": {"lr": 0.02}}


@pytest.fixture
def learner(lab) -> Learner:
    """A learner whose adapter has left its start, over the stand-in's shape but not its weights."""
    made = Learner(
        copy.deepcopy(lab.tiny("llama", seed=1)).requires_grad_(True), SFT, lora=Lora(rank=2, alpha=6.0)
    )
    move(made)
    return made


def move(learner: Learner, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in learner.model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.fixture
def connect(lab, learner) -> Iterator[Callable[..., ServerEngine]]:
    """connect(server, ...) -> an engine without weights, which knows those that the adapter changes."""
    engines = []

    def make(server: Any, base: Any = None, **config: Any) -> ServerEngine:
        engines.append(
            ServerEngine(
                lab.tiny("llama"),
                dtype=torch.float32,
                decode=lab.spell,
                stop_tokens=[299],
                config=ServedConfig(**{"url": server.url, "rows": 8, "cache_tokens": 512} | config),
                context=512,
                base=base or (lambda: lora.frozen(learner.model)),
            )
        )
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def publish(learner: Learner, engine: ServerEngine, version: int, store: Any = None) -> None:
    """Load the adapter as a sampler does, and compare what it draws from with the learner."""
    publisher = Publisher(learner, CANARY, store, unmerged=True)
    load_snapshot(engine, publisher.snapshot(version))
    assert engine.version == version
    row = [*CANARY, 3, 5, 9]
    assert engine.score(row) == pytest.approx(learner.canary(row), abs=CLOSE)


# ---------------------------------------------------------------------- adapters


@pytest.mark.parametrize("store", [None, SharedMemoryStore], ids=["here", "stored"])
@pytest.mark.sample("here")
def test_adapter_samples_as_the_merged_model(lab, learner, serve, connect, store: Any) -> None:
    server, other = serve(lora=8), serve()
    store = store() if store else None
    engine, whole = connect(server), connect(other)
    for version in (1, 2, 3):
        publish(learner, engine, version, store)
        load_snapshot(whole, Publisher(learner, CANARY).snapshot(version))
        # What an earlier version computed of this prompt is not read.
        request = Request(prompt=tuple(CANARY), sampling=Sampling(max_new_tokens=6), seed=0, task="t")
        [ours], [theirs] = lab.answers(engine, [request]), lab.answers(whole, [request])
        assert ours.tokens == theirs.tokens
        assert ours.logp_policy == pytest.approx(theirs.logp_policy, abs=CLOSE)
        assert ours.version == [version] * len(ours.tokens)
        move(learner, version)
    loads = [call for call in server.order if call != "draw"]
    assert loads == ["load", "adapter", "adapter", "adapter"]
    assert len(set(server.bytes[1:])) == 1
    assert server.bytes[0] == other.bytes[0] > 4 * server.bytes[1]
    if store:
        assert store.bytes == sum(server.bytes[1:])
        store.close()


def test_adapter_files_stay_until_the_next_is_loaded(learner, serve, connect, tmp_path) -> None:
    """A server that dropped an adapter reads its files again; each is kept under a name of its own."""
    server = serve(lora=8)
    engine = connect(server, folder=str(tmp_path))
    names = []
    for version in (1, 2):
        publish(learner, engine, version)
        [(name, place)] = server.adapters.items()
        assert [*tmp_path.iterdir()] == [place]
        config = json.loads((place / "adapter_config.json").read_text())
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 6.0)
        server.loaded.clear()
        assert engine.score(CANARY) == pytest.approx(learner.canary(CANARY), abs=CLOSE)
        names.append(name)
    assert len(set(names)) == 2


def test_base_is_sent_again_to_a_server_that_restarted(lab, learner, serve, connect) -> None:
    server = serve(lora=8)
    engine = connect(server)
    publish(learner, engine, 1)
    server.adapters.clear()
    server.model.load_state_dict(lab.tiny("llama", seed=2).state_dict())
    publish(learner, engine, 2)
    assert [call for call in server.order if call != "draw"] == ["load", "adapter"] * 2


def test_another_run_removes_adapters_of_the_last(learner, serve, connect) -> None:
    server = serve(lora=8)
    publish(learner, connect(server), 1)
    publish(learner, connect(server), 1)
    assert len(server.adapters) == 1


def test_adapter_follows_weights_that_wake_up(learner, serve, connect) -> None:
    server = serve(lora=8)
    engine = connect(server, sleep=True)
    for version in (1, 2):
        publish(learner, engine, version)
        engine.sleep()
    order = ["load", "adapter"], ["adapter"]
    first, second = (["wake weights", *part, "wake kv_cache", "draw", "sleep"] for part in order)
    assert server.order == ["draw", "sleep", *first, *second]


def test_changed_adapter_is_found(learner, serve, connect, monkeypatch) -> None:
    server = serve(lora=8)
    engine, read = connect(server), server.read_adapter
    publish(learner, engine, 1)

    def spoil(name: str) -> Any:
        file = server.adapters[name] / "adapter_model.safetensors"
        tensors = load_file(file)
        next(iter(tensors.values())).view(torch.int32)[0, 1] ^= 1
        save_file(tensors, file)
        return read(name)

    monkeypatch.setattr(server, "read_adapter", spoil)
    with pytest.raises(RunError, match="holds other weights than the learner sent as version 2"):
        publish(learner, engine, 2)


def test_wrong_base_is_found(lab, learner, serve, connect) -> None:
    engine = connect(serve(lora=8), base=lab.tiny("llama", seed=2).named_parameters)
    with pytest.raises(RunError, match="other weights than those that the learner's adapter changes"):
        publish(learner, engine, 1)
    assert engine.version == -1


def test_adapter_that_the_server_ignores_fails_the_canary(learner, serve, connect, monkeypatch) -> None:
    server = serve(lora=8)
    engine, read = connect(server), server.read_adapter

    def ignore(name: str) -> Any:
        server.loaded = {name: (0.0, read(name)[1])}
        return server.loaded[name]

    monkeypatch.setattr(server, "read_adapter", ignore)
    with pytest.raises(RunError, match="log-probabilities differ"):
        publish(learner, engine, 1)


@pytest.mark.parametrize("fault", ["lacks", "unknown", "shape"])
def test_adapter_of_another_model_is_not_sent(learner, serve, connect, fault: str) -> None:
    server = serve(lora=8)
    engine = connect(server)
    snapshot = Publisher(learner, CANARY, unmerged=True).snapshot(1)
    tensors = dict(snapshot.place.open())
    first = min(tensors)
    if fault == "lacks":
        del tensors[first]
    elif fault == "unknown":
        tensors = {name.replace("q_proj", "z_proj"): x for name, x in tensors.items()}
    else:
        tensors[first] = tensors[first][:, 1:]
    server.calls.clear()
    with pytest.raises((KeyError, ValueError)):
        engine.load_adapter(tensors.items(), 1, snapshot.adapter)
    assert server.calls == []


def test_adapter_that_the_server_refuses_ends_the_run_with_its_reason(learner, serve, connect) -> None:
    server = serve(lora=1)
    with pytest.raises(RunError) as error:
        publish(learner, connect(server), 1)
    assert "LoRA rank 2 is greater than max_lora_rank 1." in str(error.value)
    assert str(error.value).endswith("without --enable-lora it gets merged weights")


@pytest.mark.parametrize(
    ("how", "problem"),
    [
        ({}, "--enable-lora --max-lora-rank 16"),
        ({"lora": 16, "runtime_lora": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"lora": 8}, "takes adapters up to rank 8"),
        (
            {"lora": 16, "lora_config": {"max_lora_rank": 16, "target_modules": ["o_proj"]}},
            "without --lora-target-modules",
        ),
        ({"lora": 16, "parallel_config": {"_api_process_count": 2}}, "--api-server-count 1"),
        ({"lora": 16, "parallel_config": {"_api_process_count": 1}}, ""),
    ],
)
def test_server_that_takes_no_adapters_is_known(serve, how: dict[str, Any], problem: str) -> None:
    server = serve(**how)
    obstacle = adapter_obstacle(ServedConfig(url=server.url), 12)
    assert problem in obstacle
    assert bool(obstacle) == bool(problem)
    assert not problem or server.url in obstacle


# ---------------------------------------------------------------------- runs


def train(run_cli, file: Path, run: Path) -> tuple[list[dict[str, float]], str]:
    out = run_cli("train", file, "--run-dir", run)
    assert out.code == 0, out.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["update"] > 0], out.out + out.err


def test_run_sends_its_adapter_alone(fleet, run_cli, write, tmp_path) -> None:
    """Under a fiftieth of the model at each sync, and the updates of a run that sends merged weights."""
    results = []
    for name, runtime in (("alone", True), ("merged", False)):
        [server], tables = fleet(1, lora=16, runtime_lora=runtime)
        updates, output = train(run_cli, write(tables, ADAPTED), tmp_path / name)
        results.append(updates)
        assert ("note: lora: each weight sync sends the merged model" in output) == (name == "merged")
        if name == "alone":
            assert server.order == ["draw", "load", *SYNC * 3]
            assert max(server.bytes[1:]) < 0.02 * server.bytes[0]
        else:
            assert server.order == ["draw", *["load", "draw"] * 3]
            assert len(set(server.bytes)) == 1
    for ours, theirs in zip(*results, strict=True):
        assert ours["grad_norm"] > 0
        for key in ("reward/mean", "length/mean", "loss", "grad_norm", "kl/mismatch"):
            assert ours[key] == pytest.approx(theirs[key], abs=1e-4)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    ("over", "alone"),
    [
        ({"lora": {"dora": True, "rslora": False}}, False),
        ({"lora": {"targets": ["lm_head"]}}, False),
        ({"model": {"quantize": "nf4"}}, True),
        ({"model": {"random_init": True}}, True),
        ({"async": {"place": "process"}}, True),
    ],
    ids=["dora", "head", "nf4", "random", "process"],
)
def test_runs_of_other_adapters(fleet, run_cli, write, tmp_path, over: dict[str, Any], alone: bool) -> None:
    [server], tables = fleet(1, lora=16)
    merged = {key: {**ADAPTED.get(key, {}), **over.get(key, {})} for key in ADAPTED.keys() | over.keys()}
    _, output = train(run_cli, write(tables, merged), tmp_path / "run")
    assert server.order.count("load") == (1 if alone else 3)
    assert ("note: lora: each weight sync sends the merged model and not the adapter" in output) != alone


@pytest.mark.full
@pytest.mark.parametrize("second", [16, 0], ids=["both", "one"])
def test_ranks_agree_on_what_their_servers_get(fleet, write, tmp_path, second: int) -> None:
    servers, tables = fleet(2, lora=16)
    servers[1].lora = second
    command = [*TORCHRUN, "2", "-m", "posttrain", "train", write(tables, ADAPTED | {"run": {"updates": 1}})]
    done = subprocess.run(
        [*map(str, command), "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sync = ["load", *SYNC * 2] if second else ["load", "draw"] * 2
    assert [server.order for server in servers] == [["draw", *sync]] * 2


# ---------------------------------------------------------------------- names of files

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "qwen2_moe", "olmoe", "minimax_m2", "dots1")


def model_of(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES)).eval()


@pytest.mark.parametrize("family", [*EXPERTS, "llama"])
@pytest.mark.sample("qwen3_moe", "deepseek_v3", "llama")
def test_server_gets_the_names_of_save_pretrained(lab, family: str, tmp_path, monkeypatch) -> None:
    """And the digest is of the parameters, which the server has bit for bit."""
    ours, theirs = model_of(family), model_of(family, seed=1)
    for name, buffer in theirs.named_buffers():
        buffer.copy_(dict(ours.named_buffers())[name])
    ours.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    names = {name for name in files if not name.endswith("e_score_correction_bias")}  # of its own files
    with lab.StandIn(theirs, longest=64) as server:
        places: list[set[str]] = []
        reload = server.reload

        def note(place: str) -> None:
            places.append({name for file in Path(place).iterdir() for name in load_file(file)})
            reload(place)

        monkeypatch.setattr(server, "reload", note)
        monkeypatch.setattr(server, "logits", lambda tokens, name: torch.zeros(len(tokens), 61))
        engine = ServerEngine(
            ours,
            dtype=torch.float32,
            decode=str,
            stop_tokens=[],
            config=ServedConfig(url=server.url, cache_tokens=64),
            context=64,
        )
        received = engine.load(ours.named_parameters(), 1)
        engine.close()
    assert places == [names]
    assert ("experts.3." in "".join(names)) == (family != "llama")
    assert received == digest(ours.named_parameters())
    tensors = dict(theirs.named_parameters())
    assert all(tensors[name].equal(x) for name, x in ours.named_parameters())
