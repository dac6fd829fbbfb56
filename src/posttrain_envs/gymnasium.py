"""Environments of Gymnasium in words: a board that is drawn as text, and a word for each action."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.base.libraries import library, preserve_globals, require
from posttrain.base.usercode import cause
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import Task, UserError
from posttrain_envs.replayed import Game, Moved, Replayed, seeded_tasks

WHERE = "task.gymnasium"
_MARKED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0?m")
_ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True)
class Gymnasium(Replayed):
    """An environment whose actions are words or texts, and whose states are rendered as text.

    The action is the last of the words that the response names; if actions are texts, it is the response.
    Rewards arrive with the actions that earn them, and the score is their sum.

    Labels: ended (the environment says so), truncated (its time limit, or `max_turns`).
    """

    id: str
    """For example FrozenLake-v1, or module:name-v0 for one that your module registers."""
    actions: tuple[str, ...] = ()
    """A word for each action, in the order of their numbers; empty if actions are texts."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of gymnasium.make, for example {is_slippery = false}."""
    rules: str = ""
    """Text of the first message before the state; empty: names the environment and its actions."""
    max_turns: int = 50
    """Responses in an episode, including those that name no action."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, not {self.max_turns}")
        if len({word.casefold() for word in self.actions}) < len(self.actions):
            raise ValueError("actions must be different words")
        if not all(word.strip() for word in self.actions):
            raise ValueError("an action must not be blank")

    @property
    def asks(self) -> str:  # type: ignore[override]
        """Reply to a response without an action."""
        return f"Please answer with one of: {', '.join(self.actions)}."

    def open_game(self, seed: int, who: Mapping[str, Any]) -> "_GymnasiumGame":
        """The environment, reset with this seed."""
        return _GymnasiumGame(self, seed)

    def tasks(self, count: int, seed: int, held_out: int) -> list[Task]:
        return gymnasium_tasks(self, count, seed)


def gymnasium_tasks(env: Gymnasium, count: int, seed: int) -> list[Task]:
    """Return games of this environment. Raises UserError if it cannot be played in words.

    The environment is checked in a process of its own.
    """
    require("gymnasium", WHERE)
    call_in_fresh_process(_check, asdict(env), name=WHERE)
    rules = env.rules or f"You play {env.id.rpartition(':')[2]}."
    if not env.rules and env.actions:
        rules += f" Each time, answer with just one of: {', '.join(env.actions)}."
    return seeded_tasks(env.id, count, rules, seed, WHERE)


class _GymnasiumGame(Game):
    def __init__(self, env: Gymnasium, seed: int) -> None:
        self._actions = env.actions
        self._env = _make(env.id, env.options)
        words = "|".join(sorted(map(re.escape, env.actions), key=len, reverse=True))
        self._word = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)
        self._seen, _ = self._env.reset(seed=seed)

    def shown(self) -> str:
        if self._env.render_mode != "ansi":
            return str(self._seen)
        frame = self._env.render()
        text = frame if isinstance(frame, str) else "\n".join(frame)
        return _ESCAPE.sub("", _MARKED.sub(r"[\1]", text)).strip("\n")

    def move(self, response: str) -> str | None:
        if not self._actions:
            return response.strip() or None
        words = self._word.findall(response[-1000:])
        return words[-1].casefold() if words else None

    def play(self, move: str) -> Moved:
        words = [word.casefold() for word in self._actions]
        self._seen, reward, terminated, truncated, _ = self._env.step(words.index(move) if words else move)
        label = "ended" if terminated else "truncated" if truncated else ""
        return Moved(shown="" if label else self.shown(), reward=float(reward), label=label)

    def close(self) -> None:
        self._env.close()


def _make(name: str, options: Mapping[str, Any]) -> Any:
    """Make the environment, rendered as text if it can be."""
    gym = library("gymnasium")
    env = gym.make(name, **options)
    if "ansi" not in (env.metadata.get("render_modes") or ()):
        return env
    env.close()
    return gym.make(name, render_mode="ansi", **options)


def _check(options: Mapping[str, Any]) -> None:
    """Raise UserError if an environment cannot be made or played in words. Runs in a process of its own."""
    env = Gymnasium(**options)
    with preserve_globals():
        try:
            instance = _make(env.id, env.options)
            instance.reset(seed=0)
        except Exception as error:
            raise UserError(f"{WHERE}.id", f"{env.id} cannot be made: {cause(error)}") from None
        spaces = library("gymnasium").spaces
        if instance.render_mode != "ansi" and not _readable(instance.observation_space, spaces):
            problem = f"{env.id} shows {type(instance.observation_space).__name__}, which is not text"
            fix = "take one that can be drawn as text, or whose observations are Discrete or Text"
            raise UserError(f"{WHERE}.id", problem, fix)
        if isinstance(instance.action_space, spaces.Text) and not env.actions:
            return
        if not isinstance(instance.action_space, spaces.Discrete) or instance.action_space.start:
            problem = f"the actions of {env.id} are {instance.action_space}"
            raise UserError(
                f"{WHERE}.id", problem, "only Discrete actions from 0, and Text, can be named in words"
            )
        if instance.action_space.n != len(env.actions):
            problem = (
                f"{env.id} has {instance.action_space.n} actions, and {len(env.actions)} words are listed"
            )
            raise UserError(f"{WHERE}.actions", problem, "give a word for each, in their order")


def _readable(space: Any, spaces: Any) -> bool:
    if isinstance(space, spaces.Tuple):
        return all(_readable(part, spaces) for part in space.spaces)
    return isinstance(space, spaces.Discrete | spaces.Text | spaces.MultiDiscrete | spaces.MultiBinary)
