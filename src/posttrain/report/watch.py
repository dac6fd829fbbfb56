"""The rules of the report while a run goes on: each is told when it is first broken."""

from collections.abc import Iterable, Mapping

from posttrain.report.alarms import Rule, findings
from posttrain.report.evidence import Evidence, Finding
from posttrain.report.record import Metrics, number, whole


class Watch:
    """What the lines of a run say so far, and which of the rules it has told of.

    >>> watch = Watch()
    >>> [(rule.name, found.text) for rule, found in watch.see({"update": 1, "kl/ref": 0.75})]
    [('KL blow-up', 'kl/ref reached 0.75 at update 1')]
    >>> watch.see({"update": 2, "kl/ref": 0.8})
    []
    """

    def __init__(self, earlier: Iterable[Mapping[str, object]] = ()) -> None:
        """`earlier`: lines of before a resume; what they break is told with the first new line."""
        self._updates: list[int] = []
        self._series: dict[str, dict[int, float | None]] = {}
        self._told: set[str] = set()
        for line in earlier:
            self._take(line)

    def see(self, line: Mapping[str, object]) -> list[tuple[Rule, Finding]]:
        """The rules that are broken with this line of metrics.jsonl and were not before."""
        self._take(line)
        found = findings(Evidence(Metrics(tuple(self._updates), self._series), []))
        new = [(rule, finding) for rule, finding in found if rule.name not in self._told]
        self._told.update(rule.name for rule, _ in new)
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
            self._series.setdefault(name, {})[update] = number(value)
