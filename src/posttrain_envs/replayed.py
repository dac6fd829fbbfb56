"""Games of other libraries as pure functions: a game is its seed and its moves, played again for each turn.

A live game is no value: it could not be sent to a worker, killed at a deadline or gone on with in a resumed
run. Replaying costs a number of moves that grows as the square of the turns, which are few.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from posttrain.base.libraries import unmoved
from posttrain.envs.protocol import Start, Turn
from posttrain.types import Message, RunError, Task, UserError, Verdict


@dataclass(frozen=True, slots=True)
class Moves:
    seed: int
    moves: tuple[str, ...] = ()
    """What was played; empty where the response named no move, which costs a turn."""
    who: Mapping[str, Any] = field(default_factory=dict)
    """What else the task says of the game: who plays it."""
    opening: tuple[Message, ...] = ()
    """What a seat is told before its first move."""
    led: str = ""
    """A digest of what was shown and paid so far: played again, it has to be the same."""


@dataclass(frozen=True, slots=True)
class Moved:
    shown: str = ""
    """What the player sees now whose turn it is."""
    reward: float = 0.0
    label: str = ""
    """How the game ended; empty if it goes on."""
    reason: str = ""
    seat: int = 0
    """Whose turn it is."""
    verdicts: tuple[Verdict, ...] = ()
    """Of a game of several seats, at its end, one for each."""


class Game(Protocol):
    """A live game, from its start to the end of one call."""

    seats: int = 1
    """How many of its players are the policy."""
    first: int = 0
    """Which of them begins."""

    def shown(self) -> str:
        """What it sees at first."""
        ...

    def move(self, said: str) -> str | None:
        """The move that a response names; None if it names none."""
        return said.strip() or None

    def play(self, move: str) -> Moved: ...

    def close(self) -> None:
        """Frees what the game holds."""
        return


class Replayed:
    """An environment of such games, whose tasks have a field `seed`; it runs in workers alone."""

    trusted: ClassVar[bool] = False
    max_turns: int
    asks: str
    """What a response without a move is told."""

    def opened(self, seed: int, who: Mapping[str, Any]) -> Game:
        """A new game; who: the other fields of its task."""
        raise NotImplementedError

    def start(self, task: Task) -> Start:
        """The task's message, and what its game shows; UserError for a task without a seed."""
        seed = task.fields.get("seed")
        if not isinstance(seed, int):
            raise UserError(task.source, f"task {task.id!r} has no seed")
        who = {name: value for name, value in task.fields.items() if name != "seed"}
        with unmoved():
            game = self.opened(seed, who)
            try:
                shown, seats, first = game.shown(), game.seats, game.first
            finally:
                game.close()
        opening = task.messages if seats > 1 else ()
        state = Moves(seed, who=who, opening=opening, led=_digest(shown, []))
        return Start(state=state, messages=_begun(task.messages, shown), seats=seats, seat=first)

    def reply(self, state: Moves, response: str) -> Turn:
        """What follows the response, after all that was played before; RunError if that went otherwise."""
        with unmoved():
            game = self.opened(state.seed, state.who)
            try:
                shown = game.shown()
                before = [game.play(move) for move in state.moves if move]
                if _digest(shown, before) != state.led:
                    raise RunError(
                        "replay a game",
                        "the same moves led elsewhere this time: its seed does not fix the game",
                    )
                told = [game.first, *(moved.seat for moved in before)]
                move = game.move(response)
                moved = Moved(shown=self.asks, seat=told[-1]) if move is None else game.play(move)
            finally:
                game.close()
        led = _digest(shown, [*before, *([] if move is None else [moved])])
        after = replace(state, moves=(*state.moves, move or ""), led=led)
        label, reason = moved.label, moved.reason
        if not label and len(after.moves) >= self.max_turns:
            label, reason = "truncated", f"not over after {self.max_turns} turns"
        if not label:
            messages: tuple[Message, ...] = ({"role": "user", "content": moved.shown},)
            if moved.seat not in told:
                messages = _begun(state.opening, moved.shown)
            return Turn(state=after, messages=messages, reward=moved.reward or None, seat=moved.seat)
        if game.seats > 1:
            cut = (Verdict(score=0.0, label=label, reason=reason),) * game.seats
            return Turn(state=after, done=True, verdict=moved.verdicts or cut)
        score = sum((each.reward for each in before), moved.reward)
        verdict = Verdict(score=score, label=label, reason=reason)
        return Turn(state=after, reward=moved.reward, done=True, verdict=verdict)


def _digest(shown: str, moved: Sequence[Moved]) -> str:
    return hashlib.blake2b(repr((shown, moved)).encode(), digest_size=12).hexdigest()


def _begun(messages: Sequence[Message], shown: str) -> tuple[Message, ...]:
    """A task's messages, with what its game shows behind them."""
    *before, last = messages
    return (*before, {**last, "content": f"{last['content']}\n\n{shown}"})


def seeded(name: str, count: int, rules: str, seed: int, source: str) -> list[Task]:
    """Games whose seeds are fixed by the run's and their position, and lie far apart."""
    numbers = [_number(f"{seed}/{name}/{i}") for i in range(count)]
    return [
        Task(
            id=f"{name}-{seed}-{i}",
            messages=({"role": "user", "content": rules},),
            fields={"seed": number},
            source=source,
        )
        for i, number in enumerate(numbers)
    ]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
