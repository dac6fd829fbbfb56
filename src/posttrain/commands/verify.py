"""`posttrain verify`: judge responses of a file, or the recorded answers of a run again."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from posttrain.base.kinds import kinds
from posttrain.commands.options import progress_bar
from posttrain.errors import counted
from posttrain.evaluation.agreement import Agreement, measure_agreement, read_gold
from posttrain.evaluation.verdicts import RecordedAnswer, Response, read_responses, read_tasks, verdicts
from posttrain.models.checkpoint import numbered, select, split_run
from posttrain.process.workers import most_workers
from posttrain.recipe.document import is_run
from posttrain.recipe.verifier import read_verifier
from posttrain.report.terminal import console, err, out, say
from posttrain.types import UserError, Verdict
from posttrain.verifiers.protocol import Verifier

SHOWN = 20
"""Changed verdicts that are printed."""


def verify(
    verifier: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join(kinds('verifiers'))}; or a recipe or a run; or module:function."
        ),
    ],
    tasks: Annotated[
        Path,
        typer.Argument(
            metavar="TASKS.jsonl|RUN_DIR",
            help="`id` and the verifier's fields; or a run, whose recorded answers are judged again.",
        ),
    ],
    responses: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RESPONSES.jsonl]", help="`id` of the task and `response`; not given with a run."
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="An option of the verifier: --set partial=true"),
    ] = None,
    update: Annotated[
        int | None,
        typer.Option(min=0, help="Of a run, judge only the answers of this update and its evaluation."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of a run with several sources, judge only answers to the tasks of this one."
        ),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that judge in parallel.")] = 2,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds for one verdict, unless the verifier sets a limit.")
    ] = 60.0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="One verdict a line: id, class, score, reason, seconds. Of a run one line."
        ),
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
    Of a run, the answers in its samples/ are judged again, and a table counts them by the class of their
    recorded and of their new verdict: what a changed verifier would have changed. If VERIFIER is a recipe or
    a run, each source of tasks is judged by its own verifier.

    Example: `posttrain verify math tasks.jsonl responses.jsonl --json` or `posttrain verify mine.py:f runs/a`
    """
    if responses is None and is_run(tasks):
        if gold:
            raise UserError("--gold", "labels are of a file of responses, and this is a run", "leave it out")
        _verify_run(
            verifier, sets or (), tasks, update, source, workers=workers, deadline=deadline, as_json=as_json
        )
        return
    judge = read_verifier(verifier, sets or ())
    if responses is None:
        problem = "there is no RESPONSES.jsonl, and it is not a run"
        raise UserError(str(tasks), problem, "name the file of responses, or a run directory")
    if update is not None or source is not None:
        raise UserError("--source" if update is None else "--update", "is of a run", "leave it out")
    answers = read_responses(responses, read_tasks(tasks))
    if gold:
        for response in answers:
            read_gold(response)  # for its UserError, before a judge is paid
    judged: list[Verdict] = []
    classes: Counter[str] = Counter()
    scores: list[float] = []
    with _judged(judge, answers, workers=workers, deadline=deadline, hidden=as_json) as outcomes:
        for response, verdict in zip(answers, outcomes, strict=True):
            classes[verdict.label] += 1
            judged.append(verdict)
            if verdict.score is not None:
                scores.append(verdict.score)
            if as_json:
                typer.echo(_as_json(response.task.id, verdict))
            else:
                score = _score(verdict.score)
                typer.echo(f"{response.task.id}\t{verdict.label}\t{score}\t{verdict.reason}")
    if not as_json:
        _print_summary(classes, scores)
    if gold:
        _print_agreement(measure_agreement(answers, judged))


@contextmanager
def _judged(
    judge: Verifier, answers: Sequence[Response], *, workers: int, deadline: float, hidden: bool
) -> Iterator[Iterator[Verdict]]:
    """Yield the verdicts of the answers under a progress bar."""
    if workers > (most := most_workers()):
        raise UserError("--workers", f"this machine has room for {most}", "lower it")
    with progress_bar(hidden=hidden) as bar:
        line = bar.add_task("judging", total=len(answers))
        yield verdicts(
            judge,
            answers,
            workers=workers,
            deadline_s=deadline,
            on_progress=lambda count: bar.update(line, completed=count),
        )


def _update_of(path: Path, update: int | None, log: Callable[[str], None]) -> tuple[Path, int | None]:
    """Return the run, and the update whose answers are judged, also of RUN@best and RUN@UPDATE."""
    run, which = split_run(path)
    if not which:
        return run, update
    if update is not None:
        raise UserError("--update", f"{path.name} names an update already", "leave one of them out")
    if which.isdecimal():
        return run, int(which)
    checkpoint, notes = select(run, which)
    for note in notes:
        log(note)
    return run, next(number for number, saved in numbered(run / "checkpoints") if saved == checkpoint)


def _verify_run(
    verifier: str,
    overrides: Sequence[str],
    path: Path,
    update: int | None,
    source: str | None,
    *,
    workers: int,
    deadline: float,
    as_json: bool,
) -> None:
    """Judge recorded answers by the verifiers of their sources, and print how their verdicts change."""
    from posttrain.evaluation.recorded import read_judges, read_recorded  # torch, which files do not need

    judges = read_judges(verifier, overrides)
    log: Callable[[str], None] = (lambda _: None) if as_json else say
    run, update = _update_of(path, update, log)
    recorded = read_recorded(run, update, source, log)
    places: dict[int, list[int]] = {}
    verifiers: dict[int, Verifier] = {}
    unjudged: set[str] = set()
    for place, one in enumerate(recorded):
        if judge := judges.of(one.response.task.dataset):
            verifiers[id(judge)] = judge
            places.setdefault(id(judge), []).append(place)
        else:
            unjudged.add(one.response.task.dataset)
    if unjudged and not verifiers:
        problem = "it names no verifier of these answers; an environment may have given their rewards"
        raise UserError(verifier, problem, "name a verifier or a function, as reward.py:score")
    if unjudged and not as_json:
        names = ", ".join(sorted(name or "[task]" for name in unjudged))
        say(f"note: answers to the tasks of {names} have no verifier and are left out")
    outcome_of: dict[int, Verdict] = {}
    for judge_id, judge in verifiers.items():
        answers = [recorded[place].response for place in places[judge_id]]
        with _judged(judge, answers, workers=workers, deadline=deadline, hidden=as_json) as outcomes:
            outcome_of |= zip(places[judge_id], outcomes, strict=True)
    pairs = [(recorded[place], outcome_of[place]) for place in sorted(outcome_of)]
    _print_changes(pairs, len(recorded) - len(pairs), as_json=as_json)


def _print_changes(pairs: Sequence[tuple[RecordedAnswer, Verdict]], left_out: int, *, as_json: bool) -> None:
    changed = [(one, verdict) for one, verdict in pairs if one.has_changed(verdict)]
    counts = Counter((one.label, verdict.label) for one, verdict in pairs)
    scores = [[x for x in column if x is not None] for column in zip(*_scores(pairs), strict=True)]
    before, now = (sum(column) / len(column) if column else None for column in scores)
    if as_json:
        summary = {
            "answers": len(pairs),
            "left_out": left_out,
            "changed": len(changed),
            "mean_before": before,
            "mean_now": now,
        }
        classes = [{"before": a, "now": b, "answers": count} for (a, b), count in sorted(counts.items())]
        listed = [_change(one, verdict) for one, verdict in changed]
        typer.echo(json.dumps({**summary, "classes": classes, "changes": listed}))
        return
    labels = sorted({label for _, label in counts})
    table = Table("recorded \\ now", *labels, box=None, padding=(0, 2, 0, 0))
    for old in sorted({label for label, _ in counts}):
        table.add_row(old, *(str(counts[old, new]) for new in labels))
    page = out if out.is_terminal else console(width=160)  # in a file or a pipe a line stays whole
    page.print(table)
    for one, verdict in changed[:SHOWN]:
        change = f"{one.label} {_score(one.score)} → {verdict.label} {_score(verdict.score)}"
        label = f"{one.file}  {one.response.task.id}  sample {one.sample}"
        out.print(f"{label}: {change}  {one.response.text[:80]!r}", soft_wrap=True)
    if len(changed) > SHOWN:
        out.print(f"and {len(changed) - SHOWN} more: --json lists all", soft_wrap=True)
    means = f"; mean score {before:.4g} → {now:.4g}" if before is not None and now is not None else ""
    out.print(f"{len(changed)} of {counted(len(pairs), 'verdict')} changed{means}", soft_wrap=True)


def _scores(
    pairs: Sequence[tuple[RecordedAnswer, Verdict]],
) -> list[tuple[float | None, float | None]]:
    return [(one.score, verdict.score) for one, verdict in pairs] or [(None, None)]


def _score(score: float | None) -> str:
    return "-" if score is None else f"{score:g}"


def _change(one: RecordedAnswer, verdict: Verdict) -> dict[str, Any]:
    return {
        "file": one.file,
        "id": one.response.task.id,
        "sample": one.sample,
        "response": one.response.text,
        "class_before": one.label,
        "score_before": one.score,
        "class": verdict.label,
        "score": verdict.score,
        "reason": verdict.reason,
    }


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
