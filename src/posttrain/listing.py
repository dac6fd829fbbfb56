"""`posttrain methods` and `posttrain doctor`: what there is, and what this machine has for it."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from posttrain.doctor import examine
from posttrain.methods.choices import described, least_group, parameters
from posttrain.methods.table import METHODS

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines for other programs.")]
out = Console()


def methods(as_json: Json = False) -> None:
    """Prints the table of methods: what each chooses, and where it comes from."""
    if as_json:
        rows = {
            name: {"title": m.title, "loop": m.loop, "source": m.source, "step": m.step}
            | {"needs": sorted(m.method.needs), "group": least_group(m.method), **described(m.method)}
            for name, m in METHODS.items()
        }
        typer.echo(json.dumps(rows, indent=1))
        return
    page = out if out.is_terminal else Console(width=110)  # in a file or a pipe a line stays whole
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for head in ("method", "psi or credit", "ratio", "surrogate", "reduction", "critic", "step"):
        table.add_column(head, overflow="fold")
    for name, m in METHODS.items():
        names = {key: text.partition("(")[0] for key, text in described(m.method).items()}
        credit = [names[key] for key in ("returns", "psi", "credit") if names.get(key, "raw") != "raw"]
        numbers = ", ".join(f"{v:g}" for v in parameters(m.method, "surrogate").values())
        table.add_row(
            f"[bold]{name}[/bold]",
            " ".join(credit) or names.get("credit", "-"),
            names.get("ratio", "-"),
            names.get("surrogate", "-") + (f"({numbers})" if numbers else ""),
            names["reduction"],
            "yes" if "value" in m.method.needs else "-",
            {"adamw": "AdamW", "trust_region": "natural"}[m.step],
        )
    page.print(table)
    page.print()
    for name, m in METHODS.items():
        page.print(f"{name:17} {m.title}; {m.loop}; {m.source}", highlight=False)
    typer.echo(
        "\nEach choice is a function of posttrain/math; set another in the recipe, as in\n"
        '[method] credit = "leave_one_out". Online methods sample from the policy, offline ones learn\n'
        "from data. None needs a reward model. A KL to the reference enters with kl_in_loss or\n"
        "kl_in_reward. --json prints every choice with its numbers."
    )


def doctor(as_json: Json = False) -> None:
    """Says what this machine has, what is missing for which feature, and how to get it."""
    facts = examine()
    if as_json:
        typer.echo(json.dumps([vars(f) for f in facts]))
        return
    for fact in facts:
        mark = "[green]ok[/green]  " if fact.good else "[yellow]note[/yellow]"
        out.print(f"{mark} {fact.name:22} {fact.found}", highlight=False)
        if fact.mend:
            out.print(f"     {'':22} [dim]{fact.mend}[/dim]", highlight=False)
