"""An HTTP server for this machine alone."""

import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from posttrain.errors import UserError

HOST = "127.0.0.1"
_OWN_NAMES = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)


class LoopbackServer(ThreadingHTTPServer):
    """A thread for each client; foreign names of this machine are for a request to refuse."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler], port: int) -> None:
        """Opens the port, or a free one for 0; UserError for one that cannot be had."""
        try:
            super().__init__((HOST, port), handler)
        except (OSError, OverflowError) as error:
            what = getattr(error, "strerror", "") or "there is no such port"
            raise UserError(
                f"--port {port}", f"cannot be had: {what}", "name another, or 0 for a free one"
            ) from None

    @property
    def address(self) -> str:
        """Where it is."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is nobody's mistake."""


class LoopbackRequest(BaseHTTPRequestHandler):
    """Says nothing of itself and, for each request, nothing in the terminal."""

    server_version, sys_version = "posttrain", ""
    disable_nagle_algorithm = True
    """An answer is sent in two parts, and the second would wait until the client has owned to the first."""

    @property
    def is_own_name(self) -> bool:
        """Whether it is asked under a name of this machine: a page of another site could have its own point
        here, and read along."""
        return _OWN_NAMES.fullmatch(self.headers.get("Host", "")) is not None

    def log_message(self, *words: Any) -> None:
        """Says nothing: a line for each request would bury the address."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuses what is no request, and a method that is not served; what follows may be its body."""
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED:
            code, message = HTTPStatus.METHOD_NOT_ALLOWED, f"{self.command} is not served here"
        self.refuse(code, message or HTTPStatus(code).phrase)

    def refuse(self, code: int, what: str) -> None:
        """Answers with what is wrong."""
        self.say(code, "text/plain", what)

    def say(self, code: int, kind: str, text: str) -> None:
        """Answers with this text, whose kind no browser guesses, and which none keeps or shows in a frame."""
        content = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        if code == HTTPStatus.METHOD_NOT_ALLOWED:
            served = (name.removeprefix("do_") for name in dir(self) if name.startswith("do_"))
            self.send_header("Allow", ", ".join(served))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
