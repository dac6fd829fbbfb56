"""Games of other libraries as pure functions: a game is its seed and its moves, replayed for each turn.

A live game cannot be sent to a worker, killed at a deadline or continued in a resumed run. Replaying costs a
number of moves that grows as the square of the turns, which are few.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

from posttrain.base.libraries import preserve_globals
from posttrain.data.protocol import Games
from posttrain.envs.protocol import Start, Turn
from posttrain.types import Message, RunError, Task, UserError, Verdict


@dataclass(frozen=True, slots=True)
class Moves:
    """The state of an episode: the seed of its game and the moves so far."""

    seed: int
    moves: tuple[str, ...] = ()
    """The moves; "" for a response that named no move, which costs a turn."""
    who: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the task, such as the players."""
    opening: tuple[Message, ...] = ()
    """Messages to a seat before its first move."""
    led: str = ""
    """Digest of all observations and rewards so far; a replay must reproduce it."""


@dataclass(frozen=True, slots=True)
class Moved:
    """The result of a move."""

    shown: str = ""
    """What the player whose turn it is sees now."""
    reward: float = 0.0
    label: str = ""
    """How the game ended; "" while it lasts."""
    reason: str = ""
    seat: int = 0
    """Number of the player whose turn it is."""
    verdicts: tuple[Verdict, ...] = ()
    """One verdict for each seat at the end of a game of several seats."""


class Game(Protocol):
    """A live game, which exists during one call only."""

    seats: int = 1
    """Number of players that are the policy."""
    first: int = 0
    """Number of the seat that begins."""

    def shown(self) -> str:
        """Return what the first player sees at the start."""
        ...

    def move(self, response: str) -> str | None:
        """Return the move that a response names, or None."""
        return response.strip() or None

    def play(self, move: str) -> Moved: ...

    def close(self) -> None:
        """Free the resources of the game."""
        return


class Replayed:
    """An environment of replayed games, whose tasks have a field `seed`; it runs in workers only."""

    trusted: ClassVar[bool] = False
    max_turns: int
    asks: str
    """Reply to a response without a move."""

    def open_game(self, seed: int, who: Mapping[str, Any]) -> Game:
        """Start a game. who: the other fields of its task."""
        raise NotImplementedError

    def tasks(self, count: int, seed: int, held_out: int) -> list[Task]:
        """Return the tasks of `count` games, the last `held_out` of them held out."""
        raise NotImplementedError

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        tasks = self.tasks(games.train + games.held_out, seed, games.held_out)
        return tasks[: games.train], tasks[games.train :][:limit]

    def start(self, task: Task) -> Start:
        """Return the task's message with the game's first observation. Raises UserError without a seed."""
        seed = task.fields.get("seed")
        if not isinstance(seed, int):
            raise UserError(task.source, f"task {task.id!r} has no seed")
        who = {name: value for name, value in task.fields.items() if name != "seed"}
        with preserve_globals():
            game = self.open_game(seed, who)
            try:
                view, seats, first = game.shown(), game.seats, game.first
            finally:
                game.close()
        opening = task.messages if seats > 1 else ()
        state = Moves(seed, who=who, opening=opening, led=_digest(view, []))
        return Start(state=state, messages=_with_view(task.messages, view), seats=seats, seat=first)

    def reply(self, state: Moves, response: str) -> Turn:
        """Replay the game and play the response. Raises RunError if the replay differs."""
        with preserve_globals():
            game = self.open_game(state.seed, state.who)
            try:
                view = game.shown()
                before = [game.play(move) for move in state.moves if move]
                if _digest(view, before) != state.led:
                    raise RunError(
                        "replay a game",
                        "the same moves had another result this time: its seed does not determine the game",
                    )
                seats = [game.first, *(moved.seat for moved in before)]
                move = game.move(response)
                moved = Moved(shown=self.asks, seat=seats[-1]) if move is None else game.play(move)
            finally:
                game.close()
        led = _digest(view, [*before, *([] if move is None else [moved])])
        after = replace(state, moves=(*state.moves, move or ""), led=led)
        label, reason = moved.label, moved.reason
        if not label and len(after.moves) >= self.max_turns:
            label, reason = "truncated", f"not over after {self.max_turns} turns"
        if not label:
            messages: tuple[Message, ...] = ({"role": "user", "content": moved.shown},)
            if moved.seat not in seats:
                messages = _with_view(state.opening, moved.shown)
            return Turn(state=after, messages=messages, reward=moved.reward or None, seat=moved.seat)
        if game.seats > 1:
            cut = (Verdict(score=0.0, label=label, reason=reason),) * game.seats
            return Turn(state=after, done=True, verdict=moved.verdicts or cut)
        score = sum((result.reward for result in before), moved.reward)
        verdict = Verdict(score=score, label=label, reason=reason)
        return Turn(state=after, reward=moved.reward, done=True, verdict=verdict)


def _digest(view: str, moved: Sequence[Moved]) -> str:
    return hashlib.blake2b(repr((view, moved)).encode(), digest_size=12).hexdigest()


def _with_view(messages: Sequence[Message], view: str) -> tuple[Message, ...]:
    """Return a task's messages with the game's observation appended."""
    *before, last = messages
    return (*before, {**last, "content": f"{last['content']}\n\n{view}"})


def seeded_tasks(name: str, count: int, rules: str, seed: int, source: str) -> list[Task]:
    """Return games whose seeds are determined by the run's seed and their position, and lie far apart."""
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
