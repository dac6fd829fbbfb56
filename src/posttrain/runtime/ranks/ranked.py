"""What a run on several ranks can be, and what they must have alike before it begins."""

import hashlib
from typing import Any

from posttrain.base.foreign import require
from posttrain.learner.ranks import Ranks, launched
from posttrain.runtime.resolve import Resolved
from posttrain.samplers.cluster import address_of
from posttrain.types import RunError, UserError


def check_ranks(resolved: Resolved, ranks: int) -> None:
    """UserError for a recipe that so many ranks cannot train together."""
    recipe = resolved.recipe
    if recipe.train.shard and resolved.line.step == "trust_region":
        problem = "a natural step multiplies by the Fisher matrix of the whole model"
        raise UserError("train.shard", problem, "leave it out, or take another method")
    if recipe.train.ranks:
        require("ray", "train.ranks")
        if ranks not in (1, recipe.train.ranks):
            problem = f"{recipe.train.ranks} ranks are asked for, and {ranks} are there"
            raise UserError("train.ranks", problem, "leave it out under torchrun")
    if ranks == 1:
        return
    for where, name in (
        ("model.device", recipe.model.device),
        *(("async.devices", d) for d in recipe.async_.devices),
    ):
        if name.startswith("cuda:"):
            problem = f"every rank of a machine would compute on {name}"
            raise UserError(where, problem, "leave it out: each rank takes the GPU of its own number")
    count, where = recipe.rollout.groups, "rollout.groups"
    if not resolved.online:
        count, where = recipe.batch.batch_size, "batch.batch_size"
    if count < ranks:
        problem = f"{count} an update cannot be shared by {ranks} ranks, as none is taken apart"
        raise UserError(where, problem, f"set it to {ranks} or more, or start fewer ranks")
    if not resolved.online:
        return
    ahead, adapts = recipe.async_, recipe.curriculum.kind not in ("none", "order")
    for wrong, where, problem, fix in (
        (
            recipe.rollout.replay > 0,
            "rollout.replay",
            "older groups are kept by the rank that played them, and drawn from those of all",
            "set it to 0, or train with one rank",
        ),
        (
            ahead.window > 1,
            "async.window",
            "ranks would let different groups pass",
            "set it to 1",
        ),
        (
            adapts and ahead.max_lag > 0,
            "curriculum.kind",
            f"{recipe.curriculum.kind!r} depends on what is known when a task is taken, and ranks that "
            "sample ahead take it at different times",
            "set async.max_lag to 0, or take 'order' or 'none'",
        ),
        (
            ahead.where == "ray" and (launched() or not recipe.train.ranks) and not address_of(ahead.address),
            "async.address",
            "samplers on Ray need a cluster that all ranks can join",
            "set it to one's address (ray start --head), or let Ray start the ranks: train.ranks",
        ),
    ):
        if wrong:
            raise UserError(where, f"with several ranks, {problem}", fix)


def described_ranks(resolved: Resolved, ranks: int) -> dict[str, Any]:
    """What each of several ranks does, as lines for a person; empty for one."""
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
        held = "gathered layer by layer" if train.reshard_after_forward else "gathered for each step"
        holds = f"1/{ranks} of masters and moments, weights {held}"
    return {
        "ranks": ranks,
        "holds": holds,
        f"{kind} an update": f"{least} or {least + 1}" if more else least,
        "trains on": "rows dealt by length" if train.balance else "its own rows",
        "waits for others": f"at most {train.deadline_s:g} s",
    }


def agree(ranks: Ranks, config: str, code: str, data: str) -> None:
    """UserError that names the ranks whose recipe, code or data are not those of rank 0."""
    alike = "\n".join(line for line in code.splitlines() if not line.startswith("python"))  # and its kernel
    for what, text in (
        ("have a recipe", config),
        ("run code", alike),
        ("read data", data),
    ):
        try:
            ranks.agree(what, hashlib.blake2b(text.encode(), digest_size=8).hexdigest())
        except RunError as error:
            fix = "give every rank the same recipe, options, posttrain and data"
            raise UserError("torchrun", str(error), fix) from None
