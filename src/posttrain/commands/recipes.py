"""`posttrain recipes` and `posttrain schema`: the recipes that come with posttrain, and every key of one."""

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from posttrain.base.name_hints import did_you_mean
from posttrain.commands.options import Json
from posttrain.recipe.catalogue import catalogue, find_recipe, recipes_dir
from posttrain.recipe.schema import recipe_schema
from posttrain.report.terminal import console, out
from posttrain.types import UserError


def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this recipe, or copy it with --out.")
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Copy the recipe, with the stages of a pipeline, into this directory."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List the stages of pipelines too, which are recipes of their own.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the recipes that come with posttrain, print one, or copy it.

    `posttrain train NAME` runs a recipe, and `posttrain validate NAME` says what it needs on this machine.
    """
    entries = catalogue()
    if name is not None:
        _recipe(name, out_dir)
        return
    if out_dir is not None:
        raise UserError("--out", "which recipe?", "posttrain recipes NAME --out DIR")
    shown = [entry for entry in entries.values() if everything or not entry.stage_of]
    if as_json:
        typer.echo(json.dumps([asdict(entry) | {"file": str(entry.file)} for entry in shown], indent=1))
        return
    page = out if out.is_terminal else console(width=120)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("recipe", "kind", "takes", "model", "what it does"):
        table.add_column(head, overflow="fold", no_wrap=head in ("recipe", "kind", "takes"))
    for entry in shown:
        kind = "pipeline" if entry.is_pipeline else "recipe"
        about = Text(entry.about)
        if entry.result:
            about.append(f" Result: {entry.result}.", style="dim")
        table.add_row(entry.name, kind, entry.takes, entry.model, about)
    page.print(table)
    page.print("\nposttrain train NAME runs one; posttrain recipes NAME --out DIR copies it, to change it.")
    page.print("Times are those of two cores with AVX-512. A recipe without a time was not timed.")


def _recipe(name: str, out_dir: Path | None) -> None:
    """Print a recipe of the catalogue, or copy it."""
    file = find_recipe(Path(name))
    if not file.is_file():
        raise UserError("NAME", f"there is no recipe {name!r}", did_you_mean(name, catalogue()))
    if out_dir is None:
        typer.echo(file.read_text(encoding="utf-8"), nl=False)
        return
    parts = [file, *_parts(file)]
    # Paths from one file to another stay as they are.
    root = Path(os.path.commonpath([part.parent for part in parts]))
    copies = {part: out_dir / part.relative_to(root) for part in parts}
    if there := next((copy for part, copy in copies.items() if _would_change(part, copy)), None):
        raise UserError(str(there), "it is there already", "name another --out")
    for part, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        if part.is_file():
            shutil.copy(part, copy)
        else:
            shutil.copytree(part, copy, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    out.print(f"{copies[file]}\nrun it with: posttrain train {copies[file]}", soft_wrap=True)


def _would_change(part: Path, copy: Path) -> bool:
    """Return whether copying a file, or a folder, would overwrite a file; of a folder one that differs."""
    if part.is_file():
        return copy.exists()
    files = ((file, copy / file.relative_to(part)) for file in part.rglob("*") if file.is_file())
    return any(other.exists() and other.read_bytes() != file.read_bytes() for file, other in files)


def _parts(file: Path) -> list[Path]:
    """Return the files next to a recipe that it names, and the whole folders of those in other folders."""
    names = re.findall(r'"([\w./-]+)[:"]', file.read_text(encoding="utf-8"))
    files = [Path(os.path.normpath(file.parent / name)) for name in names]
    files = [path for path in files if path.is_file() and path.is_relative_to(recipes_dir())]
    parts = {path if path.parent == file.parent else path.parent for path in files}
    return sorted(parts | {folder for folder in [file.with_suffix("")] if folder.is_dir()})


def schema() -> None:
    """Print the JSON Schema of a recipe, plugins included.

    Editors complete and check the keys of a TOML file whose first line names the schema:

        posttrain schema > recipe.schema.json, and in the recipe: #:schema ./recipe.schema.json
    """
    typer.echo(json.dumps(recipe_schema(), indent=1))
