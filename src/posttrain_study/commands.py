"""The commands `truth`, `classic`, `claims` and `attack`, without what their calculations import."""

import importlib
from dataclasses import asdict
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
    first_seed: Annotated[
        int | None, typer.Option(min=0, help="The first of them; that of the card by default.")
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
    measuring = seeds is not None or first_seed is not None or out_dir is not None
    if name is None:
        if run or measuring:
            raise UserError(
                "--run", "which claim?", "posttrain claims NAME --run; posttrain claims lists them"
            )
        _list(as_json)
    elif run and as_json:
        raise UserError("--json", "a measurement is printed as a table", "read results.json in --out")
    elif run:
        _measure(cards.find_card(name), seeds, first_seed, out_dir)
    elif measuring:
        raise UserError("--seeds, --first-seed and --out", "they are for measuring a claim", "add --run")
    else:
        card = cards.find_card(name)
        out.print_json(data=card.head) if as_json else out.print(card.answer, soft_wrap=True)


def attack(
    reward: Annotated[
        str,
        typer.Argument(
            metavar="VERIFIER|RECIPE",
            help="A verifier's name, module:function, a recipe or a run, as for posttrain verify.",
        ),
    ],
    tasks: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TASKS.jsonl]",
            help="Tasks as for training, any form of docs/data.md; by default those of the recipe.",
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="An option of the verifier: --set partial=true"),
    ] = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Answers of a model, several to a task: `id` and `response`. Shows what the best of n by "
            "this reward is worth to --truth.",
        ),
    ] = None,
    truth: Annotated[
        str | None,
        typer.Option(
            metavar="VERIFIER", help="The judge that is taken for the truth of --responses; a stricter one."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Tasks that are tried, drawn at random.")] = 40,
    rounds: Annotated[
        int, typer.Option(min=0, help="Rounds in which a policy that reads no task learns; 0: none.")
    ] = 30,
    seed: Annotated[int, typer.Option(help="Of the drawn tasks and of that policy.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that judge in parallel.")] = 2,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds for one verdict, unless the verifier sets a limit.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Show what a reward pays to answers that know nothing, before a policy finds out.

    About forty known tricks are tried (a constant, the question again, every number, empty tags, a program
    that exits, an order to the judge ...), and the wrong answers of the verifier's own self-test. Then a
    policy that never reads a task learns a fixed text from the reward alone; it is judged on tasks that it
    did not learn on. With --responses and --truth the best of n answers by this reward is judged by a
    stricter one: where the first rises and the second falls, the reward is being exploited.

    Example: posttrain attack math tasks.jsonl, or posttrain attack reward.py:score tasks.jsonl --rounds 60
    """
    run = importlib.import_module("posttrain_study.attack.run")
    with progress_bar(hidden=as_json) as bar:
        line = bar.add_task("judging", total=None)
        result = run.attack(
            reward,
            tasks,
            sets or (),
            responses=responses,
            truth=truth,
            limit=limit,
            rounds=rounds,
            seed=seed,
            workers=workers,
            deadline_s=deadline,
            advance=lambda count: bar.update(line, advance=count),
        )
    if as_json:
        out.print_json(data=asdict(result))
    else:
        run.print_attack(result)


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


def _measure(card: cards.Card, seeds: int | None, first_seed: int | None, out_dir: Path | None) -> None:
    """Run the seeds of a claim's experiment, and print its table, its verdict and the head of its card."""
    frame: Any = importlib.import_module("posttrain_study.claims.experiment")
    experiment = frame.find_experiment(card)
    place = out_dir or Path("runs") / "claims" / card.experiment
    starts = (first_seed, card.first_seed, experiment.first_seed)
    first = next(start for start in starts if start is not None)
    numbers = range(first, first + (seeds or card.seeds))
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
