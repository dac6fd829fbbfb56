"""What test_ranks.py compares, run by torchrun on every rank: python -m torch.distributed.run ... OUT.json

Each case is computed by one learner over all rows, and by a learner on each rank over its own: how far
gradients, weights, metrics and log-probabilities lie apart is written down by rank 0.
"""

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from posttrain.learner.critic import CriticModel
from posttrain.learner.learner import Learner, Steps
from posttrain.learner.lora import Lora
from posttrain.learner.optim import Optim
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.ranks import ALONE, Parallel, Ranks
from posttrain.learner.reference import Reference
from posttrain.learner.shards import whole
from posttrain.learner.trust_region import Trust
from posttrain.types import Batch


def beside(name: str) -> ModuleType:
    """Another file of this folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


common, splits = beside("conftest"), beside("test_learner_splits")
ROUNDED = {
    "recomputing": 1e-6,
    "experts that recompute": 1e-6,
    "bfloat16": 0.03,
    "experts in bfloat16": 0.03,
    "moments in 8 bits": 2e-5,
    "experts in 8 bits": 2e-5,
}
ROUNDED |= {"experts of qwen3_5_moe_text": 1e-6, "experts of qwen3_next": 1e-4}
"""How far the cases may be off that do not compute in float64 throughout."""
MODES = {
    "alike": Parallel(),
    "alike, as they came": Parallel(balance=False),
    "shards": Parallel(shard=True, balance=False),
    "shards given up": Parallel(shard=True, reshard_after_forward=True),
    "shares kept apart": Parallel(shard=True, cpu_offload=True),
    "one context": Parallel(context=2),
    "one context of shards": Parallel(shard=True, context=2, balance=False),
    "two contexts": Parallel(context=2),
    "two contexts of shards": Parallel(shard=True, context=2),
    "experts": Parallel(shard=True, experts=2, balance=False),
    "experts given up": Parallel(shard=True, experts=2, reshard_after_forward=True),
    "experts of a context": Parallel(shard=True, experts=2, context=2),
    "experts kept apart": Parallel(shard=True, experts=2, cpu_offload=True),
    "experts of three": Parallel(shard=True, experts=3),
    "experts of replicas": Parallel(shard=True, experts=2, replicas=2),
    "replicas": Parallel(shard=True, replicas=2, balance=False),
    "replicas given up": Parallel(shard=True, replicas=2, reshard_after_forward=True),
}
Case = tuple[str, dict[str, Any], dict[str, Any]]
"""Method, the model's shape, what the learner is given."""
WAYS: dict[str, Case] = {
    "tied embeddings": ("grpo", {"tie_word_embeddings": True}, {}),
    "an adapter": ("grpo", {}, {"lora": Lora(rank=2, init="gaussian")}),
    "an adapter with magnitudes": ("grpo", {}, {"lora": Lora(rank=2, dora=True)}),
    "recomputing": ("grpo", {}, {"steps": {"gradient_checkpointing": True}}),
    "bfloat16": ("grpo", {}, {"dtype": torch.bfloat16}),
    "several steps": ("grpo", {}, {"steps": {"epochs": 2, "minibatches": 2}}),
    "several steps of a critic": ("ppo", {}, {"steps": {"epochs": 2, "minibatches": 2, "target_kl": 0.05}}),
    "tokens drawn by chance": ("grpo, clip_cov", {}, {"steps": {"epochs": 2, "minibatches": 2}}),
    "a reference that follows": ("grpo", {}, {"refresh": Reference(refresh_every=1, keep=0.5), "kl": 0.2}),
    "a teacher who is told more": ("gkd", {}, {"told": True}),
    "the likeliest tokens of a teacher": ("gkd", {}, {"served": 4, "refresh": Reference(top_k=4)}),
    "a teacher by task": ("gkd", {}, {"teachers": 2}),
    "a critic that warms up": ("ppo", {}, {"critic_warmup": 1}),
    "a critic of its own that warms up": ("ppo", {}, {"own": True, "critic_warmup": 1}),
    "parts of the reward": ("gdpo", {}, {"steps": {"minibatches": 2}}),
    "muon": ("grpo", {}, {"optim": Optim(name="muon", lr=1e-2, weight_decay=0.1)}),
    "moments in 8 bits": (
        "grpo",
        {"hidden_size": 64},
        {"optim": Optim(name="adamw_8bit", lr=1e-2), "dtype": torch.float32},
    ),
    "a trust region": ("trpo", {}, {"trust": Trust(max_kl=0.01, fisher_every=2)}),
    "a trust region with a critic": ("trpo_gae", {}, {"trust": Trust(max_kl=0.01, fisher_every=2)}),
}
MOE: dict[str, Case] = {
    "experts": ("grpo", {}, {"family": "qwen3_moe", "kl": 0.2}),
    "experts in every layer": ("grpo", {}, {"family": "mixtral"}),
    "experts with biases": ("sft", {}, {"family": "gpt_oss"}),
    "experts of pairs": ("dpo", {}, {"family": "qwen3_moe"}),
    "experts of a critic": ("ppo", {}, {"family": "qwen3_moe", "own": True}),
    "experts without a token": ("grpo", {}, {"family": "qwen3_moe", "idle": True}),
    "experts of a teacher": ("gkd", {}, {"family": "mixtral"}),
    "experts next to an adapter": (
        "grpo",
        {},
        {"family": "mixtral", "lora": Lora(rank=2, targets=("q_proj",))},
    ),
    "experts that are replayed": ("grpo", {}, {"family": "mixtral", "routed": True, "kl": 0.2}),
    "experts that recompute": (
        "grpo",
        {},
        {"family": "qwen3_moe", "steps": {"gradient_checkpointing": True}},
    ),
    "experts in bfloat16": ("grpo", {}, {"family": "qwen3_moe", "dtype": torch.bfloat16}),
    "experts in 8 bits": (
        "grpo",
        {"hidden_size": 64, "moe_intermediate_size": 64},
        {"family": "qwen3_moe", "optim": Optim(name="adamw_8bit", lr=1e-2), "dtype": torch.float32},
    ),
    "experts by muon": ("grpo", {}, {"family": "mixtral", "optim": Optim(name="muon", lr=1e-2)}),
}
"""Models of experts, in modes of their own."""


def build_learner(case: Case, ranks: Ranks, parallel: Parallel) -> Learner:
    """A tiny learner in float64."""
    variant, shape, given = case[0], case[1], dict(case[2])
    for columns in ("told", "served", "routed"):
        given.pop(columns, None)
    options = {"kl_in_loss": given.pop("kl")} if "kl" in given else {}
    name, own_options = splits.VARIANTS[variant]
    method = splits.build(name, {**own_options, **options}, horizon=16)
    dtype = given.pop("dtype", torch.float64)
    family = given.pop("family", "")
    make = partial(common.make_moe, family) if family else common.make_llama
    policy = make(0, **shape).to(dtype)
    if architecture := given.pop("architecture", ""):
        architectures = beside("test_all_architectures")
        policy = architectures.build(architecture, architectures.PROVEN[architecture])
    if given.pop("idle", False):  # equal scores: every token takes the same two
        nn.init.zeros_(policy.model.layers[1].mlp.gate.weight)
    if family and dtype != torch.float64:
        policy.set_experts_implementation("grouped_mm")
    critic = splits.build_critic(policy, method)
    if "teachers" in given:
        given["teachers"] = [common.make_llama(2, hidden_size=24).to(dtype) for _ in range(given["teachers"])]
    if given.pop("own", False):
        critic = CriticModel(policy, make(2).double())
        with torch.no_grad():
            critic.head.weight.copy_(torch.linspace(-1, 1, critic.head.weight.numel()).view(1, -1))
    return Learner(
        policy,
        method,
        reference=make(1).to(dtype),
        critic=critic,
        optim=given.pop("optim", Optim(lr=1e-2)),
        critic_optim=Optim(lr=1e-2),
        temperature=0.9,
        steps=Steps(microbatch_tokens=40, **given.pop("steps", {})),
        ranks=ranks,
        parallel=parallel,
        **given,
    )


def moved(learner: Learner, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, float]], Any]:
    """(the first step's gradient, the weights after two updates, metrics, the first update)."""
    gradients: list[torch.Tensor] = []
    parts = [learner.policy, *([learner.values] if learner.values else [])]
    masters = [m for part in parts for m in part.masters.masters]
    clips = [part.clip for part in parts]

    def held(clip: Any) -> Any:
        def run() -> float:
            norm: float = clip()
            if len(gradients) < len(parts):
                own = [m for part in parts if part.clip is run for m in part.masters.masters]
                grads = [m.zeros() if m.grad is None else m.grad for m in own]
                gradients.append(torch.cat([whole(g).flatten() for g in grads]))
            return norm

        return run

    for part, clip in zip(parts, clips, strict=True):
        part.clip = held(clip)  # type: ignore[method-assign]
    updates = [learner.update(batch)]
    in_bytes = learner.policy.config.name == "adamw_8bit"
    if in_bytes or learner.parallel.experts > 1:  # as from the checkpoint of any number of ranks
        state = {
            file: {k: whole(x).clone() for k, x in held.items()} for file, held in learner.tensors().items()
        }
        assert not in_bytes or any(x.dtype == torch.uint8 for x in state["optimizer"].values())
        learner.restore(state, learner.state())
    updates.append(learner.update(batch))
    weights = torch.cat([whole(m.numbers()).flatten() for m in masters])
    gradient = torch.cat(gradients) if gradients else weights[:1]
    return gradient, weights, [u.metrics for u in updates], updates[0]


def share_of(batch: Batch, ranks: Ranks) -> torch.Tensor:
    """Rows of this rank: two thirds of the groups on rank 0, the others on rank 1, none on any other."""
    groups = torch.unique(batch.group).tolist()
    mine = groups[: 2 * len(groups) // 3] if ranks.rank == 0 else groups[2 * len(groups) // 3 :]
    here = torch.isin(batch.group, torch.tensor(mine if ranks.rank < 2 else []))
    return here.nonzero().flatten()


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative distance."""
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def rows_of_all(case: Case) -> Batch:
    """What is learnt from; two rows of group 7, rank 0's, are one episode. Some rows lack a part.

    A teacher who is told more has prompts that are longer than the rows, and none for two of them. Of three
    teachers by task the last has no row.
    """
    batch: Batch = splits.with_probes(common.make_batch(K=4, seed=3, groups=4))
    number = torch.arange(len(batch))
    number[3] = 1
    if "told" in case[2]:
        g = torch.Generator().manual_seed(1)
        prompts = torch.randint(common.VOCABULARY, (len(batch), 30), generator=g)
        lengths = torch.randint(1, 31, (len(batch),), generator=g)
        lengths[[0, 5]] = 0
        batch = replace(batch, teacher_prompt=prompts, teacher_prompt_length=lengths)
    if "served" in case[2]:
        chances = torch.rand(
            *batch.tokens.shape, common.VOCABULARY, generator=torch.Generator().manual_seed(2)
        )
        logp, tokens = chances.double().log_softmax(-1).topk(case[2]["served"])
        batch = replace(batch, teacher_top=tokens, teacher_logp=logp)
    if "routed" in case[2]:
        batch = replace(batch, routes=common.make_routes(batch, layers=2))
    if "teachers" in case[2]:
        batch = replace(batch, teacher=torch.unique(batch.group, return_inverse=True)[1] % 2)
    return replace(batch, episode=number, parts=splits.parts_of(batch))


def rows_of(batch: Batch, rows: torch.Tensor) -> Batch:
    """A rank's share of them, which says nothing of episodes if each row is one."""
    mine = batch.rows(rows)
    assert mine.episode is not None
    return mine if len(mine.episode.unique()) < len(mine) else replace(mine, episode=None)


def alone(case: Case, ranks: Ranks) -> Any:
    """What one process finds, as rank 0 tells the others."""
    told = None
    if not ranks.rank:
        *all_but, update = moved(build_learner(case, ALONE, Parallel()), rows_of_all(case))
        told = (*all_but, update.logp)
    told = ranks.gather(told)[0]
    assert told is not None
    return told


def compared(case: Case, mode: str, ranks: Ranks, told: Any) -> dict[str, float]:
    """How far the ranks are from the one process that told this."""
    batch = rows_of_all(case)
    gradient, weights, metrics, said = told
    rows = share_of(batch, ranks)
    mine = moved(build_learner(case, ranks, MODES[mode]), rows_of(batch, rows))
    seen = [{k: v for k, v in each.items() if k != "ranks/imbalance"} for each in mine[2]]
    lacking = [set(a) ^ set(b) for a, b in zip(seen, metrics, strict=True)]
    assert not any(lacking), lacking
    gaps = [
        abs(a[key] - b[key]) / max(1e-9, abs(b[key]))
        for a, b in zip(seen, metrics, strict=True)
        for key in b
        if not math.isnan(a[key] + b[key]) or math.isnan(a[key]) != math.isnan(b[key])
    ]
    logp = float((mine[3].logp - said[rows]).abs().max()) if len(rows) else 0.0
    return {
        "gradient": apart(mine[0], gradient),
        "weights": apart(mine[1], weights),
        "metrics": largest(gaps),
        "logp": logp,
        "norm": float(gradient.norm()),
    }


def largest(values: list[float]) -> float:
    """The largest; infinite where one is NaN, which Python's max may pass over."""
    return max(math.inf if math.isnan(x) else x for x in values)


TWO = ("shards", "one context", "shards given up", "one context of shards", "shares kept apart")
FOUR = ("two contexts", "replicas", "two contexts of shards", "replicas given up")
EXPERTS = {
    2: ("experts", "experts given up", "experts of a context", "experts kept apart"),
    3: ("experts of three",),
    4: ("experts", "experts given up", "experts of replicas", "experts of a context"),
}
BY_RANKS = {2: TWO, 3: ("alike", "alike, as they came"), 4: FOUR}
"""Modes by the number of ranks."""


def cases(ranks: int, every: int) -> Iterator[tuple[str, Case, str]]:
    """Yield (name, case, mode) of what this number of ranks computes: of the methods each `every`-th.

    Of every method, each way is computed in all modes, and each method in two; else in one, in turn. With 0
    these are models of experts alone.
    """
    modes = BY_RANKS[ranks]
    if every != 1:
        yield from cases_of_experts(ranks, every)
    if not every:
        return
    for number, variant in enumerate(list(splits.VARIANTS)[::every]):
        for mode in modes[:2] if every == 1 else modes[number % len(modes) :][:1]:
            yield variant, (variant, {}, {}), mode
    for number, (name, case) in enumerate(WAYS.items()):
        for mode in modes if every == 1 else modes[number % len(modes) :][:1]:
            if not ("trust" in case[2] and (MODES[mode].shard or MODES[mode].context > 1)):
                yield name, case, mode


def cases_of_experts(ranks: int, every: int) -> Iterator[tuple[str, Case, str]]:
    """Yield each `every`-th case of MOE in a mode in turn; with 0 and two ranks all in all, and families."""
    modes = EXPERTS[ranks]
    for number, (name, case) in enumerate(list(MOE.items())[:: every or 1]):
        for mode in modes if (ranks, every) == (2, 0) else modes[number % len(modes) :][:1]:
            yield name, case, mode
    for name in beside("test_all_architectures").STACKED.split() if (ranks, every) == (2, 0) else ():
        yield f"experts of {name}", ("sft", {}, {"architecture": name}), "experts given up"


def main() -> None:
    found: dict[str, dict[str, float]] = {}
    told: dict[str, Any] = {}
    with join_ranks(Parallel(deadline_s=60)) as ranks:
        for name, case, mode in cases(ranks.size, int(sys.argv[2])):
            # The backward pass computes again outside of what keeps everything in float64.
            with common.Float64() if name not in ROUNDED else nullcontext():
                if name not in told:
                    told = {name: alone(case, ranks)}  # once for all modes
                each = compared(case, mode, ranks, told[name])
            worst = {key: largest([one[key] for one in ranks.gather(each)]) for key in each}
            found[f"{name} / {mode}"] = worst
        if ranks.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
