"""Check the rules of the report while a run is running, and report each broken rule once."""

import math
import time
from collections.abc import Callable, Iterable, Mapping

from posttrain.report.alarms import RULES, AlarmRule, Evidence, Finding
from posttrain.report.curve import Curve
from posttrain.report.record import Curves, integer, number

EVERY_UPDATE = 100
"""Number of first updates after each of which the rules are checked; a check reads all updates."""
SHARE = 0.01
"""Share of the time that checks may take after these updates."""


class Watch:
    """The curves of a run so far, and the rules already reported.

    >>> watch = Watch()
    >>> watch.see({"update": 1, "kl/ref": 0.1})
    []
    >>> [(rule.name, finding.text) for rule, finding in watch.see({"update": 2, "kl/ref": 0.75})]
    [('KL blow-up', 'kl/ref reached 0.75 at update 2')]
    >>> watch.see({"update": 3, "kl/ref": 0.8})
    []
    """

    def __init__(
        self, earlier: Iterable[Mapping[str, object]] = (), now: Callable[[], float] = time.monotonic
    ) -> None:
        """earlier: lines from before a resume; rules that they break are reported with the first new line."""
        self._now, self._next = now, -math.inf
        self._updates: list[int] = []
        self._series: dict[str, Curve] = {}
        self._reported: set[str] = set()
        for line in earlier:
            self._add(line)

    def see(self, line: Mapping[str, object], *, last: bool = False) -> list[tuple[AlarmRule, Finding]]:
        """Add a line of metrics.jsonl and return the broken rules that were not reported yet.

        After EVERY_UPDATE updates some lines are not checked; the `last` line always is.
        """
        self._add(line)
        start = self._now()
        if len(self._updates) > EVERY_UPDATE and start < self._next and not last:
            return []
        evidence = Evidence(Curves(tuple(self._updates), self._series), [])
        rules = [rule for rule in RULES if rule.name not in self._reported]
        new = [(rule, finding) for rule in rules if (finding := rule.check(evidence)) is not None]
        self._reported.update(rule.name for rule, _ in new)
        end = self._now()
        self._next = end + (end - start) / SHARE
        return new

    def _add(self, line: Mapping[str, object]) -> None:
        update = integer(line.get("update")) or 0
        # A run that resumes from a checkpoint repeats the updates after it.
        while self._updates and self._updates[-1] >= update:
            repeated = self._updates.pop()
            for values in self._series.values():
                values.pop(repeated, None)
        self._updates.append(update)
        for name, value in line.items():
            if name not in self._series:
                self._series[name] = Curve()
            self._series[name][update] = number(value)
