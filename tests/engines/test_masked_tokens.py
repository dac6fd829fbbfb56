"""Ids without a token, beyond which embeddings are padded: not drawn, and no part of the policy."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from posttrain.learner.forward import Net, forward
from posttrain.models.attention import mask_tokens, masked_tokens, use_layouts
from posttrain.types import Batch, Completion, Request, Sampling, Trajectory

KNOWN = range(280)
"""Of the 300 rows that the embedding of the tiny models has."""


@pytest.fixture
def padded(lab) -> PreTrainedModel:
    """A model that would rather say ids without a token than any other."""
    model = copy.deepcopy(lab.tiny("llama"))
    with torch.no_grad():
        model.lm_head.weight[len(KNOWN) :] *= 20
    return model


def request(lab, seed: int, **sampling: object) -> Request:
    asked = Sampling(**{"max_new_tokens": 12, "temperature": 1.5} | sampling)
    return Request(prompt=lab.prompt_of(6, 1, len(KNOWN)), sampling=asked, seed=seed, task="t")


def policy(lab, model: PreTrainedModel, request: Request, answer: Completion) -> list[float]:
    """log π of the answer's tokens under softmax(logits / τ) over the tokens that there are."""
    tokens, n = [*request.prompt, *answer.tokens], len(request.prompt)
    warm = lab.full_logits(model, tokens)[:, : len(KNOWN)] / request.sampling.temperature
    return [float(warm.log_softmax(-1)[t - 1, tokens[t]]) for t in range(n, len(tokens))]


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}], ids=["plain", "top_k", "top_p"])
def test_engine_never_draws_ids_without_a_token(lab, padded, filters) -> None:
    requests = [request(lab, seed, **filters) for seed in range(16)]
    plain = lab.answers(lab.build_native_engine(copy.deepcopy(padded)), requests)
    assert max(t for a in plain for t in a.tokens) >= len(KNOWN)
    model = copy.deepcopy(padded)
    mask_tokens(model, KNOWN)
    assert masked_tokens(model) == [*range(280, 300)]
    for asked, answer in zip(requests, lab.answers(lab.build_native_engine(model), requests), strict=True):
        assert max(answer.tokens) < len(KNOWN)
        assert answer.logp_policy == pytest.approx(policy(lab, padded, asked, answer), abs=1e-4)


def test_trainer_and_engine_have_one_policy_under_a_mask(lab, padded) -> None:
    asked, model = request(lab, 0), copy.deepcopy(padded)
    mask_tokens(model, KNOWN)
    [answer] = lab.answers(lab.build_native_engine(copy.deepcopy(model)), [asked])
    use_layouts(model.requires_grad_(True))
    row = Trajectory.given([*asked.prompt, *answer.tokens], len(asked.prompt))
    out = forward(Net(model), Batch.of([row], [0]), 1.5)
    assert out.logp[0, len(asked.prompt) :].tolist() == pytest.approx(answer.logp_policy, abs=1e-4)
    assert float(out.entropy.detach().max()) < torch.tensor(float(len(KNOWN))).log()
    (out.logp.sum() + out.entropy.sum()).backward()
    gradient = model.lm_head.weight.grad
    assert bool(gradient.isfinite().all())
    assert bool(gradient[: len(KNOWN)].any())
    assert not bool(gradient[len(KNOWN) :].any())


def test_whole_embeddings_have_no_mask(lab) -> None:
    model = copy.deepcopy(lab.tiny("llama"))
    before = [name for name, _ in model.named_buffers()]
    mask_tokens(model, range(300))
    assert masked_tokens(model) == []
    assert [name for name, _ in model.named_buffers()] == before
    assert "masked_tokens" not in model.state_dict()
