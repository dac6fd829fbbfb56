"""Decoding in recorded steps of fixed shape.

A CUDA graph cannot be made without a GPU. What stands between it and an answer can be tested anywhere: the
padding to a few shapes, the inputs at one place, what ends a recording, and that a step never waits for the
device, which is what a recording refuses.
"""

import copy
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from posttrain.engines.native.cache import Cache, TokenLayout
from posttrain.engines.native.cuda_graphs import CapturedStep, CudaGraphs, Replay, _stream
from posttrain.engines.native.draw import CapturedDraws
from posttrain.engines.native.engine import NativeEngine
from posttrain.types import Request, Sampling


class Recorder:
    """Replays a step by running it again on the same inputs, as a graph would; counts what it recorded."""

    def __init__(self) -> None:
        self.recorded = 0

    def __call__(self, step: Replay) -> Replay:
        self.recorded += 1
        step()  # a recording runs its step before the first replay: that must leave no trace
        return step


def record(engine: NativeEngine, record: Callable) -> CapturedStep:
    """Makes this engine decode in recorded steps."""
    runner = engine.runner
    runner._recorded = CapturedStep(runner._step, runner.cache, runner.device, lambda: record)
    return runner._recorded


def traffic(lab, seed: int, n: int = 30, longest: int = 40) -> list[Request]:
    """Requests of many lengths, several samples of a prompt among them."""
    draw = random.Random(seed)
    print("seed", seed)
    return [
        Request(
            prompt=lab.prompt_of(draw.choice([1, 2, 7, 30, longest]), i // 3),
            sampling=Sampling(max_new_tokens=draw.randint(1, 12), temperature=draw.choice([0.0, 0.7, 1.0])),
            sample=i,
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("family", ["smollm", "gemma2", "qwen3"])
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.sample("1-smollm", "5-gemma2", "16-qwen3")
def test_recorded_steps_draw_the_same_answers(lab, family: str, rows: int) -> None:
    model = lab.tiny(family, torch.float64)
    requests = traffic(lab, rows)
    plain, recorded = lab.build_native_engine(model, rows=rows), lab.build_native_engine(model, rows=rows)
    record(recorded, Recorder())
    for want, got in zip(lab.answers(plain, requests), lab.answers(recorded, requests), strict=True):
        assert got.tokens == want.tokens
        torch.testing.assert_close(got.logp_gen, want.logp_gen)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "min_p": 0.01}], ids=["plain", "mixed"])
def test_recorded_draws_give_the_same_answers_bit_for_bit(lab, filters: dict) -> None:
    model, requests = lab.tiny("smollm"), traffic(lab, 6)
    for n in range(0, len(requests), 5):
        requests[n] = replace(requests[n], sampling=replace(requests[n].sampling, **filters))
    plain, recorded = (
        lab.build_native_engine(model, rows=16, decode_kernel=False, cuda_graphs=False) for _ in range(2)
    )
    recorder = Recorder()
    recorded.runner.draws = CapturedDraws(16, torch.device("cpu"), recorder)
    for want, got in zip(lab.answers(plain, requests), lab.answers(recorded, requests), strict=True):
        assert (got.tokens, got.logp_gen, got.logp_policy) == (want.tokens, want.logp_gen, want.logp_policy)
    assert 4 <= recorder.recorded <= 10  # up to 16 draws, with greedy ones and without


def test_few_shapes_are_recorded_and_each_once(lab) -> None:
    engine, recorder = lab.build_native_engine(lab.tiny("smollm"), rows=16), Recorder()
    record(engine, recorder)
    engine.runner.cache.reserve(16, 200)
    lab.answers(engine, traffic(lab, 0, n=120))
    assert recorder.recorded <= 5  # 1, 2, 4, 8 and 16 rows


def test_long_answers_meet_few_shapes_that_are_hardly_longer(lab) -> None:
    engine = lab.build_native_engine(lab.tiny("smollm"), rows=2, cache_tokens=1 << 17)
    recorded = record(engine, Recorder())
    engine.runner.cache.reserve(2, 33_000)
    wide = {n: recorded._shape(2, n)[1] for n in range(1, 33_001)}
    assert len(set(wide.values())) <= 45
    assert all(n <= columns <= max(n * 9 / 8, n + 255) for n, columns in wide.items())


def test_recordings_of_all_shapes_leave_their_logits_in_one_place(lab) -> None:
    """Each with logits of its own, those of 64 rows and 33k columns would hold gigabytes."""
    engine, recorder = lab.build_native_engine(lab.tiny("smollm"), rows=16), Recorder()
    recorded, places = record(engine, recorder), set()
    engine.runner.cache.reserve(16, 200)
    decode = engine.runner.decode

    def spied(tokens: list[int], lengths: list[int]) -> torch.Tensor:
        logits = decode(tokens, lengths)
        places.add((logits.data_ptr(), logits.untyped_storage().nbytes()))
        return logits

    engine.runner.decode = spied
    lab.answers(engine, traffic(lab, 0, n=60))
    assert recorder.recorded > 3
    assert places == {(recorded.logits.data_ptr(), 16 * engine.runner.vocabulary * 4)}


def test_a_recording_ends_when_the_cache_moves(lab) -> None:
    """A graph would go on to read the memory that the rows have left."""
    model = lab.tiny("smollm", torch.float64)
    engine, recorder = lab.build_native_engine(model, rows=4), Recorder()
    recorded = record(engine, recorder)
    short = [Request(prompt=lab.prompt_of(5, 0), sampling=Sampling(max_new_tokens=4))]
    lab.answers(engine, short)
    [before] = recorded.recordings.replays.values()
    engine.runner.cache.reserve(4, 500)
    lab.answers(engine, short)
    assert recorder.recorded == 2
    assert before not in recorded.recordings.replays.values()


def test_recordings_are_kept_while_rows_are_divided_anew(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a cache too small for all answers at their longest: the second time nothing is recorded."""
    monkeypatch.setattr("posttrain.engines.native.scheduler.UNIT", 8)
    model = lab.tiny("smollm", torch.float64)
    requests = [
        Request(prompt=lab.prompt_of(5, i), sampling=Sampling(max_new_tokens=40 + i), sample=i)
        for i in range(10)
    ]
    plain = lab.build_native_engine(model, rows=8, cache_tokens=200)
    engine = lab.build_native_engine(model, rows=8, cache_tokens=200)
    recorder, counts = Recorder(), []
    record(engine, recorder)
    for _ in range(2):
        got, want = (lab.answers(each, requests) for each in (engine, plain))
        assert [a.tokens for a in got] == [a.tokens for a in want]
        counts.append(recorder.recorded)
    assert engine.withdrawals > 0
    assert engine.runner.cache.reallocations == 1
    assert counts[0] == counts[1]


def test_rows_that_nobody_uses_do_not_reach_the_others(lab) -> None:
    """Three rows run as four: the fourth row's old keys, even broken ones, must change nothing."""
    engine = lab.build_native_engine(lab.tiny("smollm", torch.float64), rows=4)
    record(engine, Recorder())
    requests = [
        Request(prompt=lab.prompt_of(9, i), sampling=Sampling(max_new_tokens=6, temperature=0.0))
        for i in range(3)
    ]
    want = lab.answers(engine, requests)
    for store in (engine.runner.cache.keys, engine.runner.cache.values):
        for tensor in store.values():
            tensor[3] = torch.nan
    assert [a.tokens for a in lab.answers(engine, requests)] == [a.tokens for a in want]


@pytest.mark.parametrize("family", ["smollm", "llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral"])
def test_a_step_never_waits_for_the_device(lab, family: str) -> None:
    """With tensors that have a shape and no numbers, a step that reads a number back cannot run."""
    engine = lab.build_native_engine(lab.tiny(family, torch.float64), rows=4)
    lab.answers(engine, [Request(prompt=lab.prompt_of(9, 0), sampling=Sampling(max_new_tokens=2))])
    runner = engine.runner
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, lengths = torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long)
        with torch.no_grad():
            assert runner._step(tokens, lengths, 16).shape == (4, runner.vocabulary)
        with pytest.raises(DataDependentOutputException):
            TokenLayout(Cache(4, 64), lengths, int(lengths.max()) + 1)


def test_a_model_that_cannot_be_recorded_is_decoded_all_the_same(lab) -> None:
    def refuse(step: Replay) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    model = lab.tiny("smollm", torch.float64)
    engine = lab.build_native_engine(model, rows=4)
    record(engine, refuse)
    requests = traffic(lab, 3, n=9)
    with pytest.warns(UserWarning, match="not recorded from here on.*capturing") as said:
        got = lab.answers(engine, requests)
    assert len(said) == 1
    assert [a.tokens for a in got] == [
        a.tokens for a in lab.answers(lab.build_native_engine(model), requests)
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_graphs_draw_the_same_answers_on_a_real_gpu(lab) -> None:
    model = copy.deepcopy(lab.tiny("smollm")).to("cuda")
    requests = traffic(lab, 4)
    engine = lab.build_native_engine(model, rows=8)
    assert isinstance(engine.runner._recorded.recordings.record, CudaGraphs)
    plain = lab.build_native_engine(model, rows=8, cuda_graphs=False)
    assert [a.tokens for a in lab.answers(engine, requests)] == [
        a.tokens for a in lab.answers(plain, requests)
    ]


def test_recordings_are_made_one_at_a_time_and_each_on_the_stream_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On torch's own stream, which is of the first GPU, a step of the second is silently not recorded."""
    asked, recording = [], 0

    @contextmanager
    def graph(_: object, pool: object, stream: object, **how: object) -> Iterator[None]:
        nonlocal recording
        asked.append(how | {"stream": stream})
        recording += 1
        assert recording == 1
        yield
        recording -= 1

    streams = {n: SimpleNamespace(wait_stream=lambda other: None) for n in range(2)}
    for name, made in {
        "graph": graph,
        "device": lambda _: nullcontext(),
        "stream": lambda _: nullcontext(),
        "current_stream": lambda: streams[0],
        "Stream": lambda device: streams[device.index],
        "CUDAGraph": SimpleNamespace,
        "graph_pool_handle": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, made)
    _stream.cache_clear()
    ran: list[int] = []

    def step() -> None:
        ran.append(1)
        time.sleep(0.01)

    graphs = [CudaGraphs(torch.device("cuda", n)) for n in range(2)]
    with ThreadPoolExecutor() as pool:
        [each.result() for each in [pool.submit(each, step) for each in graphs]]
    assert len(ran) == 4
    assert {id(how["stream"]) for how in asked} == {id(each) for each in streams.values()}
    # CUDA's default forbids other threads to ask for memory meanwhile, as the learner's would.
    assert [how["capture_error_mode"] for how in asked] == ["thread_local"] * 2
    _stream.cache_clear()


def test_what_was_recorded_is_given_up_where_no_more_can_be(lab) -> None:
    """It would never be replayed, and what is refused for may be memory."""
    engine, made = lab.build_native_engine(lab.tiny("smollm"), rows=8), []

    def full(step: Replay) -> Replay:
        if made:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(step)
        return step

    recorded = record(engine, full)
    with pytest.warns(UserWarning, match="out of memory"):
        lab.answers(engine, traffic(lab, 5, n=9))
    assert made
    assert not recorded.recordings.replays
