"""`posttrain methods`: print the table of methods."""

import json

import typer
from rich.table import Table

from posttrain.commands.options import Json
from posttrain.methods.build import described, parameters
from posttrain.methods.table import METHODS, Line
from posttrain.report.terminal import console, out
from posttrain.types import Method


def methods(as_json: Json = False) -> None:
    """Print the table of methods: what each chooses, and its source."""
    if as_json:
        rows = {
            name: {"title": m.title, "loop": m.loop, "learns": m.learns, "source": m.source, "step": m.step}
            | {"needs": sorted(m.method.needs), "group": m.method.least_group, **described(m.method)}
            for name, m in METHODS.items()
        }
        typer.echo(json.dumps(rows, indent=1))
        return
    page = out if out.is_terminal else console(width=120)  # in a file or a pipe a line stays whole
    for comparison, cells, columns in (
        (
            False,
            _reward_cells,
            ("estimator or credit", "ratio", "surrogate or divergence", "reduction", "critic", "step"),
        ),
        (True, _comparison_cells, ("learns from", "worth", "loss", "beta", "reference")),
    ):
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("method", overflow="fold", style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for name, m in METHODS.items():
            if _is_comparison(m.method) == comparison:
                table.add_row(name, *cells(m))
        page.print(table)
        page.print()
    for name, m in METHODS.items():
        loop = m.loop if m.loop == "online" else f"offline, {m.learns}"
        page.print(f"{name:21} {m.title}; {loop}; {m.source}")
    typer.echo(
        "\nEach choice is a function of posttrain/math; set another in the recipe, as in\n"
        '[method] credit = "leave_one_out". Online methods sample from the policy, offline ones learn\n'
        "from data. None needs a reward model; the methods with a head make one. A KL to the reference\n"
        "enters with kl_in_loss or kl_in_reward. --json prints every choice with its numbers."
    )


def _is_comparison(method: Method) -> bool:
    """Return whether a method learns from judgements of answers or steps, and not from tokens."""
    return method.unit != "token" or "head" in method.needs


def _reward_cells(line: Line) -> list[str]:
    """Return the cells of a method that learns from rewards, or from tokens."""
    method = line.method
    names = _names(method)
    credit = [
        names[key]
        for key in ("returns", "estimator", "credit", "keep", "shaping", "noise")
        if names.get(key, "raw") != "raw"
    ]
    if "turn_weight" in names:
        credit.append(f"turn_weight={names['turn_weight']}")
    credit += ["filtered"] if "filter" in names else []  # by a function whose name would fold the line
    loss = "surrogate" if "surrogate" in names else "token_divergence"
    return [
        " ".join(credit) or names.get("credit", "-"),
        names.get("ratio", "-"),
        names.get(loss, "-") + _numbers(method, loss),
        names.get("reduction", "-"),
        "yes" if "value" in method.needs else "-",
        {"adamw": "AdamW", "trust_region": "natural", "evolution": "plain"}[line.step],
    ]


def _comparison_cells(line: Line) -> list[str]:
    """Return the cells of a method that learns from judgements of answers."""
    method = line.method
    names = _names(method)
    worth = [names[key] for key in ("divergence", "implicit") if key in names]
    loss = next((key for key in ("pair_loss", "item_loss") if key in names), "")
    return [
        line.learns if line.loop == "offline" else "its own answers",
        "a head" if "head" in method.needs else " of ".join(worth) or "log_ratio",
        names[loss] + _numbers(method, loss) if loss else "of its own",
        f"{vars(method)['beta']:g}" if "beta" in vars(method) else "-",
        "yes" if "logp_ref" in method.needs else "-",
    ]


def _names(method: Method) -> dict[str, str]:
    return {key: text.partition("(")[0] for key, text in described(method).items()}


def _numbers(method: Method, choice: str) -> str:
    """Return the numbers of a choice in brackets, or ""."""
    numbers = ", ".join(f"{number:g}" for number in parameters(method, choice).values())
    return f"({numbers})" if numbers else ""
