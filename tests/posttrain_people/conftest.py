"""Questions to label, and a server that asks them."""

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from posttrain_people.labels import open_log
from posttrain_people.questions import Mode, ask, read_questions
from posttrain_people.server import LabelServer

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title = 'owned'</script>"
RECORDS = [
    {
        "id": n,
        "prompt": f"What is {n} + {n}?",
        "responses": [
            {"content": f"{2 * n}", "model": "large"},
            {"content": f"About {2 * n}: {MARKUP}", "model": "small"},
        ],
    }
    for n in range(10)
]


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """A file of ten prompts with two answers each, one of which has markup."""
    return write_lines(tmp_path / "answers.jsonl", RECORDS)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., LabelServer]]:
    """serve(source, mode, rater) -> a server of its questions, whose labels go to labels.jsonl."""
    with ExitStack() as stack:

        def start(source: Path, mode: Mode = "pairs", rater: str = "ann", seed: int = 0) -> LabelServer:
            out = tmp_path / "labels.jsonl"
            questions = ask(read_questions(source, mode, "\n\n", lambda line: None), mode, seed)
            log = open_log(out, mode)
            server = LabelServer(questions, mode, rater, log, out, seed=seed, port=0)
            return stack.enter_context(closing(server))

        yield start


def request(
    server: LabelServer, path: str, body: Any = None, kind: str = "application/json", host: str = ""
) -> tuple[int, str]:
    """Status and text of the response to a GET, or to a POST of the body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {"Host": host} if host else {}
    try:
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, json.dumps(body), {**headers, "Content-Type": kind})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def answer(server: LabelServer, path: str, body: Any = None) -> dict[str, Any]:
    """The state after a request that succeeds."""
    status, text = request(server, path, body)
    assert status == 200, text
    return dict(json.loads(text))
