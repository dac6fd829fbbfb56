"""The command `posttrain model merge`: an adapter in its model."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import posttrain
from posttrain.recipe.target import target_of


def test_the_merged_model_is_what_the_run_sampled_from(run_cli, offline, write, tmp_path):
    path = write(offline, {"lora": {"rank": 2, "alpha": 4.0}, "run": {"updates": 1}, "optim": {"lr": 0.01}})
    run, out = tmp_path / "run", tmp_path / "deep" / "merged"
    assert run_cli("train", path, "--run-dir", run, "--quiet").code == 0
    said = run_cli("model", "merge", run, out)
    assert (said.code, said.out.strip()) == (0, str(out))
    start = AutoModelForCausalLM.from_pretrained(target_of(run).recipe.model.path, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    factors = load_file(run / "checkpoints" / "step_000001" / "adapter" / "adapter_model.safetensors")
    moved = 0
    for name, weight in start.named_parameters():
        pair = [t for key, t in sorted(factors.items()) if name.removesuffix(".weight") in key]
        wanted = weight.data
        if pair:
            a, b = pair
            wanted, moved = weight.data + 2 * b @ a, moved + bool(b.any())
        torch.testing.assert_close(merged.get_parameter(name).data, wanted)
    assert moved
    by_python = posttrain.load(run).merge(tmp_path / "python")
    assert by_python == tmp_path / "python"
    weights = dict(AutoModelForCausalLM.from_pretrained(by_python, dtype=torch.float32).named_parameters())
    assert all(weight.equal(weights[name]) for name, weight in merged.named_parameters())
    with pytest.raises(posttrain.UserError, match="is there already"):
        posttrain.load(run).merge(by_python)
    again = run_cli("model", "merge", run, out)
    assert (again.code, "is there already" in again.err) == (2, True)


def test_what_cannot_be_merged_is_one_line(run_cli, offline, write, tmp_path):
    run = tmp_path / "run"
    assert run_cli("train", write(offline, {"run": {"updates": 1}}), "--run-dir", run, "--quiet").code == 0
    for target, what in ((run, "no adapter to merge; the model is"), (tmp_path, "is no run")):
        said = run_cli("model", "merge", target, tmp_path / "out")
        assert said.code == 2
        assert what in said.err
        assert len(said.err.strip().splitlines()) == 1
    with pytest.raises(posttrain.UserError, match="no adapter to merge"):
        posttrain.load(run).merge(tmp_path / "out")
    assert not (tmp_path / "out").exists()
