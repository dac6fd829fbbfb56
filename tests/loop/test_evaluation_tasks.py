"""[[eval.task]]: tasks that a run of any method answers, by name, and several answers to each."""

import json
import statistics
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.api.answering import evaluate_recipe
from posttrain.base.toml import dump
from posttrain.math.coverage import coverage
from posttrain.models import checkpoint
from posttrain.plan.resolve import resolve_recipe
from posttrain.recipe import config
from posttrain.recipe.target import target_of
from posttrain.report.record import read, read_json_lines

SUMS = {"name": "sums", "arithmetic": {"low": 2, "high": 9, "held_out": 5, "template": "{a}+{b}="}}
GAME = {"name": "game", "guess": {"high": 4}, "games": {"train": 1, "held_out": 3}}


@pytest.fixture
def train(run_cli: Callable[..., Any], write: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """train(tables, name) -> the run directory."""

    def run(tables: dict[str, Any], name: str, *words: object) -> Path:
        run_dir = tmp_path / f"{name}-run"
        said = run_cli("train", write(tables, name=name), "--run-dir", run_dir, "--quiet", *words)
        assert said.code == 0, said.err
        return run_dir

    return run


def weights(run: Path) -> bytes:
    last, _ = checkpoint.newest(run / "checkpoints")
    assert last is not None
    return (last / "model" / "model.safetensors").read_bytes()


def asked(tables: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return a recipe that also answers sums and plays a game every two updates."""
    own = {"verifier": {"number": {"where": "last"}}, "max_new_tokens": 3}
    return tables | {"eval": {"every": 2, "task": [SUMS | own, GAME], **settings}}


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.sample("dpo")
def test_a_run_that_learns_from_data_answers_tasks_and_learns_the_same(method, offline, train, tmp_path):
    file = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": "9"} for n in range(6)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"task": {"data": {"path": str(file)}}, "method": {"name": method}, "batch": {"batch_size": 3}}
    tables = offline | data
    without, run = train(tables, "without"), train(asked(tables), "run")
    assert weights(run) == weights(without)
    series = read(run).metrics.series
    assert list(series["eval/sums/accuracy"]) == [0, 2, 4]
    assert "eval/accuracy" not in series
    assert {"eval/game/accuracy", "eval/game/reward"} <= series.keys()
    # The last evaluation is that of the weights that were saved: the same recipe measures it again.
    again = evaluate_recipe(target_of(write_online(run, tmp_path)).recipe, None, lambda line: None)
    assert again["eval/sums/accuracy"] == series["eval/sums/accuracy"][4]
    assert again["eval/sums/reward"] == series["eval/sums/reward"][4]


def write_online(run: Path, folder: Path) -> Path:
    """Write a recipe of an online method with the last weights of a run and its [[eval.task]]."""
    tables = json.loads(json.dumps(tomllib.loads((run / "config.toml").read_text())))
    last, _ = checkpoint.newest(run / "checkpoints")
    tables |= {
        "method": {"name": "grpo"},
        "model": tables["model"] | {"path": str(last / "model")},
        "task": {k: v for k, v in SUMS.items() if k != "name"},
        "verifier": {"number": {}},
    }
    for name in ("batch", "checkpoint", "optim", "run"):
        tables.pop(name, None)
    file = folder / "again.toml"
    file.write_text(dump(tables))
    return file


def test_an_online_run_measures_them_apart_from_its_own_held_out_tasks(online, train):
    plain, run = train(online, "plain"), train(asked(online), "run")
    assert weights(run) == weights(plain)
    series, before = read(run).metrics.series, read(plain).metrics.series
    for update in (0, 4):
        assert series["eval/accuracy"][update] == before["eval/accuracy"][update]
        assert series["eval/reward"][update] == before["eval/reward"][update]
    assert list(series["eval/sums/accuracy"]) == [0, 2, 4]
    assert not [name for name in series if name.startswith("task/")]


def test_several_answers_give_their_mean_and_unbiased_pass_at_k(online, train):
    settings = {"samples": 4, "temperature": 1.0, "limit": 6}
    run = train(
        online | {"eval": settings, "run": {"updates": 1, "threads": 1}, "record": {"tokens": 0}}, "run"
    )
    lines, _ = read_json_lines(run / "samples" / "eval_000001.jsonl")
    groups: dict[int, list[bool]] = {}
    for line in lines:
        groups.setdefault(line["group"], []).append(line["label"] == "right")
    assert {len(group) for group in groups.values()} == {4}
    metrics = {name: points[1] for name, points in read(run).metrics.series.items() if 1 in points}
    assert metrics["eval/accuracy"] == statistics.fmean(x for group in groups.values() for x in group)
    for k in (1, 2, 4):
        expected = statistics.fmean(coverage(sum(group), 4, k) for group in groups.values())
        assert metrics[f"eval/pass@{k}"] == pytest.approx(expected)


def test_a_fault_names_the_table(offline, write, run_cli):
    tables = asked(offline)
    tables["eval"]["task"][1] = {"name": "x", "data": {"path": "no.jsonl"}}
    said = run_cli("validate", write(tables))
    assert said.code == 2
    assert "eval.task.1.verifier: no verifier or environment is configured" in said.err


def test_a_suite_is_asked_by_name(offline, train, tmp_path, write, run_cli):
    problems = tmp_path / "gsm8k.jsonl"
    lines = [{"question": f"What is {n} + 1?", "answer": f"It is so.\n#### {n + 1}"} for n in range(3)]
    problems.write_text("".join(json.dumps(line) + "\n" for line in lines))
    suite = {"name": "gsm8k", "suite": {"name": "gsm8k", "path": str(problems)}, "max_new_tokens": 3}
    run = train(offline | {"eval": {"task": [suite]}, "run": {"updates": 1, "threads": 1}}, "run")
    assert set(read(run).metrics.series["eval/gsm8k/accuracy"]) == {0, 1}
    for name, fix in (("gsm8k_5shot", "posttrain eval RUN --suite gsm8k_5shot"), ("gsm9k", "did you mean")):
        wrong = suite | {"suite": {"name": name}}
        said = run_cli("validate", write(offline | {"eval": {"task": [wrong]}}))
        assert said.code == 2
        assert "eval.task.0.suite.name" in said.err
        assert fix in said.err
    online = {name: table for name, table in offline.items() if name != "batch"}
    said = run_cli("validate", write(online | {"method": {"name": "grpo"}, "task": suite}))
    assert "there are no tasks to train on" in said.err


@pytest.mark.parametrize(
    "over",
    [
        {"method": {"name": "reinforce"}, "rollout": {"groups": 2, "group_size": 1}},
        {"method": {"name": "impala"}, "async": {"max_lag": 2}},
        {"method": {"name": "ppo"}, "rollout": {"groups": 2, "group_size": 1}},
    ],
    ids=lambda over: over["method"]["name"],
)
def test_rules_of_training_are_not_those_of_evaluation_tasks(over, online, write):
    recipe = config.read(write(asked(online | over))).recipe
    assert [part.name for part in resolve_recipe(recipe).evaluated] == ["sums", "game"]


def test_an_offline_run_reads_the_limits_of_workers(offline, write, run_cli):
    tables = asked(offline) | {"rollout": {"workers": 1, "deadline_s": 3.0}}
    assert resolve_recipe(config.read(write(tables)).recipe).evaluated[0].recipe.rollout.deadline_s == 3.0


def test_tasks_of_data_alone_may_skip_what_cannot_be_shown(online, write, run_cli, tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text(
        json.dumps({"prompt": "1+1=", "answer": "2"})
        + "\n"
        + json.dumps({"prompt": "1" * 900, "answer": "2"})
        + "\n"
    )
    source = {"name": "own", "data": {"path": str(file), "bad": "skip"}, "verifier": {"number": {}}}
    said = run_cli("validate", write(online | {"eval": {"task": [source]}}))
    assert said.code == 0, said.err


@pytest.mark.parametrize("key", ["weight", "epochs"])
def test_keys_of_training_are_refused(key, offline, write, run_cli):
    said = run_cli("validate", write(offline | {"eval": {"task": [SUMS | {key: 7.0}]}}))
    assert said.code == 2
    assert "never read" in said.err
