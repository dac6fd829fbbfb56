"""Sums, differences and products of integers, with held-out problems that are never trained on.

Every problem has an index, and a permutation fixed by the seed orders them. The first `held_out` in this
order are the held-out problems; the others are for training. Where the order of operands does not change the
answer, problems that mirror a held-out one are in neither.
"""

import hashlib
import string
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from posttrain.data.prompt_template import placeholders
from posttrain.data.protocol import Games
from posttrain.types import Task, UserError

Split = Literal["train", "held_out"]


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The problems: `operands` numbers from low to high, joined by any of `operators`.

    >>> Arithmetic().size, Arithmetic(operands=3, operators=("+", "*")).size
    (2304, 442368)
    """

    operands: int = 2
    low: int = 2
    high: int = 49
    operators: tuple[str, ...] = ("+",)
    """Some of +, - and *; products are computed before sums."""
    template: str = "What is {expression}? Answer with just the number."
    """{expression} is the problem; {a}, {b}, ... are its operands."""
    held_out: int = 200
    """Number of problems that are never trained on."""
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
        """Number of problems, held-out ones included."""
        return int((self.high - self.low + 1) ** self.operands * len(self.operators) ** (self.operands - 1))


def arithmetic(split: Split, spec: Arithmetic, *, limit: int | None = None) -> list[Task]:
    """Return the problems of a split in the order of the seed; the first `limit`, if it is set.

    Raises UserError if the split is empty, has fewer than `limit`, or is too large to list.

    >>> [task.answer for task in arithmetic("held_out", Arithmetic(), limit=3)]
    ['35', '74', '58']
    """
    if limit is None and split == "train" and spec.size > 1_000_000:
        raise UserError("", f"there are {spec.size} arithmetic problems", "set a limit")
    problems = islice(_held_out(spec) if split == "held_out" else _train(spec), limit)
    tasks = [_task(problem, spec) for problem in problems]
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
        yield _problem(_permute(place, spec.size, spec.seed), spec)


def _train(spec: Arithmetic) -> Iterator[Problem]:
    held_out = {_mirror_class(problem) for problem in _held_out(spec)}
    for place in range(spec.held_out, spec.size):
        problem = _problem(_permute(place, spec.size, spec.seed), spec)
        if _mirror_class(problem) not in held_out:
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


def _mirror_class(problem: Problem) -> Problem:
    """Return one problem for all that differ only in the order of operands that may be swapped."""
    numbers, operators = problem
    swappable = set(operators) in ({"+"}, {"*"})
    return (tuple(sorted(numbers)), operators) if swappable else problem


def _permute(index: int, size: int, seed: int) -> int:
    """Return the position of an index in a pseudo-random permutation of 0 ... size-1.

    A four-round Feistel network over the next even power of two; results of `size` or more are permuted
    again. It needs no list, and is the same on every machine and version.

    >>> sorted(_permute(i, 10, seed=3) for i in range(10))
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        high_bits, low_bits = index >> half, index & mask
        for turn in range(4):
            text = f"{seed}/{size}/{turn}/{low_bits}".encode()
            noise = int.from_bytes(hashlib.blake2b(text, digest_size=32).digest(), "big")
            high_bits, low_bits = low_bits, high_bits ^ (noise & mask)
        index = high_bits << half | low_bits
        if index < size:
            return index


def _task(problem: Problem, spec: Arithmetic) -> Task:
    numbers, operators = problem
    expression = str(numbers[0]) + "".join(f" {o} {n}" for o, n in zip(operators, numbers[1:], strict=True))
    operands = dict(zip(string.ascii_lowercase, numbers, strict=False))
    return Task(
        id=expression.replace(" ", ""),
        messages=({"role": "user", "content": spec.template.format(expression=expression, **operands)},),
        answer=str(evaluate(problem)),
        fields={
            "operands": list(numbers),
            "operators": list(operators),
            "difficulty": sum(len(str(abs(n))) for n in numbers),
        },
        source="arithmetic",
    )


def evaluate(problem: Problem) -> int:
    """Return the value of a problem, products first.

    >>> evaluate(((2, 3, 4), ("+", "*")))
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
