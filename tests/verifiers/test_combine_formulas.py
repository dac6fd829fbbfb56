"""Several verifiers as one: against formulas written a second time, in any order, alone and in batches."""

import itertools
import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mathcheck.plugin.number import Number
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.answers import Exact
from posttrain.verifiers.combine.combined import UNSTATED_S, Combined, Normalise, Part
from posttrain.verifiers.combine.length import Length
from posttrain.verifiers.pool import Pool, judge_safely
from posttrain.verifiers.protocol import Verifier
from posttrain.verifiers.self_test import check_all, self_test
from posttrain.verifiers.structure.patterns import Format, Regex

HOWS = ["sum", "product", "gate", "mean", "min", "mean_minus_std"]


@dataclass(frozen=True, kw_only=True)
class Says(Verifier):
    """Gives what the response, a JSON list, says at its place; null is a failure, text is raised."""

    at: int
    name: str = ""
    best: float | None = 1.0  # type: ignore[assignment,misc]
    batch: int = 1  # type: ignore[misc]
    budget: float | None = None
    trusted: ClassVar[bool] = True
    asked: list[int] = field(default_factory=list, compare=False)

    def __call__(self, task: Task, response: str) -> Verdict:
        self.asked.append(1)
        return self._said(response)

    def judge_all(self, pairs: Sequence[tuple[Task, str]]) -> list[Verdict]:
        self.asked.append(len(pairs))
        return [self._said(response) for _, response in pairs]

    def _said(self, response: str) -> Verdict:
        said = json.loads(response)[self.at]
        if isinstance(said, str):
            raise RuntimeError(said)
        if said is None:
            return Verdict(score=None, label="timeout", reason="slow")
        label = f"p{self.at}" if abs(said) < 7 else "forbidden"
        steps = tuple((int(10 * i), said * i / 4) for i in range(1, 4)) if self.at != 1 else ()
        return Verdict(score=said, label=label, reason="said", progress=steps)

    def budget_s(self, task: Task) -> float | None:
        return self.budget


def parts(weights: Sequence[float], **options: Any) -> tuple[Part, ...]:
    return tuple(Part(verifier=Says(at=i, name=f"s{i}", **options), weight=w) for i, w in enumerate(weights))


def task(answer: str | None = "7") -> Task:
    return Task(
        id="q", messages=({"role": "user", "content": "How much?"},), answer=answer, source="d.jsonl:3"
    )


def slow(how: str, x: list[float], k: float) -> float:
    """The formulas again, by numpy and by loops."""
    if how == "sum":
        return float(np.sum(np.array(x, dtype=np.longdouble)))
    if how == "product":
        out = 1.0
        for value in x:
            out *= value if value > 0 else 0.0
        return out
    if how == "gate":
        return next((value for value in x if value < 1.0), x[-1])
    if how == "min":
        return sorted(x)[0]
    array = np.array(x)
    return float(array.mean() - (k * array.std(ddof=0) if how == "mean_minus_std" else 0.0))


SCORES = st.floats(-2, 1, width=16)


@settings(max_examples=60, deadline=None)
@given(st.lists(SCORES, min_size=1, max_size=5), st.floats(0, 3), st.randoms())
def test_each_formula_is_what_it_is_called(scores: list[float], k: float, random: Any) -> None:
    for how in HOWS:
        options = {"k": k} if how == "mean_minus_std" else {}
        verdict = Combined(parts=parts([1.0] * len(scores)), how=how, **options)(task(), json.dumps(scores))  # type: ignore[arg-type]
        assert verdict.score == pytest.approx(slow(how, scores, k), abs=1e-9)
        if how in HOWS[3:]:
            assert verdict.parts["uncertainty"] == pytest.approx(float(np.std(scores)), abs=1e-9)
        if how == "gate":
            continue
        for name, value in zip([f"s{i}" for i in range(len(scores))], scores, strict=True):
            assert verdict.parts[name] == value
        order = random.sample(range(len(scores)), len(scores))
        mixed = tuple(parts([1.0] * len(scores))[i] for i in order)
        assert Combined(parts=mixed, how=how, **options)(task(), json.dumps(scores)).score == verdict.score  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SCORES, st.floats(0.125, 4, width=16)), min_size=1, max_size=4))
def test_weights_multiply_scores_before_anything_else(pairs: list[tuple[float, float]]) -> None:
    scores, weights = [s for s, _ in pairs], [w for _, w in pairs]
    for how in ["sum", "product", "mean", "min", "mean_minus_std"]:
        weighted = Combined(parts=parts(weights), how=how)(task(), json.dumps(scores))  # type: ignore[arg-type]
        plain = [w * s for s, w in pairs]
        assert weighted.score == pytest.approx(slow(how, plain, 1.0), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.none() | st.just("bang") | SCORES | st.just(9.0), min_size=3, max_size=3), max_size=9
    ),
    st.sampled_from(HOWS),
    st.tuples(*[st.integers(1, 4)] * 3),
)
def test_a_batch_is_judged_as_each_response_alone(rows: list[list[Any]], how: Any, batches: Any) -> None:
    """Failures of one response are its own, unless the model that judges a batch breaks as a whole."""
    rows = [
        [v if batches[i] == 1 or not isinstance(v, str) else 0.5 for i, v in enumerate(row)] for row in rows
    ]
    made = [Says(at=i, name=f"s{i}", batch=b) for i, b in enumerate(batches)]
    whole = Combined(parts=tuple(Part(verifier=v) for v in made), how=how)
    assert whole.batch == max(batches)
    together = whole.judge_all([(task(), json.dumps(row)) for row in rows])
    for part in made:
        assert max(part.asked, default=0) <= part.batch
    alone = [whole(task(), json.dumps(row)) for row in rows]
    assert together == alone
    for row, verdict in zip(rows, together, strict=True):
        reached = row if how != "gate" else [*itertools.takewhile(lambda v: v in (1.0, 9.0), row), None]
        broken = [
            v for v in (row if how != "gate" else row[: len(reached)]) if v is None or isinstance(v, str)
        ]
        assert (verdict.score is None) == bool(broken)
        if broken:
            assert verdict.label == ("raised" if isinstance(broken[0], str) else "timeout")
            assert not verdict.parts


def test_addends_are_the_weights_of_a_plain_sum_alone() -> None:
    """Σ w s over them is the score; what is more or other than such a sum has none."""
    weights = [1.0, 0.0, -0.5]
    whole = Combined(parts=parts(weights))
    assert whole.addends == {"s0": 1.0, "s2": -0.5}
    verdict = whole(task(), "[0.5, 9, 2]")
    assert verdict.score == sum(w * verdict.parts[name] for name, w in whole.addends.items())
    changes: list[dict[str, Any]] = [
        {"length": Length(shape="linear", most=9)},
        {"normalise": Normalise(std=2.0)},
        {"clip": (0.0, 1.0)},
    ]
    assert all(not Combined(parts=parts(weights), **change).addends for change in changes)
    assert all(not Combined(parts=parts([1.0, 2.0]), how=how).addends for how in HOWS[1:])  # type: ignore[arg-type]
    assert not Combined(parts=parts([2.0, 0.0])).addends


def test_a_model_that_breaks_on_a_batch_fails_that_batch_alone() -> None:
    model = Says(at=0, name="model", batch=2)
    whole = Combined(parts=(Part(verifier=model), Part(verifier=Says(at=1, name="other"))))
    rows = [[1.0, 1.0], ["bang", 1.0], [0.5, 1.0]]
    verdicts = whole.judge_all([(task(), json.dumps(row)) for row in rows])
    assert [v.score for v in verdicts] == [None, None, 1.5]
    assert verdicts[0].reason.startswith("model: RuntimeError: bang")
    assert model.asked == [2, 1]


def test_a_gate_runs_no_part_behind_the_one_that_stops_it() -> None:
    made = [Says(at=i, name=f"s{i}", batch=2) for i in range(3)]
    gate = Combined(parts=tuple(Part(verifier=v) for v in made), how="gate")
    rows = [[0.25, 1, 1], [1, 0.5, 1], [1, 1, 0.75], [1, 1, 1]]
    verdicts = gate.judge_all([(task(), json.dumps(row)) for row in rows])
    assert [(v.score, v.label) for v in verdicts] == [(0.25, "p0"), (0.5, "p1"), (0.75, "p2"), (1.0, "p2")]
    assert [sum(v.asked) for v in made] == [4, 3, 2]
    assert list(verdicts[0].parts) == ["s0"]
    assert gate.best == 1.0


def test_a_gate_of_weight_0_pays_nothing_for_a_half_open_door() -> None:
    gate = Combined(parts=parts([0.0, 1.0]), how="gate")
    assert gate(task(), "[0.9, 1.0]").score == 0.0
    assert gate(task(), "[1.0, 0.5]").score == 0.5
    assert gate.best == 1.0


def test_the_label_is_the_first_parts_unless_one_says_forbidden() -> None:
    whole = Combined(parts=parts([1.0, 1.0]))
    assert whole(task(), "[0, 1]").label == "p0"
    assert whole(task(), "[0, 9]").label == "forbidden"
    assert whole(task(), "[9, 0]").label == "forbidden"
    assert Combined(parts=parts([1.0, 0.0]))(task(), "[0, 9]").label == "forbidden"


@pytest.mark.parametrize("how", HOWS)
def test_a_part_that_cannot_judge_fails_the_whole(how: Any) -> None:
    weights = [1.0, 0.0] if how not in ("gate",) else [0.0, 1.0]
    for row in ("[null, 1]", "[1, null]"):
        verdict = Combined(parts=parts(weights), how=how, clip=(0.0, 1.0))(task(), row)
        assert (verdict.score, verdict.label) == (None, "timeout")
        assert verdict.parts == {}


@pytest.mark.parametrize("how", ["sum", "product", "mean", "min", "mean_minus_std"])
def test_a_part_of_weight_0_is_recorded_and_does_not_count(how: Any) -> None:
    verdict = Combined(parts=parts([1.0, 0.0]), how=how)(task(), "[0.5, -9]")
    assert verdict.score == 0.5
    assert verdict.parts["s1"] == -9


def test_length_normalise_and_clip_come_in_this_order() -> None:
    whole = Combined(
        parts=parts([1.0]),
        length=Length(shape="linear", most=10, penalty=1.0),
        normalise=Normalise(mean=0.25, std=0.5),
        clip=(-0.5, 0.75),
    )
    assert whole(task(), "[1.0]").score == pytest.approx((1.0 - 0.5 - 0.25) / 0.5)
    assert whole(task(), "[-9]").score == -0.5
    assert whole(task(), "[9]").score == 0.75
    assert whole(task(), "[1.0]").parts == {"s0": 1.0, "length": -0.5}


@pytest.mark.parametrize("how", [h for h in HOWS if h != "gate"])
def test_an_overflow_is_not_a_score(how: Any) -> None:
    huge = Combined(parts=parts([1e308, 1e308]), how=how)(task(), "[1e10, 1e10]")
    assert (huge.score, huge.label) == (None, "not_a_number")


# ---------------------------------------------------------------------- the best score


@pytest.mark.parametrize(
    ("how", "weights", "bests", "best"),
    [
        ("sum", [1.0, 0.5], [1.0, 2.0], 2.0),
        ("sum", [1.0, -0.5], [1.0, 1.0], None),
        ("sum", [1.0, 1.0], [1.0, None], None),
        ("sum", [1.0, 0.0], [1.0, None], 1.0),
        ("product", [1.0, 0.5], [1.0, 2.0], 1.0),
        ("product", [1.0, 1.0], [1.0, None], None),
        ("mean", [1.0, 1.0], [1.0, 2.0], 1.5),
        ("mean", [1.0, -1.0], [1.0, 2.0], None),
        ("min", [1.0, 1.0], [1.0, 2.0], 1.0),
        ("mean_minus_std", [1.0, 1.0], [1.0, 1.0], 1.0),
        ("mean_minus_std", [2.0, 1.0], [1.0, 2.0], 2.0),
        ("mean_minus_std", [1.0, 1.0], [1.0, 2.0], None),
        ("gate", [0.5, 1.0], [1.0, 1.0], 1.0),
        ("gate", [1.0, 1.0], [1.0, None], None),
    ],
)
def test_best_is_the_greatest_score_or_unknown(how: Any, weights: Any, bests: Any, best: Any) -> None:
    made = [Part(verifier=Says(at=i, name=f"s{i}", best=b), weight=w)
            for i, (w, b) in enumerate(zip(weights, bests, strict=True))]  # fmt: skip
    whole = Combined(parts=tuple(made), how=how)
    assert whole.best == best
    if best is None:
        return
    rng = np.random.default_rng(0)
    tops = [1.0 if b is None else b for b in bests]
    reached = whole(task(), json.dumps(tops)).score
    assert reached == best
    for _ in range(200):
        drawn = [float(t - d) for t, d in zip(tops, rng.exponential(1.0, len(tops)), strict=True)]
        found = whole(task(), json.dumps(drawn)).score
        assert found is not None
        assert found <= best
    scaled = Combined(parts=tuple(made), how=how, normalise=Normalise(mean=0.3, std=0.7), clip=(-9, 9))
    assert scaled.best == scaled(task(), json.dumps(tops)).score


def test_best_is_unknown_where_the_length_changes_every_score() -> None:
    for shape, best in (("linear", None), ("cosine", None), ("overlong", 1.0)):
        buffer = {"buffer": 5} if shape == "overlong" else {}
        length = Length(shape=shape, most=100, **buffer)  # type: ignore[arg-type]
        assert Combined(parts=parts([1.0]), length=length).best == best


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"parts": ()}, "at least one"),
        ({"parts": parts([1.0]) * 2}, "two parts"),
        ({"parts": (Part(verifier=Says(at=0, name="length")),)}, "'length'"),
        ({"parts": (Part(verifier=Says(at=0, name="uncertainty")),)}, "'uncertainty'"),
        ({"parts": parts([1.0]), "how": "median"}, "median"),
        ({"parts": parts([1.0]), "k": 1.0}, "k is"),
        ({"parts": parts([1.0]), "how": "mean_minus_std", "k": -1.0}, "k is"),
        ({"parts": parts([1.0]), "clip": (1.0, 1.0)}, "clip"),
        ({"parts": parts([1.0]), "clip": (0.0, math.inf)}, "clip"),
        ({"parts": parts([0.0])}, "nothing counts"),
        ({"parts": parts([0.0, 0.0]), "how": "mean"}, "nothing counts"),
        ({"parts": parts([1.0, -1.0]), "how": "product"}, "negative"),
        ({"parts": parts([1.0, -1.0]), "how": "gate"}, "negative"),
        (
            {"parts": (Part(verifier=Number()), Part(verifier=Says(at=0, best=0.0))), "how": "product"},
            "never above 0",
        ),
        ({"parts": parts([2.0, 1.0]), "how": "gate"}, "could pay more"),
        ({"parts": parts([1.0, 0.0]), "how": "gate"}, "pays by its last"),
        ({"parts": parts([1.0, 1.0], best=None), "how": "gate"}, "needs to know the best"),
        ({"parts": parts([1.0], best=None), "length": Length(shape="cosine", most=9)}, "right_at"),
        ({"parts": parts([-1.0]), "length": Length(shape="cosine", most=9)}, "right_at"),
    ],
)
def test_impossible_combinations_are_refused(options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Combined(**options)
    for mean, std in ((0.0, 0.0), (0.0, -1.0), (math.nan, 1.0), (0.0, math.inf)):
        with pytest.raises(ValueError):
            Normalise(mean=mean, std=std)


# ---------------------------------------------------------------------- progress


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SCORES, st.floats(-2, 2, width=16)), min_size=1, max_size=4), st.floats(0.25, 4))
def test_progress_of_a_sum_is_the_weighted_sum_of_the_parts(
    pairs: list[tuple[float, float]], std: float
) -> None:
    if not any(w for _, w in pairs):
        return
    scores, weights = [s for s, _ in pairs], [w for _, w in pairs]
    whole = Combined(parts=parts(weights), normalise=Normalise(mean=0.5, std=std))
    verdict = whole(task(), json.dumps(scores))
    steps = [[(10 * i, s * i / 4) for i in range(1, 4)] if n != 1 else [] for n, s in enumerate(scores)]
    for at, phi in verdict.progress:
        wanted = sum(
            w * next((p for a, p in reversed(s) if a <= at), 0.0) for w, s in zip(weights, steps, strict=True)
        )
        assert phi == pytest.approx(wanted / std, abs=1e-9)
    assert [at for at, _ in verdict.progress] == [10, 20, 30]
    potentials = [0.0, *(phi for _, phi in verdict.progress)]
    paid = sum(b - a for a, b in itertools.pairwise(potentials)) + (verdict.score or 0.0) - potentials[-1]
    assert paid == pytest.approx(verdict.score)


def test_progress_stays_within_the_clip_and_starts_from_0() -> None:
    clipped = Combined(parts=parts([10.0]), clip=(0.5, 2.0))(task(), "[1.0]")
    assert clipped.progress == ((10, 2.0), (20, 2.0), (30, 2.0))
    below = Combined(parts=parts([10.0]), clip=(0.5, 2.0))(task(), "[-1.0]")
    assert [phi for _, phi in below.progress] == [0.0, 0.0, 0.0]


def test_progress_has_no_meaning_elsewhere() -> None:
    for how in HOWS[1:]:
        assert Combined(parts=parts([1.0, 1.0]), how=how)(task(), "[1, 1]").progress == ()  # type: ignore[arg-type]
        assert len(Combined(parts=parts([1.0]), how=how)(task(), "[1]").progress) == 3  # type: ignore[arg-type]
    cosine = Length(shape="cosine", most=99)
    assert Combined(parts=parts([1.0]), length=cosine)(task(), "[1]").progress == ()


# ---------------------------------------------------------------------- with the verifiers there are

R1 = (Part(verifier=Number(where="tag")), Part(verifier=Format(), weight=0.5))
REAL = [
    Combined(parts=R1),
    Combined(parts=R1, how="min"),
    Combined(parts=R1, how="mean", clip=(-1.0, 1.0)),
    Combined(parts=R1, how="product", normalise=Normalise(mean=0.3, std=0.1)),
    Combined(parts=tuple(reversed(R1)), how="gate"),
    Combined(parts=R1, clip=(0.0, 1.0)),
    Combined(parts=R1, length=Length(shape="overlong", most=400, buffer=100)),
    Combined(parts=R1, length=Length(shape="cosine", most=400)),
    Combined(parts=R1, length=Length(shape="linear", most=400, penalty=0.1)),
    Combined(parts=(Part(verifier=Number()), Part(verifier=Regex(pattern="7")))),
]


@pytest.mark.parametrize("verifier", REAL, ids=lambda v: f"{v.how}-{v.clip}-{len(v.parts)}")
def test_own_golds_are_accepted_and_own_fakes_refused(verifier: Combined) -> None:
    known = verifier.best is not None and verifier.trusted
    assert bool(verifier.golds(task())) == known
    assert all(verifier(task(), gold).score == verifier.best for gold in verifier.golds(task()))
    for fake in verifier.fakes(task()):
        score = judge_safely(verifier, task(), fake).score
        assert score is not None
        assert verifier.best is None or score < verifier.best, fake
    assert "" in verifier.fakes(task())
    assert pickle.loads(pickle.dumps(verifier)) == verifier
    verifier.check(task())
    verifier.require()


def test_the_self_test_passes_for_all_of_them() -> None:
    with Pool(workers=1, deadline_s=20.0) as pool:
        for verifier in REAL:
            self_test(verifier, [task(), task("-1,234")], pool)


def test_a_place_of_several_tasks_with_a_fault_is_listed_once() -> None:
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        check_all(Number(), [task(None)] * 3)


@pytest.mark.parametrize(
    ("answers", "rest"), [([None] * 30, "; 29 more"), ([None, "1", None], "; 1 more: d.jsonl:3")]
)
def test_places_are_listed_unless_all_tasks_have_the_fault(answers, rest) -> None:
    tasks = [replace(task(answer), source=f"d.jsonl:{n}") for n, answer in enumerate(answers, 1)]
    with pytest.raises(UserError, match=r"^d\.jsonl:1: ") as caught:
        check_all(Number(), tasks)
    assert caught.value.problem.endswith(rest)


def test_parts_that_cannot_be_satisfied_together_are_named() -> None:
    with pytest.raises(UserError, match=r"^combined: "):
        Combined(parts=(Part(verifier=Number(where="after")), Part(verifier=Exact())), how="min").golds(
            task()
        )


def test_budgets_add_up() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Slow(Says):
        trusted: ClassVar[bool] = False

    def whole(*budgets: float | None) -> float | None:
        made = [Part(verifier=Slow(at=i, name=f"s{i}", budget=b)) for i, b in enumerate(budgets)]
        return Combined(parts=(*made, Part(verifier=Number()))).budget_s(task())

    assert whole(None, None) is None
    assert whole(3.0, 4.0) == 7.0
    assert whole(3.0, None) == 3.0 + UNSTATED_S


# ---------------------------------------------------------------------- length


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200), st.floats(0, 5), st.floats(-5, 5))
def test_linear_and_overlong_are_their_formulas(
    n: int, most: int, buffer: int, penalty: float, score: float
) -> None:
    linear = Length(shape="linear", most=most, penalty=penalty)
    assert linear.adjust(score, "x" * n, None) == pytest.approx(
        score - penalty * (n / most if n < most else 1)
    )
    if buffer > most:
        return
    soft = Length(shape="overlong", most=most, buffer=buffer, penalty=penalty)
    if n <= most - buffer:
        wanted = 0.0
    elif n <= most:
        wanted = ((most - buffer) - n) / buffer
    else:
        wanted = -1.0
    assert soft.adjust(score, "x" * n, None) == pytest.approx(score + penalty * wanted)
    assert soft.is_free("x" * n) == (n <= most - buffer)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 300),
    st.integers(1, 200),
    st.tuples(*[st.floats(-9, 9)] * 5),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_cosine_is_its_formula(n: int, most: int, numbers: Any, score: float) -> None:
    r0, r_end, w0, w_end, exceeded = numbers
    cosine = Length(
        shape="cosine", most=most, right=(r0, r_end), wrong=(w0, w_end), exceeded=exceeded, right_at=0.5
    )
    first, last = (r0, r_end) if score >= 0.5 else (w0, w_end)
    wanted = exceeded if n >= most else last + (first - last) * math.cos(math.pi * n / most / 2) ** 2
    assert cosine.adjust(score, "x" * n, None) == pytest.approx(wanted, abs=1e-9)


def test_a_longer_right_response_gets_less_and_a_longer_wrong_one_more() -> None:
    cosine = Length(shape="cosine", most=50)
    right = [cosine.adjust(1.0, "x" * n, 1.0) for n in range(50)]
    wrong = [cosine.adjust(0.9, "x" * n, 1.0) for n in range(50)]
    assert right == sorted(right, reverse=True)
    assert wrong == sorted(wrong)
    assert (right[0], wrong[0]) == (2.0, -10.0)
    assert min(right) > max(wrong)


def test_words_and_characters_are_counted() -> None:
    assert Length(shape="linear", most=9, unit="words").size("\n a  bc\u00a0d\t") == 3
    assert Length(shape="linear", most=9).size("a b\U0001f600") == 4


@pytest.mark.parametrize(
    "options",
    [
        {"shape": "linear", "most": 0},
        {"shape": "linear", "most": 9, "penalty": -1.0},
        {"shape": "linear", "most": 9, "penalty": math.inf},
        {"shape": "linear", "most": 9, "buffer": 3},
        {"shape": "linear", "most": 9, "right": (1.0, 0.0)},
        {"shape": "overlong", "most": 9},
        {"shape": "overlong", "most": 9, "buffer": 10},
        {"shape": "overlong", "most": 9, "buffer": 3, "exceeded": 0.0},
        {"shape": "cosine", "most": 9, "penalty": 2.0},
        {"shape": "cosine", "most": 9, "wrong": (math.nan, 0.0)},
        {"shape": "cosine", "most": 9, "right_at": math.inf},
    ],
)
def test_a_length_that_makes_no_sense_is_refused(options: Any) -> None:
    with pytest.raises(ValueError):
        Length(**options)
