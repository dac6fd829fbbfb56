"""Intuitionistic propositional logic, decided: formulas, derivations without contraction, scripts for Coq.

A sequent Γ ⊢ G holds where the formulas of Γ prove G. The rules of the calculus G4ip (also LJT), read
upwards, make every sequent smaller, so a search ends without looking for loops, and what it does not find is
unprovable:

    axiom   Γ, G ⊢ G with G an atom or ⊥          ⊥L    Γ, ⊥ ⊢ G
    →R      Γ, A ⊢ B            for A → B          ∧R    Γ ⊢ A and Γ ⊢ B       for A ∧ B
    ∧L      Γ, A, B ⊢ G         for A ∧ B          ∨L    Γ, A ⊢ G and Γ, B ⊢ G for A ∨ B
    p→L     Γ, p, B ⊢ G         for p → B with p   ∧→L   Γ, A → B → C ⊢ G      for A ∧ B → C
    ∨→L     Γ, A → C, B → C ⊢ G for A ∨ B → C
    ∨R      Γ ⊢ A or Γ ⊢ B      for A ∨ B          →→L   Γ, B → C ⊢ A → B and Γ, C ⊢ G  for (A → B) → C

All but the last line are invertible: what they leave holds if the sequent does, so they are said first, in
any order. ¬A is A → ⊥, and ⊥ → A, which says nothing, is left alone.

Source: R. Dyckhoff, Contraction-free sequent calculi for intuitionistic logic, Journal of Symbolic Logic 57
(1992) 795-807. Deviation: contexts are sets, which is the same as contraction is admissible there.
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from posttrain_prove.tasks.formula import FALSE, Formula


class Derivation(NamedTuple):
    """The rule that a derivation ends with, the formula it is applied to, and the derivations above it."""

    rule: str
    formula: Formula
    premises: tuple["Derivation", ...] = ()


Found = tuple[int, Derivation]
"""How many choices deep a derivation is, and the derivation."""
_Context = tuple[Formula, ...]
"""Without repetitions, in the order in which they came: what is found never depends on a hash."""


class Prover:
    r"""What is provable, and the fewest choices it takes; remembers every sequent it has met.

    >>> A, B = Formula("A"), Formula("B")
    >>> either, peirce = Formula("\\/", (A, Formula("~", (A,)))), implies(implies(implies(A, B), A), A)
    >>> prove = Prover()
    >>> prove(either), prove(peirce), prove(implies(implies(either, FALSE), FALSE))[0]
    (None, None, 1)
    """

    def __init__(self) -> None:
        self._known: dict[tuple[frozenset[Formula], Formula], Found | None] = {}

    def __call__(self, formula: Formula) -> Found | None:
        """(choices, derivation) with the least number of choices; None if there is no derivation.

        Choices are counted in depth: the most uses of ∨R and of →→L, the rules that may lead astray, on a
        path from the formula to an axiom; the least of that over all derivations which say invertible rules
        first.
        """
        return self._sequent((), formula)

    def _sequent(self, context: _Context, goal: Formula) -> Found | None:
        key = (frozenset(context), goal)
        if key not in self._known:
            self._known[key] = self._derived(context, goal)
        return self._known[key]

    def _derived(self, context: _Context, goal: Formula) -> Found | None:
        if FALSE in context:
            return 0, Derivation("falseL", FALSE)
        if not goal.parts and goal in context:
            return 0, Derivation("axiom", goal)
        if (step := _invertible(context, goal)) is not None:
            rule, formula, sequents = step
            return self._all(rule, formula, sequents, 0)
        best: Found | None = None
        for rule, formula, sequents in _choices(context, goal):
            found = self._all(rule, formula, sequents, 1)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
            if best is not None and best[0] == 1:
                break
        return best

    def _all(
        self, rule: str, formula: Formula, sequents: list[tuple[_Context, Formula]], choice: int
    ) -> Found | None:
        """The derivation from all sequents that a rule leaves; None if one does not hold."""
        derived = []
        for context, goal in sequents:
            found = self._sequent(context, goal)
            if found is None:
                return None
            derived.append(found)
        return (
            choice + max(choices for choices, _ in derived),
            Derivation(rule, formula, tuple(derivation for _, derivation in derived)),
        )


_Step = tuple[str, Formula, list[tuple[_Context, Formula]]]
"""A rule, the formula it is applied to, and the sequents it leaves."""


def _invertible(context: _Context, goal: Formula) -> _Step | None:
    """The first invertible rule that applies; None if none does."""
    if (split := _implication(goal)) is not None:
        return "impR", goal, [(_with(context, split[0]), split[1])]
    if goal.sign == "/\\":
        return "andR", goal, [(context, part) for part in goal.parts]
    for formula in context:
        rest = tuple(other for other in context if other != formula)
        if formula.sign == "/\\":
            return "andL", formula, [(_with(rest, *formula.parts), goal)]
        if formula.sign == "\\/":
            return "orL", formula, [(_with(rest, part), goal) for part in formula.parts]
        if (split := _implication(formula)) is None:
            continue
        left, right = split
        if not left.parts and left in context:
            return "atomL", formula, [(_with(rest, right), goal)]
        if left.sign in ("/\\", "\\/"):
            return f"{left.sign}L", formula, [(_with(rest, *_smaller(left, right)), goal)]
    return None


def _choices(context: _Context, goal: Formula) -> Iterator[_Step]:
    """The rules that may lead astray."""
    if goal.sign == "\\/":
        for side, part in zip(("leftR", "rightR"), goal.parts, strict=True):
            yield side, goal, [(context, part)]
    for formula in context:
        split = _implication(formula)
        inner = _implication(split[0]) if split else None
        if split and inner:
            rest = tuple(other for other in context if other != formula)
            first = (_with(rest, implies(inner[1], split[1])), split[0])
            yield "impL", formula, [first, (_with(rest, split[1]), goal)]


def implies(left: Formula, right: Formula) -> Formula:
    """left -> right."""
    return Formula("->", (left, right))


def _implication(formula: Formula) -> tuple[Formula, Formula] | None:
    """Its two sides; None if it is none."""
    if formula.sign == "->":
        return formula.parts[0], formula.parts[1]
    return (formula.parts[0], FALSE) if formula.sign == "~" else None


def _smaller(left: Formula, right: Formula) -> tuple[Formula, ...]:
    """What (left -> right) says, for a left side that is a conjunction or a disjunction."""
    one, other = left.parts
    if left.sign == "/\\":
        return (implies(one, implies(other, right)),)
    return implies(one, right), implies(other, right)


def _with(context: _Context, *formulas: Formula) -> _Context:
    return tuple(dict.fromkeys((*context, *formulas)))


def by_introductions(formula: Formula, context: _Context = ()) -> bool:
    """Whether introductions and assumption alone prove it: →R, ∧R, ∨R, and Γ, G ⊢ G of any G.

    >>> A, B = Formula("A"), Formula("B")
    >>> by_introductions(implies(A, implies(B, A))), by_introductions(implies(FALSE, A))
    (True, False)
    """
    if formula in context:
        return True
    if (split := _implication(formula)) is not None:
        return by_introductions(split[1], _with(context, split[0]))
    proved = [by_introductions(part, context) for part in formula.parts]
    return (formula.sign == "/\\" and all(proved)) or (formula.sign == "\\/" and any(proved))


def script(derivation: Derivation) -> list[str]:
    """Tactics that say the derivation to Coq, for a goal that is its formula; hypotheses are h1, h2, ...

    A tactic is one rule, but for ∨→L, which is two, and for →→L, which says what it proves by `assert` and
    then uses it.
    """
    return list(_said(derivation, {}, count(1)))


def _said(derivation: Derivation, named: dict[Formula, str], fresh: Iterator[int]) -> Iterator[str]:
    rule, formula, premises = derivation
    new = [f"h{next(fresh)}" for _ in range(_NEW.get(rule, 0))]
    h = named.get(formula, "")
    split = _implication(formula)
    left, right = split or (FALSE, FALSE)
    one, other = (*left.parts, FALSE, FALSE)[:2]
    added: list[dict[Formula, str]] = [{} for _ in premises]
    if rule in ("axiom", "falseL"):
        yield f"exact {h}." if rule == "axiom" else f"destruct {h}."
    elif rule in ("andR", "leftR", "rightR"):
        yield {"andR": "split.", "leftR": "left.", "rightR": "right."}[rule]
    elif rule == "impR":
        yield f"intro {new[0]}."
        added = [{left: new[0]}]
    elif rule == "andL":
        yield f"destruct {h} as [{new[0]} {new[1]}]."
        added = [dict(zip(formula.parts, new, strict=True))]
    elif rule == "orL":
        yield f"destruct {h} as [{new[0]}|{new[1]}]."
        added = [{part: name} for part, name in zip(formula.parts, new, strict=True)]
    elif rule == "atomL":
        yield f"pose proof ({h} {named[left]}) as {new[0]}."
        added = [{right: new[0]}]
    elif rule == "/\\L":
        yield f"pose proof (fun (a : {one}) (b : {other}) => {h} (conj a b)) as {new[0]}."
        added = [dict(zip(_smaller(left, right), new, strict=True))]
    elif rule == "\\/L":
        yield f"pose proof (fun a : {one} => {h} (or_introl a)) as {new[0]}."
        yield f"pose proof (fun b : {other} => {h} (or_intror b)) as {new[1]}."
        added = [dict(zip(_smaller(left, right), new, strict=True))]
    else:
        inner = _implication(left) or (FALSE, FALSE)
        yield f"assert ({new[0]} : {left})."
        yield f"pose proof (fun b : {inner[1]} => {h} (fun _ => b)) as {new[1]}."
        yield from _said(premises[0], named | {implies(inner[1], right): new[1]}, fresh)
        yield f"pose proof ({h} {new[0]}) as {new[2]}."
        yield from _said(premises[1], named | {right: new[2]}, fresh)
        return
    for premise, names in zip(premises, added, strict=True):
        yield from _said(premise, named | names, fresh)


_NEW = {"impR": 1, "andL": 2, "orL": 2, "atomL": 1, "/\\L": 1, "\\/L": 2, "impL": 3}
"""Hypotheses that a rule names."""
