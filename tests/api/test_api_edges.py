"""Edge cases of the Python API: input that is nearly right is accepted as meant, or refused in one line."""

import dataclasses
import errno
import fcntl
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
from posttrain.recipe.objects import _temporary_dir, export_tables, read_sources

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
SMALL = {"sampling": {"max_new_tokens": 3}, "rollout": {"groups": 3, "group_size": 4, "workers": 1}}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Write runs to the directory of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tiny):
    """Return the table of the tiny model, in float32."""
    return {"path": str(tiny), "dtype": "float32", "device": "cpu"}


def task(**other):
    return Task(**({"id": "a", "messages": ({"role": "user", "content": "1?"},), "answer": "1"} | other))


# ---------------------------------------------------------------------- rewards


def test_reward_too_large_to_square_is_masked_and_counted(model):
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


def test_skipped_records_are_reported_in_python(model, capfd):
    options = {"task": {"data": {"bad": "skip"}}, "reward": "number", "updates": 1, **SMALL}
    data = [*SUMS[:2], {"prompt": ""}]
    posttrain.train(model, data=data, show="lines", **options)
    assert "1 of 3 records skipped" in capfd.readouterr().err
    posttrain.train(model, data=data, show="none", **options)
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
    """A stand-in for a data frame of polars."""

    columns = ("prompt", "answer")

    def to_dict(self):
        raise AssertionError("this is not pandas")

    def to_dicts(self):
        return SUMS


def test_frames_and_arrays_are_records(model):
    import pandas

    options = {"reward": "number", "updates": 1, "show": "none", **SMALL}
    chat = numpy.array([{"role": "user", "content": "1+1="}], dtype=object)
    for data in (Polars(), pandas.DataFrame({"prompt": [chat, chat], "answer": [2, 3]})):
        run = posttrain.train(model, data=data, **options)
        assert run.episodes()[0]["task"]
    with pytest.raises(UserError, match=r"^data:1: "):  # as of any records without one
        posttrain.train(model, data=pandas.DataFrame([["a", "b"]]), **options)
    mixed = Records.of([{"prompt": "p", 0: "x", "grid": {1: "a", "b": {3, 1}}}])
    assert mixed.records == [{"prompt": "p", "0": "x", "grid": {"1": "a", "b": [1, 3]}}]


@pytest.mark.full
def test_records_have_the_same_digest_in_every_process():
    program = "from posttrain.data import Records\nclass Thing: pass\n"
    program += "print(Records.of([{'prompt': 'p', 'tags': {'a', 'b', 'c'}, 'thing': Thing()}]))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1, digests


def test_an_iterator_of_tasks_can_be_evaluated(model):
    options = {"reward": "number", "sampling": {"max_new_tokens": 2}}
    assert posttrain.evaluate(model, data=iter(SUMS[:3]), **options) == posttrain.evaluate(
        model, data=SUMS[:3], **options
    )
    for table, says in (
        ({"temperature": 0.7}, "eval.temperature"),
        ({"temperature": 0.0}, "eval.temperature"),
    ):
        with pytest.raises(UserError, match=says):
            posttrain.evaluate(model, data=SUMS[:3], reward="number", sampling=table)


# ---------------------------------------------------------------------- a run


def test_stop_may_be_a_single_string(model):
    with pytest.raises(ValueError, match="stop is a list of texts, none of them empty, not 'END'"):
        Sampling(stop="END")
    run = posttrain.train(model, data=SUMS, reward="number", updates=1, show="none", **SMALL)
    options = {"max_new_tokens": 12, "temperature": 1.0, "n": 8}
    assert run.sample("1+2=", stop="END", **options) == run.sample("1+2=", stop=["END"], **options)
    assert run.sample("1+2=", stop="END", **options) == run.sample("1+2=", **options), "nobody says it"
    for prompt, says in (
        ([{"content": "hi"}], "no 'role'"),
        ([{"role": "user", "content": None}], "not text"),
        ("", "empty"),
    ):
        with pytest.raises(UserError, match=says):
            run.sample(prompt)
    parts = [{"role": "user", "content": [{"type": "text", "text": "1+2="}]}]
    assert run.sample(parts, **options) == run.sample("1+2=", **options)
    with pytest.raises(UserError, match=r"^sample: "):
        run.sample("1+2=", temperature="0.5")


@pytest.mark.full
def test_callback_may_return_a_numpy_bool(model):
    options = {"data": SUMS, "reward": "number", "updates": 3, "show": "none", **SMALL}
    for answer, updates in ((numpy.bool_(False), 1), (False, 1), (numpy.bool_(True), 3), (0, 3), (None, 3)):
        run = posttrain.train(model, callbacks=Callback(on_update=lambda s, line, no=answer: no), **options)
        assert len(run.metrics) == updates, repr(answer)


def test_resume_refuses_a_change_that_affects_training(model):
    options = {"data": SUMS, "reward": "number", "dir": "run", "show": "none", **SMALL}
    posttrain.train(model, updates=1, **options)
    with pytest.raises(UserError, match=r"^eval: "):
        posttrain.train(model, updates=2, resume=True, eval={"right": 0.5}, **options)
    assert len(posttrain.train(model, updates=2, resume=True, eval={"limit": 3}, **options).metrics) == 2


def test_resume_without_a_checkpoint_keeps_the_metrics(model):
    options = {"data": SUMS, "reward": "number", "dir": "run", "show": "none", **SMALL}
    options["checkpoint"] = {"every": 1}
    run = posttrain.train(model, updates=2, **options)
    metrics = (run.path / "metrics.jsonl").read_bytes()
    for path in (run.path / "checkpoints").iterdir():
        (path / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"no checkpoint to resume from \(step_000002 was passed over"):
        posttrain.train(model, updates=3, resume=True, **options)
    (run.path / "checkpoints").rename("elsewhere")
    with pytest.raises(UserError, match=r"no checkpoint to resume from .* metrics of 2 updates"):
        posttrain.train(model, updates=3, resume=True, **options)
    assert (run.path / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.full
def test_resume_warns_of_another_reward_and_refuses_other_data(model, capfd):
    Path("rewards.py").write_text("def one(response):\n    return float(len(response) % 2)\n")
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    options = {"data": "data.jsonl", "reward": "rewards.py:one", "dir": "run", "show": "lines", **SMALL}
    posttrain.train(model, updates=1, **options)
    assert len(posttrain.train(model, updates=2, resume=True, **options).metrics) == 2
    assert "has changed" not in capfd.readouterr().err
    Path("rewards.py").write_text("def one(response):\n    return -float(len(response) % 2)\n")
    posttrain.train(model, updates=3, resume=True, **options)
    assert "rewards.py has changed since the run began" in capfd.readouterr().err
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*SUMS, SUMS[0]]))
    with pytest.raises(UserError, match=r"task\.data: .*differ from those that the run began with"):
        posttrain.train(model, updates=4, resume=True, **options)


# ---------------------------------------------------------------------- what a program does with a session


WEIGHED = {"name": "grpo", "correction": "token_truncated"}


def digit(response):
    return float(any(c.isdigit() for c in response))


@pytest.mark.filterwarnings("ignore:not saved")
def test_updates_without_publish_do_not_wait_for_weights(model):
    options = {"data": SUMS, "reward": digit, "updates": 4, "async_": {"max_lag": 1, "place": "thread"}}
    with posttrain.Session(model, method=WEIGHED, **options, **SMALL) as s:
        groups = s.sample()
        s.update(groups)
        s.update(groups)
        s.publish()
        assert s.sample()


def spread(response):
    return float(len(set(response)))


@pytest.mark.filterwarnings("ignore:not saved")
def test_failed_update_that_moved_weights_is_a_new_version(model, monkeypatch):
    steps = {"minibatches": 3}
    with posttrain.Session(model, data=SUMS, reward=spread, updates=3, steps=steps, **SMALL) as s:
        groups, steps = s.sample(), []
        move = s.learner._move

        def fail_second(*args):
            steps.append(args)
            if len(steps) == 2:
                raise posttrain.RunError("check", "the gradient is not finite")
            return move(*args)

        monkeypatch.setattr(s.learner, "_move", fail_second)
        with pytest.raises(posttrain.RunError, match=r"^check: "):
            s.update(groups)
        assert s.learner.update_count == 1
        with pytest.raises(posttrain.RunError, match=r"^sample\(\): "):
            s.sample()
        s.publish()
        rows = [e.trajectory for g in s.sample() for e in g]
        assert {v for t in rows for v, sampled in zip(t.version, t.sampled, strict=True) if sampled} == {1}


@pytest.mark.filterwarnings("ignore:not saved")
def test_refused_batch_leaves_the_line_of_groups_unchanged(model):
    options = {"data": SUMS, "reward": digit, "updates": 6, "async_": {"max_lag": 1, "place": "thread"}}
    with posttrain.Session(model, method=WEIGHED, **options, **SMALL) as s:
        batch = s.batch(groups := s.sample())
        s.update(groups)
        s.publish()
        bad = dataclasses.replace(batch, reward=batch.reward * math.nan)
        with pytest.raises((posttrain.RunError, ValueError)):
            s.update(bad)
        assert s.sample()


def test_batch_scores_reference_of_rows_not_scored_before(model):
    pairs = [{"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": str(a)} for a in range(9)] * 2
    with posttrain.Session(model, method="dpo", data=pairs, updates=2, batch={"batch_size": 2}) as s:
        for _ in range(4):
            rows = s.sample()
        batch = s.batch(rows)
        at = batch.mask
        torch.testing.assert_close(batch.logp_ref[at], s.learner.score(batch).logp[at])
        s.update(rows)


def test_groups_reward_keeps_failed_episodes_failed(model):
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
def test_functions_of_a_script_can_be_tools_and_reward(model, monkeypatch):
    monkeypatch.setattr(double, "__module__", "__main__")
    monkeypatch.setattr(has_digit, "__module__", "__main__")
    options = {"data": SUMS, "reward": has_digit, "tools": [double], "updates": 1, "show": "none"}
    run = posttrain.train(model, task={"tools": {"max_turns": 2}}, **options, **SMALL)
    assert run.metrics["verdict/scored"] == [1.0]
    tools = run.recipe.settings.source.tools
    assert (tools.max_turns, [r.tool.name for r in tools.runners()]) == (2, ["double"])
    assert load_named(tools.functions[0])(4) == 8
    with pytest.raises(UserError, match=r"double_\w+: put it into a file"):
        Recipe(model, data=SUMS, tools=[double]).write("recipe.toml")
    _temporary_dir.cache_clear()  # as in another process, where the directory is moved to
    run = posttrain.load(run.path.rename("moved"))
    assert {Path(name).parent for name in run.recipe.settings.source.tools.functions} == {
        Path("moved/code").resolve()
    }
    task = {"tools": {"max_turns": 2}}
    more = posttrain.train(model, task=task, dir="moved", resume=True, **options | {"updates": 2}, **SMALL)
    assert len(more.metrics) == 2


def test_tool_must_be_callable_in_another_process(model, monkeypatch):
    monkeypatch.setattr(has_digit, "__module__", "__main__")

    def calls_another(a: int) -> float:
        return has_digit(str(a))

    with pytest.raises(UserError, match=r"^tools: "):
        Recipe(model, data=SUMS, reward=has_digit, tools=calls_another)
    with pytest.raises(UserError, match=r"^tools: "):
        Recipe(model, data=SUMS, reward=has_digit, tools=[lambda a: a])


def test_peft_config_is_translated_or_refused_by_its_field(model):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    recipe = Recipe(model, data=SUMS, reward=has_digit, lora=config)
    assert recipe.tables["lora"] == {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    assert Recipe(model, data=SUMS, reward=has_digit, lora=LoraConfig()).tables["lora"] == {
        "rank": 8,
        "alpha": 8,
    }
    with pytest.raises(UserError) as refusal:
        Recipe(model, data=SUMS, reward=has_digit, lora=LoraConfig(lora_dropout=0.1))
    assert (
        str(refusal.value) == "lora.lora_dropout: unknown key 'lora_dropout'; leave it out: adapters have no "
        "dropout, whose draws depend on microbatches; optim.weight_decay regularises"
    )


def test_null_completion_is_refused_with_its_record(model):
    records = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}]
    with pytest.raises(UserError, match=r"^data:2: "):
        posttrain.train(model, method="sft", data=records, updates=1, show="none")


def test_held_out_records_are_read_like_the_data(model):
    rows = [{"text": row["prompt"], "gold": row["answer"]} for row in SUMS]
    read = {"columns": {"prompt": "text", "answer": "gold"}, "system": "Add."}
    options = {"reward": "number", "task": {"data": read}, **SMALL}
    metrics = posttrain.evaluate(model, data=rows, reward="number", task={"data": read})
    assert "eval/accuracy" in metrics
    run = posttrain.train(model, data=rows, updates=1, show="none", **options)
    assert run.recipe.with_held_out(rows).settings.source.held_out.system == "Add."
    assert run.evaluate(data=rows[:3]).keys() == metrics.keys()
    assert run.evaluate(data=SUMS[:3]).keys() == metrics.keys(), "columns with the usual names are found"
    again = posttrain.load(run.path).recipe
    tooled = again.replace(**{"task.tools": {"builtin": ["calculator"]}})
    assert tooled.with_held_out(rows).settings.source.tools.builtin == ("calculator",)


def test_exported_names_of_objects_do_not_change():
    """A run that an earlier version of a program started is resumed by these names."""
    recipe = Recipe("m", data=SUMS[:2], reward=[lambda response: 1.0, has_digit, has_digit], env=None)
    table = export_tables(recipe.tables)
    names = [entry["function"] for entry in table["verifier"]["function"]]
    assert names == ["memory:reward", "memory:has_digit", "memory:has_digit_2"]
    assert table["task"]["data"]["path"].startswith("memory:2 records, ")
    assert Recipe.of(table).settings.verifier.function[1].name == "has_digit"


def test_refused_resume_deletes_nothing(model, tmp_path):
    """Not even in a run without a line of metrics."""
    options = {"data": SUMS, "reward": has_digit, "dir": tmp_path / "run", "show": "none", **SMALL}
    run = posttrain.train(model, updates=1, **options)
    (run.path / "metrics.jsonl").write_text("")
    (run.path / "code" / "has_digit.held.py").write_text("def has_digit(): another\n")
    before = sorted(p.name for p in run.path.iterdir())
    with pytest.raises(UserWarning, match="has changed since the run began"):  # warnings are errors here
        posttrain.train(model, updates=2, resume=True, **options)
    assert sorted(p.name for p in run.path.iterdir()) == before


def test_reward_table_may_contain_functions(model):
    one = Recipe(
        model, data=SUMS, reward={"function": {"function": has_digit}, "weights": {"has_digit": 2.0}}
    )
    several = Recipe(
        model, data=SUMS, reward={"function": [{"function": has_digit, "name": "a"}, {"function": has_digit}]}
    )
    assert [each.name for each in one.settings.verifier.function] == ["has_digit"]
    assert [each.name for each in several.settings.verifier.function] == ["a", "has_digit"]
    assert set(read_sources(several.tables)) == {"a", "has_digit"}
    with pytest.raises(UserError, match=r"^search\.strategy: "):
        Recipe(model, data=SUMS, reward=has_digit, search={"strategy": "bogus"})


# ---------------------------------------------------------------------- directories


def test_unnamed_directory_that_cannot_be_locked_is_removed(model, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match="its file system has no locks"):
        posttrain.Session(model, data=SUMS, reward=lambda response: 0.0, updates=1, **SMALL)
    assert list(Path("runs").iterdir()) == []
