"""vLLM frees its memory while the learner trains: stand-ins for its server (conftest.py) and its engine."""

import copy
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM

import posttrain
from posttrain.api import opening
from posttrain.engines.vllm import engine as in_process
from posttrain.engines.vllm import start
from posttrain.engines.vllm.connection import ServedConfig
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.learner.learner import Learner
from posttrain.loop import sampling
from posttrain.loop.offline import OfflineRun
from posttrain.loop.online import OnlineRun
from posttrain.loop.weight_sync import Publisher
from posttrain.models.fingerprint import digest
from posttrain.models.pretrained import save_pretrained, silent
from posttrain.plan.model_info import read_model_info
from posttrain.recipe.config import read as read_config
from posttrain.rollout.remote import ThreadChannel
from posttrain.rollout.worker import RolloutWorker
from posttrain.types import Request, Sampling

SLEEPS = {"engine": {"sleep": True}}
SYNC = ["wake weights", "load", "wake kv_cache", "draw"]
PROBED = ["draw", "sleep"]


@pytest.fixture
def in_threads(monkeypatch) -> None:
    """Samplers of other processes run in threads of this one, with the same messages."""
    monkeypatch.setattr(sampling, "ProcessChannel", lambda make, log: ThreadChannel(make))


def weights(run: Path) -> dict[str, torch.Tensor]:
    [file] = run.glob("checkpoints/step_*/model/model.safetensors")
    found: dict[str, torch.Tensor] = load_file(file)
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_a_server_sleeps_from_sampling_to_the_next_sync(
    fleet, run_cli, write, tmp_path, in_threads, monkeypatch, count: int
) -> None:
    servers, tables = fleet(count)
    asleep, update = [], Learner.update

    def watched(learner: Learner, batch: Any) -> Any:
        asleep.append([set(server.asleep) for server in servers])
        return update(learner, batch)

    monkeypatch.setattr(Learner, "update", watched)
    over = {"eval": {"every": 1}, "async": {"samplers": count}}
    for name, more in (("awake", over), ("sleeps", over | SLEEPS)):
        for server in servers:
            server.order.clear()
        said = run_cli("train", write(tables, more), "--run-dir", tmp_path / name, "--quiet")
        assert said.code == 0, said.err
    # The plan, and each sampler that connects, find out what a server reports; then it sleeps.
    start = [*PROBED, "wake", *PROBED]
    assert [server.order for server in servers] == [[*start, *[*SYNC, "sleep"] * 2, *SYNC]] * count
    everything = {"weights", "kv_cache"}
    assert asleep == [[set()] * count] * 2 + [[everything] * count] * 2
    assert not any(server.closed for server in servers)
    one, two = weights(tmp_path / "awake"), weights(tmp_path / "sleeps")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("place", ["here", "process"])
def test_verbs_that_draw_wake_a_server_that_sleeps(fleet, write, tmp_path, in_threads, place: str) -> None:
    [server], tables = fleet(1)
    file = write(tables, SLEEPS | {"async": {"place": place}, "eval": {"limit": 2}})
    with posttrain.Session(file, dir=tmp_path / "run") as session:
        groups = session.sample()
        session.forward_backward(groups)
        assert server.asleep == {"weights", "kv_cache"}
        loads = server.order.count("load")
        assert session.evaluate()["eval/accuracy"] >= 0
        assert (server.asleep, server.order.count("load")) == (set(), loads + 1)
        session.forward_backward(groups)
        assert server.asleep
        with pytest.raises(ZeroDivisionError):
            session.forward_backward(groups, lambda out, batch: 1 / 0)
        assert session.sample()
        assert (server.asleep, server.order.count("load")) == (set(), loads + 2)


@pytest.mark.parametrize(
    ("over", "code", "problem"),
    [
        ({"engine": {"name": "native", "url": None, "sleep": True}}, 2, "engine.sleep: is never read"),
        ({"engine": {"sleep": True}, "async": {"max_lag": 1}}, 2, "draw while the learner trains"),
        ({"engine": {"sleep": True}}, 2, "start it with --enable-sleep-mode"),
    ],
)
def test_sleep_is_refused_where_it_cannot_be(fleet, run_cli, write, over, code: int, problem: str) -> None:
    [server], tables = fleet(1)
    server.sleep_mode = False
    correction = {"method": {"correction": "token_truncated"}}
    said = run_cli("validate", write(tables, correction | over))
    assert (said.code, said.err.count("\n")) == (code, 1)
    assert problem in said.err


def test_a_run_goes_on_with_servers_that_moved(fleet, run_cli, write, tmp_path) -> None:
    """And with another deadline, and asleep while it trains."""
    servers, tables = fleet(2)
    words = ["--run-dir", tmp_path / "run", "--quiet"]
    for server, sets in zip(servers, ([], ["--resume", "--set", "run.updates=3"]), strict=True):
        over = {"engine": {"url": server.url, **({"sleep": True, "deadline_s": 60.0} if sets else {})}}
        said = run_cli("train", write(tables, over), *words, *sets)
        assert said.code == 0, said.err
    assert "sleep" not in servers[0].order
    assert servers[1].order[-4:] == SYNC


def test_held_out_rows_are_scored_while_servers_sleep(lab, fleet, write, tmp_path, monkeypatch) -> None:
    """The memory of a run is planned for the larger of a sampler and a pass, not for both."""
    [server], tables = fleet(1)
    file = write(tables, lab.learns_from_pairs(tmp_path) | SLEEPS)
    awake, score = [], Learner.score

    def watched(learner: Learner, batch: Any) -> Any:
        awake.append(not server.asleep)
        return score(learner, batch)

    monkeypatch.setattr(Learner, "score", watched)
    with posttrain.Session(file, dir=tmp_path / "run") as session:
        session.evaluate()
        session.evaluate()
    assert len(awake) >= 2
    assert not any(awake)


def test_an_agents_late_request_does_not_keep_an_engine_awake() -> None:
    calls = []
    rollouts = SimpleNamespace(
        pause=lambda: calls.append("pause"), engine=SimpleNamespace(sleep=lambda: calls.append("sleep"))
    )
    RolloutWorker.sleep(SimpleNamespace(rollouts=rollouts))  # type: ignore[arg-type]
    assert calls == ["pause", "sleep"]


def test_all_ranks_wait_until_memory_has_changed_hands(monkeypatch) -> None:
    """A server on the GPUs of several ranks is put to sleep, and woken, by one of them."""
    calls = []
    ranks = SimpleNamespace(rank=1, gather=lambda *_: calls.append("gather"))
    learner = SimpleNamespace(ranks=ranks, update_count=0, step_count=0, population=None)
    sampler = SimpleNamespace(
        oldest_version=0, sleep=lambda: calls.append("sleep"), publish=lambda _: calls.append("wake")
    )
    journal = SimpleNamespace(timed=lambda _: nullcontext())
    OnlineRun.make_room(SimpleNamespace(sleeps=True, sampler=sampler, journal=journal, learner=learner))
    OfflineRun.make_room(
        SimpleNamespace(sleeps=True, evaluator=SimpleNamespace(sampler=sampler), learner=learner)
    )
    assert calls == ["sleep", "gather"] * 2
    calls.clear()
    sampler.oldest_version = -1
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    publisher = SimpleNamespace(learner=learner, store=None, newest=-1, snapshot=lambda *_: None)
    Publisher.publish(publisher, sampler)
    assert calls == ["empty", "gather", "wake"]


@pytest.mark.parametrize(("rank", "order"), [(0, ["plan", "the plan"]), (1, ["the plan", "plan"])])
def test_rank_0_puts_shared_servers_to_sleep_before_others_plan(
    fleet, write, tmp_path, monkeypatch, rank: int, order: list[str]
) -> None:
    """The others measure how much memory is free."""
    _, tables = fleet(1)
    calls: list[str] = []

    def follow(label: str) -> None:
        calls.append(label)
        if not rank:
            raise InterruptedError

    def plan(*_: Any, **__: Any) -> None:
        calls.append("plan")
        if rank:
            raise InterruptedError

    monkeypatch.setattr(opening, "plan_run", plan)
    ranks = SimpleNamespace(rank=rank, size=2, follow=follow)
    loaded, directory = read_config(write(tables, SLEEPS)), SimpleNamespace(path=tmp_path)
    with pytest.raises(InterruptedError):
        opening.prepare(loaded, directory, title="", resume=False, say=silent, ranks=ranks)
    assert calls == order


def test_a_server_that_does_not_fall_asleep_ends_the_run(fleet, run_cli, write, tmp_path) -> None:
    [server], tables = fleet(1)
    server.faults["/sleep"] = [None, None, (500, {"error": {"message": "no room"}})]
    said = run_cli("train", write(tables, SLEEPS), "--run-dir", tmp_path / "run", "--quiet")
    assert (said.code, said.err.count("\n")) == (1, 1)
    assert "refused /sleep?level=1 with status 500: no room" in said.err
    assert server.order[-1] == "draw"


@pytest.mark.parametrize("state", ["awake", "asleep", "paused"])
def test_a_check_of_a_recipe_leaves_a_server_as_it_is(fleet, run_cli, write, state: str) -> None:
    """A run may be drawing from it, or training in the memory that it would wake into."""
    [server], tables = fleet(1)
    server.asleep, server.paused = {"weights"} if state == "asleep" else set(), state == "paused"
    for over in (SLEEPS, {}):
        said = run_cli("validate", write(tables, over))
        assert said.code == 0, said.err
    assert server.order == (["draw"] if state == "awake" else [])
    assert (bool(server.asleep), server.paused) == (state == "asleep", state == "paused")


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_a_server_that_is_away_is_found_by_a_check(lab, fleet, run_cli, write, tmp_path, method: str) -> None:
    """Also where answers are drawn for [[eval.task]] alone."""
    [server], tables = fleet(1)
    server.__exit__()
    said = run_cli("validate", write(tables, lab.learns_from_pairs(tmp_path) if method == "sft" else {}))
    assert said.code == 2
    assert f"engine.url: the vLLM server at {server.url}: is unreachable" in said.err


def request() -> Request:
    return Request(prompt=(1, 2, 3), sampling=Sampling(max_new_tokens=4), seed=0, task="t")


def test_a_server_that_was_left_asleep_is_woken_by_the_next_run(lab, monkeypatch) -> None:
    model = lab.tiny("llama")
    config = {"rows": 4, "cache_tokens": 512, "sleep": True}
    with lab.StandIn(copy.deepcopy(model)) as server:
        config = ServedConfig(url=server.url, **config)
        for version in (1, 2):
            engine = ServerEngine(
                model, dtype=torch.float32, decode=lab.spell, stop_tokens=[], config=config, context=512
            )
            with pytest.raises(RuntimeError, match="load some first"):
                engine.submit(request())
            assert engine.load(model.named_parameters(), version) == digest(model.named_parameters())
            engine.score([1, 2, 3])
            monkeypatch.setattr(engine._streams, "begin", lambda *_: None)
            engine.submit(request())
            with pytest.raises(RuntimeError, match="withdraw"):
                engine.sleep()
            engine.withdraw()
            engine.sleep()
            engine.sleep()
            engine.close()
        assert server.order == [*PROBED, *SYNC, "sleep", "wake", *PROBED, *SYNC, "sleep"]


class FakeEngine:
    """What VllmEngine calls of vLLM's engine, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def sleep(self, level: int) -> None:
        self.order.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.order.append(f"wake {' '.join(tags)}")

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        self.order.append(f"{method} of {sum(1 for _ in kwargs['weights_iterator'])}")

    def reset_prefix_cache(self) -> bool:
        self.order.append("reset")
        return True


def test_vllm_in_this_process_wakes_weights_then_the_cache(lab, monkeypatch) -> None:
    model, llm = lab.tiny("llama"), FakeEngine()
    monkeypatch.setattr(in_process, "start", lambda *_: (None, llm))
    config = ServedConfig(rows=4, cache_tokens=512, sleep=True)
    engine = VllmEngine(
        model, dtype=torch.float32, decode=lab.spell, stop_tokens=[], config=config, context=512
    )
    load = f"reload_weights of {len(list(model.parameters()))}"
    for version in (1, 2):
        assert engine.load(model.named_parameters(), version) == digest(model.named_parameters())
        assert engine.version == version
        engine.sleep()
        engine.sleep()
        with pytest.raises(RuntimeError, match="load some first"):
            engine.submit(request())
    assert llm.order == [load, "reset", "sleep 2", "wake weights", load, "wake kv_cache", "reset", "sleep 2"]


def test_vllm_in_this_process_gets_all_that_the_models_files_hold(
    tiny, tmp_path, write, online, monkeypatch
) -> None:
    """Biases that select experts are buffers, which training leaves alone and vLLM begins without."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "n_routed_experts": 4, "eos_token_id": 2}
    shape = {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "pad_token_id": 0, "bos_token_id": None}
    config = Glm4MoeConfig(vocab_size=len(tokenizer), num_hidden_layers=2, **sizes, **heads, **shape)
    torch.manual_seed(0)
    model = Glm4MoeForCausalLM(config)
    model.model.layers[1].mlp.gate.e_score_correction_bias.normal_()
    save_pretrained(model, tokenizer, tmp_path / "experts")
    llm, sent = FakeEngine(), dict[str, torch.Tensor]()
    monkeypatch.setattr(in_process, "start", lambda *_: (None, llm))
    monkeypatch.setattr(llm, "collective_rpc", lambda _, kwargs: sent.update(kwargs["weights_iterator"]))
    model_table = {"path": str(tmp_path / "experts"), "dtype": "float32"}
    recipe = read_config(write(online, {"model": model_table, "engine": {"name": "vllm"}})).recipe
    engine = sampling.build_vllm_engine(recipe, read_model_info(recipe, silent))
    assert engine.load(model.named_parameters(), 1) == digest(model.named_parameters())
    files = load_file(tmp_path / "experts" / "model.safetensors")
    assert any("e_score_correction_bias" in name for name in files)
    assert sent.keys() == files.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in files.items())


@pytest.mark.parametrize("sleep", [False, True])
def test_vllm_in_this_process_starts_with_memory_that_sleeps(lab, monkeypatch, sleep: bool) -> None:
    options: dict[str, Any] = {}
    vllm = ModuleType("vllm")
    vllm.EngineArgs = lambda **given: options.update(given)
    vllm.LLMEngine = SimpleNamespace(from_engine_args=lambda _: "engine")
    for name in ("vllm", "vllm.inputs", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, vllm)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", *start._ENVIRONMENT):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    config = ServedConfig(rows=4, cache_tokens=512, sleep=sleep)
    assert start.start(lab.tiny("llama").config, torch.float32, config, 512) == (vllm, "engine")
    assert options["enable_sleep_mode"] is sleep
    # The variable in which vLLM looks for segments that it must not use.
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == ("expandable_segments:True" if sleep else None)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
