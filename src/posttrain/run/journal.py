"""The journal of both loops: progress, the seconds of each phase, and a line of metrics for each update."""

import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.base.usercode import cause
from posttrain.learner.ranks import launched
from posttrain.process.machine import peak_memory
from posttrain.run.rundir import kept
from posttrain.run.track import Track
from posttrain.types import RunError, UserError

PASSED_ON_S = 5.0
"""Seconds within which several signals to a rank count as one that was forwarded."""
Show = Callable[[str, Mapping[str, float]], None]
"""Called with the progress of phases, ("sample", {"done": 3, "total": 8}), and with lines, as "update"."""


@dataclass
class Progress:
    """The state of a loop in a checkpoint, besides that of the learner."""

    update: int = 0
    taken: int = 0
    """Tasks or rows taken from the stream so far."""
    admitted: int = 0
    """Groups admitted so far (see curriculum/staleness.py)."""
    tokens: int = 0
    """Tokens trained on so far."""
    seconds: float = 0.0
    recent: str = ""
    """Which of the latest episodes failed (see ErrorRate.recent)."""
    empty: int = 0
    """Consecutive updates in which selection kept no group."""
    common_tokens: dict[str, int] = field(default_factory=dict)
    """Counts of tokens in the first updates (see rare_tokens of run/probes.py)."""


class Journal:
    """Time the phases of updates and write the lines of metrics.jsonl."""

    def __init__(self, track: Track | None, progress: Progress, show: Show) -> None:
        """Continue from `progress`; without a track, as on ranks other than 0, no line is written."""
        self.track, self.progress, self.show = track, progress, show
        self._began = time.monotonic() - progress.seconds
        self.phases: Counter[str] = Counter()
        self.pending: dict[str, float] = {}
        """Metrics of the pending update."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of the block to this phase of the update."""
        self.show(phase, {})
        begin = time.monotonic()
        yield
        self.phases[phase] += time.monotonic() - begin  # type: ignore[assignment]

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write and return the update's line, with the seconds of each phase since the last line."""
        self.progress.seconds = time.monotonic() - self._began
        phases = {f"time/{name}": float(seconds) for name, seconds in self.phases.items()}
        line = {
            "update": self.progress.update,
            "version": version,
            "seconds": self.progress.seconds,
            "tokens": self.progress.tokens,
            **metrics,
            **phases,
            "memory/peak": peak_memory(),
            "time/total": sum(phases.values()),
        }
        self.phases.clear()
        if self.track:
            self.track.log(step, line)
        self.show("update", {"step": step, **line})
        return {"step": step, **line}


_stop_times: list[float] = []
"""Times at which signals requested a stop of this process."""


def stop_requested_since(start: float) -> bool:
    """Return True if a signal has requested a stop since `start`; a loop in its last update ignores one."""
    return any(at >= start for at in _stop_times)


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after SIGTERM or SIGINT, so that a loop finishes and saves.

    A second signal raises KeyboardInterrupt. After a Ctrl-C, which the terminal sends to all ranks, torchrun
    sends them a SIGTERM too.
    """
    times: list[float] = []

    def request_stop(number: int, frame: object) -> None:
        if times and time.monotonic() - times[0] > (PASSED_ON_S if launched() else 0.0):
            raise KeyboardInterrupt
        times.append(time.monotonic())
        _stop_times.append(times[-1])

    handlers = {s: signal.signal(s, request_stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(times)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextmanager
def stop_recorded(run_dir: Path, rank_dir: Path) -> Iterator[None]:
    """Write the error that ends a loop to stopped.txt in the rank's folder, for the report.

    Delete the file of an earlier run first. An unforeseen exception becomes a RunError, and its traceback
    goes to error.log. KeyboardInterrupt gets a message with the last checkpoint.
    """
    file = rank_dir / "stopped.txt"
    file.unlink(missing_ok=True)
    try:
        yield
    except RunError as error:
        _write_text(file, str(error))
        raise
    except UserError:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept(run_dir)) from None
    except Exception as error:
        log = rank_dir / "error.log"
        _write_text(log, "".join(traceback.format_exception(error)))
        reason = cause(error)
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.filename or run_dir}: {error.strerror}"
        failure = RunError("unforeseen", f"{reason}; the traceback is in {log}", kept(run_dir))
        _write_text(file, str(failure))
        raise failure from error


def _write_text(file: Path, text: str) -> None:
    with suppress(OSError):  # the error may be a full disk
        file.write_text(f"{text}\n", errors="backslashreplace")
