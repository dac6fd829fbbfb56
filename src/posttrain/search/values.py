"""Values from the policy itself: it is asked whether a state ends well, and says 1 or 0.

    V(s) = π(1 | s, ask) / (π(1 | s, ask) + π(0 | s, ask))

So a value needs no head, and is sampled, learnt, saved and handed over as any token is. HTPS takes the value
from two tokens of its model too (arXiv:2205.11491, section 4.3), there with a decoder of its own.
"""

from dataclasses import replace
from math import exp

from posttrain.base.chat import Chat
from posttrain.search.protocol import State, Target
from posttrain.search.tree import Search, Tree, spread
from posttrain.types import UserError

ASK = "Can this be done? 1 or 0"
SAID = ("0", "1")
"""What is said of a state that does not end well, and of one that does."""


def value_prompt(chat: Chat, state: State) -> list[int]:
    """The tokens that ask for a state's value. UserError if it cannot be shown."""
    if not state.shown:
        raise UserError("there is nothing to ask about")
    *before, last = state.shown
    asked = "\n".join(part for part in (last["content"], state.said, ASK) if part)
    return chat.render([*before, {**last, "content": asked}])


def value_of(no: float, yes: float) -> float:
    """V from the log-probabilities of the two answers.

    >>> value_of(-1.0, -1.0), round(value_of(-3.0, -1.0), 3)
    (0.5, 0.881)
    """
    return 1 / (1 + exp(min(no - yes, 700)))


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
    nodes = [node for pair in zip(spread(good, pairs), bad, strict=False) for node in pair]
    if nodes:
        states = tuple(node.state for node in nodes)
        [said] = yield (Target(states, tuple(node.number in ending for node in nodes)),)
        told = zip(nodes, said, strict=True)
        tree.lessons = [(node, replace(move, ended=True)) for node, move in told if move]
    return tree
