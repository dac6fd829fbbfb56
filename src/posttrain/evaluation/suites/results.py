"""A directory of results: results.json with the numbers, and SUITE.jsonl with every answer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.base.atomic_files import put
from posttrain.recipe.document import is_run
from posttrain.types import UserError

NAME = "results.json"

Line = dict[str, Any]
"""One answer: id, sample, prompt, answer, stop, tokens, score, label, reason, parts; and its vote, key."""


def load(folder: Path) -> dict[str, Any]:
    """results.json; UserError for a directory that has none, or one that cannot be read."""
    file = folder / NAME
    if not file.exists():
        problem = (
            f"is no result of eval: it has no {NAME}" if folder.exists() else "there is no such directory"
        )
        raise UserError(str(folder), problem, "name the directory that eval was given with --out")
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found | {"suites": dict(found["suites"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(str(file), f"cannot be read: {error}") from None


def locate(folder: Path) -> Path:
    """Return the directory of results that is meant: the folder itself, or of a run its latest evaluation.

    That is looked for in the run's directory and in evals/. UserError for a run without one.
    """
    if (folder / NAME).exists() or not is_run(folder):
        return folder
    run = folder.resolve()
    inside = [file.parent for file in folder.glob(f"*/{NAME}")]
    others = (file.parent for file in Path("evals").glob(f"*/{NAME}"))
    own = (each for each in others if run in Path(load(each).get("model", "")).resolve().parents)
    found = [*inside, *own]
    if not found:
        problem = "is a run that was not evaluated on suites"
        raise UserError(str(folder), problem, f"evaluate it: posttrain eval {folder} --suite SUITE")
    return max(found, key=lambda each: (each / NAME).stat().st_mtime)


def save(folder: Path, results: Mapping[str, Any]) -> None:
    """Writes results.json, whole or not at all."""
    put(folder / NAME, json.dumps(results, indent=1, allow_nan=False) + "\n")


def answers(folder: Path, suite: str) -> list[Line]:
    """Every answer to a suite."""
    return lines_of(folder / f"{suite}.jsonl")


def lines_of(file: Path) -> list[Line]:
    """The answers that a file holds, without one that was cut off while it was written."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    # Not splitlines, which also cuts at characters that JSON allows inside a string.
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].split("\n") if line]


def begun(folder: Path, who: Mapping[str, Any], prints: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The results in this directory, of this model and of these suites' fingerprints; new ones if it is new.

    UserError where it holds answers of another model, or that were asked for or judged otherwise, or of which
    nothing says whose they are.
    """
    fix = "name another --out"
    found = load(folder) if (folder / NAME).exists() else {**who, "suites": {}}
    for key in {**who, **found}:
        if key != "suites" and found.get(key) != who.get(key):
            raise UserError(str(folder), _other(key, found.get(key), who.get(key)), fix)
    for suite, print_ in prints.items():
        if suite not in found["suites"] and (folder / f"{suite}.jsonl").exists():
            problem = f"{suite}.jsonl is there, and no {NAME} says whose answers to {suite} these are"
            raise UserError(str(folder), problem, fix)
        before = found["suites"].setdefault(suite, {"fingerprint": print_})["fingerprint"]
        if differing := differences(before, print_):
            problem = f"its answers to {suite} have other {differing}"
            raise UserError(str(folder), problem, fix)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, found)
    return found


def _other(key: str, before: Any, now: Any) -> str:
    """How the answers of a directory are another model's."""
    if key != "weights":
        return f"it holds answers with another {key}: {before}, not {now}"
    return "the model's weights have changed since it was begun"


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The parts in which two fingerprints differ, or nothing.

    >>> differences({"prompts": 1, "template": 2}, {"prompts": 1, "template": 3})
    'template'
    """
    return ", ".join(key for key in {**one, **other} if one.get(key) != other.get(key))
