"""The engine and the learner on a GPU, with random weights in the shape of a Llama of 1.2 billion parameters.

Sampling at 64 and 256 rows (groups of 8, prompts of 128 tokens, 256 new tokens each, nothing ends early)
against transformers' `generate` with a dynamic and with a static cache; our own decoding with recorded steps
and without. Then GRPO steps on 64 such rows: tokens a second, the share of the device's arithmetic that this
uses, and peak memory; the same as the one rank of a group, with weights as shards (FSDP2 and NCCL). With
--large steps of a Llama of 6.7 billion parameters too, so, with gradient checkpointing: some 130 GiB.

    python benchmarks/gpu.py --peak-tflops 989 --large --out gpu.json
    python benchmarks/gpu.py --tiny --device cpu --out try.json      (tries the script out, anywhere)
"""

import argparse
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
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script out")
    parser.add_argument("--large", action="store_true", help="train the large shape as well")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, default=0.0, help="of the device in bf16, for its share")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    prompt, new, most = (8, 6, [16, 32]) if options.tiny else (128, 256, [64, 256])
    torch.manual_seed(0)
    config = LlamaConfig(**(TINY if options.tiny else BILLION), **NOBODY)
    with device:
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in model.parameters()),
        "sampling": {},
    }
    for rows in most:
        prompts = torch.randint(config.vocab_size, (rows // SAMPLES, prompt)).tolist()
        for name, draw in samplers(model, prompts, new, device).items():
            draw(0)  # warm-up: recordings and compilation
            rates = [rows * new / timed(draw, seed, device) for seed in range(1, options.repeat + 1)]
            found["sampling"][f"{name}, {rows} rows"] = rates
            print(
                f"{name}, {rows} rows: {statistics.median(rates):.0f} tokens/s ({spread(rates)})", flush=True
            )
    how = {"repeat": options.repeat, "peak": options.peak_tflops, "device": device}
    found["training"] = training(model, prompt, new, **how)
    print(found["training"])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    os.environ.setdefault("MASTER_PORT", "29513")
    with join_ranks(Parallel()) as ranks:
        shards: dict[str, Any] = {"ranks": ranks, "parallel": Parallel(shard=True)}
        found["training, shards"] = training(model, prompt, new, **how, **shards)
        print(found["training, shards"])
        if options.large:
            del model
            config = LlamaConfig(**(TINY if options.tiny else LARGE), **NOBODY)
            with device:
                model = LlamaForCausalLM(config).to(torch.bfloat16)
            steps = Steps(microbatch_tokens=8192, gradient_checkpointing="full")
            found["training, large, shards"] = training(model, prompt, new, **how, **shards, steps=steps)
            print(found["training, large, shards"])
    options.out.write_text(json.dumps(found, indent=1) + "\n")


def samplers(
    model: LlamaForCausalLM, prompts: list[list[int]], new: int, device: torch.device
) -> dict[str, Callable[[int], Any]]:
    """What draws the same workload, by name, each called with a seed."""

    def generate(cache: str) -> Callable[[int], Any]:
        def call(seed: int) -> Any:
            torch.manual_seed(seed)
            model.set_attn_implementation("sdpa")
            return model.generate(
                input_ids=torch.tensor(prompts, device=device),
                do_sample=True,
                num_return_sequences=SAMPLES,
                min_new_tokens=new,
                max_new_tokens=new,
                cache_implementation=cache,
                pad_token_id=0,
            )

        return call

    def native(recorded: bool) -> Callable[[int], Any]:
        copy = LlamaForCausalLM(model.config).to(device, torch.bfloat16)
        copy.load_state_dict(model.state_dict())
        engine = NativeEngine(
            copy,
            decode=lambda tokens: "",
            stop_tokens=[],
            config=NativeConfig(rows=len(prompts) * SAMPLES, cuda_graphs=recorded),
        )

        def call(seed: int) -> None:
            for number, prompt in enumerate(prompts):
                for k in range(SAMPLES):
                    sampling = Sampling(max_new_tokens=new)
                    engine.submit(
                        Request(
                            prompt=tuple(prompt), sampling=sampling, seed=seed, task=str(number), sample=k
                        )
                    )
            while engine.busy:
                engine.poll()

        return call

    found = {"generate, dynamic cache": generate("dynamic"), "generate, static cache": generate("static")}
    if device.type == "cuda":
        found["native, kernel by kernel"] = native(False)
    return found | {"native": native(True)}


def training(
    model: LlamaForCausalLM,
    prompt: int,
    new: int,
    *,
    repeat: int,
    peak: float,
    device: torch.device,
    steps: Steps = Steps(microbatch_tokens=16_384),  # noqa: B008 - frozen
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
