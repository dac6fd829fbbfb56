"""Search for few moves: sequential halving over what a state says, and again in the state behind the best.

    a draw without replacement is Gumbel-top-k:  the k greatest of  g(a) + log π(a),  g ~ Gumbel(0), in order
    halving        keeps the better half of the moves by  g(a) + log π(a) + σ(q(a))
    below it       a = argmax π'(a) - N(a) / (1 + Σ N),   π' = softmax(log π + σ(q))
    σ(q) = (c_visit + max N) c_scale q

q is the mean of what came back; of a move that no walk has come through the mixed value
(v + Σ N Σ π q / Σ π) / (1 + Σ N), sums over the others. Source: Danihelka et al. 2022, Policy improvement by
planning with Gumbel (ICLR), sections 3 to 5 and appendix D.

What is different here, where moves are drawn and a way to the end is looked for, not one move:

- All moves of a state cannot be listed. Its first k distinct draws are those that the greatest g + log π
  would have named, and given their order these sums are drawn top down (Kool et al. 2019, arXiv:1903.06059),
  by numbers that hang on task, state and place alone. Below, what was not said stands among the moves as one
  of the probability that best-first gives it; taken, it is drawn. So a walk costs one move.
- After a halving, which may spend half of what is left, the best move is taken, and the halving begins again
  in the state behind it. Where nothing is left, it begins again at the root, in the same tree, without what
  leads nowhere: without a budget nothing is passed over.
"""

import hashlib
from collections.abc import Generator, Iterator
from math import ceil, exp, log, log2
from typing import Any

from posttrain.search.protocol import Apply, Budget, Question, State
from posttrain.search.strategies.best_first import unsaid
from posttrain.search.tree import Edge, Node, Search, Tree
from posttrain.search.values import valued


def gumbel(
    root: State,
    budget: Budget,
    *,
    width: int = 8,
    values: bool = True,
    compares: bool = False,
    c_visit: float = 50.0,
    c_scale: float = 1.0,
) -> Search:
    """Halves `width` moves of the root down to one, then of the state behind that, and so on.

    values: without them what has not ended is worth 0, and moves are taken as the policy would. compares: an
    end is worth its value, and the halving begins again at the root behind it.
    """
    search = _Halving(Tree(root, budget, compares=compares), width, values, c_visit, c_scale)
    tree, closed = search.tree, search.closed
    if values:
        yield from valued(tree, tree.nodes)
    node = tree.nodes[0]
    while tree.room > 0 and 0 not in closed:
        best = yield from search.best(node)
        to = best.target if best else None
        node = to if to and not to.state.done else tree.nodes[0]
    return tree


def phases(moves: int, walks: int) -> Iterator[tuple[int, int]]:
    """Of each phase how many moves are left, and how many walks each of them is given.

    >>> list(phases(8, 24)), list(phases(4, 21)), list(phases(1, 5))
    ([(8, 1), (4, 2), (2, 4)], [(4, 2), (2, 5), (2, 1)], [(1, 5)])
    """
    steps = max(ceil(log2(moves)), 1)
    first = walks
    while walks >= moves:
        each = min(max(first // (steps * moves), 1), walks // moves)
        yield moves, each
        walks -= moves * each
        moves = max(moves // 2, min(moves, 2))


class _Halving:
    """A tree, and how it is walked."""

    def __init__(self, tree: Tree, width: int, values: bool, c_visit: float, c_scale: float) -> None:
        self.tree, self.width, self.values = tree, width, values
        self.c_visit, self.c_scale = c_visit, c_scale
        self.closed: set[int] = set()
        """States from which nothing is left to be tried."""

    def best(self, node: Node) -> Generator[tuple[Question, ...], Any, Edge | None]:
        """The best move of a state after a halving; None if none of those that were looked at leads on."""
        tree = self.tree
        while len(self._open(node)) < self.width and tree.room > 0 and not node.exhausted:
            yield from self._draw(node)
        left = self._open(node)[: self.width]
        if not left:
            if node.exhausted:
                self.closed.add(node.number)
            return None
        sums = perturbed(node)

        def score(edge: Edge) -> float:
            return sums[edge.move.text] + self._sigma(node, edge)

        for count, walks in phases(len(left), max(len(left), tree.room // 2)):
            left = sorted(left, key=score, reverse=True)[:count]
            for edge in left * walks:
                if not tree.over and self._leads(edge):
                    yield from self._walk(edge)
            left = [edge for edge in left if self._leads(edge)]
            if not left or tree.over:
                return None
        return max(left, key=score)

    def _walk(self, first: Edge) -> Generator[tuple[Question, ...], Any, None]:
        """Goes from a move on to one that nobody has followed, and counts what came of it."""
        tree, way = self.tree, [first]
        while node := way[-1].target:
            if not (open_ := self._open(node)) and node.exhausted:
                self.closed.add(node.number)
                way = [first]
                if not self._leads(first):
                    return
            elif (edge := self._next(node, open_)) or (edge := (yield from self._draw(node))):
                way.append(edge)
            elif tree.room <= 0:
                return
        last = way[-1]
        [[to]] = yield (Apply(((last.source.state, last.move.text),)),)
        new = tree.follow(last, to)
        if new and self.values:
            yield from valued(tree, [new])
        if new and (new.state.done or new.depth >= tree.budget.depth):
            self.closed.add(new.number)
        tree.back_up(way, last.target.value if last.target else 0.0)

    def _draw(self, node: Node) -> Generator[tuple[Question, ...], Any, Edge | None]:
        """One more move of a state, if it says one that is new and there is room for it."""
        if node.exhausted or self.tree.room <= 0:
            return None
        [moves] = yield (node.propose(1),)
        return next(iter(self.tree.add(node, moves, 1)), None)

    def _next(self, node: Node, open_: list[Edge]) -> Edge | None:
        """The move that is taken below a halving; None for what was not said."""
        logits = [(each.move.logp + self._sigma(node, each), each.visits) for each in open_]
        if not node.exhausted and self.tree.room > 0:
            logits.append((log(unsaid(node)) + self._sigma(node, None), 0))
        most, visits = max(logit for logit, _ in logits) if logits else 0.0, sum(n for _, n in logits)
        mass = sum(exp(logit - most) for logit, _ in logits)
        scores = [exp(logit - most) / mass - n / (1 + visits) for logit, n in logits]
        return [*open_, None][scores.index(max(scores))] if scores else None

    def _sigma(self, node: Node, edge: Edge | None) -> float:
        """σ of a move's q, or of what was not said."""
        if edge and edge.visits:
            q = edge.total / edge.weight
        else:
            q = mixed(node)
        return (
            (self.c_visit + max((each.visits for each in node.edges.values()), default=0)) * self.c_scale * q
        )

    def _leads(self, edge: Edge) -> bool:
        return edge.refused is None and not (edge.target and edge.target.number in self.closed)

    def _open(self, node: Node) -> list[Edge]:
        return [edge for edge in node.edges.values() if self._leads(edge)]


def mixed(node: Node) -> float:
    """The worth of a state by its own value, and by the moves that walks have come through."""
    tried = [each for each in node.edges.values() if each.visits]
    if not tried:
        return node.value
    visits = sum(each.visits for each in tried)
    most = max(each.move.logp for each in tried)
    mass = [exp(each.move.logp - most) for each in tried]
    mean = sum(p * each.total / each.weight for p, each in zip(mass, tried, strict=True)) / sum(mass)
    return (node.value + visits * mean) / (1 + visits)


def perturbed(node: Node) -> dict[str, float]:
    """g + log π of what a state has said, in its order, each the greatest of all that were left then.

    The greatest of what has the probability Z is Gumbel(log Z), and less than the one before.
    """
    sums: dict[str, float] = {}
    left, before = 1.0, float("inf")
    for n, edge in enumerate(node.edges.values()):
        name = f"{node.state.task.id}\n{node.state.key}\n{n}".encode()
        number = int.from_bytes(hashlib.blake2b(name, digest_size=6).digest())
        place, uniform = log(max(left, exp(edge.move.logp))), (number + 0.5) / 2**48
        before = sums[edge.move.text] = place - log(exp(place - before) - log(uniform))
        left -= exp(edge.move.logp)
    return sums
