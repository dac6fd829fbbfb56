"""Resume a run: find its checkpoint, and compare its code and data with those that it began with."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import counted
from posttrain.learner.ranks import Ranks
from posttrain.models import checkpoint
from posttrain.recipe.config import find_code_files
from posttrain.recipe.recipe import Recipe
from posttrain.run.rundir import CODE
from posttrain.types import Task, UserError

DATA = "data"
"""Name of the digest of the data."""
COMPARED = 256
"""Number of tasks or records in the digest, spread evenly over all."""


def digest_of_data(data: Sequence[Any]) -> str:
    """Return a digest of tasks or groups of rows that does not depend on where their file is."""
    sample = (data[n] for n in range(0, len(data), max(1, len(data) // COMPARED)))
    rows = [(x.id, [*map(dict, x.messages)], x.answer) if isinstance(x, Task) else x for x in sample]
    return hashlib.blake2b(f"{len(data)} {rows}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def newest_checkpoint(run: Path, every: int, say: Callable[[str], None], ranks: Ranks) -> Path | None:
    """Return the checkpoint to resume from, found by rank 0; None if none was written yet.

    Raises UserError if the checkpoints are missing or damaged, since starting again would delete the metrics.
    """
    newest = (None, []) if ranks.rank else checkpoint.newest(run / "checkpoints", resume=True)
    ranks.follow("the checkpoint")  # rank 0 reads it to the end
    update, (folder, skipped) = ranks.tell((0 if ranks.rank else last_update(run), newest), "the checkpoint")
    cut = bool(checkpoint.leftovers(run / "checkpoints"))  # a kill may have cut off the first checkpoint
    if not folder and (skipped or (update > every > 0 and not cut)):
        why = skipped[0] if skipped else "there is none"
        updates = counted(update, "update")
        problem = (
            f"no checkpoint to resume from ({why}); starting again would delete the metrics of {updates}"
        )
        raise UserError(str(run / "checkpoints"), problem, "put it back, or start another run")
    for fault in skipped:
        say(fault)
    say(f"resuming from {folder.name}" if folder else "no checkpoint yet: starting from the first update")
    return folder


def find_inexact_keys(recipe: Recipe) -> dict[str, str]:
    """Return the keys for which a resumed run ends with other weights than an uninterrupted one, and why."""
    ahead, search = recipe.async_, recipe.search
    keeps = ahead.max_lag and ahead.swap == "within" and ahead.cache == "keep"
    clock = "the limit is wall-clock time"
    reasons = {
        ahead.timed_by: "with async.pace = 'clock', timing decides which weights sample a token",
        "async.cache" if keeps else "": "the KV cache of older weights is in no checkpoint",
        "task.agent" if recipe.source.agent else "": "timing decides which requests share a batch",
        "rollout.episode_s" if recipe.rollout.episode_s else "": clock,
        "search.seconds" if search and search.seconds else "": clock,
    }
    return {key: why for key, why in reasons.items() if key}


def last_update(run_dir: Path) -> int:
    """Return the last update in metrics.jsonl; 0 without one."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill may have cut the last
            return int(json.loads(line)["update"])
    return 0


def digest_files(tables: Mapping[str, Any], run: Path) -> dict[str, str]:
    """Return digests of the run's copies of code, and of other files whose functions the recipe names."""
    copies = {f"{CODE}/{copy.name}": copy for copy in sorted((run / CODE).glob("*.py"))}
    others = {str(file): file for file in find_code_files(tables) if file.is_file()}
    files = copies | {name: file for name, file in others.items() if file.parent != (run / CODE).resolve()}
    return {
        name: hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() for name, file in files.items()
    }


def read_digests(run: Path) -> dict[str, str]:
    """Return the digests with which the run in this directory began; empty without a run."""
    file = run / "config.toml"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return dict(re.findall(r"(?m)^# (.+): BLAKE2b (\w+)$", text))


def check_digests(before: Mapping[str, str], now: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Report which functions have changed since the run began; raise UserError if its data have."""
    changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
    for name in changed:
        if name != DATA:
            say(f"note: {name} has changed since the run began; the run continues with the new version")
    if DATA in changed:
        problem = "the data differ from those that the run began with, so their order would change"
        raise UserError("task.data", problem, "give the same data, or start another run")
