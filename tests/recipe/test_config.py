"""Reading recipes from TOML and writing them back: lines of keys, overrides, and keys that nothing reads."""

import inspect
import json
import re
import tomllib
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.base.name_hints import names_of_other_trainers, translate_name
from posttrain.base.table_reader import key_of
from posttrain.base.toml import dump
from posttrain.methods.build import CHOICES, choices, readable
from posttrain.methods.table import METHODS
from posttrain.plan.resolve import resolve_recipe
from posttrain.recipe import config
from posttrain.recipe.recipe import Recipe
from posttrain.types import UserError

EVERY = sorted((Path(__file__).parents[2] / "recipes").rglob("*.toml"))
RECIPES = [path for path in EVERY if "[method]" in path.read_text()]  # neither pipelines nor judges

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
key = st.one_of(st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True), text)
scalar = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    text,
)
flat = st.one_of(
    scalar, st.lists(scalar, max_size=4), st.lists(st.dictionaries(key, scalar, max_size=2), max_size=2)
)
table = st.recursive(
    st.dictionaries(key, flat, max_size=4),
    lambda inner: st.dictionaries(key, st.one_of(flat, inner), max_size=3),
)


@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), table, max_size=4))
def test_dump_reads_back_as_the_same_tables(tables):
    assert tomllib.loads(dump(tables)) == tables


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_shipped_recipe_survives_a_round_trip(path, tmp_path):
    loaded = config.read(path)
    copy = tmp_path / "config.toml"
    copy.write_text(dump(loaded.tables))
    assert config.read(copy).recipe == loaded.recipe


@pytest.mark.parametrize("name", ["judge", "short", "small/judge", "small/rubric", "small/constitution"])
def test_shipped_judge_is_refused_as_a_recipe(name):
    with pytest.raises(UserError, match=r"\.toml: it is no recipe but a .*verif.*"):
        config.read(Path(__file__).parents[2] / "recipes" / "rlaif" / f"{name}.toml")


def test_components_get_plain_dataclasses_not_pydantic_ones(write, online):
    recipe = config.read(write(online, {"lora": {"rank": 2, "targets": ["q_proj"]}})).recipe
    assert type(recipe) is Recipe

    def assert_plain(value: object) -> None:
        if is_dataclass(value):
            assert not hasattr(type(value), "__pydantic_validator__")
            assert type(value).__module__.startswith(("posttrain.", "mathcheck."))
            for field in fields(value):
                assert_plain(getattr(value, field.name))

    assert_plain(recipe)
    assert recipe.lora.targets == ("q_proj",)
    assert recipe.optim.betas == (0.9, 0.999)


def test_override_value_is_toml_or_else_text(write, online):
    sets = [
        "run.updates=7",
        "optim.betas=[0.8, 0.9]",
        "model.device=cpu",
        'track.sinks=["wandb"]',
        "lora.rank=2",
    ]
    recipe = config.read(write(online), [*sets, "optim.lr = 1e-4 ", "method.credit=centred"]).recipe
    assert (recipe.run.updates, recipe.optim.betas, recipe.model.device) == (7, (0.8, 0.9), "cpu")
    assert (recipe.track.sinks, recipe.lora.rank, recipe.optim.lr) == (("wandb",), 2, 1e-4)
    assert recipe.method["credit"] == "centred"


def test_override_without_a_value_removes_the_key(write, online):
    assert config.read(write(online), ["run.updates="]).recipe.run.updates == 100
    assert config.read(write(online), ["verifier="]).recipe.verifier.number is None


TOML = """\
# a comment
[model]
path = "somewhere"   # not here
[ task . arithmetic ]
high = 9
[method]
name = "grpo"
[verifier.number]
where = "last"

[rollout]
groups = 4
group_size = 1
[optim]
  lr = 1e-6
"betas" = [0.9, 0.99]
[lora]
rank = 0
run.seed = 3
"""


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("model", 2),
        ("model.path", 3),
        ("task", 4),
        ("task.arithmetic", 4),
        ("task.arithmetic.high", 5),
        ("task.arithmetic.low", 4),
        ("method.name", 7),
        ("rollout.group_size", 13),
        ("optim.lr", 15),
        ("optim.betas", 16),
        ("optim.betas.1", 16),
        ("optim.eps", 14),
        ("lora.run.seed", 19),
        ("nothing", 0),
    ],
)
def test_where_finds_the_line_of_a_key_or_of_its_table(key, line):
    where = config.Where(Path("r.toml"), TOML, {})
    assert where(key.split(".")) == (f"r.toml:{line}: {key}" if line else f"r.toml: {key}")


def test_where_names_the_override_that_set_a_key():
    where = config.Where(Path("r.toml"), TOML, {"optim.lr": "--set optim.lr=1", "lora": "--set lora=3"})
    assert where(["optim", "lr"]) == "--set optim.lr=1: optim.lr"
    assert where(["lora", "rank"]) == "--set lora=3: lora.rank"
    assert where(["optim", "eps"]) == "r.toml:14: optim.eps"


def test_locate_adds_the_line_to_an_error_of_a_later_check(write, online):
    loaded = config.read(write(online, {"rollout": {"group_size": 1}}))
    with pytest.raises(UserError) as raised:
        resolve_recipe(loaded.recipe)
    assert raised.value.key == "rollout.group_size"
    located = str(loaded.locate(raised.value))
    number = loaded.where.text.splitlines().index("group_size = 1") + 1
    assert located.startswith(f"{loaded.where.path}:{number}: rollout.group_size: ")
    other = UserError("data.jsonl:3", "x")
    assert loaded.locate(other) is other


def test_bad_skip_leaves_out_unparsable_answers(write, online, tmp_path):
    golds = ["7", r"\int_0^1 x\,dx", "x^2", r"\frac{1", r"\int_2^3 t\,dt"]
    lines = [json.dumps({"prompt": "?", "answer": gold}) + "\n" for gold in golds]
    (tmp_path / "tasks.jsonl").write_text("".join(lines), encoding="utf-8")
    data = {"path": str(tmp_path / "tasks.jsonl"), "bad": "skip"}
    tables = {
        "task": {"arithmetic": None, "data": data},
        "verifier": {"number": None, "math": {}},
        "rollout": {"workers": 1},
    }
    notes: list[str] = []
    resolved = resolve_recipe(config.read(write(online, tables)).recipe, notes.append)
    assert [task.answer for task in resolved.train] == ["7", "x^2"]
    line = next(line for line in notes if "tasks skipped" in line)
    assert "3 of 5 tasks skipped" in line
    for piece in ("2 × ", r"\int is not in the grammar (first", "1 × ", "is missing (first"):
        assert piece in line
    data["bad"] = "error"
    with pytest.raises(UserError, match=r"^tasks\.jsonl:2: "):
        resolve_recipe(config.read(write(online, tables)).recipe)


def test_bad_skip_fails_if_every_answer_is_unparsable(write, online, tmp_path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "?", "answer": "\\\\frac{1"}\n', encoding="utf-8")
    data = {"path": str(tmp_path / "tasks.jsonl"), "bad": "skip"}
    tables = {
        "task": {"arithmetic": None, "data": data},
        "verifier": {"number": None, "math": {}},
        "rollout": {"workers": 1},
    }
    with pytest.raises(UserError, match=r"^tasks\.jsonl:1: ") as raised:
        resolve_recipe(config.read(write(online, tables)).recipe)
    assert raised.value.key.endswith("tasks.jsonl:1")


def test_unknown_key_is_reported_before_what_it_causes(write, online):
    with pytest.raises(UserError, match=r"unknown key 'modle' \(and 2 more\); did you mean 'model'"):
        config.read(write(online, {"model": None, "modle": {"path": "x"}, "run": {"updates": "x"}}))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_shipped_recipe_sets_no_unread_key(path):
    config.read(path)


FOREIGN = {
    "method": {"scale_rewards": True, "epsilon": 0.2, "colour": 1},
    "optim": {"learning_rate": 1e-5, "warmup_ratio": 0.1},
    "rollout": {"num_generations": 8},
    "run": {"max_steps": 10},
    "training": {"bf16": True},
}


def test_unknown_keys_are_reported_together_with_their_lines(write, online):
    with pytest.raises(UserError, match=r"recipe\.toml: 8 unknown keys: ") as raised:
        config.read(write(online, FOREIGN))
    message = str(raised.value)
    lines = write(online, FOREIGN).read_text().splitlines()
    for key, hint in (
        (
            "method.scale_rewards",
            "it is method.credit ('centred' does not divide, 'normalised_sample' does) here",
        ),
        ("method.epsilon", "it is method.clip_low and method.clip_high here"),
        ("optim.learning_rate", "did you mean 'lr'?"),
        ("rollout.num_generations", "did you mean 'group_size'?"),
        ("run.max_steps", "did you mean 'updates'?"),
    ):
        number = next(n for n, text in enumerate(lines, 1) if text.startswith(key.partition(".")[2] + " ="))
        assert f"recipe.toml:{number}: {key}: {hint}" in message
    assert "kl_in_reward" not in message
    assert "method.colour" in message
    assert "training" in message


def test_key_under_a_table_of_another_trainer_is_named_with_its_own_table(write, offline):
    task = {"name": "sums", "arithmetic": {}, "sampling": {"max_new_tokens": 3}}
    with pytest.raises(UserError) as raised:
        config.read(write(offline, {"eval": {"task": [task]}}))
    assert raised.value.fix == "it is eval.task.max_new_tokens here"


def test_foreign_names_translate_to_keys_of_a_recipe():
    known = {"method." + key for line in METHODS.values() for key in readable(line.method)}
    known |= {"method." + key for line in METHODS.values() for key in choices(line.method)}
    functions = (function for choice in CHOICES.values() for function in choice.values())
    known |= {"method." + key for f in functions for key in inspect.signature(f).parameters}
    hints = typing.get_type_hints(Recipe)
    for field in fields(Recipe):
        hint = hints[field.name]
        cls = next((c for c in (hint, *typing.get_args(hint)) if is_dataclass(c)), None)
        known |= {f"{key_of(field.name)}.{f.name}" for f in fields(cls)} if cls else set()
    for name, here in names_of_other_trainers("here").items():
        if here.startswith("the option "):
            continue
        keys = set(re.findall(r"\b([a-z_]+\.[a-z_]+)", here)) or {here}
        assert keys <= known | {"method.name"}, (name, keys - known)


TRL = """
packing completion_only_loss assistant_only_loss per_device_train_batch_size gradient_accumulation_steps
num_generations max_completion_length max_prompt_length beta num_iterations learning_rate warmup_ratio
lr_scheduler_type num_train_epochs max_steps save_steps eval_steps logging_steps report_to use_vllm bf16
gradient_checkpointing lora_r lora_alpha lora_dropout"""
AXOLOTL = """
base_model adapter sequence_len sample_packing pad_to_sequence_len micro_batch_size num_epochs optimizer
lora_target_linear lora_target_modules train_on_inputs roles_to_train val_set_size chat_template rl
evals_per_epoch saves_per_epoch cosine_min_lr_ratio flash_attention special_tokens"""


@pytest.mark.parametrize("names", [TRL, AXOLOTL], ids=["trl", "axolotl"])
def test_common_keys_of_other_trainers_have_a_translation(names):
    assert [name for name in names.split() if not translate_name(name)] == []
