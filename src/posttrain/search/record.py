"""A search as plain data: what it spent, and each state with the moves that were said in it.

The same in `trees/` of a run, in what `posttrain search` prints, and in the report; every number and name is
plain JSON, so what a sampler hands over can be written down wherever the learner is.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from posttrain.search.choice import SearchChoice
from posttrain.search.protocol import Refused, State
from posttrain.search.tree import Edge, Node, Tree
from posttrain.types import Task


def record(task: Task, tree: Tree | Refused, choice: SearchChoice) -> dict[str, Any]:
    """What a search of this task did; without states where it could not begin.

    moves, tokens, followed, merged   moves drawn, their tokens, of them applied, of these led to known states
    refused, refusals                 moves that led nowhere, by class and in all
    model_s, prover_s                 seconds of the engine and of Steps: of what was done for many searches
                                      at once a share by the number of its moves
    asked                             the states that spoke, in this order, a state as often as it did
    ends                              the ends that were compared, where the best is taken and not the first
    """
    numbers = {k: v for k, v in task.fields.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    told: dict[str, Any] = {"strategy": choice.strategy, "budget": choice.moves, "fields": numbers}
    if isinstance(tree, Refused):
        return told | {"moves": 0}
    way = {id(edge) for edge in tree.found}
    return told | {
        "moves": tree.drawn,
        "tokens": tree.tokens,
        "followed": tree.applied,
        "merged": tree.merged,
        "refused": dict(tree.refused),
        "refusals": sum(tree.refused.values()),
        "model_s": round(tree.model_s, 4),
        "prover_s": round(tree.prover_s, 4),
        "asked": list(tree.asked),
        **({"ends": len(tree.ends)} if tree.compares else {}),
        "states": [_state(node, way) for node in tree.nodes],
    }


def bounded(found: Mapping[str, Any], most: int) -> dict[str, Any]:
    """The same with at most so many states, the first ones, and those on the way that was found.

    >>> states = [{"number": n, "moves": [{"to": n + 1, "found": n == 3}]} for n in range(6)]
    >>> [state["number"] for state in bounded({"states": states}, 2)["states"]]
    [0, 1, 3, 4]
    """
    states = found.get("states", ())
    way = {s["number"] for s in states if any(move.get("found") for move in s["moves"])}
    way |= {move["to"] for s in states for move in s["moves"] if move.get("found")}
    return {**found, "states": [s for n, s in enumerate(states) if n < most or s["number"] in way]}


def _state(node: Node, way: set[int]) -> dict[str, Any]:
    return {
        "number": node.number,
        "shown": _shown(node.state),
        "key": hashlib.blake2b(node.state.key.encode(), digest_size=12).hexdigest(),
        "depth": node.depth,
        "logp": node.logp,
        "value": node.value,
        "visits": node.visits,
        "done": node.state.done,
        **({"parts": [part.number for part in node.parts]} if node.parts else {}),
        "moves": [_said(edge, id(edge) in way) for edge in node.edges.values()],
    }


def _shown(state: State) -> str:
    """What a person needs to see of a state: what was said of its answer so far, or what asks for a move."""
    return state.said or (state.shown[-1]["content"] if state.shown else "")


def _said(edge: Edge, found: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"text": edge.move.text, "logp": edge.move.logp, "said": edge.said}
    if edge.move.sketch:
        said["sketch"] = True
    if edge.visits:
        said |= {"visits": edge.visits, "value": edge.total / edge.weight}
    if edge.target:
        said["to"] = edge.target.number
    if edge.refused:
        said |= {"refused": edge.refused.label, "reason": edge.refused.reason}
    return said | ({"found": True} if found else {})
