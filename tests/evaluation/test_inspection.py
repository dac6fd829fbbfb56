"""`posttrain run inspect`: the numbers are those of the update, whoever made it, and of nothing else."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from posttrain.base.toml import dump
from posttrain.math.spectrum import effective_rank, energy_rank, participation_rank, stable_rank
from posttrain.models import checkpoint
from posttrain.models.loading import quiet
from posttrain.models.rounding import dither
from posttrain.models.tensor_files import write_tensors

Tables = dict[str, Any]
Make = Callable[..., Any]
RANKS = ("effective_rank", "participation_rank", "stable_rank", "rank_99")


# ---------------------------------------------------------------------- ranks


def test_the_ranks_of_a_geometric_spectrum_are_their_closed_forms() -> None:
    """σ_i = q^i: entropy h(q)/(1−q), (1+q)/(1−q), 1/(1−q²), and q^2k ≤ 0.01."""
    halves = 0.5 ** torch.arange(200, dtype=torch.float64)
    assert effective_rank(halves) == pytest.approx(4, rel=1e-12)
    assert participation_rank(halves) == pytest.approx(3, rel=1e-12)
    assert stable_rank(halves) == pytest.approx(4 / 3, rel=1e-12)
    assert energy_rank(halves, 0.99) == 4
    for q in (0.1, 0.9):
        s = q ** torch.arange(500, dtype=torch.float64)
        entropy = -(q * math.log(q) + (1 - q) * math.log(1 - q)) / (1 - q)
        assert effective_rank(s) == pytest.approx(math.exp(entropy), rel=1e-9)
        assert participation_rank(s) == pytest.approx((1 + q) / (1 - q), rel=1e-9)
        assert stable_rank(s) == pytest.approx(1 / (1 - q**2), rel=1e-9)
        assert energy_rank(s, 0.99) == math.ceil(math.log(0.01) / math.log(q**2))


@pytest.mark.parametrize("seed", range(5))
def test_the_ranks_are_ordered_and_blind_to_scale(seed: int) -> None:
    """1 ≤ Σσ²/σ_1² ≤ (Σσ)²/Σσ² ≤ exp(entropy) ≤ how many are not 0."""
    g = torch.Generator().manual_seed(seed)
    s = torch.randn(20, generator=g, dtype=torch.float64).exp().sort(descending=True).values
    s[15:] = 0
    found = [1.0, stable_rank(s), participation_rank(s), effective_rank(s), 15.0]
    assert found == sorted(found)
    for scale in (1e-12, 1e12):
        assert effective_rank(s * scale) == pytest.approx(effective_rank(s), rel=1e-9)
        assert participation_rank(s * scale) == pytest.approx(participation_rank(s), rel=1e-9)
        assert stable_rank(s * scale) == pytest.approx(stable_rank(s), rel=1e-9)
        assert energy_rank(s * scale, 0.99) == energy_rank(s, 0.99)


def test_equal_singular_values_count_one_each_and_nothing_counts_nothing() -> None:
    for k in (1, 3, 7):
        s = torch.tensor([0.3] * k + [0.0] * 2)
        for rank in (effective_rank, participation_rank, stable_rank):
            assert rank(s) == pytest.approx(k)
        assert energy_rank(s, 0.99) == k
    zero = torch.zeros(4)
    assert effective_rank(zero) == participation_rank(zero) == stable_rank(zero) == 0.0
    assert energy_rank(zero, 0.99) == 0


# ---------------------------------------------------------------------- runs


@pytest.fixture
def run_of(tmp_path: Path, offline: Tables) -> Make:
    """run_of(model, weights, **tables) -> a run directory whose newest checkpoint holds these weights."""

    def make(model: Path, weights: dict[str, torch.Tensor], **over: Any) -> Path:
        run = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        run.mkdir()
        tables = offline | over
        tables["model"] = offline["model"] | {"path": str(model)} | over.get("model", {})
        (run / "config.toml").write_text(dump(tables))

        def write(folder: Path) -> None:
            write_tensors(folder / "model" / "model.safetensors", weights)

        checkpoint.save(run / "checkpoints", 7, write, {}, keep=0)
        return run

    return make


@pytest.fixture
def trained(tmp_path: Path, write: Make, run_cli: Make, offline: Tables) -> Make:
    """trained(**tables) -> the directory of a run of two updates."""

    def make(**over: Any) -> Path:
        out = tmp_path / f"trained-{len(list(tmp_path.iterdir()))}"
        changed = {"run": {"updates": 2, "threads": 1}, "optim": {"lr": 0.01}, "batch": {"batch_size": 4}}
        recipe = write(offline, changed | over, name=out.name)
        said = run_cli("train", recipe, "--run-dir", out, "--quiet")
        assert said.code == 0, said.err
        return out

    return make


@pytest.fixture
def inspected(run_cli: Make) -> Make:
    """inspected(run, words...) -> what it prints as JSON, by name."""

    def call(run: Path, *words: object) -> dict[str, Any]:
        said = run_cli("run", "inspect", run, "--json", *words)
        assert said.code == 0, said.err
        lines = [json.loads(line) for line in said.out.splitlines()]
        return {line["name"]: line for line in lines}

    return call


def newest(run: Path) -> Path:
    folder, _ = checkpoint.newest(run / "checkpoints")
    assert folder is not None
    return folder


def expected(update: torch.Tensor, start: torch.Tensor) -> dict[str, float]:
    """The same numbers by their definitions, in float64."""
    s = torch.linalg.svdvals(update.double())
    p = s / s.sum()
    norm = float(update.double().norm())
    return {
        "norm": norm,
        "start_norm": float(start.double().norm()),
        "relative": norm / float(start.double().norm()),
        "effective_rank": float((-(p * p.clamp(min=1e-300).log()).sum()).exp()),
        "participation_rank": float(s.sum() ** 2 / s.square().sum()),
        "stable_rank": norm**2 / float(s[0] ** 2),
    }


def agrees(line: dict[str, Any], update: torch.Tensor, start: torch.Tensor, rel: float = 1e-3) -> None:
    for key, wanted in expected(update, start).items():
        assert line[key] == pytest.approx(wanted, rel=rel), key
    most = torch.linalg.svdvals(update.double())[: len(line["singular_values"])].tolist()
    assert line["singular_values"] == pytest.approx(most, rel=rel, abs=1e-4 * most[0])
    assert line["shape"] == list(update.shape)


def test_a_known_update_is_found(tiny: Path, run_of: Make, inspected: Make) -> None:
    """Of rank 2 with singular values 0.3 and 0.1 in one matrix, of all directions alike in another."""
    weights = load_file(tiny / "model.safetensors")
    low, flat = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"
    g = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(32, 2, generator=g)).Q
    v = torch.linalg.qr(torch.randn(96, 2, generator=g)).Q
    weights[low] = weights[low] + u @ torch.diag(torch.tensor([0.3, 0.1])) @ v.T
    turned = torch.linalg.qr(torch.randn(32, 32, generator=g)).Q
    weights[flat] = weights[flat] + 0.2 * turned
    found = inspected(run_of(tiny, weights))
    assert len(found) == 3 * 7 + 2  # every matrix: embedding, head, seven a layer; no norm
    for name, line in found.items():
        assert line["kind"] == name.split(".")[-2]
        if name not in (low, flat):
            assert line["norm"] == line["relative"] == 0
            assert [line[rank] for rank in RANKS] == [0] * 4
    two = found[low]
    assert two["singular_values"][:2] == pytest.approx([0.3, 0.1], rel=1e-5)
    assert two["norm"] == pytest.approx(0.1**0.5, rel=1e-5)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert two["effective_rank"] == pytest.approx(math.exp(entropy), rel=1e-3)
    assert two["participation_rank"] == pytest.approx(1.6, rel=1e-3)
    assert two["stable_rank"] == pytest.approx(10 / 9, rel=1e-5)
    assert two["rank_99"] == 2
    for rank in RANKS[:3]:
        assert found[flat][rank] == pytest.approx(32, rel=1e-5)
    assert found[flat]["rank_99"] == 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_matrix_of_a_run_against_its_definition(
    dtype: str, tiny: Path, trained: Make, inspected: Make
) -> None:
    run = trained(model={"dtype": dtype})
    start, end = load_file(tiny / "model.safetensors"), load_file(newest(run) / "model/model.safetensors")
    found = inspected(run)
    assert found.keys() == {n for n, w in end.items() if w.ndim == 2}
    for name, line in found.items():
        began = dither(name, start[name].to(getattr(torch, dtype)))
        assert len(line["singular_values"]) == 5
        agrees(line, end[name] - began, began)
    assert min(line["norm"] for line in found.values()) > 0


DORA = {"lora": {"rank": 2, "dora": True}}


@pytest.mark.parametrize("over", [{}, {"lora": {"rank": 2}}, DORA, {**DORA, "model": {"quantize": "nf4"}}])
@pytest.mark.sample("over0", "over3")
def test_a_run_that_moved_nothing_has_no_update(over: Tables, trained: Make, inspected: Make) -> None:
    """In bfloat16 the start is what the run rounded its weights to; all else would be called an update."""
    run = trained(**over | {"optim": {"lr": 0.0}, "model": {"dtype": "bfloat16"} | over.get("model", {})})
    found = inspected(run)
    bound = 1e-2 if over.get("lora", {}).get("dora") else 0.0  # its magnitudes are rounded too
    assert found
    assert max(line["relative"] for line in found.values()) <= bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_weight_has_no_update(dtype: str, trained: Make, inspected: Make, tmp_path: Path) -> None:
    """A reward model never asks for tokens: the output head of an untied model stays, and has no master."""
    pairs = tmp_path / "pairs.jsonl"
    lines = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(8)]
    pairs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {"arithmetic": None, "data": {"path": str(pairs)}}
    found = inspected(trained(method={"name": "reward"}, task=task, model={"dtype": dtype}))
    moved = {name for name, line in found.items() if line["norm"] > 0}
    assert found.keys() - moved == {"lm_head.weight"}


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_an_adapter_s_update_is_what_peft_merges(
    kind: str, tiny: Path, trained: Make, inspected: Make
) -> None:
    option = {} if kind == "lora" else {kind: True}
    run = trained(lora={"rank": 2, "alpha": 3.0, "targets": ["q_proj", "down_proj"]} | option)
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(tiny)
        before = {n: p.detach().clone() for n, p in plain.named_parameters()}
        merged = PeftModel.from_pretrained(plain, str(newest(run) / "adapter")).merge_and_unload()
    found = inspected(run)
    assert len(found) == 6
    assert {line["kind"] for line in found.values()} == {"q_proj", "down_proj"}
    for name, p in merged.named_parameters():
        if name in found:
            # peft adds first and rounds: what is left of a small update has lost some digits.
            agrees(found[name], p.detach() - before[name], before[name], rel=0.02)
            assert found[name]["norm"] > 0
    if kind != "dora":
        assert max(line["rank_99"] for line in found.values()) <= 2
        assert max(line["effective_rank"] for line in found.values()) <= 2 + 1e-9
        assert {len(line["singular_values"]) for line in found.values()} == {2}


def test_a_start_that_was_drawn_is_drawn_again(
    tiny: Path, tmp_path: Path, trained: Make, inspected: Make
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    drawn = {"path": str(bare), "random_init": True}
    still = trained(model=drawn, optim={"lr": 0.0}, run={"updates": 1, "threads": 1, "seed": 5})
    assert {line["norm"] for line in inspected(still).values()} == {0.0}
    moved = trained(model=drawn, run={"updates": 1, "threads": 1, "seed": 5})
    assert 0 < max(line["relative"] for line in inspected(moved).values()) < 1  # √2 from another draw


def test_files_with_other_names_for_the_weights_are_understood(
    tiny: Path, tmp_path: Path, run_of: Make, inspected: Make
) -> None:
    """As of a decoder that was saved without its head's prefix, which transformers reads."""
    start = load_file(tiny / "model.safetensors")
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    save_file(
        {n.removeprefix("model."): w for n, w in start.items()}, other / "model.safetensors", {"format": "pt"}
    )
    moved = dict(start)
    moved["lm_head.weight"] = start["lm_head.weight"] * 1.5
    found = inspected(run_of(other, moved))
    assert len(found) == 23
    assert found.pop("lm_head.weight")["relative"] == pytest.approx(0.5)
    assert {line["norm"] for line in found.values()} == {0.0}


def test_a_weight_that_the_start_has_not_is_left_out_and_said(
    tiny: Path, run_of: Make, run_cli: Make
) -> None:
    weights = load_file(tiny / "model.safetensors")
    run = run_of(tiny, weights | {"score.weight": torch.ones(1, 32)})
    said = run_cli("run", "inspect", run)
    assert said.code == 0
    assert "not there at the start: 1, such as score.weight" in said.out
    report = json.loads((run / "inspect.json").read_text())
    assert report["left_out"]["not there at the start"] == ["score.weight"]
    assert len(report["left_out"]["not matrices"]) == 7


# ---------------------------------------------------------------------- another model


def test_another_model_can_stand_for_the_start(tiny: Path, trained: Make, inspected: Make) -> None:
    run = trained()
    assert inspected(run, "--against", tiny) == inspected(run)
    itself = inspected(run, "--against", newest(run) / "model")
    assert {line["norm"] for line in itself.values()} == {0.0}


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapted_model_against_another_is_all_of_it(
    dora: bool, tiny: Path, make_model: Make, trained: Make, inspected: Make
) -> None:
    run = trained(lora={"rank": 2, "dora": dora, "targets": ["q_proj"]})
    own, same = inspected(run), inspected(run, "--against", tiny)
    assert len(same) == 23
    for name, line in same.items():
        assert line["norm"] == pytest.approx(own[name]["norm"] if name in own else 0.0, rel=1e-3)
    far = inspected(run, "--against", make_model(seed=8))
    assert min(line["relative"] for line in far.values()) > 0.5


# ---------------------------------------------------------------------- what is printed and left


def test_the_whole_is_the_sum_of_its_parts(trained: Make, run_cli: Make) -> None:
    run = trained()
    said = run_cli("run", "inspect", run, "--limit", 3)
    assert said.code == 0, said.err
    report = json.loads((run / "inspect.json").read_text())
    weights, kinds, whole = report["weights"], report["kinds"], report["whole"]
    assert report["checkpoint"] == "step_000002"
    assert whole["weights"] == len(weights) == sum(k["weights"] for k in kinds.values()) == 23
    assert whole["norm"] == pytest.approx(math.sqrt(sum(w["norm"] ** 2 for w in weights)))
    assert whole["norm"] == pytest.approx(math.sqrt(sum(k["norm"] ** 2 for k in kinds.values())))
    start = math.sqrt(sum(w["start_norm"] ** 2 for w in weights))
    assert whole["relative"] == pytest.approx(whole["norm"] / start)
    q = sorted(w["effective_rank"] for w in weights if w["kind"] == "q_proj")
    assert kinds["q_proj"]["effective_rank"] == q[1]
    assert kinds["q_proj"]["full_rank"] == 32
    shown = [line.split()[0] for line in said.out.splitlines() if line.startswith(("model.", "lm_head."))]
    most = sorted(weights, key=lambda w: -w["relative"])[:3]
    assert shown == [w["name"] for w in most]
    assert "3 of 23 weights" in said.out
    for kind in kinds:
        assert any(line.startswith(f"{kind} ") for line in said.out.splitlines())


def test_json_is_one_weight_a_line_the_furthest_first(trained: Make, run_cli: Make) -> None:
    run = trained()
    lines = [json.loads(line) for line in run_cli("run", "inspect", run, "--json").out.splitlines()]
    assert len(lines) == 23
    assert [line["relative"] for line in lines] == sorted((line["relative"] for line in lines), reverse=True)
    few = run_cli("run", "inspect", run, "--json", "--limit", 2)
    assert [json.loads(line) for line in few.out.splitlines()] == lines[:2]


def test_a_weight_that_was_0_has_no_relative_norm(
    tiny: Path, tmp_path: Path, run_of: Make, run_cli: Make
) -> None:
    weights = load_file(tiny / "model.safetensors")
    name, empty = "model.layers.0.self_attn.k_proj.weight", tmp_path / "empty"
    shutil.copytree(tiny, empty)
    save_file(
        weights | {name: torch.zeros_like(weights[name])}, empty / "model.safetensors", {"format": "pt"}
    )
    run = run_of(empty, weights)
    assert run_cli("run", "inspect", run).code == 0
    line = next(w for w in json.loads((run / "inspect.json").read_text())["weights"] if w["name"] == name)
    assert line["relative"] is None
    assert line["norm"] == pytest.approx(float(weights[name].norm()))


# ---------------------------------------------------------------------- mistakes


def test_mistakes_are_one_line(
    tiny: Path, tmp_path: Path, run_of: Make, run_cli: Make, make_model: Make
) -> None:
    weights = load_file(tiny / "model.safetensors")
    good = run_of(tiny, weights)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(good / "config.toml", bare)
    gone = run_of(tmp_path / "gone", weights)
    wide = run_of(make_model(intermediate_size=64), weights)
    broken = run_of(tiny, weights | {"lm_head.weight": weights["lm_head.weight"] * torch.nan})
    alien = run_of(tiny, {"something.weight": torch.ones(2, 2)})
    cases: list[tuple[list[object], list[str]]] = [
        ([tmp_path / "nothing"], ["there is no such run"]),
        ([tmp_path], ["is no run", "config.toml"]),
        ([bare], ["no whole checkpoint", "checkpoint.every"]),
        ([gone], ["config.toml:", "no model at"]),
        ([good, "--against", tmp_path / "nothing"], ["--against", "no model at"]),
        ([good, "--against", bare], ["has no whole checkpoint", "--against"]),
        ([wide], ["changed shape", "[32, 96]", "[32, 64]", "--against"]),
        ([broken], ["lm_head.weight", "NaN"]),
        ([alien], ["no matrix in common"]),
        ([good, "--limit", 0], ["--limit"]),
    ]
    for words, parts in cases:
        said = run_cli("run", "inspect", *words)
        assert said.code == 2, (words, said)
        assert "Traceback" not in said.err
        for part in parts:
            assert part in said.err, (words, said.err)
        assert not said.out


def test_an_adapter_of_another_model_is_refused(make_model: Make, trained: Make, run_cli: Make) -> None:
    run = trained(lora={"rank": 2})
    text = (run / "config.toml").read_text()
    shallow, narrow = make_model(num_hidden_layers=2), make_model(hidden_size=16, num_attention_heads=2)
    path = next(line for line in text.splitlines() if line.startswith("path = "))
    for other, part in ((shallow, "has no model.layers.2."), (narrow, "changed shape")):
        (run / "config.toml").write_text(text.replace(path, f'path = "{other}"'))
        said = run_cli("run", "inspect", run)
        assert said.code == 2
        assert part in said.err


def test_a_damaged_checkpoint_is_passed_over_and_named(trained: Make, run_cli: Make) -> None:
    run = trained(checkpoint={"every": 1})
    file = newest(run) / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    said = run_cli("run", "inspect", run)
    assert said.code == 0
    assert "step_000002 was passed over" in said.err
    assert json.loads((run / "inspect.json").read_text())["checkpoint"] == "step_000001"
