"""A search as plain data: its costs, and each state with the moves drawn there.

It is the same in `trees/` of a run, in the output of `posttrain search`, and in the report. All numbers and
names are plain JSON, so samplers can send it to the learner as it is.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from posttrain.search.choice import SearchChoice
from posttrain.search.protocol import Refused, State
from posttrain.search.tree import Edge, Node, Tree
from posttrain.search.values import values_to_learn
from posttrain.types import Task


def record(task: Task, tree: Tree | Refused, choice: SearchChoice) -> dict[str, Any]:
    """Return what a search of this task did; without states if the task could not be started.

    moves, tokens, followed, merged   moves drawn, their tokens, moves applied, moves that led to known states
    refused, refusals                 moves that led nowhere, by class and in all
    model_s, prover_s                 seconds of the engine and of Transitions; of work for several searches
                                      together a share by the number of its moves
    asked                             states in the order in which they were asked for moves, once each time
    lesson (of a state)               1 if an end was found from it, 0 if not, of those that teach values
    ends                              ends that were compared, where the best is taken and not the first
    """
    numbers = {k: v for k, v in task.fields.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    fields: dict[str, Any] = {"strategy": choice.strategy, "budget": choice.moves, "fields": numbers}
    if isinstance(tree, Refused):
        return fields | {"moves": 0}
    solution = {id(edge) for edge in tree.found}
    lessons = {node.number: int(ends) for node, ends in values_to_learn(tree, len(tree.nodes))}
    return fields | {
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
        "states": [_state(node, solution, lessons) for node in tree.nodes],
    }


def bounded(tree: Mapping[str, Any], most: int) -> dict[str, Any]:
    """Return a record with its first `most` states, and those on the path of the solution.

    >>> states = [{"number": n, "moves": [{"to": n + 1, "found": n == 3}]} for n in range(6)]
    >>> [state["number"] for state in bounded({"states": states}, 2)["states"]]
    [0, 1, 3, 4]
    """
    states = tree.get("states", ())
    solution = {s["number"] for s in states if any(move.get("found") for move in s["moves"])}
    solution |= {move["to"] for s in states for move in s["moves"] if move.get("found")}
    return {**tree, "states": [s for n, s in enumerate(states) if n < most or s["number"] in solution]}


def _state(node: Node, solution: set[int], lessons: Mapping[int, int]) -> dict[str, Any]:
    return {
        "number": node.number,
        "shown": _text(node.state),
        "key": hashlib.blake2b(node.state.key.encode(), digest_size=12).hexdigest(),
        "depth": node.depth,
        "logp": node.logp,
        "value": node.value,
        "visits": node.visits,
        "done": node.state.done,
        **({"lesson": lessons[node.number]} if node.number in lessons else {}),
        **({"parts": [part.number for part in node.parts]} if node.parts else {}),
        "moves": [_move(edge, id(edge) in solution) for edge in node.edges.values()],
    }


def _text(state: State) -> str:
    """Return the text of a state for people: the answer so far, or the message that asks for a move."""
    return state.answer or (state.shown[-1]["content"] if state.shown else "")


def _move(edge: Edge, on_path: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"text": edge.move.text, "logp": edge.move.logp, "said": edge.draws}
    if edge.move.sketch:
        fields["sketch"] = True
    if edge.visits:
        fields |= {"visits": edge.visits, "value": edge.total / edge.weight}
    if edge.target:
        fields["to"] = edge.target.number
    if edge.refused:
        fields |= {"refused": edge.refused.label, "reason": edge.refused.reason}
    return fields | ({"found": True} if on_path else {})
