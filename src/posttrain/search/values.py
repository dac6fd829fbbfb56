"""Values of states: from the policy itself, which is asked whether one ends well, or from a reward model.

    the policy        V(s) = π(1 | s, ask) / (π(1 | s, ask) + π(0 | s, ask))
    a process model   V(s) = its score of the steps that were said: the last one's, their least, product, mean
    an outcome model  V(s) = σ(its score of what was said)

The policy's value needs no head, and is sampled, learnt, saved and handed over as any token is. HTPS takes it
from two tokens of its model too (arXiv:2205.11491, section 4.3), there with a decoder of its own.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from math import exp
from typing import Any

from posttrain.base.chat import Chat
from posttrain.search.protocol import Apply, Question, State, StateValue, ValueTarget
from posttrain.search.tree import Edge, Node, Search, Tree, thin
from posttrain.types import Message, UserError
from posttrain.verifiers.model.verifier import RewardModel

ASK = "Can this be done? 1 or 0"
SAID = ("0", "1")
"""What is said of a state that does not end well, and of one that does."""


def value_prompt(chat: Chat, state: State) -> list[int]:
    """The tokens that ask for a state's value. UserError if it cannot be shown."""
    return chat.render(below(state, ASK))


def below(state: State, question: str) -> list[Message]:
    """A state as it is shown, with a line below that asks something else of it than a move."""
    if not state.shown:
        raise UserError("", "there is nothing to ask about")
    *before, last = state.shown
    asked = "\n".join(part for part in (last["content"], state.said, question) if part)
    return [*before, {**last, "content": asked}]


def value_of(no: float, yes: float) -> float:
    """V from the log-probabilities of the two answers.

    >>> value_of(-1.0, -1.0), round(value_of(-3.0, -1.0), 3)
    (0.5, 0.881)
    """
    return 1 / (1 + exp(min(no - yes, 700)))


def by_model(model: RewardModel) -> Callable[[Sequence[State]], list[float]]:
    """Values in [0, 1] of states by what was said in them; 0.5 where that is nothing.

    What the model cannot score, as it is too long, is worth 0.
    """

    def values(states: Sequence[State]) -> list[float]:
        told = [state for state in states if state.said]
        scores = iter(model.judge_all([(state.task, state.said) for state in told]))
        return [_probability(next(scores).score, model) if state.said else 0.5 for state in states]

    return values


def _probability(score: float | None, model: RewardModel) -> float:
    if score is None:
        return 0.0
    return min(max(score, 0.0), 1.0) if model.kind == "process" else value_of(0.0, score)


def followed(tree: Tree, edges: Sequence[Edge]) -> Generator[tuple[Question, ...], list[Any], list[Node]]:
    """Has these moves applied, unless the search is over; the nodes that are new."""
    if not edges or tree.over:
        return []
    [led] = yield (Apply(tuple((edge.source.state, edge.move.text) for edge in edges)),)
    return [node for edge, to in zip(edges, led, strict=True) if (node := tree.follow(edge, to))]


def valued(tree: Tree, nodes: Sequence[Node]) -> Generator[tuple[Question, ...], list[Any], None]:
    """Has these nodes valued. An end is worth 1, unless ends are compared."""
    asked = [node for node in nodes if tree.compares or not node.state.done]
    if asked:
        [values] = yield (StateValue(tuple(node.state for node in asked)),)
        for node, value in zip(asked, values, strict=True):
            node.value = value
    for node in nodes:
        if node.state.done and not tree.compares:
            node.value = 1.0


def picked(search: Search) -> Search:
    """The search, and behind it the choice among the ends that it came to, by their values."""
    tree: Tree = yield from search
    tree.pick()
    return tree


def taught(search: Search, most: int) -> Search:
    """The search, and behind it `most` of its states at most with what their values should have been.

    One half are states from which an end was found, the other those that were asked most of all without one,
    in turn. A tree without an end teaches nothing, as any state of it may have one. Source: HTPS, section
    5.1, where what was visited often and not proved counts as 0.
    """
    tree: Tree = yield from search
    ending = tree.ending()
    good = [node for node in tree.nodes if node.number in ending and not (node.state.done or node.parts)]
    bad = sorted((n for n in tree.nodes if n.number not in ending and n.asked), key=lambda n: -n.asked)
    pairs = min(most // 2, len(good), len(bad))
    nodes = [node for pair in zip(thin(good, pairs), bad, strict=False) for node in pair]
    if nodes:
        states = tuple(node.state for node in nodes)
        [said] = yield (ValueTarget(states, tuple(node.number in ending for node in nodes)),)
        told = zip(nodes, said, strict=True)
        tree.lessons = [(node, replace(move, ended=True)) for node, move in told if move]
    return tree
