"""Checkpoints that are written while training continues: the same bits, and nothing is lost in silence."""

import threading
from pathlib import Path
from typing import Any

import pytest

from posttrain.api.opening import open_session
from posttrain.loop import saving
from posttrain.loop.loop import Callback
from posttrain.loop.session import LoopSession
from posttrain.models import checkpoint
from posttrain.plan.plan import plan_run
from posttrain.recipe import config
from posttrain.testing import repeatable
from posttrain.types import RunError

ASYNC = {"checkpoint": {"every": 2, "keep": 0, "async_save": True}}
VARIANTS: dict[str, dict[str, Any]] = {
    "sft": {},
    "moments in bfloat16's masters, Muon": {"model": {"dtype": "bfloat16"}, "optim": {"name": "muon"}},
    "an adapter": {"lora": {"rank": 4}},
}


def opened(recipe: Path, run: Path, *callbacks: object) -> LoopSession:
    return LoopSession(open_session(config.read(recipe), run, title="test"), callbacks)


def files(folder: Path) -> dict[str, bytes]:
    """The files of a checkpoint, which must be whole, but for seconds in state.json."""
    assert not checkpoint.damage(folder)
    names = {f: str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    out = {name: f.read_bytes() for f, name in names.items() if name != checkpoint.MANIFEST}
    state = checkpoint.read_state(folder)
    state["progress"].pop("seconds")
    return out | {checkpoint.STATE: repr(state).encode()}


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> dict[str, threading.Event]:
    """Events: set "go" for the writer to continue; "begun" is set once it has begun."""
    events = {"go": threading.Event(), "begun": threading.Event()}
    write = saving.write_tensors

    def waits(file: Path, tensors: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            events["begun"].set()
            assert events["go"].wait(120)
        write(file, tensors)

    monkeypatch.setattr(saving, "write_tensors", waits)
    return events


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sample("sft")
def test_training_continues_and_the_next_save_waits(
    variant: str, offline, write, tmp_path, blocked, monkeypatch
):
    """The writer is blocked through an update, and still writes the weights before it."""
    tables = {"run": {"updates": 4}, "eval": {"limit": 0}, "optim": {"lr": 0.01}}
    recipe = write(config.read(write(offline, tables)).tables, VARIANTS[variant], "sync")
    background = write(config.read(recipe).tables, ASYNC, "async")
    synchronous = write(
        config.read(recipe).tables, {"checkpoint": ASYNC["checkpoint"] | {"async_save": False}}
    )
    root, events = tmp_path / "async" / "checkpoints", []
    with opened(background, tmp_path / "async", Callback(on_save=lambda _, p: events.append(p.name))) as s:
        s.step()
        s.step()
        assert blocked["begun"].wait(120)
        s.step()
        assert [line["update"] for line in s.metrics][-1] == 3
        assert [p.suffix[:5] for p in root.iterdir()] == [".tmp-"]
        wait = saving.CheckpointWriter.wait

        def goes_on(writer: saving.CheckpointWriter) -> None:
            events.append("wait")
            blocked["go"].set()
            wait(writer)
            assert (root / "step_000002").is_dir()

        with monkeypatch.context() as patch:
            patch.setattr(saving.CheckpointWriter, "wait", goes_on)
            s.step()
    assert events == ["wait", "step_000002", "step_000004"]
    with opened(synchronous, tmp_path / "sync") as s:
        s.finish()
    for name in ("step_000002", "step_000004"):
        assert files(root / name) == files(tmp_path / "sync" / "checkpoints" / name)
    assert repeatable(tmp_path / "sync" / "metrics.jsonl") == repeatable(tmp_path / "async" / "metrics.jsonl")


@pytest.mark.parametrize("update", [1, 2], ids=["before the next update", "the last"])
def test_a_full_disk_ends_the_run(update: int, offline, write, tmp_path, run_cli, monkeypatch):
    over = {"checkpoint": ASYNC["checkpoint"] | {"every": 1}}
    recipe = write(offline, over | {"run": {"updates": 2}, "eval": {"limit": 0}})
    save = saving.write_tensors

    def full(file: Path, tensors: Any) -> None:
        if f"step_{update:06d}" in str(file):
            raise OSError(28, "No space left on device")
        save(file, tensors)

    monkeypatch.setattr(saving, "write_tensors", full)
    done = run_cli("train", recipe, "--run-dir", tmp_path / "run", "--quiet")
    assert done.code == 1
    kept = "no checkpoint was written yet" if update == 1 else "step_000001 is kept"
    root = tmp_path / "run" / "checkpoints"
    assert f"write {root / f'step_{update:06d}'}: [Errno 28] No space left on device; {kept}" in done.err
    assert [p.name for p in root.iterdir()] == ([] if update == 1 else ["step_000001"])
    assert "No space left" in (tmp_path / "run" / "stopped.txt").read_text()
    assert done.err.count("Traceback") == 0


def test_an_error_of_the_run_completes_the_checkpoint(offline, write, tmp_path, blocked, monkeypatch):
    """And Ctrl-C gives it up at the end of a file."""
    recipe = write(offline, ASYNC | {"run": {"updates": 4}, "eval": {"limit": 0}})
    for error, count in ((RunError("update", "no"), 1), (KeyboardInterrupt(), 0)):
        run = tmp_path / type(error).__name__
        blocked["go"].clear()
        stop = saving.CheckpointWriter.stop

        def stops(writer: saving.CheckpointWriter, error: BaseException, stop: Any = stop) -> None:
            threading.Timer(0.1, blocked["go"].set).start()
            stop(writer, error)

        with opened(recipe, run) as s, monkeypatch.context() as patch:
            s.step()
            s.step()
            patch.setattr(saving.CheckpointWriter, "stop", stops)

            def fails(batch: Any, error: BaseException = error) -> None:
                raise error

            patch.setattr(s.learner, "update", fails)
            with pytest.raises(type(error)):
                s.finish()
        assert len([*(run / "checkpoints").glob("step_000002")]) == count


def test_the_copy_is_counted(offline, write):
    plans = {}
    for name, over in {"sync": {}, "async": ASYNC}.items():
        plans[name] = plan_run(config.read(write(offline, over, name)).recipe, lambda text: None)
    disk = plans["async"].disk
    assert "copy of a checkpoint" not in plans["sync"].memory.parts
    assert plans["async"].memory.parts["copy of a checkpoint"] == disk.weights + disk.resume
    assert disk.copied(4) == (disk.weights + disk.resume) // 4
