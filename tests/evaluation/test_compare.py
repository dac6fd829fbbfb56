"""Policies compared: of which a KL is measured."""

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from transformers import AutoTokenizer

from mathcheck.plugin.number import Number
from posttrain.data.arithmetic import Arithmetic
from posttrain.evaluation.compare import Answer, Compare, answers, compare_policies
from posttrain.evaluation.standings import standings, wins
from posttrain.evaluation.suites.numbers import wilson
from posttrain.models.pretrained import silent
from posttrain.recipe.verifier import VerifierChoice
from posttrain.types import Sampling

OTHER = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
PLAIN = "{{ messages | map(attribute='content') | join('\\n') }}"


@pytest.mark.parametrize(("template", "of_all"), [(None, None), (OTHER, None), (OTHER, OTHER + PLAIN)])
@pytest.mark.sample("None-None")
def test_a_kl_is_of_answers_to_the_same_tokens(
    able: Path, tmp_path: Path, template: str | None, of_all: str | None
) -> None:
    """A model asked under its own template is not asked under the other's; under one for all both are."""
    twin = tmp_path / "twin"
    shutil.copytree(able, twin)
    if template:
        words = AutoTokenizer.from_pretrained(twin)
        words.chat_template = template
        words.save_pretrained(twin)
    compare = Compare(
        stages=("one", "twin"),
        arithmetic=Arithmetic(low=2, high=4, held_out=3, template="{a}+{b}="),
        verifier=VerifierChoice(number=Number()),
        sampling=Sampling(max_new_tokens=3),
        device="cpu",
        chat_template=of_all,
        workers=1,
    )
    models = {"one": str(able), "twin": str(twin)}
    found = compare_policies(compare, models, tmp_path / "answers", silent, lambda name, done, total: None)
    measured = template is None or of_all is not None
    assert [k for _, k in found["twin"]] == [0.0 if measured else None] * 3
    told = standings(compare, "number", found)
    assert bool(told["notes"]) is not measured
    assert all(policy["score"] for policy in told["policies"]), "answers are compared in either case"


def test_policies_are_asked_with_the_variables_of_the_template(able: Path) -> None:
    compare = Compare(
        stages=("one", "two"),
        arithmetic=Arithmetic(low=2, high=4, held_out=1, template="{a}+{b}="),
        verifier=VerifierChoice(number=Number()),
        sampling=Sampling(max_new_tokens=1),
        device="cpu",
        chat_template="{{ mark }}" + PLAIN,
        template_args={"mark": "7+7="},
        workers=1,
    )
    [answer] = answers(compare, str(able), lambda done, total: None)[:1]
    assert answer.prompt.startswith("7+7=")


NOTHING: dict[str, Any] = {"prompt": "", "text": "", "tokens": (), "first": 0, "stop": "eos"}
NOTHING |= {"label": "", "reason": "", "logp": 0.0}


def judged(scores: list[list[float | None]]) -> list[tuple[Answer, float | None]]:
    """Answers to prompts, several to each, with these scores."""
    return [
        (Answer(task=str(task), sample=sample, score=score, **NOTHING), None)
        for task, group in enumerate(scores)
        for sample, score in enumerate(group)
    ]


def test_wins_are_averaged_by_prompt_and_prompts_are_what_is_counted() -> None:
    found = wins(judged([[1, 1, 1], [1, 0.5, 0], [1, None, 0]]), judged([[0] * 3, [0.5] * 3, [0.5] * 3]))
    assert [found[key] for key in ("won", "tied", "lost", "left_out")] == [5, 1, 2, 1]
    assert found["rate"] == pytest.approx((1 + 1 / 2 + 1 / 2) / 3)
    assert (found["low"], found["high"]) == pytest.approx(wilson(2, 3))
    alone = wins(judged([[1], [1], [0]]), judged([[0], [0], [0.5]]))
    assert (alone["rate"], alone["low"], alone["high"]) == (2 / 3, *wilson(2, 3))


@pytest.mark.parametrize("alike", [True, False])
def test_the_interval_of_wins_covers_also_where_answers_to_a_prompt_are_alike(alike: bool) -> None:
    seed, prompts, samples, rate, runs = 7, 16, 16, 0.6, 300
    print(f"seed {seed}")
    draws, other, covered = numpy.random.default_rng(seed), judged([[0.5] * samples] * prompts), 0
    for _ in range(runs):
        won = draws.random((prompts, 1 if alike else samples)) < rate
        found = wins(judged(numpy.broadcast_to(won, (prompts, samples)).astype(float).tolist()), other)
        covered += found["low"] <= rate <= found["high"]
    assert covered / runs >= 0.92
