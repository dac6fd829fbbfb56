"""What a recipe asks: its table [task], and the tasks that this makes or reads."""

# ruff: noqa: RUF009  every configuration is frozen, so one default can serve all recipes

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.base.kinds import chosen, kinds, named, table_of_kinds
from posttrain.data import Data, load_tasks
from posttrain.data.corpus import Text
from posttrain.data.protocol import Games
from posttrain.envs.agent import Agent
from posttrain.envs.protocol import Env
from posttrain.envs.repair import Repair
from posttrain.envs.tools.choice import Tools
from posttrain.envs.user import here, load_env
from posttrain.types import Task, UserError
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class UserEnv:
    """An environment made by a function of the user's."""

    factory: str
    """module:function or path/to/file.py:function, or a plugin's name; called with the options, returns the
    environment."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Env:
        """The environment that it makes; UserError if it cannot be made."""
        factory = self.factory
        if ":" not in factory and kinds("environments"):
            factory = named("environments", factory, "task.env.factory").entry.value
        return load_env(factory, self.options)


@dataclass(frozen=True, kw_only=True)
class TaskChoice:
    """What is asked or learnt: exactly one of data, text and the kinds of tasks. env plays data."""

    data: Data | None = None
    held_out: Data | None = None
    """Records that are only evaluated on, beside data."""
    text: Text | None = None
    """Documents, to be learnt as they stand."""
    held_out_text: Text | None = None
    """Documents that are only evaluated on, beside text."""
    games: Games = Games()
    """Of kinds that are played: guess, gymnasium, maze, openenv, textarena, and those of plugins."""
    env: UserEnv | Env | None = None
    repair: Repair | None = None
    """Wrong answers are asked for again, with what the verifier says of them."""
    tools: Tools | None = None
    """The policy may call tools before it answers."""
    agent: Agent | None = None
    """A program of yours plays, and asks the policy over the OpenAI chat API."""

    def __post_init__(self) -> None:
        read = {"data": self.data, "text": self.text}
        given = sorted([name for name, value in read.items() if value is not None] + list(chosen(self)))
        if len(given) != 1:
            said = " and ".join(given) if given else "none"
            names = ", ".join(sorted([*read, *kinds("tasks")]))
            raise ValueError(f"give exactly one of {names}, not {said}")
        if self.held_out_text is not None and self.text is None:
            raise ValueError("held_out_text is read beside text only")
        if self.held_out is not None and self.data is None:
            raise ValueError("held_out is read beside data only")
        if self.env is not None and self.data is None:
            raise ValueError("env plays the tasks of data, which is not given")
        played = self.game is not None or self.env is not None or self.text is not None
        if self.repair is not None and played:
            raise ValueError("repair asks again where a verifier judges, and none does here")
        if self.tools is not None and (played or self.repair):
            raise ValueError("tools are for questions that a verifier judges, without games and repair")
        if self.agent is not None and (played or self.repair or self.tools):
            raise ValueError("agent plays tasks by itself, without games, env, repair and tools")

    @classmethod
    def of(cls, **tables: Any) -> "TaskChoice":
        """Return the table of these kinds and options."""
        return cls(**tables)

    @property
    def kind(self) -> Any:
        """The family of tasks; None where data or text is given."""
        return next(iter(chosen(self).values()), None)

    @property
    def game(self) -> Env | None:
        """The family of tasks, if it is an environment, whose games [task.games] counts."""
        kind: Any = self.kind
        return kind if hasattr(kind, "start") and hasattr(kind, "reply") else None

    def scorer(self) -> Verifier | None:
        """Who judges where no verifier is named: what the tasks bring themselves."""
        own: Verifier | None = self.kind.scorer() if hasattr(self.kind, "scorer") else None
        return own

    def environment(self) -> Env | None:
        """The environment that the tasks are played in; None for a question with one answer."""
        if self.env is None:
            return self.game
        return self.env.load() if isinstance(self.env, UserEnv) else here(self.env)


if not TYPE_CHECKING:
    TaskChoice = table_of_kinds(TaskChoice, "tasks", __name__)


def tasks(
    choice: TaskChoice, limit: int, seed: int, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Task], list[Task]]:
    """The tasks to train on, and at most `limit` that are only evaluated on.

    `say` is told in which form records were recognised. Raises UserError for data that cannot be used.
    """
    if choice.data is None:
        train, held_out = choice.kind.make(limit, seed, choice.games)
        counts = Counter(task.id for task in (*train, *held_out))
        if repeated := [name for name, count in counts.items() if count > 1]:
            family = next(iter(chosen(choice)))
            raise UserError(f"task.{family}", f"it makes several tasks of the id {repeated[0]!r}")
        return train, held_out
    if choice.data.bootstrap is not None:
        problem = "a bootstrap is for what is learnt from: a task would be asked twice with the same draws"
        raise UserError("task.data.bootstrap", problem, "leave it out")
    held = load_tasks(choice.held_out, say=say)[:limit] if choice.held_out is not None and limit else []
    return load_tasks(choice.data, say=say), held
