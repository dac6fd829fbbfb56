"""The penalties of examples/penalties: against slow counts, at their limits, in linear time."""

import doctest
import importlib.util
import pickle
import sys
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.types import Task, UserError

FILE = Path(__file__).parents[2] / "examples" / "penalties" / "posttrain_penalties.py"
spec = importlib.util.spec_from_file_location(FILE.stem, FILE)
penalties: Any = importlib.util.module_from_spec(spec)
sys.modules[FILE.stem] = penalties
spec.loader.exec_module(penalties)
Language, Repetition, ngrams = penalties.Language, penalties.Repetition, penalties.ngrams


def task(prompt: str = "How much is it?", answer: str | None = "7", **fields: Any) -> Task:
    messages = ({"role": "system", "content": "Отвечай."}, {"role": "user", "content": prompt})
    return Task(id="q", messages=messages, answer=answer, fields=fields, source="d.jsonl:3")


def test_the_examples_of_its_docstrings_hold() -> None:
    assert doctest.testmod(penalties).failed == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "ab"]), max_size=30), st.integers(1, 12))
def test_ngrams_are_counted_as_a_set_of_tuples_counts_them(units: list[str], n: int) -> None:
    every = [tuple(units[i : i + n]) for i in range(len(units) - n + 1)]
    assert ngrams(units, n) == (len(every), len(set(every)))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["no", "yes", "Maybe", "."]), min_size=1, max_size=20), st.integers(1, 5))
def test_repetition_is_the_share_of_ngrams_seen_before(words: list[str], n: int) -> None:
    seen: set[tuple[str, ...]] = set()
    lower = [word.lower() for word in words]
    grams = [tuple(lower[i : i + n]) for i in range(len(words) - n + 1)]
    again = 0
    for gram in grams:
        again += gram in seen
        seen.add(gram)
    share = again / len(grams) if grams else 0.0
    text = " ".join(words)
    assert Repetition(n=n)(task(), text).score == pytest.approx(-share)
    assert Repetition(n=n, form="factor")(task(), text).score == pytest.approx(1 - share)


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("one two three", 0.0),
        ("one two three four", 0.0),
        ("The cat sat. The dog sat on it.", 0.0),
        ("a b c d a b c d", 1 / 5),
        ("A b c d, a B C D,", 2 / 7),
        ("no " * 1000, 996 / 997),
        ("a" * 160, 6 / 7),
        ("a" * 64, 0.0),
        ("." * 100, 96 / 97),
        ("ha" * 800, 96 / 97),
        ("哈" * 160, 6 / 7),
    ],
)
def test_repetition_at_its_limits(text: str, share: float) -> None:
    verdict = Repetition()(task(), text)
    assert verdict.score == pytest.approx(-share)
    assert verdict.label == ("repeats" if share else "clean")


def test_characters_are_for_languages_without_spaces() -> None:
    text = "今天天气很好我们去公园" * 4
    assert Repetition(n=4)(task(), text).score == 0.0
    assert Repetition(n=11, unit="characters")(task(), text).score == pytest.approx(-(44 - 10 - 11) / 34)


@pytest.mark.parametrize(
    "penalty", [Repetition(), Language(), Repetition(form="factor"), Language(form="factor")]
)
def test_saying_nothing_is_the_worst(penalty: Any) -> None:
    for blank in ("", " \n\t", "\u00a0"):
        verdict = penalty(task(), blank)
        assert verdict.label == "no_answer"
        assert verdict.score == penalty.best - 1
    assert penalty.golds(task()) == ["7"]
    assert penalty.golds(task(answer=None)) == []
    assert all(penalty(task(), fake).score < penalty.best for fake in penalty.fakes(task()))
    assert penalty(task(), "It is 7.").score == penalty.best
    assert pickle.loads(pickle.dumps(penalty)) == penalty
    assert penalty.trusted


@pytest.mark.parametrize(
    ("prompt", "response", "share"),
    [
        ("How?", "So it is.", 0.0),
        ("How?", "Итак.", 1.0),
        ("How?", "It is так", 3 / 7),
        ("How?", "Ѕo it iѕ", 2 / 4),
        ("How?", "7 + 8 = 15", 0.0),
        ("How?", "naïve café straße", 0.0),
        ("How?", "ｉｔ ｉｓ", 0.0),
        ("How?", "the angle α is x + π", 0.0),
        ("How?", "the ανγλε is", 5 / 10),
        ("How?", "\u0301\u0301 😀 ⅷ ²", 0.0),
        ("Сколько?", "Ответ: x = \\frac{1}{2}, y = \\alpha", 0.0),
        ("Сколько?", "Ответ is it", 4 / 9),
        ("多少？", "求x的值", 0.0),
        ("多少？", "答案 the", 3 / 5),
        ("いくらですか", "値段は三円、カード", 0.0),
        ("値段はいくら", "値段は三円", 0.0),
        ("価格計算問題は", "三円です", 0.0),
        ("얼마?", "칠입니다 seven", 5 / 9),
        ("How? (7 + 8)", "ответ", 1.0),
    ],
)
def test_letters_of_other_scripts_are_counted(prompt: str, response: str, share: float) -> None:
    verdict = Language()(task(prompt), response)
    assert verdict.score == pytest.approx(-share)
    assert verdict.label == ("mixed" if share else "clean")


def test_the_allowed_scripts_are_the_tasks_then_the_options_then_the_prompts() -> None:
    mixed = "It is так"
    assert Language()(task(), mixed).score == pytest.approx(-3 / 7)
    assert Language(scripts=("Cyrillic",))(task(), mixed).score == pytest.approx(-4 / 7)
    assert Language(scripts=("Latin", "Cyrillic"))(task(), mixed).score == 0.0
    assert Language(scripts=("Latin",))(task(script="Cyrillic"), mixed).score == pytest.approx(-4 / 7)
    assert Language()(task(script=["Latin", "Cyrillic"]), mixed).score == 0.0
    assert Language()(task("3 + 4 = ?"), "Ответ").score == 0.0
    with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
        Language().check(Task(id="q", messages=({"role": "user", "content": "3 + x"},), source="d.jsonl:3"))
    for bad in ("Klingon", 7, [], ["Latin", "x}"], [7]):
        with pytest.raises(UserError, match=r"^d\.jsonl:3: "):
            Language().check(task(script=bad))
    for name in ("Klingon", "", "Latin}|\\p{L", "L"):
        with pytest.raises(ValueError, match="not the name of a script"):
            Language(scripts=(name,))
    with pytest.raises(ValueError):
        Repetition(n=0)


NAMED = {"LATIN": "Latin", "CYRILLIC": "Cyrillic", "GREEK": "Greek", "HEBREW": "Hebrew", "THAI": "Thai"}
ALPHABET = "abzéßñ" + "абяё" + "αβω" + "אבת" + "กขค"


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=ALPHABET + " .7", max_size=30), st.sampled_from(sorted(NAMED.values())))
def test_the_share_agrees_with_the_names_of_the_characters(text: str, script: str) -> None:
    # Single Latin and Greek letters are variables: double every letter, so that none stands alone.
    text = "".join(c * 2 for c in text)
    letters = [unicodedata.name(c).split()[0] for c in text if c.isalpha()]
    others = sum(NAMED[name] != script for name in letters)
    if text.strip():
        wanted = others / len(letters) if letters else 0.0
        assert Language(scripts=(script,))(task(), text).score == pytest.approx(-wanted)


UNITS = ["a", ".", "别", "\\a", "x ", "\ud800", "\n", "ß"]


@pytest.mark.parametrize("unit", UNITS, ids=ascii)
@pytest.mark.sample(every=2)
def test_a_million_characters_take_linear_time(unit: str) -> None:
    text = unit * (10**6 // len(unit))
    for penalty in (Repetition(), Repetition(n=40), Repetition(n=20, unit="characters"), Language()):
        begin = time.thread_time()
        assert penalty(task(), text).score is not None
        assert time.thread_time() - begin < 4


def test_a_million_different_characters_take_linear_time() -> None:
    text = "".join(chr(0x4E00 + i % 20_000) + str(i) for i in range(100_000))
    for penalty in (Repetition(), Repetition(n=40, unit="characters"), Language()):
        begin = time.thread_time()
        assert penalty(task(), text).score is not None
        assert time.thread_time() - begin < 6
