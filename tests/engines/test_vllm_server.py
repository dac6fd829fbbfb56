"""vLLM's own server, in a process of its own, as the engine over HTTP.

`make test-vllm` runs these in an environment of their own; elsewhere they are skipped.
"""

import copy
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from posttrain.engines.vllm.connection import ServedConfig
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.models.fingerprint import digest
from posttrain.rollout.snapshots import LearnerWeights, Snapshot, load_snapshot
from posttrain.types import Completion, Request, RunError, Sampling

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
)

CLOSE = 1e-3
"""Nats between two implementations in float32."""
CONTEXT = 512
PATIENCE_S = 280.0
SERVER = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass
class Serving:
    """A server that runs."""

    url: str
    process: subprocess.Popen
    log: Path

    @property
    def up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False


@pytest.fixture(scope="module")
def place(make_model) -> Path:
    """A model whose heads are of a size that vLLM has kernels for."""
    return make_model(hidden_size=128, tied=True, initializer_range=0.1)


@pytest.fixture(scope="module")
def models(place) -> list[PreTrainedModel]:
    """Two policies of its shape, neither of which is the one that the server is started with."""
    whole = AutoModelForCausalLM.from_pretrained(place).float().eval().requires_grad_(False)
    found = [copy.deepcopy(whole), copy.deepcopy(whole)]
    for seed, model in enumerate(found):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return found


@pytest.fixture(scope="module")
def server(place, tmp_path_factory) -> Iterator[Serving]:
    """vLLM's server over it, as docs/engine.md starts one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    words = ["--model", place, "--host", "127.0.0.1", "--port", port, "--dtype", "float32"]
    words += ["--max-model-len", CONTEXT, "--max-num-seqs", 8, "--enforce-eager"]
    words += ["--logprobs-mode", "processed_logprobs"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, words)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=os.environ | SERVER, stdout=out, stderr=out, start_new_session=True
        )
    found = Serving(f"http://127.0.0.1:{port}", process, log)
    try:
        end = time.monotonic() + PATIENCE_S
        while not found.up:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield found
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def engine(lab, server, models) -> Iterator[ServerEngine]:
    """An engine over the server that holds the first policy's weights, as version 1."""
    made = ServerEngine(
        models[0],
        dtype=torch.float32,
        decode=lab.spell,
        stop_tokens=[99],
        config=ServedConfig(url=server.url, rows=8, cache_tokens=CONTEXT, deadline_s=60),
        context=CONTEXT,
    )
    made.load(models[0].named_parameters(), 1)
    yield made
    made.close()


@torch.no_grad()
def logps(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """log π of the second token, the third ..., as transformers finds them."""
    found = (model(torch.tensor([tokens])).logits[0] / temperature).log_softmax(-1)
    return [float(found[t - 1, tokens[t]]) for t in range(1, len(tokens))]


def asked(lab, seed: int = 0, length: int = 6, **sampling: object) -> Request:
    wishes = {"max_new_tokens": 12} | sampling
    return Request(prompt=lab.prompt_of(length, 1, 99), sampling=Sampling(**wishes), seed=seed, task="t")


def fits(model: PreTrainedModel, request: Request, answer: Completion, begin: int = 0) -> None:
    """Fails unless each token from `begin` on has the log-probability that the model says."""
    tokens, n = [*request.prompt, *answer.tokens], len(request.prompt)
    truth = logps(model, tokens, request.sampling.temperature or 1.0)[n - 1 :]
    assert answer.logp_policy[begin:] == pytest.approx(truth[begin:], abs=CLOSE)


def heard(engine: ServerEngine) -> None:
    """Polls until something is wrong."""
    while True:
        engine.poll()


def snapshot(lab, model: PreTrainedModel) -> Snapshot:
    """These weights as the learner publishes them."""
    row = [*lab.prompt_of(8, 3, 99), *[9] * 4]
    return Snapshot(
        version=2,
        number=2,
        run="",
        place=LearnerWeights(model.named_parameters),
        canary=tuple(row),
        logps=tuple(logps(model, row)),
        tolerance=CLOSE,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_each_token_says_how_likely_it_was_where_it_was_drawn(lab, engine, models, temperature) -> None:
    requests = [asked(lab, seed, temperature=temperature) for seed in range(12)]
    answers = lab.answers(engine, requests)
    for request, answer in zip(requests, answers, strict=True):
        fits(models[0], request, answer)
        assert answer.logp_gen == (answer.logp_policy if temperature else [0.0] * len(answer.tokens))
        assert answer.stop == ("eos" if answer.tokens[-1] == 99 else "length")
    assert [each.tokens for each in lab.answers(engine, requests)] == [each.tokens for each in answers]


def test_an_answer_ends_with_a_stop_token_or_a_stop_string(lab, engine) -> None:
    seed = next(s for s in range(50) if len(lab.answers(engine, [asked(lab, s)])[0].tokens) == 12)
    [whole] = lab.answers(engine, [asked(lab, seed)])
    place = next(n for n in range(4, 12) if whole.tokens[n] not in whole.tokens[:n])
    stop = lab.spell(whole.tokens[: place + 1])[-8:-1]
    [cut] = lab.answers(engine, [asked(lab, seed, stop=(stop,))])
    assert (cut.stop, cut.tokens) == ("stop", whole.tokens[: place + 1])
    engine.stop_tokens = frozenset([whole.tokens[place]])
    [ended] = lab.answers(engine, [asked(lab, seed)])
    assert (ended.stop, ended.tokens) == ("eos", whole.tokens[: place + 1])


def test_a_weight_sync_is_proven_and_a_wrong_one_is_found(lab, engine, models, monkeypatch) -> None:
    load_snapshot(engine, snapshot(lab, models[1]))
    assert engine.version == 2
    [request] = [asked(lab)]
    fits(models[1], request, lab.answers(engine, [request])[0])
    ask = engine.server.ask

    def forgetful(path: str, *given: object, **how: object) -> object:
        return None if path == "/collective_rpc" else ask(path, *given, **how)

    monkeypatch.setattr(engine.server, "ask", forgetful)
    with pytest.raises(RunError, match="on the canary"):
        load_snapshot(engine, snapshot(lab, models[0]))


def test_what_older_weights_computed_of_a_prompt_is_never_read(lab, engine, models) -> None:
    request = asked(lab, length=300)  # two of vLLM's blocks, and some
    lab.answers(engine, [request])
    assert engine.load(models[1].named_parameters(), 2) == digest(models[1].named_parameters())
    [answer] = lab.answers(engine, [request])
    fits(models[1], request, answer)


def test_what_is_withdrawn_goes_on_under_other_weights(lab, engine, models) -> None:
    requests = [asked(lab, seed, max_new_tokens=400) for seed in range(12)]
    tickets = [engine.submit(request) for request in requests]
    while sum(rest.begun is not None for _, rest in engine.unanswered()) < 2:
        engine.poll()
    left = dict(engine.withdraw())
    engine.load(models[1].named_parameters(), 2)
    rest = [replace(left[t], sampling=Sampling(max_new_tokens=60)) for t in tickets if t in left]
    rest = [each for each in rest if each.begun is None or len(each.begun.tokens) < 60]
    for request, answer in zip(rest, lab.answers(engine, rest), strict=True):
        n = len(request.begun.tokens) if request.begun else 0
        assert answer.version == [1] * n + [2] * (len(answer.tokens) - n)
        fits(models[1], request, answer, begin=n)


def test_another_model_is_refused_before_its_weights_end_the_server(server, make_model) -> None:
    other = AutoModelForCausalLM.from_pretrained(make_model(hidden_size=64))
    with pytest.raises(RunError, match="another model: states of 128, where the recipe's has 64"):
        ServerEngine(
            other,
            dtype=torch.float32,
            decode=str,
            stop_tokens=[],
            config=ServedConfig(url=server.url, cache_tokens=CONTEXT),
            context=CONTEXT,
        )
    assert server.up


@pytest.mark.parametrize(
    "ahead",
    [{}, {"place": "process", "max_lag": 2, "swap": "within"}],
    ids=["synchronous", "within"],
)
def test_a_run_of_grpo_samples_with_it(run_cli, write, online, server, place, tmp_path, ahead) -> None:
    code = tmp_path / "rewards.py"
    code.write_text("def reward(prompt, response):\n    return sum(map(ord, response)) % 8 / 8\n")
    tables = {
        "model": {"path": str(place)},
        "method": {"correction": "token_truncated"},
        "verifier": {"number": None, "function": {"function": f"{code}:reward"}},
        "sampling": {"max_new_tokens": 8, "temperature": 0.8},
        "engine": {"name": "vllm", "url": server.url, "rows": 8, "cache_tokens": CONTEXT},
        "async": ahead,
        "run": {"updates": 3},
        "checkpoint": {"every": 0},
    }
    said = run_cli("train", write(online, tables), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    updates = [line for line in map(json.loads, written) if line["update"] > 0]
    assert [line["version"] for line in updates] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 for line in updates)
    assert all(line["lag/max"] <= ahead.get("max_lag", 0) for line in updates)
    fresh = [line["kl/mismatch"] for line in updates if line["lag/max"] == 0]
    assert fresh
    assert all(abs(each) < CLOSE for each in fresh)


def test_a_server_that_is_killed_is_named(lab, server, engine, models) -> None:
    engine.submit(asked(lab, max_new_tokens=400))
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    with pytest.raises(RunError, match=f"the vLLM server at {server.url}"):
        heard(engine)
    engine.withdraw()
    with pytest.raises(RunError, match="is not there"):
        load_snapshot(engine, snapshot(lab, models[1]))
