"""A recipe on one machine: from its choices to a loop that runs.

The order is that of what can go wrong: what a key or a file decides is checked before a tokenizer
is read, a tokenizer before weights, and everything before the first step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.attention import use_layouts
from posttrain.engines.native.engine import NativeEngine
from posttrain.envs.chat import Chat
from posttrain.envs.protocol import Start, guarded_start
from posttrain.envs.tasks.arithmetic import Arithmetic
from posttrain.learner import checkpoint, lora, pretrained
from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner
from posttrain.methods.choices import described, least_group
from posttrain.runtime import saving
from posttrain.runtime.ask import Asked, ask
from posttrain.runtime.journal import Journal, Progress, Show, stop_recorded
from posttrain.runtime.offline import OfflineRun
from posttrain.runtime.online import OnlineRun
from posttrain.runtime.plan import Memory, Shape, estimate, free_memory, gib, microbatch
from posttrain.runtime.recipe import Recipe, TaskChoice
from posttrain.runtime.replay import Replay
from posttrain.runtime.rollout import Rollouts
from posttrain.runtime.rundir import RunDir
from posttrain.runtime.stream import Stream
from posttrain.track import check_sinks, open_tracker
from posttrain.types import Trajectory, UserError

NO_TASK = TaskChoice(arithmetic=Arithmetic())
"""For uses of a model that ask it no tasks."""

Say = Callable[[str], None]
"""Told, in one line, what takes time or is worth knowing."""


@dataclass(frozen=True)
class Policy:
    """A model's surroundings: everything of it but its weights."""

    path: Path
    tokenizer: Any
    chat: Chat
    config: Any
    dtype: torch.dtype
    device: torch.device
    context: int
    notes: list[str]


@dataclass(frozen=True)
class Plan:
    """What a run will do and need."""

    asked: Asked
    policy: Policy
    rows: Sequence[Trajectory]
    """Rows of an offline method."""
    held_out_rows: Sequence[Trajectory]
    longest_prompt: int
    microbatch_tokens: int
    memory: Memory
    free: int
    parameters: int
    trained: int

    def sections(self) -> dict[str, dict[str, Any]]:
        """As tables for a person, for plan.json and the report."""
        recipe = self.asked.recipe
        name = str(recipe.method["name"])
        method = {"name": name, "title": self.asked.line.title, "source": self.asked.line.source}
        model = {
            "path": recipe.model.path,
            "parameters": f"{self.parameters:,}",
            "trained": f"{self.trained:,}"
            + (f" (LoRA, rank {recipe.lora.rank})" if recipe.lora.rank else ""),
            "computes in": f"{recipe.model.dtype} on {self.policy.device}",
        }
        return {
            "Method": method | described(self.asked.method),
            "Model": model,
            "Batch plan": self._batches(),
            "Memory estimate": self.memory.rows() | {"free now": gib(self.free)},
        }

    def _batches(self) -> dict[str, Any]:
        recipe = self.asked.recipe
        steps = recipe.steps.epochs * recipe.steps.minibatches
        if self.asked.online:
            r = recipe.rollout
            out = {
                "episodes an update": f"{r.groups} tasks × {r.group_size} = {r.groups * r.group_size}",
                "tasks": f"{len(self.asked.train):,} to train on, {len(self.asked.held_out):,} held out",
                "longest prompt": f"{self.longest_prompt} tokens, {recipe.sampling.max_new_tokens} new ones",
                "sampled side by side": recipe.engine.rows,
            }
        else:
            out = {
                "rows an update": recipe.batch.batch_size,
                "rows": f"{len(self.rows):,} to train on, {len(self.held_out_rows):,} held out",
                "longest row": f"{self.longest_prompt} tokens",
            }
        return out | {
            "optimiser steps": f"{recipe.run.updates} updates × {recipe.steps.epochs} epochs × "
            f"{recipe.steps.minibatches} minibatches = {recipe.run.updates * steps}",
            "microbatch": f"at most {self.microbatch_tokens} packed tokens",
        }


# ---------------------------------------------------------------------- before its weights


def surroundings(recipe: Recipe, say: Say) -> Policy:
    """The tokenizer, template and configuration of the recipe's model, checked; UserError names the fault."""
    path = pretrained.resolve(recipe.model.path, say=say)
    config = pretrained.load_config(path)
    template = recipe.model.chat_template
    tokenizer = pretrained.load_tokenizer(path, require_chat_template=template is None)
    chat = Chat(tokenizer, template=template, ends=frozenset(pretrained.stop_ids(path, tokenizer)))
    return Policy(
        path=path,
        tokenizer=tokenizer,
        chat=chat,
        config=config,
        dtype=getattr(torch, recipe.model.dtype),
        device=_device(recipe.model.device),
        context=int(getattr(config.get_text_config(), "max_position_embeddings", 1 << 20)),
        notes=pretrained.tokenizer_notes(tokenizer),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(name)
    except RuntimeError:
        raise UserError(
            f"unknown device {name!r}", where="model.device", mend="auto, cpu, cuda or cuda:0"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU that PyTorch can use", where="model.device", mend="set it to auto")
    return device


def plan(recipe: Recipe, say: Say) -> Plan:
    """Everything that is decided before weights are read: what `posttrain validate` checks and prints."""
    check_sinks(recipe.track.sinks)
    asked = ask(recipe)
    policy = surroundings(recipe, say)
    parameters = pretrained.parameter_count(policy.config)
    trained = _adapter_size(policy, recipe) if recipe.lora.rank else parameters
    shape = Shape.of(policy.config, parameters, trained)
    rows: list[Trajectory] = []
    held_out: list[Trajectory] = []
    if asked.online:
        longest = _check_prompts(asked, policy)
    else:
        rows = _supervised(asked.train, policy, recipe, say)
        held_out = _supervised(asked.held_out, policy, recipe, say)
        longest = max(len(r.tokens) for r in rows)
    needs: dict[str, Any] = {
        "dtype": policy.dtype,
        "checkpointing": recipe.steps.gradient_checkpointing,
        "reference": "logp_ref" in asked.method.needs and not recipe.lora.rank,
        "reference_follows": bool(recipe.reference.refresh_every),
        "critic": _critic_shape(asked, policy, say),
        "natural": asked.line.step == "trust_region",
    }
    if asked.online:
        needs |= {
            "sampler_rows": recipe.engine.rows,
            "sampler_length": longest + recipe.sampling.max_new_tokens,
        }
    free = free_memory(policy.device)
    tokens = recipe.steps.microbatch_tokens or microbatch(shape, free=free, **needs)
    memory = estimate(shape, microbatch_tokens=tokens, **needs)
    return Plan(asked, policy, rows, held_out, longest, tokens, memory, free, parameters, trained)


def _critic_shape(asked: Asked, policy: Policy, say: Say) -> Shape | None:
    """The sizes of a critic's own model, all of it trained; None where there is none."""
    critic = asked.recipe.critic
    if "value" not in asked.method.needs or critic.kind == "shared":
        return None
    path = _critic_path(asked.recipe, policy, say) if critic.path else policy.path
    config = pretrained.load_config(path)
    parameters = pretrained.parameter_count(config)
    return Shape.of(config, parameters, parameters)


def _adapter_size(policy: Policy, recipe: Recipe) -> int:
    try:
        return lora.parameters(policy.config, recipe.lora)
    except ValueError as error:
        raise UserError(
            f"no adapter can be made: {str(error).splitlines()[0]}",
            where="lora.targets" if recipe.lora.targets else "lora",
        ) from None


def _check_prompts(asked: Asked, policy: Policy) -> int:
    """The longest first prompt, in tokens; UserError for one that is empty or has no room for an answer."""
    longest, room = 0, asked.recipe.sampling.max_new_tokens
    for task in (*asked.train, *asked.held_out):
        start = guarded_start(asked.env, task) if asked.env and asked.env.trusted else None
        messages = start.messages if isinstance(start, Start) else task.messages
        try:
            length = len(policy.chat.render(messages))
        except UserError as error:
            raise UserError(f"task {task.id!r}: {error}", where=task.source) from None
        if length + room > policy.context:
            raise UserError(
                f"the prompt of task {task.id!r} has {length} tokens, and with {room} new ones that is more "
                f"than the model's context of {policy.context}",
                where=task.source,
                mend="leave it out, or lower sampling.max_new_tokens",
            )
        longest = max(longest, length)
    if longest + room > asked.recipe.engine.cache_tokens:
        raise UserError(
            f"the longest prompt has {longest} tokens, and with {room} new ones that is more than the "
            f"cache of {asked.recipe.engine.cache_tokens}",
            where="engine.cache_tokens",
            mend="raise it",
        )
    return longest


def _supervised(conversations: Sequence[Any], policy: Policy, recipe: Recipe, say: Say) -> list[Trajectory]:
    """Conversations as rows; those longer than the limit are cut, and left out if nothing trained remains."""
    bound = min(recipe.batch.max_length or policy.context, policy.context)
    rows, cut, lost = [], 0, 0
    for conversation in conversations:
        try:
            tokens, trained = policy.chat.render_supervised(conversation.messages)
        except UserError as error:
            raise UserError(f"{conversation.id!r}: {error}", where=conversation.source) from None
        cut += len(tokens) > bound
        tokens, trained = tokens[:bound], trained[:bound]
        if not any(trained):
            lost += 1
            continue
        zero, reward = [0.0] * len(tokens), [0.0] * len(tokens)
        last = len(trained) - 1 - trained[::-1].index(True)
        reward[last] = getattr(conversation, "reward", None) or 0.0
        rows.append(
            Trajectory(
                tokens=tokens,
                sampled=trained,
                logp_gen=zero,
                logp_policy=zero,
                version=[0] * len(tokens),
                reward=reward,
            )
        )
    if cut:
        say(f"{cut} of {len(conversations)} conversations are longer than {bound} tokens and were cut there")
    if lost:
        say(f"{lost} of them had nothing left to train on and are left out")
    if conversations and not rows:
        raise UserError(
            f"all {len(conversations)} conversations were filtered out: none has a trained token within "
            f"{bound} tokens",
            where="batch.max_length",
            mend="raise it",
        )
    return rows


# ---------------------------------------------------------------------- with its weights


def engine_of(recipe: Recipe, policy: Policy, adapter: Path | None = None) -> NativeEngine:
    """A native engine with its own copy of the model's weights, a saved adapter merged in if one is named."""
    model = _weights(recipe, policy)
    return NativeEngine(
        lora.with_saved_adapter(model, adapter) if adapter else model,
        decode=lambda tokens: str(policy.tokenizer.decode(tokens)),
        stop_tokens=sorted(policy.chat.stops),
        config=recipe.engine,
        context=policy.context,
    )


def _weights(recipe: Recipe, policy: Policy) -> Any:
    seed = recipe.run.seed if recipe.model.random_init else None
    model = pretrained.load_model(policy.path, dtype=policy.dtype, device=policy.device, init_seed=seed)
    return _with_layouts(model, "model.path")


def _with_layouts(model: Any, where: str) -> Any:
    try:
        use_layouts(model)
    except ValueError as error:
        raise UserError(str(error), where=where, mend="take a Llama, Qwen, Gemma or Mistral") from None
    return model


def rollouts_of(asked: Asked, policy: Policy, engine: NativeEngine) -> Rollouts:
    """The episodes of a recipe, on this engine."""
    settings = asked.recipe.rollout
    return Rollouts(
        engine,
        policy.chat,
        verifier=asked.verifier,
        env=asked.env,
        workers=settings.workers,
        deadline_s=settings.deadline_s,
        memory_mb=settings.memory_mb,
        # A conversation of several turns may grow as far as both allow.
        context=min(policy.context, asked.recipe.engine.cache_tokens),
        seed=asked.recipe.run.seed,
    )


def pieces_of(policy: Policy) -> Callable[[Sequence[int]], list[str]]:
    """Each token as text."""
    return lambda tokens: [str(policy.tokenizer.decode([t])) for t in tokens]


def train(
    chosen: Plan, run_dir: RunDir, *, resume: bool, config: Mapping[str, Any], show: Show, say: Say
) -> dict[str, float]:
    """Runs the recipe to its end in this directory; the metrics of the last evaluation."""
    asked, policy, recipe = chosen.asked, chosen.policy, chosen.asked.recipe
    found, skipped = checkpoint.newest(run_dir.checkpoints) if resume else (None, [])
    for fault in skipped:
        say(fault)
    if resume:
        say(f"going on from {found.name}" if found else "no checkpoint yet: starting from the first update")
    state = checkpoint.read_state(found) if found else {}
    progress = Progress(**state.get("progress", {}))
    say("loading the model")
    learner = _learner(chosen, state)
    if found:
        saving.restore(found, learner, state)
    run_dir.forget_after(progress.update if found else -1)
    track = open_tracker(
        run_dir.path,
        recipe.track.sinks,
        project=recipe.track.project,
        name=recipe.track.name or run_dir.path.name,
        config=config,
        resume_after=progress.update if found else (-1 if resume else None),
    )
    journal = Journal(track, progress, show)
    replay = Replay(max_lag=recipe.rollout.replay_lag, seed=recipe.run.seed)
    replay.restore(state.get("replay", []))

    def save() -> None:
        saved = {"progress": asdict(progress), "microbatch_tokens": learner.microbatch_tokens}
        saved["replay"] = replay.state()
        root, keep = run_dir.checkpoints, recipe.checkpoint.keep
        saving.save(root, progress.update, learner, policy.tokenizer, saved, keep=keep)

    try:
        with stop_recorded(run_dir.path):
            if asked.online:
                return _run_online(chosen, run_dir, learner, journal, replay, save)
            return OfflineRun(
                learner=learner,
                stream=Stream(chosen.rows, seed=recipe.run.seed),
                settings=recipe.batch,
                held_out=chosen.held_out_rows[: recipe.eval.limit],
                journal=journal,
                save=save,
                updates=recipe.run.updates,
                save_every=recipe.checkpoint.every,
                evaluate_every=recipe.eval.every,
            ).run()
    finally:
        track.close()


def _run_online(
    chosen: Plan,
    run_dir: RunDir,
    learner: Learner,
    journal: Journal,
    replay: Replay,
    save: Callable[[], None],
) -> dict[str, float]:
    asked, policy, recipe = chosen.asked, chosen.policy, chosen.asked.recipe
    rollouts = rollouts_of(asked, policy, engine_of(recipe, policy))
    try:
        return OnlineRun(
            learner=learner,
            engine=rollouts.engine,
            rollouts=rollouts,
            stream=Stream(asked.train, seed=recipe.run.seed),
            sampling=recipe.sampling,
            settings=recipe.rollout,
            evaluation=recipe.eval,
            held_out=asked.held_out,
            run_dir=run_dir,
            journal=journal,
            pieces=pieces_of(policy),
            save=save,
            updates=recipe.run.updates,
            save_every=recipe.checkpoint.every,
            canary=policy.chat.render(asked.train[0].messages)[-24:],
            replay=replay,
            least_group=least_group(asked.method),
        ).run()
    finally:
        rollouts.close()


def _learner(chosen: Plan, state: Mapping[str, Any]) -> Learner:
    asked, policy, recipe = chosen.asked, chosen.policy, chosen.asked.recipe
    needs_copy = "logp_ref" in asked.method.needs and not recipe.lora.rank
    model = _weights(recipe, policy)
    return Learner(
        model,
        asked.method,
        optim=recipe.optim,
        steps=recipe.steps,
        lora=recipe.lora,
        reference=_weights(recipe, policy) if needs_copy else None,
        refresh=recipe.reference,
        critic=_critic(chosen, model) if "value" in asked.method.needs else None,
        critic_optim=replace(recipe.optim, lr=recipe.critic.lr, max_grad_norm=recipe.critic.max_grad_norm),
        trust=recipe.trust if asked.line.step == "trust_region" else None,
        temperature=recipe.sampling.temperature if asked.online else 1.0,
        total_steps=recipe.run.updates * recipe.steps.epochs * recipe.steps.minibatches,
        # A resumed run cuts its steps as the first session did, whatever memory is free today.
        microbatch_tokens=state.get("microbatch_tokens", chosen.microbatch_tokens),
        seed=recipe.run.seed,
    )


def _critic(chosen: Plan, model: Any) -> CriticModel:
    """The critic that the recipe asks for, on the policy's backbone or on its own."""
    recipe, policy = chosen.asked.recipe, chosen.policy
    if recipe.critic.kind == "shared":
        return CriticModel(model)
    if not recipe.critic.path:
        return CriticModel(model, _weights(recipe, policy))
    path = _critic_path(recipe, policy, pretrained.silent)
    body = pretrained.load_model(path, dtype=policy.dtype, device=policy.device)
    return CriticModel(model, _with_layouts(body, "critic.path"))


def _critic_path(recipe: Recipe, policy: Policy, say: Say) -> Path:
    """The directory of an own critic's model; UserError if there is none, or its vocabulary is another."""
    try:
        path = pretrained.resolve(recipe.critic.path, say=say)
        config = pretrained.load_config(path)
    except UserError as error:
        where, mend = (text.replace("model.path", "critic.path") for text in (error.where, error.mend))
        raise UserError(error.what, where=where, mend=mend) from None
    if config.get_text_config().vocab_size != policy.config.get_text_config().vocab_size:
        what = "the critic's model has another vocabulary than the policy's"
        raise UserError(what, where="critic.path", mend="take a model with the same tokenizer")
    return path
