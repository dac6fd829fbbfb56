"""Tiny random models of every family, and what transformers and plain Python say of them."""

import copy
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from posttrain.engines.native.draw import stream_key, uniforms
from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.models.loading import quiet
from posttrain.types import Completion, Request, Sampling

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Far from the usual 0.02, so that heads look at different places and the next token is not a coin toss.
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOWED = ["sliding_attention", "full_attention", "sliding_attention"]

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "smollm": lambda: LlamaConfig(
        **{**SIZES, "hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1},
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    ),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=8,
        sliding_window=5,
        layer_types=WINDOWED,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=16, query_pre_attn_scalar=8, sliding_window=5, layer_types=WINDOWED
    ),
    "mistral": lambda: MistralConfig(**SIZES, head_dim=8, sliding_window=6, tie_word_embeddings=False),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES,
        head_dim=8,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=5,
        layer_types=WINDOWED,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **SIZES,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=6,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
}

_made: dict[tuple[str, torch.dtype, int], PreTrainedModel] = {}


@pytest.fixture(scope="session")
def lab() -> ModuleType:
    """This file: models, engines and oracles."""
    return sys.modules[__name__]


def tiny(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model with transformers' eager attention; the same object for the same arguments."""
    key = (family, dtype, seed)
    if key not in _made:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation="eager")
        # Norms and biases start as ones and zeros, where mistakes in them would not show.
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn(parameter.shape)
            elif "embed" in name:
                parameter.data *= 0.5 if family == "gemma3" else 2
        with quiet():
            model.set_experts_implementation("eager")  # the other kernels know no float64
        _made[key] = model.to(dtype).eval().requires_grad_(False)
    return _made[key]


def spell(tokens: Sequence[int]) -> str:
    """Text in which every token can be told."""
    return "".join(f"<{t}>" for t in tokens)


def build_native_engine(
    model: PreTrainedModel, *, stop_tokens: Sequence[int] = (), context: int = 512, **config: int
):
    """A native engine with a copy of this model."""
    return NativeEngine(
        copy.deepcopy(model),
        decode=spell,
        stop_tokens=stop_tokens,
        config=NativeConfig(**config),
        context=context,
    )


def answers(engine: NativeEngine, requests: Sequence[Request]) -> list[Completion]:
    """The engine's answers to these requests, in their order."""
    tickets = [engine.submit(r) for r in requests]
    done: dict[int, Completion] = {}
    while engine.busy:
        ended = dict(engine.poll())
        assert not done.keys() & ended.keys()
        done.update(ended)
    assert sorted(done) == sorted(tickets)
    return [done[t] for t in tickets]


def prompt_of(length: int, seed: int, vocabulary: int = 300) -> tuple[int, ...]:
    """A random prompt."""
    g = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(vocabulary, (length,), generator=g).tolist())


@torch.no_grad()
def full_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after every token, [T, V], by an ordinary forward without a cache."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].double()


def filtered(logits: torch.Tensor, sampling: Sampling) -> np.ndarray:
    """The distribution to be drawn from, by sorting and counting in float64."""
    p = (logits / (sampling.temperature or 1.0)).softmax(-1).tolist()
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if sampling.top_k:
        order = [i for i in order if p[i] >= p[order[min(sampling.top_k, len(p)) - 1]]]
    if sampling.top_p < 1:
        total, mass, kept = math.fsum(p[i] for i in order), 0.0, []
        for i in order:
            if mass >= sampling.top_p * total:
                break
            mass += p[i]
            kept.append(i)
        order = kept
    order = [i for i in order if p[i] >= sampling.min_p * max(p)]
    total = math.fsum(p[i] for i in order)
    out = np.zeros(len(p))
    out[order] = [p[i] / total for i in order]
    return out


def slow_answer(model: PreTrainedModel, request: Request) -> list[int]:
    """The tokens that a request must give: a whole forward for each, and a search in the running sum."""
    sampling, tokens = request.sampling, list(request.prompt)
    key = stream_key(request.seed, request.task, request.sample)
    for n in range(sampling.max_new_tokens):
        logits = full_logits(model, tokens)[-1]
        if sampling.greedy:
            tokens.append(int(logits.argmax()))
        else:
            running = filtered(logits, sampling).cumsum()
            [u] = uniforms([key], [request.position + n]) * running[-1]
            tokens.append(int(np.searchsorted(running, u, side="right")))
    return tokens[len(request.prompt) :]


def assert_logps(model: PreTrainedModel, request: Request, answer: Completion, tolerance: float) -> None:
    """Both log-probabilities of every drawn token equal those of an ordinary forward."""
    sampling, n = request.sampling, len(request.prompt)
    logits = full_logits(model, [*request.prompt, *answer.tokens])[n - 1 : -1]
    policy = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    for t, token in enumerate(answer.tokens):
        assert answer.logp_policy[t] == pytest.approx(float(policy[t, token]), abs=tolerance)
        p = 1.0 if sampling.greedy else filtered(logits[t], sampling)[token]
        assert p > 0
        assert answer.logp_gen[t] == pytest.approx(math.log(p), abs=tolerance)
