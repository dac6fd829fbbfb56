"""Combine the verdicts of several verifiers into one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.combine.formula import ENSEMBLES, How, combine_scores, deviation, total
from posttrain.verifiers.combine.length import Length
from posttrain.verifiers.function import Function
from posttrain.verifiers.pool import judge_all_safely, judge_group_safely, judge_safely
from posttrain.verifiers.protocol import NOT_APPLICABLE, Group, Verifier

UNSTATED_S = 10.0
"""Budget of an untrusted part that states none, if another part states one."""
RESERVED_NAMES = {"length", "uncertainty"}
"""Names in `Verdict.parts` that belong to the combination, so that no part may have them."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of several verifiers; its score is multiplied by the weight."""

    verifier: Verifier
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"a weight must be finite, not {self.weight}")


@dataclass(frozen=True, kw_only=True)
class Normalise:
    """Replace scores by (score − mean) / std."""

    mean: float = 0.0
    """The mean that is subtracted from each score."""
    std: float = 1.0
    """The standard deviation that divides the difference."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and 0 < self.std < math.inf):
            raise ValueError(f"mean must be finite and std above 0, not {self.mean} and {self.std}")


@dataclass(frozen=True, kw_only=True)
class Combined(Verifier):
    """Combine the parts' scores s with their weights w; then apply length, normalise and clip, in this order.

    | how | score |
    |---|---|
    | sum | Σ w s |
    | product | Π max(w s, 0) |
    | gate | w s of the first part whose score is below its best; of the last part if all are at their best |
    | mean, min | mean or minimum of w s |
    | mean_minus_std | mean − k · standard deviation of w s, ddof 0 |

    A gate runs the parts in order and stops at the first that is not at its best. A part of weight 0 is
    recorded and does not count; in a gate it still stops, and then the score is 0.

    If a part fails to judge, the combination fails with that part's label: a broken part never counts as 0.
    A part that does not apply to the response (label not_applicable) is left out of the formula. The
    combination does not apply if no part that counts applies, or if the last part of a gate does not.

    The label is that of the first part that applies; in a gate that of the part that decided; `forbidden` if
    any part has that label. `Verdict.parts` holds each part's score, the parts of a part as PART/NAME,
    `uncertainty` (the standard deviation of w s; for mean, min and mean_minus_std) and `length` (the change
    of the score by the length).

    `Verdict.progress` is Σ w Φ for a sum or a single part, divided by the std and within the clip of the
    score; it is empty for other formulas and with a cosine length.

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
    """For mean_minus_std: number of standard deviations to subtract; 1 by default."""
    length: Length | None = None
    normalise: Normalise | None = None
    clip: tuple[float, float] | None = None
    """Lowest and highest score, to which other scores are clipped."""
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
        if self.length is not None and self.length.needs_best and self._raw_best is None:
            raise ValueError("a cosine length needs right_at: the best score is not known beforehand")

    @property
    def trusted(self) -> bool:
        """Whether every part is trusted, or a part is a callable of this process, which no worker can run."""
        parts = [part.verifier for part in self.parts]
        return all(v.trusted for v in parts) or any(isinstance(v, Function) and v.trusted for v in parts)

    @property
    def batch(self) -> int:
        """The largest batch of the parts; each part still gets at most its own batch."""
        return max(part.verifier.batch for part in self.parts)

    @property
    def grouped(self) -> bool:
        """Whether a part is grouped."""
        return any(part.verifier.grouped for part in self.parts)

    @property
    def largest_group(self) -> int | None:
        """The least of the parts' limits; None if no part has one."""
        limits = [part.verifier.largest_group for part in self.parts]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def best(self) -> float | None:
        """The score if every part is at its best; None if that may not be the highest score.

        It is None with a negative weight, a part whose best is unknown, a length that changes every score, or
        mean_minus_std of parts with different bests.
        """
        raw = self._raw_best
        if raw is None or (self.length is not None and self.length.shape != "overlong"):
            return None
        return self._scaled(raw)

    @property
    def addends(self) -> Mapping[str, float]:
        """The weights of the parts if the score is the weighted sum of several; empty for any other score."""
        weights = {part.verifier.name: part.weight for part in self._counted}
        is_sum = self.how == "sum" and not (self.length or self.normalise or self.clip)
        return weights if is_sum and len(weights) > 1 else {}

    def __call__(self, task: Task, response: str) -> Verdict:
        """Combine the verdicts on one response; the failure of the first part that fails."""
        return self.judge_all([(task, response)])[0]

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        """Combine the verdicts on each response; a part judges only those that no earlier part decided."""
        return self._judge(
            [r for _, r in pairs], lambda v, indices: _judge_part(v, [pairs[i] for i in indices])
        )

    def judge_group(self, group: Group) -> list[Verdict]:
        """Combine the verdicts; a grouped part gets all undecided responses as one group."""

        def judge(verifier: Verifier, indices: Sequence[int]) -> list[Verdict]:
            subgroup = group.select(indices)
            if verifier.grouped:
                return judge_group_safely(verifier, subgroup)
            return _judge_part(verifier, subgroup.pairs)

        return self._judge(group.responses, judge)

    def _judge(
        self, responses: Sequence[str], judge: Callable[[Verifier, Sequence[int]], list[Verdict]]
    ) -> list[Verdict]:
        verdicts: list[list[Verdict]] = [[] for _ in responses]
        undecided = list(range(len(responses)))
        for part in self.parts:
            judged = judge(part.verifier, undecided) if undecided else []
            for i, verdict in zip(undecided, judged, strict=True):
                verdicts[i].append(verdict)
            undecided = [i for i in undecided if self._continues(part.verifier, verdicts[i][-1])]
        return [self._verdict(of_one, response) for of_one, response in zip(verdicts, responses, strict=True)]

    def golds(self, task: Task) -> list[str]:
        """Return the trusted parts' golds that satisfy all trusted parts. Raises UserError if none does.

        The list is empty if a part is not trusted, because that part may refuse the golds of the others.
        """
        counted = [part.verifier for part in self._counted]
        trusted = [verifier for verifier in counted if verifier.trusted and verifier.best is not None]
        proposed = dict.fromkeys(gold for verifier in trusted for gold in verifier.golds(task))
        golds = [gold for gold in proposed if all(v(task, gold).score == v.best for v in trusted)]
        if proposed and not golds:
            raise UserError(
                self.name,
                f"no response satisfies {' and '.join(v.name for v in trusted)} together",
                "for example, number with where = 'tag' reads what format asks for",
            )
        if self.best is None or len(trusted) < len(counted):
            return []
        return [gold for gold in golds if self.length is None or self.length.is_free(gold)]

    def fakes(self, task: Task) -> list[str]:
        """Return the fakes of the parts that count, if each certainly keeps the combination from `best`."""
        raw = self._raw_best
        if self.best is None or raw is None or (self.clip is not None and self._normal(raw) > self.clip[1]):
            return [""]
        costly = self._counted
        if self.how == "min":  # a part with a higher best may lose score without changing the minimum
            costly = [part for part in costly if part.weight * (part.verifier.best or 0.0) == raw]
        return list(dict.fromkeys(["", *(fake for part in costly for fake in part.verifier.fakes(task))]))

    def check(self, task: Task) -> None:
        """Raise UserError if a part refuses the task."""
        for part in self.parts:
            part.verifier.check(task)

    def budget_s(self, task: Task) -> float | None:
        """Return the sum of the untrusted parts' budgets; None if no part states one."""
        budgets = [part.verifier.budget_s(task) for part in self.parts if not part.verifier.trusted]
        if all(budget is None for budget in budgets):
            return None
        return math.fsum(UNSTATED_S if budget is None else budget for budget in budgets)

    def require(self) -> None:
        """Raise UserError if a part lacks something it needs."""
        for part in self.parts:
            part.verifier.require()

    @property
    def _counted(self) -> list[Part]:
        return [part for part in self.parts if part.weight != 0 or self.how == "gate"]

    @property
    def _raw_best(self) -> float | None:
        """Highest value of the formula, before length, normalise and clip; None if unknown."""
        bests = [part.verifier.best for part in self._counted]
        numbers = [best for best in bests if best is not None]
        if len(numbers) < len(bests) or any(part.weight < 0 for part in self._counted):
            return None
        scores = [part.weight * best for part, best in zip(self._counted, numbers, strict=True)]
        if self.how == "mean_minus_std" and len(set(scores)) > 1:
            return None
        return self._value(scores)

    def _continues(self, verifier: Verifier, verdict: Verdict) -> bool:
        if verdict.score is None:
            return _is_not_applicable(verdict)
        return self.how != "gate" or verifier.best is None or verdict.score >= verifier.best

    def _value(self, scores: list[float]) -> float:
        return combine_scores(self.how, scores, 1.0 if self.k is None else self.k)

    def _verdict(self, verdicts: list[Verdict], response: str) -> Verdict:
        judged = list(zip(self.parts, verdicts, strict=False))
        applied = [(p, v) for p, v in judged if not _is_not_applicable(v)]
        scored = [(p, v, v.score) for p, v in applied if v.score is not None]
        if len(scored) < len(applied):
            part, failed = next((p, v) for p, v in applied if v.score is None)
            return Verdict(score=None, label=failed.label, reason=f"{part.verifier.name}: {failed.reason}")
        scores = [p.weight * score for p, _, score in scored if p.weight != 0 or self.how == "gate"]
        # The last part that a gate ran gives the score.
        if not scores or (self.how == "gate" and _is_not_applicable(verdicts[-1])):
            reason = "; ".join(f"{p.verifier.name}: {v.reason}" for p, v in judged)
            return Verdict(score=None, label=NOT_APPLICABLE, reason=reason)
        parts = {f"{p.verifier.name}/{name}": x for p, v, _ in scored for name, x in v.parts.items()}
        parts |= {p.verifier.name: score for p, _, score in scored}
        last = scored[-1][1]
        raw = shaped = self._value(scores)
        if self.length is not None:
            shaped = self.length.adjust(raw, response, self._raw_best)
            parts["length"] = shaped - raw
        if self.how in ENSEMBLES:
            parts["uncertainty"] = deviation(scores)
        score = self._scaled(shaped)
        if not all(math.isfinite(number) for number in (raw, score, *parts.values())):
            return Verdict(score=None, label="not_a_number", reason=f"the {self.how} of the scores is {raw}")
        reason = "; ".join(f"{p.verifier.name}: {v.reason}" for p, v, _ in scored)
        label = last.label if self.how == "gate" else scored[0][1].label
        label = next((v.label for _, v, _ in scored if v.label.casefold() == "forbidden"), label)
        progress = self._progress([(p.weight, v.progress) for p, v, _ in scored])
        return Verdict(score=score, label=label, reason=reason, parts=parts, progress=progress)

    def _normal(self, score: float) -> float:
        return score if self.normalise is None else (score - self.normalise.mean) / self.normalise.std

    def _scaled(self, score: float) -> float:
        score = self._normal(score)
        return score if self.clip is None else min(max(score, self.clip[0]), self.clip[1])

    def _progress(
        self, weighted: Sequence[tuple[float, Sequence[tuple[int, float]]]]
    ) -> tuple[tuple[int, float], ...]:
        """Σ w Φ / std, clipped, at each position where a part's Φ changes. Like every Φ it starts from 0."""
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


def _is_not_applicable(verdict: Verdict) -> bool:
    """Whether the verifier does not apply to the response."""
    return verdict.score is None and verdict.label == NOT_APPLICABLE


def _judge_part(verifier: Verifier, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
    """Judge with one part, in its own batches. An exception fails the responses of that batch alone."""
    size = verifier.batch
    if size == 1:
        return [judge_safely(verifier, task, response) for task, response in pairs]
    starts = range(0, len(pairs), size)
    return [
        verdict for start in starts for verdict in judge_all_safely(verifier, pairs[start : start + size])
    ]


def _check_names(parts: Sequence[Part]) -> None:
    names = [part.verifier.name for part in parts]
    if not names:
        raise ValueError("at least one part is needed")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two parts are called {twice[0]!r}; give each its own name")
    if reserved := sorted(RESERVED_NAMES & set(names)):
        raise ValueError(
            f"no part can be called {reserved[0]!r}: the verdict uses that name; give it another with name"
        )


def _check_order_of_scores(how: str, parts: Sequence[Part]) -> None:
    """Raise ValueError if a worse response could get a higher score."""
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
