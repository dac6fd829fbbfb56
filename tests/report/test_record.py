"""Reading a run directory: half-written files become notes, never exceptions."""

import json
import tracemalloc
from pathlib import Path
from typing import Never

import pytest

from posttrain.report.record import metrics, read, read_json_lines
from posttrain.types import UserError


def test_a_truncated_last_line_is_left_out_and_said(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1, "loss": 2}\n{"update": 2, "lo')
    rows, notes = read_json_lines(path)
    assert rows == [{"update": 1, "loss": 2}]
    assert notes == ["The last line of metrics.jsonl is cut short, so it was left out."]


def test_a_last_line_that_only_lacks_its_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1}\n{"update": 2}')
    assert read_json_lines(path) == ([{"update": 1}, {"update": 2}], [])


def test_broken_lines_are_counted_with_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    deep = b"[" * 200_000
    path.write_bytes(
        b'{"update": 1}\n\xff\xfe\n[1]\n' + deep + b'\n{"n": ' + b"9" * 5000 + b'}\n{"update": 2}\n'
    )
    rows, notes = read_json_lines(path)
    assert rows == [{"update": 1}, {"update": 2}]
    assert notes == ["metrics.jsonl has 4 line(s) that are not a JSON object (line 2, 3, 4, 5): left out."]


def test_characters_that_python_calls_line_ends_do_not_cut_a_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"prompt": "a\u2028b\u0085c"}\n', encoding="utf-8")
    assert read_json_lines(path) == ([{"prompt": "a\u2028b\u0085c"}], [])


def test_updates_are_sorted_and_a_later_line_overrides() -> None:
    read_back, notes = metrics([{"update": 3, "a": 1}, {"update": 1, "a": 2}, {"update": 3, "a": 5, "b": 7}])
    assert read_back.updates == (1, 3)
    assert read_back.points("a") == [(1, 2.0), (3, 5.0)]
    assert notes == []


def test_values_that_are_no_number_are_kept_apart_from_missing_ones() -> None:
    first = {"update": 1, "a": None, "b": float("inf"), "c": "text", "d": 1.7e308}
    read_back, _ = metrics([first, {"update": 2, "a": 1}])
    assert read_back.series == {"a": {1: None, 2: 1.0}, "b": {1: None}, "d": {1: None}}


@pytest.mark.parametrize("update", [None, "7", 1.5, True, -1, 2**60])
def test_lines_without_a_usable_update_are_said(update: object) -> None:
    read_back, notes = metrics([{"update": update, "a": 1}])
    assert read_back.updates == ()
    assert notes == ["metrics.jsonl has 1 line(s) that name no update: left out."]


def test_a_directory_that_is_no_run_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        read(tmp_path)
    with pytest.raises(UserError, match="no such directory"):
        read(tmp_path / "nowhere")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no such directory"):
        read(tmp_path / "metrics.jsonl")


def test_a_run_killed_before_its_first_update_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[run]\n")
    record = read(tmp_path)
    assert record.metrics.updates == ()
    assert record.title == tmp_path.name
    assert record.notes == [
        "code.txt is not there.",
        "plan.json is not there.",
        "metrics.jsonl is not there.",
    ]


@pytest.mark.parametrize(
    "plan", ["", "{", "[]", '{"title": 3, "sections": 5}', '{"sections": [1, {"rows": [1, ["a"]]}]}', "NaN"]
)
def test_a_malformed_plan_is_no_failure(tmp_path: Path, plan: str) -> None:
    (tmp_path / "plan.json").write_text(plan)
    assert all(rows == [] for _, rows in read(tmp_path).sections)


def test_samples_are_found_by_name_and_sorted(short: Path) -> None:
    (short / "samples" / "notes.jsonl").write_text("{}\n")
    (short / "samples" / "000009.jsonl.part").write_text("{}\n")
    found = [(s.kind, s.update) for s in read(short).samples]
    assert found == [("eval", 0), *(("train", u) for u in range(1, 7))]


def test_rollouts_that_may_not_be_read_are_a_note(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Never:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: iter(()))
    record = read(short)
    assert record.samples == []
    assert record.notes == ["samples could not be read: Permission denied."]


def test_a_long_record_is_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"update": n, "loss": 0.5, "said": "x" * 500_000}) + "\n" for n in range(40)
        )
    tracemalloc.start()
    points = read(tmp_path).metrics.points("loss")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert points == [(n, 0.5) for n in range(40)]
    assert most < 8_000_000
