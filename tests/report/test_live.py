"""`posttrain run watch`: a run's page follows it, and answers nobody else and nothing else."""

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from posttrain.commands import runs
from posttrain.commands.runs import Summaries
from posttrain.report.live import FolderServer, ReportServer
from posttrain.run.rundir import in_use
from posttrain.types import UserError

PATIENCE_S = 120.0


@contextmanager
def served(run: Path, running: Callable[[Path], bool] = in_use) -> Iterator[int]:
    """The port at which a run is served."""
    with closing(ReportServer(run, 0, running)) as server:
        yield server.port


def asked(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    """The status and the text of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, headers={"Host": host} if host is not None else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def news(port: int, offset: int) -> dict[str, Any]:
    status, text = asked(port, f"/news?from={offset}")
    assert status == 200, text
    return dict(json.loads(text))


def tree(root: Path) -> dict[str, tuple[int, int]]:
    files = (f for f in root.rglob("*") if f.is_file())
    return {str(f.relative_to(root)): ((s := f.stat()).st_size, s.st_mtime_ns) for f in files}


@pytest.mark.full
def test_the_points_of_a_run_arrive_while_it_goes_on(tmp_path: Path, tiny: Path, online, write) -> None:
    over = {"model": {"path": str(tiny)}, "checkpoint": {"every": 0}}
    run, words = tmp_path / "run", [sys.executable, "-m", "posttrain", "train", str(write(online, over))]
    with subprocess.Popen([*words, "--run-dir", str(run), "--quiet"], stdout=subprocess.DEVNULL) as training:
        end = time.monotonic() + PATIENCE_S
        while not (run / "config.toml").exists():
            assert time.monotonic() < end
            assert training.poll() is None
            time.sleep(0.01)
        with served(run) as port:
            offset, updates, running = 0, [], True
            while running:
                assert time.monotonic() < end
                told = news(port, offset)
                running = told["running"]
                offset = told["next"]
                updates += [line["update"] for line in told["lines"]]
                if told["lines"]:
                    assert told["headline"]["tiles"]
                time.sleep(0.01)
            updates += [line["update"] for line in news(port, offset)["lines"]]
    assert training.returncode == 0
    assert updates == [0, 1, 2, 3, 4], "each line once, in order"


def test_the_command_says_where_and_ctrl_c_ends_it_well(short: Path) -> None:
    before = tree(short)
    words = [sys.executable, "-m", "posttrain", "run", "watch", str(short)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = watching.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:(\d+)/ shows ", first)
        assert found, first
        status, text = asked(int(found[1]), "/")
        assert status == 200
        assert "connect-src 'self'" in text
        watching.send_signal(signal.SIGINT)
        out, err = watching.communicate(timeout=PATIENCE_S)
    assert (watching.returncode, err) == (0, "")
    assert out == f"no longer watching {short}\n"
    assert tree(short) == before, "nothing was written"


def test_only_this_machine_is_answered_and_only_with_the_page(short: Path) -> None:
    with served(short) as port:
        for host in ("127.0.0.1", f"127.0.0.1:{port}", "localhost:1", "[::1]:80", "LOCALHOST"):
            assert asked(port, "/news?from=0", host=host)[0] == 200, host
        for host in (
            "example.org",
            "127.0.0.1.example.org",
            f"localhost.:{port}",
            "",
            "10.0.0.1",
            "127.0.0.1:x",
        ):
            for path in ("/", "/news?from=0"):
                assert asked(port, path, host=host)[0] == 403, host
        for path in (
            "/metrics.jsonl",
            "/../config.toml",
            "//config.toml",
            "/news/",
            "/report.html",
            "/%2e%2e/",
        ):
            assert asked(port, path)[0] == 404, path
        for path in ("/news?from=x", "/news?from=-1", "/news?from=1e3"):
            assert asked(port, path)[0] == 400, path
        for method in ("POST", "PUT", "DELETE"):
            assert asked(port, "/", method)[0] == 405


def test_half_a_line_waits_and_a_file_that_was_cut_begins_again(short: Path) -> None:
    metrics = short / "metrics.jsonl"
    with served(short) as port:
        told = news(port, 0)
        assert [line["update"] for line in told["lines"]] == list(range(7))
        offset = told["next"]
        assert offset == metrics.stat().st_size
        assert news(port, offset)["lines"] == []
        with metrics.open("a") as file:
            file.write('{"update": 7, "reward/mean": N')
        assert news(port, offset)["next"] == offset
        with metrics.open("a") as file:
            file.write('aN, "kl/ref": 0.75, "loss": 1e999}\n')
        told = news(port, offset)
        assert told["lines"] == [{"update": 7, "reward/mean": None, "kl/ref": 0.75, "loss": None}]
        assert "KL blow-up" in {alarm["name"] for alarm in told["alarms"]}
        (short / "stopped.txt").write_text("the verifier died\n")
        assert news(port, told["next"])["stopped"] == "the verifier died"
        metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:3]))
        assert news(port, told["next"]) == {"again": True, "running": False}
        metrics.unlink()
        metrics.mkdir()
        assert news(port, 0)["lines"] == []
        assert "metrics.jsonl could not be read" in asked(port, "/")[1]


def test_what_was_read_is_not_read_again_unless_another_file_took_its_place(short: Path) -> None:
    metrics = short / "metrics.jsonl"
    metrics.write_text('{"update": 1, "eval/accuracy": 0.25}\n')
    with served(short) as port:
        offset = news(port, 0)["next"]
        with metrics.open("r+") as file:
            file.write('{"update": 1, "eval/accuracy": 0.75}\n{"update": 2, "eval/accuracy": 0.5}\n')
        told = news(port, offset)
        assert (told["headline"]["before"], told["headline"]["after"]) == ("25.0%", "50.0%")
        assert news(port, 0)["headline"] == told["headline"], "whoever asks, and from where"
        again = short / "again"
        again.write_bytes(metrics.read_bytes())
        again.replace(metrics)
        assert news(port, 0)["headline"]["before"] == "75.0%"


def test_what_cannot_be_watched_is_a_mistake(
    short: Path, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    said = run_cli("run", "watch", tmp_path / "none")
    assert (said.code, len(said.err.splitlines())) == (2, 1)
    assert "no such directory" in said.err
    with served(short) as port, pytest.raises(UserError, match=f"--port {port}: is not available"):
        ReportServer(short, port, in_use)


def test_the_page_draws_what_arrives(short: Path, tmp_path: Path, chromium: Callable[..., str]) -> None:
    """Each question for news brings the next line, as a run would."""
    came = []

    def goes_on(run: Path) -> bool:
        came.append(7 + len(came))
        with (run / "metrics.jsonl").open("a") as file:
            file.write(
                json.dumps({"update": came[-1], "reward/mean": 0.5, "kl/ref": 0.75, "new": 1.0}) + "\n"
            )
        return True

    with served(short, goes_on) as port:
        dom = chromium(tmp_path / "profile", "--dump-dom", f"http://127.0.0.1:{port}/")
    root = re.search(r"<html[^>]*>", dom)
    assert root
    told = {name: unescape(value) for name, value in re.findall(r'data-([\w-]+)="([^"]*)"', root[0])}
    assert "error" not in told, told["error"]
    assert int(told["updates"]) >= 7
    assert "Live · update" in dom
    assert "KL blow-up" in dom, "headline and alarms are those of now"
    assert len(re.findall("<h2>Curves</h2>", dom)) == 1


@pytest.fixture
def folder(short: Path, another: Callable[[Path, int], Path]) -> Iterator[tuple[Path, int]]:
    """A folder with two runs, a run in a folder within it and a broken one; and its server's port."""
    root = short.parent / "a folder"
    (root / "within").mkdir(parents=True)
    shutil.copytree(short, root / "within" / "deep é")
    for seed in range(2):
        another(root / f"seed-{seed}", seed)
    (root / "empty").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "config.toml").write_text("=")
    with closing(FolderServer(root, 0, Summaries(root), in_use)) as server:
        yield root, server.port


def test_a_folder_lists_its_runs_and_serves_each(folder: tuple[Path, int]) -> None:
    root, port = folder
    before = tree(root)
    rows = {row["name"]: row for row in json.loads(asked(port, "/list")[1])}
    assert set(rows) == {"broken", "empty", "seed-0", "seed-1", "within/deep é"}
    assert rows["broken"]["state"] == "broken"
    assert (rows["seed-0"]["kind"], rows["seed-0"]["method"]) == ("run", "grpo")
    assert rows["seed-0"]["name"] in asked(port, "/")[1]
    for name in ("seed-0", "within/deep%20%C3%A9"):
        status, page = asked(port, f"/runs/{name}/")
        assert (status, "connect-src 'self'" in page) == (200, True)
        status, said = asked(port, f"/runs/{name}/news?from=0")
        assert status == 200
        assert json.loads(said)["lines"]
    status, page = asked(port, "/compare?run=seed-0&run=within/deep%20%C3%A9")
    assert (status, "connect-src 'self'" in page) == (200, True)
    curves = json.loads(asked(port, "/curves?run=seed-0&run=seed-1")[1])
    assert [one["runs"] for one in curves["series"]] == [["seed-0", "seed-1"]], "one recipe, two seeds"
    for path in (
        "/runs/none/",
        "/runs/../",
        "/runs/seed-0/config.toml",
        "/runs/within/",
        "/compare?run=a&run=b",
    ):
        assert asked(port, path)[0] == 404, path
    assert asked(port, "/compare?run=seed-0")[0] == 400
    assert (asked(port, "/runs/broken/")[0], asked(port, "/runs/empty/")[0]) == (200, 410)
    assert asked(port, "/list", host="example.org")[0] == 403
    assert tree(root) == before, "nothing was written"


def test_what_changed_is_read_again_and_nothing_else(
    folder: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = folder
    summaries, opened = Summaries(root), []
    read_run = runs.read
    monkeypatch.setattr(runs, "read", lambda path: opened.append(path.name) or read_run(path))
    first = summaries()
    assert sorted(opened) == ["broken", "deep é", "seed-0", "seed-1"]
    del opened[:]
    assert summaries() == first
    assert opened == []
    with (root / "seed-1" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"update": 41, "eval/accuracy": 1.0}) + "\n")
    [changed] = [row for row in summaries() if row not in first]
    assert (changed["done"], changed["best"], opened) == (41, 1.0, ["seed-1"])


def test_runs_are_picked_and_compared_by_keyboard_alone(folder: tuple[Path, int], browser: Any) -> None:
    """The list and the comparison follow a run that goes on."""
    root, port = folder
    browser.open(f"http://127.0.0.1:{port}/")
    browser.wait("document.querySelectorAll('tbody tr').length === 5")
    browser.wait("document.documentElement.dataset.running === '0'")
    focus = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
    for _ in range(2):
        while not browser.value(focus).startswith("Compare seed"):
            browser.key("Tab")
        browser.key(" ")
        browser.key("Tab")
    while browser.value(focus) != "Compare 2 runs":
        browser.call(
            "Input.dispatchKeyEvent", type="keyDown", key="Tab", windowsVirtualKeyCode=9, modifiers=8
        )
    browser.key("Enter")
    browser.wait("location.pathname === '/compare' && document.documentElement?.dataset.ready === 'true'")
    browser.wait("document.querySelector('.live')?.textContent === 'Live'")
    assert browser.value("document.querySelectorAll('h1').length") == 1
    for seed in range(2):
        with (root / f"seed-{seed}" / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"update": 41, "eval/accuracy": 1.0}) + "\n")
    browser.wait("document.querySelector('#results').textContent.includes('100')")
    assert browser.value("document.querySelectorAll('h1').length") == 1, "the page is drawn anew, not twice"
    assert browser.value("document.documentElement.dataset.error ?? null") is None
