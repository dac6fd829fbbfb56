"""Start vLLM in this process, and leave the process as it was where possible."""

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig

from posttrain.base.usercode import cause
from posttrain.engines.vllm.connection import ServedConfig
from posttrain.models.attention import key_heads_of
from posttrain.types import RunError, UserError

_ENVIRONMENT = {  # unless the user has set them
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the process keeps its number of threads
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
_BLOCK = 128
"""Tokens in the largest block that vLLM's kernels need, on CPUs."""


def require(where: str = "engine.name") -> None:
    """Raise UserError, with this key, if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        fix = "pip install 'posttrain[vllm]'; docs/engine.md says what to do without a GPU"
        raise UserError(where, "vllm is not installed", fix)


def start(config: PreTrainedConfig, dtype: torch.dtype, limits: ServedConfig, context: int) -> Any:
    """Return (the module vllm, its engine), with arbitrary weights. Raise RunError if it does not start."""
    on_gpu = torch.cuda.is_available()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights arrive, and steps are taken, in this process
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if limits.sleep and (settings := os.environ.get("PYTORCH_ALLOC_CONF")):
        # Memory that sleeps cannot lie in segments that grow. vLLM turns these off for it, and reads the
        # older variable alone to know that they are on.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", settings)
    with _quietly(), tempfile.TemporaryDirectory(prefix="posttrain-vllm-") as folder:
        config.save_pretrained(folder)
        try:
            import vllm
            import vllm.inputs
            import vllm.sampling_params

            arguments = vllm.EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                generation_config="vllm",
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=context,
                max_num_seqs=limits.rows,
                kv_cache_memory_bytes=_cache_bytes(config, dtype, limits.cache_tokens),
                enforce_eager=not (on_gpu and limits.cuda_graphs),
                logprobs_mode="processed_logprobs",
                max_logprobs=-1,
                async_scheduling=False,
                disable_log_stats=True,
                enable_sleep_mode=limits.sleep,
                **({"gpu_memory_utilization": _share()} if on_gpu else {}),
            )
            return vllm, vllm.LLMEngine.from_engine_args(arguments)
        except Exception as error:
            raise RunError("start vLLM", cause(error)) from error


def _share() -> float:
    """Return the share of the GPU's memory that is free: vLLM refuses to start if less is free than
    requested.

    It decides nothing else, as the size of the cache is set.
    """
    free, total = torch.cuda.mem_get_info()
    return min(0.9, 0.95 * free / total)


def _cache_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Return the bytes of keys and values of these tokens in whole blocks, with one block for vLLM itself."""
    layers = config.get_text_config().per_layer_config
    numbers = sum(2 * heads * size for heads, size in map(key_heads_of, layers))
    return numbers * dtype.itemsize * (-(-tokens // _BLOCK) + 1) * _BLOCK


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence warnings of libraries about each other; restore torch.set_num_threads, which vLLM replaces."""
    setter = torch.set_num_threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads = setter
