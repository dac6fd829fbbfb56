"""The page of `posttrain label` in a real browser, driven over the DevTools protocol through a pipe."""

import importlib.util
import json
import os
from collections.abc import Callable
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


def label(browser: Any, name: str) -> None:
    """Press a key, and wait for another question."""
    before = browser.value("document.body.dataset.question")
    browser.key(name)
    browser.wait(f"document.body.dataset.question !== {json.dumps(before)}")


Serve = Callable[..., LabelServer]
TEXTS = "[...document.querySelectorAll('.side .said')].map((node) => node.textContent)"


def labels(server: LabelServer) -> list[Any]:
    return [entry["label"] for entry in server.log.standing.values()]


@pytest.mark.full
def test_ten_pairs_by_keyboard_alone(browser: Any, answers: Path, serve: Serve) -> None:
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
        label(browser, name)
    assert labels(server) == expected
    assert browser.value("document.querySelector('h1').textContent") == "All labelled"
    label(browser, "u")
    assert labels(server) == expected[:-1]
    label(browser, "1")
    assert len(labels(server)) == 10
    assert browser.value("document.title") == "label · posttrain", "no script of an answer ran"
    assert browser.value("document.querySelectorAll('main img, main script').length") == 0


@pytest.mark.full
def test_keys_of_ranking_steps_and_help(browser: Any, tmp_path: Path, serve: Serve) -> None:
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
    label(browser, "Enter")
    order = ranking.order(question)
    assert labels(ranking) == [[{2: 1, 0: 2, 3: 3, 1: 4}[order.index(i)] for i in range(4)]]

    ranking.out.unlink()
    ranking.log.file.unlink()
    steps = [{"prompt": "2 + 3 + 4?", "steps": ["2 + 3 = 5", "5 + 4 = 8", "So 8.", "Done."]}]
    stepped = serve(write_lines(tmp_path / "steps.jsonl", steps), "steps")
    browser.open(stepped.address)
    for name in ("Enter", "1", "1", "ArrowUp", "ArrowUp", "ArrowDown", "0", "0", "1", "2"):
        browser.key(name)
    label(browser, "Enter")
    assert labels(stepped) == [[1, 0, 0, None]]


@pytest.mark.full
def test_long_answers_scroll_and_nothing_is_lost_at_the_end(
    browser: Any, tmp_path: Path, serve: Serve
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
            label(browser, "0")  # the other one is long
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
