"""The rules of the report while a run goes on: each is told once, when it is seen to be broken."""

import math
import time
from collections.abc import Callable, Iterable, Mapping

from posttrain.report.alarms import RULES, AlarmRule
from posttrain.report.evidence import Evidence, Finding
from posttrain.report.record import Curves, number, whole
from posttrain.report.series import Curve

EACH = 100
"""Updates of a run after each of which the rules are checked; they look at all of them."""
SHARE = 0.01
"""Of the time that passes, what checking may take from then on."""


class Watch:
    """What the lines of a run say so far, and which of the rules it has told of.

    >>> watch = Watch()
    >>> watch.see({"update": 1, "kl/ref": 0.1})
    []
    >>> [(rule.name, found.text) for rule, found in watch.see({"update": 2, "kl/ref": 0.75})]
    [('KL blow-up', 'kl/ref reached 0.75 at update 2')]
    >>> watch.see({"update": 3, "kl/ref": 0.8})
    []
    """

    def __init__(
        self, earlier: Iterable[Mapping[str, object]] = (), now: Callable[[], float] = time.monotonic
    ) -> None:
        """`earlier`: lines of before a resume; what they break is told with the first new line."""
        self._now, self._next = now, -math.inf
        self._updates: list[int] = []
        self._series: dict[str, Curve] = {}
        self._told: set[str] = set()
        for line in earlier:
            self._take(line)

    def see(self, line: Mapping[str, object], *, last: bool = False) -> list[tuple[AlarmRule, Finding]]:
        """The rules that are broken with this line of metrics.jsonl and were not before.

        A long run is not looked at after each line, but surely with its `last`.
        """
        self._take(line)
        begun = self._now()
        if len(self._updates) > EACH and begun < self._next and not last:
            return []
        evidence = Evidence(Curves(tuple(self._updates), self._series), [])
        untold = [rule for rule in RULES if rule.name not in self._told]
        new = [(rule, found) for rule in untold if (found := rule.check(evidence)) is not None]
        self._told.update(rule.name for rule, _ in new)
        ended = self._now()
        self._next = ended + (ended - begun) / SHARE
        return new

    def _take(self, line: Mapping[str, object]) -> None:
        update = whole(line.get("update")) or 0
        # A run that goes on from a checkpoint makes the updates after it again.
        while self._updates and self._updates[-1] >= update:
            again = self._updates.pop()
            for values in self._series.values():
                values.pop(again, None)
        self._updates.append(update)
        for name, value in line.items():
            if name not in self._series:
                self._series[name] = Curve()
            self._series[name][update] = number(value)
