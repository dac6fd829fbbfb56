"""The command `posttrain model export`: a run's model for other programs, with its model card."""

import json
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from posttrain import cli
from posttrain.api import export
from posttrain.base.toml import dump
from posttrain.models import nf4
from posttrain.models.pretrained import load_model, load_tokenizer, resolve, stop_ids
from posttrain.models.scratch import Size, learn_tokenizer, write_new
from posttrain.recipe.target import target_of
from posttrain.verifiers.model.scorer import Scorer
from posttrain.verifiers.model.scores import ResponseStep


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A full run of two updates, whose tokenizer is one that GGUF can hold."""
    place = tmp_path_factory.mktemp("export")
    tokenizer = learn_tokenizer(["user assistant 2+3=5 3+4=7"], 270)
    write_new(place / "model", Size(layers=1, hidden=32, heads=2, context=64), tokenizer, seed=1)
    tables = {
        "model": {"path": str(place / "model"), "dtype": "float32", "device": "cpu"},
        "method": {"name": "sft"},
        "task": {"arithmetic": {"low": 2, "high": 9, "held_out": 6, "template": "{a}+{b}="}},
        "optim": {"lr": 0.003},
        "run": {"updates": 2, "threads": 1},
        "batch": {"batch_size": 8},
        "eval": {"every": 1},
        "checkpoint": {"every": 1, "keep": 2},
    }
    (place / "recipe.toml").write_text(dump(tables))
    assert cli.run(["train", str(place / "recipe.toml"), "--run-dir", str(place / "run"), "--quiet"]) == 0
    return place / "run"


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_an_adapter_is_merged_to_what_the_run_sampled_from(run_cli, offline, write, tmp_path, quantize):
    adapter = {"lora": {"rank": 2, "alpha": 4.0}, "model": {"quantize": quantize}}
    path = write(offline, adapter | {"run": {"updates": 1}, "optim": {"lr": 0.01}})
    run, out = tmp_path / "run", tmp_path / "deep" / "merged"
    assert run_cli("train", path, "--run-dir", run, "--quiet").code == 0
    said = run_cli("model", "export", run, out)
    assert (said.code, said.out.strip()) == (0, str(out))
    start = AutoModelForCausalLM.from_pretrained(target_of(run).recipe.model.path, dtype=torch.float32)
    if quantize != "none":
        nf4.round_trip(start)
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
    by_python = posttrain.load(run).export(tmp_path / "python")
    assert by_python == tmp_path / "python"
    weights = dict(AutoModelForCausalLM.from_pretrained(by_python, dtype=torch.float32).named_parameters())
    assert all(weight.equal(weights[name]) for name, weight in merged.named_parameters())
    with pytest.raises(posttrain.UserError, match="is there already"):
        posttrain.load(run).export(by_python)
    again = run_cli("model", "export", run, out)
    assert (again.code, "is there already" in again.err) == (2, True)


def test_a_full_run_is_exported_from_each_checkpoint(run_cli, run, tmp_path):
    for which, step in (("", 2), ("@1", 1)):
        out = tmp_path / f"out{which}"
        assert run_cli("model", "export", f"{run}{which}", out).code == 0
        saved = load_file(run / "checkpoints" / f"step_{step:06d}" / "model" / "model.safetensors")
        exported = load_file(out / "model.safetensors")
        assert saved.keys() == exported.keys()
        assert all(saved[name].equal(exported[name]) for name in saved)
        assert f"weights after update {step}, in float32" in (out / "README.md").read_text()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) > 0


def test_bfloat16_and_gguf_hold_the_rounded_weights(run_cli, run, tmp_path):
    out = tmp_path / "out"
    said = run_cli("model", "export", run, out, "--dtype", "bfloat16", "--gguf", "f32")
    assert (said.code, said.out.strip()) == (0, str(out))
    saved = load_file(run / "checkpoints" / "step_000002" / "model" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype is torch.bfloat16
    from_gguf = load_model(resolve(str(out / "model-f32.gguf")), dtype=torch.float32).state_dict()
    for name, weight in model.state_dict().items():
        assert weight.equal(saved.get(name, saved["model.embed_tokens.weight"]).bfloat16())
        assert from_gguf[name].equal(weight.float())


def test_a_gguf_is_read_back_from_the_folder_of_the_export(run_cli, run, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "my-model"
    assert run_cli("model", "export", run, out, "--gguf", "f32").code == 0
    assert {"tokenizer.json", "config.json", "model-f32.gguf"} <= {file.name for file in out.iterdir()}
    converted = resolve(str(out / "model-f32.gguf"))
    before, after = load_tokenizer(out), load_tokenizer(converted)
    assert after.get_vocab() == before.get_vocab()
    assert (after.eos_token, after.chat_template) == (before.eos_token, before.chat_template)
    assert stop_ids(converted, after) == stop_ids(out, before)
    assert after("2+3=5 user").input_ids == before("2+3=5 user").input_ids
    weights = load_model(out, dtype=torch.float32).state_dict()
    for name, weight in load_model(converted, dtype=torch.float32).state_dict().items():
        assert weight.equal(weights[name])
    assert not [*converted.rglob("*.gguf")]


def test_transformers_loads_an_export_in_the_dtype_of_its_weights(run_cli, run, tmp_path):
    half, out = tmp_path / "half", tmp_path / "out"
    words = ("--set", "model.dtype=bfloat16", "--set", "run.updates=1", "--run-dir", half, "--quiet")
    assert run_cli("train", run.parent / "recipe.toml", *words).code == 0
    assert run_cli("model", "export", half, out).code == 0
    assert "after update 1, in float32" in (out / "README.md").read_text()
    exported, model = load_file(out / "model.safetensors"), AutoModelForCausalLM.from_pretrained(out)
    assert {weight.dtype for weight in exported.values()} == {model.dtype} == {torch.float32}
    saved = load_file(half / "checkpoints" / "step_000001" / "model" / "model.safetensors")
    assert all(exported[name].equal(weight.float()) for name, weight in saved.items())


REWARDS = {
    "reward": ("text", [{"prompt": "2+3=", "chosen": "5", "rejected": "4"}]),
    "process_reward": (
        "token",
        [{"prompt": "2+3=", "completions": ["2+3=5", "5=4"], "labels": [True, False]}],
    ),
}


@pytest.fixture(params=REWARDS)
def scores(run_cli, run, tmp_path, request):
    """A run of one update of a reward model, of answers or of steps."""
    _, records = REWARDS[request.param]
    (tmp_path / "data.jsonl").write_text(json.dumps(records[0]) + "\n")
    tables = tomllib.loads((run.parent / "recipe.toml").read_text()) | {
        "method": {"name": request.param},
        "task": {"data": {"path": str(tmp_path / "data.jsonl")}},
        "run": {"updates": 1, "threads": 1},
        "batch": {"batch_size": 1},
        "eval": {"every": 0},
    }
    (tmp_path / "recipe.toml").write_text(dump(tables))
    place = tmp_path / request.param
    assert run_cli("train", tmp_path / "recipe.toml", "--run-dir", place, "--quiet").code == 0
    return place


def test_the_card_of_a_reward_model_scores_as_posttrain_does(run_cli, scores, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run_cli("model", "export", scores, out).code == 0
    tag, _ = REWARDS[scores.name]
    card = ModelCard.load(out / "README.md")
    assert card.data.pipeline_tag == f"{tag}-classification"
    code = card.text.split("```python\n")[1].split("\n```")[0]
    question, *steps = "2+3=", "2+3=5", "5=4"
    for text in (question, *steps)[: code.count('"..."')]:
        code = code.replace('"..."', json.dumps(text), 1)
    monkeypatch.chdir(out)
    names = {}
    exec(code, names)
    scorer = Scorer(str(out), "process" if tag == "token" else "outcome", dtype="float32", device="cpu")
    asked = [{"role": "user", "content": question}]
    row = scorer.outcome(asked, steps[0])
    if tag == "token":
        row = scorer.process(asked, [ResponseStep(step, 0) for step in steps], "\n\n")
    assert names["score"].flatten().tolist() == pytest.approx(scorer.numbers([row])[0], abs=1e-5)


def test_a_reward_model_writes_no_answers_and_no_gguf(run_cli, scores, tmp_path):
    for words, reason in (
        (("model", "export", scores, tmp_path / "out", "--gguf", "f32"), "cannot be written as GGUF"),
        (("serve", scores), "a reward model scores answers and writes none; score with it"),
        (("sample", scores, "2+3="), "a reward model scores answers and writes none; score with it"),
    ):
        refused = run_cli(*words)
        assert (refused.code, reason in refused.err) == (2, True), refused.err
    assert not (tmp_path / "out").exists()


def test_the_model_card_tells_how_the_model_was_made(run_cli, run, tmp_path):
    out = tmp_path / "out"
    assert run_cli("model", "export", run, out, "--gguf", "q8_0").code == 0
    card = ModelCard.load(out / "README.md")  # the Hub's own reader
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["posttrain", "sft"]
    assert card.data.license is None
    assert card.data.base_model is None  # a directory of this machine
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["update"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    line = next(line for line in card.text.splitlines() if line.startswith("| eval/loss"))
    first, best, last = line.strip("| ").split(" | ")[1:]
    assert first.endswith(f"(update {min(losses)})")
    assert last.endswith(f"(update {max(losses)})")
    assert best.endswith(f"(update {min(losses, key=losses.get)})")
    recipe = card.text.split("```toml\n")[1].split("\n```")[0]
    assert tomllib.loads(recipe) == tomllib.loads((run / "config.toml").read_text())
    assert "Working directory" in (run / "config.toml").read_text()
    assert "Working directory" not in recipe
    assert "supervised fine-tuning" in card.text
    assert "model-q8_0.gguf" in card.text
    assert "transformers 5" in card.text
    code = card.text.split("```python\n")[1].split("\n```")[0]
    compile(code, "README.md", "exec")


def test_what_cannot_be_exported_is_one_line(run_cli, run, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "get_token", lambda: None)
    for words, what in (
        ((tmp_path,), "is no run"),
        ((f"{run}@9",), "has no checkpoint of update 9"),
        ((run, "--gguf", "q4_0"), "unknown type 'q4_0'"),
        ((run, "--dtype", "int8"), "unknown dtype 'int8'"),
        ((run, "--push", "name"), "write OWNER/NAME"),
        ((run, "--push", "owner/name"), "there is no token"),
        ((run, "--private"), "add --push"),
    ):
        said = run_cli("model", "export", words[0], tmp_path / "out", *words[1:])
        assert said.code == 2
        assert what in said.err
        assert len(said.err.strip().splitlines()) == 1
    assert not [*tmp_path.glob("*out*")]


def test_a_failed_export_leaves_nothing(run_cli, run, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.gguf_export, "write_gguf", full)
    said = run_cli("model", "export", run, tmp_path / "out", "--gguf", "f32")
    assert (said.code, "No space left" in said.err) == (2, True)
    assert not [*tmp_path.glob("*out*")]


class Hub(BaseHTTPRequestHandler):
    """The parts of the Hub's API that an upload of small files uses; every file is sent within the commit."""

    requests: ClassVar[list[tuple[str, bytes]]]

    def do_GET(self) -> None:
        self.answer(
            404 if "resolve" in self.path else 200, {"sha": "0" * 40, "siblings": [], "id": "me/tiny"}
        )

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).requests.append((self.path, body))
        if self.path.endswith("/repos/create"):
            self.answer(200, {"url": f"{self.server.url}/me/tiny"})
        elif self.path.endswith("/validate-yaml"):
            self.answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answers = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            self.answer(200, {"files": answers})
        elif "/commit/" in self.path:
            self.answer(200, {"commitUrl": f"{self.server.url}/me/tiny/commit/0", "commitOid": "0" * 40})
        else:
            self.answer(403, {"error": "no"})

    def answer(self, code: int, value: object) -> None:
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    class Requests(Hub):
        requests: ClassVar[list[tuple[str, bytes]]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Requests) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        api = export.HfApi
        monkeypatch.setattr(export, "HfApi", lambda: api(endpoint=server.url, token="hf_token"))
        monkeypatch.setattr(export, "get_token", lambda: "hf_token")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield Requests.requests
        server.shutdown()


def test_push_uploads_every_file_of_the_directory(run_cli, run, tmp_path, hub):
    out = tmp_path / "out"
    said = run_cli("model", "export", run, out, "--push", "me/tiny", "--private")
    assert said.code == 0, said.err
    assert said.out.split() == [str(out), "https://huggingface.co/me/tiny"]
    created = json.loads(hub[0][1])
    assert (created["name"], created["organization"]) == ("tiny", "me")
    assert created.get("private") or created["visibility"] == "private"  # by the version of huggingface_hub
    [commit] = [body for path, body in hub if "/commit/" in path]
    keys = [json.loads(line) for line in commit.splitlines()]
    names = {key["value"]["path"] for key in keys if key["key"] == "file"}
    assert names == {str(p.relative_to(out)) for p in Path(out).rglob("*") if p.is_file()}


def test_a_hub_that_cannot_be_reached_is_one_line_and_the_model_stays(run_cli, run, tmp_path, monkeypatch):
    api = export.HfApi
    monkeypatch.setattr(export, "HfApi", lambda: api(endpoint="http://127.0.0.1:9", token="hf_token"))
    monkeypatch.setattr(export, "get_token", lambda: "hf_token")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    said = run_cli("model", "export", run, tmp_path / "out", "--push", "me/tiny")
    assert said.code == 1
    assert said.err.strip().splitlines()[-1].startswith("error: upload to me/tiny")
    assert (tmp_path / "out" / "model.safetensors").is_file()
