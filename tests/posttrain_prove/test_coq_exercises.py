"""The exercises in Coq: each is proved by its stored script, and none is solved in its prompt."""

import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from posttrain.types import UserError
from posttrain.verifiers.pool import Pool
from posttrain.verifiers.sandbox import LEVELS, Box, Limits, available
from posttrain.verifiers.self_test import self_test
from posttrain_prove.coq import check
from posttrain_prove.coq.verifier import Coq
from posttrain_prove.tasks import coq_exercises as module
from posttrain_prove.tasks.coq_exercises import HARDEST, CoqExercises, coq_exercises

needs_coq = pytest.mark.usefixtures("coqc")
LEVEL = next((level for level in LEVELS if not available()[level]), "strict")
ALL = coq_exercises("train", CoqExercises(held_out=0))


def test_there_are_enough_of_each_difficulty_and_no_two_are_the_same():
    assert len(ALL) >= 120
    assert {task.fields["difficulty"] for task in ALL} == set(range(1, HARDEST + 1))
    for key in ("name", "statement"):
        assert len({(task.fields[key], task.fields.get("definitions")) for task in ALL}) == len(ALL)
    assert len({task.id for task in ALL}) == len(ALL)


@needs_coq
@pytest.mark.full
def test_every_stored_script_proves_its_statement():
    """One file for each header, in which each set of definitions has a module: starting Coq takes longest."""
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for task in ALL:
        name, statement, gold = (task.fields[key] for key in ("name", "statement", "gold"))
        files[task.fields.get("header", "")][task.fields.get("definitions", "")] += [
            f"Theorem {name} : {statement}.\n{gold}\nQed.\nPrint Assumptions {name}."
        ]
    box = Box(level=LEVEL, limits=Limits(wall_s=60, memory_mb=2048), readable=check.find_programs().readable)
    for header, modules in files.items():
        text = header
        for number, (definitions, theorems) in enumerate(modules.items()):
            text += "\n".join([f"\nModule M{number}.", definitions, *theorems, f"End M{number}."])
        argv = check.command_line(check.find_programs().coqc, "-noglob", "Golds.v")
        ran = box.run(argv, files={"Golds.v": text.encode()})
        assert ran.status == 0, ran.stderr.decode()
        closed = ["Closed under the global context"] * sum(map(len, modules.values()))
        assert ran.stdout.decode().split("\n")[:-1] == closed


@needs_coq
def test_the_verifier_passes_its_self_test_on_them():
    coq = Coq(level=LEVEL)
    sample = [task for task in ALL if task.fields["name"] in ("add_zero_r", "ev_sum")]
    assert len(sample) == 2
    with Pool(workers=1, deadline_s=coq.budget_s(sample[0])) as pool:
        self_test(coq, sample, pool)


def test_no_prompt_holds_a_proof():
    for task in ALL:
        assert Coq().golds(task) == [task.fields["gold"]]
        [message] = task.messages
        shown = message["content"]
        assert f"Theorem {task.fields['name']} : {task.fields['statement']}." in shown
        for key in ("header", "definitions"):
            assert task.fields.get(key, "") in shown
        for line in task.fields["gold"].splitlines():
            assert not re.search(r"\b(Qed|reflexivity|induction|intros?)\b", shown)
            assert line not in shown, task.id
        Coq().check(task)


def test_held_out_exercises_are_never_trained_on_whatever_the_difficulty():
    for seed in (0, 1):
        held_out = {task.id for task in coq_exercises("held_out", CoqExercises(seed=seed))}
        assert len(held_out) == 30
        for low in range(1, HARDEST + 1):
            spec = CoqExercises(low=low, high=low, seed=seed)
            train = {task.id for task in coq_exercises("train", spec)}
            assert train
            assert not train & held_out
            assert all(task.fields["difficulty"] == low for task in coq_exercises("train", spec))
    first, other = (coq_exercises("train", CoqExercises(seed=seed), limit=5) for seed in (0, 1))
    assert first == coq_exercises("train", CoqExercises())[:5]
    assert first != other


def test_too_many_or_none_is_an_error():
    with pytest.raises(UserError, match=r"of difficulty 6 to 6, and .* are in 'train', not 500"):
        coq_exercises("train", CoqExercises(low=6), limit=500)
    with pytest.raises(UserError, match="held_out"):
        coq_exercises("held_out", CoqExercises(held_out=0))


@pytest.mark.parametrize(
    "options",
    [{"low": 0}, {"high": 7}, {"low": 3, "high": 2}, {"template": "Prove it."}, {"held_out": -1}],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        CoqExercises(**options)


def test_the_file_is_one_task_a_line_as_the_shell_command_reads_them():
    lines = Path(module.__file__).with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == len(ALL)
    assert all({"id", "name", "statement", "difficulty", "topic", "gold"} <= set(row) for row in rows)
