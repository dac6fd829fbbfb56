"""Searches that follow what the policy finds likely: best-first, a beam, and plain sampling.

    score of the next move of a state at depth d:  (Σ log π + log u) / (d + 1)^α

u bounds the probability of that move: 1 at first; after n draws about 1 / (n + 1), and at most the
probability that no draw has used. α = 0 prefers short paths, since every move makes Σ log π smaller; α = 1
compares means. Source: BFS-Prover, arXiv:2502.03438, section 3.1, where α is 0.5, and moves of a state are
drawn once.

With values the score is log V + log u. A beam is then the one of Snell et al. 2024, arXiv:2408.03314, section
5.1, where a process model selects the steps, and best-of-n takes the best end.
"""

from heapq import heappop, heappush
from math import log

from posttrain.search.protocol import Budget, Propose, State
from posttrain.search.tree import Edge, Node, Search, Tree
from posttrain.search.values import follow_moves, set_values

_LEAST = 1e-9
"""Values below this count as equal."""


def next_probability(node: Node) -> float:
    """Bound on the probability of a state's next move."""
    return min(node.remaining, 1 / (node.draws + 1))


def score(node: Node, alpha: float) -> float:
    """Score of the next move of a state."""
    return float((node.logp + log(next_probability(node))) / (node.depth + 1) ** alpha)


def best_first(
    root: State,
    budget: Budget,
    *,
    width: int = 8,
    alpha: float = 0.5,
    compares: bool = False,
) -> Search:
    """Draw `width` moves in the best state, follow them all, and continue with the state that is then best.

    compares: rank states, and ends too, by values instead of log-probabilities.

    A state waits for its next turn with the probability that its moves have not used. So nothing is cut off
    for good; a search that draws a fixed number of moves in each state cannot find what is not among them.
    """
    tree = Tree(root, budget, compares=compares)
    queue: list[tuple[float, int, Node]] = []
    count = 0

    def priority(node: Node) -> float:
        return log(max(node.value, _LEAST)) + log(next_probability(node)) if compares else score(node, alpha)

    def push(node: Node) -> None:
        nonlocal count
        if node.depth < budget.depth and not (node.exhausted or node.state.done):
            heappush(queue, (-priority(node), count, node))
            count += 1

    push(tree.nodes[0])
    while queue and tree.room > 0:
        node = heappop(queue)[2]
        draws = min(width, tree.room)
        [moves] = yield (node.propose(draws),)
        new = yield from follow_moves(tree, tree.add(node, moves, draws))
        if compares:
            yield from set_values(tree, new)
        for child in new:
            push(child)
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
    """Follow all moves of the best `keep` states of each depth, `width` each; compares: best by values."""
    tree = Tree(root, budget, compares=compares)
    nodes = tree.nodes[:1]
    for _ in range(budget.depth):
        nodes = nodes[: max(tree.room, 0)]
        share = min(width, tree.room // max(len(nodes), 1))
        if tree.solved or not nodes or not share:
            break
        answers = yield tuple(node.propose(share) for node in nodes)
        edges = [
            edge for node, moves in zip(nodes, answers, strict=True) for edge in tree.add(node, moves, share)
        ]
        if not edges:
            break
        new = yield from follow_moves(tree, edges)
        if compares:
            yield from set_values(tree, new)
        new.sort(key=lambda node: -node.value if compares else -node.logp / node.depth**alpha)
        nodes = [node for node in new if not node.state.done][:keep]
    return tree


def best_of_n(root: State, budget: Budget, *, width: int = 8, compares: bool = False) -> Search:
    """Sample `width` paths at a time from the root to their ends: the baseline of every search.

    compares: score all ends, and no state before them.
    """
    tree = Tree(root, budget, compares=compares)
    leaves: list[Node] = []
    while not tree.solved:
        leaves += [tree.nodes[0]] * (width - len(leaves))
        leaves = leaves[: tree.room]
        if not leaves:
            break
        first: dict[int, int] = {}
        questions = []
        for node in leaves:
            number = first.setdefault(node.number, node.draws)
            questions.append(Propose(node.state, number, 1))
            first[node.number] += 1
        answers = yield tuple(questions)
        edges: list[Edge] = []
        for node, moves in zip(leaves, answers, strict=True):
            tree.add(node, moves, 1)
            edges += [node.edges[move.text] for move in moves]
        if not edges:
            if tree.nodes[0] in leaves:
                break  # all moves were drawn
            leaves = []
            continue
        fresh = list({id(edge): edge for edge in edges if not edge.applied}.values())
        new = yield from follow_moves(tree, fresh)
        if compares:
            yield from set_values(tree, [node for node in new if node.state.done])
        targets = [edge.target for edge in edges if edge.target]
        leaves = [node for node in targets if node.depth < budget.depth and not node.state.done]
    return tree
