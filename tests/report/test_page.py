"""The page as text: deterministic, closed to the network, and deaf to what a run may say."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from posttrain.report import curves_svg, page, write
from posttrain.types import UserError

HOSTILE = "</script><script>x()</script><img src=x onerror=x()><!-- \u202e \x00 \x1b \"'&amp; <!--title-->"


class Tags(HTMLParser):
    """The elements of a page, and the text of its scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.scripts: dict[str, str] = {}
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.inside = (dict(attrs).get("id") or f"script {len(self.scripts)}") if tag == "script" else ""

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.scripts[self.inside] = self.scripts.get(self.inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


def embedded(path: Path, name: str) -> Any:
    return json.loads(Tags(path.read_text(encoding="utf-8")).scripts[name])


def test_equal_directories_give_equal_bytes(short: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / short.name
    shutil.copytree(short, copy, copy_function=shutil.copy)
    first = write(short).read_bytes()
    assert write(short).read_bytes() == first
    assert write(copy).read_bytes() == first


def test_the_report_goes_into_the_run_or_where_it_is_told(short: Path, tmp_path: Path) -> None:
    assert write(short) == short / "report.html"
    out = tmp_path / "new" / "page.html"
    assert write(short, out) == out
    assert out.read_bytes() == (short / "report.html").read_bytes()
    assert list(out.parent.iterdir()) == [out]


def test_a_place_that_cannot_be_written_is_the_users_mistake(short: Path) -> None:
    with pytest.raises(UserError, match="cannot write the report"):
        write(short, short / "config.toml" / "report.html")


def test_any_cut_of_a_running_run_gives_a_report(short: Path, tmp_path: Path) -> None:
    lines = (short / "metrics.jsonl").read_bytes()
    samples = (short / "samples" / "000006.jsonl").read_bytes()
    for part in (0, 1, 40, len(lines) // 2, len(lines) - 2, len(lines) - 1):
        (short / "metrics.jsonl").write_bytes(lines[:part])
        (short / "samples" / "000006.jsonl").write_bytes(samples[: len(samples) * part // len(lines)])
        run = embedded(write(short, tmp_path / "out.html"), "run")
        cut = [note for note in run["notes"] if "cut short" in note and "metrics" in note]
        whole = len([line for line in lines[:part].split(b"\n") if line.endswith(b"}")])
        assert len(run["updates"]) == whole
        assert len(cut) == (part not in (0, len(lines) - 1)), part


def test_a_run_without_rollouts_or_metrics_gives_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    run = embedded(write(tmp_path), "run")
    assert (run["updates"], run["steps"], run["alarms"]) == ([], [], [])


def test_a_run_that_recorded_a_share_of_its_groups_says_so(short: Path) -> None:
    said = "The run recorded the rollouts of a share of its groups"
    assert said not in write(short).read_text()
    file = max((short / "samples").glob("0*.jsonl"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [row for row in rows if row["group"] in (1, 4, 6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    page = write(short).read_text()
    [trained] = [
        line["select/kept"]
        for line in map(json.loads, (short / "metrics.jsonl").read_text().splitlines())
        if line["update"] == rows[0]["update"]
    ]
    assert f"{said}, 3 of {trained} of the last update" in page


def test_a_run_that_had_to_stop_says_why(short: Path) -> None:
    assert embedded(write(short), "run")["stopped"] == ""
    (short / "stopped.txt").write_text(f"the verifier failed on 9 of 40 episodes; {HOSTILE}\n")
    path = write(short)
    assert embedded(path, "run")["stopped"] == f"the verifier failed on 9 of 40 episodes; {HOSTILE}"
    assert "stopped.txt is not there" not in path.read_text(encoding="utf-8")


def test_hostile_text_adds_no_element(short: Path) -> None:
    calm = Tags(write(short).read_text(encoding="utf-8")).tags
    plan = {"title": HOSTILE, "sections": [{"title": HOSTILE, "rows": [[HOSTILE, HOSTILE]]}]}
    (short / "plan.json").write_text(json.dumps(plan))
    (short / "config.toml").write_text(HOSTILE)
    (short / "code.txt").write_bytes(HOSTILE.encode() + b"\xff\xfe")
    samples = short / "samples" / "000006.jsonl"
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    for row in rows:
        row |= {
            "task": HOSTILE,
            "prompt": HOSTILE + "\ud800",
            "label": HOSTILE,
            "reason": HOSTILE,
            "stop": HOSTILE,
        }
        row["pieces"] = [HOSTILE] * len(row["pieces"])
    samples.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (short / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"update": 7, HOSTILE: 1.0}) + "\n")
    path = write(short)
    text = path.read_text(encoding="utf-8")
    assert Tags(text).tags == calm
    assert "\u202e" not in text
    assert embedded(path, "run")["title"] == HOSTILE
    assert embedded(path, "train-6")[0]["prompt"] == HOSTILE + "\ud800"


def test_nothing_is_loaded_and_only_our_scripts_may_run(short: Path) -> None:
    text = write(short).read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)=[\"'](?!#)", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert policy[1].startswith("default-src 'none';")
    bodies = re.findall(r"<script>(.*?)</script>", text, re.S) + re.findall(
        r"<style>(.*?)</style>", text, re.S
    )
    digests = ["sha256-" + base64.b64encode(hashlib.sha256(b.encode()).digest()).decode() for b in bodies]
    assert re.findall(r"'(sha256-[^']+)'", policy[1]) == digests


def test_the_curves_hold_what_the_metrics_say(short: Path) -> None:
    run = embedded(write(short), "run")
    lines = [json.loads(line) for line in (short / "metrics.jsonl").read_text().splitlines()]
    assert run["updates"] == [0, 1, 2, 3, 4, 5, 6]
    assert run["series"]["reward/mean"]["at"] == [1, 2, 3, 4, 5, 6]
    assert run["series"]["reward/mean"]["y"] == pytest.approx([r["reward/mean"] for r in lines[1:]], rel=1e-5)
    assert "at" not in run["series"]["seconds"]


def test_many_updates_are_thinned_but_every_evaluation_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "POINTS", 50)
    rows: list[dict[str, Any]] = [{"update": u, "loss": u} for u in range(1000)]
    for u in (3, 501, 777):
        rows[u]["eval/accuracy"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = embedded(write(tmp_path), "run")
    assert {0, 3, 501, 777, 999} <= set(run["updates"])
    assert 50 <= len(run["updates"]) <= 53
    assert any("of 1000 updates" in note for note in run["notes"])


def test_the_page_of_forty_updates_is_small(finished: Path, tmp_path: Path) -> None:
    assert write(finished, tmp_path / "report.html").stat().st_size < 2_000_000


def test_the_picture_shows_mean_and_band(tmp_path: Path, another: Callable[[Path, int], Path]) -> None:
    runs = [another(tmp_path / str(seed), seed) for seed in range(3)]
    out = curves_svg(runs, tmp_path / "curve.svg", "accuracy", "Addition <&> GRPO")
    root = ElementTree.fromstring(out.read_text(encoding="utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.findtext(f"{space}title") == "Addition <&> GRPO"
    kinds = [node.get("class") for node in root.iter(f"{space}path")]
    assert (kinds.count("mean"), kinds.count("band"), kinds.count("run")) == (1, 1, 3)
    last = [json.loads((r / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"] for r in runs]
    values = [node.text for node in root.iter(f"{space}text") if node.get("class") == "value"]
    assert values == [f"{sum(last) / 3 * 100:.1f}%"]
    assert (
        out.read_bytes() == curves_svg(runs, tmp_path / "b.svg", "accuracy", "Addition <&> GRPO").read_bytes()
    )


def test_only_updates_that_every_run_has_are_averaged(tmp_path: Path) -> None:
    for name, values in {"a": [1.0, 3.0, 100.0], "b": [3.0, 5.0]}.items():
        (tmp_path / name).mkdir()
        rows = [json.dumps({"update": u, "loss": v}) for u, v in enumerate(values)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(rows))
    out = curves_svg([tmp_path / "a", tmp_path / "b"], tmp_path / "c.svg", "loss", "loss")
    assert "loss: 2 at update 0, 4 at update 1" in out.read_text(encoding="utf-8")


def test_a_metric_that_a_run_lacks_is_the_users_mistake(short: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'reward/mean'"):
        curves_svg([short], tmp_path / "c.svg", "reward/meen", "t")
    with pytest.raises(UserError, match="no run was given"):
        curves_svg([], tmp_path / "c.svg", "reward/mean", "t")


def test_the_labels_of_the_picture_have_room(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    (run / "metrics.jsonl").write_text("".join(f'{{"update": {u}, "x": {-u * 5e-7}}}\n' for u in range(3)))
    picture = curves_svg([run], tmp_path / "x.svg", "x", "X").read_text()
    labels = re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]+)<', picture)
    assert "-2.5e-07" in [label for _, label in labels]
    assert all(float(x) > 6 * len(label) for x, label in labels)


def test_one_constant_run_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"update": 3, "loss": 0.0}\n')
    out = curves_svg([tmp_path], tmp_path / "c.svg", "loss", "t")
    assert "nan" not in out.read_text(encoding="utf-8")
