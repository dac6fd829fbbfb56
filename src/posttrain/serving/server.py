"""One engine behind HTTP, on this machine: a thread for each client that waits for its answers."""

import json
import queue
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

from posttrain.base.chat import Chat
from posttrain.engines.protocol import Engine
from posttrain.errors import UserError
from posttrain.report.live import HOST, OWN_NAMES
from posttrain.serving.stepper import LOOK_S, Asked, Stepper
from posttrain.serving.wire import Growing, Question, RefusedError, Spoken, events, logprobs, question, reason
from posttrain.types import Completion, Request

MOST_BYTES = 8 << 20
MOST_WAITING = 1024
"""Answers that are asked for and not given, of all clients."""


class Server(ThreadingHTTPServer):
    """Serves a model's answers until it is closed; `address` is the base URL for a client."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, engine: Engine, chat: Chat, *, name: str, context: int, port: int = 0, seed: int = 0
    ) -> None:
        """Opens the port, or a free one for 0; UserError for one that cannot be had."""
        self.chat, self.name, self.context, self.seed = chat, name, context, seed
        self.asked = 0
        self.lock = threading.Lock()
        self.stepper = Stepper(engine)
        try:
            super().__init__((HOST, port), _Client)
        except (OSError, OverflowError) as error:
            what = getattr(error, "strerror", "") or "there is no such port"
            raise UserError(
                f"cannot be had: {what}", where=f"--port {port}", mend="name another, or 0"
            ) from None

    @property
    def address(self) -> str:
        """The base URL."""
        return f"http://{HOST}:{self.server_address[1]}/v1"

    def server_close(self) -> None:
        """Closes the port, and ends the engine."""
        super().server_close()
        self.stepper.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is nobody's mistake."""

    def number(self) -> int:
        """How many requests came before."""
        with self.lock:
            self.asked += 1
            return self.asked - 1

    def requests_of(self, asked: Question, number: int) -> list[Request]:
        """What the engine is asked; RefusedError for a prompt that leaves no room, or that is none."""
        try:
            prompt = tuple(self.chat.render(asked.messages))
        except UserError as error:
            raise RefusedError(str(error), field="messages") from None
        room = self.context - len(prompt)
        if room < 1:
            what = f"the prompt has {len(prompt)} tokens, and the model reads {self.context}"
            raise RefusedError(what, field="messages", code="context_length_exceeded")
        if self.stepper.waiting + asked.count > MOST_WAITING:
            raise RefusedError("too many requests wait for an answer", status=503)
        one = Request(prompt=prompt, sampling=asked.sampling(room), seed=self.seed, task=f"request {number}")
        if asked.seed is not None:
            one = replace(one, seed=asked.seed, task="")
        return [replace(one, sample=n) for n in range(asked.count)]


class _Client(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "posttrain", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """The models, or whether it lives."""
        path = urlsplit(self.path).path
        if path == "/health":
            self._say(200, {"status": "ok"})
        elif path in ("/v1/models", f"/v1/models/{self.server.name}"):
            model = {"id": self.server.name, "object": "model", "created": 0, "owned_by": "posttrain"}
            self._say(200, {"object": "list", "data": [model]} if path == "/v1/models" else model)
        else:
            self._refuse(RefusedError("there is nothing here", status=404))

    def do_POST(self) -> None:
        """Answers of the model, at once or as they are drawn."""
        try:
            body = self._body()
            if urlsplit(self.path).path != "/v1/chat/completions":
                raise RefusedError("there is nothing here: POST /v1/chat/completions", status=404)
            asked, number = question(body), self.server.number()
            requests = self.server.requests_of(asked, number)
            spoken = Spoken(id=f"chatcmpl-{number}", model=self.server.name)
            waits = Asked(requests, streams=asked.stream)
            self.server.stepper.ask(waits)
            (self._stream if asked.stream else self._at_once)(asked, waits, spoken)
        except RefusedError as error:
            self._refuse(error)

    def _body(self) -> bytes:
        if not OWN_NAMES.fullmatch(self.headers.get("Host", "")):
            raise RefusedError("this server is for this machine alone", status=403)
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self.close_connection = True
            raise RefusedError("Content-Length says how long the body is", status=411)
        if int(length) > MOST_BYTES:
            self.close_connection = True  # the rest is not read
            raise RefusedError(f"a body has at most {MOST_BYTES} bytes", status=413)
        return self.rfile.read(int(length))

    def _news(self, waits: Asked) -> Iterator[tuple[int, Sequence[int] | Completion]]:
        """What comes of the answers, until all have ended or the client has gone."""
        left = len(waits.requests)
        try:
            while left:
                try:
                    n, said = waits.news.get(timeout=LOOK_S)
                except queue.Empty:
                    if self._is_gone():
                        raise ConnectionAbortedError from None
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

    def _at_once(self, asked: Question, waits: Asked, spoken: Spoken) -> None:
        found = {n: said for n, said in self._news(waits) if isinstance(said, Completion)}
        answers = [found[n] for n in range(len(waits.requests))]
        prompt = len(waits.requests[0].prompt)
        self._say(200, spoken.whole(answers, prompt, self._logprobs if asked.logprobs else None))

    def _logprobs(self, answer: Completion) -> dict[str, Any]:
        return logprobs(self.server.chat.pieces(answer.tokens), answer.logp_policy)

    def _stream(self, asked: Question, waits: Asked, spoken: Spoken) -> None:
        news = self._news(waits)
        first = next(news)  # what cannot be served is refused before a stream begins
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for event in events(self._chunks(asked, waits, spoken, chain([first], news))):
                self.wfile.write(event)
                self.wfile.flush()
        except RefusedError as error:
            self.wfile.write(f"data: {json.dumps(error.body())}\n\n".encode())
        finally:
            news.close()  # type: ignore[attr-defined]

    def _chunks(
        self,
        asked: Question,
        waits: Asked,
        spoken: Spoken,
        news: Iterator[tuple[int, Sequence[int] | Completion]],
    ) -> Iterator[dict[str, Any]]:
        growing = [
            Growing(self.server.chat.tokenizer.decode, waits.requests[0].sampling.stop)
            for _ in waits.requests
        ]
        ended: list[Completion] = []
        for n in range(len(growing)):
            yield spoken.chunk(n, "")
        for n, said in news:
            if not isinstance(said, Completion):
                if text := growing[n].more(said):
                    yield spoken.chunk(n, text)
                continue
            ended.append(said)
            # Log-probabilities come with the end: a piece of text is not always whole tokens.
            told = self._logprobs(said) if asked.logprobs else None
            if text := growing[n].rest(said.text):
                yield spoken.chunk(n, text)
            yield spoken.chunk(n, "", reason(said), told)
        if asked.usage:
            yield spoken.cost(len(waits.requests[0].prompt), ended)

    def _refuse(self, error: RefusedError) -> None:
        self._say(error.status, error.body())

    def _say(self, code: int, told: dict[str, Any]) -> None:
        content = json.dumps(told).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: Any) -> None:
        """Says nothing: a line for each request would bury the address."""
