"""The recipes that come with posttrain, by name: `arithmetic_grpo`, `agents/guess`."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Entry:
    """A recipe or a pipeline of the catalogue."""

    name: str
    file: Path
    is_pipeline: bool
    stage_of: str
    """Name of a pipeline with this recipe as a stage or in its folder, or ""."""
    model: str
    """Model that it starts from; "" if a stage makes it."""
    about: str
    """First sentence of the file."""
    takes: str
    """Time that it takes on two processor cores (`# Takes: 9 min` in the file); "" if it was not measured."""
    result: str
    """Result, with its date and page (`# Result: ...` in the file); "" for a stage."""


def recipes_dir() -> Path:
    """Return the folder of the recipes: in the installed package, or in the repository of an editable one."""
    installed = _PACKAGE / "recipes"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "recipes"


def catalogue() -> dict[str, Entry]:
    """Return the recipes and pipelines by name, sorted."""
    return {entry.name: entry for entry in _entries(recipes_dir())}


def find_recipe(path: Path) -> Path:
    """Return a recipe's file: the path if it exists, or else the recipe of that name in the catalogue.

    `recipes/NAME.toml` is a name too. Where there is neither, the path is returned as it is.
    """
    name = path.as_posix().removeprefix("recipes/").removesuffix(".toml")
    if path.exists() or not re.fullmatch(r"[\w/]+", name):
        return path
    file = recipes_dir() / f"{name}.toml"
    return file if file.is_file() else path


def _entries(folder: Path) -> Iterator[Entry]:
    pipelines: set[str] = set()
    named_by: dict[Path, list[str]] = {}
    files = sorted(folder.rglob("*.toml"), key=lambda file: (len(file.parts), file))
    entries = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
        if not tables.keys() & {"model", "stage"}:
            continue  # a judge's or a constitution's file
        name = file.relative_to(folder).with_suffix("").as_posix()
        if "stage" in tables:
            pipelines.add(name)
            for stage in tables["stage"]:
                named_by.setdefault((file.parent / stage.get("recipe", "")).resolve(), []).append(name)
        parents = [parent.as_posix() for parent in Path(name).parents]
        entries.append(
            Entry(
                name=name,
                file=file,
                is_pipeline="stage" in tables,
                stage_of=next((parent for parent in parents if parent in pipelines), ""),
                model=str(tables.get("model", {}).get("path", "")),
                about=_first_sentence(text),
                takes=_remark(text, "Takes"),
                result=_remark(text, "Result"),
            )
        )
    for entry in sorted(entries, key=lambda entry: entry.name):
        # A recipe at the top is one of its own, though a pipeline may begin with it.
        naming = named_by.get(entry.file.resolve(), []) if "/" in entry.name else []
        yield entry if not naming or entry.stage_of in naming else replace(entry, stage_of=naming[0])


def _remark(text: str, name: str) -> str:
    match = re.search(rf"^# {name}: (.+)$", text, re.MULTILINE)
    return match[1] if match else ""


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the head of a file."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("# "):
            break
        lines.append(line[2:].strip())
    return re.split(r"(?<=[.])\s", " ".join(lines), maxsplit=1)[0]
