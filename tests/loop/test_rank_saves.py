"""Ranks with shares write a checkpoint together, each its part, and any layout resumes from it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.base.toml import dump
from posttrain.models import checkpoint
from posttrain.models.loading import quiet

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
SHARES = ["train.shard=true", "checkpoint.async_save=true"]


def launched(ranks: int, script: Path, *words: object) -> str:
    """What this script prints on so many ranks."""
    command = [*TORCHRUN, str(ranks), str(script), *map(str, words)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a whole checkpoint, whichever files they are in."""
    assert not checkpoint.damage(folder)
    out: dict[str, torch.Tensor] = {}
    for file in folder.rglob("*.safetensors"):
        name = file.relative_to(folder).as_posix().partition("-0")[0].removesuffix(".safetensors")
        held = {f"{name}/{key}": x for key, x in load_file(file).items()}
        assert not held.keys() & out.keys()
        out |= held
    return out


def state(folder: Path) -> dict[str, Any]:
    out = checkpoint.read_state(folder)
    del out["progress"]["seconds"]
    return out


def of_scripts(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def begun(able: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and its run of two updates on two ranks with shares, in float64."""
    place = tmp_path_factory.mktemp("saves")
    rows = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n + 2)} for n in range(12)]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = {
        "model": {"path": str(able), "dtype": "float64", "device": "cpu"},
        "method": {"name": "dpo"},
        "task": {"data": {"path": str(place / "pairs.jsonl")}},
        "optim": {"lr": 0.01},
        "batch": {"batch_size": 4},
        "run": {"updates": 2, "threads": 1},
        "checkpoint": {"every": 1},
        "eval": {"limit": 0},
        "train": {"deadline_s": 120.0},
    }
    (place / "recipe.toml").write_text(dump(tables))
    script = place / "start.py"
    script.write_text("import sys\nfrom posttrain import cli\nsys.exit(cli.run(sys.argv[1:]))\n")
    sets = [word for key in SHARES for word in ("--set", key)]
    launched(2, script, "train", place / "recipe.toml", "--run-dir", place / "run", "--quiet", *sets)
    return place


@pytest.mark.full
def test_each_rank_writes_its_part_of_files_that_transformers_loads(begun: Path) -> None:
    folder = begun / "run" / "checkpoints" / "step_000002"
    assert not [*folder.parent.glob("*.tmp-*")]
    parts = [f"-0000{n}-of-00002.safetensors" for n in (1, 2)]
    names = {file.relative_to(folder).as_posix() for file in folder.rglob("*.safetensors")}
    assert names == {f"{name}{part}" for name in ("model/model", "resume/optimizer") for part in parts}
    sizes = [sum(f.stat().st_size for f in folder.rglob(f"*{part}")) for part in parts]
    layer = 3 * 8 * max(x.numel() for x in tensors(folder).values())
    assert abs(sizes[0] - sizes[1]) < 2 * layer
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    files = {key.removeprefix("model/model/"): x for key, x in tensors(folder).items()}
    for name, x in model.named_parameters():
        assert torch.equal(x, files[name])
    index = json.loads((folder / "model" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        with safe_open(folder / "model" / file, framework="pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    assert index["metadata"]["total_size"] == sum(
        x.numel() * 8 for key, x in tensors(folder).items() if key.startswith("model/")
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "sets"),
    [
        (1, ()),
        (3, ()),
        (3, ("train.shard=true",)),
        (2, ("train.context=2",)),
        (2, ("train.context=2", *SHARES)),
    ],
    ids=["one", "three", "three with shares", "a context", "a context with shares"],
)
def test_any_layout_resumes_from_two_shares_bit_for_bit(
    begun: Path, tmp_path: Path, ranks: int, sets: tuple[str, ...]
) -> None:
    """Resumed and saved again at the same update, every master, moment and count is the same."""
    run = tmp_path / "run"
    shutil.copytree(begun / "run", run)
    folder = run / "checkpoints" / "step_000002"
    before, state_before = tensors(folder), state(folder)
    shutil.rmtree(run / "checkpoints" / "step_000001")
    if ranks == 1:
        of_scripts("rank_saves").save_again(begun / "recipe.toml", run, *sets)
    else:
        launched(ranks, HERE / "rank_saves.py", begun / "recipe.toml", run, *sets)
    after = tensors(folder)
    assert len([*folder.rglob("model*.safetensors")]) == (ranks if "train.shard=true" in sets else 1)
    assert after.keys() == before.keys()
    assert {x.dtype for key, x in after.items() if not key.endswith("/step")} == {torch.float64}
    assert all(torch.equal(x, before[key]) for key, x in after.items())
    assert state(folder) == state_before


PEAK = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from posttrain.learner.learner import Learner
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.ranks import Parallel
from posttrain.loop import saving
from posttrain.methods.build import build
from posttrain.models import slices
from posttrain.recipe.recipe import Checkpoints
from posttrain.types import Batch, Trajectory

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))

small, large, place = map(Path, sys.argv[1:])
tokenizer = SimpleNamespace(save_pretrained=lambda folder: None)
settings = Checkpoints(best=False)

def learner(path):
    model = slices.load_model(path, dtype=torch.float32, device=torch.device("cpu"))
    out = Learner(model, build("sft", {}, horizon=16), ranks=ranks, parallel=Parallel(shard=True))
    row = Trajectory.given([5, 6, 7, 8], trained=[False, True, True, True])
    out.update(Batch.of([row], [ranks.rank]))
    return out

def save(of, name):
    writer = saving.CheckpointWriter(ranks, asynchronous=True)
    state = {"progress": {"update": 1}}
    saving.save(place / name, of, tokenizer, settings, state, {}, head=None, replay=None, writer=writer)
    writer.wait()

with join_ranks(Parallel(deadline_s=120)) as ranks:
    save(learner(small), "small")
    of = learner(large)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    before = kib("VmRSS")
    save(of, "large")
    peaks = ranks.gather((kib("VmHWM") - before) / 1024)
    if ranks.rank == 0:
        (place / "peaks.json").write_text(json.dumps(peaks))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_holds_its_part_of_a_checkpoint_and_no_more(tmp_path: Path) -> None:
    """Of 600 MB, masters and moments, each of two ranks at most half and two of ten layers."""
    sizes = {"vocab_size": 61, "hidden_size": 640, "intermediate_size": 1728, "num_attention_heads": 4}
    for layers in (1, 10):
        config = AutoConfig.for_model("llama", **sizes, num_hidden_layers=layers, num_key_value_heads=4)
        with quiet():
            AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(layers))
    (tmp_path / "peak.py").write_text(PEAK)
    launched(2, tmp_path / "peak.py", tmp_path / "1", tmp_path / "10", tmp_path)
    folder = tmp_path / "large" / "step_000001"
    size = sum(f.stat().st_size for f in folder.rglob("*.safetensors")) / 2**20
    assert 540 < size < 660
    assert max(json.loads((tmp_path / "peaks.json").read_text())) <= (1 / 2 + 2 / 10) * size
