"""Values of states: from the policy itself, which predicts whether a state ends well, or from a reward model.

    the policy        V(s) = π(1 | s, ask) / (π(1 | s, ask) + π(0 | s, ask))
    a process model   V(s) = its score of the steps so far: of the last one, or their minimum, product or mean
    an outcome model  V(s) = σ(its score of the answer so far)

The policy's value needs no head: it is sampled, trained, saved and synced like any token. HTPS takes it from
two tokens of its model too (arXiv:2205.11491, section 4.3), there with a decoder of its own.
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
ANSWERS = ("0", "1")
"""Answers for a state that does not end well, and for one that does."""


def value_prompt(chat: Chat, state: State) -> list[int]:
    """Return the tokens that ask for a state's value. Raise UserError if the state cannot be shown."""
    return chat.render(with_question(state, ASK))


def with_question(state: State, question: str) -> list[Message]:
    """Return the messages of a state with another question below them, in place of the request for a move."""
    if not state.shown:
        raise UserError("", "there is nothing to ask about")
    *before, last = state.shown
    content = "\n".join(part for part in (last["content"], state.answer, question) if part)
    return [*before, {**last, "content": content}]


def value_of(no: float, yes: float) -> float:
    """V from the log-probabilities of the two answers.

    >>> value_of(-1.0, -1.0), round(value_of(-3.0, -1.0), 3)
    (0.5, 0.881)
    """
    return 1 / (1 + exp(min(no - yes, 700)))


def by_model(model: RewardModel) -> Callable[[Sequence[State]], list[float]]:
    """Return a function that scores states, in [0, 1], by the answer so far, or by the goals of a proof.

    An empty answer has value 0.5. What the model cannot score, as it is too long, has value 0.
    """

    def values(states: Sequence[State]) -> list[float]:
        texts = [text_of(state) for state in states]
        pairs = [(state.task, text) for state, text in zip(states, texts, strict=True) if text]
        scores = iter(model.judge_all(pairs))
        return [_probability(next(scores).score, model) if text else 0.5 for text in texts]

    return values


def text_of(state: State) -> str:
    """Return what a value model reads of a state after its task: the answer so far, or a proof's goals."""
    is_begun = bool(state.shown) and state.shown != state.task.messages
    return state.answer or (str(state.shown[-1]["content"]) if is_begun else "")


def _probability(score: float | None, model: RewardModel) -> float:
    if score is None:
        return 0.0
    return min(max(score, 0.0), 1.0) if model.kind == "process" else value_of(0.0, score)


def follow_moves(tree: Tree, edges: Sequence[Edge]) -> Generator[tuple[Question, ...], list[Any], list[Node]]:
    """Apply these moves, unless the search is over, and return the new nodes."""
    if not edges or tree.over:
        return []
    [results] = yield (Apply(tuple((edge.source.state, edge.move.text) for edge in edges)),)
    return [node for edge, result in zip(edges, results, strict=True) if (node := tree.follow(edge, result))]


def set_values(tree: Tree, nodes: Sequence[Node]) -> Generator[tuple[Question, ...], list[Any], None]:
    """Set the values of these nodes. An end has value 1, unless ends are compared."""
    unscored = [node for node in nodes if tree.compares or not node.state.done]
    if unscored:
        [values] = yield (StateValue(tuple(node.state for node in unscored)),)
        for node, value in zip(unscored, values, strict=True):
            node.value = value
    for node in nodes:
        if node.state.done and not tree.compares:
            node.value = 1.0


def with_best_end(search: Search) -> Search:
    """Run the search, then choose the end of the greatest value."""
    tree: Tree = yield from search
    tree.pick()
    return tree


def with_lessons(search: Search, most: int) -> Search:
    """Run the search, then set the correct values of at most `most` of its states as lessons."""
    tree: Tree = yield from search
    pairs = values_to_learn(tree, most)
    if pairs:
        states = tuple(node.state for node, _ in pairs)
        [moves] = yield (ValueTarget(states, tuple(ends for _, ends in pairs)),)
        targets = zip(pairs, moves, strict=True)
        tree.lessons = [(node, replace(move, complete=True)) for (node, _), move in targets if move]
    return tree


def values_to_learn(tree: Tree, most: int) -> list[tuple[Node, bool]]:
    """Return at most `most` states, each with whether an end was found from it.

    Half are states from which one was found; the other half are the states without one in which most moves
    were drawn, alternating. A tree without an end teaches nothing, since each of its states may still have
    one. Source: HTPS, section 5.1, where a state that was visited often and not proved counts as 0.
    """
    ending = tree.ending()
    good = [node for node in tree.nodes if node.number in ending and not (node.state.done or node.parts)]
    bad = sorted((n for n in tree.nodes if n.number not in ending and n.draws), key=lambda n: -n.draws)
    pairs = min(most // 2, len(good), len(bad))
    nodes = [node for pair in zip(thin(good, pairs), bad, strict=False) for node in pair]
    return [(node, node.number in ending) for node in nodes]
