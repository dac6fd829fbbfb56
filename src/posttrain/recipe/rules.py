"""The table of rules: combinations that are refused, and keys that nothing reads under the other settings.

Unread keys are refused when a recipe is read, combinations once its method, verifier and environment are
built. The error is that of the first rule that the recipe breaks. Rules that need the data or the model are
checked where those are loaded.
"""

import math
import os
from functools import partial

from posttrain.base.kinds import find_kind
from posttrain.engines.vllm.asking import LEAST_TEMPERATURE
from posttrain.errors import ADD_VERIFIER, NO_VERIFIER, Option
from posttrain.learner.ranks import launched
from posttrain.recipe.adapters import ADAPTER_RULES
from posttrain.recipe.evolution import EVOLUTION_RULES, evolves
from posttrain.recipe.rule import Context, Predicate, Rule
from posttrain.recipe.servers import SERVER_RULES
from posttrain.recipe.teachers import TEACHER_RULES

# ---------------------------------------------------------------------- templates of rules


def _table(key: str, condition: str, when: Predicate) -> Rule:
    """Return the rule for a table that some methods do not read."""
    return Rule(key, condition, when, "{table} is never read by {name}", "leave the table out", unread=True)


def _loop(key: str, loop: str, *, asks: bool = False) -> Rule:
    """Return the rule for a table that only one loop, online or offline, reads.

    asks: [[eval.task]] reads it in either loop.
    """
    condition = f"the method is {'offline' if loop == 'online' else 'online'}"
    condition += ", and there is no [[eval.task]]" if asks else ""
    problem = "{table} is never read: {name} runs in the {line.loop} loop"

    def is_unread(c: Context) -> bool:
        return c.line.loop != loop and not (asks and c.recipe.eval.task)

    return Rule(key, condition, is_unread, problem, "leave the table out", unread=True)


def _unread(keys: str, why: str, when: Predicate, condition: str = "") -> tuple[Rule, ...]:
    """Return rules for keys, separated by spaces, that nothing reads for the same reason."""
    problem, fix = f"is never read: {why}", "leave it out"
    return tuple(Rule(key, condition or why, when, problem, fix, unread=True) for key in keys.split())


def _curriculum(keys: str, *kinds: str) -> tuple[Rule, ...]:
    """Return rules for keys of [curriculum] that only these kinds read."""
    condition = f"curriculum.kind is not {' or '.join(kinds)}"
    return _unread(keys, _KIND, lambda c: c.recipe.curriculum.kind not in kinds, condition)


def _strategy(keys: str, *strategies: str) -> tuple[Rule, ...]:
    """Return rules for keys of [search] that only these strategies read; a plugin's may read any key."""

    def is_another(c: Context) -> bool:
        strategy = c.search.strategy
        return strategy not in strategies and find_kind("searches", strategy, "search.strategy").ours

    return _unread(keys, _STRATEGY, is_another, f"search.strategy is not {' or '.join(strategies)}")


def _is_one_step(c: Context) -> bool:
    return c.recipe.steps.epochs * c.recipe.steps.minibatches == 1


def _stop_metric(c: Context) -> str:
    """Return the metric of run.stop_when, or ""."""
    return c.recipe.run.condition.metric if c.recipe.run.condition else ""


def _is_played(c: Context) -> bool:
    task = c.task
    return any(player is not None for player in (task.game, task.env, task.tools, task.agent))


def _differs(table: str, key: str, usual: object, c: Context) -> bool:
    return bool(getattr(getattr(c.recipe, table), key) != usual)


def _has_task(key: str, c: Context) -> bool:
    return getattr(c.task, key) is not None


def _evaluated_names(c: Context) -> set[str]:
    """Return the names of [[eval.task]] that no source of tasks has."""
    return {source.name for source in c.recipe.eval.task} - {source.name for source in c.sources}


def _is_mixed_with(key: str, c: Context) -> bool:
    return c.mixes and (c.recipe.search is not None if key == "search" else _has_task(key[5:], c))


def _is_too_cold(table: str, c: Context) -> bool:
    return bool(0 < getattr(c.recipe, table).temperature < LEAST_TEMPERATURE)


def _is_less_than_ranks(key: str, c: Context) -> bool:
    return c.update_size[0] == key and c.update_size[1] < c.ranks


def _is_judged_at_end(key: str, usual: object, c: Context) -> bool:
    """Return whether a search over an answer's steps has this key set, which needs judged states."""
    return not (c.env or c.moves) and _differs("search", key, usual, c)


def _lacks_cluster(c: Context) -> bool:
    """Return whether samplers are on Ray, and the ranks know no cluster to join."""
    ahead, by_ray = c.recipe.async_, c.recipe.train.ranks and not launched()
    return ahead.where == "ray" and not by_ray and not (ahead.address or os.environ.get("RAY_ADDRESS"))


def _is_vllm_elsewhere(key: str, c: Context) -> bool:
    """Return whether vLLM, in the loop's process, is to compute on another GPU than the first."""
    in_process = not c.recipe.engine.url and c.recipe.async_.where == "here"
    return in_process and c.sampler_device[0] == key and c.sampler_device[1] not in _FIRST_GPU


_FIRST_GPU = ("auto", "cpu", "cuda", "cuda:0")


def _ignores_age_of_tokens(c: Context) -> bool:
    return not (c.method.corrects or (c.recipe.search and c.search.learn == "visits"))


_NATIVE = "take engine.name = 'native'"


def _ranks(key: str, condition: str, when: Predicate, problem: str, fix: str) -> Rule:
    """Return the rule for what several ranks cannot do together."""
    condition = f"several ranks train, and {condition}"
    return Rule(key, condition, lambda c: c.ranks > 1 and when(c), f"with several ranks, {problem}", fix)


def _vllm(key: str, condition: str, when: Predicate, problem: str, fix: str = _NATIVE) -> Rule:
    """Return the rule for what the engine vllm cannot do."""
    condition = f"engine.name is 'vllm', and {condition}"
    return Rule(key, condition, lambda c: c.recipe.engine.name == "vllm" and when(c), problem, fix)


def _search(key: str, condition: str, when: Predicate, problem: str, fix: str) -> Rule:
    """Return the rule for what a recipe with [search] cannot have."""
    return Rule(key, condition, lambda c: c.recipe.search and when(c), problem, fix)


_KIND = "curriculum.kind is {curriculum.kind!r}"
_STRATEGY = "search.strategy is {search.strategy!r}"
_OWN_GPU = "leave it out: each rank takes the GPU of its own number"
_OLDER = "{name} takes every token for one that the present policy drew, and some are older"
_CORRECT = "set method.correction, as to 'token_truncated', or take method.name = 'decoupled_ppo'"
_GIVE_DATA = Option("give task.data", "give data=")

# ---------------------------------------------------------------------- by table

RULES: tuple[Rule, ...] = (
    # [model]
    Rule(
        "model.dtype",
        "it is bfloat16, and the method takes trust-region steps",
        lambda c: c.line.step == "trust_region" and c.recipe.model.dtype == "bfloat16",
        "{name} multiplies with the Fisher matrix, which is noise in {model.dtype}",
        "set it to 'float32'",
    ),
    _vllm(
        "model.dtype",
        "it is float64",
        lambda c: c.recipe.model.dtype == "float64",
        "vLLM does not compute in float64",
    ),
    _ranks(
        "model.device",
        "it names one GPU",
        lambda c: c.recipe.model.device.startswith("cuda:"),
        "every rank of a machine would compute on {model.device}",
        _OWN_GPU,
    ),
    # [method]
    _search(
        "method.correction",
        "it is set, and search.learn is 'visits'",
        lambda c: c.search.learn == "visits" and c.method.corrects,
        "shares of visits are targets, whoever drew the moves, and weights of π_old/π_gen change them",
        "leave it out; older moves need none here",
    ),
    Rule(
        "method.overlong_buffer",
        "it is above 0, and the environment has no field max_turns",
        lambda c: (
            c.online
            and getattr(c.method, "overlong_buffer", 0.0)
            and c.env is not None
            and not hasattr(c.env, "max_turns")
        ),
        "the environment does not say how long an episode may be",
        "give it a field max_turns, or leave overlong_buffer out",
    ),
    Rule(
        "method.turn_weight",
        "it is above 0, and no environment or agent plays, or there is a [search]",
        lambda c: "states" in c.method.asks and (c.recipe.search or not (c.env or c.task.agent)),
        "{name} compares the turns of episodes, and here an episode is one turn",
        "set it to 0",
    ),
    Rule(
        "method.credit",
        "it compares parts of the reward, and something besides the sum of several verifiers is paid",
        lambda c: c.beyond_parts,
        "{name} credits each verifier's score by itself, and the reward depends also on {c.beyond_parts}",
        "leave {c.beyond_parts} out, or take another credit",
    ),
    Rule(
        "method.credit",
        "it compares with a greedy answer, and there is an agent, a [search] or a verifier of whole groups",
        lambda c: c.lacks_greedy,
        "{name} needs a greedy answer to each task, and {c.lacks_greedy} gives none",
        "take method.name = 'rloo'",
    ),
    *EVOLUTION_RULES,
    # [task]
    Rule(
        "task",
        "the method is offline, and a game, env, tools or agent is given",
        lambda c: not c.online and _is_played(c),
        "an offline method learns from data, and plays no games",
    ),
    Rule(
        "task.text",
        "the method is online",
        lambda c: c.online and c.task.text,
        "{name} answers tasks, and plain text asks nothing",
    ),
    Rule(
        "task",
        "the method learns from text, and task.text is not given",
        lambda c: not c.online and c.line.learns == "text" and not c.task.text,
        "{name} learns from text, and there is no text",
        "give task.text",
    ),
    Rule(
        "task",
        "the method is offline and does not learn from text, and task.text is given",
        lambda c: not c.online and c.line.learns != "text" and c.task.text,
        "{name} learns from {line.learns}, and not from plain text",
        _GIVE_DATA,
    ),
    Rule(
        "task",
        "the method learns from rankings, labels or steps, and task.data is not given",
        lambda c: not c.online and c.line.learns not in ("answers", "text") and not c.task.data,
        "{name} learns from {line.learns}, and these tasks have none",
        _GIVE_DATA,
    ),
    *_unread(
        "task.games", "it counts games, and none is played", lambda c: not c.task.game, "no game is played"
    ),
    *(
        _search(
            f"task.{key}",
            "it is given, and there is a [search]",
            partial(_has_task, key),
            problem,
            "leave it or [search] out",
        )
        for key, problem in (("agent", "a search asks no agent"), ("tools", "a search calls no tools"))
    ),
    # [[task]]
    Rule(
        "task",
        "several are given, and one has no name of its own",
        lambda c: c.mixes and len({source.name for source in c.sources} - {""}) < len(c.sources),
        "each of several sources of tasks needs a name of its own",
        'set its name, as name = "sums"',
    ),
    Rule(
        "task",
        "every weight is 0",
        lambda c: c.sources and not any(source.weight for source in c.sources),
        "every weight is 0, so nothing is left to train on",
        "give one of them a weight",
    ),
    Rule(
        "task",
        "every source has epochs, and so an end",
        lambda c: c.sources and all(source.epochs for source in c.sources if source.weight),
        "no source is left to take over when all have ended",
        "leave the epochs of one out; run.epochs ends a run",
    ),
    *(
        Rule(
            key,
            "several sources of tasks are given",
            partial(_is_mixed_with, key),
            problem,
            "leave it out, or train on one source",
        )
        for key, problem in (
            ("task.agent", "an agent plays all tasks of a run"),
            ("search", "a search has one kind of moves"),
            ("task.text", "text has no end, so no records to mix"),
        )
    ),
    *_unread("task.max_new_tokens task.stop", "no answers are sampled", lambda c: not c.online),
    # [[eval.task]]
    Rule(
        "eval.task",
        "one has no name of its own",
        lambda c: len(_evaluated_names(c) - {""}) < len(c.recipe.eval.task),
        "each source needs a name of its own, by which its metrics are called",
        'set its name, as name = "gsm8k"',
    ),
    *(
        Rule(
            key,
            "there is [[eval.task]]",
            lambda c, holds=holds: c.recipe.eval.task and holds(c),  # type: ignore[misc]
            problem,
            "leave it or [[eval.task]] out",
        )
        for key, holds, problem in (
            ("search", lambda c: c.recipe.search is not None, "a search has one kind of moves"),
            ("task.agent", lambda c: c.task.agent is not None, "an agent plays all tasks of a run"),
        )
    ),
    Rule(
        "eval.task",
        "the method trains a model that scores answers",
        lambda c: c.recipe.eval.task and "head" in c.method.needs,
        "{name} trains a model that scores answers and writes none",
        "leave it out",
    ),
    Rule(
        "eval.samples",
        "the verifier compares fewer answers at once",
        lambda c: c.verifier and c.recipe.eval.samples > (c.verifier.largest_group or math.inf),
        "the judge is shown all {eval.samples} answers to a task, which are more than it takes",
        "lower it, or raise verifier.judge.most_responses",
    ),
    Rule(
        "eval.temperature",
        "it is 0, and eval.samples is above 1",
        lambda c: c.recipe.eval.samples > 1 and c.recipe.eval.temperature == 0,
        "greedy answers are all the same, and {eval.samples} are asked of each task",
        "set it, as 0.6 or 1.0",
    ),
    # [run]
    *_unread("run.updates", "run.epochs is set", lambda c: c.recipe.run.epochs),
    Rule(
        "run.stop_when",
        "it names the number of updates",
        lambda c: _stop_metric(c) == "update",
        "updates are counted already",
        "set run.updates",
    ),
    Rule(
        "run.stop_when",
        "it names a metric of an evaluation, and eval.every or eval.limit is 0",
        lambda c: _stop_metric(c).startswith("eval/") and not (c.recipe.eval.limit and c.recipe.eval.every),
        "{run.condition.metric} is measured only before the first and after the last update",
        "set eval.every to the updates between evaluations, and eval.limit above 0",
    ),
    Rule(
        "run.patience",
        "eval.every or eval.limit is 0",
        lambda c: not (c.recipe.eval.limit and c.recipe.eval.every),
        "is never read: eval.every or eval.limit is 0, so no evaluation lies between the start and the end",
        "set eval.every to the updates between evaluations, and eval.limit above 0; or leave patience out",
        unread=True,
    ),
    *ADAPTER_RULES,
    # [verifier]
    _loop("verifier", "online", asks=True),
    Rule(
        "verifier",
        "the method is online, and no verifier, environment or agent is given",
        lambda c: c.online and not c.task.agent and c.verifier is None and c.env is None,
        "no verifier or environment is configured",
        ADD_VERIFIER,
    ),
    Rule(
        "verifier",
        "an environment gives the rewards, and a verifier is given",
        lambda c: c.online and not c.task.agent and c.verifier is not None and c.env is not None,
        "the environment gives the rewards, and a verifier is named beside it",
        NO_VERIFIER,
    ),
    # [sampling]
    _loop("sampling", "online", asks=True),
    Rule(
        "sampling.temperature",
        "it is 0, in training, unless the method perturbs the weights",
        lambda c: c.online and c.recipe.sampling.greedy and not evolves(c),
        "a policy that always takes its likeliest token has nothing to learn from",
        "0.7 to 1.0 is usual",
    ),
    *(
        _vllm(
            f"sampling.{key}",
            "it filters what is drawn",
            partial(_differs, "sampling", key, usual),
            "of a filtered draw vLLM does not say how likely the token was before the filters",
        )
        for key, usual in (("top_k", 0), ("top_p", 1), ("min_p", 0))
    ),
    *(
        _vllm(
            f"{table}.temperature",
            f"it is above 0 and below {LEAST_TEMPERATURE}",
            partial(_is_too_cold, table),
            f"vLLM draws at no temperature below {LEAST_TEMPERATURE} but 0",
        )
        for table in ("sampling", "eval")
    ),
    _search(
        "sampling",
        "it filters what is drawn, and search.strategy is not 'beam' or 'best_of_n'",
        lambda c: c.recipe.sampling.filtered and c.search.strategy not in ("beam", "best_of_n"),
        "what a state has said is left out by its probability under the policy, which a filter changes",
        "leave top_k, top_p and min_p out, or take search.strategy = 'beam' or 'best_of_n'",
    ),
    # [engine]
    _loop("engine", "online", asks=True),
    *_unread(
        "engine.cuda_graphs", "engine.url names a server, which has its own", lambda c: c.recipe.engine.url
    ),
    *SERVER_RULES,
    *_unread("engine.folder engine.deadline_s", "engine.url is empty", lambda c: not c.recipe.engine.url),
    # [rollout]
    _loop("rollout", "online", asks=True),
    *_unread(
        "rollout.groups rollout.group_size rollout.select rollout.max_rounds "
        "rollout.replay rollout.replay_lag rollout.given_answers rollout.mask_truncated "
        "rollout.router_replay",
        "an offline method trains on its data; [[eval.task]] reads the limits of workers and episodes",
        lambda c: not c.online and c.recipe.eval.task,
        "the method is offline, and there is [[eval.task]]",
    ),
    Rule(
        "rollout.group_size",
        "the verifier compares fewer answers at once",
        lambda c: c.verifier and c.recipe.rollout.group_size > (c.verifier.largest_group or math.inf),
        "the judge is shown a whole group, and {rollout.group_size} answers are more than it takes",
        "lower it, or raise verifier.judge.most_responses",
    ),
    Rule(
        "rollout.group_size",
        "it is less than the number of episodes of a task that the method compares",
        lambda c: c.online and c.recipe.rollout.group_size < c.method.least_group,
        "{name} compares the episodes of a task, and a group of {rollout.group_size} has none to compare",
        "give {c.method.least_group} or more, or take method.name = 'reinforce'",
    ),
    Rule(
        "rollout.select",
        "it is 'varied', and rollout.group_size is 1",
        lambda c: c.online and c.recipe.rollout.select == "varied" and c.recipe.rollout.group_size < 2,
        "one episode a task never varies",
        "set it to 'all'",
    ),
    Rule(
        "rollout.replay",
        "it is above 0, and the method has no correction",
        lambda c: c.recipe.rollout.replay and _ignores_age_of_tokens(c),
        _OLDER,
        _CORRECT,
    ),
    Rule(
        "rollout.replay",
        "it is above 0, and task.agent is given",
        lambda c: c.online and c.task.agent and c.recipe.rollout.replay,
        "an agent's episode may be several rows, and a replay keeps one",
        "leave it out",
    ),
    _ranks(
        "rollout.replay",
        "it is above 0",
        lambda c: c.online and c.recipe.rollout.replay,
        "older groups are kept by the rank that played them, and drawn from those of all",
        "set it to 0, or train with one rank",
    ),
    *(
        _ranks(
            key,
            "there are more of them than groups or rows",
            partial(_is_less_than_ranks, key),
            "each trains on whole groups or rows, and {ranks} ranks have {size} an update",
            "set it to {ranks} or more, or start fewer ranks",
        )
        for key in ("rollout.groups", "batch.batch_size")
    ),
    *_unread("rollout.replay_lag", "rollout.replay is 0", lambda c: not c.recipe.rollout.replay),
    *_unread(
        "rollout.max_rounds",
        "rollout.select is 'all', which drops no group",
        lambda c: c.recipe.rollout.select == "all",
    ),
    # [async]
    _loop("async", "online"),
    Rule(
        "async.max_lag",
        "it is above 0, and the method has no correction",
        lambda c: c.recipe.async_.max_lag and _ignores_age_of_tokens(c),
        _OLDER,
        _CORRECT,
    ),
    Rule(
        "async.pace",
        "it is 'steps', and task.agent is given",
        lambda c: c.online and c.task.agent and c.recipe.async_.pace == "steps",
        "when an agent asks depends on the clock",
        "leave it out",
    ),
    _search(
        "async.pace",
        "it is 'steps', and there is a [search]",
        lambda c: c.recipe.async_.pace == "steps",
        "when a tree is judged depends on the clock",
        "leave it out",
    ),
    _ranks(
        "async.devices",
        "it names one GPU",
        lambda c: any(device.startswith("cuda:") for device in c.recipe.async_.devices),
        "every rank of a machine would sample on {async_.devices[0]}",
        _OWN_GPU,
    ),
    _ranks(
        "async.window",
        "it is above 1",
        lambda c: c.online and c.recipe.async_.window > 1,
        "ranks would let different groups pass",
        "set it to 1",
    ),
    _ranks(
        "async.address",
        "async.place is 'ray', Ray does not start the ranks, and there is no address",
        _lacks_cluster,
        "samplers on Ray need a cluster that all ranks can join",
        "set it to one's address (ray start --head), or let Ray start the ranks: train.ranks",
    ),
    _vllm(
        "async.cache",
        "it is 'keep'",
        lambda c: c.recipe.async_.cache == "keep",
        "vLLM computes running answers again under new weights",
        "set it to 'recompute'",
    ),
    _vllm(
        "async.place",
        "it is 'thread', and engine.url is empty",
        lambda c: c.recipe.async_.where == "thread" and not c.recipe.engine.url,
        "vLLM changes settings of the whole process while it starts",
        "set it to 'process'",
    ),
    _vllm(
        "async.place",
        "several ranks train, it is 'here', and engine.url is empty",
        lambda c: c.ranks > 1 and c.recipe.async_.where == "here" and not c.recipe.engine.url,
        "vLLM in the process of a rank computes on the first GPU of the machine, whichever rank it is",
        "set it to 'process'",
    ),
    *(
        _vllm(
            key,
            "it is not the first GPU, and vLLM runs in the loop's process",
            partial(_is_vllm_elsewhere, key),
            "vLLM computes on the first GPU of its process, not on {device}",
            "set async.place to 'process', or leave it out",
        )
        for key in ("async.devices", "model.device")
    ),
    *_unread(
        "async.window async.swap async.pace",
        "async.max_lag is 0: everything is drawn by the newest weights",
        lambda c: not c.recipe.async_.max_lag,
    ),
    *_unread("async.steps_per_update", "async.pace is 'clock'", lambda c: c.recipe.async_.pace != "steps"),
    *_unread("async.cache", "async.swap is 'between'", lambda c: c.recipe.async_.swap != "within"),
    *_unread(
        "async.threads async.deadline_s async.max_restarts",
        "the sampler is in the loop's own thread",
        lambda c: c.recipe.async_.where == "here",
    ),
    *_unread(
        "async.threads",
        "a thread has those of the run",
        lambda c: c.recipe.async_.where == "thread",
        "async.place is 'thread'",
    ),
    *_unread(
        "async.address async.cpus async.gpus",
        "async.place is not 'ray'",
        lambda c: c.recipe.async_.where != "ray",
    ),
    # [curriculum]
    _loop("curriculum", "online"),
    _ranks(
        "curriculum.kind",
        "it adapts, and async.max_lag is above 0",
        lambda c: c.online and c.recipe.curriculum.kind not in ("none", "order") and c.recipe.async_.max_lag,
        "{curriculum.kind!r} depends on what is known when a task is taken, and ranks that sample ahead take "
        "it at different times",
        "set async.max_lag to 0, or take 'order' or 'none'",
    ),
    *_curriculum("curriculum.field", "order", "bandit"),
    *_curriculum("curriculum.low curriculum.high curriculum.keep", "band"),
    *_curriculum("curriculum.explore", "band", "bandit"),
    *_curriculum("curriculum.sweep", "band"),
    *_curriculum("curriculum.buckets curriculum.share", "bandit"),
    # [search]
    _loop("search", "online"),
    _search(
        "search",
        "the verifier judges several answers at once",
        lambda c: c.verifier and c.verifier.grouped,
        "a search is judged at its end, by a verifier that judges one answer",
        "leave [search] out, or take such a verifier",
    ),
    _search(
        "search",
        "search.learn is 'proof', and the method compares the episodes of a task",
        lambda c: c.search.learn == "proof" and c.method.least_group > 1,
        "{name} compares answers to one task, and moves of a proof are worth the same",
        "set search.learn = 'moves', or take expert_iteration",
    ),
    _search(
        "rollout.router_replay",
        "there is a [search]",
        lambda c: c.recipe.rollout.router_replay,
        "a search joins moves that were drawn apart, and notes no experts",
        "leave it out",
    ),
    _search(
        "search.learn",
        "it is 'visits', and the method is not reinforce",
        lambda c: c.search.learn == "visits" and c.recipe.method["name"] != "reinforce",
        "shares of visits are targets of a cross-entropy, and {name} makes none",
        "set method.name = 'reinforce'",
    ),
    _search(
        "search.strategy",
        "it is 'hypertree', and the verifier is of no prover",
        lambda c: c.search.strategy == "hypertree" and not c.moves,
        "a hypertree takes goals of a proof apart, and only those of coq and lean can be",
        "take 'best_first', or the verifier of a prover",
    ),
    _search(
        "search.sketches",
        "it is above 0, and the prover's proofs have no sketches",
        lambda c: c.search.sketches and not (c.moves and c.moves.can_sketch),
        "only Coq's proofs have sketches",
        "leave it out",
    ),
    _search(
        "search.value_model",
        "an environment makes the moves",
        lambda c: c.search.value_model and c.env,
        "a value_model reads the steps of an answer or the goals of a proof, and these moves are neither",
        "set search.values = true",
    ),
    _search(
        "search.value_model",
        "a prover makes the moves, and the strategy compares no values",
        lambda c: c.search.value_model and c.moves and not c.search.walks,
        "of a proof the first end is the solution, so values only guide puct and hypertree",
        "set search.strategy = 'hypertree'",
    ),
    *(
        _search(
            f"search.{key}",
            "an answer's steps are the moves",
            partial(_is_judged_at_end, key, usual),
            "an answer's steps are judged at its end alone, and only the first end is",
            "leave it out, or prove or play: [task.env], coq, lean",
        )
        for key, usual in (("values", False), ("learn", "proof"))
    ),
    *_strategy("search.alpha", "best_first", "beam", "hypertree"),
    *_unread(
        "search.alpha",
        "values guide the search",
        lambda c: c.search.value_model and c.search.strategy != "hypertree",
        "[search.value_model] is given",
    ),
    *_strategy("search.keep", "beam"),
    *_unread(
        "search.c",
        _STRATEGY,
        lambda c: not c.search.walks,
        "search.strategy is not puct or, with values, hypertree",
    ),
    *_strategy("search.sketches search.sketch_tokens search.nested", "hypertree"),
    *_unread(
        "search.sketch_tokens search.nested", "search.sketches is 0", lambda c: not c.search.asks_sketches
    ),
    # [batch]
    Rule(
        "batch",
        "the method is online, and rollout.given_answers is 0",
        lambda c: c.online and not c.recipe.rollout.given_answers,
        "{table} is never read: {name} runs in the {line.loop} loop",
        "leave the table out",
        unread=True,
    ),
    *_unread(
        "batch.batch_size",
        "the method is online: rollout.given_answers is its number of given answers",
        lambda c: c.online and c.recipe.rollout.given_answers,
    ),
    Rule(
        "batch.batch_size",
        "it is 1, and the method compares with answers to other questions",
        lambda c: not c.online and c.method.probes and c.recipe.batch.batch_size < 2,
        "{name} compares with answers to other questions, and a batch of 1 has none",
        "give 2 or more",
    ),
    *_unread(
        "batch.separator",
        "only methods of steps read it",
        lambda c: c.line.learns != "steps",
        "the method does not learn from steps",
    ),
    *_unread(
        "batch.tool_format batch.train_on",
        "only methods that learn conversations read it",
        lambda c: c.line.learns != "answers",
        "the method does not learn from conversations",
    ),
    # [steps]
    Rule(
        "steps.minibatches",
        "it is more than rollout.groups, and the method is online",
        lambda c: c.online and c.recipe.steps.minibatches > c.recipe.rollout.groups,
        "{steps.minibatches} minibatches cannot be dealt from {rollout.groups} groups",
        "give at most rollout.groups",
    ),
    Rule(
        "steps.minibatches",
        "it is more than batch.batch_size, and the method is offline",
        lambda c: not c.online and c.recipe.steps.minibatches > c.recipe.batch.batch_size,
        "{steps.minibatches} minibatches cannot be dealt from {batch.batch_size} rows",
        "give at most batch.batch_size",
    ),
    *_unread(
        "steps.gradient_checkpointing steps.compile",
        "{name} differentiates its gradients again, which then cannot be",
        lambda c: c.line.step == "trust_region",
        "the method takes trust-region steps",
    ),
    Rule(
        "steps.epochs",
        "method.kl_from_old is above 0, and an update is a single step",
        lambda c: getattr(c.method, "kl_from_old", 0.0) and _is_one_step(c),
        "{name} holds the policy near the start of an update, and one step starts there",
        "take several epochs or minibatches; PPO's own are 4 epochs",
    ),
    Rule(
        "steps.target_kl",
        "the method does not measure the KL",
        lambda c: c.recipe.steps.target_kl and not c.method.measures_kl,
        "{name} does not measure the KL",
        "leave it out",
    ),
    *_unread("steps.target_kl", "an update is a single step", _is_one_step),
    # [critic]
    _table(
        "critic", "the method has no critic and is not a reward model", lambda c: not c.needs("value", "head")
    ),
    Rule(
        "critic.kind",
        "it is 'own', and the method is a reward model",
        lambda c: "head" in c.method.needs and c.recipe.critic.kind == "own",
        "{name} trains the model that its head is on",
        "leave it out; model.path says which model becomes the reward model",
    ),
    *_unread("critic.warmup", "a reward model has no critic", lambda c: not c.needs("value")),
    # [reference]
    _table("reference", "the method reads no reference policy", lambda c: not c.reads_reference),
    *TEACHER_RULES,
    Rule(
        "method.kl",
        "the method compares whole distributions, and the step is a trust region's",
        lambda c: c.method.compare and c.line.step == "trust_region",
        "a trust region measures its own KL, and compares with no reference over the vocabulary",
        "take another estimator, as 'k3'",
    ),
    Rule(
        "reference.refresh_every",
        "it is above 0, and so is lora.rank",
        lambda c: c.recipe.reference.refresh_every and c.recipe.lora.rank,
        "with an adapter the reference is the model without it, and cannot follow",
        "leave reference.refresh_every or [lora] out",
    ),
    *_unread(
        "reference.keep", "reference.refresh_every is 0", lambda c: not c.recipe.reference.refresh_every
    ),
    *_unread(
        "method.observation_weight",
        "answers have a single turn, or the method takes trust-region steps",
        lambda c: c.line.step != "adamw" or (c.online and not (c.mixes or _is_played(c))),
    ),
    # [trust]
    _table("trust", "the method does not take trust-region steps", lambda c: c.line.step != "trust_region"),
    # [optim]
    _table("optim", "the method takes trust-region steps", lambda c: c.line.step == "trust_region"),
    *_unread("optim.momentum", "optim.name is not muon", lambda c: c.recipe.optim.name != "muon"),
    *_unread(
        "optim.min_lr_ratio", "optim.schedule is 'constant'", lambda c: c.recipe.optim.schedule == "constant"
    ),
    # [eval]
    *_unread("eval.every eval.temperature eval.right", "eval.limit is 0", lambda c: not c.recipe.eval.limit),
    *_unread(
        "eval.temperature eval.right eval.samples",
        "an offline method samples nothing without [[eval.task]]",
        lambda c: not (c.online or c.recipe.eval.task),
        "the method is offline, and there is no [[eval.task]]",
    ),
    # [checkpoint]
    *_unread(
        "checkpoint.keep_weights",
        "checkpoint.keep is 0, which keeps all",
        lambda c: not c.recipe.checkpoint.keep,
    ),
    # [record]
    _loop("record", "online"),
    *_unread("record.trees", "there is no [search]", lambda c: not c.recipe.search),
    # [train]
    Rule(
        "train.shard",
        "the method takes trust-region steps, or perturbs the weights",
        lambda c: c.recipe.train.shard and c.line.step != "adamw",
        "a step of {name} needs the whole model: the Fisher matrix multiplies it, or noise is added to it",
        "leave it out, or take another method",
    ),
    Rule(
        "train.context",
        "it is above 1, and the method takes trust-region steps, or perturbs the weights",
        lambda c: c.recipe.train.context > 1 and c.line.step != "adamw",
        "a step of {name} has no gradient that ranks could compute together",
        "leave it out, or take another method",
    ),
    Rule(
        "train.replicas",
        "ranks cannot form that many equal groups of two or more",
        lambda c: c.ranks > 1 and (c.ranks % c.recipe.train.replicas or c.ranks == c.recipe.train.replicas),
        "{ranks} ranks cannot hold {train.replicas} models, each on two ranks or more",
        "give a divisor of the number of ranks, such as the number of machines",
    ),
    Rule(
        "train.ranks",
        "torchrun has started another number",
        lambda c: c.recipe.train.ranks and c.ranks not in (1, c.recipe.train.ranks),
        "{train.ranks} ranks are asked for, and {ranks} are there",
        "leave it out under torchrun",
    ),
    # [track]
    *_unread("track.project track.name", "track.sinks is empty", lambda c: not c.recipe.track.sinks),
)


def check(context: Context, *, unread: bool = False) -> None:
    """Raise the error of the first rule that a recipe breaks: of unread keys, or else of combinations."""
    for rule in RULES:
        if rule.unread == unread and rule.breaks(context):
            raise rule.error(context)
