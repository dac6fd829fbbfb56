"""Training data from a tree: states, moves drawn in them, and the score of each.

    proof     the moves of the solution, each with the verdict on its end
    moves     the first moves that one state drew, with the verdict if they lead to the end, otherwise 0
    visits    the moves of the most visited states, with score N(s, a) / Σ_b N(s, b): REINFORCE without a
              baseline makes of this the cross-entropy  -Σ_a N(s, a) / N(s) log π(a | s)

Sources: expert iteration, arXiv:1705.08439; visit counts as targets, AlphaZero, arXiv:1712.01815.
"""

import math
from dataclasses import dataclass, replace

from posttrain.search.choice import SearchChoice
from posttrain.search.protocol import Move, State
from posttrain.search.tree import Node, Tree, thin
from posttrain.types import Verdict


@dataclass(frozen=True, slots=True)
class SearchRow:
    """A move that was drawn in a state, with its score."""

    state: State
    move: Move | None
    verdict: Verdict
    asks_value: bool = False
    """Whether the prompt asks for the value of the state."""
    text: str | None = None
    """The response, if it is not the text of the move."""


def select_training_rows(
    tree: Tree, verdict: Verdict | None, choice: SearchChoice, size: int
) -> list[SearchRow]:
    """Return at most `size` rows; for a group of one, which is not trained on, the whole answer.

    verdict: on the solution; None without one.
    """
    learns = size > 1 and not (verdict and verdict.failed)
    if learns and choice.learn == "moves":
        rows = _compared_rows(size, tree, verdict)
    elif learns and choice.learn == "visits":
        rows = _visit_rows(size, tree, verdict) or [_unsolved_row(tree)]
    elif verdict is None or tree.end is None:
        return [_unsolved_row(tree)]
    else:
        verdict = replace(verdict, reason=f"{verdict.reason}; {_summary(tree)}", progress=())
        edges = tree.found
        if not learns:
            return [SearchRow(edges[0].source.state, edges[0].move, verdict, text=tree.end.text)]
        unsure = [edge for edge in edges if edge.move.logp <= math.log(choice.surest)]
        edges = unsure or [min(edges, key=lambda edge: edge.move.logp)]
        rows = [SearchRow(edge.source.state, edge.move, verdict) for edge in thin(edges, size)]
    if verdict and verdict.score:
        certain = Verdict(score=1.0, label="value", reason="whether an end was found from here: 1 or 0")
        lessons = tree.lessons[: size - len(rows)]
        rows += [SearchRow(node.state, move, certain, True) for node, move in lessons]
    return rows


def _unsolved_row(tree: Tree) -> SearchRow:
    node = tree.nodes[tree.asked[0]]
    move = next((edge.move for edge in node.edges.values()), None)
    return SearchRow(node.state, move, _unsolved(tree), text="")


def _compared_rows(size: int, tree: Tree, verdict: Verdict | None) -> list[SearchRow]:
    """Return the moves that one state drew before any was excluded, those that lead to an end first.

    It is the state, of those that lead to an end, whose moves differ most in leading there; the first state
    with moves if none leads to an end.
    """
    ending = tree.ending() if verdict and verdict.score else set[int]()

    def leads(node: Node, move: Move) -> bool:
        target = node.edges[move.text].target
        return target is not None and target.number in ending

    def differ(node: Node) -> float:
        leading = [leads(node, move) for move in node.independent[:size]]
        return sum(leading) * (len(leading) - sum(leading)) / max(len(leading), 1) ** 2

    asked_nodes = [tree.nodes[n] for n in tree.asked if tree.nodes[n].independent]
    solved = [node for node in asked_nodes if node.number in ending]
    node = max(sorted(solved or asked_nodes[:1], key=lambda node: node.number), key=differ)
    rows = []
    for move in sorted(node.independent[:size], key=lambda move: not leads(node, move)):
        refused = node.edges[move.text].refused
        outcome = Verdict(score=0.0, label=refused.label, reason=refused.reason) if refused else None
        outcome = verdict if verdict and leads(node, move) else outcome or _unsolved(tree)
        rows.append(SearchRow(node.state, move, replace(outcome, progress=())))
    return rows


def _visit_rows(size: int, tree: Tree, verdict: Verdict | None) -> list[SearchRow]:
    """Return the moves of the most visited states, for as many states as fit with all of their moves.

    A tree without a right end has no rows: its visits merely follow what was likely.
    """
    rows: list[SearchRow] = []
    if not (verdict and verdict.score):
        return rows
    for node in sorted(tree.nodes, key=lambda node: (-node.visits, node.number)):
        edges = [edge for edge in node.edges.values() if edge.visits]
        if len(edges) < 2 or len(rows) + len(edges) > size:
            continue
        visits = sum(edge.visits for edge in edges)
        for edge in edges:
            reason = f"{edge.visits} of {visits} visits; {_summary(tree)}"
            share = Verdict(score=edge.visits / visits, label="visits", reason=reason)
            rows.append(SearchRow(node.state, edge.move, share))
    return rows


def _unsolved(tree: Tree) -> Verdict:
    return Verdict(score=0.0, label="unsolved", reason=_summary(tree))


def _summary(tree: Tree) -> str:
    """Return the counts of a search in a line."""
    refused = sum(tree.refused.values())
    return (
        f"{tree.drawn} moves drawn, {tree.applied} followed, {refused} refused, {tree.merged} merged; "
        f"{len(tree.nodes)} states, at most {tree.depth} deep"
    )
