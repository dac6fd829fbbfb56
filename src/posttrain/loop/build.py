"""A recipe on one machine: from its choices to a session that can be stepped.

The order is that of what can go wrong: what a key or a file decides is checked before a tokenizer
is read, a tokenizer before weights, and everything before the first step.
"""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

from posttrain.curriculum.curriculum import Supply, build_supply
from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.curriculum.stream import Stream
from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.loop import saving
from posttrain.loop.loop import Parts
from posttrain.loop.offline import OfflineRun
from posttrain.loop.online import OnlineRun
from posttrain.loop.reference import build_reference_scores, load_reference
from posttrain.loop.sampling import build_sampler, build_weight_store
from posttrain.loop.weight_sync import Publisher
from posttrain.models import checkpoint, heads, pretrained
from posttrain.plan.companions import head_class, scores_once
from posttrain.plan.dataset_rows import bytes_of, row_bound
from posttrain.plan.model_info import (
    ModelInfo,
    Say,
    load_weights,
    with_layouts,
)
from posttrain.plan.plan import Plan
from posttrain.plan.resolve import Resolved
from posttrain.recipe.recipe import Recipe
from posttrain.rollout.snapshots import CANARY
from posttrain.run.journal import Journal, Progress, Show, stop_recorded
from posttrain.run.resume import find_inexact_keys, newest_checkpoint
from posttrain.run.rundir import RunDir
from posttrain.run.track import Track, open_tracker


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
    tasks = build_supply(recipe.curriculum, resolved.train, seed=recipe.run.seed)
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


def build_critic(resolved: Resolved, policy: ModelInfo, model: Any) -> CriticModel:
    """The critic that the recipe asks for, on the policy's backbone or on its own."""
    recipe = resolved.recipe
    if "head" in resolved.method.needs:
        found = CriticModel(model, bias=resolved.line.learns == "steps")
        output = model.get_output_embeddings().weight
        if output is not model.get_input_embeddings().weight:
            output.requires_grad_(False)  # nobody asks for tokens: no master and no moments of it
        if not resolved.recipe.model.random_init:
            found.start_from(heads.saved_head(policy.path))
        return found
    if recipe.critic.kind == "shared":
        return CriticModel(model)
    if not recipe.critic.path:
        return CriticModel(model, load_weights(recipe, policy))
    path = policy.others["critic.path"]
    body = pretrained.load_model(path, dtype=policy.dtype, device=policy.device, scores=True)
    found = CriticModel(model, with_layouts(body, "critic.path"))
    found.start_from(heads.saved_head(path))
    return found
