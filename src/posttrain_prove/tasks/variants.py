"""Provable variants of one propositional theorem, to train on before it is searched again.

A variant is the theorem after one to six edits, drawn at random:

    part         a formula becomes one of its parts          smaller
    atom         a formula becomes an atom                   simpler
    generalise   equal formulas become one atom              more general; what a proof does not look into
    instance     an atom becomes a formula, everywhere       an instance
    exchange     a connective becomes another

Of these, formulas are kept that are provable, though not by introductions and assumption alone, and that
differ in form from the theorem and from each other. Source: AlphaProof's reinforcement learning at test time,
Nature 2025, doi 10.1038/s41586-025-09833-y, where a language model writes the variants.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.data.protocol import Games
from posttrain.types import Task, UserError
from posttrain_prove.tasks.drawn import pick
from posttrain_prove.tasks.formula import FALSE, Formula, parse_formula
from posttrain_prove.tasks.intuitionistic import Proof, Prover, by_introductions
from posttrain_prove.tasks.propositional import atoms_of, form, is_tautology, make_task

_TRIES = 200
"""Consecutive draws without a new variant, after which there are no more."""
_EDITS = 6
Path = tuple[int, ...]
"""The way to a formula within another: which part at each step."""


@dataclass(frozen=True, kw_only=True)
class Variants:
    """Variants of one theorem to train on; the theorem itself is evaluated on."""

    theorem: str
    r"""A formula in Coq's notation: capital letters, False, ->, /\, \/ and ~."""
    template: str = "{theorem}"
    """{theorem} is the goal as Coq shows it."""
    train: int = 200
    """The most variants; a small theorem has fewer."""
    seed: int = 0
    """Seed of the draws; other seeds draw other variants."""

    def __post_init__(self) -> None:
        formula = parse_formula(self.theorem)
        if formula is None or not atoms_of(formula):
            raise ValueError(f"theorem must be a formula with an atom, as 'A -> ~ ~ A', not {self.theorem!r}")
        if len(atoms_of(formula)) > 5:
            raise ValueError("theorem must have at most 5 atoms")
        if "{theorem}" not in self.template:
            raise ValueError("the template must use {theorem}")
        if self.train < 1:
            raise ValueError("train must be 1 or more")

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the variants, and the theorem unless `limit` is 0."""
        return variants(self), [theorem_task(self)][:limit]


def theorem_task(spec: Variants) -> Task:
    """Return the theorem as a task. Raises UserError if it is not provable."""
    formula = parse_formula(spec.theorem)
    proof = Prover()(formula) if formula and is_tautology(formula) else None
    if formula is None or proof is None:
        raise UserError("task.variants.theorem", "it is not provable without excluded middle", "correct it")
    return make_task((formula, proof, False), spec.template, "theorem")


def variants(spec: Variants) -> list[Task]:
    r"""Return the variants, as many as there are up to `train`; the same for the same seed.

    >>> tasks = variants(Variants(theorem="(A -> B /\\ C) -> A -> B", train=2))
    >>> print(*(task.fields["statement"] for task in tasks), sep="\n")
    forall A B : Prop, (A -> B /\ B) -> A -> B
    forall C : Prop, False -> C
    """
    theorem = parse_formula(spec.theorem)
    assert theorem is not None
    rng, prove, tries = random.Random(f"{spec.seed}/{theorem}"), Prover(), 0
    proofs: dict[str, tuple[Formula, Proof]] = {}
    own_form = form(theorem)
    while len(proofs) < spec.train and tries < _TRIES:
        tries += 1
        formula = draw_variant(theorem, rng)
        if not 1 <= len(atoms_of(formula)) <= 5 or not is_tautology(formula) or by_introductions(formula):
            continue
        key = form(formula)
        if key != own_form and key not in proofs and (proof := prove(formula)) is not None:
            proofs[key], tries = (formula, proof), 0
    if not proofs:
        raise UserError("task.variants.theorem", "it has no variants to train on", "take a larger theorem")
    pairs = enumerate(proofs.values())
    return [make_task((*pair, False), spec.template, f"variant-{n}") for n, pair in pairs]


def draw_variant(formula: Formula, rng: random.Random) -> Formula:
    """Return the formula after one to six edits."""
    for _ in range(1 + int(rng.random() * _EDITS)):
        formula = pick(_KINDS, rng)(formula, rng)
    return formula


def places(formula: Formula, path: Path = ()) -> list[tuple[Path, Formula]]:
    """Return all formulas within one, itself included, with the ways to them."""
    inner = [place for n, part in enumerate(formula.parts) for place in places(part, (*path, n))]
    return [(path, formula), *inner]


def put(formula: Formula, path: Path, other: Formula) -> Formula:
    """Return the formula with another one at a place."""
    if not path:
        return other
    first, *rest = path
    parts = [put(p, tuple(rest), other) if n == first else p for n, p in enumerate(formula.parts)]
    return Formula(formula.sign, tuple(parts))


def substitute(formula: Formula, old: Formula, new: Formula) -> Formula:
    """Return the formula with each occurrence of one formula replaced."""
    if formula == old:
        return new
    return Formula(formula.sign, tuple(substitute(part, old, new) for part in formula.parts))


def _part(formula: Formula, rng: random.Random) -> Formula:
    path, inner = pick(places(formula), rng)
    return put(formula, path, pick(inner.parts, rng)) if inner.parts else formula


def _atom(formula: Formula, rng: random.Random) -> Formula:
    path, _ = pick(places(formula), rng)
    return put(formula, path, _draw_atom(formula, rng))


def _generalise(formula: Formula, rng: random.Random) -> Formula:
    return substitute(formula, pick(places(formula), rng)[1], _draw_atom(formula, rng))


def _instance(formula: Formula, rng: random.Random) -> Formula:
    old = Formula(pick(sorted(atoms_of(formula)) or ["A"], rng))
    sign = pick(("->", "/\\", "\\/", "~"), rng)
    parts = (old,) if sign == "~" else (old, _draw_atom(formula, rng))
    return substitute(formula, old, Formula(sign, parts))


def _exchange(formula: Formula, rng: random.Random) -> Formula:
    path, inner = pick(places(formula), rng)
    return (
        put(formula, path, Formula(pick(("->", "/\\", "\\/"), rng), inner.parts))
        if len(inner.parts) == 2
        else formula
    )


def _draw_atom(formula: Formula, rng: random.Random) -> Formula:
    atoms = sorted(atoms_of(formula))
    return pick([*map(Formula, atoms), FALSE], rng)


_KINDS: tuple[Callable[[Formula, random.Random], Formula], ...] = (
    _part,
    _atom,
    _generalise,
    _instance,
    _exchange,
)
