"""Answers over HTTP, on this machine: a thread for each client that waits for its answers."""

import json
import queue
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from urllib.parse import unquote, urlsplit

from posttrain.base.chat import Chat
from posttrain.base.loopback import LoopbackRequest, LoopbackServer
from posttrain.engines.protocol import Engine
from posttrain.errors import UserError
from posttrain.serving.answers import Growing, Spoken, before_stop, events, logprobs, reason
from posttrain.serving.speech import Speech
from posttrain.serving.stepper import LOOK_S, PendingAnswers, Stepper
from posttrain.serving.wire import ChatMessage, Question, RefusedError, question, room_behind, unshown
from posttrain.types import Completion, Request

MOST_BYTES = 8 << 20
MOST_WAITING = 1024
"""Answers that are asked for and not given, of all clients."""
CHAT = "/chat/completions"


class Desk(ABC):
    """Where requests are taken that came over the wire, each in a thread of its own."""

    def __init__(self, speech: Speech, name: str) -> None:
        self.speech, self.name = speech, name
        self.lock = threading.Lock()
        self._asked = 0

    def close(self) -> None:  # noqa: B027 - a desk may have nothing to end
        """Ends what it has begun."""

    @abstractmethod
    def post(self, path: str, body: bytes, tries: int) -> PendingAnswers | dict[str, Any]:
        """The answers that will come, or what is said at once; RefusedError.

        tries: how often the client has asked the same before.
        """

    def number(self) -> int:
        """How many requests came before."""
        with self.lock:
            self._asked += 1
            return self._asked - 1


class ModelDesk(Desk):
    """Asks an engine that steps in a thread of its own; each request is a conversation by itself."""

    def __init__(self, engine: Engine, chat: Chat, *, name: str, context: int, seed: int = 0) -> None:
        super().__init__(Speech.of(chat), name)
        self.context, self.seed = context, seed
        self.stepper = Stepper(engine)

    def close(self) -> None:
        """Ends the engine; who still waits is told so."""
        self.stepper.close()

    def post(self, path: str, body: bytes, tries: int) -> PendingAnswers:
        """The answers to a request."""
        if path != f"/v1{CHAT}":
            raise RefusedError(f"there is nothing here: POST /v1{CHAT}", status=404)
        asked = question(body)
        if asked.model not in (None, self.name):
            what = f"there is no model {asked.model!r} here, but {self.name!r}"
            raise RefusedError(what, field="model", code="model_not_found", status=404)
        asks = PendingAnswers(asked, self.requests_of(asked))
        self.stepper.ask(asks)
        return asks

    def requests_of(self, asked: Question) -> list[Request]:
        """What the engine is asked; RefusedError for a prompt that leaves no room, or that is none."""
        number = self.number()
        try:
            prompt = tuple(self.speech.prompt(asked.messages, asked.tools))
        except UserError as error:
            raise unshown(error) from None
        room = room_behind(prompt, self.context)
        if self.stepper.waiting + asked.count > MOST_WAITING:
            raise RefusedError("too many requests wait for an answer", status=503)
        one = Request(prompt=prompt, sampling=asked.sampling(room), seed=self.seed, task=f"request {number}")
        if asked.seed is not None:
            one = replace(one, seed=asked.seed, task="")
        return [replace(one, sample=n) for n in range(asked.count)]


class Server(LoopbackServer):
    """Serves what a desk says until it is closed; `address` is the base URL for a client."""

    def __init__(self, desk: Desk, port: int = 0) -> None:
        """Opens the port, or a free one for 0; UserError for one that cannot be had."""
        self.desk = desk
        super().__init__(_Client, port)

    @property
    def address(self) -> str:
        """The base URL."""
        return f"{super().address}v1"


class _Client(LoopbackRequest):
    server: Server
    protocol_version = "HTTP/1.1"

    @property
    def desk(self) -> Desk:
        return self.server.desk

    def do_GET(self) -> None:  # noqa: N802 - as http.server calls it
        """The models, or whether it lives."""
        path = unquote(urlsplit(self.path).path)
        if not self.is_own_name:
            self._refuse(self._foreign())
        elif path == "/health":
            self._tell(200, {"status": "ok"})
        elif path.endswith(("/models", f"/models/{self.desk.name}")):
            model = {"id": self.desk.name, "object": "model", "created": 0, "owned_by": "posttrain"}
            self._tell(200, {"object": "list", "data": [model]} if path.endswith("/models") else model)
        else:
            self._refuse(RefusedError("there is nothing here", status=404))

    def do_POST(self) -> None:  # noqa: N802
        """Answers of the model, at once or as they are drawn."""
        try:
            body = self._body()
            tries = self.headers.get("x-stainless-retry-count", "")
            waits = self.desk.post(urlsplit(self.path).path, body, int(tries) if tries.isdecimal() else 0)
            if isinstance(waits, dict):
                self._tell(200, waits)
                return
            spoken = Spoken(id=f"chatcmpl-{self.desk.number()}", model=self.desk.name)
            (self._stream if waits.question.stream else self._at_once)(waits, spoken)
        except RefusedError as error:
            self._refuse(error)

    def _foreign(self) -> RefusedError:
        """Whoever asks under another name is refused, and what follows is not read: it may be a body."""
        self.close_connection = True
        return RefusedError("this server is for this machine alone", status=403)

    def _body(self) -> bytes:
        if not self.is_own_name:
            raise self._foreign()
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise RefusedError("Content-Length says how long the body is", status=411)
        if int(length) > MOST_BYTES:
            self.close_connection = True  # the rest is not read
            raise RefusedError(f"a body has at most {MOST_BYTES} bytes", status=413)
        return self.rfile.read(int(length))

    def _news(self, waits: PendingAnswers) -> Iterator[tuple[int, Sequence[int] | Completion]]:
        """What comes of the answers, until all have ended or the client has gone."""
        left, looked = len(waits.requests), time.monotonic()
        try:
            while left:
                # Not in silence alone: of a stream with tools, news come at each step and nothing is told.
                if time.monotonic() - looked >= LOOK_S:
                    if self._is_gone():
                        raise ConnectionAbortedError
                    looked = time.monotonic()
                try:
                    n, said = waits.news.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
                if isinstance(said, RefusedError):
                    raise said
                left -= isinstance(said, Completion)
                yield n, said
        finally:
            waits.gone = left > 0

    def _is_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _at_once(self, waits: PendingAnswers, spoken: Spoken) -> None:
        found = {n: said for n, said in self._news(waits) if isinstance(said, Completion)}
        answers = [found[n] for n in range(len(waits.requests))]
        tokens = self._logprobs if waits.question.logprobs else None
        prompt = len(waits.requests[0].prompt)
        self._tell(200, spoken.whole(answers, prompt, lambda answer: self._read(answer, waits), tokens))

    def _read(self, answer: Completion, waits: PendingAnswers) -> ChatMessage:
        text = before_stop(answer.text, waits.question.stop)
        if waits.question.tools:
            return self.desk.speech.read(text, waits.question.tools)
        return ChatMessage("assistant", text)

    def _logprobs(self, answer: Completion) -> dict[str, Any]:
        return logprobs(self.desk.speech.chat.pieces(answer.tokens), answer.logp_policy)

    def _stream(self, waits: PendingAnswers, spoken: Spoken) -> None:
        news = self._news(waits)
        first = next(news)  # what cannot be served is refused before a stream begins
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for event in events(self._chunks(waits, spoken, chain([first], news))):
                self.wfile.write(event)
                self.wfile.flush()
        except RefusedError as error:
            self.wfile.write(f"data: {json.dumps(error.body())}\n\n".encode())
        finally:
            news.close()  # type: ignore[attr-defined]

    def _chunks(
        self, waits: PendingAnswers, spoken: Spoken, news: Iterator[tuple[int, Sequence[int] | Completion]]
    ) -> Iterator[dict[str, Any]]:
        asked, decode = waits.question, self.desk.speech.chat.tokenizer.decode
        growing = [Growing(decode, waits.requests[0].sampling.stop) for _ in waits.requests]
        ended: list[Completion] = []
        for n in range(len(growing)):
            yield spoken.chunk(n, first=True)
        for n, told in news:
            if not isinstance(told, Completion):
                # What calls a tool is no text, and only its end shows what it is.
                if not asked.tools and (text := growing[n].more(told)):
                    yield spoken.chunk(n, text)
                continue
            ended.append(told)
            said = self._read(told, waits)
            # Log-probabilities come with the end: a piece of text is not always whole tokens.
            logp = self._logprobs(told) if asked.logprobs else None
            if text := growing[n].rest(said.content):
                yield spoken.chunk(n, text)
            if said.calls:
                yield spoken.chunk(n, said=said)
            yield spoken.chunk(n, "", reason(told, said), logp)
        if asked.usage:
            yield spoken.cost(len(waits.requests[0].prompt), ended)

    def refuse(self, code: int, what: str) -> None:
        """Answers with what is wrong, as the API says it."""
        self._refuse(RefusedError(what, status=code))

    def _refuse(self, error: RefusedError) -> None:
        self._tell(error.status, error.body())

    def _tell(self, code: int, told: dict[str, Any]) -> None:
        self.say(code, "application/json", json.dumps(told))
