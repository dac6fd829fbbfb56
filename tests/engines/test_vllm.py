"""vLLM as the engine: what is drawn, how likely it was, where it ends, and which weights drew it.

`make test-vllm` runs these in an environment of their own; elsewhere they are skipped.
"""

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from posttrain.api.answering import load_policy, recipe_of
from posttrain.engines.vllm.connection import ServedConfig
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.models.fingerprint import digest
from posttrain.recipe.recipe import EngineChoice
from posttrain.rollout.snapshots import LearnerWeights, Snapshot, load_snapshot
from posttrain.types import Completion, Request, RunError, Sampling

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test-vllm"
)

STOP = 299
CONTEXT = 512
CLOSE = 1e-3
"""Nats between two implementations in float32."""


def model_of(seed: int) -> PreTrainedModel:
    """A random Llama with a tied head, whose heads are of a size that vLLM has kernels for."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    """Two policies of one shape."""
    return [model_of(0), model_of(1)]


@pytest.fixture(scope="module")
def made(lab, models) -> VllmEngine:
    """One engine for all: to start it takes seconds."""
    return VllmEngine(
        models[0],
        dtype=torch.float32,
        decode=lab.spell,
        stop_tokens=[STOP],
        config=ServedConfig(rows=8, cache_tokens=4096),
        context=CONTEXT,
    )


@pytest.fixture
def engine(made, models) -> Iterator[VllmEngine]:
    """The engine with the first policy's weights, as version 1, and nothing to answer."""
    made.load(models[0].named_parameters(), 1)
    yield made
    made.withdraw()


@torch.no_grad()
def logps(model: PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """log π of the second token, the third ..., as transformers finds them."""
    found = (model(torch.tensor([tokens])).logits[0] / temperature).log_softmax(-1)
    return [float(found[t - 1, tokens[t]]) for t in range(1, len(tokens))]


def asked(lab, seed: int = 0, length: int = 6, **sampling: object) -> Request:
    """A request that is not often ended by a token."""
    wishes = {"max_new_tokens": 12} | sampling
    return Request(prompt=lab.prompt_of(length, 1, 299), sampling=Sampling(**wishes), seed=seed, task="t")


def fits(model: PreTrainedModel, request: Request, answer: Completion, begin: int = 0) -> None:
    """Fails unless each token from `begin` on has the log-probability that the model says."""
    tokens, n = [*request.prompt, *answer.tokens], len(request.prompt)
    truth = logps(model, tokens, request.sampling.temperature or 1.0)[n - 1 :]
    assert answer.logp_policy[begin:] == pytest.approx(truth[begin:], abs=CLOSE)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_each_token_says_how_likely_it_was_where_it_was_drawn(lab, engine, models, temperature) -> None:
    requests = [asked(lab, seed, temperature=temperature) for seed in range(5)]
    for request, answer in zip(requests, lab.answers(engine, requests), strict=True):
        fits(models[0], request, answer)
        assert answer.logp_gen == answer.logp_policy
        assert answer.version == [1] * len(answer.tokens)
        assert 1 <= len(answer.tokens) <= 12


def test_tokens_are_drawn_as_often_as_their_probability_says(lab, engine, models) -> None:
    prompt, n = lab.prompt_of(6, 1, 299), 2000
    one = Sampling(max_new_tokens=1)
    requests = [Request(prompt=prompt, sampling=one, seed=5, task="t", sample=k) for k in range(n)]
    drawn = torch.tensor([answer.tokens[0] for answer in lab.answers(engine, requests)])
    with torch.no_grad():
        p = models[0](torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    top = p.topk(20).indices
    often = torch.stack([(drawn == t).double().mean() for t in top])
    # Five standard errors; at 20 tokens one in 80,000 seeds would be further off.
    assert ((often - p[top]).abs() <= 5 * (p[top] * (1 - p[top]) / n).sqrt()).all()


def test_the_same_request_leads_to_the_same_answer_in_any_company(lab, engine) -> None:
    request = asked(lab, seed=3)
    [alone] = lab.answers(engine, [request])
    others = [asked(lab, seed, length=4 + seed) for seed in range(10, 20)]
    among = lab.answers(engine, [*others[:5], request, *others[5:]])[5]
    assert among.tokens == alone.tokens
    changes = ({"seed": 4}, {"task": "u"}, {"sample": 1}, {"position": 7})
    for different in lab.answers(engine, [dataclasses.replace(request, **each) for each in changes]):
        assert different.tokens != alone.tokens


def test_at_temperature_0_the_likeliest_token_is_taken(lab, engine, models) -> None:
    request = asked(lab, temperature=0.0)
    # Beside one that is drawn: vLLM treats a step of both in another way.
    [answer, _] = lab.answers(engine, [request, asked(lab, 1)])
    fits(models[0], request, answer)
    assert answer.logp_gen == [0.0] * len(answer.tokens)
    for t in range(len(answer.tokens)):
        seen = torch.tensor([[*request.prompt, *answer.tokens[:t]]])
        assert answer.tokens[t] == int(models[0](seen).logits[0, -1].argmax())


def test_an_answer_ends_with_a_stop_token_a_stop_string_or_its_length(lab, engine, models) -> None:
    [whole] = lab.answers(engine, [asked(lab, seed=8)])
    assert (whole.stop, len(whole.tokens), whole.text) == ("length", 12, lab.spell(whole.tokens))
    place = next(n for n in range(4, 12) if whole.tokens[n] not in whole.tokens[:n])
    stop = lab.spell(whole.tokens[: place + 1])[-9:-1]
    [cut] = lab.answers(engine, [asked(lab, seed=8, stop=("never said", stop))])
    assert (cut.stop, cut.tokens) == ("stop", whole.tokens[: place + 1])
    assert cut.text == lab.spell(cut.tokens)[:-1]
    engine.stop_tokens = frozenset([whole.tokens[place]])
    try:
        [ended] = lab.answers(engine, [asked(lab, seed=8)])
    finally:
        engine.stop_tokens = frozenset([STOP])
    assert (ended.stop, ended.tokens) == ("eos", whole.tokens[: place + 1])
    assert ended.text == lab.spell(whole.tokens[:place])


def test_a_token_that_is_forced_is_as_likely_as_it_was_before(lab, engine, models) -> None:
    others = [asked(lab, seed) for seed in range(3)]
    for token in (7, STOP):
        request = dataclasses.replace(asked(lab, max_new_tokens=4), forced=(token,) * 4)
        [answer, *_] = lab.answers(engine, [request, *others])
        assert (answer.tokens, answer.stop) == ([token] * 4, "length")
        fits(models[0], request, answer)


def test_given_tokens_are_scored_at_temperature_1_beside_running_answers(lab, engine, models) -> None:
    requests = [asked(lab, seed) for seed in range(3)]
    expected = lab.answers(engine, requests)
    tickets = [engine.submit(request) for request in requests]
    row = list(lab.prompt_of(40, 2))
    engine.poll()
    assert engine.score(row) == pytest.approx(logps(models[0], row), abs=CLOSE)
    done = {}
    while engine.busy:
        done |= dict(engine.poll())
    assert [done[t].tokens for t in tickets] == [answer.tokens for answer in expected]


def test_what_is_withdrawn_goes_on_under_other_weights(lab, engine, models) -> None:
    requests = [asked(lab, seed) for seed in range(12)]  # of which eight run, and four wait
    tickets = [engine.submit(request) for request in requests]
    for _ in range(4):
        engine.poll()
    left = engine.withdraw()
    assert not engine.busy
    assert {ticket for ticket, _ in left} <= set(tickets)
    assert sum(rest.begun is None for _, rest in left) >= 4
    engine.load(models[1].named_parameters(), 2)
    answers = lab.answers(engine, [rest for _, rest in left])
    moved = 0
    for (ticket, rest), answer in zip(left, answers, strict=True):
        n = len(rest.begun.tokens) if rest.begun else 0
        moved += 0 < n < len(answer.tokens)
        if rest.begun:
            assert answer.tokens[:n] == rest.begun.tokens
            assert answer.logp_gen[:n] == rest.begun.logp_gen
        assert answer.version == [1] * n + [2] * (len(answer.tokens) - n)
        assert len(answer.tokens) == 12 or answer.stop == "eos"
        fits(models[1], requests[tickets.index(ticket)], answer, begin=n)
    assert moved >= 4
    assert lab.answers(engine, [rest for _, rest in left]) == answers


def test_new_weights_are_what_is_drawn_from(lab, engine, models) -> None:
    received = engine.load(models[1].named_parameters(), 2)
    assert received == digest(models[1].named_parameters())
    assert engine.version == 2
    request = asked(lab)
    [answer] = lab.answers(engine, [request])
    fits(models[1], request, answer)
    assert answer.version == [2] * len(answer.tokens)


def test_what_older_weights_computed_of_a_prompt_is_never_read(lab, engine, models, monkeypatch) -> None:
    request = asked(lab, length=300)  # two of vLLM's blocks, and some
    lab.answers(engine, [request])
    engine.load(models[1].named_parameters(), 2)
    [answer] = lab.answers(engine, [request])
    fits(models[1], request, answer)
    # What it would be if vLLM were not told to forget: that this test can see it.
    monkeypatch.setattr(engine._llm, "reset_prefix_cache", lambda: True)
    engine.load(models[0].named_parameters(), 3)
    [stale] = lab.answers(engine, [request])
    with pytest.raises(AssertionError):
        fits(models[0], request, stale)


def spoilt(name: str) -> Callable[[PreTrainedModel], list[tuple[str, torch.Tensor]]]:
    """Weights in which one is lacking, given twice, of another shape, or nobody's."""

    def weights(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
        whole = list(model.named_parameters())
        return {
            "lack": whole[:-1],
            "twice": [*whole, whole[0]],
            "unknown": [*whole, ("model.nobody", whole[0][1])],
            "shape": [(whole[0][0], whole[0][1][1:]), *whole[1:]],
        }[name]

    return weights


@pytest.mark.parametrize("fault", ["lack", "twice", "unknown", "shape"])
def test_weights_that_are_not_its_own_are_refused_and_nothing_is_drawn_from_them(
    lab, engine, models, fault
) -> None:
    with pytest.raises((KeyError, ValueError), match=fault.replace("unknown", "nobody")):
        engine.load(spoilt(fault)(models[1]), 2)
    with pytest.raises(RuntimeError, match="no weights"):
        engine.submit(asked(lab))
    engine.load(models[1].named_parameters(), 3)
    request = asked(lab)
    [answer] = lab.answers(engine, [request])
    fits(models[1], request, answer)


def test_weights_wait_until_nothing_runs(lab, engine, models) -> None:
    engine.submit(asked(lab))
    for keep in (False, True):
        with pytest.raises(RuntimeError, match="withdraw"):
            engine.load(models[1].named_parameters(), 2, keep=keep)


def test_what_it_cannot_draw_is_refused(lab, engine) -> None:
    faults = {
        "empty": dataclasses.replace(asked(lab), prompt=()),
        "vocabulary": dataclasses.replace(asked(lab), prompt=(300,)),
        "exceed": asked(lab, max_new_tokens=CONTEXT),
        "filtered": asked(lab, top_k=5),
        "temperature": asked(lab, temperature=0.001),
        "repeat one token": dataclasses.replace(asked(lab), forced=(1, 2)),
    }
    for said, request in faults.items():
        with pytest.raises(ValueError, match=said):
            engine.submit(request)
    assert not engine.busy


def snapshot(model: PreTrainedModel, canary: list[int]) -> Snapshot:
    """These weights as the learner publishes them."""
    return Snapshot(
        version=2,
        number=2,
        run="",
        place=LearnerWeights(model.named_parameters),
        canary=tuple(canary),
        logps=tuple(logps(model, canary)),
        tolerance=0.01,
    )


def test_a_weight_sync_is_proven_and_a_wrong_one_is_found(lab, engine, models) -> None:
    canary = [*lab.prompt_of(8, 3), *[9] * 4]
    load_snapshot(engine, snapshot(models[1], canary))
    assert engine.version == 2
    reload = engine._llm.collective_rpc

    def forgetful(call: str, kwargs: dict) -> None:
        """Takes what was sent and keeps one weight of before."""
        kept = "model.layers.1.mlp.down_proj.weight"
        before = dict(models[1].named_parameters())[kept]
        named = ((n, before if n == kept else w) for n, w in kwargs["weights_iterator"])
        reload(call, kwargs={"weights_iterator": named})

    engine._llm.collective_rpc = forgetful
    try:
        with pytest.raises(RunError, match="on the canary"):
            load_snapshot(engine, snapshot(models[0], canary))
    finally:
        engine._llm.collective_rpc = reload


def test_a_model_that_is_served_or_evaluated_is_the_one_that_was_named(lab, make_model) -> None:
    path = make_model(hidden_size=128, num_attention_heads=4, num_key_value_heads=2)
    recipe, _ = recipe_of(str(path), print)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dtype="float32"))
    recipe = dataclasses.replace(recipe, engine=EngineChoice(rows=4, cache_tokens=1024))
    ours, theirs = load_policy(recipe, None, print)[1], load_policy(recipe, None, print, "vllm")[1]
    assert isinstance(theirs, VllmEngine)
    sampling = Sampling(temperature=0.0, max_new_tokens=8)
    requests = [Request(prompt=lab.prompt_of(n, 1, 100), sampling=sampling) for n in (3, 9)]
    for mine, other in zip(lab.answers(ours, requests), lab.answers(theirs, requests), strict=True):
        assert other.tokens == mine.tokens
        assert other.logp_policy == pytest.approx(mine.logp_policy, abs=CLOSE)


@pytest.mark.parametrize(
    "ahead",
    [
        {"place": "here"},
        {"place": "process", "max_lag": 1, "swap": "between"},
        {"place": "process", "max_lag": 2, "swap": "within"},
    ],
    ids=["synchronous", "between", "within"],
)
def test_a_run_of_grpo_samples_with_it(run_cli, write, online, make_model, tmp_path, ahead) -> None:
    code = tmp_path / "rewards.py"
    code.write_text("def reward(prompt, response):\n    return sum(map(ord, response)) % 8 / 8\n")
    tables = {
        "model": {"path": str(make_model(hidden_size=128, tied=True))},
        "method": {"correction": "token_truncated"},
        "verifier": {"number": None, "function": {"function": f"{code}:reward"}},
        "sampling": {"max_new_tokens": 8},
        "engine": {"name": "vllm", "rows": 8, "cache_tokens": 1024},
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
    lag = ahead.get("max_lag", 0)
    assert all(line["lag/max"] <= lag for line in updates)
    # Of what the learner's own weights drew, the learner says how likely it was as vLLM does.
    fresh = [line["kl/mismatch"] for line in updates if line["lag/max"] == 0]
    assert fresh
    assert all(abs(each) < CLOSE for each in fresh)
