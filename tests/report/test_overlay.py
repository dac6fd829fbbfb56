"""Several runs on one page: which are one series, where a mean ends, what differs, what they came to."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.report import overlay
from posttrain.report.record import read
from posttrain.types import UserError


def made(folder: Path, name: str, seed: int, values: list[float], **more: str) -> Path:
    """A run of these rewards, one an update from 1 on; `more`: keys of [method]."""
    run = folder / name
    run.mkdir(parents=True)
    keys = "".join(f"{key} = {value}\n" for key, value in ({"name": '"grpo"'} | more).items())
    (run / "config.toml").write_text(f"[method]\n{keys}\n[run]\nupdates = 9\nseed = {seed}\n")
    (run / "code.txt").write_text("posttrain 0.1.0\ntorch 2.13.0\n")
    (run / "plan.json").write_text('{"title": "a run", "sections": []}')
    lines = [
        {"update": u, "reward/mean": y, "seconds": 2.0 * u + seed, "tokens": 10 * u, "lr": 0.5}
        | ({"eval/accuracy": y} if u % 2 == 0 else {})
        for u, y in enumerate(values, start=1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def series(*runs: Path) -> list[overlay.Series]:
    return overlay.series([(run, read(run)) for run in runs])


def test_runs_that_differ_in_their_seed_alone_are_a_series_and_end_with_the_shortest(tmp_path: Path) -> None:
    runs = [
        made(tmp_path, "grpo-s0", 0, [0.0, 0.2, 0.4, 0.6]),
        made(tmp_path, "grpo-s1", 1, [0.3, 0.4, 0.5]),
        made(tmp_path, "grpo-s2", 2, [0.6, 0.6, 0.9, 0.9]),
        made(tmp_path, "wide", 0, [0.1, 0.1], clip_high="0.3"),
    ]
    several, alone = series(*runs)
    assert (several.label, alone.label) == ("grpo", "wide")
    assert [run.name for run in several.runs] == ["grpo-s0", "grpo-s1", "grpo-s2"]
    assert dict(several.metrics.points("reward/mean")) == pytest.approx({1: 0.3, 2: 0.4, 3: 0.6})
    assert several.low.points("reward/mean") == [(1, 0.0), (2, 0.2), (3, 0.4)]
    assert several.high.points("reward/mean") == [(1, 0.6), (2, 0.6), (3, 0.9)]
    assert several.metrics.points("seconds") == [(1, 3.0), (2, 5.0), (3, 7.0)]
    assert alone.metrics.points("reward/mean") == [(1, 0.1), (2, 0.1)]
    assert any(
        "grpo ends at update 3, where grpo-s1 does" in note for note in overlay._notes([several, alone])
    )


@pytest.mark.parametrize(
    ("names", "label"),
    [
        (("01-lr=1e-5,seed=0", "01-lr=1e-5,seed=1"), "01-lr=1e-5"),
        (("01-lr=1e-5,seed=10", "01-lr=1e-5,seed=11"), "01-lr=1e-5"),
        (("grpo_seed_0", "grpo_seed_1"), "grpo"),
        (("tests-0", "tests-1"), "tests"),
        (("seed=0", "seed=1"), "seed=0"),
    ],
)
def test_the_label_of_a_series_is_what_its_runs_share_without_the_seed(
    tmp_path: Path, names: tuple[str, str], label: str
) -> None:
    [group] = series(*(made(tmp_path, name, seed, [0.5]) for seed, name in enumerate(names)))
    assert group.label == label


def test_a_value_that_is_no_number_in_one_run_has_no_mean(tmp_path: Path) -> None:
    runs = [made(tmp_path, f"s{n}", n, [0.5, 0.5]) for n in range(2)]
    file = runs[1] / "metrics.jsonl"
    file.write_text(file.read_text().replace('"reward/mean": 0.5', '"reward/mean": null', 1))
    [one] = series(*runs)
    assert one.metrics.series["reward/mean"] == {1: None, 2: 0.5}


def test_only_what_differs_is_told_and_differences_are_to_the_first(tmp_path: Path) -> None:
    runs = [
        made(tmp_path, "a", 0, [0.5, 0.50]),
        made(tmp_path, "b", 7, [0.5, 0.75, 0.5, 0.25], clip_high="0.3", clip_low="0.2"),
    ]
    (runs[1] / "code.txt").write_text("posttrain 0.1.0\ntorch 2.14.0\n")
    found = series(*runs)
    assert overlay.differences(found) == [
        ["method.clip_high", "–", "0.3"],
        ["method.clip_low", "–", "0.2"],
        ["ran with torch", "2.13.0", "2.14.0"],
    ]
    rows = {row["name"]: row["cells"] for row in overlay.results(found)}
    assert [cell["value"] for cell in rows["Held-out accuracy, last"]] == ["50.0%", "25.0%"]
    assert rows["Held-out accuracy, last"][1]["difference"] == "−25.0 points"
    assert rows["Held-out accuracy, best"][1] == {
        "value": "75.0%",
        "remark": "update 2",
        "difference": "+25.0 points",
    }
    assert [cell["value"] for cell in rows["Reward while training"]] == ["0.5", "0.375"]


def test_code_of_ones_own_and_the_runs_own_directory_count_as_they_should(tmp_path: Path) -> None:
    runs = [made(tmp_path, f"s{n}", n, [0.5]) for n in range(3)]
    for run, digest in zip(runs, ("aa", "aa", "bb"), strict=True):
        with (run / "config.toml").open("a") as file:
            file.write(f'[model]\npath = "{run}/start/model"\n\n# code/mine.py: BLAKE2b {digest}\n')
    assert [len(each.runs) for each in series(*runs)] == [2, 1]
    assert overlay.differences(series(*runs)) == [["code/mine.py (own code)", "aa", "bb"]]


def test_the_command_writes_one_page_beside_the_runs_or_where_it_is_asked(
    run_cli: Callable[..., Any], another: Callable[[Path, int], Path], tmp_path: Path
) -> None:
    runs = [another(tmp_path / "runs" / name, seed) for seed, name in enumerate(("a", "b"))]
    said = run_cli("report", *runs)
    assert said.code == 0
    page = tmp_path / "runs" / "comparison.html"
    assert said.out.strip() == str(page)
    content = page.read_bytes()
    assert run_cli("report", *runs, "--out", tmp_path / "x" / "y.html").code == 0
    assert (tmp_path / "x" / "y.html").read_bytes() == content, "a function of the runs alone"
    assert not (runs[0] / "report.html").exists()
    assert run_cli("report", runs[0], "--out", tmp_path / "one.html").code == 0
    assert (tmp_path / "one.html").exists()
    assert not (runs[0] / "report.html").exists()


def test_what_cannot_be_shown_together_is_a_mistake_of_one_line(
    run_cli: Callable[..., Any], short: Path, tmp_path: Path
) -> None:
    (tmp_path / "pipe").mkdir()
    (tmp_path / "pipe" / "stages.json").write_text("{}")
    broken = made(tmp_path, "broken", 0, [0.5])
    (broken / "config.toml").write_text("[run\n")
    for other, what in ((short, "twice"), (tmp_path / "pipe", "pipeline"), (broken, "cannot be read")):
        said = run_cli("report", short, other)
        assert said.code == 2
        assert len(said.err.splitlines()) == 1
        assert what in said.err
    with pytest.raises(UserError, match="no such directory"):
        overlay.write([short, tmp_path / "none"], tmp_path / "page.html")


def test_the_page_draws_a_line_a_series_a_band_for_several_and_folds_what_never_moves(
    tmp_path: Path, answer: Callable[..., Any]
) -> None:
    runs = [
        made(tmp_path, "grpo-s0", 0, [0.0, 0.2, 0.4, 0.6]),
        made(tmp_path, "grpo-s1", 1, [0.3, 0.4, 0.5]),
        made(tmp_path, "<b>wide", 0, [0.1, 0.3, 0.2, 0.5], clip_high="0.3"),
    ]
    page = overlay.write(runs, tmp_path / "page.html")
    found = answer(
        page,
        """const chart = all('#curves .chart')[0];
        const slider = one('.smooth input');
        const before = chart.querySelectorAll('.stroke').length;
        slider.value = 0.5;
        slider.dispatchEvent(new Event('input'));
        const smooth = chart.querySelectorAll('.stroke.raw').length;
        const drawn = () => [...chart.querySelectorAll('.stroke')].map((n) => n.getAttribute('d'));
        const along = drawn();
        all('.axis button').find((b) => b.textContent === 'time').click();
        const later = drawn();
        all('.series button')[1].click();
        return {titles: texts('#curves h4'), folded: texts('#curves .constant').join(' '),
                before, smooth, bands: chart.querySelectorAll('.band').length, left: drawn().length,
                moved: along.join() !== later.join(), names: texts('.series b'), n: text('.series small'),
                cell: texts('#recipes tbody th'), markup: all('.series b b').length};""",
    )
    assert found["titles"][:2] == ["Reward", "Accuracy"]
    assert (found["before"], found["smooth"], found["bands"]) == (2, 2, 1)
    assert found["moved"], "along time the points lie elsewhere"
    assert found["left"] == 2, "of the series that is shown its curve and the raw one below"
    assert "Learning rate 0.5" in found["folded"]
    assert found["names"] == ["grpo", "<b>wide"]
    assert found["markup"] == 0
    assert found["cell"] == ["method.clip_high"]
    assert found["n"].startswith("n = 2")


def test_a_page_without_notes_says_nothing_in_their_place(tmp_path: Path, answer: Callable[..., Any]) -> None:
    runs = [made(tmp_path, "a", 0, [0.0, 0.2]), made(tmp_path, "b", 0, [0.1, 0.3], clip_high="0.3")]
    page = overlay.write(runs, tmp_path / "page.html")
    found = answer(page, "return {last: one('#top').lastChild.className, note: all('#top .note').length};")
    assert found == {"last": "series", "note": 0}


def test_the_page_loads_nothing(another: Callable[[Path, int], Path], tmp_path: Path) -> None:
    page = overlay.write(
        [another(tmp_path / str(n), n) for n in range(2)], tmp_path / "page.html"
    ).read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.sample("dark")
def test_it_is_a_picture(
    another: Callable[[Path, int], Path], tmp_path: Path, picture: Callable[..., Any], scheme: str
) -> None:
    page = overlay.write([another(tmp_path / str(n), n) for n in range(2)], tmp_path / "page.html")
    shot = picture(page.as_uri(), tmp_path / "shot.png", 1280, 1800, scheme)
    assert (float(shot.mean()) > 0.8) is (scheme == "light")
    saturation = shot.max(axis=2) - shot.min(axis=2)
    assert float((saturation > 0.4).mean()) > 0.001, "curves have colours"
