"""Sample a model's answers to a conversation, or evaluate it on held-out tasks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from posttrain.base import plain_template
from posttrain.engines.protocol import Engine
from posttrain.engines.vllm.start import require
from posttrain.errors import spell_key
from posttrain.loop.sampling import build_engine, build_episode_runner, build_native_engine
from posttrain.methods.table import line
from posttrain.models import pretrained
from posttrain.plan.memory import check_rows_fit, free_memory
from posttrain.plan.model_info import NO_TASK, ModelInfo, read_model_info
from posttrain.plan.resolve import resolve_recipe
from posttrain.recipe.document import is_run
from posttrain.recipe.recipe import Model, Recipe
from posttrain.recipe.target import target_of
from posttrain.run.hacking_metrics import auditors_of
from posttrain.run.metrics import named_evaluation_metrics
from posttrain.types import Completion, Message, Request, Sampling, UserError

EngineName = Literal["native", "vllm"]


def recipe_of(target: str, say: Callable[[str], None]) -> tuple[Recipe, Path | None]:
    """Return a recipe with a model or with a run's newest checkpoint, and the adapter on top, or None."""
    if is_run(Path(target)):
        _, recipe, adapter = target_of(Path(target), say=say)
        return recipe, adapter
    return Recipe(model=Model(path=target), method={"name": "grpo"}, task=NO_TASK), None


def parse_engine(name: str) -> EngineName:
    """Return the value of --engine; raise UserError for an unknown name, and if vLLM is not installed."""
    if name == "native":
        return "native"
    if name == "vllm":
        require(where="--engine")
        return "vllm"
    raise UserError("--engine", f"unknown engine {name!r}", "native or vllm")


def load_policy(
    recipe: Recipe, adapter: Path | None, say: Callable[[str], None], engine: EngineName = "native"
) -> tuple[ModelInfo, Engine]:
    """Load the recipe's model for sampling, independently of its method and tasks: its info, and an engine.

    engine: replaces the recipe's own. Raises UserError for a reward model.
    """
    if "head" in line(recipe.method["name"]).method.needs:
        fix = "score with it: posttrain data score MODEL DATA --against RUN_DIR, or as verifier.model.paths"
        raise UserError(recipe.model.path, "a reward model scores answers and writes none", fix)
    model = recipe.model
    tokenizer = pretrained.load_tokenizer(pretrained.resolve(model.path, say=say))
    if model.chat_template is None and not tokenizer.chat_template:
        say("the model has no chat template: it continues the prompt as plain text")
        model = replace(model, chat_template=plain_template.NAME)
    # The run's seed stays: it may determine the random weights below an adapter.
    settings = replace(recipe.engine, name=engine, url="", sleep=False)
    recipe = replace(recipe, model=model, method={"name": "grpo"}, task=NO_TASK, engine=settings)
    policy = read_model_info(recipe, say)
    return policy, build_engine(recipe, policy, adapter)


def sample_answers(
    recipe: Recipe,
    adapter: Path | None,
    messages: Sequence[Message],
    count: int,
    sampling: Sampling,
    seed: int,
    say: Callable[[str], None],
) -> Iterator[Completion]:
    """Yield `count` answers of the recipe's model to a conversation, in the order in which they end.

    Raises UserError for a model that cannot be read, and for a prompt that leaves no room.
    """
    policy, engine = load_policy(recipe, adapter, say)
    tokens = tuple(policy.chat.render(messages))
    check_rows_fit(count, len(tokens) + sampling.max_new_tokens, free_memory(torch.device("cpu")), where="-n")
    try:
        for n in range(count):
            engine.submit(Request(prompt=tokens, sampling=sampling, seed=seed, sample=n))
    except ValueError as error:
        raise UserError("prompt", str(error)) from None
    while engine.busy:
        for _, answer in engine.poll():
            yield answer


def evaluate_recipe(recipe: Recipe, adapter: Path | None, say: Callable[[str], None]) -> dict[str, float]:
    """Return accuracy, reward and length on the recipe's held-out tasks; raise UserError without any."""
    resolved = resolve_recipe(recipe)
    if not resolved.online:
        fix = "give problems, as --data FILE.jsonl --verifier number, or a recipe that samples"
        raise UserError("method.name", "an offline recipe has no answers to judge", fix)
    if not resolved.held_out and not resolved.evaluated:
        raise UserError("eval.limit", "there are no held-out tasks", f"give {spell_key('task.held_out')}")
    policy = read_model_info(recipe, say)
    engine = build_native_engine(recipe, policy, adapter)
    with closing(build_episode_runner(resolved, policy, engine)) as rollouts:
        groups = []
        parts = (*resolved.parts, *resolved.evaluated)
        for part in parts:
            sampling = replace(part.recipe.sampling, temperature=recipe.eval.temperature)
            groups += rollouts.run(part.held_out, recipe.eval.samples, sampling)
    auditors = {part.name: auditors_of(part.verifier) for part in parts}
    separate = {part.name for part in resolved.evaluated}
    return named_evaluation_metrics(groups, recipe.eval.right, auditors, separate)
