"""`posttrain eval`: evaluate a model on suites of problems, or on the held-out tasks of its recipe."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from posttrain.api.answering import evaluate_recipe, parse_engine
from posttrain.api.opening import claim_directory
from posttrain.commands.options import Json, Model, check_dtype
from posttrain.errors import counted
from posttrain.evaluation.suites import results
from posttrain.evaluation.suites.model import EvaluatedModel, resolve_target
from posttrain.evaluation.suites.numbers import summary
from posttrain.evaluation.suites.results import read_lines
from posttrain.evaluation.suites.run import SuiteProtocol, answer_problems
from posttrain.evaluation.suites.suite import Suite, SuiteProblem, fingerprint, read
from posttrain.evaluation.suites.table import SUITES, suite_of
from posttrain.models import pretrained
from posttrain.models.checkpoint import split_run
from posttrain.plan.model_info import Say
from posttrain.process import machine
from posttrain.recipe.document import is_run, read_toml
from posttrain.recipe.recipe import EngineChoice
from posttrain.recipe.target import target_of
from posttrain.recipe.verifier import read_verifier
from posttrain.report.terminal import err, out, print_wide, say
from posttrain.run.rundir import claim
from posttrain.types import UserError
from posttrain.verifiers.protocol import Verifier

DataFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="[SUITE=]FILE",
        help="Your own problems; with --suite its problems, and SUITE.shots=FILE its solved examples.",
    ),
]
NAMES = f"Some of {', '.join(SUITES)}, with commas."
JUDGES = "The verifier of your own --data, as for `posttrain verify`; by default the recipe's."
FOLDER = "By default evals/NAME-001 ...; an evaluation in it is continued."
SETS = "Overrides a key of a recipe: --set eval.temperature=1"


def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN_DIR|RECIPE.toml",
            help="A run means its newest checkpoint, RUN_DIR@best or RUN_DIR@UPDATE another.",
        ),
    ],
    suites: Annotated[str | None, typer.Option("--suite", metavar="A,B", help=NAMES)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only a suite's first problems.")] = None,
    samples: Annotated[int | None, typer.Option("-n", min=1, help="Answers to a problem.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="By default the suite's.")] = None,
    data: DataFiles = None,
    verifier: Annotated[str | None, typer.Option(help=JUDGES)] = None,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help=FOLDER)] = None,
    seed: Annotated[int, typer.Option(help="Seed of a suite's answers.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="For a suite: bfloat16 or float32; by default the run's, or what is quick here."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine that answers a suite: native, the default, or vllm.")
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help=SETS)] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model on suites of problems, or on the held-out tasks of its recipe.

    With --suite, or --data of your own, every answer is judged and written to --out; an interrupted
    evaluation continues there. Without them the held-out tasks of a recipe or a run are answered once,
    and accuracy, reward and length are printed.

    Example: `posttrain eval runs/grpo-001 --suite gsm8k,humaneval --limit 200`
    """
    log: Say = pretrained.silent if as_json else say
    if suites is None and data:
        suites = "own"
    check_dtype(dtype)
    if suites is None:
        suite_options: dict[str, object] = {"--limit": limit, "-n": samples, "--temperature": temperature}
        suite_options |= {"--verifier": verifier, "--out": folder, "--dtype": dtype, "--engine": engine}
        for option, value in suite_options.items():
            if value is not None:
                fix = "name them with --suite" + " (or --set eval.limit=N)" * (option == "--limit")
                raise UserError(option, "is for suites", fix)
        _held_out(target, sets or (), model, as_json, log)
        return
    engine_choice = EngineChoice(name=parse_engine(engine or "native"))
    recipe, adapter = resolve_target(target, sets or (), model, dtype, log, engine_choice)
    machine.configure(recipe.run.threads)
    suite_problems = _suites(suites, data or (), verifier, limit, target)
    policy = EvaluatedModel(recipe, adapter, seed, log)
    protocols = [(policy.asking(suite, samples, temperature), problems) for suite, problems in suite_problems]
    _answer(policy, protocols, folder or claim_directory(_short(target), "evals"), as_json)


def _short(target: str) -> str:
    """Return the name of a model for a directory."""
    name = target.rstrip("/").removesuffix(".toml").rpartition("/")[2].rpartition(":")[2]
    return re.sub(r"[^\w.-]+", "-", name)


def _answer(
    policy: EvaluatedModel,
    suites: Sequence[tuple[SuiteProtocol, list[SuiteProblem]]],
    folder: Path,
    as_json: bool,
) -> None:
    """Answer the suites in this directory, and print their metrics."""
    fingerprints = {
        p.suite.name: fingerprint(p.suite, problems, p.chat, p.sampling, p.samples) for p, problems in suites
    }
    lock = claim(folder, "wait until it ends, or name another --out", "evaluation")
    try:
        result = results.begun(folder, policy.name, fingerprints)
        for protocol, problems in suites:
            name = protocol.suite.name
            _suite(policy, protocol, problems, folder / f"{name}.jsonl", quiet=as_json)
            result["suites"][name] |= summary(protocol.suite, results.answers(folder, name))
            results.save(folder, result)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"continue it with --out {folder}") from None
    finally:
        os.close(lock)
    if as_json:
        typer.echo(json.dumps(result))
        return
    print_wide(_table(result, list(fingerprints)))
    out.print(f"every answer: {folder}", soft_wrap=True)


def _held_out(target: str, sets: Sequence[str], model: str | None, as_json: bool, log: Say) -> None:
    run, which = split_run(target)
    if which and model is None:
        target, model = str(run), target
    if not Path(target).exists() and not target.endswith(".toml"):
        raise UserError(
            target,
            "there is no such recipe and no such run, and a model alone has no held-out tasks",
            "name --suite gsm8k, or a recipe",
        )
    loaded, recipe, adapter = target_of(Path(target), sets, model, log)
    machine.configure(recipe.run.threads)
    with loaded.located():
        metrics = evaluate_recipe(recipe, adapter, log)
    if as_json:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        typer.echo(json.dumps(finite, allow_nan=False))
        return
    for key, value in metrics.items():
        out.print(f"{key:16} {value:.4f}")


def _suites(
    names: str, data: Sequence[str], verifier: str | None, limit: int | None, target: str
) -> list[tuple[Suite, list[SuiteProblem]]]:
    """Return the suites of --suite, each with its problems."""
    suites = [suite_of(name) for name in dict.fromkeys(name.strip() for name in names.split(","))]
    files: dict[str, str] = {}
    for text in data:
        key, mark, file = text.partition("=")
        key, file = (key, file) if mark and key.partition(".")[0] in SUITES else ("", text)
        if not key and len(suites) > 1:
            raise UserError(f"--data {text}", "whose is it?", f"write {suites[0].name}={text}")
        files[key or suites[0].name] = file
    valid = {key for suite in suites for key in (suite.name, f"{suite.name}.shots")}
    if unknown := sorted(set(files) - valid):
        raise UserError(f"--data {unknown[0]}", "this suite is not asked for", "name it in --suite")
    if verifier and not any(suite.name == "own" for suite in suites):
        raise UserError("--verifier", "the other suites have a judge", "leave it out")
    pairs = []
    for suite in suites:
        if suite.name == "own":
            suite = replace(suite, verifier=_judge_of(target, verifier))
        if suite.verifier is not None:
            suite.verifier.require()
        pairs.append((suite, read(suite, files.get(suite.name), files.get(f"{suite.name}.shots"), limit)))
    return pairs


def _judge_of(target: str, verifier: str | None) -> Verifier:
    """Return the verifier of --verifier, or of the recipe or run; raise UserError without one."""
    file = split_run(target)[0] / "config.toml" if is_run(Path(target)) else Path(target)
    if verifier is None and file.suffix == ".toml" and read_toml(file)[0].get("verifier"):
        verifier = str(file)
    if verifier is None:
        fix = "name one with --verifier: number, math, a recipe or module:function (see posttrain verify)"
        raise UserError("--verifier", "who judges?", fix)
    return read_verifier(verifier)


def _suite(
    policy: EvaluatedModel,
    protocol: SuiteProtocol,
    problems: Sequence[SuiteProblem],
    file: Path,
    *,
    quiet: bool,
) -> None:
    """Answer the problems that have no answer yet, under a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    total = len(problems) * protocol.samples
    if sum(line["score"] is not None for line in read_lines(file)) == total:
        return
    if not quiet and not err.is_terminal:
        policy.told(f"{protocol.suite.name}: {counted(total, 'answer')}")
    with Progress(
        *columns, TimeRemainingColumn(), console=err, disable=quiet or not err.is_terminal, transient=True
    ) as bar:
        row = bar.add_task(protocol.suite.name, total=total)
        answer_problems(protocol, policy.engine, problems, file, lambda done: bar.update(row, completed=done))


def _table(result: Mapping[str, Any], names: Sequence[str]) -> Table:
    heads = ("suite", "metric", "value", "95 %", "problems", "answers", "errors", "cut off")
    table = Table(*heads, box=None, padding=(0, 1, 0, 0), pad_edge=False)  # fits in 80 columns
    for name in names:
        suite = result["suites"][name]
        counts = [suite["fingerprint"]["problems"], *(suite[key] for key in ("answers", "errors", "cut_off"))]
        for number, (metric, estimate) in enumerate(suite["metrics"].items()):
            value = f"{100 * estimate['value']:.1f} ± {100 * estimate['error']:.1f}"
            within = f"{100 * estimate['low']:.1f} – {100 * estimate['high']:.1f}"
            rest = [] if number else [str(count) for count in counts]
            table.add_row("" if number else name, metric, value, within, *rest)
    return table
