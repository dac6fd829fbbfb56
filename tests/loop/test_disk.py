"""What a run will write is told before it begins, and is what it then writes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from posttrain.models import checkpoint
from posttrain.plan import disk
from posttrain.plan.disk import Disk
from posttrain.plan.plan import plan_run
from posttrain.recipe import config
from posttrain.types import RunError


def tensor_bytes(folder: Path) -> int:
    """Bytes of the tensors of a folder's files."""
    return sum(t.nbytes for f in folder.rglob("*.safetensors") for t in load_file(f).values())


VARIANTS = {
    "whole": {},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "lora": {"lora": {"rank": 4}},
    "a critic of its own": {"method": {"name": "ppo"}, "critic": {"kind": "own"}},
    "a shared critic": {"method": {"name": "ppo"}},
    "a reference that follows": {"method": {"kl_in_loss": 0.1}, "reference": {"refresh_every": 1}},
    "replay": {"method": {"name": "decoupled_ppo"}, "rollout": {"replay": 2}},
    "trpo": {"method": {"name": "trpo"}, "optim": None},
    "muon": {"optim": {"name": "muon"}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sample(every=2)
def test_a_checkpoint_is_as_large_as_was_said(run_cli, online, able, write, tmp_path, variant):
    learnt = {"model": {"path": str(able)}, "task": {"arithmetic": {"low": 2, "high": 4, "held_out": 2}}}
    short = {"run": {"updates": 3}, "eval": {"limit": 0}, "checkpoint": {"every": 0}}
    recipe = write(config.read(write(online, learnt | short)).tables, VARIANTS[variant])
    said = plan_run(config.read(recipe).recipe, lambda text: None).disk
    assert run_cli("train", recipe, "--run-dir", tmp_path / "run", "--quiet").code == 0
    folder = tmp_path / "run" / "checkpoints" / "step_000003"
    resume = tensor_bytes(folder / "resume")
    # Steps counted by AdamW, and the head of a critic.
    assert resume == pytest.approx(said.resume, rel=0.05, abs=2000)
    assert tensor_bytes(folder) - resume == pytest.approx(said.weights, rel=0.01)
    samples = sum(f.stat().st_size for f in (tmp_path / "run" / "samples").iterdir())
    assert samples < 3 * said.others["rollouts"], "a few tokens of a short answer are mostly names of keys"


@pytest.mark.full
def test_so_is_one_with_moments_in_8_bits(run_cli, offline, make_model, write, tmp_path):
    over = {
        "model": {"path": str(make_model(hidden_size=64))},
        "optim": {"name": "adamw_8bit"},
        "run": {"updates": 1},
    }
    recipe = write(offline, over)
    said = plan_run(config.read(recipe).recipe, lambda text: None).disk
    assert run_cli("train", recipe, "--run-dir", tmp_path / "run", "--quiet").code == 0
    resume = tensor_bytes(tmp_path / "run" / "checkpoints" / "step_000001" / "resume")
    assert resume == pytest.approx(said.resume, rel=0.001)
    assert said.resume < said.weights, "AdamW's moments are twice that"


@pytest.mark.parametrize("rank", [0, 4])
def test_so_is_that_of_a_reward_model(run_cli, offline, write, tmp_path, rank):
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "1?", "chosen": "7", "rejected": "3"}\n' * 8)
    over = {"method": {"name": "reward"}, "task": {"arithmetic": None, "data": {"path": str(data)}}}
    recipe = write(offline, over | {"lora": {"rank": rank}, "run": {"updates": 1}, "eval": {"limit": 0}})
    said = plan_run(config.read(recipe).recipe, lambda text: None).disk
    assert run_cli("train", recipe, "--run-dir", tmp_path / "run", "--quiet").code == 0
    folder = tmp_path / "run" / "checkpoints" / "step_000001"
    written = tensor_bytes(folder)
    # The head over the vocabulary is not trained and has no moments, which is left out of account.
    assert 0.7 * (said.weights + said.resume) < written < 1.01 * (said.weights + said.resume)


def test_a_checkpoint_that_cannot_be_written_says_which_one_is_kept(
    run_cli, online, write, tmp_path, monkeypatch
):
    save = checkpoint.save

    def refused(root: Path, update: int, *given: Any, **how: Any) -> Path:
        if update == 2:
            raise RunError("write", "no room")
        return save(root, update, *given, **how)

    monkeypatch.setattr(checkpoint, "save", refused)
    said = run_cli("train", write(online), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 1
    assert f"no room; step_000001 is kept, go on with --resume --run-dir {tmp_path / 'run'}" in said.err


def disk_of(**given: int) -> Disk:
    sizes = {"weights": 10, "resume": 20, "written": 9, "keep": 2, "keep_weights": 0, "merged": 0, "free": 0}
    return Disk(**{**sizes, **given}, others={"rollouts": 5})


def test_the_most_that_is_there_at_once():
    assert disk_of().peak == 2 * 30 + 30 + 5, "the newest is whole before an older one goes"
    assert disk_of(written=1).peak == 30 + 5
    assert disk_of(keep=0).peak == 9 * 30 + 5
    assert disk_of(keep_weights=3).peak == 2 * 30 + 3 * 10 + 30 + 5
    assert disk_of(best=True).peak == 2 * 30 + 10 + 30 + 5
    assert disk_of(best=True, merged=7).finished == 2 * 10 + 7 + 5
    assert disk_of(keep_weights=100).peak == 2 * 30 + 6 * 10 + 30 + 5
    assert disk_of().finished == 10 + 5
    assert disk_of(keep_weights=3, merged=7).finished == 4 * 10 + 7 + 5
    assert disk_of(keep=0).finished == 9 * 10 + 5


def test_a_run_that_cannot_save_does_not_begin(run_cli, online, write, tmp_path, monkeypatch):
    recipe = write(online, {"run": {"updates": 1}})
    said = run_cli("validate", recipe)
    assert said.code == 0
    assert "a checkpoint" in said.err
    need = plan_run(config.read(recipe).recipe, lambda text: None).disk
    for free, code, note in ((need.weights + need.resume, 0, True), (10**12, 0, False), (0, 2, False)):
        monkeypatch.setattr(
            disk.shutil, "disk_usage", lambda _, n=free: shutil._ntuple_diskusage(10**12, 0, n)
        )
        run = tmp_path / str(free)
        said = run_cli("train", recipe, "--run-dir", run)
        assert said.code == code, said.err
        assert ("the run may fill the disk" in said.err) == note
        assert run.exists() == (code == 0), "nothing is left of what was refused"
    assert "a checkpoint takes" in said.err
