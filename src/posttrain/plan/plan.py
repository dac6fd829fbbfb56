"""Plan a run: check its recipe, and estimate the memory and disk that it needs.

Keys and files are checked before a tokenizer is read, and the tokenizer before weights.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.base import libraries
from posttrain.engines.vllm.connection import ServedConfig, check_temperature, connect
from posttrain.engines.vllm.routed import check_routed
from posttrain.engines.vllm.start import require as require_vllm
from posttrain.errors import counted
from posttrain.learner import lora
from posttrain.learner.context import check_context
from posttrain.learner.experts import check_experts
from posttrain.learner.ranks import environment_number, launched
from posttrain.methods.build import described
from posttrain.methods.table import label
from posttrain.models import heads, pretrained
from posttrain.models.experts import expert_layers, router_choices
from posttrain.models.loading import usable_device
from posttrain.plan.companions import (
    compared_size,
    critic_shape,
    head_class,
    lends_weights,
    optimizer_sizes,
    references_size,
)
from posttrain.plan.dataset_rows import Group, build_mixed_groups
from posttrain.plan.disk import Disk, estimate_disk
from posttrain.plan.memory import (
    SHARE,
    Memory,
    Shape,
    check_host,
    check_rows_fit,
    estimate,
    free_memory,
    gib,
    local_ranks,
    microbatch,
    samplers_on,
)
from posttrain.plan.model_info import ModelInfo, Say, read_model_info, with_companion_models
from posttrain.plan.prompts import check_evaluation, check_prompts, check_replies
from posttrain.plan.resolve import Resolved, resolve_given, resolve_recipe
from posttrain.plan.smaller import smaller_settings
from posttrain.plan.teacher_server import TeacherServer
from posttrain.process import machine
from posttrain.recipe.recipe import Recipe
from posttrain.run.track import check_sinks
from posttrain.types import RunError, UserError


@dataclass(frozen=True)
class Plan:
    """A checked run, and the resources that it needs."""

    resolved: Resolved
    policy: ModelInfo
    groups: Sequence[Group]
    """Training rows of an offline method, in groups: one row, or the answers to one question. Of an online
    method the given answers (`rollout.given_answers`)."""
    held_out_groups: Sequence[Group]
    longest_prompt: int
    microbatch_tokens: int
    memory: Memory
    free: int
    parameters: int
    trained: int
    disk: Disk
    ranks: int = 1
    published: int = 0
    """Bytes of weights for samplers in the machine's memory, of a run on a GPU."""
    smaller: str = ""
    """Settings with which the run would need less memory; for a run that does not fit, or hardly on a GPU."""
    copied: int = 0
    """Bytes of a checkpoint that is copied to the machine's memory, of a run on a GPU."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Numbers of training and held-out groups of each source, as far as there are `groups`."""

    def check_memory(self) -> None:
        """Raise UserError if the run does not fit on its GPU, unless the recipe sets its microbatch.

        Of a CPU free memory is not a bound: the kernel swaps, and gives back what it caches.
        """
        excess, recipe = self.memory.total > self.free, self.resolved.recipe
        if not excess or recipe.steps.microbatch_tokens or self.policy.device.type == "cpu":
            return
        largest = sorted(self.memory.parts.items(), key=lambda part: -part[1])[:3]
        parts = ", ".join(f"{name} {gib(size)}" for name, size in largest)
        problem = (
            f"a microbatch of {self.microbatch_tokens} tokens takes {gib(self.memory.total)} ({parts} ...), "
            f"and {gib(self.free)} of {self.policy.device} are free"
        )
        fix = (
            f"set {self.smaller}" if self.smaller else "take a smaller model, or more ranks with train.shard"
        )
        raise UserError("steps.microbatch_tokens", problem, f"{fix}; or set it, to try all the same")

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return tables for a person, for plan.json and the report."""
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
        if recipe.model.is_quantized:
            model["quantised"] = f"{recipe.model.quantize}, the linear layers under the adapter"
        ranks = _described_ranks(self.resolved, self.ranks)
        host = {"published weights": self.published, "copy of a checkpoint": self.copied}
        host_rows = {f"{name}, in the machine's memory": gib(size) for name, size in host.items() if size}
        return {
            "Method": method | described(self.resolved.method),
            "Model": model,
            "Batch plan": self._batches(),
            **({"Each of the ranks": ranks} if ranks else {}),
            "Memory estimate": self.memory.rows() | {"free now": gib(self.free)} | host_rows,
            "Disk": self.disk.rows(),
        }

    def _batches(self) -> dict[str, Any]:
        resolved, recipe = self.resolved, self.resolved.recipe
        updates, epochs, cuts = recipe.run.updates, recipe.steps.epochs, recipe.steps.minibatches
        warmup = recipe.critic.warmup
        if resolved.online:
            r, several = recipe.rollout, recipe.async_.samplers > 1
            greedy = f", and {r.groups} greedy" if getattr(resolved.method, "asks_greedy", False) else ""
            count_given = len(self.groups)
            count = f"{r.groups} tasks × {r.group_size} = {r.groups * r.group_size}{greedy}"
            out = {
                "episodes an update": count,
                "tasks": f"{len(resolved.train):,} to train on, {len(resolved.held_out):,} held out",
                **(
                    {"given answers": f"{r.given_answers} an update of {count_given:,}"}
                    if count_given
                    else {}
                ),
                **({"sources": _described_sources(resolved)} if resolved.sources else {}),
                "longest prompt": f"{self.longest_prompt} tokens, {recipe.sampling.max_new_tokens} new ones",
                "samplers": recipe.async_.described(recipe.run.threads or machine.cores()),
                "sampled side by side": f"{recipe.engine.rows} each" if several else recipe.engine.rows,
            }
        else:
            out = {
                f"{resolved.line.learns} an update": recipe.batch.batch_size,
                resolved.line.learns: f"{len(self.groups):,} to train on, "
                f"{len(self.held_out_groups):,} held out",
                **({"sources": _described_sources(resolved)} if resolved.sources else {}),
                "longest": f"{self.longest_prompt} tokens",
                "passes over them": f"{updates * recipe.batch.batch_size / len(self.groups):.3g}",
            }
        if resolved.line.step != "trust_region":
            by = {"muon": ", Muon for matrices", "adamw_8bit": ", moments in 8 bits"}.get(
                recipe.optim.name, ""
            )
            out["learning rate"] = f"{recipe.optim.lr:g}, {recipe.optim.schedule}{by}"
        if warmup:
            out["warm-up"] = f"the critic alone in the first {counted(warmup, 'update')}"
        out["optimiser steps"] = (
            f"{counted(updates, 'update')} × {counted(epochs, 'epoch')} × "
            f"{counted(cuts, 'minibatch', 'minibatches')} = {updates * epochs * cuts}"
        )
        if resolved.line.has_loss:
            out["microbatch"] = f"at most {self.microbatch_tokens} packed tokens"
        return out


def plan_run(
    recipe: Recipe,
    say: Say,
    path: Path = Path("runs"),
    checked: Path | None = None,
    *,
    ranks: int = 1,
    begins: bool = False,
) -> Plan:
    """Decide all that can be decided before weights are read: what `posttrain validate` checks and prints.

    path: where the run will write. checked: a file that records which prompts are valid, so that a later run
    does not check them again. ranks: number of learner ranks; the memory is that of one. begins: a run
    follows, which wakes servers and puts them to sleep.
    """
    check_sinks(recipe.track.sinks)
    resolved = resolve_recipe(recipe, say, ranks=ranks)
    _check_machine(resolved)
    policy = with_companion_models(recipe, read_model_info(recipe, say), say)
    model = pretrained.skeleton(policy.config)
    shape = _shape(resolved, policy, model, ranks)
    groups: Sequence[Group] = []
    held_out: Sequence[Group] = []
    sizes: list[tuple[int, int]] = []
    longest_given = 0
    if resolved.online:
        if len(resolved.train) > 50_000:  # a few hundred thousand take minutes
            say(f"looking at {len(resolved.train):,} prompts")
        resolved, longest = check_prompts(resolved, policy, say, checked)
        check_replies(resolved, policy)
        if recipe.rollout.given_answers:
            groups, _, longest_given, sizes = build_mixed_groups(resolve_given(recipe, say), policy, say)
    else:
        groups, held_out, longest, sizes = build_mixed_groups(resolved, policy, say)
        if head_class(policy.config, resolved) is not None:
            heads.saved_head(policy.path)
    if resolved.online or resolved.evaluated:
        _check_vllm(recipe, policy, model, say, begins=begins)
    resolved = _with_updates(resolved, len(groups))
    resolved, longest_asked = check_evaluation(resolved, policy, say)
    if recipe.reference.url:
        new = recipe.sampling.max_new_tokens if resolved.online else 0
        several = any(part.env or part.recipe.source.agent for part in resolved.parts)
        row = policy.context if several else max(longest + new, longest_given)
        teacher_server(recipe, policy).check(policy.chat.spell, row)
    needs = _needs(resolved, policy, longest, shape, ranks)
    if resolved.evaluated:
        new = max(part.recipe.sampling.max_new_tokens for part in resolved.asked)
        needs["sampler_tokens"] = recipe.engine.cached_tokens(max(longest, longest_asked) + new)
        needs.setdefault("samplers", 1)
    needs["longest"] = max(needs["longest"], longest_given)
    disk = estimate_disk(resolved, policy, groups, path, shape, critic=needs["critic"], longest=longest)
    needs["copied"] = disk.copied(ranks if recipe.train.shard else 1) if recipe.checkpoint.async_save else 0
    free = free_memory(policy.device)
    memory_here = free_memory(torch.device("cpu"))
    published = copied = 0
    if policy.device.type != "cpu":
        published = _versions(recipe) * shape.parameters * policy.dtype.itemsize if resolved.online else 0
        offloaded = _offloaded(shape, policy, needs["shares"]) if needs["offloaded"] else 0
        # Ranks without shares leave the copy to rank 0.
        copied = needs.pop("copied") * (local_ranks() if recipe.train.shard else 1)
        check_host(published, offloaded, memory_here * local_ranks(), copied=copied)
    if resolved.online:
        r, length = recipe.rollout, max(longest + recipe.sampling.max_new_tokens, longest_given)
        where = "rollout.group_size" if r.group_size > r.groups else "rollout.groups"
        more = _route_bytes(recipe, model)
        check_rows_fit(r.groups * r.group_size + r.given_answers, length, memory_here, where=where, more=more)
    else:
        check_rows_fit(recipe.batch.batch_size, longest, memory_here, where="batch.batch_size")
    tokens = recipe.steps.microbatch_tokens or microbatch(
        shape, free=free, device=policy.device.type, **needs
    )
    if resolved.method.unit == "group":  # a group is never split
        answers = recipe.rollout.group_size * recipe.sampling.max_new_tokens if resolved.online else 0
        tokens = max(tokens, longest + answers)
    memory = estimate(shape, microbatch_tokens=tokens, device=policy.device.type, **needs)
    smaller = ""
    if memory.total > (1.0 if policy.device.type == "cpu" else SHARE) * free:
        options = {"free": free, "ranks": ranks, "longest": needs["longest"], "tokens": tokens}
        smaller = smaller_settings(shape, **options, device=policy.device.type, needs=needs)
    return Plan(
        resolved,
        policy,
        groups,
        held_out,
        longest,
        tokens,
        memory,
        free,
        shape.parameters,
        shape.trained,
        disk,
        ranks,
        published,
        smaller,
        copied,
        tuple(sizes),
    )


def teacher_server(recipe: Recipe, policy: ModelInfo) -> TeacherServer:
    """Return the server of the recipe's teacher."""
    return TeacherServer(recipe.reference, policy.config.get_text_config().vocab_size)


def _described_sources(resolved: Resolved) -> str:
    """Return the share of each source of a mixture."""
    total = sum(source.weight for source in resolved.recipe.task)
    return ", ".join(f"{source.name} {source.weight / total:.0%}" for source in resolved.recipe.task)


def _with_updates(resolved: Resolved, records: int) -> Resolved:
    """Return the recipe with run.updates in place of run.epochs. records: those of an offline method.

    Raises UserError if the critic's warm-up would last to the end.
    """
    recipe, run = resolved.recipe, resolved.recipe.run
    if run.epochs:
        count, size = len(resolved.train) if resolved.online else records, recipe.batch.batch_size
        updates = math.ceil(run.epochs * count / (recipe.rollout.groups if resolved.online else size))
        run = replace(run, updates=updates, epochs=0.0)
        resolved = replace(resolved, recipe=replace(recipe, run=run))
    if recipe.critic.warmup >= run.updates:
        problem = f"the critic alone learns in {recipe.critic.warmup} updates, and the run has {run.updates}"
        raise UserError("critic.warmup", problem, "lower it, or train for longer")
    return resolved


def _check_machine(resolved: Resolved) -> None:
    """Raise UserError for a library or a device that the recipe needs and this machine does not have."""
    recipe = resolved.recipe
    if recipe.train.ranks:
        libraries.require("ray", "train.ranks")
    if recipe.engine.name == "vllm" and not recipe.engine.url and (resolved.online or resolved.evaluated):
        require_vllm()
    if not resolved.online:
        return
    if recipe.async_.where == "ray":
        libraries.require("ray", "async.place")
    for device in recipe.async_.devices:
        usable_device(device, "async.devices")
    if recipe.search and recipe.search.value_model:
        recipe.search.value_model.require()


def _needs(resolved: Resolved, policy: ModelInfo, longest: int, shape: Shape, ranks: int) -> dict[str, Any]:
    """Return those arguments of `estimate` that do not depend on the microbatch."""
    recipe = resolved.recipe
    needs: dict[str, Any] = {
        "dtype": policy.dtype,
        "checkpointing": recipe.steps.gradient_checkpointing,
        "reference": references_size(resolved, policy, shape.parameters),
        "reference_follows": bool(recipe.reference.refresh_every),
        "critic": critic_shape(resolved, policy, shape.context),
        "natural": resolved.line.step == "trust_region",
        "perturbed": resolved.line.step == "evolution",
        "longest": longest,
        "shares": max(1, ranks // recipe.train.replicas) if recipe.train.shard else 1,
        "experts": recipe.train.experts,
        "resharded": recipe.train.reshard_after_forward,
        "offloaded": recipe.train.cpu_offload and policy.device.type != "cpu",
        "read_whole": recipe.model.random_init or recipe.lora.dora,
        "sleeps": recipe.engine.sleep,
        "lends": lends_weights(resolved, policy.device),
    }
    if resolved.online:
        several = any(part.env or part.recipe.source.agent for part in resolved.parts)
        needs |= {
            "sampler_tokens": recipe.engine.cached_tokens(longest + recipe.sampling.max_new_tokens),
            "samplers": samplers_on(policy.device, recipe.async_),
            "sampler_rows": recipe.engine.rows if recipe.engine.name == "native" else 0,
            # They are in host memory, never on a GPU; the ranks of a machine share them.
            "published": _versions(recipe) / local_ranks() if policy.device.type == "cpu" else 0,
            "longest": min(policy.context, recipe.engine.cache_tokens)
            if several
            else longest + recipe.sampling.max_new_tokens,
        }
    return needs


def _versions(recipe: Recipe) -> int:
    """Return how many versions of the weights wait for samplers, in the memory of each machine.

    Ray's store has three, and a fourth is laid out before it is copied there.
    """
    if recipe.async_.where == "ray":
        return 4
    return 2 if recipe.async_.publishes else 0


def _offloaded(shape: Shape, policy: ModelInfo, shares: int) -> int:
    """Return the bytes of offloaded shares in a machine's memory.

    Masters, gradients and moments in float32; under an adapter, which is not sharded, frozen weights.
    """
    moments = shape.moment_bytes or 8 * shape.trained
    frozen = policy.dtype.itemsize * (shape.parameters - shape.trained)
    sharded = frozen or 8 * shape.trained + moments
    return sharded * local_ranks() // shares


def _shape(resolved: Resolved, policy: ModelInfo, model: Any, ranks: int) -> Shape:
    """Return the sizes of the policy; raise UserError if a setting needs heads or experts that it lacks.

    model: the policy without numbers.
    """
    recipe = resolved.recipe
    check_context(recipe.train.context, ranks, [policy.config])
    check_experts(recipe.train.experts, ranks, model)
    if recipe.rollout.router_replay and not router_choices(model):
        problem = f"{policy.config.model_type} has no routers whose choices can be replayed"
        raise UserError("rollout.router_replay", problem, "leave it out")
    trained = _adapter_size(policy, recipe) if recipe.lora.rank else None
    optimizer = optimizer_sizes(policy.config, recipe.optim, recipe.lora)
    return Shape.of(
        model,
        trained,
        **optimizer,
        packed=recipe.model.is_quantized,
        context=recipe.train.context if ranks > 1 else 1,
        compared=compared_size(resolved, policy),
    )


def _route_bytes(recipe: Recipe, model: Any) -> int:
    """Return the bytes of the experts of a token, int16 in an episode and in a batch; 0 if none are noted."""
    if not recipe.rollout.router_replay:
        return 0
    return 2 * 2 * len(expert_layers(model)) * router_choices(model)


def _adapter_size(policy: ModelInfo, recipe: Recipe) -> int:
    try:
        return lora.parameters(policy.config, recipe.lora)
    except ValueError as error:
        raise UserError(
            "lora.targets" if recipe.lora.targets else "lora",
            f"no adapter can be made: {str(error).splitlines()[0]}",
        ) from None


def _check_vllm(recipe: Recipe, policy: ModelInfo, model: Any, say: Say, *, begins: bool) -> None:
    """Raise UserError if vLLM cannot sleep here, or a server cannot be reached or lacks something.

    A rank checks the servers of its own samplers alone, of which it may have none: others may be loading
    weights.
    """
    if recipe.engine.name != "vllm":
        return
    if not recipe.engine.url:
        if recipe.engine.sleep and policy.device.type == "cpu":
            raise UserError(
                "engine.sleep", "vLLM frees the memory of a GPU, and runs on the CPU", "leave it out"
            )
        return
    numbers = range(len(recipe.engine.urls))
    if launched():
        numbers = recipe.samplers_of(environment_number("RANK"))
    for number in numbers:
        server = recipe.engine.of_sampler(number)
        _check_server(recipe, server, model, min(policy.context, server.cache_tokens), begins=begins)
    if recipe.engine.sleep and not begins:
        say("engine.sleep: the GPU memory of servers counts as used here; a run puts them to sleep first")


def _check_server(recipe: Recipe, engine: ServedConfig, model: Any, context: int, *, begins: bool) -> None:
    try:
        server, _, raw = connect(engine, model, context, draws=begins)
        with closing(server):
            if recipe.rollout.router_replay:
                check_routed(server)
    except RunError as error:
        raise UserError("engine.url", str(error)) from None
    if raw is None:
        return
    for table, temperature in (("sampling", recipe.sampling.temperature), ("eval", recipe.eval.temperature)):
        try:
            check_temperature(temperature, raw=raw)
        except ValueError as error:
            raise UserError(f"{table}.temperature", str(server.fault(str(error)))) from None


def _described_ranks(resolved: Resolved, ranks: int) -> dict[str, Any]:
    """Return lines for a person on what each of several ranks does; empty for one rank."""
    if ranks == 1:
        return {}
    recipe = resolved.recipe
    train, online = recipe.train, resolved.online
    count, kind = (
        (recipe.rollout.groups, "tasks") if online else (recipe.batch.batch_size, resolved.line.learns)
    )
    least, more = divmod(count, ranks)
    holds = "a copy of the weights, masters and moments"
    if train.shard:
        weights = "gathered layer by layer" if train.reshard_after_forward else "gathered for each step"
        holds = f"1/{ranks // train.replicas} of masters and moments, weights {weights}"
    if train.experts > 1:
        holds += f", of experts 1/{train.experts}"
    return {
        "ranks": ranks,
        "holds": holds,
        f"{kind} an update": f"{least} or {least + 1}" if more else least,
        **({"answers": "drawn by rank 0, for all"} if online and recipe.is_central else {}),
        **({"computes": f"1/{train.context} of the tokens of a microbatch"} if train.context > 1 else {}),
        "trains on": "rows dealt by length" if train.balance or train.context > 1 else "its own rows",
        "waits for others": f"at most {train.deadline_s:g} s",
    }
