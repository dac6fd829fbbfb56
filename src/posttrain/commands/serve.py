"""`posttrain serve`: a model's answers over the OpenAI chat API."""

import signal
import sys
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from posttrain.api.answering import load_policy, parse_engine, recipe_of
from posttrain.process import machine
from posttrain.report.terminal import out, say
from posttrain.serving.server import ChatServer, ModelDesk


def serve(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RUN_DIR", help="A model, or a run's newest checkpoint.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0 takes a free one.")] = 8000,
    name: Annotated[str, typer.Option(help="Of the model, for clients; by default what it is called.")] = "",
    engine: Annotated[str, typer.Option(help="What draws: native or vllm.")] = "native",
    rows: Annotated[int, typer.Option(min=1, help="Answers that are drawn at once; others wait.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the draws of requests that name none.")] = 0,
) -> None:
    """Serve a model's answers over the OpenAI chat API on this machine, until Ctrl-C.

    Any client of that API can ask: base URL http://127.0.0.1:8000/v1, any key. What is asked at the same time
    is drawn at the same time.

    Example: `posttrain serve runs/arithmetic_grpo-001`
    """
    recipe, adapter = recipe_of(target, say)
    machine.configure()
    recipe = replace(recipe, engine=replace(recipe.engine, rows=rows))
    policy, draws = load_policy(recipe, adapter, say, parse_engine(engine))
    name = name or Path(target).name
    desk = ModelDesk(draws, policy.chat, name=name, context=policy.context, seed=seed)
    with closing(ChatServer(desk, port)) as server, closing(desk):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        out.print(f"{server.address} serves {name}; Ctrl-C ends it", soft_wrap=True)
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.wait()
    out.print(f"no longer serving {name}")
