"""`posttrain eval`: a model on suites of problems, or on the held-out tasks of its recipe."""

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
from posttrain.api.opening import claimed_directory
from posttrain.errors import counted
from posttrain.evaluation.suites import results
from posttrain.evaluation.suites.model import Evaluated, model_of
from posttrain.evaluation.suites.numbers import summary
from posttrain.evaluation.suites.results import lines_of
from posttrain.evaluation.suites.run import SuiteProtocol, answered
from posttrain.evaluation.suites.suite import Suite, SuiteProblem, fingerprint, read
from posttrain.evaluation.suites.table import SUITES, suite_of
from posttrain.models import pretrained
from posttrain.plan.model_info import Say
from posttrain.process import machine
from posttrain.recipe.document import is_run, read_toml
from posttrain.recipe.recipe import EngineChoice
from posttrain.recipe.target import target_of
from posttrain.recipe.verifier import read_verifier
from posttrain.report.terminal import err, out, print_whole, say
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
NAMES = f"Of {', '.join(SUITES)}; several with commas."
JUDGES = "Who judges your own --data: as `posttrain verify` names it; by default the recipe's."
FOLDER = "By default evals/NAME-001 ...; what is there is gone on with."
SETS = "Overrides a key of a recipe: --set eval.temperature=1"


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|RUN_DIR|RECIPE.toml", help="Of a run its newest checkpoint.")
    ],
    suites: Annotated[str | None, typer.Option("--suite", metavar="A,B", help=NAMES)] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only a suite's first problems.")] = None,
    samples: Annotated[int | None, typer.Option("-n", min=1, help="Answers to a problem.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="In place of the suite's.")] = None,
    data: DataFiles = None,
    verifier: Annotated[str | None, typer.Option(help=JUDGES)] = None,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help=FOLDER)] = None,
    seed: Annotated[int, typer.Option(help="Of a suite's draws.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="For a suite: bfloat16 or float32; by default the run's, or what is quick here."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="What answers a suite: native, which it is by default, or vllm.")
    ] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help=SETS)] = None,
    model: Annotated[
        str | None, typer.Option(help="Another model than the recipe's, or than the run's newest checkpoint.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Evaluate a model on suites of problems, or on the held-out tasks of its recipe.

    With --suite, or --data of your own, every answer is judged and written down in --out; an interrupted
    evaluation goes on from there. Without them the held-out tasks of a recipe or a run are answered once, and
    accuracy, reward and length are printed.

    Example: `posttrain eval runs/grpo-001 --suite gsm8k,humaneval --limit 200`
    """
    told: Say = pretrained.silent if as_json else say
    if suites is None and data:
        suites = "own"
    if dtype not in (None, "bfloat16", "float32"):
        raise UserError("--dtype", f"unknown dtype {dtype!r}", "bfloat16 or float32")
    if suites is None:
        given: dict[str, object] = {"--limit": limit, "-n": samples, "--temperature": temperature}
        given |= {
            "--verifier": verifier,
            "--out": folder,
            "--dtype": dtype,
            "--engine": engine,
        }
        for option, value in given.items():
            if value is not None:
                fix = "name them with --suite" + " (or --set eval.limit=N)" * (option == "--limit")
                raise UserError(option, "is for suites", fix)
        _held_out(target, sets or (), model, as_json, told)
        return
    draws = EngineChoice(name=parse_engine(engine or "native"))
    recipe, adapter = model_of(target, sets or (), model, dtype, told, draws)
    machine.configure(recipe.run.threads)
    chosen = _suites(suites, data or (), verifier, limit, target)
    who = Evaluated(recipe, adapter, seed, told)
    asked = [(who.asking(suite, samples, temperature), problems) for suite, problems in chosen]
    _answer(who, asked, folder or claimed_directory(_short(target), "evals"), as_json)


def _short(target: str) -> str:
    """What a model is called in the name of a directory."""
    name = target.rstrip("/").removesuffix(".toml").rpartition("/")[2].rpartition(":")[2]
    return re.sub(r"[^\w.-]+", "-", name)


def _answer(
    who: Evaluated, asked: Sequence[tuple[SuiteProtocol, list[SuiteProblem]]], where: Path, as_json: bool
) -> None:
    """Has the suites answered in this directory, and prints what they came to."""
    prints = {
        each.suite.name: fingerprint(each.suite, problems, each.chat, each.sampling, each.samples)
        for each, problems in asked
    }
    held = claim(where, "wait until it ends, or name another --out", "evaluation")
    try:
        found = results.begun(where, who.name, prints)
        for asking, problems in asked:
            name = asking.suite.name
            _suite(who, asking, problems, where, quiet=as_json)
            found["suites"][name] |= summary(asking.suite, results.answers(where, name))
            results.save(where, found)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"run it again with --out {where}, and it goes on") from None
    finally:
        os.close(held)
    if as_json:
        typer.echo(json.dumps(found))
        return
    print_whole(_table(found, list(prints)))
    out.print(f"every answer: {where}", soft_wrap=True)


def _held_out(target: str, sets: Sequence[str], model: str | None, as_json: bool, told: Say) -> None:
    if not Path(target).exists() and not target.endswith(".toml"):
        raise UserError(
            target,
            "there is no such recipe and no such run, and a model alone has no held-out tasks",
            "name --suite gsm8k, or a recipe",
        )
    found, recipe, adapter = target_of(Path(target), sets, model, told)
    machine.configure(recipe.run.threads)
    with found.located():
        metrics = evaluate_recipe(recipe, adapter, told)
    if as_json:
        known = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        typer.echo(json.dumps(known, allow_nan=False))
        return
    for key, value in metrics.items():
        out.print(f"{key:16} {value:.4f}")


def _suites(
    names: str, data: Sequence[str], verifier: str | None, limit: int | None, target: str
) -> list[tuple[Suite, list[SuiteProblem]]]:
    """The suites that are named, each with its problems."""
    chosen = [suite_of(name) for name in dict.fromkeys(name.strip() for name in names.split(","))]
    files: dict[str, str] = {}
    for each in data:
        key, mark, file = each.partition("=")
        key, file = (key, file) if mark and key.partition(".")[0] in SUITES else ("", each)
        if not key and len(chosen) > 1:
            raise UserError(f"--data {each}", "whose is it?", f"write {chosen[0].name}={each}")
        files[key or chosen[0].name] = file
    wanted = {key for suite in chosen for key in (suite.name, f"{suite.name}.shots")}
    if odd := sorted(set(files) - wanted):
        raise UserError(f"--data {odd[0]}", "this suite is not asked for", "name it in --suite")
    if verifier and not any(suite.name == "own" for suite in chosen):
        raise UserError("--verifier", "the other suites have a judge", "leave it out")
    out = []
    for suite in chosen:
        if suite.name == "own":
            suite = replace(suite, verifier=_judge_of(target, verifier))
        if suite.verifier is not None:
            suite.verifier.require()
        out.append((suite, read(suite, files.get(suite.name), files.get(f"{suite.name}.shots"), limit)))
    return out


def _judge_of(target: str, verifier: str | None) -> Verifier:
    """Return the verifier that is named, or that of the recipe or run; UserError if there is none."""
    file = Path(target) / "config.toml" if is_run(Path(target)) else Path(target)
    if verifier is None and file.suffix == ".toml" and read_toml(file)[0].get("verifier"):
        verifier = str(file)
    if verifier is None:
        fix = "name one with --verifier: number, math, a recipe or module:function (see posttrain verify)"
        raise UserError("--verifier", "who judges?", fix)
    return read_verifier(verifier)


def _suite(
    who: Evaluated, asking: SuiteProtocol, problems: Sequence[SuiteProblem], where: Path, *, quiet: bool
) -> None:
    """Has what is not answered answered, under a bar."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
    file, total = where / f"{asking.suite.name}.jsonl", len(problems) * asking.samples
    if sum(line["score"] is not None for line in lines_of(file)) == total:
        return
    if not quiet and not err.is_terminal:
        who.told(f"{asking.suite.name}: {counted(total, 'answer')}")
    with Progress(
        *columns, TimeRemainingColumn(), console=err, disable=quiet or not err.is_terminal, transient=True
    ) as bar:
        row = bar.add_task(asking.suite.name, total=total)
        answered(asking, who.engine, problems, file, lambda done: bar.update(row, completed=done))


def _table(found: Mapping[str, Any], names: Sequence[str]) -> Table:
    heads = ("suite", "metric", "value", "95 %", "problems", "answers", "errors", "cut off")
    table = Table(*heads, box=None, padding=(0, 1, 0, 0), pad_edge=False)  # whole in 80 columns
    for name in names:
        each = found["suites"][name]
        counts = [each["fingerprint"]["problems"], *(each[key] for key in ("answers", "errors", "cut_off"))]
        for number, (metric, v) in enumerate(each["metrics"].items()):
            value = f"{100 * v['value']:.1f} ± {100 * v['error']:.1f}"
            within = f"{100 * v['low']:.1f} – {100 * v['high']:.1f}"
            rest = [] if number else [str(count) for count in counts]
            table.add_row("" if number else name, metric, value, within, *rest)
    return table
