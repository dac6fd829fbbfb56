"""What a user begins with: recipes by name, `init`, `schema`, `data show`, and `train` without a file."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from posttrain.base.usercode import load_named
from posttrain.commands import train as command
from posttrain.methods.table import METHODS
from posttrain.recipe.catalogue import catalogue, find_recipe, recipes_dir
from posttrain.recipe.schema import recipe_schema

ROOT = Path(__file__).parents[2]
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]
SMALL = (
    "model.dtype=float32",
    "run.updates=2",
    "run.seed=7",
    "rollout.groups=2",
    "rollout.group_size=4",
    "sampling.max_new_tokens=4",
    "optim.lr=0.01",
)


def sets(*assignments: str) -> list[str]:
    return [word for each in assignments for word in ("--set", each)]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------- recipes by name


def test_catalogue_lists_every_recipe_and_pipeline_of_the_folder():
    files = [
        f for f in recipes_dir().rglob("*.toml") if {"model", "stage"} & tomllib.loads(f.read_text()).keys()
    ]
    assert sorted(entry.file for entry in catalogue().values()) == sorted(files)
    assert catalogue()["rlhf"].is_pipeline
    assert catalogue()["rlhf/ppo"].stage_of == "rlhf"
    assert catalogue()["agents/guess"].stage_of == ""
    assert all(entry.about for entry in catalogue().values())


def test_times_of_recipes_are_read_from_their_heads_and_listed(run_cli):
    assert all(re.fullmatch(r"(\d+ min)?", entry.takes) for entry in catalogue().values())
    assert catalogue()["arithmetic_sft"].takes == "3 min"
    assert "Takes" not in catalogue()["arithmetic_sft"].about
    assert re.search(r"arithmetic_sft +recipe +3 min ", run_cli("recipes").out)


def test_each_recipe_says_what_came_of_it_and_where_that_stands(run_cli):
    root = recipes_dir().parent
    for entry in catalogue().values():
        assert bool(entry.result) == (not entry.stage_of), entry.name
        measured = re.search(r"\((\d{4}-\d\d-\d\d), ([\w/.-]+)\)$", entry.result)
        assert measured or entry.stage_of or entry.result.startswith("not "), entry.name
        assert measured is None or (root / measured[2]).is_file(), entry.name
    listed = " ".join(run_cli("recipes").out.split())
    assert "add two numbers. Result: 24.5 → 93 % of held-out sums" in listed


def test_recipe_name_is_found_where_there_is_no_such_file(here):
    file = recipes_dir() / "agents" / "guess.toml"
    for name in ("agents/guess", "agents/guess.toml", "recipes/agents/guess.toml"):
        assert find_recipe(Path(name)) == file
    (here / "agents").mkdir()
    (here / "agents" / "guess.toml").write_text("")
    assert find_recipe(Path("agents/guess.toml")) == Path("agents/guess.toml")
    for other in ("agents/gues", "../arithmetic_grpo", "/arithmetic_grpo"):
        assert find_recipe(Path(other)) == Path(other)


def test_commands_take_a_recipe_by_its_name(run_cli, here, tiny):
    small = sets(f"model.path={tiny}", *SMALL, "eval.limit=2", "task.arithmetic.held_out=2")
    assert run_cli("validate", "arithmetic_grpo", *small).code == 0
    wrong = run_cli("validate", "arithmetic_grp")
    assert wrong.code == 2
    assert "did you mean 'arithmetic_grpo'" in wrong.err


def test_recipes_prints_and_copies_a_pipeline_with_its_stages(run_cli, here):
    assert run_cli("recipes", "r1_zero").out == (recipes_dir() / "r1_zero.toml").read_text()
    assert run_cli("recipes", "r1_zero", "--out", "mine").code == 0
    assert {f.name for f in (here / "mine" / "r1_zero").iterdir()} >= {"grpo.toml", "rows.py"}
    assert not list(here.rglob("__pycache__"))
    assert run_cli("recipes", "r1_zero", "--out", "mine").code == 2, "nothing is written over"
    names = [row["name"] for row in json.loads(run_cli("recipes", "--json").out)]
    assert "rlhf" in names
    assert "rlhf/ppo" not in names


# ---------------------------------------------------------------------- init


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sample(
    "grpo", "gigpo", "ppo_penalty", "trpo", "distill", "klq_offline", "reward_margin", "kto", "pretrain"
)
def test_every_recipe_of_init_is_valid(run_cli, here, tiny, method):
    assert run_cli("init", "mine", "--method", method, "--model", tiny).code == 0
    done = run_cli("validate", "mine/recipe.toml")
    assert done.code == 0, done.err
    assert done.err.count("unknown") == 0
    tables = tomllib.loads((here / "mine" / "recipe.toml").read_text())
    jsonschema.validate(tables, json.loads((here / "mine" / "recipe.schema.json").read_text()))


def test_recipe_of_init_teaches_something(run_cli, here):
    """A teacher with the student's weights and prompt has no gradient; steps of es are on σ's scale."""

    def written(method: str) -> tuple[str, str, dict[str, Any]]:
        done = run_cli("init", method, "--method", method, "--model", "the/model")
        text = (here / method / "recipe.toml").read_text()
        return done.out, text, tomllib.loads(text)

    _, _, gkd = written("gkd")
    assert gkd["reference"] == {"hint": "The answer is {answer}."}
    for method in ("kd", "distill"):
        printed, text, tables = written(method)
        assert tables["reference"]["path"] == "the/model"
        assert "REPLACE" in text
        assert "set reference.path first" in printed
    _, _, es = written("es")
    sigma = METHODS["es"].method.sigma
    assert es["optim"]["lr"] == pytest.approx(sigma * sigma / 2), "α = lr / σ, half of σ"
    for method, compared in (("grpo", True), ("remax", False)):
        assert ("which are compared" in written(method)[1]) == compared


def test_init_writes_over_nothing(run_cli, here):
    (here / "recipe.toml").write_text("mine")
    assert run_cli("init").code == 2
    assert [f.name for f in here.iterdir()] == ["recipe.toml"]


def test_files_of_a_recipe_are_looked_for_in_its_folder_too(run_cli, here, tiny):
    run_cli("init", "mine", "--model", tiny)
    for folder in (here, here / "mine"):
        os.chdir(folder)
        recipe = os.path.relpath(here / "mine" / "recipe.toml")
        assert run_cli("validate", recipe, "--json").code == 0
    # A file of the recipe's folder comes first.
    os.chdir(here)
    (here / "tasks.jsonl").write_text(json.dumps({"prompt": "1", "answer": "1"}) + "\n")
    assert "3 tasks in the form" in run_cli("validate", "mine/recipe.toml").err
    # A path of the command line is relative to the working directory alone.
    given = run_cli("validate", "mine/recipe.toml", "--set", "task.data.path=tasks.jsonl")
    assert "1 task in the form" in given.err
    (here / "tasks.jsonl").unlink()
    assert run_cli("validate", "mine/recipe.toml", "--set", "task.data.path=tasks.jsonl").code == 2


# ---------------------------------------------------------------------- schema


def test_schema_accepts_every_recipe_and_refuses_what_the_reader_refuses():
    schema = recipe_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    validator = jsonschema.Draft7Validator(schema)
    for entry in catalogue().values():
        if not entry.is_pipeline:
            validator.validate(tomllib.loads(entry.file.read_text()))
    tables = tomllib.loads((recipes_dir() / "arithmetic_grpo.toml").read_text())
    for key, value in (("rows", "many"), ("row", 3), ("name", "vlm")):
        wrong = {**tables, "engine": {key: value}}
        assert list(validator.iter_errors(wrong)), key
    assert list(validator.iter_errors({**tables, "method": {"name": "gpro"}}))
    assert list(validator.iter_errors({k: v for k, v in tables.items() if k != "model"}))


def test_schema_says_what_each_key_means():
    schema = recipe_schema()
    rollout = schema["$defs"]["Rollout"]["properties"]
    assert all(key["description"] for key in rollout.values())
    assert set(schema["properties"]["method"]["properties"]["name"]["enum"]) == set(METHODS)


# ---------------------------------------------------------------------- data show


def test_data_show_marks_what_is_trained(run_cli, here, tiny):
    run_cli("init", "pairs", "--method", "dpo", "--model", tiny)
    rows = [
        json.loads(x)
        for x in run_cli("data", "show", "pairs/recipe.toml", "--json", "--limit", "1").out.splitlines()
    ]
    assert [row["row"] for row in rows] == ["1, answer 1", "1, answer 2"]
    for row, answer in zip(rows, ("42", "52"), strict=True):
        text = "".join(part["text"] for part in row["parts"])
        assert "What is 17 + 25?" in text
        assert [p["text"] for p in row["parts"] if p["trained"]] == [f"{answer}<|im_end|>"]
    run_cli("init", "tasks", "--model", tiny)
    shown = run_cli("data", "show", "tasks/recipe.toml", "--limit", "2").out
    assert "a run samples the answers" in shown
    assert "⟦" not in shown
    assert shown.count("── ") == 2


# ---------------------------------------------------------------------- train without a file


def test_train_without_a_file_prints_the_recipe_that_it_runs(run_cli, here, tiny):
    (here / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    (here / "r.py").write_text("def odd(response):\n    return float(len(response) % 2)\n")
    words = ("train", "--model", tiny, "--data", "sums.jsonl", "--reward", "r.py:odd", *sets(*SMALL))
    done = run_cli(*words, "--run-dir", "first")
    assert done.code == 0, done.err
    printed = done.err[done.err.index("[model]") :]
    text = printed[: printed.index("sums.jsonl: ")]
    (here / "same.toml").write_text(text)
    assert run_cli("train", "same.toml", "--run-dir", "second", "--quiet").code == 0
    weights = [
        next((here / run / "checkpoints").rglob("model.safetensors")).read_bytes()
        for run in ("first", "second")
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("method", "sets", "rate"),
    [
        ("sft", (), 2e-5),
        ("dpo", (), 1e-6),
        ("reward", (), 1e-5),
        ("orpo", (), 8e-6),
        ("sft", ("optim.lr=3e-4",), 3e-4),
        ("dpo", ("method.name=sft", "optim.warmup_steps=2"), 2e-5),
    ],
)
def test_train_without_a_file_prints_the_usual_rate_of_its_method(here, method, sets, rate):
    printed: list[str] = []
    loaded, _ = command._recipe_of({"model": "m", "data": "d.jsonl", "method": method}, sets, printed.append)
    assert loaded.recipe.optim.lr == rate
    [text] = printed
    assert tomllib.loads(text[text.index("[model]") :])["optim"]["lr"] == rate


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("--reward", "r.py"), "name the function: r.py:odd or r.py:even"),
        (("--reward", "gone/r.py"), "name the function: gone/r.py:NAME"),
        ((), "give --reward number, another verifier's name, or --reward file.py:NAME"),
    ],
)
def test_a_reward_without_its_function_is_named(run_cli, here, tiny, words, fix):
    (here / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    code = "def odd(response):\n    return 1.0\n\n\nasync def even(response):\n    return 0.0\n"
    (here / "r.py").write_text(f"{code}\n\ndef _helper():\n    pass\n")
    done = run_cli("train", "--model", tiny, "--data", "sums.jsonl", *words)
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert last.startswith("error: --reward: "), last
    assert last.endswith(fix), last


def test_options_of_train_replace_keys_of_a_recipe(run_cli, here, tiny):
    run_cli("init", "mine", "--model", "nowhere")
    (here / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    words = ("train", "mine/recipe.toml", "--model", tiny, "--method", "rloo", "--data", "sums.jsonl")
    done = run_cli(*words, "--run-dir", "run", "--quiet", *sets(*SMALL))
    assert done.code == 0, done.err
    tables = tomllib.loads((here / "run" / "config.toml").read_text())
    assert tables["method"]["name"] == "rloo"
    assert tables["task"]["data"]["path"] == "sums.jsonl"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((), "RECIPE"),
        (("--data", "x.jsonl"), "RECIPE"),
        (("arithmetic_grpo", "--reward", "number"), "--reward"),
        (("rlhf", "--method", "dpo"), "--method"),
    ],
)
def test_train_refuses_options_that_nothing_reads(run_cli, here, words, key):
    done = run_cli("train", *words)
    assert done.code == 2
    assert done.err.startswith(f"error: {key}: ")


# ---------------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("posttrain tra", ["train"]),
        ("posttrain data sh", ["show"]),
        ("posttrain train agents/gu", ["agents/guess", "agents/guess/grpo", "agents/guess/sft"]),
        ("posttrain train min", ["mine.toml"]),
        ("posttrain train x --met", ["--method"]),
        ("posttrain train x --method dr_", ["dr_grpo"]),
        ("posttrain train x --set rollout.gr", ["rollout.group_size=", "rollout.groups="]),
        ("posttrain train x --set method.name=dr_", ["method.name=dr_grpo"]),
        ("posttrain sample ru", ["runs/first"]),
        ("posttrain train x --run-dir ", []),
    ],
)
@pytest.mark.sample("posttrain train agents/gu-*", "posttrain train x --set rollout.gr-*")
def test_shell_completes(here, line, expected):
    (here / "mine.toml").write_text("")
    (here / "runs" / "first").mkdir(parents=True)
    (here / "runs" / "first" / "config.toml").write_text("")
    env = os.environ | {
        "_POSTTRAIN_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    command = [sys.executable, "-m", "posttrain"]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == expected, done.stderr


def test_completing_imports_no_command(here):
    code = (
        "import sys; from posttrain.commands.completion import complete; "
        "complete('train', ['x', '--set'], 'optim.'); assert not {'torch', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---------------------------------------------------------------------- the wheel


@pytest.mark.full
def test_wheel_and_sdist_work_in_an_empty_folder(here, tiny):
    """The commands of the README, from a built wheel in a fresh environment, without the repository."""
    pip = [sys.executable, "-m", "pip", "-q"]
    source, hatch = here / "source", here / "hatch"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".venv*", ".git", ".*cache", "runs", "__pycache__")
    )
    made = subprocess.run(
        [*pip, "install", "--target", str(hatch), "hatchling"], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"THE WHEEL IS NOT TESTED HERE: hatchling cannot be installed: {made.stderr[-300:]}")
    build = "import sys; from hatchling.build import build_sdist; print(build_sdist(sys.argv[1]))"
    env = os.environ | {"PYTHONPATH": str(hatch)}
    subprocess.run([sys.executable, "-c", build, str(here / "dist")], cwd=source, env=env, check=True)
    [sdist] = (here / "dist").glob("posttrain-*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert not [name for name in archive.getnames() if "__pycache__" in name or "/runs/" in name]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(here / "dist"), str(sdist)]
    subprocess.run(wheel, env=env, check=True)
    [file] = (here / "dist").glob("posttrain-*.whl")
    names = zipfile.ZipFile(file).namelist()
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]
    venv.create(here / "env", with_pip=False)
    [site] = (here / "env" / "lib").glob("python3*/site-packages")
    python = here / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(file)], check=True)
    # The libraries of this environment, without posttrain.
    libraries = here / "libraries"
    libraries.mkdir()
    for path in (p for p in sys.path if p.endswith("site-packages")):
        for each in Path(path).iterdir():
            if "posttrain" not in each.name and not (libraries / each.name).exists():
                (libraries / each.name).symlink_to(each)
    (site / "libraries.pth").write_text(f"{libraries}\n")
    empty = here / "empty"
    empty.mkdir()
    every = ("rollout.select=all", "rollout.max_rounds=", "eval.limit=2", "task.arithmetic.held_out=2")
    small = sets(f"model.path={tiny}", *SMALL, *every)

    def run(*words: object) -> str:
        command = [str(here / "env" / "bin" / "posttrain"), *map(str, words)]
        done = subprocess.run(command, cwd=empty, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "arithmetic_grpo" in run("recipes")
    run("train", "arithmetic_grpo", *small, "--run-dir", "run", "--quiet")
    assert "accuracy" in run("eval", "run", *sets("eval.limit=2"))
    run("init", "mine", "--model", tiny)
    run("validate", "mine/recipe.toml")
    assert "held-out accuracy" in run("demo", *small, *sets("run.stop_when="))
    assert (empty / "runs" / "demo-seed0-001" / "report.html").exists()


def test_copy_has_every_folder_whose_files_a_pipeline_names(here, run_cli):
    assert run_cli("recipes", "agents/nim_gigpo", "--out", here / "mine").code == 0
    assert (here / "mine" / "nim" / "nim.py").is_file()
    assert run_cli("recipes", "distill", "--out", here / "other").code == 0
    assert (here / "other" / "arithmetic_grpo.toml").is_file()
    said = run_cli("recipes", "arithmetic_grpo", "--out", here / "other")
    assert (said.code, "it is there already" in said.err) == (2, True)
    (here / "other" / "distill" / "student.toml").write_text("# changed")
    (here / "other" / "distill.toml").unlink()
    (here / "other" / "arithmetic_grpo.toml").unlink()
    said = run_cli("recipes", "distill", "--out", here / "other")
    assert (said.code, "student.toml" in said.err or "distill" in said.err) == (2, True)
    assert (here / "other" / "distill" / "student.toml").read_text() == "# changed"


@pytest.mark.parametrize(("name", "judge"), [("rlaif", "judge.toml"), ("rlaif/small", "small/judge.toml")])
def test_judges_of_a_pipeline_lie_next_to_it(here, run_cli, tiny, name, judge):
    """In an empty folder: the packaged ones by name, and those of a copy in the copy."""
    assert run_cli("recipes", name, "--out", "mine").code == 0
    rubric = "short" if name == "rlaif" else "small/rubric"
    for folder in (recipes_dir(), here / "mine"):
        [makes] = folder.rglob("makes.py")
        if folder == here / "mine":
            file = makes.parent / f"{rubric}.toml"
            file.write_text(file.read_text().replace('prompt = """', 'prompt = """CHANGED', 1))
        stages = tomllib.loads((folder / f"{name}.toml").read_text())["stage"]
        assert {stage.get("options", {}).get("judge", judge) for stage in stages} == {judge}
        found = load_named(f"{makes}:_judge")(judge, str(tiny))
        assert ("CHANGED" in found.rubric.prompt) == (folder == here / "mine")


PIPELINES = [entry.name for entry in catalogue().values() if entry.is_pipeline]


@pytest.mark.full
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_are_valid_by_name_and_copied_in_an_empty_folder(here, run_cli, name):
    copied = run_cli("recipes", name, "--out", "mine")
    assert copied.code == 0, copied.err
    for recipe in (name, copied.out.splitlines()[0]):
        said = run_cli("validate", recipe)
        assert said.code == 0, said.err
        assert not list(here.glob("runs*"))


@pytest.mark.full
def test_games_of_the_catalogue_run_in_an_empty_folder(here, run_cli):
    short = ("form.run.updates=2", "play.run.updates=1", "play.eval.limit=2")
    sets = [word for assignment in short for word in ("--set", assignment)]
    said = run_cli("train", "agents/nim_gigpo", "--run-dir", here / "run", "-q", *sets)
    assert said.code == 0, said.err
