"""Rewrites the generated parts of README.md and of docs/; with --check only names the stale pages.

A generated part stands between two comments, and everything else on a page is written by hand:

    <!-- generated: equations grpo -->
    <!-- end -->

The first word names a function of BLOCKS, the others are its arguments. What the functions say is
read off the code (docstrings, signatures, defaults), so a page cannot disagree with it for long.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

from posttrain.cli import app
from posttrain.math import corrections, returns, surrogate, trust
from posttrain.methods import choices, policy_gradient, table
from posttrain.methods.actor_critic import ActorCritic
from posttrain.methods.policy_gradient import PolicyGradient
from posttrain.methods.q_learning import SoftQ
from posttrain.report.alarms import RULES
from posttrain.runtime.recipe import OFFLINE_ONLY, ONLINE_ONLY, WHERE_NEEDED, Recipe
from posttrain.truth import printed
from posttrain.truth.table import rows as everything
from posttrain.types import Method

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- generated: ([^\n]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

UNSAID = {
    "Arithmetic.operands": "Numbers in a problem.",
    "Arithmetic.low": "The smallest of them.",
    "Arithmetic.high": "The largest of them.",
    "Arithmetic.seed": "Of the order of problems, and so of which ones are held out.",
    "TaskChoice.arithmetic": "Made-up sums; see below.",
    "TaskChoice.coq": "Theorems to prove in Coq; see below.",
    "TaskChoice.data": "Records of a file or of the Hub; see below.",
    "TaskChoice.guess": "A guessing game of several turns; see below.",
    "TaskChoice.maze": "A text maze of several turns; see below.",
    "TaskChoice.maze_size": "Columns and rows of each maze.",
    "TaskChoice.env": "An environment of yours, which plays the tasks of data; see below.",
    "Guess.high": "Numbers run from 1 to this.",
    "Guess.max_turns": "Guesses in a game.",
    "Guess.shaping": "Most reward that an episode can get for narrowing the range down.",
    "Maze.max_turns": "Moves in an episode.",
    "Games.train": "Games to train on.",
    "Games.held_out": "Games to evaluate on.",
    "UserEnv.options": "Keyword arguments of the factory.",
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
    "VerifierChoice.judge": "A language model's judgement; see its page.",
    "VerifierChoice.model": "A reward model's score; see its page.",
    "VerifierChoice.repetition": "A penalty for saying the same again; see the page on combining.",
    "VerifierChoice.language": "A penalty for another script; see the page on combining.",
    "VerifierChoice.length": "What the length of a response changes; see the page on combining.",
    "VerifierChoice.normalise": "(score − mean) / std, as {mean = 0.4, std = 0.2}.",
    "VerifierChoice.regex": "A pattern; see below.",
    "VerifierChoice.format": "Sections between tags; see below.",
    "VerifierChoice.function": "A Python function of yours; see below.",
    "Exact.marker": "For where = after.",
    "Exact.tag": "For where = tag: <answer> ... </answer>.",
    "Number.where": "Which number counts.",
    "Regex.pattern": "In Python's syntax.",
    "Function.function": "module:function or path/to/file.py:function.",
    "Sampling.max_new_tokens": "Tokens after which an answer is cut off.",
    "Optim.betas": "AdamW's decay rates of the two moments.",
    "Optim.eps": "AdamW's term in the denominator.",
    "Optim.weight_decay": "AdamW's; of matrices only.",
    "Optim.min_lr_ratio": "What is left of lr at the last step.",
    "Tracking.project": "Name of the project at the services that have projects.",
    **{
        f"{verifier}.name": "Under which its score is recorded."
        for verifier in (
            *("Exact", "Number", "Regex", "Format", "Function", "Code", "Lean", "Json", "Sql"),
            *("Grammar", "Repetition", "Language"),
        )
    },
}
"""Meanings of the keys whose field has no docstring."""

NUMBERS = {
    "eps": "Added to what is divided by.",
    "k": "Of how many answers the best counts; a group needs one more.",
    "clip_low": "How far below 1 a ratio counts.",
    "clip_high": "How far above 1 a ratio counts.",
    "cap": "The largest ratio that counts, 1 or more.",
    "tau_up": "How steeply the gate closes where A ≥ 0.",
    "tau_down": "How steeply the gate closes where A < 0.",
    "gamma": "γ: what a reward one token later is worth.",
    "lam": "λ: how far targets look ahead; 0 is one step, 1 to the end.",
    "n": "Steps that a target looks ahead.",
    "rho_cap": "The largest π/π_gen by which an error of V counts.",
    "c_cap": "The largest π/π_gen by which what comes later counts.",
    "weight_cap": "The largest π_old/π_gen that counts.",
    "weight_floor": "The smallest π_old/π_gen that is not rejected.",
    "value_clip": "How far V may move in an update, in units of the return.",
    "gain": "How fast β follows: it changes by at most a fifth of this at a time.",
}
"""Meanings of the numbers that functions of math/ take, and of a Q's of the same name."""

CHOSEN = {
    "psi": "What a token is credited with, and what the critic learns.",
    "value_loss": "The critic's loss.",
}
"""Meanings of the choices that the family's page does not name."""

READ_BY = {
    "critic": "methods with a critic",
    "reference": "methods that compare with a reference policy",
    "trust": "methods whose step is the trust region's",
}
"""Who reads the tables of WHERE_NEEDED."""

STEPS = {"adamw": "AdamW", "trust_region": "natural gradient"}
"""What a line's step is called."""


# ---------------------------------------------------------------------- reading the code


def said(cls: type) -> dict[str, str]:
    """The docstring under each field of a class and of its bases, in one line."""
    found: dict[str, str] = {}
    for base in cls.__bases__:
        found |= said(base) if dataclasses.is_dataclass(base) else {}
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for one, following in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[one.target.id] = " ".join(str(following.value.value).split())
    return found


def meaning(cls: type, name: str) -> str:
    """What a key means; KeyError if neither its field nor UNSAID says so."""
    docs = said(cls)
    return docs[name] if name in docs else UNSAID[f"{cls.__name__}.{name}"]


def nested(hint: Any) -> type | None:
    """The configuration that a key's table holds, if it holds one."""
    return next((a for a in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(a)), None)  # type: ignore[return-value]


def kind(hint: Any) -> str:
    """A type as a person says it."""
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{json.dumps(a)}`" for a in typing.get_args(hint))
    if isinstance(hint, types.UnionType):
        return kind(next(a for a in typing.get_args(hint) if a is not type(None)))
    if nested(hint):
        return "table"
    if typing.get_origin(hint) is tuple:
        inside = {
            "list of numbers" if a is float else "list of texts"
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
    silent = {corrections.uncorrected}
    for choice in choices.choices(method):
        function = choices.function(vars(method)[choice])
        off = choice in ("kl", "control") and choice not in choices.described(method)
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
        cells = [f"[`{name}`](docs/methods/{name}.md)", line.title, line.loop, *_glance(line)]
        lines.append(" | ".join([*cells, line.source]))
    return rows("method | what it is | loop | group | critic | reference KL | step | source", lines)


def _glance(line: table.Line) -> list[str]:
    """Least group, critic, where the reference's KL enters, step."""
    method = line.method
    group = str(choices.least_group(method)) if line.loop == "online" else "–"
    return [group, "yes" if "value" in method.needs else "–", _reference(method), STEPS[line.step]]


def _reference(method: Method) -> str:
    """Where a KL to the reference enters."""
    if isinstance(method, SoftQ):
        return "in Q"
    numbers = choices.numbers(method)
    places = [place for place in ("reward", "loss") if numbers.get(f"kl_in_{place}")]
    return f"in the {places[0]}" if places else "if asked" if "kl_in_loss" in numbers else "–"


def glance() -> str:
    """The seeds' comparison table: critic? reward? whose samples? where does a KL enter?"""
    lines = []
    for name, line in table.METHODS.items():
        method = line.method
        given = "in the data" if isinstance(method, SoftQ) else "none: imitates"
        reward = given if line.loop == "offline" else "verifier"
        old = "old policy, in the loss" if choices.numbers(method).get("kl_from_old") else ""
        old = "old policy, bounds the step" if line.step == "trust_region" else old
        cells = [f"[`{name}`](methods/{name}.md)", "yes" if "value" in method.needs else "no", reward]
        where = _reference(method)
        where = where if where == "–" else f"reference, {where}"
        cells += [_samples(line), old or where, _several(line)]
        lines.append(" | ".join(cells))
    return rows("method | critic | reward | samples | where a KL enters | several steps an update", lines)


def _samples(line: table.Line) -> str:
    """Whose tokens the method may learn from."""
    if line.loop == "offline":
        return "given"
    return "its own, and older ones" if choices.corrects(line.method) else "its own"


def _several(line: table.Line) -> str:
    """What holds the second step on the same samples."""
    method: Any = line.method
    if isinstance(method, SoftQ):
        return "yes, towards fixed targets"
    if line.loop == "offline":
        return "yes"
    if line.step == "trust_region":
        return "each within the region"
    if choices.numbers(method).get("kl_from_old"):
        return "held by the penalty"
    held = {
        "score": "nothing holds it",
        "unclipped": "weighed, not bounded",
        "truncated": "weight bounded",
        "soft_gated": "fades",
    }
    return held.get(choices.function(method.surrogate).__name__, "clipped")


def commands() -> str:
    """The command line, with the first sentence of each command's help."""
    lines = []
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        words = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
        options = [f"`{max(p.opts, key=len)}`" for p in command.params if p.param_type_name == "option"]
        use = cell(" ".join(["posttrain", name, *words]))
        lines.append(f"`{use}` | {cell(command.help.splitlines()[0])} | {' '.join(options) or '–'}")
    return rows("command | what it does | options", lines)


def fields(where: str) -> str:
    """The keys of the configuration called module:Class."""
    module, _, name = where.partition(":")
    cls = getattr(importlib.import_module(f"posttrain.{module}"), name)
    return _keys(cls)


def _keys(cls: type) -> str:
    hints = typing.get_type_hints(cls)
    given = [f for f in dataclasses.fields(cls) if f.init]
    lines = [
        f"`{f.name}` | {kind(hints[f.name])} | {default(f)} | {cell(meaning(cls, f.name))}" for f in given
    ]
    return rows("key | type | default | meaning", lines)


def recipe() -> str:
    """Every table of a recipe with every key."""
    hints = typing.get_type_hints(Recipe)
    parts = []
    for field in dataclasses.fields(Recipe):
        if field.name == "method":
            parts.append(_method_table())
            continue
        cls = nested(hints[field.name])
        assert cls is not None
        parts += list(_tables(field.name, cls))
    return "\n".join(parts)


def _tables(path: str, cls: type) -> Iterator[str]:
    loop = "online" if path in ONLINE_ONLY else "offline" if path in OFFLINE_ONLY else ""
    note = (
        f" Only the {loop} loop reads it; beside a method of the other loop it is an error." if loop else ""
    )
    if path in WHERE_NEEDED:
        note = f" Read by {READ_BY[path]}; beside any other it is an error."
    if path == "optim":
        note = f" Not read by {READ_BY['trust']}; beside one it is an error."
    yield f"{'#' * (2 + path.count('.'))} `[{path}]`\n\n{cell(paragraphs(cls)[0])}{note}\n\n{_keys(cls)}"
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = nested(hints[field.name])
        if inner:
            yield from _tables(f"{path}.{field.name}", inner)


def _method_table() -> str:
    known = " or ".join(f"`{name}`" for name in table.METHODS)
    lines = [f"`name` | {known} | required | Which line of the table of methods."]
    lines += [
        f"`{choice}` | {_names(functions)} | its line's | {_meaning(_reader(choice), choice)}"
        for choice, functions in choices.CHOICES.items()
    ]
    owned: dict[str, list[str]] = {}
    for name, line in table.METHODS.items():
        for number in choices.numbers(line.method):
            owned.setdefault(number, []).append(name)
    own = [number for number in owned if number not in NUMBERS]
    lines += [f"`{n}` | number | its line's | {_meaning(_reader(n), n)}{_only(n)}" for n in own]
    lines += [_number(number, means, owned.get(number, [])) for number, means in NUMBERS.items()]
    return (
        "## `[method]`\n\nIts name, and options over its published defaults. Each method's page says what "
        "it reads; anything else is an error.\n\n" + rows("key | type | default | meaning", lines)
    )


def _reader(key: str) -> type:
    """The most general class of methods that has this field."""
    kinds = {type(line.method) for line in table.METHODS.values() if key in vars(line.method)}
    return min(kinds, key=lambda cls: len(cls.__mro__))


def _only(number: str) -> str:
    """Of a number that part of the table reads: which part."""
    cls = _reader(number)
    if cls is SoftQ:
        return " Read by methods of a Q."
    if cls is ActorCritic:
        return " Read by actor-critics."
    return " Not read by actor-critics." if number in ActorCritic.unread else ""


def _number(number: str, means: str, owners: list[str]) -> str:
    """The line of a number that functions take, or methods by themselves."""
    readers, kinds = [], set()
    for functions in choices.CHOICES.values():
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
    for choice in choices.choices(method):
        functions = choices.CHOICES[choice]
        if choice == "credit" and _by_token(method):
            functions = {f.__name__: f for f in choices.BY_TOKEN}
        default = choices.function(vars(method)[choice]).__name__
        lines.append(f"`{choice}` | {_names(functions)} | `{default}` | {_meaning(type(method), choice)}")
    for key, value in choices.numbers(method).items():
        lines.append(f"`{key}` | number | `{value:g}` | {_meaning(type(method), key)}")
    for choice in choices.choices(method):
        for key, value in choices.parameters(method, choice).items():
            if key != "horizon":
                kind = "whole number" if isinstance(value, int) else "number"
                lines.append(f"`{key}` | {kind} | `{value:g}` | {cell(NUMBERS[key])}")
    return rows("key | type | default | meaning", lines)


def _names(functions: Mapping[str, Any]) -> str:
    return " or ".join(f"`{name}`" for name in functions)


def _meaning(cls: type, key: str) -> str:
    """What a choice or an own number of a method means."""
    told = dict(re.findall(r"^    (\w+) +(.+)$", policy_gradient.__doc__ or "", re.MULTILINE))
    docs = said(cls)
    text = docs.get(key) or CHOSEN.get(key) or NUMBERS.get(key) or re.sub(r"\s{2,}", ": ", told[key])
    # A Greek letter stays small: β is the name of a number.
    return cell((text[0].upper() if text[0].isascii() else text[0]) + text[1:])


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    return {k: p.default for k, p in parameters.items() if isinstance(p.default, (int, float))}


def _by_token(method: Method) -> bool:
    """Whether each token is credited by itself."""
    whole = choices.function(getattr(method, "returns", returns.total)) is returns.total
    return isinstance(method, ActorCritic) or not whole


def facts(name: str) -> str:
    """What to know of a method before choosing it."""
    line = table.METHODS[name]
    lines = [f"name in a recipe | `{name}`", f"what it is | {line.title}", f"source | {line.source}"]
    if line.loop == "offline":
        rewarded = isinstance(line.method, SoftQ)
        lines += [
            "loop | offline: learns from conversations that are given" + ", with rewards" * rewarded,
            f"critic | {_critic(line.method)}",
            f"reward model | {'none: rewards are in the data' if rewarded else 'none'}",
            f"reference policy | {_of_reference(line.method) if rewarded else 'none'}",
            f"step | {_step(line)}",
        ]
        return rows("fact | value", lines)
    lines += [
        "loop | online: learns from answers of the policy itself",
        f"samples of older policies | {_older(line.method)}",
        f"several steps in an update | {_moved(line)}",
        f"critic | {_critic(line.method)}",
        "reward model | none: a verifier or an environment says what an answer is worth",
        f"reference policy | {_of_reference(line.method)}",
        f"step | {_step(line)}",
        f"episodes of a task | {choices.least_group(line.method)} or more",
    ]
    carried = {"beta": "β of its KL", "mean": "the mean return", "variance": "the returns' variance"}
    kept = [carried[key] for key in line.method.start if key in carried]
    lines += [f"kept from update to update | {' and '.join(kept)}; a checkpoint holds it"] if kept else []
    return rows("fact | value", lines)


def _older(method: Method) -> str:
    if choices.corrects(method):
        return "made up for: `rollout.replay` is allowed"
    mend = "`lam` is 0" if isinstance(method, SoftQ) else "`correction` is set"
    return f"taken for its own, so `rollout.replay` is refused unless {mend}"


def _moved(line: table.Line) -> str:
    method: Any = line.method
    if line.step == "trust_region":
        return "each is bounded by the region, from where the one before has left off"
    if isinstance(method, SoftQ):
        return (
            "targets are those of the policy before the first; the loss itself does not ask who drew a token"
        )
    start = "the policy has moved after the first; "
    kind = choices.function(method.surrogate)
    if kind is surrogate.score:
        return start + "nothing accounts for it: keep to one"
    if choices.numbers(method).get("kl_from_old"):
        return start + "the ratio accounts for it, and the penalty, which is 0 at the first, holds it near"
    return start + "the ratio accounts for it, within its bounds"


def _critic(method: Method) -> str:
    if "value" not in method.needs:
        return "none"
    return "a head on the policy's backbone, or a model of its own: `[critic]`"


def _of_reference(method: Method) -> str:
    if "logp_ref" not in method.needs:
        return "only with `kl_in_loss` or `kl_in_reward`"
    return f"its KL is {_reference(method)}; the start of the run, or what follows the policy: `[reference]`"


def _step(line: table.Line) -> str:
    if line.step == "trust_region":
        return "natural gradient, KL(π_old ‖ π) at most `trust.max_kl`: `[trust]`, and no `[optim]`"
    return "AdamW: `[optim]`"


def equations(name: str) -> str:
    """The formulas of a method's choices, in the letters of the code."""
    line = table.METHODS[name]
    method: Any = line.method
    if isinstance(method, SoftQ):
        lines = _equations_of_q(method)
    elif isinstance(method, PolicyGradient):
        lines = [*_equations_of_credit(method), *_equations_of_loss(method)]
    else:
        lines = ["loss = -logp"]
    lines += _formula("weight", method.reduction, "mask")
    parts = ["loss"]
    if isinstance(method, PolicyGradient):
        parts = ["w · loss" if method.correction is not corrections.uncorrected else "loss"]
        parts += ["β KL"] if method.kl_from_old else []
        parts += [f"{method.value_weight:g} value_loss"] if isinstance(method, ActorCritic) else []
    whole = f"({' + '.join(parts)})" if len(parts) > 1 else parts[0]
    lines.append(f"L = Σ weight · {whole} over the trained tokens of a step")
    if line.step == "trust_region":
        lines += [
            "step = argmin of gᵀΔ within ½ Δᵀ F Δ ≤ max_kl, g = ∇L, F the Fisher matrix of π",
            "    then back until L falls and KL(π_old ‖ π) ≤ max_kl",
        ]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _formula(left: str, function: Callable[..., Any], given: str) -> list[str]:
    """A call of a function with its numbers, and what its docstring says it is."""
    bare = choices.function(function)
    numbers = "".join(f", {k}={v:g}" for k, v in _defaults(function).items())
    first, *others = formulas(bare)
    formula, *coefficient = re.split(r"\s{3,}", first)
    # Two choices have a function called clipped.
    name = _label(bare) if left == "value_loss" else bare.__name__
    lines = [f"{left} = {name}({given}{numbers})", f"    = {' '.join(formula.split())}"]
    lines += [f"      {other}" for other in others]
    return lines + [f"    ∇loss = -c ∇logp with {' '.join(c.split())}" for c in coefficient]


def _equations_of_credit(method: PolicyGradient) -> list[str]:
    """From rewards to advantages."""
    lines = []
    if method.kl_in_reward:
        lines.append(f"r_t = reward_t - {method.kl_in_reward:g} (logp_old - logp_ref)_t")
    reward = "r" if method.kl_in_reward else "reward"
    by = ", token by token" if _by_token(method) else ""
    if isinstance(method, ActorCritic):
        weighed = ", logp_old - logp_gen" if choices.function(method.psi) is returns.vtrace else ""
        given = f"{reward}, mask, V_old{weighed}"
        lines += _formula("Ψ, G", method.psi, given)
        call, *rest = _formula("A", method.credit, "Ψ, group")
        return [*lines, call + by, *rest]
    lines += _formula("R", method.returns, f"{reward}, mask")
    if method.running_baseline:
        keep = method.running_baseline
        lines.append(f"b = running mean of the earlier updates' mean returns, decay {keep:g}")
    R = "R - b" if method.running_baseline else "R"
    call, *rest = _formula("A", method.credit, f"{R}, group")
    return [*lines, call + by, *rest]


def _equations_of_loss(method: PolicyGradient) -> list[str]:
    """From advantages to losses."""
    lines = _formula("log r", method.ratio, "logp, logp_old, mask")
    lines += _formula("loss", method.surrogate, "log r, A")
    if method.correction is not corrections.uncorrected:
        lines += _formula("w", method.correction, "logp_old - logp_gen, mask")
    if method.kl_from_old:
        lines.append("KL = r - 1 - log r, which is k3 of KL(π_old ‖ π) on tokens of π_old")
        beta = f"β = {method.kl_from_old:g}"
        if method.kl_target:
            follow = choices.function(method.control).__name__
            beta += f" at first; then β = {follow}(β, KL, {method.kl_target:g})"
        lines.append(beta)
    if isinstance(method, ActorCritic):
        lines += _formula("value_loss", method.value_loss, "V, G, V_old")
    return lines


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


def update(name: str) -> str:
    """The update as pseudocode."""
    line = table.METHODS[name]
    method: Any = line.method
    if line.loop == "offline":
        begin = ["the next batch.batch_size conversations, as rows of a Batch"]
        loss, end = ["logp = log π(y_t | y_<t) at the assistant's tokens", "loss = -logp"], []
        if isinstance(method, SoftQ):
            begin += [*_columns(line), *_prepared(method)]
            loss, end = _losses(method), _settled(method)
    else:
        begin = [
            "for each of the next rollout.groups tasks:",
            "    draw rollout.group_size answers y ~ π, and judge each: reward",
            "drop the groups that rollout.select does not keep, and episodes that nobody could judge",
        ]
        if choices.corrects(method):
            begin.append("add rollout.replay groups of the last rollout.replay_lag updates")
        begin += [*_columns(line), *_prepared(method)]
        loss = _losses(method)
        end = [*_settled(method), "hand the weights over to the sampler, and prove that they arrived"]
    by_advantage = isinstance(method, PolicyGradient) and not isinstance(method, ActorCritic)
    zero = by_advantage and not method.kl_from_old
    weight = f"weight = {choices.function(method.reduction).__name__}(mask of the whole step)"
    step = [
        weight + (", and 0 where A is 0" if zero else ""),
        "for each microbatch:",
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


def _columns(line: table.Line) -> list[str]:
    """What the learner fills before prepare."""
    needs = line.method.needs
    always = needs & {"logp_old", "value"} or line.step == "trust_region"
    old = "logp_old, V_old = logp, V" if "value" in needs else "logp_old = logp"
    lines = [f"{old} of these rows" + ("" if always else ", if there will be several steps")]
    if "logp_ref" in needs:
        lines.append("logp_ref = logp of these rows under the reference")
    return lines


def _prepared(method: Any) -> list[str]:
    """What prepare does, over all rows."""
    if isinstance(method, SoftQ):
        return ["g = beta · (logp_old - logp_ref)", "G = soft_lambda(reward, V_old, g)"]
    paid = [f"reward -= {method.kl_in_reward:g} · (logp_old - logp_ref)"] if method.kl_in_reward else []
    credit, rest = (
        choices.function(method.credit).__name__,
        "over all tokens" if _by_token(method) else "row by row",
    )
    if isinstance(method, ActorCritic):
        psi = choices.function(method.psi).__name__
        weighed = ", logp_old - logp_gen" if choices.function(method.psi) is returns.vtrace else ""
        return [*paid, f"Ψ, G = {psi}(reward, V_old{weighed})", f"A = {credit}(Ψ, group), {rest}"]
    base = " - b" if method.running_baseline else ""
    R = choices.function(method.returns).__name__
    return [*paid, f"R = {R}(reward)", f"A = {credit}(R{base}, group), {rest}"]


def _losses(method: Any) -> list[str]:
    """What a microbatch computes."""
    both = "logp, V" if "value" in method.needs else "logp"
    seen = "log π(y_t | y_<t), V(y_<t)" if "value" in method.needs else "log π(y_t | y_<t)"
    lines = [f"{both} = {seen} at the trained tokens"]
    if isinstance(method, SoftQ):
        return [*lines, "loss = ½ (beta · (logp - logp_ref) + V - G)²"]
    name = {c: choices.function(vars(method)[c]).__name__ for c in choices.choices(method)}
    lines.append(f"log r = {name['ratio']}(logp, logp_old, mask)")
    lines.append(f"loss = {name['surrogate']}(log r, A)")
    if method.correction is not corrections.uncorrected:
        lines[-1] = f"loss = {name['correction']}(logp_old - logp_gen) · {name['surrogate']}(log r, A)"
    lines += ["       + β · (r - 1 - log r)"] if method.kl_from_old else []
    if isinstance(method, ActorCritic):
        lines.append(f"       + value_weight · value.{name['value_loss']}(V, G, V_old)")
    return [*lines, "       [+ kl_in_loss · kl(logp, logp_ref) - entropy_bonus · entropy]"]


def _moves(line: table.Line) -> list[str]:
    """What is done with the gradient of a step."""
    if line.step == "trust_region":
        return [
            "s = (F + trust.damping I)⁻¹ (-gradient), by trust.iterations products with F",
            "Δ = s · √(2 trust.max_kl / sᵀ (F + trust.damping I) s)",
            "of Δ, shrink Δ, shrink² Δ ... (trust.tries of them) add the first that lowers the loss",
            "    with KL(π_old ‖ π) ≤ trust.max_kl, exact over the vocabulary; or none",
        ]
    moves = ["scale the gradient down to optim.max_grad_norm, and take a step of AdamW"]
    if "value" in line.method.needs:
        moves.append("the same for the critic's own weights, with critic.max_grad_norm and critic.lr")
    return moves


def _settled(method: Any) -> list[str]:
    """What is carried into the next update."""
    lines = []
    if "beta" in method.start:
        name = choices.function(method.control).__name__
        lines.append(f"β = {name}(β, KL(π_old ‖ π) as the last step found it, kl_target)")
    if "mean" in method.start:
        lines.append("b takes this update's mean return in")
    if "logp_ref" in method.needs:
        lines.append("every reference.refresh_every updates the reference follows the policy")
    return lines


def line_of_table(name: str) -> str:
    """The statement of methods/table.py that makes the method."""
    source = inspect.getsource(table)
    wanted = next(k for k, v in vars(table).items() if v is table.METHODS[name].method)
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == wanted for t in node.targets
        ):
            return f"```python\n{ast.get_source_segment(source, node)}\n```\n"
    raise KeyError(wanted)


def sources(name: str) -> str:
    """What the docstrings of its functions say of where they come from and how they differ."""
    line = table.METHODS[name]
    named = [(label, function) for _, function, label in chosen(name)]
    if isinstance(line.method, SoftQ):
        named = [("q_learning.SoftQ", SoftQ), (_label(returns.soft_lambda), returns.soft_lambda), *named]
    out = [f"- `{label}`: {cell(_notes(thing))}" for label, thing in named]
    if line.step == "trust_region":
        out.append(f"- `trust`: {cell(_notes(trust))}")
    return "\n".join(out) + "\n"


def _notes(thing: Any) -> str:
    """What a docstring says after its first paragraph; if it says nothing more, what its file does."""
    return " ".join(paragraphs(thing)[1:] or paragraphs(inspect.getmodule(thing))[1:])


def truth() -> str:
    """What `posttrain truth` prints."""
    return printed.page(everything())


def file(path: str) -> str:
    """A file as it stands."""
    suffix = Path(path).suffix.removeprefix(".")
    return f"```{suffix}\n{(ROOT / path).read_text(encoding='utf-8')}```\n"


def alarms() -> str:
    """The rules that the report checks."""
    return rows("alarm | when", [f"{rule.name} | {cell(rule.says)}" for rule in RULES])


BLOCKS: Mapping[str, Callable[..., str]] = {
    "methods": methods,
    "glance": glance,
    "commands": commands,
    "fields": fields,
    "recipe": recipe,
    "facts": facts,
    "equations": equations,
    "line": line_of_table,
    "update": update,
    "options": options,
    "sources": sources,
    "alarms": alarms,
    "truth": truth,
    "file": file,
}


# ---------------------------------------------------------------------- rewriting


def renewed(text: str) -> str:
    """A page with its generated parts as they ought to be."""

    def replace(found: re.Match[str]) -> str:
        name, *arguments = found[2].split()
        return f"{found[1]}{BLOCKS[name](*arguments)}{found[4]}"

    return BLOCK.sub(replace, text)


def stale(root: Path = ROOT) -> dict[Path, str]:
    """The pages whose generated parts are not what the code says, with what they ought to be."""
    pages = [root / "README.md", root / "ARCHITECTURE.md", *sorted((root / "docs").rglob("*.md"))]
    wanted = {page: renewed(page.read_text(encoding="utf-8")) for page in pages}
    return {page: text for page, text in wanted.items() if page.read_text(encoding="utf-8") != text}


def main() -> int:
    """Rewrites the stale pages; with --check only names them, and returns 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page is stale")
    check = parser.parse_args().check
    found = stale()
    for page, text in found.items():
        print(f"{'stale' if check else 'rewritten'}: {page.relative_to(ROOT)}")
        if not check:
            page.write_text(text, encoding="utf-8")
    return 1 if check and found else 0


if __name__ == "__main__":
    sys.exit(main())
