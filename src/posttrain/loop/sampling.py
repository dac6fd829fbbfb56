"""A recipe's engine, the episodes that are played on it, and the samplers that do so beside the learner."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from posttrain.base.kinds import by_class, find_kind, kinds
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.protocol import Engine
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.envs.protocol import Env
from posttrain.learner import lora
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.models.loading import see_only, usable_device
from posttrain.models.pretrained import silent, skeleton
from posttrain.plan.model_info import ModelInfo, load_weights, read_model_info, with_companion_models
from posttrain.plan.resolve import Resolved
from posttrain.process import machine
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.recipe.recipe import Recipe
from posttrain.rollout.agents import AgentRunner
from posttrain.rollout.cluster import SPARE, Cluster
from posttrain.rollout.episode_runner import EpisodeRunner
from posttrain.rollout.local import LocalSampler
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.protocol import Sampler
from posttrain.rollout.ray import VERSIONS, ObjectStore, RayChannel
from posttrain.rollout.remote import Channel, ProcessChannel, ThreadChannel
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.search_runner import SearchRunner
from posttrain.rollout.snapshots import GatherOnlyStore, SharedMemoryStore, WeightStore
from posttrain.rollout.worker import RolloutWorker
from posttrain.run.metrics import is_right_verdict
from posttrain.search.choice import SearchChoice
from posttrain.search.moves.reasoning import ReasoningTransitions
from posttrain.search.moves.turns import EnvTransitions
from posttrain.search.protocol import Transitions
from posttrain.types import Verdict
from posttrain.verifiers.protocol import Verifier


def build_native_engine(recipe: Recipe, policy: ModelInfo, adapter: Path | None = None) -> NativeEngine:
    """A native engine with its own copy of the model's weights, a saved adapter merged in if one is named."""
    return NativeEngine(
        _model_of(recipe, policy, adapter),
        decode=lambda tokens: str(policy.tokenizer.decode(tokens)),
        stop_tokens=sorted(policy.chat.stops),
        config=recipe.engine,
        context=policy.context,
    )


def build_engine(recipe: Recipe, policy: ModelInfo, adapter: Path | None = None) -> Engine:
    """The engine that the recipe names, with those weights."""
    engine = _chosen_engine(recipe, policy, adapter)
    if recipe.engine.name != "native":
        engine.load(_model_of(recipe, policy, adapter).named_parameters(), 0)
    return engine


def _model_of(recipe: Recipe, policy: ModelInfo, adapter: Path | None) -> Any:
    model = load_weights(recipe, policy)
    return lora.with_saved_adapter(model, adapter) if adapter else model


def _chosen_engine(recipe: Recipe, policy: ModelInfo, adapter: Path | None = None) -> Engine:
    """The engine that the recipe names, by the registry."""
    engine: Engine = find_kind("engines", recipe.engine.name, "engine.name").load()(recipe, policy, adapter)
    return engine


def build_vllm_engine(recipe: Recipe, policy: ModelInfo, adapter: Path | None = None) -> Engine:
    """vLLM here or behind a server; it has no weights before the first are handed over."""
    return (ServerEngine if recipe.engine.url else VllmEngine)(
        policy.masked(skeleton(policy.config)),
        dtype=policy.dtype,
        decode=lambda tokens: str(policy.tokenizer.decode(tokens)),
        stop_tokens=sorted(policy.chat.stops),
        config=recipe.engine,
        context=policy.context,
    )


def build_episode_runner(resolved: Resolved, policy: ModelInfo, engine: Engine) -> EpisodeRunner:
    """The episodes of a recipe, on this engine."""
    return _rollouts(resolved.recipe, policy, engine, resolved.verifier, resolved.env)


def _rollouts(
    recipe: Recipe, policy: ModelInfo, engine: Engine, verifier: Verifier | None, env: Env | None
) -> EpisodeRunner:
    settings, ahead = recipe.rollout, recipe.async_
    how: dict[str, Any] = {
        "verifier": verifier,
        "workers": settings.workers,
        "deadline_s": settings.deadline_s,
        "memory_mb": settings.memory_mb,
        # A conversation of several turns may grow as far as both allow.
        "context": min(policy.context, recipe.engine.cache_tokens),
        "seed": recipe.run.seed,
    }
    if recipe.search:
        world = build_transitions(recipe, verifier, env)
        return SearchRunner(engine, policy.chat, world, recipe.search, recipe.sampling, **how)
    if recipe.task.agent:
        return AgentRunner(engine, policy.chat, recipe.task.agent, **how)
    return Rollouts(
        engine,
        policy.chat,
        env=env,
        episode_tokens=settings.episode_tokens,
        episode_s=settings.episode_s,
        exact=not ahead.timed_by,
        waits=ahead.max_lag > 0 and ahead.pace == "steps",
        **how,
    )


def build_transitions(recipe: Recipe, verifier: Verifier | None, env: Env | None) -> Transitions:
    """Where moves lead: turns of an environment, tactics of a prover, otherwise steps of an answer."""
    search, settings = recipe.search or SearchChoice(), recipe.rollout
    if env:
        return EnvTransitions(
            env,
            partial(_ends, recipe.eval.right),
            workers=settings.workers,
            deadline_s=settings.deadline_s,
            memory_mb=settings.memory_mb,
        )
    kind = by_class("verifiers").get(type(verifier), "")
    if kind in kinds("moves"):
        moves: Transitions = kinds("moves")[kind].load().of_verifier(verifier, search)
        return moves
    return ReasoningTransitions(search.separator)


def _ends(right: float, verdict: Verdict) -> bool:
    return is_right_verdict(verdict.label, verdict.score, right)


def _worker(recipe: Recipe, rollouts: EpisodeRunner) -> RolloutWorker:
    ahead = recipe.async_
    return RolloutWorker(rollouts, swap=ahead.swap, cache=ahead.cache, in_order=ahead.max_lag <= 1)


@dataclass(frozen=True)
class WorkerFactory:
    """Makes a worker from a recipe, wherever it is called."""

    recipe: Recipe
    threads: int
    """Of the process; 0 leaves them as they are."""
    number: int = 0

    def __call__(self) -> RolloutWorker:
        """The worker, whose engine is still to be given the run's weights."""
        if self.threads:
            machine.configure(self.threads)
        recipe = on_device_of(self.recipe, self.number)
        if self.threads and recipe.engine.name == "vllm":
            recipe = replace(recipe, model=replace(recipe.model, device=see_only(recipe.model.device)))
        policy = with_companion_models(recipe, read_model_info(recipe, silent), silent)
        engine = _chosen_engine(recipe, policy)
        verifier, env = recipe.build_verifier_and_env()
        return _worker(recipe, _rollouts(recipe, policy, engine, verifier, env))


def on_device_of(recipe: Recipe, number: int) -> Recipe:
    """The recipe as the sampler of this number reads it: with the device that it computes on."""
    if not recipe.async_.devices:
        return recipe
    device = recipe.async_.devices[number % len(recipe.async_.devices)]
    return replace(recipe, model=replace(recipe.model, device=device))


def build_weight_store(recipe: Recipe, size: int, ranks: Ranks = ALONE) -> WeightStore | None:
    """Where samplers find each version of the weights, of so many bytes; None: it is the learner's own."""
    ahead = recipe.async_
    if ahead.where != "ray":
        return SharedMemoryStore() if ahead.publishes else None
    needs = {} if ranks.rank else sampler_needs(ahead, torch.get_num_threads())
    cluster = Cluster(ahead.address, needs, VERSIONS * size + SPARE)
    return GatherOnlyStore(cluster.close) if ranks.rank else ObjectStore(cluster)


def sampler_needs(ahead: Asynchrony, threads: int) -> dict[str, float]:
    """What all samplers together ask of a Ray cluster, where the learner has so many threads."""
    each = {"async.cpus": ahead.cpus or ahead.threads_of(threads), "async.gpus": ahead.gpus}
    return {key: ahead.samplers * count for key, count in each.items()}


def build_sampler(resolved: Resolved, policy: ModelInfo, logs: Path, ranks: Ranks = ALONE) -> Sampler:
    """Return the samplers of a recipe, wherever it puts them.

    logs: where processes leave what they print. Of samplers on Ray all are rank 0's.
    """
    recipe, ahead = resolved.recipe, resolved.recipe.async_
    if ahead.where == "here":
        there = replace(policy, device=usable_device(ahead.devices[0])) if ahead.devices else policy
        rollouts = build_episode_runner(resolved, policy, _chosen_engine(recipe, there))
        steps = ahead.steps_per_update if ahead.pace == "steps" else 0
        return LocalSampler(_worker(recipe, rollouts), steps=steps)
    threads = ahead.threads_of(torch.get_num_threads())

    def start(number: int) -> Channel:
        made = WorkerFactory(recipe, 0 if ahead.where == "thread" else threads, number)
        if ahead.where == "thread":
            return ThreadChannel(made)
        log = logs / f"{number}.log"
        if ahead.where == "process":
            return ProcessChannel(made, log)
        return RayChannel(made, log, cpus=ahead.cpus or threads, gpus=ahead.gpus, keeps=ranks.size > 1)

    return SamplerPool(
        start,
        0 if ahead.where == "ray" and ranks.rank else ahead.samplers,
        deadline_s=ahead.deadline_s,
        max_restarts=ahead.max_restarts,
    )
