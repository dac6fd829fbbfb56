"""`posttrain search`: search tasks with a policy, and print answers, proofs and trees."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from rich.tree import Tree

from posttrain.base.kinds import kinds
from posttrain.base.toml import dump
from posttrain.commands.options import Model, Sets, progress_bar
from posttrain.errors import UnreadKeyError
from posttrain.loop.sampling import build_episode_runner, build_native_engine
from posttrain.methods.table import line
from posttrain.models import pretrained
from posttrain.plan.model_info import read_model_info
from posttrain.plan.resolve import Resolved, build_context, resolve_recipe
from posttrain.process import machine
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.rules import check
from posttrain.recipe.target import Target, target_of
from posttrain.report import write
from posttrain.report.terminal import out, say
from posttrain.rollout.episode_runner import EpisodeRunner
from posttrain.run.rundir import RunDir
from posttrain.run.samples import search_line
from posttrain.search.choice import SearchChoice, Strategy
from posttrain.types import Task, UserError

Line = Mapping[str, Any]
"""A search, as a line of trees/."""
OutDir = Annotated[
    Path | None, typer.Option("--out", help="A new directory for the searches and their report.")
]
Goals = Annotated[
    Path | None,
    typer.Option(help="A file for the open goals of sketches of unsolved theorems: tasks, a line each."),
]
Values = Annotated[
    Path | None,
    typer.Option(help="A file for states of proofs found, each with its value: data of process_reward."),
]


def search(
    target: Annotated[Path, typer.Argument(metavar="RECIPE.toml|RUN_DIR", help="The policy and the tasks.")],
    sets: Sets = None,
    model: Model = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="A value of search.strategy, or several with commas; by default the recipe's."),
    ] = None,
    budget: Annotated[
        int | None, typer.Option(min=1, help="Moves that each search may draw; by default search.moves.")
    ] = None,
    split: Annotated[str, typer.Option(help="held_out or train.")] = "held_out",
    limit: Annotated[int, typer.Option(min=1, help="Tasks.")] = 10,
    tree: Annotated[bool, typer.Option("--tree", help="Draw the trees too.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A line of JSON for each task, tree included.")
    ] = False,
    out_dir: OutDir = None,
    goals: Goals = None,
    values: Values = None,
) -> None:
    """Search tasks with a policy, and print answers or proofs with their trees.

    The policy of a recipe is the model that training would start from; of a run, its newest whole checkpoint.
    The recipe's verifier judges what a search finds. With --out the searches are written to a directory, with
    a report.html.
    """
    strategies = _strategies(strategy)
    overrides = [*(sets or ()), *([f"search.moves={budget}"] if budget else [])]
    loaded, recipe, adapter = _target(target, overrides, model, strategies)
    settings = recipe.search or SearchChoice()
    recipe = replace(recipe, search=settings)
    machine.configure(recipe.run.threads)
    choices = [replace(settings, strategy=name) for name in strategies] or [settings]
    if goals:
        _check_goals(goals, choices)
    if values:
        _check_folder("--values", values)
    with loaded.located():
        resolved, tasks = _resolve(recipe, choices, split, limit)
        if values and not build_context(resolved.recipe).moves:
            problem = "the ends of these searches are not known to be right, as those of proofs are"
            raise UserError("--values", problem, "leave it out")
        policy = read_model_info(recipe, pretrained.silent if as_json else say)
    run_dir = RunDir(out_dir, resume=False) if out_dir else None
    engine = build_native_engine(recipe, policy, adapter)
    searches: dict[str, list[Line]] = {}
    for choice in choices:
        variant = replace(resolved, recipe=replace(recipe, search=choice))
        searches[choice.strategy] = lines = _run_searches(
            build_episode_runner(variant, policy, engine), tasks, recipe
        )
        for search in lines:
            _print(search, tree, as_json)
    rows = [] if as_json else table(searches, settings.moves)
    if run_dir:
        summary = {"of": target, "tasks": f"{len(tasks)} of {split}", "moves": settings.moves}
        report = _write_page(run_dir, searches, dump(loaded.tables), summary)
        rows += [] if as_json else [f"report {report}"]
    if goals:
        _write_goals(goals, searches)
    if values:
        write_values(values, searches, tasks)
    for row in rows:
        out.print(row, soft_wrap=True)


def _strategies(text: str | None) -> list[Strategy]:
    """Return the strategies of --strategy."""
    strategies = kinds("searches")
    names = text.split(",") if text else []
    if unknown := [name for name in names if name not in strategies]:
        fix = ", ".join(strategies)
        raise UserError("--strategy", f"there is no strategy {unknown[0]!r}", fix)
    return names


def _resolve(
    recipe: Recipe, choices: Sequence[SearchChoice], split: str, limit: int
) -> tuple[Resolved, Sequence[Task]]:
    """Resolve the recipe; return it and the tasks to search."""
    if split not in ("held_out", "train"):
        raise UserError("--split", f"there is no split {split!r}", "held_out or train")
    if line(recipe.method["name"]).loop != "online":
        raise UserError("method.name", "an offline recipe has no answers to search")
    resolved = resolve_recipe(replace(recipe, search=choices[0]))
    for choice in choices[1:]:
        check(build_context(replace(recipe, search=choice)))
    tasks = (resolved.held_out if split == "held_out" else resolved.train)[:limit]
    if not tasks:
        raise UserError("eval.limit", f"there are no tasks in {split}")
    return resolved, tasks


def _write_page(
    run_dir: RunDir, searches: Mapping[str, Sequence[Line]], config: str, summary: dict[str, Any]
) -> Path:
    """Write the searches and their report to a run directory, and return the report's path."""
    run_dir.describe(config, f"{summary['of'].stem}: {', '.join(searches)}", {"Search": summary})
    with run_dir.recording():
        for name, lines in searches.items():
            run_dir.samples(name, lines, "trees")
    run_dir.close()
    return write(run_dir.path)


def _target(target: Path, overrides: list[str], model: str | None, strategies: list[Strategy]) -> Target:
    """Read the target with the first strategy that reads all overrides, or else with the recipe's own."""
    for strategy in strategies:
        try:
            return target_of(target, [*overrides, f"search.strategy={strategy}"], model, say)
        except UnreadKeyError:
            continue
    return target_of(target, overrides, model, say)


def _check_goals(path: Path, choices: Sequence[SearchChoice]) -> None:
    """Raise UserError for a file of goals that no strategy fills, or that cannot be written."""
    if not any(choice.asks_sketches for choice in choices):
        fix = "set search.strategy = 'hypertree' and search.sketches"
        raise UserError("--goals", "no strategy sketches proofs, so there are no open goals", fix)
    _check_folder("--goals", path)


def _check_folder(option: str, path: Path) -> None:
    if not path.parent.is_dir():
        raise UserError(option, f"there is no folder {str(path.parent)!r}", "make it first")


def _write_goals(path: Path, searches: Mapping[str, Sequence[Line]]) -> None:
    """Write the open goals, each theorem once, as [task.data] reads them."""
    goals = (goal for lines in searches.values() for line in lines for goal in line.get("goals", ()))
    unique = dict.fromkeys(json.dumps(goal, sort_keys=True) + "\n" for goal in goals)
    path.write_text("".join(unique), encoding="utf-8")


def write_values(path: Path, searches: Mapping[str, Sequence[Line]], tasks: Sequence[Task]) -> None:
    """Write states with their values, each once, as a value model reads them: the task, and its goals."""
    messages = {task.id: list(task.messages) for task in tasks}
    rows = (
        {"prompt": messages[line["task"]], "steps": [state["shown"]], "labels": [state["lesson"]]}
        for lines in searches.values()
        for line in lines
        for state in line.get("states", ())
        if "lesson" in state and state["number"]
    )
    unique = dict.fromkeys(json.dumps(row, sort_keys=True) + "\n" for row in rows)
    path.write_text("".join(unique), encoding="utf-8")


def _run_searches(trees: EpisodeRunner, tasks: Sequence[Task], recipe: Recipe) -> list[Line]:
    """Search these tasks, and return each search as a line of trees/ with all its states."""
    with closing(trees), progress_bar() as bar:
        line = bar.add_task("searches", total=len(tasks))
        groups = trees.run(tasks, 1, recipe.sampling, lambda count: bar.update(line, completed=count))
    return [search_line(episode, recipe.eval.right) for [episode] in groups]


def table(searches: Mapping[str, Sequence[Line]], budget: int) -> list[str]:
    """Return rows of how many tasks each strategy solves within budgets, from one search of each task.

    A task that was solved after m moves is solved at every budget of m or more. Where a search compares
    all ends, it spends the whole budget, which says nothing of smaller ones.

    >>> lines = [{"solved": True, "moves": 3}, {"solved": False, "moves": 8}, {"solved": True, "moves": 8}]
    >>> print(*table({"puct": lines}, 8), sep="\\n")
    solved of 3 within     1     2     4     8 moves
    puct                   0     0     1     2  6.333 a task
    """
    ends = any("ends" in line for lines in searches.values() for line in lines)
    budgets = [budget] if ends else [budget // 2**n for n in range(3, -1, -1) if budget >= 2**n]
    count = len(next(iter(searches.values())))
    head = f"solved of {count} within"
    width = max(len(head), *map(len, searches)) + 1
    rows = [f"{head:{width}}" + "".join(f"{m:6}" for m in budgets)[1:] + " moves"]
    for name, lines in searches.items():
        solved = [sum(line["solved"] and (ends or line["moves"] <= m) for line in lines) for m in budgets]
        spent = sum(line["moves"] for line in lines) / count
        rows.append(f"{name:{width}}" + "".join(f"{n:6}" for n in solved)[1:] + f"  {spent:.4g} a task")
    return rows


def _print(line: Line, draw: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(line, ensure_ascii=False))
        return
    out.print(f"{line['task']}  {line['label']}: {line['reason']}", soft_wrap=True)
    if line["answer"]:
        out.print(line["answer"])
    if draw and "states" in line:
        root = Tree("start")
        _draw(root, line["states"], 0, set())
        out.print(root)
    out.print()


def _draw(branch: Tree, states: Sequence[Line], number: int, visited: set[int]) -> None:
    """Add the moves of a state, the likeliest first, or its parts, to a branch; each state once."""
    visited.add(number)
    for part, to in enumerate(states[number].get("parts", ()), start=1):
        below = branch.add(f"goal {part}")
        if to not in visited:
            _draw(below, states, to, visited)
    for move in sorted(states[number]["moves"], key=lambda move: -move["logp"]):
        to = move.get("to")
        style = "bold green" if "found" in move else "" if to is not None else "dim"
        end = move.get("refused", "not followed") if to is None else "end" if states[to]["done"] else ""
        text = f"{move['text'].strip()}  {move['logp']:.2f}  {end}".rstrip()
        below = branch.add(Text(text, style=style))
        if to is not None and to not in visited:
            _draw(below, states, to, visited)
