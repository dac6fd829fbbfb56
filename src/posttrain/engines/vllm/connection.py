"""Checks of the vLLM servers that a recipe names, before they are used."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from posttrain.engines.native.engine import NativeConfig
from posttrain.engines.vllm.ipc import CudaIpc
from posttrain.engines.vllm.nccl import NcclGroup
from posttrain.engines.vllm.server import VllmServer

SLEEP = "/sleep?level=1"
"""Asks for level 1, at which a server has its weights in CPU memory: at level 2 it would lose those that no
sync brings, such as biases that select experts, and after a run that ended meanwhile all others."""
COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
"""Parameters of a draw that would otherwise be those of the model's generation config."""
HIGHEST_BIAS = 100.0
"""The highest bias of a logit that vLLM accepts."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that --max-lora-rank may have."""
START_COMMAND = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"
"""Command that starts a server with everything that training needs."""
NO_ADAPTERS = "without --enable-lora it gets merged weights"
"""What a user can do about a server that takes adapters, but not this one."""
NO_TRANSFER = "without --weight-transfer-config it gets files"
"""What a user can do about a server that weights do not reach from a GPU."""
_INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"


@dataclass(frozen=True, kw_only=True)
class ServedConfig(NativeConfig):
    """How many answers are sampled at once, and the servers that draw them, if any."""

    url: str | tuple[str, ...] = ""
    """URL of a vLLM server that draws, as http://host:8000, or several, one for each sampler. Several ranks
    have async.samplers servers, from which rank 0 draws for all, or one for each sampler of each rank, those
    of rank 0 first. Empty: vLLM runs in the sampler's own process."""
    folder: str = ""
    """Folder through which weights pass to servers, visible to all machines; empty: a temporary one."""
    deadline_s: float = 600.0
    """Seconds without a response after which the server counts as hanging; loading weights counts too."""
    sleep: bool = False
    """Free the GPU memory of vLLM's weights and KV cache while the learner trains on the same GPU. A server
    needs --enable-sleep-mode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for url in (self.url,) * bool(self.url) if isinstance(self.url, str) else self.url:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"url must begin with http:// or https://, not {url!r}")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("url names a server twice, and each sampler replaces the weights of its own")
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s must be above 0, not {self.deadline_s}")

    @property
    def urls(self) -> tuple[str, ...]:
        """The servers in the order of samplers; empty if vLLM runs in the sampler's own process."""
        return tuple(url for url in ([self.url] if isinstance(self.url, str) else self.url) if url)

    def of_sampler(self, number: int) -> Self:
        """Return the choice with this sampler's server alone."""
        return replace(self, url=self.urls[number]) if self.urls else self


def completion_body(model: str, prompt: Sequence[int], params: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request: tokens in and out, no default of the model's generation config."""
    reports = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return {"model": model, "prompt": list(prompt), **NEUTRAL, **params, **reports}


def connect(
    config: ServedConfig, model: PreTrainedModel, context: int, *, draws: bool = True
) -> tuple[VllmServer, str, bool | None]:
    """Return the only server of a choice, the name of its model, and whether it reports probabilities before
    temperature and bias. With `config.sleep` the server sleeps until weights are loaded.

    draws: wake the server, so that it draws. Otherwise it stays as it is, since a run may be using it; of one
    that sleeps it is then not known which probabilities it reports, None.
    Raise RunError if it is unreachable, has a model of other sizes than `model`, cannot hold sequences of
    `context` tokens, or does not let its weights be replaced.
    """
    [url] = config.urls
    server = VllmServer(url, config.deadline_s)
    try:
        models = server.ask(MODELS, method="GET")
        with server.expecting("does not say which model it serves: is it a vLLM server?"):
            name, longest = str(models["data"][0]["id"]), int(models["data"][0]["max_model_len"])
        if longest < context:
            raise server.fault(
                f"holds sequences of {longest} tokens, and the recipe needs {context}: start it with "
                f"--max-model-len {context}, or set engine.cache_tokens to {longest}"
            )
        if not server.offers("/is_paused"):
            raise server.fault(f"does not let its weights be replaced: start it as {START_COMMAND}")
        sleeps = _is_sleeping(server)
        if draws and sleeps:  # a run that ended while it trained left it so
            server.ask("/wake_up")
        if draws:  # a run that ended during a weight sync left the server paused
            server.ask("/resume")
        is_raw = _reports_unbiased(server, name) if draws or not sleeps else None
        check_model(server, model)
        if config.sleep:
            _check_sleep_mode(server)
        if config.sleep and draws:
            server.ask(SLEEP)
        return server, name, is_raw
    except BaseException:
        server.close()
        raise


def _is_sleeping(server: VllmServer) -> bool:
    if not server.offers("/is_sleeping"):
        return False
    with server.expecting("does not say whether it sleeps"):
        return bool(server.ask("/is_sleeping", method="GET")["is_sleeping"])


def _check_sleep_mode(server: VllmServer) -> None:
    """Raise RunError if the server says that it would free no memory while it sleeps."""
    try:
        frees = bool(config_of(server)["model_config"]["enable_sleep_mode"])
    except (KeyError, TypeError):
        frees = server.offers("/is_sleeping")
    if not frees:
        raise server.fault("frees no memory while it sleeps: start it with --enable-sleep-mode")


def config_of(server: VllmServer) -> Any:
    """Return vLLM's configuration as the server reports it; an empty one if it does not."""
    return _server_info(server)["vllm_config"]


def _server_info(server: VllmServer) -> Any:
    path = "/server_info?config_format=json"
    return server.ask(path, method="GET") if server.offers(path) else {"vllm_config": {}}


def adapter_obstacle(config: ServedConfig, rank: int) -> str:
    """Return why the only server of a choice takes no adapters of this rank, "" if it does (vLLM 0.32).

    Raise RunError if it is unreachable.
    """
    [url] = config.urls
    server = VllmServer(url, config.deadline_s)
    try:
        settings = config_of(server)
        lora, parallel = settings.get("lora_config"), settings.get("parallel_config") or {}
        problem = ""
        if not lora or not server.offers("/v1/load_lora_adapter"):
            problem = (
                "takes no adapters: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and "
                f"--enable-lora --max-lora-rank {next((r for r in _RANKS if r >= rank), _RANKS[-1])}"
            )
        elif (highest := int(lora["max_lora_rank"])) < rank:
            problem = f"takes adapters up to rank {highest}, and lora.rank is {rank}: see --max-lora-rank"
        elif lora.get("target_modules"):  # it leaves other parts of an adapter out without a word
            problem = "applies adapters to some layers alone: start it without --lora-target-modules"
        elif int(parallel.get("_api_process_count", 1)) > 1:  # each of which knows the adapters sent to it
            problem = "answers from several processes: start it with --api-server-count 1"
        return str(server.fault(problem)) if problem else ""
    finally:
        server.close()


def transfer_backend(config: ServedConfig, device: torch.device) -> tuple[str, str]:
    """Return the backend by which weights pass to the only server of a choice: nccl, ipc, or "" for files.

    With it, why they do not pass by the one for which the server was started (--weight-transfer-config of
    vLLM 0.32), "" if it was for none or they do. device: that of the sampler, which sends them.
    Raise RunError if the server is unreachable.
    """
    [url] = config.urls
    server = VllmServer(url, config.deadline_s)
    try:
        info = _server_info(server)
        transfer = info["vllm_config"].get("weight_transfer_config")
        if not transfer:
            return "", ""
        backend = str(transfer.get("backend"))
        if backend == "nccl":
            problem = _nccl_problem(config, device, info["vllm_config"].get("parallel_config") or {})
        elif backend == "ipc":
            problem = _ipc_problem(server, device, info.get("vllm_env") or {})
        else:
            problem = "it is not known here"
        return (
            ("", str(server.fault(f"gets no weights by {backend}: {problem}"))) if problem else (backend, "")
        )
    finally:
        server.close()


def _nccl_problem(config: ServedConfig, device: torch.device, parallel: dict[str, Any]) -> str:
    if config.sleep:
        return 'with engine.sleep it is on the sampler\'s GPU, and NCCL needs two: see the backend "ipc"'
    if parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb"):
        return "it passes requests to some of its data-parallel workers alone"
    return NcclGroup.obstacle(device)


def _ipc_problem(server: VllmServer, device: torch.device, settings: dict[str, Any]) -> str:
    if problem := CudaIpc.obstacle(device):
        return problem
    if not settings.get(_INSECURE):  # it would not unpickle handles
        return f"start it with {_INSECURE}=1"
    workers = server.ask("/get_world_size", method="GET")
    with server.expecting("does not say how many workers it has"):
        return "it has workers on other GPUs than the sampler's" if int(workers["world_size"]) > 1 else ""


def _reports_unbiased(server: VllmServer, name: str) -> bool:
    """Return True if the server reports the probability of a token before its logit was raised.

    It asks for two tokens, each with a bias that makes it all but certain. Unbiased, their probabilities sum
    to at most 1.
    """
    total = 0.0
    for token in (0, 1):
        bias = {str(token): HIGHEST_BIAS}
        params = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "logit_bias": bias}
        response = server.ask(COMPLETIONS, completion_body(name, [0], params))
        with server.expecting("does not report the probability of the tokens that it draws"):
            total += math.exp(float(response["choices"][0]["logprobs"]["token_logprobs"][0]))
    return total < 1.5


def check_model(server: VllmServer, model: PreTrainedModel) -> None:
    """Raise RunError if the server's model has other sizes: weights that do not fit would end the server."""
    response = server.ask("/collective_rpc", {"method": "get_model_inspection"})
    printed = str(response["results"][0]) if isinstance(response, dict) and response.get("results") else ""
    config, table = model.config.get_text_config(), model.get_input_embeddings()
    sizes = {
        "a vocabulary of": (table.num_embeddings, re.findall(r"org_vocab_size=(\d+)", printed)[:1]),
        "states of": (table.embedding_dim, re.findall(r"embedding_dim=(\d+)", printed)[:1]),
        "layers:": (config.num_hidden_layers, _layers(printed)),
    }
    for noun, (size, served) in sizes.items():
        if served and int(served[0]) != size:
            raise server.fault(f"serves another model: {noun} {served[0]}, where the recipe's has {size}")


def _layers(printed: str) -> list[int]:
    """Return the number of decoder layers of a printed model in a list; an empty list if it does not show.

    >>> _layers("(0-1): 2 x LlamaDecoderLayer()((2): LlamaDecoderLayer()("), _layers("")
    ([3], [])
    """
    counts = re.findall(r"\(\d+(?:-\d+)?\): (?:(\d+) x )?\w*DecoderLayer\(", printed)
    return [sum(int(count or 1) for count in counts)] if counts else []


def check_temperature(temperature: float, *, raw: bool) -> None:
    """Raise ValueError if the server does not report the probability of a token as it was drawn."""
    if raw and temperature not in (0.0, 1.0):
        raise ValueError(
            f"it reports probabilities at temperature 1, and not at {temperature:g}: "
            "start it with --logprobs-mode processed_logprobs"
        )
