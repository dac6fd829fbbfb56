"""The page of `posttrain label` in a real browser, driven over the DevTools protocol through a pipe."""

import base64
import fcntl
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain_people.server import LabelServer

_spec = importlib.util.spec_from_file_location("people_conftest", Path(__file__).with_name("conftest.py"))
assert _spec
assert _spec.loader
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
write_lines, MARKUP = _shared.write_lines, _shared.MARKUP

PATIENCE_S = 60.0
KEY_CODES = {"Enter": 13, "Backspace": 8, "ArrowLeft": 37, "ArrowRight": 39, "ArrowUp": 38, "ArrowDown": 40}
START = (
    "import os, sys; r, w = map(int, sys.argv[1:3]); os.dup2(r, 3); os.dup2(w, 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
"""Chromium reads commands from descriptor 3 and writes to 4."""


class Browser:
    """One page of headless Chromium."""

    def __init__(self, program: str, profile: Path) -> None:
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for pair in (os.pipe(), os.pipe()) for end in pair]
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        flags += ["--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command = [sys.executable, "-c", START, str(ends[0]), str(ends[3]), program]
        self.process = subprocess.Popen(
            [*command, *flags, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(ends[0], ends[3]),
            stderr=subprocess.DEVNULL,
        )
        os.close(ends[0])
        os.close(ends[3])
        self.reader, self.writer = os.fdopen(ends[2], "rb"), os.fdopen(ends[1], "wb", buffering=0)
        self.count, self.session, self.pending = 0, "", b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        self.writer.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.pending:
                chunk = os.read(self.reader.fileno(), 1 << 16)
                assert chunk, "the browser ended"
                self.pending += chunk
            line, _, self.pending = self.pending.partition(b"\0")
            reply = json.loads(line)
            if reply.get("id") == self.count:
                assert "error" not in reply, reply
                return dict(reply["result"])

    def value(self, expression: str) -> Any:
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def wait(self, expression: str) -> Any:
        end = time.monotonic() + PATIENCE_S
        while not (value := self.value(expression)):
            assert time.monotonic() < end, expression
            time.sleep(0.01)
        return value

    def open(self, url: str, width: int = 1280, height: int = 800, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        self.wait("document.body?.dataset.done !== undefined")

    def key(self, name: str) -> None:
        """Press and release a key, as a keyboard does."""
        press = {"key": name, "windowsVirtualKeyCode": KEY_CODES.get(name, ord(name[0].upper()))}
        text = {"text": "\r" if name == "Enter" else name} if len(name) == 1 or name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **press, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **press)

    def label(self, name: str) -> None:
        """Press a key, and wait for another question."""
        before = self.value("document.body.dataset.question")
        self.key(name)
        self.wait(f"document.body.dataset.question !== {json.dumps(before)}")

    def picture(self, out: Path) -> None:
        out.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self.writer.close()
        self.process.kill()
        self.process.wait()
        self.reader.close()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A page of Chromium; without one the test is skipped."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip(
            "NO CHROMIUM ON PATH: the page of posttrain label is not tested. "
            "Install it with: apt-get install --no-install-recommends chromium fonts-dejavu"
        )
    opened = Browser(program, tmp_path / "profile")
    yield opened
    opened.close()


Serve = Callable[..., LabelServer]
TEXTS = "[...document.querySelectorAll('.side .said')].map((node) => node.textContent)"


def labels(server: LabelServer) -> list[Any]:
    return [entry["label"] for entry in server.log.standing.values()]


@pytest.mark.full
def test_ten_pairs_by_keyboard_alone(browser: Browser, answers: Path, serve: Serve) -> None:
    server = serve(answers)
    browser.open(server.address)
    keys, expected = ["1", "2", "0", "b", "ArrowLeft", "ArrowRight", "1", "2", "1", "2"], []
    for number, name in enumerate(keys):
        shown = browser.value(TEXTS)
        question = server.questions[browser.value("document.body.dataset.question")]
        assert shown == [question.answers[i] for i in server.order(question)], "markup is text"
        position = {"1": 0, "ArrowLeft": 0, "2": 1, "ArrowRight": 1}.get(name)
        plain = {"0": "tie", "b": "bad"}
        expected.append(plain[name] if position is None else server.order(question)[position])
        assert browser.value("document.getElementById('progress').textContent") == f"{number} of 10 · ann"
        browser.label(name)
    assert labels(server) == expected
    assert browser.value("document.querySelector('h1').textContent") == "All labelled"
    browser.label("u")
    assert labels(server) == expected[:-1]
    browser.label("1")
    assert len(labels(server)) == 10
    assert browser.value("document.title") == "label · posttrain", "no script of an answer ran"
    assert browser.value("document.querySelectorAll('main img, main script').length") == 0


@pytest.mark.full
def test_keys_of_ranking_steps_and_help(browser: Browser, tmp_path: Path, serve: Serve) -> None:
    records = [{"prompt": "Name one.", "answers": ["a", "b", "c", "d"]}]
    ranking = serve(write_lines(tmp_path / "ranked.jsonl", records), "rank")
    browser.open(ranking.address)
    [question] = ranking.questions.values()
    browser.key("?")
    assert browser.value("document.getElementById('help').open")
    browser.key("3")
    browser.key("?")
    assert not browser.value("document.getElementById('help').open")
    for name in ("Enter", "3", "3", "2", "Backspace", "1", "4"):
        browser.key(name)
    browser.label("Enter")
    order = ranking.order(question)
    assert labels(ranking) == [[{2: 1, 0: 2, 3: 3, 1: 4}[order.index(i)] for i in range(4)]]

    ranking.out.unlink()
    ranking.log.file.unlink()
    steps = [{"prompt": "2 + 3 + 4?", "steps": ["2 + 3 = 5", "5 + 4 = 8", "So 8.", "Done."]}]
    stepped = serve(write_lines(tmp_path / "steps.jsonl", steps), "steps")
    browser.open(stepped.address)
    for name in ("Enter", "1", "1", "ArrowUp", "ArrowUp", "ArrowDown", "0", "0", "1", "2"):
        browser.key(name)
    browser.label("Enter")
    assert labels(stepped) == [[1, 0, 0, None]]


@pytest.mark.full
def test_long_answers_scroll_and_nothing_is_lost_at_the_end(
    browser: Browser, tmp_path: Path, serve: Serve
) -> None:
    long = "\n".join(f"line {n} " + "word " * 30 + "x" * 300 for n in range(200))
    records = [
        {"prompt": long, "answers": [long, f"{long} {MARKUP}"]},
        {"prompt": "b", "answers": ["c", "d"]},
    ]
    server = serve(write_lines(tmp_path / "long.jsonl", records))
    for scheme, width, height in (("light", 1280, 800), ("dark", 1280, 800), ("light", 400, 640)):
        browser.open(server.address, width, height, scheme)
        if browser.value("document.querySelector('.question').textContent") == "b":
            browser.label("0")  # the other one is long
        root = "document.documentElement"
        assert browser.value(f"{root}.scrollWidth <= innerWidth && {root}.scrollHeight <= innerHeight")
        bottom = "document.getElementById('keys').getBoundingClientRect().bottom"
        assert browser.value(f"{bottom} <= innerHeight"), "the keys are in the window"
        panes = "[...document.querySelectorAll('.side .scroll')]"
        assert min(browser.value(f"{panes}.map((pane) => pane.clientHeight)")) > 90
        assert browser.value(f"{panes}.map((pane) => pane.scrollTop)") == [0, 0]
        browser.key("ArrowDown")
        browser.wait(f"{panes}.every((pane) => pane.scrollTop > 0)")
        dark = "getComputedStyle(document.body).backgroundColor"
        assert browser.value(dark) == ("rgb(17, 17, 15)" if scheme == "dark" else "rgb(246, 245, 242)")
        if folder := os.environ.get("POSTTRAIN_PICTURES"):
            browser.picture(Path(folder) / f"label_{scheme}_{width}.png")
    before = browser.value("document.body.dataset.question")
    server.close()
    browser.key("1")
    browser.wait("!!document.getElementById('failure')")
    assert browser.value("document.body.dataset.question") == before
