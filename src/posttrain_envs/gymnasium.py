"""Environments of Gymnasium in words: a board that is drawn as text, and a word for each action."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.base.libraries import library, require, unmoved
from posttrain.base.usercode import cause
from posttrain.data.protocol import Games
from posttrain.process.interpreter import asked
from posttrain.types import Task, UserError
from posttrain_envs.replayed import Game, Moved, Replayed, seeded

WHERE = "task.gymnasium"
_MARKED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0?m")
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class Gymnasium(Replayed):
    """An environment whose actions are words or texts, and whose states are shown as text.

    An action is the last of the words that the response names; where actions are texts, it is the response.
    Rewards arrive with the actions that earn them, and the score is their sum.

    Labels: ended (the environment says so), truncated (its time limit, or `max_turns`).
    """

    id: str
    """As FrozenLake-v1, or module:name-v0 for one that a module of yours registers."""
    actions: tuple[str, ...] = ()
    """A word for each action, in the order of their numbers; empty where actions are texts."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of gymnasium.make, as {is_slippery = false}."""
    rules: str = ""
    """What the first message says before what is seen; empty names the environment and its actions."""
    max_turns: int = 50
    """Responses in an episode, those included that name no action."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, not {self.max_turns}")
        if len({word.casefold() for word in self.actions}) < len(self.actions):
            raise ValueError("actions must be different words")
        if not all(word.strip() for word in self.actions):
            raise ValueError("an action must not be blank")

    @property
    def asks(self) -> str:  # type: ignore[override]
        """What a response without an action is told."""
        return f"Please answer with one of: {', '.join(self.actions)}."

    def opened(self, seed: int, who: Mapping[str, Any]) -> "_GymnasiumGame":
        """The environment, reset with this seed."""
        return _GymnasiumGame(self, seed)

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        tasks = gymnasium_tasks(self, games.train + games.held_out, seed)
        return tasks[: games.train], tasks[games.train :][:limit]


def gymnasium_tasks(env: Gymnasium, count: int, seed: int) -> list[Task]:
    """Games of this environment; UserError, from a process of its own, if it cannot be played in words."""
    require("gymnasium", WHERE)
    asked(_check, asdict(env), name=WHERE)
    rules = env.rules or f"You play {env.id.rpartition(':')[2]}."
    if not env.rules and env.actions:
        rules += f" Each time, answer with just one of: {', '.join(env.actions)}."
    return seeded(env.id, count, rules, seed, WHERE)


class _GymnasiumGame(Game):
    def __init__(self, env: Gymnasium, seed: int) -> None:
        self._actions = env.actions
        self._env = _made(env.id, env.options)
        words = "|".join(sorted(map(re.escape, env.actions), key=len, reverse=True))
        self._word = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)
        self._seen, _ = self._env.reset(seed=seed)

    def shown(self) -> str:
        if self._env.render_mode != "ansi":
            return str(self._seen)
        drawn = self._env.render()
        text = drawn if isinstance(drawn, str) else "\n".join(drawn)
        return _ESCAPE.sub("", _MARKED.sub(r"[\1]", text)).strip("\n")

    def move(self, said: str) -> str | None:
        if not self._actions:
            return said.strip() or None
        named = self._word.findall(said[-1000:])
        return named[-1].casefold() if named else None

    def play(self, move: str) -> Moved:
        words = [word.casefold() for word in self._actions]
        self._seen, reward, ended, truncated, _ = self._env.step(words.index(move) if words else move)
        label = "ended" if ended else "truncated" if truncated else ""
        return Moved(shown="" if label else self.shown(), reward=float(reward), label=label)

    def close(self) -> None:
        self._env.close()


def _made(name: str, options: Mapping[str, Any]) -> Any:
    """The environment, drawn as text where it can be."""
    gym = library("gymnasium")
    env = gym.make(name, **options)
    if "ansi" not in (env.metadata.get("render_modes") or ()):
        return env
    env.close()
    return gym.make(name, render_mode="ansi", **options)


def _check(plain: Mapping[str, Any]) -> None:
    """UserError for an environment that cannot be made or be played in words; called in another process."""
    env = Gymnasium(**plain)
    with unmoved():
        try:
            made = _made(env.id, env.options)
            made.reset(seed=0)
        except Exception as error:
            raise UserError(f"{WHERE}.id", f"{env.id} cannot be made: {cause(error)}") from None
        spaces = library("gymnasium").spaces
        if made.render_mode != "ansi" and not _readable(made.observation_space, spaces):
            problem = f"{env.id} shows {type(made.observation_space).__name__}, which is no text"
            fix = "take one that can be drawn as text, or whose observations are Discrete or Text"
            raise UserError(f"{WHERE}.id", problem, fix)
        if isinstance(made.action_space, spaces.Text) and not env.actions:
            return
        if not isinstance(made.action_space, spaces.Discrete) or made.action_space.start:
            problem = f"the actions of {env.id} are {made.action_space}"
            raise UserError(f"{WHERE}.id", problem, "only Discrete actions from 0, and Text, can be said")
        if made.action_space.n != len(env.actions):
            problem = f"{env.id} has {made.action_space.n} actions, and {len(env.actions)} words are given"
            raise UserError(f"{WHERE}.actions", problem, "give a word for each, in their order")


def _readable(space: Any, spaces: Any) -> bool:
    if isinstance(space, spaces.Tuple):
        return all(_readable(each, spaces) for each in space.spaces)
    return isinstance(space, spaces.Discrete | spaces.Text | spaces.MultiDiscrete | spaces.MultiBinary)
