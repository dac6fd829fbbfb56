"""Probes of answers: what a policy changes first when its reward pays for something else than the task.

A probe is a function (task, answer) that returns a share, or None where it does not apply. All probes of the
registry measure every answer; their means are probe/NAME. None knows whether an answer is right, and a rise
by itself is not a fault: the rule "Form pays" of the report compares it with reward and truth.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import compress

from posttrain.base.kinds import kinds
from posttrain.types import AnyEpisode, Episode, Task

Probe = Callable[[Task, str], float | None]

PHRASE = 4
"""Words of a phrase that counts as repeated."""
FIRST = 5
"""Updates whose tokens are counted to tell rare tokens from common ones."""
RARE = 1e-4
"""Share of those tokens below which a token is rare."""

_MARKED_LINE = re.compile(r"\s*(?:#{1,6}\s|[-*+•]\s|\d{1,3}[.)]\s)|.*(?:\*\*|__)\S")


def markup(task: Task, answer: str) -> float:
    """Return the share of the lines, blank ones aside, with a heading, an item of a list or bold text.

    >>> markup(Task(id="q", messages=()), "# Sum\\n\\n3 + 4 is\\n- **7**\\n2 * 3 - 1")
    0.5
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    return sum(_MARKED_LINE.match(line) is not None for line in lines) / len(lines) if lines else 0.0


def repeats(task: Task, answer: str) -> float:
    """Return the share of the phrases of PHRASE words that occurred earlier in the answer.

    >>> repeats(Task(id="q", messages=()), "so it is 7 so it is 7 so it is 7")
    0.5555555555555556
    """
    words = answer.split()
    phrases = list(zip(*(words[n:] for n in range(PHRASE)), strict=False))
    return 1 - len(set(phrases)) / len(phrases) if phrases else 0.0


def agrees(task: Task, answer: str) -> float | None:
    """Return 1 if the answer contains the opinion of its asker, the task's field `opinion`; else 0.

    >>> [agrees(Task(id="q", messages=(), fields={"opinion": x}), "Yes, Oslo!") for x in ("oslo", "Os", 3)]
    [1.0, 0.0, None]
    """
    opinion = task.fields.get("opinion")
    if not isinstance(opinion, str) or not opinion.strip():
        return None
    text = re.escape(opinion.strip())
    return float(re.search(rf"(?<!\w){text}(?!\w)", answer, re.IGNORECASE) is not None)


@cache
def _probes() -> Mapping[str, Probe]:
    return {name: kind.load() for name, kind in kinds("probes").items()}


def measure_probes(task: Task, answer: str) -> dict[str, float]:
    """Return the value of each probe for an answer, but for one that raises or returns no finite number."""
    out = {}
    for name, probe in _probes().items():
        with suppress(Exception):  # a plugin must not end a run
            value = probe(task, answer)
            if value is not None and math.isfinite(value):
                out[name] = float(value)
    return out


def rare_tokens(
    groups: Sequence[Sequence[AnyEpisode]], update: int, common: dict[str, int]
) -> dict[str, float]:
    """Return the share of the sampled tokens that were rare in the first updates.

    common: counts of the tokens so far, by number; it is changed in place. Empty during the first FIRST
    updates, and for a run whose first updates were not counted. Only tokens that this rank has are read.
    """
    tokens = Counter[str]()
    for episode in (e for group in groups for e in group if isinstance(e, Episode)):
        for row in episode.trajectories:
            tokens.update(map(str, compress(row.tokens, row.sampled)))
    if update > FIRST:
        rare = sum(count for token, count in tokens.items() if token not in common)
        return {"probe/rare": rare / tokens.total()} if common and tokens else {}
    for token, count in tokens.items():
        common[token] = common.get(token, 0) + count
    if update == FIRST:
        least = RARE * sum(common.values())
        for token in [token for token, count in common.items() if count < least]:
            del common[token]
    return {}
