"""New weights: used at once, by every layer, with the version that drew each token and a true digest."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from posttrain.engines.native.decode_kernel import load
from posttrain.engines.native.runner import PackedLinear, _can_pack
from posttrain.models.fingerprint import digest
from posttrain.rollout.snapshots import LearnerWeights, Snapshot, load_snapshot
from posttrain.types import Request, Sampling

CPU = torch.device("cpu")


def weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


def requests_of(lab, n: int = 8, limit: int = 8) -> list[Request]:
    return [
        Request(prompt=lab.prompt_of(3 + i % 3, i // 4), sampling=Sampling(max_new_tokens=limit), sample=i)
        for i in range(n)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "smollm", "qwen2", "gemma2"])
def test_loaded_weights_draw_what_a_fresh_engine_of_them_draws(lab, family: str, dtype: torch.dtype) -> None:
    old, new = lab.tiny(family, dtype), lab.tiny(family, dtype, seed=1)
    engine, fresh = lab.build_native_engine(old, rows=4), lab.build_native_engine(new, rows=4)
    before = lab.answers(engine, requests_of(lab))
    received = engine.load(weights(new), 7)
    assert engine.version == 7
    assert received == digest(weights(new)) != digest(weights(old))
    after, expected = lab.answers(engine, requests_of(lab)), lab.answers(fresh, requests_of(lab))
    assert [a.tokens for a in after] == [a.tokens for a in expected] != [a.tokens for a in before]
    assert [a.logp_gen for a in after] == [a.logp_gen for a in expected]
    assert all(set(a.version) == {0} for a in before)
    assert all(set(a.version) == {7} for a in after)


def test_the_digest_is_of_what_arrived_in_the_engines_own_type(lab) -> None:
    master = lab.tiny("smollm", torch.float32, seed=1)
    engine = lab.build_native_engine(lab.tiny("smollm", torch.bfloat16))
    received = engine.load(weights(master), 1)
    assert received == digest((n, p.to(torch.bfloat16)) for n, p in weights(master))
    damaged = [(n, p.clone()) for n, p in weights(master)]
    damaged[5][1].view(-1)[3] *= 1.5
    assert engine.load(damaged, 2) != received


def test_weights_that_change_in_the_middle_of_answers(lab) -> None:
    """Each token is the newest weights' over the keys and values that were there, and says so."""
    old, new = lab.tiny("qwen3"), lab.tiny("qwen3", seed=1)
    requests = requests_of(lab, n=3, limit=9)
    before = lab.answers(lab.build_native_engine(old), requests)
    engine = lab.build_native_engine(old)
    tickets = [engine.submit(r) for r in requests]
    done = dict(engine.poll())
    done.update(engine.poll())
    engine.load(weights(new), 5, keep=True)
    while engine.busy:
        done.update(engine.poll())
    for request, ticket, earlier in zip(requests, tickets, before, strict=True):
        answer = done[ticket]
        assert answer.version == [0] * 3 + [5] * 6
        assert answer.tokens[:3] == earlier.tokens[:3]
        cache = DynamicCache(config=old.config)
        with torch.no_grad():
            old(input_ids=torch.tensor([[*request.prompt, *answer.tokens[:2]]]), past_key_values=cache)
            logits = new(input_ids=torch.tensor([answer.tokens[2:-1]]), past_key_values=cache).logits[0]
        logps = logits.log_softmax(-1)
        expected = [float(logps[t, token]) for t, token in enumerate(answer.tokens[3:])]
        assert answer.logp_policy[3:] == pytest.approx(expected, abs=3e-5)
    assert [done[t].tokens for t in tickets] != [a.tokens for a in before]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_samples_that_wait_while_weights_change_use_the_new_ones_for_the_prompt_too(lab, rows: int) -> None:
    old, new = lab.tiny("smollm"), lab.tiny("smollm", seed=1)
    prompt = lab.prompt_of(9, 0)
    requests = [Request(prompt=prompt, sampling=Sampling(max_new_tokens=6), sample=k) for k in range(5)]
    engine = lab.build_native_engine(old, rows=rows)
    prefill, prefilled = engine.runner.prefill, []
    engine.runner.prefill = lambda prompts, *turns: (prefilled.extend(prompts), prefill(prompts))[1]
    tickets = [engine.submit(r) for r in requests]
    done = dict(engine.poll())
    assert prompt in engine.runner.cache.prompts
    engine.load(weights(new), 1, keep=True)
    engine.load(weights(new), 2, keep=True)
    while engine.busy:
        done.update(engine.poll())
    assert prefilled == [prompt, prompt]
    late = [done[t] for t in tickets[rows:]]
    assert all(a.version == [2] * 6 for a in late)
    expected = lab.answers(lab.build_native_engine(new), requests)[rows:]
    assert [a.tokens for a in late] == [a.tokens for a in expected]
    assert engine.runner.cache.prompts == engine._first_logits == {}


def test_a_beginning_that_the_old_weights_computed_is_not_shared_with_new_prompts(lab) -> None:
    old, new = lab.tiny("smollm"), lab.tiny("smollm", seed=1)
    system = lab.prompt_of(12, 0)
    requests = [
        Request(prompt=(*system, k, 5), sampling=Sampling(max_new_tokens=6), sample=k) for k in range(4)
    ]
    engine = lab.build_native_engine(old, rows=1)
    tickets = [engine.submit(r) for r in requests]
    done = dict(engine.poll())
    engine.load(weights(new), 1, keep=True)
    while engine.busy:
        done.update(engine.poll())
    late = [done[t].tokens for t in tickets[1:]]
    assert late == [a.tokens for a in lab.answers(lab.build_native_engine(new), requests[1:])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["smollm", "qwen3", "gemma2"])
def test_a_changed_embedding_changes_the_tied_head_as_well(lab, family: str, dtype: torch.dtype) -> None:
    """A head that shares the embedding keeps a packed copy of its own, which a weight sync must renew."""
    model = copy.deepcopy(lab.tiny(family, dtype))
    engine = lab.build_native_engine(model)
    tokens = list(lab.prompt_of(12, 4))
    before = engine.score(tokens)
    model.get_input_embeddings().weight.data.mul_(0.7)
    engine.load(weights(model), 1)
    logps = lab.full_logits(model, tokens).log_softmax(-1)
    expected = [float(logps[t - 1, tokens[t]]) for t in range(1, len(tokens))]
    tolerance = 0.25 if dtype == torch.bfloat16 else 3e-5
    assert engine.score(tokens) == pytest.approx(expected, abs=tolerance)
    assert max(abs(a - b) for a, b in zip(before, expected, strict=True)) > 0.5


def test_every_single_weight_counts(lab) -> None:
    """Changing any one tensor changes the scores as it does in transformers: none is left behind."""
    for family in ("qwen2", "gemma2"):
        model = copy.deepcopy(lab.tiny(family))
        engine = lab.build_native_engine(model)
        tokens = list(lab.prompt_of(8, 2))
        last = engine.score(tokens)
        for version, (_, parameter) in enumerate(model.named_parameters(), 1):
            parameter.data.mul_(1.3).add_(
                0.05 * torch.randn(parameter.shape, generator=torch.manual_seed(version))
            )
            engine.load(weights(model), version)
            logps = lab.full_logits(model, tokens).log_softmax(-1)
            now = engine.score(tokens)
            assert now == pytest.approx([float(logps[t - 1, tokens[t]]) for t in range(1, 8)], abs=1e-4)
            assert now != last
            last = now


@pytest.mark.parametrize("family", ["smollm", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_do_not_fit_are_named(lab, family: str, dtype: torch.dtype) -> None:
    model = lab.tiny(family, dtype)
    good = dict(weights(model))
    engine = lab.build_native_engine(model)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        short = {n: p for n, p in good.items() if n != name}
        with pytest.raises(KeyError, match=name):
            engine.load(short.items(), 1)
        with pytest.raises(KeyError, match=name):
            engine.load([*good.items(), (name, good[name])], 1)
        # A shape that broadcasting would accept is no less wrong.
        for wrong in (
            good[name][:1],
            good[name].T if good[name].ndim > 1 else good[name][:, None],
            good[name][0],
        ):
            with pytest.raises(ValueError, match=name):
                engine.load({**good, name: wrong}.items(), 1)
    with pytest.raises(KeyError, match=r"model\.layers\.9\.new"):
        engine.load([*good.items(), ("model.layers.9.new", torch.zeros(2))], 1)
    assert engine.version == 0
    engine.load(good.items(), 3)
    assert engine.version == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_packed_linear_layer_equals_the_plain_one(dtype: torch.dtype, bias: bool, compiled: bool) -> None:
    kernels = load(dtype, 64, 1) if compiled else None
    if compiled and kernels is None:
        pytest.skip("NOT RUN: no kernel is compiled here, which wants Linux and g++")
    if not _can_pack(CPU, dtype):
        pytest.skip(f"this machine's oneDNN does not pack {dtype}")
    g = torch.Generator().manual_seed(0)
    for width, out in [(32, 48), (17, 5), (64, 300), (1, 1), (70, 97)]:
        plain = nn.Linear(width, out, bias=bias, dtype=dtype)
        for renewed in range(2):
            for parameter in plain.parameters():
                parameter.data = torch.randn(parameter.shape, generator=g).to(dtype)
            if renewed:
                packed.pack(plain.weight)  # noqa: F821 - made in the round before
            else:
                packed = PackedLinear(plain, 8, kernels)
            for shape in [(1, width), (3, width), (8, width), (33, width), (1, 40, width), (5, 1, width)]:
                x = torch.randn(*shape, generator=g).to(dtype)
                with torch.no_grad():
                    torch.testing.assert_close(packed(x), plain(x))


def test_the_engine_packs_every_linear_layer_where_it_can(lab) -> None:
    if not _can_pack(CPU, torch.float32):
        pytest.skip("this machine's oneDNN does not pack")
    packs = {torch.float32: True, torch.float64: False}
    for dtype, packed in packs.items():
        for family, layers in [("llama", 3 * 7 + 1), ("smollm", 3 * 7 + 1)]:
            kinds = [type(m) for m in lab.build_native_engine(lab.tiny(family, dtype)).runner.model.modules()]
            assert kinds.count(PackedLinear) == (layers if packed else 0)
            assert kinds.count(nn.Linear) == (0 if packed else layers)


def test_scoring_leaves_running_answers_alone_and_uses_the_newest_weights(lab) -> None:
    model = lab.tiny("gemma2")
    requests = requests_of(lab, n=7)
    expected = lab.answers(lab.build_native_engine(model, rows=3), requests)
    engine = lab.build_native_engine(model, rows=3)
    tickets, done = [engine.submit(r) for r in requests], {}
    scored = [list(requests[0].prompt), list(lab.prompt_of(100, 1))]
    first = [lab.build_native_engine(model).score(s) for s in scored]
    while engine.busy:
        assert [engine.score(s) for s in scored] == first
        done.update(engine.poll())
    assert [done[t] for t in tickets] == expected
    other = lab.tiny("gemma2", seed=1)
    engine.load(weights(other), 1)
    assert engine.score(scored[0]) == lab.build_native_engine(other).score(scored[0]) != first[0]


@pytest.mark.parametrize("limits", [(1, 3), (3, 1), (1, 2, 3, 4, 5), (5, 4, 3, 2, 1)])
def test_no_answer_is_lost_that_ends_with_the_canary(lab, limits: tuple[int, ...]) -> None:
    """Weights taken amid answers are proved by a row drawn beside them; any may end in its last step."""
    old, new = lab.tiny("llama"), lab.tiny("llama", seed=1)
    engine = lab.build_native_engine(old, rows=8)
    tickets = [
        engine.submit(
            Request(prompt=lab.prompt_of(5, n), sampling=Sampling(max_new_tokens=limit, temperature=2.0))
        )
        for n, limit in enumerate(limits)
    ]
    row = lab.prompt_of(9, 7)
    logps = tuple(lab.build_native_engine(new).score(list(row)))
    place = LearnerWeights(lambda: weights(new))
    snapshot = Snapshot(version=1, number=1, run="r", place=place, canary=row, logps=logps, tolerance=1e-3)
    ended = [ticket for ticket, _ in load_snapshot(engine, snapshot, keep=True)]
    while engine.busy:
        ended += [ticket for ticket, _ in engine.poll()]
    assert sorted(ended) == tickets
