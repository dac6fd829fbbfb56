"""Monte Carlo tree search: PUCT with values, and with a reward for new states.

    puct    a = argmax Q(s, a) + c P(s, a) √N(s) / (1 + N(s, a))       Q the mean of the backed-up values
    rmax    a = argmax W_γ / N_γ + √(2 ln Σ_b N_γ(s, b) / N_γ(s, a))   W_γ of walks to new states

P is π over the moves drawn in a state, normalised. Sources: AlphaZero, arXiv:1712.01815; RMaxTS of
DeepSeek-Prover-V1.5, arXiv:2408.08152, section 3.3, whose counts are discounted with γ = 0.99.
"""

from collections.abc import Callable, Generator
from math import exp, inf, log, sqrt
from typing import Any

from posttrain.search.protocol import Apply, Budget, Question, State
from posttrain.search.tree import Edge, Node, Search, Tree
from posttrain.search.values import set_values

Score = Callable[[Node, Edge], float]


def puct(
    root: State,
    budget: Budget,
    *,
    width: int = 8,
    c: float = 1.25,
    values: bool = True,
    compares: bool = False,
) -> Search:
    """Walk from the root to a move that was not followed yet; its value is that of the state it leads to.

    A move that was not followed counts with the value of its own state. values: without them a state that has
    not ended has value 0, and P alone leads the search. compares: rank ends by their values instead of
    stopping at the first.
    """

    def score(node: Node, edge: Edge) -> float:
        mean = edge.total / edge.weight if edge.weight else node.value
        return mean + bonus(node, edge, c)

    return _search(Tree(root, budget, compares=compares), score, width=width, values=values)


def bonus(node: Node, edge: Edge, c: float) -> float:
    """c P(s, a) √N(s) / (1 + N(s, a)), N(s) at least 1: the bonus of a likely and rarely visited move."""
    most = max(e.move.counted for e in node.edges.values())  # exp of a long move underflows
    mass = sum(exp(e.move.counted - most) for e in node.edges.values())
    return c * exp(edge.move.counted - most) / mass * sqrt(max(node.visits, 1)) / (1 + edge.weight)


def rmax(root: State, budget: Budget, *, width: int = 8, discount: float = 0.99) -> Search:
    """Like `puct` for new states: a walk has value 1 if it reaches a state not in the tree yet, else 0."""

    def score(node: Node, edge: Edge) -> float:
        if not edge.weight:
            return inf
        weight = sum(e.weight for e in node.edges.values())
        return edge.total / edge.weight + sqrt(2 * log(max(weight, 1.0)) / edge.weight)

    return _search(Tree(root, budget), score, width=width, discount=discount, novelty=True)


def _search(
    tree: Tree,
    score: Score,
    *,
    width: int,
    values: bool = False,
    discount: float = 1.0,
    novelty: bool = False,
) -> Search:
    closed: set[int] = set()
    if values:
        yield from set_values(tree, tree.nodes)
    while not tree.over and 0 not in closed:
        path = yield from _select_path(tree, score, closed, width)
        if not path or tree.over:
            continue
        last = path[-1]
        [[to]] = yield (Apply(((last.source.state, last.move.text),)),)
        new = tree.follow(last, to)
        if new and values:
            yield from set_values(tree, [new])
        if new and (new.state.done or new.depth >= tree.budget.depth):
            closed.add(new.number)
        value = float(new is not None) if novelty else last.target.value if last.target else 0.0
        tree.back_up(path, value, discount)
    return tree


def _select_path(
    tree: Tree, score: Score, closed: set[int], width: int
) -> Generator[tuple[Question, ...], Any, list[Edge]]:
    """Return the moves from the root to one that was not followed; none if a state turned out to be closed.

    A state with N visits has about √(width N) draws, `width` at a time.
    """
    node, path = tree.nodes[0], list[Edge]()
    while True:
        open_ = [edge for edge in node.edges.values() if not _leads_nowhere(edge, closed)]
        if not node.exhausted and tree.room > 0 and (not open_ or node.draws**2 < width * node.visits):
            count = min(width, tree.room)
            [moves] = yield (node.propose(count),)
            tree.add(node, moves, count)
            continue
        if not open_:
            closed.add(node.number)
            return []
        edge = max(open_, key=lambda edge: score(node, edge))
        path.append(edge)
        if edge.target is None:
            return path
        node = edge.target


def _leads_nowhere(edge: Edge, closed: set[int]) -> bool:
    return edge.refused is not None or (edge.target is not None and edge.target.number in closed)
