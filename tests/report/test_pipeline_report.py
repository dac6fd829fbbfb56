"""The page of a pipeline: the numbers of its stages and policies, whatever is there, in one file."""

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.data import Data
from posttrain.evaluation.compare import Answer, Compare
from posttrain.evaluation.standings import standings
from posttrain.report.pipeline import headline, summary, write
from posttrain.types import UserError

EVIL = "</script><img src=x onerror=alert(1)>\u202e{{x}}"


def mean(value: float, error: float) -> dict[str, float]:
    return {"mean": value, "error": error}


def policy(name: str, score: float, kl: float) -> dict[str, Any]:
    return {
        "name": name,
        "score": mean(score, 0.1),
        "kl": mean(kl, 0.2),
        "length": mean(40.0, 1.5),
        "cut": 0.25,
        "judged": 9,
        "failed": 1,
        "labels": {"scored": 9, "raised": 1},
    }


def win(of: str, over: str, rate: float) -> dict[str, Any]:
    return {"of": of, "over": over, "rate": rate, "low": rate - 0.1, "high": rate + 0.1} | {
        "won": 5, "tied": 1, "lost": 3, "left_out": 1
    }  # fmt: skip


COMPARE = {
    "judge": "model",
    "temperature": 1.0,
    "max_new_tokens": 64,
    "prompts": 10,
    "samples": 1,
    "first": "sft",
    "policies": [policy("sft", 0.5, 0.0), policy("ppo", 1.75, 6.5), policy("dpo", 1.25, 2.5)],
    "wins": [win("ppo", "sft", 0.625), win("dpo", "sft", 0.5), win("dpo", "ppo", 0.375)],
    "examples": [
        {
            "task": "t1",
            "prompt": f"Why? {EVIL}",
            "answers": [
                {
                    "policy": name,
                    "text": f"{name} says {EVIL}",
                    "score": score,
                    "label": "x",
                    "stop": "eos",
                    "kl": 0.0,
                }
                for name, score in (("sft", 0.1), ("ppo", None), ("dpo", 0.3))
            ],
        }
    ],
    "notes": ["A note on it."],
}


def answer_of(score: float) -> Answer:
    said = {"task": "t", "sample": 0, "prompt": "Why?", "text": "x", "tokens": (1, 2), "first": 1}
    return Answer(**said, stop="eos", score=score, label="scored", reason="", logp=0.0)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A pipeline's directory: data made, sft finished, ppo stopped, dpo waiting."""
    out = tmp_path / "pipe"
    names = (
        ("data", "make", []),
        ("sft", "recipe", ["data"]),
        ("ppo", "recipe", ["sft"]),
        ("dpo", "recipe", ["sft"]),
    )
    stages = [
        {"name": n, "kind": k, "directory": f"{i:02d}-{n}", "says": f"parts/{n}.toml", "takes": t}
        for i, (n, k, t) in enumerate(names, start=1)
    ]
    (out / "01-data").mkdir(parents=True)
    (out / "stages.json").write_text(json.dumps({"title": f"From pairs {EVIL}", "stages": stages}))
    (out / "01-data" / "pairs.jsonl").write_text("x" * 1234)
    for directory, updates in (("02-sft", 4), ("03-ppo", 2)):
        run = out / directory
        run.mkdir()
        (run / "config.toml").write_text("[run]\nupdates = 4\n")
        (run / "code.txt").write_text("posttrain")
        (run / "plan.json").write_text(json.dumps({"title": directory, "sections": []}))
        (run / "report.html").write_text("a page")
        rows = [
            {"update": u, "seconds": 10.0 * u, "tokens": 100 * u, "loss": 4.0 - u, "eval/loss": 2.0 / (1 + u)}
            for u in range(updates + 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (out / "03-ppo" / "stopped.txt").write_text("the disk is full\n")
    return out


@pytest.fixture
def compared(root: Path) -> Path:
    """The same with a comparison."""
    (root / "compare.json").write_text(json.dumps(COMPARE))
    return root


def test_it_holds_what_each_stage_did(root):
    found = summary(root)
    data, sft, ppo, dpo = found["stages"]
    assert data["files"] == [["pairs.jsonl", 1234]]
    assert [s["state"] for s in found["stages"]] == ["finished", "finished", "stopped", "waiting"]
    assert (sft["updates"], sft["of"], sft["tokens"], sft["seconds"]) == (4, 4, 400.0, 40.0)
    assert sft["takes"] == ["data"]
    assert sft["report"] == "02-sft/report.html"
    assert {"name": "eval/loss", "first": 2.0, "last": 0.4, "updates": 5} in sft["changed"]
    # While training, means over updates at each end, none of them in both: 4 and 3, then 1 and 0.
    assert {"name": "loss", "first": 3.5, "last": 0.5, "updates": 5} in sft["changed"]
    assert ppo["stopped"] == "the disk is full"
    assert found["compare"] is None
    assert "updates" not in dpo


def test_the_json_beside_the_page_and_the_data_in_it_are_the_same(compared):
    page = write(compared).read_text()
    kept = json.loads((compared / "pipeline.json").read_text())
    [held] = re.findall(r'<script type="application/json" id="pipeline">(.*?)</script>', page, re.DOTALL)
    inside = json.loads(held)
    assert {k: v for k, v in inside.items() if k != "headline"} == kept
    assert kept["compare"] == COMPARE
    assert kept["stages"] == summary(compared)["stages"]


def test_of_one_prompt_no_error_is_known(compared):
    """None is shown, rather than ± 0."""
    row = [(answer_of(2.0), None)]
    found = standings(Compare(stages=("a", "b"), data=Data(path="x")), "judge", {"a": row, "b": row})
    assert found["policies"][0]["score"] == {"mean": 2.0, "error": None}
    (compared / "compare.json").write_text(json.dumps(COMPARE | {"policies": found["policies"], "wins": []}))
    tiles = {name: (value, remark) for name, value, remark in headline(summary(compared))}
    assert tiles["Best mean score"] == ("2", "a; b 2")


def test_the_headline_is_the_best_policy_and_what_it_all_took(compared):
    tiles = {name: (value, remark) for name, value, remark in headline(summary(compared))}
    assert tiles["Best mean score"] == ("1.75 ± 0.1", "ppo; sft 0.5 ± 0.1; dpo 1.25 ± 0.1")
    # Over sft it wins by 52.5 % or more, and over dpo 62.5 % too, in which dpo's 37.5 % are turned around.
    assert tiles["Best policy"] == ("ppo", "wins 62.5% over sft, 95 %: 52.5% – 72.5%; 10 prompts")
    assert tiles["Stages"] == ("2 of 4", "finished")
    assert tiles["Time"] == ("1 min 0 s", "all stages")
    assert tiles["Tokens trained"] == ("600", "all stages")


@pytest.mark.parametrize(
    ("of", "over", "rate", "said"),
    [
        ("dpo", "ppo", 0.45, "ppo wins 55.0% over dpo, 95 %: 45.0% – 65.0%; 10 prompts"),
        ("ppo", "sft", 0.58, "ppo wins 58.0% over sft, 95 %: 48.0% – 68.0%; 10 prompts"),
    ],
)
def test_a_policy_that_may_be_no_better_is_not_named_the_best(compared, of, over, rate, said):
    wins = [w for w in COMPARE["wins"] if (w["of"], w["over"]) != (of, over)] + [win(of, over, rate)]
    (compared / "compare.json").write_text(json.dumps(COMPARE | {"wins": wins}))
    tiles = {name: (value, remark) for name, value, remark in headline(summary(compared))}
    assert tiles["Best policy"] == ("no clear winner", said)


def test_a_single_update_has_no_change(root):
    lines = (root / "02-sft" / "metrics.jsonl").read_text().splitlines()
    (root / "02-sft" / "metrics.jsonl").write_text(lines[1] + "\n")
    loss = next(m for m in summary(root)["stages"][1]["changed"] if m["name"] == "loss")
    assert loss == {"name": "loss", "first": 3.0, "last": 3.0, "updates": 1}


def test_equal_directories_give_equal_pages(compared):
    first = write(compared).read_bytes()
    assert write(compared).read_bytes() == first


def test_the_page_loads_nothing_and_no_text_leaves_its_data(compared):
    page = write(compared).read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", page)
    assert "<img" not in page


def test_half_written_files_are_noted_and_not_fatal(compared):
    (compared / "compare.json").write_text('{"judge": ')
    (compared / "02-sft" / "metrics.jsonl").write_text('{"update": 1, "loss": 2.0}\n{"upd')
    found = summary(compared)
    assert found["compare"] is None
    assert found["notes"] == ["compare.json is not a JSON object, so it was left out."]
    assert found["stages"][1]["updates"] == 1
    assert write(compared).exists()


def test_a_directory_without_a_pipeline_is_refused(tmp_path):
    with pytest.raises(UserError, match="not a pipeline's directory"):
        write(tmp_path)


# ---------------------------------------------------------------------- in a browser


@pytest.fixture
def shown(compared: Path, dom: Callable[[str], str]) -> Callable[[], str]:
    """shown() -> the document that a browser makes of the page."""
    return lambda: dom(write(compared).as_uri())


def test_the_page_draws_itself_and_shows_the_numbers(shown):
    dom = shown()
    root = re.search(r"<html[^>]*>", dom)
    assert root
    assert 'data-ready="true"' in root[0]
    assert "data-error" not in root[0]
    text = unescape(re.sub(r"<script.*?</script>|<style.*?</style>", "", dom, flags=re.DOTALL))
    for fragment in ("1.75 ± 0.1", "6.5 ± 0.2", "62.5%", "52.5% – 72.5%", "5 / 1 / 3", "the disk is full"):
        assert fragment in text, fragment
    assert "⟨U+202E⟩" in text  # what would turn the line around is shown by name
    assert dom.count('class="point"') == 3
    assert 'href="02-sft/report.html"' in dom
    assert "<img" not in dom.split('id="pipeline"')[0]


def test_no_card_is_drawn_of_win_rates_that_are_not_there(compared, shown):
    two = {"policies": COMPARE["policies"][:2], "wins": COMPARE["wins"][:1]}
    (compared / "compare.json").write_text(json.dumps(COMPARE | two))
    [pair] = re.findall(r'<h2>Win rates</h2><div class="pair">(.*?)</div><p', shown(), re.DOTALL)
    assert "Each over the one before" in pair
    assert pair.endswith("</div>")


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.sample("light")
def test_the_page_is_a_picture_in_light_and_dark(compared, picture, tmp_path, scheme):
    pixels = picture(write(compared).as_uri(), tmp_path / "shot.png", 1280, 1500, scheme)
    brightness = float(np.median(pixels))
    assert brightness > 0.9 if scheme == "light" else brightness < 0.15
    # Every tenth of the page shows something, and the points bring colours that text has not.
    for part in np.array_split(pixels[:1300], 10):
        assert part.std() > 0.01
    spread = pixels.max(-1) - pixels.min(-1)
    assert (spread > 0.4).sum() > 200
