"""`posttrain serve`: serve a model's answers over the OpenAI chat API."""

import signal
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from posttrain.api.answering import load_policy, parse_engine, recipe_of
from posttrain.commands.options import Policy, Port
from posttrain.errors import UserError
from posttrain.process import machine
from posttrain.recipe.recipe import Recipe
from posttrain.report.terminal import out, say
from posttrain.serving.feedback import FeedbackLog
from posttrain.serving.server import ChatServer, ModelDesk, ModelsDesk


def serve(
    target: Policy,
    port: Port = 8000,
    name: Annotated[
        str, typer.Option(help="Name of the model, for clients; by default the last part of its path.")
    ] = "",
    adapters: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            metavar="NAME=RUN_DIR|DIR",
            help="Serve another model by this name too: a run, a folder with a LoRA adapter over MODEL, or a "
            "model. May be repeated. Each has an engine and the memory of all its weights: adapters are "
            "merged, so that answers are those of the run served alone.",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Append ratings of answers on the chat page to this file, for KTO; which of two answers is "
            "better to FILE.pairs.jsonl, for DPO and reward models.",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine: native or vllm.")] = "native",
    rows: Annotated[int, typer.Option(min=1, help="Answers sampled at once; others wait.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of requests without one.")] = 0,
) -> None:
    """Serve models over the OpenAI chat API on this machine, with a chat page, until Ctrl-C.

    For any client of that API: base URL http://127.0.0.1:8000/v1, any key. Simultaneous requests are sampled
    in one batch. http://127.0.0.1:8000/ is a page to chat with one model, or with two next to each other.

    Example: `posttrain serve runs/arithmetic_grpo-001`
    """
    recipe, adapter = recipe_of(target, say)
    models = {name or Path(target).name: (recipe, adapter)}
    for text in adapters or ():
        other, _, path = text.partition("=")
        if not (other and path):
            raise UserError(f"--adapter {text}", "is not NAME=RUN_DIR", "name it, as --adapter new=runs/new")
        if other in models:
            raise UserError(f"--adapter {text}", f"{other!r} is already the name of a model", "take another")
        models[other] = _adapted(recipe, path)
    if len(models) > 1 and parse_engine(engine) == "vllm":
        raise UserError("--adapter", "vLLM serves one model in a process", "take --engine native")
    feedback = FeedbackLog(log) if log else None
    machine.configure()
    desks = []
    for other, (its_recipe, its_adapter) in models.items():
        its_recipe = replace(its_recipe, engine=replace(its_recipe.engine, rows=rows))
        policy, sampler = load_policy(its_recipe, its_adapter, say, parse_engine(engine))
        desks.append(ModelDesk(sampler, policy.chat, name=other, context=policy.context, seed=seed))
    desk, names = ModelsDesk(desks, feedback), ", ".join(models)
    with closing(ChatServer(desk, port)) as server, closing(desk):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        page = server.address.removesuffix("v1")
        out.print(
            f"{server.address} serves {names}, {page} is a page to chat; Ctrl-C ends it", soft_wrap=True
        )
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.wait()
    out.print(f"no longer serving {names}")


def _adapted(recipe: Recipe, path: str) -> tuple[Recipe, Path | None]:
    """Return the recipe and the adapter of --adapter; a folder with an adapter alone is over this recipe."""
    if (Path(path) / "adapter_config.json").exists():
        return recipe, Path(path)
    return recipe_of(path, say)
