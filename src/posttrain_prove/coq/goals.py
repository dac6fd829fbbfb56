"""What Coq prints of goals, read: each with its hypotheses, and as a policy reads them."""

import hashlib
import re
from collections.abc import Sequence

from posttrain.search.protocol import State
from posttrain.types import Message, Task

_SORT = re.compile(r"^[\w', ]+ : (?:Prop|Set|Type)$")
_GOAL = re.compile(
    r"^(?:\d+ (?:focused )?goals?|goal \d+)(?: \(shelved: \d+\))?(?: \(ID \d+\))?(?: is:)?\n", re.MULTILINE
)
_LINE = "============================\n"
PROVED = "No more goals."
PART_PROVED = "This subproof is complete"
SHELVED = re.compile(r"\(shelved: \d+\)")
_HAS = "match goal with |- ?a => has_evar a | _ : ?a |- _ => has_evar a | _ := ?a |- _ => has_evar a end"
CLOSED = f"all: assert_fails (idtac; {_HAS})."
"""Accepted if no goal has an existential variable; those that are shown are not all, as some are implicit."""


def shown(goals: Sequence[str]) -> tuple[Message, ...]:
    """The first of these goals, and what is to be proved in the others."""
    waiting = [f"then: {goal.rpartition(_LINE)[2].strip()}" for goal in goals[1:]]
    return ({"role": "user", "content": "\n".join([_short(goals[0]), *waiting])},)


def _short(goal: str) -> str:
    """A goal for a policy to read: without the lines that only say what is a proposition or a type."""
    lines = goal.replace(_LINE, "======\n").splitlines()
    return "\n".join(line for line in lines if not _SORT.search(line))


def goals_of(output: str) -> list[str]:
    """The goals that `Show` prints, without their numbers; of all but the first only what is to be proved.

    >>> goals_of("1 goal (ID 4)\\n  \\n  A : Prop\\n  h : A\\n  ============================\\n  A\\n\\n")
    ['A : Prop\\nh : A\\n============================\\nA']
    """
    parts = _GOAL.split(output)[1:]
    return ["\n".join(line.strip() for line in part.splitlines() if line.strip()) for part in parts]


def alone(state: State) -> Task | None:
    """A state of one goal as a theorem of its own, which begins with its hypotheses; None if one is defined.

    >>> task = Task(id="t", messages=(), fields={"name": "goal", "header": "Require Import Arith."})
    >>> made = alone(State(task=task, key=f"a, b : nat\\nh : a = b\\n{_LINE}b = a"))
    >>> made.fields["statement"], made.fields["opening"], made.fields["header"]
    ('forall (a b : nat) (h : a = b), b = a', 'intros a b h.', 'Require Import Arith.')
    """
    given, _, goal = state.key.rpartition(_LINE)
    lines = [line.partition(" : ") for line in given.splitlines()]
    if any(":=" in name for name, _, _ in lines) or not goal or _LINE in given:
        return None
    names = [name.replace(",", "") for name, _, _ in lines]
    binders = " ".join(f"({name} : {kind})" for name, (_, _, kind) in zip(names, lines, strict=True))
    fields = {k: state.task.fields[k] for k in ("name", "header", "definitions") if k in state.task.fields}
    fields["statement"] = f"forall {binders}, {goal}" if lines else goal
    fields["opening"] = f"intros {' '.join(names)}." if lines else ""
    digest = hashlib.blake2b(fields["statement"].encode(), digest_size=8).hexdigest()
    return Task(id=f"goal-{digest}", messages=state.shown, fields=fields, source=state.task.source)
