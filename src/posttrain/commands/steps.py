"""`posttrain data steps`: label the steps of a policy's answers, to train a process reward model."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.commands.options import NewFile, Sets, progress_bar
from posttrain.evaluation.step_labels import Labelling, hard, soft, step_labels
from posttrain.loop.sampling import build_native_engine
from posttrain.models.pretrained import silent
from posttrain.plan.model_info import ModelInfo, read_model_info
from posttrain.plan.prompts import check_prompts
from posttrain.plan.resolve import Resolved, resolve_recipe
from posttrain.process import machine
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.target import target_of
from posttrain.report.terminal import err
from posttrain.types import UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier


def steps(
    target: Annotated[
        Path, typer.Argument(metavar="RECIPE.toml|RUN_DIR", help="The model, the tasks and the verifier.")
    ],
    out: NewFile,
    solutions: Annotated[int, typer.Option(min=1, help="Answers sampled for each task.")] = 1,
    rollouts: Annotated[int, typer.Option(min=1, help="Continuations from each step of an answer.")] = 8,
    budget: Annotated[
        int, typer.Option(min=0, help="Continuations after which no further task begins; 0: no bound.")
    ] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Only the first tasks; 0 takes all.")] = 0,
    separator: Annotated[str, typer.Option(help="Between steps; \\n is a newline.")] = "\\n\\n",
    reachable: Annotated[
        bool, typer.Option("--hard", help="Label a step 1 if any continuation ends right, else 0.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Label each step of a policy's answers by how often the policy, continuing from it, ends right.

    Each line is a record for the method process_reward: prompt, steps, labels (success rates), rollouts.
    """
    if out.exists():
        raise UserError(str(out), "is there already", "name another file, or remove it")
    (loaded, recipe, adapter), separator = target_of(target, sets or ()), _parse_separator(separator)
    options = Labelling(
        solutions=solutions,
        rollouts=rollouts,
        budget=budget,
        separator=separator,
        right=recipe.eval.right,
        estimate=hard if reachable else soft,
    )
    machine.configure(recipe.run.threads)
    with loaded.located():
        resolved, verifier, policy = _resolve(recipe, limit or None)
    rollout = recipe.rollout
    with (
        Pool(workers=rollout.workers, deadline_s=rollout.deadline_s, memory_mb=rollout.memory_mb) as pool,
        progress_bar() as bar,
    ):
        line = bar.add_task("continuations", total=budget or None)
        records = step_labels(
            resolved.train,
            build_native_engine(recipe, policy, adapter),
            policy.chat,
            verifier,
            pool,
            recipe.sampling,
            options,
            context=min(policy.context, recipe.engine.cache_tokens),
            seed=recipe.run.seed,
            on_progress=lambda spent: bar.update(line, completed=spent),
        )
        answers, labelled = _write_records(records, out)
    err.print(f"{out}: answers {answers}, steps {labelled}", soft_wrap=True)


def _parse_separator(separator: str) -> str:
    if not separator:
        raise UserError("--separator", "is empty", "give the text between steps")
    return separator.replace("\\n", "\n")


def _write_records(records: Iterable[dict[str, Any]], out: Path) -> tuple[int, int]:
    """Write the records; return counts of answers and steps. The file appears at the end or at Ctrl-C."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, answers, labelled = out.with_name(out.name + ".tmp"), 0, 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                answers, labelled = answers + 1, labelled + len(record["steps"])
    except KeyboardInterrupt:
        if not answers:
            raise
        partial.replace(out)
        raise KeyboardInterrupt(f"kept in {out}: answers {answers}, steps {labelled}") from None
    partial.replace(out)
    return answers, labelled


def _resolve(recipe: Recipe, limit: int | None) -> tuple[Resolved, Verifier, ModelInfo]:
    """Return the recipe with its first tasks, its verifier and its model; raise UserError without them."""
    resolved = resolve_recipe(recipe)
    if not resolved.online or resolved.verifier is None:
        problem = "steps are judged by where they lead, and this recipe has no verifier that could"
        raise UserError("verifier", problem, "take the recipe of an online method")
    policy = read_model_info(recipe, silent)
    limited, _ = check_prompts(replace(resolved, train=resolved.train[:limit], held_out=()), policy, silent)
    return limited, resolved.verifier, policy
