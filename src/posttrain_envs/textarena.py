"""Games of TextArena: alone, against oneself, or against an opponent that does not learn."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from posttrain.base.libraries import library, preserve_globals, require
from posttrain.base.usercode import cause, load_named
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import RunError, Task, UserError, Verdict
from posttrain_envs.replayed import Game, Moved, Replayed, seeded_tasks

WHERE = "task.textarena"
SELF = "self"
_CHOICES = re.compile(r"\[[^\[\]\n]{1,20}\]")


@dataclass(frozen=True, kw_only=True)
class TextArena(Replayed):
    """A game of TextArena for one player, or for two of whom one is the policy, or both.

    Ids that end in -raw send only what is new; others repeat the whole game at every turn, so that a
    conversation grows as the square of its turns. The reward comes at the end and is the library's: 1 for a
    win, so only a full win counts as right. In self-play each seat has its own conversation and reward, and
    is compared with the same seat of the other games of its group.

    Labels: ended, invalid (by an invalid move of the policy; worth at most 0), truncated (`max_turns`).
    """

    id: str
    """Id of the game, for example TicTacToe-v0-raw."""
    opponent: str = ""
    """Opponent in a game for two: random (any of the moves that it sees in brackets, such as [4], if all are
    listed so); or a function of yours, module:function or path/to/file.py:function, from the text that it
    sees to its move; or self: the policy. Empty: a game for one."""
    held_out_opponent: str = "random"
    """Opponent in held-out games, if the opponent is self; the policy plays either seat in turn."""
    seat: int = 0
    """The policy's number among the players, 0 or 1; in self-play it has both."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function textarena.make."""
    max_turns: int = 30
    """Responses in an episode, of both seats in self-play."""
    asks = "Please answer with a move."

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, not {self.max_turns}")
        if self.seat not in ((0, 1) if self.opponent not in ("", SELF) else (0,)):
            raise ValueError(f"seat {self.seat} is not among the players")

    def open_game(self, seed: int, who: Mapping[str, Any]) -> "_TextArenaGame":
        """The game, reset with this seed, when it is the policy's turn."""
        return _TextArenaGame(replace(self, **who), seed)

    def tasks(self, count: int, seed: int, held_out: int) -> list[Task]:
        return textarena_tasks(self, count, seed, held_out)


def textarena_tasks(env: TextArena, count: int, seed: int, held_out: int = 0) -> list[Task]:
    """Return games of this kind, the last ones held out. Raises UserError if it cannot be played.

    The game is checked in a process of its own.
    """
    require("textarena", WHERE)
    tested = replace(env, opponent=env.held_out_opponent)
    for spec in [env, tested] if env.opponent == SELF else [env]:
        call_in_fresh_process(_check, asdict(spec), name=WHERE)
    tasks = seeded_tasks(
        env.id, count, "You play a game. Each time, answer with your move alone.", seed, WHERE
    )
    if env.opponent != SELF or not held_out:
        return tasks
    players = [{"opponent": env.held_out_opponent, "seat": n % 2} for n in range(held_out)]
    tests = zip(tasks[-held_out:], players, strict=True)
    return [*tasks[:-held_out], *(replace(task, fields={**task.fields, **fields}) for task, fields in tests)]


class _TextArenaGame(Game):
    def __init__(self, env: TextArena, seed: int) -> None:
        self._spec, self.seats = env, 2 if env.opponent == SELF else 1
        self._game = library("textarena").make(env.id, **env.options)
        self._opponent = _opponent(env.opponent, seed) if env.opponent not in ("", SELF) else None
        self._game.reset(num_players=2 if env.opponent else 1, seed=seed)
        self._first = self._until_ours()
        self.first = self._first.seat

    def shown(self) -> str:
        return self._first.shown

    def play(self, move: str) -> Moved:
        is_over, _ = self._game.step(action=move)
        return self._over() if is_over else self._until_ours()

    def _until_ours(self) -> Moved:
        """Play the opponent's moves, and return what the policy sees next."""
        while True:
            seat, observation = self._game.get_observation()
            text = _text(observation, seat)
            if seat == self._spec.seat or self._opponent is None:
                return Moved(shown=text, seat=seat if self.seats > 1 else 0)
            is_over, _ = self._game.step(action=self._opponent(text))
            if is_over:
                return self._over()

    def _over(self) -> Moved:
        """End the game. Raises RunError if the opponent made an invalid move, as the win is not earned."""
        rewards, info = self._game.close()
        ours = range(self.seats) if self.seats > 1 else [self._spec.seat]
        verdicts = tuple(_verdict((rewards or {}).get(n, 0.0), info.get(n, {})) for n in ours)
        mine = verdicts[0]
        if all(v.label != "invalid" for v in verdicts) and any(
            player.get("invalid_move") for player in info.values()
        ):
            raise RunError("play", f"the opponent {self._spec.opponent} made an invalid move")
        if self.seats > 1:
            return Moved(label=mine.label, reason=mine.reason, verdicts=verdicts)
        return Moved(reward=mine.score or 0.0, label=mine.label, reason=mine.reason)


def _verdict(reward: float, info: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a player."""
    is_invalid, reason = bool(info.get("invalid_move")), str(info.get("reason", ""))
    score = min(float(reward), 0.0) if is_invalid else float(reward)
    return Verdict(score=score, label="invalid" if is_invalid else "ended", reason=reason)


def _text(observation: Any, seat: int) -> str:
    """Return what a player sees, without its own messages."""
    if isinstance(observation, str):
        return observation.strip()
    texts = (
        text for sender, text, kind in observation if kind.name != "PLAYER_ACTION" or sender not in (seat, -1)
    )
    return "\n".join(text.strip() for text in texts)


def _opponent(name: str, seed: int) -> Callable[[str], str]:
    """Return a function from the text that the opponent sees to its move."""
    if name != "random":
        function: Callable[[str], str] = load_named(name)
        return lambda text: str(function(text))
    draw = random.Random(seed)

    def any_choice(text: str) -> str:
        listed: list[list[str]] = [_CHOICES.findall(line) for line in text.splitlines()]
        choices = next(filter(None, reversed(listed)), None)
        if choices is None:
            raise RunError("play", "a random opponent sees no choices in brackets")
        return draw.choice(choices)

    return any_choice


def _check(options: Mapping[str, Any]) -> None:
    """Raise UserError if a game cannot be made or begun. Runs in a process of its own."""
    env = TextArena(**options)
    with preserve_globals():
        try:
            game = env.open_game(0, {})
        except UserError:
            raise
        except Exception as error:
            fix = "many games need downloads, keys or a newer Python"
            raise UserError(f"{WHERE}.id", f"{env.id} cannot be played: {cause(error)}", fix) from None
        if env.opponent != "random":
            return
        try:
            ours, moved = _opponent("random", 1), Moved(shown=game.shown())
            while not moved.label:
                moved = game.play(ours(moved.shown))
        except RunError:
            moved = Moved(label="invalid")
        if moved.label == "invalid":
            fix = "give a function of yours as its opponent"
            raise UserError(f"{WHERE}.opponent", f"{env.id} does not list its moves in brackets", fix)
