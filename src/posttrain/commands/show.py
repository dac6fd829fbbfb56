"""`posttrain data show`: the first rows of a recipe's data as the model gets them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Annotated

import typer
from rich.text import Text

from posttrain.base.chat import Chat
from posttrain.commands.options import Json, RecipeFile, Sets
from posttrain.loop.transcript import transcript
from posttrain.models import pretrained
from posttrain.plan.dataset_rows import build_groups
from posttrain.plan.model_info import ModelInfo, read_model_info
from posttrain.plan.resolve import Resolved, resolve_recipe
from posttrain.recipe import config
from posttrain.report.terminal import join_pieces, mark, out, say
from posttrain.types import Trajectory

Pieces = Sequence[tuple[str, bool]]
"""Text, and whether a run trains on it."""


def show(
    recipe: RecipeFile,
    sets: Sets = None,
    limit: Annotated[int, typer.Option(min=1, help="Tasks, conversations or groups of answers.")] = 3,
    as_json: Json = False,
) -> None:
    """Show the first rows of a recipe's data as the model gets them, with what is trained marked.

    Tokens that a run trains on are between ⟦ and ⟧. Of tasks it is the prompt, since their answers are still
    to be sampled; where an environment, tools or an agent play, a script plays the first episode.

    Example: `posttrain data show dpo.toml --limit 2`
    """
    loaded = config.read(recipe, sets or ())
    with loaded.located():
        told = pretrained.silent if as_json else say
        resolved = resolve_recipe(loaded.recipe, told)
        policy = read_model_info(loaded.recipe, told)
        rows = [row for part in resolved.parts if part.train for row in _rows(part, policy, limit)]
    for place, source, pieces, count in rows:
        if as_json:
            parts = [{"text": text, "trained": trained} for text, trained in pieces]
            typer.echo(json.dumps({"row": place, "source": source, "tokens": count, "parts": parts}))
            continue
        prompt = "" if any(trained for _, trained in pieces) else ", a prompt: a run samples the answers"
        size = f"  {count} tokens" if count else ""
        out.print(Text(f"── {place}  {source}{size}{prompt}", "bold"), soft_wrap=True)
        line = Text()
        for text, marked in pieces:
            line.append(mark([(text, marked)]), style="green" if marked else "")
        out.print(line, soft_wrap=True)
        out.print()


def _rows(resolved: Resolved, policy: ModelInfo, limit: int) -> Iterator[tuple[str, str, Pieces, int]]:
    """Yield (number of the row, where it stands in the data, its text, number of tokens)."""
    if not resolved.online:
        text = resolved.line.learns == "text"
        few = resolved if text else replace(resolved, train=resolved.train[:limit], held_out=())
        groups, _, _ = build_groups(few, policy, pretrained.silent)
        for number, group in enumerate(islice(groups, limit)):
            source = "" if text else str(getattr(few.train[number], "source", ""))
            for place, row in enumerate(group):
                name = f"{number + 1}" if len(group) == 1 else f"{number + 1}, answer {place + 1}"
                name = f"{resolved.name}: {name}" if resolved.name else name
                yield name, source, _pieces(policy.chat, row), len(row.tokens)
        return
    episode = transcript(resolved, policy)
    if episode:
        name = f"{resolved.name}: " if resolved.name else ""
        yield f"{name}1, played by a script", str(resolved.train[0].source), episode, 0
        return
    for number, task in enumerate(resolved.train[:limit]):
        tokens = policy.chat.render(task.messages)
        name = f"{resolved.name}: {number + 1}" if resolved.name else f"{number + 1}"
        yield name, str(task.source), [("".join(policy.chat.pieces(tokens)), False)], len(tokens)


def _pieces(chat: Chat, row: Trajectory) -> Pieces:
    """Return a row as text, cut where training begins or ends."""
    return join_pieces(zip(chat.pieces(row.tokens), row.sampled, strict=True))
