"""Horn theorems: definite clauses over propositional variables, their least proofs, their form up to names.

A hypothesis `A -> B -> C` is a clause with premises A, B and conclusion C; a clause without premises is a
fact. A backward proof has one tactic for each clause it uses: `exact` for a fact, `apply` for an implication,
which leaves its premises as separate goals. So the least number of tactics T obeys

    T(v) = min over clauses c with conclusion v of 1 + Σ over premises p of c of T(p),

and is infinite where v does not follow. T is computed forwards from the facts, as shortest paths in a graph
whose edges have several tails.
"""

import functools
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

Clause = tuple[tuple[int, ...], int]
"""Premises and conclusion, as numbers of variables."""


@dataclass(frozen=True, slots=True)
class Theorem:
    """Hypotheses h1, h2, ... in order, and the variable that follows from them."""

    clauses: tuple[Clause, ...]
    goal: int


def least_proofs(clauses: Sequence[Clause]) -> dict[int, tuple[int, int]]:
    """Return {v: (T(v), last clause of a least proof of v)} for each variable v that follows.

    Variables are settled in the order of T, as in Dijkstra's algorithm; a clause gets its cost once all its
    premises are settled. This is exact, as a clause costs more than any premise. Of clauses with equal cost
    the earlier one is taken.

    Source: Knuth, A generalization of Dijkstra's algorithm, Information Processing Letters 6 (1977) 1-5.

    >>> least_proofs([((), 0), ((0,), 1), ((0, 1), 2), ((2,), 1), ((3,), 2)])
    {0: (1, 0), 1: (2, 1), 2: (4, 2)}
    """
    users: dict[int, list[int]] = defaultdict(list)
    unsettled = []
    queue: list[tuple[int, int]] = []
    for number, (premises, _) in enumerate(clauses):
        distinct = set(premises)
        unsettled.append(len(distinct))
        for premise in distinct:
            users[premise].append(number)
        if not distinct:
            heappush(queue, (1, number))
    proofs: dict[int, tuple[int, int]] = {}
    while queue:
        cost, number = heappop(queue)
        variable = clauses[number][1]
        if variable in proofs:
            continue
        proofs[variable] = (cost, number)
        for user in users[variable]:
            unsettled[user] -= 1
            if not unsettled[user]:
                heappush(queue, (1 + sum(proofs[p][0] for p in clauses[user][0]), user))
    return proofs


def write_script(theorem: Theorem) -> list[str]:
    """Return a least proof, a tactic a line: `exact` for facts, `apply` for implications; premises in order.

    >>> write_script(Theorem((((0,), 1), ((), 0)), 1))
    ['apply h1.', 'exact h2.']
    """
    proofs, tactics, goals = least_proofs(theorem.clauses), [], [theorem.goal]
    while goals:
        number = proofs[goals.pop()][1]
        premises = theorem.clauses[number][0]
        tactics.append(f"{'apply' if premises else 'exact'} h{number + 1}.")
        goals += reversed(premises)
    return tactics


def height(theorem: Theorem) -> int:
    """Return the number of implications on the longest path from the goal to a fact in the least proof.

    >>> height(Theorem((((), 0), ((0,), 1), ((0, 1), 2)), 2))
    2
    """
    proofs = least_proofs(theorem.clauses)

    @functools.cache  # a variable may be needed on many paths
    def below(variable: int) -> int:
        premises = theorem.clauses[proofs[variable][1]][0]
        return 1 + max(map(below, premises)) if premises else 0

    return below(theorem.goal)


def form_digest(theorem: Theorem) -> str:
    """Return a digest that theorems share if they differ only in trifles.

    Trifles are: the names of variables, the order of hypotheses and of premises, a repeated hypothesis or
    premise, a hypothesis that concludes its own premise, and one that no backward proof reaches. Colours of
    variables are refined by the clauses they stand in until no colour splits (Weisfeiler and Leman 1968), so
    two theorems that differ in more may share a digest, but never the other way round.

    >>> short = form_digest(Theorem((((0,), 1), ((), 0)), 1))
    >>> short == form_digest(Theorem((((), 4), ((7,), 8), ((4,), 2)), 2))
    True
    >>> short == form_digest(Theorem((((), 0), ((0,), 1), ((1,), 2)), 2))
    False
    """
    clauses = _relevant_clauses(theorem)
    variables = {v for premises, conclusion in clauses for v in (*premises, conclusion)} | {theorem.goal}
    colour = {v: int(v == theorem.goal) for v in variables}
    colours = 0
    while True:
        signatures: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {v: [] for v in variables}
        for premises, conclusion in clauses:
            before = tuple(sorted([colour[p] for p in premises]))
            signatures[conclusion].append((0, colour[conclusion], before))
            for premise in premises:
                signatures[premise].append((1, colour[conclusion], before))
        signs = {v: (colour[v], tuple(sorted(signatures[v]))) for v in variables}
        rank = {sign: number for number, sign in enumerate(sorted(set(signs.values())))}
        colour = {v: rank[signs[v]] for v in variables}
        if len(rank) == colours:
            return hashlib.blake2b(repr(sorted(signs.values())).encode(), digest_size=16).hexdigest()
        colours = len(rank)


def _relevant_clauses(theorem: Theorem) -> list[tuple[frozenset[int], int]]:
    """Return the clauses that a backward proof may reach, each once, except those that conclude a premise."""
    by_conclusion: dict[int, set[tuple[frozenset[int], int]]] = defaultdict(set)
    for premises, conclusion in theorem.clauses:
        if conclusion not in premises:
            by_conclusion[conclusion].add((frozenset(premises), conclusion))
    reached, todo = {theorem.goal}, [theorem.goal]
    while todo:
        for needed, _ in by_conclusion[todo.pop()]:
            todo += needed - reached
            reached |= needed
    return [clause for variable in reached for clause in by_conclusion[variable]]
