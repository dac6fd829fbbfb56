"""The experts that a vLLM server chooses: the engine against a stand-in of its endpoint for tokens."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from posttrain.engines.vllm.connection import ServedConfig
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.engines.vllm.routed import check_routed
from posttrain.models.experts import Routers
from posttrain.types import Request, RunError, Sampling


@pytest.fixture
def served(serve: Callable[..., Any]) -> Iterator[Callable[..., tuple[Any, ServerEngine, PreTrainedModel]]]:
    """served(...) -> a server of a model without experts in its first layer, its engine, the policy."""
    engines = []

    def make(**how: Any) -> tuple[Any, ServerEngine, PreTrainedModel]:
        sizes = {"hidden_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": 50}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 6}
        shape = {"num_experts_per_tok": 2, "mlp_only_layers": [0], "initializer_range": 0.3}
        config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, **shape)
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            models.append(AutoModelForCausalLM.from_config(config).eval())
        server = serve(**how)
        server.model, policy = models
        engine = ServerEngine(
            policy,
            dtype=torch.float32,
            decode=lambda tokens: " ".join(map(str, tokens)),
            stop_tokens=[49],
            config=ServedConfig(url=server.url, rows=4, cache_tokens=512),
            context=512,
            routes=True,
        )
        engines.append(engine)
        engine.load(policy.named_parameters(), 1)
        return server, engine, policy

    yield make
    for engine in engines:
        engine.close()


def answers(engine: ServerEngine) -> list[Any]:
    found = []
    while engine.busy:
        found += engine.poll()
    return found


def test_an_answer_says_to_which_experts_each_token_went(served) -> None:
    server, engine, policy = served()
    prompts = {
        engine.submit(Request(prompt=p, sampling=Sampling(max_new_tokens=5))): p for p in ((1, 2), (3,))
    }
    for ticket, answer in answers(engine):
        tokens = torch.tensor([[*prompts[ticket], *answer.tokens]])
        routers = Routers(policy, notes=True)
        with torch.no_grad():
            logits = policy(input_ids=tokens).logits[0].log_softmax(-1)
        assert answer.routes.tolist() == routers.taken().transpose(0, 1)[:-1].tolist()
        assert answer.routes.shape == (tokens.shape[1] - 1, 2, 2), "the first layer has none"
        first = len(prompts[ticket])
        picked = logits[first - 1 : -1].gather(-1, tokens[0, first:, None])[:, 0]
        assert answer.logp_policy == pytest.approx(picked.tolist(), abs=1e-4)
    assert server.calls.count("/inference/v1/generate") == 2


def test_a_server_that_does_not_say_so_is_refused(served) -> None:
    start = "start it with --enable-return-routed-experts"
    _, engine, _ = served(routed=False, aux_output_config={"enable_return_routed_experts": False})
    with pytest.raises(RunError, match=f"does not say to which experts it sends tokens: {start}"):
        check_routed(engine.server)
    engine.submit(Request(prompt=(1, 2), sampling=Sampling(max_new_tokens=5)))
    with pytest.raises(RunError, match=f"the tokens of an answer: {start}"):
        answers(engine)
