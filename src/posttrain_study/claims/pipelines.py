"""Run pipelines of recipes/ in folders of experiments, once each."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

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
