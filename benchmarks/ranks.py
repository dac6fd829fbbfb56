"""What several ranks cost and save on one machine: memory a rank, seconds a step, bytes, a checkpoint.

SmolLM2 in bfloat16, SFT on rows of random tokens, the same rows for any number of ranks. On two cores ranks
take each other's time: what is shown is that nothing is lost by it, not that it is faster. Bytes are what a
rank gave to others, without those of FSDP2's own messages.

    python benchmarks/ranks.py --model DIR --out runs/bench/ranks.json
"""

import argparse
import json
import os
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

from posttrain.learner.learner import Learner, Steps
from posttrain.learner.optim import Optim
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.ranks import Parallel
from posttrain.learner.shards import local, whole
from posttrain.methods.build import build
from posttrain.models.pretrained import load_model
from posttrain.models.tensor_files import write_tensors
from posttrain.process.machine import configure
from posttrain.types import Batch, Trajectory

MODES = {
    "whole": {},
    "shards": {"shard": True},
    "shards given up": {"shard": True, "reshard_after_forward": True},
}
ROWS, LONGEST, STEPS = 16, 384, 3


def rows() -> tuple[list[Trajectory], list[int]]:
    """Rows of 32 to 384 tokens, each a group by itself."""
    g, out = torch.Generator().manual_seed(0), []
    for n in torch.randint(32, LONGEST, (ROWS,), generator=g).tolist():
        out.append(Trajectory.given(torch.randint(5, 40_000, (n,), generator=g).tolist(), 8))
    return out, list(range(ROWS))


def measured(model: Path, mode: str) -> dict[str, Any]:
    """One rank's numbers."""
    configure()
    with join_ranks(Parallel()) as ranks:
        learner = Learner(
            load_model(model, dtype=torch.bfloat16),
            build("sft", {}, horizon=LONGEST),
            optim=Optim(lr=1e-6),
            steps=Steps(microbatch_tokens=1024),
            ranks=ranks,
            parallel=Parallel(**MODES[mode]),
        )
        every, groups = rows()
        mine = [n for n in groups if n % ranks.size == ranks.rank]
        batch = Batch.of([every[n] for n in mine], mine)
        seconds = []
        for _ in range(STEPS + 1):
            begin = time.monotonic()
            found = learner.update(batch)
            seconds.append(time.monotonic() - begin)
        sent = ranks.sent()
        rests = [m.rest for m in learner.masters.masters if m.rest is not None]
        held = [*learner.model.parameters(), *rests]
        weights = {t.data_ptr(): t.numel() * t.element_size() for t in map(local, held)}
        moments = [local(t) for m in learner.masters.masters for t in m.state.values()]
        begin = time.monotonic()
        with tempfile.TemporaryDirectory() as place:
            gathered = {name: whole(t).cpu() for name, t in learner.masters.tensors().items()}
            if not ranks.rank:
                write_tensors(Path(place) / "model.safetensors", gathered)
            ranks.gather(None, "the checkpoint")
        return {
            "rank": ranks.rank,
            "ranks": ranks.size,
            "mode": mode,
            "weights_mib": sum(weights.values()) / 2**20,
            "moments_mib": sum(t.numel() * t.element_size() for t in moments) / 2**20,
            "step_s": sorted(seconds[1:])[STEPS // 2],
            "imbalance": found.metrics.get("ranks/imbalance", 1.0),
            "sent": {name: count / (STEPS + 1) for name, count in sent.items()},
            "gather_s": time.monotonic() - begin,
            "grad_norm": found.metrics["grad_norm"],
        }


def main() -> None:
    """Measures every number of ranks in every mode, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--mode", choices=list(MODES), help="of this rank: torchrun calls it so")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.mode:
        found = measured(options.model, options.mode)
        Path(f"{options.out}.{found['rank']}").write_text(json.dumps(found))
        return
    every = []
    print(
        "| ranks | each holds | weights and masters | moments | s a step | most over mean | gathering all |"
    )
    print("|---|---|---|---|---|---|---|")
    for size in options.ranks:
        for mode in MODES if size > 1 else ["whole"]:
            words = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(size),
            ]
            own = [__file__, "--model", str(options.model), "--mode", mode, "--out", str(options.out)]
            threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // size))}
            subprocess.run([*words, *own], check=True, env=os.environ | threads)
            parts = [json.loads(Path(f"{options.out}.{rank}").read_text()) for rank in range(size)]
            every.append(parts)
            most = {key: max(part[key] for part in parts) for key in ("weights_mib", "moments_mib", "step_s")}
            print(
                f"| {size} | {mode} | {most['weights_mib']:.0f} MiB | {most['moments_mib']:.0f} MiB "
                f"| {most['step_s']:.2f} | {parts[0]['imbalance']:.2f} | {parts[0]['gather_s']:.1f} s |"
            )
    options.out.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
