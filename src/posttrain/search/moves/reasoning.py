"""Steps of an answer as moves: each is appended to those before it, and the last one ends the answer."""

from collections.abc import Sequence
from typing import ClassVar

from posttrain.search.protocol import Refused, State, Transitions
from posttrain.types import Task


class ReasoningTransitions(Transitions):
    """Answers written step by step: `separator` ends a step, and a step without it ends the answer."""

    judges: ClassVar[bool] = False

    def __init__(self, separator: str) -> None:
        self.separator = separator
        self.stop: tuple[str, ...] = (separator,)

    def begin(self, tasks: Sequence[Task]) -> list[State | Refused]:
        """Return the question with an empty answer."""
        return [State(task=task, shown=task.messages, key=f"{task.id}:") for task in tasks]

    def apply(self, pairs: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """Append each step to the answer so far."""
        return [self._append(state, move) for state, move in pairs]

    def _append(self, state: State, move: str) -> State | Refused:
        if not move.strip():
            return Refused("form", "the step is empty")
        answer, complete = state.answer + move, not move.endswith(self.separator)
        return State(
            task=state.task,
            moves=(*state.moves, move),
            shown=state.shown,
            answer=answer,
            key=f"{state.task.id}:{answer}",
            done=complete,
            text=answer if complete else "",
        )
