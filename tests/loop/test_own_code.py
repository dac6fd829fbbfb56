"""A method, tasks and a selection of one's own, in a file beside the recipe, from training to resuming."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import posttrain
from posttrain.base.usercode import imported_files, load_edited
from posttrain.data.own import OwnTasks
from posttrain.methods.table import line
from posttrain.recipe import config
from posttrain.testing import repeatable

MINE = '''
from dataclasses import replace

import torch

import posttrain
from aside import SLOPE
from posttrain.methods.table import GRPO, Line
from posttrain.types import Task


@posttrain.choice(compares="group")
def quantile(returns, group, *, q: posttrain.Between(0, 1) = 0.75):
    """The return, less the q-quantile of its group."""
    out = torch.empty_like(returns)
    for g in group.unique():
        out[group == g] = returns[group == g] - returns[group == g].quantile(q)
    return out


def soft_clip(log_ratio, advantage, *, width: posttrain.AtLeast(1e-3) = 0.2):
    """-(1 + w tanh((r - 1)/w)) A."""
    return -SLOPE * (1 + width * torch.tanh((log_ratio.exp() - 1) / width)) * advantage


MY_METHOD = posttrain.method("grpo", credit=quantile, surrogate=soft_clip)
BARE = replace(GRPO, credit=quantile)
OFFLINE = Line(posttrain.method("sft").method, "mine", "me", loop="offline")
WRONG = 7


def sums(high=5):
    for a in range(high):
        yield Task(id=f"sum-{a}", messages=({"role": "user", "content": f"{a}+1="},), answer=str(a + 1))


def twice():
    return [*sums(2), *sums(1)]


def records(kinds=()):
    return [{"question": "1+1=", "answer": 2, "level": 1}, *kinds]


class HardestFirst:
    """The tasks from the last to the first, over and over; counts what it was told."""

    def __init__(self, tasks, *, seed):
        self.tasks, self.taken, self.told = tasks, 0, 0

    def take(self):
        epoch, place = divmod(self.taken, len(self.tasks))
        self.taken += 1
        return epoch, self.tasks[-1 - place]

    def observe(self, rates):
        self.told += len(rates)
        return {"curriculum/told": self.told}

    def state(self):
        return {"told": self.told}

    def restore(self, state):
        self.told = state.get("told", 0)


class Breaks(HardestFirst):
    def take(self):
        return 1 / 0


class Forgets(HardestFirst):
    observe = property()


def any_judged(group):
    return any(not e.verdict.failed for e in group)
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of one's own beside the recipe, and one that it imports."""
    (tmp_path / "aside.py").write_text("SLOPE = 1.0\n")
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def edit(file: Path, before: str, after: str) -> None:
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 10**9))


CHOSEN = {"method": {"name": "grpo", "credit": "mine.py:quantile", "q": 0.5}}
CHOSEN["method"]["surrogate"] = {"name": "mine.py:soft_clip", "width": 0.1}


def losses(run: Path) -> list[float]:
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_file_beside_the_recipe_is_trained_with_kept_and_gone_on_with(
    run_cli, write, online, mine, tmp_path, monkeypatch
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    recipe, whole, run = write(online, CHOSEN), tmp_path / "whole", tmp_path / "run"
    said = run_cli("train", recipe, "--run-dir", whole, "-q")
    assert said.code == 0, said.err
    said = run_cli("train", recipe, "--run-dir", run, "-q", "--set", "run.updates=2")
    assert said.code == 0, said.err
    assert (run / "code" / "mine.py").read_text() == MINE
    assert (run / "code" / "aside.py").exists()
    kept = (run / "config.toml").read_text()
    assert tomllib.loads(kept)["method"]["credit"] == "code/mine.py:quantile"
    assert "# code/mine.py: BLAKE2b " in kept
    # The original is edited: the run goes on with its copy, to the very same numbers, and says so.
    edit(mine, "-SLOPE", "-3 * SLOPE")
    (tmp_path / "aside.py").write_text("SLOPE = 7.0\n")
    said = run_cli("train", recipe, "--run-dir", run, "--resume")
    assert said.code == 0, said.err
    assert "mine.py has changed since the run began, which continues with its copy" in said.err
    assert losses(run) == losses(whole)
    assert any(losses(run))
    # A run may be moved, and needs the original no more.
    mine.unlink()
    (tmp_path / "aside.py").unlink()
    moved = run.rename(tmp_path / "moved")
    for words in (["eval", moved], ["sample", moved, "1+1=", "--max-new-tokens", "2"], ["report", moved]):
        said = run_cli(*words)
        assert said.code == 0, said.err
    assert "quantile" in (moved / "report.html").read_text()
    said = run_cli("train", moved / "config.toml", "--run-dir", moved, "--resume", "--set", "run.updates=5")
    assert said.code == 0, said.err
    assert len(losses(moved)) == 5


@pytest.mark.parametrize(("name", "title"), [("MY_METHOD", "group-relative"), ("BARE", "Σ weight")])
def test_a_whole_method_is_named_by_its_file(name, title, run_cli, write, online, mine, tmp_path):
    over = {"method": {"name": f"mine.py:{name}", "q": 0.9}, "run": {"updates": 1}}
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run")
    assert said.code == 0, said.err
    assert f"mine.py:{name}" in said.err
    assert "quantile(q=0.9)" in said.err
    assert title in said.err


REFUSED = {
    "no such file": ({"credit": "nowhere.py:f"}, "method.credit: ", "there is no file"),
    "no such name": ({"credit": "mine.py:quantil"}, "method.credit: ", "did you mean 'quantile'"),
    "no function": ({"credit": "mine.py:WRONG"}, "method.credit: ", "does not fit credit"),
    "no credit": ({"credit": "mine.py:soft_clip"}, "method.q: ", "grpo does not read 'q'"),
    "no method": ({"name": "mine.py:WRONG", "q": None}, "method.name: ", "7 is not a method"),
    "out of range": ({"q": 2.0}, "method.q: ", "expected a number less than or equal to 1, got 2.0"),
    "a number misspelt": ({"surrogate": {"name": "mine.py:soft_clip", "widht": 1}}, "widht", "did you mean"),
    "of the other loop": ({"name": "mine.py:OFFLINE", "q": None, "credit": None}, "", "is never read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_line_with_its_place(case, run_cli, write, online, mine, tmp_path):
    over, where, what = REFUSED[case]
    tables = {"method": {"credit": "mine.py:quantile", "q": 0.5, **over}}
    said = run_cli("train", write(online, tables), "--run-dir", tmp_path / "run")
    assert said.code == 2
    assert what in said.err
    assert where in said.err
    assert "recipe.toml:" in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "run").exists()


def test_a_group_of_one_is_refused_for_a_credit_of_one_s_own(run_cli, write, online, mine, tmp_path):
    said = run_cli("validate", write(online, CHOSEN | {"rollout": {"group_size": 1}}))
    assert said.code == 2
    assert "a group of 1 has none to compare" in said.err


def test_tasks_and_a_selection_of_one_s_own(run_cli, write, online, mine, tmp_path):
    own = {"function": "mine.py:sums", "options": {"high": 9}, "held_out": 2}
    over = {
        "task": {"arithmetic": None, "own": own},
        "rollout": {"select": "mine.py:any_judged"},
        "run": {"updates": 2},
    }
    recipe, run = write(online, over), tmp_path / "run"
    said = run_cli("train", recipe, "--run-dir", run)
    assert said.code == 0, said.err
    assert "7 to train on, 2 held out" in said.err
    assert (run / "code" / "mine.py").exists()
    assert run_cli("eval", run).code == 0
    assert 'function = "code/mine.py:sums"' in (run / "config.toml").read_text()
    for table, said_of in (
        ({"function": "mine.py:sums", "options": {"hihg": 9}}, "unexpected keyword argument 'hihg'"),
        ({"function": "mine.py:twice"}, "data:3: another task is called 'sum-0'"),
        ({"function": "mine.py:records", "options": {"kinds": ["x"]}}, "data: an entry is of str"),
        ({"function": "mine.py:records", "options": {"kinds": [{"text": ""}]}}, "data:2: there is none of"),
        ({"function": "mine.py:sums", "held_out": 5}, "makes 5 tasks, none to train on"),
        ({"function": "mine.py:WRONG"}, "not callable"),
        ({"function": "mine.py:nowhere"}, "has no 'nowhere'"),
    ):
        said = run_cli("validate", write(online, {"task": {"arithmetic": None, "own": table}}, name="bad"))
        assert (said.code, "bad.toml:" in said.err) == (2, True)
        assert said_of in said.err, said.err
    said = run_cli("validate", write(online, {"rollout": {"select": "mine.py:WRONG"}}, name="bad"))
    assert "selects nothing: 7 is not a callable object" in said.err


def test_tasks_of_one_s_own_may_be_records(mine):
    [task] = OwnTasks(function=f"{mine}:records").tasks()
    assert (task.messages, task.answer) == (({"role": "user", "content": "1+1="},), "2")
    assert (task.fields["level"], task.id) == (1, "data:1")


def test_a_curriculum_of_one_s_own_goes_on_where_it_was(run_cli, write, online, mine, tmp_path):
    own = {"function": "mine.py:sums", "options": {"high": 5}}
    task = {"arithmetic": None, "own": own}
    shape = {"groups": 2, "group_size": 2}
    over = {
        "task": task,
        "curriculum": {"kind": "mine.py:HardestFirst"},
        "rollout": shape,
        "eval": {"limit": 0},
    }
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run_cli("train", write(online, over | {"run": {"updates": 4}}), "--run-dir", whole).code == 0
    half = write(online, over | {"run": {"updates": 2}}, name="half")
    assert run_cli("train", half, "--run-dir", halves).code == 0
    said = run_cli("train", write(online, over | {"run": {"updates": 4}}), "--run-dir", halves, "--resume")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in (halves / "metrics.jsonl").read_text().splitlines()]
    assert [line["curriculum/told"] for line in lines if line["update"]] == [2, 4, 6, 8]
    rows = [
        json.loads(line)
        for file in sorted((halves / "samples").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert [row["task"] for row in rows[::2]] == [f"sum-{n}" for n in (4, 3, 2, 1, 0, 4, 3, 2)]
    assert repeatable(whole / "metrics.jsonl") == repeatable(halves / "metrics.jsonl")
    broken = write(online, over | {"curriculum": {"kind": "mine.py:Breaks"}}, name="broken")
    said = run_cli("train", broken, "--run-dir", tmp_path / "broken")
    assert (said.code, "take fails: ZeroDivisionError" in said.err) == (1, True)
    lacking = write(online, over | {"curriculum": {"kind": "mine.py:Forgets"}}, name="lacking")
    said = run_cli("validate", lacking)
    assert (said.code, "has no observe" in said.err) == (2, True)


def test_truth_measures_a_method_of_one_s_own(run_cli, mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    said = run_cli("truth", "mine.py:MY_METHOD")
    assert said.code == 0, said.err
    assert "mine.py:MY_METHOD" in said.out
    assert "biased" in said.out
    said = run_cli("truth", "mine.py:OFFLINE")
    assert said.code == 2
    assert "draws no samples" in said.err
    assert "unknown method 'grpoo'; did you mean 'grpo'?" in run_cli("truth", "grpoo").err


def test_an_edited_file_is_loaded_anew_and_finds_its_own_neighbours(tmp_path):
    for folder, value in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "next_to_it.py").write_text(f"VALUE = {value}\n")
        (tmp_path / folder / "edited.py").write_text("from next_to_it import VALUE\nTEN = 10 * VALUE\n")
    files = [tmp_path / folder / "edited.py" for folder in ("one", "two")]
    assert [path.name for path in imported_files(files[0])] == ["edited.py", "next_to_it.py"]
    assert [load_edited(f"{file}:TEN", "k") for file in files] == [10, 20]
    assert load_edited(f"{files[0]}:TEN", "k") == 10
    edit(files[1], "10 *", "100 *")
    assert load_edited(f"{files[1]}:TEN", "k") == 200
    edit(files[1].with_name("next_to_it.py"), "2", "3")
    assert load_edited(f"{files[1]}:TEN", "k") == 300
    sys.path[:] = [place for place in sys.path if str(tmp_path) not in place]


def test_the_recipe_s_directory_comes_before_the_working_one(write, online, mine, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.py").write_text(MINE.replace("from aside import SLOPE", "SLOPE = 2"))
    (other / "here.py").write_text("from mine import quantile\n")
    monkeypatch.chdir(other)
    for name, folder in (("mine.py:quantile", tmp_path), ("here.py:quantile", other)):
        found = config.read(write(online, {"method": {"credit": name}}))
        assert found.recipe.method["credit"] == f"{folder / name}"


def test_public_names_load_nothing_until_they_are_asked_for():
    code = (
        "import posttrain, sys; print('torch' in sys.modules, bool(posttrain.method), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
    assert posttrain.method("grpo", clip_high=0.3).title == line("grpo").title
    with pytest.raises(AttributeError, match="has no attribute 'methd'"):
        posttrain.methd  # noqa: B018


def test_a_stage_of_a_pipeline_goes_on_with_its_copy(run_cli, write, online, mine, tmp_path):
    write(online, CHOSEN | {"run": {"updates": 2}}, name="stage")
    pipeline = tmp_path / "pipeline.toml"
    pipeline.write_text('[[stage]]\nname = "own"\nrecipe = "stage.toml"\n')
    words = ("train", pipeline, "--run-dir", tmp_path / "made")
    said = run_cli(*words)
    assert said.code == 0, said.err
    [copy] = (tmp_path / "made").glob("*/code/mine.py")
    assert copy.read_text() == MINE
    edit(mine, "-SLOPE", "-3 * SLOPE")
    said = run_cli(*words, "--resume")
    assert said.code == 0, said.err
    assert "is not what it was made with" not in said.err


def test_a_run_is_used_from_another_directory_than_that_it_was_started_in(
    online, write, run_cli, tmp_path, monkeypatch
):
    """Its relative paths are of the first one, where the other has files of the same names."""
    start, other = tmp_path / "start", tmp_path / "other"
    for folder, value in ((start, 1.0), (other, 2.0)):
        folder.mkdir()
        (folder / "rewards.py").write_text(f"def brief(prompt, response, answer):\n    return {value}\n")
    tables = online | {"verifier": {"function": {"function": "rewards.py:brief"}}}
    over = {"rollout": {"select": "all"}, "run": {"updates": 1}}
    monkeypatch.chdir(start)
    ended = run_cli("train", write(tables, over), "--run-dir", "run", "--quiet")
    assert ended.code == 0, ended.err
    monkeypatch.chdir(other)
    exported = run_cli("model", "export", "../start/run", "model")
    assert exported.code == 0, exported.err
    resumed = run_cli("train", "--resume", "--run-dir", "../start/run", "--set", "run.updates=2", "--quiet")
    assert resumed.code == 0, resumed.err
    metrics = map(json.loads, (start / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["reward/mean"] for line in metrics if line["update"]] == [1.0, 1.0]
