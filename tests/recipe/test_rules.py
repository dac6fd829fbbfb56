"""Each rule against a recipe that breaks it, and a mended recipe that breaks none."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest

import posttrain
from posttrain.base.table_reader import Where, keys_at, parse
from posttrain.errors import UnreadKeyError, UserError
from posttrain.methods.table import line
from posttrain.plan.resolve import build_context, resolve_recipe
from posttrain.process.interpreter import AWAY_ENV
from posttrain.recipe.config import from_tables
from posttrain.recipe.document import put
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.rule import Context, Rule
from posttrain.recipe.rules import RULES

Tables = dict[str, Any]
Keys = dict[str, Any]
"""Values by dotted key; None removes a key."""
Case = tuple[str, str, Keys, Keys]
"""Key of the error, regex of its problem; keys that break a valid recipe, and keys that mend it."""


def compared(prompts: list[str], completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]


class Endless:
    """An environment without max_turns."""

    def start(self, task: object) -> None: ...
    def reply(self, state: object, response: str) -> None: ...


def cases_of(values: Keys, problem: str, mends: Keys, among: Keys | None = None) -> list[Case]:
    """Return a case for each key; `among` are further keys of the broken recipe."""
    return [(key, problem, {**(among or {}), key: value}, mends) for key, value in values.items()]


def mixed(*tables: Keys, named: bool = False) -> Keys:
    """Return a mixture of sums with these keys; named: with names."""
    sums = {"arithmetic": {"low": 2, "high": 9}}
    return {"task": [{**sums, **({"name": f"s{n}"} if named else {}), **t} for n, t in enumerate(tables)]}


ASKED = {"eval": {"task": [{"name": "sums", "arithmetic": {"low": 2, "high": 9}}]}}
DATA = {"task.arithmetic": None, "task.data.path": "x.jsonl"}
TEXT = {"task.arithmetic": None, "task.text.path": "x.txt"}
GUESS = {"task.arithmetic": None, "task.guess": {}, "verifier": None}
ENV = {**DATA, "task.env.factory": f"{__file__}:Endless", "verifier": None}
AGENT = {**DATA, "task.agent.function": "x.py:play"}
GRPO, PPO, KLQ = {"method.name": "grpo"}, {"method.name": "ppo"}, {"method.name": "klq"}
TRPO = {"method.name": "trpo", "optim": None}
TOLD = {"method.name": "gkd", "reference.hint": "x"}
PP = {"method.name": "reinforce_pp"}
TAUGHT = {"method.name": "gkd", "reference.path": "x"}
ES = {"method.name": "es"}
TWO_MODELS = {"train.shard": True, "train.replicas": 2, "rollout.groups": 4}
GROUPED = {"verifier": None, "verifier.function.function": f"{__file__}:compared"}
HELD = {**GRPO, "method.kl_in_loss": 0.1}
PENALISED = {"method.kl_in_reward": 0.1, "method.overlong_buffer": 2, "reference": {}}
RESCALED = {"method.running_scale": 0.9, "method.reward_weight": 0.5}
SHAPED = {
    "verifier.length": {"shape": "linear", "most": 9},
    "verifier.normalise": {"std": 2.0},
    "verifier.clip": [0, 1],
}
COMPARED = {"function": {"function": f"{__file__}:compared"}}
PAID_CALLS = {**DATA, "task.tools": {"builtin": ["calculator"], "call_reward": 0.1}}
CORRECTED = {"method.correction": "token_truncated"}
AHEAD = {**CORRECTED, "async.max_lag": 1}
SERVED = {"engine.name": "vllm", "engine.url": "http://127.0.0.1:1"}
SERVERS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]
DPO = {**DATA, "method.name": "dpo"}
REWARD = {**DATA, "method.name": "reward"}
EXPERT = {"method.name": "expert_iteration", "rollout.group_size": 1}
COQ = {"verifier": None, "verifier.coq": {}}
VLLM = {"engine.name": "vllm"}
RANKS = "ranks"
"""Not a key of a recipe: how many ranks train."""

ONLINE: list[Case] = [
    # [model], [method], [task]
    (
        "model.dtype",
        "trpo multiplies with .* noise in bfloat16",
        {**TRPO, "model.dtype": "bfloat16"},
        {"model.dtype": "float32"},
    ),
    (
        "method.overlong_buffer",
        "how long an episode may be",
        {**ENV, "method.overlong_buffer": 2},
        {"method.overlong_buffer": None},
    ),
    ("method.turn_weight", "gigpo compares the turns", {"method.name": "gigpo"}, GUESS),
    (
        "method.turn_weight",
        "rloo compares the turns",
        {"method.name": "rloo", "method.turn_weight": 1.0},
        {"method.turn_weight": 0.0},
    ),
    (
        "method.turn_weight",
        "dr_grpo compares the turns",
        {**GUESS, "method.name": "dr_grpo", "method.turn_weight": 0.5, "search": {}},
        {"search": None},
    ),
    *[
        (
            "method.credit",
            f"gdpo credits each verifier's score by itself, and the reward depends also on {named}",
            {"method.name": "gdpo", "verifier.format": {}, **keys},
            mends,
        )
        for named, keys, mends in (
            (
                "method.kl_in_reward, method.overlong_buffer",
                PENALISED,
                {"method": {"name": "gdpo"}, "reference": None},
            ),
            ("method.running_scale, method.reward_weight", RESCALED, {"verifier.weights": {"format": 0.0}}),
            ("verifier.combine", {"verifier.combine": "product"}, {"verifier.format": None}),
            ("verifier.length, verifier.normalise, verifier.clip", SHAPED, {"method.credit": "centred"}),
            ("task.tools.call_reward", PAID_CALLS, {"task.tools.call_reward": 0.0}),
            ("search", {"search": {}}, {"search": None}),
        )
    ],
    *[
        (
            "method.credit",
            f"and {named} gives none",
            {"method.name": "remax", **keys},
            {"method.name": "rloo"},
        )
        for named, keys in (
            ("an agent", AGENT),
            ("a search", {**COQ, "search": {"learn": "moves"}}),
            ("a verifier of groups", {"verifier": COMPARED}),
        )
    ],
    ("task.text", "grpo answers tasks", TEXT, {"task.text": None, "task.data.path": "x.jsonl"}),
    ("task.games", "none is played", {"task.games.train": 3}, GUESS),
    # [[task]]
    ("task", "needs a name of its own", mixed({}, {"name": "a"}), mixed({"name": "b"}, {"name": "a"})),
    (
        "task",
        "nothing is left to train on",
        mixed({"weight": 0.0}, {"weight": 0.0}, named=True),
        mixed({"weight": 0.0}, {"weight": 1.0}, named=True),
    ),
    (
        "task",
        "no source is left",
        mixed({"epochs": 1.0}, {"epochs": 2.0}, named=True),
        mixed({"epochs": 1.0}, {}, named=True),
    ),
    (
        "task.agent",
        "an agent plays all tasks",
        {**mixed({"agent": {"function": "x.py:play"}}, {}, named=True)},
        mixed({}, {}, named=True),
    ),
    ("eval.task", "a name of its own", {"eval": {"task": mixed({}, {})["task"]}}, ASKED),
    ("search", "one kind of moves", {**ASKED, **COQ, "search": {}}, {"search": None}),
    ("task.agent", "an agent plays all tasks", {**ASKED, **AGENT}, {"eval": None}),
    ("eval.temperature", "greedy answers", {"eval.samples": 2}, {"eval.temperature": 0.6}),
    ("search", "one kind of moves", {**mixed({}, {}, named=True), "search": {}}, {"search": None}),
    (
        "rollout.group_size",
        "is shown a whole group",
        {
            "verifier": {
                "judge": {
                    "rubric": "listwise",
                    "most_responses": 2,
                    "endpoint": {"base_url": "http://127.0.0.1:1/v1", "model": "m"},
                }
            }
        },
        {"verifier.judge.most_responses": 8},
    ),
    (
        "eval.samples",
        "is shown all 9 answers",
        {
            "eval.samples": 9,
            "eval.temperature": 1.0,
            "verifier.number": None,
            "verifier.judge.rubric": "listwise",
            "verifier.judge.most_responses": 8,
            "verifier.judge.endpoint": {"base_url": "http://127.0.0.1:1/v1", "model": "m"},
        },
        {"verifier.judge.most_responses": 9},
    ),
    # [run], [lora]
    ("run.updates", "run.epochs is set", {"run.updates": 3, "run.epochs": 1.0}, {"run.updates": None}),
    ("run.stop_when", "updates are counted", {"run.stop_when": "update > 3"}, {"run.stop_when": None}),
    (
        "run.stop_when",
        "eval/accuracy is measured only",
        {"run.stop_when": "eval/accuracy > 0.5"},
        {"eval.every": 1},
    ),
    ("run.patience", "eval.every or eval.limit is 0", {"run.patience": 2}, {"eval.every": 1}),
    *cases_of(
        {
            "lora.alpha": 8.0,
            "lora.targets": ["x"],
            "lora.rslora": True,
            "lora.dora": True,
            "lora.init": "gaussian",
        },
        "lora.rank is 0",
        {"lora.rank": 2},
    ),
    ("model.quantize", "there is no adapter", {"model.quantize": "nf4"}, {"lora.rank": 2}),
    (
        "model.quantize",
        "not cut among ranks",
        {RANKS: 2, "model.quantize": "nf4", "lora.rank": 2, "train.shard": True},
        {"train.shard": False},
    ),
    # [verifier], [sampling], [engine]
    (
        "verifier",
        "no verifier or environment is configured",
        {"verifier": None},
        {"verifier.number": {}},
    ),
    (
        "verifier",
        "the environment gives the rewards",
        {**GUESS, "verifier": {"number": {}}},
        {"verifier": None},
    ),
    (
        "sampling.temperature",
        "nothing to learn from",
        {"sampling.temperature": 0},
        {"sampling.temperature": 1},
    ),
    *cases_of({"engine.folder": "x", "engine.deadline_s": 3.0}, "engine.url is empty", SERVED),
    ("engine.sleep", "frees nothing between updates", {"engine.sleep": True}, SERVED),
    ("engine.sleep", "that sleeps cannot", {**SERVED, **AHEAD, "engine.sleep": True}, {"async": None}),
    (
        "engine.sleep",
        "share none with the learner",
        {**SERVED, "async.place": "ray", "engine.sleep": True},
        {"engine.sleep": False},
    ),
    ("engine.cuda_graphs", "names a server", {**SERVED, "engine.cuda_graphs": False}, {"engine.url": None}),
    # [rollout]
    *[
        (
            "rollout.group_size",
            f"{name} compares .* a group of {size} has none",
            {"method.name": name, "rollout.group_size": size, **options},
            {"rollout.group_size": size + 1},
        )
        for name, size, options in (
            *((name, 1, {}) for name in ("grpo", "rloo", "dr_grpo", "dapo", "gspo", "cispo")),
            ("pass_at_k", 2, {}),
            ("pass_at_k", 4, {"method.k": 4}),
        )
    ],
    (
        "rollout.select",
        "never varies",
        {"method.name": "reinforce", "rollout.group_size": 1, "rollout.select": "varied"},
        {"rollout.select": "all"},
    ),
    ("rollout.replay", "grpo takes every token", {"rollout.replay": 2}, CORRECTED),
    ("rollout.replay", "klq takes every token", {**KLQ, "rollout.replay": 2}, {"rollout.replay": None}),
    (
        "rollout.replay",
        "a replay keeps one",
        {**AGENT, **CORRECTED, "rollout.replay": 2},
        {"rollout.replay": None},
    ),
    (
        "rollout.replay_lag",
        "rollout.replay is 0",
        {**CORRECTED, "rollout.replay_lag": 2},
        {"rollout.replay": 2},
    ),
    ("rollout.max_rounds", "drops no group", {"rollout.max_rounds": 2}, {"rollout.select": "varied"}),
    # [async]
    ("async.max_lag", "grpo takes every token", {"async.max_lag": 1}, CORRECTED),
    ("async.pace", "when an agent asks", {**AGENT, **AHEAD, "async.pace": "steps"}, {"async.pace": None}),
    *cases_of(
        {"async.window": 2, "async.swap": "between", "async.pace": "clock"}, "async.max_lag is 0", AHEAD
    ),
    *cases_of({"async.steps_per_update": 3}, "async.pace is 'clock'", {"async.pace": "steps"}, AHEAD),
    *cases_of({"async.cache": "recompute"}, "async.swap is 'between'", {"async.swap": "within"}, AHEAD),
    *cases_of(
        {"async.threads": 1, "async.deadline_s": 3.0, "async.max_restarts": 1},
        "the sampler is in the loop's own thread",
        {"async.place": "process"},
    ),
    *cases_of(
        {"async.threads": 1}, "those of the run", {"async.place": "process"}, {"async.place": "thread"}
    ),
    *cases_of(
        {"async.address": "auto", "async.cpus": 1.0, "async.gpus": 1.0}, "not 'ray'", {"async.place": "ray"}
    ),
    # [curriculum], [search]
    *[
        (
            f"curriculum.{key}",
            f"curriculum.kind is '{other}'",
            {"curriculum.kind": other, f"curriculum.{key}": value},
            {"curriculum.kind": kind},
        )
        for key, value, kind, other in (
            ("field", "level", "order", "none"),
            ("field", "level", "bandit", "band"),
            ("low", 0.2, "band", "none"),
            ("high", 0.9, "band", "order"),
            ("keep", 0.1, "band", "bandit"),
            ("explore", 0.1, "band", "order"),
            ("explore", 0.1, "bandit", "none"),
            ("sweep", False, "band", "bandit"),
            ("buckets", 3, "bandit", "band"),
            ("share", 0.01, "bandit", "order"),
        )
    ],
    *[
        (
            f"search.{key}",
            problem,
            {**EXPERT, **COQ, **{f"search.{k}": v for k, v in {key: value, **among}.items()}},
            {f"search.{k}": v for k, v in mends.items()},
        )
        for key, value, problem, among, mends in (
            ("alpha", 0.1, "search.strategy is 'puct'", {"strategy": "puct"}, {"strategy": "beam"}),
            ("alpha", 0.1, "values guide", {"value_model": {"paths": ["x"]}}, {"value_model": None}),
            ("keep", 3, "search.strategy is 'best_first'", {}, {"strategy": "beam"}),
            ("c", 2.0, "search.strategy is 'beam'", {"strategy": "beam"}, {"strategy": "puct"}),
            ("c", 2.0, "search.strategy is 'hypertree'", {"strategy": "hypertree"}, {"values": True}),
            ("sketches", 2, "search.strategy is 'best_first'", {}, {"strategy": "hypertree"}),
            (
                "sketch_tokens",
                9,
                "search.strategy is 'best_first'",
                {},
                {"strategy": "hypertree", "sketches": 2},
            ),
            ("sketch_tokens", 9, "search.sketches is 0", {"strategy": "hypertree"}, {"sketches": 2}),
            ("nested", 3, "search.strategy is 'best_first'", {}, {"strategy": "hypertree", "sketches": 2}),
            ("nested", 3, "search.sketches is 0", {"strategy": "hypertree"}, {"sketches": 2}),
        )
    ],
    ("search", "compares answers to one task", {"search": {}}, EXPERT),
    (
        "search",
        "a verifier that judges one answer",
        {
            **EXPERT,
            "search": {},
            "verifier": None,
            "verifier.function.function": f"{__file__}:compared",
        },
        {"verifier": None, "verifier.number": {}},
    ),
    (
        "sampling",
        "which a filter changes",
        {**EXPERT, "search": {}, "sampling.top_k": 5},
        {"search.strategy": "beam"},
    ),
    (
        "rollout.router_replay",
        "from servers alone",
        {**VLLM, "rollout.router_replay": True},
        {"engine.name": None},
    ),
    (
        "sampling.stop",
        "texts end answers here",
        {**VLLM, "engine.url": "http://x", "rollout.router_replay": True, "sampling.stop": ["x"]},
        {"sampling.stop": None},
    ),
    (
        "rollout.router_replay",
        "notes no experts",
        {**EXPERT, "search": {}, "rollout.router_replay": True},
        {"rollout.router_replay": False},
    ),
    (
        "search.learn",
        "grpo makes none",
        {**COQ, "search.strategy": "puct", "search.learn": "visits"},
        {"method.name": "reinforce"},
    ),
    (
        "method.correction",
        "shares of visits are targets",
        {
            **COQ,
            **CORRECTED,
            "method.name": "reinforce",
            "search.strategy": "puct",
            "search.learn": "visits",
        },
        {"method.correction": None},
    ),
    (
        "search.strategy",
        "a hypertree takes goals",
        {**EXPERT, "search.strategy": "hypertree"},
        COQ,
    ),
    (
        "search.sketches",
        "only Coq's proofs",
        {
            **EXPERT,
            "verifier": None,
            "verifier.lean": {},
            "search.strategy": "hypertree",
            "search.sketches": 2,
        },
        {"search.sketches": None},
    ),
    (
        "search.value_model",
        "these moves are neither",
        {**EXPERT, **GUESS, "search.value_model.paths": ["x"]},
        {"search.value_model": None},
    ),
    (
        "search.value_model",
        "only guide puct and hypertree",
        {**EXPERT, **COQ, "search.value_model.paths": ["x"]},
        {"search.strategy": "hypertree"},
    ),
    *[
        (
            f"search.{key}",
            "judged at its end alone",
            {**EXPERT, "search.strategy": "puct", f"search.{key}": value},
            COQ,
        )
        for key, value in (("values", True), ("learn", "moves"))
    ],
    (
        "async.pace",
        "when a tree is judged",
        {"method.name": "reinforce", **AHEAD, "search": {}, "async.pace": "steps"},
        {"search": None},
    ),
    ("task.agent", "a search asks no agent", {**AGENT, **EXPERT, "search": {}}, {"search": None}),
    (
        "task.tools",
        "a search calls no tools",
        {**EXPERT, "search": {}, "task.tools": {"builtin": ["calculator"]}},
        {"search": None},
    ),
    # the engine vllm
    *[
        (f"sampling.{key}", "before the filters", {**VLLM, f"sampling.{key}": value}, {"engine.name": None})
        for key, value in (("top_k", 1), ("top_p", 0.5), ("min_p", 0.1))
    ],
    (
        "sampling.temperature",
        "no temperature below",
        {**VLLM, "sampling.temperature": 0.001},
        {"engine": None},
    ),
    (
        "eval.temperature",
        "no temperature below",
        {**VLLM, "eval.limit": 5, "eval.temperature": 0.001},
        {"eval.temperature": 0.0},
    ),
    (
        "async.cache",
        "under new weights",
        {**VLLM, **AHEAD, "async.swap": "within", "async.cache": "keep"},
        {"async.cache": None},
    ),
    ("model.dtype", "in float64", {**VLLM, "model.dtype": "float64"}, {"model.dtype": "float32"}),
    ("async.place", "settings of the whole process", {**VLLM, "async.place": "thread"}, SERVED),
    ("async.samplers", "and engine.url names 1", {**SERVED, "async.samplers": 2}, {"engine.url": SERVERS}),
    ("async.samplers", "and engine.url names 2", {**SERVED, "engine.url": SERVERS}, {"async.samplers": 2}),
    *[
        (key, "not on cuda:1", {**VLLM, key: value}, {"async.place": "process"})
        for key, value in (("async.devices", ["cuda:1"]), ("model.device", "cuda:1"))
    ],
    # several ranks
    ("async.place", "whichever rank it is", {**VLLM, RANKS: 2}, {"async.place": "process"}),
    *[
        ("engine.url", "3 samplers have 2", {**SERVED, "engine.url": SERVERS, RANKS: 3}, mends)
        for mends in ({"engine.url": SERVERS[:1]}, {"async.samplers": 2}, {RANKS: 2})
    ],
    (
        "engine.url",
        "4 samplers have 1",
        {**SERVED, "async.samplers": 2, RANKS: 2},
        {"engine.url": SERVERS, "async.place": "ray", "async.address": "x"},
    ),
    ("model.device", "would compute on cuda:1", {RANKS: 2, "model.device": "cuda:1"}, {RANKS: 1}),
    ("async.devices", "would sample on cuda:0", {RANKS: 2, "async.devices": ["cuda:0"]}, {RANKS: 1}),
    ("rollout.replay", "drawn from those of all", {**CORRECTED, RANKS: 2, "rollout.replay": 2}, {RANKS: 1}),
    ("rollout.groups", "4 ranks have 3 an update", {RANKS: 4}, {"rollout.groups": 4}),
    (
        "async.window",
        "let different groups pass",
        {**AHEAD, RANKS: 2, "async.window": 2},
        {"async.window": 1},
    ),
    (
        "curriculum.kind",
        "at different times",
        {**AHEAD, RANKS: 2, "curriculum.kind": "band"},
        {"async.max_lag": 0},
    ),
    ("async.address", "a cluster that all ranks", {RANKS: 2, "async.place": "ray"}, {"async.address": "x"}),
    ("train.ranks", "3 ranks are asked for", {RANKS: 2, "train.ranks": 3}, {"train.ranks": 2}),
    ("train.shard", "the Fisher matrix", {**TRPO, "train.shard": True}, {"train.shard": False}),
    ("train.context", "compute together", {**TRPO, "train.context": 2}, {"train.context": 1}),
    ("train.replicas", "cannot hold 2", {RANKS: 2, **TWO_MODELS}, {"train.replicas": 1}),
    ("train.replicas", "cannot hold 2", {RANKS: 3, **TWO_MODELS}, {RANKS: 4}),
    # evolution
    ("steps", "es, which makes one step", {**ES, "steps.epochs": 2}, {"steps": None}),
    *cases_of(
        {
            "optim.name": "muon",
            "optim.betas": [0.9, 0.9],
            "optim.eps": 1e-6,
            "optim.weight_decay": 0.1,
            "optim.max_grad_norm": 2,
        },
        "a plain step",
        GRPO,
        ES,
    ),
    ("rollout.router_replay", "passes no rows", {**ES, "rollout.router_replay": True}, GRPO),
    ("method.name", "one rank plays", {**ES, RANKS: 2}, {RANKS: 1}),
    ("verifier", "judged alone", {**ES, **GROUPED}, GRPO),
    ("search", "a search draws moves", {**ES, "search": {}}, {"search": None}),
    ("rollout.group_size", "come in pairs", {**ES, "rollout.group_size": 5}, {"method.noise": "independent"}),
    (
        "rollout.group_size",
        "none to compare",
        {**ES, "method.noise": "independent", "rollout.group_size": 1},
        {"rollout.group_size": 3},
    ),
    ("rollout.replay", "its own update", {**ES, "rollout.replay": 1}, {"rollout.replay": 0}),
    ("async.max_lag", "population of this update", {**ES, "async.max_lag": 1}, {"async.max_lag": 0}),
    ("sampling.temperature", "always takes its likeliest", {"sampling.temperature": 0}, ES),
    # [batch], [steps]
    ("batch", "\\[batch\\] is never read: grpo runs in the online loop", {"batch": {}}, {"batch": None}),
    ("steps.minibatches", "4 minibatches .* 3 groups", {"steps.minibatches": 4}, {"rollout.groups": 4}),
    (
        "steps.gradient_checkpointing",
        "trpo differentiates its gradients again",
        {**TRPO, "steps.gradient_checkpointing": True},
        {"steps": None},
    ),
    ("steps.compile", "trpo differentiates", {**TRPO, "steps.compile": True}, {"steps": None}),
    ("steps.epochs", "one step starts there", {"method.name": "ppo_penalty"}, {"steps.epochs": 2}),
    (
        "steps.target_kl",
        "klq does not measure",
        {**KLQ, "steps.epochs": 2, "steps.target_kl": 0.1},
        {"steps": None},
    ),
    ("steps.target_kl", "an update is a single step", {"steps.target_kl": 0.1}, {"steps.epochs": 2}),
    # [critic], [reference], [trust], [optim]
    ("critic", "\\[critic\\] is never read by grpo", {"critic": {}}, PPO),
    ("critic", "\\[critic\\] is never read by trpo", {"method.name": "trpo", "critic.lr": 0.1}, PPO),
    ("reference", "\\[reference\\] is never read by grpo", {"reference": {}}, HELD),
    (
        "reference.path",
        "distill learns from a teacher alone",
        {"method.name": "distill", "verifier": None},
        {"reference.path": "x"},
    ),
    *[
        (
            "reference.hint",
            "policy's own prompts",
            {**HELD, "reference.hint": "x", **keys},
            {"method": {"name": "gkd"}},
        )
        for keys in ({}, {"method.kl": "exact"})
    ],
    ("reference.hint", "conversations", {**GUESS, **TOLD}, {"reference.hint": None, "reference.path": "x"}),
    *[
        ("reference.url", problem, {**keys, "reference.url": "http://x", "reference.top_k": 4}, mends)
        for problem, keys, mends in (
            ("stays as it is", {**TAUGHT, "reference.refresh_every": 2}, {"reference.refresh_every": None}),
            ("passes without rows", {**TAUGHT, RANKS: 2, "train.shard": True}, {"train": None}),
            ("draws at 0.7", {**TAUGHT, "sampling.temperature": 0.7}, {"sampling.temperature": 1.0}),
        )
    ],
    (
        "reference.url",
        "reinforce_pp needs the reference itself",
        {**PP, "reference.url": "http://x"},
        {"method": {"name": "gkd"}, "reference.top_k": 4},
    ),
    (
        "reference.url",
        "not the whole vocabulary",
        {"method.name": "gkd", "reference.url": "http://x"},
        {"reference.top_k": 20},
    ),
    (
        "reference.top_k",
        "compares no whole distributions",
        {**PP, "reference.top_k": 4},
        {"method": {"name": "gkd"}, "reference.path": "x"},
    ),
    *cases_of(
        {"reference.api_key_env": "KEY", "reference.deadline_s": 9},
        "reference.url is empty",
        {"reference.url": "http://x", "reference.top_k": 4},
        TAUGHT,
    ),
    (
        "batch.batch_size",
        "given_answers is its number",
        {**TAUGHT, "rollout.given_answers": 2, "batch.max_length": 64, "batch.batch_size": 4},
        {"batch.batch_size": None},
    ),
    (
        "task.reference_path",
        "grpo compares with no reference",
        {"task.reference_path": "x"},
        {"task.reference_path": None},
    ),
    (
        "reference.refresh_every",
        "stay as they are",
        {"method.name": "gkd", "task.reference_path": "x", "reference.refresh_every": 1},
        {"reference": None},
    ),
    *[
        ("rollout.given_answers", problem, {**keys, "rollout.given_answers": 2}, {"rollout": None})
        for problem, keys in (
            ("for one of the policy's", GRPO),
            ("given ones have none", TOLD),
            ("in no data", {**GUESS, **TAUGHT}),
        )
    ],
    ("reference.hint", "are not stored", {**TOLD, "rollout.replay": 2}, {"rollout.replay": None}),
    (
        "method.kl",
        "measures its own KL",
        {**TRPO, "method.kl": "exact", "method.kl_in_loss": 0.1},
        {"method.kl": None},
    ),
    (
        "reference.refresh_every",
        "cannot follow",
        {**HELD, "reference.refresh_every": 2, "lora.rank": 2},
        {"lora": None},
    ),
    ("reference.keep", "refresh_every is 0", {**HELD, "reference.keep": 0.9}, {"reference.refresh_every": 2}),
    (
        "method.observation_weight",
        "a single turn",
        {**GRPO, "method.observation_weight": 0.05},
        {"task.tools": {"builtin": ["calculator"]}},
    ),
    ("trust", "\\[trust\\] is never read by ppo", {**PPO, "trust.max_kl": 0.01}, TRPO),
    ("optim", "\\[optim\\] is never read by trpo", {"method.name": "trpo"}, {"optim": None}),
    ("optim.momentum", "name is not muon", {"optim.momentum": 0.9}, {"optim.name": "muon"}),
    (
        "optim.min_lr_ratio",
        "schedule is 'constant'",
        {"optim.min_lr_ratio": 0.1},
        {"optim.schedule": "linear"},
    ),
    # [eval], [checkpoint], [record], [track]
    *cases_of(
        {"eval.every": 3, "eval.temperature": 0.5, "eval.right": 0.5},
        "limit is 0",
        {"eval.limit": 5},
        {"eval.limit": 0},
    ),
    (
        "checkpoint.keep_weights",
        "keep is 0",
        {"checkpoint.keep": 0, "checkpoint.keep_weights": 1},
        {"checkpoint.keep": 1},
    ),
    ("record.trees", "there is no", {**EXPERT, "record.trees": 3}, {"search": {}}),
    *cases_of({"track.project": "x", "track.name": "x"}, "track.sinks is empty", {"track.sinks": ["wandb"]}),
]

OFFLINE: list[Case] = [
    (
        "reference.hint",
        "nothing judges them",
        {"method.name": "kd", "reference.path": "x", "reference.hint": "x"},
        {"reference.hint": None},
    ),
    (
        "reference.path",
        "never read: every source",
        {"method.name": "kd", "reference.path": "x", "task.reference_path": "y"},
        {"reference.path": None},
    ),
    (
        "task.reference_path",
        "is asked once, before training",
        {**DPO, "task.reference_path": "x"},
        {"task.reference_path": None, "reference.path": "x"},
    ),
    ("eval.task", "scores answers and writes none", {**REWARD, **ASKED}, {"eval": None}),
    *[
        (f"rollout.{key}", "trains on its data", {**ASKED, f"rollout.{key}": value}, {f"rollout.{key}": None})
        for key, value in (
            ("groups", 2),
            ("group_size", 2),
            ("select", "varied"),
            ("replay", 2),
            ("given_answers", 2),
        )
    ],
    (
        "rollout.mask_truncated",
        "trains on its data",
        {**ASKED, "rollout.mask_truncated": True},
        {"rollout": None},
    ),
    (
        "rollout.router_replay",
        "trains on its data",
        {**ASKED, "rollout.router_replay": True},
        {"rollout": None},
    ),
    ("rollout.max_rounds", "trains on its data", {**ASKED, "rollout.max_rounds": 2}, {"rollout": None}),
    ("rollout.replay_lag", "trains on its data", {**ASKED, "rollout.replay_lag": 2}, {"rollout": None}),
    (
        "task.text",
        "text has no end",
        {
            "task": [{"name": name, "text": {"path": "x.txt"}} for name in "ab"],
            "method": {"name": "pretrain"},
        },
        mixed({}, {}, named=True) | {"method": {"name": "sft"}},
    ),
    *cases_of({"task.max_new_tokens": 3, "task.stop": ["x"]}, "no answers are sampled", mixed({})),
    *[
        (table, "is never read: sft runs in the offline loop", {table: {}}, {table: None})
        for table in ("verifier", "sampling", "engine", "rollout", "async", "curriculum", "search", "record")
    ],
    (
        "task",
        "plays no games",
        {"task.arithmetic": None, "task.guess": {}},
        {"task.guess": None, "task.data.path": "x"},
    ),
    ("task", "pretrain learns from text, and there is no text", {"method.name": "pretrain"}, TEXT),
    (
        "task",
        "reward learns from rankings, and not from plain text",
        {**TEXT, "method.name": "reward"},
        {"method.name": "pretrain"},
    ),
    ("task", "dpo learns from rankings, and these tasks have none", {"method.name": "dpo"}, DATA),
    (
        "batch.batch_size",
        "a batch of 1",
        {**DATA, "method.name": "kto", "batch.batch_size": 1},
        {"batch.batch_size": 2},
    ),
    (
        "batch.separator",
        "only methods of steps",
        {**DPO, "batch.separator": "\n"},
        {"method.name": "process_reward"},
    ),
    (
        "batch.train_on",
        "only methods that learn",
        {**DPO, "batch.train_on": "last"},
        {"method.name": "sft"},
    ),
    (
        "batch.tool_format",
        "only methods that learn",
        {**DPO, "batch.tool_format": "hermes"},
        {"method.name": "sft"},
    ),
    (
        "steps.minibatches",
        "3 minibatches .* 2 rows",
        {"steps.minibatches": 3, "batch.batch_size": 2},
        {"steps": None},
    ),
    ("critic", "\\[critic\\] is never read by dpo", {**DPO, "critic.lr": 0.1}, {"method.name": "reward"}),
    (
        "batch.batch_size",
        "3 ranks have 2 an update",
        {RANKS: 3, "batch.batch_size": 2},
        {"batch.batch_size": 3},
    ),
    ("critic.kind", "reward trains the model", {**REWARD, "critic.kind": "own"}, {"critic": None}),
    ("critic.warmup", "a reward model has no critic", {**REWARD, "critic.warmup": 1}, {"critic": None}),
    (
        "reference",
        "\\[reference\\] is never read by reward",
        {**REWARD, "reference": {}},
        {"method.name": "dpo"},
    ),
    *cases_of(
        {"eval.temperature": 0.5, "eval.right": 0.5, "eval.samples": 2},
        "samples nothing",
        {"eval": {**ASKED["eval"], "temperature": 0.5}},
    ),
]

CASES = [("online", *case) for case in ONLINE] + [("offline", *case) for case in OFFLINE]


@pytest.fixture
def bases(online: Tables, offline: Tables, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tables]:
    """Return the valid recipe of each loop, which the cases change."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(AWAY_ENV, "1")  # load the environment of this file in this process
    return {"online": online, "offline": offline}


def changed(tables: Tables, keys: Keys) -> Tables:
    """Return a copy of the tables with these keys set or removed."""
    tables = copy.deepcopy(tables)
    for key, value in keys.items():
        put(tables, key, value, key)
    return tables


def without_ranks(tables: Tables) -> tuple[Tables, int]:
    """Return the tables of a recipe, and how many ranks a case trains it with."""
    return {name: table for name, table in tables.items() if name != RANKS}, tables.get(RANKS, 1)


def first_broken(tables: Tables) -> tuple[Rule, UserError] | None:
    """Return the rule that refuses these tables, with its error."""
    tables, ranks = without_ranks(tables)
    whole = parse(Recipe, tables, Where())
    recipe = whole.take_source(0)
    first = tables["task"][0] if isinstance(tables["task"], list) else tables["task"]
    reading = Context(recipe, line(recipe.method["name"]), {**tables, "task": first}, sources=whole.task)
    if unread := next((rule for rule in RULES if rule.unread and rule.breaks(reading)), None):
        return unread, unread.error(reading)
    context = replace(build_context(recipe, ranks), sources=whole.task)
    broken = next((rule for rule in RULES if not rule.unread and rule.breaks(context)), None)
    return (broken, broken.error(context)) if broken else None


@pytest.mark.parametrize(("base", "key", "problem", "breaks", "mends"), CASES)
def test_rule_refuses_broken_recipe_and_accepts_mended_one(bases, base, key, problem, breaks, mends):
    broken = changed(bases[base], breaks)
    first = first_broken(broken)
    assert first is not None
    rule, error = first
    assert error.key == key
    assert re.search(problem, error.problem)
    assert isinstance(error, UnreadKeyError) == rule.unread
    tables, ranks = without_ranks(broken)
    if isinstance(tables["task"], list) and key.startswith("task."):
        error = error.at(key.replace("task.", "task.0."))
    with pytest.raises(type(error), match=f"^{re.escape(str(error))}$"):
        resolve_recipe(from_tables(tables).recipe, ranks=ranks)
    assert first_broken(changed(broken, mends)) is None


def test_every_rule_has_a_case(bases):
    firsts = [first_broken(changed(bases[base], breaks)) for base, _, _, breaks, _ in CASES]
    covered = [first[0] for first in firsts if first]
    assert [(rule.key, rule.condition) for rule in RULES if rule not in covered] == []


def test_every_rule_names_a_key_of_a_recipe():
    for rule in RULES:
        *table, key = rule.key.split(".")
        assert table == ["method"] or key in keys_at(Recipe, table)


def test_rules_see_the_options_of_a_method_object():
    tables = {"data": [{"prompt": "1+1=", "answer": "2"}], "reward": "number", "reference": {}}
    posttrain.Recipe("model", method=posttrain.method("grpo", kl_in_loss=0.1), **tables)
    with pytest.raises(UnreadKeyError, match=r"^reference: "):
        posttrain.Recipe("model", method=posttrain.method("grpo"), **tables)
