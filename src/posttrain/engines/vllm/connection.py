"""A vLLM server that a recipe names, before it is used: that it is there, and gives what is needed."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from posttrain.engines.native.engine import NativeConfig
from posttrain.engines.vllm.server import VllmServer

COMPLETIONS = "/v1/completions"
RAISED = 100.0
"""The most that vLLM adds to a logit."""
START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"
"""How a server is started that gives all that training needs."""


@dataclass(frozen=True, kw_only=True)
class ServedConfig(NativeConfig):
    """How much runs at once, and where, if a server draws."""

    url: str = ""
    """Of a vLLM server that draws, as http://host:8000; empty: vLLM draws in the sampler's own process."""
    folder: str = ""
    """Where weights lie on their way to the server, seen by both machines; empty: a temporary one of this."""
    deadline_s: float = 600.0
    """Seconds after which a server that says nothing counts as hanging; the time to take weights included."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be above 0, not {self.deadline_s}")


def completion(model: str, prompt: Sequence[int], asked: dict[str, Any]) -> dict[str, Any]:
    """The body of a request: tokens in, tokens out, and no default of the model's generation config."""
    plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    told = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"model": model, "prompt": list(prompt), **plain, **asked, **told}


def connect(config: ServedConfig, context: int) -> tuple[VllmServer, str, bool]:
    """The server, the name of its model, and whether it tells log-probabilities before temperature and bias.

    RunError where it is not there, cannot hold sequences of so many tokens, or does not let its weights be
    replaced.
    """
    server = VllmServer(config.url, config.deadline_s)
    try:
        said = server.ask("/v1/models", method="GET")
        try:
            name, longest = str(said["data"][0]["id"]), int(said["data"][0]["max_model_len"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise server.fault("does not say which model it serves: is it one of vLLM?") from None
        if longest < context:
            raise server.fault(
                f"holds sequences of {longest} tokens, and the recipe's may come to {context}: start it with "
                f"--max-model-len {context}, or set engine.cache_tokens to {longest}"
            )
        if not server.offers("/is_paused"):
            raise server.fault(f"does not let its weights be replaced: start it as {START}")
        server.ask("/resume")  # a run that ended while it handed weights over has left it so
        return server, name, _raw(server, name)
    except BaseException:
        server.close()
        raise


def _raw(server: VllmServer, name: str) -> bool:
    """Whether it tells how likely a token was before its logit was raised.

    Of two tokens that are each all but certain, only one can have been so before.
    """
    told = 0.0
    for token in (0, 1):
        asked = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "logit_bias": {str(token): RAISED}}
        said = server.ask(COMPLETIONS, completion(name, [0], asked))
        try:
            told += math.exp(float(said["choices"][0]["logprobs"]["token_logprobs"][0]))
        except (KeyError, IndexError, TypeError, ValueError):
            raise server.fault("does not say how likely the tokens are that it draws") from None
    return told < 1.5


def check_model(server: VllmServer, model: PreTrainedModel) -> None:
    """RunError where the server's model has other sizes: weights that do not fit would end the server."""
    asked = server.ask("/collective_rpc", {"method": "get_model_inspection"})
    said = str(asked["results"][0]) if isinstance(asked, dict) and asked.get("results") else ""
    config, table = model.config.get_text_config(), model.get_input_embeddings()
    ours = {
        "a vocabulary of": (table.num_embeddings, re.findall(r"org_vocab_size=(\d+)", said)[:1]),
        "states of": (table.embedding_dim, re.findall(r"embedding_dim=(\d+)", said)[:1]),
        "layers:": (config.num_hidden_layers, _layers(said)),
    }
    for what, (size, found) in ours.items():
        if found and int(found[0]) != size:
            raise server.fault(f"serves another model: {what} {found[0]}, where the recipe's has {size}")


def _layers(said: str) -> list[int]:
    """How many decoder layers a printed model has; empty if that cannot be told.

    >>> _layers("(0-1): 2 x LlamaDecoderLayer()((2): LlamaDecoderLayer()("), _layers("")
    ([3], [])
    """
    found = re.findall(r"\(\d+(?:-\d+)?\): (?:(\d+) x )?\w*DecoderLayer\(", said)
    return [sum(int(count or 1) for count in found)] if found else []


def check_temperature(temperature: float, *, raw: bool) -> None:
    """Passes where the server says how likely a token was as it was drawn; ValueError otherwise."""
    if raw and temperature not in (0.0, 1.0):
        raise ValueError(
            f"it tells how likely a token is at temperature 1, and not at {temperature:g}: "
            "start it with --logprobs-mode processed_logprobs"
        )
