r"""Random equations of natural numbers to prove in Coq by computation and induction alone.

    forall a b : nat, b + S a = S (a + b)

Both sides are sums of the same variables and the same number of successors, in any order and bracketing, so
each equation holds. Coq computes by the first argument: 0 + n = n and S m + n = S (m + n). All else needs
induction, and most of that needs lemmas, such as n + 0 = n or n + S m = S (n + m), which the prompt does not
give. A digest of the form alone (names of variables and the order of its sides do not count) decides whether
an equation may be trained on or is held out.
"""

import hashlib
import random
from dataclasses import dataclass
from itertools import permutations

from posttrain.data.protocol import Games
from posttrain.types import Task
from posttrain_prove.tasks.drawn import Split, Theorems, collect_split, draw_in_split, pick, shuffle

Term = str | tuple["Term", ...]
"""0 or a variable by its name; (t,) is the successor of t, (t, u) the sum of both."""
_ZERO = 0.15
"""Share of sides that get a 0 among their summands."""


@dataclass(frozen=True, kw_only=True)
class Peano(Theorems):
    """Size and number of the equations."""

    variables: int = 3
    """Number of variables to draw from, at most 5: a, b, c, ..."""
    low: int = 2
    """The fewest operations of a side: sums and successors, without those that add a 0."""
    high: int = 5
    """The most operations of a side; each number from low to high has an equal share of the theorems."""
    successors: int = 2
    """The most successors of a side."""
    computed: bool = True
    """Include equations that computation alone proves."""

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
    """Return the theorems of a split, sizes in turn; the first `limit` if given. No two have the same form.

    `fields` holds what the verifier `coq` needs, `operations`, which is also `difficulty`, and `computed`,
    whether both sides compute to the same term. Raises UserError if the split is empty or there are too few
    equations of this size.

    >>> [task] = peano("held_out", Peano(low=3, high=3), limit=1)
    >>> print(task.messages[0]["content"])
    ======
    forall b c : nat, S c + S b = b + 2 + c
    """
    content = f"equations of {spec.low} to {spec.high} operations for {split!r}"
    equations = collect_split(split, spec, limit, _draw_equation, "Peano", content)
    return [_task(left, right, spec, f"{split}-{index}") for index, (left, right) in equations]


def _draw_equation(split: Split, spec: Peano, index: int) -> tuple[tuple[Term, Term], str] | None:
    """Return the equation of an index, with low + index mod (high - low + 1) operations, and its form."""
    size = spec.size(index)

    def draw(rng: random.Random) -> tuple[tuple[Term, Term], str] | None:
        steps = int(rng.random() * (min(spec.successors, size) + 1))
        names = [chr(ord("a") + int(rng.random() * spec.variables)) for _ in range(size - steps + 1)]
        left, right = _draw_side(names, steps, rng), _draw_side(names, steps, rng)
        if left == right or (compute(left) == compute(right) and not spec.computed):
            return None
        return (left, right), form_digest(left, right)

    return draw_in_split(split, random.Random(f"{spec.seed}/{split}/{index}"), draw)


def _draw_side(names: list[str], steps: int, rng: random.Random) -> Term:
    """Return a sum of these in random order and brackets, with `steps` successors anywhere."""
    summands: list[Term] = [*names, *["0"] * (rng.random() < _ZERO)]
    term = _draw_brackets(shuffle(summands, rng), rng)
    for _ in range(steps):
        term = _add_successor(term, pick(_paths(term), rng))
    return term


def _draw_brackets(summands: list[Term], rng: random.Random) -> Term:
    if len(summands) == 1:
        return summands[0]
    at = 1 + int(rng.random() * (len(summands) - 1))
    return _draw_brackets(summands[:at], rng), _draw_brackets(summands[at:], rng)


def _paths(term: Term) -> list[tuple[int, ...]]:
    """Return the paths to all parts of a term."""
    if isinstance(term, str):
        return [()]
    return [(), *((n, *path) for n, part in enumerate(term) for path in _paths(part))]


def _add_successor(term: Term, path: tuple[int, ...]) -> Term:
    """Return the term with the part at this path replaced by its successor."""
    if not path or isinstance(term, str):
        return (term,)
    return tuple(_add_successor(part, path[1:]) if n == path[0] else part for n, part in enumerate(term))


def compute(term: Term) -> Term:
    """Compute a term everywhere, from left to right: 0 + n = n and S m + n = S (m + n).

    >>> compute(((("a",), "b"), ("0", "c")))
    ((('a', 'b'), 'c'),)
    """
    if isinstance(term, str):
        return term
    if len(term) == 1:
        return (compute(term[0]),)
    left, right = compute(term[0]), compute(term[1])
    if left == "0":
        return right
    if isinstance(left, tuple) and len(left) == 1:
        return (compute((left[0], right)),)
    return left, right


def print_term(term: Term, level: int = 50) -> str:
    """Print a term as Coq does: S binds more than +, which associates to the left.

    >>> print_term((("a", "b"), (("c", "0"),))), print_term(("a", (("0",), "b"))), print_term((("0",),))
    ('a + b + S (c + 0)', 'a + (1 + b)', '2')
    """
    if isinstance(term, str):
        return term
    if len(term) == 1:
        inner = print_term(term[0], 9)
        text, own_level = (str(int(inner) + 1), 0) if inner.isdigit() else (f"S {inner}", 10)
    else:
        text, own_level = f"{print_term(term[0], 50)} + {print_term(term[1], 49)}", 50
    return f"({text})" if own_level > level else text


def form_digest(left: Term, right: Term) -> str:
    """Return a digest that equations share if they differ by names or by the order of their sides.

    >>> form_digest(("a", "b"), ("b", "a")) == form_digest(("c", "a"), ("a", "c"))
    True
    """
    names = sorted(variables(left) | variables(right))
    canonical = min(
        min(f"{a}={b}", f"{b}={a}")
        for order in permutations(names)
        for renamed in [{name: f"x{n}" for n, name in enumerate(order)}]
        for a, b in [(print_term(_rename(left, renamed)), print_term(_rename(right, renamed)))]
    )
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


def _rename(term: Term, names: dict[str, str]) -> Term:
    if isinstance(term, str):
        return names.get(term, term)
    return tuple(_rename(part, names) for part in term)


def variables(term: Term) -> set[str]:
    if isinstance(term, str):
        return {term} - {"0"}
    return set[str]().union(*map(variables, term))


def _count_operations(term: Term) -> int:
    return 0 if isinstance(term, str) else 1 + sum(map(_count_operations, term))


def _task(left: Term, right: Term, spec: Peano, name: str) -> Task:
    names = " ".join(sorted(variables(left) | variables(right)))
    statement = f"forall {names} : nat, {print_term(left)} = {print_term(right)}"
    operations = min(_count_operations(left), _count_operations(right))
    return Task(
        id=f"peano-{name}",
        messages=({"role": "user", "content": spec.template.replace("{theorem}", f"======\n{statement}")},),
        fields={
            "name": "goal",
            "statement": statement,
            "operations": operations,
            "computed": compute(left) == compute(right),
            "difficulty": operations,
        },
        source="peano",
    )
