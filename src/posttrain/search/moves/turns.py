"""Turns of an environment as moves: each is a whole response, and the reply is where it leads.

    State.shown   the conversation so far
    State.key     what the environment holds, where that is plain data: of a pure environment nothing else
                  decides what comes after. Otherwise the conversation.
    State.held    what the environment holds

An end that is right is an end of the search; any other is a move that leads nowhere, under the class of its
verdict.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from posttrain.envs.protocol import Env, Start, Turn, broken_turn, guarded_reply, guarded_start, unfit
from posttrain.process.workers import Failed, Workers
from posttrain.search.protocol import Refused, State, Transitions
from posttrain.types import Message, Task, Verdict

_POLL_S = 1.0


class EnvTransitions(Transitions):
    """Where responses lead in an environment; one that is not ours is asked in worker processes.

    right: whether a verdict is of an end that was looked for.
    """

    def __init__(
        self,
        env: Env,
        right: Callable[[Verdict], bool],
        *,
        workers: int = 2,
        deadline_s: float = 10.0,
        memory_mb: int = 4096,
    ) -> None:
        self.env, self.right = env, right
        guards: dict[str, Any] = {"deadline_s": deadline_s, "memory_mb": memory_mb}
        self.workers = None if env.trusted else Workers(workers, **guards)

    def begin(self, tasks: Sequence[Task]) -> list[State | Refused]:
        """What each episode begins with."""
        started = self._called(guarded_start, [(self.env, task) for task in tasks])
        return [self._begun(task, start) for task, start in zip(tasks, started, strict=True)]

    def apply(self, asked: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """What each response leads to."""
        turns = self._called(guarded_reply, [(self.env, state.held, move) for state, move in asked])
        return [self._led(state, move, turn) for (state, move), turn in zip(asked, turns, strict=True)]

    def close(self) -> None:
        if self.workers:
            self.workers.close()

    def _called(self, call: Callable[..., Any], given: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What the environment says to each, or how it failed."""
        if self.workers is None:
            return [call(*each) for each in given]
        tickets = [self.workers.submit(call, *each) for each in given]
        found: dict[int, Any] = {}
        while len(found) < len(tickets):
            found |= dict(self.workers.poll(_POLL_S))
        return [each if isinstance(each := found[t], Failed) else each.value for t in tickets]

    def _begun(self, task: Task, start: Start | Verdict | Failed) -> State | Refused:
        if not isinstance(start, Start):
            return Refused(start.label, start.reason)
        if start.seats > 1:
            return Refused("seats", f"a search plays alone, and the game has {start.seats} seats")
        key = _key(task, start.state, start.messages)
        tools = tuple(start.tools)
        return State(task=task, shown=tuple(start.messages), tools=tools, key=key, held=start.state)

    def _led(self, state: State, move: str, turn: Turn | Failed) -> State | Refused:
        if isinstance(turn, Failed):
            turn = broken_turn(state.held, turn.label, turn.reason)
        if wrong := unfit(turn, seats=1):
            turn = broken_turn(state.held, "bad_turn", wrong)
        moves, said = (*state.moves, move), {"role": "assistant", "content": move}
        if not turn.verdicts:
            shown = (*state.shown, said, *turn.messages)
            key = _key(state.task, turn.state, shown)
            return replace(state, moves=moves, shown=shown, key=key, held=turn.state)
        [verdict] = turn.verdicts
        if not self.right(verdict):
            return Refused(verdict.label, verdict.reason)
        return State(
            task=state.task,
            moves=moves,
            key=_key(state.task, None, (*state.shown, said)),
            done=True,
            text="\n".join(moves),
            verdict=verdict,
        )


def _key(task: Task, held: Any, conversation: Sequence[Message]) -> str:
    """Equal for what is one state, in any process."""
    try:
        text = json.dumps(["held", _plain(held)]) if held is not None else ""
    except TypeError:
        text = ""
    text = text or json.dumps(["said", [dict(message) for message in conversation]])
    return f"{task.id}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _plain(value: Any) -> Any:
    """Data that JSON can spell, in one spelling for equal values; TypeError for anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return [type(value).__name__, value]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_plain(each) for each in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted(json.dumps(_plain(each)) for each in value)]
    if isinstance(value, dict):
        return ["dict", sorted(json.dumps([_plain(k), _plain(v)]) for k, v in value.items())]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, [[f.name, _plain(getattr(value, f.name))] for f in fields(value)]]
    raise TypeError(f"{type(value).__name__} is no plain data")
