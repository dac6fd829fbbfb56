"""Searches that follow what the policy finds likely: best-first, a beam, and plain sampling.

    score of what a state at depth d says next:  (Σ log π + log u) / (d + 1)^α

u is how likely that can be: 1 at first; of what n draws have not said about 1 / (n + 1), and no more than is
left. α = 0 prefers short ways, as every move makes Σ log π smaller; α = 1 compares means. Source: BFS-Prover,
arXiv:2502.03438, section 3.1, where α is 0.5; there a state says its moves once.
"""

from heapq import heappop, heappush
from math import log

from posttrain.search.protocol import Apply, Budget, Propose, State
from posttrain.search.tree import Edge, Node, Search, Tree


def unsaid(node: Node) -> float:
    """How likely a state's next move can be."""
    return min(node.unsaid, 1 / (node.asked + 1))


def score(node: Node, alpha: float) -> float:
    """Of what a state says next."""
    return float((node.logp + log(unsaid(node))) / (node.depth + 1) ** alpha)


def best_first(root: State, budget: Budget, *, width: int = 8, alpha: float = 0.5) -> Search:
    """Asks the best state for `width` moves, follows all of them, and goes on with what is then best.

    A state that has spoken waits for its next turn under what it has not said. So nothing is cut off for
    good, where a search that takes so many moves of each state and no others cannot find what is not among
    them.
    """
    tree = Tree(root, budget)
    queue: list[tuple[float, int, Node]] = []
    count = 0

    def push(node: Node) -> None:
        nonlocal count
        if node.depth < budget.depth and not node.exhausted:
            heappush(queue, (-score(node, alpha), count, node))
            count += 1

    push(tree.nodes[0])
    while queue and tree.room > 0:
        node = heappop(queue)[2]
        asked = min(width, tree.room)
        [moves] = yield (node.propose(asked),)
        if edges := tree.said(node, moves, asked):
            [led] = yield (Apply(tuple((node.state, edge.move.text) for edge in edges)),)
            for edge, to in zip(edges, led, strict=True):
                if new := tree.led(edge, to):
                    push(new)
        push(node)
    return tree


def beam(root: State, budget: Budget, *, width: int = 8, keep: int = 8, alpha: float = 0.5) -> Search:
    """All moves of the best `keep` states of each depth, `width` drawn in each."""
    tree = Tree(root, budget)
    nodes = tree.nodes[:1]
    for _ in range(budget.depth):
        nodes = nodes[: max(tree.room, 0)]
        share = min(width, tree.room // max(len(nodes), 1))
        if tree.solved or not nodes or not share:
            break
        said = yield tuple(node.propose(share) for node in nodes)
        edges = [
            edge for node, moves in zip(nodes, said, strict=True) for edge in tree.said(node, moves, share)
        ]
        if not edges:
            break
        [led] = yield (Apply(tuple((edge.source.state, edge.move.text) for edge in edges)),)
        new = [node for edge, to in zip(edges, led, strict=True) if (node := tree.led(edge, to))]
        new.sort(key=lambda node: -node.logp / node.depth**alpha)
        nodes = new[:keep]
    return tree


def best_of_n(root: State, budget: Budget, *, width: int = 8) -> Search:
    """Ways sampled from the root to their end, `width` side by side: the measure of every search."""
    tree = Tree(root, budget)
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
            tree.said(node, moves, 1)
            on += [node.edges[move.text] for move in moves]
        if not on:
            if tree.nodes[0] in ways:
                break  # nothing is left to say
            ways = []
            continue
        fresh = list({id(edge): edge for edge in on if not edge.applied}.values())
        if fresh:
            [led] = yield (Apply(tuple((edge.source.state, edge.move.text) for edge in fresh)),)
            for edge, to in zip(fresh, led, strict=True):
                tree.led(edge, to)
        ways = [edge.target for edge in on if edge.target and edge.target.depth < budget.depth]
    return tree
