"""A pipeline that is killed anywhere and goes on ends where one that was not killed ends."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from posttrain.base.toml import dump

KILLS = 4
SUMS = {"low": 2, "high": 4, "held_out": 3, "template": "{a}+{b}="}
PIPELINE = """
[[stage]]
name = "data"
make = "pairs.py:write"

[[stage]]
name = "sft"
recipe = "sft.toml"
set = { "lora.rank" = 2, "lora.targets" = ["q_proj"] }

[[stage]]
name = "dpo"
recipe = "dpo.toml"
set = { "model.path" = "{sft}", "task.data.path" = "{data}/pairs.jsonl" }

[[stage]]
name = "grpo"
recipe = "grpo.toml"
set = { "model.path" = "{sft}" }

[compare]
stages = ["sft", "dpo", "grpo"]
limit = 3
verifier.number = { where = "last" }
sampling.max_new_tokens = 4

[compare.arithmetic]
low = 2
high = 4
held_out = 3
template = "{a}+{b}="
"""
PAIRS = """
import json

def write(directory):
    with open(directory / "pairs.jsonl", "w") as out:
        for a in range(2, 5):
            out.write(json.dumps({"prompt": f"{a}+{a}=", "chosen": str(2 * a), "rejected": "9 9"}) + "\\n")
"""


@pytest.fixture
def pipe(able: Path, tmp_path: Path) -> Path:
    """A pipeline's file with its recipes beside it."""
    shared = {
        "model": {"path": str(able), "dtype": "float32", "device": "cpu"},
        "optim": {"lr": 0.01},
        "run": {"updates": 3, "threads": 1},
        "checkpoint": {"every": 1},
    }
    batch = {"batch": {"batch_size": 3}}
    parts = {
        "sft": {**shared, "method": {"name": "sft"}, "task": {"arithmetic": SUMS}, **batch},
        "dpo": {**shared, "method": {"name": "dpo"}, "task": {"data": {"path": "none"}}, **batch},
        "grpo": {
            **shared,
            "method": {"name": "grpo"},
            "task": {"arithmetic": SUMS},
            "verifier": {"number": {}},
            "sampling": {"max_new_tokens": 4},
            "rollout": {"groups": 2, "group_size": 3},
        },
    }
    for name, tables in parts.items():
        (tmp_path / f"{name}.toml").write_text(dump(tables))
    (tmp_path / "pairs.py").write_text(PAIRS)
    (tmp_path / "pipe.toml").write_text(PIPELINE)
    return tmp_path / "pipe.toml"


def made(root: Path) -> dict[str, bytes]:
    """All that a pipeline leaves and that no clock or path is in."""
    files = [*root.glob("0*/checkpoints/step_000003/**/*.safetensors"), *root.glob("01-data/*")]
    files += [
        *root.glob("02-sft/merged*/*.safetensors"),
        *root.glob("compare/*.jsonl"),
        root / "compare.json",
    ]
    return {str(f.relative_to(root)): f.read_bytes() for f in files}


@pytest.mark.full
def test_through_kills_at_any_moment_it_ends_with_the_same_weights(launcher, pipe, tmp_path):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    never, run, output = tmp_path / "never", tmp_path / "run", tmp_path / "out.txt"
    assert launcher.run("train", pipe, "--run-dir", never, "--quiet", output=output) == 0, output.read_text()
    wanted = made(never)
    assert sum(name.endswith("model.safetensors") for name in wanted) >= 3
    assert {"compare/sft.jsonl", "compare/dpo.jsonl", "compare/grpo.jsonl"} <= wanted.keys()
    struck = 0
    for _ in range(KILLS):
        go_on = ["--resume"] if (run / "stages.json").exists() else []
        words = ["train", pipe, "--run-dir", run, "--quiet", *go_on]
        code = launcher.run(*words, output=output, die_at=dice.randint(1, 150), watch=run)
        struck += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), output.read_text()
    assert struck
    go_on = ["--resume"] if (run / "stages.json").exists() else []
    assert launcher.run("train", pipe, "--run-dir", run, "--quiet", *go_on, output=output) == 0, (
        output.read_text()
    )
    assert made(run) == wanted
    told = json.loads((run / "pipeline.json").read_text())
    assert [s["state"] for s in told["stages"]] == ["finished"] * 4
    assert [s.get("updates") for s in told["stages"]] == [None, 3, 3, 3]


def test_sigterm_ends_the_update_saves_it_and_the_next_stage_waits_for_resume(launcher, pipe, tmp_path):
    run, output = tmp_path / "run", tmp_path / "out.txt"
    long = ["--set", "sft.run.updates=2000", "--set", "sft.checkpoint.every=0"]
    started = launcher.start("train", pipe, "--run-dir", run, "--quiet", *long, output=output)
    metrics = run / "02-sft" / "metrics.jsonl"
    started.until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    time.sleep(0.05)
    started.kill(signal.SIGTERM)
    assert started.wait() == 1
    said = output.read_text()
    assert "stopped on request after update" in said
    assert "--resume" in said
    assert "Traceback" not in said
    assert not (run / "03-dpo").exists()
    told = json.loads((run / "pipeline.json").read_text())
    assert [s["state"] for s in told["stages"]] == ["finished", "stopped", "waiting", "waiting"]
    assert list((run / "02-sft" / "checkpoints").glob("step_*"))
