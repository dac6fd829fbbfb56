"""Write tasks for a model that learns to program: functions of a list of whole numbers, requested in words.

    text.txt         requests with their programs                  (to learn a tokenizer from)
    shown.jsonl      requests with their programs, and copies      (for SFT)
    tasks.jsonl      other requests, with cases and a solution     (for rewards)
    held_out.jsonl   others again                                  (to evaluate on)

A request names which numbers are read, what each becomes, and what is returned:

    The sum of the squares of the even numbers of xs.
    def f(xs):
        return sum([x * x for x in xs if x % 2 == 0])

Each request of shown.jsonl has `repeat` rows. Further rows, `copied` of them, hold a number in place of a
request, and any of all programs in the prompt, in the words of HINT. From those a model learns to read the
hint of a teacher (`reference.hint`), and what programs look like, but not what a request means. No request is
in two of the files but text.txt. The same options write the same files.
"""

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

HINT = "A right answer is:"
NUMBERS = (2, 3, 4, 5, 7, 9)
FILTERS = {
    "numbers": "",
    "even numbers": "x % 2 == 0",
    "odd numbers": "x % 2 == 1",
    "positive numbers": "x > 0",
    "negative numbers": "x < 0",
    "numbers above {k}": "x > {k}",
    "numbers below {k}": "x < {k}",
    "multiples of {k}": "x % {k} == 0",
}
MAPS = {
    "": "x",
    "squares of the ": "x * x",
    "doubles of the ": "2 * x",
    "halves of the ": "x // 2",
    "sizes of the ": "abs(x)",
    "opposites of the ": "-x",
    "last digits of the ": "abs(x) % 10",
}
RESULTS = {
    "The sum of the": "sum({xs})",
    "The count of the distinct": "len(set({xs}))",
    "The largest of 0 and the": "max([0] + {xs})",
    "The smallest of 9 and the": "min([9] + {xs})",
    "The sorted list of the": "sorted({xs})",
    "The reversed list of the": "{xs}[::-1]",
    "The list without its first of the": "{xs}[1:]",
    "The list without its last of the": "{xs}[:-1]",
}


def programs(
    directory: Path,
    *,
    shown: int = 16,
    repeat: int = 8,
    copied: int = 2000,
    tasks: int = 600,
    held_out: int = 128,
    cases: int = 2,
    length: int = 12,
    seed: int = 0,
) -> None:
    """Write the four files; each task of tasks.jsonl has `cases` cases, a list of `length` numbers each."""
    dice = random.Random(seed)
    functions = list(every_function())
    dice.shuffle(functions)
    ends = (shown, shown + tasks, shown + tasks + held_out)
    if ends[-1] > len(functions):
        raise ValueError(f"there are {len(functions)} requests, and {ends[-1]} are asked for")
    rows = [{"prompt": request, "completion": program} for request, program in functions[: ends[0]]] * repeat
    for number in range(copied):
        _, program = dice.choice(functions)
        rows.append({"prompt": f"Function {number}.\n\n{HINT}\n{program}", "completion": program})
    write(directory / "shown.jsonl", rows)
    write(directory / "tasks.jsonl", [task(*f, dice, cases, length) for f in functions[ends[0] : ends[1]]])
    write(directory / "held_out.jsonl", [task(*f, dice) for f in functions[ends[1] : ends[2]]])
    text = (f"{request}\n{program}\n\n{HINT}\n" for request, program in functions[: ends[0]])
    (directory / "text.txt").write_text("<|endoftext|>\n".join(text), encoding="utf-8")


def every_function() -> Iterator[tuple[str, str]]:
    """Yield each request with its program."""
    parts = product(RESULTS.items(), MAPS.items(), FILTERS.items())
    for (start, result), (middle, new), (end, kept) in parts:
        for k in NUMBERS if "{k}" in end else NUMBERS[:1]:
            condition = f" if {kept}" if kept else ""
            xs = f"[{new} for x in xs{condition}]".format(k=k)
            program = f"def f(xs):\n    return {result.format(xs=xs)}"
            yield f"{start} {middle}{end} of xs.".format(k=k), program


def task(request: str, program: str, dice: random.Random, cases: int = 2, length: int = 12) -> dict[str, Any]:
    """Return a task with its cases."""
    scope: dict[str, Any] = {}
    exec(program, scope)
    lists = [[dice.randint(-20, 20) for _ in range(length)] for _ in range(cases)]
    tests = [{"args": [xs], "expected": scope["f"](xs)} for xs in lists]
    return {"prompt": request, "kind": "call", "entry_point": "f", "cases": tests, "solution": program}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
