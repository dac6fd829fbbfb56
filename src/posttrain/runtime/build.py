"""A recipe on one machine: from its choices to a session that can be stepped.

The order is that of what can go wrong: what a key or a file decides is checked before a tokenizer
is read, a tokenizer before weights, and everything before the first step.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from posttrain.errors import counted
from posttrain.learner import lora
from posttrain.learner.learner import Learner
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.methods.build import described
from posttrain.methods.table import label
from posttrain.models import checkpoint, heads, pretrained
from posttrain.process import machine
from posttrain.recipe.recipe import Recipe
from posttrain.runtime.critics import build_critic, critic_shape, head_class
from posttrain.runtime.dataset_rows import Group, build_groups, bytes_of, row_bound
from posttrain.runtime.loop import Parts
from posttrain.runtime.memory import (
    Memory,
    Shape,
    check_held,
    estimate,
    free_memory,
    gib,
    microbatch,
    samplers_on,
)
from posttrain.runtime.model_info import ModelInfo, Say, load_weights, read_model_info, with_companion_models
from posttrain.runtime.offline import OfflineRun
from posttrain.runtime.online import OnlineRun
from posttrain.runtime.prompts import check_prompts, check_replies
from posttrain.runtime.ranks.ranked import check_ranks, described_ranks
from posttrain.runtime.record import saving
from posttrain.runtime.record.journal import Journal, Progress, Show, stop_recorded
from posttrain.runtime.record.resume import find_inexact_keys, newest_checkpoint
from posttrain.runtime.record.rundir import RunDir
from posttrain.runtime.record.track import Track, check_sinks, open_tracker
from posttrain.runtime.reference import build_reference_scores, load_reference, reference_size, scores_once
from posttrain.runtime.resolve import Resolved, resolve_recipe
from posttrain.runtime.sampling import build_sampler, build_weight_store, check_samplers, check_server
from posttrain.runtime.tasks.curriculum import Supply, supply
from posttrain.runtime.tasks.replay_buffer import ReplayBuffer
from posttrain.runtime.tasks.stream import Stream
from posttrain.runtime.weight_sync import Publisher
from posttrain.samplers.snapshots import CANARY
from posttrain.types import UserError


@dataclass(frozen=True)
class Plan:
    """What a run will do and need."""

    resolved: Resolved
    policy: ModelInfo
    groups: Sequence[Group]
    """Rows of an offline method: one, or the answers to one question."""
    held_out_groups: Sequence[Group]
    longest_prompt: int
    microbatch_tokens: int
    memory: Memory
    free: int
    parameters: int
    trained: int
    disk: saving.Disk
    ranks: int = 1

    def sections(self) -> dict[str, dict[str, Any]]:
        """As tables for a person, for plan.json and the report."""
        recipe = self.resolved.recipe
        name = label(recipe.method["name"])
        method = {"name": name, "title": self.resolved.line.title, "source": self.resolved.line.source}
        model = {
            "path": recipe.model.path,
            "parameters": f"{self.parameters:,}",
            "trained": f"{self.trained:,}"
            + (f" (LoRA, rank {recipe.lora.rank})" if recipe.lora.rank else ""),
            "computes in": f"{recipe.model.dtype} on {self.policy.device}",
        }
        ranks = described_ranks(self.resolved, self.ranks)
        return {
            "Method": method | described(self.resolved.method),
            "Model": model,
            "Batch plan": self._batches(),
            **({"Each of the ranks": ranks} if ranks else {}),
            "Memory estimate": self.memory.rows() | {"free now": gib(self.free)},
            "Disk": self.disk.rows(),
        }

    def _batches(self) -> dict[str, Any]:
        resolved, recipe = self.resolved, self.resolved.recipe
        updates, epochs, cuts = recipe.run.updates, recipe.steps.epochs, recipe.steps.minibatches
        if resolved.online:
            r, several = recipe.rollout, recipe.async_.samplers > 1
            out = {
                "episodes an update": f"{r.groups} tasks × {r.group_size} = {r.groups * r.group_size}",
                "tasks": f"{len(resolved.train):,} to train on, {len(resolved.held_out):,} held out",
                "longest prompt": f"{self.longest_prompt} tokens, {recipe.sampling.max_new_tokens} new ones",
                "samplers": recipe.async_.described(recipe.run.threads or machine.cores()),
                "sampled side by side": f"{recipe.engine.rows} each" if several else recipe.engine.rows,
            }
        else:
            out = {
                f"{resolved.line.learns} an update": recipe.batch.batch_size,
                resolved.line.learns: f"{len(self.groups):,} to train on, "
                f"{len(self.held_out_groups):,} held out",
                "longest": f"{self.longest_prompt} tokens",
                "passes over them": f"{updates * recipe.batch.batch_size / len(self.groups):.3g}",
            }
        if resolved.line.step == "adamw":
            out["learning rate"] = f"{recipe.optim.lr:g}, {recipe.optim.schedule}"
        return out | {
            "optimiser steps": f"{counted(updates, 'update')} × {counted(epochs, 'epoch')} × "
            f"{counted(cuts, 'minibatch', 'minibatches')} = {updates * epochs * cuts}",
            "microbatch": f"at most {self.microbatch_tokens} packed tokens",
        }


# ---------------------------------------------------------------------- before its weights


def plan(
    recipe: Recipe, say: Say, path: Path = Path("runs"), checked: Path | None = None, *, ranks: int = 1
) -> Plan:
    """Everything that is decided before weights are read: what `posttrain validate` checks and prints.

    path: where the run will write; checked: a file that keeps which prompts were found in order, so that they
    need not be looked at again. ranks: how many train together; what is said of memory is one's.
    """
    check_sinks(recipe.track.sinks)
    resolved = resolve_recipe(recipe, say)
    if resolved.online:
        check_samplers(resolved)
    check_ranks(resolved, ranks)
    policy = with_companion_models(recipe, read_model_info(recipe, say), say)
    parameters = pretrained.parameter_count(policy.config)
    trained = _adapter_size(policy, recipe) if recipe.lora.rank else parameters
    shape = Shape.of(policy.config, parameters, trained)
    groups: Sequence[Group] = []
    held_out: Sequence[Group] = []
    if resolved.online:
        if len(resolved.train) > 50_000:  # minutes, of some hundred thousand
            say(f"looking at {len(resolved.train):,} prompts")
        resolved, longest = check_prompts(resolved, policy, say, checked)
        check_replies(resolved, policy)
        check_server(recipe, policy)
    else:
        groups, held_out, longest = build_groups(resolved, policy, say)
        if head_class(policy.config, resolved) is not None:
            heads.saved_head(policy.path)
    needs = _needs(resolved, policy, longest, parameters, ranks)
    free = free_memory(policy.device)
    memory_here = free_memory(torch.device("cpu"))
    if resolved.online:
        r, where = recipe.rollout, "rollout.group_size"
        where = where if r.group_size > r.groups else "rollout.groups"
        check_held(
            r.groups * r.group_size, longest + recipe.sampling.max_new_tokens, memory_here, where=where
        )
    else:
        check_held(recipe.batch.batch_size, longest, memory_here, where="batch.batch_size")
    tokens = recipe.steps.microbatch_tokens or microbatch(
        shape, free=free, device=policy.device.type, **needs
    )
    if resolved.method.unit == "group":  # no group is ever cut
        answers = recipe.rollout.group_size * recipe.sampling.max_new_tokens if resolved.online else 0
        tokens = max(tokens, longest + answers)
    memory = estimate(shape, microbatch_tokens=tokens, device=policy.device.type, **needs)
    disk = saving.disk(resolved, policy, groups, path, shape, critic=needs["critic"], longest=longest)
    return Plan(
        resolved, policy, groups, held_out, longest, tokens, memory, free, parameters, trained, disk, ranks
    )


def _needs(
    resolved: Resolved, policy: ModelInfo, longest: int, parameters: int, ranks: int
) -> dict[str, Any]:
    """What of a run's memory depends on more than the model and the size of a microbatch (see estimate)."""
    recipe = resolved.recipe
    needs: dict[str, Any] = {
        "dtype": policy.dtype,
        "checkpointing": recipe.steps.gradient_checkpointing,
        "reference": reference_size(resolved, policy, parameters),
        "reference_follows": bool(recipe.reference.refresh_every),
        "critic": critic_shape(resolved, policy),
        "natural": resolved.line.step == "trust_region",
        "longest": longest,
        "shares": ranks if recipe.train.shard else 1,
        "resharded": recipe.train.reshard_after_forward,
    }
    if resolved.online:
        several = resolved.env or recipe.task.agent
        needs |= {
            "sampler_tokens": recipe.engine.cached_tokens(longest + recipe.sampling.max_new_tokens),
            "samplers": samplers_on(policy.device, recipe.async_),
            # Of processes they lie in memory that these share, never on a GPU.
            "published": 2 if recipe.async_.publishes and policy.device.type == "cpu" else 0,
            "longest": policy.context if several else longest + recipe.sampling.max_new_tokens,
        }
    return needs


def _adapter_size(policy: ModelInfo, recipe: Recipe) -> int:
    try:
        return lora.parameters(policy.config, recipe.lora)
    except ValueError as error:
        raise UserError(
            "lora.targets" if recipe.lora.targets else "lora",
            f"no adapter can be made: {str(error).splitlines()[0]}",
        ) from None


# ---------------------------------------------------------------------- with its weights


def build_session_parts(
    chosen: Plan,
    run_dir: RunDir,
    *,
    resume: bool,
    config: Mapping[str, Any],
    show: Show,
    say: Say,
    ranks: Ranks = ALONE,
) -> Parts:
    """Return what a session of this plan needs to run it in this directory.

    ranks: those that train together.
    """
    resolved, policy, recipe = chosen.resolved, chosen.policy, chosen.resolved.recipe
    found = newest_checkpoint(run_dir.path, recipe.checkpoint.every, say, ranks) if resume else None
    state = checkpoint.read_state(found) if found else {}
    progress = Progress(**state.get("progress", {}))
    for key, why in find_inexact_keys(recipe).items() if found else ():
        say(f"note: {key}: this run will not end with the weights of an uninterrupted one: {why}")
    say("loading the model")
    learner = build_learner(chosen, state, ranks)
    tasks, replay = _sources(resolved, state)
    memory = replay if resolved.online and recipe.rollout.replay else None
    if found:
        saving.restore(found, learner, state, memory)
    run_dir.forget_after(progress.update if found else -1, ranks.size)
    after = progress.update if found else (-1 if resume else None)

    beside: dict[str, Any] = {"head": head_class(policy.config, resolved), "replay": memory}
    save = partial(saving.save, run_dir.checkpoints, learner, policy.tokenizer, recipe.checkpoint, **beside)
    with ExitStack() as stack:
        track = None if ranks.rank else _tracker(recipe, run_dir, config, after)
        if track:
            stack.callback(track.close)
        journal = Journal(track, progress, show)
        with stop_recorded(run_dir.path, run_dir.own):
            loop: OnlineRun | OfflineRun
            if tasks:
                loop = _online(chosen, run_dir, learner, tasks, journal, replay, stack)
                loop.source.resume(saving.flight(found))
            else:
                loop = _offline(chosen, run_dir, learner, journal)
        return Parts(
            loop=loop,
            run_dir=run_dir,
            checkpoint=save,
            stop_when=recipe.run.condition,
            save_every=recipe.checkpoint.every,
            evaluate_every=recipe.eval.every,
            closing=stack.pop_all(),
        )


def _tracker(recipe: Recipe, run_dir: RunDir, config: Mapping[str, Any], after: int | None) -> Track:
    return open_tracker(
        run_dir.path,
        recipe.track.sinks,
        project=recipe.track.project,
        name=recipe.track.name or run_dir.path.name,
        config=config,
        resume_after=after,
    )


def _sources(resolved: Resolved, state: Mapping[str, Any]) -> tuple[Supply | None, ReplayBuffer]:
    """Where tasks and older groups come from, as far as a checkpoint had come; offline there are no tasks."""
    recipe = resolved.recipe
    replay = ReplayBuffer(max_lag=recipe.rollout.replay_lag, seed=recipe.run.seed)
    if not resolved.online:
        return None, replay
    tasks = supply(recipe.curriculum, resolved.train, seed=recipe.run.seed)
    if state.get("curriculum"):
        tasks.restore(state["curriculum"])
    return tasks, replay


def _offline(chosen: Plan, run_dir: RunDir, learner: Learner, journal: Journal) -> OfflineRun:
    resolved, policy, recipe = chosen.resolved, chosen.policy, chosen.resolved.recipe
    held_out, file = chosen.held_out_groups[: recipe.eval.limit], run_dir.path / "reference.safetensors"
    return OfflineRun(
        learner=learner,
        stream=Stream(chosen.groups, seed=recipe.run.seed),
        settings=recipe.batch,
        held_out=held_out,
        held_out_bytes=bytes_of(chosen.held_out_groups, recipe.eval.limit),
        journal=journal,
        updates=recipe.run.updates,
        bound=row_bound(resolved, policy),
        reference=build_reference_scores(
            resolved, policy, chosen.groups, held_out, file=file, learner=learner, journal=journal
        ),
        compares=resolved.line.learns not in ("text", "answers"),
    )


def _online(
    chosen: Plan,
    run_dir: RunDir,
    learner: Learner,
    tasks: Supply,
    journal: Journal,
    replay: ReplayBuffer,
    stack: ExitStack,
) -> OnlineRun:
    resolved, policy, recipe = chosen.resolved, chosen.policy, chosen.resolved.recipe
    canary = policy.chat.render(resolved.train[0].messages)[-CANARY:]
    ahead, ranks = recipe.async_, learner.ranks
    store = build_weight_store(recipe, chosen.parameters * policy.dtype.itemsize, ranks)
    publisher = stack.enter_context(closing(Publisher(learner, canary, store)))
    sampler = build_sampler(resolved, policy, run_dir.own / "samplers", ranks)
    stack.enter_context(closing(sampler))
    stack.enter_context(run_dir.recording())
    return OnlineRun(
        learner=learner,
        sampler=sampler,
        publisher=publisher,
        verifier=resolved.verifier,
        ahead=ahead,
        stream=tasks,
        sampling=recipe.sampling,
        settings=recipe.rollout,
        evaluation=recipe.eval,
        held_out=resolved.held_out,
        run_dir=run_dir,
        journal=journal,
        pieces=policy.chat.pieces,
        updates=recipe.run.updates,
        replay=replay,
        tasks=len(resolved.train),
        record=recipe.record,
    )


def build_learner(chosen: Plan, state: Mapping[str, Any], ranks: Ranks = ALONE) -> Learner:
    """The learner of a plan, with new optimisers; state: of the checkpoint that it will go on from."""
    resolved, policy, recipe = chosen.resolved, chosen.policy, chosen.resolved.recipe
    model = load_weights(recipe, policy)
    return Learner(
        model,
        resolved.method,
        optim=recipe.optim,
        steps=recipe.steps,
        lora=recipe.lora,
        reference=load_reference(resolved, policy),
        brings_reference=scores_once(resolved),
        refresh=recipe.reference,
        critic=build_critic(resolved, policy, model) if resolved.method.needs & {"value", "head"} else None,
        critic_optim=replace(recipe.optim, lr=recipe.critic.lr, max_grad_norm=recipe.critic.max_grad_norm),
        trust=recipe.trust if resolved.line.step == "trust_region" else None,
        temperature=recipe.sampling.temperature if resolved.online else 1.0,
        total_steps=recipe.run.updates * recipe.steps.epochs * recipe.steps.minibatches,
        # A resumed run cuts its steps as the first session did, whatever memory is free today.
        microbatch_tokens=state.get("microbatch_tokens", chosen.microbatch_tokens),
        seed=recipe.run.seed,
        ranks=ranks,
        parallel=recipe.train,
    )
