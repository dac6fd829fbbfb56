"""Bytes that pass through the controller in an update, in two designs, for 2 and 4 workers.

A worker is a learner rank and a sampler, with GROUPS groups of SIZE answers an update: work grows with them.

    references   episodes stay with their samplers, where ranks fetch them; rank 0 hears and tells of them
    each its own no controller: each rank has its own sampler (the design of torchrun)

Counted are messages between rank 0 and samplers, and those that it sends to ranks, pickled, as they go;
without weights, gradients, and the rows that learners deal to one another.

    pip install 'posttrain[ray]'
    python benchmarks/async/controller.py --model DIR --data gsm8k_train.jsonl --out runs/bench/bytes.json
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

GROUPS, SIZE, TOKENS, UPDATES = 4, 8, 96, 3
DESIGNS = {
    "references": {"async.place": "ray"},
    "each its own": {"async.place": "process"},
}


def recipe(model: Path, data: Path) -> str:
    """Questions of GSM8K, answered in so many tokens."""
    return f"""
[model]
path = "{model.absolute()}"
[method]
name = "grpo"
[task.data]
path = "{data.absolute()}"
[verifier.number]
where = "last"
[sampling]
max_new_tokens = {TOKENS}
[rollout]
group_size = {SIZE}
[eval]
limit = 0
[checkpoint]
every = 0
[run]
updates = {UPDATES}
threads = 1
"""


def measured(file: Path, design: str, workers: int, place: Path) -> dict[str, Any]:
    """Means over updates of rank 0's bytes and of the tokens that all ranks trained on."""
    run = place / f"{design.replace(' ', '-')}-{workers}"
    keys = {"rollout.groups": GROUPS * workers, "train.ranks": workers, **DESIGNS[design]}
    keys |= {"async.samplers": workers if keys["async.place"] == "ray" else 1, "train.balance": "false"}
    sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    words = [sys.executable, "-m", "posttrain", "train", str(file), "--run-dir", str(run), "--quiet", *sets]
    subprocess.run(words, check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = {"design": design, "workers": workers}
    for name in ("samplers/bytes", "ranks/words_bytes", "ranks/rows_bytes", "length/mean", "time/total"):
        found[name] = sum(line.get(name, 0.0) for line in lines) / len(lines)
    found["bytes"] = found["samplers/bytes"] + found["ranks/words_bytes"] + found["ranks/rows_bytes"]
    return found


def main() -> None:
    """Runs both designs, and prints a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    given = options.parse_args()
    place = given.out.parent / "controller"
    place.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in given.data.read_text().splitlines()]
    tasks = [{"prompt": r["question"], "answer": r["answer"].rpartition("#### ")[2]} for r in rows]
    (data := place / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (file := place / "recipe.toml").write_text(recipe(given.model, data))
    found = [measured(file, design, n, place) for n in given.workers for design in DESIGNS]
    given.out.write_text(json.dumps(found, indent=1))
    print("| workers | design | samplers, B | words to ranks, B | rows to ranks, B | in all, B an answer |")
    print("|---|---|---|---|---|---|")
    for row in found:
        each = row["bytes"] / (row["workers"] * GROUPS * SIZE)
        parts = [f"{row[name]:,.0f}" for name in ("samplers/bytes", "ranks/words_bytes", "ranks/rows_bytes")]
        print(f"| {row['workers']} | {row['design']} | {' | '.join(parts)} | {each:,.0f} |")


if __name__ == "__main__":
    main()
