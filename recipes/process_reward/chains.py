"""Data of process_reward.toml: rows of digits from 0 to 4, and labels of steps.

A row is read from the left: begin with 0, and at each digit take the difference of the two, without its sign.
A step is what is left after a digit, and blanks part digits and steps. The last step is the answer. A share
`wrong` of the steps that are shown is any other digit, from which the next steps go on:

    4 0 3 1 1:4 4 1 0 1
    4 0 3 1 1:4 4 2 1 0
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posttrain.api.steps import label_steps

SEPARATOR = " "


def rows(
    directory: Path,
    *,
    length: int = 5,
    shown: int = 6_000,
    wrong: float = 0.1,
    tasks: int = 2_000,
    held_out: int = 300,
    seed: int = 0,
) -> None:
    """Write shown.jsonl, answers to fine-tune on; tasks.jsonl and held_out.jsonl; text.txt, for a tokenizer.

    No row of held_out.jsonl is in another file. The same options write the same files.
    """
    dice = random.Random(seed)
    aside = {draw(dice, length): None for _ in range(held_out)}
    others = [row for row in (draw(dice, length) for _ in range(shown + tasks)) if row not in aside]
    answers = [{"prompt": question(row), "completion": flawed(dice, row, wrong)} for row in others[tasks:]]
    write(directory / "shown.jsonl", answers)
    for name, part in (("tasks", others[:tasks]), ("held_out", aside)):
        write(
            directory / f"{name}.jsonl", ({"prompt": question(row), "answer": steps(row)[-1]} for row in part)
        )
    text = "".join(f"{answer['prompt']}{answer['completion']}\n" for answer in answers[:200])
    (directory / "text.txt").write_text(text, encoding="utf-8")


def labelled(
    directory: Path, *, model: str, tasks: str, answers: int, rollouts: int, held_out: int, seed: int = 0
) -> None:
    """Write train.jsonl and held_out.jsonl: answers of the model, with the value of each step by rollouts.

    The verifier and the sampling are those of outcome.toml.
    """
    file, every = Path(__file__).with_name("outcome.toml"), directory / "labelled.jsonl"
    sets = [f"model.path={json.dumps(model)}", f"task.data.path={json.dumps(tasks)}", f"run.seed={seed}"]
    sets += ["task.held_out="]  # which is asked of the policy later, and of no step
    label_steps(file, every, rollouts=rollouts, limit=answers, separator=SEPARATOR, sets=sets)
    records = [json.loads(line) for line in every.read_text(encoding="utf-8").splitlines()]
    write(directory / "held_out.jsonl", records[:held_out])
    write(directory / "train.jsonl", records[held_out:])


def draw(dice: random.Random, length: int) -> str:
    """Return a row."""
    return "".join(dice.choices("01234", k=length))


def question(row: str) -> str:
    """Return the digits of a row, and a colon."""
    return f"{SEPARATOR.join(row)}:"


def steps(row: str) -> str:
    """Return the right steps of a row.

    >>> steps("40311")
    '44101'
    """
    return flawed(random.Random(0), row, 0.0).replace(SEPARATOR, "")


def flawed(dice: random.Random, row: str, wrong: float) -> str:
    """Return an answer whose steps are wrong with this probability."""
    left, answer = 0, []
    for digit in row:
        left = abs(left - int(digit))
        if dice.random() < wrong:
            left = dice.choice([n for n in range(5) if n != left])
        answer.append(str(left))
    return SEPARATOR.join(answer)


def write(file: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write a line of JSON for each record."""
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
