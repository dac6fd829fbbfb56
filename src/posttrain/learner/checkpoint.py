"""Checkpoints that are whole or are not there.

    step_000040.tmp-1234/   written file by file, each flushed to the disk
    step_000040.tmp-1234/manifest.json   last: name, size and SHA-256 of every other file
    step_000040/            renamed to when everything is on the disk

What a crash leaves is a .tmp- directory that nobody reads. Resuming takes the newest checkpoint
whose manifest holds, and names each one that it passes over.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from posttrain.types import RunError

MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})")


def save(
    root: Path, update: int, write: Callable[[Path], None], state: Mapping[str, Any], *, keep: int
) -> Path:
    """The committed checkpoint of this update: what `write` puts into a directory, and the state as JSON.

    Older ones beyond the `keep` newest are deleted only after it is committed (keep = 0: never).

    Raises RunError when the disk refuses; older checkpoints are then untouched.
    """
    final = root / f"step_{update:06d}"
    working = root / f"{final.name}.tmp-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob("*.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        working.mkdir()
        write(working)
        (working / STATE).write_text(json.dumps(state, indent=1))
        files = sorted(p for p in working.rglob("*") if p.is_file())
        for file in files:
            _flush(file)
        manifest = {str(f.relative_to(working)): [f.stat().st_size, _sha256(f)] for f in files}
        (working / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _flush(working / MANIFEST)
        for folder in {f.parent for f in files}:
            _flush(folder)
        if final.exists():  # of a run that went on from before it
            shutil.rmtree(final)
        working.rename(final)
        _flush(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(working, ignore_errors=True)
        raise RunError(f"{final}: the checkpoint cannot be written: {error}") from error
    if keep:
        for _, old in list(_numbered(root))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    return final


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and one line for each newer one that is not."""
    skipped: list[str] = []
    for _, path in reversed(list(_numbered(root))):
        fault = damage(path)
        if not fault:
            return path, skipped
        skipped.append(f"{path.name} was passed over: {fault}")
    return None, skipped


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


def read_state(path: Path) -> dict[str, Any]:
    """The state that was saved beside the tensors."""
    state: dict[str, Any] = json.loads((path / STATE).read_text())
    return state


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes tensors as safetensors; each is stored once, under its own name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(plain, str(file), metadata={"format": "pt"})


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file."""
    with safe_open(str(file), framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _numbered(root: Path) -> Iterator[tuple[int, Path]]:
    found = [(int(m[1]), p) for p in root.glob("step_*") if (m := _NAME.fullmatch(p.name))]
    yield from sorted(found)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
