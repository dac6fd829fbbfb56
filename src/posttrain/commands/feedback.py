"""`posttrain data revise` and `posttrain data prefer`: make training data by a constitution.

The two halves of Constitutional AI, Bai et al. 2022, arXiv:2212.08073: answers criticised and revised,
to be fine-tuned on, and preferences between answers, for a reward model or DPO.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.commands.options import NewFile, Sets
from posttrain.data.records import read_records
from posttrain.recipe.verifier import read_verifier
from posttrain.types import UserError
from posttrain.verifiers.judge.judge import Judge, Judging
from posttrain.verifiers.judge.preferences import write_preferences
from posttrain.verifiers.judge.revisions import Revising, write_revisions

JudgeFile = Annotated[
    Path,
    typer.Argument(metavar="JUDGE.toml", help="A table [verifier.judge] with its model and constitution."),
]


def revise(
    recipe: JudgeFile,
    prompts: Annotated[
        Path, typer.Argument(metavar="PROMPTS.jsonl", help="`prompt`, and `response` if it is answered.")
    ],
    out: NewFile,
    rounds: Annotated[int, typer.Option(min=1, help="Revisions of each answer.")] = 1,
    sets: Sets = None,
) -> None:
    """Have a model answer prompts, criticise its answers by the constitution, and revise them.

    Each line of the result is one round: prompt, initial, critique, revision, principle.
    """
    judge, records = _read(recipe, prompts, sets or ())
    if judge.constitution is None:
        fix = 'set verifier.judge.constitution = "ours" and rubric = "principled"'
        raise UserError(str(recipe), "there is no constitution", fix)
    options = Revising(
        rounds=rounds, max_tokens=judge.max_tokens, temperature=judge.temperature, seed=judge.seed
    )
    _say(write_revisions(judge.writer, judge.constitution, records, out, options), out)


def prefer(
    recipe: JudgeFile,
    pairs: Annotated[
        Path, typer.Argument(metavar="PAIRS.jsonl", help="`prompt` and `responses`, a list of two.")
    ],
    out: NewFile,
    keep: Annotated[bool, typer.Option(help="Keep pairs that the judge finds equal, with margin 0.")] = False,
    sets: Sets = None,
) -> None:
    """Have a model say which of two answers is better, in both orders, and write its preferences.

    Each line of the result is a pair: prompt, chosen, rejected, margin, agree.
    """
    judge, records = _read(recipe, pairs, sets or ())
    options = Judging(**{name: getattr(judge, name) for name in Judging.__dataclass_fields__})
    try:
        counts = write_preferences(
            judge.writer, judge.rubric, records, out, constitution=judge.constitution, keep=keep, how=options
        )
    except ValueError as error:
        raise UserError(str(recipe), str(error), 'set verifier.judge.rubric = "pairwise"') from None
    _say(counts, out)
    if counts["unparsable"] > counts["better"]:
        typer.echo(
            "note: its probabilities can be read instead of its words: --set verifier.judge.verdict=logprobs"
        )


def _read(recipe: Path, data: Path, sets: Sequence[str]) -> tuple[Judge, list[dict[str, Any]]]:
    """Return the judge of a recipe, and the records of a file; raise UserError for another verifier."""
    judge = read_verifier(str(recipe), sets)
    if not isinstance(judge, Judge):
        raise UserError(str(recipe), "its verifier is not a judge alone", "give it [verifier.judge]")
    records = [record.fields for record in read_records(str(data))]
    judge.require()
    return judge, records


def _say(counts: Counter[str], out: Path) -> None:
    typer.echo(", ".join(f"{count} {label}" for label, count in counts.most_common()) + f"; written to {out}")
