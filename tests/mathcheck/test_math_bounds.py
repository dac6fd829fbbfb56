"""Whatever the response, the verifier math gives a verdict, and in time."""

import ast
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mathcheck as math_package
from mathcheck.plugin.math import Math
from posttrain.process.cpu_limit import OverTimeError, within
from posttrain.types import Task

MILLION = 10**6
LABELS = {"right", "wrong", "no_answer", "unreadable", "too_hard"}
GOLDS = ["7", "x^2", r"\{1,2\}", "(1,2)", r"(3,\infty)", "y=2x", "B", "Paris", "10 cm", r"50\%", r"\sqrt{2}"]
GOLDS += [
    r"x+y\le 5",
    "3:4",
    r"\pi",
    r"\tan x",
    "n!",
    r"90^\circ",
    "$5",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
]
LONG: dict[str, Callable[[], str]] = {
    "braces": lambda: "{" * MILLION,
    "braces after a box": lambda: r"\boxed{7}" + "{" * MILLION,
    "open boxes": lambda: r"\boxed{" * (MILLION // 7),
    "boxes in boxes": lambda: r"\boxed{" * (MILLION // 8) + "7" + "}" * (MILLION // 8),
    "one line": lambda: "x" * MILLION,
    "numbers": lambda: "7 " * (MILLION // 2),
    "lines": lambda: "\n" * MILLION,
    "lines of signs": lambda: "$\n" * (MILLION // 2),
    "digits": lambda: "7" * MILLION,
    "boxed digits": lambda: r"\boxed{" + "7" * MILLION + "}",
    "markers": lambda: "####" * (MILLION // 4),
    "tags": lambda: "<answer>" * (MILLION // 8),
    "prose": lambda: "so we get 7 or not, " * (MILLION // 20),
    "dollars": lambda: "$" * MILLION,
    "backslashes": lambda: "\\" * MILLION,
}
HARD: dict[str, Callable[[], str]] = {
    "brackets": lambda: "(" * 700 + "7" + ")" * 700,
    "roots of roots": lambda: r"\sqrt" * 400 + " 2",
    "fractions of fractions": lambda: r"\frac" * 400 + " 2",
    "signs": lambda: "-" * 1400 + "7",
    "bars": lambda: "|" * 1400 + "7",
    "divisions": lambda: "1/" * 700 + "1",
    "towers": lambda: "^".join(["9"] * 700),
    "a tower": lambda: "9**9**9",
    "a tower of tens": lambda: "10^{10^{10}}",
    "a tower over x": lambda: "x^{9^{9^9}}",
    "negative tower": lambda: "2^{-9^{9^9}}",
    "a factorial": lambda: "10000000!",
    "factorials": lambda: "3" + "!" * 30,
    "a binomial": lambda: r"\binom{10000000}{5000000}",
    "e to e": lambda: "e^{e^{e^{e^e}}}",
    "a power": lambda: "(x+y+z)^{1000}",
    "a product": lambda: "*".join(f"(x+{i})^{i}" for i in range(60)),
    "200 roots": lambda: "+".join(f"\\sqrt{{x+{i}}}" for i in range(200)),
    "nested sines": lambda: r"\sin(" * 36 + "x" + ")" * 36,
    "a set of roots": lambda: r"\{" + ",".join(f"\\sqrt{{{i}}}" for i in range(60)) + r"\}",
    "intervals": lambda: r"\cup".join(f"(\\sqrt{{{i}}},\\sqrt{{{i + 1}}})" for i in range(60)),
    "inequalities": lambda: " or ".join(f"x<{i}" for i in range(200)),
    "a matrix": lambda: "[" + ",".join(["[" + ",".join("1" * 200) + "]"] * 200) + "]",
    "a wide matrix": lambda: r"\begin{pmatrix}" + "&".join("1" * 600) + r"\end{pmatrix}",
    "digits": lambda: "7" * 3000,
    "an exponent": lambda: "1e999999999",
    "a long decimal": lambda: "0." + "3" * 900 + "+x",
    "units": lambda: "5 " + "m " * 500,
    "powers of units": lambda: "5 cm" + "^9" * 300,
    "upright units": lambda: "5" + r"\mathrm{m}" * 390 + "x",
    "overs": lambda: "{" + r"\over{a}" * 490,
    "alignments": lambda: r"\begin{aligned}" * 260,
    "names": lambda: "sin" * 1000,
    "surrogates": lambda: "\ud800",
    "zeros": lambda: "7\x00",
}  # fmt: skip


HANGS_S = 30
"""Of the processor: far more than any answer takes on a slow one, far less than what does not end."""


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """SymPy, whose import takes half a second once."""
    Math()(Task(id="q", messages=(), answer="x"), "x")


def judged(gold: str, response: str) -> tuple[str, float]:
    """The label, and the processor time it took."""
    begin = time.process_time()
    verdict = Math()(Task(id="q", messages=(), answer=gold), response)
    assert verdict.label in LABELS
    assert verdict.score == float(verdict.label == "right")
    assert len(verdict.reason) < 400
    return verdict.label, time.process_time() - begin


@pytest.mark.parametrize("name", LONG)
def test_a_million_characters(name: str) -> None:
    for gold in ("7", "B", "Paris", "x^2"):
        _, seconds = judged(gold, LONG[name]())
        assert seconds < HANGS_S


@pytest.mark.parametrize("name", HARD)
def test_what_would_hang_a_careless_reader(name: str) -> None:
    for gold in ("7", "x", r"\{1,2\}", "x<1"):
        label, seconds = judged(gold, f"\\boxed{{{HARD[name]()}}}")
        assert label != "right" or (name == "zeros" and gold == "7")
        assert seconds < HANGS_S


SOUP = re.findall(
    r"\S+",
    r"""7 3.5 1,234 x y n e i pi \pi \frac \sqrt \sqrt[3] { } ( ) [ ] \{ \} | ^ _ + - * / \cdot \times = < >
    \le \ge \ne \approx , ; : ! % ^\circ \sin \cos \ln \log \log_2 \exp \tanh \infty \cup \in \pm \binom
    \begin{pmatrix} \end{pmatrix} & \\ \text{cm} \text{or} cm km/h eggs and or not is the answer
    $ \$ \boxed{ #### . \left \right \lfloor \rfloor 10^{100} 0.\overline{3} 9^9 \emptyset \mathbb{R}
    \setminus A (C) apples \, ² ½ √ ° − ≤ ∞ U \over \choose \cr \\[2pt] \mathrm{m} \mathrm{s^{2}} f(3) f^{-1}
    \textcolor{red} \bm \Large \begin{aligned} \end{aligned} \in million""",
)


@given(
    st.sampled_from(GOLDS),
    st.one_of(
        st.text(max_size=200),
        st.lists(st.sampled_from(SOUP), max_size=25).map(" ".join),
        st.lists(st.sampled_from(SOUP), max_size=25).map("".join).map(lambda s: f"\\boxed{{{s}}}"),
    ),
)
@settings(max_examples=300, deadline=None)
def test_any_text_gets_a_verdict_in_time(gold: str, response: str) -> None:
    label, seconds = judged(gold, response)
    assert seconds < HANGS_S
    assert judged(gold, response)[0] == label


NUMBERS = st.integers(-(10**6), 10**6)


@given(
    NUMBERS,
    NUMBERS,
    st.sampled_from(["{}", "{}.0", "+{}", r"\frac{{{}}}{{1}}", r"\text{{{}}}", "${}$", "x = {}"]),
)
@settings(max_examples=200, deadline=None)
def test_a_whole_number_is_right_exactly_if_it_is_the_gold(gold: int, other: int, form: str) -> None:
    form = form.replace("+{}", "{}") if other < 0 else form
    written = f"\\boxed{{{form.format(other)}}}"
    assert (judged(str(gold), written)[0] == "right") == (gold == other)
    assert judged(str(other), written)[0] == "right"


@given(st.integers(-30, 30), st.integers(-30, 30), st.integers(-30, 30), st.sampled_from([0, 0, 1, -1]))
@settings(max_examples=100, deadline=None)
def test_a_product_of_lines_is_its_polynomial(a: int, b: int, c: int, off: int) -> None:
    gold = f"x^3 + ({-(a + b + c)})x^2 + ({a * b + b * c + c * a})x + ({-a * b * c + off})"
    response = f"\\boxed{{(x-({a}))(x-({b}))(x-({c}))}}"
    assert judged(gold, response)[0] == ("wrong" if off else "right")


def test_the_limit_ends_a_loop_that_swallows_exceptions() -> None:
    def stubborn() -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue

    begin = time.process_time()
    with pytest.raises(OverTimeError), within(0.1):
        stubborn()
    assert time.process_time() - begin < 1.0
    time.sleep(0.1)  # no alarm is left behind
    sum(range(10**6))


def test_nothing_is_ever_evaluated_as_python(tmp_path: object) -> None:
    mark = f"{tmp_path}/here"
    for attack in (f"__import__('os').system('touch {mark}')", f"open('{mark}','w')", "().__class__.__mro__"):
        for gold in GOLDS:
            assert judged(gold, f"\\boxed{{{attack}}}")[0] != "right"
    assert not os.path.exists(mark)


def test_sympy_is_imported_only_where_it_judges() -> None:
    for path in Path(math_package.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "sympy"], path.name
