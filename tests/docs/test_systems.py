"""Every command of docs/systems.md, run in small."""

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.methods.table import METHODS
from posttrain.pipeline import file as pipeline_file
from posttrain.recipe import config
from posttrain.recipe.document import parse_override, put, read_toml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
COMMANDS = list(dict.fromkeys(re.findall(r"`(posttrain [^`]+)`", PAGE)))
SUMS = [(a, b) for a in range(2, 6) for b in range(2, 6)]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "rankings": [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b + 9)} for a, b in SUMS],
    "labels": [{"prompt": f"{a}+{b}=", "completion": str(a + b), "label": float(a > b)} for a, b in SUMS],
    "steps": [{"prompt": f"{a}+{b}=", "completions": [str(a), str(b)], "labels": [1, 0]} for a, b in SUMS],
    "answers": [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in SUMS],
    "tasks": [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS],
}
PROOF = "theorem t : True := trivial"
JUDGED: dict[str, tuple[dict[str, Any], str]] = {
    "number": ({"answer": "4"}, "It is 4."),
    "math": ({"answer": "1/2"}, r"\boxed{0.5}"),
    "code": (
        {"kind": "call", "entry_point": "two", "cases": [{"args": [], "expected": 2}]},
        "def two():\n    return 2",
    ),
    "format": ({}, "<think>1</think><answer>4</answer>"),
    "regex": ({}, "4"),
    "json": ({"schema": {"type": "object"}}, '{"a": 1}'),
    "sql": (
        {"schema": "CREATE TABLE t (a INT); INSERT INTO t VALUES (1);", "gold": "SELECT a FROM t"},
        "SELECT a FROM t",
    ),
    "coq": ({"statement": "True", "name": "t"}, "exact I."),
    "lean": ({"statement": "theorem t : True"}, f"```lean\n{PROOF}\n```"),
}


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def small(recipe: Path, sets: list[str], tiny: Path, place: Path) -> Iterator[str]:
    """Yield the overrides that make a run of this recipe small."""
    tables = read_toml(recipe)[0]
    for word in sets:
        put(tables, *parse_override(word, "--set"), "--set")
    line = METHODS[tables["method"]["name"]]
    made = {"arithmetic", "coq", "propositional"} & set(tables["task"])
    yield from (f"model.path={tiny}", "model.dtype=float32", "run.updates=1", "checkpoint.every=1")
    yield from ("eval.every=0", "eval.limit=2")
    if line.loop == "online":
        yield from ("rollout.groups=2", "rollout.group_size=2", "rollout.select=all")
        if "max_rounds" in tables["rollout"]:
            yield "rollout.max_rounds="
        yield "sampling.max_new_tokens=4"
        if line.step != "evolution":  # it makes one step
            yield "steps.minibatches=1"
        records = "tasks"
    else:
        yield "batch.batch_size=2"
        records = line.learns
    if records == "text":
        (place / "text.txt").write_text("".join(f"{a} + {b} = {a + b}\n" for a, b in SUMS) * 20)
        yield from (
            "batch.max_length=32",
            *(f"task.{key}.path=text.txt" for key in ("text", "held_out_text")),
        )
    elif "propositional" in tables["task"]:
        yield from ("task.propositional.train=64", "task.propositional.held_out=8")
    elif "coq" in tables["task"]:
        yield from ("task.coq.high=1", "task.coq.held_out=60", "task.coq.template={theorem}")
    elif not made:
        written(place / "data.jsonl", RECORDS[records])
        for key in ("data", "held_out"):
            yield f'task.{key}={{path = "data.jsonl"}}'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that has the recipes."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.sample(every=8)
def test_command_of_the_page_runs_in_small(
    command: str, place: Path, tiny: Path, run_cli: Callable[..., Any]
) -> None:
    name, *words = shlex.split(command)[1:]
    sets = [word for key, word in itertools.pairwise(words) if key == "--set"]
    if name == "train" and "[[stage]]" in Path(words[0]).read_text():
        pipeline = pipeline_file.read(Path(words[0]))
        for stage in pipeline.stages:
            if stage.recipe:
                assert config.read(Path(words[0]).parent / stage.recipe).recipe.method
        return
    for prover, program, marks in (("COQ", "coqc", ("coq", "prove", "proofs")), ("LEAN", "lean", ("lean",))):
        if any(mark in command for mark in marks) and not shutil.which(program):
            pytest.skip(f"{prover} IS NOT TESTED HERE: {program} is not installed")
    if name == "train":
        if "runs/process" in command and "--run-dir" not in words:
            first = [c for c in COMMANDS if "--run-dir runs/process" in c]
            run(shlex.split(first[0])[1:], place, tiny, run_cli)
        run([name, *words], place, tiny, run_cli)
        assert list(Path("runs").rglob("checkpoints/step_000001"))
        return
    if name == "verify":
        fields, response = JUDGED[words[0]]
        written(place / "tasks.jsonl", [{"id": "a", "prompt": "?", **fields}])
        written(place / "responses.jsonl", [{"id": "a", "response": response}])
        said = run_cli(name, *words, "--json")
        assert said.json["score"] == 1.0, said
        return
    if (name, *words[:1]) == ("run", "inspect"):
        first = [c for c in COMMANDS if f"--run-dir {words[1]}" in c]
        run(shlex.split(first[0])[1:], place, tiny, run_cli)
    if (name, *words[:1]) == ("model", "new"):
        (place / "text.txt").write_text("one and one is two\n" * 50)
        words += ["--vocab", "270", "--layers", "1", "--hidden", "16", "--heads", "2", "--key-heads", "1"]
    if (name, *words[:1]) == ("data", "steps"):
        words += ["--limit", "1", "--rollouts", "1", "--solutions", "1"]
        words += [w for each in small(Path(words[1]), sets, tiny, place) for w in ("--set", each)]
    said = run_cli(name, *words)
    assert said.code == 0, said.err


def run(words: list[str], place: Path, tiny: Path, run_cli: Callable[..., Any]) -> None:
    """Train with these words, in small."""
    sets = [word for key, word in itertools.pairwise(words) if key == "--set"]
    more = [w for each in small(Path(words[1]), sets, tiny, place) for w in ("--set", each)]
    said = run_cli(*words, *more, "--quiet")
    assert said.code == 0, said.err
