"""Whole runs on several ranks: real processes that torchrun starts, as a user would."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from posttrain import cli
from posttrain.base.toml import dump
from posttrain.models.pretrained import save_pretrained
from posttrain.testing import repeatable

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}
Tables = dict[str, Any]


def online(model: Path) -> Tables:
    return {
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "method": {"name": "grpo", "kl_in_loss": 0.1},
        "task": {"arithmetic": {"low": 2, "high": 4, "held_out": 5, "template": "{a}+{b}="}},
        "verifier": {"number": {"where": "last"}},
        "sampling": {"max_new_tokens": 3},
        "rollout": {"groups": 3, "group_size": 4, "select": "varied"},
        "curriculum": {"kind": "band"},
        # With eps a gradient that is hardly 0 does not move its weight by what it was rounded to.
        "optim": {"lr": 0.003, "eps": 1e-4},
        "steps": {"epochs": 2, "minibatches": 2},
        "run": {"updates": 3, "threads": 1},
        "checkpoint": {"every": 1},
        "eval": {"every": 2},
        "record": {"tokens": 0},
        "train": {"check_every": 1, "deadline_s": 60.0},
    }


def ahead(model: Path) -> Tables:
    """The same one update ahead, in a thread of each rank."""
    plain = {"rollout": {"groups": 3, "group_size": 4}, "curriculum": {"kind": "none"}}
    tables = online(model) | plain | {"async": {"max_lag": 1, "place": "thread"}}
    tables["method"] |= {"correction": "token_truncated"}
    return tables


GAME = """
from dataclasses import dataclass
from posttrain.envs.protocol import Start, Turn
from posttrain.types import Verdict


@dataclass(frozen=True)
class Game:
    trusted = False
    max_turns = 2

    def start(self, task):
        return Start(state=(), messages=task.messages, seats=2)

    def reply(self, state, response):
        said = (*state, response)
        if len(said) == 3:
            each = (sum(map(ord, x)) % 5 / 4 for x in said[1:])
            verdicts = tuple(Verdict(score=x, label="scored", reason="") for x in each)
            return Turn(state=said, done=True, verdict=verdicts)
        return Turn(state=said, messages=({"role": "user", "content": "3+2="},), seat=len(said) % 2)


def make():
    return Game()
"""


def seats(model: Path, place: Path) -> Tables:
    """A game of two, so that each group that is played is two to learn from."""
    (place / "game.py").write_text(GAME)
    tables = online(model) | {"curriculum": {"kind": "none"}}
    del tables["verifier"]
    tables["rollout"] |= {"select": "all"}
    sums = "".join(json.dumps({"prompt": f"{a}+{b}="}) + "\n" for a in (2, 3, 4) for b in (2, 3, 4))
    (place / "sums.jsonl").write_text(sums)
    data = {"path": str(place / "sums.jsonl")}
    tables["task"] = {"data": data, "held_out": data, "env": {"factory": f"{place / 'game.py'}:make"}}
    return tables


def rankings(place: Path) -> list[Path]:
    """Pairs of answers to sums, the right one chosen, to learn from and held out."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1 + (a * b) % 3)}
        for a in range(2, 7)
        for b in range(2, 7)
    ]
    files = [place / "train.jsonl", place / "held_out.jsonl"]
    for file, part in zip(files, (rows[7:], rows[:7]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
    return files


def offline(model: Path, place: Path, method: str) -> Tables:
    base = online(model)
    train, held_out = rankings(place)
    return {key: base[key] for key in ("model", "optim", "run", "checkpoint", "train")} | {
        "method": {"name": method},
        "task": {"data": {"path": str(train)}, "held_out": {"path": str(held_out)}},
        "batch": {"batch_size": 7},
    }


def launched(place: Path, ranks: int, commands: Sequence[Sequence[Any]]) -> list[list[int]]:
    """The exit codes of these commands on every rank."""
    (place / "commands.json").write_text(json.dumps(commands))
    words = [*TORCHRUN, str(ranks), str(HERE / "rank_runs.py"), "commands.json", "codes"]
    done = subprocess.run(words, cwd=place, env=ENV, capture_output=True, text=True, check=False, timeout=280)
    (place / f"said-{ranks}.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((place / f"codes.{rank}").read_text()) for rank in range(ranks)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step_*"))
    files = sorted((newest / "model").glob("model*.safetensors"))  # ranks with shares write one each
    return {name: x for file in files for name, x in load_file(file).items()}


NEAR = 0.003 / 20
"""A twentieth of a step's size. AdamW divides gradients by their own size, so that where they are about
optim.eps the last bits of a sum are seen; a wrong share of the gradient moves weights by a step."""


def gap(a: Path, b: Path) -> float:
    """The largest difference of two runs' weights."""
    x, y = weights(a), weights(b)
    assert set(x) == set(y)
    return max(float((x[name] - y[name]).abs().max()) for name in x)


def lines(run: Path) -> list[Mapping[str, float]]:
    return repeatable(run / "metrics.jsonl")


def said(run: Path) -> list[tuple[Any, ...]]:
    """What was drawn, of all ranks."""
    files = [*run.glob("samples/*.jsonl"), *run.glob("ranks/*/samples/*.jsonl")]
    rows = [(f.stem, json.loads(line)) for f in files for line in f.read_text().splitlines()]
    return sorted((name, r["task"], r["sample"], "".join(r["pieces"]), r["score"]) for name, r in rows)


def started(place: Path, name: str, *words: str, recipe: str = "grpo.toml") -> subprocess.Popen[str]:
    command = [*TORCHRUN, "2", "-m", "posttrain", "train", recipe, "--run-dir", name, "--quiet", *words]
    return subprocess.Popen(command, cwd=place, env=ENV, stderr=subprocess.PIPE, text=True)


def ranks_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of a run, in the order in which they began."""
    return sorted(psutil.Process(run.pid).children(), key=lambda p: p.create_time())


def until(happened: Callable[[], bool], run: subprocess.Popen[str]) -> None:
    while not happened():
        assert run.poll() is None, run.communicate()[1][-3000:]
        time.sleep(0.05)


NAMES = ("grpo", "dpo", "ahead")
SHARD = ["--set", "train.shard=true"]
LONGER = ["--set", "run.updates=4", "--set", "rollout.select=varied", *SHARD]
"""Of the run that is killed, which samples one step off: its groups are selected, its weights shards."""


@pytest.fixture(scope="module")
def written(able: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with recipes."""
    root = tmp_path_factory.mktemp("runs")
    recipes = {"grpo": online(able), "dpo": offline(able, root, "dpo"), "ahead": ahead(able)}
    for name in NAMES:
        (root / f"{name}.toml").write_text(dump(recipes[name]))
    return root


@pytest.fixture(scope="module")
def killed(written: Path) -> str:
    """What a run of two ranks said, one of which was killed after its second update."""
    run = started(written, "killed", *LONGER, recipe="ahead.toml")
    until(lambda: (written / "killed" / "checkpoints" / "step_000002").exists(), run)
    ranks_of(run)[-1].kill()
    _, err = run.communicate(timeout=120)
    assert run.returncode != 0
    assert not list((written / "killed" / "checkpoints").glob("step_000004"))
    return err


@pytest.fixture(scope="module")
def place(written: Path, killed: str) -> Path:
    """The folder once the same recipes were run by one process, and by two ranks."""
    root, alone = written, NAMES[:-1]
    before = Path.cwd()
    os.chdir(root)
    try:
        for name in alone:
            assert cli.run(["train", f"{name}.toml", "--run-dir", f"one-{name}", "--quiet"]) == 0
    finally:
        os.chdir(before)
    two: list[list[Any]] = [
        ["train", f"{name}.toml", "--run-dir", f"two-{name}", "--quiet"] for name in alone
    ]
    two.append(["train", "grpo.toml", "--run-dir", "shards", "--quiet", *SHARD])
    two.append(["train", "grpo.toml", "--run-dir", "context", "--quiet", "--set", "train.context=2"])
    two.append(["train", "ahead.toml", "--run-dir", "whole", "--quiet", *LONGER])
    two.append(["train", "ahead.toml", "--run-dir", "killed", "--quiet", "--resume", *LONGER])
    two.append(["train", "grpo.toml", "--run-dir", "other", {"1": ["--set", "optim.lr=0.1"]}, "--quiet"])
    words = ["train", "ahead.toml", "--run-dir", "ahead", "--quiet"]
    two += [[*words, "--set", "run.updates=2"], [*words, "--resume"]]
    # All at once: that a rank starts takes longer than what it then does.
    codes = launched(root, 2, two)
    assert codes == [[0, 0, 0, 0, 0, 0, 2, 0, 0]] * 2, (root / "said-2.txt").read_text()[-3000:]
    return root


def assert_same(one: Path, two: Path) -> None:
    """The same tasks, tokens, selections, curriculum, evaluations and weights, but for rounding."""
    assert gap(one, two) < NEAR
    for alone, together in zip(lines(one), lines(two), strict=True):
        assert together == pytest.approx(alone, rel=1e-2, abs=1e-5, nan_ok=True)
    assert said(one) == said(two)


@pytest.mark.parametrize("name", ["grpo", "dpo"])
def test_two_ranks_make_the_run_of_one(place: Path, name: str) -> None:
    assert_same(place / f"one-{name}", place / f"two-{name}")


def test_two_ranks_of_one_context_make_the_run_of_one(place: Path) -> None:
    assert_same(place / "one-grpo", place / "context")


@pytest.mark.full
@pytest.mark.parametrize("name", ["reward", "seats"])
def test_two_ranks_train_a_reward_model_and_on_a_game_of_two_as_one(
    name: str, able: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = seats(able, tmp_path) if name == "seats" else offline(able, tmp_path, name)
    Path("recipe.toml").write_text(dump(tables))
    assert cli.run(["train", "recipe.toml", "--run-dir", "one", "--quiet"]) == 0
    assert launched(tmp_path, 2, [["train", "recipe.toml", "--run-dir", "two", "--quiet"]]) == [[0], [0]]
    assert_same(tmp_path / "one", tmp_path / "two")


def test_what_ranks_send_is_documented(place: Path) -> None:
    rows = [json.loads(line) for line in (place / "two-grpo" / "metrics.jsonl").read_text().splitlines()]
    seen = {name for row in rows for name in row if name.startswith("ranks/")}
    page = (HERE.parents[1] / "docs" / "metrics.md").read_text()
    assert seen == set(re.findall(r"`(ranks/\w+)`", page))
    assert all(row["ranks/gradients_bytes"] > 0 for row in rows if row.get("grad_norm"))


def test_shares_of_weights_make_it_too(place: Path) -> None:
    assert gap(place / "one-grpo", place / "shards") < NEAR
    assert (place / "shards" / "ranks" / "1" / "samples").is_dir()


@pytest.mark.full
def test_any_number_of_ranks_goes_on_from_any_other(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that two ranks began as shards goes on in one process, and one of one process as shards."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(place / "grpo.toml", "grpo.toml")
    words = ["train", "grpo.toml", "--run-dir", "begun", "--quiet"]
    assert launched(tmp_path, 2, [[*words, *SHARD, "--set", "run.updates=2"]]) == [[0], [0]]
    assert cli.run([*words, "--resume"]) == 0
    assert gap(place / "one-grpo", tmp_path / "begun") < NEAR
    words = ["train", "grpo.toml", "--run-dir", "alone", "--quiet"]
    assert cli.run([*words, "--set", "run.updates=1"]) == 0
    launched(tmp_path, 3, [[*words, "--resume", *SHARD]])
    assert gap(place / "one-grpo", tmp_path / "alone") < NEAR


@pytest.mark.full
def test_ranks_with_experts_of_their_own_make_the_run_of_one_process(
    able: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From files that ranks read by rows; each goes on from the checkpoint of the other."""
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(able)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    save_pretrained(Qwen3MoeForCausalLM(config), tokenizer, Path("random"))
    sums = {key: online(Path("random"))[key] for key in ("model", "task")}
    Path("sft.toml").write_text(
        dump(sums | {"method": {"name": "sft"}, "optim": {"lr": 0.01}, "batch": {"batch_size": 7}})
    )
    assert cli.run(["train", "sft.toml", "--run-dir", "sft", "--quiet", "--set", "run.updates=8"]) == 0
    model = tmp_path / "sft" / "checkpoints" / "step_000008" / "model"
    Path("grpo.toml").write_text(dump(online(model)))
    train, experts = ["train", "grpo.toml", "--quiet", "--run-dir"], [*SHARD, "--set", "train.experts=2"]
    assert cli.run([*train, "one"]) == 0
    assert cli.run([*train, "begun", "--set", "run.updates=1"]) == 0
    commands = [
        [*train, "two", *experts, "--set", "run.updates=2"],
        [*train, "begun", "--resume", *experts],
    ]
    assert launched(tmp_path, 2, commands) == [[0, 0]] * 2, Path("said-2.txt").read_text()[-3000:]
    assert cli.run([*train, "two", "--resume"]) == 0
    assert gap(Path("one"), Path("two")) < NEAR
    assert gap(Path("one"), Path("begun")) < NEAR


@pytest.mark.full
def test_two_models_of_two_shares_make_the_run_of_one_process_and_go_on_in_one(
    able: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one process goes on as two models of two shares."""
    monkeypatch.chdir(tmp_path)
    Path("grpo.toml").write_text(dump(online(able)))
    four, replicas = ["--set", "rollout.groups=4"], [*SHARD, "--set", "train.replicas=2"]
    train = ["train", "grpo.toml", "--quiet", *four, "--run-dir"]
    assert cli.run([*train, "one"]) == 0
    assert cli.run([*train, "begun", "--set", "run.updates=1"]) == 0
    commands = [
        [*train, "two", *replicas, "--set", "run.updates=2"],
        [*train, "begun", "--resume", *replicas],
    ]
    assert launched(tmp_path, 4, commands) == [[0, 0]] * 4
    assert cli.run([*train, "two", "--resume"]) == 0
    assert gap(Path("one"), Path("two")) < NEAR
    assert gap(Path("one"), Path("begun")) < NEAR


def test_ranks_that_were_told_otherwise_are_refused(place: Path) -> None:
    assert "rank 1 of 2 have a recipe other than rank 0" in (place / "said-2.txt").read_text()
    assert not (place / "other").exists(), "nothing of it is left"


def test_a_rank_that_is_killed_is_named_and_the_run_goes_on_bit_for_bit(killed: str, place: Path) -> None:
    """One step off and as shards: also while weights are gathered for samplers and for a checkpoint."""
    assert re.search(r"rank [01] of 2 was killed or stopped while the others waited for", killed), killed[
        -3000:
    ]
    assert gap(place / "whole", place / "killed") == 0.0


@pytest.mark.full
def test_a_rank_that_hangs_ends_the_run_within_the_deadline(place: Path) -> None:
    run = started(place, "hung", "--set", "run.updates=50", "--set", "train.deadline_s=4")
    until(lambda: (place / "hung" / "checkpoints" / "step_000002").exists(), run)
    stuck = ranks_of(run)[-1]
    stuck.send_signal(signal.SIGSTOP)
    stopped = place / "hung" / "stopped.txt"
    others = [place / "hung" / "ranks" / "1" / "stopped.txt", stopped]
    until(lambda: any(file.exists() for file in others), run)
    stuck.kill()
    run.communicate(timeout=120)
    assert any("was killed or stopped" in file.read_text() for file in others if file.exists())


def test_sampling_ahead_loses_and_repeats_nothing(place: Path) -> None:
    """One update ahead in a sampler thread of each rank: all saves know what was running on all."""
    rows = lines(place / "ahead")
    assert [row["update"] for row in rows] == [0, 1, 2, 3]
    assert max(row.get("lag/max", 0.0) for row in rows) == 1.0
    drawn = [(name, task) for name, task, sample, *_ in said(place / "ahead") if sample == 0]
    assert len([name for name, _ in drawn if not name.startswith("eval")]) == 9, (
        "no group is lost or repeated"
    )


@pytest.mark.full
def test_ranks_share_the_given_answers_of_one(
    able: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = online(tiny) | {"method": {"name": "gkd"}, "reference": {"path": str(able)}}
    tables |= {"rollout": {"groups": 3, "group_size": 2, "given_answers": 5}, "curriculum": {"kind": "none"}}
    Path("gkd.toml").write_text(dump(tables))
    assert cli.run(["train", "gkd.toml", "--run-dir", "one", "--quiet"]) == 0
    assert launched(tmp_path, 2, [["train", "gkd.toml", "--run-dir", "two", "--quiet"]]) == [[0], [0]]
    assert gap(tmp_path / "one", tmp_path / "two") < NEAR


@pytest.mark.parametrize(
    ("over", "ranks", "why"),
    [
        ({}, 4, "rollout.groups.*4 ranks have 3 an update"),
        (
            {"rollout": {"replay": 1}, "method": {"correction": "token_truncated"}},
            2,
            "rollout.replay.*with several ranks",
        ),
        ({"async": {"max_lag": 1}, "method": {"correction": "token_truncated"}}, 2, "curriculum.kind.*ahead"),
        (
            {"method": {"name": "trpo"}, "train": {"shard": True}, "optim": None, "steps": None},
            1,
            "train.shard",
        ),
        (
            {"method": {"name": "trpo"}, "train": {"context": 2}, "optim": None, "steps": None},
            2,
            "train.context",
        ),
        ({"train": {"context": 2}}, 3, "train.context.*3 ranks are not a multiple of 2"),
        ({"train": {"context": 0}}, 1, "train.*context must be 1"),
        (
            {"train": {"shard": True, "experts": 2}},
            2,
            "train.experts.*LlamaForCausalLM has no stacks of experts",
        ),
        ({"train": {"experts": 2}}, 2, "experts.*set shard = true"),
        ({"train": {"experts": 0}}, 1, "train.*experts must be 1"),
        ({"train": {"cpu_offload": True}}, 1, "cpu_offload.*set shard = true"),
        ({"train": {"replicas": 2}}, 3, "replicas.*set shard = true"),
        ({"train": {"shard": True, "replicas": 2}}, 3, "train.replicas.*3 ranks cannot hold 2 models"),
        ({"train": {"shard": True, "replicas": 3}}, 3, "train.replicas.*3 ranks cannot hold 3 models"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_weights_are_read(
    able: Path, tmp_path: Path, run_cli: Any, over: Tables, ranks: int, why: str
) -> None:
    tables = online(able)
    for key, value in over.items():
        tables[key] = value if value is None or "name" in value else tables.get(key, {}) | value
    tables = {key: value for key, value in tables.items() if value is not None}
    (tmp_path / "r.toml").write_text(dump(tables))
    done = run_cli("validate", str(tmp_path / "r.toml"), "--ranks", str(ranks))
    assert done.code == 2
    assert re.search(why, done.err, re.DOTALL), done.err


def test_the_plan_says_what_each_rank_holds(able: Path, tmp_path: Path, run_cli: Any) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(dump(online(able)))
    one, two = (run_cli("validate", str(recipe), "--json", "--ranks", str(n)).json["plan"] for n in (1, 2))
    assert "Each of the ranks" not in one
    assert two["Each of the ranks"]["tasks an update"] == "1 or 2"
    words = ["--json", "--ranks", "4", *SHARD, "--set", "train.replicas=2", "--set", "rollout.groups=4"]
    four = run_cli("validate", str(recipe), *words).json["plan"]
    assert four["Each of the ranks"]["holds"].startswith("1/2 of masters and moments")
