"""Write the metrics of a run: to metrics.jsonl always, and to tracking services if the recipe names some.

`metrics.jsonl` is the record: one JSON object per update, on the disk before `log` returns.

    {"update": 3, "step": 6, "version": 6, "seconds": 41.2, "tokens": 9216, "reward/mean": 0.31, ...}

Services are optional; those of posttrain are the tracking classes of accelerate. Each runs in its own thread
behind a bounded queue. One that raises, hangs or falls behind is dropped with one line on stderr, and the run
continues.
"""

import json
import logging
import math
import os
import queue
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from posttrain.base.atomic_files import replace_atomically
from posttrain.base.kinds import find_kind, kinds
from posttrain.base.libraries import require
from posttrain.base.toml import flat
from posttrain.types import RunError

METRICS = "metrics.jsonl"
REQUIRED = ("update", "version", "seconds", "tokens")
"""Keys of every line besides its step and its metrics."""
QUEUE = 256
"""Updates that a service may fall behind before it is dropped."""
CLOSE_SECONDS = 30.0
"""Seconds that the end of a run waits for all services together."""


class Service(Protocol):
    """A service that receives the finite metrics of each update, in addition to metrics.jsonl."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of one update."""
        ...

    def close(self) -> None:
        """Send everything that is pending."""
        ...


@dataclass(frozen=True, slots=True)
class TrackerRun:
    """The description of a run with which a service is opened."""

    dir: Path
    project: str
    name: str
    config: Mapping[str, Any]
    last_step: int
    """The step of the last recorded line; -1 in a new run."""


class Track:
    """The open record of a run, returned by `open_tracker`."""

    def __init__(self, path: Path, last_update: int, feeds: Sequence["_Feed"]) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)  # one line is one write
        self._last_update = last_update
        self._feeds = feeds

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one update to metrics.jsonl, on the disk at return, and offer it to the services.

        `metrics` holds update, version, seconds and tokens besides the metrics of docs/metrics.md. Updates
        must ascend. NaN and infinities are written as null, and not sent to services.

        Raises RunError if the line cannot be written.
        """
        numbers = {name: _number(value) for name, value in metrics.items()}
        update, head = int(metrics["update"]), {name: numbers.pop(name) for name in REQUIRED}
        if update <= self._last_update:
            raise ValueError(f"update {update} after update {self._last_update}")
        for feed in self._feeds:
            feed.offer(step, {name: x for name, x in (head | numbers).items() if x is not None})
        if self._feeds:
            numbers["track/dead"] = sum(feed.dead() for feed in self._feeds)
        line = {"update": update, "step": step, **{k: head[k] for k in REQUIRED[1:]}, **numbers}
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError("no space left for a whole line")
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RunError("record metrics", f"{self._path}: cannot be written: {error}") from error
        self._last_update = update

    def close(self) -> None:
        """End the record; services have CLOSE_SECONDS together to send what is pending."""
        self._file.close()
        for feed in self._feeds:
            feed.finish()
        deadline = time.monotonic() + CLOSE_SECONDS
        for feed in self._feeds:
            feed.join(deadline)


def open_tracker(
    run_dir: Path,
    sinks: Sequence[str],
    *,
    project: str,
    name: str,
    config: Mapping[str, Any],
    resume_after: int | None = None,
) -> Track:
    """Open the record of the run in `run_dir`, and these services by their names in the registry.

    resume_after: the update of the checkpoint that the run resumes from; later lines are removed.

    Raises UserError for a service that is unknown or not installed. An unreachable service is not an error.
    """
    check_sinks(sinks)
    run_dir.mkdir(parents=True, exist_ok=True)
    last = truncate_after(run_dir, resume_after)
    run = TrackerRun(run_dir.resolve(), project, name, config, last["step"])
    feeds = [_Feed(sink, partial(kinds("trackers")[sink].load(), run)) for sink in dict.fromkeys(sinks)]
    return Track(run_dir / METRICS, last["update"], feeds)


def check_sinks(sinks: Sequence[str]) -> None:
    """Raise UserError for a service that is unknown or not installed."""
    for sink in sinks:
        # A sink of posttrain has the name of its package and of the extra.
        if find_kind("trackers", sink, "track.sinks").ours:
            require(sink, "track.sinks")


def truncate_after(run_dir: Path, update: int | None) -> dict[str, int]:
    """Remove later lines from metrics.jsonl; return {"update", "step"} of the last line, or -1 for both.

    Lines of updates after `update` are removed (none if it is None), and so is a line that a crash cut off.
    The file is replaced in one step, or left alone if no line is removed.
    """
    path, last = run_dir / METRICS, {"update": -1, "step": -1}
    if not path.exists():
        return last
    lines = path.read_bytes().splitlines(keepends=True)
    pairs = [(line, parsed) for line in lines if (parsed := _parse(line))]
    pairs = [(line, parsed) for line, parsed in pairs if update is None or parsed["update"] <= update]
    if pairs:
        last = pairs[-1][1]
    if len(pairs) < len(lines):
        with replace_atomically(path) as working, working.open("wb") as file:
            file.writelines(line for line, _ in pairs)
            file.flush()
            os.fsync(file.fileno())
        directory = os.open(run_dir, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    return last


def _parse(line: bytes) -> dict[str, int] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        parsed = json.loads(line)
        return {"update": int(parsed["update"]), "step": int(parsed["step"])}
    except (ValueError, KeyError, TypeError):
        return None


def _number(value: float) -> float | int | None:
    if isinstance(value, int):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None


class _Feed:
    """A service behind a bounded queue, used by one daemon thread alone."""

    def __init__(self, name: str, open_service: Callable[[], Service]) -> None:
        self._name = name
        self._open = open_service
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(QUEUE)
        self._cause = ""
        self._reported = False
        self._done = threading.Event()
        threading.Thread(target=self._serve, name=f"track-{name}", daemon=True).start()

    def _serve(self) -> None:
        try:
            service = self._open()
            while not self._cause and (item := self._queue.get()) is not None:
                service.log(*item)
            service.close()
        except BaseException as error:  # a service may even try to exit the process
            text = str(error).strip().splitlines()
            self._cause = self._cause or f"{type(error).__name__}{': ' + text[0][:200] if text else ''}"
        self._done.set()

    def offer(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue one update, unless the service is dropped."""
        if self.dead():
            return
        try:
            self._queue.put_nowait((step, metrics))
        except queue.Full:
            self._give_up(f"it is {QUEUE} updates behind")

    def dead(self) -> bool:
        """Return True if the service was dropped; report it once."""
        if self._cause and not self._reported:
            self._reported = True
            # Printed by the main thread, so that it cannot cut into its lines.
            print(
                f"posttrain: tracking to {self._name} stopped ({self._cause}); {METRICS} continues",
                file=sys.stderr,
                flush=True,
            )
        return bool(self._cause)

    def finish(self) -> None:
        """Send the end of the queue to the thread."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._give_up(f"it is {QUEUE} updates behind")

    def join(self, deadline: float) -> None:
        """Wait, until the deadline at most, for the service to take everything."""
        if not self._done.wait(0.0 if self._cause else max(0.0, deadline - time.monotonic())):
            self._give_up(f"it did not close within {CLOSE_SECONDS:g} s")
        self.dead()

    def _give_up(self, cause: str) -> None:
        self._cause = self._cause or cause
        self.dead()


def _run_id(run_dir: Path) -> str:
    """Return an id of this run directory; a resumed run gets the same."""
    file = run_dir / "track_id"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12])
    return file.read_text()


class Accelerated:
    """A service made of its class in accelerate.tracking, without an Accelerator."""

    def __init__(
        self, name: str, options: Callable[[TrackerRun], Mapping[str, Any]], run: TrackerRun
    ) -> None:
        from accelerate import tracking

        # Its logger raises without a PartialState, which would choose a device for the whole process.
        vars(tracking)["logger"] = logging.getLogger(tracking.__name__)
        arguments = options(run)
        self._tracker = tracking.LOGGER_TYPE_TO_CLASS[name](**arguments)
        self._tracker.main_process_only = False
        self._tracker.start()
        if name == "tensorboard":  # it would store the configuration as another run
            text = f"```json\n{json.dumps(run.config, indent=2, default=str)}\n```"
            self._tracker.log({"config": text}, step=0)
        elif not {"config", "run_id"} & arguments.keys():
            values = {_plain(key): str(value)[:500] for key, value in flat(run.config).items()}
            self._tracker.store_init_configuration(values)
        self._name = _plain if name == "mlflow" else str

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tracker.log({self._name(name): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        self._tracker.finish()


def _plain(name: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", name)


def _tensorboard(run: TrackerRun) -> Mapping[str, Any]:
    # The viewer hides what a crashed run wrote after the checkpoint.
    purge = run.last_step + 1 if run.last_step >= 0 else None
    return {"run_name": "tensorboard", "logging_dir": str(run.dir), "purge_step": purge}


def _wandb(run: TrackerRun) -> Mapping[str, Any]:
    """A run of Weights & Biases, its files in RUN_DIR/wandb; WANDB_MODE=offline keeps it there."""
    import wandb

    settings = wandb.setup(wandb.Settings(silent=True, console="off")).settings
    # Without a login, init would ask for one on the terminal.
    if settings.mode not in ("offline", "dryrun", "disabled") and not wandb.login(prompt=False):
        raise ConnectionError("not logged in: run wandb login, or set WANDB_API_KEY")
    identity = {"run_name": run.project, "name": run.name, "id": _run_id(run.dir), "resume": "allow"}
    return {**identity, "dir": str(run.dir), "config": dict(run.config)}


def _trackio(run: TrackerRun) -> Mapping[str, Any]:
    """A run of trackio, in its own store (TRACKIO_DIR) or wherever its environment points it."""
    import trackio
    import trackio.run
    import trackio.utils

    for module in (trackio, trackio.run, trackio.utils):
        # It has no quiet mode, and stdout is for the output of the command.
        vars(module)["print"] = lambda *words, **options: None
    identity = {"run_name": run.project, "name": f"{run.name}-{_run_id(run.dir)}", "resume": "allow"}
    return {**identity, "config": json.loads(json.dumps(run.config, default=str)), "embed": False}


def _mlflow(run: TrackerRun) -> Mapping[str, Any]:
    """A run of MLflow, at MLFLOW_TRACKING_URI or else in RUN_DIR/mlflow/mlflow.db."""
    import mlflow

    logging.getLogger("mlflow").setLevel(logging.ERROR)
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    uri, here = os.environ.get("MLFLOW_TRACKING_URI"), run.dir / "mlflow"
    if not uri:
        here.mkdir(exist_ok=True)
    mlflow.set_tracking_uri(uri or f"sqlite:///{here}/mlflow.db")
    if not uri:  # set_tracking_uri may set the variable, for later runs of this process too
        os.environ.pop("MLFLOW_TRACKING_URI", None)
    tags = {"posttrain_id": _run_id(run.dir)}
    earlier = mlflow.search_runs(
        experiment_names=[run.project],
        filter_string=f"tags.posttrain_id = '{tags['posttrain_id']}'",
        output_format="list",
    )
    identity = {"experiment_name": run.project, "run_name": run.name, "tags": tags}
    if earlier:
        identity["run_id"] = earlier[0].info.run_id
    return {**identity, "logging_dir": None if uri else str(here)}


def _comet_ml(run: TrackerRun) -> Mapping[str, Any]:
    """An experiment of Comet; its key must have 32 letters or more."""
    return {"run_name": run.project, "experiment_key": 3 * _run_id(run.dir), "mode": "get_or_create"}


def _aim(run: TrackerRun) -> Mapping[str, Any]:
    """A run in the repository RUN_DIR/.aim."""
    quiet = {"capture_terminal_logs": False, "system_tracking_interval": None}
    return {"run_name": run.name, "experiment": run.project, "logging_dir": str(run.dir), **quiet}


def _dvclive(run: TrackerRun) -> Mapping[str, Any]:
    """Files of DVCLive in RUN_DIR/dvclive, without an experiment in Git."""
    return {"dir": str(run.dir / "dvclive"), "resume": True, "save_dvc_exp": False, "dvcyaml": None}


tensorboard = partial(Accelerated, "tensorboard", _tensorboard)
wandb = partial(Accelerated, "wandb", _wandb)
trackio = partial(Accelerated, "trackio", _trackio)
mlflow = partial(Accelerated, "mlflow", _mlflow)
comet_ml = partial(Accelerated, "comet_ml", _comet_ml)
aim = partial(Accelerated, "aim", _aim)
dvclive = partial(Accelerated, "dvclive", _dvclive)
