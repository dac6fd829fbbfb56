"""Environments of users, made by a factory that the config names, or passed as objects."""

import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, cast

from posttrain.base.name_hints import did_you_mean
from posttrain.base.usercode import cause, load_named, refuse_memory
from posttrain.envs.protocol import Env, Start, Turn
from posttrain.process.interpreter import call_in_fresh_process
from posttrain.types import Task, UserError


@dataclass(frozen=True)
class NamedEnv:
    """The environment that the factory called "module:factory" or "path/to/file.py:factory" returns.

    It is pickled by name and runs in workers only. Made by `load_env`.
    """

    factory: str
    options: str
    """The keyword arguments of the factory, as JSON."""
    numbers: tuple[tuple[str, float], ...] = ()
    """max_turns and reply_s of the environment, if it has them."""
    trusted: ClassVar[bool] = False

    def __getattr__(self, name: str) -> Any:
        for number_name, number in vars(self).get("numbers", ()):
            if name == number_name:
                return number
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Callable[..., "NamedEnv"], tuple[Any, ...]]:
        # Unpickling makes the environment, so that states of its classes can be unpickled afterwards.
        return _unpickle_named, (self.factory, self.options, self.numbers)

    def start(self, task: Task) -> Start:
        """Return the environment's start with a pickled state: only workers know the classes of states."""
        started: Start = _pickle_state(_make(self.factory, self.options).start(task))
        return started

    def reply(self, state: Any, response: str) -> Turn:
        """Return the environment's reply, with a pickled state."""
        env = _make(self.factory, self.options)
        turn: Turn = _pickle_state(env.reply(pickle.loads(state), response))
        return turn

    def state_key(self, state: bytes) -> Any:
        """Return the part of the state that the environment names, or the state itself."""
        env: Any = _make(self.factory, self.options)
        unpickled = pickle.loads(state)
        return env.state_key(unpickled) if hasattr(env, "state_key") else unpickled


@dataclass(frozen=True)
class InProcessEnv:
    """An environment that a program passes as an object; it runs in this process, so it can hang the run."""

    env: Env
    trusted: ClassVar[bool] = True

    def __getattr__(self, name: str) -> Any:
        # For optional attributes, such as max_turns.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)

    def start(self, task: Task) -> Start:
        return self.env.start(task)

    def reply(self, state: Any, response: str) -> Turn:
        return self.env.reply(state, response)


def here(env: Any) -> InProcessEnv:
    """Return this environment. Raises UserError unless it has `start(task)` and `reply(state, response)`."""
    _check_methods("env", env, "it is")
    return InProcessEnv(env)


def load_env(factory: str, options: Mapping[str, Any] | None = None) -> NamedEnv:
    """Return the environment that factory(**options) returns.

    Raises UserError if the factory does not exist, if it does not take the options or raises, or if its
    result has no `start(task)` and `reply(state, response)`.
    """
    refuse_memory(factory, "give the environment again, or put it into a file and name its factory")
    try:
        text = json.dumps(dict(options or {}), sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(factory, f"its options are not plain data: {error}") from None
    numbers = call_in_fresh_process(_numbers, factory, text, name=factory)
    return NamedEnv(factory, text, tuple((name, number) for name, number in numbers))


def _numbers(factory: str, options: str) -> list[tuple[str, float]]:
    env = _make(factory, options)
    values = {name: getattr(env, name, None) for name in ("max_turns", "reply_s")}
    return [(name, value) for name, value in values.items() if isinstance(value, int | float)]


def _unpickle_named(factory: str, options: str, numbers: tuple[tuple[str, float], ...] = ()) -> NamedEnv:
    _make(factory, options)
    return NamedEnv(factory, options, numbers)


def _pickle_state(result: Any) -> Any:
    """Return a Start or a Turn with a pickled state; the caller refuses any other value."""
    return replace(result, state=pickle.dumps(result.state)) if isinstance(result, Start | Turn) else result


@lru_cache(maxsize=64)
def _make(factory: str, options: str) -> Env:
    make = load_named(factory)
    arguments = json.loads(options)
    if not callable(make):
        raise UserError(factory, f"it is not a function but {type(make).__name__}")
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        parameters = inspect.signature(make).parameters
        unknown = [name for name in arguments if name not in parameters]
        hint = did_you_mean(unknown[0], parameters) if unknown else ""
        raise UserError(
            factory, f"it cannot be called with {', '.join(arguments) or 'nothing'}: {error}", hint
        ) from None
    except ValueError:
        pass  # a callable whose parameters cannot be read is simply called
    try:
        env: Any = make(**arguments)
    except Exception as error:
        raise UserError(factory, f"it fails: {cause(error)}") from None
    _check_methods(factory, env, "it makes")
    return cast("Env", env)


def _check_methods(factory: str, env: Any, prefix: str) -> None:
    for name, count, form in (("start", 1, "start(task)"), ("reply", 2, "reply(state, response)")):
        method = getattr(env, name, None)
        if not callable(method):
            raise UserError(factory, f"{prefix} a {type(env).__name__}, which has no {form}")
        if inspect.iscoroutinefunction(method):
            raise UserError(factory, f"{name} is an async function", "write it with 'def'")
        try:
            inspect.signature(method).bind(*range(count))
        except TypeError:
            raise UserError(factory, f"its {name} cannot be called as {form}") from None
