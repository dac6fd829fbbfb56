"""A server of the Model Context Protocol in plain Python: what it offers, and how it misbehaves.

Arguments: words that change how it behaves; see `main`.
"""

import json
import os
import sys
import time

TEXT = {"type": "object", "properties": {"how": {"type": "string"}}, "required": ["how"]}
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [
    {"name": "zadd", "description": "Adds two whole numbers.", "inputSchema": NUMBERS},
    {"name": "misbehave", "title": "Misbehaves.", "inputSchema": TEXT},
    {"name": "count", "description": "Counts its calls.", "inputSchema": {"type": "object"}},
    {"name": "pid", "description": "Its process.", "inputSchema": {"type": "object", "properties": {}}},
]
COUNT = 0


def send(message):
    """One message on a line."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def asked(method):
    """What the client answers to a request of ours."""
    send({"id": f"ours/{method}", "method": method, "params": {}})
    while (answer := json.loads(sys.stdin.readline())).get("id") != f"ours/{method}":
        pass
    return answer


def misbehave(how):
    """The content of a result, if there is one."""
    if how == "die":
        os._exit(3)
    if how == "hang":
        time.sleep(1000)
    if how == "error":
        raise ValueError("no such\nplace")
    if how == "large":
        return "x" * 50_000_000
    if how == "long":
        return "x" * 5000
    if how == "half":
        return "\ud800 half"
    if how == "asks":
        told = asked("ping"), asked("roots/list")
        return json.dumps([told[0]["result"], told[1]["error"]["code"]])
    if how == "garbage":
        print('Starting up!\n[[[\nnull\n[]\n{"id": 99, "result": {}}\n' + "[" * 100_000)
        send({"method": "notifications/message", "params": {"data": "hello"}})
    if how == "stderr":
        for _ in range(200):
            sys.stderr.write("e" * 99_999 + "\n")
    return "well"


def result(name, given):
    """What a call returns."""
    global COUNT
    COUNT += name == "count"
    if name == "zadd":
        return {
            "content": [{"type": "text", "text": str(given["a"] + given["b"])}],
            "structuredContent": {"x": float("nan")},
        }
    if name == "misbehave" and given["how"] == "kinds":
        text, image = (
            {"type": "text", "text": "one"},
            {"type": "image", "mimeType": "image/png", "data": "iVBO"},
        )
        held = {"type": "resource", "resource": {"uri": "file:///a", "text": "held"}}
        return {"content": [text, image, held, {"type": "resource_link", "uri": "file:///b", "name": "b"}]}
    if name == "misbehave" and given["how"] == "structured":
        return {"content": [], "structuredContent": {"sum": 5}}
    said = {
        "misbehave": lambda: misbehave(**given),
        "count": lambda: str(COUNT),
        "pid": lambda: str(os.getpid()),
    }
    return {"content": [{"type": "text", "text": said[name]()}]}


def page(cursor):
    """The tools, two a page."""
    first = int(cursor or 0)
    following = {"nextCursor": str(first + 2)} if first + 2 < len(TOOLS) else {}
    return {"tools": TOOLS[first : first + 2], **following}


def answer(message, words):
    """The answer to a request."""
    params = message.get("params", {})
    if message["method"] == "initialize":
        version = "1999-01-01" if "old" in words else params["protocolVersion"]
        tools = {} if "none" in words else {"tools": {}}
        about = {"serverInfo": {"name": "own", "version": "1"}}
        return {"result": {"protocolVersion": version, "capabilities": tools, **about}}
    if message["method"] == "tools/list":
        return {"result": page(params.get("cursor"))}
    if message["method"] == "tools/call" and params["name"] in {tool["name"] for tool in TOOLS}:
        try:
            return {"result": result(params["name"], params["arguments"])}
        except Exception as error:
            return {
                "result": {
                    "content": [{"type": "text", "text": f"{type(error).__name__}: {error}"}],
                    "isError": True,
                }
            }
    return {
        "error": {"code": -32602, "message": f"nothing is known of {params.get('name', message['method'])}"}
    }


def main():
    """Speaks until its stdin ends.

    fails: it ends at once; once FILE: at every start but the first. old: its version of the protocol;
    none: it has no tools. deaf: it goes on when its stdin has ended.
    """
    words = sys.argv[1:]
    if "fails" in words:
        sys.exit("there is no database\n")
    if "once" in words:
        seen = words[words.index("once") + 1]
        if os.path.exists(seen):
            sys.exit(1)
        open(seen, "w").close()
    for line in sys.stdin:
        message = json.loads(line)
        if message.get("id") is not None:
            send({"id": message["id"], **answer(message, words)})
    while "deaf" in words:
        time.sleep(1)


if __name__ == "__main__":
    main()
