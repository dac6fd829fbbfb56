"""Serve the page for a rater, or print the summary of labels, for `posttrain label`."""

import json
import math
import signal
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from posttrain.commands.options import progress_bar
from posttrain.errors import counted
from posttrain.report.terminal import out as console
from posttrain.report.terminal import say
from posttrain.types import UserError
from posttrain_people.ensemble import by_disagreement
from posttrain_people.labels import open_log, read_log, write_training
from posttrain_people.questions import MODES, LabelQuestion, ask, read_questions, share_of
from posttrain_people.server import LabelServer
from posttrain_people.summary import Summary, summarise


@dataclass(frozen=True)
class QuestionOrder:
    """Which questions a rater is asked, and in which order."""

    raters: Sequence[str]
    """Names of all raters who share the questions; empty: this rater answers all."""
    ratings: int
    """Raters of one question; 0: all."""
    ensemble: Sequence[str]
    """Run directories of reward models; the questions that they disagree on most come first."""
    limit: int
    """The most questions that are asked; 0: all."""
    seed: int


def serve(
    source: Path | None, out: Path, mode: str, rater: str, order: QuestionOrder, *, separator: str, port: int
) -> None:
    """Ask a rater on a page until Ctrl-C, and write each label to its log and the training data to `out`."""
    if source is None:
        raise UserError("label", "nothing to label is named", "give a run or a JSONL file, or --summary FILE")
    chosen_mode = next((name for name in MODES if name == mode), None)
    if chosen_mode is None:
        raise UserError("--mode", f"unknown mode {mode!r}", f"one of {', '.join(MODES)}")
    if not source.exists():
        raise UserError(str(source), "there is no such file or run", "name a run directory or a JSONL file")
    if not separator:
        raise UserError("--separator", "is empty", "give the text between steps")
    _check_raters(rater, order.raters, order.ratings)
    _check_ensemble(order.ensemble, mode)
    log = open_log(out, chosen_mode)
    questions = ask(
        read_questions(source, chosen_mode, separator.replace("\\n", "\n"), say), chosen_mode, order.seed
    )
    if order.ensemble:
        questions = _order_by_ensemble(questions, order.ensemble)
    if order.raters:
        questions = share_of(questions, rater, order.raters, order.ratings or len(order.raters), order.seed)
    questions = questions[: order.limit or None]
    if log.faulty:
        say(f"{log.file}: {log.faulty} lines are not labels and are left out")
    write_training(log.standing.values(), out)
    server = LabelServer(questions, chosen_mode, rater, log, out, seed=order.seed, port=port)
    with closing(server):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        progress = f"{server.done} of {len(questions)} labelled"
        with suppress(KeyboardInterrupt):
            console.print(f"{server.address} asks {rater}, {progress}; Ctrl-C ends it", soft_wrap=True)
            sys.stdout.flush()
            server.wait()
    records = write_training(log.standing.values(), out)
    progress = f"{server.done} of {len(questions)} labelled by {rater}"
    console.print(f"{out}: {progress}, {counted(records, 'record')} to train on", soft_wrap=True)


def _check_raters(rater: str, raters: Sequence[str], ratings: int) -> None:
    if not rater.strip():
        raise UserError("--rater", "is empty", "give a name")
    if ratings and not raters:
        raise UserError(
            "--ratings", "is a number of raters, and --of names none", "repeat --of NAME for each rater"
        )
    if raters and (rater not in raters or len(set(raters)) < len(raters)):
        raise UserError(
            "--of", f"must name each rater once, with {rater!r}", f"add --of {rater}, or set --rater"
        )
    if ratings > len(raters):
        raise UserError("--ratings", f"{ratings} of {len(raters)} raters", "lower it, or name more with --of")


def _check_ensemble(paths: Sequence[str], mode: str) -> None:
    if paths and mode == "steps":
        raise UserError("--ensemble", "compares answers, and --mode steps has one", "leave it out")
    if paths and len(set(paths)) < max(2, len(paths)):
        raise UserError(
            "--ensemble", "one model has no disagreement", "name two reward models or more, each once"
        )


def _order_by_ensemble(questions: list[LabelQuestion], paths: Sequence[str]) -> list[LabelQuestion]:
    with progress_bar() as bar:
        line = bar.add_task("scoring", total=len(questions))
        return by_disagreement(questions, paths, lambda count: bar.update(line, completed=count))


def print_summary(path: Path, *, as_json: bool) -> None:
    """Print agreement, strengths and reliabilities of the labels of a file."""
    entries = read_log(path)
    result = summarise(entries)
    if as_json:
        print(json.dumps(_finite(asdict(result))))
        return
    _print(result)


def _finite(value: object) -> object:
    """Return infinite numbers as texts, which JSON has."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print(result: Summary) -> None:
    labels, questions = counted(result.labels, "label"), counted(result.questions, "question")
    console.print(f"{labels} of {questions} by {counted(len(result.raters), 'rater')}")
    if result.measure:
        name = {"kappa": "Cohen's kappa", "alpha": "Krippendorff's alpha"}[result.measure]
        value = "undefined" if result.agreement is None else f"{result.agreement:.3f}"
        console.print(f"{name} {value}, from {counted(result.shared, 'shared judgement')}")
    table = Table(
        "rater", "labels", "ties", "bad", "first shown", "seconds", "reliability", box=None, pad_edge=False
    )
    reliability = result.strengths.reliability if result.strengths else {}
    for name, rater in result.raters.items():
        table.add_row(
            name,
            str(rater.labels),
            str(rater.ties),
            str(rater.bad),
            "–" if rater.first is None else f"{rater.first:.0%}",
            f"{rater.seconds:.1f}",
            f"{reliability[name]:.2f}" if name in reliability else "–",
        )
    console.print(table)
    if result.strengths is None:
        console.print(f"no strengths: {result.remark}", soft_wrap=True)
        return
    table = Table("answers by", "strength", "± error", box=None, pad_edge=False)
    strengths = result.strengths.strength
    for name in sorted(strengths, key=lambda name: -strengths[name]):
        table.add_row(name, f"{strengths[name]:.2f}", f"{result.strengths.error[name]:.2f}")
    console.print(table)
