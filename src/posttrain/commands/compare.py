"""`posttrain run compare`: two results on the same problems, problem by problem."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from posttrain.errors import counted
from posttrain.evaluation.suites import results
from posttrain.evaluation.suites.numbers import grouped, holm, paired_difference, ratio_of, sign_test
from posttrain.evaluation.suites.suite import Metric
from posttrain.evaluation.suites.table import suite_of
from posttrain.report.terminal import out, print_whole
from posttrain.types import UserError

LEVEL = 0.05


def compare(
    first: Annotated[
        Path,
        typer.Argument(metavar="OUT1|RUN_DIR", help="What eval was given as --out, or a run: its latest."),
    ],
    second: Annotated[Path, typer.Argument(metavar="OUT2|RUN_DIR", help="Another one, of the same suites.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Compare two results of eval, problem by problem: differences with intervals, and exact tests.

    Printed is the second less the first. A difference is called one only where its 95 % interval is on one
    side of 0 and the sign test, corrected for the number of suites, is at most 0.05.

    Example: `posttrain run compare evals/base-001 evals/grpo-001`
    """
    first, second = results.locate(first), results.locate(second)
    rows = compared(first, second)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(
        "suite", "metric", "first", "second", "difference", "95 %", "better : worse", "p", "p (Holm)"
    )
    for row in rows:
        shown = [f"{100 * row['first']:.1f}", f"{100 * row['second']:.1f}"]
        shown += [f"{100 * row['difference']:+.1f} ± {100 * row['error']:.1f}"]
        shown += [f"{100 * row['low']:+.1f} – {100 * row['high']:+.1f}", f"{row['better']} : {row['worse']}"]
        table.add_row(row["suite"], row["metric"], *shown, f"{row['p']:.3g}", f"{row['p_holm']:.3g}")
    print_whole(table)
    for row in rows:
        ahead = second if row["difference"] > 0 else first
        said = f"{ahead} is ahead" if row["clear"] else "no difference is shown"
        out.print(f"{row['suite']}: {said}, on {counted(row['problems'], 'problem')}", soft_wrap=True)


def compared(first: Path, second: Path) -> list[dict[str, Any]]:
    """For each suite that both have: the values, second - first with its interval, and the tests.

    `p` is the exact sign test's over problems that differ, `p_holm` the same corrected for the number of
    suites. `clear` says that the interval is on one side of 0, and p_holm at most 0.05.

    UserError if they have no suite in common, and for a suite with other problems, another fingerprint or
    missing answers.
    """
    one, other = results.load(first), results.load(second)
    common = [suite for suite in one["suites"] if suite in other["suites"]]
    if not common:
        problem = f"they have no suite in common: {_names(one)}, and {_names(other)}"
        raise UserError(f"{first}, {second}", problem, "run both on the same suites")
    rows = [_suite(name, first, second, one["suites"][name], other["suites"][name]) for name in common]
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p
        row["clear"] = p <= LEVEL and (row["low"] > 0 or row["high"] < 0)
    return rows


def _names(found: dict[str, Any]) -> str:
    return ", ".join(found["suites"]) or "none"


def _suite(
    name: str, first: Path, second: Path, one: dict[str, Any], other: dict[str, Any]
) -> dict[str, Any]:
    where = f"{first}, {second}: {name}"
    if differing := results.differences(one["fingerprint"], other["fingerprint"]):
        problem = f"what is compared must be asked and judged alike; these differ in {differing}"
        raise UserError(where, problem, "run one of them again as the other was")
    for folder, each in ((first, one), (second, other)):
        if "metrics" not in each:
            raise UserError(str(folder), f"{name} is not finished", "run its eval again")
    mine, theirs = (grouped(results.answers(folder, name)) for folder in (first, second))
    if mine.keys() != theirs.keys():
        odd = len(mine.keys() ^ theirs.keys())
        raise UserError(where, f"{odd} problems were answered by one of them only")
    metric: Metric = suite_of(name).metrics[0]
    ids = sorted(mine)
    pair = ratio_of(metric, mine, ids), ratio_of(metric, theirs, ids)
    by_problem = [[a / p if p else 0.0 for a, p in zip(*ratio, strict=True)] for ratio in pair]
    better = sum(b > a for a, b in zip(*by_problem, strict=True))
    worse = sum(b < a for a, b in zip(*by_problem, strict=True))
    difference = paired_difference(*pair)
    return {
        "suite": name,
        "metric": metric.name,
        "problems": len(ids),
        "first": pair[0].value,
        "second": pair[1].value,
        "difference": difference.value,
        "error": difference.error,
        "low": difference.low,
        "high": difference.high,
        "better": better,
        "worse": worse,
        "p": sign_test(better, worse),
    }
