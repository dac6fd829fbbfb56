"""Continuous batching: who runs when, what is computed once, and that no answer depends on its company."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.engines.native.cache import Cache
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.native.scheduler import Scheduler
from posttrain.engines.sequence import Sequence
from posttrain.types import Completion, Request, Sampling


class Spy:
    """What an engine's runner was asked to do, while it does it."""

    def __init__(self, engine: NativeEngine) -> None:
        self.decoded: list[tuple[int, int]] = []
        """Rows of each decoding pass, and requests waiting meanwhile."""
        self.prefilled: Counter[tuple[int, ...]] = Counter()
        self.widest = 0
        """Largest rows × columns of the tensors that hold keys and values."""
        runner = engine.runner
        decode, prefill = runner.decode, runner.prefill

        def spied_decode(tokens: list[int], lengths: list[int]) -> torch.Tensor:
            self.decoded.append((len(tokens), len(engine.scheduler.waiting)))
            self.widest = max(self.widest, *(k.shape[0] * k.shape[2] for k in runner.cache.keys.values()))
            return decode(tokens, lengths)

        def spied_prefill(prompts: list[tuple[int, ...]], *turns: object) -> torch.Tensor:
            self.prefilled.update(prompts)
            return prefill(prompts, *turns)

        runner.decode, runner.prefill = spied_decode, spied_prefill


def mixed_requests(lab, n: int = 24) -> list[Request]:
    """Ragged prompts, groups that share one, and every kind of sampling and limit."""
    kinds = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 7},
        {"min_p": 0.05, "temperature": 1.2},
    ]
    return [
        Request(
            prompt=lab.prompt_of([3, 19, 3, 40, 7][i // 3 % 5], i // 6),
            sampling=Sampling(max_new_tokens=1 + (7 * i) % 11, **kinds[i % 5]),
            seed=3,
            task=f"task {i // 3}",
            sample=i % 3,
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", ["smollm", "gemma2"])
@pytest.mark.sample("smollm-dtype0", "gemma2-dtype1")
def test_an_answer_does_not_depend_on_its_company(lab, family: str, dtype: torch.dtype) -> None:
    model = lab.tiny(family, dtype)
    requests = mixed_requests(lab)
    single = lab.build_native_engine(model, rows=1)
    alone = [lab.answers(single, [r])[0] for r in requests]
    tolerance = 2e-5
    for rows, order in [(1, 0), (2, 1), (5, 2), (64, 3)]:
        shuffled = list(range(len(requests)))
        random.Random(order).shuffle(shuffled)
        engine = lab.build_native_engine(model, rows=rows)
        got = lab.answers(engine, [requests[i] for i in shuffled])
        for i, answer in zip(shuffled, got, strict=True):
            assert answer.tokens == alone[i].tokens
            assert answer.stop == alone[i].stop
            assert answer.logp_gen == pytest.approx(alone[i].logp_gen, abs=tolerance)
            assert answer.logp_policy == pytest.approx(alone[i].logp_policy, abs=tolerance)


def test_samples_seeds_and_tasks_give_different_answers_and_the_same_request_the_same(lab) -> None:
    prompt = lab.prompt_of(6, 0)
    sampling = Sampling(max_new_tokens=12, temperature=1.5)
    requests = [
        Request(prompt=prompt, sampling=sampling, seed=seed, task=task, sample=sample)
        for seed in (0, 1)
        for task in ("a", "b")
        for sample in (0, 1)
    ]
    engine = lab.build_native_engine(lab.tiny("llama"), rows=4)
    once, again = lab.answers(engine, requests), lab.answers(engine, requests[::-1])[::-1]
    assert [a.tokens for a in once] == [a.tokens for a in again]
    assert len({tuple(a.tokens) for a in once}) == len(requests)


@pytest.mark.parametrize("rows", [1, 3, 8, 64])
def test_no_row_is_decoded_in_vain_and_none_stays_empty(lab, rows: int) -> None:
    engine = lab.build_native_engine(lab.tiny("llama"), rows=rows)
    spy = Spy(engine)
    requests = [
        Request(prompt=lab.prompt_of(1 + i % 9, i), sampling=Sampling(max_new_tokens=2 + i % 7), sample=i)
        for i in range(20)
    ]
    got = lab.answers(engine, requests)
    assert [len(a.tokens) for a in got] == [2 + i % 7 for i in range(20)]
    assert sum(n for n, _ in spy.decoded) == sum(len(a.tokens) - 1 for a in got)
    assert all(n == rows for n, waiting in spy.decoded if waiting)
    if rows >= 20:
        assert len(spy.decoded) == 7


def test_answers_come_out_in_the_step_that_ends_them(lab) -> None:
    engine = lab.build_native_engine(lab.tiny("llama"), rows=4)
    tickets = [
        engine.submit(Request(prompt=(1, 2), sampling=Sampling(max_new_tokens=n), sample=n))
        for n in (1, 2, 5, 3)
    ]
    # The first step draws two tokens: one from the prompt's logits, one from the pass that follows.
    steps = [[t for t, _ in engine.poll()] for _ in range(4)]
    assert steps == [tickets[:2], [tickets[3]], [], [tickets[2]]]
    assert not engine.busy
    assert engine.poll() == []


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_group_runs_its_prompt_once_even_if_it_does_not_fit_the_rows(lab, rows: int) -> None:
    engine = lab.build_native_engine(lab.tiny("gemma3"), rows=rows)
    spy = Spy(engine)
    prompts = [lab.prompt_of(5, 0), lab.prompt_of(11, 1), lab.prompt_of(2, 2)]
    requests = [
        Request(prompt=p, sampling=Sampling(max_new_tokens=3 + k % 4), task=str(p), sample=k)
        for p in prompts
        for k in range(7)
    ]
    lab.answers(engine, requests)
    assert spy.prefilled == Counter(dict.fromkeys(prompts, 1))
    assert_nothing_is_kept(engine)


@pytest.mark.parametrize("rows", [5, 64])
@pytest.mark.parametrize("family", ["smollm", "gemma3", "mistral"])
@pytest.mark.sample("smollm-64", "gemma3-5")
def test_samples_run_once_as_far_as_they_have_drawn_alike(lab, family: str, rows: int) -> None:
    """They part at low temperatures late, end at other times, and rows that all have left are filled."""
    model = lab.tiny(family, torch.float64)
    requests = [
        Request(
            prompt=lab.prompt_of(4 + 3 * (i // 8), i // 8),
            sampling=Sampling(max_new_tokens=4 + i % 8, temperature=0.02 + 0.04 * (i // 8)),
            sample=i,
        )
        for i in range(24)
    ]
    engine = lab.build_native_engine(model, rows=rows)
    spy = Spy(engine)
    got = lab.answers(engine, requests)
    for request, answer in zip(requests, got, strict=True):
        assert answer.tokens == lab.slow_answer(model, request, answer.tokens)
        lab.assert_logps(model, request, answer, 1e-4)  # logits are float32, over 0.02
    texts = [
        (r.prompt, *a.tokens[:n]) for r, a in zip(requests, got, strict=True) for n in range(1, len(a.tokens))
    ]
    computed = sum(n for n, _ in spy.decoded)
    assert len(set(texts)) <= computed < len(texts)
    if rows == 64:
        assert computed == len(set(texts)), "no text is computed twice where all run side by side"
    assert_nothing_is_kept(engine)


def test_greedy_samples_cost_what_one_costs(lab) -> None:
    engine = lab.build_native_engine(lab.tiny("llama"), rows=8)
    spy, greedy = Spy(engine), Sampling(max_new_tokens=6, temperature=0.0)
    got = lab.answers(engine, [Request(prompt=(5, 6, 7), sampling=greedy, sample=i) for i in range(20)])
    assert all(a == got[0] for a in got)
    assert [n for n, _ in spy.decoded] == [1] * 15, "five steps for each eight"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_rows_hold_the_texts_of_their_sequences_however_these_part(data: st.DataObject) -> None:
    """A cache of texts in the place of tensors; copies are made all at once, as a gather and a scatter."""
    scheduler, held = Scheduler(12, 1000), {}
    numbers = st.integers(0, 2)
    for ticket in range(data.draw(st.integers(1, 30))):
        prompt = (data.draw(numbers),)
        request = Request(prompt=prompt, sampling=Sampling(max_new_tokens=9))
        scheduler.waiting.append(Sequence(ticket, request))
    while scheduler.running or scheduler.waiting:
        starts = data.draw(st.booleans()) or not scheduler.running
        first = len(scheduler.running) if starts else 0
        if starts:
            started = scheduler.admit()
            held |= {first + n: row[0].prompt for n, row in enumerate(started)}
        else:  # the newest tokens run
            held = {n: (*row[0].prompt, *row[0].tokens) for n, row in enumerate(scheduler.running)}
        before = scheduler.sequences
        ended = set()
        for sequence in (s for row in scheduler.running[first:] for s in row):
            sequence.append(data.draw(numbers), 0.0, 0.0, 0)
            if data.draw(st.integers(0, 3)) == 0:
                ended.add(sequence.ticket)
        copies = scheduler.split_rows(first, ended)
        assert not {a for a, _ in copies} & {b for _, b in copies}
        held |= {target: held[source] for source, target in copies}
        assert sorted(s.ticket for s in scheduler.sequences) == sorted(
            s.ticket for s in before if s.ticket not in ended
        )
        assert len(scheduler.running) <= len(before) <= 12
        for n, row in enumerate(scheduler.running):
            assert {(*s.prompt, *s.tokens[:-1]) for s in row} == {held[n]}
            assert len({s.tokens[-1] for s in row}) == 1
        assert all(first <= target for _, target in copies)


def assert_nothing_is_kept(engine: NativeEngine) -> None:
    assert not engine.busy
    assert engine.runner.cache.prompts == {}
    assert engine.runner.cache.latest == ((), {})
    assert engine.runner.cache.turns == {}
    assert engine._first_logits == {}
    assert not engine._waiting_samples


def test_many_prompts_run_in_passes_of_bounded_size(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.engines.native.runner.PASS", 20)
    model = lab.tiny("qwen3")
    requests = [
        Request(prompt=lab.prompt_of(n, 0), sampling=Sampling(max_new_tokens=4))
        for n in (9, 11, 1, 30, 20, 5, 5, 5, 5)
    ]
    engine = lab.build_native_engine(model, rows=64)
    read, seen = engine.runner._read, []
    engine.runner._read = lambda at, *of: (seen.append([len(p) for p in at.parts]), read(at, *of))[1]
    got = lab.answers(engine, requests)
    assert seen == [[9, 11], [1], [30], [20], [5]]  # the last four prompts are one and the same
    assert [a.tokens for a in got] == [lab.slow_answer(model, r) for r in requests]


def greeted(lab, system: int, rests: list[int], limit: int = 6) -> list[Request]:
    """One request for each rest, whose prompts all begin with the same `system` tokens."""
    return [
        Request(
            prompt=lab.prompt_of(system, 99) + lab.prompt_of(n, i),
            sampling=Sampling(max_new_tokens=limit + i % 3),
            task=str(i),
        )
        for i, n in enumerate(rests)
    ]


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("family", ["smollm", "qwen2", "gemma2", "gemma3", "mistral"])
@pytest.mark.sample(every=3)
def test_a_common_beginning_runs_once_and_answers_are_as_alone(lab, family: str, rows: int) -> None:
    """Also where it is longer than a layer's window, and where prompts come one after the other."""
    model = lab.tiny(family, torch.float64)
    requests = greeted(lab, 12, [4, 1, 9, 2, 2, 7, 1, 3])
    engine = lab.build_native_engine(model, rows=rows)
    fed = fed_to(engine)
    got = lab.answers(engine, requests)
    assert sum(fed) == 12 + sum(len(r.prompt) - 12 for r in requests)
    for request, answer in zip(requests, got, strict=True):
        assert answer.tokens == lab.slow_answer(model, request, answer.tokens)
        lab.assert_logps(model, request, answer, 1e-5)  # draws are made in float32
    assert_nothing_is_kept(engine)


def conversations(
    lab, engine: NativeEngine, count: int, turns: int, between=lambda turn: None
) -> list[tuple]:
    """(request, answer) of each turn; a prompt is all that came before it and three tokens more."""
    prompts, out = [lab.prompt_of(8 + i, i) for i in range(count)], []
    for turn in range(turns):
        requests = [
            Request(
                prompt=prompt,
                sampling=Sampling(max_new_tokens=3 + (turn + i) % 3),
                task=str(i),
                position=sum(len(a.tokens) for r, a in out if r.task == str(i)),
                episode=f"game {i}",
            )
            for i, prompt in enumerate(prompts)
        ]
        got = lab.answers(engine, requests)
        out += zip(requests, got, strict=True)
        prompts = [
            (*r.prompt, *a.tokens, *lab.prompt_of(3, 10 * turn + i))
            for i, (r, a) in enumerate(zip(requests, got, strict=True))
        ]
        between(turn)
    return out


def fed_to(engine: NativeEngine) -> list[int]:
    """Lengths of what the engine's passes over prompts run, as they are run."""
    read, fed = engine.runner._read, []
    engine.runner._read = lambda at, *of: (fed.extend(map(len, at.parts)), read(at, *of))[1]
    return fed


@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize("family", ["smollm", "gemma2", "gemma3", "mistral"])
@pytest.mark.sample("smollm-2", "gemma2-64", "gemma3-2", "mistral-64")
def test_a_later_turn_runs_only_what_is_new(lab, family: str, rows: int) -> None:
    """Also where a layer's window is shorter than a turn."""
    model = lab.tiny(family, torch.float64)
    engine = lab.build_native_engine(model, rows=rows)
    fed = fed_to(engine)
    played = conversations(lab, engine, count=3, turns=3)
    # A turn's last token has not run when it ends: it does with the three that follow.
    assert sum(fed) == sum(8 + i for i in range(3)) + 3 * 2 * (1 + 3)
    for request, answer in played:
        assert answer.tokens == lab.slow_answer(model, request, answer.tokens)
        lab.assert_logps(model, request, answer, 1e-5)
    for i in range(5):
        engine.release(f"game {i}")
        engine.release(f"game {i}")
    assert_nothing_is_kept(engine)


def test_what_is_kept_for_later_turns_is_bounded_and_never_of_other_weights_or_words(lab) -> None:
    model = lab.tiny("smollm", torch.float64)
    small = lab.build_native_engine(model, rows=2, cache_tokens=60)
    held = []
    played = conversations(
        lab,
        small,
        5,
        3,
        lambda turn: held.append(sum(len(tokens) for tokens, _ in small.runner.cache.turns.values())),
    )
    assert max(held) <= 60
    assert [a.tokens for _, a in played] == [lab.slow_answer(model, r, a.tokens) for r, a in played]

    weights = [(name, p.clone()) for name, p in model.named_parameters()]
    engine = lab.build_native_engine(model, rows=2)
    fed = fed_to(engine)
    played = conversations(lab, engine, 2, 2, lambda turn: engine.load(weights, turn + 1))
    assert sum(fed) == sum(len(r.prompt) for r, _ in played), "new weights: all of it runs again"

    [first] = lab.answers(
        engine, [Request(prompt=(5, 6, 7), sampling=Sampling(max_new_tokens=3), episode="a")]
    )
    other = Request(prompt=(5, 6, 8, 9, 1, 2), sampling=Sampling(max_new_tokens=3), episode="a")
    fed.clear()
    assert [a.tokens for a in lab.answers(engine, [other])] == [lab.slow_answer(model, other)]
    assert fed == [6], "a prompt that does not go on where the episode was runs whole"
    one = Request(prompt=(5, 6), sampling=Sampling(max_new_tokens=1), episode="b")
    assert lab.answers(engine, [one])[0].tokens == lab.answers(engine, [one])[0].tokens
    assert len(first.tokens) == 3


def test_another_beginning_takes_the_place_of_the_last(lab) -> None:
    model = lab.tiny("smollm", torch.float64)
    first, second = greeted(lab, 12, [4, 2, 3]), greeted(lab, 15, [2, 5, 1])
    engine = lab.build_native_engine(model, rows=2)
    got = lab.answers(engine, [*first, *second, *first])
    assert [a.tokens for a in got] == [lab.slow_answer(model, r) for r in [*first, *second, *first]]


def test_a_short_beginning_is_not_set_apart(lab) -> None:
    """A first token that all prompts have must not put long prompts under a mask."""
    engine = lab.build_native_engine(lab.tiny("smollm"), rows=8)
    fed = fed_to(engine)
    lab.answers(engine, greeted(lab, 1, [30, 30, 30]))
    assert fed == [31, 31, 31]


def test_the_same_requests_give_the_same_bits_whatever_was_asked_before(lab) -> None:
    """Bits of a prompt depend on how it was split: a beginning kept from earlier answers would show."""
    model = lab.tiny("smollm")
    requests = greeted(lab, 12, [4, 1, 9, 2])
    used = lab.build_native_engine(model, rows=2)
    lab.answers(used, greeted(lab, 12, [3, 5]))
    fresh = lab.answers(lab.build_native_engine(model, rows=2), requests)
    assert [a.logp_gen for a in lab.answers(used, requests)] == [a.logp_gen for a in fresh]


def test_cache_memory_stays_within_its_bound(lab) -> None:
    """One long request among many short ones must not make every row as long as its own."""
    model = lab.tiny("llama", torch.float64)
    bound = 400
    lengths = [5, 9, 4, 6, 3, 8, 2, 4, 300, 7, 150, 150, 2, 5, 300, 3]
    requests = [
        Request(prompt=lab.prompt_of(n, i), sampling=Sampling(max_new_tokens=3 + 5 * i % 17), sample=i)
        for i, n in enumerate(lengths)
    ]
    engine = lab.build_native_engine(model, rows=8, cache_tokens=bound)
    spy = Spy(engine)
    got = lab.answers(engine, requests)
    assert spy.widest <= bound
    assert max(n for n, _ in spy.decoded) == 8
    single = lab.build_native_engine(model, rows=1)
    for request, answer in zip(requests, got, strict=True):
        [alone] = lab.answers(single, [request])
        assert answer.tokens == alone.tokens


def test_rows_and_columns_never_exceed_the_bound(lab) -> None:
    engine = lab.build_native_engine(lab.tiny("llama"), rows=16, cache_tokens=64)
    rng = random.Random(0)
    for i in range(25):
        sampling = Sampling(max_new_tokens=rng.randint(1, 20))
        engine.submit(Request(prompt=lab.prompt_of(rng.randint(1, 40), i), sampling=sampling, sample=i))
    while engine.busy:
        engine.poll()
        running, cache = engine.scheduler.sequences, engine.runner.cache
        assert len(running) <= cache.rows
        assert max((s.length for s in running), default=0) <= cache.columns
        assert cache.rows * cache.columns <= 64
    assert_nothing_is_kept(engine)


def long_requests(lab, n: int) -> list[Request]:
    """Groups of four short answers, and some that may become long; forced, asked again, in turns."""
    kinds = [{}, {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}]
    limits = [Sampling(max_new_tokens=30 + 170 * (i % 9 == 0), **kinds[i // 4 % 3]) for i in range(n)]
    requests = [
        Request(
            prompt=lab.prompt_of(3 + i // 4 % 11, i // 4), sampling=limits[i], task=str(i // 4), sample=i % 4
        )
        for i in range(n)
    ]
    excluded = (((4, 5), (-2.0, -1.0)), ((7,), (-1.5,)))
    more = (
        *({"alternatives": 2}, {"forced": tuple(range(1, 31))}, {"episode": "a"}, {"again": True}),
        {"excluded": excluded},
    )
    return [replace(request, **more[i % 16]) if i % 16 < 5 else request for i, request in enumerate(requests)]


def test_a_small_cache_gives_the_answers_of_a_large_one(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of what all rows may need: answers are withdrawn and go on later, token for token."""
    monkeypatch.setattr("posttrain.engines.native.scheduler.UNIT", 8)
    model, requests = lab.tiny("llama", torch.float64), long_requests(lab, 60)
    longest = max(len(r.prompt) + r.sampling.max_new_tokens for r in requests)
    rows, ends = 24, range(0, 300, 150)
    bound = rows * longest // 10
    small = lab.build_native_engine(model, rows=rows, cache_tokens=bound, stop_tokens=ends)
    spy = Spy(small)
    got = lab.answers(small, requests)
    assert small.withdrawals > 5
    assert spy.widest <= bound
    assert max(n for n, _ in spy.decoded) > 5 * (bound // longest), "more than may all become the longest"
    small.release("a")
    assert_nothing_is_kept(small)
    plenty = lab.build_native_engine(model, rows=rows, stop_tokens=ends)
    for want, answer in zip(lab.answers(plenty, requests), got, strict=True):
        assert (answer.tokens, answer.stop, answer.version) == (want.tokens, want.stop, want.version)
        assert answer.logp_gen == pytest.approx(want.logp_gen, abs=1e-9)
        assert [[t for t, _ in x] for x in answer.alternatives] == [
            [t for t, _ in x] for x in want.alternatives
        ]
    assert plenty.withdrawals == 0


def test_the_answers_that_came_last_are_withdrawn(lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the first ones always end, whatever the others need."""
    monkeypatch.setattr("posttrain.engines.native.scheduler.UNIT", 8)
    engine = lab.build_native_engine(lab.tiny("llama"), rows=8, cache_tokens=300)
    sampling = Sampling(max_new_tokens=150)
    tickets = [engine.submit(Request(prompt=(3, 4 + i), sampling=sampling, sample=i)) for i in range(8)]
    ended, running = [], []
    while engine.busy:
        ended += [ticket for ticket, _ in engine.poll()]
        running.append(sorted(s.ticket for s in engine.scheduler.sequences))
    assert ended == tickets
    assert running[0] == tickets
    assert [tickets[0]] in running
    assert 0 < engine.withdrawals <= 3 * len(tickets)


def test_prompts_kept_for_later_samples_stay_within_the_bound(lab) -> None:
    """Submitted sample by sample, every prompt waits for its last sample: they must not pile up."""
    model = lab.tiny("llama", torch.float64)
    prompts = [lab.prompt_of(20, i) for i in range(12)]
    requests = [
        Request(prompt=p, sampling=Sampling(max_new_tokens=4), task=str(i), sample=k)
        for k in range(3)
        for i, p in enumerate(prompts)
    ]
    engine = lab.build_native_engine(model, rows=2, cache_tokens=100)
    spy = Spy(engine)
    tickets, done, held = [engine.submit(r) for r in requests], {}, 0
    while engine.busy:
        done.update(engine.poll())
        held = max(held, sum(map(len, engine.runner.cache.prompts)))
    assert 80 <= held <= 100
    assert sum(spy.prefilled.values()) < len(requests)
    assert_nothing_is_kept(engine)
    plenty = lab.answers(lab.build_native_engine(model, rows=64), requests)
    assert [done[t].tokens for t in tickets] == [a.tokens for a in plenty]


@pytest.mark.parametrize(("bound", "runs"), [(4096, 1), (75, 5)])
def test_a_prompt_that_may_be_asked_again_runs_once_while_there_is_room(lab, bound: int, runs: int) -> None:
    """Five times each of three prompts in turn, beside one long answer; then nothing is kept."""
    model = lab.tiny("llama", torch.float64)
    engine = lab.build_native_engine(model, rows=2, cache_tokens=bound)
    spy, few = Spy(engine), Sampling(max_new_tokens=2)
    long = engine.submit(Request(prompt=(3, 4), sampling=Sampling(max_new_tokens=33), task="long"))
    prompts, found = [lab.prompt_of(30, i) for i in range(3)], {}
    for k in range(5):
        for i, prompt in enumerate(prompts):
            request = Request(prompt=prompt, sampling=few, task=str(i), sample=k, again=True)
            ticket = engine.submit(request)
            while ticket not in found:
                found |= dict(engine.poll())
            assert sum(map(len, engine.runner.cache.prompts)) <= bound
            [alone] = lab.answers(lab.build_native_engine(model, rows=2), [request])
            assert found[ticket].tokens == alone.tokens
    assert long not in found
    assert [spy.prefilled[prompt] for prompt in prompts] == [runs] * 3
    while engine.busy:
        engine.poll()
    assert_nothing_is_kept(engine)


def test_growing_and_shrinking_the_cache_keeps_what_rows_hold() -> None:
    cache = Cache(6, 1200)
    cache.reserve(2, 100)
    assert (cache.rows, cache.columns) == (6, 128)
    prompt = (1,) * 90
    cache.prompts[prompt] = {0: (torch.ones(3, 90, 4), 2 * torch.ones(3, 90, 5))}
    cache.place([prompt, prompt], 0)
    before = cache.keys[0][:2, :, :90].clone(), cache.values[0][:2, :, :90].clone()
    for rows, columns, shape in [
        (2, 500, (2, 512)),
        (1, 900, (1, 960)),
        (1, 1190, (1, 1200)),
        (6, 200, (6, 200)),
        (3, 300, (3, 320)),
        (2, 100, (3, 320)),
        (6, 91, (6, 128)),
    ]:
        kept = min(2, rows, cache.rows)
        cache.reserve(rows, columns, occupied=kept)
        assert (cache.rows, cache.columns) == shape
        for store, old in ((cache.keys, before[0]), (cache.values, before[1])):
            assert tuple(store[0].shape[::2]) == shape
            assert torch.equal(store[0][:kept, :, :90], old[:kept])
        cache.place([prompt] * min(2, cache.rows), 0)


REQUEST = st.fixed_dictionaries(
    {
        "length": st.sampled_from([1, 2, 3, 7, 30, 63, 64, 65, 130]),
        "prompt": st.integers(0, 2),
        "limit": st.integers(1, 9),
        "sample": st.integers(0, 99),
        "kind": st.sampled_from([{}, {"temperature": 0.0}, {"top_k": 5}, {"temperature": 0.7, "top_p": 0.8}]),
        "arrives": st.integers(0, 12),
    }
)


TRAFFIC = given(
    wishes=st.lists(REQUEST, min_size=1, max_size=12), rows=st.integers(1, 6), slack=st.integers(0, 300)
)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@TRAFFIC
def test_any_traffic_gives_the_answers_of_one_at_a_time(lab, wishes, rows: int, slack: int) -> None:
    assert_answers_are_as_alone(lab, wishes, rows, slack)


@pytest.mark.full
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@TRAFFIC
def test_much_traffic_gives_the_answers_of_one_at_a_time(lab, wishes, rows: int, slack: int) -> None:
    assert_answers_are_as_alone(lab, wishes, rows, slack)


def assert_answers_are_as_alone(lab, wishes, rows: int, slack: int) -> None:
    model = lab.tiny("mistral", torch.float64)
    requests = [
        Request(
            prompt=lab.prompt_of(w["length"], w["prompt"]),
            sampling=Sampling(max_new_tokens=w["limit"], **w["kind"]),
            sample=w["sample"],
        )
        for w in wishes
    ]
    bound = max(len(r.prompt) + r.sampling.max_new_tokens for r in requests) + slack
    engine = lab.build_native_engine(model, rows=rows, cache_tokens=bound, stop_tokens=range(0, 300, 17))
    spy = Spy(engine)
    tickets: dict[int, int] = {}
    done: dict[int, Completion] = {}
    clock = 0
    while engine.busy or len(tickets) < len(requests):
        for i, wish in enumerate(wishes):
            if wish["arrives"] == clock:
                tickets[engine.submit(requests[i])] = i
        done.update({tickets[t]: a for t, a in engine.poll()})
        clock += 1
    assert spy.widest <= bound
    assert sum(n for n, _ in spy.decoded) <= sum(len(a.tokens) - 1 for a in done.values())
    assert_nothing_is_kept(engine)
    one = lab.build_native_engine(model, rows=1, stop_tokens=range(0, 300, 17))
    for i, request in enumerate(requests):
        [alone] = lab.answers(one, [request])
        assert (done[i].tokens, done[i].stop, done[i].text) == (alone.tokens, alone.stop, alone.text)
        assert done[i].logp_gen == pytest.approx(alone.logp_gen, abs=1e-5)
