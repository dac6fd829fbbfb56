"""What a method costs: seconds a trained token and peak memory of one update, method against method.

Every configuration trains on the same rows (8 prompts of 46 tokens, 8 answers of 12 to 32 tokens, half of
them right) in a process of its own, and every update of it is timed.

    python benchmarks/method_costs.py --model DIR --out X.json
    python benchmarks/method_costs.py --model DIR --out X.json --every-method --groups 4 --repeat 3

With --every-method each line of the table that makes AdamW's steps on log-probabilities is a case, with its
defaults: trust regions have their cases above, `es` has no backward pass, and reward models no vocabulary.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from prompts import peak_resident_mib, resident_mib, restart_peak

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Optim
from posttrain.learner.trust_region import Trust
from posttrain.methods.build import build
from posttrain.methods.table import METHODS
from posttrain.models.pretrained import load_model, skeleton
from posttrain.plan.memory import Shape, estimate
from posttrain.process.machine import configure
from posttrain.types import Batch, Trajectory

GROUPS, SAMPLES, PROMPT = 8, 8, 46
ONCE, FOUR = Steps(microbatch_tokens=2048), Steps(microbatch_tokens=2048, epochs=2, minibatches=2)
LORA = Lora(rank=16)
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"method": "grpo"},
    "ppo, shared critic": {"method": "ppo", "critic": "shared"},
    "grpo, 2 epochs of 2": {"method": "grpo", "steps": FOUR},
    "ppo, shared critic, 2 epochs of 2": {"method": "ppo", "critic": "shared", "steps": FOUR},
    "ppo, own critic, 2 epochs of 2": {"method": "ppo", "critic": "own", "steps": FOUR},
    "grpo, KL to the reference": {"method": "grpo", "options": {"kl_in_loss": 0.1}},
    "rloo, LoRA, float32": {"method": "rloo", "lora": LORA, "dtype": "float32"},
    "trpo, LoRA, float32": {"method": "trpo", "lora": LORA, "dtype": "float32"},
    "trpo, LoRA, float32, products on half of the tasks": {
        "method": "trpo",
        "lora": LORA,
        "dtype": "float32",
        "trust": Trust(fisher_every=2),
    },
}
AGAINST = {
    "ppo, shared critic": "grpo",
    "ppo, shared critic, 2 epochs of 2": "grpo, 2 epochs of 2",
    "ppo, own critic, 2 epochs of 2": "grpo, 2 epochs of 2",
    "grpo, KL to the reference": "grpo",
    "trpo, LoRA, float32": "rloo, LoRA, float32",
    "trpo, LoRA, float32, products on half of the tasks": "rloo, LoRA, float32",
}
"""What each cost is divided by."""


def every_method() -> dict[str, dict[str, Any]]:
    """Return a case for each line of the table that makes AdamW's steps on log-probabilities."""
    return {
        name: {"method": name} | ({"critic": "shared"} if "value" in line.method.needs else {})
        for name, line in METHODS.items()
        if line.step == "adamw" and line.has_loss and "head" not in line.method.needs
    }


def main() -> None:
    """Measures every case in its own process and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=GROUPS, help="prompts, with 8 answers each")
    parser.add_argument("--every-method", action="store_true", help="each line of the table, against grpo")
    parser.add_argument("--only", action="append", help="this case and grpo; may be repeated")
    parser.add_argument("--one", help="only this case, in this process")
    options = parser.parse_args()
    cases = every_method() if options.every_method else CASES
    if options.one:
        configure(options.threads)
        case = measure(cases[options.one], options.model, options.repeat, options.groups)
        options.out.write_text(json.dumps(case))
        return
    found = {}
    for name in ["grpo", *(name for name in options.only or cases if name != "grpo")]:
        words = ["--model", str(options.model), "--out", str(options.out)]
        words += ["--repeat", str(options.repeat), "--threads", str(options.threads)]
        words += ["--groups", str(options.groups), *["--every-method"] * options.every_method]
        subprocess.run([sys.executable, __file__, *words, "--one", name], check=True)
        found[name] = json.loads(options.out.read_text())
        print(f"{name:36} {found[name]}", flush=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n| update | ms a trained token (range) | against | ratio | peak MiB, measured | estimated |")
    print("|---|---|---|---|---|---|")
    for name, f in found.items():
        ms = [1000 * s / f["tokens"] for s in f["seconds"]]
        base = AGAINST.get(name, "grpo" if options.every_method else None)
        ratio = (
            f"{statistics.median(f['seconds']) / statistics.median(found[base]['seconds']):.2f}×"
            if base
            else "–"
        )
        span = f"{statistics.median(ms):.2f} ({min(ms):.2f}–{max(ms):.2f})"
        print(
            f"| {name} | {span} | {base or '–'} | {ratio} | {f['peak_mib']:.0f} | {f['estimated_mib']:.0f} |"
        )


def rows(vocabulary: int, groups: int) -> Batch:
    """Return the same rows for every case."""
    g = torch.Generator().manual_seed(0)

    def words(n: int) -> list[int]:
        return torch.randint(vocabulary, (n,), generator=g).tolist()

    out, numbers = [], []
    for group in range(groups):
        prompt = words(PROMPT)
        for sample in range(SAMPLES):
            n = int(torch.randint(12, 33, (), generator=g))
            reward = [0.0] * (PROMPT + n - 1) + [float(sample % 2)]
            out.append(Trajectory.given(prompt + words(n), PROMPT, reward=reward))
            numbers.append(group)
    batch = Batch.of(out, numbers)
    starts = torch.arange(batch.tokens.shape[1]) == PROMPT
    half = torch.full_like(batch.reward, 0.5)
    return replace(batch, turn_state=starts.long().expand_as(batch.tokens), greedy=half)


def measure(case: dict[str, Any], path: Path, repeat: int, groups: int) -> dict[str, Any]:
    """Return seconds of each update after the first, and the peak of resident memory over the start's."""
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    before = resident_mib()
    restart_peak()
    model = load_model(path, dtype=dtype)
    method = build(case["method"], case.get("options", {}), horizon=32)
    critic = None
    if "critic" in case:
        critic = CriticModel(model, load_model(path, dtype=dtype) if case["critic"] == "own" else None)
    needs_copy = "logp_ref" in method.needs or method.compare is not None
    learner = Learner(
        model,
        method,
        optim=Optim(lr=1e-6),
        steps=case.get("steps", ONCE),
        lora=case.get("lora", Lora()),
        reference=load_model(path, dtype=dtype) if needs_copy else None,
        critic=critic,
        critic_optim=Optim(lr=1e-6),
        trust=case.get("trust", Trust()) if METHODS[case["method"]].step == "trust_region" else None,
    )
    batch, seconds = rows(model.config.vocab_size, groups), []
    own = learner.score(batch).logp.detach()
    batch = replace(batch, logp_gen=own, logp_policy=own)
    for _ in range(repeat + 1):
        begin = time.perf_counter()
        learner.update(batch)
        seconds.append(time.perf_counter() - begin)
    trained = sum(m.parameter.numel() for m in learner.masters.masters)
    shape = Shape.of(skeleton(model.config), trained)
    planned = estimate(
        shape,
        dtype=dtype,
        microbatch_tokens=2048,
        reference=needs_copy,
        critic=shape if case.get("critic") == "own" else None,
        natural=learner.trust is not None,
    )
    return {
        "seconds": seconds[1:],
        "tokens": int(batch.mask.sum()),
        "peak_mib": peak_resident_mib() - before,
        "estimated_mib": planned.total / 2**20,
    }


if __name__ == "__main__":
    main()
