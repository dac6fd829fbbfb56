"""Theorems of known difficulty: Coq takes their golds, and the verifier judges them as it should."""

import pytest

from posttrain.envs.tasks.horn import Horn, horn
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.proof import coq_check
from posttrain.verifiers.proof.coq import Coq
from posttrain.verifiers.sandbox import LEVELS, Box, Limits, available
from posttrain.verifiers.self_test import self_test

pytestmark = pytest.mark.usefixtures("coqc")
LEVEL = next((level for level in LEVELS if not available()[level]), "strict")
HORN = horn("train", Horn(), limit=23) + horn("held_out", Horn(facts=2, high=5), limit=8)


@pytest.mark.parametrize("tasks", [HORN], ids=["horn"])
def test_coq_accepts_every_gold(tasks):
    """One file for all, as starting Coq takes longest."""
    box = Box(level=LEVEL, limits=Limits(wall_s=60, memory_mb=2048), readable=coq_check.programs().readable)
    text = "".join(
        f"Theorem t{n} : {task.fields['statement']}.\n{task.fields['gold']}\nQed.\nPrint Assumptions t{n}.\n"
        for n, task in enumerate(tasks)
    )
    ran = box.run(coq_check.command(coq_check.programs().coqc, "Golds.v"), files={"Golds.v": text.encode()})
    assert ran.status == 0, ran.stderr.decode()
    assert ran.stdout.decode().splitlines() == ["Closed under the global context"] * len(tasks)


@pytest.mark.parametrize("tasks", [HORN], ids=["horn"])
def test_the_verifier_passes_its_self_test_on_them(tasks):
    coq = Coq(level=LEVEL)
    for task in tasks:
        coq.check(task)
    with Pool(workers=1, deadline_s=coq.budget_s(tasks[0])) as pool:
        self_test(coq, [tasks[0], tasks[-1]], pool)


def test_the_hypotheses_are_named_by_intros_and_shown_as_the_prompt_shows_them():
    task = HORN[6]
    [opening] = task.fields["opening"]
    said = f"Theorem t : {task.fields['statement']}.\n{opening}\nShow.\nAbort.\n"
    box = Box(level=LEVEL, limits=Limits(wall_s=60, memory_mb=2048), readable=coq_check.programs().readable)
    ran = box.run(coq_check.command(coq_check.programs().coqc, "Show.v"), files={"Show.v": said.encode()})
    shown = [line.strip() for line in ran.stdout.decode().splitlines()]
    *lines, _, goal = task.messages[0]["content"].splitlines()
    place = shown.index(lines[0])
    assert shown[place : place + len(lines)] == lines
    assert set(shown[place + len(lines)]) == {"="}
    assert shown[place + len(lines) + 1] == goal
