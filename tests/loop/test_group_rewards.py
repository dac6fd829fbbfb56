"""Rewards that compare the answers to a task, and several of them: in a run, over its end and its workers."""

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.recipe import config
from posttrain.testing import repeatable

REWARDS = """
def others(prompts, completions, completion_ids, trainer_state, **columns):
    assert all(prompt == prompts[0] for prompt in prompts)
    assert isinstance(completions[0], list) == isinstance(prompts[0], list)
    assert trainer_state.global_step / trainer_state.max_steps <= 1
    said = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [sum(s != other for other in said) / 8 + len(ids) / 1000 + trainer_state.global_step
            + trainer_state.epoch / 100 for s, ids in zip(said, completion_ids)]

def digits(completions, **columns):
    said = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [sum(c.isdigit() for c in s) if s else None for s in said]
"""


@pytest.fixture
def recipe_of(online, able, write, tmp_path):
    """recipe_of(over) -> a recipe with two functions of a group."""

    def make(**over: Any) -> Path:
        code = tmp_path / "group_rewards.py"
        code.write_text(REWARDS)
        functions = [{"function": f"{code}:{name}"} for name in ("others", "digits")]
        tables = {
            "model": {"path": str(able)},
            "task": {"arithmetic": {"low": 2, "high": 4, "held_out": 2}},
            "verifier": {"number": None, "function": functions, "weights": {"digits": 0.5}},
            "rollout": {"groups": 3, "group_size": 4, "workers": 1},
            "sampling": {"temperature": 2.0},
            "run": {"updates": 4},
            "eval": {"every": 2, "limit": 2},
            "checkpoint": {"every": 1},
        }
        return write(config.read(write(online, tables)).tables, over)

    return make


def rows_of(run: Path) -> dict[str, list[dict]]:
    return {
        file.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in sorted((run / "samples").glob("*.jsonl"))
    }


def numbers(run: Path) -> list[dict]:
    return repeatable(run / "metrics.jsonl")


def check(rows: list[dict], step: int, epoch: float) -> None:
    """Each score is what its function gives for the group."""
    for row in rows:
        group = ["".join(r["pieces"]).partition("<|im_end|>")[0] for r in rows if r["group"] == row["group"]]
        own = group[row["sample"]]
        others = sum(own != other for other in group) / 8 + sum(row["sampled"]) / 1000
        others += step + epoch / 100
        assert row["parts"]["others"] == pytest.approx(others)
        digits = sum(c.isdigit() for c in own)
        assert row["parts"].get("digits") == (digits if own else None)
        assert row["score"] == pytest.approx(others + 0.5 * digits)


@pytest.mark.full
def test_answers_are_compared_within_their_group_and_a_resumed_run_is_the_same(run_cli, recipe_of, tmp_path):
    recipe, run, resumed = recipe_of(), tmp_path / "run", tmp_path / "resumed"
    said = run_cli("train", recipe, "--run-dir", run, "--quiet")
    assert said.code == 0, said.err
    rows = rows_of(run)
    tasks = 6  # of nine, two are held out, and one that is the same sum as one of these
    for update in range(4):
        trained = rows[f"{update + 1:06d}.jsonl"]
        assert len(trained) == 12
        check(trained, update, 3 * update / tasks)
    check(rows["eval_000002.jsonl"], 2, 6 / tasks)
    assert len({row["parts"]["others"] % 1 for row in rows["000001.jsonl"]}) > 1
    assert numbers(run)[-1]["part/others"] > 3

    words = ("train", recipe_of(rollout={"workers": 3}), "--run-dir", resumed, "--quiet")
    assert run_cli(*words, "--set", "run.updates=2").code == 0
    assert run_cli(*words, "--resume").code == 0
    assert rows_of(resumed) == {name: rows[name] for name in rows if name in rows_of(resumed)}
    assert rows_of(resumed).keys() == rows.keys()
    assert numbers(resumed)[-2:] == numbers(run)[-2:]
    weights = [d / "checkpoints" / "step_000004" / "model" / "model.safetensors" for d in (run, resumed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
