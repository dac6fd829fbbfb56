"""Every family of models: the engine's answers and log-probabilities are those of transformers."""

import copy

import numpy as np
import pytest
import torch

from posttrain.types import Request, Sampling

FAMILIES = ["llama", "smollm", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "gpt_oss", "qwen3_5"]
EXACT = [torch.float32, torch.float64]

SAMPLINGS = [
    Sampling(max_new_tokens=7),
    Sampling(max_new_tokens=7, temperature=0.7),
    Sampling(max_new_tokens=7, temperature=1.3, top_k=5),
    Sampling(max_new_tokens=7, top_p=0.6),
    Sampling(max_new_tokens=7, min_p=0.2),
    Sampling(max_new_tokens=7, temperature=0.9, top_k=40, top_p=0.8, min_p=0.05),
    Sampling(max_new_tokens=7, temperature=0.0, top_k=2),
]


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample("llama-*", "*-dtype0")
def test_greedy_equals_generate(lab, family: str, dtype: torch.dtype) -> None:
    model = lab.tiny(family, dtype)
    prompts = [lab.prompt_of(n, seed) for n, seed in [(1, 0), (3, 1), (8, 2), (17, 3), (60, 4)]]
    engine = lab.build_native_engine(model, rows=3)
    got = lab.answers(
        engine, [Request(prompt=p, sampling=Sampling(temperature=0, max_new_tokens=12)) for p in prompts]
    )
    for prompt, answer in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12
        )
        assert answer.tokens == expected[0, len(prompt) :].tolist()
        assert answer.logp_gen == [0.0] * 12
        assert answer.stop == "length"
        assert answer.text == lab.spell(answer.tokens)
    assert len({tuple(a.tokens) for a in got}) == len(got)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sample("llama-*", "*-dtype0")
def test_samples_and_their_logps_equal_a_whole_forward_for_each_token(
    lab, family: str, dtype: torch.dtype
) -> None:
    model = lab.tiny(family, dtype)
    requests = [
        Request(prompt=lab.prompt_of(n, 0), sampling=s, seed=5, task=f"{i}", sample=i)
        for i, s in enumerate(SAMPLINGS)
        for n in (2, 13)
    ]
    got = lab.answers(lab.build_native_engine(model, rows=5), requests)
    for request, answer in zip(requests, got, strict=True):
        assert answer.tokens == lab.slow_answer(model, request, answer.tokens)
        lab.assert_logps(model, request, answer, tolerance=3e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_rounds_no_worse_than_transformers(lab, family: str) -> None:
    model = lab.tiny(family, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    requests = [
        Request(prompt=lab.prompt_of(n, seed), sampling=Sampling(max_new_tokens=9), seed=seed)
        for n in (1, 4, 12)
        for seed in range(4)
    ]
    ours, theirs = [], []
    for request, answer in zip(
        requests, lab.answers(lab.build_native_engine(model, rows=5), requests), strict=True
    ):
        tokens = [*request.prompt, *answer.tokens]
        place = (torch.arange(len(request.prompt) - 1, len(tokens) - 1), torch.tensor(answer.tokens))
        true, rounded = (lab.full_logits(m, tokens).log_softmax(-1)[place] for m in (exact, model))
        ours.extend((torch.tensor(answer.logp_policy) - true).tolist())
        theirs.extend((rounded - true).tolist())
    error, usual = (float(np.sqrt(np.mean(np.square(x)))) for x in (ours, theirs))
    assert 0 < error <= 1.25 * usual, (error, usual)


@pytest.mark.parametrize("family", FAMILIES)
def test_score_equals_a_whole_forward(lab, family: str) -> None:
    model = lab.tiny(family)
    engine = lab.build_native_engine(model)
    for length in (2, 5, 40):
        tokens = lab.prompt_of(length, 9)
        logps = lab.full_logits(model, tokens).log_softmax(-1)
        expected = [float(logps[t - 1, tokens[t]]) for t in range(1, length)]
        assert engine.score(list(tokens)) == pytest.approx(expected, abs=3e-5)
    assert engine.score([3]) == []


def test_a_layer_with_a_state_reads_a_later_turn_from_its_first_token_on(lab) -> None:
    """After other requests, and next to one that begins alike: neither has a state to go on from."""
    model = lab.tiny("qwen3_5")
    engine = lab.build_native_engine(model, rows=2)
    first = Request(prompt=lab.prompt_of(9, 0), sampling=Sampling(max_new_tokens=4), seed=1, episode="a")
    [answer] = lab.answers(engine, [first])
    longer = (*first.prompt, *answer.tokens, *lab.prompt_of(3, 1))
    later = [
        Request(prompt=longer[:end], sampling=first.sampling, seed=1, sample=n, episode="a")
        for n, end in enumerate((16, 15, 16, 12))
    ]
    for request, answer in zip(later, lab.answers(engine, later), strict=True):
        assert answer.tokens == lab.slow_answer(model, request, answer.tokens)
        lab.assert_logps(model, request, answer, tolerance=3e-4)


def test_the_tiny_models_use_what_is_special_about_their_family(lab) -> None:
    """Windows and soft caps change these answers, so the tests above see whether they are honoured."""
    prompt = lab.prompt_of(17, 3)
    for family, key, value in [
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma2", "final_logit_softcapping", None),
        ("gemma2", "sliding_window", 400),
        ("gemma3", "sliding_window", 400),
        ("mistral", "sliding_window", None),
    ]:
        model = lab.tiny(family)
        config = copy.deepcopy(model.config)
        setattr(config, key, value)
        other = type(model)._from_config(config, attn_implementation="eager").eval()
        other.load_state_dict(model.state_dict())
        assert (lab.full_logits(model, prompt) - lab.full_logits(other, prompt)).abs().max() > 0.01, (
            family,
            key,
        )
