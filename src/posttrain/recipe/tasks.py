"""The table [task]: which tasks, data or text a run learns from."""

# ruff: noqa: RUF009  every configuration is frozen, so one default can serve all recipes

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from posttrain.recipe.verifier import VerifierChoice
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
    """What the policy learns from: exactly one of data, text or a family of tasks, such as arithmetic.

    Several tables, [[task]], are a mixture.
    """

    name: str = ""
    """Name of the source in metrics and of its evaluation; needed if there are several."""
    weight: float = 1.0
    """Share of an update's groups, or records, relative to the other sources; 0: evaluate on it alone."""
    epochs: float = 0.0
    """Passes over these tasks after which the other sources take over their share; 0: no end."""
    system: str | None = None
    """A system message before every task; for data it is data.system."""
    max_new_tokens: int | None = None
    """Replaces sampling.max_new_tokens for these tasks."""
    stop: tuple[str, ...] | None = None
    """Replaces sampling.stop for these tasks."""
    reference_path: str = ""
    """Replaces reference.path for these tasks: each of several sources may have a teacher of its own."""
    verifier: VerifierChoice | None = None
    """[verifier] for these tasks, with the same keys; by default the recipe's."""
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
        if not re.fullmatch(r"[\w.-]*", self.name):
            raise ValueError(f"name may have letters, digits, dots, - and _, not {self.name!r}")
        if not 0 <= self.weight < math.inf:
            raise ValueError(f"weight must be 0 or more, not {self.weight}")
        if self.epochs < 0:
            raise ValueError(f"epochs must be 0 (no end) or more, not {self.epochs}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, not {self.max_new_tokens}")
        if self.system is not None and (self.data is not None or self.text is not None):
            raise ValueError("system is for tasks that are made; data has its own key, data.system")
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

    @property
    def played(self) -> bool:
        """Return whether an environment plays the tasks and gives the rewards."""
        return self.game is not None or self.env is not None

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
    """Make or read the tasks to train on, and at most `limit` tasks to evaluate on, with their source's name.

    `say` receives a line for each data set: the form in which its records were recognised. Raises UserError
    for data that cannot be used.
    """
    if choice.data is None:
        train, held_out = choice.kind.make(limit, seed, choice.games)
        counts = Counter(task.id for task in (*train, *held_out))
        if repeated := [name for name, count in counts.items() if count > 1]:
            family = next(iter(chosen_kinds(choice)))
            raise UserError(f"task.{family}", f"it makes several tasks of the id {repeated[0]!r}")
        return _in_source(choice, train), _in_source(choice, held_out)
    if choice.data.bootstrap is not None:
        problem = "a bootstrap is for what is learnt from: a task would be asked twice with the same draws"
        raise UserError("task.data.bootstrap", problem, "leave it out")
    held_out = load_tasks(choice.held_out, say=say)[:limit] if choice.held_out is not None and limit else []
    return _in_source(choice, load_tasks(choice.data, say=say)), _in_source(choice, held_out)


def make_evaluation_tasks(
    choice: TaskChoice, limit: int, seed: int, say: Callable[[str], None] = lambda text: None
) -> list[Task]:
    """Make or read the tasks of a source of [[eval.task]]: its held-out ones, or else its data."""
    if choice.data is not None and choice.held_out is None:
        choice = replace(choice, held_out=choice.data)
    return make_tasks(choice, limit, seed, say)[1]


def _in_source(choice: TaskChoice, tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks with the name of their source and its system message."""
    if not choice.name and choice.system is None:
        return list(tasks)
    first = () if choice.system is None else ({"role": "system", "content": choice.system},)
    return [replace(task, dataset=choice.name, messages=(*first, *task.messages)) for task in tasks]
