"""Checkpoints, written atomically.

    step_000040.tmp-1234/   written file by file, each flushed to the disk, by one process or several
    step_000040.tmp-1234/manifest.json   written last: name, size and SHA-256 of every other file
    step_000040/            the final name, after everything is on the disk
    step_000040/resume/     files that only a resume needs; older checkpoints may be kept without them

After a crash a .tmp- directory remains, which is never read. If an update is saved again, its old checkpoint
is called step_000040.before until the new one has its final name, and is read if a crash left no other. A
resume takes the newest checkpoint whose manifest is valid and names files of resume/, and reports each newer
one that it skips. Files that a manifest does not name are not read.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from posttrain.base.atomic_files import replace_atomically
from posttrain.types import RunError, UserError

MANIFEST = "manifest.json"
STATE = "state.json"
RESUME = "resume"
BEST = "best"
"""Key of a state: the update with the best evaluation so far. RUN@best names that checkpoint."""
UNSAVED = "unsaved_best"
"""Key of a state, if an evaluation at an update without a checkpoint is better than that of BEST: its update,
its value, and the value at BEST."""
_NAME = re.compile(r"step_(\d{6,})(\.before)?")


Entries = dict[str, tuple[int, str]]
"""Part of a manifest: size and SHA-256 of files by name."""


def save(
    root: Path,
    update: int,
    write: Callable[[Path], Entries | None],
    state: Mapping[str, Any],
    *,
    keep: int,
    keep_weights: int = 0,
    best: int | None = None,
    draft: Path | None = None,
) -> Path:
    """Save a checkpoint of this update and return its path: the files that `write` creates, and the state.

    `write` returns the entries of files that are flushed already, as by other processes. draft: the folder
    that `begin` made for this update, with some of the files. After it is committed, older checkpoints are
    thinned to the `keep` newest (0: all stay as they are), and the weights of the `best` update, which the
    state names for `select`.

    Raises RunError if the disk fails; older checkpoints are then unchanged.
    """
    working = draft or begin(root, update)
    final = named_by(working)
    before = root / f"{final.name}.before"
    with writing(working):
        manifest = write(working) or {}
        (working / STATE).write_text(json.dumps(state if best is None else {**state, BEST: best}, indent=1))
        files = sorted(p for p in working.rglob("*") if p.is_file())
        unsealed = [file for file in files if str(file.relative_to(working)) not in manifest]
        manifest = seal(working, unsealed) | manifest
        (working / MANIFEST).write_text(json.dumps(manifest, indent=1))
        flush(working / MANIFEST)
        for folder in {f.parent for f in files}:
            flush(folder)
        if final.exists():  # saved twice, or by a run that was resumed from an earlier update
            final.rename(before)
        working.rename(final)
        flush(root)
        if before.exists():
            before.rename(working)  # if killed, the remains do not have a checkpoint's name
            shutil.rmtree(working)
    if keep:
        thin(root, whole=keep, weights=keep_weights, best=best, last=update)
    return final


def begin(root: Path, update: int) -> Path:
    """Return a new folder for the files of a checkpoint; remove those of interrupted saves."""
    working = root / f"step_{update:06d}.tmp-{os.getpid()}"
    with writing(working):
        root.mkdir(parents=True, exist_ok=True)
        for stale in leftovers(root):
            shutil.rmtree(stale, ignore_errors=True)
        working.mkdir()
    return working


def named_by(draft: Path) -> Path:
    """Return the final path of a checkpoint whose files are being written to this folder."""
    return draft.with_name(draft.name.partition(".tmp-")[0])


@contextmanager
def writing(draft: Path, *, shared: bool = False) -> Iterator[None]:
    """Raise RunError if the disk fails in the block, and remove the folder unless it is `shared`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if not shared:
            shutil.rmtree(draft, ignore_errors=True)
        raise RunError(f"write {named_by(draft)}", str(error)) from error


def seal(folder: Path, files: Iterable[Path]) -> Entries:
    """Flush these files of a folder to the disk; return their entries in the manifest."""
    files = sorted(files)
    for file in files:
        flush(file)
    names = [str(file.relative_to(folder)) for file in files]
    digests = zip(files, _sha256(files), strict=True)
    return dict(zip(names, ((file.stat().st_size, digest) for file, digest in digests), strict=True))


def leftovers(root: Path) -> list[Path]:
    """Return the directories of interrupted saves, which are never read."""
    before = (p for p in root.glob("*.before") if p.with_suffix("").exists())
    return sorted([*root.glob("*.tmp-*"), *before])


def thin(root: Path, *, whole: int, weights: int, best: int | None = None, last: float = math.inf) -> None:
    """Keep the `whole` newest, and without resume/ the `weights` before them and the `best`; remove others.

    Updates after `last` stay and are not counted: a resumed run has skipped them as damaged.
    If killed, every remaining checkpoint is valid, with or without resume/.
    """
    checkpoints = [(update, path) for update, path in numbered(root) if update <= last]
    for age, (update, path) in enumerate(reversed(checkpoints)):
        if age >= whole + weights and update != best:
            shutil.rmtree(path, ignore_errors=True)
        elif age >= whole:
            to_weights(path)


def to_weights(path: Path) -> None:
    """Remove the files that only a resume needs from a checkpoint; a damaged one stays as it is."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        weights = {name: entry for name, entry in manifest.items() if not name.startswith(f"{RESUME}/")}
        if len(weights) < len(manifest):
            with replace_atomically(path / MANIFEST) as fresh:
                fresh.write_text(json.dumps(weights, indent=1))
                flush(fresh)
            flush(path)
        shutil.rmtree(path / RESUME, ignore_errors=True)
    except (OSError, ValueError, AttributeError):
        return  # damaged, or the disk is full


def newest(root: Path, *, resume: bool = False) -> tuple[Path | None, list[str]]:
    """Return (the newest valid checkpoint or None, one line for each newer one that is damaged).

    resume: also skip checkpoints without the files that a resume needs.
    """
    skipped: list[str] = []
    for _, path in reversed(list(numbered(root))):
        fault = damage(path) or ("it holds weights alone" if resume and not resumes(path) else "")
        if not fault:
            return path, skipped
        skipped.append(f"{path.name} was passed over: {fault}")
    return None, skipped


def split_run(path: Path | str) -> tuple[Path, str]:
    """Split RUN@best and RUN@UPDATE into the run directory and the checkpoint; "" for the newest one.

    >>> split_run("runs/a@best"), split_run("runs/a")
    ((PosixPath('runs/a'), 'best'), (PosixPath('runs/a'), ''))
    """
    path = Path(path).expanduser()
    name, at, which = path.name.rpartition("@")
    # A number behind the name of a Hub model is a branch or a commit of it.
    is_number = which.isdecimal() and path.with_name(name or at).is_dir()
    is_checkpoint = at and (which == BEST or is_number) and not path.exists()
    return (path.with_name(name), which) if is_checkpoint and name else (path, "")


def select(run: Path, which: str = "") -> tuple[Path, list[str]]:
    """Return (a checkpoint of a run, a line for each damaged one that was skipped).

    which: "" for the newest valid one, "best" for that of the best evaluation, or the number of an update.
    For "best" a line more is returned if an evaluation at an update without a checkpoint was better.
    Raises UserError if the run does not have it.
    """
    root = run / "checkpoints"
    if not run.is_dir():
        raise UserError(str(run), "there is no such run", "check its path")
    last, skipped = newest(root)
    if last is None:
        fix = "one is written after the last update, and every checkpoint.every updates"
        raise UserError(str(run), "has no whole checkpoint", fix)
    if not which:
        return last, skipped
    state = read_state(last)
    update = state.get(BEST) if which == BEST else int(which)
    if update is None:
        problem = "has no best checkpoint: it was never evaluated, or checkpoint.best is false"
        raise UserError(f"{run}@{which}", problem, f"name an update, as {run}@{int(last.name[5:])}")
    path = dict(numbered(root)).get(update)
    if path is None or (fault := damage(path)):
        there = ", ".join(str(number) for number, _ in numbered(root))
        problem = f"has no checkpoint of update {update}"
        if path is not None:
            problem = f"{path.name} is damaged: {fault}"
        raise UserError(f"{run}@{which}", problem, f"there are {there}")
    if which == BEST and UNSAVED in state:
        better, value, saved = state[UNSAVED]
        name = f"update {better}, which has no checkpoint," if better else "the start"
        numbers = f"{value:.3g} against {saved:.3g} at update {update}"
        skipped.append(f"{run}@{which}: {name} was better ({numbers})")
    return path, skipped


def weights_alone(root: Path) -> bool:
    """Return whether there are checkpoints, and no manifest names, or may have named, files of resume/."""
    paths = [path for _, path in numbered(root)]
    return bool(paths) and not any(resumes(path) for path in paths)


def resumes(path: Path) -> bool:
    """Return whether a checkpoint's manifest names files of resume/, or cannot be read.

    The directory itself may exist without being named, after a kill.
    """
    try:
        return any(name.startswith(f"{RESUME}/") for name in json.loads((path / MANIFEST).read_text()))
    except (OSError, ValueError, TypeError):
        return True


def damage(path: Path) -> str:
    """Return what is wrong with a checkpoint, or an empty string."""
    try:
        manifest: Any = json.loads((path / MANIFEST).read_text())
        if not isinstance(manifest, dict) or STATE not in manifest:
            return "its manifest does not name the files"
        for name, (size, _) in manifest.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes, not {size}"
        digests = zip(manifest.items(), _sha256([path / name for name in manifest]), strict=True)
        for (name, (_, digest)), current in digests:
            if current != digest:
                return f"{name} is not what was written"
    except (OSError, ValueError, TypeError) as error:
        return f"its manifest cannot be read ({error})"
    return ""


def listed(checkpoint: Path) -> list[Path]:
    """Return the files that a checkpoint's manifest names; none for a folder that is not a checkpoint."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        return [checkpoint / name for name in manifest] if STATE in manifest else []
    except (OSError, ValueError, TypeError):
        return []


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that was saved with the tensors."""
    state: dict[str, Any] = json.loads((path / STATE).read_text())
    return state


def numbered(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (update, path) of each checkpoint, damaged or not, from the first to the last."""
    paths = [(int(m[1]), not m[2], p) for p in root.glob("step_*") if (m := _NAME.fullmatch(p.name))]
    yield from {update: path for update, _, path in sorted(paths)}.items()


def _sha256(files: Sequence[Path]) -> Iterator[str]:
    """Yield the SHA-256 of each file; large ones are read at the same time, each by a thread."""

    def digest(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=4) as pool:
        yield from pool.map(digest, files)


def flush(path: Path) -> None:
    """Flush a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
