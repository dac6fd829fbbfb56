"""`posttrain data steps`: label the steps of a policy's answers, to train a process reward model."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.api.steps import label_steps
from posttrain.commands.options import NewFile, Sets, progress_bar
from posttrain.report.terminal import err
from posttrain.types import UserError


def steps(
    target: Annotated[
        Path, typer.Argument(metavar="RECIPE.toml|RUN_DIR", help="The model, the tasks and the verifier.")
    ],
    out: NewFile,
    solutions: Annotated[int, typer.Option(min=1, help="Answers sampled for each task.")] = 1,
    rollouts: Annotated[int, typer.Option(min=1, help="Continuations from each step of an answer.")] = 8,
    budget: Annotated[
        int, typer.Option(min=0, help="Continuations after which no further task begins; 0: no bound.")
    ] = 0,
    limit: Annotated[int, typer.Option(min=0, help="Only the first tasks; 0 takes all.")] = 0,
    separator: Annotated[str, typer.Option(help="Between steps; \\n is a newline.")] = "\\n\\n",
    reachable: Annotated[
        bool, typer.Option("--hard", help="Label a step 1 if any continuation ends right, else 0.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Label each step of a policy's answers by how often the policy, continuing from it, ends right.

    Each line is a record for the method process_reward: prompt, steps, labels (success rates), rollouts.
    """
    separator = _parse_separator(separator)
    with progress_bar() as bar:
        line = bar.add_task("continuations", total=budget or None)
        answers, labelled = label_steps(
            target,
            out,
            solutions=solutions,
            rollouts=rollouts,
            budget=budget,
            limit=limit,
            separator=separator,
            reachable=reachable,
            sets=sets or (),
            on_progress=lambda spent: bar.update(line, completed=spent),
        )
    err.print(f"{out}: answers {answers}, steps {labelled}", soft_wrap=True)


def _parse_separator(separator: str) -> str:
    if not separator:
        raise UserError("--separator", "is empty", "give the text between steps")
    return separator.replace("\\n", "\n")
