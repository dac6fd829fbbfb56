"""What a search has found: states as nodes, moves as edges, and what it cost."""

from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any, TypeVar

from posttrain.search.protocol import HOLE, Budget, Move, Propose, Question, Refused, State

_T = TypeVar("_T")
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
    taken: str = ""
    """The move as Steps have taken it, if it leads somewhere."""
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
    drawn: dict[tuple[tuple[int, ...], str], Move] = field(default_factory=dict)
    """The moves by their tokens and text, as one text may be said in several ways."""
    sketches: list[Move] = field(default_factory=list)
    """What was drawn where a sketch was asked for, which are no draws of a move."""
    asked: int = 0
    """Moves drawn here, repeated ones included."""
    independent: list[Move] = field(default_factory=list)
    """Those of them that the policy drew before any was excluded: it draws each with its own probability."""
    excluding: bool = False
    exhausted: bool = False
    """Whether it has said all that it can."""
    value: float = 0.0
    visits: int = 0
    parts: list["Node"] = field(default_factory=list)
    """Of a state that is taken apart, all of which have to end; it says nothing itself."""

    @property
    def unsaid(self) -> float:
        """The probability of all moves that have not been said here."""
        return 1 - sum(exp(move.logp) for move in self.drawn.values())

    def propose(self, count: int) -> Propose:
        """The question for so many more of its moves."""
        self.excluding = bool(self.drawn)
        return Propose(self.state, self.asked, count, tuple(self.drawn.values()))

    def sketch(self) -> Propose:
        """The question for one more sketch."""
        return Propose(self.state, len(self.sketches), 1, tuple(self.sketches), sketch=True)


@dataclass(slots=True, eq=False)
class Tree:
    """All that a search has found."""

    root: State
    budget: Budget
    apart: bool = False
    """Whether the parts of states are nodes of their own."""
    compares: bool = False
    """Whether it goes on after an end, to take the best of all; `pick` then says which that is."""
    nodes: list[Node] = field(default_factory=list)
    drawn: int = 0
    """Moves, repeated ones included."""
    tokens: int = 0
    applied: int = 0
    merged: int = 0
    """Moves that led to a node that was there."""
    refused: Counter[str] = field(default_factory=Counter)
    """Moves that led nowhere, by class."""
    asked: list[int] = field(default_factory=list)
    """The nodes that spoke, in this order, each by its number."""
    model_s: float = 0.0
    """Seconds that drawing its moves took, as whoever ran the search counts them."""
    prover_s: float = 0.0
    """Likewise of following them."""
    solved: Node | None = None
    """The node that is done; the root, if what was found is made of parts."""
    end: State | None = None
    """Where what was found ends."""
    found: list[Edge] = field(default_factory=list)
    """Its moves, in their order."""
    lessons: list[tuple[Node, Move]] = field(default_factory=list)
    """States, each with what the policy should have said of its value."""
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
        if self.apart:
            node.parts = [self.by_key.get(part.key) or self._add(part, parent) for part in state.parts]
        elif state.done and self.solved is None and not self.compares:
            self._end_at(node)
        return node

    def _end_at(self, node: Node) -> None:
        self.solved, self.end, self.found = node, node.state, self.path(node)

    def trim(self, end: State) -> None:
        """Takes an end that says less, and leaves out the sketches of which not all is said."""
        if self.end and end.text != self.end.text:
            text = " ".join(end.text.split())
            said = [(e, [" ".join(piece.split()) for piece in e.taken.split(HOLE)]) for e in self.found]
            kept = [e for e, told in said if not e.move.sketch or all(piece in text for piece in told)]
            self.end, self.found = end, kept or self.found

    @property
    def ends(self) -> list[Node]:
        """The nodes that are done, the first one first."""
        return [node for node in self.nodes if node.state.done]

    def pick(self) -> None:
        """Takes the end of the greatest value, of equal ones the first, for what was looked for."""
        if self.ends:
            self._end_at(max(self.ends, key=lambda node: node.value))

    def add(self, node: Node, moves: list[Move], asked: int) -> list[Edge]:
        """The edges that are new, of the moves that were drawn in a node when it was asked for so many."""
        node.asked += len(moves)
        if not node.excluding:
            node.independent += moves
        for move in moves:
            node.drawn.setdefault((move.tokens, move.text), move)
        node.exhausted = len(moves) < asked or node.unsaid < SAID
        return self._edges(node, moves)

    def add_sketches(self, node: Node, moves: list[Move]) -> list[Edge]:
        """Likewise of sketches; where there was no room for one, it counts as drawn."""
        node.sketches += moves or [Move("", 0.0, ended=False, sketch=True)]
        return self._edges(node, moves)

    def _edges(self, node: Node, moves: list[Move]) -> list[Edge]:
        """Counts what a node has said; the edges that are new and came to their end within the tokens."""
        new = []
        self.asked.append(node.number)
        self.drawn += len(moves)
        for move in moves:
            self.tokens += len(move.tokens)
            if edge := node.edges.get(move.text):
                edge.said += 1
            else:
                edge = node.edges[move.text] = Edge(node, move)
                if move.ended and not 0 < self.budget.tokens < self.tokens:
                    new.append(edge)
                else:
                    edge.refused = Refused("cut", "it was cut off at its length, or the search's tokens")
                    self.refused["cut"] += 1
        return new

    def follow(self, edge: Edge, to: State | Refused) -> Node | None:
        """The node to which a move led if that is new; None if it led nowhere, or to where one has been.

        A move back to a state from which one can come to where it was said leads nowhere: no shortest way
        makes it, and what is left has no circles. Where states are taken apart, what leads back on one way
        may be proved on another, and be needed beside it: only a move that changes nothing is refused.
        """
        self.applied += 1
        edge.taken = (to.taken or to.moves[-1]) if isinstance(to, State) else ""
        if isinstance(to, State) and (found := self.by_key.get(to.key)):
            if found is edge.source or (not self.apart and self._comes_to(found, edge.source)):
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

    def back_up(self, way: list[Edge], worth: float, discount: float = 1.0) -> None:
        """Counts a walk along these moves, and what it was worth."""
        for edge in way:
            edge.visits += 1
            edge.source.visits += 1
            edge.weight = discount * edge.weight + 1
            edge.total = discount * edge.total + worth

    @property
    def over(self) -> bool:
        """Whether an end was found, or its seconds are over: what was drawn is then not followed either."""
        return self.solved is not None or bool(self.budget.late and self.budget.late())

    @property
    def room(self) -> int:
        """Moves that may still be drawn."""
        return 0 if self.over or 0 < self.budget.tokens <= self.tokens else self.budget.moves - self.drawn

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

    def ending(self) -> set[int]:
        """The numbers of all nodes from which moves that were followed lead to the end, if one was found."""
        if self.solved is None:
            return set()
        done = {node.number for node in self.nodes if node.state.done}
        return self.leading(done if self.apart else {self.solved.number})

    def leading(self, to: set[int]) -> set[int]:
        """The numbers of all nodes that have a move to one of these, or to one that has, and so on.

        What has parts leads there if all of them do: the least set of this kind, in which no circle holds
        itself.
        """
        found, grows = set(to), True
        while grows:
            grows = False
            for node in reversed(self.nodes):
                if node.number not in found and (
                    any(each.target and each.target.number in found for each in node.edges.values())
                    or (node.parts and all(part.number in found for part in node.parts))
                ):
                    found.add(node.number)
                    grows = True
        return found

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return max(node.depth for node in self.nodes)


def thin(given: Sequence[_T], most: int) -> list[_T]:
    """So many of them at most, evenly over all.

    >>> thin("abcdef", 3), thin("ab", 3)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    count = min(most, len(given))
    return [given[n * len(given) // count] for n in range(count)]


Search = Generator[tuple[Question, ...], list[Any], Tree]
"""Yields questions that may be answered together, and is sent the list of their answers."""
