"""Checkpoints survive a crash at any file operation and damage to any of their files."""

import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.models.checkpoint import (
    MANIFEST,
    STATE,
    damage,
    newest,
    read_state,
    save,
    thin,
    weights_alone,
)
from posttrain.models.tensor_files import read_tensors, write_tensors
from posttrain.types import RunError

OPERATIONS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Crash(BaseException):
    """The process is gone: no handler runs that a kill -9 would not let run."""


def content(update: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(update)
    return {"a": torch.randn(3, 4, generator=g), "b": torch.tensor(update), "c": torch.ones(2).bfloat16()}


def write(update: int) -> Callable[[Path], None]:
    def into(folder: Path) -> None:
        write_tensors(folder / "optimizer.safetensors", content(update))
        write_tensors(folder / "model" / "deep" / "model.safetensors", content(update + 100))
        (folder / "model" / "config.json").write_text("{}")

    return into


def saved(root: Path, update: int, keep: int = 0) -> Path:
    return save(root, update, write(update), {"update": update}, keep=keep)


def holds(path: Path | None, update: int, named: int | None = None) -> bool:
    """Whether this is the whole checkpoint of that update, called after it or another."""
    name = f"step_{named or update:06d}"
    if path is None or path.name not in (name, f"{name}.before") or damage(path):
        return False
    got = read_tensors(path / "optimizer.safetensors")
    same = all(torch.equal(got[k], v) and got[k].dtype == v.dtype for k, v in content(update).items())
    return (
        same
        and got.keys() == content(update).keys()
        and read_state(path)
        in (
            {"update": update},
            {"update": update, "best": 2},
            {"update": update, "best": 6},
        )
    )


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    assert newest(tmp_path) == (None, [])
    assert newest(tmp_path / "absent") == (None, [])
    for update in (1, 2, 10):
        assert holds(saved(tmp_path, update), update)
    found, skipped = newest(tmp_path)
    assert holds(found, 10)
    assert skipped == []
    assert {p.name for p in tmp_path.iterdir()} == {"step_000001", "step_000002", "step_000010"}
    assert holds(saved(tmp_path, 1_234_567), 1_234_567)
    assert newest(tmp_path)[0] == tmp_path / "step_1234567"


def test_tensors_that_lie_crosswise_in_memory_come_back(tmp_path: Path) -> None:
    x = torch.arange(12.0).view(3, 4)
    write_tensors(tmp_path / "new" / "x.safetensors", {"turned": x.T, "column": x[:, 1]})
    got = read_tensors(tmp_path / "new" / "x.safetensors")
    assert torch.equal(got["turned"], x.T)
    assert torch.equal(got["column"], x[:, 1])


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for update in range(1, 6):
        saved(tmp_path, update, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000004", "step_000005"]
    saved(tmp_path, 6)  # 0 deletes nothing
    assert len(list(tmp_path.iterdir())) == 3


def test_a_damaged_one_of_a_later_update_takes_no_place(tmp_path: Path) -> None:
    """A run that went on from before it keeps what it saves, until it replaces that one too."""
    saved(tmp_path, 2)
    (saved(tmp_path, 4) / STATE).write_text("")
    saved(tmp_path, 3, keep=1)
    assert holds(newest(tmp_path)[0], 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000004"]
    saved(tmp_path, 4, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000004"]


def with_rest(root: Path, update: int, **kept: int | None) -> Path:
    """A checkpoint with something that only a resume needs."""

    def into(folder: Path) -> None:
        write(update)(folder)
        write_tensors(folder / "resume" / "moments.safetensors", content(update))

    return save(root, update, into, {"update": update}, **({"keep": 0} | kept))


def what_stays(root: Path) -> dict[int, bool]:
    """Of each checkpoint, which must be whole, whether it has its rest."""
    found = {int(p.name[-6:]): p for p in root.glob("step_*")}
    assert all(holds(path, update) for update, path in found.items())
    return {update: (path / "resume").exists() for update, path in sorted(found.items())}


def test_older_ones_may_keep_their_weights_alone(tmp_path: Path) -> None:
    for update in range(1, 7):
        with_rest(tmp_path, update, keep=2, keep_weights=3)
    assert what_stays(tmp_path) == {2: False, 3: False, 4: False, 5: True, 6: True}
    assert newest(tmp_path, resume=True) == (tmp_path / "step_000006", [])
    for update in (5, 6):
        (tmp_path / f"step_{update:06d}" / "model" / "config.json").write_text("[]")
    assert newest(tmp_path)[0] == tmp_path / "step_000004"
    found, skipped = newest(tmp_path, resume=True)
    assert found is None
    assert skipped[2:] == [f"step_00000{n} was passed over: it holds weights alone" for n in (4, 3, 2)]


def test_best_checkpoint_keeps_its_weights(tmp_path: Path) -> None:
    for update in range(1, 7):
        with_rest(tmp_path, update, keep=2, best=2 if update > 2 else None)
    assert what_stays(tmp_path) == {2: False, 5: True, 6: True}
    with_rest(tmp_path, 7, keep=2, best=6)
    assert what_stays(tmp_path) == {6: True, 7: True}


def test_whether_only_weights_are_left_is_seen_without_reading_them(tmp_path: Path) -> None:
    assert not weights_alone(tmp_path)
    for update in (1, 2):
        with_rest(tmp_path, update)
    assert not weights_alone(tmp_path)
    thin(tmp_path, whole=0, weights=1)
    assert weights_alone(tmp_path)
    (tmp_path / "step_000002" / MANIFEST).write_text("")
    assert not weights_alone(tmp_path), "of a damaged one nobody knows"


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
def test_a_crash_while_they_are_thinned_leaves_each_whole(
    after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    for when in range(1, 1000):
        root = tmp_path / str(when)
        for update in (1, 2, 3):
            with_rest(root, update)
        finished = True
        with pytest.MonkeyPatch.context() as patch:
            crash_at(patch, when, after)
            try:
                thin(root, whole=0, weights=2)
            except Crash:
                finished = False
        assert holds(root / "step_000003", 3)
        assert holds(root / "step_000002", 2)
        thin(root, whole=0, weights=2)
        assert what_stays(root) == {2: False, 3: False}
        if finished:
            break
    assert when > 8


def test_what_a_crash_left_is_swept_away_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "step_000001.tmp-999").mkdir(parents=True)
    saved(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]


def crash_at(monkeypatch: pytest.MonkeyPatch, when: int, after: bool) -> list[str]:
    """Makes the `when`-th operation the last one, done or not; the log of all before."""
    log: list[str] = []

    def patched(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(name)
            if len(log) > when:
                raise Crash
            last = len(log) == when
            if last and not after:
                raise Crash
            done = real(*args, **kwargs)
            if last:
                raise Crash
            return done

        return call

    for name in OPERATIONS:
        monkeypatch.setattr(os, name, patched(name))
    return log


# After an operation the disk is as before the next one.
@pytest.mark.sample("*-before it", "a later-after it")
@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("case", ["the first", "a later", "in place of a damaged one", "the only one again"])
def test_a_crash_at_any_file_operation_leaves_a_whole_checkpoint(
    case: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one, or else the one before. A second attempt always succeeds."""
    seen: set[str] = set()
    outcomes = set()
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nobody pulls the plug here, and disks are slow
    for when in range(1, 1000):
        root = tmp_path / str(when)
        if case == "the only one again":
            save(root, 3, write(2), {"update": 2}, keep=0)
        elif case != "the first":
            saved(root, 1)
            saved(root, 2)
        if case == "in place of a damaged one":
            (saved(root, 3) / STATE).write_text("")
        finished = True
        with pytest.MonkeyPatch.context() as patch:
            log = crash_at(patch, when, after)
            try:
                saved(root, 3, keep=1)
            except Crash:
                finished = False
        seen |= set(log)
        found, skipped = newest(root)
        new, old = holds(found, 3), holds(found, 2, named=3 if case == "the only one again" else 2)
        assert new or old or (case == "the first" and found is None)
        assert all(re.match(r"step_000003(\.before)? was passed over: ", line) for line in skipped)
        assert not (new and skipped)
        outcomes.add(new)
        if finished:
            assert new
            break
        assert holds(saved(root, 3, keep=1), 3)
        assert [p.name for p in root.iterdir()] == ["step_000003"]
        shutil.rmtree(root)
    else:
        pytest.fail("it never finished")
    assert outcomes == {False, True}
    assert {"fsync", "rename", "mkdir"} <= seen
    assert case == "the first" or {"unlink", "rmdir"} <= seen
    assert when > 15


def test_a_crash_while_files_are_written_leaves_the_one_before(tmp_path: Path) -> None:
    saved(tmp_path, 1)

    def dies(folder: Path) -> None:
        (folder / "optimizer.safetensors").write_bytes(b"half")
        raise Crash

    with pytest.raises(Crash):
        save(tmp_path, 2, dies, {}, keep=1)
    assert holds(newest(tmp_path)[0], 1)


@pytest.mark.parametrize("operation", ["fsync", "rename", "mkdir", "open"])
def test_a_disk_that_refuses_stops_the_run_and_spares_the_older_ones(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)

    def refuses(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, refuses)
        with pytest.raises(RunError, match=r"step_000002.*No space left"):
            saved(tmp_path, 2, keep=1)
    assert holds(newest(tmp_path)[0], 1)
    assert holds(saved(tmp_path, 2, keep=1), 2)


def test_a_full_disk_while_tensors_are_written_does_so_too(tmp_path: Path) -> None:
    """safetensors has an error of its own for it, which is no OSError."""
    saved(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(RunError, match="step_000002"):
            save(
                tmp_path,
                2,
                lambda folder: write_tensors(folder / "big.safetensors", {"x": torch.ones(10_000)}),
                {},
                keep=1,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["step_000001"]
    assert holds(newest(tmp_path)[0], 1)


FILES = (MANIFEST, STATE, "optimizer.safetensors", "model/deep/model.safetensors", "model/config.json")
SPOILT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "half": lambda raw: raw[: len(raw) // 2],
    "longer": lambda raw: raw + b"\0",
    "one bit": lambda raw: raw[:-2] + bytes([raw[-2] ^ 1]) + raw[-1:],
    "zeros": lambda raw: bytes(len(raw)),
    "another thing": lambda raw: b"[]",
    "nothing said": lambda raw: b"{}x"[: 2 + (raw == b"{}")],
}


def test_the_files_named_here_are_all_there_are(tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    assert {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} == set(FILES)
    assert set(json.loads((path / MANIFEST).read_text())) == set(FILES) - {MANIFEST}


@pytest.mark.parametrize("how", [*SPOILT, "deleted"])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_is_passed_over_by_name(file: str, how: str, tmp_path: Path) -> None:
    saved(tmp_path, 1)
    for update in (2, 3):
        target = saved(tmp_path, update) / file
        if how == "deleted":
            target.unlink()
        else:
            target.write_bytes(SPOILT[how](target.read_bytes()))
    found, skipped = newest(tmp_path)
    assert holds(found, 1)
    named = "manifest" if file == MANIFEST else file
    assert [line.split(":")[0] for line in skipped] == [f"step_00000{n} was passed over" for n in (3, 2)]
    assert all(named in line for line in skipped) or file == MANIFEST
    assert all(len(line.splitlines()) == 1 for line in skipped)


def test_with_none_whole_there_is_none_and_each_is_named(tmp_path: Path) -> None:
    for update in (1, 2):
        (saved(tmp_path, update) / STATE).unlink()
    found, skipped = newest(tmp_path)
    assert found is None
    assert skipped == [f"step_00000{n} was passed over: state.json is missing" for n in (2, 1)]
