"""Searches that follow what the policy finds likely: best-first, a beam, and plain sampling.

    score of what a state at depth d says next:  (Σ log π + log u) / (d + 1)^α

u is how likely that can be: 1 at first; of what n draws have not said about 1 / (n + 1), and no more than is
left. α = 0 prefers short ways, as every move makes Σ log π smaller; α = 1 compares means. Source: BFS-Prover,
arXiv:2502.03438, section 3.1, where α is 0.5; there a state says its moves once.

Guided by values the score is log V + log u. A beam is then the one of Snell et al. 2024, arXiv:2408.03314,
section 5.1, whose process model says which steps are kept, and best-of-n takes the best end.
"""

from heapq import heappop, heappush
from math import log

from posttrain.search.protocol import Budget, Propose, State
from posttrain.search.tree import Edge, Node, Search, Tree
from posttrain.search.values import followed, valued

_LEAST = 1e-9
"""Below which values are alike."""


def unsaid(node: Node) -> float:
    """How likely a state's next move can be."""
    return min(node.unsaid, 1 / (node.asked + 1))


def score(node: Node, alpha: float) -> float:
    """Of what a state says next."""
    return float((node.logp + log(unsaid(node))) / (node.depth + 1) ** alpha)


def best_first(
    root: State,
    budget: Budget,
    *,
    width: int = 8,
    alpha: float = 0.5,
    compares: bool = False,
) -> Search:
    """Asks the best state for `width` moves, follows all of them, and goes on with what is then best.

    compares: ends are compared by their values, and what is best say values too, not how likely the way is.

    A state that has spoken waits for its next turn under what it has not said. So nothing is cut off for
    good, where a search that takes so many moves of each state and no others cannot find what is not among
    them.
    """
    tree = Tree(root, budget, compares=compares)
    queue: list[tuple[float, int, Node]] = []
    count = 0

    def worth(node: Node) -> float:
        return log(max(node.value, _LEAST)) + log(unsaid(node)) if compares else score(node, alpha)

    def push(node: Node) -> None:
        nonlocal count
        if node.depth < budget.depth and not (node.exhausted or node.state.done):
            heappush(queue, (-worth(node), count, node))
            count += 1

    push(tree.nodes[0])
    while queue and tree.room > 0:
        node = heappop(queue)[2]
        asked = min(width, tree.room)
        [moves] = yield (node.propose(asked),)
        new = yield from followed(tree, tree.add(node, moves, asked))
        if compares:
            yield from valued(tree, new)
        for found in new:
            push(found)
        push(node)
    return tree


def beam(
    root: State,
    budget: Budget,
    *,
    width: int = 8,
    keep: int = 8,
    alpha: float = 0.5,
    compares: bool = False,
) -> Search:
    """All moves of the best `keep` states of each depth, `width` drawn in each; compares: best by values."""
    tree = Tree(root, budget, compares=compares)
    nodes = tree.nodes[:1]
    for _ in range(budget.depth):
        nodes = nodes[: max(tree.room, 0)]
        share = min(width, tree.room // max(len(nodes), 1))
        if tree.solved or not nodes or not share:
            break
        said = yield tuple(node.propose(share) for node in nodes)
        edges = [
            edge for node, moves in zip(nodes, said, strict=True) for edge in tree.add(node, moves, share)
        ]
        if not edges:
            break
        new = yield from followed(tree, edges)
        if compares:
            yield from valued(tree, new)
        new.sort(key=lambda node: -node.value if compares else -node.logp / node.depth**alpha)
        nodes = [node for node in new if not node.state.done][:keep]
    return tree


def best_of_n(root: State, budget: Budget, *, width: int = 8, compares: bool = False) -> Search:
    """Ways sampled from the root to their end, `width` side by side: the measure of every search.

    compares: all ends have values; nothing on the way is asked for one.
    """
    tree = Tree(root, budget, compares=compares)
    ways: list[Node] = []
    while not tree.solved:
        ways += [tree.nodes[0]] * (width - len(ways))
        ways = ways[: tree.room]
        if not ways:
            break
        first: dict[int, int] = {}
        questions = []
        for node in ways:
            number = first.setdefault(node.number, node.asked)
            questions.append(Propose(node.state, number, 1))
            first[node.number] += 1
        said = yield tuple(questions)
        on: list[Edge] = []
        for node, moves in zip(ways, said, strict=True):
            tree.add(node, moves, 1)
            on += [node.edges[move.text] for move in moves]
        if not on:
            if tree.nodes[0] in ways:
                break  # nothing is left to say
            ways = []
            continue
        fresh = list({id(edge): edge for edge in on if not edge.applied}.values())
        new = yield from followed(tree, fresh)
        if compares:
            yield from valued(tree, [node for node in new if node.state.done])
        came = [edge.target for edge in on if edge.target]
        ways = [node for node in came if node.depth < budget.depth and not node.state.done]
    return tree
