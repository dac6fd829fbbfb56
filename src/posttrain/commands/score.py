"""`posttrain data score`: score answers by a policy's implicit reward.

A policy that was trained on preferences is a reward model too: up to a constant of the prompt, the reward
for which it is the best policy under a KL to its reference is

    r(x, y) = β (log π(y | x) - log π_ref(y | x)).

Source: DPO, arXiv:2305.18290, eq. 5.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from filelock import FileLock, Timeout

from posttrain.commands.options import Json, Policy, check_dtype
from posttrain.data import Data, Ranking, load_labelled, load_rankings
from posttrain.learner import forward, lora
from posttrain.learner.critic import Critic
from posttrain.learner.reference import Reference
from posttrain.loop.reference import AT_ONCE, load_or_score
from posttrain.math import preference
from posttrain.math.choice import function_of
from posttrain.methods.build import build
from posttrain.methods.preference import Preference, better
from posttrain.methods.table import label, line
from posttrain.models import pretrained
from posttrain.models.rounding import dither
from posttrain.plan.dataset_rows import Group, Shaper, numbered
from posttrain.plan.model_info import (
    NO_TASK,
    ModelInfo,
    Say,
    load_weights,
    read_model_info,
    with_companion_models,
)
from posttrain.process import machine
from posttrain.recipe.document import is_run
from posttrain.recipe.recipe import Model, Recipe
from posttrain.recipe.target import target_of
from posttrain.report.terminal import out, say
from posttrain.run.agreement import agreement, calibration_curve, correlation
from posttrain.types import Batch, PerRow, Task, UserError
from posttrain.verifiers.model.verifier import RewardModel

PACKED = 2048
"""Packed tokens in one forward pass."""


def score(
    target: Policy,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Pairs, rankings, or answers with a label.")],
    reference: Annotated[
        str | None, typer.Option(help="The model it was trained from; for a run, by default its recipe's.")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="β of the implicit reward; by default the run's, else 0.1.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="A reward model to compare with; several are an ensemble's mean.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first records.")] = None,
    max_length: Annotated[int, typer.Option(min=0, help="Tokens of an answer; 0: the model's context.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "float32",
    as_json: Json = False,
) -> None:
    """Score answers by a policy's implicit reward β log π/π_ref, and compare it with a reward model's.

    It prints how often scores have the order of the data, by margin and length, and with --against the same
    for the reward model, and how far the two agree.
    """
    check_dtype(dtype)
    machine.configure()
    model_recipe, adapter, start, default_beta = _policy(target, dtype)
    origin = _reference_recipe(start, model_recipe, reference)
    if origin is None:
        problem = "log π/π_ref needs the model that the policy was trained from"
        raise UserError("--reference", problem, "name it, or score a run directory")
    log = pretrained.silent if as_json else say
    rankings = _read(data, limit, log)
    policy = _limit_context(origin, read_model_info(model_recipe, log), log)
    bound = min(max_length or policy.context, policy.context)
    shaper = Shaper(policy.chat, bound, marks=False)
    try:
        pairs = shaper.each(rankings, "rankings", log)
    except UserError as error:
        raise error.moved("batch.max_length", "--max-length") from None
    groups = [g for _, g in pairs]
    with _cache_dir(data, target, reference or "") as cache_dir:
        logp = _logp(start if adapter and start else model_recipe, policy, groups, cache_dir, adapter)
        logp_ref = _logp(origin, policy, groups, cache_dir)
        implicit = (default_beta if beta is None else beta) * (logp - logp_ref)
        explicit = _reward_model_scores([ranking for ranking, _ in pairs], against) if against else None
    if as_json:
        for line in _lines([ranking for ranking, _ in pairs], implicit, explicit):
            typer.echo(json.dumps(line))
        return
    _print(groups, implicit, explicit)


def _policy(target: str, dtype: str) -> tuple[Recipe, Path | None, Recipe | None, float]:
    """Return (recipe of the target's model, adapter, recipe of the run or None, β)."""
    model = Model(path=target, dtype=dtype)  # type: ignore[arg-type]
    model_recipe = Recipe(model=model, method={"name": "grpo"}, task=NO_TASK)
    if not is_run(Path(target)):
        return model_recipe, None, None, 0.1
    loaded, recipe, adapter = target_of(Path(target))
    default_beta = getattr(line(recipe.method["name"]).method, "beta", 0.1)
    beta = float(recipe.method.get("beta", default_beta))
    method = build(recipe.method["name"], {k: v for k, v in recipe.method.items() if k != "name"}, horizon=1)
    dpo = (preference.log_ratio, preference.reverse_kl)
    if isinstance(method, Preference) and (method.implicit, function_of(method.divergence)) != dpo:
        raise UserError(
            target,
            f"a run of {label(recipe.method['name'])} has another implicit reward than β log π/π_ref",
            "score the model of its checkpoint, with --reference and --beta",
        )
    keys = ("path", "chat_template", "template_args", "parse_special", "date")
    model = replace(model, **{key: getattr(recipe.model, key) for key in keys})
    return replace(model_recipe, model=model), adapter, loaded.recipe, beta


def _reference_recipe(start: Recipe | None, model_recipe: Recipe, reference: str | None) -> Recipe | None:
    """Return the recipe of π_ref: --reference, or the run's reference, or the run's start; None for none."""
    path = reference or (start.reference.path if start else "")
    recipe = start or (model_recipe if path else None)
    if recipe is None or not path or pretrained.resolve(path) == pretrained.resolve(recipe.model.path):
        if recipe and start and start.reference.path:  # named, it is loaded apart from the policy
            return replace(recipe, model=replace(recipe.model, quantize="none"))
        return recipe
    # A reference that is not the start is never trained, and so has no masters.
    model = replace(recipe.model, path=path, random_init=False, quantize="none")
    return replace(recipe, model=model, reference=Reference(path=path))


def _limit_context(origin: Recipe, policy: ModelInfo, say: Say) -> ModelInfo:
    """Limit the policy's context to that of π_ref; raise UserError if it has another tokenizer."""
    try:
        companion = replace(origin, reference=Reference(path=origin.model.path), critic=Critic())
        return with_companion_models(companion, policy, say)
    except UserError as error:
        raise error.moved("reference.path", "--reference") from None


def _read(data: Path, limit: int | None, say: Say) -> list[Ranking]:
    """Return rankings of two answers or more, or else labelled single answers."""
    source = Data(path=str(data), limit=limit)
    try:
        return load_rankings(source, say=say)
    except UserError as error:
        try:
            return load_labelled(source, say=say)
        except UserError:
            raise error from None


@contextmanager
def _cache_dir(*parts: object) -> Iterator[Path]:
    """Yield a directory for likelihoods: it survives a kill for the next call, and is removed at the end.

    parts: what identifies the computation. Raises UserError if another process does the same one, or if
    the directory cannot be written.
    """
    root = pretrained.cache_directory()
    place = root / f"score-{_digest(str(Path.cwd()), *parts)}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{place}.lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise UserError(str(place), "another process is scoring the same") from None
    except OSError as error:
        fix = "set POSTTRAIN_CACHE to a directory with room"
        raise UserError(str(root), f"nothing can be kept: {error.strerror}", fix) from None
    with lock:
        yield place
        shutil.rmtree(place, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)


def _digest(*facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def _logp(
    recipe: Recipe, policy: ModelInfo, groups: Sequence[Group], cache_dir: Path, adapter: Path | None = None
) -> PerRow:
    """Return log π(y | x) of every row, summed over its tokens, for the weights that the recipe starts from.

    Those are weights of the recipe's dtype, or their float32 masters, in the policy's dtype. Results are
    cached in `cache_dir`, under a digest of everything that they depend on.
    """
    files = [f for d in (pretrained.resolve(recipe.model.path), adapter) if d for f in sorted(d.iterdir())]
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    weights = (recipe.model, recipe.lora, recipe.reference, recipe.run.seed)
    model = cache(lambda: _weights(recipe, policy, adapter))
    table = load_or_score(
        cache_dir / f"{_digest(weights, policy.dtype, stats)}.safetensors",
        groups,
        lambda batch: forward.score_batch(forward.Net(model()), batch, 1.0, PACKED).logp,
    )
    sums = []
    for start in range(0, len(groups), AT_ONCE):
        batch = Batch.of(*numbered(groups[start : start + AT_ONCE]))
        logp = table.column(batch).double()
        sums.append(preference.log_ratio(logp, torch.zeros_like(logp), batch.mask))
    return torch.cat(sums)


def _weights(recipe: Recipe, policy: ModelInfo, adapter: Path | None) -> Any:
    path, wide = pretrained.resolve(recipe.model.path), policy.dtype == torch.float32
    first = getattr(torch, recipe.model.dtype) if wide else policy.dtype
    model = load_weights(recipe, replace(policy, path=path, dtype=first))
    if wide:
        for name, parameter in model.named_parameters():
            # Weights below an adapter, and those of another reference, are not trained: no masters.
            stays = recipe.lora.rank or recipe.reference.path == recipe.model.path
            parameter.data = parameter.data.float() if stays else dither(name, parameter)
    return lora.with_saved_adapter(model, adapter) if adapter else model


def _reward_model_scores(rankings: Sequence[Ranking], paths: Sequence[str]) -> PerRow:
    judge = RewardModel(paths=tuple(paths))
    judge.require()
    pairs: list[tuple[Task, str]] = []
    for ranking in rankings:
        task = Task(id=ranking.id, messages=ranking.messages, source=ranking.source)
        for answer in ranking.answers:
            if not isinstance(answer, str):
                problem = (
                    "an answer has several messages, calls or reasoning, and a reward model judges one text"
                )
                raise UserError(ranking.source, problem, "leave --against out")
            pairs.append((task, answer))
    scores = [v.score if v.score is not None else float("nan") for v in judge.judge_all(pairs)]
    return torch.tensor(scores, dtype=torch.float64)


def _lines(rankings: Sequence[Ranking], implicit: PerRow, explicit: PerRow | None) -> list[dict[str, Any]]:
    """Return a line for each answer, whose reward stands at its row."""
    lines: list[dict[str, Any]] = []
    answers = [(r.id, number, worth) for r in rankings for number, worth in enumerate(r.scores)]
    for row, (name, number, worth) in enumerate(answers):
        lines.append({"id": name, "answer": number, "worth": worth, "implicit": float(implicit[row])})
        if explicit is not None:
            lines[-1]["explicit"] = float(explicit[row]) if bool(explicit[row].isfinite()) else None
    return lines


def _print(groups: Sequence[Group], implicit: PerRow, explicit: PerRow | None) -> None:
    rows, group = numbered(groups)
    batch = Batch.of(rows, group)
    lengths = [len(row.tokens) for row in rows]
    out.print(f"answers {len(rows)}  mean implicit reward {float(implicit.mean()):.4f}")
    pairs = better(batch).nonzero().T
    if explicit is not None and not bool(explicit.isfinite().all()):
        unscored = int((~explicit.isfinite()).sum())
        out.print(f"the reward model has no score for {unscored} of {len(rows)} answers: it is not compared")
        explicit = None
    for name, rewards in (("implicit", implicit), ("explicit", explicit)):
        if rewards is not None:
            for key, value in agreement(batch, _at_end(rewards, batch), lengths).items():
                out.print(f"{name + '/' + key:34} {value:.4f}")
            margin = rewards[pairs[0]] - rewards[pairs[1]]
            for sure, right, share in calibration_curve(margin.abs().sigmoid(), (margin > 0).double()):
                line = f"{name}/calibration: of {sure:.2f} sure, right {right:.2f} ({share:.0%} of the pairs)"
                out.print(line)
    if explicit is not None:
        gap = [rewards[pairs[0]] - rewards[pairs[1]] for rewards in (implicit, explicit)]
        out.print(f"{'agreement of margins':34} {correlation(*gap):.4f}")


def _at_end(values: PerRow, batch: Batch) -> torch.Tensor:
    """Return [B, T] with the value of each row at its last trained token, else 0."""
    last = (batch.mask.cumsum(-1) == batch.mask.sum(-1, keepdim=True)) & batch.mask
    return last * values[:, None]
