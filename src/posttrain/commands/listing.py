"""The commands that list what there is: `methods`, `recipes`, and `schema`, every key of a recipe."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from posttrain.base.name_hints import did_you_mean
from posttrain.commands.options import Json
from posttrain.methods.build import described, parameters
from posttrain.methods.table import METHODS, Line
from posttrain.recipe.catalogue import catalogue, find_recipe
from posttrain.recipe.schema import recipe_schema
from posttrain.report.terminal import console, out
from posttrain.types import Method, UserError


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
    for head in ("recipe", "kind", "model", "takes", "what it does"):
        table.add_column(head, overflow="fold", no_wrap=head in ("recipe", "kind"))
    for entry in shown:
        kind = "pipeline" if entry.is_pipeline else "recipe"
        table.add_row(entry.name, kind, entry.model, entry.takes, entry.about)
    page.print(table)
    page.print("\nposttrain train NAME runs one; posttrain recipes NAME --out DIR copies it, to change it.")


def _recipe(name: str, out_dir: Path | None) -> None:
    """Print a recipe of the catalogue, or copy it."""
    file = find_recipe(Path(name))
    if not file.is_file():
        raise UserError("NAME", f"there is no recipe {name!r}", did_you_mean(name, catalogue()))
    if out_dir is None:
        typer.echo(file.read_text(encoding="utf-8"), nl=False)
        return
    copy, stages = out_dir / file.name, file.with_suffix("")
    if copy.exists():
        raise UserError(str(copy), "it is there already", "name another --out")
    out_dir.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, copy)
    if stages.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(stages, out_dir / stages.name, ignore=ignored, dirs_exist_ok=True)
    out.print(f"{copy}\nrun it with: posttrain train {copy}", soft_wrap=True)


def schema() -> None:
    """Print the JSON Schema of a recipe, plugins included.

    Editors complete and check the keys of a TOML file whose first line names the schema:

        posttrain schema > recipe.schema.json, and in the recipe: #:schema ./recipe.schema.json
    """
    typer.echo(json.dumps(recipe_schema(), indent=1))


def methods(as_json: Json = False) -> None:
    """Print the table of methods: what each chooses, and its source."""
    if as_json:
        rows = {
            name: {"title": m.title, "loop": m.loop, "learns": m.learns, "source": m.source, "step": m.step}
            | {"needs": sorted(m.method.needs), "group": m.method.least_group, **described(m.method)}
            for name, m in METHODS.items()
        }
        typer.echo(json.dumps(rows, indent=1))
        return
    page = out if out.is_terminal else console(width=120)  # in a file or a pipe a line stays whole
    for comparison, cells, columns in (
        (False, _reward_cells, ("estimator or credit", "ratio", "surrogate", "reduction", "critic", "step")),
        (True, _comparison_cells, ("learns from", "worth", "loss", "beta", "reference")),
    ):
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("method", overflow="fold", style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for name, m in METHODS.items():
            if _is_comparison(m.method) == comparison:
                table.add_row(name, *cells(m))
        page.print(table)
        page.print()
    for name, m in METHODS.items():
        loop = m.loop if m.loop == "online" else f"offline, {m.learns}"
        page.print(f"{name:21} {m.title}; {loop}; {m.source}")
    typer.echo(
        "\nEach choice is a function of posttrain/math; set another in the recipe, as in\n"
        '[method] credit = "leave_one_out". Online methods sample from the policy, offline ones learn\n'
        "from data. None needs a reward model; the methods with a head make one. A KL to the reference\n"
        "enters with kl_in_loss or kl_in_reward. --json prints every choice with its numbers."
    )


def _is_comparison(method: Method) -> bool:
    """Return whether a method learns from judgements of answers or steps, and not from tokens."""
    return method.unit != "token" or "head" in method.needs


def _reward_cells(line: Line) -> list[str]:
    """Return the cells of a method that learns from rewards, or from tokens."""
    method = line.method
    names = _names(method)
    credit = [
        names[key] for key in ("returns", "estimator", "credit", "keep") if names.get(key, "raw") != "raw"
    ]
    return [
        " ".join(credit) or names.get("credit", "-"),
        names.get("ratio", "-"),
        names.get("surrogate", "-") + _numbers(method, "surrogate"),
        names["reduction"],
        "yes" if "value" in method.needs else "-",
        {"adamw": "AdamW", "trust_region": "natural"}[line.step],
    ]


def _comparison_cells(line: Line) -> list[str]:
    """Return the cells of a method that learns from judgements of answers."""
    method = line.method
    names = _names(method)
    worth = [names[key] for key in ("divergence", "implicit") if key in names]
    loss = next((key for key in ("pair_loss", "item_loss") if key in names), "")
    return [
        line.learns if line.loop == "offline" else "its own answers",
        "a head" if "head" in method.needs else " of ".join(worth) or "log_ratio",
        names[loss] + _numbers(method, loss) if loss else "of its own",
        f"{vars(method)['beta']:g}" if "beta" in vars(method) else "-",
        "yes" if "logp_ref" in method.needs else "-",
    ]


def _names(method: Method) -> dict[str, str]:
    return {key: text.partition("(")[0] for key, text in described(method).items()}


def _numbers(method: Method, choice: str) -> str:
    """Return the numbers of a choice in brackets, or ""."""
    numbers = ", ".join(f"{number:g}" for number in parameters(method, choice).values())
    return f"({numbers})" if numbers else ""
