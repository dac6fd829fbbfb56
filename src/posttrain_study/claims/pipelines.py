"""Run pipelines of recipes/ in folders of experiments, once each."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import RunError


def run_pipeline(name: str, place: Path, seed: int, *, seeded: Sequence[str], trained: Sequence[str]) -> None:
    """Run a pipeline into PLACE with this seed, on one thread; one that is complete there is not run again.

    seeded: its stages with a key `seed`; trained: those whose seed is `run.seed`.
    """
    if (place / "complete").exists():
        return
    shutil.rmtree(place, ignore_errors=True)
    sets = [f"{stage}.seed={seed}" for stage in seeded]
    for stage in trained:
        sets += [f"{stage}.run.seed={seed}", f"{stage}.run.threads=1"]
    words = [sys.executable, "-m", "posttrain", "train", name, "--run-dir", str(place), "--quiet"]
    words += [word for value in sets for word in ("--set", value)]
    if code := subprocess.run(words, check=False).returncode:
        raise RunError(f"recipes/{name}.toml", f"exit status {code}", f"its runs are in {place}")
    (place / "complete").touch()


def evaluations(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics that have an evaluation, in their order."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as lines:
        return [line for line in map(json.loads, lines) if "eval/accuracy" in line]
