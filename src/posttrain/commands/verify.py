"""`posttrain verify`: judge responses of a file."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from posttrain.base.kinds import kinds
from posttrain.commands.options import progress_bar
from posttrain.evaluation.agreement import Agreement, measure_agreement, read_gold
from posttrain.evaluation.verdicts import read_responses, read_tasks, verdicts
from posttrain.process.workers import most_workers
from posttrain.recipe.verifier import read_verifier
from posttrain.report.terminal import err
from posttrain.types import UserError, Verdict


def verify(
    verifier: Annotated[
        str, typer.Argument(help=f"One of {', '.join(kinds('verifiers'))}; or a recipe; or module:function.")
    ],
    tasks: Annotated[Path, typer.Argument(metavar="TASKS.jsonl", help="`id` and the verifier's fields.")],
    responses: Annotated[
        Path, typer.Argument(metavar="RESPONSES.jsonl", help="`id` of the task and `response`.")
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="An option of the verifier: --set partial=true"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that judge in parallel.")] = 2,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds for one verdict, unless the verifier sets a limit.")
    ] = 60.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="One verdict a line: id, class, score, reason, seconds.")
    ] = False,
    gold: Annotated[
        bool,
        typer.Option(
            "--gold",
            help="Compare the scores with the labels of RESPONSES: `gold` or `label`, true or 0 to 1.",
        ),
    ] = False,
) -> None:
    """Judge responses as a training run would, without a model.

    The verdicts come in the order of the responses. A score of null means that the verifier could not
    judge: training masks and counts such an episode, and gives it no reward of 0.

    Example: `posttrain verify math tasks.jsonl responses.jsonl --json`
    """
    judge = read_verifier(verifier, sets or ())
    tasks_by_id = read_tasks(tasks)
    answers = read_responses(responses, tasks_by_id)
    if gold:
        for response in answers:
            read_gold(response)  # for its UserError, before a judge is paid
    judged: list[Verdict] = []
    classes: Counter[str] = Counter()
    scores: list[float] = []
    if workers > (most := most_workers()):
        raise UserError("--workers", f"this machine has room for {most}", "lower it")
    with progress_bar(hidden=as_json) as bar:
        line = bar.add_task("judging", total=len(answers))
        outcomes = verdicts(
            judge,
            answers,
            workers=workers,
            deadline_s=deadline,
            on_progress=lambda count: bar.update(line, completed=count),
        )
        for response, verdict in zip(answers, outcomes, strict=True):
            classes[verdict.label] += 1
            judged.append(verdict)
            if verdict.score is not None:
                scores.append(verdict.score)
            if as_json:
                typer.echo(_as_json(response.task.id, verdict))
            else:
                score = "-" if verdict.score is None else f"{verdict.score:g}"
                typer.echo(f"{response.task.id}\t{verdict.label}\t{score}\t{verdict.reason}")
    if not as_json:
        _print_summary(classes, scores)
    if gold:
        _print_agreement(measure_agreement(answers, judged))


def _as_json(name: str, verdict: Verdict) -> str:
    return json.dumps(
        {
            "id": name,
            "class": verdict.label,
            "score": verdict.score,
            "reason": verdict.reason,
            "seconds": round(verdict.seconds, 6),
        }
    )


def _print_summary(classes: Counter[str], scores: list[float]) -> None:
    total = sum(classes.values())
    table = Table("class", "responses", "share")
    for label, count in classes.most_common():
        table.add_row(label, str(count), f"{count / total:.1%}")
    err.print(table)
    mean = f"mean score {sum(scores) / len(scores):.4g}" if scores else "no score"
    failed = total - len(scores)
    err.print(mean + (f"; {failed} could not be judged" if failed else ""))


def _print_agreement(agreement: Agreement) -> None:
    """Print the agreement with the gold labels on stderr."""
    table = Table("agreement with gold", "value", "95% interval")
    for name in ("accuracy", "kappa", "auc"):
        number = getattr(agreement, name)
        table.add_row(name, f"{number.value:.3f}", f"{number.low:.3f} to {number.high:.3f}")
    err.print(table)
    if agreement.disagree is not None:
        orders = f"orders that contradict each other {agreement.disagree:.1%}"
        err.print(f"{orders}; bias to the first {agreement.bias:+.3f}")
    bins = Table("score", "responses", "mean score", "gold rate", "95% interval")
    for part in agreement.bins:
        bounds = f"{part.gold_low:.3f} to {part.gold_high:.3f}"
        span = f"{part.low:g} to {part.high:g}"
        bins.add_row(span, str(part.count), f"{part.score:.3f}", f"{part.gold:.3f}", bounds)
    err.print(bins)
