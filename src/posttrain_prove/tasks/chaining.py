"""Horn theorems: definite clauses over propositional variables, their least proofs, their form up to names.

A hypothesis `A -> B -> C` is a clause with premises A, B and conclusion C; a clause without premises is a
fact. A proof from the goal backwards says one tactic for each clause it uses, `exact` of a fact or `apply` of
an implication, which leaves its premises as goals, each to be proved apart. So the least number of tactics T
obeys

    T(v) = min over clauses c with conclusion v of 1 + Σ over premises p of c of T(p),

and is infinite where v does not follow. Facts that do follow are found forwards, as in a graph whose edges
have several tails.
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


def least(clauses: Sequence[Clause]) -> dict[int, tuple[int, int]]:
    """(T(v), the clause that a least proof of v ends with), for each variable v that follows.

    Variables are settled in the order of T, as in Dijkstra's algorithm; a clause costs what its premises do
    once all of them are settled. Exact, as a clause costs more than any premise. Of clauses that cost the
    same the earlier one is taken.

    Source: Knuth, A generalization of Dijkstra's algorithm, Information Processing Letters 6 (1977) 1-5.

    >>> least([((), 0), ((0,), 1), ((0, 1), 2), ((2,), 1), ((3,), 2)])
    {0: (1, 0), 1: (2, 1), 2: (4, 2)}
    """
    users: dict[int, list[int]] = defaultdict(list)
    waits = []
    queue: list[tuple[int, int]] = []
    for number, (premises, _) in enumerate(clauses):
        needed = set(premises)
        waits.append(len(needed))
        for premise in needed:
            users[premise].append(number)
        if not needed:
            heappush(queue, (1, number))
    found: dict[int, tuple[int, int]] = {}
    while queue:
        cost, number = heappop(queue)
        variable = clauses[number][1]
        if variable in found:
            continue
        found[variable] = (cost, number)
        for user in users[variable]:
            waits[user] -= 1
            if not waits[user]:
                heappush(queue, (1 + sum(found[p][0] for p in clauses[user][0]), user))
    return found


def script(theorem: Theorem) -> list[str]:
    """A least proof, a tactic a line: `exact` for facts, `apply` for implications, first premise first.

    >>> script(Theorem((((0,), 1), ((), 0)), 1))
    ['apply h1.', 'exact h2.']
    """
    last, said, goals = least(theorem.clauses), [], [theorem.goal]
    while goals:
        number = last[goals.pop()][1]
        premises = theorem.clauses[number][0]
        said.append(f"{'apply' if premises else 'exact'} h{number + 1}.")
        goals += reversed(premises)
    return said


def height(theorem: Theorem) -> int:
    """Implications on the longest path from the goal to a fact in the least proof.

    >>> height(Theorem((((), 0), ((0,), 1), ((0, 1), 2)), 2))
    2
    """
    last = least(theorem.clauses)

    @functools.cache  # a variable may be needed on many paths
    def below(variable: int) -> int:
        premises = theorem.clauses[last[variable][1]][0]
        return 1 + max(map(below, premises)) if premises else 0

    return below(theorem.goal)


def form(theorem: Theorem) -> str:
    """A digest that theorems share if they are the same but for trifles.

    Those are: the names of variables, the order of hypotheses and of premises, a hypothesis or a premise
    said twice, one that concludes its own premise, and one that no proof from the goal backwards ever meets.
    Colours of variables are refined by the clauses they stand in until no colour splits (Weisfeiler and
    Leman 1968), so two theorems that differ in more may share a digest, but never the other way round.

    >>> form(Theorem((((0,), 1), ((), 0)), 1)) == form(Theorem((((), 4), ((7,), 8), ((4,), 2)), 2))
    True
    >>> form(Theorem((((), 0), ((0,), 1)), 1)) == form(Theorem((((), 0), ((0,), 1), ((1,), 2)), 2))
    False
    """
    clauses = _relevant(theorem)
    variables = {v for premises, conclusion in clauses for v in (*premises, conclusion)} | {theorem.goal}
    colour = {v: int(v == theorem.goal) for v in variables}
    colours = 0
    while True:
        seen: dict[int, list[tuple[int, int, tuple[int, ...]]]] = {v: [] for v in variables}
        for premises, conclusion in clauses:
            before = tuple(sorted([colour[p] for p in premises]))
            seen[conclusion].append((0, colour[conclusion], before))
            for premise in premises:
                seen[premise].append((1, colour[conclusion], before))
        signs = {v: (colour[v], tuple(sorted(seen[v]))) for v in variables}
        rank = {sign: number for number, sign in enumerate(sorted(set(signs.values())))}
        colour = {v: rank[signs[v]] for v in variables}
        if len(rank) == colours:
            return hashlib.blake2b(repr(sorted(signs.values())).encode(), digest_size=16).hexdigest()
        colours = len(rank)


def _relevant(theorem: Theorem) -> list[tuple[frozenset[int], int]]:
    """The clauses that a proof backwards may meet, each once, without those that conclude a premise."""
    by_conclusion: dict[int, set[tuple[frozenset[int], int]]] = defaultdict(set)
    for premises, conclusion in theorem.clauses:
        if conclusion not in premises:
            by_conclusion[conclusion].add((frozenset(premises), conclusion))
    met, todo = {theorem.goal}, [theorem.goal]
    while todo:
        for needed, _ in by_conclusion[todo.pop()]:
            todo += needed - met
            met |= needed
    return [clause for variable in met for clause in by_conclusion[variable]]
