"""What a rule looks at, and what it finds."""

from dataclasses import dataclass

from posttrain.report.record import Metrics
from posttrain.report.rollouts import Step


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the rules may look at."""

    metrics: Metrics
    steps: list[Step]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found, and where to look: an update and a metric, with verdict/* for any verdict."""

    text: str
    update: int
    metric: str
