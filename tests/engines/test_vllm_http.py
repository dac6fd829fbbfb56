"""A vLLM server over HTTP: the engine against a small server that speaks as vLLM's does.

What vLLM's own server does is in test_vllm_server.py, which needs vLLM.
"""

import copy
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from posttrain.engines.vllm import weight_sinks
from posttrain.engines.vllm.connection import ServedConfig
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.models.attention import mask_tokens
from posttrain.models.fingerprint import digest
from posttrain.rollout.snapshots import LearnerWeights, Snapshot, load_snapshot
from posttrain.types import Request, RunError, Sampling

HANGS, DIES, STOPS = "hangs", "dies", "stops"
"""What a path of a stand-in may do (see conftest.py)."""
STOP = 299
CLOSE = 1e-4
"""Nats between a whole row computed at once and the same row one token longer each time, in float32."""


@pytest.fixture
def models(lab) -> list[PreTrainedModel]:
    """Two policies of one shape; the server holds a third."""
    return [copy.deepcopy(lab.tiny("llama", seed=seed)) for seed in (1, 2)]


@pytest.fixture
def connect(lab, models) -> Iterator[Callable[..., ServerEngine]]:
    """connect(server, ...) -> an engine that has been given the first policy's weights, as version 1."""
    made = []

    def make(server: Any, load: bool = True, **config: Any) -> ServerEngine:
        engine = ServerEngine(
            models[0],
            dtype=torch.float32,
            decode=lab.spell,
            stop_tokens=[STOP],
            config=ServedConfig(**{"url": server.url, "rows": 8, "cache_tokens": 512} | config),
            context=512,
        )
        made.append(engine)
        if load:
            engine.load(models[0].named_parameters(), 1)
        return engine

    yield make
    for engine in made:
        engine.close()


def asked(lab, seed: int = 0, **sampling: object) -> Request:
    wishes = {"max_new_tokens": 8} | sampling
    return Request(prompt=lab.prompt_of(6, 1, 299), sampling=Sampling(**wishes), seed=seed, task="t")


def heard(engine: ServerEngine) -> None:
    """Polls until something is wrong."""
    while True:
        engine.poll()


def logps(lab, model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> list[float]:
    found = (lab.full_logits(model, tokens) / temperature).log_softmax(-1)
    return [float(found[t - 1, tokens[t]]) for t in range(1, len(tokens))]


def snapshot(lab, model: PreTrainedModel) -> Snapshot:
    """These weights as the learner publishes them."""
    row = [*lab.prompt_of(8, 3), *[9] * 4]
    return Snapshot(
        version=2,
        number=2,
        run="",
        place=LearnerWeights(model.named_parameters),
        canary=tuple(row),
        logps=tuple(logps(lab, model, row)),
        tolerance=0.01,
    )


# ---------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("raw", "temperature"), [(False, 1.0), (False, 0.7), (False, 0.0), (True, 1.0), (True, 0.0)]
)
def test_each_token_says_how_likely_it_was(lab, models, serve, connect, raw, temperature) -> None:
    engine = connect(serve(raw=raw))
    requests = [asked(lab, seed, temperature=temperature) for seed in range(3)]
    for request, answer in zip(requests, lab.answers(engine, requests), strict=True):
        truth = logps(lab, models[0], [*request.prompt, *answer.tokens], temperature or 1.0)[5:]
        assert answer.logp_policy == pytest.approx(truth, abs=CLOSE)
        assert answer.logp_gen == (answer.logp_policy if temperature else [0.0] * len(truth))
        assert answer.version == [1] * len(answer.tokens)
        assert answer.stop == ("eos" if answer.tokens[-1] == STOP else "length")


def test_the_same_request_leads_to_the_same_answer_and_no_other_does(lab, serve, connect) -> None:
    engine = connect(serve())
    changes = ({}, {"seed": 4}, {"task": "u"}, {"sample": 1}, {"position": 7}, {})
    answers = lab.answers(engine, [replace(asked(lab, 3), **each) for each in changes])
    assert answers[0].tokens == answers[-1].tokens
    assert len({tuple(each.tokens) for each in answers}) == 5


def test_an_answer_ends_with_a_stop_token_a_stop_string_or_its_length(lab, serve, connect) -> None:
    engine = connect(serve())
    [whole] = lab.answers(engine, [asked(lab, 8)])
    place = next(n for n in range(3, 8) if whole.tokens[n] not in whole.tokens[:n])
    stop = lab.spell(whole.tokens[: place + 1])[-6:-1]
    [cut] = lab.answers(engine, [asked(lab, 8, stop=(stop,))])
    assert (cut.stop, cut.tokens) == ("stop", whole.tokens[: place + 1])
    assert cut.text == lab.spell(cut.tokens)[:-1]
    engine.stop_tokens = frozenset([whole.tokens[place]])
    [ended] = lab.answers(engine, [asked(lab, 8)])
    assert (ended.stop, ended.tokens) == ("eos", whole.tokens[: place + 1])


def test_what_is_withdrawn_is_given_up_by_the_server_and_goes_on_under_other_weights(
    lab, models, serve, connect
) -> None:
    server = serve()
    engine = connect(server, rows=3)
    server.pause_s = 0.02
    requests = [asked(lab, seed, max_new_tokens=200) for seed in range(4)]  # of which three run at once
    tickets = [engine.submit(request) for request in requests]
    while min(len(rest.begun.tokens) if rest.begun else 0 for _, rest in engine.unanswered()[:3]) < 2:
        assert engine.poll() == []
    with pytest.raises(RuntimeError, match="withdraw"):
        engine.load(models[1].named_parameters(), 2)
    left = dict(engine.withdraw())
    assert not engine.busy
    assert list(left) == tickets
    assert left[tickets[3]].begun is None
    assert engine.load(models[1].named_parameters(), 2) == digest(models[1].named_parameters())
    server.pause_s = 0.0
    rest = [replace(each, sampling=Sampling(max_new_tokens=20)) for each in left.values()]
    for request, answer in zip(rest, lab.answers(engine, rest), strict=True):
        n = len(request.begun.tokens) if request.begun else 0
        truth = logps(lab, models[1], [*request.prompt, *answer.tokens])[5 + n :]
        assert answer.version == [1] * n + [2] * (len(answer.tokens) - n)
        assert answer.logp_policy[n:] == pytest.approx(truth, abs=CLOSE)
    assert server.closed["answers"] == 3


# ---------------------------------------------------------------------- weights


@pytest.mark.parametrize("raw", [False, True])
def test_a_weight_sync_is_proven_and_a_weight_that_stays_is_found(lab, models, serve, connect, raw) -> None:
    server = serve(raw=raw)
    engine = connect(server)
    server.calls.clear()
    load_snapshot(engine, snapshot(lab, models[1]))
    assert engine.version == 2
    assert server.calls[:4] == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume"]
    server.kept = {"model.layers.1.mlp.down_proj.weight"}
    with pytest.raises(RunError, match=r"^weight sync: "):
        load_snapshot(engine, snapshot(lab, models[0]))


def test_the_digest_is_of_what_lay_where_the_server_read(lab, models, serve, connect, monkeypatch) -> None:
    server = serve()
    engine = connect(server)

    def spoil(place: str) -> None:
        file = next(Path(place).iterdir())
        named = load_file(file)
        named["model.norm.weight"][0] += 1e-3
        save_file(named, file)

    monkeypatch.setattr(server, "reload", spoil)
    with pytest.raises(RunError, match=r"^weight sync: "):
        load_snapshot(engine, snapshot(lab, models[1]))


@pytest.mark.parametrize("fault", ["lacks", "hold model.nobody", "shape"])
def test_weights_that_are_not_its_own_are_not_sent(lab, models, serve, connect, fault) -> None:
    server = serve()
    engine = connect(server)
    whole = list(models[1].named_parameters())
    weights = {
        "lacks": whole[:-1],
        "hold model.nobody": [*whole, ("model.nobody", whole[0][1])],
        "shape": [(whole[0][0], whole[0][1][1:]), *whole[1:]],
    }[fault]
    server.calls.clear()
    with pytest.raises((KeyError, ValueError), match=fault.replace("lacks", "lack")):
        engine.load(weights, 2)
    assert server.calls == []
    with pytest.raises(RuntimeError, match="no weights"):
        engine.submit(asked(lab))


def test_a_large_model_goes_in_several_files(lab, models, serve, connect, monkeypatch) -> None:
    server = serve()
    engine = connect(server)
    monkeypatch.setattr(weight_sinks, "_FILE_BYTES", 20_000)
    files: list[int] = []
    reload = server.reload
    monkeypatch.setattr(server, "reload", lambda place: (files.append(len(os.listdir(place))), reload(place)))
    load_snapshot(engine, snapshot(lab, models[1]))
    assert files[0] > 2


# ---------------------------------------------------------------------- faults of a server


@pytest.mark.parametrize(
    ("path", "fault", "said"),
    [
        ("/collective_rpc", DIES, "closed the connection at /collective_rpc"),
        ("/collective_rpc", HANGS, "has not answered /collective_rpc within 0.3 s"),
        ("/collective_rpc", (500, {"error": {"message": "no file"}}), "with status 500: no file"),
        ("/reset_prefix_cache", (200, {"success": False}), "did not release"),
        ("/pause", (200, "not json"), "with text that is not JSON"),
    ],
)
def test_weights_that_a_server_does_not_take_leave_none(
    lab, models, serve, connect, path, fault, said
) -> None:
    server = serve()
    engine = connect(server, deadline_s=0.3)
    server.faults[path] = fault
    with pytest.raises(RunError, match=said) as error:
        load_snapshot(engine, snapshot(lab, models[1]))
    assert server.url in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.submit(asked(lab))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (DIES, "stopped an answer: .*disconnected"),
        (STOPS, "closed the connection before the end"),
        (HANGS, "sent nothing for 0.3 s, with 1 answers pending"),
        ((400, {"error": {"message": "too long"}}), "with status 400: too long"),
        ((503, {"error": {"message": "busy"}}), "with status 503: busy .* tries"),
    ],
)
def test_an_answer_that_a_server_does_not_give_ends_the_run(lab, serve, connect, fault, said) -> None:
    server = serve()
    engine = connect(server, deadline_s=0.3 if fault is HANGS else 5.0)
    server.faults["/v1/completions"] = fault
    engine.submit(asked(lab))
    with pytest.raises(RunError, match=said) as error:
        heard(engine)
    assert server.url in str(error.value)


def test_what_has_not_begun_is_asked_again_and_what_has_is_not(lab, serve, connect) -> None:
    server = serve()
    engine = connect(server)
    [expected] = lab.answers(engine, [asked(lab)])
    server.calls.clear()
    server.faults["/v1/completions"] = [(503, ""), (429, "")]
    assert lab.answers(engine, [asked(lab)]) == [expected]
    assert server.calls == ["/v1/completions"] * 3
    server.calls.clear()
    server.faults["/v1/completions"] = [STOPS]
    engine.submit(asked(lab))
    with pytest.raises(RunError, match="before the end of an answer"):
        heard(engine)
    assert server.calls == ["/v1/completions"]


def test_a_server_that_goes_away_is_named(lab, serve, connect) -> None:
    server = serve()
    engine = connect(server, deadline_s=2.0)
    server.__exit__()
    engine.submit(asked(lab))
    # Whether its tries or the silence ends first, the cause is said.
    with pytest.raises(RunError, match="is unreachable"):
        heard(engine)


@pytest.mark.parametrize(
    ("how", "faults", "said"),
    [
        ({"dev": False}, {}, "does not let its weights be replaced: start it as VLLM_SERVER_DEV_MODE=1"),
        ({"longest": 256}, {}, "--max-model-len 512, or set engine.cache_tokens to 256"),
        ({}, {"/v1/models": (200, {"data": []})}, "is it a vLLM server"),
        ({}, {"/v1/models": (401, {"error": "no key"})}, "with status 401: no key"),
        ({}, {"/collective_rpc": (200, {"results": ["3: 2 x", "org_vocab_size=1"]})}, ""),
        (
            {},
            {"/collective_rpc": (200, {"results": ["(0-8): 9 x LlamaDecoderLayer()("]})},
            "another model: layers: 9, where the recipe's has 3",
        ),
    ],
)
def test_a_server_that_cannot_serve_is_refused_in_a_line(serve, connect, how, faults, said) -> None:
    server = serve(**how)
    server.faults |= faults
    if not said:  # what a model prints need not be understood
        connect(server, load=False)
        return
    with pytest.raises(RunError, match=said):
        connect(server, load=False)


def test_what_it_cannot_draw_is_refused(lab, serve, connect) -> None:
    engine = connect(serve(raw=True))
    faults = {
        "empty": replace(asked(lab), prompt=()),
        "vocabulary": replace(asked(lab), prompt=(300,)),
        "exceed": asked(lab, max_new_tokens=512),
        "filtered": asked(lab, top_k=5),
        "processed_logprobs": asked(lab, temperature=0.7),
        "repeat one token": replace(asked(lab), forced=(1, 2)),
    }
    for said, request in faults.items():
        with pytest.raises(ValueError, match=said):
            engine.submit(request)
    assert not engine.busy


# ---------------------------------------------------------------------- runs


@pytest.fixture
def served(fleet) -> tuple[Any, dict[str, Any]]:
    """A server over the recipe's model, and the recipe that names it."""
    [server], tables = fleet(1)
    return server, tables


def test_a_run_of_grpo_samples_with_it(run_cli, write, served, tmp_path) -> None:
    _, tables = served
    said = run_cli("train", write(tables), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    updates = [line for line in map(json.loads, written) if line["update"] > 0]
    assert [line["version"] for line in updates] == [1, 2]
    assert all(line["grad_norm"] > 0 for line in updates)
    assert all(abs(line["kl/mismatch"]) < CLOSE for line in updates)


@pytest.mark.parametrize(
    ("over", "said"),
    [
        (
            {"engine": {"url": "http://127.0.0.1:9"}},
            "engine.url: the vLLM server at http://127.0.0.1:9: ",
        ),
        ({"engine": {"url": "127.0.0.1:9"}}, "url must begin with http"),
        ({"engine": {"name": "native"}}, "set name = 'vllm'"),
        ({"engine": {"cuda_graphs": False}}, "engine.cuda_graphs: is never read"),
        ({"async": {"samplers": 2}}, "and engine.url names 1; set it to 1, or name 2 there"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p: of a filtered draw"),
    ],
)
def test_what_a_recipe_asks_of_a_server_in_vain_is_refused(run_cli, write, served, over, said) -> None:
    _, tables = served
    found = run_cli("validate", write(tables, over))
    assert found.code == 2
    assert said in found.err
    assert found.err.count("\n") == 1


def test_a_server_that_tells_raw_log_probabilities_serves_temperature_1_alone(run_cli, write, served) -> None:
    server, tables = served
    server.raw = True
    assert run_cli("validate", write(tables)).code == 0
    found = run_cli("validate", write(tables, {"sampling": {"temperature": 0.8}}))
    assert (found.code, "--logprobs-mode processed_logprobs" in found.err) == (2, True)


def test_a_server_that_dies_in_a_run_ends_it_with_a_line(run_cli, write, served, tmp_path) -> None:
    server, tables = served
    server.faults["/v1/completions"] = [None] * 40 + [DIES] * 200
    said = run_cli("train", write(tables), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 1
    assert f"the vLLM server at {server.url}" in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("raw", [False, True])
def test_masked_tokens_are_not_drawn_over_http(lab, models, serve, connect, raw: bool) -> None:
    with torch.no_grad():
        models[0].lm_head.weight[280:] *= 20
    mask_tokens(models[0], range(280))
    engine = connect(serve(raw=raw))
    for seed in range(8):
        [answer] = lab.answers(engine, [asked(lab, seed)])
        assert max(answer.tokens) < 280
        if not raw:
            prompt = [*asked(lab).prompt]
            known = lab.full_logits(models[0], [*prompt, *answer.tokens])[:, :280].log_softmax(-1)
            truth = [float(known[n + len(prompt) - 1, t]) for n, t in enumerate(answer.tokens)]
            assert answer.logp_policy == pytest.approx(truth, abs=CLOSE)
