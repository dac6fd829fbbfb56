"""Checkpoints that are whole or are not there.

    step_000040.tmp-1234/   written file by file, each flushed to the disk
    step_000040.tmp-1234/manifest.json   last: name, size and SHA-256 of every other file
    step_000040/            renamed to when everything is on the disk
    step_000040/resume/     what only a resume needs; an older one may be kept without it

What a crash leaves is a .tmp- directory that nobody reads. One of an update that is saved again is called
step_000040.before until the new one is there, and is read where a crash left no other. Resuming takes the
newest checkpoint whose manifest holds and names files of resume/, and names each one that it passes over.
Files that a manifest does not name are not read.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from posttrain.base.atomic_files import replacing
from posttrain.types import RunError

MANIFEST = "manifest.json"
STATE = "state.json"
RESUME = "resume"
_NAME = re.compile(r"step_(\d{6,})(\.before)?")


def save(
    root: Path,
    update: int,
    write: Callable[[Path], None],
    state: Mapping[str, Any],
    *,
    keep: int,
    keep_weights: int = 0,
    best: int | None = None,
) -> Path:
    """The committed checkpoint of this update: what `write` puts into a directory, and the state as JSON.

    Only after it is committed those before it are thinned to the `keep` newest (0: all stay as they are), and
    the weights of the `best` update.

    Raises RunError when the disk refuses; older checkpoints are then untouched.
    """
    final = root / f"step_{update:06d}"
    working, before = root / f"{final.name}.tmp-{os.getpid()}", root / f"{final.name}.before"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in leftovers(root):
            shutil.rmtree(stale, ignore_errors=True)
        working.mkdir()
        write(working)
        (working / STATE).write_text(json.dumps(state, indent=1))
        files = sorted(p for p in working.rglob("*") if p.is_file())
        for file in files:
            flush(file)
        manifest = {str(f.relative_to(working)): [f.stat().st_size, _sha256(f)] for f in files}
        (working / MANIFEST).write_text(json.dumps(manifest, indent=1))
        flush(working / MANIFEST)
        for folder in {f.parent for f in files}:
            flush(folder)
        if final.exists():  # saved twice, or of a run that went on from before it
            final.rename(before)
        working.rename(final)
        flush(root)
        if before.exists():
            before.rename(working)  # a kill leaves what nobody takes for a checkpoint
            shutil.rmtree(working)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(working, ignore_errors=True)
        raise RunError(f"write {final}", str(error)) from error
    if keep:
        thin(root, whole=keep, weights=keep_weights, best=best, last=update)
    return final


def leftovers(root: Path) -> list[Path]:
    """What saves that a crash broke off have left, and nobody reads."""
    before = (p for p in root.glob("*.before") if p.with_suffix("").exists())
    return sorted([*root.glob("*.tmp-*"), *before])


def thin(root: Path, *, whole: int, weights: int, best: int | None = None, last: float = math.inf) -> None:
    """Leave the `whole` newest, and without resume/ the `weights` before them and the `best`; remove others.

    Of updates after `last` all stay, and count for nothing: a resumed run has passed them over as damaged.
    A kill in between leaves each one whole, with resume/ or without.
    """
    found = [(update, path) for update, path in numbered(root) if update <= last]
    for age, (update, path) in enumerate(reversed(found)):
        if age >= whole + weights and update != best:
            shutil.rmtree(path, ignore_errors=True)
        elif age >= whole:
            to_weights(path)


def to_weights(path: Path) -> None:
    """Takes from a checkpoint what only a resume would need; a damaged one stays as it is."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        kept = {name: found for name, found in manifest.items() if not name.startswith(f"{RESUME}/")}
        if len(kept) < len(manifest):
            with replacing(path / MANIFEST) as fresh:
                fresh.write_text(json.dumps(kept, indent=1))
                flush(fresh)
            flush(path)
        shutil.rmtree(path / RESUME, ignore_errors=True)
    except (OSError, ValueError, AttributeError):
        return  # it is damaged, or the disk is full: it stays as it is


def newest(root: Path, *, resume: bool = False) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and one line for each newer one that is not.

    `resume`: those without what a resume needs are passed over too.
    """
    skipped: list[str] = []
    for _, path in reversed(list(numbered(root))):
        fault = damage(path) or ("it holds weights alone" if resume and not resumes(path) else "")
        if not fault:
            return path, skipped
        skipped.append(f"{path.name} was passed over: {fault}")
    return None, skipped


def weights_alone(root: Path) -> bool:
    """Whether there are checkpoints, and none of them has, or may have had, what a resume needs."""
    found = [path for _, path in numbered(root)]
    return bool(found) and not any(resumes(path) for path in found)


def resumes(path: Path) -> bool:
    """Whether a checkpoint names files of resume/; True of one whose manifest cannot be read.

    That there is a resume/ says nothing: a kill may leave one that nobody names.
    """
    try:
        return any(name.startswith(f"{RESUME}/") for name in json.loads((path / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        return True


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, or an empty string."""
    try:
        manifest: Any = json.loads((path / MANIFEST).read_text())
        if not isinstance(manifest, dict) or STATE not in manifest:
            return "its manifest does not name the files"
        for name, (size, digest) in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes, not {size}"
            if _sha256(file) != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    return ""


def listed(checkpoint: Path) -> list[Path]:
    """Return the files that a checkpoint's manifest names; none of a folder that is not a checkpoint."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        return [checkpoint / name for name in manifest] if STATE in manifest else []
    except (OSError, ValueError, TypeError):
        return []


def read_state(path: Path) -> dict[str, Any]:
    """The state that was saved beside the tensors."""
    state: dict[str, Any] = json.loads((path / STATE).read_text())
    return state


def numbered(root: Path) -> Iterator[tuple[int, Path]]:
    """(update, path) of each checkpoint, damaged or not, from the first to the last."""
    found = [(int(m[1]), not m[2], p) for p in root.glob("step_*") if (m := _NAME.fullmatch(p.name))]
    yield from {update: path for update, _, path in sorted(found)}.items()


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Puts a file, or the names in a directory, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
