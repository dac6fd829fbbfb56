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
"""An answer: id, sample, prompt, answer, stop, tokens, score, label, reason, parts; and key, its vote."""


def load(folder: Path) -> dict[str, Any]:
    """Read results.json; UserError if it is missing or cannot be read."""
    file = folder / NAME
    if not file.exists():
        problem = (
            f"is not a result of eval: it has no {NAME}" if folder.exists() else "there is no such directory"
        )
        raise UserError(str(folder), problem, "name the directory of eval's --out")
    try:
        results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return results | {"suites": dict(results["suites"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(str(file), f"cannot be read: {error}") from None


def locate(folder: Path) -> Path:
    """Return a directory of results: the folder itself, or the latest evaluation of a run.

    Evaluations are searched for in the run's directory and in evals/. Raises UserError if a run has none.
    """
    if (folder / NAME).exists() or not is_run(folder):
        return folder
    run = folder.resolve()
    folders = [file.parent for file in folder.glob(f"*/{NAME}")]
    others = (file.parent for file in Path("evals").glob(f"*/{NAME}"))
    folders += [other for other in others if run in Path(load(other).get("model", "")).resolve().parents]
    if not folders:
        problem = "is a run that was not evaluated on suites"
        raise UserError(str(folder), problem, f"evaluate it: posttrain eval {folder} --suite SUITE")
    return max(folders, key=lambda folder: (folder / NAME).stat().st_mtime)


def save(folder: Path, results: Mapping[str, Any]) -> None:
    """Write results.json atomically."""
    put(folder / NAME, json.dumps(results, indent=1, allow_nan=False) + "\n")


def answers(folder: Path, suite: str) -> list[Line]:
    """Return every answer to a suite."""
    return read_lines(folder / f"{suite}.jsonl")


def read_lines(file: Path) -> list[Line]:
    """Return the answers of a file, without a last line that was cut off; none if the file is missing."""
    if not file.exists():
        return []
    text = file.read_text(encoding="utf-8")
    # Not splitlines, which also cuts at characters that JSON allows inside a string.
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].split("\n") if line]


def begun(folder: Path, who: Mapping[str, Any], prints: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Open the results in a directory for this model and these fingerprints of suites, or begin new ones.

    Raises UserError if the directory holds answers of another model, answers with another fingerprint, or
    answers that results.json does not mention.
    """
    fix = "name another --out"
    results = load(folder) if (folder / NAME).exists() else {**who, "suites": {}}
    for key in {**who, **results}:
        if key != "suites" and results.get(key) != who.get(key):
            problem = f"it holds answers with another {key}: {results.get(key)}, not {who.get(key)}"
            if key == "weights":
                problem = "the model's weights have changed since its first answers"
            raise UserError(str(folder), problem, fix)
    for suite, print_ in prints.items():
        if suite not in results["suites"] and (folder / f"{suite}.jsonl").exists():
            problem = f"it has {suite}.jsonl, but {NAME} does not say which model gave these answers"
            raise UserError(str(folder), problem, fix)
        before = results["suites"].setdefault(suite, {"fingerprint": print_})["fingerprint"]
        if differing := differences(before, print_):
            problem = f"its answers to {suite} have other {differing}"
            raise UserError(str(folder), problem, fix)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, results)
    return results


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the keys in which two fingerprints differ, separated by commas.

    >>> differences({"prompts": 1, "template": 2}, {"prompts": 1, "template": 3})
    'template'
    """
    return ", ".join(key for key in {**one, **other} if one.get(key) != other.get(key))
