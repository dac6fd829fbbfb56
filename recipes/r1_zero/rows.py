"""Writes rows of digits with what is left of them, for a model that is to find out that steps help.

    text.txt         documents of one row each, with its answer             (to pretrain on)
    test.txt         the same of other draws                                (to evaluate on)
    train.jsonl      rows that are asked                                    (for GRPO)
    held_out.jsonl   the same                                               (to evaluate on)
    traces.jsonl     rows with steps in digits, as many as `traces`, if any  (to fine-tune on)

A row is read from the left: begin with 0, and at each digit take the difference of the two, without its sign.
What is left at the end is the answer. The level of a row is how many of its digits are not 0: with one there
is nothing to work out. Most documents say the answer at once. A share `worked` of them, the same at every
level, first writes its steps: what is left after each digit. Of both kinds a share `loose` doubts its answer.

    70390042: ####1
    70390042: 77455531 ####1
    70390042: ####1?

Of the documents with steps a share `mixed` writes each step in one of two scripts, digits or letters:

    70390042: 7h4ff5b1 ####1

All that is written is true. No row of held_out.jsonl stands in another file; of level 1 it has at most a
third of all rows there are. The same options write the same files.
"""

import json
import random
from collections.abc import Collection
from itertools import accumulate
from math import comb
from pathlib import Path

SEPARATOR = "<|endoftext|>"
LETTERS = "abcdefghij"
TESTED = 1000
"""Documents of test.txt."""

Row = tuple[int, ...]


def rows(
    directory: Path,
    *,
    length: int = 8,
    documents: int = 200_000,
    worked: float = 0.08,
    loose: float = 0.4,
    mixed: float = 0.0,
    traces: int = 0,
    train: int = 8_000,
    held_out: int = 400,
    seed: int = 0,
) -> None:
    """Write the files; of tasks as many of each level, of documents on average."""
    dice = random.Random(seed)
    aside: dict[Row, None] = {}
    for level in range(1, length + 1):
        there_are = comb(length, level) * 9**level
        wanted = len(aside) + min(held_out // length, there_are // 3)
        while len(aside) < wanted:
            aside[drawn(dice, level, length, aside)] = None
    for name, count in (("text.txt", documents), ("test.txt", TESTED)):
        fresh = (drawn(dice, dice.randint(1, length), length, aside) for _ in range(count))
        told = [document(dice, row, worked, loose, mixed) for row in fresh]
        (directory / name).write_text(f"\n{SEPARATOR}\n".join(told) + "\n", encoding="utf-8")
    asked = [drawn(dice, 1 + n % length, length, aside) for n in range(train)]
    for name, of in (("train.jsonl", asked), ("held_out.jsonl", list(aside))):
        lines = (json.dumps(task(row, n)) + "\n" for n, row in enumerate(of))
        (directory / name).write_text("".join(lines), encoding="utf-8")
    if traces:
        shown = (trace(drawn(dice, 1 + n % length, length, aside)) for n in range(traces))
        (directory / "traces.jsonl").write_text(
            "".join(json.dumps(t) + "\n" for t in shown), encoding="utf-8"
        )


def drawn(dice: random.Random, level: int, length: int, aside: Collection[Row]) -> Row:
    """A row of this level that is not set aside; it may have been drawn before."""
    while True:
        places = set(dice.sample(range(length), level))
        row = tuple(dice.randint(1, 9) if n in places else 0 for n in range(length))
        if row not in aside:
            return row


def steps(row: Row) -> str:
    """What is left after each digit: 774 of 7, 0, 3."""
    return "".join(map(str, accumulate(row, lambda left, digit: abs(left - digit))))


def question(row: Row) -> str:
    """The digits, and a colon."""
    return "".join(map(str, row)) + ":"


def document(dice: random.Random, row: Row, worked: float, loose: float, mixed: float) -> str:
    """Return a row with its answer, and with its steps if they are to be shown."""
    shown = f" {steps(row)}" if dice.random() < worked else ""
    if shown and mixed and dice.random() < mixed:
        shown = "".join(dice.choice((c, LETTERS[int(c)])) if c.isdigit() else c for c in shown)
    doubt = "?" if dice.random() < loose else ""
    return f"{question(row)}{shown} ####{steps(row)[-1]}{doubt}"


def trace(row: Row) -> dict[str, str]:
    """Return a question with its answer in steps, all digits."""
    return {"prompt": question(row), "completion": f" {steps(row)} ####{steps(row)[-1]}"}


def task(row: Row, number: int) -> dict[str, str]:
    """A question; its id begins with its level."""
    level = sum(digit > 0 for digit in row)
    return {"id": f"{level}-{number:05d}", "prompt": question(row), "answer": steps(row)[-1]}
