"""The table [task]: which tasks, data or text a run learns from."""

# ruff: noqa: RUF009  every configuration is frozen, so one default can serve all recipes

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.base.kinds import chosen_kinds, find_kind, kinds, table_of_kinds
from posttrain.data import Data, load_tasks
from posttrain.data.corpus import Text
from posttrain.data.protocol import Games
from posttrain.envs.agent import Agent
from posttrain.envs.protocol import Env
from posttrain.envs.repair import Repair
from posttrain.envs.tools.settings import Tools
from posttrain.envs.user import here, load_env
from posttrain.types import Task, UserError
from posttrain.verifiers.protocol import Verifier


@dataclass(frozen=True, kw_only=True)
class UserEnv:
    """An environment that a function of yours makes."""

    factory: str
    """module:function or path/to/file.py:function, or the name of a plugin's environment; called with the
    options, it returns the environment."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""

    def load(self) -> Env:
        """Call the factory. Raises UserError if it cannot be called, or returns no environment."""
        factory = self.factory
        if ":" not in factory and kinds("environments"):
            factory = find_kind("environments", factory, "task.env.factory").entry.value
        return load_env(factory, self.options)


@dataclass(frozen=True, kw_only=True)
class TaskChoice:
    """What the policy learns from: exactly one of data, text or a family of tasks, such as arithmetic."""

    data: Data | None = None
    """Records of a file or of the Hub; see below."""
    held_out: Data | None = None
    """Records to evaluate on, never trained on; only with data."""
    text: Text | None = None
    """Documents to learn as plain text."""
    held_out_text: Text | None = None
    """Documents to evaluate on, never trained on; only with text."""
    games: Games = Games()
    """Numbers of games, for families that are games: guess, gymnasium, maze, openenv, textarena, and those of
    plugins."""
    env: UserEnv | Env | None = None
    """Your environment, which plays the tasks of data; see below."""
    repair: Repair | None = None
    """Ask for a wrong answer again, with the reason that the verifier gives."""
    tools: Tools | None = None
    """Tools that the policy may call before it answers."""
    agent: Agent | None = None
    """A program of yours plays the tasks of data, and calls the policy over the OpenAI chat API."""

    def __post_init__(self) -> None:
        files = {"data": self.data, "text": self.text}
        sources = [name for name, table in files.items() if table is not None]
        sources = sorted([*sources, *chosen_kinds(self)])
        if len(sources) != 1:
            names = ", ".join(sorted([*files, *kinds("tasks")]))
            raise ValueError(f"give exactly one of {names}, not {' and '.join(sources) or 'none'}")
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
        """Return the table with these families and options, whose names type checkers do not know."""
        return cls(**tables)

    @property
    def kind(self) -> Any:
        """Return the family of tasks; None if data or text is given."""
        return next(iter(chosen_kinds(self).values()), None)

    @property
    def game(self) -> Env | None:
        """Return the family of tasks if it is an environment; [task.games] then sets its numbers of games."""
        kind: Any = self.kind
        return kind if hasattr(kind, "start") and hasattr(kind, "reply") else None

    def scorer(self) -> Verifier | None:
        """Return the verifier that the family of tasks brings, for recipes without [verifier]."""
        scorer: Verifier | None = self.kind.scorer() if hasattr(self.kind, "scorer") else None
        return scorer

    def environment(self) -> Env | None:
        """Return the environment that plays the tasks; None if each task is one question with one answer."""
        if self.env is None:
            return self.game
        return self.env.load() if isinstance(self.env, UserEnv) else here(self.env)


if not TYPE_CHECKING:
    TaskChoice = table_of_kinds(TaskChoice, "tasks", __name__)


def make_tasks(
    choice: TaskChoice, limit: int, seed: int, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Task], list[Task]]:
    """Make or read the tasks to train on, and at most `limit` tasks to evaluate on.

    `say` receives a line for each data set: the form in which its records were recognised. Raises UserError
    for data that cannot be used.
    """
    if choice.data is None:
        train, held_out = choice.kind.make(limit, seed, choice.games)
        counts = Counter(task.id for task in (*train, *held_out))
        if repeated := [name for name, count in counts.items() if count > 1]:
            family = next(iter(chosen_kinds(choice)))
            raise UserError(f"task.{family}", f"it makes several tasks of the id {repeated[0]!r}")
        return train, held_out
    if choice.data.bootstrap is not None:
        problem = "a bootstrap is for what is learnt from: a task would be asked twice with the same draws"
        raise UserError("task.data.bootstrap", problem, "leave it out")
    held_out = load_tasks(choice.held_out, say=say)[:limit] if choice.held_out is not None and limit else []
    return load_tasks(choice.data, say=say), held_out
