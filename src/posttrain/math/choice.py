"""A choice of a method: a function with its numbers, what each number may be, and what the function needs.

Nothing has to be said of a function. Its parameters whose default is a number are its numbers, and each
may be 0 or more:

    def tapered(log_ratio, advantage, cap: AtLeast(1) = 1.0): ...

says otherwise of one of them, and @choice(compares="group") of the function that it holds the answers to a
task against one another.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Between:
    """What a number may be, both ends included: the annotation of a parameter, or within `Annotated`.

    >>> Between(0, 1)
    Between(least=0, most=1)
    """

    least: int | float
    most: int | float


@dataclass(frozen=True)
class AtLeast(Between):
    """The same without an upper end.

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
    """What a function asks of the updates that it is used in."""

    group: Callable[[Mapping[str, Any]], int] = lambda numbers: 1
    """The fewest judged answers to a task, from the function's numbers."""
    by_token: bool = True
    """Whether it makes sense of tokens that are credited one by one."""


def choice(
    *,
    compares: Literal["group"] | None = None,
    group: int | Callable[[Mapping[str, Any]], int] = 2,
    by_token: bool | None = None,
) -> Callable[[F], F]:
    """Says of a function what it needs, and leaves it as it is: a decorator.

    compares: "group" if it holds the answers to a task against one another, of which it then needs `group`;
    fewer are refused before anything trains. by_token: whether tokens that are credited one by one may be
    given to it, which is not so of what compares answers unless it says so.

    >>> @choice(compares="group")
    ... def best(returns, group): ...
    >>> least_group(best), least_group(lambda returns, group: returns)
    (2, 1)
    """
    least = (group if callable(group) else lambda numbers: group) if compares else lambda numbers: 1
    needs = Needs(least, by_token if by_token is not None else compares is None)

    def said(function: F) -> F:
        vars(function)["needs"] = needs
        return function

    return said


@dataclass(frozen=True)
class Choice:
    """A function with its numbers, called like the function. Two of one function and numbers are equal."""

    function: ClassVar[Callable[..., Any]]

    def __call__(self, *args: Any, **given: Any) -> Any:
        """The function's value at these arguments and these numbers."""
        numbers = {name: number for name, number in vars(self).items() if number is not None}
        return self.function(*args, **numbers, **given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self).function, vars(self))


def _made(function: Callable[..., Any], numbers: Mapping[str, Any]) -> Choice:
    return kind_of(function)(**numbers)


@lru_cache(maxsize=1024)
def kind_of(function: Callable[..., Any]) -> type[Choice]:
    """The dataclass of a function's choices: a field for each number, with what it may be.

    A `horizon` without a default is one too, which is None until the length of the longest answer is known.
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
    """A number's type, with its bounds."""
    if isinstance(annotation, Between):
        return Annotated[kind, annotation]
    if get_origin(annotation) is Annotated:
        return Annotated[get_args(annotation)[0], bounds(annotation)]
    kind = annotation if annotation in (bool, int, float) else kind
    return kind if kind is bool else Annotated[kind, AtLeast(0)]


def bounds(hint: Any) -> Between:
    """What a number of this type may be: 0 or more, if the type does not say."""
    said = (mark for mark in get_args(hint) if isinstance(mark, Between))
    return next(said, AtLeast(0))


@lru_cache(maxsize=64)
def numbers_of(cls: type) -> type:
    """The dataclass of the numbers among a dataclass's fields, with what each may be."""
    hints = get_type_hints(cls, include_extras=True)
    found = ((f.name, hints[f.name]) for f in fields(cls))
    own = [
        (name, Annotated[float, bounds(hint)], field(default=0.0))
        for name, hint in found
        if float in (hint, *get_args(hint)[:1])
    ]
    return make_dataclass(f"{cls.__name__}Numbers", own, frozen=True)


def as_choice(chosen: Callable[..., Any]) -> Choice:
    """What is chosen with its numbers: a function with its defaults, a partial with those that it fixes.

    >>> def clipped(x, low: float = 0.2): ...
    >>> as_choice(partial(clipped, low=0.1))
    clipped(low=0.1)
    """
    return chosen if isinstance(chosen, Choice) else kind_of(chosen)()


def function_of(chosen: Any) -> Any:
    """What is chosen, without numbers that a choice or a partial has fixed."""
    while isinstance(chosen, (partial, Choice)):
        chosen = chosen.func if isinstance(chosen, partial) else chosen.function
    return chosen


def name_of(chosen: Any) -> str:
    """The name of a chosen function; of an object that can be called, that of its class."""
    function = function_of(chosen)
    return str(getattr(function, "__name__", type(function).__name__))


def needs_of(chosen: Callable[..., Any]) -> Needs:
    """What a chosen function needs."""
    found: Needs = getattr(function_of(chosen), "needs", Needs())
    return found


def least_group(chosen: Callable[..., Any]) -> int:
    """The fewest judged answers to a task that a chosen function can say anything of."""
    found = getattr(function_of(chosen), "needs", None)
    return found.group(vars(as_choice(chosen))) if found else 1


@lru_cache(maxsize=1024)
def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


def misfit(function: Any, neighbour: Callable[..., Any]) -> str:
    """Why a function cannot be called as its neighbour is, whose numbers have defaults; empty if it can.

    >>> misfit(lambda returns: returns, lambda returns, group, eps=1e-6: returns)
    'too many positional arguments; it is called with (returns, group), and its numbers have defaults'
    """
    like = inspect.signature(neighbour).parameters.values()
    given = [p.name for p in like if type(p.default) not in (int, float)]
    try:
        signature = inspect.signature(function, eval_str=True)
        signature.bind(*given, **{"horizon": 0} if "horizon" in signature.parameters else {})
    except (TypeError, ValueError, NameError) as error:
        return f"{error}; it is called with ({', '.join(given)}), and its numbers have defaults"
    return ""
