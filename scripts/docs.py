"""Rewrites the generated parts of the pages, docs/ above all; with --check only names the stale pages.

A generated part stands between two comments, and everything else on a page is written by hand:

    <!-- generated: equations grpo -->
    <!-- end -->

The first word names a function of BLOCKS, the others are its arguments. What the functions say is
read off the code (docstrings, signatures, defaults), so a page cannot disagree with it for long.
docs/architecture.svg is generated too, by picture.py.
"""

import argparse
import ast
import dataclasses
import functools
import gc
import importlib
import inspect
import json
import re
import sys
import textwrap
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pages as site
import picture

import posttrain
from posttrain.base.kinds import GROUPS, kinds
from posttrain.base.table_reader import key_of, keys_of
from posttrain.cli import COMMANDS, Command, plugin_commands
from posttrain.commands import completion
from posttrain.errors import UserError, shell
from posttrain.math import (
    advantages,
    corrections,
    filters,
    preference,
    ratios,
    reduce,
    returns,
    reward,
    surrogate,
    trust,
)
from posttrain.math.choice import COLUMNS, function_of, takes
from posttrain.math.evolution import fitness
from posttrain.methods import build, policy_gradient, table
from posttrain.methods import preference as preferences
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.distillation import Distillation
from posttrain.methods.evolution import Evolution
from posttrain.methods.imitation import ExpertIteration, Imitation, WeightedImitation
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.preference import Preference, Unpaired
from posttrain.methods.q_learning import SoftQ
from posttrain.methods.reward_model import ListwiseReward, PairwiseReward, PointwiseReward
from posttrain.recipe import rules as combinations
from posttrain.recipe.catalogue import catalogue
from posttrain.recipe.recipe import Recipe
from posttrain.recipe.schema import field_docs
from posttrain.report import glossary
from posttrain.report.alarms import RULES
from posttrain.types import Method
from posttrain_study.claims import cards as evidence
from posttrain_study.claims.experiment import count, find_experiment
from posttrain_study.truth import printed
from posttrain_study.truth.table import rows as everything

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- generated: ([^\n]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

UNSAID = {
    "Arithmetic.operands": "Numbers in a problem.",
    "Arithmetic.low": "The smallest of them.",
    "Arithmetic.high": "The largest of them.",
    "Arithmetic.seed": "Of the order of problems, and so of which ones are held out.",
    "TaskChoice.arithmetic": "Made-up sums; see below.",
    "TaskChoice.coq": "Theorems to prove in Coq; see below.",
    "TaskChoice.coq_library": "Theorems of Coq's standard library; see below.",
    "TaskChoice.horn": "Horn theorems to prove in Coq, of known least proofs; see below.",
    "TaskChoice.peano": "Random equations of numbers to prove in Coq by induction; see below.",
    "TaskChoice.propositional": "Random theorems of propositional logic to prove in Coq; see below.",
    "TaskChoice.variants": "Provable variants of one propositional theorem, to train on; see below.",
    "TaskChoice.guess": "A guessing game of several turns; see below.",
    "TaskChoice.maze": "A text maze of several turns; see below.",
    "TaskChoice.gymnasium": "An environment of Gymnasium in words; see below.",
    "TaskChoice.openenv": "An environment behind a server of OpenEnv; see below.",
    "TaskChoice.own": "Tasks of a function of yours; see below.",
    "TaskChoice.suite": "The problems of a suite of posttrain eval; see below.",
    "TaskChoice.textarena": "A game of TextArena; see below.",
    "TaskChoice.reasoning_gym": "Problems of reasoning-gym, which brings its own scorers; see below.",
    "Guess.high": "Numbers run from 1 to this.",
    "Guess.max_turns": "Guesses in a game.",
    "Guess.shaping": "Most reward that an episode can get for narrowing the range down.",
    "Maze.max_turns": "Moves in an episode.",
    "ReasoningGym.seed": "Of which questions are drawn, and of their order.",
    "Games.train": "Games to train on.",
    "Games.held_out": "Games to evaluate on.",
    "Lora.rslora": "Scale by alpha / √rank instead of alpha / rank.",
    "Lora.dora": "Learn the length of each row of a matrix apart from its direction.",
    "VerifierChoice.exact": "The answer, letter for letter; see below.",
    "VerifierChoice.number": "The answer as a number; see below.",
    "VerifierChoice.math": "A mathematical answer; see its page.",
    "VerifierChoice.code": "A program, by what it does; see its page.",
    "VerifierChoice.coq": "A proof in Coq; see its page.",
    "VerifierChoice.lean": "A proof in Lean; see its page.",
    "VerifierChoice.json": "JSON of a schema; see its page.",
    "VerifierChoice.sql": "A query, by its result; see its page.",
    "VerifierChoice.grammar": "A text of a grammar; see its page.",
    "VerifierChoice.instructions": "Instructions that a program can check; see its page.",
    "VerifierChoice.reasoning_gym": "The scorers of reasoning-gym's own problems; see its page.",
    "VerifierChoice.judge": "A language model's judgement; see its page.",
    "VerifierChoice.model": "A reward model's score; see its page.",
    "VerifierChoice.regex": "A pattern; see below.",
    "VerifierChoice.format": "Sections between tags; see below.",
    "VerifierChoice.http": "The score of a service over HTTP; see its page.",
    "VerifierChoice.rubric": "A weighted checklist for each task; see its page.",
    "VerifierChoice.function": "A Python function of yours; see below.",
    "Exact.marker": "For where = after.",
    "Exact.tag": "For where = tag: <answer> ... </answer>.",
    "Number.where": "Which number counts.",
    "Regex.pattern": "In Python's syntax.",
    "Function.function": "module:function or path/to/file.py:function.",
    "Sampling.max_new_tokens": "Tokens after which an answer is cut off.",
    "Optim.betas": "AdamW's decay rates of the two moments.",
    "Optim.eps": "AdamW's term in the denominator.",
    "Optim.weight_decay": "Decoupled from the gradient; of matrices only, embeddings among them.",
    "Optim.min_lr_ratio": "What is left of lr at the last step.",
    **{
        f"{verifier}.name": "Under which its score is recorded."
        for verifier in (
            *("Exact", "Number", "Regex", "Format", "Code", "Lean", "Json", "Sql"),
            *("Grammar", "ReasoningGymScorer", "Instructions"),
        )
    },
}
"""Meanings of the keys whose field has no docstring."""

NUMBERS = {
    "eps": "Added to what is divided by.",
    "mix": "β: weight of the teacher in the mixture; near 0 as the forward KL, near 1 as the reverse one.",
    "k": "Of how many answers the best counts; a group needs one more.",
    "clip_low": "How far below 1 a ratio counts.",
    "clip_high": "How far above 1 a ratio counts.",
    "clip_log": "How far from 0 a token's log-ratio counts, in the direction its advantage asks for.",
    "cap": "The largest ratio that counts, 1 or more.",
    "floor": "The smallest ratio that counts, at most 1; 0 sets no bound.",
    "k_up": "Power of the ratio in the gate where A ≥ 0.",
    "lambda_up": "How fast the gate closes above its maximum where A ≥ 0.",
    "k_down": "Power of the ratio in the gate where A < 0.",
    "lambda_down": "How fast the gate closes above its maximum where A < 0.",
    "max_tv": "The largest |π - π_old| at which a token is pushed further; of tv_bounded, at all.",
    "max_kl": "The largest KL(π_old ‖ π) of a token's event, in nats, at which it is pushed further; "
    "of kl_bounded the largest in either direction at which it is pushed at all.",
    "pull": "How strongly log r is pulled to 0: it is fitted to A / pull.",
    "tau_up": "How steeply the gate closes where A ≥ 0.",
    "tau_down": "How steeply the gate closes where A < 0.",
    "gamma": "γ: what a reward one token later is worth.",
    "lam": "λ: how far targets look ahead; 0 is one step, 1 to the end.",
    "critic_lam": "λ of the critic's target; 1 is the return itself.",
    "n": "Steps that a target looks ahead.",
    "rho_cap": "The largest π/π_gen by which an error of V counts.",
    "c_cap": "The largest π/π_gen by which what comes later counts.",
    "weight_cap": "The largest π_old/π_gen that counts.",
    "weight_floor": "The smallest π_old/π_gen that is not rejected.",
    "weight_tv": "The largest |π_old - π_gen| at which a token is not rejected.",
    "weight_kl": "The largest KL between π_old and π_gen, in either direction, of a token's event, in nats.",
    "value_clip": "How far V may move in an update, in units of the return.",
    "top_share": "ρ: the share of the update's tokens that are kept, those of the largest entropy.",
    "max_second_moment": "τ: bound of the mean of (log π_old/μ)² over the tokens that are kept.",
    "cov_share": "The share of the update's tokens that lose their advantage; 0: none.",
    "cov_low": "The least (A - Ā)(log π_old - its mean) of a token that may lose its advantage.",
    "cov_high": "The largest such number.",
    "gain": "How fast β follows: it changes by at most a fifth of this at a time.",
    "target_margin": "γ: by how much β h must exceed 0 before a pair counts as right.",
    "delta": "δ: the β h from which a pair costs nothing.",
    "flipped": "ε: the share of labels that are held to be wrong, below ½.",
    "alpha": "α of the divergence: near 0 the reverse KL, 1 the forward KL.",
}
"""Meanings of the numbers that functions of math/ take, and of a Q's of the same name."""

CHOSEN = {
    "estimator": "What a token is credited with, and what the critic learns.",
    "value_loss": "The critic's loss.",
    "item_loss": "What a number costs beside its label: a squared error, or a cross-entropy.",
    "beta": "How far a judgement moves the policy: small is far.",
    "pair_weight": "How much the pairs count.",
}
"""Meanings of the choices that the family's page does not name."""

GIVEN = {
    "text": "documents, as they stand",
    "answers": "conversations that are given",
    "rankings": "answers to one question that somebody compared",
    "labels": "answers that were judged one by one",
    "steps": "answers of which each step was judged",
}
"""What `Line.learns` says, in words."""

DATA = {
    "text": "plain text",
    "answers": "conversations",
    "rankings": "pairs or rankings",
    "labels": "labelled answers",
    "steps": "labelled steps",
}
"""What offline methods learn from, in llms.txt."""

STANDS_FOR = {
    "name": "the method",
    "table": "the table",
    "line.loop": "other",
    "line.learns": "other data",
    "c.method.least_group": "as many as it compares",
    "c.beyond_parts": "the key that changes it",
    "c.lacks_greedy": "what is given",
    "run.condition.metric": "the metric",
    "curriculum.kind": "another",
    "search.strategy": "another",
}
"""What the templates of a rule's error stand for, unless it is a key."""

STEPS = {"adamw": "AdamW", "trust_region": "natural gradient", "evolution": "plain"}
"""What a line's step is called."""

READERS: Mapping[type, str] = {
    ActorCritic: "actor-critics",
    SoftQ: "methods of a Q",
    ExpertIteration: "expert iteration",
    Preference: "methods of pairs of answers",
    Unpaired: "`kto`",
    PairwiseReward: "reward models of comparisons",
    Evolution: "evolution strategies",
}
"""Who reads a number that is not every policy gradient's."""


# ---------------------------------------------------------------------- reading the code


def meaning(cls: type, name: str) -> str:
    """What a key means; KeyError if neither its field nor UNSAID says so."""
    docs = field_docs(cls)
    return docs[name] if name in docs else UNSAID[f"{cls.__name__}.{name}"]


def nested(hint: Any) -> type | None:
    """The configuration that a key's table holds, if it holds one."""
    return next((a for a in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(a)), None)  # type: ignore[return-value]


def kind(hint: Any) -> str:
    """A type as a person says it."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{json.dumps(a)}`" for a in typing.get_args(hint))
    if isinstance(hint, types.UnionType):
        arguments = [kind(a) for a in typing.get_args(hint) if a is not type(None)]
        return ", or ".join(dict.fromkeys(arguments))
    if nested(hint):
        return "table"
    if typing.get_origin(hint) is tuple:
        inside = {
            "list of numbers" if a in (float, int) else "list of texts"
            for a in typing.get_args(hint)
            if a is not ...
        }
        return inside.pop()
    plain = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`"}
    return plain.get(hint, "table")


def default(field: "dataclasses.Field[Any]") -> str:
    """A default as TOML spells it."""
    if field.default_factory is not dataclasses.MISSING:
        return "`{}`"
    if field.default is dataclasses.MISSING:
        return "required"
    value = field.default
    if value is None or dataclasses.is_dataclass(value):
        return "–"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def paragraphs(thing: Any) -> list[str]:
    """The paragraphs of a docstring, each in one line, without its examples and indented formulas."""
    parts = (inspect.getdoc(thing) or "").split("\n\n")
    return [re.sub(r"\s*\n\s*", " ", p.strip()) for p in parts if not p.startswith((">>>", "    "))]


def chosen(name: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(choice, function, file.function) of each choice that says something of a method."""
    method = table.METHODS[name].method
    silent = {corrections.uncorrected, preference.reverse_kl, filters.every_token}
    for choice in build.choices(method):
        function = function_of(vars(method)[choice])
        off = choice in ("kl", "control") and choice not in build.described(method)
        if function not in silent and not off:
            yield choice, function, _label(function)


def _label(function: Callable[..., Any]) -> str:
    return f"{function.__module__.removeprefix('posttrain.math.')}.{function.__name__}"


def formulas(thing: Any) -> list[str]:
    """The lines of a docstring that are formulas: its first paragraph, and those that are indented."""
    first, *others = (inspect.getdoc(thing) or "").split("\n\n")
    shifted = [line.strip() for p in others if p.startswith("    ") for line in p.splitlines()]
    return [re.sub(r"\s*\n\s*", " ", first.strip()), *(re.sub(r"\s{2,}", "  ", line) for line in shifted)]


# ---------------------------------------------------------------------- generated parts


def rows(head: str, lines: Iterator[str] | list[str]) -> str:
    """A Markdown table."""
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + "---|" * columns, *(f"| {line} |" for line in lines)]) + "\n"


def cell(text: str) -> str:
    """Text that neither ends a cell nor starts an HTML tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def methods() -> str:
    """Every method at a glance."""
    lines = []
    for name, line in table.METHODS.items():
        loop = line.loop if line.loop == "online" else f"offline, {line.learns}"
        cells = [f"[`{name}`](methods/{name}.md)", line.title, loop, *_glance(line)]
        lines.append(" | ".join([*cells, line.source]))
    return rows("method | what it is | loop | group | critic | reference KL | step | source", lines)


def _glance(line: table.Line) -> list[str]:
    """Least group, critic, where the reference's KL enters, step."""
    method = line.method
    group = str(method.least_group) if line.loop == "online" else "–"
    return [group, _values(method) or "–", _reference(method), STEPS[line.step]]


def _values(method: Method) -> str:
    """Whether there is a critic, or a head that is itself what is learnt."""
    return "yes" if "value" in method.needs else "a head" if "head" in method.needs else ""


def _reference(method: Method) -> str:
    """Where a KL to the reference enters."""
    if isinstance(method, SoftQ):
        return "in Q"
    if isinstance(method, Preference | Unpaired):
        return "in the loss" if "logp_ref" in method.needs else "–"
    if isinstance(method, Distillation):
        return "is the loss"
    numbers = build.numbers(method)
    places = [place for place in ("reward", "loss") if numbers.get(f"kl_in_{place}")]
    return f"in the {places[0]}" if places else "if asked" if "kl_in_loss" in numbers else "–"


def glance() -> str:
    """The seeds' comparison table: critic? reward? whose samples? where does a KL enter?"""
    lines = []
    for name, line in table.METHODS.items():
        method = line.method
        given = "none: imitates" if isinstance(method, Imitation) else "in the data"
        judge = "teacher" if "teacher" in method.asks else "verifier"
        reward = given if line.loop == "offline" and judge == "verifier" else judge
        old = "old policy, in the loss" if build.numbers(method).get("kl_from_old") else ""
        old = "old policy, bounds the step" if line.step == "trust_region" else old
        cells = [f"[`{name}`](methods/{name}.md)", _values(method) or "no", reward]
        where = _reference(method)
        where = where if where == "–" else f"reference, {where}"
        cells += [_samples(line), old or where, _several(line)]
        lines.append(" | ".join(cells))
    return rows("method | critic | reward | samples | where a KL enters | several steps an update", lines)


def _samples(line: table.Line) -> str:
    """Whose tokens the method may learn from."""
    if line.loop == "offline":
        return "given"
    return "its own, and older ones" if line.method.corrects else "its own"


def _several(line: table.Line) -> str:
    """What holds the second step on the same samples."""
    method: Any = line.method
    if isinstance(method, SoftQ | Distillation):
        return "yes, towards fixed targets"
    if line.loop == "offline":
        return "yes"
    if line.step == "trust_region":
        return "each within the region"
    if isinstance(method, Evolution):
        return "no: one step an update"
    if not isinstance(method, PolicyGradient):
        return "yes, near the reference" if "logp_ref" in method.needs else "nothing holds it"
    if build.numbers(method).get("kl_from_old"):
        return "held by the penalty"
    held = {
        "score": "nothing holds it",
        "unclipped": "weighed, not bounded",
        "truncated": "weight bounded",
        "soft_gated": "fades",
        "regressed": "pulled back",
    }
    with_companion_models = "clipped by token" if _and_advantage(method) else ""
    return with_companion_models or held.get(function_of(method.surrogate).__name__, "clipped")


def commands() -> str:
    """The command line, with the first sentence of each command's help."""
    lines = []
    for name in (*COMMANDS, *plugin_commands()):
        command: Any = Command(name).load()
        words = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
        options = [f"`{max(p.opts, key=len)}`" for p in command.params if p.param_type_name == "option"]
        use = cell(" ".join(["posttrain", name, *words]))
        lines.append(f"`{use}` | {cell(command.help.splitlines()[0])} | {' '.join(options) or '–'}")
    return rows("command | what it does | options", lines)


def fields(where: str) -> str:
    """The keys of the configuration called module:Class."""
    module, _, name = where.partition(":")
    cls = getattr(importlib.import_module(module), name)
    return _keys(cls)


def _keys(cls: type) -> str:
    hints = dict(keys_of(cls))
    given = [f for f in dataclasses.fields(cls) if f.init and f.name in hints]
    given.sort(key=lambda f: default(f) != "required")
    lines = [
        f"`{f.name}` | {kind(hints[f.name])} | {default(f)} | {cell(meaning(cls, f.name))}" for f in given
    ]
    return rows("key | type | default | meaning", lines)


def recipe() -> str:
    """Every table of a recipe with every key."""
    hints = typing.get_type_hints(Recipe)
    parts = []
    places: dict[type, str] = {}
    for field in dataclasses.fields(Recipe):
        if field.name == "method":
            parts.append(_method_table())
            continue
        cls = nested(hints[field.name])
        assert cls is not None
        parts += list(_tables(key_of(field.name), cls, places))
    return "\n".join(parts)


def _tables(path: str, cls: type, places: dict[type, str]) -> Iterator[str]:
    """Yield the table at this path and those in it. places: where each class stands that has been shown."""
    unread = next((rule for rule in combinations.RULES if rule.unread and rule.key == path), None)
    note = f" It is an error where {unread.condition}." if unread else ""
    head = f"{'#' * (2 + path.count('.'))} `[{path}]`\n\n"
    place = "verifier" if path == "task.verifier" else places.get(cls)  # where it is explained
    if place:
        yield f"{head}Takes the keys of `[{place}]`.{note}\n"
        return
    places[cls] = path
    yield f"{head}{cell(paragraphs(cls)[0])}{note}\n\n{_keys(cls)}"
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = nested(hints[field.name])
        if inner:
            yield from _tables(f"{path}.{field.name}", inner, places)


def _method_table() -> str:
    known = " or ".join(f"`{name}`" for name in table.METHODS)
    lines = [f"`name` | {known} | required | Which line of the table of methods."]
    lines += [
        f"`{choice}` | {_names(functions)} | its line's | {_meaning(_kinds(choice)[0], choice)}"
        for choice, functions in build.CHOICES.items()
    ]
    owned: dict[str, list[str]] = {}
    for name, line in table.METHODS.items():
        for number in build.numbers(line.method):
            owned.setdefault(number, []).append(name)
    own = [number for number in owned if number not in NUMBERS]
    lines += [f"`{n}` | number | its line's | {_own(n)}" for n in own]
    lines += [_number(number, means, owned.get(number, [])) for number, means in NUMBERS.items()]
    return (
        "## `[method]`\n\nIts name, and options over its published defaults. Each method's page says what "
        "it reads; anything else is an error. What is of your own is named as `file.py:name`, and "
        "`{name = ..., NUMBER = ...}` is a function with its numbers: [adding a method](add-a-method.md).\n\n"
        + rows("key | type | default | meaning", lines)
    )


def _kinds(key: str) -> list[type]:
    """The most general classes of methods that have this field, in the order of the table."""
    kinds = dict.fromkeys(type(line.method) for line in table.METHODS.values() if key in vars(line.method))
    return [cls for cls in kinds if not any(other in cls.__mro__[1:] for other in kinds)]


def _own(number: str) -> str:
    """What a method's own number means to each family that has it, and which part of the table reads it."""
    told: dict[str, list[str]] = {}
    for cls in _kinds(number):
        told.setdefault(_meaning(cls, number), []).append(READERS.get(cls, ""))
    parts = []
    for means, readers in told.items():
        named = " and ".join(filter(None, readers))
        parts.append(means + (f" Read by {named}." if named else ""))
    return " ".join(parts) + (" Not read by actor-critics." if number in ActorCritic.unread else "")


def _number(number: str, means: str, owners: list[str]) -> str:
    """The line of a number that functions take, or methods by themselves."""
    readers, kinds = [], set()
    for functions in build.CHOICES.values():
        for name, function in functions.items():
            found = _defaults(function).get(number)
            if found is not None:
                kinds.add("whole number" if isinstance(found, int) else "number")
                readers.append(f"{name} ({found:g})")
    readers += [f"{name} ({vars(table.METHODS[name].method)[number]:g})" for name in owners]
    return f"`{number}` | {kinds.pop()} | its function's | {cell(means)} Read by {', '.join(readers)}."


def options(name: str) -> str:
    """What a recipe's [method] may set besides the name."""
    method: Any = table.METHODS[name].method
    lines = []
    for choice in build.choices(method):
        functions = build.CHOICES[choice]
        functions = {f: function for f, function in functions.items() if _accepts(name, {choice: f})}
        default = function_of(vars(method)[choice]).__name__
        lines.append(f"`{choice}` | {_names(functions)} | `{default}` | {_meaning(type(method), choice)}")
    for key, value in build.numbers(method).items():
        if _accepts(name, {key: value / 2 or 0.5}):
            lines.append(f"`{key}` | number | `{value:g}` | {_meaning(type(method), key)}")
    for choice in build.choices(method):
        for key, value in build.parameters(method, choice).items():
            if key != "horizon":
                kind = "whole number" if isinstance(value, int) else "number"
                lines.append(f"`{key}` | {kind} | `{value:g}` | {cell(NUMBERS[key])}")
    return rows("key | type | default | meaning", lines) if lines else "None.\n"


SWITCHES: tuple[Mapping[str, float], ...] = (
    {},
    {"kl_in_loss": 1.0},
    {"kl_target": 0.0},
    {"kl_target": 0.1},
    {"kl_from_old": 1.0},
    {"kl_from_old": 1.0, "kl_target": 0.1},
    {"entropy_target": 1.0},
    {"turn_weight": 1.0},
)
"""Numbers with which other options have an effect."""


def _accepts(name: str, options: Mapping[str, Any]) -> bool:
    """Whether the method takes these options, alone or with what gives them an effect."""
    # Returns of tokens and their credit are chosen together; a credit of parts is of whole answers.
    others = [{"returns": "to_go"}] if "credit" in options else []
    by_part = build.credits_parts(table.METHODS[name].method)
    others += [{"credit": "centred"}] if "returns" in options and not by_part else []
    for other in (*SWITCHES, *others):
        try:
            build.method(name, **{**other, **options})
        except UserError:
            continue
        return True
    return False


def _names(functions: Mapping[str, Any]) -> str:
    return " or ".join(f"`{name}`" for name in functions)


def _meaning(cls: type, key: str) -> str:
    """What a choice or an own number of a method means."""
    families = f"{policy_gradient.__doc__}\n{preferences.__doc__}"
    told = dict(re.findall(r"^    (\w+) +(.+)$", families, re.MULTILINE))
    docs = field_docs(cls)
    text = docs.get(key) or CHOSEN.get(key) or NUMBERS.get(key) or re.sub(r"\s{2,}", ": ", told[key])
    # A Greek letter stays small, and so does a single one: β and m are names of numbers.
    small = not text[0].isascii() or text[1] == ":"
    return cell((text[0] if small else text[0].upper()) + text[1:])


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {k: p.default for k, p in parameters.items() if isinstance(p.default, (int, float))}


def _by_token(method: Method) -> bool:
    """Whether each token is credited by itself."""
    whole = function_of(getattr(method, "returns", returns.total)) is returns.total
    return isinstance(method, ActorCritic) or not whole


def facts(name: str) -> str:
    """What to know of a method before choosing it."""
    line = table.METHODS[name]
    lines = [f"name in a recipe | `{name}`", f"what it is | {line.title}", f"source | {line.source}"]
    if line.loop == "offline":
        rewarded = ", with rewards" if isinstance(line.method, SoftQ) else ""
        lines += [
            f"loop | offline: learns from {GIVEN[line.learns]}{rewarded}",
            f"critic | {_critic(line.method)}",
            f"reward model | {_model_of_rewards(line.method)}",
            f"reference policy | {_of_reference(line.method)}",
            f"step | {_step(line)}",
        ]
        return rows("fact | value", lines)
    judge = "the teacher" if "teacher" in line.method.asks else "a verifier or an environment"
    lines += [
        "loop | online: learns from answers of the policy itself",
        f"samples of older policies | {_older(line.method)}",
        f"several steps in an update | {_moved(line)}",
        f"critic | {_critic(line.method)}",
        f"reward model | none: {judge} says what an answer is worth",
        f"reference policy | {_of_reference(line.method)}",
        f"step | {_step(line)}",
        f"episodes of a task | {line.method.least_group} or more",
    ]
    carried = {"beta": "β of its KL", "mean": "the mean return", "variance": "the returns' variance"}
    kept = [carried[key] for key in line.method.start if key in carried]
    lines += [f"kept from update to update | {' and '.join(kept)}; a checkpoint holds it"] if kept else []
    return rows("fact | value", lines)


def _model_of_rewards(method: Method) -> str:
    """Whether an offline method has, or is, a model of rewards."""
    if "head" in method.needs:
        return "this is one"
    if isinstance(method, Preference | Unpaired):
        return "none: the policy's own likelihoods say what an answer is worth"
    return "none: rewards are in the data" if isinstance(method, SoftQ) else "none"


def _older(method: Method) -> str:
    if method.corrects:
        return "made up for: `rollout.replay` is allowed"
    if isinstance(method, SoftQ):
        return "taken for its own, so `rollout.replay` is refused unless `lam` is 0"
    unless = " unless `correction` is set" if isinstance(method, PolicyGradient) else ""
    return f"taken for its own, so `rollout.replay` is refused{unless}"


def _moved(line: table.Line) -> str:
    method: Any = line.method
    if line.step == "trust_region":
        return "each is bounded by the region, from where the one before has left off"
    if isinstance(method, Evolution):
        return "none: an update is one step"
    if isinstance(method, SoftQ):
        return (
            "targets are those of the policy before the first; the loss itself does not ask who drew a token"
        )
    if isinstance(method, Preference | Unpaired):
        return "the loss does not ask who wrote the answers; what holds the policy is the reference alone"
    if isinstance(method, Imitation):
        return "the answers that were kept are imitated further; nothing holds the policy"
    if isinstance(method, Distillation):
        return "the teacher is compared with again, at the same states"
    start = "the policy has moved after the first; "
    kind = function_of(method.surrogate)
    if kind is surrogate.score:
        return start + "nothing accounts for it: keep to one"
    if kind is surrogate.regressed:
        return start + "the squared pull to where it was, which is 0 at the first, holds it near"
    if build.numbers(method).get("kl_from_old"):
        return start + "the ratio accounts for it, and the penalty, which is 0 at the first, holds it near"
    if kind is surrogate.unclipped and not _and_advantage(method):
        return start + "the ratio accounts for it, without a bound"
    return start + "the ratio accounts for it, within its bounds"


def _critic(method: Method) -> str:
    if "head" in method.needs:
        return "none; its own head learns with `critic.lr` and `critic.max_grad_norm`"
    if "value" not in method.needs:
        return "none"
    return "a head on the policy's backbone, or a model of its own: `[critic]`"


def _of_reference(method: Method) -> str:
    start = "the start of the run, or what follows the policy: `[reference]`"
    if isinstance(method, Unpaired):
        return f"answers are worth their likelihood against it; {start}"
    if isinstance(method, Preference) and "logp_ref" in method.needs:
        return f"pairs are compared against it; {start}"
    if isinstance(method, Distillation):
        return "the teacher, whose distributions are what is learnt: `[reference]`"
    if not isinstance(method, PolicyGradient) and "logp_ref" not in method.needs:
        return "none"
    if "logp_ref" not in method.needs:
        return "only with `kl_in_loss` or `kl_in_reward`"
    return f"its KL is {_reference(method)}; {start}"


def _step(line: table.Line) -> str:
    if line.step == "trust_region":
        critic = "; the critic's by AdamW: `[critic]`" if "value" in line.method.needs else ""
        return f"natural gradient, KL(π_old ‖ π) at most `trust.max_kl`: `[trust]`, and no `[optim]`{critic}"
    if line.step == "evolution":
        return "plain: `optim.lr` with its schedule and warm-up, without AdamW, gradients or `[steps]`"
    return "AdamW: `[optim]`"


def equations(name: str) -> str:
    """The formulas of a method's choices, in the letters of the code."""
    line = table.METHODS[name]
    method: Any = line.method
    if isinstance(method, PolicyGradient):
        lines = [*_equations_of_credit(method), *_equations_of_filter(method), *_equations_of_loss(method)]
    else:
        lines = _EQUATIONS[type(method)](method)
    if isinstance(method, Evolution):
        return "```text\n" + "\n".join(lines) + "\n```\n"
    lines += _formula("weight", getattr(method, "reduction", _fixed(method)), _over(method))
    parts = ["loss"]
    if isinstance(method, PolicyGradient):
        parts = ["w · loss" if method.correction is not corrections.uncorrected else "loss"]
        parts += ["β KL"] if method.kl_from_old else []
        parts += [f"{method.kl_in_loss:g} KL"] if method.kl_in_loss else []
        parts += [f"{method.value_weight:g} value_loss"] if isinstance(method, ActorCritic) else []
    if isinstance(method, ExpertIteration):
        lines += _formula("weight", method.balance, "weight, group")
    whole = f"({' + '.join(parts)})" if len(parts) > 1 else parts[0]
    over = "marks" if "head" in method.needs else "trained tokens"
    lines.append(f"L = Σ weight · {whole} over the {over} of a step")
    if line.step == "trust_region":
        lines += [
            "step = argmin of gᵀΔ within ½ Δᵀ F Δ ≤ max_kl, g = ∇L, F the Fisher matrix of π",
            "    then back until L falls and KL(π_old ‖ π) ≤ max_kl",
        ]
        if "value" in method.needs:
            lines.append("    L without value_loss here, whose gradient ends at the critic's own weights")
    return "```text\n" + "\n".join(lines) + "\n```\n"


def typeset(name: str) -> str:
    """The same in TeX, as far as it is a choice of the method's: scripts/tex.toml, by the functions' names.

    KeyError for a choice that has no line there.
    """
    tex = _tex()
    choices = re.findall(r"^\S.* = ([a-z_.\d]+)\(", equations(name), re.MULTILINE)
    return "".join(f"$$\n{tex[each]}\n$$\n\n" for each in choices if each not in NOT_TYPESET)


@functools.cache
def _tex() -> Mapping[str, str]:
    return tomllib.loads((ROOT / "scripts" / "tex.toml").read_text(encoding="utf-8"))


NOT_TYPESET = ("distinct", "every", "max", "doubling")
"""Choices of rows and of numbers, which words say better."""


def _fixed(method: Method) -> Callable[..., Any]:
    """The reduction of a method that has no choice of it: the mean over rows, or over groups."""
    return reduce.per_group if method.unit == "group" else reduce.per_sequence


def _over(method: Method) -> str:
    """What the reduction sees."""
    if method.unit == "group":
        return "mask of answers that are in a pair, group"
    if isinstance(method, Unpaired):
        return "mask of answers that are no probes"
    return "mask of kept answers" if isinstance(method, ExpertIteration) else "mask"


def _formula(left: str, function: Callable[..., Any], given: str, slope: str = "∇logp") -> list[str]:
    """A call of a function with its numbers, and what its docstring says it is."""
    bare = function_of(function)
    numbers = "".join(f", {k}={v:g}" for k, v in _defaults(function).items())
    first, *others = formulas(bare)
    formula, *coefficient = re.split(r"\s{3,}", first)
    # Two choices have a function called clipped, and two one called jensen_shannon.
    twice = bare.__module__.rpartition(".")[2] in ("value", "divergences")
    name = _label(bare) if twice else bare.__name__
    lines = [f"{left} = {name}({given}{numbers})", f"    = {' '.join(formula.split())}"]
    lines += [f"      {other}" for other in others]
    coefficient = coefficient or [p for p in paragraphs(bare)[1:] if p.startswith("c = ")]
    return lines + [f"    ∇loss = -c {slope} with {' '.join(c.split())}" for c in coefficient]


def _equations_of_credit(method: PolicyGradient) -> list[str]:
    """From rewards to advantages."""
    lines = []
    if method.kl_in_reward:
        lines.append(f"r_t = reward_t - {method.kl_in_reward:g} (logp_old - logp_ref)_t")
    reward = "r" if method.kl_in_reward else "reward"
    by = ", token by token" if _by_token(method) else ""
    if isinstance(method, ActorCritic):
        weighed = ", logp_old - logp_gen" if function_of(method.estimator) is returns.vtrace else ""
        given = f"{reward}, mask, V_old{weighed}"
        lines += _formula("Ψ, G", method.estimator, given)
        call, *rest = _formula("A", method.credit, "Ψ, group")
        return [*lines, call + by, *rest]
    lines += _formula("R", method.returns, f"{reward}, mask")
    if method.running_baseline:
        keep = method.running_baseline
        lines.append(f"b = running mean of the earlier updates' mean returns, decay {keep:g}")
    R = "R - b" if method.running_baseline else "R"
    call, *rest = _formula("A", method.credit, f"{R}, group")
    lines += [call + by, *rest]
    if method.turn_weight:
        call, *rest = _formula("G", returns.turns_to_go, f"{reward}, mask, turn_state ≠ 0")
        lines += [call.replace("gamma=1", f"gamma={method.turn_gamma:g}"), *rest]
        credit = function_of(method.credit).__name__
        lines += _formula("A_turn", advantages.credit_turns, f"{credit}, G, turn_state, mask, group")
        lines.append(f"A = A + {method.turn_weight:g} A_turn")
    return lines


def _equations_of_filter(method: PolicyGradient) -> list[str]:
    """From advantages to those that are kept."""
    if method.filter is filters.every_token:
        return []
    return [*_formula("kept", method.filter, _seen_by_filter(method)), "A = 0 where kept is False"]


def _seen_by_filter(method: PolicyGradient) -> str:
    return ", ".join(["mask", *(name for name in COLUMNS if takes(function_of(method.filter), name))])


def _equations_of_loss(method: PolicyGradient) -> list[str]:
    """From advantages to losses."""
    lines = _formula("log r", method.ratio, "logp, logp_old, mask" + _and_advantage(method))
    lines += _formula("loss", method.surrogate, "log r, A")
    if method.correction is not corrections.uncorrected:
        lines += _formula("w", method.correction, "logp_old - logp_gen, mask")
    if method.kl_from_old:
        lines.append("KL = r - 1 - log r, which is k3 of KL(π_old ‖ π) on tokens of π_old")
        beta = f"β = {method.kl_from_old:g}"
        if method.kl_target:
            follow = function_of(method.control).__name__
            beta += f" at first; then β = {follow}(β, KL, {method.kl_target:g})"
        lines.append(beta)
    if method.kl_in_loss:
        lines += _formula("KL", method.kl, "logp, logp_ref")
    if isinstance(method, ActorCritic):
        lines += _formula("value_loss", method.value_loss, "V, G, V_old")
    return lines


def _and_advantage(method: PolicyGradient) -> str:
    """What the ratio reads besides, where the sign of the advantage says on which side it is bounded."""
    return ", A" if function_of(method.ratio) is ratios.by_bounded_sequence else ""


def _equations_of_q(method: SoftQ) -> list[str]:
    """A Q that is made of π and V, and its targets."""
    _, *others = formulas(returns.soft_lambda)
    return [
        f"Q_t = {method.beta:g} (logp - logp_ref)_t + V_t",
        f"g_t = {method.beta:g} (logp_old - logp_ref)_t",
        f"G = soft_lambda(reward, mask, V_old, g, gamma={method.gamma:g}, lam={method.lam:g})",
        *(f"    = {other}" for other in others),
        "loss = ½ (Q - G)²",
    ]


def _equations_of_pairs(method: Preference) -> list[str]:
    """From likelihoods to what an answer is worth, and from margins to losses."""
    given = "logp, logp_ref, mask" if "logp_ref" in method.needs else "logp, mask"
    worth, shaped = "u", method.divergence is not preference.reverse_kl
    lines = _formula("log u" if shaped else "u", method.implicit, given)
    if shaped:
        lines += _formula("v", method.divergence, "log u")
        worth = "v"
    lines.append(f"h = {worth}_w - {worth}_l of each pair (w, l) of a group: R_w > R_l")
    lines += _formula("loss", method.pair_loss, f"h, β={method.beta:g}", "β ∇h")
    times = "" if method.pair_weight == 1 else f"{method.pair_weight:g} "
    if method.sft_weight:
        share = "" if method.sft_weight == 1 else f"{method.sft_weight:g} "
        lines.append(f"loss = {times}loss + {share}NLL_w,  NLL_w = -(1/|y_w|) Σ_t log π(y_w,t)")
    return [*lines, "loss of a group = the mean over its pairs, at each of its tokens"]


def _equations_of_prospect(method: Unpaired) -> list[str]:
    """An answer's worth beside that of answers to other questions."""
    lines = _formula("u", preference.log_ratio, "logp, logp_ref, mask")
    return [
        *lines,
        f"r = β u,  β={method.beta:g}",
        "z = max(0, β · mean of u over the probes), of the policy before the update; no gradient",
        *_formula("loss", preference.prospect, "r, R > 0, z"),
        "    λ_D = desirable_weight, λ_U = undesirable_weight",
        "loss of an answer stands at each of its tokens",
    ]


def _equations_of_comparison(method: PairwiseReward) -> list[str]:
    """From the head's numbers to margins and losses."""
    less = f" - {method.margin:g} (R_w - R_l)" if method.margin else ""
    lines = ["s = the head's number behind the last token of an answer"]
    lines.append(f"h = s_w - s_l{less} of each pair (w, l) of a group: R_w > R_l")
    lines += _formula("loss", method.pair_loss, "h, β=1", "∇h")
    if method.centre:
        lines.append(f"loss = loss + {method.centre:g} (s_w + s_l)²")
    return [*lines, "loss of a group = the mean over its pairs"]


def _equations_of_ranking(method: ListwiseReward) -> list[str]:
    """The likelihood of an order."""
    lines = ["s = the head's number behind the last token of an answer"]
    return [*lines, *_formula("loss", reward.plackett_luce, "s, R, answers of the group")]


def _equations_of_items(method: PointwiseReward) -> list[str]:
    """Numbers beside labels."""
    mark = "each judged step" if method == table.PROCESS_REWARD else "the last token of an answer"
    return [f"s = the head's number behind {mark}", *_formula("loss", method.item_loss, "s, R")]


def _loss_of_imitation(method: Imitation) -> str:
    return "loss = -sg(exp(logp)) logp" if isinstance(method, WeightedImitation) else "loss = -logp"


def _equations_of_imitation(method: Imitation) -> list[str]:
    """The likelihood of what was given, or of what was kept."""
    if not isinstance(method, ExpertIteration):
        return [_loss_of_imitation(method)]
    return [
        "R = Σ_k r_k: the return of the whole answer",
        f"accepted = answers with R ≥ {method.accept:g}",
        *_formula("candidates", method.repeats, "tokens, mask, group, among=accepted"),
        *_formula("kept", method.keep, "R, group, among=candidates"),
        "loss = -logp",
    ]


def _equations_of_distillation(method: Distillation) -> list[str]:
    """The two distributions of each state."""
    given = "log π(· | y_<t), log π_ref(· | y_<t)"
    return _formula("loss", method.token_divergence, given)


def _equations_of_evolution(method: Evolution) -> list[str]:
    """From returns to the fitness of members, and from that to the step."""
    return [
        *_formula("d, s", method.noise, "i"),
        "θ_i = θ + sigma s_i ε_{d(i)}, ε ~ N(0, I): member i of the population, n = rollout.group_size",
        *_formula("F", fitness, "R, member, group"),
        *_formula("z", method.shaping, "F"),
        "g = 1/(n sigma) Σ_i z_i s_i ε_{d(i)}",
        "θ ← θ + lr g",
    ]


_EQUATIONS: Mapping[type, Callable[[Any], list[str]]] = {
    Evolution: _equations_of_evolution,
    SoftQ: _equations_of_q,
    Imitation: _equations_of_imitation,
    WeightedImitation: _equations_of_imitation,
    ExpertIteration: _equations_of_imitation,
    Distillation: _equations_of_distillation,
    Preference: _equations_of_pairs,
    Unpaired: _equations_of_prospect,
    PairwiseReward: _equations_of_comparison,
    ListwiseReward: _equations_of_ranking,
    PointwiseReward: _equations_of_items,
}


def update(name: str) -> str:
    """The update as pseudocode."""
    line = table.METHODS[name]
    method: Any = line.method
    if isinstance(method, Evolution):
        return _update_of_evolution(method)
    if line.loop == "offline":
        begin = [*_NEXT[line.learns], *_columns(line), *_prepared(method)]
        end = _settled(method)
    else:
        taught = "teacher" in method.asks
        begin = [
            "for each of the next rollout.groups tasks:",
            "    draw rollout.group_size answers y ~ π"
            + (
                " [and judge each, if there is a verifier, to measure]"
                if taught
                else ", and judge each: reward"
            ),
            *["    draw one more greedily, and judge it: greedy"] * getattr(method, "asks_greedy", False),
            "drop the groups that rollout.select does not keep"
            + ("" if taught else ", and episodes that nobody could judge"),
        ]
        if taught and method.compare:
            begin.append(
                "[append reference.hint to the prompts of π_ref; leave out rows that lack a field of it]"
            )
        if method.corrects:
            begin.append("add rollout.replay groups of the last rollout.replay_lag updates")
        begin += [*_columns(line), *_prepared(method)]
        end = [*_settled(method), "hand the weights over to the sampler, and prove that they arrived"]
    loss = _losses(line)
    by_advantage = isinstance(method, PolicyGradient) and not isinstance(method, ActorCritic)
    zero = by_advantage and not (method.kl_from_old or method.kl_in_loss or method.pulls)
    step = [
        _weighs(method) + (", and 0 where A is 0" if zero else ""),
        "for each microbatch" + (", of whole groups:" if method.unit == "group" else ":"),
        *(f"    {text}" for text in loss),
        "    add the gradient of Σ weight · loss",
        *_moves(line),
    ]
    if isinstance(method, PolicyGradient) and line.step == "adamw":
        step.append("[no further step once KL(π_old ‖ π), as this one found it, is above steps.target_kl]")
    lines = [
        "for each of run.updates updates:",
        *(f"    {s}" for s in begin),
        "    for each of steps.epochs passes, for each of steps.minibatches parts of the rows:",
        *(f"        {s}" for s in step),
        *(f"    {s}" for s in end),
    ]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _update_of_evolution(method: Evolution) -> str:
    """The update without a loss."""
    noise, shaping = (function_of(chosen).__name__ for chosen in (method.noise, method.shaping))
    lines = [
        "for each of run.updates updates:",
        "    take the next rollout.groups tasks",
        "    for each member i of rollout.group_size:",
        f"        d, s = {noise}(i)",
        "        hand θ + sigma s ε_d over to the sampler, and prove that it arrived",
        "        draw one answer to each task, and judge it: reward",
        "    drop the groups that rollout.select does not keep",
        "    R = sum of reward, row by row",
        "    F = fitness(R, member, group); an answer without a verdict counts as the mean of its task",
        f"    z = {shaping}(F)",
        "    for each parameter:",
        "        draw ε_0, ε_1 ... again, and add lr/(n sigma) Σ_i z_i s_i ε_d(i)",
        "    hand the weights over to the sampler, and prove that they arrived",
    ]
    return "```text\n" + "\n".join(lines) + "\n```\n"


_NEXT: Mapping[str, list[str]] = {
    "text": ["the next batch.batch_size pieces of documents, as rows of a Batch"],
    "answers": ["the next batch.batch_size conversations, as rows of a Batch"],
    "rankings": [
        "the next batch.batch_size rankings: each is a group of a Batch, each of its answers a row,",
        "    and R what the judge gave an answer: of a pair 1 and 0, unless the data says more",
    ],
    "labels": [
        "the next batch.batch_size answers, as rows of a Batch, each a group of its own with its label R",
    ],
    "steps": [
        "the next batch.batch_size answers, as rows of a Batch, marked behind each judged step: R its label",
    ],
}
"""What an offline update takes."""


def _weighs(method: Any) -> str:
    """The weights of a step's losses."""
    if isinstance(method, Preference | PairwiseReward | ListwiseReward):
        return "weight = per_group(mask of the whole step, group), and 0 on answers that are in no pair"
    if isinstance(method, Unpaired):
        return "weight = per_sequence(mask of the whole step without its probes)"
    weight = f"{function_of(method.reduction).__name__}(mask of the whole step)"
    if isinstance(method, ExpertIteration):
        weight = weight.replace("mask of the whole step", "mask of the step's kept answers")
        weight = f"{function_of(method.balance).__name__}({weight}, group)"
    return f"weight = {weight}"


def _columns(line: table.Line) -> list[str]:
    """What the learner fills before prepare."""
    needs, lines = line.method.needs, []
    always = needs & {"logp_old", "value"} or line.step == "trust_region"
    if always or line.method.anchored:
        old = "logp_old, V_old = logp, V" if "value" in needs else "logp_old = logp"
        lines.append(f"{old} of these rows" + ("" if always else ", if there will be several steps"))
    if "logp_ref" in needs:
        once = line.loop == "offline" and not line.method.probes
        text = "logp_ref = logp of these rows under the reference"
        lines.append(text + (", asked once for all updates if it never moves" if once else ""))
    probes = "for each row a probe: its prompt with an answer to another prompt, which is not learnt"
    return [probes, *lines] if line.method.probes else lines


def _prepared(method: Any) -> list[str]:
    """What prepare does, over all rows."""
    if isinstance(method, SoftQ):
        return ["g = beta · (logp_old - logp_ref)", "G = soft_lambda(reward, V_old, g)"]
    if isinstance(method, Unpaired):
        return ["z = max(0, beta · mean of Σ_t logp_old - logp_ref over the probes)"]
    if isinstance(method, ExpertIteration):
        keep, repeats = (function_of(chosen).__name__ for chosen in (method.keep, method.repeats))
        return [
            "R = sum of reward, row by row",
            f"candidates = {repeats}(answers with R ≥ accept, group)",
            f"kept = {keep}(R, group, candidates)",
        ]
    if not isinstance(method, PolicyGradient):
        return []
    pays = "-= " if method.reward_weight else "= -"
    paid = [f"reward {pays}{method.kl_in_reward:g} · (logp_old - logp_ref)"] if method.kl_in_reward else []
    credit, rest = (
        function_of(method.credit).__name__,
        "over all tokens" if _by_token(method) else "row by row",
    )
    if isinstance(method, ActorCritic):
        estimator = function_of(method.estimator).__name__
        weighed = ", logp_old - logp_gen" if function_of(method.estimator) is returns.vtrace else ""
        return [*paid, f"Ψ, G = {estimator}(reward, V_old{weighed})", f"A = {credit}(Ψ, group), {rest}"]
    base = " - b" if method.running_baseline else ""
    R = function_of(method.returns).__name__
    lines = [*paid, f"R = {R}(reward)", f"A = {credit}(R{base}, group), {rest}"]
    if method.turn_weight:
        lines += [
            "G = turns_to_go(reward, first tokens of turns, turn_gamma)",
            f"A += turn_weight · {credit}(G, group and state), turn by turn; 0 in a state with one turn",
        ]
    if method.filter is not filters.every_token:
        lines.append(f"A = 0 but for {function_of(method.filter).__name__}({_seen_by_filter(method)})")
    return lines


def _losses(line: table.Line) -> list[str]:
    """What a microbatch computes."""
    method: Any = line.method
    if isinstance(method, PairwiseReward | ListwiseReward | PointwiseReward):
        return _losses_of_a_head(line)
    both = "logp, V" if "value" in method.needs else "logp"
    seen = "log π(y_t | y_<t), V(y_<t)" if "value" in method.needs else "log π(y_t | y_<t)"
    where = "trained tokens" if line.learns != "answers" or not isinstance(method, Imitation) else ""
    where = where or ("assistant's tokens" if line.loop == "offline" else "kept answers' tokens")
    lines = [f"{both} = {seen} at the {where}"]
    if isinstance(method, Imitation):
        return [*lines, _loss_of_imitation(method)]
    if isinstance(method, Distillation):
        name = function_of(method.token_divergence).__name__
        return [
            "π, π_ref = the distributions over the vocabulary at the trained tokens, chunk by chunk",
            f"loss = {name}(log π, log π_ref)",
        ]
    if isinstance(method, SoftQ):
        return [*lines, "loss = ½ (beta · (logp - logp_ref) + V - G)²"]
    if isinstance(method, Unpaired):
        u = "r = beta · log_ratio(logp, logp_ref), row by row"
        return [*lines, u, "loss = prospect(r, R > 0, z, desirable_weight, undesirable_weight)"]
    if isinstance(method, Preference):
        return [*lines, *_losses_of_pairs(method)]
    name = {c: function_of(vars(method)[c]).__name__ for c in build.choices(method)}
    lines.append(f"log r = {name['ratio']}(logp, logp_old, mask{_and_advantage(method)})")
    lines.append(f"loss = {name['surrogate']}(log r, A)")
    if method.correction is not corrections.uncorrected:
        lines[-1] = f"loss = {name['correction']}(logp_old - logp_gen) · {name['surrogate']}(log r, A)"
    lines += ["       + β · (r - 1 - log r)"] if method.kl_from_old else []
    if isinstance(method, ActorCritic):
        lines.append(f"       + value_weight · value.{name['value_loss']}(V, G, V_old)")
    return [*lines, "       [+ kl_in_loss · kl(logp, logp_ref) - entropy_bonus · entropy]"]


def _losses_of_pairs(method: Preference) -> list[str]:
    """What a microbatch computes of pairs."""
    name = {c: function_of(vars(method)[c]).__name__ for c in build.choices(method)}
    given = "logp, logp_ref" if "logp_ref" in method.needs else "logp"
    worth, shaped = "u", method.divergence is not preference.reverse_kl
    lines = [f"{'log u' if shaped else 'u'} = {name['implicit']}({given}), row by row"]
    if shaped:
        lines.append(f"v = {name['divergence']}(log u)")
        worth = "v"
    lines.append(f"h = {worth}_w - {worth}_l of each pair of a group: R_w > R_l")
    loss = f"{name['pair_loss']}(h, beta)"
    loss = loss if method.pair_weight == 1 else f"pair_weight · {loss}"
    loss += " - sft_weight · mean of logp over y_w" if method.sft_weight else ""
    return [*lines, f"loss = mean over the group's pairs of {loss}"]


def _losses_of_a_head(line: table.Line) -> list[str]:
    """What a microbatch computes of a reward model's numbers."""
    method: Any = line.method
    mark = "each judged step" if line.learns == "steps" else "the last token of each answer"
    lines = [f"s = the head's number behind {mark}"]
    if isinstance(method, PointwiseReward):
        return [*lines, f"loss = {function_of(method.item_loss).__name__}(s, R)"]
    if isinstance(method, ListwiseReward):
        return [*lines, "loss = plackett_luce(s, R) of each group"]
    less = " - margin · (R_w - R_l)" if method.margin else ""
    lines.append(f"h = s_w - s_l{less} of each pair of a group: R_w > R_l")
    loss = f"{function_of(method.pair_loss).__name__}(h, 1)"
    return [*lines, f"loss = mean over the group's pairs of {loss} [+ centre · (s_w + s_l)²]"]


def _moves(line: table.Line) -> list[str]:
    """What is done with the gradient of a step."""
    if line.step == "trust_region":
        moves = [
            "s = (F + trust.damping I)⁻¹ (-gradient), by trust.iterations products with F",
            "Δ = s · √(2 trust.max_kl / sᵀ (F + trust.damping I) s)",
            "of Δ, shrink Δ, shrink² Δ ... (trust.tries of them) add the first that lowers the loss",
            "    with KL(π_old ‖ π) ≤ trust.max_kl, exact over the vocabulary; or none",
        ]
    else:
        moves = ["scale the gradient down to optim.max_grad_norm, and take a step of AdamW"]
    if "value" in line.method.needs:
        same = "a step of AdamW" if line.step == "trust_region" else "the same"
        moves.append(f"{same} for the critic's own weights, with critic.max_grad_norm and critic.lr")
    if "head" in line.method.needs:
        moves.append("the same for the head, with critic.max_grad_norm and critic.lr")
    return moves


def _settled(method: Any) -> list[str]:
    """What is carried into the next update."""
    lines = []
    if "beta" in method.start:
        name = function_of(method.control).__name__
        lines.append(f"β = {name}(β, KL(π_old ‖ π) as the last step found it, kl_target)")
    if "mean" in method.start:
        lines.append("b takes this update's mean return in")
    if "logp_ref" in method.needs:
        lines.append("every reference.refresh_every updates the reference follows the policy")
    return lines


def line_of_table(name: str) -> str:
    """The statement of methods/table.py that makes the method."""
    source = inspect.getsource(table)
    wanted = next((k for k, v in vars(table).items() if v is table.METHODS[name].method), "METHODS")
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == wanted for t in targets):
            return f"```python\n{ast.get_source_segment(source, node)}\n```\n"
        if isinstance(node, ast.Dict) and wanted == "METHODS":
            # It has no name of its own: its line is made in place.
            pairs = zip(node.keys, node.values, strict=True)
            made = next(v for k, v in pairs if isinstance(k, ast.Constant) and k.value == name)
            first, _, rest = (ast.get_source_segment(source, made) or "").partition("\n")
            return f"```python\n{first}\n{textwrap.dedent(rest)}\n```\n"
    raise KeyError(wanted)


def sources(name: str) -> str:
    """What the docstrings of its functions say of where they come from and how they differ."""
    line = table.METHODS[name]
    named = [(label, function) for _, function, label in chosen(name)]
    if isinstance(line.method, SoftQ):
        named = [("q_learning.SoftQ", SoftQ), (_label(returns.soft_lambda), returns.soft_lambda), *named]
    elif not isinstance(line.method, PolicyGradient | Preference):
        cls = type(line.method)
        named = [(f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}", cls), *_BESIDE.get(cls, []), *named]
    if getattr(line.method, "turn_weight", 0.0):
        named += [(_label(f), f) for f in (returns.turns_to_go, advantages.credit_turns)]
    out = [f"- `{label}`: {cell(_notes(thing))}" for label, thing in named]
    if line.step == "trust_region":
        out.append(f"- `trust`: {cell(_notes(trust))}")
    return "\n".join(out) + "\n"


_BESIDE: Mapping[type, list[tuple[str, Callable[..., Any]]]] = {
    Evolution: [(_label(fitness), fitness)],
    Unpaired: [(_label(f), f) for f in (preference.prospect, preference.log_ratio)],
    ListwiseReward: [(_label(reward.plackett_luce), reward.plackett_luce)],
}
"""Functions that a method calls without a choice."""


def _notes(thing: Any) -> str:
    """What a docstring says after its first paragraph; if it says nothing more, what its file does.

    A table of the file is not repeated: then it is the first paragraph itself.
    """
    others = paragraphs(thing)[1:] or paragraphs(inspect.getmodule(thing))[1:]
    return paragraphs(thing)[0] if any(text.startswith("|") for text in others) else " ".join(others)


def truth() -> str:
    """What `posttrain truth` prints."""
    return printed.page(everything())


def card(name: str) -> str:
    """What the head of an evidence card says, and what its rule makes of the figures."""
    it = evidence.find_card(name)
    measured, rule = f"measured with {count(it.seeds)}", ""
    if it.experiment:
        law = find_experiment(it).rules[name]
        measured = law.sentence(it.values) if it.values else f"{law.quantity}, {measured}"
        rule = f"; {law.words}"
    takes = f"{it.minutes:g} minutes on one core; " if it.minutes else ""
    lines = [
        f"**Claim.** {it.claim} ({it.source}).",
        f"**Verdict: {it.verdict}.** {measured[0].upper()}{measured[1:]}{rule}.",
        f"**What would change it.** {it.changes[0].upper()}{it.changes[1:]}.",
        f"```bash\n{it.command}     # {takes}measured {it.date}\n```",
    ]
    return "\n" + "\n\n".join(lines) + "\n\n"


def verdicts(*names: str) -> str:
    """What the cards of these names came to, for a page of the course."""
    cards = [evidence.find_card(name) for name in names]
    lines = [f"[{cell(it.claim)}](../claims/{it.name}.md) | {it.verdict}" for it in cards]
    return rows("claim | verdict", lines)


def claims() -> str:
    """The evidence cards, by verdict."""
    parts, cards = [], evidence.cards().values()
    for verdict in evidence.VERDICTS:
        lines = [
            f"[{cell(it.claim)}](claims/{it.name}.md) | {it.seeds} | "
            + (f"{it.minutes:g}" if it.minutes else "–")
            for it in cards
            if it.verdict == verdict
        ]
        if lines:
            parts.append(f"### {verdict.capitalize()}\n\n{rows('claim | seeds | minutes', lines)}")
    return "\n" + "\n".join(parts) + "\n"


def navigation(text: str) -> str:
    """mkdocs.yml with a line for each evidence card."""
    titles = [(it.name, it.file.read_text(encoding="utf-8")) for it in evidence.cards().values()]
    lines = [
        f"          - {json.dumps(title, ensure_ascii=False)}: claims/{name}.md\n"
        for name, page in titles
        for title in re.findall(r"^# (.+)$", page, re.MULTILINE)[:1]
    ]
    return re.sub(
        r"(# generated: claims\n).*?( *# end\n)",
        lambda m: m[1] + "".join(lines) + m[2],
        text,
        flags=re.DOTALL,
    )


def file(path: str) -> str:
    """A file as it stands."""
    suffix = Path(path).suffix.removeprefix(".")
    return f"```{suffix}\n{(ROOT / path).read_text(encoding='utf-8')}```\n"


def alarms() -> str:
    """The rules that the report checks."""
    return rows("alarm | when", [f"{rule.name} | {cell(rule.says)}" for rule in RULES])


def rules() -> str:
    """The rules that a recipe must keep, with what the error says."""
    lines: dict[str, list[str]] = {}
    for rule in combinations.RULES:
        with shell():  # as a recipe file spells keys
            texts = [rule.condition, *(_in_words(str(text)) for text in (rule.problem, rule.fix))]
        lines.setdefault(" | ".join(texts), []).append(f"`{rule.key}`")
    return rows(
        "key | where | problem | fix", [f"{', '.join(keys)} | {text}" for text, keys in lines.items()]
    )


def _in_words(template: str) -> str:
    """A template of an error, with the names of keys in place of their values."""
    text = re.sub(r"\{([\w.]+)(?:!r)?\}", lambda each: STANDS_FOR.get(each[1], f"*{each[1]}*"), template)
    return cell(text)


def api(*names: str) -> str:
    """What of posttrain is public, with the first paragraph of its docstring."""
    lines = []
    for name in names:
        thing = getattr(posttrain, name)
        called = isinstance(thing, type) or not callable(thing)
        lines.append(f"`{name}{'' if called else '()'}` | {cell(paragraphs(thing)[0])}")
    return rows("name | what it is", lines)


def metrics(section: str) -> str:
    """A table of metrics, each row with an anchor that reports can name."""
    lines = []
    for names, (unit, means, how) in glossary.sections()[section].items():
        named = ", ".join(f"`{name}`" for name in names.split(", "))
        anchor = f'<a id="{glossary.anchor(names.split(", ")[0])}"></a>'
        lines.append(f"{named} | {cell(unit)} | {cell(means)} | {cell(how)} {anchor}")
    return rows("name | unit | meaning | how it is computed", lines)


def registry() -> str:
    """The groups of the registry: where their kinds are named, what they are, and which are ours."""
    lines = []
    for group, what in GROUPS.items():
        named = ", ".join(f"`{name}`" for name, kind in kinds(group).items() if kind.ours)
        lines.append(f"`posttrain.{group}` | {cell(what)} | {named or '–'}")
    return rows("entry points | named as: what it is | ours", lines)


def recipe_results() -> str:
    """What each recipe takes, and what came of it."""
    lines = []
    for name, entry in catalogue().items():
        if entry.stage_of:
            continue
        result = re.sub(r"((?:docs|benchmarks)/[\w/-]+\.md)", _linked, cell(entry.result))
        lines.append(f"[`{name}`](../recipes/{name}.toml) | {entry.takes or '–'} | {result}")
    return rows("recipe | takes | result", lines)


def _linked(match: re.Match[str]) -> str:
    file = match[1]
    page = file.removeprefix("docs/") if file.startswith("docs/") else f"../{file}"
    return f"[{Path(file).stem}]({page})"


BLOCKS: Mapping[str, Callable[..., str]] = {
    "methods": methods,
    "glance": glance,
    "commands": commands,
    "fields": fields,
    "recipe": recipe,
    "facts": facts,
    "equations": equations,
    "typeset": typeset,
    "line": line_of_table,
    "update": update,
    "options": options,
    "sources": sources,
    "alarms": alarms,
    "rules": rules,
    "kinds": registry,
    "api": api,
    "metrics": metrics,
    "truth": truth,
    "card": card,
    "verdicts": verdicts,
    "claims": claims,
    "recipe_results": recipe_results,
    "file": file,
}


# ---------------------------------------------------------------------- rewriting


def renewed(text: str) -> str:
    """A page with its generated parts as they ought to be."""

    def replace(found: re.Match[str]) -> str:
        name, *arguments = found[2].split()
        return f"{found[1]}{BLOCKS[name](*arguments)}{found[4]}"

    return BLOCK.sub(replace, text)


EXAMPLES = (
    "arithmetic_grpo",
    "gsm8k_grpo",
    "methods/ppo",
    "rlhf/sft",
    "rlhf/dpo",
    "rlhf/reward",
    "agents/calculator",
    "pretrain_to_reasoner/pretrain",
)
"""Recipes that llms.txt shows whole."""


def llms() -> str:
    """All that a program needs to write recipes: llms.txt, one file without links to follow."""
    out = [(ROOT / "scripts" / "llms_head.md").read_text(encoding="utf-8")]
    out += [
        f"### {name}\n\n```toml\n{(ROOT / 'recipes' / name).with_suffix('.toml').read_text()}```\n"
        for name in EXAMPLES
    ]
    out += ["## Methods: [method] name\n"]
    for name, line in table.METHODS.items():
        data = DATA[line.learns] if line.loop == "offline" else "tasks"
        out.append(f"- {name}: {line.title}; {line.loop}, learns from {data}")
    out += ["\n## Every key\n", recipe()]
    out += ["## What cannot be combined\n", rules()]
    return "\n".join(out)


def completions() -> str:
    """The names that shells complete: options of commands, keys of recipes, methods."""
    options = {
        words: sorted(o for p in Command(words).load().params for o in p.opts if o.startswith("--"))
        for words in COMMANDS
    }
    names = {"options": options, "keys": sorted(_dotted(Recipe)), "methods": list(table.METHODS)}
    return json.dumps(names, indent=0) + "\n"


def _dotted(cls: type) -> Iterator[str]:
    """Yield the keys of a configuration with those of its tables, dotted."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner, key = nested(hints[field.name]), key_of(field.name)
        if inner:
            yield from (f"{key}.{name}" for name in _dotted(inner))
        elif cls is not Recipe:
            yield key
    if cls is Recipe:
        options = {option for line in table.METHODS.values() for option in build.readable(line.method)}
        yield from (f"method.{option}" for option in {"name", *options})


def stale(root: Path = ROOT) -> dict[Path, str]:
    """The pages whose generated parts are not what the code says, with what they ought to be."""
    pages = [root / "README.md", root / "ARCHITECTURE.md", *sorted((root / "docs").rglob("*.md"))]
    before = {page: page.read_text(encoding="utf-8") for page in pages}
    wanted = {page: renewed(text) for page, text in before.items()}
    drawn = root / "docs" / "architecture.svg"
    if (root / "src").is_dir():
        before[drawn] = drawn.read_text(encoding="utf-8") if drawn.exists() else ""
        wanted[drawn] = picture.architecture(root, before[drawn])
        menu = root / "mkdocs.yml"
        before[menu] = menu.read_text(encoding="utf-8")
        wanted[menu] = navigation(before[menu])
        for file, written in (
            (root / "llms.txt", llms()),
            (root / completion.FILE.relative_to(ROOT), completions()),
            *((p.with_suffix(".ipynb"), site.notebook(p)) for p in (root / "docs/notebooks").glob("*.py")),
        ):
            before[file] = file.read_text(encoding="utf-8") if file.exists() else ""
            wanted[file] = written
    return {page: text for page, text in wanted.items() if text != before[page]}


def main() -> int:
    """Rewrites the stale pages; with --check only names them, and returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is stale")
    check = parser.parse_args().check
    gc.disable()  # every file is parsed, and a collection would visit all its nodes
    found = stale()
    for page, text in found.items():
        print(f"{'stale' if check else 'rewritten'}: {page.relative_to(ROOT)}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
