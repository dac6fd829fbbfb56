"""Serve the report of a running run, or of a folder of runs, to this machine: pages that poll for news.

    /              the current report
    /news?from=N   the lines after the first N bytes of metrics.jsonl, and the current headline

and of a folder:

    /                     the list of its runs
    /list                 the rows of the list
    /runs/NAME/           the report of a run, with its news; the page of a pipeline
    /compare?run=A&run=B  one page of several runs
    /curves?run=A&run=B   the data of that page

Nothing is written and nothing else is served. Requests under another host name than this machine's are
refused: otherwise another site could point its name here (DNS rebinding) and read the page.
"""

import json
from collections.abc import Callable, Mapping, Sequence
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
from posttrain.report import overlay, pipeline
from posttrain.report.glossary import words
from posttrain.report.headline import headline
from posttrain.report.page import alarms, assembled, block, page
from posttrain.report.record import Curves, file_text, metrics, number, read, samples_in
from posttrain.report.rollouts import json_text, pack_file
from posttrain.report.verdicts import classes

METRICS = "metrics.jsonl"


class ReportServer(LoopbackServer):
    """Serve the report of one run at `address` until it is closed."""

    def __init__(self, run_dir: Path, port: int, running: Callable[[Path], bool]) -> None:
        """Open the port, or a free one for 0; `running` returns whether a process still writes to the run.

        Raises UserError for a directory that is not a run, and for a port that is not available.
        """
        report = LiveReport(run_dir, running)
        super().__init__([Route("/", report.page), Route("/news", report.news)], port, {UserError: _refuse})


class LiveReport:
    """Responses with the report of one run, and with what came since."""

    def __init__(self, run_dir: Path, running: Callable[[Path], bool]) -> None:
        """Raises UserError for a directory that is not a run."""
        read(run_dir)
        self.run_dir, self.running, self.curves = run_dir, running, LiveCurves(run_dir / METRICS)

    def page(self, request: Request) -> Response:
        """Return the report as it is now."""
        offset = len(lines_after(self.curves.file, 0) or b"")
        return _html(page(read(self.run_dir), live=offset))

    def news(self, request: Request) -> Response:
        """Return `news` from the query's byte on, and whether the run is running."""
        try:
            content = news(self.curves, int(request.query_params.get("from", "0")))
        except ValueError:
            raise HTTPException(400, "from is a number of bytes") from None
        return _json({**content, "running": self.running(self.run_dir)})


class FolderServer(LoopbackServer):
    """Serve the runs of a folder at `address` until it is closed."""

    def __init__(
        self,
        folder: Path,
        port: int,
        summaries: Callable[[], Sequence[Mapping[str, Any]]],
        running: Callable[[Path], bool],
    ) -> None:
        """Open the port, or a free one for 0.

        summaries: returns the row of each run and pipeline, with its `path` and `kind`. running: returns
        whether a process still writes to a run. Raises UserError for a port that is not available.
        """
        self.folder, self.summaries, self.running = folder, summaries, running
        self._reports: dict[Path, LiveReport] = {}
        routes = [
            Route("/", self._page),
            Route("/list", self._list),
            Route("/compare", self._compare),
            Route("/curves", self._curves),
            Route("/runs/{name:path}/news", self._news),
            Route("/runs/{name:path}/", self._report),
        ]
        super().__init__(routes, port, {UserError: _refuse})

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {**row, "name": Path(row["path"]).relative_to(self.folder).as_posix()} for row in self.summaries()
        ]

    def _page(self, request: Request) -> Response:
        data = block("folder", json_text({"folder": str(self.folder), "runs": self._rows()}))
        styles = ["style.css", "folder.css"]
        return _html(
            assembled(
                "folder.html", ["dom.js", "poll.js", "folder.js"], styles, str(self.folder), data, asks=True
            )
        )

    def _list(self, request: Request) -> Response:
        return _json(self._rows())

    def _find(self, names: Sequence[str]) -> list[tuple[Path, str]]:
        """Return path and kind of each of these runs. Raises HTTPException for a name that the list lacks."""
        listing = {row["name"]: (Path(row["path"]), row["kind"]) for row in self._rows()}
        if not all(name in listing for name in names):
            raise HTTPException(404)
        return [listing[name] for name in names]

    def _live(self, path: Path) -> LiveReport:
        if path not in self._reports:
            self._reports[path] = LiveReport(path, self.running)
        return self._reports[path]

    def _report(self, request: Request) -> Response:
        [(path, kind)] = self._find([request.path_params["name"]])
        if kind == "pipeline":
            return _html(pipeline.page(pipeline.summary(path)))
        return self._live(path).page(request)

    def _news(self, request: Request) -> Response:
        [(path, _)] = self._find([request.path_params["name"]])
        return self._live(path).news(request)

    def _groups(self, request: Request) -> list[overlay.Series]:
        paths = [path for path, _ in self._find(request.query_params.getlist("run"))]
        if len(paths) < 2:
            raise HTTPException(400, "name two runs or more")
        return overlay.series([(path, read(path)) for path in paths])

    def _compare(self, request: Request) -> Response:
        return _html(overlay.page(self._groups(request), live=True))

    def _curves(self, request: Request) -> Response:
        return Response(json_text(overlay.content(self._groups(request))), media_type="application/json")


def _html(text: str) -> Response:
    return HTMLResponse(text.encode("utf-8", "replace"))


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")


def _refuse(request: Request, error: Exception) -> Response:
    """Answer 410 Gone: the run directory was removed."""
    return PlainTextResponse(str(error), 410)


class LiveCurves:
    """The curves of a growing metrics.jsonl, each line of which is read once."""

    def __init__(self, file: Path) -> None:
        self.file, self.lock = file, Lock()
        """`lock` must be held while curves are used: `update` changes them in place."""
        self._metrics, self._offset, self._inode = Curves((), {}), 0, -1

    def update(self) -> Curves:
        """Return the curves with all lines so far; a replaced file, as after a resume, is read again."""
        inode = self.file.stat().st_ino
        fresh = lines_after(self.file, self._offset) if inode == self._inode else None
        if fresh is None:
            self._metrics, self._offset, fresh = Curves((), {}), 0, lines_after(self.file, 0) or b""
        self._metrics, _ = metrics(_objects(fresh), self._metrics)
        self._offset, self._inode = self._offset + len(fresh), inode
        return self._metrics


def lines_after(file: Path, offset: int) -> bytes | None:
    """Return the complete lines from this byte on; None if no line begins there."""
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
    """Return the lines of metrics.jsonl from this byte on, and headline, alarms and tables if there are any.

    `next` is the offset of the following lines. `again` is set if the file was replaced, as by a resume that
    removed lines: the page then reloads. Raises ValueError for an offset below 0.
    """
    if offset < 0:
        raise ValueError("an offset is 0 or more")
    if (fresh := lines_after(curves.file, offset)) is None:
        return {"again": True}
    run_dir = curves.file.parent
    stopped = file_text(run_dir / "stopped.txt")[0].strip()
    content: dict[str, Any] = {"next": offset + len(fresh), "lines": _objects(fresh), "stopped": stopped}
    if content["lines"]:
        samples, _ = samples_in(run_dir / "samples")
        newest = [pack_file(file)[0] for file in samples[-1:]]
        with curves.lock:
            current = curves.update()
            content |= {
                "headline": asdict(headline(current)),
                "alarms": alarms(current, newest),
                "classes": classes(current),
                "words": words(current.series),
                "rollouts": len(samples),
            }
    return content


def _objects(content: bytes) -> list[dict[str, Any]]:
    rows = []
    for line in content.splitlines():
        try:
            # NaN is null in metrics.jsonl; browsers cannot parse the other constants that Python accepts.
            row = json.loads(line, parse_constant=lambda name: None, parse_float=lambda x: number(float(x)))
        except (ValueError, RecursionError):
            continue
        rows += [row] if isinstance(row, dict) else []
    return rows
