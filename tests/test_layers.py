"""Layers: who may import whom, and how long files and functions may be."""

import ast
import gc
import importlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from posttrain.pipeline import file as pipeline_file
from posttrain.pipeline import kinds
from posttrain.process import interpreter
from posttrain.recipe import config

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "posttrain"
FILES = sorted((ROOT / "src").rglob("*.py"))
PROGRAMS = sorted((ROOT / "scripts").glob("*.py"))
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRACTS = PROJECT["tool"]["importlinter"]
EXTRAS = {
    "posttrain/envs/tools/mcp_client.py": "mcp anyio httpx2",
    "posttrain_study/classic": "gymnasium matplotlib",
    "posttrain_study/claims/picture.py": "matplotlib",
}
"""Files that are imported only where their library is installed."""

LINES, FUNCTION_LINES = 500, 100
LONGER_FILES = {
    "learner/learner.py": 650,  # an update, and the halves of a step
    "models/pretrained.py": 670,  # one check after the other, each with its message
    "recipe/rules.py": 870,  # one table
    "rollout/rollouts.py": 530,  # an episode from its first phase to its last
}
LONGER_FUNCTIONS: dict[str, int] = {}
IMPORTERS = {
    "transformers": (
        "engines/native/compiled_step.py engines/native/engine.py engines/native/runner.py "
        "engines/vllm/asking.py engines/vllm/connection.py engines/vllm/engine.py "
        "engines/vllm/remote.py engines/vllm/start.py envs/tools/functions.py learner/critic.py "
        "learner/forward.py learner/learner.py learner/loan.py learner/lora.py learner/pack.py "
        "learner/passes.py learner/recompute.py learner/reference.py learner/trust_region.py "
        "models/attention.py models/experts.py models/file_names.py models/gguf_export.py "
        "models/gguf_files.py models/heads.py models/loading.py "
        "models/pretrained.py models/scratch.py models/slices.py posttrain_study/claims/digit_sums.py "
        "posttrain_study/claims/dpo_or_rlhf_by_pairs.py "
        "posttrain_study/claims/fitting.py posttrain_study/claims/forgetting.py "
        "posttrain_study/claims/goodhart.py "
        "posttrain_study/claims/policy_path.py posttrain_study/claims/sequents.py "
        "posttrain_study/claims/tiny.py "
        "posttrain_study/truth/policy.py verifiers/model/scorer.py"
    ),
    "vllm": "engines/vllm/start.py",
    "peft": "learner/lora.py",
    "tokenizers": "models/pretrained.py models/scratch.py",
    "pydantic": "base/table_reader.py serving/wire.py",
    "starlette": (
        "base/loopback.py posttrain_people/server.py report/live.py rollout/episodes.py serving/server.py "
        "serving/wire.py"
    ),
    "uvicorn": "base/loopback.py",
    "datasets": "data/records.py",
    "gguf": "models/gguf_export.py models/gguf_files.py models/pretrained.py",
    "huggingface_hub": "api/export.py models/pretrained.py",
    "typer": (
        "api/new.py cli.py commands/clean.py commands/compare.py "
        "commands/contamination.py commands/demo.py commands/doctor.py commands/evaluate.py "
        "commands/export.py commands/feedback.py commands/init.py commands/inspection.py commands/methods.py "
        "commands/options.py commands/prove.py commands/recipes.py commands/runs.py "
        "commands/score.py commands/serve.py commands/show.py commands/steps.py commands/sweep.py "
        "commands/train.py commands/verify.py pipeline/command.py pipeline/kinds.py "
        "posttrain_people/command.py "
        "posttrain_study/commands.py"
    ),
    "accelerate": "run/track.py",
    "mcp": "envs/tools/mcp_client.py",
    "ray": "loop/launch.py rollout/cluster.py rollout/ray.py",
    "lm_eval": "evaluation/suites/harness.py",
    "gymnasium": (
        "posttrain_study/classic/dqn.py posttrain_study/classic/environment.py "
        "posttrain_study/classic/examples.py posttrain_study/classic/maze.py"
    ),
    "matplotlib": "posttrain_study/claims/picture.py posttrain_study/classic/plot.py",
}
"""The files that import each heavy library (docs/decisions/004-one-place-imports.md)."""


def inside(path: Path) -> str:
    """A file's path within the kernel, or of another package with the package."""
    return path.relative_to(SRC if SRC in path.parents else SRC.parent).as_posix()


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    """Collect no garbage while all files are parsed: their 800 000 nodes would be visited each time."""
    gc.disable()
    yield
    for cached in (tree, nodes, imported):
        cached.cache_clear()
    gc.enable()


@cache
def tree(path: Path) -> ast.Module:
    """A file, parsed."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(tree(path)))


@cache
def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, wherever in it."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


# ---------------------------------------------------------------------- imports


def lint(source: Path) -> subprocess.CompletedProcess[str]:
    """import-linter with our contracts on the package in this directory."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from importlinter.cli import lint_imports;"
        "sys.exit(lint_imports(config_filename=sys.argv[2], no_cache=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(source), str(ROOT / "pyproject.toml")],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_layers_hold() -> None:
    done = lint(ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("math/kl.py", "import posttrain.types"),
        ("methods/table.py", "import posttrain.learner.optim"),
        ("learner/pack.py", "import posttrain.curriculum.stream"),
        ("errors.py", "import posttrain.math.kl"),
        ("report/page.py", "import posttrain.math.kl"),
        ("base/name_hints.py", "import posttrain.models.loading"),
        ("evaluation/suites/run.py", "import mathcheck"),
        ("../mathcheck/answers.py", "import posttrain.types"),
    ],
)
@pytest.mark.sample(every=3)
def test_an_import_against_the_layers_is_found(module: str, line: str, tmp_path: Path) -> None:
    shutil.copytree(SRC.parent, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "src" / "posttrain" / module
    file.write_text(file.read_text(encoding="utf-8") + f"\n{line}\n", encoding="utf-8")
    done = lint(tmp_path / "src")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_no_module_stands_outside_the_layers() -> None:
    [layers] = [c["layers"] for c in CONTRACTS["contracts"] if c["type"] == "layers"]
    named = {name.strip() for layer in layers for name in re.split(r"[|:]", layer)} - {"posttrain_study"}
    there = {p.stem for p in SRC.iterdir() if p.suffix == ".py" or p.is_dir()}
    there -= {"__init__", "__main__", "__pycache__"}
    assert {f"posttrain.{name}" for name in there} == named


def test_the_page_on_architecture_shows_the_same_layers() -> None:
    [layers] = [c["layers"] for c in CONTRACTS["contracts"] if c["type"] == "layers"]
    shown = "\n".join(layer.replace("posttrain.", "") for layer in layers)
    assert f"```text\n{shown}\n```" in PAGE


def test_the_page_on_architecture_is_read_in_one_sitting() -> None:
    assert len(PAGE.splitlines()) <= 150, "a decision goes to docs/decisions, a walk to docs/walks.md"


@pytest.mark.parametrize(
    "file", sorted(p for d in ("benchmarks", "recipes", "scripts") for p in (ROOT / d).rglob("*.py")), ids=str
)
def test_programs_import_what_is_there(file: Path) -> None:
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("posttrain", "mathcheck")):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("library", IMPORTERS)
def test_a_library_is_imported_by_the_listed_files_alone(library: str) -> None:
    assert {inside(path) for path in FILES if library in imported(path)} == set(IMPORTERS[library].split())


def test_what_is_imported_at_the_top_is_installed_with_the_package() -> None:
    """A library that only comes with another one is missing on the day that the other one drops it."""
    required = {
        re.split(r"[<>=\[]", text)[0].replace("-", "_") for text in PROJECT["project"]["dependencies"]
    }
    required.add("yaml")  # of pyyaml
    packages = {path.name for path in (ROOT / "src").iterdir()}
    for path in FILES:
        name = path.relative_to(ROOT / "src").as_posix()
        extra = next((names.split() for start, names in EXTRAS.items() if name.startswith(start)), [])
        top = {a.name.split(".")[0] for n in tree(path).body if isinstance(n, ast.Import) for a in n.names}
        top |= {(n.module or "").split(".")[0] for n in tree(path).body if isinstance(n, ast.ImportFrom)}
        assert top <= {*sys.stdlib_module_names, *required, *packages, *extra}, name


@pytest.mark.parametrize("library", ["wandb", "trackio", "mlflow", "datasets", "tensorboard", "ray"])
def test_a_library_that_few_need_is_not_imported_at_the_top(library: str) -> None:
    for path in FILES:
        top = {a.name.split(".")[0] for n in tree(path).body if isinstance(n, ast.Import) for a in n.names}
        top |= {(n.module or "").split(".")[0] for n in tree(path).body if isinstance(n, ast.ImportFrom)}
        assert library not in top, inside(path)


def test_nobody_escapes_through_type_checking() -> None:
    late = {"types.py", "verifiers/model/verifier.py"}  # what they name so is imported at its first use
    late |= {"recipe/tasks.py", "recipe/verifier.py"}  # tables whose fields the registry adds
    for path in FILES:
        names = {n.id for n in nodes(path) if isinstance(n, ast.Name)}
        names |= {n.attr for n in nodes(path) if isinstance(n, ast.Attribute)}
        assert ("TYPE_CHECKING" in names) == (inside(path) in late), inside(path)


# ---------------------------------------------------------------------- names and lengths


def test_nothing_is_named_for_having_no_subject() -> None:
    empty = {"utils", "util", "helpers", "helper", "common", "misc"}
    named = {part for p in [*FILES, *PROGRAMS] for part in (*p.relative_to(ROOT).parts[:-1], p.stem)}
    assert not named & empty
    hollow = re.compile(r"(Manager|Helper|Base|Util|Utils|Wrapper|Handler)$")
    for path in FILES:
        classes = [n.name for n in nodes(path) if isinstance(n, ast.ClassDef)]
        assert not [c for c in classes if hollow.search(c)], inside(path)


def test_files_keep_to_their_budget() -> None:
    lengths = {inside(p): len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    over = {name: n for name, n in lengths.items() if n > LONGER_FILES.get(name, LINES)}
    assert not over
    idle = {name for name in LONGER_FILES if lengths.get(name, 0) <= LINES}
    assert not idle, "they need no exception any more"


def test_functions_keep_to_their_budget() -> None:
    lengths: dict[str, int] = defaultdict(int)
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                name = f"{inside(path)}: {node.name}"
                lengths[name] = max(lengths[name], (node.end_lineno or 0) - node.lineno + 1)
    over = {name: n for name, n in lengths.items() if n > LONGER_FUNCTIONS.get(name, FUNCTION_LINES)}
    assert not over
    idle = {name for name in LONGER_FUNCTIONS if lengths[name] <= FUNCTION_LINES}
    assert not idle, "they need no exception any more"


def test_every_module_has_a_docstring() -> None:
    trees = {path: tree(path) for path in [*FILES, *PROGRAMS]}
    assert not [path for path, parsed in trees.items() if parsed.body and not ast.get_docstring(parsed)]


def test_what_should_fall_does_not_rise() -> None:
    program = runpy.run_path(str(ROOT / "scripts" / "measure.py"))
    most = json.loads((ROOT / "scripts" / "baseline.json").read_text(encoding="utf-8"))
    counts = program["prose"]([nodes(path) for path in FILES])
    risen = {name: (counts[name], bound) for name, bound in most.items() if counts[name] > bound}
    assert not risen, "write less of it; where it fell, scripts/measure.py --lower keeps that"


# ---------------------------------------------------------------------- recipes

EVERY = sorted((ROOT / "recipes").rglob("*.toml"))
PIPELINES = [path for path in EVERY if "[[stage]]" in path.read_text()]
RECIPES = [path for path in EVERY if "[method]" in path.read_text()]  # not pipelines, nor who judges


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: str(p.relative_to(ROOT / "recipes")))
def test_every_recipe_is_read(path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# "), "a recipe begins with what it is"
    assert config.read(path).recipe.model.path


@pytest.mark.parametrize("path", PIPELINES, ids=lambda p: p.stem)
def test_every_pipeline_is_read_with_all_that_its_stages_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These functions are our own, and need no process each to be looked at in.
    monkeypatch.setenv(interpreter.AWAY_ENV, "1")
    found = pipeline_file.read(path)
    assert path.read_text(encoding="utf-8").startswith("# ")
    for stage in found.stages:
        if stage.recipe:
            assert (path.parent / stage.recipe).is_file()
        if stage.make:
            kinds.check_function(found, stage)
