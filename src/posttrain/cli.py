"""The command line: its commands, each imported when it is called, and what their errors print.

A UserError is one line and exit code 2, a RunError one line and exit code 1. Any other exception is one line
too, and its traceback is written to a file.
"""

import errno
import importlib
import inspect
import os
import re
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from posttrain import __main__, __version__
from posttrain.base.kinds import Kind, kinds
from posttrain.commands.completion import complete
from posttrain.errors import RunError, UserError, interrupts, shell

COMPLETES = "_POSTTRAIN_COMPLETE"
"""A shell sets it to ask what may stand where its user presses Tab."""
PATH_ERRORS = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EROFS)
"""Errors of the system for a path that the user named."""
MEMORY_FIX = (
    "for training lower steps.microbatch_tokens or set steps.gradient_checkpointing, for sampling lower "
    "engine.rows; posttrain validate prints what each takes, and --resume continues a saved run"
)

PATH_METAVAR = re.compile(r"\b(FILE|DIR|RUN_DIR)\b|\.toml\b")

COMMANDS: dict[str, tuple[str, str]] = {
    "train": (
        "commands.train:train",
        "Run a recipe or a pipeline of recipes to its end, and write its report.",
    ),
    "sweep": (
        "commands.sweep:sweep",
        "Run every combination of values with several seeds, and say which differences are real.",
    ),
    "validate": (
        "commands.train:validate",
        "Check all that can be checked before weights are read, and print the plan.",
    ),
    "eval": (
        "commands.evaluate:evaluate",
        "Evaluate a model on suites of problems, or on the held-out tasks of its recipe.",
    ),
    "sample": ("commands.train:sample", "Sample answers to one prompt."),
    "serve": (
        "commands.serve:serve",
        "Serve models over the OpenAI chat API on this machine, with a chat page, until Ctrl-C.",
    ),
    "search": (
        "commands.prove:search",
        "Search tasks with a policy, and print answers or proofs with their trees.",
    ),
    "verify": ("commands.verify:verify", "Judge responses as a training run would, without a model."),
    "report": (
        "commands.runs:report",
        "Write report.html of a run, pipeline.html of a pipeline, or one page of several runs.",
    ),
    "run list": (
        "commands.runs:runs",
        "List runs and pipelines: method, updates, state, best evaluation, date, and size on disk.",
    ),
    "run show": ("commands.runs:show", "Print a run's metrics, one line for each update."),
    "run watch": (
        "commands.runs:watch",
        "Serve the report of a run, or of all runs of a folder, and update it until Ctrl-C.",
    ),
    "run compare": (
        "commands.compare:compare",
        "Compare two results of eval, problem by problem: differences with intervals, and exact tests.",
    ),
    "run inspect": (
        "commands.inspection:inspect",
        "Measure what training did to each matrix: how far it moved, and in how many directions.",
    ),
    "run clean": ("commands.clean:clean", "List what runs can do without, ask, and remove it."),
    "model new": (
        "api.new:new",
        "Make a small Llama with random weights, and a tokenizer learned from text.",
    ),
    "model pull": (
        "commands.train:pull",
        "Fetch a model, convert it once if it must be, and print the directory that holds it.",
    ),
    "model export": (
        "commands.export:export",
        "Write a run's model as a directory that transformers, vLLM and other recipes load.",
    ),
    "data show": (
        "commands.show:show",
        "Show the first rows of a recipe's data as the model gets them, with what is trained marked.",
    ),
    "data prefer": (
        "commands.feedback:prefer",
        "Have a model say which of two answers is better, in both orders, and write its preferences.",
    ),
    "data revise": (
        "commands.feedback:revise",
        "Have a model answer prompts, criticise its answers by the constitution, and revise them.",
    ),
    "data steps": (
        "commands.steps:steps",
        "Label each step of a policy's answers by how often the policy, continuing from it, ends right.",
    ),
    "data score": (
        "commands.score:score",
        "Score answers by a policy's implicit reward β log π/π_ref, and compare it with a reward model's.",
    ),
    "data contamination": (
        "commands.contamination:contamination",
        "List the problems of a suite that share a run of words with training data.",
    ),
    "demo": (
        "commands.demo:demo",
        "Train a real model with GRPO until it adds numbers, and show how: two to four minutes.",
    ),
    "init": (
        "commands.init:init",
        "Write a recipe of your own, with its data and its reward, to begin from.",
    ),
    "recipes": (
        "commands.recipes:recipes",
        "List the recipes that come with posttrain, print one, or copy it.",
    ),
    "schema": ("commands.recipes:schema", "Print the JSON Schema of a recipe, plugins included."),
    "methods": ("commands.methods:methods", "Print the table of methods: what each chooses, and its source."),
    "doctor": (
        "commands.doctor:doctor",
        "Report what this machine has, what is missing for which feature, and how to get it.",
    ),
}
"""The module and function of each command, and the first sentence of its help."""
GROUPS = {
    "run": "List, follow, compare and tidy up runs.",
    "model": "Make, fetch and export models.",
    "data": "Make and check data.",
}
"""The first words of commands of two words, and their help."""


def plugin_commands() -> dict[str, Kind]:
    """Return the commands of plugins by name, except those named like a command or a group of posttrain."""
    return {name: kind for name, kind in kinds("commands").items() if name not in {*COMMANDS, *GROUPS}}


class Command(TyperCommand):
    """A command that is imported when it is called; help needs only its words and one sentence."""

    def __init__(self, words: str, **options: Any) -> None:
        super().__init__(words.split()[-1], **options)
        self.words = words

    def load(self) -> TyperCommand:
        """Import the command, and return it with its options."""
        if self.words in COMMANDS:
            module, _, function = COMMANDS[self.words][0].partition(":")
            call = getattr(importlib.import_module(f"posttrain.{module}"), function)
        else:
            call = plugin_commands()[self.words].load()
        one = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
        one.command(self.name)(_with_home(call))
        loaded: Any = typer.main.get_command(one)
        return loaded  # type: ignore[no-any-return]

    def make_context(self, *words: Any, **more: Any) -> Any:
        """Load the command and make its context; from here on Ctrl-C raises KeyboardInterrupt."""
        if more.get("resilient_parsing") and COMPLETES in os.environ:
            context = self.context_class(self, info_name=words[0], parent=more.get("parent"))
            context.args = list(words[1])
            return context
        loaded = self.load()
        __main__.finish_imports()
        return loaded.make_context(*words, **more)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return what a shell may complete to."""
        return list(complete(self.words, ctx.args, incomplete))


def _with_home(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command to expand a leading ~ of its paths, which shells leave in --run-dir=~/run.

    Paths are parameters annotated as Path, and text whose metavar names a file or a directory.
    """
    hints = typing.get_type_hints(call, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    metavars = {name: str(getattr(mark[0], "metavar", "")) for name, mark in marks.items() if mark}
    texts = {name for name, metavar in metavars.items() if PATH_METAVAR.search(metavar)}

    def expand(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(expand(name, item) for item in value)
        if isinstance(value, Path):
            return value.expanduser()
        return os.path.expanduser(value) if isinstance(value, str) and name in texts else value

    @wraps(call)
    def command(**values: Any) -> Any:
        return call(**{name: expand(name, value) for name, value in values.items()})

    return command


class Commands(TyperGroup):
    """The commands of one word, and the groups of commands of two words."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for words, (_, sentence) in COMMANDS.items():
            group, _, name = words.rpartition(" ")
            place = self.commands
            if group:
                if group not in place:
                    place[group] = TyperGroup(
                        name=group,
                        help=GROUPS[group],
                        commands={},
                        no_args_is_help=True,
                        rich_markup_mode="markdown",
                    )
                place = place[group].commands  # type: ignore[attr-defined]
            place[name] = Command(words, help=sentence)
        for name in plugin_commands():
            self.commands[name] = Command(name, rich_help_panel="By other packages")

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, and import the commands of plugins for their first sentences."""
        for name, kind in plugin_commands().items():
            try:
                sentence = (inspect.getdoc(kind.load()) or "").partition("\n")[0]
            except UserError as error:
                sentence = f"({error.problem})"
            self.commands[name].help = sentence or f"A command of {kind.origin}."
        super().format_help(ctx, formatter)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of language models.",
    epilog="Start with `posttrain demo`, `posttrain recipes` or `posttrain init mine`.",
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"posttrain {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None: ...


@shell()
def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code; print what it raises as one line on stderr."""
    commands = typer.main.get_command(app)
    if COMPLETES in os.environ:  # a shell asks what may stand here
        commands.main(prog_name="posttrain")
    try:
        with interrupts(), commands.make_context("posttrain", list(words)) as context:
            code = commands.invoke(context)
        sys.stdout.flush()  # report a full disk here, not from the interpreter's exit
        return code if isinstance(code, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except BrokenPipeError:
        # The reader has closed the pipe, as `| head` does, which is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (typer.Abort, KeyboardInterrupt) as error:
        _say(f"interrupted{f'; {error}' if str(error) else ''}")
        return 130
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Print an exception as one line, and return the exit code."""
    if hasattr(error, "exit_code") and hasattr(error, "show"):  # a usage error of click
        context = getattr(error, "ctx", None)
        help_ = f"; see {context.command_path} --help" if context else ""
        message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        if "unexpected extra argument" in message and "=" in message:  # as verl's users write keys
            help_ = "; give keys of the recipe as --set A.B=C"
        if message:  # empty without a command, as click then prints the help
            _say(f"{message}{help_}")
        return int(error.exit_code)
    if isinstance(error, UserError | RunError):
        _say(str(error))
        return 2 if isinstance(error, UserError) else 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        _say(f"a name is too long: {str(error.filename)[:60]}...")
        return 2
    if isinstance(error, OSError) and error.errno in PATH_ERRORS and error.filename is not None:
        _say(f"{error.filename}: {error.strerror}")
        return 2
    first = next(iter(str(error).strip().splitlines()), "")
    # By name, as torch may not be imported.
    if type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in first:
        _say(f"out of memory: {first[:300]}; {MEMORY_FIX}")
        return 1
    try:
        number, name = tempfile.mkstemp(prefix="posttrain-", suffix=".log")
        with open(number, "w", errors="backslashreplace") as file:
            traceback.print_exception(error, file=file)
        place = f"the traceback is in {name}"
    except OSError as second:
        place = f"its traceback could not be kept: {second}"
    _say(f"{type(error).__name__}{': ' if first else ''}{first[:300]}; {place}")
    return 1


def _say(line: str) -> None:
    typer.echo(f"error: {' '.join(line.splitlines())}", err=True)
