"""`posttrain search`: searches tasks with a policy, and prints what was found, with its trees."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress
from rich.text import Text
from rich.tree import Tree as Drawn

from posttrain.learner import pretrained
from posttrain.runtime import process
from posttrain.runtime.ask import ask
from posttrain.runtime.policy import surroundings
from posttrain.runtime.recipe import Recipe
from posttrain.runtime.sampling import check_samplers, engine_of, rollouts_of
from posttrain.samplers.trees import Trees
from posttrain.search.choice import SearchChoice
from posttrain.search.protocol import Refused
from posttrain.search.tree import Edge, Node, Tree
from posttrain.show import err, out
from posttrain.target import target_of
from posttrain.training import say
from posttrain.types import Episode, Task, UserError


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
        str | None, typer.Option(help="best_first, beam, best_of_n, puct or rmax; by default the recipe's.")
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
) -> None:
    """Searches tasks with a policy, and prints answers or proofs with their trees.

    Of a recipe it takes the model that training would start from; of a run directory the newest whole
    checkpoint. What a search finds is judged by the recipe's verifier.
    """
    given = list(sets or ())
    given += [f"search.strategy={strategy}"] if strategy else []
    given += [f"search.moves={budget}"] if budget else []
    found, recipe, adapter = target_of(target, given, model, say)
    recipe = replace(recipe, search=recipe.search or SearchChoice())
    process.settle(recipe.run.threads)
    try:
        if split not in ("held_out", "train"):
            raise UserError(f"there is no split {split!r}", where="--split", mend="held_out or train")
        asked = ask(recipe)
        if not asked.online:
            raise UserError("an offline recipe has no answers to search", where="method.name")
        check_samplers(asked)
        tasks = (asked.held_out if split == "held_out" else asked.train)[:limit]
        if not tasks:
            raise UserError(f"there are no tasks in {split}", where="eval.limit")
        policy = surroundings(recipe, pretrained.silent if as_json else say)
    except UserError as error:
        raise found.locate(error) from None
    trees = rollouts_of(asked, policy, engine_of(recipe, policy, adapter))
    assert isinstance(trees, Trees)
    groups = _searched(trees, tasks, recipe)
    for number, [episode] in enumerate(groups):
        if as_json:
            typer.echo(json.dumps(record(episode, trees.found[number]), ensure_ascii=False))
        else:
            _print(episode, trees.found[number], tree)
    if not as_json:
        solved = sum((e.verdict.score or 0.0) >= recipe.eval.right for [e] in groups)
        spent = sum(t.drawn for t in trees.found.values() if isinstance(t, Tree))
        named = f"{trees.choice.strategy}, at most {trees.choice.moves} moves"
        out.print(f"{named}: {solved} of {len(tasks)} solved, {spent / len(tasks):.4g} moves a task")


def _searched(trees: Trees, tasks: Sequence[Task], recipe: Recipe) -> list[list[Episode]]:
    """What searches of these tasks came to, with their trees in `trees`."""
    trees.keeps = True
    try:
        with Progress(console=err, disable=not err.is_terminal, transient=True) as bar:
            line = bar.add_task("searches", total=len(tasks))
            return trees.run(tasks, 1, recipe.sampling, lambda done: bar.update(line, completed=done))
    finally:
        trees.close()


def record(episode: Episode, tree: Tree | Refused) -> dict[str, Any]:
    """A search as JSON: what it came to, what it spent, and each state with the moves said in it."""
    verdict = episode.verdict
    said: dict[str, Any] = {
        "task": episode.task.id,
        "label": verdict.label,
        "score": verdict.score,
        "reason": verdict.reason,
        "answer": episode.response,
    }
    if isinstance(tree, Refused):
        return said
    return said | {
        "moves": tree.drawn,
        "tokens": tree.tokens,
        "followed": tree.applied,
        "merged": tree.merged,
        "refused": dict(tree.refused),
        "states": [
            {
                "shown": node.state.key,
                "depth": node.depth,
                "done": node.state.done,
                "moves": [_said(edge) for edge in node.edges.values()],
            }
            for node in tree.nodes
        ],
    }


def _said(edge: Edge) -> dict[str, Any]:
    where = {"to": edge.target.number} if edge.target else {}
    why = {"refused": edge.refused.label, "reason": edge.refused.reason} if edge.refused else {}
    said = {"text": edge.move.text, "logp": edge.move.logp, "said": edge.said, "visits": edge.visits}
    return said | where | why


def _print(episode: Episode, tree: Tree | Refused, draw: bool) -> None:
    verdict = episode.verdict
    out.print(f"{episode.task.id}  {verdict.label}: {verdict.reason}", soft_wrap=True)
    if episode.response:
        out.print(episode.response)
    if draw and isinstance(tree, Tree):
        way = {id(edge) for edge in tree.path(tree.solved)} if tree.solved else set()
        drawn = Drawn("start")
        _draw(drawn, tree.nodes[0], way, set())
        out.print(drawn)
    out.print()


def _draw(drawn: Drawn, node: Node, way: set[int], seen: set[int]) -> None:
    """Adds the moves of a node, the likeliest first; each node once."""
    seen.add(node.number)
    for edge in sorted(node.edges.values(), key=lambda edge: -edge.move.logp):
        style = "bold green" if id(edge) in way else "" if edge.target else "dim"
        end = edge.refused.label if edge.refused else "" if edge.target else "not followed"
        end = "end" if edge.target and edge.target.state.done else end
        text = f"{edge.move.text.strip()}  {edge.move.logp:.2f}  {end}".rstrip()
        below = drawn.add(Text(text, style=style))
        if edge.target and edge.target.number not in seen:
            _draw(below, edge.target, way, seen)
