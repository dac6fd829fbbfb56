"""Label the steps of a policy's answers, for `posttrain data steps` and the functions of pipelines."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.evaluation.step_labels import Labelling, hard, soft, step_labels
from posttrain.loop.sampling import build_native_engine
from posttrain.models.pretrained import silent
from posttrain.plan.model_info import ModelInfo, read_model_info
from posttrain.plan.prompts import check_prompts
from posttrain.plan.resolve import Resolved, resolve_recipe
from posttrain.process import machine
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.target import target_of
from posttrain.types import UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier


def label_steps(
    target: Path,
    out: Path,
    *,
    solutions: int = 1,
    rollouts: int = 8,
    budget: int = 0,
    limit: int = 0,
    separator: str = "\n\n",
    reachable: bool = False,
    sets: Sequence[str] = (),
    on_progress: Callable[[int], None] = lambda rollouts: None,
) -> tuple[int, int]:
    """Write a record for each labelled answer to OUT; return the number of answers and of steps.

    target: a recipe of an online method, or a run: the model, the tasks and the verifier. sets: overrides of
    its keys, "model.path=runs/sft". limit: only the first tasks; 0 takes all. reachable: label a step 1 if
    any continuation ends right, else 0. The others are those of `Labelling`. Raises UserError if OUT exists,
    and for a recipe without a verifier.
    """
    if out.exists():
        raise UserError(str(out), "is there already", "name another file, or remove it")
    loaded, recipe, adapter = target_of(target, sets)
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
    with Pool(workers=rollout.workers, deadline_s=rollout.deadline_s, memory_mb=rollout.memory_mb) as pool:
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
            on_progress=on_progress,
        )
        return _write_records(records, out)


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
