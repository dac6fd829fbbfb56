"""Environments behind a server of the library OpenEnv, asked over its client: text in, text out."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.base.libraries import library, require
from posttrain.base.usercode import cause
from posttrain.data.protocol import Games
from posttrain.process.interpreter import asked
from posttrain.types import RunError, Task, UserError
from posttrain_envs.replayed import Game, Moved, Replayed, seeded

WHERE = "task.openenv"


@dataclass(frozen=True, kw_only=True)
class OpenEnv(Replayed):
    """An environment that a server of OpenEnv plays, each call in a session of its own.

    An episode is its seed and its moves: each turn is asked of a session that is reset with the seed and told
    all moves before, so the server must answer the same moves alike. Rewards arrive with the actions that
    earn them, and the score is their sum; nothing is asked after `done`, as a server may pay again.

    Labels: ended (the server says so), invalid (it refuses the action), truncated (`max_turns`).
    """

    url: str
    """As http://localhost:8000."""
    action: str = "message"
    """The key of the action under which a response is sent."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else an action holds."""
    reset: Mapping[str, Any] = field(default_factory=dict)
    """What a reset is told besides the seed."""
    observation: str = ""
    """The key of what the policy sees; empty: the whole observation, as JSON."""
    rules: str = "You play a game. Each time, answer with your move alone."
    """What the first message says before what is seen."""
    max_turns: int = 30
    """Responses in an episode."""
    asks = "Please answer with a move."

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns must be 1 or more, not {self.max_turns}")
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"url must begin with http://, not {self.url!r}")

    def opened(self, seed: int, who: Mapping[str, Any]) -> "_OpenEnvGame":
        """A session, reset with this seed."""
        return _OpenEnvGame(self, seed)

    def make(self, limit: int, seed: int, games: Games) -> tuple[list[Task], list[Task]]:
        """Return the tasks to train on, and at most `limit` that are only evaluated on."""
        tasks = openenv_tasks(self, games.train + games.held_out, seed)
        return tasks[: games.train], tasks[games.train :][:limit]


def openenv_tasks(env: OpenEnv, count: int, seed: int) -> list[Task]:
    """Games of this server; UserError, from a process of its own, if it cannot be played."""
    require("openenv", WHERE)
    asked(_check, asdict(env), name=WHERE)
    return seeded("openenv", count, env.rules, seed, WHERE)


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
            led = self._client.step({**self._spec.options, self._spec.action: move})
        except RuntimeError as error:  # with a code of the server's
            if "VALIDATION_ERROR" not in str(error):
                raise RunError(f"the server at {self._spec.url} fails", cause(error)) from None
            return Moved(label="invalid", reason=cause(error))
        label = "ended" if led.done else ""
        return Moved(shown=self._shown(led.observation), reward=float(led.reward or 0.0), label=label)

    def close(self) -> None:
        self._client.close()

    def _shown(self, seen: Mapping[str, Any]) -> str:
        key = self._spec.observation
        if key and key not in seen:
            known = ", ".join(map(str, seen)) or "nothing"
            raise UserError(f"{WHERE}.observation", f"an observation has no {key!r}, but {known}")
        found = seen[key] if key else seen
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)


def _check(plain: Mapping[str, Any]) -> None:
    """UserError for a server that is not there, or does not show what it should."""
    try:
        OpenEnv(**plain).opened(0, {}).close()
    except RunError as error:
        fix = "start it, as `python -m my_env.server.app`, and give its address"
        raise UserError(f"{WHERE}.url", str(error), fix) from None
