"""Monte Carlo tree search: PUCT with values, and with a reward for states that are new.

    puct    a = argmax Q(s, a) + c P(s, a) √N(s) / (1 + N(s, a))       Q the mean of what came back
    rmax    a = argmax W_γ / N_γ + √(2 ln Σ_b N_γ(s, b) / N_γ(s, a))   W_γ of walks to new states

P is π over the moves that a state has said, normalised. Sources: AlphaZero, arXiv:1712.01815; RMaxTS of
DeepSeek-Prover-V1.5, arXiv:2408.08152, section 3.3, whose counts fade with γ = 0.99.
"""

from collections.abc import Callable, Generator
from math import exp, inf, log, sqrt
from typing import Any

from posttrain.search.protocol import Apply, Budget, Question, State
from posttrain.search.tree import Edge, Node, Search, Tree
from posttrain.search.values import valued

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
    """Walks from the root to a move that nobody has followed, which is worth the value of where it leads.

    A move that was not followed counts as worth what its state is. values: without them what has not ended
    is worth 0, and P alone says where to go. compares: an end is worth its value, and not what is looked for.
    """

    def score(node: Node, edge: Edge) -> float:
        mean = edge.total / edge.weight if edge.weight else node.value
        return mean + bonus(node, edge, c)

    return _search(Tree(root, budget, compares=compares), score, width=width, values=values)


def bonus(node: Node, edge: Edge, c: float) -> float:
    """c P(s, a) √N(s) / (1 + N(s, a)), N(s) at least 1: a move's worth for being likely and seldom taken."""
    most = max(each.move.counted for each in node.edges.values())  # moves may be too improbable for exp
    mass = sum(exp(each.move.counted - most) for each in node.edges.values())
    return c * exp(edge.move.counted - most) / mass * sqrt(max(node.visits, 1)) / (1 + edge.weight)


def rmax(root: State, budget: Budget, *, width: int = 8, discount: float = 0.99) -> Search:
    """The same for what is new: a walk is worth 1 if it comes to a state where none has been, otherwise 0."""

    def score(node: Node, edge: Edge) -> float:
        if not edge.weight:
            return inf
        weight = sum(each.weight for each in node.edges.values())
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
        yield from valued(tree, tree.nodes)
    while not tree.over and 0 not in closed:
        way = yield from _select_path(tree, score, closed, width)
        if not way or tree.over:
            continue
        last = way[-1]
        [[to]] = yield (Apply(((last.source.state, last.move.text),)),)
        new = tree.follow(last, to)
        if new and values:
            yield from valued(tree, [new])
        if new and (new.state.done or new.depth >= tree.budget.depth):
            closed.add(new.number)
        worth = float(new is not None) if novelty else last.target.value if last.target else 0.0
        tree.back_up(way, worth, discount)
    return tree


def _select_path(
    tree: Tree, score: Score, closed: set[int], width: int
) -> Generator[tuple[Question, ...], Any, list[Edge]]:
    """The moves from the root to one that has not been followed; empty if a state was found to be closed.

    A state that was visited N times has said about √(width N) moves, `width` at a time.
    """
    node, way = tree.nodes[0], list[Edge]()
    while True:
        open_ = [each for each in node.edges.values() if not _leads_nowhere(each, closed)]
        if not node.exhausted and tree.room > 0 and (not open_ or node.asked**2 < width * node.visits):
            asked = min(width, tree.room)
            [moves] = yield (node.propose(asked),)
            tree.add(node, moves, asked)
            continue
        if not open_:
            closed.add(node.number)
            return []
        edge = max(open_, key=lambda each: score(node, each))
        way.append(edge)
        if edge.target is None:
            return way
        node = edge.target


def _leads_nowhere(edge: Edge, closed: set[int]) -> bool:
    return edge.refused is not None or (edge.target is not None and edge.target.number in closed)
