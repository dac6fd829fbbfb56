"""The example plugin of docs/write-a-plugin.md, installed into an environment of its own and used."""

import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from posttrain import UserError, Verifier
from posttrain.base.kinds import Kind, find_unloadable, kinds, table_of_kinds
from posttrain.recipe.objects import is_object as is_object
from posttrain.recipe.verifier import VerifierChoice
from posttrain.verifiers.judge.checklist import Checklist
from posttrain.verifiers.judge.judge import Judge

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "plugin"
PENALTIES = ROOT / "examples" / "penalties"
Posttrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages of a fresh environment that sees this one's packages and has both plugins."""
    place = tmp_path_factory.mktemp("plugin")
    venv.create(place / "env", with_pip=False)
    [site] = (place / "env" / "lib").glob("python3*/site-packages")
    ours = [str(ROOT / "src"), *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "seen.pth").write_text("".join(f"{path}\n" for path in ours))
    for plugin in (PLUGIN, PENALTIES):
        shutil.copytree(plugin, place / plugin.name)
    python = str(place / "env" / "bin" / "python")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        *(str(place / plugin.name) for plugin in (PLUGIN, PENALTIES)),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=240)
    if done.returncode:
        pytest.skip(f"THE PLUGIN IS NOT TESTED HERE: pip cannot build it: {done.stderr[-300:]}")
    return site


@pytest.fixture
def posttrain(site: Path, tmp_path: Path) -> Posttrain:
    """posttrain(WORDS...) -> the command line of that environment."""
    python = site.parents[2] / "bin" / "python"

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [str(python), "-m", "posttrain", *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)

    return run


def test_plugin_kinds_are_used_like_ours(posttrain: Posttrain, tiny: Path, tmp_path: Path) -> None:
    small = ("model.path", tiny), ("run.updates", 1), ("rollout.groups", 2), ("rollout.group_size", 2)
    sets = [word for key, value in small for word in ("--set", f"{key}={value}")]
    recipe = PLUGIN / "palindromes.toml"
    trained = posttrain("train", recipe, *sets, "--set", "eval.limit=4", "--run-dir", "run", "--quiet")
    assert trained.returncode == 0, trained.stderr
    assert re.fullmatch(r"1,[\d.]+\n", (tmp_path / "run" / "rewards.csv").read_text())
    [rows, *_] = sorted((tmp_path / "run" / "samples").glob("0*.jsonl"))
    labels = {json.loads(line)["label"] for line in rows.read_text().splitlines()}
    assert labels <= {"right", "elsewhere", "wrong"}
    assert posttrain("is-palindrome", "Anna").stdout == "yes\n"
    (tmp_path / "tasks.jsonl").write_text('{"id": "1", "prompt": "?", "answer": "ab"}\n')
    (tmp_path / "said.jsonl").write_text('{"id": "1", "response": "abba"}\n')
    judged = posttrain("verify", "palindrome", "tasks.jsonl", "said.jsonl", "--json")
    assert json.loads(judged.stdout)["class"] == "right", judged.stderr


def test_penalties_are_installed_and_judge(posttrain: Posttrain, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "1", "prompt": "How much?", "answer": "7"}\n')
    (tmp_path / "said.jsonl").write_text('{"id": "1", "response": "no no no no так"}\n')
    for name, label, score in (("repetition", "repeats", -0.5), ("language", "mixed", -3 / 11)):
        words = ("--set", "n=2") if name == "repetition" else ()
        done = posttrain("verify", name, "tasks.jsonl", "said.jsonl", "--json", *words)
        verdict = json.loads(done.stdout)
        assert (verdict["class"], verdict["score"]) == (label, pytest.approx(score)), done.stderr


@pytest.mark.full
def test_plugin_keys_are_read_as_strictly_as_ours(posttrain: Posttrain) -> None:
    refused = posttrain("validate", PLUGIN / "palindromes.toml", "--set", "verifier.palindrome.partal=0.1")
    assert refused.returncode == 2
    assert "unknown key 'partal'; did you mean 'partial'?" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.full
def test_plugin_objects_are_given_in_python(site: Path) -> None:
    program = (
        "import posttrain\n"
        "from posttrain_palindromes.verifier import Palindrome\n"
        "recipe = posttrain.Recipe('m', task={'palindromes': {}}, reward=Palindrome(partial=0.25))\n"
        "recipe.write('recipe.toml')\n"
        "print(posttrain.Recipe.read('recipe.toml') == recipe, recipe.tables['verifier'])\n"
    )
    python = site.parents[2] / "bin" / "python"
    done = subprocess.run([python, "-c", program], cwd=site.parent, capture_output=True, text=True)
    assert done.stdout == "True {'palindrome': {'partial': 0.25}}\n", done.stderr


@pytest.mark.full
def test_a_broken_plugin_is_one_line_and_hurts_nothing_else(posttrain: Posttrain, site: Path) -> None:
    doctor = posttrain("doctor").stdout
    assert "plugin posttrain-palindromes 0.1.0" in doctor
    assert "verifiers.palindrome" in doctor
    file = site / "posttrain_palindromes" / "verifier.py"
    text = file.read_text()
    file.write_text("import no_such_module\n")
    try:
        assert "'palindrome' of posttrain-palindromes 0.1.0 cannot be imported" in posttrain("doctor").stdout
        refused = posttrain("validate", PLUGIN / "palindromes.toml")
        assert refused.returncode == 2
        assert len(refused.stderr.splitlines()) == 1
        assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'" in refused.stderr
        assert posttrain("methods").returncode == 0
    finally:
        file.write_text(text)


@dataclass
class Thawed(Verifier):
    name: str = "thawed"


@dataclass(frozen=True)
class NoVerifier:
    name: str = "none"


@dataclass(frozen=True)
class Short:
    def make(self, limit: int) -> None: ...


@pytest.mark.parametrize(
    ("group", "name", "told"),
    [
        ("verifiers", "Thawed", "is not frozen"),
        ("verifiers", "NoVerifier", "does not inherit posttrain.Verifier"),
        ("verifiers", "PLUGIN", "which cannot be called"),
        ("tasks", "Short", "has no make(self, limit, seed, games)"),
        ("tasks", "is_object", "is not a dataclass"),
        ("trackers", "nowhere", "cannot be imported: AttributeError"),
    ],
)
def test_a_kind_that_is_not_what_its_group_asks_is_named(group: str, name: str, told: str) -> None:
    kind = Kind(group, "mine", EntryPoint("mine", f"{__name__}:{name}", f"posttrain.{group}"))
    with pytest.raises(UserError, match=rf"posttrain.{group}: 'mine' of unknown .*{re.escape(told)}"):
        kind.load()


def test_a_name_that_can_be_no_table_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    base = VerifierChoice.__bases__[0]
    names = {field.name for field in fields(VerifierChoice)}
    for name in ("my-verifier", "class", "weights", "build"):
        entry = EntryPoint(name, f"{__name__}:Good", "posttrain.verifiers")
        monkeypatch.setitem(kinds("verifiers"), name, Kind("verifiers", name, entry))  # type: ignore[arg-type]
    table = table_of_kinds(base, "verifiers", __name__)
    assert {field.name for field in fields(table)} == names
    assert table(weights={"a": 2.0}).weights == {"a": 2.0}
    assert table().build() is None
    assert {kind.name for kind in find_unloadable()} >= {"my-verifier", "class", "weights", "build"}


def test_a_plugin_that_ends_the_process_as_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends.py").write_text("import sys; sys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kind = Kind("trackers", "ends", EntryPoint("ends", "ends:Ends", "posttrain.trackers"))
    with pytest.raises(UserError, match=r"^posttrain\.trackers: "):
        kind.load()


def test_a_gate_asks_our_verifiers_in_the_order_of_before() -> None:
    first = "exact number math code coq lean json sql grammar regex format instructions"
    last = "reasoning_gym judge model function rubric http"
    classes = {name: kind.load() for name, kind in kinds("verifiers").items() if kind.ours}
    classes |= {"judge": Judge, "rubric": Checklist}  # which their tables build
    assert sorted(classes, key=lambda name: classes[name].place) == [*first.split(), *last.split()]
