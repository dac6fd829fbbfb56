"""Test a verifier on its tasks before any response is sampled."""

from collections.abc import Sequence

from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.combine.combined import Combined
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.protocol import NOT_APPLICABLE, Verifier, quote

_LISTED = 20
"""Most faulty tasks whose places one error names."""
FAKED = 8
"""Tasks whose fakes an untrusted verifier judges: Coq takes a second for those of one task."""


def self_test(verifier: Verifier, tasks: Sequence[Task], pool: Pool, *, limit: int = 32) -> None:
    """Raise UserError naming the first task that the verifier cannot judge, or judges wrongly.

    Every task goes through `Verifier.check`. On the first `limit` tasks the golds must get the verifier's
    best score and the fakes less, and neither may make it fail; a verifier that is not trusted judges the
    fakes of FAKED tasks alone. A verifier without a best score only must not fail. The parts of a combination
    are tested one by one and then together.
    """
    check_all(verifier, tasks)
    if isinstance(verifier, Combined):
        for part in verifier.parts:
            _judge_known(part.verifier, tasks[:limit], pool)
    _judge_known(verifier, tasks[:limit], pool)


def check_all(verifier: Verifier, tasks: Sequence[Task]) -> None:
    """Raise the UserError of the first task that cannot be judged, with the places of the others.

    If no task can be judged, the others are only counted.
    """
    first: UserError | None = None
    others: list[str] = []
    for task in tasks:
        try:
            verifier.check(task)
        except UserError as error:
            if first is None:
                first = error
            else:
                others.append(error.key or task.id)
    if first is None:
        return
    if others:
        places = list(dict.fromkeys(others))  # generated tasks all have the same one
        more = f"; {len(others)} more"
        if len(others) + 1 < len(tasks):
            more += f": {', '.join(places[:_LISTED])}" + (" ..." if places[_LISTED:] else "")
        first = UserError(first.key, first.problem + more, first.fix)
    raise first


def _judge_known(verifier: Verifier, tasks: Sequence[Task], pool: Pool) -> None:
    cases: list[tuple[Task, str, bool]] = []
    with_fakes = len(tasks) if verifier.trusted else FAKED
    for number, task in enumerate(tasks):
        cases += [(task, gold, True) for gold in verifier.golds(task)]
        cases += [(task, fake, False) for fake in (verifier.fakes(task) if number < with_fakes else ())]
    verdicts = pool.judge(verifier, [(task, response) for task, response, _ in cases])
    for (task, response, is_gold), verdict in zip(cases, verdicts, strict=True):
        complaint = _complaint(verifier.best, is_gold, verdict)
        if complaint:
            raise UserError(
                task.source,
                f"verifier {verifier.name!r} {complaint} the response {quote(response)} "
                f"of task {task.id!r}: {verdict.label}, {verdict.reason}",
                "mend the verifier or the task's answer" if is_gold else "",
            )


def _complaint(best: float | None, is_gold: bool, verdict: Verdict) -> str:
    """Return what is wrong with the verdict on a gold or a fake; "" if nothing is."""
    if verdict.score is None:
        return "" if verdict.label == NOT_APPLICABLE else "fails on"
    if best is None:
        return ""
    if is_gold and verdict.score != best:
        return f"gives {verdict.score:g}, not {best:g}, to"
    if not is_gold and verdict.score >= best:
        return f"accepts with {verdict.score:g}"
    return ""
