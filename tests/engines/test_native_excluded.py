"""Answers that are not drawn again: what is left is drawn as if they had never been there."""

import math

import pytest

from posttrain.engines.sequence import Sequence
from posttrain.types import Completion, Request, Sampling

SAMPLING = Sampling(max_new_tokens=3, temperature=0.25)


def asked(prompt: tuple[int, ...], sample: int, before: list[Completion]) -> Request:
    excluded = tuple((tuple(c.tokens), tuple(c.logp_policy)) for c in before)
    return Request(prompt=prompt, sampling=SAMPLING, task="t", sample=sample, excluded=excluded)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_each_answer_is_drawn_once_with_the_probability_that_is_left(lab, family: str) -> None:
    """Σ logp_gen of an answer is log π(answer) - log(1 - Σ π of those drawn before it)."""
    engine = lab.build_native_engine(lab.tiny(family), stop_tokens=[7])
    drawn: list[Completion] = []
    for sample in range(40):
        [answer] = lab.answers(engine, [asked(lab.prompt_of(6, 1), sample, drawn)])
        left = 1 - sum(math.exp(sum(c.logp_policy)) for c in drawn)
        assert sum(answer.logp_gen) == pytest.approx(sum(answer.logp_policy) - math.log(left), abs=1e-3)
        drawn.append(answer)
    assert len({tuple(c.tokens) for c in drawn}) == 40
    [again] = lab.answers(engine, [asked(lab.prompt_of(6, 1), 0, [])])
    assert again.tokens == drawn[0].tokens  # and nothing of them stays behind


def test_all_answers_come_and_then_they_come_again(lab) -> None:
    """Of one token, of six that top-k leaves: each once; then the draw is the policy's own."""
    engine = lab.build_native_engine(lab.tiny("qwen3"))
    few = Sampling(max_new_tokens=1, temperature=2.0, top_k=6)
    shares, drawn = _of_top(lab, engine, few), list[Completion]()
    for sample in range(7):
        said = tuple(((c.tokens[0],), (shares[c.tokens[0]],)) for c in drawn[:6])
        [answer] = lab.answers(engine, [Request(prompt=(5, 6), sampling=few, sample=sample, excluded=said)])
        drawn.append(answer)
    assert {c.tokens[0] for c in drawn[:6]} == set(shares)
    assert drawn[6].logp_gen == pytest.approx([shares[drawn[6].tokens[0]]], abs=1e-4)


def _of_top(lab, engine, sampling: Sampling) -> dict[int, float]:
    """log of the probability of each token that top-k leaves, from many draws."""
    requests = [Request(prompt=(5, 6), sampling=sampling, sample=n) for n in range(400)]
    return {c.tokens[0]: c.logp_gen[0] for c in lab.answers(engine, requests)}


def test_shares_are_of_what_was_drawn_so_far() -> None:
    """By hand: π(ab) = 0.3, π(ac) = 0.2, π(d) = 0.4. Behind `a`, `ab` takes three fifths."""
    said = (((1, 2), (math.log(0.5), math.log(0.6))), ((4,), (math.log(0.4),)))
    sequence = Sequence(0, Request(prompt=(0,), sampling=Sampling(max_new_tokens=4), excluded=said))
    assert sequence.excluded == pytest.approx({1: 0.3, 4: 0.4})
    sequence.append(1, 0.0, 0.0, 0)
    assert sequence.excluded == pytest.approx({2: 0.6})
    sequence.append(3, 0.0, 0.0, 0)
    assert sequence.excluded == {}
