"""Decide intuitionistic propositional logic: formulas, derivations without contraction, scripts for Coq.

A sequent Γ ⊢ G holds where the formulas of Γ prove G. The rules of the calculus G4ip (also LJT), read
upwards, make every sequent smaller, so a search ends without looking for loops, and a sequent without a
derivation is unprovable:

    axiom   Γ, G ⊢ G with G an atom or ⊥          ⊥L    Γ, ⊥ ⊢ G
    →R      Γ, A ⊢ B            for A → B          ∧R    Γ ⊢ A and Γ ⊢ B       for A ∧ B
    ∧L      Γ, A, B ⊢ G         for A ∧ B          ∨L    Γ, A ⊢ G and Γ, B ⊢ G for A ∨ B
    p→L     Γ, p, B ⊢ G         for p → B with p   ∧→L   Γ, A → B → C ⊢ G      for A ∧ B → C
    ∨→L     Γ, A → C, B → C ⊢ G for A ∨ B → C
    ∨R      Γ ⊢ A or Γ ⊢ B      for A ∨ B          →→L   Γ, B → C ⊢ A → B and Γ, C ⊢ G  for (A → B) → C

All but the last line are invertible: the sequents they leave hold if the sequent does, so they are applied
first, in any order. ¬A is A → ⊥, and ⊥ → A, which is trivial, is left alone.

Source: R. Dyckhoff, Contraction-free sequent calculi for intuitionistic logic, Journal of Symbolic Logic 57
(1992) 795-807. Deviation: contexts are sets, which is the same as contraction is admissible there.
"""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from posttrain_prove.tasks.formula import FALSE, Formula, ProverName, print_formula


class Derivation(NamedTuple):
    """The last rule of a derivation, the formula it is applied to, and the derivations of its premises."""

    rule: str
    formula: Formula
    premises: tuple["Derivation", ...] = ()


Proof = tuple[int, Derivation]
"""The depth of choices, and the derivation."""
_Context = tuple[Formula, ...]
"""Distinct formulas in order of appearance: results never depend on a hash."""


class Prover:
    r"""Decide formulas, with the fewest choices; caches every sequent.

    >>> A, B = Formula("A"), Formula("B")
    >>> either, peirce = Formula("\\/", (A, Formula("~", (A,)))), implies(implies(implies(A, B), A), A)
    >>> prove = Prover()
    >>> prove(either), prove(peirce), prove(implies(implies(either, FALSE), FALSE))[0]
    (None, None, 1)
    """

    def __init__(self) -> None:
        self._results: dict[tuple[frozenset[Formula], Formula], Proof | None] = {}

    def __call__(self, formula: Formula) -> Proof | None:
        """Return (choices, derivation) with the least number of choices; None without a derivation.

        Choices are counted in depth: the most uses of ∨R and of →→L, the rules that may lead astray, on a
        path from the formula to an axiom; the least of that over all derivations that apply invertible rules
        first.
        """
        return self._prove((), formula)

    def _prove(self, context: _Context, goal: Formula) -> Proof | None:
        key = (frozenset(context), goal)
        if key not in self._results:
            self._results[key] = self._derive(context, goal)
        return self._results[key]

    def _derive(self, context: _Context, goal: Formula) -> Proof | None:
        if FALSE in context:
            return 0, Derivation("falseL", FALSE)
        if not goal.parts and goal in context:
            return 0, Derivation("axiom", goal)
        if (step := _find_invertible(context, goal)) is not None:
            rule, formula, sequents = step
            return self._derive_all(rule, formula, sequents, 0)
        best: Proof | None = None
        for rule, formula, sequents in _find_choices(context, goal):
            proof = self._derive_all(rule, formula, sequents, 1)
            if proof is not None and (best is None or proof[0] < best[0]):
                best = proof
            if best is not None and best[0] == 1:
                break
        return best

    def _derive_all(
        self, rule: str, formula: Formula, sequents: list[tuple[_Context, Formula]], choice: int
    ) -> Proof | None:
        """Return the derivation from all sequents that a rule leaves; None if one does not hold."""
        proofs = []
        for context, goal in sequents:
            proof = self._prove(context, goal)
            if proof is None:
                return None
            proofs.append(proof)
        return (
            choice + max(choices for choices, _ in proofs),
            Derivation(rule, formula, tuple(derivation for _, derivation in proofs)),
        )


_Step = tuple[str, Formula, list[tuple[_Context, Formula]]]
"""A rule, the formula it is applied to, and the sequents it leaves."""


def _find_invertible(context: _Context, goal: Formula) -> _Step | None:
    """Return the first invertible rule that applies; None if none does."""
    if (split := _split_implication(goal)) is not None:
        return "impR", goal, [(_extend(context, split[0]), split[1])]
    if goal.sign == "/\\":
        return "andR", goal, [(context, part) for part in goal.parts]
    for formula in context:
        rest = tuple(other for other in context if other != formula)
        if formula.sign == "/\\":
            return "andL", formula, [(_extend(rest, *formula.parts), goal)]
        if formula.sign == "\\/":
            return "orL", formula, [(_extend(rest, part), goal) for part in formula.parts]
        if (split := _split_implication(formula)) is None:
            continue
        left, right = split
        if not left.parts and left in context:
            return "atomL", formula, [(_extend(rest, right), goal)]
        if left.sign in ("/\\", "\\/"):
            return f"{left.sign}L", formula, [(_extend(rest, *_split_premise(left, right)), goal)]
    return None


def _find_choices(context: _Context, goal: Formula) -> Iterator[_Step]:
    """Yield the rules that may lead astray."""
    if goal.sign == "\\/":
        for side, part in zip(("leftR", "rightR"), goal.parts, strict=True):
            yield side, goal, [(context, part)]
    for formula in context:
        split = _split_implication(formula)
        inner = _split_implication(split[0]) if split else None
        if split and inner:
            rest = tuple(other for other in context if other != formula)
            first = (_extend(rest, implies(inner[1], split[1])), split[0])
            yield "impL", formula, [first, (_extend(rest, split[1]), goal)]


def implies(left: Formula, right: Formula) -> Formula:
    return Formula("->", (left, right))


def _split_implication(formula: Formula) -> tuple[Formula, Formula] | None:
    """Return both sides of an implication or a negation; None for other formulas."""
    if formula.sign == "->":
        return formula.parts[0], formula.parts[1]
    return (formula.parts[0], FALSE) if formula.sign == "~" else None


def _split_premise(left: Formula, right: Formula) -> tuple[Formula, ...]:
    """Return the implications equivalent to left -> right, for a conjunction or disjunction on the left."""
    one, other = left.parts
    if left.sign == "/\\":
        return (implies(one, implies(other, right)),)
    return implies(one, right), implies(other, right)


def _extend(context: _Context, *formulas: Formula) -> _Context:
    return tuple(dict.fromkeys((*context, *formulas)))


def by_introductions(formula: Formula, context: _Context = ()) -> bool:
    """Return whether introductions and assumption alone prove it: →R, ∧R, ∨R, and Γ, G ⊢ G of any G.

    >>> A, B = Formula("A"), Formula("B")
    >>> by_introductions(implies(A, implies(B, A))), by_introductions(implies(FALSE, A))
    (True, False)
    """
    if formula in context:
        return True
    if (split := _split_implication(formula)) is not None:
        return by_introductions(split[1], _extend(context, split[0]))
    part_proofs = [by_introductions(part, context) for part in formula.parts]
    return (formula.sign == "/\\" and all(part_proofs)) or (formula.sign == "\\/" and any(part_proofs))


def write_script(derivation: Derivation, prover: ProverName = "coq") -> list[str]:
    """Return tactics for a derivation, whose goal is its formula; hypotheses are h1, h2, ...

    A tactic is one rule, except that some of Lean's take two or three, ∨→L takes two, and →→L proves a lemma
    and then uses it.
    """
    return list(_write_tactics(derivation, {}, count(1), prover))


def _write_tactics(
    derivation: Derivation, names: dict[Formula, str], fresh: Iterator[int], prover: ProverName
) -> Iterator[str]:
    rule, formula, premises = derivation
    new = [f"h{next(fresh)}" for _ in range(_FRESH_NAMES.get(rule, 0))]
    left, right = _split_implication(formula) or (FALSE, FALSE)
    one, other = (*left.parts, FALSE, FALSE)[:2]
    inner = _split_implication(left) or (FALSE, FALSE)
    additions: list[dict[Formula, str]] = [{} for _ in premises]
    if rule == "impR":
        additions = [{left: new[0]}]
    elif rule == "andL":
        additions = [dict(zip(formula.parts, new, strict=True))]
    elif rule == "orL":
        additions = [{part: name} for part, name in zip(formula.parts, new, strict=True)]
    elif rule == "atomL":
        additions = [{right: new[0]}]
    elif rule in ("/\\L", "\\/L"):
        additions = [dict(zip(_split_premise(left, right), new, strict=True))]
    elif rule == "impL":
        additions = [{implies(inner[1], right): new[1]}, {right: new[2]}]
    values = {
        "h": names.get(formula, ""),
        "new": new,
        "premise": names.get(left, ""),
        "left": print_formula(left, prover),
        "one": print_formula(one, prover),
        "other": print_formula(other, prover),
        "conclusion": print_formula(inner[1], prover),
    }
    before = _TACTICS[prover][rule]
    for line in before[0]:
        yield line.format(**values)
    for number, (premise, premise_names) in enumerate(zip(premises, additions, strict=True)):
        for line in before[number] if number else ():
            yield line.format(**values)
        yield from _write_tactics(premise, names | premise_names, fresh, prover)


_TACTICS: dict[ProverName, dict[str, tuple[tuple[str, ...], ...]]] = {
    "coq": {
        "axiom": (("exact {h}.",),),
        "falseL": (("destruct {h}.",),),
        "andR": (("split.",), ()),
        "leftR": (("left.",),),
        "rightR": (("right.",),),
        "impR": (("intro {new[0]}.",),),
        "andL": (("destruct {h} as [{new[0]} {new[1]}].",),),
        "orL": (("destruct {h} as [{new[0]}|{new[1]}].",), ()),
        "atomL": (("pose proof ({h} {premise}) as {new[0]}.",),),
        "/\\L": (("pose proof (fun (a : {one}) (b : {other}) => {h} (conj a b)) as {new[0]}.",),),
        "\\/L": (
            (
                "pose proof (fun a : {one} => {h} (or_introl a)) as {new[0]}.",
                "pose proof (fun b : {other} => {h} (or_intror b)) as {new[1]}.",
            ),
        ),
        "impL": (
            (
                "assert ({new[0]} : {left}).",
                "pose proof (fun b : {conclusion} => {h} (fun _ => b)) as {new[1]}.",
            ),
            ("pose proof ({h} {new[0]}) as {new[2]}.",),
        ),
    },
    "lean": {
        "axiom": (("exact {h}",),),
        "falseL": (("cases {h}",),),
        "andR": (("constructor",), ()),
        "leftR": (("left",),),
        "rightR": (("right",),),
        "impR": (("intro {new[0]}",),),
        "andL": (("have {new[0]} := {h}.1", "have {new[1]} := {h}.2"),),
        "orL": (("refine Or.elim {h} ?_ ?_", "intro {new[0]}"), ("intro {new[1]}",)),
        "atomL": (("have {new[0]} := {h} {premise}",),),
        "/\\L": (("have {new[0]} := fun (a : {one}) (b : {other}) => {h} ⟨a, b⟩",),),
        "\\/L": (
            (
                "have {new[0]} := fun (a : {one}) => {h} (Or.inl a)",
                "have {new[1]} := fun (b : {other}) => {h} (Or.inr b)",
            ),
        ),
        "impL": (
            (
                "refine have {new[0]} : {left} := ?_; ?_",
                "have {new[1]} := fun (b : {conclusion}) => {h} (fun _ => b)",
            ),
            ("have {new[2]} := {h} {new[0]}",),
        ),
    },
}
"""Tactics before each premise of a rule."""
_FRESH_NAMES = {"impR": 1, "andL": 2, "orL": 2, "atomL": 1, "/\\L": 1, "\\/L": 2, "impL": 3}
"""Number of hypotheses that a rule names."""
