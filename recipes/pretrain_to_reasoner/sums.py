"""Writes what a model needs to learn sums from nothing: plain text about numbers, and answered questions.

    text.txt     documents of number facts: sums, counting, comparing       (to pretrain on)
    test.txt     the same of other draws                                    (to evaluate on)
    sft.jsonl    questions with their answers                               (to fine-tune on)

None of them holds a sum that `[task.arithmetic]` with the same low, high and held_out sets aside, nor its
mirror image: what a recipe evaluates on was never read. The same options write the same files.
"""

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

from posttrain.data.arithmetic import Arithmetic, arithmetic
from posttrain.types import Task

SEPARATOR = "<|endoftext|>"
SUMS, OTHERS = 12, 6
"""Lines of a document of sums, and of another."""
TEMPLATE = "What is {a} + {b}?"
"""Of the questions, and for task.arithmetic.template."""

Draw = Callable[[random.Random, int], str]


def sums(
    directory: Path,
    *,
    low: int = 2,
    high: int = 49,
    held_out: int = 200,
    documents: int = 8000,
    questions: int = 400,
    seed: int = 0,
) -> None:
    """Writes the three files; ValueError if the numbers leave no sum to learn."""
    spec = Arithmetic(low=low, high=high, held_out=held_out, template=TEMPLATE)
    tasks = arithmetic("train", spec)
    pairs = [(int(task.fields["operands"][0]), int(task.fields["operands"][1])) for task in tasks]
    dice = random.Random(seed)
    for name, count in (("text.txt", documents), ("test.txt", max(1, documents // 60))):
        texts = [document(dice, pairs, 2 * high) for _ in range(count)]
        (directory / name).write_text(f"\n{SEPARATOR}\n".join(texts) + "\n", encoding="utf-8")
    asked = dice.sample(tasks, min(questions, len(tasks)))
    lines = "".join(json.dumps(question(task)) + "\n" for task in asked)
    (directory / "sft.jsonl").write_text(lines, encoding="utf-8")


def document(dice: random.Random, pairs: list[tuple[int, int]], top: int) -> str:
    """Lines of one kind, three times of four sums."""
    kind = dice.choice((*[None] * 9, counting, neighbours, comparing))
    if kind is None:
        return "\n".join(told(dice, *dice.choice(pairs)) for _ in range(SUMS))
    return "\n".join(kind(dice, top) for _ in range(OTHERS))


def told(dice: random.Random, a: int, b: int) -> str:
    """A sum: in signs three times of four, else in words."""
    words = (f"{a} and {b} is {a + b}.", f"If you add {b} to {a} you get {a + b}.")
    return dice.choice((*[f"{a} + {b} = {a + b}"] * 6, *words))


def counting(dice: random.Random, top: int) -> str:
    """Numbers in a row: by ones, twos, fives or tens."""
    step = dice.choice((1, 1, 2, 5, 10))
    first = dice.randrange(max(1, top - 9 * step))
    return " ".join(str(n) for n in range(first, min(top, first + 9 * step) + 1, step))


def neighbours(dice: random.Random, top: int) -> str:
    """What comes next, or before."""
    n = dice.randrange(1, top)
    return dice.choice((f"After {n} comes {n + 1}.", f"Before {n} comes {n - 1}."))


def comparing(dice: random.Random, top: int) -> str:
    """Which of two numbers is larger."""
    a, b = sorted(dice.sample(range(top + 1), 2))
    return dice.choice((f"{b} is more than {a}.", f"{a} is less than {b}."))


def question(task: Task) -> dict[str, str]:
    """The problem as a record; the answer is the line that the text would have."""
    a, b = task.fields["operands"]
    said = f"{a} + {b} = {task.answer}"
    asked = task.messages[0]["content"]
    return {"id": task.id, "prompt": asked, "completion": said, "answer": str(task.answer)}


def main() -> None:
    """Writes the files and says how large they are."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("directory", type=Path, help="made if it is not there")
    for name, default in sums.__kwdefaults__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    sums(**vars(given))
    for path in sorted(given.directory.iterdir()):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
