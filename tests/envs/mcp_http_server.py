"""A server of the Model Context Protocol over HTTP, by the library mcp, and how it misbehaves.

Arguments: its port (0: any), how it answers (json; events: in a session, by the protocol of 2025), and the
token that it asks for. It prints its port.
"""

import os
import socket
import sys
import time

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.responses import PlainTextResponse

server = MCPServer("own", log_level="CRITICAL")


@server.tool()
def zadd(a: int, b: int) -> str:
    """Adds two whole numbers."""
    return str(a + b)


@server.tool()
def misbehave(how: str) -> str:
    """Misbehaves."""
    if how == "die":
        os._exit(3)
    if how == "hang":
        time.sleep(5)
    if how == "error":
        raise ValueError("no such place")
    return {"large": "x" * 5_000_000, "long": "x" * 5000}.get(how, "well")


def main():
    port, answers, token = sys.argv[1:]
    app = server.streamable_http_app(json_response=answers == "json")

    async def guarded(scope, receive, send):
        headers = dict(scope.get("headers", []))
        if scope["type"] != "lifespan" and headers.get(b"authorization") != f"Bearer {token}".encode():
            await PlainTextResponse("who?", 401)(scope, receive, send)
        elif answers == "events" and headers.get(b"mcp-method") == b"server/discover":
            await PlainTextResponse("what?", 404)(scope, receive, send)
        else:
            await app(scope, receive, send)

    with socket.create_server(("127.0.0.1", int(port))) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(guarded, log_level="critical")).run([listening])


if __name__ == "__main__":
    main()
