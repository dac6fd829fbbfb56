"""Promise 6: a verifier that breaks is masked and counted; it is never a reward of 0."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from posttrain.loop import build
from posttrain.plan.plan import plan_run
from posttrain.recipe import config

REWARDS = """
import math, os, time

WAYS = (
    lambda: 1 / 0,
    lambda: time.sleep(60),
    lambda: os._exit(7),
    lambda: [0.5],
)

def way(prompt):
    first, second = (int(c) - 2 for c in prompt if c.isdigit())
    return 3 * first + second

def entry(response):
    return (math.nan, None, 1.0, 2.0)[sum(map(ord, response)) % 4]

def rewards(prompts, completions, **columns):
    chosen = way(prompts[0])
    if chosen < len(WAYS) and completions[0]:
        return WAYS[chosen]()
    return [entry(said) if said else 1.0 for said in completions]

def one(prompt, response):
    if sum(map(ord, response)) % 2 and response:
        raise KeyError("unit")
    return 1.0
"""
WHOLE = ("raised", "timeout", "died", "wrong_length")
"""Labels of the ways in which it breaks on a whole group."""
ENTRIES = (("not_a_number", "nan"), ("not_applicable", "None"))
"""Label and part of the reason of each way in which it breaks on one response."""


def expected(answer: str) -> tuple[float | None, str, str]:
    """Score, label and part of the reason."""
    entry = sum(map(ord, answer)) % 4
    if not answer or entry >= len(ENTRIES):
        return (float(entry - 1) if answer else 1.0, "scored", "")
    return (None, *ENTRIES[entry])


@pytest.fixture
def recipe_of(online, able, write, tmp_path):
    """recipe_of(function, over) -> a recipe whose rewards come from that function of the file above."""

    def make(function: str, **over):
        code = tmp_path / "broken_rewards.py"
        code.write_text(REWARDS)
        tables = {
            "model": {"path": str(able)},
            "task": {"arithmetic": {"low": 2, "high": 4, "held_out": 2}},
            "verifier": {"number": None, "function": {"function": f"{code}:{function}"}},
            "rollout": {"groups": 5, "group_size": 8, "deadline_s": 3.0, "max_error_rate": 1.0},
            "sampling": {"temperature": 2.0},
            "run": {"updates": 1},
            "eval": {"limit": 0},
        }
        return write(config.read(write(online, tables)).tables, over)

    return make


def rows_of(run: Path, update: int = 1) -> list[dict]:
    return [json.loads(line) for line in (run / "samples" / f"{update:06d}.jsonl").read_text().splitlines()]


def metrics_of(run: Path) -> dict:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


def test_what_breaks_is_masked_counted_and_leaves_the_gradient_of_the_others(
    run_cli, recipe_of, tmp_path, updates
):
    # A group has the deadlines of its eight answers.
    whole = {"rollout": {"groups": 9, "deadline_s": 0.5}, "task": {"arithmetic": {"held_out": 0}}}
    recipe, run = recipe_of("rewards", **whole), tmp_path / "run"
    said = run_cli("train", recipe, "--run-dir", run, "--quiet")
    assert said.code == 0, said.err

    rows, metrics = rows_of(run), metrics_of(run)
    assert metrics["select/dropped"] == len(WHOLE)
    for label in WHOLE:
        assert metrics[f"verdict/{label}"] == 8 / 72
    assert len(rows) == 72 - 8 * len(WHOLE)
    for row in rows:
        answer = "".join(row["pieces"]).partition("<|im_end|>")[0]
        score, label, reason = expected(answer)
        assert (row["score"], row["label"]) == (score, label)
        assert reason in row["reason"]
        assert ("advantage" in row) is (score is not None)
    labels = {label for label, _ in ENTRIES} | {"scored"}
    assert {row["label"] for row in rows} == labels, "the test needs answers on which it breaks in every way"
    judged = [r for r in rows if r["score"] is not None]
    for label in labels:
        assert metrics[f"verdict/{label}"] == sum(r["label"] == label for r in rows) / 72
    assert metrics["reward/mean"] == pytest.approx(sum(r["score"] for r in judged) / len(judged))

    # The batch that was trained has the judged rows and no other, and a learner that is given these alone
    # finds the same gradient.
    [(batch, norm)] = updates
    assert batch.reward.sum(1).tolist() == [r["score"] for r in judged]
    assert batch.group.tolist() == [r["group"] for r in judged]
    chosen = plan_run(config.read(recipe).recipe, print)
    assert build.build_learner(chosen, {}).update(batch).metrics["grad_norm"] == norm > 0
    # With one that broke put in as a 0 it is another one.
    as_zero = replace(batch, reward=batch.reward.clone())
    as_zero.reward[0] = 0.0
    assert build.build_learner(chosen, {}).update(as_zero).metrics["grad_norm"] != norm


def test_above_the_rate_the_run_stops_with_the_first_cause_and_keeps_what_it_had(
    run_cli, recipe_of, tmp_path
):
    run = tmp_path / "run"
    recipe = recipe_of("one", rollout={"max_error_rate": 0.05}, run={"updates": 6})
    said = run_cli("train", recipe, "--run-dir", run, "--quiet")
    assert said.code == 1
    [line] = said.err.splitlines()
    assert line.startswith("error: ")
    assert "rollout.max_error_rate" in line
    assert "first cause: raised: KeyError: 'unit'" in line
    assert (run / "report.html").exists()
    share = [float(word) for word in line.replace("%", "").split() if word.isdigit()]
    failed, judged = share[0], share[1]
    assert failed / judged > 0.05
    assert judged >= 16
    again = run_cli("train", recipe, "--run-dir", run, "--quiet", "--resume")
    assert (again.code, again.err) == (1, said.err), "a resumed run meets the same end"


def test_a_function_that_breaks_on_everything_never_trains_on_anything(run_cli, recipe_of, tmp_path, tiny):
    code = tmp_path / "always.py"
    code.write_text("def reward(response):\n    return 0.0 if not response else None\n")
    function = {"function": {"function": f"{code}:reward"}}
    over = {"verifier": function, "run": {"updates": 3}, "model": {"path": str(tiny)}}
    run = tmp_path / "run"
    said = run_cli("train", recipe_of("one", **over), "--run-dir", run, "--quiet")
    assert said.code == 1
    assert "no group was kept in 3 updates in a row" in said.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3], "the last one shows why too"
    assert all(line["verdict/not_a_number"] > 0.9 and line["tokens"] == 0 for line in lines)
    assert all(line["step"] == 0 for line in lines)
    # A mean over nothing is not there, rather than 0.
    assert not any("reward/mean" in line for line in lines if line["verdict/not_a_number"] == 1.0)


@pytest.mark.parametrize(("updates", "made"), [(1, "1 update"), (2, "2 updates")])
@pytest.mark.sample("1-*")
def test_a_run_that_trained_nothing_fails_however_short(run_cli, recipe_of, tmp_path, updates, made):
    code = tmp_path / "always.py"
    code.write_text("def reward(response):\n    return 0.0 if not response else 1 / 0\n")
    over = {
        "verifier": {"function": {"function": f"{code}:reward"}},
        "rollout": {"groups": 1, "group_size": 4},
        "run": {"updates": updates},
    }
    run = tmp_path / "run"
    said = run_cli("train", recipe_of("one", **over), "--run-dir", run, "--quiet")
    assert said.code == 1
    [line] = said.err.splitlines()
    assert f"train {made}: nothing was trained: none of the last {4 * updates} episodes" in line
    assert "first cause: raised: ZeroDivisionError" in line
    again = run_cli("train", run / "config.toml", "--run-dir", run, "--quiet", "--resume")
    assert again.code == 1


def test_a_run_whose_rewards_are_all_equal_is_told_what_is_not_refused(
    run_cli, online, able, write, tmp_path
):
    over = {
        "model": {"path": str(able)},
        "task": {"arithmetic": {"low": 5, "high": 9, "held_out": 3, "template": "{a}+{b}="}},
        "sampling": {"max_new_tokens": 1},
        "rollout": {"groups": 1, "group_size": 2, "select": "varied", "max_rounds": 1},
        "eval": {"limit": 0},
        "run": {"updates": 1},
    }
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.err.endswith("or set rollout.select to 'all' and leave rollout.max_rounds out\n")


@pytest.mark.full
def test_an_update_that_keeps_nothing_goes_on_with_the_next(run_cli, recipe_of, tmp_path):
    # Every answer of a group of two is broken in some groups; those groups alone are left out.
    run = tmp_path / "run"
    recipe = recipe_of("one", rollout={"group_size": 2, "groups": 8})
    assert run_cli("train", recipe, "--run-dir", run, "--quiet").code == 0
    metrics = metrics_of(run)
    assert metrics["select/dropped"] >= 1
    assert metrics["select/kept"] + metrics["select/dropped"] == 8
    kept = {r["group"] for r in rows_of(run)}
    assert len(kept) == metrics["select/kept"]
    assert math.isfinite(metrics["grad_norm"])
