"""Random theorems of intuitionistic propositional logic to prove in Coq or Lean, of known difficulty.

A formula of n connectives over a few atoms, one at least, is drawn until it is provable (intuitionistic.py:
Prover), and not by introductions and assumption alone. A digest of its form alone decides whether it may be
trained on or is held out.
"""

import hashlib
import random
import string
from dataclasses import dataclass
from itertools import permutations
from typing import ClassVar

from posttrain.data.protocol import Games
from posttrain.types import Task
from posttrain_prove.tasks.drawn import Split, Theorems, collect_split, draw_in_split, pick
from posttrain_prove.tasks.formula import FALSE, Formula, ProverName, print_formula
from posttrain_prove.tasks.intuitionistic import Proof, Prover, by_introductions, write_script

_CONNECTIVES = ("->", "->", "/\\", "\\/", "~")
"""A connective is drawn as often as it is listed."""
_FALSE = 0.05
"""Share of False among the leaves."""


@dataclass(frozen=True, kw_only=True)
class Propositional(Theorems):
    """Size and number of the formulas."""

    atoms: int = 4
    """Number of atoms to draw from, at most 5: A, B, C, ..."""
    low: int = 6
    r"""The fewest connectives: ->, /\, \/ and ~."""
    high: int = 13
    """The most connectives; each number from low to high has an equal share of the theorems."""
    prover: ProverName = "coq"
    """Whether statement, prompt and gold are written for the verifier `coq` or `lean`."""
    refuted: float = 0.0
    """Share of theorems that are the negation of a formula, which is drawn to be refutable."""
    least: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.atoms <= 5:
            raise ValueError(f"atoms must be 1 to 5, not {self.atoms}")
        if not 0 <= self.refuted <= 1:
            raise ValueError(f"refuted must lie in [0, 1], not {self.refuted}")

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        held_out = propositional("held_out", self)[:limit] if limit and self.held_out else []
        return propositional("train", self), held_out


def propositional(split: Split, spec: Propositional, *, limit: int | None = None) -> list[Task]:
    r"""Return the theorems of a split, sizes in turn; the first `limit` if given. No two have the same form.

    `fields` holds what the verifier needs, and besides: `connectives`, which is also `difficulty`;
    `choices`, the least number of rules that may lead astray on a path of a derivation (intuitionistic.py:
    Prover); `refuted`, whether the theorem was drawn as a negation; `gold`, a proof, not necessarily the
    shortest; for Coq `opening`, the sentences sent first. Raises UserError if the split is empty or there are
    too few theorems of this size.

    >>> [task] = propositional("held_out", Propositional(low=4, high=4), limit=1)
    >>> print(task.messages[0]["content"])
    ======
    B -> ~ ~ (D \/ B)
    >>> task.fields["statement"], task.fields["choices"]
    ('forall B D : Prop, B -> ~ ~ (D \\/ B)', 0)
    """
    content = f"propositional theorems of {spec.low} to {spec.high} connectives for {split!r}"
    theorems = collect_split(split, spec, limit, draw_theorem, "propositional", content)
    return [make_task(theorem, spec.template, f"{split}-{index}", spec.prover) for index, theorem in theorems]


DrawnTheorem = tuple[Formula, Proof, bool]
"""(formula, (choices, derivation), whether it was drawn as a negation)."""


def draw_theorem(split: Split, spec: Propositional, index: int) -> tuple[DrawnTheorem, str] | None:
    """Return the theorem of an index and its form, with low + index mod (high - low + 1) connectives.

    Return None if the split has none. It takes about a millisecond for any index.
    """
    size = spec.size(index)
    rng = random.Random(f"{spec.seed}/{split}/{index}")
    negated = rng.random() < spec.refuted

    def draw(rng: random.Random) -> tuple[DrawnTheorem, str] | None:
        formula = _draw(size - negated, spec.atoms, rng)
        formula = Formula("~", (formula,)) if negated else formula
        if not atoms_of(formula) or not is_tautology(formula) or by_introductions(formula):
            return None
        proof = Prover()(formula)
        return None if proof is None else ((formula, proof, negated), form(formula))

    return draw_in_split(split, rng, draw)


def _draw(size: int, atoms: int, rng: random.Random) -> Formula:
    """Draw a formula of this many connectives, and how they are split between its parts."""
    if size == 0:
        return FALSE if rng.random() < _FALSE else Formula(string.ascii_uppercase[int(rng.random() * atoms)])
    sign = pick(_CONNECTIVES, rng)
    if sign == "~":
        return Formula(sign, (_draw(size - 1, atoms, rng),))
    left = int(rng.random() * size)
    return Formula(sign, (_draw(left, atoms, rng), _draw(size - 1 - left, atoms, rng)))


def is_tautology(formula: Formula) -> bool:
    r"""Return whether every assignment makes it true: a formula that fails this classical test is unprovable.

    >>> A = Formula("A")
    >>> is_tautology(Formula("\\/", (A, Formula("~", (A,))))), is_tautology(A)
    (True, False)
    """
    atoms = sorted(atoms_of(formula))
    rows = 1 << len(atoms)
    true_rows = (1 << rows) - 1
    """The truth of a formula in each row of its table is a bit of a number."""
    column = {
        atom: sum(1 << row for row in range(rows) if row >> place & 1) for place, atom in enumerate(atoms)
    }

    def truth(formula: Formula) -> int:
        values = [truth(part) for part in formula.parts]
        match formula.sign:
            case "/\\":
                return values[0] & values[1]
            case "\\/":
                return values[0] | values[1]
            case "->":
                return true_rows & ~values[0] | values[1]
            case "~":
                return true_rows & ~values[0]
        return column.get(formula.sign, 0)

    return truth(formula) == true_rows


def form(formula: Formula) -> str:
    r"""Return a digest that formulas share if they differ only in trifles.

    Trifles are: the names of atoms, the order and repetition of what ∧ and ∨ join and of premises, premises
    joined by ∧ or by →, and ¬A for A → False.

    >>> A, B, C = map(Formula, "ABC")
    >>> one = Formula("->", (Formula("/\\", (A, B)), Formula("~", (C,))))
    >>> other = Formula("->", (C, Formula("->", (A, Formula("->", (B, FALSE))))))
    >>> form(one) == form(other), form(one) == form(A)
    (True, False)
    """
    atoms = sorted(atoms_of(formula))
    names = [dict(zip(atoms, order, strict=True)) for order in permutations(range(len(atoms)))]
    least = min(_normalise(formula, {a: str(n) for a, n in order_names.items()}) for order_names in names)
    return hashlib.blake2b(least.encode(), digest_size=16).hexdigest()


def _normalise(formula: Formula, names: dict[str, str]) -> str:
    if formula.sign in ("/\\", "\\/"):
        parts = sorted({_normalise(part, names) for part in _operands(formula, formula.sign)})
        return parts[0] if len(parts) == 1 else f"({formula.sign.join(parts)})"
    premises: set[str] = set()
    while formula.sign in ("->", "~"):
        premises |= {_normalise(part, names) for part in _operands(formula.parts[0], "/\\")}
        formula = formula.parts[1] if formula.sign == "->" else FALSE
    if premises:
        return f"({','.join(sorted(premises))}>{_normalise(formula, names)})"
    return names.get(formula.sign, "F")


def _operands(formula: Formula, sign: str) -> list[Formula]:
    """Return the operands of a connective, however it is nested."""
    if formula.sign != sign:
        return [formula]
    return [operand for part in formula.parts for operand in _operands(part, sign)]


def atoms_of(formula: Formula) -> set[str]:
    """Return the names of the atoms in a formula."""
    if formula.parts:
        return set().union(*map(atoms_of, formula.parts))
    return set() if formula == FALSE else {formula.sign}


def make_task(proved: DrawnTheorem, template: str, name: str, prover: ProverName = "coq") -> Task:
    """Return a theorem as a task: its goal after the introduction of its atoms."""
    formula, (choices, derivation), refuted = proved
    atoms = " ".join(sorted(atoms_of(formula)))
    connectives = _count_connectives(formula)
    text, script = print_formula(formula, prover), write_script(derivation, prover)
    if prover == "coq":
        opening = f"intros {atoms}."
        proof = {
            "statement": f"forall {atoms} : Prop, {text}",
            "opening": [opening],
            "gold": "\n".join([opening, *script]),
        }
    else:
        proof = {"statement": f"({atoms} : Prop) : {text}", "prelude": "tactics", "gold": "\n".join(script)}
    return Task(
        id=f"propositional-{name}",
        messages=({"role": "user", "content": template.replace("{theorem}", f"======\n{text}")},),
        fields={
            "name": "goal",
            **proof,
            "connectives": connectives,
            "choices": choices,
            "refuted": refuted,
            "difficulty": connectives,
        },
        source="propositional",
    )


def _count_connectives(formula: Formula) -> int:
    return bool(formula.parts) + sum(map(_count_connectives, formula.parts))
