"""`posttrain run compare`: compare two results of eval, problem by problem."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from posttrain.commands.options import Json
from posttrain.errors import counted
from posttrain.evaluation.suites import results
from posttrain.evaluation.suites.numbers import group_by_problem, holm, paired_difference, ratio_of, sign_test
from posttrain.evaluation.suites.suite import Metric
from posttrain.evaluation.suites.table import suite_of
from posttrain.report.terminal import out, print_wide
from posttrain.types import UserError

LEVEL = 0.05


def compare(
    first: Annotated[
        Path,
        typer.Argument(metavar="OUT1|RUN_DIR", help="The --out of an eval, or a run: its latest evaluation."),
    ],
    second: Annotated[Path, typer.Argument(metavar="OUT2|RUN_DIR", help="Another one, of the same suites.")],
    as_json: Json = False,
) -> None:
    """Compare two results of eval, problem by problem: differences with intervals, and exact tests.

    Differences are second minus first. One is reported as such only if its 95 % interval is on one side of 0
    and the p-value of the sign test, corrected for the number of suites, is at most 0.05.

    Example: `posttrain run compare evals/base-001 evals/grpo-001`
    """
    first, second = results.locate(first), results.locate(second)
    rows = compare_results(first, second)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table(
        "suite", "metric", "first", "second", "difference", "95 %", "better : worse", "p", "p (Holm)"
    )
    for row in rows:
        cells = [f"{100 * row['first']:.1f}", f"{100 * row['second']:.1f}"]
        cells += [f"{100 * row['difference']:+.1f} ± {100 * row['error']:.1f}"]
        cells += [f"{100 * row['low']:+.1f} – {100 * row['high']:+.1f}", f"{row['better']} : {row['worse']}"]
        table.add_row(row["suite"], row["metric"], *cells, f"{row['p']:.3g}", f"{row['p_holm']:.3g}")
    print_wide(table)
    for row in rows:
        ahead = second if row["difference"] > 0 else first
        verdict = f"{ahead} is ahead" if row["clear"] else "no difference is shown"
        out.print(f"{row['suite']}: {verdict}, on {counted(row['problems'], 'problem')}", soft_wrap=True)


def compare_results(first: Path, second: Path) -> list[dict[str, Any]]:
    """Return, for each suite of both: the values, second - first with its interval, and the tests.

    `p` is the exact sign test's over problems that differ, `p_holm` the same corrected for the number of
    suites. `clear` is true if the interval is on one side of 0, and p_holm at most 0.05.

    Raises UserError if they have no suite in common, and for a suite with other problems, another fingerprint
    or missing answers.
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


def _names(result: dict[str, Any]) -> str:
    return ", ".join(result["suites"]) or "none"


def _suite(
    name: str, first: Path, second: Path, suite: dict[str, Any], other_suite: dict[str, Any]
) -> dict[str, Any]:
    key = f"{first}, {second}: {name}"
    if differing := results.differences(suite["fingerprint"], other_suite["fingerprint"]):
        problem = f"both must have the same questions and judge; these differ in {differing}"
        raise UserError(key, problem, "run one of them again as the other was")
    for folder, result in ((first, suite), (second, other_suite)):
        if "metrics" not in result:
            raise UserError(str(folder), f"{name} is not finished", "run its eval again")
    answers, other_answers = (group_by_problem(results.answers(folder, name)) for folder in (first, second))
    if answers.keys() != other_answers.keys():
        unmatched = len(answers.keys() ^ other_answers.keys())
        raise UserError(key, f"{unmatched} problems were answered by one of them only")
    metric: Metric = suite_of(name).metrics[0]
    ids = sorted(answers)
    pair = ratio_of(metric, answers, ids), ratio_of(metric, other_answers, ids)
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
