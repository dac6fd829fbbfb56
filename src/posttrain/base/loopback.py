"""An HTTP server on the loopback interface: a Starlette application under uvicorn, in a thread."""

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Host, Router
from starlette.types import Receive, Scope, Send

from posttrain.errors import UserError

HOST = "127.0.0.1"
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
"""Headers of every response: browsers do not guess types, cache nothing and do not show it in a frame."""
_IDLE_S = 3600
"""Seconds that a connection stays open between requests; an agent may take long between two."""


class LoopbackServer:
    """Serves routes until `close()`; refuses requests whose Host is not a name of the loopback interface.

    Otherwise a page of another site could let its own name resolve to this address and read the responses.
    """

    def __init__(self, routes: Sequence[BaseRoute], port: int, errors: Mapping[Any, Any]) -> None:
        """Open the port, or a free one for 0. Raises UserError for a port that is not available.

        errors: handlers by the class of the exception, as Starlette takes them.
        """
        try:
            self._listener = socket.create_server((HOST, port))
        except (OSError, OverflowError) as error:
            problem = f"is not available: {getattr(error, 'strerror', '') or 'there is no such port'}"
            raise UserError(f"--port {port}", problem, "name another, or 0 for a free one") from None
        # A response is sent in two parts; the second must not wait for the first to be acknowledged.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port: int = self._listener.getsockname()[1]
        router = Router(routes, redirect_slashes=False)
        names = (HOST, "localhost", "[::1]")
        app = Starlette(routes=[Host(name, router) for name in names], exception_handlers=errors)
        app.router.default = _refuse_name
        config = uvicorn.Config(
            app,
            loop="asyncio",  # "auto" would take uvloop and httptools where vLLM installed them
            http="h11",
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            headers=list(_HEADERS.items()),
            log_config=None,
            access_log=False,  # the paths of agents hold the keys of their episodes
            log_level="critical",
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=3,
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, args=([self._listener],), daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.port}/"

    def wait(self) -> None:
        """Block until the server ends; Ctrl-C interrupts."""
        while self._thread.is_alive():
            time.sleep(0.5)  # a join that is interrupted takes the thread for ended, before Python 3.13

    def close(self) -> None:
        """Close the port. Pending requests have three seconds to end."""
        self._uvicorn.should_exit = True
        self._thread.join()
        self._listener.close()


async def _refuse_name(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(403, "this server is for this machine alone", {"Connection": "close"})
