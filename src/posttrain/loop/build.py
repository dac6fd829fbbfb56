"""Build the parts of a session from a plan: the learner, the sampler, the journal and the loop."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from posttrain.curriculum.curriculum import Supply, build_supply
from posttrain.curriculum.mixture import ByUpdate, Mixture, mix, mix_records
from posttrain.curriculum.replay_buffer import ReplayBuffer
from posttrain.curriculum.stream import Stream
from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner
from posttrain.learner.loan import WeightLoan
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.loop import saving
from posttrain.loop.central import tell_all
from posttrain.loop.evaluator import Evaluator
from posttrain.loop.loop import Parts
from posttrain.loop.offline import OfflineRun
from posttrain.loop.online import OnlineRun
from posttrain.loop.reference import build_reference_scores, load_references
from posttrain.loop.sampling import (
    build_sampler,
    build_weight_store,
    check_weight_store,
    note_files,
    sends_adapter,
)
from posttrain.loop.teacher_prompts import TeacherPrompts
from posttrain.loop.weight_sync import Publisher
from posttrain.models import checkpoint, heads, pretrained, slices
from posttrain.plan.companions import head_class, lends_weights, scores_once
from posttrain.plan.dataset_rows import Group, bytes_of, row_bound
from posttrain.plan.model_info import ModelInfo, Say, load_weights, with_layouts
from posttrain.plan.plan import Plan, teacher_server
from posttrain.plan.resolve import Resolved
from posttrain.rollout.protocol import Sampler
from posttrain.rollout.snapshots import CANARY, WeightStore
from posttrain.run.hacking_metrics import auditors_of
from posttrain.run.journal import Journal, Progress, Show, stop_recorded
from posttrain.run.resume import find_inexact_keys, newest_checkpoint
from posttrain.run.rundir import RunDir
from posttrain.run.track import open_tracker
from posttrain.types import Task


def build_session_parts(
    plan: Plan,
    run_dir: RunDir,
    *,
    resume: bool,
    config: Mapping[str, Any],
    show: Show,
    say: Say,
    ranks: Ranks = ALONE,
) -> Parts:
    """Return the parts of a session that runs this plan in this directory.

    Keys, files and the tokenizer have been checked by the plan; weights are read here. ranks: the learner
    ranks.
    """
    resolved, policy, recipe = plan.resolved, plan.policy, plan.resolved.recipe
    folder = newest_checkpoint(run_dir.path, recipe.checkpoint.every, say, ranks) if resume else None
    state = checkpoint.read_state(folder) if folder else {}
    progress = Progress(**state.get("progress", {}))
    for key, why in find_inexact_keys(recipe).items() if folder else ():
        say(f"note: {key}: this run will not end with the weights of an uninterrupted one: {why}")
    if resolved.online and not ranks.rank:
        check_weight_store(recipe, plan.parameters * policy.dtype.itemsize)
    say("loading the model")
    learner = build_learner(plan, state, ranks)
    tasks, replay = _restore_sources(resolved, state)
    memory = replay if resolved.online and recipe.rollout.replay else None
    if folder:
        saving.restore(folder, learner, state, memory)
    run_dir.forget_after(progress.update if folder else -1, ranks.size)
    unmerged = sends_adapter(resolved, learner, say)
    if not unmerged:
        note_files(resolved, policy, ranks, say)
    make_publisher = partial(Publisher, learner, unmerged=unmerged)
    writer = saving.CheckpointWriter(ranks, asynchronous=recipe.checkpoint.async_save)
    save = partial(
        saving.save,
        run_dir.checkpoints,
        learner,
        policy.tokenizer,
        recipe.checkpoint,
        head=head_class(policy.config, resolved),
        replay=memory,
        writer=writer,
    )
    with ExitStack() as stack:
        track = None
        if not ranks.rank:
            track = open_tracker(
                run_dir.path,
                recipe.track.sinks,
                project=recipe.track.project,
                name=recipe.track.name or run_dir.path.name,
                config=config,
                resume_after=progress.update if folder else (-1 if resume else None),
            )
            stack.callback(track.close)
        journal = Journal(track, progress, show)
        builder = _LoopBuilder(plan, run_dir, learner, make_publisher, journal, stack)
        with stop_recorded(run_dir.path, run_dir.own):
            loop: OnlineRun | OfflineRun
            if tasks:
                loop = builder.build_online(tasks, replay)
                loop.source.resume(saving.load_flight(folder))
            else:
                loop = builder.build_offline(state)
        return Parts(
            loop=loop,
            run_dir=run_dir,
            checkpoint=save,
            writer=writer,
            stop_when=recipe.run.condition,
            patience=recipe.run.patience,
            best=recipe.checkpoint.best_metric,
            max_seconds=recipe.run.max_seconds,
            save_every=recipe.checkpoint.every,
            evaluate_every=recipe.eval.every,
            closing=stack.pop_all(),
        )


def _restore_sources(resolved: Resolved, state: Mapping[str, Any]) -> tuple[Supply | None, ReplayBuffer]:
    """Return the tasks and the replay buffer, as the checkpoint has them; no tasks for an offline method."""
    recipe = resolved.recipe
    replay = ReplayBuffer(max_lag=recipe.rollout.replay_lag, seed=recipe.run.seed)
    if not resolved.online:
        return None, replay
    tasks = _build_tasks(resolved)
    if state.get("curriculum"):
        tasks.restore(state["curriculum"])
    return tasks, replay


def _build_tasks(resolved: Resolved) -> Supply:
    """Return the supply of a run's tasks, mixed by weight if they have several sources."""
    settings, seed = resolved.recipe.curriculum, resolved.recipe.run.seed
    if not resolved.sources:
        return build_supply(settings, resolved.train, seed=seed)
    parts = [part for part in resolved.parts if part.train]
    supplies = [build_supply(settings, part.train, seed=seed) for part in parts]
    return mix([part.recipe.source for part in parts], supplies, [len(part.train) for part in parts])


@dataclass(frozen=True)
class _LoopBuilder:
    """Builds the loop of a plan; `stack` closes what it opens."""

    plan: Plan
    run_dir: RunDir
    learner: Learner
    make_publisher: Callable[..., Publisher]
    journal: Journal
    stack: ExitStack

    def build_online(self, tasks: Supply, replay: ReplayBuffer) -> OnlineRun:
        resolved, policy, recipe = self.plan.resolved, self.plan.policy, self.plan.resolved.recipe
        samplings = {part.name: part.recipe.sampling for part in resolved.asked}
        ranks = self.learner.ranks
        store = build_weight_store(recipe, self.plan.parameters * policy.dtype.itemsize, ranks)
        publisher, sampler = self._open_sampler(resolved.train[0], store)
        return OnlineRun(
            learner=self.learner,
            sampler=sampler,
            publisher=publisher,
            auditors={part.name: auditors_of(part.verifier) for part in resolved.asked},
            separate=frozenset(part.name for part in resolved.evaluated),
            ahead=recipe.async_,
            stream=tasks,
            samplings=samplings,
            settings=recipe.rollout,
            evaluation=recipe.eval,
            held_out=[*resolved.held_out, *(task for part in resolved.evaluated for task in part.held_out)],
            run_dir=self.run_dir,
            journal=self.journal,
            pieces=policy.chat.pieces,
            updates=recipe.run.updates,
            replay=replay,
            tasks=len(resolved.train),
            teacher_prompts=TeacherPrompts.of(recipe, policy.chat.render, policy.context),
            teachers={source.name: recipe.teacher_of(source) for source in recipe.task},
            answers_of_data=ByUpdate(partial(_mixed_records, self.plan), recipe.rollout.given_answers)
            if self.plan.groups
            else None,
            record=recipe.record,
            teacher=teacher_server(recipe, policy) if recipe.reference.url else None,
            sleeps=recipe.engine.sleep,
            is_central=recipe.is_central and ranks.size > 1,
        )

    def build_offline(self, state: Mapping[str, Any]) -> OfflineRun:
        resolved, policy, recipe = self.plan.resolved, self.plan.policy, self.plan.resolved.recipe
        held_out, file = self.plan.held_out_groups, self.run_dir.path / "reference.safetensors"
        if not resolved.sources:
            held_out = held_out[: recipe.eval.limit]
        stream = _mixed_records(self.plan)
        if state.get("curriculum"):
            stream.restore(state["curriculum"])
        return OfflineRun(
            learner=self.learner,
            stream=stream,
            by_name=_split_held_out(self.plan),
            settings=recipe.batch,
            held_out=held_out,
            held_out_bytes=bytes_of(self.plan.held_out_groups, recipe.eval.limit),
            journal=self.journal,
            updates=recipe.run.updates,
            records=len(self.plan.groups),
            bound=row_bound(resolved, policy),
            reference=build_reference_scores(
                resolved,
                policy,
                self.plan.groups,
                held_out,
                sizes=[train for train, _ in self.plan.sizes],
                file=file,
                learner=self.learner,
                journal=self.journal,
            ),
            compares=resolved.line.learns not in ("text", "answers"),
            teacher=teacher_server(recipe, policy) if recipe.reference.url else None,
            sleeps=recipe.engine.sleep,
            evaluator=self._build_evaluator(),
        )

    def _build_evaluator(self) -> Evaluator | None:
        """Build the evaluator of [[eval.task]] for a run that learns from data; None without such tasks."""
        resolved, ranks = self.plan.resolved, self.learner.ranks
        tasks = [task for part in resolved.evaluated for task in part.held_out]
        if not tasks:
            return None
        publisher, sampler = self._open_sampler(tasks[0])
        is_central = resolved.recipe.is_central and ranks.size > 1

        def share(items: list[Any], called: str) -> list[Any]:
            if is_central:
                return tell_all(ranks, items, called)
            return [item for part in ranks.gather(items, called) for item in part]

        return Evaluator(
            sampler=sampler,
            tasks=tasks,
            samplings={part.name: part.recipe.sampling for part in resolved.evaluated},
            auditors={part.name: auditors_of(part.verifier) for part in resolved.evaluated},
            separate=frozenset(part.name for part in resolved.evaluated),
            settings=resolved.recipe.eval,
            run_dir=self.run_dir,
            journal=self.journal,
            pieces=self.plan.policy.chat.pieces,
            record=resolved.recipe.record,
            is_own=lambda number: ranks.rank == (0 if is_central else number % ranks.size),
            share=share,
            publisher=publisher,
        )

    def _open_sampler(self, task: Task, store: WeightStore | None = None) -> tuple[Publisher, Sampler]:
        """Return the publisher, whose canary is of this task, and the sampler; record what it samples."""
        canary = self.plan.policy.chat.render(task.messages)[-CANARY:]
        publisher = self.stack.enter_context(closing(self.make_publisher(canary, store)))
        logs = self.run_dir.own / "samplers"
        sampler = build_sampler(self.plan.resolved, self.plan.policy, logs, self.learner)
        self.stack.enter_context(closing(sampler))
        self.stack.enter_context(self.run_dir.recording())
        return publisher, sampler


def _mixed_records(plan: Plan) -> Mixture[Group] | Stream[Group]:
    """Return the order of the groups of a plan."""
    recipe = plan.resolved.recipe
    return mix_records(plan.groups, recipe.task, [train for train, _ in plan.sizes], recipe.run.seed)


def _split_held_out(plan: Plan) -> dict[str, Sequence[Group]]:
    """Return the held-out groups by the name of their source; empty if it has none."""
    start, by_name, resolved = 0, {}, plan.resolved
    most = None if resolved.sources else resolved.recipe.eval.limit  # blocks of one text are cut here alone
    for part, (_, count) in zip(resolved.parts, plan.sizes, strict=True):
        if part.name and count:
            by_name[part.name] = plan.held_out_groups[start : start + count][:most]
        start += count
    return by_name


def build_learner(plan: Plan, state: Mapping[str, Any], ranks: Ranks = ALONE) -> Learner:
    """Build the learner of a plan, with new optimisers; state: that of the checkpoint it resumes from."""
    resolved, policy, recipe = plan.resolved, plan.policy, plan.resolved.recipe
    sliced = recipe.train.shard and ranks is not ALONE
    # DoRA's magnitudes are lengths of whole rows.
    model = load_weights(recipe, policy, packed=True, sliced=sliced and not recipe.lora.dora)
    loan = WeightLoan(model) if lends_weights(resolved, policy.device) else None
    references = load_references(resolved, policy, sliced=sliced)
    critic = None
    if resolved.method.needs & {"value", "head"}:
        critic = build_critic(resolved, policy, model, sliced=sliced)
    return Learner(
        model,
        resolved.method,
        optim=recipe.optim,
        steps=recipe.steps,
        lora=recipe.lora,
        reference=next(iter(references), None),
        teachers=references[1:],
        brings_reference=scores_once(resolved) or bool(recipe.reference.url),
        refresh=recipe.reference,
        critic=critic,
        critic_optim=replace(recipe.optim, lr=recipe.critic.lr, max_grad_norm=recipe.critic.max_grad_norm),
        critic_warmup=recipe.critic.warmup,
        trust=recipe.trust if resolved.line.step == "trust_region" else None,
        temperature=recipe.sampling.temperature if resolved.online else 1.0,
        total_steps=recipe.run.updates * recipe.steps.epochs * recipe.steps.minibatches,
        # A resumed run splits its steps as the first session did, whatever memory is free now.
        microbatch_tokens=state.get("microbatch_tokens", plan.microbatch_tokens),
        seed=recipe.run.seed,
        ranks=ranks,
        parallel=recipe.train,
        loan=loan,
    )


def build_critic(resolved: Resolved, policy: ModelInfo, model: Any, *, sliced: bool = False) -> CriticModel:
    """Build the critic of the recipe, on the policy's backbone or on its own.

    sliced: leave the weights of its own in their files until they are sharded.
    """
    recipe = resolved.recipe
    if "head" in resolved.method.needs:
        critic = CriticModel(model, bias=resolved.line.learns == "steps")
        output = model.get_output_embeddings().weight
        if output is not model.get_input_embeddings().weight:
            output.requires_grad_(False)  # its tokens are not used, so it needs no master and no moments
        if not resolved.recipe.model.random_init:
            critic.start_from(heads.saved_head(policy.path))
        return critic
    if recipe.critic.kind == "shared":
        return CriticModel(model)
    if not recipe.critic.path:
        trained = replace(recipe, model=replace(recipe.model, quantize="none"))  # all of its weights are
        return CriticModel(model, load_weights(trained, policy, sliced=sliced))
    path = policy.others[recipe.critic.path]
    load = slices.load_model if sliced else pretrained.load_model
    body = load(path, dtype=policy.dtype, device=policy.device, scores=True)
    critic = CriticModel(model, with_layouts(body, "critic.path"))
    critic.start_from(heads.saved_head(path))
    return critic
