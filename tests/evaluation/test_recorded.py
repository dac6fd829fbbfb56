"""The answers that a run recorded: the task of each line, and the verifier of its source."""

from pathlib import Path
from typing import Any

import pytest

from posttrain.evaluation.recorded import read_judges, read_recorded
from posttrain.evaluation.verdicts import RecordedAnswer, Response, verdicts
from posttrain.models import checkpoint
from posttrain.types import Task, UserError, Verdict
from posttrain.verifiers.answers import Exact

from .conftest import Records

FIRST, AFTER = "update_000001", "eval_000001"


def data(path: Path) -> dict[str, Any]:
    return {"path": str(path)}


def source(name: str, path: Path, **others: Any) -> dict[str, Any]:
    return {"name": name, "data": data(path), **others}


def answers_of(run: Path, **options: Any) -> list[str | None]:
    """Return the answer of the task of each recorded line."""
    return [one.response.task.answer for one in read_recorded(run, **options)]


@pytest.fixture
def two(records: Records, recorded: Any) -> Any:
    """two(**over) -> a run of a mixture of a (exact) and b (number, option `where`), and [[eval.task]] c."""

    def make(over: dict[str, Any] | None = None, **files: Any) -> Path:
        a, b, c = (
            records({"id": "0", "prompt": "?", "answer": answer}, name=name)
            for name, answer in (("a", "seven"), ("b", "8"), ("c", "nine"))
        )
        exact, number = {"verifier": {"exact": {}}}, {"verifier": {"number": {"where": "last"}}}
        sources = [source("a", a, **exact), source("b", b, **number)]
        tables = {"task": sources, "verifier": None, "eval": {"task": [source("c", c, **exact)]}}
        files = files or {
            FIRST: [("a/0", "seven", {"dataset": "a"}), ("b/0", "it is 8", {"dataset": "b"})],
            AFTER: [("0", "nine", {"dataset": "c"})],
        }
        return recorded(tables | (over or {}), **files)

    return make


def test_training_and_evaluation_with_equal_ids_are_two_tasks(records, recorded):
    train = records({"id": "1", "prompt": "?", "answer": "trained"}, name="train")
    held_out = records({"id": "1", "prompt": "?", "answer": "held out"}, name="held_out")
    row = ("1", "x", {})
    run = recorded(
        {"task": {"data": data(train), "held_out": data(held_out), "arithmetic": None}},
        **{FIRST: [row], AFTER: [row]},
    )
    assert {one.file: one.response.task.answer for one in read_recorded(run)} == {
        "000001": "trained",
        "eval_000001": "held out",
    }


def test_sources_and_eval_tasks_are_found_by_name(two):
    assert answers_of(two()) == ["nine", "seven", "8"]


def test_a_source_without_its_file_leaves_the_tasks_of_others(two, tmp_path):
    run, notes = two(), []
    (tmp_path / "a.jsonl").unlink()
    assert answers_of(run, say=notes.append) == ["nine", None, "8"]
    [note] = notes
    assert "1 task known only by prompt and answer" in note
    assert "the tasks of 'a' cannot be made" in note


def test_a_run_that_learns_text_has_the_answers_of_its_evaluations(two, tmp_path):
    (tmp_path / "text.txt").write_text("Once upon a time.\n")
    text = {
        "method": {"name": "pretrain"},
        "task": {"text": {"path": str(tmp_path / "text.txt")}, "arithmetic": None},
        "sampling": None,
        "rollout": None,
    }
    notes: list[str] = []
    run = two(text, **{AFTER: [("0", "nine", {"dataset": "c"})]})
    assert answers_of(run, say=notes.append) == ["nine"]
    assert not notes


def test_tasks_of_two_sources_with_one_id_have_each_its_fault():
    wrong, right = (
        Task(id="0", messages=(), answer=answer, dataset=answer or "none") for answer in (None, "7")
    )
    judged = verdicts(
        Exact(),
        [Response(wrong, "7"), Response(right, "7")],
        workers=1,
        deadline_s=10.0,
        on_progress=lambda count: None,
    )
    assert [verdict.label for verdict in judged] == ["data_error", "right"]


@pytest.mark.parametrize(
    ("stop", "text"),
    [("stop", "so 7#"), ("length", "so 7## 8!")],
)
def test_an_answer_ends_with_its_first_stop_string(records, recorded, stop, text):
    """A token may spell more than the stop string in it; training judged the text up to its end."""
    file = records({"id": "0", "prompt": "?", "answer": "7"})
    task = {"arithmetic": None, "data": data(file), "stop": ["!", "#"]}
    row = ("0", "", {"pieces": ["so", " 7", "## 8!"], "sampled": [True] * 3, "stop": stop})
    [one] = read_recorded(recorded({"task": task}, **{FIRST: [row]}))
    assert one.response.text == text


def test_a_run_judges_each_source_by_its_own_verifier(two, run_cli):
    run = two()
    judges = read_judges(str(run))
    assert [judges.of(name).name for name in "abc"] == ["exact", "number", "exact"]
    same = run_cli("verify", run, run, "--json")
    assert same.code == 0, same.err
    assert (same.json["answers"], same.json["left_out"], same.json["changed"]) == (3, 0, 0)
    strict = run_cli("verify", run, run, "--json", "--set", "task.b.verifier.number.where=boxed")
    assert [change["id"] for change in strict.json["changes"]] == ["0"], strict.err


def test_one_source_is_judged_alone(two, run_cli):
    run = two()
    done = run_cli("verify", "number", run, "--source", "b", "--json")
    assert (done.code, done.json["answers"], done.json["changed"]) == (0, 1, 0)
    assert run_cli("verify", "exact", run, "--json").json["answers"] == 3
    with pytest.raises(UserError, match="it has a, b, c") as caught:
        read_recorded(run, source="zzz")
    assert caught.value.key == "--source"


def test_answers_of_a_game_have_no_verifier(recorded, run_cli):
    game = {"task": {"guess": {"high": 4}, "games": {"train": 2}, "arithmetic": None}, "verifier": None}
    run = recorded(game, **{FIRST: [("guess 1", "2", {})]})
    done = run_cli("verify", run, run)
    assert done.code == 2
    assert "names no verifier of these answers" in done.err


def test_a_checkpoint_names_its_run_and_its_update(two, run_cli):
    run = two(
        **{
            FIRST: [("a/0", "seven", {"dataset": "a"})],
            "update_000002": [("a/0", "six", {"dataset": "a"}), ("b/0", "8", {"dataset": "b"})],
        }
    )
    for update in (1, 2):
        checkpoint.save(run / "checkpoints", update, lambda path: None, {}, keep=2, best=1)
    assert run_cli("verify", f"{run}@best", run, "--json").json["answers"] == 3
    assert run_cli("verify", run, f"{run}@best", "--json").json["answers"] == 1
    assert run_cli("verify", run, f"{run}@2", "--json").json["answers"] == 2
    assert run_cli("verify", run, f"{run}@2", "--update", 1).code == 2


@pytest.mark.parametrize(
    ("label", "score", "changed"),
    [("scored", 1.0, False), ("scored", 0.5, True), ("scored", None, True), ("wrong", 1.0, True)],
)
def test_a_verdict_without_a_class_changes_by_its_score(label, score, changed):
    before = RecordedAnswer(Response(Task(id="0", messages=()), "7"), "000001", 0, "right", 1.0)
    assert before.has_changed(Verdict(score=score, label=label)) is changed
