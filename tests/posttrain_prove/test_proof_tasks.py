"""Theorems of known difficulty: Coq takes their golds, and the verifier judges them as it should."""

import random
from itertools import pairwise

import pytest

from posttrain.verifiers.pool import Pool
from posttrain.verifiers.sandbox import LEVELS, Box, Limits, available
from posttrain.verifiers.self_test import self_test
from posttrain_prove.coq import check
from posttrain_prove.coq.verifier import Coq
from posttrain_prove.tasks.formula import FALSE, Formula
from posttrain_prove.tasks.horn import Horn, horn
from posttrain_prove.tasks.intuitionistic import Prover
from posttrain_prove.tasks.propositional import Propositional, propositional

pytestmark = pytest.mark.usefixtures("coqc")
LEVEL = next((level for level in LEVELS if not available()[level]), "strict")
HORN = horn("train", Horn(), limit=23) + horn("held_out", Horn(facts=2, high=5), limit=8)
FORMULAS = propositional("train", Propositional(high=15, refuted=0.2), limit=23) + propositional(
    "held_out", Propositional(low=4, high=20), limit=8
)
each = pytest.mark.parametrize("tasks", [HORN, FORMULAS], ids=["horn", "propositional"])


def _ran(text: str) -> list[str]:
    """What Coq prints for a file."""
    box = Box(level=LEVEL, limits=Limits(wall_s=60, memory_mb=2048), readable=check.find_programs().readable)
    ran = box.run(check.command_line(check.find_programs().coqc, "File.v"), files={"File.v": text.encode()})
    assert ran.status == 0, ran.stderr.decode()
    return ran.stdout.decode().splitlines()


@each
def test_coq_accepts_every_gold(tasks):
    """One file for all, as starting Coq takes longest."""
    text = "".join(
        f"Theorem t{n} : {task.fields['statement']}.\n{task.fields['gold']}\nQed.\nPrint Assumptions t{n}.\n"
        for n, task in enumerate(tasks)
    )
    assert _ran(text) == ["Closed under the global context"] * len(tasks)


@each
def test_the_verifier_passes_its_self_test_on_them(tasks):
    coq = Coq(level=LEVEL)
    for task in tasks:
        coq.check(task)
    with Pool(workers=1, deadline_s=coq.budget_s(tasks[0])) as pool:
        self_test(coq, [tasks[-1]], pool)


def test_the_hypotheses_are_named_by_intros_and_shown_as_the_prompt_shows_them():
    task = HORN[6]
    [opening] = task.fields["opening"]
    said = f"Theorem t : {task.fields['statement']}.\n{opening}\nShow.\nAbort.\n"
    shown = [line.strip() for line in _ran(said)]
    *lines, _, goal = task.messages[0]["content"].splitlines()
    place = shown.index(lines[0])
    assert shown[place : place + len(lines)] == lines
    assert set(shown[place + len(lines)]) == {"="}
    assert shown[place + len(lines) + 1] == goal


def test_the_decision_procedure_says_what_tauto_says_and_formulas_are_printed_as_coq_prints_them():
    rng, formulas = random.Random(0), []
    for n in range(400):
        formulas.append(_drawn(3 + n % 12, rng))
    text = "Set Printing Width 1000.\n" + "".join(
        f"Goal forall A B C : Prop, {formula}.\n"
        'intros A B C; tryif (assert_succeeds tauto) then idtac "yes" else idtac "no". Show. Abort.\n'
        for formula in formulas
    )
    lines = [line.strip() for line in _ran(text)]
    said = [line for line in lines if line in ("yes", "no")]
    assert said == ["no" if Prover()(formula) is None else "yes" for formula in formulas]
    assert said.count("yes") > 60
    shown = [after for line, after in pairwise(lines) if line and set(line) == {"="}]
    assert shown == [str(formula) for formula in formulas]


def _drawn(size: int, rng: random.Random) -> Formula:
    if size == 0:
        return rng.choice([*map(Formula, "ABC"), FALSE])
    sign = rng.choice(["->", "->", "/\\", "\\/", "~"])
    left = rng.randrange(size)
    parts = (size - 1,) if sign == "~" else (left, size - 1 - left)
    return Formula(sign, tuple(_drawn(part, rng) for part in parts))
