"""A recipe's engine, the episodes that are played on it, and the samplers that do so beside the learner."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from posttrain.base import process
from posttrain.engines.native.engine import NativeEngine
from posttrain.engines.protocol import Engine
from posttrain.engines.vllm.asking import check_sampling
from posttrain.engines.vllm.connection import check_model, check_temperature, connect
from posttrain.engines.vllm.engine import VllmEngine
from posttrain.engines.vllm.remote import ServerEngine
from posttrain.engines.vllm.start import require
from posttrain.envs.protocol import Env
from posttrain.learner import lora
from posttrain.learner.ranks import ALONE, Ranks
from posttrain.models.loading import usable_device
from posttrain.models.pretrained import silent, skeleton
from posttrain.recipe.asynchrony import Asynchrony
from posttrain.recipe.recipe import Recipe
from posttrain.runtime.policy import Policy, bounded, surroundings, weights_of
from posttrain.runtime.record.metrics import told_right
from posttrain.runtime.record.schedule import RecordedSchedule, Recorder
from posttrain.runtime.resolve import Resolved
from posttrain.samplers.agents import AgentPlay
from posttrain.samplers.cluster import SPARE, Cluster, check_ray
from posttrain.samplers.local import LocalSampler
from posttrain.samplers.players import Plays
from posttrain.samplers.pool import SamplerPool
from posttrain.samplers.protocol import Sampler
from posttrain.samplers.ray import VERSIONS, ObjectStore, RayChannel
from posttrain.samplers.remote import Channel, ProcessChannel, ThreadChannel
from posttrain.samplers.replay import ReplaySampler
from posttrain.samplers.rollouts import Rollouts
from posttrain.samplers.snapshots import Arenas, Nowhere, Store
from posttrain.samplers.trees import Trees, check_search
from posttrain.samplers.worker import RolloutWorker
from posttrain.search.choice import SearchChoice
from posttrain.search.moves.coq import CoqSteps
from posttrain.search.moves.lean import LeanSteps
from posttrain.search.moves.reasoning import ReasoningSteps
from posttrain.search.moves.turns import EnvSteps
from posttrain.search.protocol import Steps
from posttrain.types import RunError, UserError, Verdict
from posttrain.verifiers.proof.coq.verifier import Coq
from posttrain.verifiers.proof.lean.verifier import Lean
from posttrain.verifiers.protocol import Verifier


def engine_of(recipe: Recipe, policy: Policy, adapter: Path | None = None) -> NativeEngine:
    """A native engine with its own copy of the model's weights, a saved adapter merged in if one is named."""
    return NativeEngine(
        _model_of(recipe, policy, adapter),
        decode=lambda tokens: str(policy.tokenizer.decode(tokens)),
        stop_tokens=sorted(policy.chat.stops),
        config=recipe.engine,
        context=policy.context,
    )


def loaded_engine(recipe: Recipe, policy: Policy, adapter: Path | None = None) -> Engine:
    """The engine that the recipe names, with those weights."""
    engine = _chosen_engine(recipe, policy, adapter)
    if recipe.engine.name != "native":
        engine.load(_model_of(recipe, policy, adapter).named_parameters(), 0)
    return engine


def _model_of(recipe: Recipe, policy: Policy, adapter: Path | None) -> Any:
    model = weights_of(recipe, policy)
    return lora.with_saved_adapter(model, adapter) if adapter else model


def check_samplers(resolved: Resolved) -> None:
    """UserError where samplers cannot be where the recipe has them, or cannot do what it wants of them."""
    recipe = resolved.recipe
    if recipe.search:
        check_search(recipe, recipe.search, resolved.method, resolved.verifier, resolved.env)
    if recipe.async_.where == "ray":
        check_ray("async.place")
    for device in recipe.async_.devices:
        usable_device(device, "async.devices")
    if recipe.engine.name == "native":
        return
    if recipe.async_.cache == "keep":
        what = "vLLM computes running answers again under new weights"
        raise UserError(what, where="async.cache", mend="set it to 'recompute'")
    if recipe.async_.where == "thread" and not recipe.engine.url:
        what = "vLLM changes settings of the whole process while it starts"
        raise UserError(what, where="async.place", mend="set it to 'process'")
    for table, temperature in (("sampling", recipe.sampling.temperature), ("eval", recipe.eval.temperature)):
        sampling = replace(recipe.sampling, temperature=temperature)
        filters = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
        where = next((f"sampling.{key}" for key, on in filters.items() if on), f"{table}.temperature")
        try:
            check_sampling(sampling)
        except ValueError as error:
            raise UserError(str(error), where=where, mend="take engine.name = 'native'") from None
    if not recipe.engine.url:
        require()
    elif recipe.async_.samplers > 1:
        what = "one sampler drives a server, whose weights would else be replaced while another draws"
        raise UserError(what, where="async.samplers", mend="set it to 1; a server may run several replicas")


def check_server(recipe: Recipe, policy: Policy) -> None:
    """UserError where the vLLM server that the recipe names is not there, or cannot give what it needs."""
    if not recipe.engine.url:
        return
    try:
        server, _, raw = connect(recipe.engine, min(policy.context, recipe.engine.cache_tokens))
        check_model(server, skeleton(policy.config))
    except RunError as error:
        raise UserError(str(error), where="engine.url") from None
    server.close()
    for table, temperature in (("sampling", recipe.sampling.temperature), ("eval", recipe.eval.temperature)):
        try:
            check_temperature(temperature, raw=raw)
        except ValueError as error:
            raise UserError(str(server.fault(str(error))), where=f"{table}.temperature") from None


def _chosen_engine(recipe: Recipe, policy: Policy, adapter: Path | None = None) -> Engine:
    """The engine that the recipe names; vLLM has no weights before the first are handed over."""
    if recipe.engine.name == "native":
        return engine_of(recipe, policy, adapter)
    return (ServerEngine if recipe.engine.url else VllmEngine)(
        skeleton(policy.config),
        dtype=policy.dtype,
        decode=lambda tokens: str(policy.tokenizer.decode(tokens)),
        stop_tokens=sorted(policy.chat.stops),
        config=recipe.engine,
        context=policy.context,
    )


def rollouts_of(resolved: Resolved, policy: Policy, engine: Engine) -> Plays:
    """The episodes of a recipe, on this engine."""
    return _rollouts(resolved.recipe, policy, engine, resolved.verifier, resolved.env)


def _rollouts(
    recipe: Recipe, policy: Policy, engine: Engine, verifier: Verifier | None, env: Env | None
) -> Plays:
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
        world = steps_of(recipe, verifier, env)
        return Trees(engine, policy.chat, world, recipe.search, recipe.sampling, **how)
    if recipe.task.agent:
        return AgentPlay(engine, policy.chat, recipe.task.agent, **how)
    return Rollouts(
        engine,
        policy.chat,
        env=env,
        episode_tokens=settings.episode_tokens,
        episode_s=settings.episode_s,
        exact=ahead.max_lag <= 1 or ahead.pace == "steps",
        waits=ahead.max_lag > 0 and ahead.pace == "steps",
        **how,
    )


def steps_of(recipe: Recipe, verifier: Verifier | None, env: Env | None) -> Steps:
    """Where moves lead: turns of an environment, tactics of a prover, otherwise steps of an answer."""
    search, settings = recipe.search or SearchChoice(), recipe.rollout
    if env:
        return EnvSteps(
            env,
            partial(_ends, recipe.eval.right),
            workers=settings.workers,
            deadline_s=settings.deadline_s,
            memory_mb=settings.memory_mb,
        )
    if isinstance(verifier, Coq):
        return CoqSteps(
            level=verifier.level,
            timeout_s=search.timeout_s,
            memory_mb=verifier.memory_mb,
            sketches=search.asks_sketches,
        )
    if isinstance(verifier, Lean):
        return LeanSteps(lean=verifier)
    return ReasoningSteps(search.separator)


def _ends(right: float, verdict: Verdict) -> bool:
    return told_right(verdict.label, verdict.score, right)


def _worker(recipe: Recipe, rollouts: Plays) -> RolloutWorker:
    ahead = recipe.async_
    return RolloutWorker(rollouts, swap=ahead.swap, cache=ahead.cache, in_order=ahead.max_lag <= 1)


@dataclass(frozen=True)
class Made:
    """Makes a worker from a recipe, wherever it is called."""

    recipe: Recipe
    threads: int
    """Of the process; 0 leaves them as they are."""
    number: int = 0

    def __call__(self) -> RolloutWorker:
        """The worker, whose engine is still to be given the run's weights."""
        if self.threads:
            process.configure(self.threads)
        recipe = on_device_of(self.recipe, self.number)
        policy = bounded(recipe, surroundings(recipe, silent), silent)
        engine = _chosen_engine(recipe, policy)
        verifier, env = recipe.judges()
        return _worker(recipe, _rollouts(recipe, policy, engine, verifier, env))


def on_device_of(recipe: Recipe, number: int) -> Recipe:
    """The recipe as the sampler of this number reads it: with the device that it computes on."""
    if not recipe.async_.devices:
        return recipe
    device = recipe.async_.devices[number % len(recipe.async_.devices)]
    return replace(recipe, model=replace(recipe.model, device=device))


def store_of(recipe: Recipe, size: int, ranks: Ranks = ALONE) -> Store | None:
    """Where samplers find each version of the weights, of so many bytes; None: it is the learner's own."""
    ahead = recipe.async_
    if ahead.where != "ray":
        return Arenas() if ahead.publishes else None
    needs = {} if ranks.rank else sampler_needs(ahead, torch.get_num_threads())
    cluster = Cluster(ahead.address, needs, VERSIONS * size + SPARE)
    return Nowhere(cluster.close) if ranks.rank else ObjectStore(cluster)


def sampler_needs(ahead: Asynchrony, threads: int) -> dict[str, float]:
    """What all samplers together ask of a Ray cluster, where the learner has so many threads."""
    each = {"async.cpus": ahead.cpus or ahead.threads_of(threads), "async.gpus": ahead.gpus}
    return {key: ahead.samplers * count for key, count in each.items()}


def sampler_of(
    resolved: Resolved,
    policy: Policy,
    logs: Path,
    schedule: Recorder | RecordedSchedule | None = None,
    ranks: Ranks = ALONE,
) -> Sampler:
    """The samplers of a recipe, wherever it puts them; or ones that do again what others did.

    logs: where processes leave what they print. schedule: where what they do is written down, or read.
    Of samplers on Ray all are rank 0's.
    """
    recipe, ahead = resolved.recipe, resolved.recipe.async_
    if isinstance(schedule, RecordedSchedule):
        workers = [Made(recipe, 0, n)() for n in range(ahead.samplers)]
        return ReplaySampler(workers, schedule.logs, ahead.threads_of(torch.get_num_threads()))
    if ahead.where == "here":
        there = replace(policy, device=usable_device(ahead.devices[0])) if ahead.devices else policy
        rollouts = rollouts_of(resolved, policy, _chosen_engine(recipe, there))
        steps = ahead.steps_per_update if ahead.pace == "steps" else 0
        return LocalSampler(_worker(recipe, rollouts), steps=steps)
    threads = ahead.threads_of(torch.get_num_threads())
    start: Callable[[int], Channel] = partial(_thread, recipe)
    if ahead.where == "process":
        start = partial(_process, Made(recipe, threads), logs)
    if ahead.where == "ray":
        keeps = ranks.size > 1 and recipe.train.data == "references"
        start = partial(_actor, Made(recipe, threads), logs, ahead.cpus or threads, keeps)
    return SamplerPool(
        start,
        0 if ahead.where == "ray" and ranks.rank else ahead.samplers,
        deadline_s=ahead.deadline_s,
        max_restarts=ahead.max_restarts,
        did=schedule.did if schedule else None,
    )


def _thread(recipe: Recipe, number: int) -> Channel:
    return ThreadChannel(Made(recipe, 0, number))


def _process(made: Made, logs: Path, number: int) -> Channel:
    return ProcessChannel(replace(made, number=number), logs / f"{number}.log")


def _actor(made: Made, logs: Path, cpus: float, keeps: bool, number: int) -> Channel:
    made, log = replace(made, number=number), logs / f"{number}.log"
    return RayChannel(made, log, cpus=cpus, gpus=made.recipe.async_.gpus, keeps=keeps)
