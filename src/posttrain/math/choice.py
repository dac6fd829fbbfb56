"""A choice of a method: a function with its numbers, their bounds, and the function's needs.

Any function can be a choice. Its parameters whose default is a number are its numbers, and each may be 0 or
more, unless an annotation sets other bounds:

    def tapered(log_ratio, advantage, cap: AtLeast(1) = 1.0): ...

Decorate a function with @choice(compares="group") if it compares the answers to a task with one another.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

GIVEN = ("horizon", "logp_old", "parts", "weights", "greedy", "step", "score_norm")
"""Parameters without a default that a function of a choice may ask for: the longest answer's tokens; log
π_old(y_t); a credit also for the scores of the parts of the reward, [B, N], and their weights, [N], and for
the reward of the greedy answer, [B]; a credit of tokens for each token's index in its answer, [N], and the
squared norm of the scores of the answer up to it, [N]."""
COLUMNS = ("advantage", "entropy", "logp_gen", "logp_old", "uniform")
"""Parameters without a default that a filter may ask for: columns of the update's batch."""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Between:
    """Bounds of a number, both included: the annotation of a parameter, or inside `Annotated`.

    >>> Between(0, 1)
    Between(least=0, most=1)
    """

    least: int | float
    most: int | float


@dataclass(frozen=True)
class AtLeast(Between):
    """A lower bound alone.

    >>> AtLeast(1)
    AtLeast(least=1, most=inf)
    """

    most: int | float = math.inf


Signed = Annotated[float, AtLeast(-math.inf)]
"""A number of either sign."""
Share = Annotated[float, Between(0, 1)]
"""A number from 0 to 1."""


@dataclass(frozen=True)
class Needs:
    """A function's requirements on the updates that it is used in."""

    group: Callable[[Mapping[str, Any]], int] = lambda numbers: 1
    """Return the fewest judged answers to a task, from the function's numbers."""
    by_token: bool = True
    """True if the function also makes sense where each token is credited by itself."""


def choice(
    *,
    compares: Literal["group"] | None = None,
    group: int | Callable[[Mapping[str, Any]], int] = 2,
    by_token: bool | None = None,
) -> Callable[[F], F]:
    """Return a decorator that records a function's needs and returns the function itself.

    compares: "group" if the function compares the answers to a task; it then needs at least `group` answers,
    and fewer are refused before training starts. by_token: True if the function may also be called with
    tokens that are credited one by one; None: False if it compares answers, else True.

    >>> @choice(compares="group")
    ... def best(returns, group): ...
    >>> least_group(best), least_group(lambda returns, group: returns)
    (2, 1)
    """
    least = (group if callable(group) else lambda numbers: group) if compares else lambda numbers: 1
    needs = Needs(least, by_token if by_token is not None else compares is None)

    def record_needs(function: F) -> F:
        vars(function)["needs"] = needs
        return function

    return record_needs


@dataclass(frozen=True)
class Choice:
    """A function with its numbers, called like the function. Equal functions and numbers: equal choices."""

    function: ClassVar[Callable[..., Any]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with these arguments and the choice's numbers."""
        numbers = {name: number for name, number in vars(self).items() if number is not None}
        return self.function(*args, **numbers, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_choice, (type(self).function, vars(self))


def _restore_choice(function: Callable[..., Any], numbers: Mapping[str, Any]) -> Choice:
    return kind_of(function)(**numbers)


@lru_cache(maxsize=1024)
def kind_of(function: Callable[..., Any]) -> type[Choice]:
    """Return the dataclass of a function's choices: a field for each number, with its bounds.

    A `horizon` without a default is a number too; it is None until the length of the longest answer is set.
    """
    numbers: list[tuple[str, Any, Any]] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if isinstance(parameter.default, (bool, int, float)):
            hint = _hint(parameter.annotation, type(parameter.default))
            numbers.append((name, hint, field(default=parameter.default)))
        elif name == "horizon" and parameter.default is parameter.empty:
            numbers.append((name, int | None, field(default=None)))
    return make_dataclass(
        name_of(function),
        numbers,
        bases=(Choice,),
        namespace={"function": staticmethod(function), "__doc__": inspect.getdoc(function)},
        frozen=True,
    )


def _hint(annotation: Any, kind: type) -> Any:
    """Return the type of a number, annotated with its bounds."""
    if isinstance(annotation, Between):
        return Annotated[kind, annotation]
    if get_origin(annotation) is Annotated:
        return Annotated[get_args(annotation)[0], bounds(annotation)]
    kind = annotation if annotation in (bool, int, float) else kind
    return kind if kind is bool else Annotated[kind, AtLeast(0)]


def bounds(hint: Any) -> Between:
    """Return the bounds in a number's type; 0 or more if it has none."""
    marks = (mark for mark in get_args(hint) if isinstance(mark, Between))
    return next(marks, AtLeast(0))


@lru_cache(maxsize=64)
def numbers_of(cls: type) -> type:
    """Return a dataclass of the numbers among a dataclass's fields, with their bounds."""
    hints = get_type_hints(cls, include_extras=True)
    numbers = [
        (f.name, Annotated[float, bounds(hints[f.name])], field(default=0.0))
        for f in fields(cls)
        if float in (hints[f.name], *get_args(hints[f.name])[:1])
    ]
    return make_dataclass(f"{cls.__name__}Numbers", numbers, frozen=True)


def as_choice(function: Callable[..., Any]) -> Choice:
    """Return a function as a choice with its default numbers, a partial with the numbers that it fixes.

    >>> def clipped(x, low: float = 0.2): ...
    >>> as_choice(partial(clipped, low=0.1))
    clipped(low=0.1)
    """
    return function if isinstance(function, Choice) else kind_of(function)()


def function_of(function: Any) -> Any:
    """Return the function itself, without the numbers that a choice or a partial fixes."""
    while isinstance(function, (partial, Choice)):
        function = function.func if isinstance(function, partial) else function.function
    return function


def name_of(function: Any) -> str:
    """Return the name of the function, or of the class of an object that can be called."""
    plain = function_of(function)
    return str(getattr(plain, "__name__", type(plain).__name__))


def needs_of(function: Callable[..., Any]) -> Needs:
    """Return the needs that @choice recorded, or those of a plain function."""
    needs: Needs = getattr(function_of(function), "needs", Needs())
    return needs


def least_group(function: Callable[..., Any]) -> int:
    """Return the fewest judged answers to a task that the function can compare."""
    needs = getattr(function_of(function), "needs", None)
    return needs.group(vars(as_choice(function))) if needs else 1


@lru_cache(maxsize=1024)
def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def misfit(function: Any, neighbour: Callable[..., Any], columns: Sequence[str] = GIVEN) -> str:
    """Return why a function cannot be called like its neighbour, whose numbers have defaults; "" if it can.

    columns: parameters that it may also have.

    >>> misfit(lambda returns: returns, lambda returns, group, eps=1e-6: returns)
    'too many positional arguments; it is called with (returns, group), and its numbers have defaults'
    """
    like = inspect.signature(neighbour).parameters.values()
    positional = [p.name for p in like if type(p.default) not in (int, float)]
    try:
        signature = inspect.signature(function, eval_str=True)
        extras = [name for name in columns if name in signature.parameters]
        signature.bind(*positional, **dict.fromkeys(extras))
    except (TypeError, ValueError, NameError) as error:
        return f"{error}; it is called with ({', '.join(positional)}), and its numbers have defaults"
    return ""
