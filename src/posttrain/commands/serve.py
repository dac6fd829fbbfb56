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
from posttrain.process import machine
from posttrain.report.terminal import out, say
from posttrain.serving.server import ChatServer, ModelDesk


def serve(
    target: Policy,
    port: Port = 8000,
    name: Annotated[
        str, typer.Option(help="Name of the model, for clients; by default the last part of its path.")
    ] = "",
    engine: Annotated[str, typer.Option(help="Engine: native or vllm.")] = "native",
    rows: Annotated[int, typer.Option(min=1, help="Answers sampled at once; others wait.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of requests without one.")] = 0,
) -> None:
    """Serve a model's answers over the OpenAI chat API on this machine, until Ctrl-C.

    For any client of that API: base URL http://127.0.0.1:8000/v1, any key. Simultaneous requests are sampled
    in one batch.

    Example: `posttrain serve runs/arithmetic_grpo-001`
    """
    recipe, adapter = recipe_of(target, say)
    machine.configure()
    recipe = replace(recipe, engine=replace(recipe.engine, rows=rows))
    policy, sampler = load_policy(recipe, adapter, say, parse_engine(engine))
    name = name or Path(target).name
    desk = ModelDesk(sampler, policy.chat, name=name, context=policy.context, seed=seed)
    with closing(ChatServer(desk, port)) as server, closing(desk):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        out.print(f"{server.address} serves {name}; Ctrl-C ends it", soft_wrap=True)
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.wait()
    out.print(f"no longer serving {name}")
