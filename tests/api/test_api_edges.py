"""What people give posttrain from Python that is nearly right: taken as it is meant, or refused in a line."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import posttrain
from posttrain import Callback, Sampling, Task, UserError
from posttrain.data import InMemoryData

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
SMALL = {"sampling": {"max_new_tokens": 3}, "rollout": {"groups": 3, "group_size": 4, "workers": 1}}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Runs are left in the test's own directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tiny):
    """The tiny model, computing in float32."""
    return {"path": str(tiny), "dtype": "float32", "device": "cpu"}


def task(**other):
    return Task(**({"id": "a", "messages": ({"role": "user", "content": "1?"},), "answer": "1"} | other))


# ---------------------------------------------------------------------- rewards


def test_a_reward_that_losses_cannot_square_is_masked_and_counted(model):
    def exponential(response):
        return 1e39 if sum(map(ord, response)) % 2 else float(len(set(response)))

    rollout = SMALL["rollout"] | {"max_error_rate": 1.0}
    run = posttrain.train(
        model, data=SUMS, reward=exponential, updates=2, show="none", **SMALL | {"rollout": rollout}
    )
    assert max(run.metrics["verdict/not_a_number"]) > 0
    assert all(math.isfinite(value) for line in run.metrics for value in line.values())
    labels = {(row["label"], row["score"] is None) for update in (1, 2) for row in run.episodes(update)}
    assert ("not_a_number", True) in labels
    assert ("not_a_number", False) not in labels
    assert ("scored", False) in labels


# ---------------------------------------------------------------------- data


def test_what_is_skipped_is_said_in_python_too(model, capfd):
    asked = {"task": {"data": {"bad": "skip"}}, "reward": "number", "updates": 1, **SMALL}
    data = [*SUMS[:2], {"prompt": ""}]
    posttrain.train(model, data=data, show="lines", **asked)
    assert "1 of 3 records skipped" in capfd.readouterr().err
    posttrain.train(model, data=data, show="none", **asked)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("tasks", "table", "says"),
    [
        ([task()], {"limit": 1}, "task.data.limit: is never read: the tasks are given as they are"),
        ([task()], {"system": "Be brief."}, r"task\.data\.system: is never read"),
        ([task(), task()], {}, "data:2: another task is called 'a'"),
        ([task(answer=7)], {}, "data:1: its answer is 7, not text"),
        ([task(id=7)], {}, "data:1: its id is 7, not text"),
        ([task(messages=({"role": "user"},))], {}, "data:1: a message has no text as role or content"),
        (
            [task(messages=({"role": "user", "content": [{"type": "text", "text": "hi"}]},))],
            {},
            "a message has no text as role or content",
        ),
    ],
)
def test_tasks_are_checked_as_records_are(model, tasks, table, says):
    with pytest.raises(UserError, match=says):
        posttrain.Session(model, data=tasks, reward="number", updates=1, task={"data": table}, **SMALL)


class Polars:
    """What polars says of a frame."""

    columns = ("prompt", "answer")

    def to_dict(self):
        raise AssertionError("this is not pandas")

    def to_dicts(self):
        return SUMS


def test_frames_and_arrays_are_records(model):
    import pandas

    asked = {"reward": "number", "updates": 1, "show": "none", **SMALL}
    chat = numpy.array([{"role": "user", "content": "1+1="}], dtype=object)
    for data in (Polars(), pandas.DataFrame({"prompt": [chat, chat], "answer": [2, 3]})):
        run = posttrain.train(model, data=data, **asked)
        assert run.episodes()[0]["task"]
    with pytest.raises(UserError, match="there is none of messages, prompt"):  # as of any records without one
        posttrain.train(model, data=pandas.DataFrame([["a", "b"]]), **asked)
    mixed = InMemoryData.of([{"prompt": "p", 0: "x", "grid": {1: "a", "b": {3, 1}}}])
    assert mixed.records == [{"prompt": "p", "0": "x", "grid": {"1": "a", "b": [1, 3]}}]


def test_records_that_are_given_again_are_known_again_in_another_process():
    program = "from posttrain.data import InMemoryData\nclass Thing: pass\n"
    program += "print(InMemoryData.of([{'prompt': 'p', 'tags': {'a', 'b', 'c'}, 'thing': Thing()}]).path)"
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1, said


def test_an_iterator_of_tasks_can_be_evaluated(model):
    asked = {"reward": "number", "sampling": {"max_new_tokens": 2}}
    assert posttrain.evaluate(model, data=iter(SUMS[:3]), **asked) == posttrain.evaluate(
        model, data=SUMS[:3], **asked
    )
    for table, says in (
        ({"temperature": 0.7}, "eval.temperature"),
        ({"temperature": 0.0}, "eval.temperature"),
    ):
        with pytest.raises(UserError, match=says):
            posttrain.evaluate(model, data=SUMS[:3], reward="number", sampling=table)


# ---------------------------------------------------------------------- a run


def test_one_stop_string_is_one(model):
    with pytest.raises(ValueError, match="stop is a list of texts, none of them empty, not 'END'"):
        Sampling(stop="END")
    run = posttrain.train(model, data=SUMS, reward="number", updates=1, show="none", **SMALL)
    asked = {"max_new_tokens": 12, "temperature": 1.0, "n": 8}
    assert run.sample("1+2=", stop="END", **asked) == run.sample("1+2=", stop=["END"], **asked)
    assert run.sample("1+2=", stop="END", **asked) == run.sample("1+2=", **asked), "nobody says it"
    for prompt, says in (
        ([{"content": "hi"}], "no 'role'"),
        ([{"role": "user", "content": None}], "not text"),
        ("", "empty"),
    ):
        with pytest.raises(UserError, match=says):
            run.sample(prompt)
    parts = [{"role": "user", "content": [{"type": "text", "text": "1+2="}]}]
    assert run.sample(parts, **asked) == run.sample("1+2=", **asked)
    with pytest.raises(UserError, match="sample"):
        run.sample("1+2=", temperature="0.5")


def test_a_callback_may_answer_as_numpy_does(model):
    asked = {"data": SUMS, "reward": "number", "updates": 3, "show": "none", **SMALL}
    for answer, updates in ((numpy.bool_(False), 1), (False, 1), (numpy.bool_(True), 3), (0, 3), (None, 3)):
        run = posttrain.train(model, callbacks=Callback(on_update=lambda s, line, no=answer: no), **asked)
        assert len(run.metrics) == updates, repr(answer)


def test_what_decides_what_is_trained_may_not_differ_on_a_resume(model):
    asked = {"data": SUMS, "reward": "number", "dir": "run", "show": "none", **SMALL}
    posttrain.train(model, updates=1, **asked)
    with pytest.raises(UserError, match=r"eval.*right was 1.0 and is 0.5"):
        posttrain.train(model, updates=2, resume=True, eval={"right": 0.5}, **asked)
    assert len(posttrain.train(model, updates=2, resume=True, eval={"limit": 3}, **asked).metrics) == 2


def test_metrics_are_not_deleted_for_want_of_a_checkpoint(model):
    asked = {"data": SUMS, "reward": "number", "dir": "run", "show": "none", **SMALL}
    asked["checkpoint"] = {"every": 1}
    run = posttrain.train(model, updates=2, **asked)
    kept = (run.path / "metrics.jsonl").read_bytes()
    for path in (run.path / "checkpoints").iterdir():
        (path / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"no checkpoint to go on from \(step_000002 was passed over"):
        posttrain.train(model, updates=3, resume=True, **asked)
    (run.path / "checkpoints").rename("elsewhere")
    with pytest.raises(UserError, match=r"no checkpoint to go on from .* told of 2 updates"):
        posttrain.train(model, updates=3, resume=True, **asked)
    assert (run.path / "metrics.jsonl").read_bytes() == kept


def test_a_run_is_not_gone_on_with_with_other_data_nor_silently_with_another_reward(model, capfd):
    Path("rewards.py").write_text("def one(response):\n    return float(len(response) % 2)\n")
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    asked = {"data": "data.jsonl", "reward": "rewards.py:one", "dir": "run", "show": "lines", **SMALL}
    posttrain.train(model, updates=1, **asked)
    assert len(posttrain.train(model, updates=2, resume=True, **asked).metrics) == 2
    assert "has changed" not in capfd.readouterr().err
    Path("rewards.py").write_text("def one(response):\n    return -float(len(response) % 2)\n")
    posttrain.train(model, updates=3, resume=True, **asked)
    assert "rewards.py has changed since the run began" in capfd.readouterr().err
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*SUMS, SUMS[0]]))
    with pytest.raises(UserError, match=r"task\.data.*not those that the run began with"):
        posttrain.train(model, updates=4, resume=True, **asked)
