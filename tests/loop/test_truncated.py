"""rollout.mask_truncated: answers that were cut off are trained on as if they had not been drawn."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from posttrain.loop import build
from posttrain.plan.plan import plan_run
from posttrain.recipe import config

CUT = ("length", "context")
REWARD = "def reward(response):\n    return len(set(response)) / 4\n"


@pytest.fixture
def recipe_of(online, able, write, tmp_path):
    """recipe_of(over) -> a recipe whose answers are cut off now and then."""

    def make(**over):
        code = tmp_path / "letters.py"
        code.write_text(REWARD)
        tables = {
            "model": {"path": str(able)},
            "task": {"arithmetic": {"low": 2, "high": 4, "held_out": 2}},
            "verifier": {"number": None, "function": {"function": f"{code}:reward"}},
            "rollout": {"groups": 5, "group_size": 8, "mask_truncated": True},
            "sampling": {"temperature": 2.0, "max_new_tokens": 2},
            "run": {"updates": 1},
            "eval": {"limit": 0},
        }
        return write(config.read(write(online, tables)).tables, over)

    return make


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples" / "000001.jsonl").read_text().splitlines()]


def metrics_of(run: Path) -> dict[str, float]:
    line: dict[str, float] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return line


def test_an_update_is_that_of_the_answers_that_ended(run_cli, recipe_of, tmp_path, updates):
    for seed in range(10):  # draws differ between processors, and a group of one answer that ended is dropped
        recipe, run = recipe_of(run={"updates": 1, "seed": seed}), tmp_path / f"run{seed}"
        updates.clear()
        said = run_cli("train", recipe, "--run-dir", run, "--quiet")
        assert said.code == 0, said.err
        rows, metrics = rows_of(run), metrics_of(run)
        ended = [r for r in rows if r["stop"] not in CUT]
        if len(ended) < len(rows) == 40:
            break
    assert 0 < len(ended) < len(rows) == 40
    assert metrics["select/truncated"] == len(rows) - len(ended)
    assert metrics["length/clipped"] == pytest.approx(1 - len(ended) / 40)
    assert metrics["reward/mean"] == pytest.approx(math.fsum(r["score"] for r in rows) / 40), "they count"

    # The advantage of an answer is that among the answers to its task that ended.
    groups = defaultdict(list)
    for r in ended:
        groups[r["group"]].append(r["score"])
    assert any(len(group) < 8 for group in groups.values())
    for r in rows:
        if r["stop"] in CUT:
            assert "advantage" not in r
            continue
        scores = groups[r["group"]]
        mean = math.fsum(scores) / len(scores)
        sigma = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / len(scores))
        assert r["advantage"][0] == pytest.approx((r["score"] - mean) / (sigma + 1e-6), abs=2e-3)

    # A learner that gets these rows alone finds the same gradient, so the divisor counts no other.
    [(batch, norm)] = updates
    assert batch.reward.sum(1).tolist() == pytest.approx([r["score"] for r in ended])
    assert batch.group.tolist() == [r["group"] for r in ended]
    chosen = plan_run(config.read(recipe).recipe, print)
    assert build.build_learner(chosen, {}).update(batch).metrics["grad_norm"] == norm > 0


@pytest.mark.full
def test_without_the_key_every_answer_is_trained(run_cli, recipe_of, tmp_path):
    run = tmp_path / "run"
    said = run_cli("train", recipe_of(rollout={"mask_truncated": False}), "--run-dir", run, "--quiet")
    assert said.code == 0, said.err
    assert all("advantage" in r for r in rows_of(run))
    assert "select/truncated" not in metrics_of(run)


def test_where_all_are_cut_off_nothing_is_trained_and_the_run_says_why(run_cli, recipe_of, tmp_path, tiny):
    run = tmp_path / "run"
    over = {"model": {"path": str(tiny)}, "sampling": {"max_new_tokens": 1, "temperature": 0.0001}}
    recipe = recipe_of(**over, run={"updates": 4}, rollout={"groups": 1, "max_error_rate": 0.0})
    said = run_cli("train", recipe, "--run-dir", run, "--quiet")
    assert said.code == 1
    [line] = said.err.splitlines()
    assert "no group was kept in 3 updates in a row" in line
    assert "too few answers ended before they were cut off (sampling.max_new_tokens)" in line
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    assert [metrics["select/truncated"] for metrics in lines] == [8, 8, 8]
    assert all(metrics["step"] == 0 and "loss" not in metrics for metrics in lines)
    assert not any(math.isnan(x) for metrics in lines for x in metrics.values())
