"""Search over goals that can be proved separately: AND over the parts of a state, OR over its moves.

    a state is proved   if it is done, if all its parts are, or if a move leads to a proved state
    value of parts      the product of theirs, as if they ended well independently
    with values         a = argmax Q(s, a) + c P(s, a) √N(s) / (1 + N(s, a)), in all parts at once

A flat search has to find the moves for one goal again for each way to prove another: their numbers multiply.
Here they add, and a goal that occurs in several places is proved once. The set of proved states is the least
fixed point of the first line, so nothing is used in its own proof, though moves may lead in cycles. Source:
HyperTree Proof Search, arXiv:2205.11491, section 4; there all moves of a state are drawn at once.
"""

from collections.abc import Generator
from dataclasses import replace
from math import prod
from typing import Any

from posttrain.search.protocol import HOLE, Budget, Question, State
from posttrain.search.strategies.best_first import score
from posttrain.search.strategies.puct import bonus
from posttrain.search.tree import Edge, Node, Search, Tree
from posttrain.search.values import follow_moves, set_values

Proofs = dict[int, Edge | None]
"""By a state's number the move that proves it, None if it is done or has parts; each after what it needs."""
Walk = list[tuple[Node, Edge | None]]
"""States, each after those to which its move leads; None for a state that draws more moves, or has parts."""


def hypertree(
    root: State,
    budget: Budget,
    *,
    width: int = 8,
    alpha: float = 0.5,
    c: float = 1.25,
    values: bool = False,
    sketches: int = 0,
    nested: int = 2,
) -> Search:
    """Draw `width` moves in states that a proof still needs, follow them all, and join the proofs of parts.

    Without values this is the one state with the best score of `best_first`, where moves of other parts do
    not count. With values it is every state in which a hypertree ends, selected from the root by PUCT down
    all parts; if none of these can draw moves, the one with the best score.

    The root draws `sketches` sketches, one at a time, before its first move. So does each part of a sketch,
    down to `nested` levels. A sketch scores as one move, with the mean log-probability of its tokens.
    """
    tree, proofs = Tree(root, budget, splits=True), Proofs()
    plans = {0: 0} if sketches else {}  # by number of a state that may sketch: sketches around it
    if values:
        yield from _value(tree, tree.nodes)
    _prove(tree, proofs)
    while tree.room > 0:
        hope = tree.leading({*proofs, *(node.number for node in tree.nodes if _can_draw(tree, node))})
        needed = _open_states(tree, proofs, hope)
        if not needed:
            break
        walk = _select_hypertree(tree, proofs, hope, c, width) if values else []
        leaves = [node for node, edge in walk if edge is None and node in needed]
        leaves = leaves[: tree.room] or [max(needed, key=lambda node: score(node, alpha))]
        count = len(tree.nodes)
        planning = [leaf for leaf in leaves if leaf.number in plans and len(leaf.sketches) < sketches]
        if planning:
            yield from _sketch(tree, planning, plans, nested)
        else:
            yield from _expand(tree, leaves, min(width, tree.room // len(leaves)))
        if values:
            yield from _value(tree, tree.nodes[count:])
        _prove(tree, proofs)
        _back_up(tree, proofs, walk)
    return tree


def _expand(tree: Tree, leaves: list[Node], count: int) -> Generator[tuple[Question, ...], list[Any], None]:
    """Draw this many moves in each of these states, and follow them."""
    answers = yield tuple(node.propose(count) for node in leaves)
    yield from follow_moves(
        tree, [e for node, moves in zip(leaves, answers, strict=True) for e in tree.add(node, moves, count)]
    )


def _sketch(
    tree: Tree, leaves: list[Node], plans: dict[int, int], nested: int
) -> Generator[tuple[Question, ...], list[Any], None]:
    """Draw a sketch in each of these states; the parts of a sketch may be sketched in turn."""
    answers = yield tuple(node.sketch() for node in leaves)
    edges = [e for node, moves in zip(leaves, answers, strict=True) for e in tree.add_sketches(node, moves)]
    yield from follow_moves(tree, edges)
    for edge in edges:
        within = plans[edge.source.number] + 1
        if edge.target and within < nested:
            for part in _goals(edge.target):
                plans.setdefault(part.number, within)


def left_out(tree: Tree) -> list[Node]:
    """Return the parts of sketches that were not proved, each once; none if the root was."""
    if tree.solved:
        return []
    edges = [edge for node in tree.nodes for edge in node.edges.values() if edge.move.sketch]
    parts = {part.number: part for edge in edges if edge.target for part in _goals(edge.target)}
    proved = tree.leading({node.number for node in tree.nodes if node.state.done})
    return [part for number, part in parts.items() if number not in proved]


def _goals(node: Node) -> list[Node]:
    """Return the parts of a state, or the state if it has none."""
    return node.parts or [node]


def _value(tree: Tree, nodes: list[Node]) -> Generator[tuple[Question, ...], list[Any], None]:
    """Set the values of states; a state with parts has the product of their values."""
    yield from set_values(tree, [node for node in nodes if not node.parts])
    for node in nodes:
        if node.parts:
            node.value = prod(part.value for part in node.parts)


# ---------------------------------------------------------------------- proved and open states


def _prove(tree: Tree, proofs: Proofs) -> None:
    """Add the states that are now proved, and the solution once the root is."""
    grows = True
    while grows:
        grows = False
        for node in reversed(tree.nodes):
            if node.number in proofs:
                continue
            edge = next((e for e in node.edges.values() if e.target and e.target.number in proofs), None)
            if edge or node.state.done or (node.parts and all(part.number in proofs for part in node.parts)):
                proofs[node.number], grows = edge, True
    if 0 in proofs and not tree.solved:
        tree.solved = tree.nodes[0]
        tree.found, tree.end = _join_proofs(tree, proofs)


def _join_proofs(tree: Tree, proofs: Proofs) -> tuple[list[Edge], State]:
    """Return the moves of the root's proof, each once, and its end, whose text has them in order."""
    ahead: list[Node | str] = [tree.nodes[0]]
    edges, texts = dict[int, Edge](), list[str]()
    while ahead:
        current = ahead.pop()
        if isinstance(current, str):
            texts.append(current.strip())
        elif current.parts:
            before, behind = current.state.around
            ahead += [piece for part in reversed(current.parts) for piece in (behind, part, before)]
        elif (edge := proofs[current.number]) and edge.target:
            edges[id(edge)] = edge
            ahead += reversed(_fill_holes(edge.spelling, edge.target))
    text = "\n".join(filter(None, [tree.root.text, *texts]))
    end = replace(tree.root, moves=(*tree.root.moves, *texts), shown=(), parts=(), done=True, text=text)
    return list(edges.values()), end


def _fill_holes(spelling: str, target: Node) -> list[Node | str]:
    """Return a move with its holes replaced by their parts, followed by the parts without a hole."""
    first, *pieces = spelling.split(HOLE)
    if not pieces:
        return [first, target]
    parts = _goals(target)
    open_ = len(parts) - len(pieces)
    before, behind = target.state.around
    filled = zip([*parts[open_:], *parts[:open_]], [*pieces, *[""] * open_], strict=True)
    return [first, *(text for part, piece in filled for text in (before, part, behind, piece))]


def _can_draw(tree: Tree, node: Node) -> bool:
    """Return True if more moves may be drawn in a state."""
    return not (node.parts or node.state.done or node.exhausted) and node.depth < tree.budget.depth


def _open_states(tree: Tree, proofs: Proofs, hope: set[int]) -> list[Node]:
    """Return the states in which moves may be drawn and whose proofs may become part of the root's.

    hope: states that are proved or may still be; cycles alone prove nothing.
    """
    visited, ahead, nodes = {0}, [tree.nodes[0]], list[Node]()
    while ahead:
        node = ahead.pop()
        if node.number in proofs or node.number not in hope:
            continue
        if _can_draw(tree, node):
            nodes.append(node)
        for child in (*node.parts, *(edge.target for edge in node.edges.values())):
            if child and child.number not in visited:
                visited.add(child.number)
                ahead.append(child)
    return sorted(nodes, key=lambda node: node.number)


# ---------------------------------------------------------------------- with values


def _select_hypertree(tree: Tree, proofs: Proofs, hope: set[int], c: float, width: int) -> Walk:
    """Return a hypertree from the root to states in which more moves are to be drawn.

    A state with N visits has about √(width N) draws.
    """
    walk, visited = Walk(), set[int]()
    ahead: list[tuple[Node, frozenset[int], Edge | None, bool]] = [(tree.nodes[0], frozenset(), None, False)]
    while ahead:
        node, above, edge, expanded = ahead.pop()
        if expanded:
            walk.append((node, edge))
            continue
        if node.number in visited or node.number in proofs:
            continue
        visited.add(node.number)
        above |= {node.number}
        open_ = [
            (edge, edge.target)
            for edge in node.edges.values()
            if edge.target and edge.target.number in hope and not _is_cycle(edge.target, above)
        ]
        if _can_draw(tree, node) and (not open_ or node.draws**2 < width * node.visits):
            open_ = []
        edge, target = max(open_, key=lambda pair: _puct(node, pair[0], c), default=(None, None))
        ahead.append((node, above, edge, True))
        ahead += [(child, above, None, False) for child in (*reversed(node.parts), target) if child]
    return walk


def _is_cycle(node: Node, above: frozenset[int]) -> bool:
    return node.number in above or any(part.number in above for part in node.parts)


def _puct(node: Node, edge: Edge, c: float) -> float:
    """Q plus the bonus; a move that was not visited counts with the value of the state that it leads to."""
    assert edge.target
    mean = edge.total / edge.weight if edge.weight else edge.target.value
    return mean + bonus(node, edge, c)


def _back_up(tree: Tree, proofs: Proofs, walk: Walk) -> None:
    """Back up the values of a hypertree, from its ends to the root."""
    values: dict[int, float] = {}

    def value(node: Node) -> float:
        return 1.0 if node.number in proofs else values[node.number]

    for node, edge in walk:
        if edge and edge.target:
            values[node.number] = value(edge.target)
            tree.back_up([edge], values[node.number])
        else:
            values[node.number] = prod(map(value, node.parts)) if node.parts else node.value
