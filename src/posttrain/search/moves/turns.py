"""Turns of an environment as moves: each is a whole response, and the reply leads to the next state.

    State.shown      the conversation so far
    State.key        the environment's state where it is plain data, since in a pure environment nothing else
                     decides what follows; otherwise the conversation
    State.env_state  the environment's state

A right end is an end of the search; any other is a move that leads nowhere, with the class of its verdict.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from posttrain.envs.protocol import Env, Start, Turn, broken_turn, guarded_reply, guarded_start, seat_fault
from posttrain.process.workers import Failed, Workers
from posttrain.search.protocol import Refused, State, Transitions
from posttrain.types import Message, Task, Verdict

_POLL_S = 1.0


class EnvTransitions(Transitions):
    """Where responses lead in an environment; an untrusted one runs in worker processes.

    right: return True for the verdict of an end that the search looks for.
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
        """Return the initial state of each episode."""
        started = self._call(guarded_start, [(self.env, task) for task in tasks])
        return [self._initial(task, start) for task, start in zip(tasks, started, strict=True)]

    def apply(self, pairs: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """Return where each response leads."""
        turns = self._call(guarded_reply, [(self.env, state.env_state, move) for state, move in pairs])
        return [self._next(state, move, turn) for (state, move), turn in zip(pairs, turns, strict=True)]

    def close(self) -> None:
        if self.workers:
            self.workers.close()

    def _call(self, call: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call the environment for each of these arguments and return its answers or failures."""
        if self.workers is None:
            return [call(*values) for values in arguments]
        tickets = [self.workers.submit(call, *values) for values in arguments]
        results: dict[int, Any] = {}
        while len(results) < len(tickets):
            results |= dict(self.workers.poll(_POLL_S))
        return [result if isinstance(result := results[t], Failed) else result.value for t in tickets]

    def _initial(self, task: Task, start: Start | Verdict | Failed) -> State | Refused:
        if not isinstance(start, Start):
            return Refused(start.label, start.reason)
        if start.seats > 1:
            return Refused("seats", f"a search plays alone, and the game has {start.seats} seats")
        key = _key(task, start.state, start.messages)
        tools = tuple(start.tools)
        return State(task=task, shown=tuple(start.messages), tools=tools, key=key, env_state=start.state)

    def _next(self, state: State, move: str, turn: Turn | Failed) -> State | Refused:
        if isinstance(turn, Failed):
            turn = broken_turn(state.env_state, turn.label, turn.reason)
        if wrong := seat_fault(turn, seats=1):
            turn = broken_turn(state.env_state, "bad_turn", wrong)
        moves, message = (*state.moves, move), {"role": "assistant", "content": move}
        if not turn.verdicts:
            conversation = (*state.shown, message, *turn.messages)
            key = _key(state.task, turn.state, conversation)
            return replace(state, moves=moves, shown=conversation, key=key, env_state=turn.state)
        [verdict] = turn.verdicts
        if not self.right(verdict):
            return Refused(verdict.label, verdict.reason)
        return State(
            task=state.task,
            moves=moves,
            key=_key(state.task, None, (*state.shown, message)),
            done=True,
            text="\n".join(moves),
            verdict=verdict,
        )


def _key(task: Task, env_state: Any, conversation: Sequence[Message]) -> str:
    """Return a key that is equal for equal states, in any process."""
    try:
        text = json.dumps(["held", _plain(env_state)]) if env_state is not None else ""
    except TypeError:
        text = ""
    text = text or json.dumps(["said", [dict(message) for message in conversation]])
    return f"{task.id}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _plain(value: Any) -> Any:
    """Return data in a form that JSON spells equally for equal values. Raise TypeError for any other data."""
    if value is None or isinstance(value, bool | int | float | str):
        return [type(value).__name__, value]
    if isinstance(value, list | tuple):
        return [type(value).__name__, [_plain(item) for item in value]]
    if isinstance(value, set | frozenset):
        return ["set", sorted(json.dumps(_plain(item)) for item in value)]
    if isinstance(value, dict):
        return ["dict", sorted(json.dumps([_plain(k), _plain(v)]) for k, v in value.items())]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, [[f.name, _plain(getattr(value, f.name))] for f in fields(value)]]
    raise TypeError(f"{type(value).__name__} is not plain data")
