"""Exact resume: whatever kills a run, and whenever, going on ends where one that was not killed ends."""

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from posttrain.models import checkpoint, loading
from posttrain.recipe import config
from posttrain.recipe import recipe as runtime_recipe
from posttrain.testing import repeatable

UPDATES = 5
REWARD = """
def reward(response, answer):
    return sum(c.isdigit() for c in response) / 3
"""

VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "lora": {"lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}, "optim": {"lr": 0.02}},
    "lora over 4 bits": {"lora": {"rank": 4}, "model": {"quantize": "nf4"}, "optim": {"lr": 0.02}},
    "epochs and minibatches": {"steps": {"epochs": 2, "minibatches": 3}, "optim": {"schedule": "linear"}},
    "reference in bfloat16": {"method": {"kl_in_loss": 0.1}, "model": {"dtype": "bfloat16"}},
    "varied": {
        "rollout": {"select": "varied", "group_size": 3, "max_rounds": 3},
        "optim": {"lr": 0.003},  # at 0.01 the policy may be sure of every answer before the end
    },
    "checkpoints apart": {"checkpoint": {"every": 2, "keep": 1}, "eval": {"every": 2}},
    "guess": {
        "task": {
            "arithmetic": None,
            "guess": {"high": 9, "max_turns": 3, "shaping": 0.5},
            "games": {"train": 7},
        },
        "verifier": None,
        "eval": {"limit": 4},
    },
    "observations, and Muon": {
        "task": {"arithmetic": None, "guess": {"high": 9, "max_turns": 3}, "games": {"train": 7}},
        "verifier": None,
        "method": {"observation_weight": 0.05},
        "optim": {"name": "muon"},
        "eval": {"limit": 4},
    },
    "a critic of its own, and a KL that follows its target": {
        "method": {"name": "ppo", "kl_in_reward": 0.1, "kl_target": 0.5},
        "critic": {"kind": "own", "lr": 0.01},
        "steps": {"epochs": 2, "minibatches": 2, "target_kl": 0.5},
    },
    "a shared critic that warms up, and rewards scaled as they come": {
        "method": {"name": "a2c", "running_scale": 0.9},
        "critic": {"warmup": 3},
        "optim": {"lr": 0.01, "schedule": "linear"},
    },
    "a running baseline, and a reference that follows": {
        "method": {"name": "reinforce_running", "kl_in_loss": 0.1},
        "reference": {"refresh_every": 2, "keep": 0.5},
    },
    "replay": {"method": {"name": "decoupled_ppo"}, "rollout": {"replay": 2, "replay_lag": 2}},
    "trpo": {"method": {"name": "trpo"}, "optim": None},
    "evolution": {"method": {"name": "es", "sigma": 0.02}, "sampling": {"temperature": 0.0}},
    "expert iteration": {
        "method": {"name": "expert_iteration"},
        "rollout": {"select": "accepted", "max_rounds": 3},
        "steps": {"epochs": 2, "minibatches": 2},
    },
    "easiest first": {"curriculum": {"kind": "order"}, "task": {"arithmetic": {"high": 12}}},
    "a band of tasks": {"curriculum": {"kind": "band", "keep": 0.5}},
    "a bandit": {"curriculum": {"kind": "bandit"}, "task": {"arithmetic": {"high": 12}}},
    "klq": {"method": {"name": "klq"}},
    "checkpoints in the background": {"checkpoint": {"async_save": True, "every": 2, "keep": 1}},
    "sft": {},
}


@pytest.fixture
def recipe_of(online, offline, able, make_model, write):
    """recipe_of(variant) -> its recipe file."""

    def make(variant: str) -> Path:
        problems = {"low": 2, "high": 4, "held_out": 2}
        over: dict[str, Any] = {"run": {"updates": UPDATES}, "optim": {"lr": 0.01}}
        if variant == "sft":
            # As wide as moments in 8 bits need.
            wide = {"model": {"path": str(make_model(hidden_size=64))}}
            over["optim"]["name"] = "adamw_8bit"
            rows = {"task": {"arithmetic": problems}, "batch": {"batch_size": 3}}
            return write(offline, {**over, **rows, **wide})
        tables = {**over, "model": {"path": str(able)}, "task": {"arithmetic": problems}}
        return write(config.read(write(online, tables)).tables, VARIANTS[variant])

    return make


@pytest.fixture(scope="module")
def straight(launcher, tmp_path_factory):
    """straight(variant, recipe) -> the directory of its run that nobody killed, made once."""
    made: dict[str, Path] = {}

    def make(variant: str, recipe: Path) -> Path:
        if variant not in made:
            place = tmp_path_factory.mktemp("straight")
            output = place / "out.txt"
            assert launcher.run("train", recipe, "--run-dir", place / "run", "--quiet", output=output) == 0, (
                output.read_text()
            )
            made[variant] = place / "run"
        return made[variant]

    return make


def lines(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def numbers(run: Path) -> list[dict[str, Any]]:
    """The same without what a clock says."""
    return repeatable(run / "metrics.jsonl")


def last(run: Path) -> Path:
    """The newest checkpoint, which must be whole."""
    found, skipped = checkpoint.newest(run / "checkpoints")
    assert found is not None
    assert not skipped
    return found


def assert_same(run: Path, never_killed: Path, updates: int = UPDATES) -> None:
    """Both runs ended with the same weights, moments, numbers and rollouts, each update once."""
    one, other = last(run), last(never_killed)
    assert one.name == other.name == f"step_{updates:06d}"
    names = sorted(str(f.relative_to(other)) for f in other.rglob("*") if f.is_file())
    assert names == sorted(str(f.relative_to(one)) for f in one.rglob("*") if f.is_file())
    weights = [n for n in names if n.endswith(".safetensors")]
    assert len(weights) >= 2
    for name in weights:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert [line["update"] for line in lines(run)] == list(range(updates + 1))
    assert numbers(run) == numbers(never_killed)
    rollouts = {f.name: f.read_bytes() for f in (never_killed / "samples").glob("*")}
    assert {f.name: f.read_bytes() for f in (run / "samples").glob("*")} == rollouts
    assert not list((run / "checkpoints").glob("*.tmp-*"))
    assert (run / "report.html").stat().st_size > 1000


def tasks_trained(run: Path) -> list[str]:
    """The task of each group, in the order of training."""
    out = []
    for file in sorted((run / "samples").glob("0*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        out += [row["task"] for row in rows if row["sample"] == 0]
    return out


def finish_through_kills(launcher, recipe: Path, run: Path, dice: random.Random) -> list[str]:
    """Trains to the end through three kills at random moments; where each of them struck."""
    struck, output = [], run.with_suffix(".txt")
    at_start, early, late = 0, dice.randint(1, 2), dice.randint(3, UPDATES - 1)
    for updates in (early, at_start, late):
        go_on = ["--resume"] if (run / "config.toml").exists() else []
        started = launcher.start("train", recipe, "--run-dir", run, "--quiet", *go_on, output=output)
        if updates:
            started.until(lambda least=updates: len(lines(run)) > least)
        time.sleep(dice.uniform(0.0, 0.05 if updates else 0.3))
        started.kill()
        if started.wait() == -signal.SIGKILL:
            struck.append(f"after line {len(lines(run))}")
    code = launcher.run("train", recipe, "--run-dir", run, "--quiet", "--resume", output=output)
    assert code == 0, output.read_text()
    return struck


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sample("grpo", "sft")
def test_killed_at_random_moments_a_run_ends_bit_for_bit_as_if_it_had_not_been(
    launcher, recipe_of, straight, tmp_path, variant
):
    recipe = recipe_of(variant)
    never_killed = straight(variant, recipe)
    seed, run = random.randrange(10**6), tmp_path / "killed"
    struck = finish_through_kills(launcher, recipe, run, random.Random(seed))
    print(f"{variant}: seed {seed}, killed {', '.join(struck)}")
    assert struck
    assert_same(run, never_killed)


def test_the_variants_have_something_to_learn_and_to_lose(recipe_of, straight):
    for variant in ("grpo", "guess"):
        run = straight(variant, recipe_of(variant))
        assert sum(line["grad_norm"] > 0.01 for line in lines(run)[1:]) >= 3


def test_every_task_is_trained_exactly_once_an_epoch(recipe_of, straight):
    """And so of a run that was killed: its rollouts are the same, see assert_same."""
    learnt = tasks_trained(straight("grpo", recipe_of("grpo")))
    epoch = len(set(learnt))
    assert len(learnt) == 3 * UPDATES > 2 * epoch > 0
    for start in range(0, len(learnt) - epoch + 1, epoch):
        assert set(Counter(learnt[start : start + epoch]).values()) == {1}


@pytest.mark.full
@pytest.mark.timeout(1800)  # some hundred processes, one after the other
def test_killed_at_everything_that_it_does_to_a_file_a_run_goes_on_exactly(launcher, recipe_of, tmp_path):
    recipe, never_killed, run = recipe_of("grpo"), tmp_path / "never_killed", tmp_path / "run"
    short = ["--set", "run.updates=3", "--set", "checkpoint.keep=1", "--quiet"]
    output = tmp_path / "out.txt"
    assert launcher.run("train", recipe, "--run-dir", never_killed, *short, output=output) == 0
    # The first update is killed at every eighth thing, until its checkpoint is there; the second at every
    # fourth; then it may end. Where it begins is drawn, so that all are tried in time.
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    first = random.Random(seed).randint(1, 4)
    kills, reached, die_at, code = Counter[int](), -1, first, -9
    while code != 0:
        before, skipped = checkpoint.newest(run / "checkpoints")
        assert not skipped, "a checkpoint that is there is whole"
        update = int(before.name[-6:]) if before else 0
        assert update >= reached, "a checkpoint that was there has gone"
        if update > reached:
            reached, die_at = update, first
        strike = die_at if update < 2 else 0
        go_on = ["--resume"] if (run / "config.toml").exists() else []
        words = ["train", recipe, "--run-dir", run, *short, *go_on]
        code = launcher.run(*words, output=output, die_at=strike, watch=run)
        assert code in (0, -9), output.read_text()
        if code:
            kills[update] += 1
            die_at += 4 if update else 8
    assert kills[0] >= 4
    assert kills[1] >= 8
    assert_same(run, never_killed, updates=3)


@pytest.mark.parametrize("die_at", [9, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 15, 20))])
def test_killed_while_a_checkpoint_is_written_in_the_background(
    launcher, recipe_of, straight, tmp_path, die_at: int
):
    """At this operation on its files: the one before is left, and the run ends with the bits of others."""
    recipe, run, output = recipe_of("grpo"), tmp_path / "run", tmp_path / "out.txt"
    words = ["train", recipe, "--run-dir", run, "--quiet", "--set", "checkpoint.async_save=true"]
    draft = run / "checkpoints" / "step_000003.tmp-"
    assert launcher.run(*words, output=output, die_at=die_at, watch=draft) == -9, output.read_text()
    assert [*draft.parent.glob(f"{draft.name}*")]
    assert last(run).name == "step_000002"
    assert launcher.run(*words, "--resume", output=output) == 0, output.read_text()
    assert_same(run, straight("grpo", recipe))


def test_sigterm_ends_the_update_saves_it_and_exits_with_1(launcher, recipe_of, tmp_path):
    recipe, never_killed, run = recipe_of("epochs and minibatches"), tmp_path / "never", tmp_path / "run"
    words, output = ["--quiet", "--set", "checkpoint.every=0"], tmp_path / "out.txt"
    assert launcher.run("train", recipe, "--run-dir", never_killed, *words, output=output) == 0
    started = launcher.start("train", recipe, "--run-dir", run, *words, output=output)
    started.until(lambda: len(lines(run)) >= 3)
    started.kill(signal.SIGTERM)
    assert started.wait() == 1
    said = output.read_text()
    assert "stopped on request after update" in said
    assert "--resume" in said
    assert "Traceback" not in said
    assert last(run).name == f"step_{lines(run)[-1]['update']:06d}"
    assert lines(run)[-1]["update"] < UPDATES
    assert launcher.run("train", recipe, "--run-dir", run, "--resume", *words, output=output) == 0
    assert_same(run, never_killed)


def test_a_run_with_workers_leaves_neither_a_lock_nor_a_process_when_it_is_killed(
    launcher, recipe_of, write, online, tmp_path
):
    code = tmp_path / "rewards.py"
    code.write_text(REWARD)
    function = {"number": None, "function": {"function": f"{code}:reward"}}
    over = {"verifier": function, "run": {"updates": UPDATES}, "rollout": {"workers": 1}}
    recipe, run, never_killed = write(online, over), tmp_path / "run", tmp_path / "never"
    output = tmp_path / "out.txt"
    assert launcher.run("train", recipe, "--run-dir", never_killed, "--quiet", output=output) == 0
    started = launcher.start("train", recipe, "--run-dir", run, "--quiet", output=output)
    started.until(lambda: len(lines(run)) >= 3)
    started.kill()
    assert started.wait() == -9
    # At once: a worker that outlived the run must not hold its directory.
    assert launcher.run("train", recipe, "--run-dir", run, "--quiet", "--resume", output=output) == 0
    assert_same(run, never_killed)


@pytest.mark.full
def test_as_it_is_really_started(recipe_of, straight, tmp_path):
    recipe, run = recipe_of("grpo"), tmp_path / "run"

    def start(*more: str) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "posttrain", "train", str(recipe), "--run-dir", str(run), *more]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    process = start()
    while len(lines(run)) < 3 and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    again = start("--resume")
    said, _ = again.communicate()
    assert again.returncode == 0, said
    assert "resuming from step_" in said
    assert_same(run, straight("grpo", recipe))


def test_what_auto_came_to_where_a_run_began_holds_where_it_goes_on(
    run_cli, recipe_of, write, monkeypatch, tmp_path
):
    tables = config.read(recipe_of("sft")).tables
    del tables["model"]["dtype"]
    recipe, straight, moved = write(tables, name="auto"), tmp_path / "straight", tmp_path / "moved"
    monkeypatch.setattr(loading, "multiplies_in_bfloat16", lambda device="cpu": True)
    run_cli("train", recipe, "--run-dir", straight, "--quiet")
    run_cli("train", recipe, "--run-dir", moved, "--quiet", "--set", "run.updates=2")
    assert config.read(moved / "config.toml").recipe.model.dtype == "bfloat16"
    monkeypatch.setattr(loading, "multiplies_in_bfloat16", lambda device="cpu": False)
    assert config.read(recipe).recipe.model.dtype == "float32"
    named = ("--set", "model.dtype=float32")
    said = run_cli("train", recipe, "--run-dir", moved, "--resume", *named)
    assert (said.code, "[model]" in said.err, f"resume with {moved / 'config.toml'}" in said.err) == (2, 1, 1)
    assert run_cli("train", recipe, "--run-dir", moved, "--resume", "--quiet").code == 0
    assert config.read(moved / "config.toml").recipe.model.dtype == "bfloat16"
    assert (last(moved) / "model" / "model.safetensors").read_bytes() == (
        last(straight) / "model" / "model.safetensors"
    ).read_bytes()


def test_a_template_is_told_the_day_on_which_the_run_began(run_cli, recipe_of, write, monkeypatch, tmp_path):
    """Resumed after midnight, the prompts are those of the day before."""
    template = "{{ strftime_now('%j ') }}{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    recipe = write(config.read(recipe_of("sft")).tables, {"model": {"chat_template": template}}, name="dated")
    straight, slept = tmp_path / "straight", tmp_path / "slept"
    days = {
        day: type("Day", (date,), {"today": classmethod(lambda _, d=day: date(2024, 2, d))}) for day in (1, 2)
    }
    monkeypatch.setattr(runtime_recipe, "date", days[1])
    run_cli("train", recipe, "--run-dir", straight, "--quiet")
    run_cli("train", recipe, "--run-dir", slept, "--quiet", "--set", "run.updates=2")
    monkeypatch.setattr(runtime_recipe, "date", days[2])
    assert config.read(recipe).recipe.model.date == "2024-02-02"
    assert run_cli("train", recipe, "--run-dir", slept, "--resume", "--quiet").code == 0
    assert config.read(slept / "config.toml").recipe.model.date == "2024-02-01"
    assert (last(slept) / "model" / "model.safetensors").read_bytes() == (
        last(straight) / "model" / "model.safetensors"
    ).read_bytes()
    assert run_cli("train", recipe, "--run-dir", tmp_path / "no", "--set", "model.date=tomorrow").code == 2


def test_stop_when_ends_a_run_as_its_last_update(run_cli, online, write, tmp_path):
    """The weights are those of a run with so few updates; without the condition it goes on to the end."""
    short = write(online, {"run": {"updates": 2}}, name="short")
    long = write(online, {}, name="long")
    ends = write(online, {"run": {"stop_when": "step >= 2"}}, name="ends")
    for recipe in (short, long, ends):
        result = run_cli("train", recipe, "--run-dir", tmp_path / recipe.stem, "--quiet")
        assert result.code == 0, result.err
    assert_same(tmp_path / "ends", tmp_path / "short", updates=2)
    listed = [json.loads(line) for line in run_cli("run", "list", tmp_path, "--json").out.splitlines()]
    assert [run["state"] for run in listed] == ["done"] * 3
    words = ("--run-dir", tmp_path / "ends", "--resume", "--quiet")
    assert run_cli("train", ends, *words).code == 0
    assert len(numbers(tmp_path / "ends")) == 3, "a run that has ended is not trained further"
    assert run_cli("train", ends, *words, "--set", "run.stop_when=").code == 0
    model = "model/model.safetensors"
    assert (last(tmp_path / "ends") / model).read_bytes() == (last(tmp_path / "long") / model).read_bytes()


@pytest.mark.parametrize(
    ("condition", "over", "key"),
    [
        ("eval/accuracy >= 0.8", {}, "run.stop_when"),
        ("eval/acuracy >= 0.8", {"eval": {"every": 1}}, "run.stop_when"),
        ("update > 2", {}, "run.stop_when"),
        ("kl/ref", {}, "run"),
        ("kl/ref > much", {}, "run"),
    ],
)
def test_stop_when_that_cannot_hold_is_refused(run_cli, online, write, condition, over, key):
    result = run_cli("validate", write(online, over), "--set", f"run.stop_when={condition}")
    assert result.code == 2
    assert f"{key}: " in result.err


@pytest.mark.full
def test_stray_files_of_a_checkpoint_are_not_read(run_cli, recipe_of, monkeypatch, tmp_path):
    """Files that the manifest does not name, whatever a library would make of their names."""
    recipe, run = recipe_of("a critic of its own, and a KL that follows its target"), tmp_path / "run"
    assert run_cli("train", recipe, "--run-dir", run, "--quiet", "--set", "run.updates=1").code == 0
    model = last(run) / "model"
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    before = run_cli("eval", run, "--json").out
    for stray in ("x.safetensors", "adapter_config.json", "model.safetensors.index.json", ".DS_Store"):
        (model / stray).write_bytes(b"")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 1 / 0 }}")
    (last(run) / "resume" / "y.safetensors").write_bytes(b"")
    (last(run) / "z.safetensors").write_bytes(b"")
    said = run_cli("eval", run, "--json")
    assert (said.code, said.out) == (0, before)
    for words in (("sample", run, "1+1="), ("sample", model, "1+1="), ("run", "inspect", run)):
        said = run_cli(*words)
        assert said.code == 0, said.err
    said = run_cli("train", recipe, "--run-dir", run, "--quiet", "--resume", "--set", "run.updates=2")
    assert said.code == 0, said.err
