"""The result of a search: states as nodes, moves as edges, and what it cost."""

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any, TypeVar

from posttrain.search.protocol import HOLE, Budget, Move, Propose, Question, Refused, State

_T = TypeVar("_T")
EXHAUSTED = 1e-5
"""A state is exhausted if the moves that were not drawn have less probability than this."""


@dataclass(slots=True, eq=False)
class Edge:
    """A move that was drawn in a node."""

    source: "Node"
    move: Move
    draws: int = 1
    """Number of times that it was drawn."""
    target: "Node | None" = None
    spelling: str = ""
    """The move as it stands in the answer (State.taken), if it leads somewhere."""
    refused: Refused | None = None
    visits: int = 0
    total: float = 0.0
    """Sum of the values of its visits; discounted if values fade."""
    weight: float = 0.0
    """Number of these visits; discounted likewise."""

    @property
    def applied(self) -> bool:
        """Return True if it is known where it leads."""
        return self.target is not None or self.refused is not None


@dataclass(slots=True, eq=False)
class Node:
    """A state, with the path on which it was first reached."""

    state: State
    number: int
    parent: Edge | None = None
    logp: float = 0.0
    """Σ log π of the moves to it."""
    depth: int = 0
    edges: dict[str, Edge] = field(default_factory=dict)
    """Edges by the text of the move."""
    moves: dict[tuple[tuple[int, ...], str], Move] = field(default_factory=dict)
    """Moves by their tokens and text, as one text may be drawn as different tokens."""
    sketches: list[Move] = field(default_factory=list)
    """Moves that answer a request for a sketch; they do not count as draws of a move."""
    draws: int = 0
    """Moves drawn here, repeated ones included."""
    independent: list[Move] = field(default_factory=list)
    """Moves drawn before any was excluded: each was drawn with its own probability."""
    excluding: bool = False
    exhausted: bool = False
    """Whether no further move can be drawn."""
    value: float = 0.0
    visits: int = 0
    parts: list["Node"] = field(default_factory=list)
    """Parts of a state that is split: each has to end, and the state itself draws no moves."""

    @property
    def remaining(self) -> float:
        """Probability of all moves that were not drawn here."""
        return 1 - sum(exp(move.logp) for move in self.moves.values())

    def propose(self, count: int) -> Propose:
        """Return the question for `count` more moves."""
        self.excluding = bool(self.moves)
        return Propose(self.state, self.draws, count, tuple(self.moves.values()))

    def sketch(self) -> Propose:
        """Return the question for one more sketch."""
        return Propose(self.state, len(self.sketches), 1, tuple(self.sketches), sketch=True)


@dataclass(slots=True, eq=False)
class Tree:
    """The result of a search."""

    root: State
    budget: Budget
    splits: bool = False
    """Whether the parts of states are nodes of their own."""
    compares: bool = False
    """Whether the search continues after an end, to take the best of all; `pick` then chooses it."""
    nodes: list[Node] = field(default_factory=list)
    drawn: int = 0
    """Moves that were drawn, repeated ones included."""
    tokens: int = 0
    applied: int = 0
    merged: int = 0
    """Moves that led to an existing node."""
    refused: Counter[str] = field(default_factory=Counter)
    """Moves that led nowhere, by class."""
    asked: list[int] = field(default_factory=list)
    """Numbers of the nodes that were asked for moves, in order."""
    model_s: float = 0.0
    """Seconds that drawing its moves took, as counted by the driver."""
    prover_s: float = 0.0
    """Seconds that applying its moves took, likewise."""
    solved: Node | None = None
    """The node that is done; the root if the solution consists of parts."""
    end: State | None = None
    """The last state of the solution."""
    found: list[Edge] = field(default_factory=list)
    """The moves of the solution, in order."""
    lessons: list[tuple[Node, Move]] = field(default_factory=list)
    """States, each with the tokens that state its correct value."""
    by_key: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.nodes:
            self._add(self.root, None)

    # ------------------------------------------------------------------ growing

    def _add(self, state: State, parent: Edge | None) -> Node:
        source = parent.source if parent else None
        node = Node(state, len(self.nodes), parent)
        if parent and source:
            node.logp, node.depth = source.logp + parent.move.counted, source.depth + 1
        self.nodes.append(node)
        self.by_key[state.key] = node
        if self.splits:
            node.parts = [self.by_key.get(part.key) or self._add(part, parent) for part in state.parts]
        elif state.done and self.solved is None and not self.compares:
            self._end_at(node)
        return node

    def _end_at(self, node: Node) -> None:
        self.solved, self.end, self.found = node, node.state, self.path(node)

    def trim(self, end: State) -> None:
        """Replace the end by a shorter one, and drop sketches of which not all is in its answer."""
        if self.end and end.text != self.end.text:
            text = " ".join(end.text.split())

            def is_used(edge: Edge) -> bool:
                pieces = (" ".join(piece.split()) for piece in edge.spelling.split(HOLE))
                return not edge.move.sketch or all(piece in text for piece in pieces)

            edges = [edge for edge in self.found if is_used(edge)]
            self.end, self.found = end, edges or self.found

    @property
    def ends(self) -> list[Node]:
        """Nodes that are done, in order."""
        return [node for node in self.nodes if node.state.done]

    def pick(self) -> None:
        """Take the end of the greatest value, the first one of equal ones, as the solution."""
        if self.ends:
            self._end_at(max(self.ends, key=lambda node: node.value))

    def add(self, node: Node, moves: list[Move], count: int) -> list[Edge]:
        """Add the moves that were drawn in a node, `count` at most, and return the new edges."""
        node.draws += len(moves)
        if not node.excluding:
            node.independent += moves
        for move in moves:
            node.moves.setdefault((move.tokens, move.text), move)
        node.exhausted = len(moves) < count or node.remaining < EXHAUSTED
        return self._edges(node, moves)

    def add_sketches(self, node: Node, moves: list[Move]) -> list[Edge]:
        """Add sketches, and return the new edges; if there was no room for one, it counts as drawn."""
        node.sketches += moves or [Move("", 0.0, complete=False, sketch=True)]
        return self._edges(node, moves)

    def _edges(self, node: Node, moves: list[Move]) -> list[Edge]:
        """Count moves and return the new edges that were not cut off by their length or the token budget."""
        new = []
        self.asked.append(node.number)
        self.drawn += len(moves)
        for move in moves:
            self.tokens += len(move.tokens)
            if edge := node.edges.get(move.text):
                edge.draws += 1
            else:
                edge = node.edges[move.text] = Edge(node, move)
                if move.complete and not 0 < self.budget.tokens < self.tokens:
                    new.append(edge)
                else:
                    edge.refused = Refused("cut", "it was cut off at its length, or the search's tokens")
                    self.refused["cut"] += 1
        return new

    def follow(self, edge: Edge, to: State | Refused) -> Node | None:
        """Return the node to which a move led if it is new; None if it led nowhere, or to an existing node.

        A move back to a state that leads to where the move was drawn is refused: no shortest path uses it,
        and the graph stays without cycles. Where states are split, a move that leads back on one path may be
        proved on another, and be needed there; so only a move that changes nothing is refused.
        """
        self.applied += 1
        edge.spelling = (to.taken or to.moves[-1]) if isinstance(to, State) else ""
        if isinstance(to, State) and (node := self.by_key.get(to.key)):
            if node is edge.source or (not self.splits and self._reaches(node, edge.source)):
                to = Refused("repeated", "it leads back to where it came from")
            else:
                self.merged += 1
                edge.target = node
                return None
        if isinstance(to, Refused):
            edge.refused = to
            self.refused[to.label] += 1
            return None
        edge.target = self._add(to, edge)
        return edge.target

    def _reaches(self, node: Node, other: Node) -> bool:
        """Return True if followed moves lead from one node to the other, or if both are the same."""
        ahead, visited = [node], {node.number}
        while ahead:
            current = ahead.pop()
            if current is other:
                return True
            for edge in current.edges.values():
                if edge.target and edge.target.number not in visited:
                    visited.add(edge.target.number)
                    ahead.append(edge.target)
        return False

    def back_up(self, path: list[Edge], value: float, discount: float = 1.0) -> None:
        """Count a walk along these moves, and its value."""
        for edge in path:
            edge.visits += 1
            edge.source.visits += 1
            edge.weight = discount * edge.weight + 1
            edge.total = discount * edge.total + value

    @property
    def over(self) -> bool:
        """Return True if an end was found or the seconds are over; drawn moves are then not followed."""
        return self.solved is not None or bool(self.budget.late and self.budget.late())

    @property
    def room(self) -> int:
        """Moves that may still be drawn."""
        return 0 if self.over or 0 < self.budget.tokens <= self.tokens else self.budget.moves - self.drawn

    # ------------------------------------------------------------------ reading

    def path(self, node: Node) -> list[Edge]:
        """Return the moves from the root to a node, as it was first reached."""
        edges = list[Edge]()
        while node.parent:
            edges.append(node.parent)
            node = node.parent.source
        return edges[::-1]

    def ending(self) -> set[int]:
        """Return the numbers of all nodes from which followed moves lead to the end, if there is one."""
        if self.solved is None:
            return set()
        ends = {node.number for node in self.nodes if node.state.done}
        return self.leading(ends if self.splits else {self.solved.number})

    def leading(self, to: set[int]) -> set[int]:
        """Return the numbers of all nodes from which moves lead to one of these nodes, these included.

        A node with parts belongs to them if all its parts do: the least such set, in which no cycle supports
        itself.
        """
        numbers, grows = set(to), True
        while grows:
            grows = False
            for node in reversed(self.nodes):
                if node.number not in numbers and (
                    any(edge.target and edge.target.number in numbers for edge in node.edges.values())
                    or (node.parts and all(part.number in numbers for part in node.parts))
                ):
                    numbers.add(node.number)
                    grows = True
        return numbers

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(node.depth for node in self.nodes)


def thin(items: Sequence[_T], most: int) -> list[_T]:
    """Return at most `most` items, evenly spaced.

    >>> thin("abcdef", 3), thin("ab", 3)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    count = min(most, len(items))
    return [items[n * len(items) // count] for n in range(count)]


Search = Generator[tuple[Question, ...], list[Any], Tree]
"""Yields questions that may be answered together, and is sent the list of their answers."""
