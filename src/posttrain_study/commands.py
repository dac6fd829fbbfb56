"""The commands `truth`, `classic` and `claims`, without what their calculations import."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from posttrain.commands.options import Json, progress_bar
from posttrain.errors import UserError
from posttrain.report.terminal import out
from posttrain_study.claims import cards
from posttrain_study.classic.__main__ import NAMES
from posttrain_study.classic.__main__ import main as run_classic


def truth(
    method: Annotated[str | None, typer.Argument(metavar="[METHOD]", help="One line of the table.")] = None,
) -> None:
    """Compare the exact expectation of each estimator with what it estimates, by enumeration."""
    importlib.import_module("posttrain_study.truth").command(method)


def classic(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"all, or one of {', '.join(NAMES)}.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Run a small example of classical reinforcement learning, and compare it with the exact optimum."""
    words = [name, "--seed", str(seed), *(["--plot", str(plot)] if plot else [])]
    raise typer.Exit(run_classic(words))


def claims(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this claim and its answer, or measure it.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Measure the claim here, and print the table and the verdict.")
    ] = False,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Seeds to run; as many as the card's by default. Three give a verdict."),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Directory for results and picture, by default runs/claims/EXPERIMENT. "
            "Seeds that it holds are not run again.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List claims of courses and papers with their verdicts, print one, or measure it."""
    if name is None:
        if run or seeds is not None or out_dir is not None:
            raise UserError(
                "--run", "which claim?", "posttrain claims NAME --run; posttrain claims lists them"
            )
        _list(as_json)
    elif run:
        _measure(cards.find_card(name), seeds, out_dir)
    elif seeds is not None or out_dir is not None:
        raise UserError("--seeds and --out", "they are for measuring a claim", "add --run")
    else:
        card = cards.find_card(name)
        out.print_json(data=card.head) if as_json else out.print(card.answer, soft_wrap=True)


def _list(as_json: bool) -> None:
    every = cards.cards().values()
    if as_json:
        out.print_json(data=[card.head for card in every])
        return
    table = Table("name", "claim", "verdict", "minutes", box=None, pad_edge=False)
    for card in every:
        table.add_row(card.name, card.claim, card.verdict, f"{card.minutes:g}" if card.minutes else "–")
    out.print(table)
    out.print(
        "\nposttrain claims NAME prints an answer, posttrain claims NAME --run measures it.", soft_wrap=True
    )


def _measure(card: cards.Card, seeds: int | None, out_dir: Path | None) -> None:
    """Run the seeds of a claim's experiment, and print its table, its verdict and the head of its card."""
    frame: Any = importlib.import_module("posttrain_study.claims.experiment")
    experiment = frame.find_experiment(card)
    place = out_dir or Path("runs") / "claims" / card.experiment
    numbers = range(experiment.first_seed, experiment.first_seed + (seeds or card.seeds))
    with progress_bar() as bar:
        task = bar.add_task(card.experiment, total=len(numbers))
        results = experiment.run(
            numbers,
            place,
            report=lambda text: bar.update(task, description=text),
            advance=lambda: bar.advance(task),
        )
    typer.echo(experiment.table(results))
    values = experiment.values(card.name, results)
    rule = experiment.rules[card.name]
    typer.echo(f"\n{card.claim}: {rule.decide(values).verdict}.\n{rule.sentence(values)}; {rule.words}.")
    typer.echo("\nThe head of its card:")
    for line in frame.head_lines(experiment, card.name, results):
        typer.echo(line)
    picture = place / f"{card.experiment}.svg"
    try:
        frame.save_picture(experiment, results, picture)
    except UserError as error:
        typer.echo(str(error), err=True)
    else:
        typer.echo(f"\nThe picture is {picture}.")
