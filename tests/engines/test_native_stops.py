"""When an answer ends, what it then holds, how turns continue, and which requests are refused."""

import dataclasses

import pytest

from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.types import Completion, Request, Sampling


@pytest.fixture(scope="module")
def free(lab) -> tuple[Request, Completion]:
    """A request without stops, and its answer of 20 tokens."""
    request = Request(
        prompt=lab.prompt_of(6, 1), sampling=Sampling(max_new_tokens=20, temperature=1.5), seed=2
    )
    [answer] = lab.answers(lab.build_native_engine(lab.tiny("qwen3")), [request])
    assert len(answer.tokens) == 20
    assert answer.stop == "length"
    return request, answer


def with_stop(request: Request, *stop: str) -> Request:
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop=stop))


def first_new(tokens: list[int], start: int) -> int:
    """The first place from `start` on of a token that was not drawn before."""
    return next(n for n in range(start, len(tokens)) if tokens[n] not in tokens[:n])


def test_a_stop_token_ends_the_answer_and_stays_in_it(lab, free) -> None:
    request, answer = free
    n = first_new(answer.tokens, 7)
    [got] = lab.answers(
        lab.build_native_engine(lab.tiny("qwen3"), stop_tokens=[299, answer.tokens[n]]), [request]
    )
    assert got.tokens == answer.tokens[: n + 1]
    assert (got.stop, got.text) == ("eos", lab.spell(answer.tokens[:n]))
    assert got.logp_gen == pytest.approx(answer.logp_gen[: n + 1], abs=1e-5)
    assert len(got.logp_policy) == len(got.version) == n + 1


def test_a_stop_token_may_be_the_first(lab, free) -> None:
    request, answer = free
    [got] = lab.answers(lab.build_native_engine(lab.tiny("qwen3"), stop_tokens=answer.tokens[:1]), [request])
    assert (got.tokens, got.stop, got.text) == (answer.tokens[:1], "eos", "")


def test_a_stop_string_over_several_tokens_cuts_the_text_and_keeps_the_tokens(lab, free) -> None:
    request, answer = free
    n = first_new(answer.tokens, 5)
    # From the middle of one token's text, over the next, to the middle of the third.
    spelled = [lab.spell([t]) for t in answer.tokens]
    stop = spelled[n - 1][1:] + spelled[n] + spelled[n + 1][:2]
    [got] = lab.answers(lab.build_native_engine(lab.tiny("qwen3")), [with_stop(request, "never said", stop)])
    assert got.stop == "stop"
    assert got.tokens == answer.tokens[: n + 2]
    assert got.text == "".join(spelled[: n + 1]) + spelled[n + 1][:2]
    assert got.text.endswith(stop)


def test_of_several_stop_strings_the_one_that_ends_first_counts(lab, free) -> None:
    request, answer = free
    n = first_new(answer.tokens, 4)
    piece = lab.spell([answer.tokens[n]])
    [got] = lab.answers(
        lab.build_native_engine(lab.tiny("qwen3")), [with_stop(request, piece, piece[:-1], "zzz")]
    )
    assert got.tokens == answer.tokens[: n + 1]
    assert got.text == lab.spell(answer.tokens[:n]) + piece[:-1]


def test_each_request_of_a_batch_has_its_own_limits_and_stops(lab, free) -> None:
    request, answer = free
    n = first_new(answer.tokens, 8)
    wishes = [
        dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_new_tokens=m))
        for m in (1, 4, 20)
    ]
    wishes.append(with_stop(request, lab.spell([answer.tokens[n]])))
    got = lab.answers(lab.build_native_engine(lab.tiny("qwen3"), rows=3), wishes)
    assert [a.stop for a in got] == ["length", "length", "length", "stop"]
    for one, m in zip(got, (1, 4, 20, n + 1), strict=True):
        assert one.tokens == answer.tokens[:m]
        assert one.text == lab.spell(answer.tokens[:m])


def test_a_stop_token_beats_the_limit_in_the_same_place(lab, free) -> None:
    request, answer = free
    n = first_new(answer.tokens, 7)
    short = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, max_new_tokens=n + 1))
    [got] = lab.answers(lab.build_native_engine(lab.tiny("qwen3"), stop_tokens=[answer.tokens[n]]), [short])
    assert (len(got.tokens), got.stop) == (n + 1, "eos")


def test_a_second_turn_goes_on_in_the_stream_of_draws(lab, free) -> None:
    request, answer = free
    engine, model = lab.build_native_engine(lab.tiny("qwen3")), lab.tiny("qwen3")
    # Cut after 8 tokens and continued at position 8, the answer is what it would have been.
    on = dataclasses.replace(
        request,
        prompt=(*request.prompt, *answer.tokens[:8]),
        position=8,
        sampling=dataclasses.replace(request.sampling, max_new_tokens=12),
    )
    assert lab.answers(engine, [on])[0].tokens == answer.tokens[8:]
    # Asked again with the same words, later positions are other numbers than the first ones.
    later, first = (dataclasses.replace(on, position=p) for p in (8, 0))
    got = lab.answers(engine, [later, first])
    assert got[0].tokens != got[1].tokens
    assert [a.tokens for a in got] == [lab.slow_answer(model, r) for r in (later, first)]


def test_requests_that_can_never_be_served_are_refused_and_leave_no_trace(lab) -> None:
    engine = lab.build_native_engine(lab.tiny("llama"), context=30, rows=2, cache_tokens=25)
    roomy = lab.build_native_engine(lab.tiny("llama"), context=30)
    sampling = Sampling(max_new_tokens=10)
    for asked, prompt, words in [
        (engine, (), "empty prompt"),
        (engine, tuple(range(16)), "16 tokens and up to 10 new ones exceed the 25"),
        (roomy, tuple(range(21)), "21 tokens and up to 10 new ones exceed the 30"),
        (engine, (1, 300), "outside the vocabulary of 300"),
        (engine, (-1, 3), "outside the vocabulary of 300"),
    ]:
        with pytest.raises(ValueError, match=words):
            asked.submit(Request(prompt=prompt, sampling=sampling))
        assert not asked.busy
        assert not asked._waiting_samples
    for asked, length in [(engine, 15), (roomy, 20)]:
        [got] = lab.answers(asked, [Request(prompt=tuple(range(length)), sampling=sampling)])
        assert len(got.tokens) == 10


def test_a_machine_without_rows_or_cache_is_refused() -> None:
    for wrong in ({"rows": 0}, {"cache_tokens": 0}):
        with pytest.raises(ValueError, match="1 or more"):
            NativeConfig(**wrong)


def test_a_refused_request_does_not_disturb_the_others(lab) -> None:
    engine: NativeEngine = lab.build_native_engine(lab.tiny("llama"), context=40)
    request = Request(prompt=(1, 2, 3), sampling=Sampling(max_new_tokens=6))
    [expected] = lab.answers(lab.build_native_engine(lab.tiny("llama")), [request])
    ticket = engine.submit(request)
    done = dict(engine.poll())
    with pytest.raises(ValueError):
        engine.submit(Request(prompt=(), sampling=request.sampling))
    while engine.busy:
        done.update(engine.poll())
    assert done[ticket] == expected
