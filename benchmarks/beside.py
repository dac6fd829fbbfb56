"""Sampling, a GRPO step and an SFT step beside a process that keeps one core busy, on both sides.

Each is measured three times over: on the quiet machine; beside the other process, which computes at normal
priority and waits for nothing; and, as the fair share, on the quiet machine with one thread less, since one
core is the other's.

    python benchmarks/beside.py --model DIR --data hh_harmless_test.jsonl.gz --out runs/bench
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
Result = dict[str, Any]


def tokens_per_second(result: Result) -> float:
    """Of the only repeat."""
    return float(result["repeats"][0]["tokens_per_second"])


def steps_per_second(result: Result) -> float:
    """Of the last step: the first one grows memory and warms caches."""
    return 1 / float(result["steps"][-1]["seconds"])


# What is measured, how it is read, and the scripts of the two sides with their options.
KINDS: dict[str, tuple[Callable[[Result], float], str, str, list[str]]] = {
    "sampling, tokens/s": (
        tokens_per_second,
        "hf_generate",
        "native_generate",
        ["--repeat", "1", "--max-new-tokens", "16"],
    ),
    "GRPO steps/s": (steps_per_second, "trl_grpo", "native_grpo", ["--steps", "2", "--seed", "0"]),
    "SFT, tokens/s": (
        tokens_per_second,
        "trl_sft",
        "native_offline",
        ["--repeat", "1", "--steps", "2", "--rows", "8"],
    ),
}


def main() -> None:
    """Measures everything that is not there yet, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--trl", type=Path, default=Path(".venv-trl/bin/python"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of both sides")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print("| what | side | quiet | fair share | beside | slower than its share |\n|---|---|---|---|---|---|")
    for kind, (read, theirs, ours, words) in KINDS.items():
        for script in (theirs, ours):
            found = {
                state: read(measured(script, words, state, options)) for state in ("quiet", "share", "beside")
            }
            cells = " | ".join(f"{value:.3g}" for value in found.values())
            print(f"| {kind} | {script} | {cells} | {found['share'] / found['beside']:.2f}× |", flush=True)


def measured(script: str, words: list[str], state: str, options: argparse.Namespace) -> Result:
    """What the script wrote in this state of the machine; it is run unless its file is there."""
    out = options.out / f"beside-{script}-{state}.json"
    if not out.exists():
        python = sys.executable if script.startswith(("native", "hf")) else str(options.trl)
        command = [
            python,
            str(HERE / f"{script}.py"),
            "--model",
            str(options.model),
            "--out",
            str(out),
            *words,
        ]
        command += ["--threads", str(options.threads - (state == "share"))]
        command += ["--compute" if script.endswith("grpo") else "--dtype", options.dtype]
        if script == "hf_generate":
            command += ["--cache", "dynamic"]  # the static one is no faster, and compiles for minutes
        if "sft" in script or "offline" in script:
            command += ["--data", str(options.data)]
        if script == "native_offline":
            command += ["--method", "sft"]
        with busy() if state == "beside" else nobody():
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: Result = json.loads(out.read_text())
    return found


@contextmanager
def nobody() -> Iterator[None]:
    """Nothing else runs."""
    yield


@contextmanager
def busy() -> Iterator[None]:
    """Another process keeps a core busy."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


if __name__ == "__main__":
    main()
