"""The record of a run: what is on the disk, what a resume leaves of it, and services that misbehave."""

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.base.kinds import kinds
from posttrain.run import track
from posttrain.run.track import Track, TrackerRun, open_tracker, truncate_after
from posttrain.types import RunError, UserError


def tracker(service: Any) -> Any:
    """A kind of the registry that opens this service."""
    return SimpleNamespace(ours=True, load=lambda: service)


CONFIG = {"optimiser": {"lr": 2e-5}, "method": "grpo"}


def opened(run_dir: Path, *sinks: str, resume_after: int | None = None) -> Track:
    return open_tracker(run_dir, sinks, project="p", name="n", config=CONFIG, resume_after=resume_after)


def line(update: int, **metrics: float) -> dict[str, float]:
    return {"update": update, "version": update, "seconds": 0.5 * update, "tokens": 10 * update} | metrics


def lines(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]


def updates(run_dir: Path) -> list[float]:
    return [parsed["update"] for parsed in lines(run_dir)]


# metrics.jsonl


def test_a_line_has_its_keys_in_order_and_plain_numbers(tmp_path: Path) -> None:
    record = opened(tmp_path)
    record.log(2, line(1) | {"reward/mean": torch.tensor(0.5), "lag/max": np.int64(3), "accuracy": 1})
    text = (tmp_path / "metrics.jsonl").read_text()  # before close: it is on the disk at return
    assert text == (
        '{"update": 1, "step": 2, "version": 1, "seconds": 0.5, "tokens": 10, '
        '"reward/mean": 0.5, "lag/max": 3.0, "accuracy": 1}\n'
    )
    record.close()


def test_what_is_not_finite_is_null_and_the_line_stays_json(tmp_path: Path) -> None:
    record = opened(tmp_path)
    record.log(1, line(1) | {"loss": float("nan"), "kl/ref": float("inf"), "ess": -float("inf"), "lr": 1.0})
    record.close()
    strict = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (strict["loss"], strict["kl/ref"], strict["ess"], strict["lr"]) == (None, None, None, 1.0)


def test_an_update_is_never_written_twice(tmp_path: Path) -> None:
    record = opened(tmp_path)
    record.log(1, line(1))
    with pytest.raises(ValueError, match="update 1 after update 1"):
        record.log(2, line(1))
    record.close()
    record = opened(tmp_path)
    with pytest.raises(ValueError, match="update 1 after update 1"):
        record.log(2, line(1))
    record.close()
    assert updates(tmp_path) == [1]


def test_a_resume_removes_what_came_after_the_checkpoint_and_a_half_line(tmp_path: Path) -> None:
    record = opened(tmp_path)
    for update in range(5):
        record.log(update + 10, line(update))
    record.close()
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"update": 5, "st')
    record = opened(tmp_path, resume_after=2)
    assert updates(tmp_path) == [0, 1, 2]
    record.log(13, line(3, accuracy=1.0))
    record.close()
    assert updates(tmp_path) == [0, 1, 2, 3]
    assert lines(tmp_path)[-1]["accuracy"] == 1.0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_half_line_never_runs_into_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"update": 1, "step": 1}\nnot json\n{"update": 2, "step": 2}')
    assert truncate_after(tmp_path, None) == {"update": 1, "step": 1}
    record = opened(tmp_path)
    record.log(3, line(2))
    record.close()
    assert updates(tmp_path) == [1, 2]


def test_truncation_says_what_is_left_and_leaves_a_whole_file_alone(tmp_path: Path) -> None:
    assert truncate_after(tmp_path, 3) == {"update": -1, "step": -1}
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"update": 0, "step": 4}\n{"update": 1, "step": 8}\n')
    before = file.stat().st_ino
    assert truncate_after(tmp_path, 1) == {"update": 1, "step": 8}
    assert file.stat().st_ino == before
    assert truncate_after(tmp_path, 0) == {"update": 0, "step": 4}
    assert truncate_after(tmp_path, -1) == {"update": -1, "step": -1}
    assert file.read_bytes() == b""


def test_every_line_survives_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, signal, pathlib\n"
        "from posttrain.run.track import open_tracker\n"
        f"t = open_tracker(pathlib.Path({str(tmp_path)!r}), [], project='p', name='n', config={{}})\n"
        "for u in range(7): t.log(u, dict(update=u, version=u, seconds=0.0, tokens=0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert updates(tmp_path) == list(range(7))


def test_a_full_disk_stops_the_run_with_its_name(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("NOT RUN: this system has no /dev/full")
    (tmp_path / "metrics.jsonl").symlink_to(full)
    record = Track(tmp_path / "metrics.jsonl", -1, [])
    with pytest.raises(RunError, match=r"^record metrics: "):
        record.log(1, line(1))
    record.close()


def test_a_line_that_is_only_half_written_stops_the_run_and_goes_at_the_resume(tmp_path: Path) -> None:
    program = (
        "import pathlib, resource, signal\n"
        "from posttrain.run.track import open_tracker\n"
        "from posttrain.types import RunError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"t = open_tracker(pathlib.Path({str(tmp_path)!r}), [], project='p', name='n', config={{}})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "t.log(0, dict(update=0, version=0, seconds=0.0, tokens=0))\n"
        "try:\n    t.log(1, dict(update=1, version=1, seconds=0.0, tokens=0))\n"
        "except RunError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "no space left for a whole line" in done.stdout
    assert len((tmp_path / "metrics.jsonl").read_bytes()) == 100
    assert truncate_after(tmp_path, None) == {"update": 0, "step": 0}
    assert updates(tmp_path) == [0]


# Services that misbehave


class Probe:
    """A service that notes what it is given and does at each call what the test tells it."""

    def __init__(self, run: TrackerRun) -> None:
        self.run = run
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False
        self.at_log: Callable[[], object] = lambda: None
        self.at_close: Callable[[], object] = lambda: None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.at_log()
        self.logged.append((step, metrics))

    def close(self) -> None:
        self.at_close()
        self.closed = True


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    made = Probe(TrackerRun(Path(), "", "", {}, -1))
    monkeypatch.setitem(kinds("trackers"), "tensorboard", tracker(lambda run: made))
    return made


def fail() -> None:
    raise ConnectionError("the service is gone\nand more")


def test_a_service_gets_every_finite_number_at_its_step(tmp_path: Path, probe: Probe) -> None:
    record = opened(tmp_path, "tensorboard")
    for update in range(100):
        record.log(update * 2, line(update, loss=float("nan"), lr=0.1))
    record.close()
    assert [step for step, _ in probe.logged] == [2 * u for u in range(100)]
    assert probe.logged[3][1] == {"update": 3, "version": 3, "seconds": 1.5, "tokens": 30, "lr": 0.1}
    assert probe.closed
    assert {parsed["track/dead"] for parsed in lines(tmp_path)} == {0}


def leave() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("misdeed", [fail, leave, interrupt])
def test_a_service_that_raises_is_left_alone_with_one_line(
    tmp_path: Path, probe: Probe, capfd: pytest.CaptureFixture[str], misdeed: Callable[[], None]
) -> None:
    probe.at_log = misdeed
    record = opened(tmp_path, "tensorboard")
    record.log(0, line(0))
    record._feeds[0]._done.wait(10)
    for update in (1, 2):
        record.log(update, line(update))
    record.close()
    assert [parsed["track/dead"] for parsed in lines(tmp_path)] == [0, 1, 1]
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "tracking to tensorboard stopped" in told


def test_the_one_line_names_the_cause(
    tmp_path: Path, probe: Probe, capfd: pytest.CaptureFixture[str]
) -> None:
    probe.at_close = fail
    record = opened(tmp_path, "tensorboard")
    record.log(0, line(0))
    record.close()
    told = "tracking to tensorboard stopped (ConnectionError: the service is gone); metrics.jsonl continues"
    assert capfd.readouterr().err == f"posttrain: {told}\n"


def test_a_service_that_cannot_be_opened_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(kinds("trackers"), "tensorboard", tracker(lambda run: fail()))
    record = opened(tmp_path, "tensorboard")
    record.log(0, line(0))
    record.close()
    assert updates(tmp_path) == [0]
    assert capfd.readouterr().err.count("stopped (ConnectionError") == 1


def test_a_service_that_hangs_costs_nothing_while_the_run_goes_on_and_a_bounded_wait_at_its_end(
    tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(track, "CLOSE_SECONDS", 0.2)
    released = threading.Event()
    probe.at_log = lambda: released.wait(60)
    record = opened(tmp_path, "tensorboard")
    for update in range(3):
        record.log(update, line(update))
    record.close()
    assert updates(tmp_path) == [0, 1, 2]
    assert "it did not close within 0.2 s" in capfd.readouterr().err
    released.set()


def test_a_service_that_hangs_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    program = (
        "import time; from posttrain.run import track\n"
        "track.CLOSE_SECONDS = 0.1\n"
        "from types import SimpleNamespace; from posttrain.base.kinds import kinds\n"
        "sleeps = SimpleNamespace(ours=True, load=lambda: lambda run: time.sleep(3600))\n"
        "kinds('trackers')['tensorboard'] = sleeps\n"
        "t = opened('tensorboard'); t.log(0, line(0)); t.close()"
    )
    assert "did not close within 0.1 s" in alone(program, tmp_path).stderr


def test_a_service_that_falls_too_far_behind_is_given_up(
    tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(track, "QUEUE", 4)
    released = threading.Event()
    probe.at_log = lambda: released.wait(60)
    record = opened(tmp_path, "tensorboard")
    for update in range(20):
        record.log(update, line(update))
    assert lines(tmp_path)[-1]["track/dead"] == 1
    record.close()  # at once: it is already given up
    assert updates(tmp_path) == list(range(20))
    told = capfd.readouterr().err
    assert "it is 4 updates behind" in told
    assert told.count("\n") == 1
    released.set()
    assert len(probe.logged) <= 5


def test_one_dead_service_does_not_touch_the_other(
    tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        kinds("trackers"), "json", tracker(lambda run: fail())
    )  # any package that is installed
    record = opened(tmp_path, "json", "tensorboard")
    record._feeds[0]._done.wait(10)
    record.log(0, line(0))
    record.close()
    assert lines(tmp_path)[0]["track/dead"] == 1
    assert len(probe.logged) == 1


def test_an_unknown_or_absent_service_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"^track\.sinks: "):
        opened(tmp_path / "run", "wandbb")
    monkeypatch.setitem(kinds("trackers"), "no_such_package", tracker(Probe))
    with pytest.raises(UserError, match=r"^track\.sinks: "):
        opened(tmp_path / "run", "no_such_package")
    assert not (tmp_path / "run").exists()


# The services themselves


def test_tensorboard_reads_back_what_was_logged_and_a_resume_hides_the_rest(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    record = opened(tmp_path, "tensorboard")
    for update in range(4):
        record.log(update, line(update) | {"reward/mean": update / 4})
    record.close()
    record = opened(tmp_path, "tensorboard", resume_after=1)
    record.log(2, line(2) | {"reward/mean": 9.0})
    record.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.25), (2, 9.0)]
    assert "config/text_summary" in events.Tags()["tensors"]
    assert {parsed["track/dead"] for parsed in lines(tmp_path)} == {0}


def alone(program: str, tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs it in a process of its own, in which these services may leave threads and exit hooks."""
    start = (
        "import pathlib; from posttrain.run.track import open_tracker\n"
        "def opened(sink, **named):\n"
        f"    return open_tracker(pathlib.Path({str(tmp_path / 'run')!r}), [sink], project='p', name='n',\n"
        f"                        config={CONFIG!r}, **named)\n"
        "def line(u, **m): return dict(update=u, version=u, seconds=0.0, tokens=0, **m)\n"
    )
    home = {
        "PYTHONPATH": str(Path(track.__file__).parents[3]),
        "HOME": str(tmp_path / "home"),
        "WANDB_API_KEY": "",
        "MLFLOW_TRACKING_URI": "",
        "NETRC": os.devnull,
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + program],
        env=os.environ | home | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=tmp_path,
    )


TWICE = """
t = opened({0!r})
for u in (0, 1, 2): t.log(u, line(u, **{{'reward/mean': u / 4, 'verdict/odd (é)': 1.0}}))
t.close()
t = opened({0!r}, resume_after=1)
t.log(2, line(2, **{{'reward/mean': 9.0}}))
t.close()
"""


def test_wandb_writes_an_offline_run_and_says_nothing(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = alone(TWICE.format("wandb"), tmp_path, WANDB_MODE="offline")
    assert (done.stdout, done.stderr) == ("", "")
    assert [parsed["track/dead"] for parsed in lines(tmp_path / "run")] == [0, 0, 0]
    runs = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert runs
    assert b"reward/mean" in runs[0].read_bytes()


def test_wandb_without_a_login_neither_asks_nor_stops_the_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    done = alone(
        "t = opened('wandb'); t.log(0, line(0)); t.close()",
        tmp_path,
        WANDB_MODE="online",
        WANDB_BASE_URL="http://127.0.0.1:9",
    )
    assert done.stdout == ""
    assert "tracking to wandb stopped (ConnectionError: not logged in" in done.stderr
    assert updates(tmp_path / "run") == [0]


def test_mlflow_keeps_one_run_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    unset = "import os; assert not os.environ.get('MLFLOW_TRACKING_URI'), 'the next run would go there'"
    done = alone(TWICE.format("mlflow") + unset, tmp_path)
    assert done.stdout == ""
    with sqlite3.connect(tmp_path / "run" / "mlflow" / "mlflow.db") as store:
        assert store.execute("select name, status from runs").fetchall() == [("n", "FINISHED")]
        assert ("optimiser.lr", "2e-05") in store.execute("select key, value from params").fetchall()
        values = store.execute(
            "select step, value from metrics where key = 'reward/mean' order by step, timestamp"
        )
        assert values.fetchall() == [(0, 0.0), (1, 0.25), (2, 0.5), (2, 9.0)]
    store.close()


def test_trackio_keeps_one_run_over_a_resume_and_prints_nothing(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    done = alone(TWICE.format("trackio"), tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert done.stdout == ""
    with sqlite3.connect(tmp_path / "trackio" / "p.db") as store:
        rows = store.execute("select run_name, step, metrics from metrics order by id").fetchall()
    store.close()
    assert len({name for name, _, _ in rows}) == 1
    assert [(step, json.loads(m)["reward/mean"]) for _, step, m in rows] == [
        (0, 0.0),
        (1, 0.25),
        (2, 0.5),
        (2, 9.0),
    ]


def test_aim_writes_below_the_run_and_prints_nothing(tmp_path: Path) -> None:
    pytest.importorskip("aim")
    done = alone(TWICE.format("aim"), tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "run/.aim/run_metadata.sqlite").exists()


def test_dvclive_adds_to_its_files_and_prints_nothing(tmp_path: Path) -> None:
    pytest.importorskip("dvclive")
    done = alone(TWICE.format("dvclive"), tmp_path)
    assert (done.stdout, done.stderr) == ("", "")
    rows = (tmp_path / "run/dvclive/plots/metrics/reward/mean.tsv").read_text().splitlines()
    assert [row.split("\t") for row in rows[1:]] == [["0", "0.0"], ["1", "0.25"], ["2", "0.5"], ["2", "9.0"]]
    assert "optimiser.lr: '2e-05'" in (tmp_path / "run/dvclive/params.yaml").read_text()


def test_comet_keeps_one_experiment_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml")
    done = alone(
        TWICE.format("comet_ml"), tmp_path, COMET_START_ONLINE="0", COMET_OFFLINE_DIRECTORY=str(tmp_path)
    )
    assert done.stdout == ""
    assert "stopped" not in done.stderr
    assert len({file.name[:36] for file in tmp_path.glob("*.zip")}) == 1


def test_the_services_leave_no_state_of_accelerate_behind(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    after = "from accelerate.state import PartialState; print(PartialState._shared_state)"
    done = alone(TWICE.format("tensorboard") + after, tmp_path)
    assert done.stdout == "{}\n"
