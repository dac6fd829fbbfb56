"""Searches that follow what the policy finds likely: best-first over moves, a beam, and plain sampling.

    score of a state after L moves:  Σ log π / L^α

α = 0 prefers short ways, as every move makes Σ log π smaller; α = 1 compares means. Source: BFS-Prover,
arXiv:2502.03438, section 3.1, where α is 0.5.
"""

from heapq import heappop, heappush
from math import log

from posttrain.search.protocol import Apply, Budget, Propose, Search, State
from posttrain.search.tree import Edge, Node, Tree


def best_first(root: State, budget: Budget, *, width: int = 8, alpha: float = 0.5) -> Search:
    """Follows the likeliest move of all that have been said and not followed, one at a time.

    The queue holds moves, and of each state besides all that it has not said yet, under the probability
    which is left for that: when it is its turn the state says `width` more. So nothing is cut off for good,
    where a search that takes so many moves of each state and no others cannot find what is not among them.
    """
    tree = Tree(root, budget)
    queue: list[tuple[float, int, Node, Edge | None]] = []
    count = 0

    def push(node: Node, edge: Edge | None) -> None:
        nonlocal count
        if node.depth < budget.depth and not node.state.done:
            logp = node.logp + (edge.move.logp if edge else log(node.unsaid))
            heappush(queue, (-logp / (node.depth + 1) ** alpha, count, node, edge))
            count += 1

    push(tree.nodes[0], None)
    while queue and not tree.solved:
        _, _, node, edge = heappop(queue)
        if edge:
            [[to]] = yield (Apply(((node.state, edge.move.text),)),)
            if new := tree.led(edge, to):
                push(new, None)
        elif tree.room > 0:
            asked = min(width, tree.room)
            [moves] = yield (Propose(node.state, node.asked, asked),)
            for each in tree.said(node, moves, asked):
                push(node, each)
            if not node.exhausted:
                push(node, None)
    return tree


def beam(root: State, budget: Budget, *, width: int = 8, keep: int = 8, alpha: float = 0.5) -> Search:
    """All moves of the best `keep` states of each depth, `width` drawn in each."""
    tree, level = Tree(root, budget), [0]
    for _ in range(budget.depth):
        nodes = [tree.nodes[n] for n in level]
        share = min(width, tree.room // max(len(nodes), 1))
        if tree.solved or not nodes or not share:
            break
        said = yield tuple(Propose(node.state, node.asked, share) for node in nodes)
        edges = [
            edge for node, moves in zip(nodes, said, strict=True) for edge in tree.said(node, moves, share)
        ]
        if not edges:
            break
        [led] = yield (Apply(tuple((edge.source.state, edge.move.text) for edge in edges)),)
        new = [node for edge, to in zip(edges, led, strict=True) if (node := tree.led(edge, to))]
        new.sort(key=lambda node: -node.logp / node.depth**alpha if alpha else -node.logp)
        level = [node.number for node in new[:keep]]
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
            break  # nothing is left to say
        fresh = list({id(edge): edge for edge in on if not edge.applied}.values())
        if fresh:
            [led] = yield (Apply(tuple((edge.source.state, edge.move.text) for edge in fresh)),)
            for edge, to in zip(fresh, led, strict=True):
                tree.led(edge, to)
        ways = [edge.target for edge in on if edge.target and edge.target.depth < budget.depth]
    return tree
