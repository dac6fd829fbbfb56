"""What a rule looks at, and what it finds."""

from dataclasses import dataclass

from posttrain.report.record import Curves
from posttrain.report.rollouts import UpdateRollouts


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules may look at."""

    metrics: Curves
    steps: list[UpdateRollouts]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found, and where to look: an update and a metric, with verdict/* for any verdict."""

    text: str
    update: int
    metric: str
