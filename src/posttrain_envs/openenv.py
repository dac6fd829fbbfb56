"""Environments behind a server of the library OpenEnv, played through its client: text in, text out."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.base.libraries import library, require
from posttrain.base.usercode import cause
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import RunError, Task, UserError
from posttrain_envs.replayed import Game, Moved, Replayed, seeded_tasks

WHERE = "task.openenv"


@dataclass(frozen=True, kw_only=True)
class OpenEnv(Replayed):
    """An environment that a server of OpenEnv plays, each call in a session of its own.

    An episode is its seed and its moves: each turn opens a session, resets it with the seed and sends all
    earlier moves, so the server must answer the same moves alike. Rewards arrive with the actions that earn
    them, and the score is their sum; nothing is sent after `done`, as a server may pay again.

    Labels: ended (the server says so), invalid (it refuses the action), truncated (`max_turns`).
    """

    url: str
    """Address of the server, for example http://localhost:8000."""
    action: str = "message"
    """Key of the action that holds the response."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of an action."""
    reset: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a reset in addition to the seed."""
    observation: str = ""
    """Key of the text for the policy; empty: the whole observation, as JSON."""
    rules: str = "You play a game. Each time, answer with your move alone."
    """Text of the first message before the observation."""
    max_turns: int = 30
    """Responses in an episode of the game."""
    asks = "Please answer with a move."

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, not {self.max_turns}")
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"url must begin with http://, not {self.url!r}")

    def open_game(self, seed: int, who: Mapping[str, Any]) -> "_OpenEnvGame":
        """A session, reset with this seed."""
        return _OpenEnvGame(self, seed)

    def tasks(self, count: int, seed: int, held_out: int) -> list[Task]:
        return openenv_tasks(self, count, seed)


def openenv_tasks(env: OpenEnv, count: int, seed: int) -> list[Task]:
    """Return games of this server. Raises UserError, from a process of its own, if it cannot be played."""
    require("openenv", WHERE)
    call_in_fresh_process(_check, asdict(env), name=WHERE)
    return seeded_tasks("openenv", count, env.rules, seed, WHERE)


class _OpenEnvGame(Game):
    def __init__(self, env: OpenEnv, seed: int) -> None:
        self._spec = env
        self._client = library("openenv.core.generic_client").GenericEnvClient(base_url=env.url).sync()
        try:
            self._client.connect()
            self._first = self._shown(self._client.reset(seed=seed, **env.reset).observation)
        except UserError:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise RunError(f"the server at {env.url}", f"it does not begin a game: {cause(error)}") from None

    def shown(self) -> str:
        return self._first

    def play(self, move: str) -> Moved:
        try:
            result = self._client.step({**self._spec.options, self._spec.action: move})
        except RuntimeError as error:  # its message holds the server's code
            if "VALIDATION_ERROR" not in str(error):
                raise RunError(f"the server at {self._spec.url} fails", cause(error)) from None
            return Moved(label="invalid", reason=cause(error))
        label = "ended" if result.done else ""
        return Moved(shown=self._shown(result.observation), reward=float(result.reward or 0.0), label=label)

    def close(self) -> None:
        self._client.close()

    def _shown(self, observation: Mapping[str, Any]) -> str:
        key = self._spec.observation
        if key and key not in observation:
            keys = ", ".join(map(str, observation)) or "nothing"
            raise UserError(f"{WHERE}.observation", f"an observation has no {key!r}, but {keys}")
        value = observation[key] if key else observation
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _check(options: Mapping[str, Any]) -> None:
    """Raise UserError if the server does not answer, or its observations lack the key."""
    try:
        OpenEnv(**options).open_game(0, {}).close()
    except RunError as error:
        fix = "start it, as `python -m my_env.server.app`, and give its address"
        raise UserError(f"{WHERE}.url", str(error), fix) from None
