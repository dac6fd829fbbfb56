"""Measure posttrain on a GPU within a quarter of an hour: eleven parts, those that decide most first.

facts    what the device can do: products, pinned and pageable copies, digests of weights
alike    are updates, answers and a weight sync the same as on a CPU? If not, all else is only speed
attend   one layer's attention of a pack: as the product does it, and in three other ways
train    GRPO steps of a model of 1.5 billion weights: tokens a second, the share of the device's arithmetic,
         peak memory against the estimate, launches and the dearest kernels, memory of a checkpoint
decode   answers of that model with 64 and 256 rows and with long prompts, with CUDA graphs and without
sync     a weight sync within the process, and its steps through shared memory
moe      Qwen3-30B-A3B with 4 of its 48 layers: a step, decoding, and the KL of sampler and learner
shards   one rank as shards (FSDP2 and NCCL), also resharded, and with shares in CPU memory
seven    an adapter of a model of 7 billion weights and its sampler together
thread   a sampler that captures graphs in a thread next to a learner that trains
compiled the first step of `train` with steps.compile: seconds to compile, and the same numbers

Each part is a process with a time limit, which imports while the part before it runs. A finding is a line of
OUT/results.jsonl at once, so a part that hangs loses only what is not measured yet. Weights are random.

    python benchmarks/gpu_quarter.py --out OUT --budget 560
    python benchmarks/gpu_quarter.py --out OUT --only attend,train --budget 140
    python benchmarks/gpu_quarter.py --out OUT --tiny --device cpu       (small shapes, anywhere)
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

# isort: off
import posttrain  # noqa: F401 - before torch, so that its threads wait as those of a run do

# isort: on
import torch
import transformers
from attention import lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from posttrain.engines.native.engine import NativeConfig, NativeEngine
from posttrain.learner import varlen
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Optim
from posttrain.learner.pack import pack
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.ranks import Parallel
from posttrain.loop.weight_sync import Publisher
from posttrain.methods.table import DPO, GRPO, SFT
from posttrain.models.fingerprint import NamedTensors, digest
from posttrain.plan.memory import Shape, estimate
from posttrain.process.machine import peak_tflops
from posttrain.rollout.snapshots import SharedMemoryStore, load_snapshot
from posttrain.types import Batch, Completion, Request, Sampling, Trajectory

Part = Callable[[Namespace], None]
GIB = 1 << 30
ANSWERS = 8
"""Answers to a prompt."""
WORDS = 500
"""Tokens are drawn from the first of the vocabulary, which all shapes have."""
CANARY = list(range(12))
NAMES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "num_experts num_experts_per_tok moe_intermediate_size head_dim"
)
SHAPES = {
    "1.5B": (151_936, 1536, 8960, 28, 12, 2),
    "7B": (152_064, 3584, 18_944, 28, 28, 4),
    "moe": (151_936, 2048, 6144, 4, 32, 4, 128, 8, 768, 128),
    "tiny": (512, 64, 128, 2, 4, 2),
    "tiny moe": (512, 64, 64, 2, 4, 2, 8, 2, 32, 16),
}
"""Sizes of models, in the order of NAMES: Qwen2, and Qwen3 if it has experts."""
GROUPS = {
    "7 groups x 8 x 270": (7, 8, 150, 270),
    "8 rows of 2000": (8, 1, 150, 1850),
    "1 group x 2 x 8000": (1, 2, 200, 8000),
}
"""Groups, answers to each, tokens of a prompt and of an answer."""

# ---------------------------------------------------------------------- the parts


def facts(options: Namespace) -> None:
    is_gpu = options.device != "cpu"
    name = torch.cuda.get_device_name() if is_gpu else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record(options, **versions, device=name, cpus=os.cpu_count())
    n = 512 if options.tiny else 8192
    matrix = torch.randn(n, n, device=options.device, dtype=torch.bfloat16)
    product = seconds(options, torch.matmul, matrix, matrix, repeat=10, warmup=3)
    record(options, product_tflops=2 * n**3 / product / 1e12)
    host = torch.zeros(1 << (22 if options.tiny else 30), dtype=torch.uint8)
    device = host.to(options.device, copy=True)
    copies: dict[str, tuple[Any, ...]] = {
        "pageable_to_device": (device.copy_, host),
        "device_to_pageable": (host.copy_, device),
        "digest_cpu": (digest, [("x", host)]),
        "digest_device": (digest, [("x", device)]),
    }
    if is_gpu:
        copies["pinned_to_device"] = (device.copy_, host.pin_memory(), True)
    for way, call in copies.items():
        record(options, **{f"{way}_gb_s": host.nbytes / seconds(options, *call) / 1e9})


def alike(options: Namespace) -> None:
    """Compare two updates, answers and a weight sync of small models on a CPU and on the device."""
    small, batch = Namespace(tiny=True, device="cpu"), random_batch(options, 3, 4, 300, 700)
    recompute = Steps(gradient_checkpointing=True, microbatch_tokens=300)
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "grpo": (GRPO, {}),
        "sft": (SFT, {}),
        "dpo": (DPO, {"lora": Lora(rank=4)}),
        "lora": (GRPO, {"lora": Lora(rank=4)}),
        "checkpointing": (GRPO, {"steps": recompute}),
        "epochs": (GRPO, {"steps": Steps(epochs=2, minibatches=2)}),
    }
    for name, (method, settings) in cases.items():
        for dtype in (torch.float32, torch.bfloat16):
            metrics = []
            for device in ("cpu", options.device):
                model = random_model(small, dtype=dtype).to(device)
                learner = Learner(model, method, optim=Optim(lr=1e-3), seed=3, **settings)
                metrics += [learner.update(batch).metrics for _ in range(2)]
            losses, norms = ([side[key] for side in metrics] for key in ("loss", "grad_norm"))
            gap = abs(norms[2] - norms[0]) / norms[0]
            record(options, case=name, dtype=str(dtype), gap=gap, losses=losses, grad_norms=norms)
    model = random_model(small, dtype=torch.float32)
    prompts = [[(7 * i + j) % WORDS for j in range(5 + 9 * i)] for i in range(6)]
    places: dict[str, tuple[str, dict[str, Any]]] = {
        "cpu": ("cpu", {"decode_kernel": False}),
        "captured": (options.device, {}),
        "not captured": (options.device, {"cuda_graphs": False}),
    }
    answers = {}
    for name, (device, settings) in places.items():
        engine = new_engine(copy.deepcopy(model).to(device), rows=16, **settings)
        answers[name] = [answer.tokens for answer in sample(engine, prompts, 40, samples=4)]
    record(options, answers_equal={name: tokens == answers["cpu"] for name, tokens in answers.items()})
    models = [random_model(small).to(options.device) for _ in range(2)]
    learner, engine = Learner(models[0], GRPO), new_engine(models[1], rows=8)
    load_snapshot(engine, Publisher(learner, CANARY).snapshot(0))
    record(options, weight_sync="verified")


def attend(options: Namespace) -> None:
    """Time one layer's attention of packs, forward and back.

    product: as the learner does it, in one call if `one_call`. by_branch: as it does without that call.
    one_causal_row: the pack as a single row, the least number of launches, and more arithmetic. lower_right:
    a call for each branch without a mask and with nothing recomputed.
    """
    heads, key_heads, size = (4, 2, 32) if options.tiny else (12, 2, 128)
    plain: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    alone: dict[str, Any] = {"scale": size**-0.5, "window": None, "softcap": None}
    for label, shape in (GROUPS | {"2 groups x 8 x 1000": (2, 8, 200, 1000)}).items():
        packed = pack(random_batch(options, *shape))
        n = len(packed.tokens) + packed.spare
        shapes = [(1, h, n, size) for h in (heads, key_heads, key_heads)]
        draw = partial(torch.randn, device=options.device, dtype=torch.bfloat16, requires_grad=True)
        qkv = [draw(*one) for one in shapes]
        ways: dict[str, Callable[..., torch.Tensor]] = {
            "product": partial(packed.attend, **alone),
            "by_branch": partial(replace(packed, compiled=False).attend, **alone),
            "one_causal_row": partial(scaled_dot_product_attention, **plain),
            "lower_right": partial(lower_right, packed),
        }
        times: dict[str, Any] = {"one_call": varlen.suits(qkv[0], qkv[2], None)}
        for name, way in ways.items():
            try:
                times[f"{name}_ms"] = 1e3 * seconds(options, forward_and_back, way, qkv, repeat=3)
            except Exception as error:  # a kernel that this device lacks must not end the comparison
                times[f"{name}_ms"] = f"{type(error).__name__}: {error}"[:120]
        record(options, shape=label, tokens=n, **times)


def forward_and_back(way: Callable[..., torch.Tensor], qkv: list[torch.Tensor]) -> None:
    """Attend, and compute the gradients of queries, keys and values."""
    torch.autograd.grad(way(*qkv).sum(), qkv)


def train(options: Namespace) -> None:
    learner = grpo_learner(options)
    for label in GROUPS:
        measure_steps(options, learner, label)
    tensors = learner.tensors()
    size = sum(x.nbytes for file in tensors.values() for x in file.values())
    record(options, checkpoint_gib=size / GIB)


def compiled(options: Namespace) -> None:
    learner = grpo_learner(options, compile=True)
    label = next(iter(GROUPS))
    begin = time.perf_counter()
    learner.update(signed_batch(options, label))
    record(options, shape=label, first_step_s=time.perf_counter() - begin)
    measure_steps(options, learner, label)


def grpo_learner(options: Namespace, **steps: Any) -> Learner:
    """Return a learner of the model of 1.5 billion weights."""
    steps = {"microbatch_tokens": 16_384} | steps
    return Learner(random_model(options), GRPO, optim=Optim(lr=1e-6), steps=Steps(**steps))


def signed_batch(options: Namespace, label: str) -> Batch:
    """Return a batch of GROUPS with the advantages 1 and -1 in turn."""
    batch = random_batch(options, *GROUPS[label])
    sign = (torch.arange(len(batch)) % 2 * 2.0 - 1)[:, None]  # the only answer of a group has none
    return replace(batch, advantage=batch.mask * sign)


def measure_steps(options: Namespace, learner: Learner, label: str) -> None:
    """Record the speed of steps on a batch of GROUPS, and the launches of one."""
    batch, kind = signed_batch(options, label), torch.device(options.device).type
    shape, budget = Shape.of(learner.net.policy), learner.microbatch_tokens
    expected = estimate(shape, dtype=torch.bfloat16, microbatch_tokens=budget, device=kind).total / GIB
    tokens = len(pack(batch).tokens)
    learner.flops, first = 0.0, learner.update_count
    step_s = seconds(options, learner.update, batch, repeat=2)
    tflops = learner.flops / (learner.update_count - first) / step_s / 1e12
    speed = {"step_s": step_s, "tokens_s": tokens / step_s, "tflops": tflops}
    if peak := options.peak_tflops or peak_tflops(learner.net.policy.device):
        speed["mfu"] = tflops / peak
    record(options, shape=label, packed_tokens=tokens, **speed, estimated_gib=expected)
    if kind == "cuda" and GROUPS[label][3] < 8000:
        record(options, shape=label, **kernels(partial(learner.update, batch)))


def kernels(work: Callable[[], Any]) -> dict[str, Any]:
    """Return the number of launches, the device's time, and the dearest kernels: name, calls and ms."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return {
        "launches": sum(event.count for event in events if event.key == "cudaLaunchKernel"),
        "device_ms": sum(event.self_device_time_total for event in events) / 1e3,
        "kernels": [(e.key[:60], e.count, round(e.self_device_time_total / 1e3, 1)) for e in events[:12]],
    }


def decode(options: Namespace) -> None:
    """Sample with 1.5 billion weights. The first round captures the graphs that the second replays."""
    for rows, new in ((8, 8),) if options.tiny else ((64, 256), (256, 256)):
        prompts = random_prompts(rows // ANSWERS, 6 if options.tiny else 128)
        for graphs in (True, False):
            engine = new_engine(random_model(options), rows=rows, cuda_graphs=graphs)
            first_s = seconds(options, sample, engine, prompts, new, 0, warmup=0)
            speed = rows * new / seconds(options, sample, engine, prompts, new, 1, warmup=0)
            record(options, rows=rows, graphs=graphs, first_s=first_s, tokens_s=speed, **captures(engine))
            del engine
    engine = new_engine(random_model(options), rows=2 * ANSWERS)
    length, new = (60, 4) if options.tiny else (7500, 200)
    round_s = seconds(options, sample, engine, random_prompts(2, length), new, warmup=0)
    record(options, rows=2 * ANSWERS, prompt_tokens=length, new=new, seconds=round_s)


def captures(engine: NativeEngine) -> dict[str, Any]:
    """Return how many shapes are captured as graphs, and whether capturing was given up."""
    step = engine.runner._recorded
    return {"captures": len(step._replays) if step else 0, "given_up": bool(step and step._refused)}


def sync(options: Namespace) -> None:
    learner, engine = Learner(random_model(options), GRPO), new_engine(random_model(options), rows=8)
    publisher = Publisher(learner, CANARY)
    in_process_s = seconds(options, lambda: load_snapshot(engine, publisher.snapshot(0)), repeat=2)
    record(options, in_process_s=in_process_s)

    def weights() -> NamedTensors:
        return ((name, tensor.detach()) for name, tensor in learner.weights())

    store = SharedMemoryStore()
    try:
        first_s = seconds(options, store.put, 1, weights, warmup=0)
        store.retain(set())  # the second version overwrites the memory of the first
        put_s = seconds(options, store.put, 2, weights, warmup=0)
        stored = store.put(3, weights)
        digest_s = seconds(options, lambda: digest(stored.open()), warmup=0)
        load_s = seconds(options, lambda: engine.load(stored.open(), 3), warmup=0)
        times = {"put_first_s": first_s, "put_s": put_s, "digest_s": digest_s, "load_s": load_s}
        record(options, gib=stored.size / GIB, **times)
    finally:
        store.close()


def moe(options: Namespace) -> None:
    """Train on sampled answers: kl/mismatch compares sampler and learner under the same weights."""
    groups, length, new = (1, 20, 4) if options.tiny else (4, 150, 230)
    engine = new_engine(random_model(options, "moe"), rows=groups * ANSWERS)
    prompts = random_prompts(groups, length)
    round_s = seconds(options, sample, engine, prompts, new)
    record(options, tokens_s=groups * ANSWERS * new / round_s, **captures(engine))
    rows = []
    for n, answer in enumerate(sample(engine, prompts, new)):
        columns: dict[str, list[float]] = {
            "logp_gen": [0.0] * length + answer.logp_gen,
            "logp_policy": [0.0] * length + answer.logp_policy,
            "reward": [0.0] * (length + new - 1) + [float(n % 2)],
        }
        rows.append(Trajectory.given(prompts[n // ANSWERS] + answer.tokens, length, **columns))
    batch = Batch.of(rows, [n // ANSWERS for n in range(len(rows))])
    model = random_model(options, "moe")
    learner = Learner(model, GRPO, microbatch_tokens=8192)
    metrics = learner.update(batch).metrics
    step_s = seconds(options, learner.update, batch, repeat=2, warmup=0)
    experts, mismatch = model.config._experts_implementation, metrics.get("kl/mismatch")
    record(options, experts=experts, step_s=step_s, mismatch=mismatch)


def shards(options: Namespace) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    os.environ.setdefault("MASTER_PORT", "29531")
    batch, steps = random_batch(options, *GROUPS["7 groups x 8 x 270"]), Steps(microbatch_tokens=8192)
    with join_ranks(Parallel()) as ranks:
        for more in ({}, {"reshard_after_forward": True}, {"cpu_offload": True}):
            parallel = Parallel(shard=True, **more)
            learner = Learner(random_model(options), GRPO, steps=steps, ranks=ranks, parallel=parallel)
            step_s = seconds(options, learner.update, batch)
            weights_s = seconds(options, lambda weights=learner.weights: [None for _ in weights()], warmup=0)
            record(options, **more, step_s=step_s, weights_s=weights_s)
            del learner


def seven(options: Namespace) -> None:
    learner = Learner(random_model(options, "7B"), GRPO, lora=Lora(rank=16), microbatch_tokens=8192)
    step_s = seconds(options, learner.update, random_batch(options, 3, 8, 150, 270), repeat=2)
    record(options, lora_step_s=step_s)
    groups, length, new = (1, 6, 4) if options.tiny else (8, 128, 128)
    engine = new_engine(random_model(options, "7B"), rows=groups * ANSWERS)
    round_s = seconds(options, sample, engine, random_prompts(groups, length), new)
    record(options, tokens_s=groups * ANSWERS * new / round_s)


def thread(options: Namespace) -> None:
    learner = Learner(random_model(options, "tiny"), GRPO, microbatch_tokens=2048)
    engine, prompts = new_engine(random_model(options, "tiny"), rows=16), random_prompts(4, 9)
    faults: list[str] = []

    def draw() -> None:
        try:
            for seed in range(3):
                engine.runner.cache.columns = engine.runner.cache.rows = 0  # every shape is captured again
                sample(engine, prompts, 30, seed, samples=4)
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}"[:300])

    sampler = threading.Thread(target=draw)
    sampler.start()
    batch, steps = random_batch(options, 3, 4, 400, 800), 0
    while sampler.is_alive() and steps < 200:
        learner.update(batch)
        steps += 1
    sampler.join()
    record(options, faults=faults, steps_meanwhile=steps, **captures(engine))


# ---------------------------------------------------------------------- what the parts share


def random_model(options: Namespace, shape: str = "1.5B", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a model of random weights, the same at each call, made in its dtype and on its device."""
    if options.tiny:
        shape = "tiny moe" if shape == "moe" else "tiny"
    sizes: dict[str, Any] = dict(zip(NAMES.split(), SHAPES[shape], strict=False))
    no_stop = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    more = {"max_position_embeddings": 1 << 16, "tie_word_embeddings": shape in ("1.5B", "tiny")} | no_stop
    has_experts = "num_experts" in sizes
    config = (Qwen3MoeConfig if has_experts else Qwen2Config)(**sizes, **more)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # float32 first would double the memory
    try:
        with torch.device(options.device):
            return (Qwen3MoeForCausalLM if has_experts else Qwen2ForCausalLM)(config).eval()
    finally:
        torch.set_default_dtype(before)


def random_prompts(count: int, length: int) -> list[list[int]]:
    return torch.randint(WORDS, (count, length)).tolist()


def random_batch(options: Namespace, groups: int, samples: int, prompt: int, new: int) -> Batch:
    """Return groups of random answers to random prompts, every other answer right."""
    if options.tiny:
        prompt, new = max(4, prompt // 40), max(4, new // 40)
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(groups):
        start = torch.randint(WORDS, (prompt,), generator=generator).tolist()
        for k in range(samples):
            tokens = start + torch.randint(WORDS, (new,), generator=generator).tolist()
            reward = [0.0] * (len(tokens) - 1) + [float(k % 2)]
            rows.append(Trajectory.given(tokens, prompt, reward=reward))
    return Batch.of(rows, [n // samples for n in range(len(rows))])


def new_engine(model: PreTrainedModel, **config: Any) -> NativeEngine:
    """Return a sampler whose answers end at their longest alone."""
    return NativeEngine(model, decode=lambda tokens: "", stop_tokens=[], config=NativeConfig(**config))


def sample(
    engine: NativeEngine, prompts: list[list[int]], new: int, seed: int = 0, samples: int = ANSWERS
) -> list[Completion]:
    """Return the answers to each prompt, in order."""
    sampling = Sampling(max_new_tokens=new)
    for number, prompt in enumerate(prompts):
        for k in range(samples):
            key: dict[str, Any] = {"seed": seed, "task": str(number), "sample": k}
            engine.submit(Request(prompt=tuple(prompt), sampling=sampling, **key))
    answers: dict[int, Completion] = {}
    while engine.busy:
        answers.update(engine.poll())
    return [answers[ticket] for ticket in sorted(answers)]


def seconds(
    options: Namespace, work: Callable[..., Any], *inputs: Any, repeat: int = 1, warmup: int = 1
) -> float:
    """Return the mean seconds of a call, until the device is idle."""
    wait = torch.cuda.synchronize if options.device != "cpu" else lambda: None
    for _ in range(warmup):
        work(*inputs)
    wait()
    begin = time.perf_counter()
    for _ in range(repeat):
        work(*inputs)
    wait()
    return (time.perf_counter() - begin) / repeat


def record(options: Namespace, **values: Any) -> None:
    """Append a line to the results, with the peak of the GPU's memory since the line before, and print it."""
    if torch.cuda.is_initialized():
        values["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.reset_peak_memory_stats()
    rounded = {key: float(f"{x:.4g}") if isinstance(x, float) else x for key, x in values.items()}
    line = json.dumps({"part": options.part} | rounded)
    with (options.out / "results.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


# ---------------------------------------------------------------------- the processes

PARTS = (facts, alike, attend, train, decode, sync, moe, shards, seven, thread, compiled)
LIMITS_S = dict(zip(PARTS, (25, 80, 50, 90, 80, 40, 45, 45, 70, 30, 90), strict=True))
LEAST_S = 10
"""A part is not begun with less time than this."""


def main() -> None:
    """Run the parts one after the other until the budget is spent."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all parts")
    parser.add_argument("--only", default="", help="names of parts, with commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak-tflops", type=float, help="of a GPU that posttrain does not know")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    by_name = {part.__name__: part for part in PARTS}
    if options.part:
        print("ready", flush=True)
        sys.stdin.readline()  # its turn
        by_name[options.part](options)
        return
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"this PyTorch ({torch.__version__}) can use no GPU; --tiny --device cpu runs anywhere")
    unknown = set(names := options.only.split(",") if options.only else by_name) - set(by_name)
    if unknown:
        parser.error(f"--only: there is no part {', '.join(unknown)}; the parts are {', '.join(by_name)}")
    run_parts(options, [part for name, part in by_name.items() if name in names])


def run_parts(options: Namespace, parts: Sequence[Part]) -> None:
    """Give each part its turn, and record how it ended."""
    end = time.monotonic() + options.budget
    waiting: subprocess.Popen[bytes] | None = start(options, parts[0])
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        process, waiting = waiting, start(options, following) if following else None
        log = options.out / f"{part.__name__}.log"
        while process.poll() is None and not log.stat().st_size and time.monotonic() < end:
            time.sleep(0.1)  # it imports, which counts for no part
        begin = time.monotonic()
        left = min(LIMITS_S[part], end - begin)
        status: int | str = "the budget is spent"
        if left >= LEAST_S:
            try:
                process.communicate(b"go\n", timeout=left)
                status = process.returncode
            except subprocess.TimeoutExpired:
                status = "out of time"
        process.kill()
        process.wait()
        record(options, part=part.__name__, status=status, seconds=time.monotonic() - begin)
        if status:
            print(log.read_text(errors="replace")[-1500:], flush=True)


def start(options: Namespace, part: Part) -> subprocess.Popen[bytes]:
    """Start the process of a part, which imports and then waits for its turn."""
    command = [sys.executable, __file__, "--part", part.__name__, *["--tiny"] * options.tiny]
    for key in ("out", "device"):
        command += [f"--{key}", str(getattr(options, key))]
    command += ["--peak-tflops", str(options.peak_tflops)] if options.peak_tflops else []
    with (options.out / f"{part.__name__}.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


if __name__ == "__main__":
    main()
