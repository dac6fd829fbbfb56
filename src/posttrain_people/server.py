"""Serve the page on which one rater labels questions, on this machine only.

/        the page
/state   GET: the next question, blind, and the progress
/label   POST {"question", "label", "seconds"}: append the label, return the new state
/undo    POST {}: take the rater's newest label back, return the new state

A POST must be application/json, which a browser does not let a page of another site send to this address.
Who wrote an answer is never sent to the page.
"""

import html
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from posttrain.base.loopback import LoopbackServer
from posttrain.data.messages import answer_messages
from posttrain.report.page import content_policy, part
from posttrain.types import Message
from posttrain_people.labels import LabelLog, check_label, entry_of, write_training
from posttrain_people.questions import LabelQuestion, Mode

_SLOT = re.compile(r"<!--(\w+)-->")


class LabelServer(LoopbackServer):
    """Ask one rater the questions in their order, until closed; labels of earlier sessions count."""

    def __init__(
        self,
        questions: Sequence[LabelQuestion],
        mode: Mode,
        rater: str,
        log: LabelLog,
        out: Path,
        *,
        seed: int,
        port: int,
    ) -> None:
        """Open the port, or a free one for 0. Raises UserError for a port that is not available."""
        self.questions = {question.key: question for question in questions}
        self.mode, self.rater, self.log, self.out, self.seed = mode, rater, log, out, seed
        self._lock = Lock()
        routes = [
            Route("/", self._page),
            Route("/state", self._state),
            Route("/label", self._label, methods=["POST"]),
            Route("/undo", self._undo, methods=["POST"]),
        ]
        super().__init__(routes, port, {OSError: _refuse_unsaved})

    @property
    def done(self) -> int:
        """Number of questions that the rater has labelled."""
        return len(self.questions.keys() & set(self.log.of_rater(self.rater)))

    def order(self, question: LabelQuestion) -> list[int]:
        """Return the indices of the answers in the order of the page, drawn from seed, rater and question."""
        count = len(question.answers)
        return random.Random(f"{self.seed} {self.rater} {question.key}").sample(range(count), count)

    def state(self) -> dict[str, Any]:
        """Return what the page shows: the first question without a label, and the progress."""
        self.log.read()
        labelled = set(self.log.of_rater(self.rater))
        question = next((q for key, q in self.questions.items() if key not in labelled), None)
        content = None
        if question is not None:
            answers = [answer_messages(question.answers[i]) for i in self.order(question)]
            content = {
                "key": question.key,
                "prompt": _turns(question.messages),
                "answers": [_turns(turns) for turns in answers],
                "steps": [*question.steps],
            }
        return {"done": self.done, "total": len(self.questions), "question": content}

    def label(self, key: str, on_page: Any, seconds: float) -> None:
        """Append a label, given in the order of the page. Raises ValueError for one that is not valid."""
        question = self.questions[key]
        order = self.order(question)
        check_label(self.mode, on_page, len(question.steps or question.answers))
        label = on_page
        if self.mode == "pairs" and type(on_page) is int:
            label = order[on_page]
        elif self.mode == "rank" and isinstance(on_page, list):
            label = [on_page[order.index(i)] for i in range(len(order))]
        entry = entry_of(question, self.mode, self.rater, order, label)
        self.log.append(entry | {"seconds": round(seconds, 2), "time": _now()})
        write_training(self.log.standing.values(), self.out)

    def undo(self) -> None:
        """Append an undo of the rater's newest label in this session's questions; without one do nothing."""
        keys = [key for key in self.log.of_rater(self.rater) if key in self.questions]
        if keys:
            self.log.append({"rater": self.rater, "question": keys[-1], "undo": True, "time": _now()})
            write_training(self.log.standing.values(), self.out)

    def _page(self, request: Request) -> Response:
        return HTMLResponse(label_page(self.mode, self.rater, self.out.name))

    def _state(self, request: Request) -> Response:
        with self._lock:
            return _json(self.state())

    async def _label(self, request: Request) -> Response:
        body = await _body(request)
        with self._lock:
            self.log.read()
            try:
                self.label(str(body["question"]), body["label"], float(body.get("seconds") or 0.0))
            except (KeyError, TypeError, ValueError) as error:
                raise HTTPException(400, f"not a label: {error}") from None
            return _json(self.state())

    async def _undo(self, request: Request) -> Response:
        await _body(request)
        with self._lock:
            self.log.read()
            self.undo()
            return _json(self.state())


def label_page(mode: Mode, rater: str, out: str) -> str:
    """Return the HTML of the page, which loads nothing and asks only its own server."""
    guard, style = part("guard.js"), part("style.css") + _asset("label.css")
    script = "(() => {\n'use strict';\n" + part("dom.js") + _asset("label.js") + "\n})();\n"
    parts = {
        "policy": content_policy([guard, script], style, asks=True),
        "guard": f"<script>{guard}</script>",
        "style": f"<style>{style}</style>",
        "mode": mode,
        "rater": html.escape(rater),
        "out": html.escape(out),
        "script": f"<script>{script}</script>",
    }
    return _SLOT.sub(lambda slot: parts[slot[1]], _asset("label.html"))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _turns(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Return messages as role and text; calls of tools and the like are their JSON."""
    turns = []
    for message in messages:
        rest = {key: value for key, value in message.items() if key not in ("role", "content") and value}
        texts = [
            str(message.get("content") or ""),
            json.dumps(rest, ensure_ascii=False, indent=1) if rest else "",
        ]
        turns.append({"role": str(message["role"]), "text": "\n".join(filter(None, texts))})
    return turns


async def _body(request: Request) -> Mapping[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send application/json")
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise HTTPException(400, "send an object")
    return body


def _refuse_unsaved(request: Request, error: Exception) -> Response:
    """Answer 507 Insufficient Storage: the label is not on disk, and the question stays."""
    return Response(f"not saved: {getattr(error, 'strerror', '') or error}", 507, media_type="text/plain")


def _json(content: Mapping[str, Any]) -> Response:
    """Answer in ASCII: a text may have surrogates, which UTF-8 has no bytes for."""
    return Response(json.dumps(content), media_type="application/json")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
