"""What both loops keep: how far they are, how long each phase took, and a line for each update."""

import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from posttrain.base.usercode import cause
from posttrain.learner.ranks import launched
from posttrain.run.rundir import kept
from posttrain.run.track import Track
from posttrain.types import RunError, UserError

PASSED_ON_S = 5.0
"""Seconds within which signals to a rank are one that came in several ways."""
Show = Callable[[str, Mapping[str, float]], None]
"""Told of each phase's progress ("sample", {"done": 3, "total": 8}) and, as "update", of each line."""


@dataclass
class Progress:
    """Everything of a loop that a checkpoint must hold besides what the learner holds."""

    update: int = 0
    taken: int = 0
    """Tasks or rows taken from the stream."""
    admitted: int = 0
    """Groups admitted."""
    tokens: int = 0
    """Tokens trained."""
    seconds: float = 0.0
    recent: str = ""
    """Of the latest episodes which failed, as ErrorRate keeps it."""
    empty: int = 0
    """Updates in a row for which selection kept no group."""


class Journal:
    """Times phases and writes the lines of metrics.jsonl."""

    def __init__(self, track: Track | None, progress: Progress, show: Show) -> None:
        """track: None for a rank whose lines another one writes."""
        self.track, self.progress, self.show = track, progress, show
        self._began = time.monotonic() - progress.seconds
        self.phases: Counter[str] = Counter()
        self.noted: dict[str, float] = {}
        """Metrics of the update running."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds what happens inside to the phase's seconds of this update."""
        self.show(phase, {})
        begin = time.monotonic()
        yield
        self.phases[phase] += time.monotonic() - begin  # type: ignore[assignment]

    def log(self, step: int, version: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Writes the update's line, with the seconds of each phase since the last one; the line."""
        self.progress.seconds = time.monotonic() - self._began
        phases = {f"time/{name}": float(seconds) for name, seconds in self.phases.items()}
        line = {
            "update": self.progress.update,
            "version": version,
            "seconds": self.progress.seconds,
            "tokens": self.progress.tokens,
            **metrics,
            **phases,
            "time/total": sum(phases.values()),
        }
        self.phases.clear()
        if self.track:
            self.track.log(step, line)
        self.show("update", {"step": step, **line})
        return {"step": step, **line}


_asked_at: list[float] = []
"""When signals have asked this process to stop."""


def stop_asked_since(then: float) -> bool:
    """Whether a signal has asked a loop to stop since then; a loop in its last update does not tell."""
    return any(at >= then for at in _asked_at)


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM or SIGINT has come. The first asks a loop to finish and save; a second ends at once.

    torchrun sends its ranks a SIGTERM for the Ctrl-C that the terminal has sent them already.
    """
    asked: list[float] = []

    def ask(number: int, frame: object) -> None:
        if asked and time.monotonic() - asked[0] > (PASSED_ON_S if launched() else 0.0):
            raise KeyboardInterrupt
        asked.append(time.monotonic())
        _asked_at.append(asked[-1])

    before = {s: signal.signal(s, ask) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_recorded(run_dir: Path, own: Path) -> Iterator[None]:
    """Leaves what ends a loop in stopped.txt of this rank's own folder, for the report; an earlier one goes.

    An exception that nobody foresaw becomes a RunError, and its traceback error.log. Ctrl-C that would
    not wait says what is kept.
    """
    file = own / "stopped.txt"
    file.unlink(missing_ok=True)
    try:
        yield
    except RunError as error:
        _leave(file, str(error))
        raise
    except UserError:
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept(run_dir)) from None
    except Exception as error:
        log = own / "error.log"
        _leave(log, "".join(traceback.format_exception(error)))
        what = cause(error)
        if isinstance(error, OSError) and error.strerror:
            what = f"{error.filename or run_dir}: {error.strerror}"
        failure = RunError("unforeseen", f"{what}; the traceback is in {log}", kept(run_dir))
        _leave(file, str(failure))
        raise failure from error


def _leave(file: Path, text: str) -> None:
    with suppress(OSError):  # a full disk may be what it says
        file.write_text(f"{text}\n", errors="backslashreplace")
