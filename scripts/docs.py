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
from functools import partial
from pathlib import Path
from typing import Any

import typer.main

from posttrain.cli import app
from posttrain.math import advantages, kl, ratios, reduce, surrogate
from posttrain.methods import policy_gradient, table
from posttrain.report.alarms import RULES
from posttrain.runtime.recipe import OFFLINE_ONLY, ONLINE_ONLY, Recipe

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- generated: ([^\n]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CHOICES = ("credit", "ratio", "surrogate", "reduction")

UNSAID = {
    "Arithmetic.operands": "Numbers in a problem.",
    "Arithmetic.low": "The smallest of them.",
    "Arithmetic.high": "The largest of them.",
    "Arithmetic.seed": "Of the order of problems, and so of which ones are held out.",
    "TaskChoice.arithmetic": "Made-up sums; see below.",
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
        for verifier in ("Exact", "Number", "Regex", "Format", "Function")
    },
}
"""Meanings of the keys whose field has no docstring."""

NUMBERS = {
    "eps": "Added to what is divided by.",
    "clip_low": "How far below 1 a ratio counts.",
    "clip_high": "How far above 1 a ratio counts.",
    "cap": "The largest ratio that counts, 1 or more.",
}
"""Meanings of the numbers that functions of math/ take."""


# ---------------------------------------------------------------------- reading the code


def said(cls: type) -> dict[str, str]:
    """The docstring under each field of a class, in one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
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
    """The paragraphs of a docstring, each in one line, without its examples."""
    parts = (inspect.getdoc(thing) or "").split("\n\n")
    return [re.sub(r"\s*\n\s*", " ", p.strip()) for p in parts if not p.lstrip().startswith(">>>")]


def chosen(name: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """(choice, function, file.function) of each choice that a method makes."""
    method = table.METHODS[name].method
    for choice in CHOICES:
        if hasattr(method, choice):
            function = getattr(method, choice)
            while isinstance(function, partial):
                function = function.func
            yield (
                choice,
                function,
                f"{function.__module__.removeprefix('posttrain.math.')}.{function.__name__}",
            )


# ---------------------------------------------------------------------- generated parts


def rows(head: str, lines: Iterator[str] | list[str]) -> str:
    """A Markdown table."""
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|" + "---|" * columns, *(f"| {line} |" for line in lines)]) + "\n"


def cell(text: str) -> str:
    """Text that neither ends a cell nor starts an HTML tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def methods() -> str:
    """The table of methods, as table.described gives it."""
    lines = []
    for name, line in table.METHODS.items():
        choices = table.described(line.method)
        shown = [f"`{choices[c]}`" if c in choices else "–" for c in CHOICES]
        link = f"[`{name}`](docs/methods/{name}.md)"
        lines.append(" | ".join([link, line.title, line.loop, *shown, line.source]))
    return rows("method | what it is | loop | credit | ratio | surrogate | reduction | source", lines)


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
    yield f"{'#' * (2 + path.count('.'))} `[{path}]`\n\n{cell(paragraphs(cls)[0])}{note}\n\n{_keys(cls)}"
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = nested(hints[field.name])
        if inner:
            yield from _tables(f"{path}.{field.name}", inner)


def _method_table() -> str:
    known = " or ".join(f"`{name}`" for name in table.METHODS)
    lines = [
        f"`name` | {known} | required | Which line of the table of methods.",
        *_options("grpo", "its line's"),
    ]
    lines += _numbers_of_functions()
    return (
        "## `[method]`\n\nIts name, and options over its published defaults. Each method's page says what "
        "it reads; anything else is an error.\n\n" + rows("key | type | default | meaning", lines)
    )


def _numbers_of_functions() -> Iterator[str]:
    modules = (advantages, ratios, surrogate, reduce, kl)
    for number, means in NUMBERS.items():
        readers = []
        for choice, module in zip(table.CHOICES, modules, strict=False):
            for name in table.names(choice):
                parameter = inspect.signature(vars(module)[name]).parameters.get(number)
                readers += [f"{name} ({parameter.default:g})"] if parameter else []
        yield f"`{number}` | number | its function's | {means} Read by {', '.join(readers)}."


def options(name: str) -> str:
    """What a recipe's [method] may set besides the name."""
    lines = list(_options(name, ""))
    method = table.METHODS[name].method
    values = {
        key: value
        for choice, _, _ in chosen(name)
        for key, value in _defaults(getattr(method, choice)).items()
        if key in NUMBERS
    }
    lines += [f"`{key}` | number | `{value:g}` | {NUMBERS[key]}" for key, value in values.items()]
    return rows("key | type | default | meaning", lines)


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {k: p.default for k, p in inspect.signature(function).parameters.items()}


def _options(name: str, instead: str) -> Iterator[str]:
    """The choices and own numbers of a method; `instead` stands for the defaults of its choices."""
    method: Any = table.METHODS[name].method
    told = dict(re.findall(r"^    (\w+) +(.+)$", policy_gradient.__doc__ or "", re.MULTILINE))
    docs = said(type(method))
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.name in table.CHOICES:
            values = " or ".join(f"`{n}`" for n in table.names(field.name))
            shown = instead if instead and field.name in CHOICES else f"`{_name(value)}`"
            text = docs.get(field.name) or re.sub(r"\s{2,}", ": ", told[field.name])
            yield f"`{field.name}` | {values} | {shown} | {cell(text[0].upper() + text[1:])}"
        else:
            yield f"`{field.name}` | number | `{value:g}` | {cell(docs[field.name])}"


def _name(function: Callable[..., Any]) -> str:
    return str((function.func if isinstance(function, partial) else function).__name__)


def facts(name: str) -> str:
    """What to know of a method before choosing it."""
    line = table.METHODS[name]
    lines = [f"name in a recipe | `{name}`", f"what it is | {line.title}", f"source | {line.source}"]
    if line.loop == "offline":
        lines += ["loop | offline: learns from conversations that are given", "reference policy | none"]
    else:
        several = "the ratio accounts for it, within its bounds"
        if any(f is surrogate.score for _, f, _ in chosen(name)):
            several = "nothing accounts for it: keep to one"
        lines += [
            "loop | online: learns from answers of the policy itself",
            f"several steps in an update | the policy has moved after the first; {several}",
            "reference policy | only with `kl_in_loss` or `kl_in_reward`",
            f"episodes of a task | {table.least_group(line.method)} or more",
        ]
    return rows("fact | value", [*lines, "critic, reward model | none"])


def equations(name: str) -> str:
    """The formulas of a method's choices, in the letters of the code."""
    calls = {
        "credit": ("A", "(R, group)"),
        "ratio": ("log r", "(logp, logp_old, mask)"),
        "surrogate": ("loss", "(log r, A)"),
        "reduction": ("weight", "(mask)"),
    }
    lines = ["R = Σ_t reward_t"] if any(c == "credit" for c, _, _ in chosen(name)) else ["loss = -logp"]
    for choice, function, _ in chosen(name):
        symbol, given = calls[choice]
        formula, *coefficient = re.split(r"\s{3,}", (inspect.getdoc(function) or "").split("\n\n")[0])
        numbers = "".join(
            f", {k}={v:g}"
            for k, v in _defaults(getattr(table.METHODS[name].method, choice)).items()
            if k in NUMBERS
        )
        lines.append(f"{symbol} = {function.__name__}{given[:-1]}{numbers})")
        lines.append(f"    = {' '.join(formula.split())}")
        lines += [f"    ∇loss = -c ∇logp with {' '.join(c.split())}" for c in coefficient]
    return (
        "```text\n" + "\n".join([*lines, "L = Σ weight · loss over the trained tokens of a step"]) + "\n```\n"
    )


def update(name: str) -> str:
    """The update as pseudocode."""
    names = {choice: function.__name__ for choice, function, _ in chosen(name)}
    if table.METHODS[name].loop == "offline":
        steps = ["the next batch.batch_size conversations, as rows of a Batch"]
        loss = ["logp = log π(y_t | y_<t) at the assistant's tokens", "loss = -logp"]
    else:
        steps = [
            "for each of the next rollout.groups tasks:",
            "    draw rollout.group_size answers y ~ π, and judge each: R",
            "drop the groups that rollout.select does not keep, and episodes that nobody could judge",
            "logp_old = logp of these rows, if there will be several steps",
            f"A = {names['credit']}(R, group)",
        ]
        loss = [
            "logp = log π(y_t | y_<t) at the sampled tokens",
            f"log r = {names['ratio']}(logp, logp_old, mask)",
            f"loss = {names['surrogate']}(log r, A)",
            "       [+ kl_in_loss · kl(logp, logp_ref) - entropy_bonus · entropy]",
        ]
    step = [
        f"weight = {names['reduction']}(mask of the whole step)",
        "for each microbatch:",
        *(f"    {text}" for text in loss),
        "    add the gradient of Σ weight · loss",
        "scale the gradient down to optim.max_grad_norm, and take a step of AdamW",
    ]
    lines = [
        "for each of run.updates updates:",
        *(f"    {s}" for s in steps),
        "    for each of steps.epochs passes, for each of steps.minibatches parts of the rows:",
        *(f"        {s}" for s in step),
    ]
    lines += (
        ["    hand the weights over to the sampler, and prove that they arrived"] if len(names) > 1 else []
    )
    return "```text\n" + "\n".join(lines) + "\n```\n"


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
    out = []
    for _, function, label in chosen(name):
        notes = " ".join(paragraphs(function)[1:])
        out.append(f"- `{label}`: {cell(notes)}")
    return "\n".join(out) + "\n"


def file(path: str) -> str:
    """A file as it stands."""
    suffix = Path(path).suffix.removeprefix(".")
    return f"```{suffix}\n{(ROOT / path).read_text(encoding='utf-8')}```\n"


def alarms() -> str:
    """The rules that the report checks."""
    return rows("alarm | when", [f"{rule.name} | {cell(rule.says)}" for rule in RULES])


BLOCKS: Mapping[str, Callable[..., str]] = {
    "methods": methods,
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
