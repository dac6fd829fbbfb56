"""What a search has found: states as nodes, moves as edges, and what it cost."""

from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from math import exp
from typing import Any

from posttrain.search.protocol import Budget, Move, Question, Refused, State

SAID = 1e-5
"""A state whose moves have all but so much of the probability has said all."""


@dataclass(slots=True, eq=False)
class Edge:
    """A move that was said in a node."""

    source: "Node"
    move: Move
    said: int = 1
    """How often it was drawn."""
    target: "Node | None" = None
    refused: Refused | None = None
    visits: int = 0
    total: float = 0.0
    """Sum of what its visits were worth; a discounted one where worth fades."""
    weight: float = 0.0
    """Of these visits: their number, or a discounted one."""

    @property
    def applied(self) -> bool:
        """Whether it is known where it leads."""
        return self.target is not None or self.refused is not None


@dataclass(slots=True, eq=False)
class Node:
    """A state, by the way on which it was first reached."""

    state: State
    number: int
    parent: Edge | None = None
    logp: float = 0.0
    """Σ log π of the moves to it."""
    depth: int = 0
    edges: dict[str, Edge] = field(default_factory=dict)
    """By what was said."""
    asked: int = 0
    """Moves drawn here, repeated ones included."""
    exhausted: bool = False
    """Whether it has said all that it can."""
    value: float = 0.0
    visits: int = 0

    @property
    def unsaid(self) -> float:
        """The probability of all moves that have not been said here."""
        return 1 - sum(exp(edge.move.logp) for edge in self.edges.values())


@dataclass(slots=True, eq=False)
class Tree:
    """All that a search has found."""

    root: State
    budget: Budget
    nodes: list[Node] = field(default_factory=list)
    drawn: int = 0
    """Moves, repeated ones included."""
    tokens: int = 0
    applied: int = 0
    merged: int = 0
    """Moves that led to a node that was there."""
    refused: Counter[str] = field(default_factory=Counter)
    """Moves that led nowhere, by class."""
    solved: Node | None = None
    by_key: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.nodes:
            self._add(self.root, None)

    # ------------------------------------------------------------------ growing

    def _add(self, state: State, parent: Edge | None) -> Node:
        source = parent.source if parent else None
        node = Node(state, len(self.nodes), parent)
        if parent and source:
            node.logp, node.depth = source.logp + parent.move.logp, source.depth + 1
        self.nodes.append(node)
        self.by_key[state.key] = node
        if state.done and self.solved is None:
            self.solved = node
        return node

    def said(self, node: Node, moves: list[Move], asked: int) -> list[Edge]:
        """The edges that are new, of the moves that were drawn in a node when it was asked for so many."""
        new = []
        node.asked += len(moves)
        self.drawn += len(moves)
        for move in moves:
            self.tokens += len(move.tokens)
            if edge := node.edges.get(move.text):
                edge.said += 1
            else:
                edge = node.edges[move.text] = Edge(node, move)
                if move.ended:
                    new.append(edge)
                else:
                    edge.refused = Refused("cut", "it was cut off at its length")
                    self.refused["cut"] += 1
        node.exhausted = len(moves) < asked or node.unsaid < SAID
        return new

    def led(self, edge: Edge, to: State | Refused) -> Node | None:
        """The node to which a move led if that is new; None if it led nowhere, or to where one has been.

        A move back to a state from which one can come to where it was said leads nowhere: no shortest way
        makes it, and what is left has no circles.
        """
        self.applied += 1
        if isinstance(to, State) and (found := self.by_key.get(to.key)):
            if self._comes_to(found, edge.source):
                to = Refused("repeated", "it leads back to where it came from")
            else:
                self.merged += 1
                edge.target = found
                return None
        if isinstance(to, Refused):
            edge.refused = to
            self.refused[to.label] += 1
            return None
        edge.target = self._add(to, edge)
        return edge.target

    def _comes_to(self, node: Node, other: Node) -> bool:
        """Whether moves that have been followed lead from one node to another, or both are one."""
        ahead, seen = [node], {node.number}
        while ahead:
            at = ahead.pop()
            if at is other:
                return True
            for edge in at.edges.values():
                if edge.target and edge.target.number not in seen:
                    seen.add(edge.target.number)
                    ahead.append(edge.target)
        return False

    @property
    def room(self) -> int:
        """Moves that may still be drawn."""
        if self.solved or (self.budget.tokens and self.tokens >= self.budget.tokens):
            return 0
        return self.budget.moves - self.drawn

    # ------------------------------------------------------------------ reading

    def way(self, node: Node) -> Iterator[Node]:
        """The nodes from this one back to the root."""
        at: Node | None = node
        while at:
            yield at
            at = at.parent.source if at.parent else None

    def path(self, node: Node) -> list[Edge]:
        """The moves from the root to a node, as it was first reached."""
        return [each.parent for each in self.way(node) if each.parent][::-1]

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return max(node.depth for node in self.nodes)


Search = Generator[tuple[Question, ...], list[Any], Tree]
"""Yields questions that may be answered together, and is sent the list of their answers."""
