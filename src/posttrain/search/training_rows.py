"""What is learnt from a tree: states, moves that were said in them, and what each is worth.

    proof     the moves of the way that was found, each worth the verdict on its end
    moves     those that one state said when it was first asked, worth the verdict if the end lies behind them
    visits    those of the states that were visited most, worth N(s, a) / Σ_b N(s, b): REINFORCE without a
              baseline makes of that the cross-entropy  -Σ_a N(s, a) / N(s) log π(a | s)

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
    """A move that was said in a state, and what it is worth."""

    state: State
    move: Move | None
    verdict: Verdict
    asks_value: bool = False
    """Whether the state was shown with the question what it is worth."""
    text: str | None = None
    """What stands for the response, if not the move."""


def select_training_rows(
    tree: Tree, verdict: Verdict | None, choice: SearchChoice, size: int
) -> list[SearchRow]:
    """At most `size` rows; of a group of one, which nobody learns from, the whole.

    verdict: of what was found; None if nothing was.
    """
    learns = size > 1 and not (verdict and verdict.failed)
    if learns and choice.learn == "moves":
        rows = _children(size, tree, verdict)
    elif learns and choice.learn == "visits":
        rows = _visited(size, tree, verdict) or [_nothing(tree)]
    elif verdict is None or tree.end is None:
        return [_nothing(tree)]
    else:
        verdict = replace(verdict, reason=f"{verdict.reason}; {_told(tree)}", progress=())
        way = tree.found
        if not learns:
            return [SearchRow(way[0].source.state, way[0].move, verdict, text=tree.end.text)]
        unsure = [edge for edge in way if edge.move.logp <= math.log(choice.surest)]
        way = unsure or [min(way, key=lambda edge: edge.move.logp)]
        rows = [SearchRow(edge.source.state, edge.move, verdict) for edge in thin(way, size)]
    if verdict and verdict.score:
        told = Verdict(score=1.0, label="value", reason="whether an end was found from here: 1 or 0")
        rows += [SearchRow(node.state, move, told, True) for node, move in tree.lessons[: size - len(rows)]]
    return rows


def _nothing(tree: Tree) -> SearchRow:
    spoke = tree.nodes[tree.asked[0]]
    move = next((each.move for each in spoke.edges.values()), None)
    return SearchRow(spoke.state, move, _unsolved(tree), text="")


def _children(size: int, tree: Tree, verdict: Verdict | None) -> list[SearchRow]:
    """The moves that one state said when it was first asked, those behind which an end was found first.

    The state is the one, of those from which an end was found, whose moves differ most in that; the first
    that spoke if there is none.
    """
    ending = tree.ending() if verdict and verdict.score else set[int]()

    def leads(node: Node, move: Move) -> bool:
        target = node.edges[move.text].target
        return target is not None and target.number in ending

    def differ(node: Node) -> float:
        led = [leads(node, move) for move in node.independent[:size]]
        return sum(led) * (len(led) - sum(led)) / max(len(led), 1) ** 2

    spoke = [tree.nodes[n] for n in tree.asked if tree.nodes[n].independent]
    told = [node for node in spoke if node.number in ending]
    node = max(sorted(told or spoke[:1], key=lambda node: node.number), key=differ)
    rows = []
    for move in sorted(node.independent[:size], key=lambda move: not leads(node, move)):
        refused = node.edges[move.text].refused
        came = Verdict(score=0.0, label=refused.label, reason=refused.reason) if refused else None
        came = verdict if verdict and leads(node, move) else came or _unsolved(tree)
        rows.append(SearchRow(node.state, move, replace(came, progress=())))
    return rows


def _visited(size: int, tree: Tree, verdict: Verdict | None) -> list[SearchRow]:
    """The moves of the states that were visited most, as many states as find room with all of theirs.

    Nothing of a tree without an end that is right: its visits follow what was likely, and say no more.
    """
    rows: list[SearchRow] = []
    if not (verdict and verdict.score):
        return rows
    for node in sorted(tree.nodes, key=lambda node: (-node.visits, node.number)):
        came = [edge for edge in node.edges.values() if edge.visits]
        if len(came) < 2 or len(rows) + len(came) > size:
            continue
        visits = sum(edge.visits for edge in came)
        for edge in came:
            reason = f"{edge.visits} of {visits} visits; {_told(tree)}"
            share = Verdict(score=edge.visits / visits, label="visits", reason=reason)
            rows.append(SearchRow(node.state, edge.move, share))
    return rows


def _unsolved(tree: Tree) -> Verdict:
    return Verdict(score=0.0, label="unsolved", reason=_told(tree))


def _told(tree: Tree) -> str:
    """What a search did, in a line."""
    refused = sum(tree.refused.values())
    return (
        f"{tree.drawn} moves drawn, {tree.applied} followed, {refused} refused, {tree.merged} merged; "
        f"{len(tree.nodes)} states, at most {tree.depth} deep"
    )
