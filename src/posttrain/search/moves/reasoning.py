"""Steps of an answer as moves: each goes behind those before it, and the last one ends the answer."""

from collections.abc import Sequence

from posttrain.search.protocol import Refused, State, Transitions
from posttrain.types import Task


class ReasoningTransitions(Transitions):
    """Answers that are written step by step; `separator` ends a step, and a step without it the answer."""

    def __init__(self, separator: str) -> None:
        self.separator = separator
        self.stop: tuple[str, ...] = (separator,)

    def begin(self, tasks: Sequence[Task]) -> list[State | Refused]:
        """The question, and nothing said."""
        return [State(task=task, shown=task.messages, key=f"{task.id}:") for task in tasks]

    def apply(self, asked: Sequence[tuple[State, str]]) -> list[State | Refused]:
        """The answer so far with this step behind it."""
        return [self._led(state, move) for state, move in asked]

    def _led(self, state: State, move: str) -> State | Refused:
        if not move.strip():
            return Refused("form", "the step is empty")
        said, done = state.said + move, not move.endswith(self.separator)
        return State(
            task=state.task,
            moves=(*state.moves, move),
            shown=state.shown,
            said=said,
            key=f"{state.task.id}:{said}",
            done=done,
            text=said if done else "",
        )
