"""`posttrain search`: searches tasks with a policy, and prints what was found, with its trees."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.text import Text
from rich.tree import Tree as Drawn

from posttrain.base.kinds import kinds
from posttrain.base.toml import dump
from posttrain.errors import UnreadKeyError
from posttrain.loop.sampling import build_episode_runner, build_native_engine
from posttrain.methods.table import line
from posttrain.models import pretrained
from posttrain.plan.model_info import read_model_info
from posttrain.plan.resolve import Resolved, context_of, resolve_recipe
from posttrain.process import machine
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.rules import check
from posttrain.recipe.target import Target, target_of
from posttrain.report import write
from posttrain.report.terminal import err, out, say
from posttrain.rollout.episode_runner import EpisodeRunner
from posttrain.run.rundir import RunDir
from posttrain.run.samples import search_line
from posttrain.search.choice import SearchChoice, Strategy
from posttrain.types import Task, UserError

Line = Mapping[str, Any]
"""A search, as in trees/."""
Kept = Annotated[
    Path | None, typer.Option("--out", help="A new directory for these lines, and a report of them.")
]
Goals = Annotated[
    Path | None,
    typer.Option(help="A file for what sketches of unsolved theorems left to prove: tasks, a line each."),
]


def search(
    target: Annotated[Path, typer.Argument(metavar="RECIPE.toml|RUN_DIR", help="Whose policy and tasks.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Overrides a key: --set search.strategy=puct"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Another model than the recipe's, or than the run's newest checkpoint.")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="One of search.strategy, or several with commas between; by default the recipe's."),
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
    out_dir: Kept = None,
    goals: Goals = None,
) -> None:
    """Search tasks with a policy, and print answers or proofs with their trees.

    Of a recipe it takes the model that training would start from; of a run directory the newest whole
    checkpoint. What a search finds is judged by the recipe's verifier. With --out what it found is kept
    too, and shown in a report.html.
    """
    strategies = _strategies(strategy)
    given = [*(sets or ()), *([f"search.moves={budget}"] if budget else [])]
    found, recipe, adapter = _target(target, given, model, strategies)
    settings = recipe.search or SearchChoice()
    recipe = replace(recipe, search=settings)
    machine.configure(recipe.run.threads)
    choices = [replace(settings, strategy=each) for each in strategies] or [settings]
    _check_goals(goals, choices)
    with found.located():
        resolved, tasks = _resolve(recipe, choices, split, limit)
        policy = read_model_info(recipe, pretrained.silent if as_json else say)
    kept = RunDir(out_dir, resume=False) if out_dir else None
    engine = build_native_engine(recipe, policy, adapter)
    told: dict[str, list[Line]] = {}
    for choice in choices:
        searched = replace(resolved, recipe=replace(recipe, search=choice))
        told[choice.strategy] = lines = _run_searches(
            build_episode_runner(searched, policy, engine), tasks, recipe
        )
        for search in lines:
            _print(search, tree, as_json)
    said = [] if as_json else table(told, settings.moves)
    if kept:
        about = {"of": target, "tasks": f"{len(tasks)} of {split}", "moves": settings.moves}
        said += [f"report {_write_page(kept, told, dump(found.tables), about)}"][as_json:]
    _write_goals(goals, told)
    for row in said:
        out.print(row, soft_wrap=True)


def _strategies(named: str | None) -> list[Strategy]:
    """Those that are named, with commas between."""
    known = kinds("searches")
    names = named.split(",") if named else []
    if unknown := [each for each in names if each not in known]:
        fix = ", ".join(known)
        raise UserError("--strategy", f"there is no strategy {unknown[0]!r}", fix)
    return names


def _resolve(
    recipe: Recipe, choices: Sequence[SearchChoice], split: str, limit: int
) -> tuple[Resolved, Sequence[Task]]:
    """What the recipe asks, and the tasks that are meant."""
    if split not in ("held_out", "train"):
        raise UserError("--split", f"there is no split {split!r}", "held_out or train")
    if line(recipe.method["name"]).loop != "online":
        raise UserError("method.name", "an offline recipe has no answers to search")
    resolved = resolve_recipe(replace(recipe, search=choices[0]))
    for choice in choices[1:]:
        check(context_of(replace(recipe, search=choice)))
    tasks = (resolved.held_out if split == "held_out" else resolved.train)[:limit]
    if not tasks:
        raise UserError("eval.limit", f"there are no tasks in {split}")
    return resolved, tasks


def _write_page(kept: RunDir, told: Mapping[str, Sequence[Line]], config: str, about: dict[str, Any]) -> Path:
    """The page of these searches, beside their lines."""
    kept.describe(config, f"{about['of'].stem}: {' beside '.join(told)}", {"Search": about})
    with kept.recording():
        for name, lines in told.items():
            kept.samples(name, lines, "trees")
    kept.close()
    return write(kept.path)


def _target(target: Path, given: list[str], model: str | None, strategies: list[Strategy]) -> Target:
    """What is searched, with keys that one of the strategies reads; the recipe's own is asked last."""
    for strategy in strategies:
        try:
            return target_of(target, [*given, f"search.strategy={strategy}"], model, say)
        except UnreadKeyError:
            continue
    return target_of(target, given, model, say)


def _check_goals(path: Path | None, choices: Sequence[SearchChoice]) -> None:
    """UserError for a file of goals that nothing would fill, or that could not be written."""
    if path is None:
        return
    if not any(each.asks_sketches for each in choices):
        fix = "set search.strategy = 'hypertree' and search.sketches"
        raise UserError("--goals", "nothing is sketched, so nothing is left to prove", fix)
    if not path.parent.is_dir():
        raise UserError("--goals", f"there is no folder {str(path.parent)!r}", "make it first")


def _write_goals(path: Path | None, told: Mapping[str, Sequence[Line]]) -> None:
    """What was left to prove, each theorem once, as [task.data] reads it."""
    if path is None:
        return
    goals = (goal for lines in told.values() for line in lines for goal in line.get("goals", ()))
    left = dict.fromkeys(json.dumps(goal, sort_keys=True) + "\n" for goal in goals)
    path.write_text("".join(left), encoding="utf-8")


def _run_searches(trees: EpisodeRunner, tasks: Sequence[Task], recipe: Recipe) -> list[Line]:
    """What searches of these tasks came to, each as a line of trees/ with all its states."""
    with closing(trees), Progress(console=err, disable=not err.is_terminal, transient=True) as bar:
        line = bar.add_task("searches", total=len(tasks))
        groups = trees.run(tasks, 1, recipe.sampling, lambda done: bar.update(line, completed=done))
    return [search_line(episode, recipe.eval.right) for [episode] in groups]


def table(told: Mapping[str, Sequence[Line]], budget: int) -> list[str]:
    """How many of the tasks each strategy solves with at most so many moves, from one search of each.

    A task that was solved after m moves is solved at every budget of m or more. Where all ends are compared
    the whole budget is spent, and says nothing of smaller ones.

    >>> lines = [{"solved": True, "moves": 3}, {"solved": False, "moves": 8}, {"solved": True, "moves": 8}]
    >>> print(*table({"puct": lines}, 8), sep="\\n")
    solved of 3 within     1     2     4     8 moves
    puct                   0     0     1     2  6.333 a task
    """
    compared = any("ends" in line for lines in told.values() for line in lines)
    budgets = [budget] if compared else [budget // 2**n for n in range(3, -1, -1) if budget >= 2**n]
    count = len(next(iter(told.values())))
    head = f"solved of {count} within"
    width = max(len(head), *map(len, told)) + 1
    rows = [f"{head:{width}}" + "".join(f"{m:6}" for m in budgets)[1:] + " moves"]
    for name, lines in told.items():
        solved = [sum(line["solved"] and (compared or line["moves"] <= m) for line in lines) for m in budgets]
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
        drawn = Drawn("start")
        _draw(drawn, line["states"], 0, set())
        out.print(drawn)
    out.print()


def _draw(drawn: Drawn, states: Sequence[Line], number: int, seen: set[int]) -> None:
    """Adds the moves of a state, the likeliest first, or its parts; each state once."""
    seen.add(number)
    for part, to in enumerate(states[number].get("parts", ()), start=1):
        below = drawn.add(f"goal {part}")
        if to not in seen:
            _draw(below, states, to, seen)
    for move in sorted(states[number]["moves"], key=lambda move: -move["logp"]):
        to = move.get("to")
        style = "bold green" if "found" in move else "" if to is not None else "dim"
        end = move.get("refused", "not followed") if to is None else "end" if states[to]["done"] else ""
        text = f"{move['text'].strip()}  {move['logp']:.2f}  {end}".rstrip()
        below = drawn.add(Text(text, style=style))
        if to is not None and to not in seen:
            _draw(below, states, to, seen)
