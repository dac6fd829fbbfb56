"""Environments of the library verifiers, played by its own harness: `make test-verifiers` has the library."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

from posttrain.types import UserError
from posttrain_envs import verifiers_library

HERE = Path(__file__).parent
THERE = importlib.util.find_spec("verifiers") is not None
needs = pytest.mark.skipif(not THERE, reason="verifiers is not installed: make test-verifiers")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


def test_without_the_library_it_is_said_what_installs_it() -> None:
    if not THERE:
        with pytest.raises(UserError, match=r"^task\.own\.options: "):
            verifiers_library.tasks(taskset="gsm8k")


def test_the_table_is_the_users_own_with_a_chat_on_this_machine_where_nothing_is_said() -> None:
    table = verifiers_library._table("a", {"taskset": {"seed": 1}, "agent": {"max_turns": 4}, "id": "b"})
    assert table == {
        "id": "b",
        "taskset": {"id": "a", "seed": 1},
        "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4},
    }


@needs
def test_tasks_are_those_of_the_taskset(importable: None) -> None:
    found = verifiers_library.tasks(taskset="verifiers_taskset", limit=4)
    assert [task.messages[0]["content"] for task in found] == ["0+0=", "1+1=", "2+2=", "3+3="]
    assert [task.fields["index"] for task in found] == [0, 1, 2, 3]
    with pytest.raises(UserError, match="no_such_set"):
        verifiers_library.tasks(taskset="no_such_set")


@needs
def test_a_run_is_paid_by_its_rewards_and_what_breaks_there_is_not_scored(
    importable: None, tiny: Path, tmp_path: Path
) -> None:
    import posttrain

    run = posttrain.train(
        model=str(tiny),
        method="grpo",
        task={
            "own": {
                "function": "posttrain_envs.verifiers_library:tasks",
                "options": {"taskset": "verifiers_taskset", "limit": 4},
            },
            "agent": {"function": "posttrain_envs.verifiers_library:play", "at_once": 4},
        },
        sampling={"max_new_tokens": 6},
        rollout={"groups": 4, "group_size": 2},
        updates=1,
        dir=tmp_path / "run",
    )
    lines = [
        json.loads(line)
        for path in sorted((tmp_path / "run" / "samples").iterdir())
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    told = run.metrics[0]
    assert (told["verdict/scored"], told["hacking/error_rate"], told["agent/calls"]) == (0.75, 0.25, 1.0)
    assert len(lines) == 6, "the task whose reward breaks is no reward of 0"
    for line in lines:
        wanted = int(line["task"].rpartition("-")[2])
        assert wanted != 3
        # What the library takes for the reply is stripped, and without special tokens.
        assert 10.0 * wanted <= line["score"] <= 10.0 * wanted + len("".join(line["pieces"]))
