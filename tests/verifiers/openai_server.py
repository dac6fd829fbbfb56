"""A server on this machine that speaks OpenAI's /chat/completions, and fails as it is told to.

    with serving(lambda asked: "Score: 7") as server:
        Endpoint(base_url=server.url, model="test")

What answers is a function of what was asked: a text, or one of the failures below.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Status:
    """An error status, with a message and a Retry-After."""

    code: int
    message: str = ""
    retry_after: str = ""


@dataclass(frozen=True)
class Raw:
    """A body that is sent as it stands; `length` is what the header claims."""

    body: bytes
    length: int | None = None
    kind: str = "application/json"
    status: int = 200


@dataclass(frozen=True)
class Slow:
    """An answer that begins after a while, or comes byte by byte with a pause before each."""

    wait_s: float = 0.0
    drip_s: float = 0.0


class Drop:
    """The connection is closed without a word."""


@dataclass(frozen=True)
class Likely:
    """An answer with the chances of tokens to be its first one."""

    chances: dict[str, float]


Behaviour = Callable[["Asked"], Any]


@dataclass(frozen=True)
class Asked:
    """One request as it arrived."""

    body: dict[str, Any]
    headers: dict[str, str]
    path: str
    number: int
    """Of the requests of this server, from 0."""
    at: float

    @property
    def text(self) -> str:
        """The last message."""
        return str(self.body["messages"][-1]["content"])


@dataclass
class Server:
    """What it was asked, and where it is."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    most_at_once: int = 0


def completion(
    text: Any, prompt_tokens: int = 100, completion_tokens: int = 10, finish: str = "stop", **more: Any
) -> bytes:
    """The body that carries an answer."""
    message = {"role": "assistant", "content": text}
    return json.dumps(
        {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": finish, **more}],
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
        }
    ).encode()


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[Server]:
    """A server that behaves so, until the end of the block."""
    server, lock, live = Server(), threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked = Asked(body, dict(self.headers), self.path, len(server.asked), time.monotonic())
                server.asked.append(asked)
                live[0] += 1
                server.most_at_once = max(server.most_at_once, live[0])
            try:
                self._answer(behaviour(asked))
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            finally:
                with lock:
                    live[0] -= 1

        def _answer(self, said: Any) -> None:
            if isinstance(said, Drop):
                self.close_connection = True
                return
            if isinstance(said, Status):
                body = json.dumps({"error": {"message": said.message}}).encode()
                extra = {"Retry-After": said.retry_after} if said.retry_after else {}
                self._send(said.code, body, extra)
                return
            if isinstance(said, Slow):
                time.sleep(said.wait_s)
                self._drip(completion("Score: 7"), said.drip_s)
                return
            if isinstance(said, Raw):
                length = len(said.body) if said.length is None else said.length
                self._send(said.status, said.body, {"Content-Type": said.kind}, length)
                self.close_connection = length != len(said.body)
                return
            if isinstance(said, Likely):
                tops = [{"token": t, "logprob": math.log(p)} for t, p in said.chances.items()]
                logprobs = {"content": [{"token": tops[0]["token"], "top_logprobs": tops}]}
                body = completion(tops[0]["token"], 100, 1, "length", logprobs=logprobs)
                self._send(200, body, {"Content-Type": "application/json"})
                return
            self._send(200, completion(said), {"Content-Type": "application/json"})

        def _drip(self, body: bytes, pause_s: float) -> None:
            self._send(200, b"", {}, len(body))
            for byte in body if pause_s else [body]:
                time.sleep(pause_s)
                self.wfile.write(bytes([byte]) if isinstance(byte, int) else byte)
                self.wfile.flush()

        def _send(self, code: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Silent."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def scripted(*answers: Any) -> Behaviour:
    """These answers, one a request; the last one ever after."""
    return lambda asked: answers[min(asked.number, len(answers) - 1)]
