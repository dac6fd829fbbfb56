"""Policies compared: of which a KL is measured."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from posttrain.envs.tasks.arithmetic import Arithmetic
from posttrain.evaluation.compare import Compare, compared
from posttrain.evaluation.standings import standings
from posttrain.models.pretrained import silent
from posttrain.recipe.verifier import VerifierChoice
from posttrain.types import Sampling
from posttrain.verifiers.answers import Number

OTHER = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
PLAIN = "{{ messages | map(attribute='content') | join('\\n') }}"


@pytest.mark.parametrize(("template", "of_all"), [(None, None), (OTHER, None), (OTHER, OTHER + PLAIN)])
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
    found = compared(compare, models, tmp_path / "answers", silent, lambda name, done, total: None)
    measured = template is None or of_all is not None
    assert [k for _, k in found["twin"]] == [0.0 if measured else None] * 3
    told = standings(compare, "number", found)
    assert bool(told["notes"]) is not measured
    assert all(policy["score"] for policy in told["policies"]), "answers are compared in either case"
