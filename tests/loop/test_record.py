"""The record of samples: how much of an update it holds, and that it is there when it must be."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from posttrain.run import samples
from posttrain.run.rundir import RunDir
from posttrain.run.samples import draw_groups
from posttrain.types import Episode, RunError, Task, Trajectory, Verdict


def group(*lengths: int) -> list[Episode]:
    """Answers of so many tokens to one question of one."""
    return [
        Episode(
            task=Task(id="q", messages=()),
            sample=k,
            response="",
            stop="eos",
            turns=1,
            verdict=Verdict(score=1.0, label="right"),
            trajectory=Trajectory(
                tokens=[1] * (1 + n),
                sampled=[False, *[True] * n],
                logp_gen=[0.0] * (1 + n),
                logp_policy=[0.0] * (1 + n),
                version=[0] * (1 + n),
                reward=[0.0] * (1 + n),
            ),
        )
        for k, n in enumerate(lengths)
    ]


GROUPS = [group(4, 4) for _ in range(30)]


def test_a_small_update_is_kept_whole_and_of_a_large_one_a_share_of_its_groups() -> None:
    for bound in (0, 300, 10**9):
        assert draw_groups(GROUPS, bound, "1") == list(range(30))
    chosen = draw_groups(GROUPS, 299, "1")
    assert len(chosen) == 29
    few = draw_groups(GROUPS, 100, "1")
    assert len(few) == 10
    assert few == sorted(set(few))
    assert set(few) < set(chosen), "a larger share holds a smaller one"
    assert draw_groups(GROUPS, 100, "1") == few, "they depend on the key alone"
    assert draw_groups(GROUPS, 100, "2") != few
    assert len(draw_groups(GROUPS, 1, "1")) == 1
    assert draw_groups([], 1, "1") == []


def test_a_long_group_is_as_likely_as_a_short_one() -> None:
    groups = [group(2, 2), group(200, 300), *[group(4, 4) for _ in range(8)]]
    counts = Counter(n for key in range(500) for n in draw_groups(groups, 300, str(key)))
    assert set(counts) == set(range(10))
    assert min(counts.values()) > 0.7 * max(counts.values())


def rows(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples" / f"{name}.jsonl").read_text().splitlines()]


def test_what_is_recorded_changes_nothing_that_is_learnt(run_cli, online, write, tmp_path):
    over = {"run": {"updates": 3}, "rollout": {"groups": 6}, "eval": {"limit": 4}}
    runs = {}
    for name, tokens in (("all", 0), ("few", 40), ("default", None)):
        more = over if tokens is None else over | {"record": {"tokens": tokens}}
        said = run_cli("train", write(online, more, name), "--run-dir", tmp_path / name, "--quiet")
        assert said.code == 0, said.err
        runs[name] = tmp_path / name
    weights = [(r / "checkpoints/step_000003/model/model.safetensors").read_bytes() for r in runs.values()]
    assert weights[0] == weights[1] == weights[2]
    for file in ("000001", "000002", "000003", "eval_000000", "eval_000003"):
        whole, few = rows(runs["all"], file), rows(runs["few"], file)
        assert rows(runs["default"], file) == whole, "a small run is kept whole"
        assert 0 < len(few) < len(whole)
        groups = {row["group"] for row in few}
        assert few == [row for row in whole if row["group"] in groups], "whole groups, under their numbers"
    asked = [{row["task"] for row in rows(runs["few"], f"eval_00000{n}")} for n in (0, 3)]
    assert asked[0] == asked[1], "the same questions each time"


def test_they_are_written_beside_the_loop_and_are_there_before_a_checkpoint(tmp_path):
    run, go_on = RunDir(tmp_path / "run", resume=False), Event()

    def slowly() -> Iterator[dict[str, int]]:
        go_on.wait()
        yield {"a": 1}

    file = run.path / "samples" / "000001.jsonl"
    with run.recording():
        run.samples("000001", slowly())
        assert not file.exists(), "nobody waits for them"
        go_on.set()
        run.wait()
        assert file.read_text() == '{"a": 1}\n'
        run.samples("000002", [])
    assert (run.path / "samples" / "000002.jsonl").read_text() == ""
    with contextlib.suppress(RuntimeError), run.recording():
        run.samples("000003", [{"a": 2}])
        raise RuntimeError("the run has to stop")
    assert (run.path / "samples" / "000003.jsonl").exists(), "whatever ends it"
    run.close()


def test_a_disk_that_refuses_them_stops_the_run(tmp_path):
    run = RunDir(tmp_path / "run", resume=False)
    (run.path / "samples").write_text("a file in their place")
    with pytest.raises(RunError, match=r"^write rollouts: "), run.recording():
        run.samples("000001", [{"a": 1}])
    run.close()


def test_numbers_have_five_decimals() -> None:
    values = torch.tensor([-0.123456789, 1 / 3, -104.5, 1e-9, 3.0])
    assert json.dumps(samples._rounded(values)) == "[-0.12346, 0.33333, -104.5, 0.0, 3.0]"
    assert samples._rounded([0.1, 0]) == [0.1, 0.0]
