"""Print the table on a terminal, and as a page."""

from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from posttrain.methods.table import METHODS, label, line
from posttrain.types import UserError
from posttrain_study.truth.comparison import EXACT, TruthRow
from posttrain_study.truth.table import rows

COLOURS = {"unbiased": "green", "scaled": "yellow", "biased": "red"}

MEANING: Mapping[str, str] = {
    "error": "|E[g] − ∇J| / |∇J|",
    "sine": "what is left of the error after the best rescaling: the sine of the angle",
    "variance": "trace of the covariance of one answer's contribution; methods are first scaled to ∇J",
    "weight": "what ∇p of the task is multiplied by, with rewards of 0 and 1",
    "length · σ": "length of E[g] along ∇J, times the rewards' deviation",
    "value / KL": "E[estimate] / KL",
    "off": "|found − true| / |true|: of the step, of values and advantages over all states, or of chances",
    "silent": "share of the tokens whose gradient the clip takes away",
    "KL / δ": "KL(π_old ‖ π) a token after the step, over its bound",
    "gain": "J(π) − J(π_old)",
    "surrogate": "what π would gain at the states that π_old visits",
    "sure": "the surrogate less T (T − 1) max |A| max_s KL(π_old ‖ π), which the gain is never below",
    "lost": "what the answer that is best with this reward earns less than the best there is",
    "π* moved": "KL of π* ∝ π_ref exp(R/β) with this reward from the one with R, β = 0.3",
    "update": "|E[update]|, over that of a random policy and critic",
    "KL(π ‖ π*)": "over whole answers",
    "KL(π ‖ π_IPO)": "over whole answers",
    "pull": "what β ∇h of the pair is multiplied by",
    "margin": "β h, h = log π/π_ref of the best answer less that of the worst",
    "most": "the gain of the π exp(R/β) that is as far in KL, more than which no policy has",
    "shortest": "chance of the shortest right answer",
    "KL": "of the best of n from the policy, in nats",
    "bound": "log n − (n − 1)/n",
    "reached": "share of the most that E[R] − β KL(π ‖ π_old) can gain, β = 0.5",
    "fresh": "|E[∇penalty] − ∇KL| / |∇KL| on the policy's own tokens; the KL is that of each state that is "
    "visited, for a penalty in the reward that of whole answers",
    "older": "the same on another policy's tokens, which is π_old",
    "noise": "trace of the covariance of one answer's ∇penalty there, over |∇KL|²",
    "passes": "forward passes that the penalty adds to an update of one step: logp_ref, and logp_old",
    "gradient error": "|E[∇estimate] − ∇KL| / |∇KL|, KL over whole answers",
}
"""Definition of each quantity in the table."""


def number(x: float) -> str:
    """Format a number with three digits; values within rounding are 0.

    >>> number(3e-16), number(0.123456), number(38.5521)
    ('0', '0.123', '38.6')
    """
    return "0" if abs(x) < EXACT else f"{x:.3g}"


def sections(table: Iterable[TruthRow]) -> dict[str, dict[str, dict[str, TruthRow]]]:
    """Return {section: {name: {quantity: row}}}, in the order of the table."""
    out: dict[str, dict[str, dict[str, TruthRow]]] = {}
    for row in table:
        out.setdefault(row.section, {}).setdefault(row.name, {})[row.quantity] = row
    return out


def quantities(entries: Mapping[str, Mapping[str, TruthRow]]) -> list[str]:
    """Return the quantities of a section, each once."""
    return list(dict.fromkeys(quantity for entry in entries.values() for quantity in entry))


def cells(entries: Mapping[str, Mapping[str, TruthRow]]) -> Iterable[tuple[list[str], str, str]]:
    """Yield (name and numbers, verdict, sentence) for each line of a section."""
    for name, entry in entries.items():
        numbers = [number(entry[q].number) if q in entry else "" for q in quantities(entries)]
        first = next(iter(entry.values()))
        yield [name, *numbers], first.verdict, first.sentence


def show(table: Iterable[TruthRow], console: Console) -> None:
    """Print the table, one section after the other."""
    for section, entries in sections(table).items():
        console.print(section, style="bold", highlight=False, markup=False)
        grid = Table(box=None, pad_edge=False)
        grid.add_column("")
        for quantity in quantities(entries):
            grid.add_column(quantity, justify="right")
        grid.add_column("verdict")
        grid.add_column("because", overflow="fold")
        for texts, verdict, sentence in cells(entries):
            colour = COLOURS.get(verdict, "")
            label = f"[{colour}]{verdict}[/]" if colour else verdict
            grid.add_row(*map(escape, texts), label, escape(sentence))
        console.print(grid)
        for quantity in quantities(entries):
            console.print(f"  {quantity}: {MEANING[quantity]}", style="dim", highlight=False, markup=False)
        console.print()


def page(table: Iterable[TruthRow]) -> str:
    """Return the table as Markdown: the generated part of docs/truth.md."""
    out = []
    for section, entries in sections(table).items():
        names = quantities(entries)
        out += [f"### {section}", ""]
        out += [f"- {quantity}: {MEANING[quantity].replace('|', '‖')}" for quantity in names]
        out += ["", "| | " + " | ".join(names) + " | verdict | because |"]
        out += ["|---|" + "---:|" * len(names) + "---|---|"]
        for texts, verdict, sentence in cells(entries):
            out.append("| " + " | ".join((*texts, verdict, sentence.replace("|", "‖"))) + " |")
        out.append("")
    return "\n".join(out)


def command(method: str | None) -> None:
    """Run `posttrain truth [METHOD]`.

    Raises UserError for a method that is not in the table, or that does not sample from the policy.
    """
    if method is not None and not (line(method).loop == "online" and line(method).has_loss):
        online = ", ".join(name for name, row in METHODS.items() if row.loop == "online" and row.has_loss)
        lacks = "draws no samples" if line(method).has_loss else "has no loss of its samples"
        problem = f"{label(method)} {lacks}, so it has no expectation over them"
        raise UserError("", problem, f"one of {online}")
    show(rows(method), Console())
