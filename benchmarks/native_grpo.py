"""posttrain's GRPO on the additions, step by step: the other side of trl_grpo.py.

The same prompts in the same order, reward, learning rate, clipping, credit (ddof 1, eps 1e-4) and
loss; fp32 masters, bf16 compute. `--microbatch` is a number of rows: as many prompt groups of eight
samples, each its prompt once and at most 32 new tokens a sample, go through one pass.

    python benchmarks/native_grpo.py --model DIR --steps 30 --seed 0 --out X.json
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

# isort: off
import posttrain  # noqa: F401 - before torch, so that its threads wait as those of a run do

# isort: on
import torch
from prompts import addition_tasks, chat, peak_resident_mib, resident_mib, restart_peak, reward

from posttrain.base.chat import Chat
from posttrain.engines.native.engine import NativeEngine
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.loop.weight_sync import Publisher
from posttrain.methods.build import build
from posttrain.models.pretrained import load_model, load_tokenizer
from posttrain.process.machine import configure
from posttrain.rollout.snapshots import load_snapshot
from posttrain.types import Batch, Request, Sampling, Trajectory

PROMPTS, SAMPLES, NEW = 8, 8, 32


def main() -> None:
    """Measures and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--microbatch", type=int, default=64, help="rows in one forward and backward pass")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--compute", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    configure(options.threads)
    dtype = getattr(torch, options.compute)
    tokenizer = load_tokenizer(options.model)
    speaks = Chat(tokenizer)
    engine = NativeEngine(
        load_model(options.model, dtype=dtype),
        decode=lambda tokens: str(tokenizer.decode(tokens)),
        stop_tokens=sorted(speaks.stops),
    )
    learner = Learner(
        load_model(options.model, dtype=dtype),
        build("grpo", {"credit": "normalised_sample", "eps": 1e-4}, horizon=NEW),
        optim=Optim(lr=2e-5),
        steps=Steps(microbatch_tokens=options.microbatch // SAMPLES * (60 + SAMPLES * NEW)),
    )
    tasks = addition_tasks("train", PROMPTS * options.steps, options.seed)
    canary = speaks.render(chat(tasks[0].question))[-24:]
    publisher = Publisher(learner, canary)
    load_snapshot(engine, publisher.snapshot(0))
    steps: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for n in range(options.steps):
        chosen = tasks[PROMPTS * n : PROMPTS * (n + 1)]
        steps.append({"step": n + 1, **one_step(learner, engine, speaks, chosen, n, publisher, options)})
        print(json.dumps(steps[-1]), flush=True)
    result = {
        "what": "posttrain",
        "settings": {"microbatch": options.microbatch, "seed": options.seed, "threads": options.threads},
        "seconds": time.perf_counter() - begin,
        "steps": steps,
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def one_step(
    learner: Learner,
    engine: NativeEngine,
    speaks: Chat,
    tasks: Any,
    n: int,
    publisher: Publisher,
    options: Any,
) -> dict[str, Any]:
    """Sampling, training and the weight sync of the new weights, which is counted as training."""
    begin = time.perf_counter()
    rows, group, tickets = [], [], {}
    for number, task in enumerate(tasks):
        prompt = speaks.render(chat(task.question))
        for k in range(SAMPLES):
            key = f"{n}/{task.question}"
            request = Request(
                prompt=tuple(prompt),
                sampling=Sampling(max_new_tokens=NEW),
                seed=options.seed,
                task=key,
                sample=k,
            )
            tickets[engine.submit(request)] = (number, prompt, task)
    rewards, lengths = [], []
    while engine.busy:
        for ticket, answer in engine.poll():
            number, prompt, task = tickets[ticket]
            # Groups that agree are not computed; for the memory of a full step none may.
            score = float(ticket % 2) if options.memory else reward(answer.text, task.answer)
            blank = [0.0] * len(prompt)
            rows.append(
                Trajectory(
                    tokens=prompt + answer.tokens,
                    sampled=[False] * len(prompt) + [True] * len(answer.tokens),
                    logp_gen=blank + answer.logp_gen,
                    logp_policy=blank + answer.logp_policy,
                    version=[0] * len(prompt) + answer.version,
                    reward=blank + [0.0] * (len(answer.tokens) - 1) + [score],
                )
            )
            group.append(number)
            rewards.append(score)
            lengths.append(len(answer.tokens))
    sampled = time.perf_counter()
    before = 0.0
    if options.memory:
        restart_peak()
        before = resident_mib()
    update = learner.update(Batch.of(rows, group))
    peak = peak_resident_mib() if options.memory else 0.0
    load_snapshot(engine, publisher.snapshot(n + 1))
    ended = time.perf_counter()
    out = {
        "seconds": ended - begin,
        "seconds_sampling": sampled - begin,
        "seconds_training": ended - sampled,
        "reward": sum(rewards) / len(rewards),
        "mean_length": sum(lengths) / len(lengths),
        "grad_norm": update.metrics["grad_norm"],
        "entropy": update.metrics.get("entropy"),  # not computed where no group has two rewards
    }
    if options.memory:
        out |= {
            "resident_mib_before_training": before,
            "peak_resident_mib_in_training": peak,
            "peak_mib_over_before": peak - before,
        }
    return out


if __name__ == "__main__":
    main()
