"""Sums, differences and products of whole numbers, with problems set aside that are never trained on.

Every problem has an index; a permutation fixed by the seed orders them, the first `held_out` of
it are the held-out problems and the others are for training. Where the order of operands does
not change the answer, the mirror images of held-out problems are in neither.
"""

import hashlib
import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from posttrain.data.prompt_template import placeholders
from posttrain.data.protocol import Games
from posttrain.types import Task, UserError

Split = Literal["train", "held_out"]

_LEVELS: tuple[tuple[int, int, int, tuple[str, ...]], ...] = (
    (2, 2, 9, ("+",)),
    (2, 2, 49, ("+",)),
    (2, 2, 99, ("+", "-")),
    (3, 2, 99, ("+", "-")),
    (3, 2, 99, ("+", "-", "*")),
    (4, 2, 999, ("+", "-", "*")),
)
HARDEST = len(_LEVELS)


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Which problems there are: `operands` numbers from low to high, joined by any of `operators`.

    >>> Arithmetic().size, Arithmetic(operands=3, operators=("+", "*")).size
    (2304, 442368)
    """

    operands: int = 2
    low: int = 2
    high: int = 49
    operators: tuple[str, ...] = ("+",)
    """Of +, - and *; products come before sums."""
    template: str = "What is {expression}? Answer with just the number."
    """{expression} is the problem; {a}, {b}, ... are its operands."""
    held_out: int = 200
    """How many problems are never trained on."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.operands <= 26:
            raise ValueError(f"operands must be 2 to 26, not {self.operands}")
        if self.low > self.high:
            raise ValueError(f"low {self.low} is more than high {self.high}")
        if not self.operators or not set(self.operators) <= {"+", "-", "*"}:
            raise ValueError(f"operators must be some of + - *, not {' '.join(self.operators) or 'none'}")
        if len(set(self.operators)) != len(self.operators):
            raise ValueError(f"an operator is named twice: {' '.join(self.operators)}")
        if self.held_out < 0:
            raise ValueError(f"held_out must be 0 or more, not {self.held_out}")
        letters = set(string.ascii_lowercase[: self.operands])
        used = set(placeholders(self.template))
        if not used <= letters | {"expression"}:
            raise ValueError(f"the template may use {{expression}} and {{a}}, {{b}}, ..., not {sorted(used)}")
        if "expression" not in used and used != letters:
            raise ValueError("the template must use {expression} or every operand")

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        held_out = arithmetic("held_out", self, limit=min(limit, self.held_out)) if limit else []
        return arithmetic("train", self), held_out

    @property
    def size(self) -> int:
        """How many problems there are."""
        return int((self.high - self.low + 1) ** self.operands * len(self.operators) ** (self.operands - 1))


def of_difficulty(level: int, spec: Arithmetic | None = None) -> Arithmetic:
    """The problems of a difficulty from 1 (one digit, sums) to 6 (four numbers below 1000, + - *).

    >>> of_difficulty(2) == Arithmetic()
    True
    """
    if not 1 <= level <= HARDEST:
        raise ValueError(f"difficulty must be 1 to {HARDEST}, not {level}")
    operands, low, high, operators = _LEVELS[level - 1]
    return replace(spec or Arithmetic(), operands=operands, low=low, high=high, operators=operators)


def arithmetic(split: Split, spec: Arithmetic, *, limit: int | None = None) -> list[Task]:
    """The problems of a split in the seed's order; the first `limit` of them.

    Raises UserError if the split is empty, has fewer than `limit`, or is too large to list.

    >>> [task.answer for task in arithmetic("held_out", Arithmetic(), limit=3)]
    ['35', '74', '58']
    """
    if limit is None and split == "train" and spec.size > 1_000_000:
        raise UserError("", f"there are {spec.size} arithmetic problems", "set a limit")
    chosen = islice(_held_out(spec) if split == "held_out" else _train(spec), limit)
    tasks = [_task(problem, spec) for problem in chosen]
    if not tasks or (limit is not None and len(tasks) < limit):
        raise UserError(
            "",
            f"there are {spec.size} arithmetic problems, of which {spec.held_out} are held out, and "
            f"{len(tasks)} are in {split!r}, not {limit or 'any'}",
            "widen low ... high, or ask for fewer",
        )
    return tasks


Problem = tuple[tuple[int, ...], tuple[str, ...]]
"""Operands, and the operators between them."""


def _held_out(spec: Arithmetic) -> Iterator[Problem]:
    for place in range(min(spec.held_out, spec.size)):
        yield _problem(_permuted(place, spec.size, spec.seed), spec)


def _train(spec: Arithmetic) -> Iterator[Problem]:
    kept_back = {_mirrored(problem) for problem in _held_out(spec)}
    for place in range(spec.held_out, spec.size):
        problem = _problem(_permuted(place, spec.size, spec.seed), spec)
        if _mirrored(problem) not in kept_back:
            yield problem


def _problem(index: int, spec: Arithmetic) -> Problem:
    numbers, operators = [], []
    for _ in range(spec.operands):
        index, digit = divmod(index, spec.high - spec.low + 1)
        numbers.append(spec.low + digit)
    for _ in range(spec.operands - 1):
        index, digit = divmod(index, len(spec.operators))
        operators.append(spec.operators[digit])
    return tuple(numbers), tuple(operators)


def _mirrored(problem: Problem) -> Problem:
    """One of the problems that differ only in the order of operands that may be swapped."""
    numbers, operators = problem
    swappable = set(operators) in ({"+"}, {"*"})
    return (tuple(sorted(numbers)), operators) if swappable else problem


def _permuted(index: int, size: int, seed: int) -> int:
    """Where a pseudo-random permutation of 0 ... size-1 takes an index.

    A four-round Feistel network over the next even power of two; results beyond the size go round
    again. Needs no list, and is the same on every machine and version.

    >>> sorted(_permuted(i, 10, seed=3) for i in range(10))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for turn in range(4):
            text = f"{seed}/{size}/{turn}/{right}".encode()
            noise = int.from_bytes(hashlib.blake2b(text, digest_size=32).digest(), "big")
            left, right = right, left ^ (noise & low)
        index = left << half | right
        if index < size:
            return index


def _task(problem: Problem, spec: Arithmetic) -> Task:
    numbers, operators = problem
    expression = str(numbers[0]) + "".join(f" {o} {n}" for o, n in zip(operators, numbers[1:], strict=True))
    named = dict(zip(string.ascii_lowercase, numbers, strict=False))
    return Task(
        id=expression.replace(" ", ""),
        messages=({"role": "user", "content": spec.template.format(expression=expression, **named)},),
        answer=str(value(problem)),
        fields={
            "operands": list(numbers),
            "operators": list(operators),
            "difficulty": sum(len(str(abs(n))) for n in numbers),
        },
        source="arithmetic",
    )


def value(problem: Problem) -> int:
    """What a problem comes to, products first.

    >>> value(((2, 3, 4), ("+", "*")))
    14
    """
    numbers, operators = problem
    terms = [numbers[0]]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            terms[-1] *= number
        else:
            terms.append(number if operator == "+" else -number)
    return sum(terms)
