"""A condition on one line of metrics, such as `eval/accuracy >= 0.8`."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@dataclass(frozen=True)
class Condition:
    """A metric, a relation and a bound.

    >>> str(Condition.parse("eval/accuracy>=.8")), str(Condition.parse("tokens > 1234567"))
    ('eval/accuracy >= 0.8', 'tokens > 1234567')
    """

    metric: str
    relation: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Read `METRIC RELATION NUMBER`.

        Raises ValueError if the text has another form.
        """
        match = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
        try:
            bound = float(match[3]) if match else math.nan
        except ValueError:
            bound = math.nan
        if match is None or not math.isfinite(bound):
            form = f"a metric, one of {' '.join(RELATIONS)} and a number"
            raise ValueError(f'expected {form}, such as "eval/accuracy >= 0.8", not {text!r}')
        return cls(match[1], match[2], bound)

    def __str__(self) -> str:
        bound = int(self.bound) if self.bound.is_integer() else self.bound
        return f"{self.metric} {self.relation} {bound}"  # exact digits: the recipe stores this text

    def holds(self, line: Mapping[str, object]) -> bool:
        """Return whether the line has the metric and its value satisfies the relation; NaN never does."""
        value = line.get(self.metric)
        return isinstance(value, int | float) and RELATIONS[self.relation](value, self.bound)

    def first_update(self, lines: Iterable[Mapping[str, object]]) -> int | None:
        """Return the first update after which the condition holds, or None.

        The evaluation before training is update 0 and does not count.
        """
        updates = (line.get("update") for line in lines if self.holds(line))
        return next((update for update in updates if isinstance(update, int) and update > 0), None)
