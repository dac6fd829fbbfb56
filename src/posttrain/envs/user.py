"""An environment of the user's, made by a function named in the config."""

import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from posttrain.base.name_hints import did_you_mean
from posttrain.base.usercode import cause, load_named, refuse_memory
from posttrain.envs.protocol import Env, Start, Turn
from posttrain.process.interpreter import asked
from posttrain.types import Task, UserError


@dataclass(frozen=True)
class NamedEnv:
    """What the factory called "module:factory" or "path/to/file.py:factory" makes.

    It is sent to other processes by name, and runs in workers alone. Made by `load_env`.
    """

    factory: str
    options: str
    """The factory's keyword arguments as JSON."""
    numbers: tuple[tuple[str, float], ...] = ()
    """Its max_turns and reply_s, where it has them."""
    trusted: ClassVar[bool] = False

    def __getattr__(self, name: str) -> Any:
        for known, number in vars(self).get("numbers", ()):
            if name == known:
                return number
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Callable[..., "NamedEnv"], tuple[Any, ...]]:
        # Being unpickled makes the environment, so that states of its classes can be unpickled after it.
        return _named, (self.factory, self.options, self.numbers)

    def start(self, task: Task) -> Start:
        """As the user's environment starts; the state is pickled, as only workers know its classes."""
        started: Start = _sealed(_make(self.factory, self.options).start(task))
        return started

    def reply(self, state: Any, response: str) -> Turn:
        """As the user's environment replies."""
        env = _make(self.factory, self.options)
        turn: Turn = _sealed(env.reply(pickle.loads(state), response))
        return turn


@dataclass(frozen=True)
class InProcessEnv:
    """An environment that a program holds, played in this process: nothing ends one that hangs."""

    env: Env
    trusted: ClassVar[bool] = True

    def __getattr__(self, name: str) -> Any:
        # Such as max_turns, where it has one.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def start(self, task: Task) -> Start:
        """As the program's environment starts."""
        return self.env.start(task)

    def reply(self, state: Any, response: str) -> Turn:
        """As the program's environment replies."""
        return self.env.reply(state, response)


def here(env: Any) -> InProcessEnv:
    """This environment; UserError unless it has `start(task)` and `reply(state, response)`."""
    _check_methods("env", env, "it is")
    return InProcessEnv(env)


def load_env(factory: str, options: Mapping[str, Any] | None = None) -> NamedEnv:
    """The environment that factory(**options) returns.

    Raises UserError if there is no such factory, if it does not take the options, if it raises, or if
    what it returns has no `start(task)` and `reply(state, response)`.
    """
    refuse_memory(factory, "give the environment again, or put it into a file and name its factory")
    try:
        text = json.dumps(dict(options or {}), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(factory, f"its options are not plain data: {error}") from None
    numbers = asked(_numbers, factory, text, name=factory)
    return NamedEnv(factory, text, tuple((name, number) for name, number in numbers))


def _numbers(factory: str, options: str) -> list[tuple[str, float]]:
    env = _make(factory, options)
    found = {name: getattr(env, name, None) for name in ("max_turns", "reply_s")}
    return [(name, value) for name, value in found.items() if isinstance(value, int | float)]


def _named(factory: str, options: str, numbers: tuple[tuple[str, float], ...] = ()) -> NamedEnv:
    _make(factory, options)
    return NamedEnv(factory, options, numbers)


def _sealed(given: Any) -> Any:
    """The same with its state pickled; what is neither is for others to refuse."""
    return replace(given, state=pickle.dumps(given.state)) if isinstance(given, Start | Turn) else given


@lru_cache(maxsize=64)
def _make(factory: str, options: str) -> Env:
    make = load_named(factory)
    given = json.loads(options)
    if not callable(make):
        raise UserError(factory, f"it is not a function but {type(make).__name__}")
    try:
        inspect.signature(make).bind(**given)
    except TypeError as error:
        known = inspect.signature(make).parameters
        unknown = [name for name in given if name not in known]
        hint = did_you_mean(unknown[0], known) if unknown else ""
        raise UserError(
            factory, f"it cannot be called with {', '.join(given) or 'nothing'}: {error}", hint
        ) from None
    except ValueError:
        pass  # a callable whose parameters cannot be read is simply called
    try:
        env: Any = make(**given)
    except Exception as error:
        raise UserError(factory, f"it fails: {cause(error)}") from None
    _check_methods(factory, env, "it makes")
    made: Env = env
    return made


def _check_methods(factory: str, env: Any, is_: str) -> None:
    _check_method(factory, env, "start", 1, is_)
    _check_method(factory, env, "reply", 2, is_)


def _check_method(factory: str, env: Any, name: str, arguments: int, is_: str) -> None:
    method = getattr(env, name, None)
    wants = {"start": "start(task)", "reply": "reply(state, response)"}[name]
    if not callable(method):
        raise UserError(factory, f"{is_} a {type(env).__name__}, which has no {wants}")
    if inspect.iscoroutinefunction(method):
        raise UserError(factory, f"{name} is an async function", "write it with 'def'")
    try:
        inspect.signature(method).bind(*range(arguments))
    except TypeError:
        raise UserError(factory, f"its {name} cannot be called as {wants}") from None
