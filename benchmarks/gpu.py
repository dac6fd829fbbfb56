"""The engine and the learner on a GPU, with random weights in the shape of a Llama of 1.2 billion parameters.

sampling   64 and 256 rows (groups of 8, prompts of 128 tokens, 256 new tokens each, nothing ends early),
           with recorded decoding steps and without
generate   the same by transformers, with a dynamic and with a static cache; it compiles for the latter
training   GRPO steps on 64 such rows: tokens a second, the share of the device's arithmetic that this
           uses, and peak memory
shards     the same as the one rank of a group, with weights as shards (FSDP2 and NCCL)
large      so of a Llama of 6.7 billion parameters with gradient checkpointing, some 130 GiB; of 2.7
           billion where there is less memory

python benchmarks/gpu.py training --peak-tflops 989 --out gpu-training.json
python benchmarks/gpu.py training --tiny --device cpu --out try.json      (tries it out, anywhere)
"""

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.learner.pack import pack
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.ranks import Parallel
from posttrain.methods.table import GRPO
from posttrain.types import Batch, Request, Sampling, Trajectory

SAMPLES = 8
STEPS = Steps(microbatch_tokens=16_384)
NOBODY: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BILLION = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
LARGE = BILLION | {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
}
TINY = BILLION | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main() -> None:
    """Measures one part and writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("sampling", "generate", "training", "shards", "large"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script out")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device in bf16, for its share")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"there is no GPU that this PyTorch ({torch.__version__}) can use")
    device, part = torch.device(options.device), options.part
    prompt, new, most = (8, 6, [16, 32]) if options.tiny else (128, 256, [64, 256])
    torch.manual_seed(0)
    shape = TINY if options.tiny else BILLION if part != "large" else LARGE | fitting(device)
    config = LlamaConfig(**shape, **NOBODY)
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    found: dict[str, Any] = {
        "part": part,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    how = {"repeat": options.repeat, "peak": options.peak_tflops, "device": device}
    if part in ("sampling", "generate"):
        prompts = {n: torch.randint(config.vocab_size, (n // SAMPLES, prompt)).tolist() for n in most}
        for rows, asked in prompts.items():
            made = engines(model, asked, new, device) if part == "sampling" else generates(model, asked, new)
            for name, draw in made.items():
                draw(0)  # warm-up: recordings and compilation
                rates = [rows * new / timed(draw, seed, device) for seed in range(1, options.repeat + 1)]
                found[f"{name}, {rows} rows"] = rates
                print(f"{name}, {rows} rows: {statistics.median(rates):.0f} tokens/s ({spread(rates)})")
                write(options.out, found)  # the next may fail
    elif part == "training":
        found |= training(model, prompt, new, **how)
    else:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
        os.environ.setdefault("MASTER_PORT", "29513")
        steps = Steps(microbatch_tokens=8192, gradient_checkpointing=True) if part == "large" else STEPS
        with join_ranks(Parallel()) as ranks:
            shards: dict[str, Any] = {"ranks": ranks, "parallel": Parallel(shard=True)}
            found |= training(model, prompt, new, **how, **shards, steps=steps)
    write(options.out, found)
    print(found, flush=True)


def fitting(device: torch.device) -> dict[str, int]:
    """The layers of the large shape: 18 bytes a weight, and the passes, are to fit."""
    least = 135 << 30
    whole = device.type == "cpu" or torch.cuda.get_device_properties(device).total_memory > least
    return {} if whole else {"num_hidden_layers": 12}


def write(out: Path, found: dict[str, Any]) -> None:
    """Leaves what was found so far in the file."""
    out.write_text(json.dumps(found, indent=1) + "\n")


def generates(model: LlamaForCausalLM, prompts: list[list[int]], new: int) -> dict[str, Callable[[int], Any]]:
    """What draws the workload with transformers, by name, each called with a seed."""

    def generate(cache: str) -> Callable[[int], Any]:
        def call(seed: int) -> Any:
            torch.manual_seed(seed)
            return model.generate(
                input_ids=torch.tensor(prompts, device=model.device),
                do_sample=True,
                num_return_sequences=SAMPLES,
                min_new_tokens=new,
                max_new_tokens=new,
                cache_implementation=cache,
                pad_token_id=0,
            )

        return call

    return {f"generate, {cache} cache": generate(cache) for cache in ("dynamic", "static")}


def engines(
    model: LlamaForCausalLM, prompts: list[list[int]], new: int, device: torch.device
) -> dict[str, Callable[[int], Any]]:
    """What draws the same with an engine of ours."""

    def native(recorded: bool) -> Callable[[int], Any]:
        # With a configuration of its own, in which stands how it attends.
        own = LlamaForCausalLM(copy.deepcopy(model.config)).to(device, torch.bfloat16)
        own.load_state_dict(model.state_dict())
        engine = NativeEngine(
            own,
            decode=lambda tokens: "",
            stop_tokens=[],
            config=NativeConfig(rows=len(prompts) * SAMPLES, cuda_graphs=recorded),
        )

        def call(seed: int) -> None:
            sampling = Sampling(max_new_tokens=new)
            for number, prompt in enumerate(prompts):
                for k in range(SAMPLES):
                    how: dict[str, Any] = {"seed": seed, "task": str(number), "sample": k}
                    engine.submit(Request(prompt=tuple(prompt), sampling=sampling, **how))
            while engine.busy:
                engine.poll()

        return call

    found = {"native": native(True)}
    return found | ({"native, kernel by kernel": native(False)} if device.type == "cuda" else {})


def training(
    model: LlamaForCausalLM,
    prompt: int,
    new: int,
    *,
    repeat: int,
    peak: float,
    device: torch.device,
    steps: Steps = STEPS,
    **how: Any,
) -> dict[str, Any]:
    """One GRPO step an update on 8 groups of 8."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    parameters = sum(p.numel() for p in model.parameters())
    learner = Learner(model, GRPO, optim=Optim(lr=1e-6), steps=steps, **how)
    batch = rows(prompt, new, model.config.vocab_size)
    seconds = [timed(lambda _: learner.update(batch), 0, device) for _ in range(repeat + 1)][1:]
    fed = len(pack(batch).tokens)
    # 6 operations a weight and token, forward and back; the look-up of the tied embedding is no product.
    work = 6 * parameters * fed
    return {
        "seconds": seconds,
        "packed_tokens": fed,
        "trained_tokens": int(batch.mask.sum()),
        "packed_tokens_per_second": fed / statistics.median(seconds),
        "flops_utilisation": work / statistics.median(seconds) / (peak * 1e12) if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    }


def rows(prompt: int, new: int, vocabulary: int) -> Batch:
    """8 random prompts with 8 random answers each, half of them right."""
    out, groups = [], []
    for group in range(SAMPLES):
        asked = torch.randint(vocabulary, (prompt,)).tolist()
        for k in range(SAMPLES):
            tokens = asked + torch.randint(vocabulary, (new,)).tolist()
            reward = [0.0] * (len(tokens) - 1) + [float(k % 2)]
            out.append(Trajectory.given(tokens, prompt, reward=reward))
            groups.append(group)
    return Batch.of(out, groups)


def timed(work: Callable[[int], Any], seed: int, device: torch.device) -> float:
    """Seconds until the device is done."""
    begin = time.perf_counter()
    work(seed)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def spread(values: list[float]) -> str:
    """Least to greatest."""
    return f"{min(values):.0f}–{max(values):.0f}"


if __name__ == "__main__":
    main()
