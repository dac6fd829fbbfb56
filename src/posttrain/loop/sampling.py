"""Build a recipe's engine, the runner of its episodes, and its samplers in this process or in others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import ReferenceType, ref

import torch

from posttrain.base.kinds import by_class, find_kind, kinds
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.protocol import Engine
from posttrain.engines.vllm.connection import ServedConfig, adapter_obstacle, transfer_backend
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.envs.protocol import Env, Player
from posttrain.learner import lora
from posttrain.learner.learner import Learner
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.methods import build
from posttrain.models.loading import hide_other_gpus, stored_buffers, usable_device
from posttrain.models.pretrained import silent, skeleton
from posttrain.plan.model_info import ModelInfo, Say, load_weights, read_model_info, with_companion_models
from posttrain.plan.resolve import Resolved, build_players
from posttrain.process import machine
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.recipe.recipe import Recipe
from posttrain.rollout.agents import AgentRunner
from posttrain.rollout.cluster import SPARE, Cluster, address_of, check_store
from posttrain.rollout.episode_runner import EpisodeRunner
from posttrain.rollout.local import LocalSampler
from posttrain.rollout.pool import SamplerPool
from posttrain.rollout.protocol import Sampler
from posttrain.rollout.ray import VERSIONS, ObjectStore, RayChannel
from posttrain.rollout.remote import Channel, ProcessChannel, ThreadChannel
from posttrain.rollout.rollouts import Rollouts
from posttrain.rollout.search_runner import SearchRunner
from posttrain.rollout.snapshots import GatherOnlyStore, MachineStore, SharedMemoryStore, WeightStore
from posttrain.rollout.worker import RolloutWorker
from posttrain.run.metrics import is_right_verdict
from posttrain.search.choice import SearchChoice
from posttrain.search.moves.reasoning import ReasoningTransitions
from posttrain.search.moves.turns import EnvTransitions
from posttrain.search.protocol import Transitions
from posttrain.types import Verdict
from posttrain.verifiers.protocol import Verifier


def build_native_engine(recipe: Recipe, policy: ModelInfo, adapter: Path | None = None) -> NativeEngine:
    """Build a native engine with its own copy of the model's weights, and a saved adapter merged in."""
    return _native_engine(recipe, policy, _model_of(recipe, policy, adapter))


def _native_engine(
    recipe: Recipe, policy: ModelInfo, model: Any, lent: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> NativeEngine:
    return NativeEngine(
        model,
        decode=lambda tokens: str(policy.tokenizer.decode(tokens)),
        stop_tokens=sorted(policy.chat.stops),
        config=recipe.engine,
        context=policy.context,
        lent=lent,
        routes=recipe.rollout.router_replay,
    )


def build_engine(recipe: Recipe, policy: ModelInfo, adapter: Path | None = None) -> Engine:
    """Build the engine that the recipe names, with the same weights."""
    engine = _load_engine(recipe, policy, adapter)
    if recipe.engine.name != "native":
        engine.load(_model_of(recipe, policy, adapter).named_parameters(), 0)
    return engine


def _model_of(recipe: Recipe, policy: ModelInfo, adapter: Path | None) -> Any:
    model = load_weights(recipe, policy)
    return lora.with_saved_adapter(model, adapter) if adapter else model


def _load_engine(recipe: Recipe, policy: ModelInfo, adapter: Path | None = None) -> Engine:
    """Build the engine that the recipe names in the registry; its weights may be loaded later."""
    engine: Engine = find_kind("engines", recipe.engine.name, "engine.name").load()(recipe, policy, adapter)
    return engine


def build_vllm_engine(recipe: Recipe, policy: ModelInfo, adapter: Path | None = None) -> Engine:
    """Build vLLM in this process or behind a server; it has no weights until `load`."""
    model, on_cpu = policy.masked(skeleton(policy.config)), replace(policy, device=torch.device("cpu"))
    options: dict[str, Any] = {
        "dtype": policy.dtype,
        "decode": lambda tokens: str(policy.tokenizer.decode(tokens)),
        "stop_tokens": sorted(policy.chat.stops),
        "config": recipe.engine,
        "context": policy.context,
    }
    if not recipe.engine.url:
        has_buffers = any(True for _ in stored_buffers(model))
        source = load_weights(recipe, on_cpu, sliced=True) if has_buffers else model
        return VllmEngine(model, **options, buffers=dict(stored_buffers(source)))
    options["base"] = lambda: load_weights(recipe, on_cpu).named_parameters()
    return ServerEngine(model, device=policy.device, routes=recipe.rollout.router_replay, **options)


def sends_adapter(resolved: Resolved, learner: Learner, say: Say) -> bool:
    """Return True if weight syncs send an adapter alone, which all servers must take; log why not.

    All ranks must call it. Raise RunError if a server is unreachable.
    """
    recipe, ranks = resolved.recipe, learner.ranks
    if not (recipe.lora.rank and recipe.engine.url and (resolved.online or resolved.evaluated)):
        return False
    problem = ""
    if recipe.lora.dora:
        problem = "lora.dora is set, and vLLM has no such adapters"
    elif lora.adapts_head(learner.model):  # LogitsProcessorWithLoRA of vLLM 0.32 maps sampled tokens alone
        problem = "lora.targets names the output head, without whose adapter vLLM scores prompts"
    problem = problem or _first_problem(
        recipe, ranks, lambda server: adapter_obstacle(server, recipe.lora.rank)
    )
    if problem:
        say(f"note: lora: each weight sync sends the merged model and not the adapter alone: {problem}")
    return not problem


def note_files(resolved: Resolved, policy: ModelInfo, ranks: Ranks, say: Say) -> None:
    """Log why weights pass by files to a server that was started for another way.

    All ranks must call it. Of a sampler on Ray the device is not known here. Raise RunError if a server is
    unreachable.
    """
    recipe = resolved.recipe
    if not recipe.engine.url or recipe.async_.where == "ray" or not (resolved.online or resolved.evaluated):
        return
    devices = recipe.async_.devices
    device = usable_device(devices[0]) if devices else policy.device
    if problem := _first_problem(recipe, ranks, lambda server: transfer_backend(server, device)[1]):
        say(f"note: engine.url: weights pass by files: {problem}")


def _first_problem(recipe: Recipe, ranks: Ranks, find: Callable[[ServedConfig], str]) -> str:
    """Return the first problem that `find` has with a server of any rank, "" if there are none.

    All ranks must call it.
    """
    servers = (recipe.engine.of_sampler(number) for number in recipe.samplers_of(ranks.rank))
    problem = next(filter(None, map(find, servers)), "")
    return next(filter(None, ranks.gather(problem, "the servers")), "")


def build_episode_runner(resolved: Resolved, policy: ModelInfo, engine: Engine) -> EpisodeRunner:
    """Build the runner of a recipe's episodes on this engine."""
    return _rollouts(resolved.recipe, policy, engine, resolved.players)


def _rollouts(
    recipe: Recipe, policy: ModelInfo, engine: Engine, players: Mapping[str, Player]
) -> EpisodeRunner:
    settings, ahead = recipe.rollout, recipe.async_
    options: dict[str, Any] = {
        "workers": settings.workers,
        "deadline_s": settings.deadline_s,
        "memory_mb": settings.memory_mb,
        # A conversation of several turns may use all that both allow.
        "context": min(policy.context, recipe.engine.cache_tokens),
        "seed": recipe.run.seed,
    }
    player = next(iter(players.values()))
    if recipe.search:
        world = build_transitions(recipe, player.verifier, player.env)
        options["verifier"] = player.verifier
        return SearchRunner(engine, policy.chat, world, recipe.search, recipe.sampling, **options)
    method = dict(recipe.method)
    options["keyed"] = "states" in build.method(method.pop("name"), **method).method.asks
    if recipe.source.agent:
        options["verifier"] = player.verifier
        return AgentRunner(engine, policy.chat, recipe.source.agent, **options)
    return Rollouts(
        engine,
        policy.chat,
        players=players,
        episode_tokens=settings.episode_tokens,
        episode_s=settings.episode_s,
        exact=not ahead.timed_by,
        waits=ahead.max_lag > 0 and ahead.pace == "steps",
        **options,
    )


def build_transitions(recipe: Recipe, verifier: Verifier | None, env: Env | None) -> Transitions:
    """Return the moves of a search: turns of an environment, tactics of a prover, or steps of an answer."""
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
    """Builds a worker from a recipe, in any process."""

    recipe: Recipe
    threads: int
    """Threads of the process; 0 leaves them unchanged."""
    number: int = 0

    def __call__(self) -> RolloutWorker:
        """Build the worker; its engine does not have the run's weights yet."""
        if self.threads:
            machine.configure(self.threads)
        recipe = on_device_of(self.recipe, self.number)
        if self.threads and recipe.engine.name == "vllm":
            recipe = replace(recipe, model=replace(recipe.model, device=hide_other_gpus(recipe.model.device)))
        policy = with_companion_models(recipe, read_model_info(recipe, silent), silent)
        engine = _load_engine(recipe, policy)
        return _worker(recipe, _rollouts(recipe, policy, engine, build_players(recipe)))


def on_device_of(recipe: Recipe, number: int) -> Recipe:
    """Return the recipe with the device of this sampler."""
    if not recipe.async_.devices:
        return recipe
    device = recipe.async_.devices[number % len(recipe.async_.devices)]
    return replace(recipe, model=replace(recipe.model, device=device))


def _on_server_of(recipe: Recipe, number: int) -> Recipe:
    """Return the recipe with the server of this sampler, counted over all ranks."""
    return replace(recipe, engine=recipe.engine.of_sampler(number))


def check_weight_store(recipe: Recipe, size: int) -> None:
    """Raise UserError if a cluster of the run's own would have no room for versions of `size` bytes."""
    if recipe.async_.where == "ray" and not address_of(recipe.async_.address):
        check_store(VERSIONS * size + SPARE)


def build_weight_store(recipe: Recipe, size: int, ranks: Ranks = ALONE) -> WeightStore | None:
    """Return the store of versions of `size` bytes; None if samplers read the learner's tensors."""
    ahead = recipe.async_
    if ahead.where != "ray":
        if not ahead.publishes:
            return None
        if ranks is ALONE or recipe.is_central:
            return GatherOnlyStore(lambda: None) if ranks.rank else SharedMemoryStore()
        return MachineStore(ranks)
    needs = {} if ranks.rank else sampler_needs(ahead, torch.get_num_threads())
    cluster = Cluster(ahead.address, needs, VERSIONS * size + SPARE)
    return GatherOnlyStore(cluster.close) if ranks.rank else ObjectStore(cluster)


def sampler_needs(ahead: Asynchrony, threads: int) -> dict[str, float]:
    """Return the resources of all samplers on a Ray cluster; threads: those of the learner."""
    one = {"async.cpus": ahead.cpus or ahead.threads_of(threads), "async.gpus": ahead.gpus}
    return {key: ahead.samplers * count for key, count in one.items()}


def _has_pending(worker: ReferenceType[RolloutWorker]) -> bool:
    """Return True if the worker has groups to finish; weak, since a learner may outlive its sampler."""
    sampler = worker()
    return sampler is not None and not sampler.idle


def build_sampler(resolved: Resolved, policy: ModelInfo, logs: Path, learner: Learner) -> Sampler:
    """Build the samplers of a recipe: here, in a thread, in processes or on Ray.

    logs: folder for the output of processes. A sampler in this thread reads the weights that the learner
    lends. Where rank 0 has all samplers (`Recipe.is_central`), other ranks get a pool without any.
    """
    recipe, ahead, ranks = resolved.recipe, resolved.recipe.async_, learner.ranks
    numbers = recipe.samplers_of(ranks.rank)
    if ahead.where == "here" and numbers:
        placed = replace(policy, device=usable_device(ahead.devices[0])) if ahead.devices else policy
        engine: Engine
        if loan := learner.loan:
            engine = _native_engine(recipe, placed, loan.lend(learner.model), loan.tensors)
        else:
            engine = _load_engine(_on_server_of(recipe, numbers[0]), placed)
        worker = _worker(recipe, build_episode_runner(resolved, policy, engine))
        if loan:
            loan.has_pending = partial(_has_pending, ref(worker))
        return LocalSampler(worker, steps=ahead.steps_per_update if ahead.pace == "steps" else 0)
    threads = ahead.threads_of(torch.get_num_threads())

    def start(number: int) -> Channel:
        factory = WorkerFactory(
            _on_server_of(recipe, numbers[number]), 0 if ahead.where == "thread" else threads, number
        )
        if ahead.where == "thread":
            return ThreadChannel(factory)
        log = logs / f"{number}.log"
        if ahead.where == "process":
            return ProcessChannel(factory, log)
        return RayChannel(factory, log, cpus=ahead.cpus or threads, gpus=ahead.gpus, keeps=ranks.size > 1)

    return SamplerPool(
        start,
        len(numbers),
        stride=1 if recipe.is_central else ranks.size,
        deadline_s=ahead.deadline_s,
        max_restarts=ahead.max_restarts,
    )
