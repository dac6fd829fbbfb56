"""Search for settings with which a run that is too large for its device would fit."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, product
from math import gcd
from typing import Any

from posttrain.learner import moments
from posttrain.plan.memory import SHARE, Shape, estimate

LORA, NF4, EIGHT_BITS = "lora.rank = 32", 'model.quantize = "nf4"', 'optim.name = "adamw_8bit"'
SERVER = "engine.url to a vLLM server on other GPUs (with engine.name = 'vllm')"


def smaller_settings(
    shape: Shape, *, free: int, ranks: int, longest: int, tokens: int, device: str, needs: Mapping[str, Any]
) -> str:
    """Return the fewest settings with which a run of this microbatch fits, or an empty string.

    needs: those arguments of `estimate` that do not depend on the microbatch. The settings leave 1 - SHARE
    of the free memory if any do.
    """
    cached = max(longest, needs.get("sampler_tokens", 0) // 4)
    adapter = replace(shape, trained=shape.parameters // 100, matrices=0, moment_bytes=0)
    shares = needs["shares"] if needs["shares"] > 1 else ranks
    shard = "" if needs["shares"] > 1 else "train.shard = true and "
    full = shape.trained == shape.parameters and not needs["natural"] and not needs["perturbed"]
    choices: list[tuple[str, dict[str, Any]]] = []
    if needs.get("copied"):
        choices.append(("checkpoint.async_save = false", {"copied": 0}))
    if ranks > 1 and full and not needs["resharded"]:
        resharded = {"shares": shares, "resharded": True}
        choices.append((f"{shard}train.reshard_after_forward = true", resharded))
    experts = gcd(ranks, shape.expert_count) if shape.expert_count else 1
    if experts > needs.get("experts", 1) and (full or needs["shares"] > 1):
        choices.append((f"{shard}train.experts = {experts}", {"shares": shares, "experts": experts}))
    if not needs["checkpointing"] and not needs["natural"] and not needs["perturbed"]:
        choices.append(("steps.gradient_checkpointing = true", {"checkpointing": True}))
    if needs.get("samplers") and needs.get("sampler_tokens", 0) > cached:
        choices.append((f"engine.cache_tokens = {cached}", {"sampler_tokens": cached}))
    if full and not shape.matrices and not shape.moment_bytes:
        choices.append((EIGHT_BITS, {}))
    if full:
        choices.append((LORA, {}))
    if not shape.packed and not needs["natural"] and needs["shares"] == 1:
        choices.append((NF4, {}))
    sets = [group for n in range(1, len(choices) + 1) for group in combinations(choices, n)]
    tries = list(product((SHARE, 1.0), sets))
    if needs.get("samplers") and device != "cpu":
        server = (SERVER, {"samplers": 0})
        tries += product((SHARE, 1.0), [(*group, server) for group in ((), *sets)])
    for share, group in tries:
        other = dict(needs)
        for _, changes in group:
            other |= changes
        names = [setting for setting, _ in group]
        smaller = adapter if LORA in names else shape
        if EIGHT_BITS in names:
            smaller = replace(
                smaller,
                moment_bytes=moments.stored_bytes((smaller.trained // moments.BLOCK, moments.BLOCK)),
            )
        if NF4 in names:
            if smaller.trained == smaller.parameters:
                continue
            smaller = replace(smaller, packed=True)
        memory = estimate(smaller, microbatch_tokens=tokens, device=device, **other)
        if memory.total <= share * free:
            return " and ".join(dict.fromkeys(" and ".join(names).split(" and ")))  # train.shard once
    return ""
