"""posttrain run list and run clean: the list is true, and what was cleaned still works."""

import csv
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.commands import clean as cleaning
from posttrain.run.rundir import claim

Tree = dict[str, int]


@pytest.fixture(scope="module")
def kept() -> dict[str, Path]:
    """The run of this module, made by the first test that asks."""
    return {}


@pytest.fixture
def run(kept, run_cli, online, write, able, tmp_path, tmp_path_factory) -> Path:
    """A copy of a run of four updates with a checkpoint and an evaluation after each."""
    if not kept:
        made = tmp_path_factory.mktemp("made") / "grpo-001"
        over = {"model": {"path": str(able)}, "eval": {"every": 1}, "checkpoint": {"every": 1, "keep": 0}}
        assert run_cli("train", write(online, over), "--run-dir", made, "--quiet").code == 0
        kept["run"] = made
    return Path(shutil.copytree(kept["run"], tmp_path / "runs" / "grpo-001"))


def tree(root: Path) -> Tree:
    return {str(f.relative_to(root)): f.stat().st_size for f in root.rglob("*") if f.is_file()}


def evaluated(run: Path, accuracy: dict[int, float]) -> None:
    """Writes these accuracies over what the evaluations came to."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"eval/accuracy": accuracy[line["update"]]} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def listing(run_cli: Callable[..., Any], *words: object) -> dict[str, dict[str, Any]]:
    said = run_cli("run", "list", *words, "--json")
    assert said.code == 0, said.err
    return {Path(each["path"]).name: each for each in map(json.loads, said.out.splitlines())}


# ---------------------------------------------------------------------- runs


def test_a_run_is_told_with_what_it_came_to(run: Path, run_cli) -> None:
    evaluated(run, {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.9, 4: 0.2})
    told = listing(run_cli, run.parent)["grpo-001"]
    assert (told["kind"], told["method"], told["state"]) == ("run", "grpo", "done")
    assert (told["done"], told["of"]) == (4, 4)
    assert (told["metric"], told["at"], told["best"]) == ("eval/accuracy", 2, 0.9), "the first of two"
    assert told["size"] == sum(tree(run).values())
    assert told["model"] == "run/step_000025"
    shown = run_cli("run", "list", run.parent).out
    for words in ("grpo-001", "4 of 4", "done", "accuracy 90.0% @ 2"):
        assert words in shown


def test_metrics_are_printed_as_the_run_has_them(run: Path, run_cli) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    printed = [line.split() for line in run_cli("run", "show", run).out.splitlines()]
    assert printed[0][:3] == ["update", "reward/mean", "loss"]
    assert [row[0] for row in printed[1:]] == ["0", "1", "2", "3", "4"]
    assert printed[-1][1:3] == [f"{lines[-1][name]:.4g}" for name in ("reward/mean", "loss")]
    rows = list(csv.DictReader(io.StringIO(run_cli("run", "show", run, "--csv").out)))
    for line, row in zip(lines, rows, strict=True):
        assert {k: float(v) for k, v in row.items() if v} == {k: v for k, v in line.items() if v is not None}
    words = ("run", "show", run, "--metrics", "eval/*,reward/mean", "--csv")
    [head, *rest] = run_cli(*words).out.splitlines()
    assert head.split(",")[-1] == "reward/mean"
    assert all(name.startswith("eval/") for name in head.split(",")[1:-1])
    assert len(rest) == 5
    assert run_cli(*words, "--last", 2).out.splitlines() == [head, *rest[-2:]]
    row = json.loads(sorted((run / "samples").glob("0*.jsonl"))[-1].read_text().splitlines()[0])
    first, *text = run_cli("run", "show", run, "--samples", 1).out.splitlines()
    assert first.startswith(f"── update {row['update']}, {row['task']}: {row['label']}, score ")
    assert "\n".join(text).startswith(f"{row['prompt']}⟦{row['pieces'][0]}")
    short = run_cli("run", "show", run, "--metrics", "loss", "--last", 2).out.splitlines()
    assert [line.split()[0] for line in short] == ["update", "3", "4"]
    assert "did you mean 'reward/mean'" in run_cli("run", "show", run, "--metrics", "reward/men").err
    (run.parent / "stages.json").write_text("{}")
    assert "is a pipeline" in run_cli("run", "show", run.parent).err


def test_weights_of_the_best_evaluation_are_found_or_gone(run: Path, run_cli) -> None:
    evaluated(run, {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.9, 4: 0.2})
    place = run / "checkpoints" / "step_000002"
    assert listing(run_cli, run.parent)["grpo-001"]["weights"] == str(place)
    assert "@ 2, in step_000002" in run_cli("run", "list", run.parent).out
    shutil.rmtree(place)
    assert listing(run_cli, run.parent)["grpo-001"]["weights"] == ""
    assert "@ 2, weights not kept" in run_cli("run", "list", run.parent).out
    evaluated(run, {0: 0.95, 1: 0.5, 2: 0.9, 3: 0.9, 4: 0.2})
    assert "@ 0, the start" in run_cli("run", "list", run.parent).out


def test_resumed_run_keeps_its_best_checkpoint(run: Path, run_cli) -> None:
    evaluated(run, {0: 0.1, 1: 0.5, 2: 1.5, 3: 0.9, 4: 0.2})
    asked = ["--set", "run.updates=5", "--set", "checkpoint.keep=1", "--set", "checkpoint.every=1"]
    said = run_cli("train", run / "config.toml", "--run-dir", run, "--resume", "--quiet", *asked)
    assert said.code == 0, said.err
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_000002", "step_000005"]
    assert (run / "checkpoints" / "step_000002" / "model" / "model.safetensors").exists()
    assert not (run / "checkpoints" / "step_000002" / "resume").exists()


def test_a_run_that_removes_a_file_meanwhile_is_not_broken(run: Path, run_cli, monkeypatch) -> None:
    lstat, gone = Path.lstat, run / "checkpoints" / "step_000001.tmp-1" / "state.json"
    gone.parent.mkdir()
    gone.touch()

    def vanish(self: Path) -> os.stat_result:
        if self == gone and gone.parent.exists():
            shutil.rmtree(gone.parent)
        return lstat(self)

    monkeypatch.setattr(Path, "lstat", vanish)
    told = listing(run_cli, run.parent)["grpo-001"]
    assert (told["state"], told["size"]) == ("done", sum(tree(run).values()))


def test_each_state_is_told(run: Path, run_cli) -> None:
    folder = run.parent
    for name in ("failed", "stopped", "asked", "held"):
        shutil.copytree(run, folder / name)
    (folder / "failed" / "stopped.txt").write_text("the verifier died\n")
    (folder / "asked" / "stopped.txt").write_text(
        "stopped on request after update 2 of 3; all of it is saved"
    )
    lines = (folder / "stopped" / "metrics.jsonl").read_text().splitlines(keepends=True)
    for name in ("stopped", "asked"):
        (folder / name / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    (folder / "empty").mkdir()
    (folder / "torn").mkdir()
    (folder / "torn" / "config.toml").write_text("[run\n")
    (folder / "headless" / "checkpoints").mkdir(parents=True)
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("no run")
    lock = claim(folder / "held", "")
    try:
        told = listing(run_cli, folder)
    finally:
        os.close(lock)
    assert {name: each["state"] for name, each in told.items()} == {
        "grpo-001": "done",
        "failed": "failed",
        "stopped": "stopped",
        "asked": "stopped",
        "held": "running",
        "empty": "broken",
        "torn": "broken",
        "headless": "broken",
    }
    assert told["failed"]["note"] == "the verifier died"
    assert told["stopped"]["done"] == 2
    assert told["empty"]["note"] == "it is empty"
    shown = run_cli("run", "list", folder)
    assert shown.code == 0
    assert f"{folder / 'torn'}: broken" in shown.out


def test_a_directory_that_may_not_be_read_is_one_broken_line(run: Path, run_cli, monkeypatch) -> None:
    shut = run.parent / "shut"
    shutil.copytree(run, shut)
    (run.parent / "torn").mkdir()
    stat, iterdir = Path.stat, Path.iterdir

    def refused(path: Path, within: Path) -> None:
        if within == shut:
            raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", lambda p, **how: refused(p, p.parent) or stat(p, **how))
    monkeypatch.setattr(Path, "iterdir", lambda p: refused(p, p) or iterdir(p))
    told = listing(run_cli, run.parent)
    assert {name: each["state"] for name, each in told.items()} == {
        "grpo-001": "done",
        "shut": "broken",
        "torn": "broken",
    }
    assert "Permission denied" in told["shut"]["note"]
    said = run_cli("run", "clean", run.parent, "--dry-run")
    assert said.code == 0
    assert f"{shut}: left alone" in said.err
    assert "can go" in said.out


def test_the_list_is_in_the_order_that_is_asked(run: Path, run_cli) -> None:
    folder = run.parent
    for name, accuracy, size in (("a", 0.2, 10), ("b", 0.8, 30_000), ("c", 0.5, 20_000)):
        shutil.copytree(run, folder / name)
        evaluated(folder / name, dict.fromkeys(range(5), accuracy))
        (folder / name / "more").write_bytes(b"." * size)
    shutil.rmtree(run)
    assert list(listing(run_cli, folder)) == ["a", "b", "c"]
    assert list(listing(run_cli, folder, "--sort", "best")) == ["b", "c", "a"]
    assert list(listing(run_cli, folder, "--sort", "size")) == ["b", "c", "a"]
    for name in "abc":
        config = folder / name / "config.toml"
        text = config.read_text()
        config.write_text(text.replace("[checkpoint]\n", "[checkpoint]\nbest = 'min eval/accuracy'\n"))
    assert list(listing(run_cli, folder, "--sort", "best")) == ["a", "c", "b"]
    os.utime(folder / "a" / "more", (2e9, 2e9))
    assert next(iter(listing(run_cli, folder, "--sort", "when"))) == "a"
    wrong = run_cli("run", "list", folder, "--sort", "luck")
    assert wrong.code == 2
    assert len(wrong.err.splitlines()) == 1


def test_a_pipeline_is_one_line_and_its_stages_are_told_where_it_is_named(run: Path, run_cli) -> None:
    pipeline = run.parent / "two"
    shutil.copytree(run, pipeline / "02-rl")
    (pipeline / "01-data").mkdir()
    stages = [
        {"name": "data", "kind": "make", "directory": "01-data"},
        {"name": "rl", "kind": "recipe", "directory": "02-rl"},
        {"name": "more", "kind": "recipe", "directory": "03-more"},
    ]
    (pipeline / "stages.json").write_text(json.dumps({"title": "two", "stages": stages}))
    told = listing(run_cli, run.parent)
    assert set(told) == {"grpo-001", "two"}
    assert (told["two"]["done"], told["two"]["of"], told["two"]["state"]) == (2, 3, "stopped")
    assert told["two"]["size"] == sum(tree(pipeline).values())
    assert listing(run_cli, pipeline)["02-rl"]["state"] == "done"


def test_a_recipe_may_begin_with_the_mark_of_some_editors(run: Path, run_cli) -> None:
    config = run / "config.toml"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    assert listing(run_cli, run.parent)["grpo-001"]["method"] == "grpo"
    other = Path(shutil.copytree(run, run.parent / "grpo-002"))
    assert run_cli("report", run, other).code == 0


def test_a_run_whose_recipe_cannot_be_read_is_broken_and_not_one_of_the_default_length(
    run: Path, run_cli, monkeypatch
) -> None:
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.name == "config.toml":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", refused)  # root may read everything
    told = listing(run_cli, run.parent)["grpo-001"]
    assert (told["state"], told["of"]) == ("broken", None)
    assert told["note"] == "it cannot be read: config.toml could not be read: Permission denied."


def test_a_folder_that_is_not_there_is_a_mistake(run_cli, tmp_path: Path) -> None:
    for command in ("list", "clean"):
        said = run_cli("run", command, tmp_path / "none")
        assert said.code == 2
        assert "there is no such directory" in said.err
    assert run_cli("run", "list", tmp_path).out.strip().endswith("holds no runs")


# ---------------------------------------------------------------------- clean


def test_what_is_cleaned_can_be_reported_asked_evaluated_and_resumed(run: Path, run_cli) -> None:
    evaluated(run, {0: 0.1, 1: 0.5, 2: 0.9, 3: 0.3, 4: 0.2})
    (run / ".code.txt.tmp").write_text("half")
    (run / "report.html.part").write_text("half")
    (run / "checkpoints" / "step_000003.tmp-17").mkdir()
    (run / "checkpoints" / "step_000003.tmp-17" / "weights").write_text("half")
    (run / "checkpoints" / "step_000004.before").mkdir()
    before, answers = tree(run), run_cli("sample", run, "2+2=", "--json").out
    said = run_cli("run", "clean", run, "--yes")
    assert said.code == 0, said.err
    assert "step_000002 (best by eval/accuracy, 0.9), step_000004 (the last)" in said.out
    after = tree(run)
    gone = before.keys() - after.keys()
    assert {name.split("/")[0] for name in gone} == {
        "checkpoints",
        "samples",
        ".code.txt.tmp",
        "report.html.part",
    }
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step_000002", "step_000004"}
    assert all(before[name] == size for name, size in after.items() if name != ".lock")
    assert not list((run / "samples").iterdir())
    assert run_cli("report", run).code == 0
    assert run_cli("sample", run, "2+2=", "--json").out == answers
    assert run_cli("eval", run, "--json").code == 0
    again = run_cli(
        "train", run / "config.toml", "--run-dir", run, "--resume", "--set", "run.updates=5", "--quiet"
    )
    assert again.code == 0, again.err
    assert listing(run_cli, run)["grpo-001"]["done"] == 5


def test_weights_alone_can_be_asked_and_not_resumed_and_only_of_what_has_ended(run: Path, run_cli) -> None:
    going_on = shutil.copytree(run, run.parent / "going-on")
    words = ("--set", "run.updates=9", "--resume", "--quiet")
    config = (going_on / "config.toml").read_text()
    assert "updates = 4" in config
    (going_on / "config.toml").write_text(config.replace("updates = 4", "updates = 9"))
    assert run_cli("run", "clean", run.parent, "--weights-only", "--keep-records", "--yes").code == 0
    assert not list(run.rglob("resume"))
    assert list(going_on.rglob("resume")), "it has five updates to go"
    assert list((run / "samples").iterdir())
    assert run_cli("sample", run, "2+2=").code == 0
    refused = run_cli("train", run / "config.toml", "--run-dir", run, *words)
    assert refused.code == 2
    assert "weights alone" in refused.err


def test_without_a_terminal_and_without_yes_nothing_goes(run: Path, run_cli, monkeypatch) -> None:
    before = tree(run)
    for words in (["--dry-run"], ["--dry-run", "--yes"], []):
        said = run_cli("run", "clean", run, *words)
        assert said.code == 0
        assert "can go" in said.out
        assert tree(run) == before
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, stays in ((False, True), (True, False)):
        monkeypatch.setattr(cleaning.typer, "confirm", lambda question, answer=answer: answer)
        assert run_cli("run", "clean", run).code == 0
        assert (tree(run) == before) is stays
    assert run_cli("run", "clean", run, "--yes").out.strip() == "nothing can go"


def test_a_run_or_a_pipeline_at_work_is_left_alone(run: Path, run_cli) -> None:
    pipeline = run.parent / "two"
    shutil.copytree(run, pipeline / "01-rl")
    stages = [{"name": "rl", "kind": "recipe", "directory": "01-rl"}]
    (pipeline / "stages.json").write_text(json.dumps({"title": "two", "stages": stages}))
    before = tree(run.parent)
    locks = [claim(run, ""), claim(pipeline, "")]
    try:
        said = run_cli("run", "clean", run.parent, pipeline / "01-rl", "--yes")
    finally:
        for lock in locks:
            os.close(lock)
    assert said.out.strip() == "nothing can go"
    assert said.err.count("left alone, it is running") == 2
    assert {k: v for k, v in tree(run.parent).items() if not k.endswith(".lock")} == {
        k: v for k, v in before.items() if not k.endswith(".lock")
    }
    assert run_cli("run", "clean", run.parent, "--yes").code == 0
    assert len(list((pipeline / "01-rl" / "checkpoints").iterdir())) <= 2


def test_a_stage_that_cannot_be_read_is_left_alone_and_the_others_are_cleaned(
    run: Path, run_cli, monkeypatch
) -> None:
    pipeline, exists = run.parent / "two", Path.exists
    for stage in ("01-shut", "02-rl"):
        shutil.copytree(run, pipeline / stage)
    (pipeline / "stages.json").write_text(json.dumps({"title": "two", "stages": []}))

    def refused(path: Path) -> bool:
        if path.parent.name == "01-shut":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refused)  # root may read everything
    said = run_cli("run", "clean", pipeline, "--yes")
    assert said.code == 0, said.err
    assert "01-shut: left alone, it cannot be read: " in said.err
    assert len(list((pipeline / "01-shut" / "checkpoints").iterdir())) == 4
    assert len(list((pipeline / "02-rl" / "checkpoints").iterdir())) <= 2


def test_a_checkpoint_that_another_run_begins_from_stays_and_a_damaged_one_is_not_the_last(
    run: Path, run_cli
) -> None:
    other = run.parent / "next"
    other.mkdir()
    begun = run / "checkpoints" / "step_000001" / "model"
    (other / "config.toml").write_text(f'[model]\npath = "{begun}"\n[method]\nname = "grpo"\n')
    evaluated(run, dict.fromkeys(range(5), 0.5))
    (run / "checkpoints" / "step_000004" / "state.json").write_text("{}")
    assert run_cli("run", "clean", run, "--yes").code == 0
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step_000001", "step_000003"}
    assert run_cli("sample", run, "2+2=").code == 0


def test_a_checkpoint_that_is_a_link_stays_and_so_does_what_it_leads_to(run: Path, run_cli) -> None:
    moved = run.parent / "disk" / "step_000001"
    moved.parent.mkdir()
    (run / "checkpoints" / "step_000001").rename(moved)
    (run / "checkpoints" / "step_000001").symlink_to(moved)
    evaluated(run, {n: n / 5 for n in range(5)})
    said = run_cli("run", "clean", run, "--yes")
    assert said.code == 0, said.err
    assert "step_000001 (it lies elsewhere)" in said.out
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step_000001", "step_000004"}
    assert (moved / "manifest.json").exists()
