"""The report of a run while it goes on, for this machine alone: a page that asks for new metrics.

    /              the report as it is now
    /news?from=N   what was written after the first N bytes of metrics.jsonl, and the headline of now

Nothing is written, nothing else is served, and whoever asks under another name than this machine's own is
refused: a page of some other site could otherwise have its name point here and read along.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from posttrain.base.loopback import LoopbackServer
from posttrain.errors import UserError
from posttrain.report.glossary import words
from posttrain.report.headline import headline
from posttrain.report.page import alarms, page
from posttrain.report.record import Curves, file_text, metrics, number, read, samples_in
from posttrain.report.rollouts import pack_file
from posttrain.report.verdicts import classes

METRICS = "metrics.jsonl"


class ReportServer(LoopbackServer):
    """Serves the report of one run until it is closed; `address` is where."""

    def __init__(self, run_dir: Path, port: int, running: Callable[[Path], bool]) -> None:
        """Open the port, or a free one for 0; `running` says whether a process still writes to the run.

        Raises UserError for what is not a run, and for a port that is not available.
        """
        read(run_dir)
        self.run_dir, self.running, self.curves = run_dir, running, LiveCurves(run_dir / METRICS)
        routes = [Route("/", self._page), Route("/news", self._news)]
        super().__init__(routes, port, {UserError: _refuse})

    def _page(self, request: Request) -> Response:
        offset = len(lines_after(self.curves.file, 0) or b"")
        return HTMLResponse(page(read(self.run_dir), live=offset).encode("utf-8", "replace"))

    def _news(self, request: Request) -> Response:
        try:
            told = news(self.curves, int(request.query_params.get("from", "0")))
        except ValueError:
            raise HTTPException(400, "from is a number of bytes") from None
        told["running"] = self.running(self.run_dir)
        return Response(json.dumps(told), media_type="application/json")


def _refuse(request: Request, error: Exception) -> Response:
    """The directory is gone."""
    return PlainTextResponse(str(error), 410)


class LiveCurves:
    """The curves of a metrics.jsonl that grows: what was read is not read again."""

    def __init__(self, file: Path) -> None:
        self.file, self.lock = file, Lock()
        """Held by whoever looks at curves: those that are read next are made of them."""
        self._metrics, self._offset, self._which = Curves((), {}), 0, -1

    def read_on(self) -> Curves:
        """The curves of all whole lines. One that took its place, as after a resume, is read again."""
        which = self.file.stat().st_ino
        fresh = lines_after(self.file, self._offset) if which == self._which else None
        if fresh is None:
            self._metrics, self._offset, fresh = Curves((), {}), 0, lines_after(self.file, 0) or b""
        self._metrics, _ = metrics(_objects(fresh), self._metrics)
        self._offset, self._which = self._offset + len(fresh), which
        return self._metrics


def lines_after(file: Path, offset: int) -> bytes | None:
    """The whole lines from this byte on; None if no line begins there."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, offset - 1))
            content = opened.read()
    except OSError:
        content = b""
    if offset and not content.startswith(b"\n"):
        return None
    return content[bool(offset) : content.rfind(b"\n") + 1]


def news(curves: LiveCurves, offset: int) -> dict[str, Any]:
    """The lines of metrics.jsonl from this byte on, and what the page says again if there are any.

    `next` is where the following ones begin. `again` says that the file is another one than it was, as after
    a resume that took lines back. Raises ValueError for an offset below 0.
    """
    if offset < 0:
        raise ValueError("an offset is 0 or more")
    if (fresh := lines_after(curves.file, offset)) is None:
        return {"again": True}
    run_dir = curves.file.parent
    told: dict[str, Any] = {"next": offset + len(fresh), "lines": _objects(fresh)}
    told["stopped"] = file_text(run_dir / "stopped.txt")[0].strip()
    if told["lines"]:
        samples, _ = samples_in(run_dir / "samples")
        newest = [pack_file(file)[0] for file in samples[-1:]]
        with curves.lock:
            found = curves.read_on()
            told |= {
                "headline": asdict(headline(found)),
                "alarms": alarms(found, newest),
                "classes": classes(found),
                "words": words(found.series),
                "rollouts": len(samples),
            }
    return told


def _objects(content: bytes) -> list[dict[str, Any]]:
    found = []
    for line in content.splitlines():
        try:
            # A number that is none is null in a line; what else Python reads, no browser does.
            row = json.loads(line, parse_constant=lambda name: None, parse_float=lambda x: number(float(x)))
        except (ValueError, RecursionError):
            continue
        found += [row] if isinstance(row, dict) else []
    return found
