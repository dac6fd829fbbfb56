"""Games of TextArena: alone, against oneself, or against an opponent that does not learn."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from posttrain.base.libraries import library, require, unmoved
from posttrain.base.usercode import cause, load_named
from posttrain.data.protocol import Games
from posttrain.process.interpreter import asked
from posttrain.types import RunError, Task, UserError, Verdict
from posttrain_envs.replayed import Game, Moved, Replayed, seeded

WHERE = "task.textarena"
SELF = "self"
_CHOICES = re.compile(r"\[[^\[\]\n]{1,20}\]")


@dataclass(frozen=True, kw_only=True)
class TextArena(Replayed):
    """A game of TextArena for one player, or for two of whom one is the policy, or both.

    Ids that end in -raw show what is new; others repeat the whole game at every turn, so that a conversation
    grows as the square of its turns. The reward comes at the end, as the library gives it: 1 for a win, so
    that only a whole one counts as right. In self-play each seat has a conversation and a reward of its
    own, and is compared with the same seat of the other games of its group.

    Labels: ended, invalid (by an invalid move of the policy; worth at most 0), truncated (`max_turns`).
    """

    id: str
    """As TicTacToe-v0-raw."""
    opponent: str = ""
    """Of a game for two: random (any of the moves that it is shown in brackets, as [4], where all are), or a
    function of yours, module:function or path/to/file.py:function, from what it is shown to its move; or
    self: the policy. Empty: there is none."""
    held_out_opponent: str = "random"
    """Of held-out games, where the opponent is self: whom it is tested against, from either seat in turn."""
    seat: int = 0
    """The policy's number among the players, 0 or 1; in self-play it has both."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of textarena.make."""
    max_turns: int = 30
    """Responses in an episode, of both seats in self-play."""
    asks = "Please answer with a move."

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, not {self.max_turns}")
        if self.seat not in ((0, 1) if self.opponent not in ("", SELF) else (0,)):
            raise ValueError(f"seat {self.seat} is not among the players")

    def opened(self, seed: int, who: Mapping[str, Any]) -> "_TextArenaGame":
        """The game, reset with this seed, when it is the policy's turn."""
        return _TextArenaGame(replace(self, **who), seed)

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        tasks = textarena_tasks(self, games.train + games.held_out, seed, games.held_out)
        return tasks[: games.train], tasks[games.train :][:limit]


def textarena_tasks(env: TextArena, count: int, seed: int, held_out: int = 0) -> list[Task]:
    """Games of this kind, the last ones held out.

    Raises UserError, from a process of its own, if it cannot be played.
    """
    require("textarena", WHERE)
    tested = replace(env, opponent=env.held_out_opponent)
    for each in [env, tested] if env.opponent == SELF else [env]:
        asked(_check, asdict(each), name=WHERE)
    tasks = seeded(env.id, count, "You play a game. Each time, answer with your move alone.", seed, WHERE)
    if env.opponent != SELF or not held_out:
        return tasks
    who = [{"opponent": env.held_out_opponent, "seat": n % 2} for n in range(held_out)]
    tests = zip(tasks[-held_out:], who, strict=True)
    return [*tasks[:-held_out], *(replace(task, fields={**task.fields, **its}) for task, its in tests)]


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
        done, _ = self._game.step(action=move)
        return self._over() if done else self._until_ours()

    def _until_ours(self) -> Moved:
        """The opponent's moves, and what the policy then sees."""
        while True:
            seat, seen = self._game.get_observation()
            text = _text(seen, seat)
            if seat == self._spec.seat or self._opponent is None:
                return Moved(shown=text, seat=seat if self.seats > 1 else 0)
            done, _ = self._game.step(action=self._opponent(text))
            if done:
                return self._over()

    def _over(self) -> Moved:
        """The end; RunError where it was the opponent who broke the rules, for nobody won then."""
        rewards, info = self._game.close()
        ours = range(self.seats) if self.seats > 1 else [self._spec.seat]
        verdicts = tuple(_verdict((rewards or {}).get(n, 0.0), info.get(n, {})) for n in ours)
        mine = verdicts[0]
        if all(v.label != "invalid" for v in verdicts) and any(
            each.get("invalid_move") for each in info.values()
        ):
            raise RunError("play", f"the opponent {self._spec.opponent} made an invalid move")
        if self.seats > 1:
            return Moved(label=mine.label, reason=mine.reason, verdicts=verdicts)
        return Moved(reward=mine.score or 0.0, label=mine.label, reason=mine.reason)


def _verdict(reward: float, info: Mapping[str, Any]) -> Verdict:
    """What a player has earned."""
    broke, reason = bool(info.get("invalid_move")), str(info.get("reason", ""))
    score = min(float(reward), 0.0) if broke else float(reward)
    return Verdict(score=score, label="invalid" if broke else "ended", reason=reason)


def _text(seen: Any, seat: int) -> str:
    """What a player sees, without what it said itself."""
    if isinstance(seen, str):
        return seen.strip()
    kept = (text for sender, text, kind in seen if kind.name != "PLAYER_ACTION" or sender not in (seat, -1))
    return "\n".join(text.strip() for text in kept)


def _opponent(name: str, seed: int) -> Callable[[str], str]:
    """From what it is shown to its move."""
    if name != "random":
        function: Callable[[str], str] = load_named(name)
        return lambda text: str(function(text))
    draw = random.Random(seed)

    def any_choice(text: str) -> str:
        listed: list[list[str]] = [_CHOICES.findall(line) for line in text.splitlines()]
        choices = next(filter(None, reversed(listed)), None)
        if choices is None:
            raise RunError("play", "a random opponent is shown no choices in brackets")
        return draw.choice(choices)

    return any_choice


def _check(plain: Mapping[str, Any]) -> None:
    """UserError for a game that cannot be made or begun; called in a process of its own."""
    env = TextArena(**plain)
    with unmoved():
        try:
            game = env.opened(0, {})
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
