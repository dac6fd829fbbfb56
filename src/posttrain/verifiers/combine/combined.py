"""One verdict from several verifiers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.combine.formula import ENSEMBLES, How, combined, deviation, total
from posttrain.verifiers.combine.length import Length
from posttrain.verifiers.function import Function
from posttrain.verifiers.pool import judged, judged_all, judged_group
from posttrain.verifiers.protocol import NOT_APPLICABLE, Group, Verifier

UNSTATED_S = 10.0
"""What a part that runs in a worker and states no budget is allowed, where another part states one."""
TAKEN = {"length", "uncertainty"}
"""What the verdict says of all parts together, by these names."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One verifier of several; its score counts times the weight."""

    verifier: Verifier
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"a weight must be finite, not {self.weight}")


@dataclass(frozen=True, kw_only=True)
class Normalise:
    """Scores are replaced by (score − mean) / std."""

    mean: float = 0.0
    """Taken off each score."""
    std: float = 1.0
    """Divides what is left."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 < self.std < math.inf):
            raise ValueError(f"mean must be finite and std above 0, not {self.mean} and {self.std}")


@dataclass(frozen=True, kw_only=True)
class Combined(Verifier):
    """The parts' scores s, each times its weight w, as one; then length, normalise and clip, in this order.

    | how | score |
    |---|---|
    | sum | Σ w s |
    | product | Π max(w s, 0) |
    | gate | w s of the first part that gives less than its best; of the last one if none does |
    | mean, min | mean or minimum of w s |
    | mean_minus_std | mean − k · standard deviation of w s, ddof 0 |

    A gate judges the parts in order and ends at the first that is not at its best. Elsewhere a part of
    weight 0 is recorded and does not count; in a gate it stops what it must and pays 0.

    If a part cannot judge, the whole cannot, and carries that part's label: a broken part is never counted
    as 0. A part to which a response does not apply is left out of the formula, as if it were not there; where
    no part that counts applies, or the last of a gate does not, the whole does not. The label is that of the
    first part that applies, in a gate that of the part that decided, and `forbidden` wherever a part says so.
    `Verdict.parts` holds each part's own score, parts of a part as PART/NAME, `uncertainty` (the standard
    deviation of w s) for the last three, and `length`, what the length has changed.

    `Verdict.progress` is Σ w Φ for a sum or a single part, over the same std and within the same clip as the
    score; others, and a cosine length, have none.

    >>> from posttrain.verifiers.answers import Exact
    >>> from posttrain.verifiers.structure.patterns import Format
    >>> both = Combined(parts=(Part(verifier=Exact(where="tag")), Part(verifier=Format(), weight=0.5)))
    >>> verdict = both(Task(id="q", messages=(), answer="7"), "<answer>7</answer>")
    >>> verdict.score, verdict.label, dict(verdict.parts)
    (1.0, 'right', {'exact': 1.0, 'format': 0.0})
    """

    parts: tuple[Part, ...]
    how: How = "sum"
    k: float | None = None
    """For mean_minus_std: how many standard deviations to take off; 1 where it is not given."""
    length: Length | None = None
    normalise: Normalise | None = None
    clip: tuple[float, float] | None = None
    """The least and the greatest score."""
    name: str = "combined"

    def __post_init__(self) -> None:
        _check_names(self.parts)
        if self.how not in get_args(How):
            raise ValueError(f"how must be one of {', '.join(get_args(How))}, not {self.how!r}")
        if self.k is not None and (self.how != "mean_minus_std" or not 0 <= self.k < math.inf):
            raise ValueError(f"k is 0 or more and read by mean_minus_std only; here it is {self.k}")
        if self.clip is not None and not -math.inf < self.clip[0] < self.clip[1] < math.inf:
            raise ValueError(f"clip must be [low, high] with low < high, not {list(self.clip)}")
        if not any(part.weight for part in self.parts):
            raise ValueError("every weight is 0: nothing counts")
        if self.how in ("product", "gate"):
            _check_order_of_scores(self.how, self.parts)
        if self.length is not None and self.length.asks_best and self._raw_best is None:
            raise ValueError("a cosine length needs right_at: the best score is not known beforehand")

    @property
    def trusted(self) -> bool:
        """Whether every part is; or one is a function of this process, where the others then judge too."""
        parts = [part.verifier for part in self.parts]
        return all(v.trusted for v in parts) or any(isinstance(v, Function) and v.trusted for v in parts)

    @property
    def batch(self) -> int:
        """The largest of the parts' own; a part never gets more at a time than it takes."""
        return max(part.verifier.batch for part in self.parts)

    @property
    def grouped(self) -> bool:
        """Whether a part compares the responses to a task."""
        return any(part.verifier.grouped for part in self.parts)

    @property
    def best(self) -> float | None:
        """The score where every part is at its best; None where that is not known to be the greatest.

        That is with a negative weight, a part whose best is unknown, a length that changes every score, and
        mean_minus_std of parts with different bests.
        """
        raw = self._raw_best
        if raw is None or (self.length is not None and self.length.shape != "overlong"):
            return None
        return self._scaled(raw)

    def __call__(self, task: Task, response: str) -> Verdict:
        """The combined verdict, or the failure of the first part that fails."""
        return self.judge_all([(task, response)])[0]

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """The combined verdicts; a part is asked only about responses that nothing has decided before."""
        return self._judge([r for _, r in pairs], lambda v, chosen: _judged(v, [pairs[i] for i in chosen]))

    def judge_group(self, group: Group) -> list[Verdict]:
        """The same, where parts that compare are given all responses that nothing has decided before."""

        def judge(verifier: Verifier, chosen: Sequence[int]) -> list[Verdict]:
            some = group.only(chosen)
            return judged_group(verifier, some) if verifier.grouped else _judged(verifier, some.pairs)

        return self._judge(group.responses, judge)

    def _judge(
        self, responses: Sequence[str], judge: Callable[[Verifier, Sequence[int]], list[Verdict]]
    ) -> list[Verdict]:
        given: list[list[Verdict]] = [[] for _ in responses]
        going = list(range(len(responses)))
        for part in self.parts:
            for i, verdict in zip(going, judge(part.verifier, going) if going else (), strict=True):
                given[i].append(verdict)
            going = [i for i in going if self._goes_on(part.verifier, given[i][-1])]
        return [self._verdict(verdicts, each) for verdicts, each in zip(given, responses, strict=True)]

    def golds(self, task: Task) -> list[str]:
        """Those golds of the trusted parts that satisfy all of them; UserError if none does.

        None are named if a part is not trusted, which may refuse what the others propose.
        """
        counted = [part.verifier for part in self._counted]
        known = [verifier for verifier in counted if verifier.trusted and verifier.best is not None]
        proposed = dict.fromkeys(gold for verifier in known for gold in verifier.golds(task))
        kept = [gold for gold in proposed if all(v(task, gold).score == v.best for v in known)]
        if proposed and not kept:
            raise UserError(
                self.name,
                f"no response satisfies {' and '.join(v.name for v in known)} together",
                "for example, number with where = 'tag' reads what format asks for",
            )
        if self.best is None or len(known) < len(counted):
            return []
        return [gold for gold in kept if self.length is None or self.length.spares(gold)]

    def fakes(self, task: Task) -> list[str]:
        """The fakes of all parts that count, where each of them is bound to cost the whole its best score."""
        raw = self._raw_best
        if self.best is None or raw is None or (self.clip is not None and self._normal(raw) > self.clip[1]):
            return [""]
        costly = self._counted
        if self.how == "min":  # another part's score may fall, and the least stays
            costly = [part for part in costly if part.weight * (part.verifier.best or 0.0) == raw]
        return list(dict.fromkeys(["", *(fake for part in costly for fake in part.verifier.fakes(task))]))

    def check(self, task: Task) -> None:
        """UserError if a part refuses the task."""
        for part in self.parts:
            part.verifier.check(task)

    def budget_s(self, task: Task) -> float | None:
        """The parts' budgets together; None if none of them states one."""
        stated = [part.verifier.budget_s(task) for part in self.parts if not part.verifier.trusted]
        if all(budget is None for budget in stated):
            return None
        return math.fsum(UNSTATED_S if budget is None else budget for budget in stated)

    def require(self) -> None:
        """UserError if a part lacks what it needs."""
        for part in self.parts:
            part.verifier.require()

    @property
    def _counted(self) -> list[Part]:
        return [part for part in self.parts if part.weight != 0 or self.how == "gate"]

    @property
    def _raw_best(self) -> float | None:
        """The greatest value of the formula; None where it is unknown."""
        bests = [part.verifier.best for part in self._counted]
        known = [best for best in bests if best is not None]
        if len(known) < len(bests) or any(part.weight < 0 for part in self._counted):
            return None
        scores = [part.weight * best for part, best in zip(self._counted, known, strict=True)]
        if self.how == "mean_minus_std" and len(set(scores)) > 1:
            return None
        return self._value(scores)

    def _goes_on(self, verifier: Verifier, verdict: Verdict) -> bool:
        if verdict.score is None:
            return _silent(verdict)
        return self.how != "gate" or verifier.best is None or verdict.score >= verifier.best

    def _value(self, scores: list[float]) -> float:
        return combined(self.how, scores, 1.0 if self.k is None else self.k)

    def _verdict(self, given: list[Verdict], response: str) -> Verdict:
        asked = list(zip(self.parts, given, strict=False))
        said = [(p, v) for p, v in asked if not _silent(v)]
        scored = [(p, v, v.score) for p, v in said if v.score is not None]
        if len(scored) < len(said):
            part, failed = next((p, v) for p, v in said if v.score is None)
            return Verdict(score=None, label=failed.label, reason=f"{part.verifier.name}: {failed.reason}")
        scores = [p.weight * score for p, _, score in scored if p.weight != 0 or self.how == "gate"]
        if not scores or (self.how == "gate" and _silent(given[-1])):  # a gate pays by its last part
            reason = "; ".join(f"{p.verifier.name}: {v.reason}" for p, v in asked)
            return Verdict(score=None, label=NOT_APPLICABLE, reason=reason)
        kept = {f"{p.verifier.name}/{name}": x for p, v, _ in scored for name, x in v.parts.items()}
        kept |= {p.verifier.name: score for p, _, score in scored}
        last = scored[-1][1]
        raw = shaped = self._value(scores)
        if self.length is not None:
            shaped = self.length.shaped(raw, response, self._raw_best)
            kept["length"] = shaped - raw
        if self.how in ENSEMBLES:
            kept["uncertainty"] = deviation(scores)
        score = self._scaled(shaped)
        if not all(math.isfinite(number) for number in (raw, score, *kept.values())):
            return Verdict(score=None, label="not_a_number", reason=f"the {self.how} of the scores is {raw}")
        reason = "; ".join(f"{p.verifier.name}: {v.reason}" for p, v, _ in scored)
        label = last.label if self.how == "gate" else scored[0][1].label
        label = next((v.label for _, v, _ in scored if v.label.casefold() == "forbidden"), label)
        progress = self._progress([(p.weight, v.progress) for p, v, _ in scored])
        return Verdict(score=score, label=label, reason=reason, parts=kept, progress=progress)

    def _normal(self, score: float) -> float:
        return score if self.normalise is None else (score - self.normalise.mean) / self.normalise.std

    def _scaled(self, score: float) -> float:
        score = self._normal(score)
        return score if self.clip is None else min(max(score, self.clip[0]), self.clip[1])

    def _progress(
        self, weighted: Sequence[tuple[float, Sequence[tuple[int, float]]]]
    ) -> tuple[tuple[int, float], ...]:
        """Σ w Φ wherever a part's Φ changes. Every Φ starts from 0, and so must what becomes of it."""
        replaced = self.length is not None and self.length.shape == "cosine"
        if replaced or (self.how != "sum" and len(self.parts) > 1):
            return ()
        low, high = (-math.inf, math.inf) if self.clip is None else self.clip
        std = 1.0 if self.normalise is None else self.normalise.std
        points = []
        for at in sorted({at for _, progress in weighted for at, _ in progress}):
            phi = total([w * next((phi for a, phi in reversed(p) if a <= at), 0.0) for w, p in weighted])
            points.append((at, min(max(phi / std, min(low, 0.0)), max(high, 0.0))))
        return tuple(points)


def _silent(verdict: Verdict) -> bool:
    """Whether the response is none that the verifier has anything to say about."""
    return verdict.score is None and verdict.label == NOT_APPLICABLE


def _judged(verifier: Verifier, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
    """One part's verdicts; what it raises is a failure of the responses it was judging."""
    size = verifier.batch
    if size == 1:
        return [judged(verifier, task, response) for task, response in pairs]
    starts = range(0, len(pairs), size)
    return [verdict for start in starts for verdict in judged_all(verifier, pairs[start : start + size])]


def _check_names(parts: Sequence[Part]) -> None:
    names = [part.verifier.name for part in parts]
    if not names:
        raise ValueError("at least one part is needed")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two parts are called {twice[0]!r}; give each its own name")
    if taken := sorted(TAKEN & set(names)):
        raise ValueError(
            f"no part can be called {taken[0]!r}: the verdict uses that name; give it another with name"
        )


def _check_order_of_scores(how: str, parts: Sequence[Part]) -> None:
    """ValueError where a worse response would be paid more."""
    if any(part.weight < 0 for part in parts):
        raise ValueError(f"a {how} takes no negative weight")
    if how == "product":
        low = next((p for p in parts if p.verifier.best is not None and p.verifier.best <= 0), None)
        if low is not None and low.weight > 0:
            raise ValueError(f"a product is never above 0 with {low.verifier.name!r}, whose best is not")
        return
    *before, last = parts
    if last.weight == 0:
        raise ValueError(f"a gate pays by its last part, and the weight of {last.verifier.name!r} is 0")
    for part in before:
        best, final = part.verifier.best, last.verifier.best
        if best is None:
            raise ValueError(f"a gate needs to know the best score of {part.verifier.name!r}")
        if final is not None and part.weight * best > last.weight * final:
            raise ValueError(f"failing {part.verifier.name!r} could pay more than passing every gate")
