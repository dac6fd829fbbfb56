"""posttrain sweep: every combination and seed is a run, and what is unfinished is made."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from posttrain.base.toml import dump
from posttrain.commands import sweep as command
from posttrain.pipeline import sweep as sweeps
from posttrain.report.sweep import check_metric
from posttrain.types import UserError


@pytest.fixture
def recipe(offline, write) -> Path:
    return write(offline, {"run": {"updates": 2}, "eval": {"every": 1}}, name="sums")


def test_every_combination_of_values_is_read(recipe: Path) -> None:
    sets = ["optim.lr=1e-3, 3e-3", 'optim.schedule="linear","cosine"', "run.updates=3"]
    sweep = sweeps.read(recipe, sets, 2)
    assert [one.label for one in sweep.combinations] == [
        'lr=1e-3, schedule="linear"',
        'lr=1e-3, schedule="cosine"',
        'lr=3e-3, schedule="linear"',
        'lr=3e-3, schedule="cosine"',
    ]
    assert [one.loaded.recipe.optim.lr for one in sweep.combinations] == [1e-3, 1e-3, 3e-3, 3e-3]
    assert {one.loaded.recipe.run.updates for one in sweep.combinations} == {3}
    names = [run.name for run in sweep.runs(recipe.parent)]
    assert len(set(names)) == 8
    assert names[0] == "01-lr=1e-3,schedule=-linear-,seed=0"
    assert sweep.combinations[2].with_seed(1)["run"]["seed"] == 1


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["optim.lr=1e-3,"], "--set optim.lr=1e-3,"),
        (["optim.lr=1e-3,0.001"], "--set optim.lr=1e-3,0.001"),
        (["optim.lr=1,2", "optim.lr=3,4"], "--set optim.lr=3,4"),
        (["run.seed=1,2"], "--set run.seed=1,2"),
        (["optim.lrr=1,2"], "optim.lrr=1"),
        (["optim.lr=1e-3,much"], "optim.lr=much"),
    ],
)
def test_a_mistake_in_the_values_is_named(recipe: Path, sets: list[str], key: str) -> None:
    with pytest.raises(UserError) as error:
        sweeps.read(recipe, sets, 3)
    assert error.value.key.startswith(key)


def test_a_combination_that_cannot_run_is_refused_before_the_first(
    run_cli, recipe: Path, tmp_path: Path
) -> None:
    missing = f"task.held_out.path={tmp_path / 'none.jsonl'}"
    out = tmp_path / "sweep"
    refused = run_cli("sweep", recipe, "--set", "batch.batch_size=8,1000000", "--set", missing, "--out", out)
    assert refused.code == 2, refused.err
    assert not out.exists()
    assert run_cli("sweep").code == 2
    assert run_cli("sweep", "--resume", tmp_path / "nothing").code == 2


def test_finished_runs_are_compared_and_not_made_again(run_cli, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    sweep = sweeps.read(recipe, ["optim.lr=1e-4,1e-2"], 3)
    out.mkdir()
    sweeps.save(sweep, out)
    for one in sweep.runs(out):
        one.recipe.write_text(dump(one.combination.with_seed(one.seed)))
        assert run_cli("train", one.recipe, "--run-dir", one.directory, "--quiet").code == 0
    words = ["sweep", recipe, "--set", "optim.lr=1e-4,1e-2", "--out", out]
    result = run_cli(*words, "--json")
    assert result.code == 0, result.err
    first, second = result.json["combinations"]
    assert (result.json["metric"], result.json["best"]) == ("eval/loss", second["name"])
    assert {run["state"] for run in result.json["runs"]} == {"finished"}
    assert first["against"]["real"] is True
    assert first["low"] < first["mean"] < first["high"]
    lines = [
        json.loads(line) for line in (out / f"{first['name']},seed=1/metrics.jsonl").read_text().splitlines()
    ]
    assert first["values"]["1"] == [line["eval/loss"] for line in lines if "eval/loss" in line][-1]
    assert result.json["measured"] == "the last evaluation of each run, lower is better"
    page = (out / "sweep.html").read_text()
    assert all(text in page for text in ("sums: a sweep", "lr=1e-4", "lr=1e-2"))
    printed = run_cli("sweep", "--resume", out, "--metric", "entropy")
    assert printed.code == 0
    assert "entropy, at the end of each run" in printed.out
    unknown = run_cli("sweep", "--resume", out, "--metric", "entropie")
    assert (unknown.code, unknown.out) == (2, "")
    for other in (["--set", "optim.lr=1e-4,2e-2"], ["--set", "optim.lr=1e-4,1e-2,1"]):
        assert "holds another sweep" in run_cli("sweep", recipe, *other, "--out", out).err
    assert run_cli("sweep", "--resume", out, "--seeds", 2).code == 2


def test_the_disk_is_checked_for_all_runs(recipe: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    sweep = sweeps.read(recipe, ["optim.lr=1e-4,1.0"], 3)
    sweeps.check(sweep, tmp_path, lines.append, lambda count: None)
    [line] = lines
    assert line.startswith("the runs write at most ")


def evaluated(sweep: sweeps.Sweep, root: Path, metric: str, values: dict[str, list[list[float]]]) -> None:
    """Write finished runs: by label the evaluations of each seed, before training and after each update."""
    for one in sweep.runs(root):
        one.directory.mkdir(parents=True)
        (one.directory / "config.toml").write_text(dump(one.combination.with_seed(one.seed)))
        rows = enumerate(values[one.combination.label][one.seed])
        lines = [json.dumps({"update": update, metric: value}) for update, value in rows]
        (one.directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def compared(sweep: sweeps.Sweep, root: Path, metric: str = "") -> dict[str, Any]:
    return sweeps.report(sweep, root, {one.name: ("finished", "") for one in sweep.runs(root)}, metric)


def test_a_sweep_compares_ends_so_that_damage_shows(recipe: Path, tmp_path: Path) -> None:
    sweep = sweeps.read(recipe, ["optim.lr=1e-4,1.0"], 3)
    values = {
        "lr=1e-4": [[0.3, 0.95], [0.3, 0.5], [0.3, 1.0]],
        "lr=1.0": [[0.3, 0.1], [0.3, 0.0], [0.3, 0.0]],
    }
    evaluated(sweep, tmp_path / "sweep", "eval/accuracy", values)
    result = compared(sweep, tmp_path / "sweep")
    mild, damaged = result["combinations"]
    assert result["measured"] == "the last evaluation of each run"
    assert damaged["values"] == {0: 0.1, 1: 0.0, 2: 0.0}
    assert result["best"] == mild["name"]
    # Student's t of three seeds passes 0 % and 100 %.
    assert (damaged["low"], mild["high"], damaged["against"]["low"]) == (0.0, 1.0, -1.0)


def test_a_tie_of_the_best_means_is_said(capsys, recipe: Path, tmp_path: Path) -> None:
    sweep, out = sweeps.read(recipe, ["optim.lr=1e-4,1e-2,1.0"], 3), tmp_path / "sweep"
    one, other = [[0.5], [0.75], [1.0]], [[1.0], [0.5], [0.75]]
    values = {"lr=1e-4": one, "lr=1e-2": other, "lr=1.0": [[0.0], [0.25], [0.25]]}
    evaluated(sweep, out, "eval/accuracy", values)
    result = compared(sweep, out)
    assert result["best"] is None
    assert result["says"][0] == "No best: lr=1e-4; lr=1e-2 are tied."
    assert result["says"][1].startswith("lr=1e-4 is better, beyond chance of seeds, than lr=1.0")
    command._print(result)
    printed = capsys.readouterr().out
    assert "the best mean" not in printed
    verdicts = [line.split()[-2] for line in printed.splitlines() if line.startswith("│ lr=")]
    assert verdicts == ["tied", "tied", "real"]


@pytest.mark.parametrize(
    ("metric", "name", "lowest_is_best"),
    [
        ("eval/perplexity", "eval/perplexity", True),
        ("eval/bits_per_byte", "eval/bits_per_byte", True),
        ("max eval/perplexity", "eval/perplexity", False),
        ("min eval/length", "eval/length", True),
        ("eval/length", "eval/length", False),
    ],
)
def test_a_metric_has_its_direction_or_that_of_min_and_max(
    recipe: Path, tmp_path: Path, metric: str, name: str, lowest_is_best: bool
) -> None:
    sweep = sweeps.read(recipe, ["optim.lr=1e-4,1.0"], 1)
    evaluated(sweep, tmp_path / "sweep", name, {"lr=1e-4": [[9.0, 2.0]], "lr=1.0": [[9.0, 3.0]]})
    check_metric(metric)
    result = compared(sweep, tmp_path / "sweep", metric)
    assert result["metric"] == name
    assert result["best"] == result["combinations"][not lowest_is_best]["name"]
    assert result["measured"].endswith("lower is better") == lowest_is_best
    with pytest.raises(UserError, match=f"there is no metric 'mean {name}'"):
        check_metric(f"mean {name}")


@pytest.mark.full
def test_a_failed_run_is_a_line_and_more_seeds_are_added(run_cli, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    made = run_cli("sweep", recipe, "--set", "optim.lr=1e-2,1e6", "--seeds", 1, "--out", out)
    assert made.code == 0, made.err
    assert "1 of 2 runs: failed" in made.out
    assert "02-lr=1e6,seed=0 failed: optimiser step" in made.out
    before = (out / "01-lr=1e-2,seed=0/metrics.jsonl").read_bytes()
    more = run_cli("sweep", "--resume", out, "--seeds", 2, "--json")
    assert [run["state"] for run in more.json["runs"]] == ["finished", "failed"] * 2
    assert (out / "01-lr=1e-2,seed=0/metrics.jsonl").read_bytes() == before


@pytest.mark.full
def test_an_interrupted_sweep_goes_on_bit_for_bit(run_cli, offline, write, tmp_path: Path) -> None:
    recipe = write(offline, {"run": {"updates": 60}, "checkpoint": {"every": 60}}, name="sums")
    command = [sys.executable, "-m", "posttrain", "sweep", recipe, "--seeds", "1", "--out"]
    child = subprocess.Popen(
        [*command, tmp_path / "cut"], stderr=subprocess.PIPE, text=True, env={**os.environ}, cwd=tmp_path
    )
    metrics = tmp_path / "cut" / "01-the-recipe,seed=0" / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 1, errors
    assert f"go on with posttrain sweep --resume {tmp_path / 'cut'}" in errors
    assert len(metrics.read_text().splitlines()) < 60
    assert json.loads((tmp_path / "cut" / "sweep.json").read_text())["runs"][0]["state"] == "stopped"
    assert run_cli("sweep", "--resume", tmp_path / "cut").code == 0
    assert run_cli("sweep", recipe, "--seeds", 1, "--out", tmp_path / "whole").code == 0
    cut, whole = (
        load_file(tmp_path / name / "01-the-recipe,seed=0/checkpoints/step_000060/model/model.safetensors")
        for name in ("cut", "whole")
    )
    assert cut.keys() == whole.keys()
    assert all((cut[name] == whole[name]).all() for name in cut)
