"""A recipe on one machine: from its choices to a loop that runs.

The order is that of what can go wrong: what a key or a file decides is checked before a tokenizer
is read, a tokenizer before weights, and everything before the first step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.attention import use_layouts
from posttrain.data import load_conversations, load_tasks
from posttrain.engines.native.engine import NativeEngine
from posttrain.envs.chat import Chat
from posttrain.envs.guess import guess_tasks
from posttrain.envs.maze import maze_tasks
from posttrain.envs.protocol import Env, Start, guarded_start
from posttrain.envs.tasks.arithmetic import Arithmetic, arithmetic
from posttrain.learner import checkpoint, lora, pretrained
from posttrain.learner.learner import Learner
from posttrain.methods.table import Line, build, described, least_group, line
from posttrain.runtime import saving
from posttrain.runtime.journal import Journal, Progress, Show
from posttrain.runtime.offline import OfflineRun
from posttrain.runtime.online import OnlineRun
from posttrain.runtime.plan import Memory, Shape, estimate, free_memory, gib, microbatch
from posttrain.runtime.recipe import Recipe, TaskChoice
from posttrain.runtime.rollout import Rollouts
from posttrain.runtime.rundir import RunDir
from posttrain.runtime.stream import Stream
from posttrain.track import check_sinks, open_tracker
from posttrain.types import Method, Task, Trajectory, UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.self_test import self_test

NO_TASK = TaskChoice(arithmetic=Arithmetic())
"""For uses of a model that ask it no tasks."""

Say = Callable[[str], None]
"""Told, in one line, what takes time or is worth knowing."""


@dataclass(frozen=True)
class Asked:
    """What a recipe asks, known without a model: the method, the tasks and who judges them."""

    recipe: Recipe
    line: Line
    method: Method
    train: Sequence[Any]
    """Tasks, or conversations for an offline method."""
    held_out: Sequence[Any]
    verifier: Verifier | None
    env: Env | None

    @property
    def online(self) -> bool:
        """Whether the policy is sampled from."""
        return self.line.loop == "online"


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


# ---------------------------------------------------------------------- before a model


def ask(recipe: Recipe) -> Asked:
    """The method, tasks and judge of a recipe, each checked as far as it can be without a model.

    Raises UserError for an impossible combination, and for the first fault of the data.
    """
    found = line(str(recipe.method.get("name", "")))
    options = {k: v for k, v in recipe.method.items() if k != "name"}
    task, sampling = recipe.task, recipe.sampling
    env = task.environment() if found.loop == "online" else None
    turns = getattr(env, "max_turns", 1) if env else 1
    method = build(str(recipe.method["name"]), options, horizon=sampling.max_new_tokens * turns)
    verifier = recipe.verifier.build() if found.loop == "online" else None
    if found.loop == "online":
        _check_online(recipe, method, verifier, env)
        train, held_out = _tasks(recipe)
        if verifier is not None:
            with Pool(workers=recipe.rollout.workers, deadline_s=recipe.rollout.deadline_s) as pool:
                self_test(verifier, [*train, *held_out], pool)
        return Asked(recipe, found, method, train, held_out, verifier, env)
    if task.guess or task.maze or task.env:
        raise UserError("an offline method learns from data, and plays no games", where="task")
    if recipe.steps.minibatches > recipe.batch.batch_size:
        raise UserError(
            f"{recipe.steps.minibatches} minibatches cannot be dealt from {recipe.batch.batch_size} rows",
            where="steps.minibatches",
            mend="give at most batch.batch_size",
        )
    return Asked(recipe, found, method, *_conversations(recipe), None, None)


def _check_online(recipe: Recipe, method: Method, verifier: Verifier | None, env: Env | None) -> None:
    size, name = recipe.rollout.group_size, recipe.method["name"]
    least = least_group(method)
    if size < least:
        raise UserError(
            f"{name} compares the episodes of a task, and a group of {size} has none to compare",
            where="rollout.group_size",
            mend=f"give {least} or more, or take method.name = 'reinforce'",
        )
    if recipe.steps.minibatches > recipe.rollout.groups:
        raise UserError(
            f"{recipe.steps.minibatches} minibatches cannot be dealt from {recipe.rollout.groups} groups",
            where="steps.minibatches",
            mend="give at most rollout.groups",
        )
    if recipe.rollout.select == "varied" and size < 2:
        raise UserError("one episode a task never varies", where="rollout.select", mend="set it to 'all'")
    if recipe.sampling.greedy:
        raise UserError(
            "a policy that always takes its likeliest token has nothing to learn from",
            where="sampling.temperature",
            mend="0.7 to 1.0 is usual",
        )
    if (verifier is None) == (env is None):
        raise UserError(
            "nobody says what a good answer is"
            if verifier is None
            else "the environment gives the rewards, and a verifier is named beside it",
            where="verifier",
            mend="add for example [verifier.number]" if verifier is None else "leave [verifier] out",
        )


def _tasks(recipe: Recipe) -> tuple[list[Task], list[Task]]:
    choice, limit = recipe.task, recipe.eval.limit
    if choice.arithmetic is not None:
        spec = choice.arithmetic
        held_out = arithmetic("held_out", spec, limit=min(limit, spec.held_out)) if limit else []
        return arithmetic("train", spec), held_out
    if choice.data is not None:
        held = load_tasks(choice.held_out)[:limit] if choice.held_out is not None and limit else []
        return load_tasks(choice.data), held
    n, seed = choice.games, recipe.run.seed
    if choice.guess is not None:
        games = guess_tasks(n.train + n.held_out, high=choice.guess.high, seed=seed)
    else:
        games = maze_tasks(n.train + n.held_out, size=choice.maze_size, seed=seed)
    return games[: n.train], games[n.train :][:limit]


def _conversations(recipe: Recipe) -> tuple[list[Any], list[Any]]:
    choice = recipe.task
    if choice.arithmetic is not None:
        train, held_out = _tasks(recipe)
        return [_answered(t) for t in train], [_answered(t) for t in held_out]
    assert choice.data is not None
    held = load_conversations(choice.held_out)[: recipe.eval.limit] if choice.held_out is not None else []
    return load_conversations(choice.data), held


def _answered(task: Task) -> Task:
    """The task with its answer as the assistant's turn, for supervised fine-tuning."""
    return Task(
        id=task.id,
        messages=(*task.messages, {"role": "assistant", "content": task.answer or ""}),
        source=task.source,
    )


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
        zero = [0.0] * len(tokens)
        rows.append(
            Trajectory(
                tokens=tokens,
                sampled=trained,
                logp_gen=zero,
                logp_policy=zero,
                version=[0] * len(tokens),
                reward=zero,
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
    try:
        use_layouts(model)
    except ValueError as error:
        raise UserError(str(error), where="model.path", mend="take a Llama, Qwen, Gemma or Mistral") from None
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

    def save() -> None:
        saved = {"progress": asdict(progress), "microbatch_tokens": learner.microbatch_tokens}
        root, keep = run_dir.checkpoints, recipe.checkpoint.keep
        saving.save(root, progress.update, learner, policy.tokenizer, saved, keep=keep)

    try:
        if asked.online:
            return _run_online(chosen, run_dir, learner, journal, save)
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
    chosen: Plan, run_dir: RunDir, learner: Learner, journal: Journal, save: Callable[[], None]
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
            least_group=least_group(asked.method),
        ).run()
    finally:
        rollouts.close()


def _learner(chosen: Plan, state: Mapping[str, Any]) -> Learner:
    asked, policy, recipe = chosen.asked, chosen.policy, chosen.asked.recipe
    needs_copy = "logp_ref" in asked.method.needs and not recipe.lora.rank
    return Learner(
        _weights(recipe, policy),
        asked.method,
        optim=recipe.optim,
        steps=recipe.steps,
        lora=recipe.lora,
        reference=_weights(recipe, policy) if needs_copy else None,
        temperature=recipe.sampling.temperature if asked.online else 1.0,
        total_steps=recipe.run.updates * recipe.steps.epochs * recipe.steps.minibatches,
        # A resumed run cuts its steps as the first session did, whatever memory is free today.
        microbatch_tokens=state.get("microbatch_tokens", chosen.microbatch_tokens),
        seed=recipe.run.seed,
    )
