"""Tiny random models, batches with everything in them, and arithmetic that stays in float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import is_
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from posttrain.learner import kernels
from posttrain.types import Batch, Trajectory

VOCABULARY = 23
narrow = partial(is_, torch.float32)
"""Whether an argument is that dtype, asked without Python's own calls."""


class Float64(TorchFunctionMode):
    """Models round to float32 in norms, rotations and softmax; within this nothing does.

    Two ways to compute the same number can then be compared to 1e-9.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        # Most of the million calls read a tensor's shape or dtype: they are let through at once.
        if not kwargs and not any(map(narrow, args)):
            return func(*args)

        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*(wide(a) for a in args), **{k: wide(v) for k, v in (kwargs or {}).items()})


@pytest.fixture
def float64() -> Iterator[None]:
    """The whole test in float64."""
    with Float64():
        yield


def make_llama(seed: int = 0, **shape: Any) -> LlamaForCausalLM:
    """A random Llama in float32 whose norms differ from 1."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes | shape))
    stir(model)
    return model


def make_moe(family: str, seed: int = 0, **shape: Any) -> PreTrainedModel:
    """A random model in float32 whose second layer has six experts, of which each token takes two."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "num_experts": 6,
        "num_local_experts": 6,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "mlp_only_layers": [0],
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | shape))
    model.set_experts_implementation("eager")  # the other kernels know no float64
    stir(model)
    return model


def stir(model: nn.Module) -> None:
    """Moves every vector parameter (norms, biases) off its starting value."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.2 * torch.randn_like(p)


@pytest.fixture(scope="session")
def llama() -> Callable[..., LlamaForCausalLM]:
    """llama(seed, **shape) -> a random model."""
    return make_llama


def make_rows(
    seed: int, *, groups: int = 3, K: int = 3, turns: int = 2, idle: bool = True, system: int = 0
) -> tuple[list[Trajectory], list[int]]:
    """Groups with a shared prompt and K answers each, of several turns, shuffled; and their numbers.

    Some answers are a single token; one row trains nothing; one group's prompts differ half way. All prompts
    begin with the same `system` tokens.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=g))

    def words(n: int) -> list[int]:
        return torch.randint(VOCABULARY, (n,), generator=g).tolist()

    rows = []
    for number in range(groups):
        prompt = [(7 * t) % VOCABULARY for t in range(system)] + words(draw(1, 6))
        for k in range(K):
            tokens, sampled, states = list(prompt), [False] * len(prompt), dict[int, int]()
            if number == 1 and k == 1 and len(prompt) > 1:
                half = (system + len(prompt)) // 2
                tokens[half] = (tokens[half] + 1) % VOCABULARY
            for turn in range(draw(1, turns + 1)):
                reply, n = draw(1, 4) if turn else 0, draw(1, 5)
                states[len(tokens) + reply] = 1 + turn  # turns of one number begin in one state
                tokens += words(reply + n)
                sampled += [False] * reply + [True] * n
            tail = draw(0, 3)  # what an environment said last, and nobody answered
            tokens += words(tail)
            sampled += [False] * tail
            if idle and number == 0 and k == 0:
                sampled, states = [False] * len(tokens), {}
            n = len(tokens)
            logp = [-abs(x) for x in torch.randn(n, generator=g).tolist()]
            reward = [float(draw(0, 3)) if s else 0.0 for s in sampled]
            row = Trajectory(
                tokens=tokens,
                sampled=sampled,
                logp_gen=logp,
                logp_policy=logp,
                version=[0] * n,
                reward=reward,
                turn_state=states,
            )
            rows.append((row, 10 * number - 3))
    order = torch.randperm(len(rows), generator=g).tolist()
    return [rows[i][0] for i in order], [rows[i][1] for i in order]


def make_batch(seed: int, dtype: torch.dtype = torch.float64, **shape: Any) -> Batch:
    """Such rows as a batch, with float columns of this type."""
    batch = Batch.of(*make_rows(seed, **shape))
    floats = ("reward", "logp_gen", "logp_policy")
    columns = {name: getattr(batch, name).to(dtype) for name in floats}
    return replace(batch, **columns, greedy=(batch.group % 3).to(dtype)[:, None].expand(batch.mask.shape))


def make_routes(batch: Batch, layers: int) -> torch.Tensor:
    """Two of six experts for each token and layer, some unknown; alike for equal tokens at equal places."""
    places = torch.arange(batch.tokens.shape[1])
    number = (batch.tokens * 7 + places * 5)[..., None] + 3 * torch.arange(layers)
    routes = torch.stack([number % 6, (number % 6 + 1 + number % 5) % 6], dim=-1).short()
    routes[number % 4 == 0] = -1
    return routes


@pytest.fixture(scope="session")
def moe() -> Callable[..., PreTrainedModel]:
    """moe(family, seed, **shape) -> a random model of experts."""
    return make_moe


@pytest.fixture(scope="session")
def routes_of() -> Callable[..., torch.Tensor]:
    """routes_of(batch, layers) -> experts for its tokens."""
    return make_routes


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., Batch]:
    """rows_of(seed, groups=..., K=..., turns=..., idle=...) -> a batch."""
    return make_batch


@pytest.fixture(scope="session")
def flat_gradient() -> Callable[[nn.Module], torch.Tensor]:
    """flat_gradient(model) -> the gradients of its parameters, end to end, which are then forgotten."""

    def read(model: nn.Module) -> torch.Tensor:
        found = []
        for p in model.parameters():
            found.append((torch.zeros_like(p) if p.grad is None else p.grad).flatten().clone())
            p.grad = None
        return torch.cat(found)

    return read


@pytest.fixture(scope="session")
def by_hand() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """by_hand(model, batch, temperature) -> (logp, entropy), row by row with transformers' own forward."""

    def run(model: PreTrainedModel, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        logp, entropy = [], []
        for i in range(len(batch)):
            n, T = int(batch.length[i]), batch.mask.shape[1]
            logits = model(input_ids=batch.tokens[i : i + 1, :n], use_cache=False).logits[0, :-1]
            p = (logits / temperature).log_softmax(-1)
            picked = p.gather(-1, batch.tokens[i, 1:n, None])[:, 0]
            spread = -(p.exp() * p).sum(-1)
            trained = batch.mask[i, 1:n]
            pad = (1, T - n)
            logp.append(nn.functional.pad(torch.where(trained, picked, 0.0), pad))
            entropy.append(nn.functional.pad(torch.where(trained, spread, 0.0), pad))
        return torch.stack(logp), torch.stack(entropy)

    return run


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave everything to PyTorch, as on a machine without a compiler."""
    monkeypatch.setattr(kernels, "suits", lambda x: False)
