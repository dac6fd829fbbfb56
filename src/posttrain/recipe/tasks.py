"""What a recipe asks: its table [task], and the tasks that this makes or reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from posttrain.base.usercode import cause, load_edited
from posttrain.data import Data, Records, load_tasks
from posttrain.data.corpus import Text
from posttrain.envs.agent import Agent
from posttrain.envs.guess import Guess, guess_tasks
from posttrain.envs.gymnasium import Gymnasium, gymnasium_tasks
from posttrain.envs.maze import Maze, laid_out, layout_tasks, maze_tasks
from posttrain.envs.openenv import OpenEnv, openenv_tasks
from posttrain.envs.protocol import Env
from posttrain.envs.repair import Repair
from posttrain.envs.tasks.arithmetic import Arithmetic, arithmetic
from posttrain.envs.tasks.coq_exercises import CoqExercises, coq_exercises
from posttrain.envs.tasks.horn import Horn, horn
from posttrain.envs.tasks.peano import Peano, peano
from posttrain.envs.tasks.propositional import Propositional, propositional
from posttrain.envs.textarena import TextArena, textarena_tasks
from posttrain.envs.tools.choice import Tools
from posttrain.envs.user import here, load_env
from posttrain.types import Task, UserError
from posttrain.verifiers.proof.coq.library import CoqLibrary, coq_library
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.reasoning_gym.tasks import ReasoningGym, problems
from posttrain.verifiers.reasoning_gym.verifier import ReasoningGymScorer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class UserEnv:
    """An environment made by a function of the user's."""

    factory: str
    """module:function or path/to/file.py:function; called with the options, returns the environment."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Env:
        """The environment that it makes; UserError if it cannot be made."""
        return load_env(self.factory, self.options)


@dataclass(frozen=True, kw_only=True)
class OwnTasks:
    """Tasks made by a function of your own, which the run keeps a copy of."""

    function: str
    """module:function or path/to/file.py:function; called with the options, it returns or yields tasks:
    dictionaries that `[task.data]` would read, or posttrain.types.Task."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments."""
    held_out: int = 0
    """How many of its last tasks are only evaluated on."""

    def __post_init__(self) -> None:
        if self.held_out < 0:
            raise ValueError(f"held_out must be 0 or more, not {self.held_out}")

    def made(self) -> list[Task]:
        """The tasks, in the order of the function; UserError for what are none, or for two of one id."""
        where = "task.own.function"
        function = load_edited(self.function, where)
        try:
            given = list(function(**self.options))
        except Exception as error:
            raise UserError(where, f"{self.function} fails: {cause(error)}") from None
        try:
            found = load_tasks(Data(path=Records.of(given))) if given else []
        except UserError as error:
            raise UserError(where, f"{self.function} makes what is no task: {error}") from None
        if len(found) <= self.held_out:
            raise UserError(where, f"{self.function} makes {len(found)} tasks, none to train on")
        return found


@dataclass(frozen=True, kw_only=True)
class Games:
    """How many games to make for an environment of ours."""

    train: int = 1000
    held_out: int = 200

    def __post_init__(self) -> None:
        if self.train < 1 or self.held_out < 0:
            raise ValueError("train must be 1 or more and held_out 0 or more")


@dataclass(frozen=True, kw_only=True)
class TaskChoice:
    """What is asked or learnt: exactly one of arithmetic, coq, coq_library, data, guess, gymnasium,
    horn, maze, openenv, own, peano, propositional, reasoning_gym, text and textarena. env plays data."""

    arithmetic: Arithmetic | None = None
    coq: CoqExercises | None = None
    coq_library: CoqLibrary | None = None
    data: Data | None = None
    held_out: Data | None = None
    """Records that are only evaluated on, beside data."""
    text: Text | None = None
    """Documents, to be learnt as they stand."""
    held_out_text: Text | None = None
    """Documents that are only evaluated on, beside text."""
    guess: Guess | None = None
    gymnasium: Gymnasium | None = None
    """An environment of Gymnasium in words; see below."""
    horn: Horn | None = None
    maze: Maze | None = None
    openenv: OpenEnv | None = None
    """An environment behind a server of OpenEnv; see below."""
    own: OwnTasks | None = None
    """Tasks of a function of yours; see below."""
    peano: Peano | None = None
    propositional: Propositional | None = None
    textarena: TextArena | None = None
    """A game of TextArena; see below."""
    reasoning_gym: ReasoningGym | None = None
    """Problems of the library reasoning-gym, which brings its own scorers; see below."""
    maze_size: int = 4
    maze_layout: str = ""
    """A maze of your own in place of random ones, rows joined by "/": "S../.XG" is start, trap and goal."""
    games: Games = Games()
    """Of guess, gymnasium, maze, openenv and textarena."""
    env: UserEnv | Env | None = None
    repair: Repair | None = None
    """Wrong answers are asked for again, with what the verifier says of them."""
    tools: Tools | None = None
    """The policy may call tools before it answers."""
    agent: Agent | None = None
    """A program of yours plays, and asks the policy over the OpenAI chat API."""

    def __post_init__(self) -> None:
        kinds = ["arithmetic", "coq", "coq_library", "data", "guess", "gymnasium", "horn", "maze"]
        kinds += ["openenv", "own", "peano", "propositional", "reasoning_gym", "text", "textarena"]
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            said = " and ".join(given) if given else "none"
            raise ValueError(f"give exactly one of {', '.join(kinds)}, not {said}")
        if self.held_out_text is not None and self.text is None:
            raise ValueError("held_out_text is read beside text only")
        if self.held_out is not None and self.data is None:
            raise ValueError("held_out is read beside data only")
        if self.maze_layout:
            laid_out(self.maze_layout)
        if self.env is not None and self.data is None:
            raise ValueError("env plays the tasks of data, which is not given")
        if self.repair is not None and (self.game or self.env or self.text):
            raise ValueError("repair asks again where a verifier judges, and none does here")
        if self.tools is not None and (self.game or self.env or self.text or self.repair):
            raise ValueError("tools are for questions that a verifier judges, without games and repair")
        if self.agent is not None and (self.game or self.env or self.text or self.repair or self.tools):
            raise ValueError("agent plays tasks by itself, without games, env, repair and tools")

    @property
    def game(self) -> Guess | Maze | Gymnasium | OpenEnv | TextArena | None:
        """What [task.games] counts the games of."""
        return self.guess or self.maze or self.gymnasium or self.openenv or self.textarena

    def scorer(self) -> Verifier | None:
        """Who judges where no verifier is named: what the tasks bring themselves."""
        return ReasoningGymScorer() if self.reasoning_gym else None

    def environment(self) -> Env | None:
        """The environment that the tasks are played in; None for a question with one answer."""
        if self.env is None:
            return self.game
        return self.env.load() if isinstance(self.env, UserEnv) else here(self.env)


def _split(
    make: Callable[[Literal["train", "held_out"], T], list[Task]], spec: T, limit: int
) -> tuple[list[Task], list[Task]]:
    """The tasks of both splits, of the second at most `limit`."""
    held = make("held_out", spec)[:limit] if limit else []
    return make("train", spec), held


def tasks(
    choice: TaskChoice, limit: int, seed: int, say: Callable[[str], None] = lambda text: None
) -> tuple[list[Task], list[Task]]:
    """The tasks to train on, and at most `limit` that are only evaluated on.

    `say` is told in which form records were recognised. Raises UserError for data that cannot be used.
    """
    if choice.arithmetic is not None:
        spec = choice.arithmetic
        held_out = arithmetic("held_out", spec, limit=min(limit, spec.held_out)) if limit else []
        return arithmetic("train", spec), held_out
    if choice.own is not None:
        made, least = choice.own.made(), choice.own.held_out
        return made[: len(made) - least], made[len(made) - least :][:limit]
    if choice.coq is not None:
        return _split(coq_exercises, choice.coq, limit if choice.coq.held_out else 0)
    if choice.coq_library is not None:
        return _split(coq_library, choice.coq_library, limit if choice.coq_library.held_out_files else 0)
    if choice.horn is not None:
        return _split(horn, choice.horn, limit if choice.horn.held_out else 0)
    if choice.peano is not None:
        return _split(peano, choice.peano, limit if choice.peano.held_out else 0)
    if choice.propositional is not None:
        return _split(propositional, choice.propositional, limit if choice.propositional.held_out else 0)
    if choice.reasoning_gym is not None:
        train, held = problems(choice.reasoning_gym)
        return train, held[:limit]
    if choice.data is not None and choice.data.bootstrap is not None:
        problem = "a bootstrap is for what is learnt from: a task would be asked twice with the same draws"
        raise UserError("task.data.bootstrap", problem, "leave it out")
    if choice.data is not None:
        held = load_tasks(choice.held_out, say=say)[:limit] if choice.held_out is not None and limit else []
        return load_tasks(choice.data, say=say), held
    n = choice.games
    if choice.guess is not None:
        games = guess_tasks(n.train + n.held_out, high=choice.guess.high, seed=seed)
    elif choice.gymnasium is not None:
        games = gymnasium_tasks(choice.gymnasium, n.train + n.held_out, seed)
    elif choice.openenv is not None:
        games = openenv_tasks(choice.openenv, n.train + n.held_out, seed)
    elif choice.textarena is not None:
        games = textarena_tasks(choice.textarena, n.train + n.held_out, seed, n.held_out)
    elif choice.maze_layout:
        games = layout_tasks(n.train + n.held_out, layout=choice.maze_layout)
    else:
        games = maze_tasks(n.train + n.held_out, size=choice.maze_size, seed=seed)
    return games[: n.train], games[n.train :][:limit]
