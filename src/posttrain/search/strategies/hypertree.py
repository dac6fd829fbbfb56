"""Search over goals that can be proved apart: AND over the parts of a state, OR over its moves.

    a state is proved   if it is done, if all its parts are, or if a move leads to one that is
    value of parts      ∏ of theirs, as if they ended well independently
    with values         a = argmax Q(s, a) + c P(s, a) √N(s) / (1 + N(s, a)), in all parts at once

A flat search has to choose moves for one goal again for each way to prove another: their numbers multiply.
Here they add, and a goal that stands in several places is proved once. What is proved is the least fixed
point of the first line, so nothing is used in its own proof, though moves may lead in circles. Source:
HyperTree Proof Search, arXiv:2205.11491, section 4; there all moves of a state are said at once.
"""

from collections.abc import Generator
from dataclasses import replace
from math import prod
from typing import Any

from posttrain.search.protocol import HOLE, Budget, Question, State
from posttrain.search.strategies.best_first import score
from posttrain.search.strategies.puct import bonus
from posttrain.search.tree import Edge, Node, Search, Tree
from posttrain.search.values import followed, valued

Proofs = dict[int, Edge | None]
"""By a state's number the move that proves it, None if it is done or has parts; each behind what it needs."""
Way = list[tuple[Node, Edge | None]]
"""States, each behind those to which its move leads; None where a state says more, or has parts."""


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
    """Asks for `width` moves in states that a proof still needs, follows all, and joins proofs of parts.

    Without values it is the one state with the best score of `best_first`, where what was said of other parts
    does not count. With values it is every state in which a hypertree ends, taken from the root by PUCT down
    all parts; where that leads nowhere, the one with the best score.

    The root says so many sketches, one at a time, before its first move; so does each part of a sketch, until
    so many are nested. A sketch scores as one move does, with the mean log-probability of its tokens.
    """
    tree, proofs = Tree(root, budget, apart=True), Proofs()
    plans = {0: 0} if sketches else {}
    """By a state's number, of those that may sketch, the sketches in which it lies."""
    if values:
        yield from _value(tree, tree.nodes)
    _prove(tree, proofs)
    while tree.room > 0:
        hope = tree.leading({*proofs, *(node.number for node in tree.nodes if _speaks(tree, node))})
        needed = _needed(tree, proofs, hope)
        if not needed:
            break
        way = _selected(tree, proofs, hope, c, width) if values else []
        leaves = [node for node, edge in way if edge is None and node in needed]
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
        _back(tree, proofs, way)
    return tree


def _expand(tree: Tree, leaves: list[Node], asked: int) -> Generator[tuple[Question, ...], list[Any], None]:
    """Asks these states for so many moves each, and follows what they say."""
    said = yield tuple(node.propose(asked) for node in leaves)
    yield from followed(
        tree, [e for node, moves in zip(leaves, said, strict=True) for e in tree.add(node, moves, asked)]
    )


def _sketch(
    tree: Tree, leaves: list[Node], plans: dict[int, int], nested: int
) -> Generator[tuple[Question, ...], list[Any], None]:
    """Asks these states for a sketch each; the parts of each may be sketched in their turn."""
    said = yield tuple(node.sketch() for node in leaves)
    edges = [e for node, moves in zip(leaves, said, strict=True) for e in tree.add_sketches(node, moves)]
    yield from followed(tree, edges)
    for edge in edges:
        within = plans[edge.source.number] + 1
        if edge.target and within < nested:
            for part in _goals(edge.target):
                plans.setdefault(part.number, within)


def left_out(tree: Tree) -> list[Node]:
    """What sketches have left to prove and was not proved, each once; nothing if the whole was."""
    if tree.solved:
        return []
    edges = [edge for node in tree.nodes for edge in node.edges.values() if edge.move.sketch]
    found = {part.number: part for edge in edges if edge.target for part in _goals(edge.target)}
    proved = tree.leading({node.number for node in tree.nodes if node.state.done})
    return [part for number, part in found.items() if number not in proved]


def _goals(node: Node) -> list[Node]:
    """The parts of a state, or itself where it has none."""
    return node.parts or [node]


def _value(tree: Tree, nodes: list[Node]) -> Generator[tuple[Question, ...], list[Any], None]:
    """Has states valued; what has parts is worth their product."""
    yield from valued(tree, [node for node in nodes if not node.parts])
    for node in nodes:
        if node.parts:
            node.value = prod(part.value for part in node.parts)


# ---------------------------------------------------------------------- what is proved, and what may be


def _prove(tree: Tree, proofs: Proofs) -> None:
    """Adds what is proved now, and what was found if that is the root."""
    grows = True
    while grows:
        grows = False
        for node in reversed(tree.nodes):
            if node.number in proofs:
                continue
            edge = next((e for e in node.edges.values() if e.target and e.target.number in proofs), None)
            if edge or node.state.done or (node.parts and all(each.number in proofs for each in node.parts)):
                proofs[node.number], grows = edge, True
    if 0 in proofs and not tree.solved:
        tree.solved = tree.nodes[0]
        tree.found, tree.end = _joined(tree, proofs)


def _joined(tree: Tree, proofs: Proofs) -> tuple[list[Edge], State]:
    """The moves of the root's proof, each once, and its end, whose text has them in order."""
    ahead: list[Node | str] = [tree.nodes[0]]
    edges, said = dict[int, Edge](), list[str]()
    while ahead:
        at = ahead.pop()
        if isinstance(at, str):
            said.append(at.strip())
        elif at.parts:
            before, behind = at.state.around
            ahead += [each for part in reversed(at.parts) for each in (behind, part, before)]
        elif (edge := proofs[at.number]) and edge.target:
            edges[id(edge)] = edge
            ahead += reversed(_filled(edge.taken, edge.target))
    text = "\n".join(filter(None, [tree.root.text, *said]))
    end = replace(tree.root, moves=(*tree.root.moves, *said), shown=(), parts=(), done=True, text=text)
    return list(edges.values()), end


def _filled(taken: str, target: Node) -> list[Node | str]:
    """A move, with the parts that are its holes in their places, and what it leaves open behind it."""
    first, *pieces = taken.split(HOLE)
    if not pieces:
        return [first, target]
    parts = _goals(target)
    open_ = len(parts) - len(pieces)
    before, behind = target.state.around
    filled = zip([*parts[open_:], *parts[:open_]], [*pieces, *[""] * open_], strict=True)
    return [first, *(each for part, piece in filled for each in (before, part, behind, piece))]


def _speaks(tree: Tree, node: Node) -> bool:
    """Whether a state may be asked for more."""
    return not (node.parts or node.state.done or node.exhausted) and node.depth < tree.budget.depth


def _needed(tree: Tree, proofs: Proofs, hope: set[int]) -> list[Node]:
    """The states that may be asked for more, and whose proofs may become part of the root's.

    hope: the states that are proved or may yet be; circles alone prove nothing.
    """
    seen, ahead, found = {0}, [tree.nodes[0]], list[Node]()
    while ahead:
        node = ahead.pop()
        if node.number in proofs or node.number not in hope:
            continue
        if _speaks(tree, node):
            found.append(node)
        for each in (*node.parts, *(edge.target for edge in node.edges.values())):
            if each and each.number not in seen:
                seen.add(each.number)
                ahead.append(each)
    return sorted(found, key=lambda node: node.number)


# ---------------------------------------------------------------------- with values


def _selected(tree: Tree, proofs: Proofs, hope: set[int], c: float, width: int) -> Way:
    """A hypertree from the root to states that are to say more.

    A state that N walks have come through has said about √(width N) moves.
    """
    way, seen = Way(), set[int]()
    ahead: list[tuple[Node, frozenset[int], Edge | None, bool]] = [(tree.nodes[0], frozenset(), None, False)]
    while ahead:
        node, above, edge, left = ahead.pop()
        if left:
            way.append((node, edge))
            continue
        if node.number in seen or node.number in proofs:
            continue
        seen.add(node.number)
        above |= {node.number}
        open_ = [
            (each, each.target)
            for each in node.edges.values()
            if each.target and each.target.number in hope and not _circles(each.target, above)
        ]
        if _speaks(tree, node) and (not open_ or node.asked**2 < width * node.visits):
            open_ = []
        edge, target = max(open_, key=lambda each: _puct(node, each[0], c), default=(None, None))
        ahead.append((node, above, edge, True))
        ahead += [(each, above, None, False) for each in (*reversed(node.parts), target) if each]
    return way


def _circles(node: Node, above: frozenset[int]) -> bool:
    return node.number in above or any(part.number in above for part in node.parts)


def _puct(node: Node, edge: Edge, c: float) -> float:
    """A move that was not taken counts as worth the state to which it leads."""
    assert edge.target
    mean = edge.total / edge.weight if edge.weight else edge.target.value
    return mean + bonus(node, edge, c)


def _back(tree: Tree, proofs: Proofs, way: Way) -> None:
    """Counts a hypertree, from where it ends to the root: what each of its states is worth in it."""
    worth: dict[int, float] = {}

    def of(node: Node) -> float:
        return 1.0 if node.number in proofs else worth[node.number]

    for node, edge in way:
        if edge and edge.target:
            worth[node.number] = of(edge.target)
            tree.back_up([edge], worth[node.number])
        else:
            worth[node.number] = prod(map(of, node.parts)) if node.parts else node.value
