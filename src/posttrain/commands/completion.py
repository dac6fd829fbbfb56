"""What may stand where a shell's user presses Tab, without importing the commands themselves.

completion.json lists options, keys and methods: scripts/docs.py writes it. A command is not imported, as that
takes seconds. Where nothing is known, the shell completes names of files.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from posttrain.recipe.catalogue import catalogue

FILE = Path(__file__).with_name("completion.json")
TAKES_RECIPE = (
    "train",
    "validate",
    "recipes",
    "search",
    "eval",
    "data show",
    "data steps",
    "data contamination",
)
TAKES_RUN = (
    "eval",
    "sample",
    "serve",
    "report",
    "search",
    "run list",
    "run show",
    "run watch",
    "run inspect",
    "model export",
)


class Candidate(NamedTuple):
    """A completion, as the shells' scripts of typer read it."""

    value: str
    type: str = "plain"
    help: str | None = None


@cache
def known() -> Mapping[str, Any]:
    """Return options by command, keys of recipes and names of methods."""
    names: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return names


def complete(command: str, words: Sequence[str], incomplete: str) -> list[Candidate]:
    """Return what may be completed to; `words` are the command's arguments before the incomplete one."""
    return [Candidate(word) for word in sorted(set(_words(command, words, incomplete)))]


def _words(command: str, words: Sequence[str], incomplete: str) -> Iterator[str]:
    if words and words[-1] == "--set":
        yield from _assignments(incomplete)
    elif words and words[-1] == "--method":
        yield from (name for name in known()["methods"] if name.startswith(incomplete))
    elif words and words[-1].startswith("--") and words[-1] not in ("--quiet", "--json", "--resume", "--all"):
        return  # a value: the shell completes files
    elif incomplete.startswith("-"):
        yield from (option for option in known()["options"].get(command, ()) if option.startswith(incomplete))
    else:
        if command in TAKES_RECIPE:
            yield from (name for name in catalogue() if name.startswith(incomplete))
            yield from _paths(incomplete, ".toml")
        if command in TAKES_RUN:
            yield from _runs(incomplete)


def _assignments(incomplete: str) -> Iterator[str]:
    """Yield KEY= for the keys that begin so, and method.name=METHOD."""
    key, equals, value = incomplete.partition("=")
    if equals:
        names = known()["methods"] if key == "method.name" else ()
        yield from (f"{key}={name}" for name in names if name.startswith(value))
        return
    yield from (f"{name}=" for name in known()["keys"] if name.startswith(key))


def _paths(incomplete: str, suffix: str) -> Iterator[str]:
    """Yield files of this kind, and folders, that begin so."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    for path in folder.glob("*") if folder.is_dir() else ():
        if str(path).startswith(incomplete) and (path.suffix == suffix or path.is_dir()):
            yield f"{path}/" if path.is_dir() else str(path)


def _runs(incomplete: str) -> Iterator[str]:
    """Yield run directories in runs/ and here that begin so."""
    for file in (*Path().glob("*/config.toml"), *Path("runs").glob("*/config.toml")):
        if str(file.parent).startswith(incomplete):
            yield str(file.parent)
