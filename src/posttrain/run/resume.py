"""What a resumed run goes on from, and whether it still reads what it was begun with."""

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
"""What the digest of the data is called."""
COMPARED = 256
"""Tasks or records of which digests are compared, spread evenly over all."""


def digest_of_data(data: Sequence[Any]) -> str:
    """What two readings of the same tasks, or groups of rows, share, wherever their file lies."""
    chosen = (data[n] for n in range(0, len(data), max(1, len(data) // COMPARED)))
    some = [(x.id, [*map(dict, x.messages)], x.answer) if isinstance(x, Task) else x for x in chosen]
    return hashlib.blake2b(f"{len(data)} {some}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def newest_checkpoint(run: Path, every: int, say: Callable[[str], None], ranks: Ranks) -> Path | None:
    """The checkpoint that a resumed run goes on from, if there is one yet: what rank 0 finds whole.

    UserError if those that there were are gone or damaged: a run that begins again deletes its metrics.
    """
    made = 0 if ranks.rank else last_update(run)
    looked = (None, []) if ranks.rank else checkpoint.newest(run / "checkpoints", resume=True)
    made, (found, skipped) = ranks.tell((made, looked), "the checkpoint")
    if not found and (skipped or made > every > 0):  # its last checkpoint may not have been written whole
        why = skipped[0] if skipped else "there is none"
        told = counted(made, "update")
        problem = f"no checkpoint to go on from ({why}); to begin again deletes what is told of {told}"
        raise UserError(str(run / "checkpoints"), problem, "put it back, or start another run")
    for fault in skipped:
        say(fault)
    say(f"going on from {found.name}" if found else "no checkpoint yet: starting from the first update")
    return found


def find_inexact_keys(recipe: Recipe) -> dict[str, str]:
    """Return the keys by which a resumed run ends with other weights than an uninterrupted one, and why."""
    ahead, search = recipe.async_, recipe.search
    keeps = ahead.max_lag and ahead.swap == "within" and ahead.cache == "keep"
    clock = "the limit is wall-clock time"
    reasons = {
        ahead.timed_by: "with async.pace = 'clock', timing decides which weights sample a token",
        "async.cache" if keeps else "": "the KV cache of older weights is in no checkpoint",
        "task.agent" if recipe.task.agent else "": "timing decides which requests share a batch",
        "rollout.episode_s" if recipe.rollout.episode_s else "": clock,
        "search.seconds" if search and search.seconds else "": clock,
    }
    return {key: why for key, why in reasons.items() if key}


def last_update(run_dir: Path) -> int:
    """The last update that metrics.jsonl tells of; 0 if it tells of none."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill may have cut the last
            return int(json.loads(line)["update"])
    return 0


def digests_of(tables: Mapping[str, Any], run: Path) -> dict[str, str]:
    """Of the run's copies of code, and of the other files of functions that the recipe names."""
    copies = {f"{CODE}/{copy.name}": copy for copy in sorted((run / CODE).glob("*.py"))}
    others = {str(file): file for file in find_code_files(tables) if file.is_file()}
    found = copies | {name: file for name, file in others.items() if file.parent != (run / CODE).resolve()}
    return {
        name: hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() for name, file in found.items()
    }


def read_digests(run: Path) -> dict[str, str]:
    """What the run in this directory was begun with; nothing if none was."""
    file = run / "config.toml"
    return (
        dict(re.findall(r"(?m)^# (.+): BLAKE2b (\w+)$", file.read_text(encoding="utf-8")))
        if file.is_file()
        else {}
    )


def check_digests(before: Mapping[str, str], now: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Says which functions have changed since the run began; UserError if its data have."""
    changed = [name for name, digest in now.items() if before.get(name, digest) != digest]
    for name in changed:
        if name != DATA:
            say(f"note: {name} has changed since the run began, which goes on with it as it is now")
    if DATA in changed:
        problem = "its data are not those that the run began with, and would be gone through in another order"
        raise UserError("task.data", problem, "give the same data, or start another run")
