"""Bad input of methods that learn from preferences, labels and steps: a line, exit 2, nothing left behind."""

import json
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from posttrain.models.loading import quiet
from posttrain.models.pretrained import save_pretrained

Tables = dict[str, Any]
Records = list[dict[str, Any]]
Fragments = tuple[str, ...]

PAIR = {"prompt": "2+3?", "chosen": "5", "rejected": "6"}
OTHER = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
STEPS = {"prompt": "2+3?", "steps": ["2+2=4", "5"], "labels": [1, 1]}
GOOD: dict[str, Records] = {
    "dpo": [PAIR, OTHER],
    "reward": [PAIR, OTHER],
    "kto": [PAIR, OTHER],
    "process_reward": [STEPS],
}


def said(*contents: str) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[n % 2], "content": c} for n, c in enumerate(contents)]


DATA: dict[str, tuple[str, Records, Fragments]] = {
    "equal sides": (
        "dpo",
        [PAIR, {**PAIR, "chosen": "6"}],
        ("data.jsonl:2", "chosen and rejected are equal"),
    ),
    "an empty side": ("dpo", [{**PAIR, "rejected": " "}], ("data.jsonl:1", "rejected", "is empty")),
    "a side missing": (
        "reward",
        [{"prompt": "a", "chosen": "5"}],
        ("data.jsonl:1", "there is chosen and no rejected"),
    ),
    "no prompt": ("dpo", [{"chosen": "5", "rejected": "6"}], ("data.jsonl:1", "there is no prompt")),
    "an empty prompt": ("reward", [PAIR, {**PAIR, "prompt": ""}], ("data.jsonl:2", "prompt", "is empty")),
    "different prompts": (
        "dpo",
        [{"chosen": said("2+3?", "5"), "rejected": said("2+4?", "6")}],
        ("data.jsonl:1", "the prompts of the two sides differ", "'2+3?' against '2+4?'"),
    ),
    "the user speaks last": (
        "reward",
        [{"chosen": said("a", "b", "c"), "rejected": said("a", "b", "d")}],
        ("data.jsonl:1", "chosen ends with the user"),
    ),
    "single answers": (
        "dpo",
        [{"prompt": "a", "completion": "5", "label": True}],
        ("data.jsonl:1", "neither chosen and rejected nor"),
    ),
    "a ranking of one": (
        "reward_ranking",
        [{"prompt": "a", "responses": ["5"], "scores": [1]}],
        ("data.jsonl:1", "too few"),
    ),
    "a ranking that prefers nothing": (
        "reward_ranking",
        [{"prompt": "a", "responses": ["5", "6"], "scores": [1, 1]}],
        ("data.jsonl:1", "all scores are equal"),
    ),
    "fewer scores than answers": (
        "reward",
        [{"prompt": "a", "responses": ["5", "6"], "scores": [1]}],
        ("data.jsonl:1", "differ: 2 and 1"),
    ),
    "the rejected side scored higher": (
        "reward_margin",
        [{**PAIR, "score_chosen": 1, "score_rejected": 2}],
        ("data.jsonl:1", "score_chosen is less than score_rejected: 1 and 2"),
    ),
    "pairs without a margin": (
        "reward_margin",
        [{**PAIR, "margin": 2}, {**PAIR, "id": "bare"}],
        ("data.jsonl:2", "of 'bare' only the order is known", "or take method.name = 'reward'"),
    ),
    "ranks for a margin": (
        "reward_margin",
        [{"prompt": "a", "responses": ["5", "6", "7"], "ranks": [1, 2, 3]}],
        ("data.jsonl:1", "only the order is known", "give each record scores or a margin"),
    ),
    "a score that is no number": (
        "reward_regression",
        [{"prompt": "a", "response": "5", "score": "high"}],
        ("data.jsonl:1", "score"),
    ),
    "a label that is neither": (
        "kto",
        [{"prompt": "a", "completion": "5", "label": 2}],
        ("data.jsonl:1", "label is neither true nor false: 2"),
    ),
    "no label": ("kto", [{"prompt": "a", "completion": "5"}], ("data.jsonl:1", "there is none of label")),
    "a rating as a probability": (
        "reward_classification",
        [{"prompt": "a", "response": "5", "rating": r} for r in (1, 4)],
        ("data.jsonl:2", "learns right and wrong", "is 4", "'reward_regression'"),
    ),
    "ratings that are all wanted": (
        "kto",
        [{"prompt": "a", "response": "5", "rating": r} for r in (1, 4)],
        ("task.data", "all labels are above 0, so all are wanted", "on both sides of 0"),
    ),
    "labels that are all bad": (
        "kto",
        [{"prompt": "a", "response": r, "label": False} for r in "56"],
        ("task.data", "all labels are 0 or less, so none is wanted"),
    ),
    "pairs for steps": ("process_reward", [PAIR], ("data.jsonl:1", "there are no steps")),
    "steps for pairs": ("dpo", [STEPS], ("data.jsonl:1", "neither chosen and rejected nor")),
    "more labels than steps": (
        "process_reward",
        [{**STEPS, "labels": [1, 1, 0]}],
        ("data.jsonl:1", "the numbers of steps and labels differ: 2 and 3"),
    ),
    "a label out of range": (
        "process_reward",
        [STEPS, {**STEPS, "labels": [1, 1.5]}],
        ("data.jsonl:2", "label 2 is not from 0 to 1: 1.5"),
    ),
    "steps that do not join": (
        "process_reward",
        [{**STEPS, "response": "2+2=4 and 6"}],
        ("data.jsonl:1", "the steps do not join to the response"),
    ),
    "one prompt alone": (
        "kto",
        [PAIR, {**OTHER, "prompt": PAIR["prompt"]}],
        ("task.data", "all records have the same prompt", "give records of two prompts or more"),
    ),
    "steps that nobody judged": (
        "process_reward",
        [{**STEPS, "labels": [None, None]}],
        ("no step has a label",),
    ),
}
"""(method, records, fragments)"""

OPTIONS: dict[str, tuple[str, Tables, Fragments]] = {
    "a path of a head that is shared": (
        "reward",
        {"critic": {"path": "somewhere"}},
        ("critic", "reads no path"),
    ),
    "an empty separator": (
        "process_reward",
        {"batch": {"separator": ""}},
        ("batch", "separator must not be empty"),
    ),
    "rankings that are all too long": (
        "dpo",
        {"batch": {"max_length": 10}},
        ("batch.max_length", "all 2 rankings were filtered out", "10 tokens", "raise it"),
    ),
    "answers that all end too late": (
        "reward",
        {"batch": {"max_length": 24}},
        ("batch.max_length", "all 2 rankings were filtered out", "24 tokens"),
    ),
    "steps that all end too late": (
        "process_reward",
        {"batch": {"max_length": 24}},
        ("batch.max_length", "all 1 answers were filtered out", "24 tokens"),
    ),
    "a loss that is none": (
        "dpo",
        {"method": {"pair_loss": "logistik"}},
        ("method.pair_loss", "unknown pair_loss 'logistik'", "logistic"),
    ),
    "a share of flips that is too large": (
        "cdpo",
        {"method": {"flipped": 0.6}},
        ("method.flipped", ", got 0.6", "less than or equal to 0.499"),
    ),
    "a beta of 0": ("dpo", {"method": {"beta": 0.0}}, ("method.beta", "greater than or equal to 0.000001")),
    "a beta of a reward model": (
        "reward",
        {"method": {"beta": 0.1}},
        ("method.beta", "reward does not read 'beta'"),
    ),
}
"""(method, tables, fragments)"""


@pytest.fixture
def refuse(run_cli, write, offline, tmp_path) -> Callable[..., None]:
    """refuse(method, records, tables, fragments): the recipe is refused in one line that has these."""

    def make(method: str, records: Records, tables: Tables, fragments: Fragments) -> None:
        data, run = tmp_path / "data.jsonl", tmp_path / "run"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        base = {"method": {"name": method}, "task": {"arithmetic": None, "data": {"path": str(data)}}}
        first = write(offline, base)
        text = json.dumps(tables).replace("{tmp}", str(tmp_path))
        merged = write(_read(first), json.loads(text))
        found = run_cli("train", merged, "--run-dir", run, "--quiet")
        lines = found.err.splitlines()
        assert found.code == 2, (found.code, found.err)
        assert len(lines) == 1, found.err
        assert lines[0].startswith("error: ")
        assert found.out == ""
        for fragment in fragments:
            assert fragment in lines[0], lines[0]
        assert not run.exists(), "a refused recipe leaves no run directory"
        assert len(lines[0]) < 900

    return make


def _read(recipe: Path) -> Tables:
    return tomllib.loads(recipe.read_text())


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_learnt_from(refuse, case):
    method, records, fragments = DATA[case]
    refuse(method, records, {}, fragments)


@pytest.mark.parametrize("case", OPTIONS)
def test_what_a_method_cannot_have(refuse, case):
    method, tables, fragments = OPTIONS[case]
    refuse(method, GOOD.get(method, [PAIR, OTHER]), tables, fragments)


def test_what_is_held_out_is_checked_too(refuse, tmp_path):
    (tmp_path / "held.jsonl").write_text(json.dumps(PAIR) + "\n" + json.dumps({**PAIR, "chosen": "6"}) + "\n")
    held = {"task": {"held_out": {"path": "{tmp}/held.jsonl"}}}
    refuse("dpo", GOOD["dpo"], held, ("held.jsonl:2", "chosen and rejected are equal"))


# ---------------------------------------------------------------- models


@pytest.fixture
def other(tiny, tmp_path) -> Callable[..., Path]:
    """other(change) -> a copy of the tiny model with something changed."""

    def make(change: Callable[[Path], object]) -> Path:
        out = tmp_path / "other"
        shutil.copytree(tiny, out)
        change(out)
        return out

    return make


def as_reward_model(numbers: int) -> Callable[[Path], None]:
    """Turns a model into one whose head gives so many numbers."""

    def change(model: Path) -> None:
        weights = load_file(model / "model.safetensors")
        save_file(
            weights | {"score.weight": torch.zeros(numbers, 32)},
            model / "model.safetensors",
            {"format": "pt"},
        )
        settings = json.loads((model / "config.json").read_text())
        settings["architectures"] = ["LlamaForSequenceClassification"]
        (model / "config.json").write_text(json.dumps(settings))

    return change


def test_a_reward_model_is_no_policy(refuse, other):
    model = {"model": {"path": str(other(as_reward_model(1)))}}
    refuse("dpo", GOOD["dpo"], model, ("config.json", "LlamaForSequenceClassification is not a decoder-only"))


def test_a_head_of_two_numbers_cannot_go_on(refuse, other):
    model = {"model": {"path": str(other(as_reward_model(2)))}}
    refuse(
        "reward", GOOD["reward"], model, ("model.safetensors", "its head gives 2 numbers, and a score is one")
    )


def test_a_separator_that_the_tokenizer_drops(refuse, other):
    def strip(model: Path) -> None:
        words = Tokenizer.from_file(str(model / "tokenizer.json"))
        words.normalizer = normalizers.Strip()
        words.save(str(model / "tokenizer.json"))

    model = {"model": {"path": str(other(strip))}}
    refuse("process_reward", [STEPS], model, ("batch.separator", "the tokenizer has no token", r"'\n\n'"))


def test_a_model_whose_steps_nothing_could_judge(refuse, tiny, tmp_path):
    with quiet():
        model = GPT2LMHeadModel(GPT2Config(vocab_size=100, n_positions=128, n_embd=8, n_layer=1, n_head=1))
    save_pretrained(model, AutoTokenizer.from_pretrained(tiny), tmp_path / "gpt2")
    told = ("model.path", "transformers has no token classification for gpt2")
    refuse("process_reward", [STEPS], {"model": {"path": "{tmp}/gpt2"}}, told)


def test_a_reward_model_of_another_tokenizer_is_no_critic(run_cli, write, online, other, tmp_path):
    def swap(model: Path) -> None:
        as_reward_model(1)(model)
        words = json.loads((model / "tokenizer.json").read_text())
        held = words["model"]["vocab"]
        held["7"], held["8"] = held["8"], held["7"]
        (model / "tokenizer.json").write_text(json.dumps(words))

    over = {"method": {"name": "ppo"}, "critic": {"kind": "own", "path": str(other(swap))}}
    found = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert found.code == 2, found.err
    assert "critic.path: the critic's model was trained with another tokenizer: 2 tokens differ" in found.err
    assert not (tmp_path / "run").exists()


def test_online_a_single_answer_is_no_pair(run_cli, write, online, tmp_path):
    over = {"method": {"name": "online_dpo"}, "rollout": {"group_size": 1}}
    found = run_cli("train", write(online, over), "--run-dir", tmp_path / "run", "--quiet")
    assert found.code == 2, found.err
    assert "rollout.group_size: online_dpo compares the episodes of a task" in found.err
    assert not (tmp_path / "run").exists()
