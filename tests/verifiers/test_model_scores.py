"""Steps, what they come to, ensembles and scales: each against arithmetic done another way."""

import itertools
import random
import statistics

import pytest

from posttrain.types import UserError
from posttrain.verifiers.combine.formula import deviation
from posttrain.verifiers.model.scores import over_models, over_steps, read_reference, scale_of, steps

SEED = 20260


def random_text(dice):
    return "".join(dice.choice(["a", "b ", "\n", "\n\n", " "]) for _ in range(dice.randrange(12)))


def test_steps_cover_the_response_and_none_is_blank():
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    for separator in ("\n\n", "\n", "a"):
        for _ in range(300):
            text = random_text(dice)
            found = steps(text, separator)
            ends = [step.end for step in found]
            assert ends == sorted(set(ends))
            assert ends[-1] == len(text)
            if text.replace(separator, "").strip():
                starts = [0, *ends[:-1]]
                for start, step in zip(starts, found, strict=True):
                    assert step.text.strip()
                    assert separator not in step.text
                    piece = text[start : step.end]
                    assert piece.replace(separator, "").split() == step.text.split()
            else:
                assert [step.text for step in found] == [text]


def test_more_separators_make_no_more_steps():
    texts = [step.text for step in steps("a\n\nb", "\n\n")]
    assert [step.text for step in steps("\n\na\n\n\n\n\n\nb\n\n", "\n\n")] == texts


def test_what_steps_come_to():
    scores = [0.9, 0.2, 0.5]
    assert over_steps(scores, "last") == 0.5
    assert over_steps(scores, "min") == 0.2
    assert over_steps(scores, "product") == pytest.approx(0.09)
    assert over_steps(scores, "mean") == pytest.approx(1.6 / 3)


def test_no_further_step_raises_the_product_or_the_minimum():
    for scores in itertools.product([0.0, 0.3, 1.0], repeat=3):
        for how in ("product", "min"):
            assert over_steps(scores, how) <= over_steps(scores[:-1], how)


def test_an_ensemble_is_more_careful_the_more_it_disagrees():
    agreed, split = [1.0, 1.0, 1.0], [0.0, 1.0, 2.0]
    assert over_models(agreed, "lower", 2.0) == 1.0
    assert deviation(split) == pytest.approx((2 / 3) ** 0.5)
    assert over_models(split, "lower", 2.0) == pytest.approx(1.0 - 2 * (2 / 3) ** 0.5)
    assert over_models(split, "lower", 0.0) == over_models(split, "mean", 5.0) == 1.0
    assert over_models(split, "min", 0.0) == 0.0
    assert (over_models([0.3], "lower", 9.0), deviation([0.3])) == (0.3, 0.0)


def test_a_scale_gives_its_reference_mean_0_and_variance_1():
    dice = random.Random(SEED)
    print(f"seed {SEED}")
    scores = [dice.gauss(7.0, 3.0) for _ in range(50)]
    scaled = [scale_of(scores, "r")(score) for score in scores]
    assert statistics.fmean(scaled) == pytest.approx(0.0, abs=1e-12)
    assert statistics.pvariance(scaled) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("scores", [[], [1.0], [2.0, 2.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_what_has_no_scale_is_the_users_error(scores):
    with pytest.raises(UserError, match=r"^ref\.jsonl: "):
        scale_of(scores, "ref.jsonl")


def test_a_reference_is_read_and_its_faults_are_named_by_line(tmp_path):
    file = tmp_path / "ref.jsonl"
    file.write_text(
        '\ufeff{"prompt": "p", "response": "r\\u2028s", "more": 1}\n\n{"prompt": "q", "response": ""}\n'
    )
    assert read_reference(file) == [("p", "r\u2028s"), ("q", "")]
    for bad in ("{", "[1]", '{"prompt": "p"}', '{"prompt": "p", "response": 3}', "3"):
        file.write_text('{"prompt": "p", "response": "r"}\n' + bad)
        with pytest.raises(UserError, match=r"ref\.jsonl:2: "):
            read_reference(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_reference(tmp_path / "none.jsonl")
