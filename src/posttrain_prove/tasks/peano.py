r"""Random equations of natural numbers to prove in Coq from nothing but computation and induction.

    forall a b : nat, b + S a = S (a + b)

Both sides are sums of the same variables and the same number of successors, in any order and bracket, so
each equation holds. Coq computes by the first argument: 0 + n = n and S m + n = S (m + n). All else is
induction, and most of it needs lemmas, as n + 0 = n or n + S m = S (n + m), which nobody tells. Whether an
equation may be trained on or is held out is said by a digest of its form (names of variables and the order of
its sides do not count), and by nothing else.
"""

import hashlib
import random
from dataclasses import dataclass
from functools import partial
from itertools import permutations

from posttrain.data.protocol import Games
from posttrain.types import Task
from posttrain_prove.tasks.drawn import Split, Theorems, in_split, of_split, picked, shuffled

Term = str | tuple["Term", ...]
"""0 or a variable by its name; (t,) is the successor of t, (t, u) the sum of both."""
_ZERO = 0.15
"""Share of sides that get a 0 among what they add."""


@dataclass(frozen=True, kw_only=True)
class Peano(Theorems):
    """How large the equations are, and how many."""

    variables: int = 3
    """Variables to draw from, at most 5: a, b, c, ..."""
    low: int = 2
    """The fewest operations of a side: sums and successors, without what adds a 0."""
    high: int = 5
    """The most of them; each number from low to high has an equal share of the theorems."""
    successors: int = 2
    """The most successors of a side."""
    computed: bool = True
    """Whether there are equations that computation alone proves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.variables <= 5:
            raise ValueError(f"variables must be 1 to 5, not {self.variables}")
        if self.successors < 0:
            raise ValueError(f"successors must be 0 or more, not {self.successors}")

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        held_out = peano("held_out", self)[:limit] if limit and self.held_out else []
        return peano("train", self), held_out


def peano(split: Split, spec: Peano, *, limit: int | None = None) -> list[Task]:
    """The theorems of a split, sizes in turn; the first `limit` of them. No two have the same form.

    `fields` holds what the verifier `coq` needs, and besides `operations`, which is also `difficulty`, and
    `computed`, whether both sides compute to the same. Raises UserError if the split is empty or there are
    too few equations so small.

    >>> [task] = peano("held_out", Peano(low=3, high=3), limit=1)
    >>> print(task.messages[0]["content"])
    ======
    forall b c : nat, S c + S b = b + 2 + c
    """
    what = f"equations of {spec.low} to {spec.high} operations for {split!r}"
    made = of_split(split, spec, limit, partial(_equation, split, spec), kind="Peano", what=what)
    return [_task(left, right, spec, f"{split}-{index}") for index, (left, right) in made]


def _equation(split: Split, spec: Peano, index: int) -> tuple[tuple[Term, Term], str] | None:
    """The equation of that index, with low + index mod (high - low + 1) operations, and its form."""
    size = spec.size(index)

    def draw(rng: random.Random) -> tuple[tuple[Term, Term], str] | None:
        steps = int(rng.random() * (min(spec.successors, size) + 1))
        names = [chr(ord("a") + int(rng.random() * spec.variables)) for _ in range(size - steps + 1)]
        left, right = _side(names, steps, rng), _side(names, steps, rng)
        if left == right or (computed(left) == computed(right) and not spec.computed):
            return None
        return (left, right), form(left, right)

    return in_split(split, random.Random(f"{spec.seed}/{split}/{index}"), draw)


def _side(names: list[str], steps: int, rng: random.Random) -> Term:
    """A sum of these in random order and brackets, with so many successors anywhere."""
    added: list[Term] = [*names, *["0"] * (rng.random() < _ZERO)]
    term = _bracketed(shuffled(added, rng), rng)
    for _ in range(steps):
        term = _at(term, picked(_places(term), rng))
    return term


def _bracketed(added: list[Term], rng: random.Random) -> Term:
    if len(added) == 1:
        return added[0]
    at = 1 + int(rng.random() * (len(added) - 1))
    return _bracketed(added[:at], rng), _bracketed(added[at:], rng)


def _places(term: Term) -> list[tuple[int, ...]]:
    """The ways to each part of a term."""
    if isinstance(term, str):
        return [()]
    return [(), *((n, *way) for n, part in enumerate(term) for way in _places(part))]


def _at(term: Term, way: tuple[int, ...]) -> Term:
    """The term with the successor of a part in its place."""
    if not way or isinstance(term, str):
        return (term,)
    return tuple(_at(part, way[1:]) if n == way[0] else part for n, part in enumerate(term))


def computed(term: Term) -> Term:
    """What a term computes to: 0 + n = n and S m + n = S (m + n) from left to right, everywhere.

    >>> computed(((("a",), "b"), ("0", "c")))
    ((('a', 'b'), 'c'),)
    """
    if isinstance(term, str):
        return term
    if len(term) == 1:
        return (computed(term[0]),)
    left, right = computed(term[0]), computed(term[1])
    if left == "0":
        return right
    if isinstance(left, tuple) and len(left) == 1:
        return (computed((left[0], right)),)
    return left, right


def shown(term: Term, level: int = 50) -> str:
    """As Coq prints it: S binds more than +, which associates to the left.

    >>> shown((("a", "b"), (("c", "0"),))), shown(("a", (("0",), "b"))), shown((("0",),))
    ('a + b + S (c + 0)', 'a + (1 + b)', '2')
    """
    if isinstance(term, str):
        return term
    if len(term) == 1:
        inner = shown(term[0], 9)
        text, own = (str(int(inner) + 1), 0) if inner.isdigit() else (f"S {inner}", 10)
    else:
        text, own = f"{shown(term[0], 50)} + {shown(term[1], 49)}", 50
    return f"({text})" if own > level else text


def form(left: Term, right: Term) -> str:
    """A digest that equations share if they differ by names or by which side is which.

    >>> form(("a", "b"), ("b", "a")) == form(("c", "a"), ("a", "c"))
    True
    """
    names = sorted(variables(left) | variables(right))
    least = min(
        min(f"{a}={b}", f"{b}={a}")
        for order in permutations(names)
        for renamed in [{name: f"x{n}" for n, name in enumerate(order)}]
        for a, b in [(shown(_renamed(left, renamed)), shown(_renamed(right, renamed)))]
    )
    return hashlib.blake2b(least.encode(), digest_size=16).hexdigest()


def _renamed(term: Term, names: dict[str, str]) -> Term:
    if isinstance(term, str):
        return names.get(term, term)
    return tuple(_renamed(part, names) for part in term)


def variables(term: Term) -> set[str]:
    """The names of the variables in it."""
    if isinstance(term, str):
        return {term} - {"0"}
    return set[str]().union(*map(variables, term))


def _operations(term: Term) -> int:
    return 0 if isinstance(term, str) else 1 + sum(map(_operations, term))


def _task(left: Term, right: Term, spec: Peano, name: str) -> Task:
    names = " ".join(sorted(variables(left) | variables(right)))
    statement = f"forall {names} : nat, {shown(left)} = {shown(right)}"
    operations = min(_operations(left), _operations(right))
    return Task(
        id=f"peano-{name}",
        messages=({"role": "user", "content": spec.template.replace("{theorem}", f"======\n{statement}")},),
        fields={
            "name": "goal",
            "statement": statement,
            "operations": operations,
            "computed": computed(left) == computed(right),
            "difficulty": operations,
        },
        source="peano",
    )
