"""docs: what the pages say of the code is so."""

import ast
import contextlib
import dataclasses
import doctest
import functools
import gc
import importlib.util
import inspect
import io
import itertools
import json
import re
import shlex
import sys
import tomllib
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import posttrain
from posttrain.base.name_hints import translate_name
from posttrain.base.table_reader import key_of
from posttrain.base.table_reader import keys_of as fields_of
from posttrain.base.usercode import load_named
from posttrain.cli import COMMANDS, GROUPS, Command, plugin_commands
from posttrain.envs.protocol import Start, guarded_reply, guarded_start
from posttrain.math.reduce import weighted_sum
from posttrain.methods.build import CHOICES, choices, numbers, readable
from posttrain.methods.q_learning import SoftQ
from posttrain.methods.table import METHODS
from posttrain.pipeline import file as pipeline_file
from posttrain.plan.resolve import resolve_recipe
from posttrain.recipe import config
from posttrain.recipe.catalogue import catalogue
from posttrain.recipe.recipe import Recipe
from posttrain.report.alarms import RULES
from posttrain.run import samples
from posttrain.types import Outputs, Task, UserError
from posttrain.verifiers.function import Function

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "posttrain"
README = ROOT / "README.md"
DOCS = ROOT / "docs"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PAGES = [README, ARCHITECTURE, *sorted((ROOT / "docs").rglob("*.md"))]
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

MADE_OF = (
    *("returns", "estimator", "credit", "ratio", "surrogate", "value_loss", "reduction"),
    *("implicit", "divergence", "pair_loss", "item_loss", "repeats", "keep", "balance"),
)
"""Choices whose functions the pseudocode of an update names."""


def each_page(test: Callable[[Path], None]) -> Callable[[], None]:
    """Run a test on every page, and fail with all pages on which it fails."""

    def run() -> None:
        errors = []
        for page in PAGES:
            try:
                test(page)
            except Exception as error:
                error.add_note(str(page.relative_to(ROOT)))
                errors.append(error)
        if errors:
            raise ExceptionGroup("pages", errors)

    return run


def script(name: str) -> ModuleType:
    """A file of scripts/ as a module, which may import others."""
    if str(ROOT / "scripts") not in sys.path:
        sys.path.append(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(f"posttrain_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PAGES_OF = script("pages")
"""What makes the site's pages."""


@pytest.fixture(scope="module")
def docs() -> Iterator[ModuleType]:
    """scripts/docs.py as a module. Nothing is collected meanwhile: it parses every file."""
    gc.disable()
    yield script("docs")
    gc.enable()
    del sys.modules["posttrain_docs"]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def fences(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in a language."""
    return [body for kind, body in FENCED.findall(page.read_text(encoding="utf-8")) if kind == language]


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the Markdown table whose first heading this is, without the heading."""
    lines = text.split(f"| {first} |", 1)[1].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([part.strip() for part in re.split(r"(?<!\\)\|", line.strip())[1:-1]])
    return rows


def keys_of(cls: type, path: str = "") -> Iterator[str]:
    """Every key and table of a configuration, dotted."""
    for name, hint in fields_of(cls):
        dotted = f"{path}.{key_of(name)}".removeprefix(".")
        yield dotted
        for inner in (hint, *typing.get_args(hint)):
            if isinstance(inner, type) and dataclasses.is_dataclass(inner):
                yield from keys_of(inner, dotted)


@functools.cache
def keys_of_recipes() -> frozenset[str]:
    return frozenset(keys_of(Recipe))


def leaves(tables: dict[str, Any], path: str = "") -> Iterator[str]:
    """The dotted keys of the values in tables."""
    for key, value in tables.items():
        dotted = f"{path}.{key}".removeprefix(".")
        if isinstance(value, dict) and value:
            yield from leaves(value, dotted)
        else:
            yield dotted


# ---------------------------------------------------------------------- generated parts


def test_no_generated_part_is_stale(docs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the page on truth, whose numbers take half a minute."""
    page = (DOCS / "truth.md").read_text(encoding="utf-8")
    numbers = page.partition("<!-- generated: truth -->\n")[2].partition("<!-- end -->")[0]
    monkeypatch.setattr(docs, "BLOCKS", {**docs.BLOCKS, "truth": lambda: numbers})
    found = [str(page.relative_to(ROOT)) for page in docs.stale()]
    assert not found, f"run scripts/docs.py: {found}"


@pytest.mark.full
def test_the_page_on_truth_is_not_stale(docs: ModuleType) -> None:
    page = (DOCS / "truth.md").read_text(encoding="utf-8")
    assert docs.renewed(page) == page, "run scripts/docs.py"


def test_a_changed_generated_part_is_stale_and_is_mended(docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "ARCHITECTURE.md"):
        (tmp_path / name).write_text("nothing generated\n")
    page = tmp_path / "docs" / "reports.md"
    good = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    page.write_text(good.replace(RULES[0].says, "When it likes."))
    assert docs.stale(tmp_path) == {page: good}


@pytest.mark.parametrize(("share", "stays"), [(1.0, True), (2.0, False)])
def test_a_size_of_the_picture_changes_when_it_is_far_off(
    docs: ModuleType, share: float, stays: bool
) -> None:
    drawn = (DOCS / "architecture.svg").read_text(encoding="utf-8")
    size = dict(docs.picture.SIZE.findall(drawn))["posttrain.learner"]
    other = f'data-of="posttrain.learner" data-lines="{share * int(size):.0f}"'
    before = drawn.replace(f'data-of="posttrain.learner" data-lines="{size}"', other)
    assert (other in docs.picture.architecture(ROOT, before)) == stays


def test_rules_in_the_pages_have_no_attribute_of_the_code(docs: ModuleType) -> None:
    assert "*c." not in docs.rules(), "name it in STANDS_FOR of scripts/docs.py"


def test_options_in_the_pages_are_those_that_a_method_takes(docs: ModuleType) -> None:
    tables = {name: docs.options(name) for name in ("grpo", "gdpo", "remax", "ppo", "distill", "ppo_penalty")}
    keys = {name: re.findall(r"^\| `(\w+)`", text, re.MULTILINE) for name, text in tables.items()}
    assert {"turn_weight", "turn_gamma", "kl_target", "entropy_step", "kl_from_old_share"} <= {*keys["grpo"]}
    assert not {"baseline", "running_baseline"} & {*keys["grpo"]}, "normalised is a baseline"
    assert not {"turn_weight", "turn_gamma"} & {*keys["gdpo"]}
    assert not {"reward_weight", "running_scale", "baseline", "running_baseline"} & {*keys["remax"]}
    assert "against_greedy" in tables["grpo"]
    assert "against_greedy" not in tables["ppo"]
    assert "| `control` | `doubling` or `proportional` |" in tables["distill"]
    assert "kl_in_reward" in keys["ppo_penalty"], "with kl_target = 0"


def test_a_misspelt_generated_part_is_an_error(docs: ModuleType) -> None:
    with pytest.raises(KeyError):
        docs.renewed("<!-- generated: alrams -->\n<!-- end -->")


@each_page
def test_every_generated_part_is_closed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert (
        text.count("<!-- generated: ")
        == text.count("<!-- end -->")
        == len(
            re.findall(r"<!-- generated: [^\n]+ -->\n(?:(?!<!-- generated).)*?<!-- end -->", text, re.DOTALL)
        )
    )


def test_no_meaning_is_given_twice(docs: ModuleType) -> None:
    """A key is explained by its field's docstring or by docs.py, which explains nothing that is gone."""
    silent = set()
    seen: set[type] = set()

    def walk(cls: type) -> None:
        if cls in seen:
            return
        seen.add(cls)
        told = docs.field_docs(cls)
        for name, hint in fields_of(cls):
            if name not in told:
                silent.add(f"{cls.__name__}.{name}")
            inner = docs.nested(hint)
            if inner:
                walk(inner)

    for field in dataclasses.fields(Recipe):
        inner = docs.nested(typing.get_type_hints(Recipe)[field.name])
        if inner:
            walk(inner)
    assert set(docs.UNSAID) == silent, "fields without a docstring, and UNSAID of scripts/docs.py"


# ---------------------------------------------------------------------- against the code


def test_the_table_of_methods_is_that_of_the_code() -> None:
    rows = {row[0]: row for row in table((DOCS / "methods.md").read_text(encoding="utf-8"), "method")}
    assert list(rows) == [f"[`{name}`](methods/{name}.md)" for name in METHODS]
    for (title, loop, group, critic, reference, step, source), line in zip(
        (row[1:] for row in rows.values()), METHODS.values(), strict=True
    ):
        learns = "" if line.loop == "online" else f", {line.learns}"
        assert (title, loop, source) == (line.title, line.loop + learns, line.source)
        assert group == (str(line.method.least_group) if loop == "online" else "–")
        assert (critic == "yes") == ("value" in line.method.needs)
        assert (critic == "a head") == ("head" in line.method.needs)
        assert (reference in ("in the reward", "in the loss", "in Q")) == ("logp_ref" in line.method.needs)
        assert (reference == "if asked") == (
            "kl_in_loss" in vars(line.method) and "logp_ref" not in line.method.needs
        )
        known = {"adamw": "AdamW", "trust_region": "natural gradient", "evolution": "plain"}
        assert step == known[line.step]


def test_the_comparison_says_who_may_replay_and_who_has_a_critic() -> None:
    page = (ROOT / "docs" / "when-to-use-what.md").read_text(encoding="utf-8")
    rows = {row[0].split("`")[1]: row[1:] for row in table(page, "method")}
    assert list(rows) == list(METHODS)
    assert [n for n, row in rows.items() if row[2] == "its own, and older ones"] == [
        "impala",
        "decoupled_ppo",
        "kpop",
        "aipo",
        "m2po",
        "expert_iteration",
        "gkd",
    ]
    assert [n for n, row in rows.items() if row[3].startswith("old policy")] == [
        "ppo_penalty",
        "trpo",
        "trpo_gae",
        "trpo_penalty",
    ]
    for name, row in rows.items():
        assert (row[0] == "yes") == ("value" in METHODS[name].method.needs)
        assert (row[0] == "a head") == ("head" in METHODS[name].method.needs)
        assert (row[1] in ("verifier", "teacher")) == (METHODS[name].loop == "online" or name == "kd")
        assert (row[1] == "teacher") == ("teacher" in METHODS[name].method.asks)
    assert rows["reinforce"][4] == "nothing holds it"


def accepts(name: str, options: dict[str, float]) -> bool:
    try:
        posttrain.method(name, **options)
    except UserError:
        return False
    return True


def test_options_that_contradict_a_methods_choices_are_not_listed() -> None:
    told = {
        name: {
            row[0].strip("`")
            for row in table((ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8"), "key")
        }
        for name in ("gdpo", "grpo", "reinforce_running")
    }
    assert "turn_weight" in told["grpo"] - told["gdpo"] - told["reinforce_running"]
    assert "baseline" in told["reinforce_running"] - told["grpo"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sample(every=3)
def test_every_method_has_a_page_with_every_option_it_takes(name: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
        "Quick facts",
        "Key equations",
        "The update",
        "When to use it",
        "Options",
        "Source and deviations",
    ]
    options = readable(METHODS[name].method)
    told = [row[0].strip("`") for row in table(text, "key")] if options else []
    assert len(told) == len(set(told))
    assert set(told) <= options
    own = numbers(METHODS[name].method)
    assert options - set(told) <= own.keys()
    for number in own:
        values = [value for value in (0.5, 1.0) if value != own[number]]
        settings = [{other: x} | {number: value} for value in values for other in own for x in (0.0, 1.0)]
        assert (number in told) == any(accepts(name, setting) for setting in settings), number
    assert options or "\n| key |" not in text


@pytest.mark.parametrize("name", METHODS)
def test_the_update_of_a_page_names_what_the_method_is_made_of(name: str) -> None:
    """What is computed is in the pseudocode, and what is not is not."""
    line = METHODS[name]
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    [update] = re.findall(r"<!-- generated: update .+?<!-- end -->", text, re.DOTALL)
    for choice in MADE_OF:
        default = choice == "divergence" and line.method != METHODS["f_dpo"].method
        if choice in choices(line.method) and not default:
            chosen = vars(line.method)[choice]
            assert f"{getattr(chosen, 'func', chosen).__name__}(" in update
    assert ("V_old" in update) == ("value" in line.method.needs)
    assert ("under the reference" in update) == ("logp_ref" in line.method.needs)
    assert ("AdamW" in update) == (line.step == "adamw" or "value" in line.method.needs)
    assert ("trust.max_kl" in update) == (line.step == "trust_region")
    assert ("β · (r - 1 - log r)" in update) == bool(getattr(line.method, "kl_from_old", 0.0))
    assert ("soft_lambda" in update) == isinstance(line.method, SoftQ)
    assert ("per_group(" in update) == (line.method.unit == "group")
    assert ("the head's number" in update) == ("head" in line.method.needs)
    assert ("sft_weight" in update) == bool(getattr(line.method, "sft_weight", 0.0))
    assert ("a probe:" in update) == line.method.probes


@pytest.mark.parametrize("name", METHODS)
def test_the_equations_of_a_page_call_functions_with_their_numbers(name: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    [equations] = re.findall(r"<!-- generated: equations .+?<!-- end -->", text, re.DOTALL)
    method = METHODS[name].method
    for choice in ("returns", "estimator", "credit", "surrogate", "value_loss", "pair_loss"):
        if choice in choices(method):
            for number, parameter in inspect.signature(vars(method)[choice]).parameters.items():
                if isinstance(parameter.default, int | float):
                    assert f"{number}={parameter.default:g}" in equations


def test_every_key_of_a_recipe_is_in_its_page() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    told, links = set(), []
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        head = re.match(r"`\[([\w.]+)\]`", section)
        if head:
            if same := re.search(r"^Takes the keys of `\[([\w.]+)\]`", section, re.MULTILINE):
                links.append((head[1], same[1]))
            else:
                told |= {f"{head[1]}.{row[0].strip('`')}" for row in table(section, "key")}
            told.add(head[1])
    for _ in range(3):  # a table that is explained elsewhere may hold another one
        for place, same_as in links:
            told |= {place + key.removeprefix(same_as) for key in told if key.startswith(f"{same_as}.")}
    options = {f"method.{o}" for line in METHODS.values() for o in readable(line.method)}
    options |= {
        f"method.{number}"
        for functions in CHOICES.values()
        for function in functions.values()
        for number, parameter in inspect.signature(function).parameters.items()
        if isinstance(parameter.default, int | float)
    }
    assert told == set(keys_of(Recipe)) | options | {"method.name"}


RECORDS: dict[str, list[dict[str, Any]]] = {
    "rankings": [{"prompt": "2 + 3?", "chosen": "5", "rejected": "6", "margin": 1.0}],
    "labels": [{"prompt": "2 + 3?", "completion": str(n), "label": n % 2} for n in (5, 6)],
    "steps": [{"prompt": "2 + 3?", "steps": ["2 + 3 = 5", "So it is 5."], "labels": [1, 1]}],
}


@pytest.mark.parametrize("name", METHODS)
def test_every_whole_recipe_of_a_method_s_page_is_a_recipe(name: str, tmp_path: Path) -> None:
    """The file is read, and what it asks is checked, on a record of the kind that the method learns from."""
    blocks = fences(ROOT / "docs" / "methods" / f"{name}.md", "toml")
    whole = [block for block in blocks if "[model]" in block and "[method]" in block]
    learns = METHODS[name].learns
    assert whole or learns not in RECORDS, "the page shows no recipe"
    records = RECORDS.get(learns, [])
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for block in whole:
        file = tmp_path / "recipe.toml"
        file.write_text(re.sub(r'"[\w.]+\.jsonl"', f'"{tmp_path / "data.jsonl"}"', block))
        resolved = resolve_recipe(config.read(file).recipe)
        assert resolved.line is METHODS[name]
        assert resolved.train


def test_the_first_recipe_is_explained_key_by_key() -> None:
    path = ROOT / "recipes" / "arithmetic_grpo.toml"
    page = DOCS / "first-recipe.md"
    text = page.read_text(encoding="utf-8")
    explained = [row[0].strip("`") for row in table(text, "key")]
    assert len(explained) == len(set(explained))
    assert set(explained) == set(leaves(tomllib.loads(path.read_text(encoding="utf-8"))))
    assert path.read_text(encoding="utf-8") in fences(page, "toml")


@each_page
def test_every_toml_block_sets_keys_that_exist(page: Path) -> None:
    free = ("task.env.options", "task.own.options", "verifier.weights", "task.data.columns", "method")
    free += ("task.reasoning_gym.weights", "task.reasoning_gym.options", "task.gymnasium.options")
    free += ("verifier.http.headers_env", "model.template_args")
    known = keys_of_recipes()
    for block in fences(page, "toml"):
        tables = tomllib.loads(block)
        if {"stage", "compare"} & set(tables):  # a pipeline, whose stages have recipes of their own
            assert set(tables) <= {f.name for f in dataclasses.fields(pipeline_file.Tables)}
            keys = {f.name for f in dataclasses.fields(pipeline_file.Stage)}
            assert all(set(stage) <= keys for stage in tables.get("stage", ()))
            continue
        for key in leaves(tables):
            assert key in known or key.startswith(free), key


@each_page
def test_python_is_python_and_its_examples_are_true(page: Path) -> None:
    for block in fences(page, "python"):
        found = doctest.DocTestParser().get_doctest(block, {}, page.name, str(page), 0)
        if found.examples:
            assert doctest.DocTestRunner().run(found).failed == 0
        else:
            ast.parse(block)
    # The imports of examples that are not run.
    imports = [
        n
        for b in fences(page, "python")
        if ">>>" not in b
        for n in ast.walk(ast.parse(b))
        if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("posttrain")
    ]
    for node in imports:
        module = importlib.import_module(node.module or "")
        assert all(hasattr(module, name.name) for name in node.names)


def test_the_page_on_adding_a_method_adds_three_and_each_is_short() -> None:
    """Every block runs, in the order of the page; the second of a pair checks the first one's gradient."""
    _, _, line, check, cls = fences(ROOT / "docs" / "add-a-method.md", "python")
    space: dict[str, Any] = {"__name__": "methods_of_the_page"}
    sys.modules["methods_of_the_page"] = ModuleType("methods_of_the_page")
    for block in (line, check, cls):
        assert len([text for text in block.splitlines() if text.strip()]) < 40
        exec(compile(block, "add-a-method.md", "exec"), space)
    assert len([text for block in (line, check) for text in block.splitlines() if text.strip()]) < 40
    logp = torch.zeros_like(space["logp"], requires_grad=True)
    best = space["BEST"]
    batch = best.prepare(space["batch"])
    loss = best.loss(Outputs(logp=logp, entropy=torch.zeros_like(logp)), batch)
    weighted_sum(loss, best.weight(batch), batch.mask).backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0, -0.25, -0.25], [0.0, 0.0, 0.0]]


def test_the_file_of_that_page_is_checked_and_trained_with(
    run_cli: Any, write: Any, online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = ROOT / "docs" / "add-a-method.md"
    mine, check, *_ = fences(page, "python")
    assert len([text for text in mine.splitlines() if text.strip()]) < 20
    (tmp_path / "mine.py").write_text(mine)
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(check, "add-a-method.md", "exec"), {})
    assert printed.getvalue() == "mine.py:MINE keeps 8 promises\n"
    [block] = fences(page, "toml")
    (tmp_path / "page.toml").write_text(block)
    assert config.read(tmp_path / "page.toml").recipe.method["q"] == 0.5
    over = {"method": tomllib.loads(block)["method"] | {"name": "mine.py:MINE"}}
    said = run_cli("train", write(online, over), "--run-dir", tmp_path / "run")
    assert said.code == 0, said.err
    assert "quantile(q=0.5)" in said.err
    assert "soft_clip(width=0.1)" in said.err


def test_a_wrong_weight_on_that_page_would_be_found() -> None:
    _, _, line, check, _ = fences(ROOT / "docs" / "add-a-method.md", "python")
    wrong = line.replace("advantage < 0", "advantage > 0")
    assert wrong != line
    with pytest.raises(AssertionError, match="not close"):
        exec(compile(wrong + check, "add-a-method.md", "exec"), {"__name__": "wrong"})


def test_the_environment_of_the_page_plays_its_game() -> None:
    """The example is what a reader copies: it counts down and refuses a wrong number."""
    block = next(b for b in fences(ROOT / "docs" / "verifiers.md", "python") if "class Countdown" in b)
    space: dict[str, Any] = {"__name__": "countdown_of_the_page"}
    sys.modules["countdown_of_the_page"] = ModuleType("countdown_of_the_page")
    exec(compile(block, "countdown.py", "exec"), space)
    env = space["countdown"](2)
    start = guarded_start(env, Task(id="c", messages=({"role": "user", "content": "Count down."},)))
    assert isinstance(start, Start)
    first = guarded_reply(env, start.state, "2")
    second = guarded_reply(env, first.state, "1")
    last, wrong = guarded_reply(env, second.state, "0"), guarded_reply(env, second.state, "7")
    assert [turn.done for turn in (first, second, last, wrong)] == [False, False, True, True]
    assert [turn.verdict and turn.verdict.score for turn in (last, wrong)] == [1.0, 0.0]


def test_verifier_class_of_the_page_judges_from_toml_and_python(tmp_path: Path) -> None:
    page = DOCS / "verifiers.md"
    block = next(b for b in fences(page, "python") if "class Palindrome" in b)
    tables = next(tomllib.loads(b) for b in fences(page, "toml") if "palindromes.py" in b)
    (tmp_path / "palindromes.py").write_text(block)
    name = f"{tmp_path}/{tables['verifier']['function']['function']}"
    judge = Function(function=name)
    task = Task(id="p", messages=({"role": "user", "content": "Say a palindrome."},))
    for verifier in (judge, Function(function=load_named(name))):
        assert verifier.name == "palindrome"
        verdicts = [verifier(task, text) for text in ("Never odd or even", "abba", "palindrome")]
        assert [(v.score, v.label) for v in verdicts] == [(1.0, "right"), (0.0, "wrong"), (0.0, "wrong")]
    with pytest.raises(UserError, match=r"it is a class.*make one"):
        Function(function=name.replace(":palindrome", ":Palindrome"))


def test_every_command_and_option_in_the_pages_exists() -> None:
    known = {*COMMANDS, *plugin_commands()}

    def name_of(words: list[str]) -> str:
        return " ".join(words[1:3]) if words[1] in GROUPS else words[1]

    rows = table((DOCS / "cli.md").read_text(encoding="utf-8"), "command")
    assert {name_of(row[0].strip("`").split()) for row in rows} == known
    lines = [line for page in PAGES for block in fences(page, "bash") for line in block.splitlines()]
    calls = [shlex.split(line, comments=True) for line in lines if line.startswith("posttrain ")]
    assert calls
    written = {words[2] for words in calls if words[1] == "init"}
    for words in calls:
        assert name_of(words) in known, words
        options = {o for p in Command(name_of(words)).load().params for o in p.opts}
        assert {w for w in words[2:] if w.startswith("--")} <= options
        names = [words[2]] if words[1] in ("train", "validate") and words[2] in catalogue() else []
        paths = [w for w in words[2:] if w.endswith(".toml") and Path(w).parts[0] not in written]
        for path in (*paths, *(f"recipes/{name}.toml" for name in names)):
            overrides = [value for key, value in itertools.pairwise(words) if key == "--set"]
            read = pipeline_file.read if "[[stage]]" in (ROOT / path).read_text() else config.read
            read(ROOT / path, overrides)


def test_every_target_of_make_in_the_pages_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        t for page in PAGES for t in re.findall(r"^make (\w+)|`make (\w+)`", page.read_text(), re.MULTILINE)
    }
    named = {one or other for one, other in named}
    assert named
    assert named <= targets


def test_the_keys_of_a_line_of_samples_are_those_written() -> None:
    source = inspect.getsource(samples._line) + inspect.getsource(samples.columns)
    page = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    told = [row[0].strip("`") for row in table(page, "key")]
    written = set(re.findall(r'^\s+"(\w+)": ', source, re.MULTILINE))
    assert len(told) == len(set(told))
    assert set(told) == written


def test_every_key_of_the_metrics_page_is_unique() -> None:
    names = [row[0] for row in table((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"), "name")]
    assert len(names) == len(set(names))


# ---------------------------------------------------------------------- paths and names


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: small letters, no signs, hyphens for spaces."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    named = re.findall(r'<a id="([^"]+)">', page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads} | set(named)


@each_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", prose(page)):
        assert (page.parent / target).exists(), target
        assert not anchor or anchor in anchors(page.parent / target if target else page), anchor


def test_every_page_is_in_the_navigation_of_the_site_and_no_other() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = re.findall(r"[\w/-]+\.md$", nav, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == {to for to in PAGES_OF.where_pages_go().values() if to.endswith(".md")}


def test_a_link_of_a_page_leads_to_its_place_in_the_site(tmp_path: Path) -> None:
    staged = PAGES_OF.Staged(tmp_path)
    text = (
        "[a](../../src/posttrain/math/kl.py) [b](../../README.md#limits) "
        "[c](../notebooks/stepping.py) [d](../../recipes)"
    )
    assert staged.relinked("docs/methods/grpo.md", text) == (
        "[a](../files/src/posttrain/math/kl.py.md) [b](../index.md#limits) [c](../notebooks/stepping.md) d"
    )
    staged.write_shown()
    shown = (tmp_path / "files/src/posttrain/math/kl.py.md").read_text(encoding="utf-8")
    assert (ROOT / "src/posttrain/math/kl.py").read_text(encoding="utf-8") in shown


def test_what_leads_nowhere_in_a_site_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="x"></h1><a href="b.html#y">1</a><a href="#z">2</a><a href="c.html">3</a><a href="#x">4</a>'
        '<script src="https://example.org/x.js"></script><img src="d.svg"><a href="https://example.org">5</a>'
    )
    (tmp_path / "b.html").write_text('<p id="y"></p>')
    assert PAGES_OF.broken(tmp_path) == [
        "a.html: loads https://example.org/x.js",
        "a.html: #z has no such anchor",
        "a.html: c.html is not there",
        "a.html: d.svg is not there",
    ]


def test_every_public_name_is_on_the_page_of_the_api_once() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = [n for names in re.findall(r"generated: api ([\w ]+) -->", page) for n in names.split()]
    assert sorted(named) == posttrain.__all__


def test_every_page_is_linked_from_an_index() -> None:
    linked = {
        (index.parent / target).resolve()
        for index in (*DOCS.rglob("index.md"), DOCS / "claims.md")
        for target in re.findall(r"\]\(([^)#]+)\)", index.read_text(encoding="utf-8"))
    }
    assert set(PAGES) - {DOCS / "index.md"} <= linked


@pytest.mark.parametrize("page", DECISIONS, ids=lambda p: p.stem)
def test_a_decision_is_a_page_of_context_choice_and_cost(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^#+ .+$", text, re.MULTILINE)[1:] == ["## Context", "## Choice", "## What it costs"]
    assert len(text.splitlines()) <= 50
    title = text.splitlines()[0].removeprefix("# ")
    assert f"| [{page.stem[:3]}]({page.name}) | {title} |" in (page.parent / "index.md").read_text()


def test_decisions_are_numbered_without_gaps() -> None:
    assert [page.stem[:3] for page in DECISIONS] == [f"{n:03d}" for n in range(1, len(DECISIONS) + 1)]


def paths_of_the_tree() -> list[str]:
    """Return every path that the tree names; folders end in a slash."""
    [block] = [b for b in fences(ARCHITECTURE, "text") if "src/posttrain/" in b]
    folder, paths = "", list[str]()
    for line in block.splitlines():
        name = line.split()[0]
        folder = name if line[0] != " " else folder
        paths.append(name if line[0] != " " else folder + name)
    return paths


@pytest.mark.parametrize("path", paths_of_the_tree())
def test_every_path_of_the_tree_exists(path: str) -> None:
    assert (ROOT / path).exists()
    assert (ROOT / path).is_dir() == path.endswith("/")


def test_every_room_is_in_the_tree() -> None:
    """Rooms are the packages of src and their folders, and the other folders of the repository."""
    rooms = {f"{name}/" for name in ("benchmarks", "docs", "examples", "recipes", "scripts", "tests")}
    for file in SRC.parent.rglob("*.py"):
        rooms.add("/".join(file.relative_to(ROOT).parts[:-1][:3]) + "/")
    assert rooms == {path for path in paths_of_the_tree() if path.endswith("/")}


@each_page
def test_every_named_thing_of_the_code_is_there(page: Path) -> None:
    """`learner/learner.py: Learner.step` is a function in that file, and `tests/...` exists."""
    text = page.read_text(encoding="utf-8")
    for path, name in re.findall(r"([\w/]+\.py):\s+([A-Za-z_][\w.]*[\w])", prose(page).replace("`", "")):
        file = next((base / path for base in (SRC, SRC.parent, ROOT) if (base / path).exists()), None)
        assert file, path
        body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
        for part in name.split("."):
            found = [n for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
            assert found, f"{path}: {name}"
            body = found[0].body
    for path in re.findall(r"`((?:tests|scripts|recipes|benchmarks)/[\w./]*)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`([\w/]+\.py)`", prose(page)):
        assert any((base / path).exists() for base in (SRC, SRC.parent, ROOT)), path


def test_every_page_that_the_code_names_exists() -> None:
    for file in (*SRC.rglob("*.py"), *(ROOT / "scripts").glob("*.py")):
        for path in re.findall(r"docs/\w[\w/]*\.md", file.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{file.name}: {path}"


@each_page
def test_no_path_is_of_one_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.~$<])/(?:home|root|work|tmp|usr|opt|mnt)/", text)


def test_every_name_of_another_trainer_that_the_page_lists_is_known_to_errors():
    page = (ROOT / "docs" / "recipes.md").read_text()
    rows = page.split("## Coming from TRL")[1].split("\n\n")[1].splitlines()[2:]
    named = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.split("|")[1])]
    assert len(named) > 30
    assert not [name for name in named if not translate_name(name.rpartition(".")[2])]
