"""What people give posttrain from Python that is nearly right: taken as it is meant, or refused in a line."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from peft import LoraConfig

import posttrain
from posttrain import Callback, Recipe, Sampling, Task, UserError
from posttrain.base.usercode import load_named
from posttrain.data import Records
from posttrain.recipe.objects import _written, exported, sources_of

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
    with pytest.raises(UserError, match=r"^data:1: "):  # as of any records without one
        posttrain.train(model, data=pandas.DataFrame([["a", "b"]]), **asked)
    mixed = Records.of([{"prompt": "p", 0: "x", "grid": {1: "a", "b": {3, 1}}}])
    assert mixed.records == [{"prompt": "p", "0": "x", "grid": {"1": "a", "b": [1, 3]}}]


@pytest.mark.full
def test_records_that_are_given_again_are_known_again_in_another_process():
    program = "from posttrain.data import Records\nclass Thing: pass\n"
    program += "print(Records.of([{'prompt': 'p', 'tags': {'a', 'b', 'c'}, 'thing': Thing()}]))"
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
    with pytest.raises(UserError, match=r"^sample: "):
        run.sample("1+2=", temperature="0.5")


@pytest.mark.full
def test_a_callback_may_answer_as_numpy_does(model):
    asked = {"data": SUMS, "reward": "number", "updates": 3, "show": "none", **SMALL}
    for answer, updates in ((numpy.bool_(False), 1), (False, 1), (numpy.bool_(True), 3), (0, 3), (None, 3)):
        run = posttrain.train(model, callbacks=Callback(on_update=lambda s, line, no=answer: no), **asked)
        assert len(run.metrics) == updates, repr(answer)


def test_what_decides_what_is_trained_may_not_differ_on_a_resume(model):
    asked = {"data": SUMS, "reward": "number", "dir": "run", "show": "none", **SMALL}
    posttrain.train(model, updates=1, **asked)
    with pytest.raises(UserError, match=r"^eval: "):
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


@pytest.mark.full
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


# ---------------------------------------------------------------------- what a program does with a session


WEIGHED = {"name": "grpo", "correction": "token_truncated"}


def digit(response):
    return float(any(c.isdigit() for c in response))


@pytest.mark.filterwarnings("ignore:not saved")
def test_two_updates_without_publishing_do_not_wait_for_weights_that_nobody_sent(model):
    asked = {"data": SUMS, "reward": digit, "updates": 4, "async_": {"max_lag": 1, "place": "thread"}}
    with posttrain.Session(model, method=WEIGHED, **asked, **SMALL) as s:
        groups = s.sample()
        s.update(groups)
        s.update(groups)
        s.publish()
        assert s.sample()


def spread(response):
    return float(len(set(response)))


@pytest.mark.filterwarnings("ignore:not saved")
def test_weights_that_a_failed_update_has_moved_are_others(model, monkeypatch):
    steps = {"minibatches": 3}
    with posttrain.Session(model, data=SUMS, reward=spread, updates=3, steps=steps, **SMALL) as s:
        groups, steps = s.sample(), []
        whole = s.learner._move

        def fails_second(*given):
            steps.append(given)
            if len(steps) == 2:
                raise posttrain.RunError("check", "the gradient is not finite")
            return whole(*given)

        monkeypatch.setattr(s.learner, "_move", fails_second)
        with pytest.raises(posttrain.RunError, match=r"^check: "):
            s.update(groups)
        assert s.learner.update_count == 1
        with pytest.raises(posttrain.RunError, match=r"^sample\(\): "):
            s.sample()
        s.publish()
        found = s.sample()
        rows = [e.trajectory for g in found for e in g]
        assert {v for t in rows for v, sampled in zip(t.version, t.sampled, strict=True) if sampled} == {1}


@pytest.mark.filterwarnings("ignore:not saved")
def test_own_rows_after_an_update_leave_the_line_of_groups_as_it_is(model):
    asked = {"data": SUMS, "reward": digit, "updates": 6, "async_": {"max_lag": 1, "place": "thread"}}
    with posttrain.Session(model, method=WEIGHED, **asked, **SMALL) as s:
        batch = s.batch(groups := s.sample())
        s.update(groups)
        s.publish()
        bad = dataclasses.replace(batch, reward=batch.reward * math.nan)
        with pytest.raises((posttrain.RunError, ValueError)):
            s.update(bad)
        assert s.sample()


def test_rows_beyond_those_that_were_scored_get_their_reference_too(model):
    pairs = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(9)] * 2
    with posttrain.Session(model, method="dpo", data=pairs, updates=2, batch={"batch_size": 2}) as s:
        for _ in range(4):
            rows = s.sample()
        batch = s.batch(rows)
        at = batch.mask
        torch.testing.assert_close(batch.logp_ref[at], s.learner.score(batch).logp[at])
        s.update(rows)


def test_an_episode_without_a_score_stays_one_whatever_is_paid_by_hand(model):
    def breaks(response):
        if sum(map(ord, response)) % 3 == 1:
            raise RuntimeError("no wages")
        return 1.0

    rollout = SMALL["rollout"] | {"max_error_rate": 1.0}
    with posttrain.Session(model, data=SUMS, reward=breaks, updates=2, **SMALL | {"rollout": rollout}) as s:
        groups = s.sample()
        failed = [e.verdict.failed for g in groups for e in g]
        assert any(failed)
        paid = groups.reward(lambda episode: 2.0)
        assert [e.verdict.failed for g in paid for e in g] == failed
        assert {e.reward for g in paid for e in g if not e.verdict.failed} == {2.0}


SCALE = 2


def has_digit(response: str) -> float:
    return float(any(c.isdigit() for c in response))


def double(a: int) -> int:
    """Doubles a number.

    Args:
        a: The number.
    """
    return SCALE * int(json.loads(str(a)))


@pytest.mark.full
def test_functions_of_a_script_are_tools_and_judge_with_them(model, monkeypatch):
    monkeypatch.setattr(double, "__module__", "__main__")
    monkeypatch.setattr(has_digit, "__module__", "__main__")
    asked = {"data": SUMS, "reward": has_digit, "tools": [double], "updates": 1, "show": "none"}
    run = posttrain.train(model, task={"tools": {"max_turns": 2}}, **asked, **SMALL)
    assert run.metrics["verdict/scored"] == [1.0]
    tools = run.recipe.settings.task.tools
    assert (tools.max_turns, [r.tool.name for r in tools.runners()]) == (2, ["double"])
    assert load_named(tools.functions[0])(4) == 8
    with pytest.raises(UserError, match=r"double_\w+: put it into a file"):
        Recipe(model, data=SUMS, tools=[double]).write("recipe.toml")
    _written.cache_clear()  # as in another process, where the directory is moved to
    run = posttrain.load(run.path.rename("moved"))
    assert {Path(name).parent for name in run.recipe.settings.task.tools.functions} == {
        Path("moved/code").resolve()
    }
    task = {"tools": {"max_turns": 2}}
    more = posttrain.train(model, task=task, dir="moved", resume=True, **asked | {"updates": 2}, **SMALL)
    assert len(more.metrics) == 2


def test_what_cannot_be_called_in_another_process_is_no_tool(model, monkeypatch):
    monkeypatch.setattr(has_digit, "__module__", "__main__")

    def calls_another(a: int) -> float:
        return has_digit(str(a))

    with pytest.raises(UserError, match=r"^tools: "):
        Recipe(model, data=SUMS, reward=has_digit, tools=calls_another)
    with pytest.raises(UserError, match=r"^tools: "):
        Recipe(model, data=SUMS, reward=has_digit, tools=[lambda a: a])


def test_an_adapter_of_peft_is_ours_or_refused_by_what_it_has_besides(model):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    made = Recipe(model, data=SUMS, reward=has_digit, lora=config)
    assert made.tables["lora"] == {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    assert Recipe(model, data=SUMS, reward=has_digit, lora=LoraConfig()).tables["lora"] == {
        "rank": 8,
        "alpha": 8,
    }
    with pytest.raises(UserError) as told:
        Recipe(model, data=SUMS, reward=has_digit, lora=LoraConfig(lora_dropout=0.1))
    assert (
        str(told.value) == "lora.lora_dropout: unknown key 'lora_dropout'; leave it out: adapters have no "
        "dropout, whose draws depend on microbatches; optim.weight_decay regularises"
    )


def test_an_answer_that_is_null_is_named(model):
    records = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]
    with pytest.raises(UserError, match=r"^data:2: "):
        posttrain.train(model, method="sft", data=records, updates=1, show="none")


def test_held_out_records_are_read_as_the_others_are(model):
    rows = [{"text": row["prompt"], "gold": row["answer"]} for row in SUMS]
    read = {"columns": {"prompt": "text", "answer": "gold"}, "system": "Add."}
    asked = {"reward": "number", "task": {"data": read}, **SMALL}
    found = posttrain.evaluate(model, data=rows, reward="number", task={"data": read})
    assert "eval/accuracy" in found
    run = posttrain.train(model, data=rows, updates=1, show="none", **asked)
    assert run.recipe.with_held_out(rows).settings.task.held_out.system == "Add."
    assert run.evaluate(data=rows[:3]).keys() == found.keys()
    assert run.evaluate(data=SUMS[:3]).keys() == found.keys(), "of other columns, by their usual names"
    again = posttrain.load(run.path).recipe
    tooled = again.replace(**{"task.tools": {"builtin": ["calculator"]}})
    assert tooled.with_held_out(rows).settings.task.tools.builtin == ("calculator",)


def test_objects_have_the_names_in_a_file_that_they_always_had():
    """A run that a program made before is resumed by these names."""
    recipe = Recipe("m", data=SUMS[:2], reward=[lambda response: 1.0, has_digit, has_digit], env=None)
    table = exported(recipe.tables)
    names = [entry["function"] for entry in table["verifier"]["function"]]
    assert names == ["memory:reward", "memory:has_digit", "memory:has_digit_2"]
    assert table["task"]["data"]["path"].startswith("memory:2 records, ")
    assert Recipe.of(table).settings.verifier.function[1].name == "has_digit"


def test_a_refused_resume_deletes_nothing(model, tmp_path):
    """Even of a run that has no line of metrics yet."""
    asked = {"data": SUMS, "reward": has_digit, "dir": tmp_path / "run", "show": "none", **SMALL}
    run = posttrain.train(model, updates=1, **asked)
    (run.path / "metrics.jsonl").write_text("")
    (run.path / "code" / "has_digit.held.py").write_text("def has_digit(): another\n")
    before = sorted(p.name for p in run.path.iterdir())
    with pytest.raises(UserWarning, match="has changed since the run began"):  # warnings are errors here
        posttrain.train(model, updates=2, resume=True, **asked)
    assert sorted(p.name for p in run.path.iterdir()) == before


def test_a_reward_table_may_hold_functions(model):
    one = Recipe(
        model, data=SUMS, reward={"function": {"function": has_digit}, "weights": {"has_digit": 2.0}}
    )
    several = Recipe(
        model, data=SUMS, reward={"function": [{"function": has_digit, "name": "a"}, {"function": has_digit}]}
    )
    assert [each.name for each in one.settings.verifier.function] == ["has_digit"]
    assert [each.name for each in several.settings.verifier.function] == ["a", "has_digit"]
    assert set(sources_of(several.tables)) == {"a", "has_digit"}
    with pytest.raises(UserError, match=r"^search\.strategy: "):
        Recipe(model, data=SUMS, reward=has_digit, search={"strategy": "bogus"})
