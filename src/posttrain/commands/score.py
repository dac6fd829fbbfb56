"""`posttrain data score`: what a trained policy thinks of answers, by its own likelihoods.

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
    target: Annotated[
        str,
        typer.Argument(metavar="MODEL|RUN_DIR", help="A model, or a run's newest checkpoint."),
    ],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Pairs, rankings, or answers with a label.")],
    reference: Annotated[
        str | None, typer.Option(help="The model it was trained from; of a run, its recipe's.")
    ] = None,
    beta: Annotated[
        float | None, typer.Option(help="β of the implicit reward; of a run, its recipe's; else 0.1.")
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="A reward model to compare with; several are an ensemble's mean.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first records.")] = None,
    max_length: Annotated[int, typer.Option(min=0, help="Tokens of an answer; 0: the model's context.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line for each answer.")] = False,
) -> None:
    """Score answers by a policy's implicit reward β log π/π_ref, and compare it with a reward model's.

    Prints how often the order of scores is that of the data, by margin and length, and with --against the
    same of the reward model and how far the two agree.
    """
    if dtype not in ("bfloat16", "float32"):
        raise UserError("--dtype", f"unknown dtype {dtype!r}", "bfloat16 or float32")
    machine.configure()
    chosen, adapter, start, usual = _policy(target, dtype)
    origin = _origin(start, chosen, reference)
    if origin is None:
        problem = "log π/π_ref needs the model that the policy was trained from"
        raise UserError("--reference", problem, "name it, or score a run directory")
    told = pretrained.silent if as_json else say
    rankings = _read(data, limit, told)
    policy = _beside(origin, read_model_info(chosen, told), told)
    bound = min(max_length or policy.context, policy.context)
    shaper = Shaper(policy.chat, bound, marks=False)
    try:
        pairs = shaper.each(rankings, "rankings", told)
    except UserError as error:
        raise error.moved("batch.max_length", "--max-length") from None
    groups = [g for _, g in pairs]
    with _cache_dir(data, target, reference or "") as place:
        logp = _logp(start if adapter and start else chosen, policy, groups, place, adapter)
        implicit = (usual if beta is None else beta) * (logp - _logp(origin, policy, groups, place))
        explicit = _explicit([r for r, _ in pairs], against) if against else None
    if as_json:
        for line in _lines([r for r, _ in pairs], implicit, explicit):
            typer.echo(json.dumps(line))
        return
    _print(groups, implicit, explicit)


def _policy(target: str, dtype: str) -> tuple[Recipe, Path | None, Recipe | None, float]:
    """(recipe of its model, adapter, recipe that it was trained by, β) of what the command line names."""
    model = Model(path=target, dtype=dtype)  # type: ignore[arg-type]
    chosen = Recipe(model=model, method={"name": "grpo"}, task=NO_TASK)
    if not is_run(Path(target)):
        return chosen, None, None, 0.1
    found, recipe, adapter = target_of(Path(target))
    published = getattr(line(recipe.method["name"]).method, "beta", 0.1)
    beta = float(recipe.method.get("beta", published))
    method = build(recipe.method["name"], {k: v for k, v in recipe.method.items() if k != "name"}, horizon=1)
    usual = (preference.log_ratio, preference.reverse_kl)
    if isinstance(method, Preference) and (method.implicit, function_of(method.divergence)) != usual:
        raise UserError(
            target,
            f"a run of {label(recipe.method['name'])} has another implicit reward than β log π/π_ref",
            "score the model of its checkpoint, with --reference and --beta",
        )
    model = replace(model, path=recipe.model.path, chat_template=recipe.model.chat_template)
    return replace(chosen, model=model), adapter, found.recipe, beta


def _origin(start: Recipe | None, chosen: Recipe, reference: str | None) -> Recipe | None:
    """What π_ref is read with: the model that is named here, or by the run's recipe, or the run's start."""
    named = reference or (start.reference.path if start else "")
    recipe = start or (chosen if named else None)
    if recipe is None or not named or pretrained.resolve(named) == pretrained.resolve(recipe.model.path):
        return recipe
    # It has no masters: a reference that is not the start is never trained.
    model = replace(recipe.model, path=named, random_init=False)
    return replace(recipe, model=model, reference=Reference(path=named))


def _beside(origin: Recipe, policy: ModelInfo, say: Say) -> ModelInfo:
    """The policy, with answers no longer than π_ref can read; UserError for one of another tokenizer."""
    try:
        asked = replace(origin, reference=Reference(path=origin.model.path), critic=Critic())
        return with_companion_models(asked, policy, say)
    except UserError as error:
        raise error.moved("reference.path", "--reference") from None


def _read(data: Path, limit: int | None, say: Say) -> list[Ranking]:
    """Rankings of two answers or more, or else answers by themselves."""
    chosen = Data(path=str(data), limit=limit)
    try:
        return load_rankings(chosen, say=say)
    except UserError as error:
        try:
            return load_labelled(chosen, say=say)
        except UserError:
            raise error from None


@contextmanager
def _cache_dir(*asked: object) -> Iterator[Path]:
    """A directory for the likelihoods of this question: it is there again after a kill, and goes at the end.

    UserError if another process asks the same, or nothing can be kept.
    """
    kept = pretrained.cache_directory()
    place = kept / f"score-{_digest(str(Path.cwd()), *asked)}"
    try:
        kept.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{place}.lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise UserError(str(place), "another process is scoring the same") from None
    except OSError as error:
        fix = "set POSTTRAIN_CACHE to a directory with room"
        raise UserError(str(kept), f"nothing can be kept: {error.strerror}", fix) from None
    with lock:
        yield place
        shutil.rmtree(place, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)


def _digest(*facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def _logp(
    recipe: Recipe, policy: ModelInfo, groups: Sequence[Group], place: Path, adapter: Path | None = None
) -> PerRow:
    """log π(y | x) of every row, summed over its tokens, of what the recipe's training begins with.

    Those are weights of the recipe's dtype, or the masters that begin behind them, in the policy's dtype.
    What has been computed is kept in `place`, under all that it depends on.
    """
    files = [f for d in (pretrained.resolve(recipe.model.path), adapter) if d for f in sorted(d.iterdir())]
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    weights = (recipe.model, recipe.lora, recipe.reference, recipe.run.seed)
    model = cache(lambda: _weights(recipe, policy, adapter))
    table = load_or_score(
        place / f"{_digest(weights, policy.dtype, stats)}.safetensors",
        groups,
        lambda batch: forward.score_batch(forward.Net(model()), batch, 1.0, PACKED).logp,
    )
    found = []
    for start in range(0, len(groups), AT_ONCE):
        batch = Batch.of(*numbered(groups[start : start + AT_ONCE]))
        logp = table.column(batch).double()
        found.append(preference.log_ratio(logp, torch.zeros_like(logp), batch.mask))
    return torch.cat(found)


def _weights(recipe: Recipe, policy: ModelInfo, adapter: Path | None) -> Any:
    path, wide = pretrained.resolve(recipe.model.path), policy.dtype == torch.float32
    first = getattr(torch, recipe.model.dtype) if wide else policy.dtype
    model = load_weights(recipe, replace(policy, path=path, dtype=first))
    if wide:
        for name, parameter in model.named_parameters():
            # Under an adapter, and of a reference elsewhere, the weights stay and have no masters.
            stays = recipe.lora.rank or recipe.reference.path == recipe.model.path
            parameter.data = parameter.data.float() if stays else dither(name, parameter)
    return lora.with_saved_adapter(model, adapter) if adapter else model


def _explicit(rankings: Sequence[Ranking], paths: Sequence[str]) -> PerRow:
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
    found = [v.score if v.score is not None else float("nan") for v in judge.judge_all(pairs)]
    return torch.tensor(found, dtype=torch.float64)


def _lines(rankings: Sequence[Ranking], implicit: PerRow, explicit: PerRow | None) -> list[dict[str, Any]]:
    out, at = [], 0
    for ranking in rankings:
        for number, worth in enumerate(ranking.scores):
            line: dict[str, Any] = {
                "id": ranking.id,
                "answer": number,
                "worth": worth,
                "implicit": float(implicit[at]),
            }
            if explicit is not None:
                line["explicit"] = float(explicit[at]) if bool(explicit[at].isfinite()) else None
            out.append(line)
            at += 1
    return out


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
    for name, each in (("implicit", implicit), ("explicit", explicit)):
        if each is not None:
            for key, value in agreement(batch, _at_end(each, batch), lengths).items():
                out.print(f"{name + '/' + key:34} {value:.4f}")
            margin = each[pairs[0]] - each[pairs[1]]
            for sure, right, share in calibration_curve(margin.abs().sigmoid(), (margin > 0).double()):
                line = f"{name}/calibration: of {sure:.2f} sure, right {right:.2f} ({share:.0%} of the pairs)"
                out.print(line)
    if explicit is not None:
        gap = [each[pairs[0]] - each[pairs[1]] for each in (implicit, explicit)]
        out.print(f"{'agreement of margins':34} {correlation(*gap):.4f}")


def _at_end(each: PerRow, batch: Batch) -> torch.Tensor:
    """A number of each row at its last trained token."""
    last = (batch.mask.cumsum(-1) == batch.mask.sum(-1, keepdim=True)) & batch.mask
    return last * each[:, None]
