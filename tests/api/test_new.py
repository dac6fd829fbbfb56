"""The command `posttrain model new`."""

import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "three and four is seven\n<|endoftext|>\nthree and five is eight, żółw\n"
SMALL = ("--layers", 1, "--hidden", 32, "--heads", 2, "--context", 32, "--vocab", 270)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_it_makes_a_model_that_transformers_loads(run_cli, text, tmp_path):
    said = run_cli("model", "new", tmp_path / "a", "--text", text, *SMALL)
    assert said.code == 0, said.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(tokenizer) == model.config.vocab_size == 270
    documents = [part.strip("\n") for part in TEXT.split("<|endoftext|>")]
    tokens = sum(len(tokenizer(d, add_special_tokens=False)["input_ids"]) for d in documents)
    size = sum(len(d.encode()) for d in documents)
    parameters = sum(p.numel() for p in model.parameters())
    assert f"{parameters:,} parameters, 270 tokens, {tokens / size:.3f} tokens a byte" in said.out
    assert tokens < size
    assert model.config.num_key_value_heads == 2
    assert model.config.intermediate_size == 96


def test_the_same_words_make_the_same_files(run_cli, text, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert run_cli("model", "new", tmp_path / name, "--text", text, "--seed", seed, *SMALL).code == 0
    files = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
    other = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()}
    assert [name for name in files if files[name] != other[name]] == ["model.safetensors"]


def test_several_files_and_every_option(run_cli, text, tmp_path):
    records = tmp_path / "more.jsonl"
    records.write_text(json.dumps({"text": "12 12 12 12 and 77"}) + "\n")
    shape = ("--layers", 2, "--hidden", 64, "--heads", 4, "--key-heads", 2, "--intermediate", 48)
    both = ("--text", text, "--text", records, "--no-split-digits", "--vocab", 300, "--context", 99)
    assert run_cli("model", "new", tmp_path / "a", *both, *shape).code == 0
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    read = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    assert [config[key] for key in read] == [2, 64, 4, 2]
    assert (config["intermediate_size"], config["max_position_embeddings"]) == (48, 99)
    assert AutoTokenizer.from_pretrained(tmp_path / "a").tokenize("12") == ["12"]


def test_a_text_with_too_little_in_it_gives_fewer_tokens_and_says_so(run_cli, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("ab")
    said = run_cli("model", "new", tmp_path / "a", "--text", path, *SMALL[:-1], 500)
    assert said.code == 0, said.err
    assert "the text supports 261 tokens, not 500" in said.err
    assert "261 tokens" in said.out


def test_a_trainable_recipe(run_cli, text, tmp_path, offline, write):
    """What it makes is trained, saved and sampled from like any other model."""
    assert run_cli("model", "new", tmp_path / "a", "--text", text, *SMALL[:-2], "--vocab", 270).code == 0
    over = {"model": {"path": str(tmp_path / "a")}, "run": {"updates": 1}, "batch": {"batch_size": 2}}
    said = run_cli("train", write(offline, over), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    assert re.search(r"eval/loss \d", said.out)


def test_text_is_learnt_by_a_recipe_which_says_bits_per_byte(run_cli, text, tmp_path, write):
    assert run_cli("model", "new", tmp_path / "a", "--text", text, *SMALL).code == 0
    tables = {
        "model": {"path": str(tmp_path / "a"), "dtype": "float32", "device": "cpu"},
        "method": {"name": "pretrain"},
        "task": {"text": {"path": str(text)}, "held_out_text": {"path": str(text)}},
        "optim": {"lr": 0.01},
        "batch": {"batch_size": 2, "max_length": 16},
        "run": {"updates": 15, "threads": 1},
    }
    said = run_cli("train", write(tables), "--run-dir", tmp_path / "run", "--quiet")
    assert said.code == 0, said.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (next(x for x in order if "eval/loss" in x) for order in (lines, lines[::-1]))
    assert last["eval/loss"] < first["eval/loss"] - 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    documents = [part.strip("\n") for part in TEXT.split("<|endoftext|>")]
    tokens = sum(len(tokenizer(d, add_special_tokens=False)["input_ids"]) + 1 for d in documents)
    nats = last["eval/loss"] * tokens
    size = sum(len(d.encode()) for d in documents)
    assert last["eval/bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)


BAD = [
    (("--text", "none.txt"), "there is no such file"),
    (("--text", "blank.txt"), "there is no text in it"),
    (("--text", "text.txt", "--vocab", 259), "has no room for 256 bytes and 4 marks: it needs 260 or more"),
    (("--text", "text.txt", "--hidden", 100, "--heads", 3), "hidden 100 is not divisible by 3 heads"),
    (("--text", "text.txt", "--text", "text.txt"), "path names text.txt twice"),
    (("--text", "broken.jsonl"), "broken.jsonl:2: there is no field 'text'"),
]


@pytest.mark.parametrize(("words", "line"), BAD, ids=[line[:30] for _, line in BAD])
def test_a_mistake_is_one_line_and_leaves_nothing(run_cli, text, tmp_path, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{}\n')
    said = run_cli("model", "new", "a", *words)
    assert said.code == 2
    assert line in said.err
    assert len(said.err.splitlines()) == 1
    assert not (tmp_path / "a").exists()


def test_a_directory_that_holds_something_is_left_alone(run_cli, text, tmp_path):
    said = run_cli("model", "new", tmp_path, "--text", text, *SMALL)
    assert said.code == 2
    assert "the directory is not empty" in said.err
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]
    assert "it is a file" in run_cli("model", "new", text, "--text", text, *SMALL).err
    below = run_cli("model", "new", text / "a", "--text", text, *SMALL)
    assert (below.code, len(below.err.splitlines())) == (2, 1)
    assert "it cannot be written" in below.err
    (tmp_path / "empty").mkdir()
    assert run_cli("model", "new", tmp_path / "empty", "--text", text, *SMALL).code == 0
