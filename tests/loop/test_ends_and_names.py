"""When a run ends by passes or by time, which checkpoint is the best, and how others name it."""

import itertools
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from posttrain.base.chat import Chat
from posttrain.errors import UserError
from posttrain.loop import session
from posttrain.models import checkpoint, pretrained
from posttrain.recipe.target import target_of
from posttrain.report.headline import best, progress_ended
from posttrain.report.record import Curves, read

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"
    "{% if add_generation_prompt %}[assistant:{% if not enable_thinking %}<none>{% endif %}{% endif %}"
)


@pytest.fixture
def sft(
    offline: dict[str, Any], write: Callable[..., Path], run_cli: Callable[..., Any], tmp_path: Path
) -> Callable[..., Path]:
    """sft(name, tables, words...) -> the run directory of an SFT run on five records."""
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": f"{a} + 1?", "completion": str(a + 1)} for a in range(5)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(name: str, over: dict[str, Any], *words: object) -> Path:
        tables = {
            "task": {"arithmetic": None, "data": {"path": str(data)}, "held_out": {"path": str(data)}},
            "batch": {"batch_size": 2},
            "checkpoint": {"every": 1, "keep": 1},
            "eval": {"every": 1},
        }
        said = run_cli(
            "train", write(offline, tables | over), "--run-dir", tmp_path / name, "--quiet", *words
        )
        assert said.code == 0, said.err
        return tmp_path / name

    return run


def weights(run: Path) -> bytes:
    last, _ = checkpoint.newest(run / "checkpoints")
    assert last is not None
    return (last / "model" / "model.safetensors").read_bytes()


def test_epochs_are_the_updates_that_draw_each_record_as_often(sft):
    by_passes = sft("passes", {"run": {"updates": None, "epochs": 1.5}})  # 1.5 × 5 records / 2, rounded up
    assert tomllib.loads((by_passes / "config.toml").read_text())["run"]["updates"] == 4
    assert weights(by_passes) == weights(sft("updates", {"run": {"updates": 4}}))
    longer = sft("passes", {"run": {"updates": None, "epochs": 2.0}}, "--resume")
    assert max(read(longer).metrics.updates) == 5


def test_a_run_resumes_with_its_own_recipe(sft, run_cli, tmp_path):
    for name in ("own", "given"):
        sft(name, {"run": {"updates": 1}})
    given = sft("given", {"run": {"updates": 2}}, "--resume")
    own, plan = tmp_path / "own", tmp_path / "own" / "plan.json"
    title = json.loads(plan.read_text())["title"]
    said = run_cli("train", "--resume", "--run-dir", own, "--quiet", "--set", "run.updates=2")
    assert said.code == 0, said.err
    assert weights(own) == weights(given)
    assert json.loads(plan.read_text())["title"] == title
    copy = own / "config.toml"  # as a rank that Ray starts
    assert run_cli("train", copy, "--resume", "--run-dir", own, "--quiet").code == 0
    assert json.loads(plan.read_text())["title"] == title
    said = run_cli("train", "--resume", "--run-dir", tmp_path / "none")
    assert (said.code, "there is no such run" in said.err) == (2, True)
    (tmp_path / "pipe").mkdir()
    (tmp_path / "pipe" / "stages.json").write_text("{}")
    said = run_cli("train", "--resume", "--run-dir", tmp_path / "pipe")
    assert (said.code, "posttrain train PIPELINE.toml --resume" in said.err) == (2, True)


def test_updates_beside_epochs_are_never_read(offline, write, run_cli):
    said = run_cli("validate", write(offline, {"run": {"updates": 3, "epochs": 1.0}}))
    assert said.code == 2
    assert "run.updates: is never read: run.epochs is set" in said.err


@pytest.mark.parametrize("run", [{"updates": 2}, {"updates": None, "epochs": 0.01}], ids=str)
def test_a_critic_that_would_warm_up_to_the_end_is_refused(run, online, write, run_cli):
    over = {"method": {"name": "ppo"}, "critic": {"warmup": 2}, "run": run}
    said = run_cli("validate", write(online, over))
    assert said.code == 2
    assert "critic.warmup: the critic alone learns in 2 updates, and the run has" in said.err


def test_a_run_that_is_out_of_time_is_saved_and_ends_with_the_weights_of_an_uninterrupted_one(
    sft, monkeypatch
):
    whole = sft("whole", {"run": {"updates": 4}})
    # Each reading of the clock is 10 s after the one before: two readings an update, and one at the start.
    readings = itertools.count(0.0, 10.0)
    with monkeypatch.context() as patch:
        patch.setattr(session, "time", SimpleNamespace(monotonic=readings.__next__))
        cut = sft("cut", {"run": {"updates": 4, "max_time": "1m"}})
    done = max(read(cut).metrics.updates)
    assert 0 < done < 4
    assert (cut / "stopped.txt").read_text() == f"run.max_time ended the run after update {done} of 4\n"
    assert weights(sft("cut", {"run": {"updates": 4}}, "--resume")) == weights(whole)


@pytest.mark.parametrize(("wrong", "why"), [("soon", "a time such as"), ("2h 5", "a time such as")])
def test_a_time_that_cannot_be_read_is_refused(wrong, why, offline, write, run_cli):
    said = run_cli("validate", write(offline, {"run": {"max_time": wrong}}))
    assert said.code == 2
    assert why in said.err


def test_patience_without_evaluations_says_which_key_to_set(offline, write, run_cli):
    said = run_cli("validate", write(offline, {"run": {"patience": 2}, "eval": None}))
    assert said.code == 2
    assert "run.patience: is never read" in said.err
    assert "; set eval.every to the updates between evaluations" in said.err


@pytest.mark.parametrize("metric", ["min eval/loss", "max eval/loss"])
def test_the_best_checkpoint_is_that_of_the_named_metric_and_has_a_name(sft, metric):
    run = sft("run", {"run": {"updates": 3}, "checkpoint": {"every": 1, "keep": 1, "best": metric}})
    points = [p for p in read(run).metrics.points("eval/loss") if p[0]]
    pick = max if metric.startswith("max") else min
    update = pick(points, key=lambda point: point[1])[0]
    assert {p.name for p in (run / "checkpoints").glob("step_*")} == {f"step_{update:06d}", "step_000003"}
    model = run / "checkpoints" / f"step_{update:06d}" / "model"
    assert pretrained.resolve(f"{run}@best") == model
    assert Path(target_of(Path(f"{run}@best")).recipe.model.path) == model
    assert pretrained.resolve(f"{run}@3") == pretrained.resolve(str(run))
    with pytest.raises(UserError, match=r"no checkpoint of update 7.*there are"):
        pretrained.resolve(f"{run}@7")


def test_the_best_checkpoint_is_the_model_of_another_recipe(sft):
    run = sft("run", {"run": {"updates": 2}, "checkpoint": {"every": 1, "best": "max eval/loss"}})
    after = sft("after", {"run": {"updates": 1}, "model": {"path": f"{run}@best"}})
    recorded = tomllib.loads((after / "config.toml").read_text())["model"]["path"]
    _, update, _ = best(read(run).metrics, {1, 2}, "max eval/loss")
    assert recorded == str(run / "checkpoints" / f"step_{update:06d}" / "model")


def test_best_says_that_a_start_without_checkpoint_was_better(sft, offline, write, run_cli, tmp_path):
    run = sft("run", {"run": {"updates": 2}, "checkpoint": {"every": 1, "best": "max eval/loss"}})
    points = dict(read(run).metrics.points("eval/loss"))
    update = max((1, 2), key=lambda u: (points[u], u))
    assert points[0] > points[update], "training lowers the loss"
    numbers = f"{points[0]:.3g} against {points[update]:.3g} at update {update}"
    note, short = f"{run}@best: the start was better ({numbers})", ("--max-new-tokens", 2)
    export = ("model", "export", f"{run}@best", tmp_path / "out")
    after = ("train", write(offline, {"model": {"path": f"{run}@best"}, "run": {"updates": 1}}), "--run-dir")
    for words in (("sample", f"{run}@best", "1?", *short), export, (*after, tmp_path / "after")):
        said = run_cli(*words)
        assert said.code == 0, said.err
        assert said.err.splitlines().count(note) == 1
    assert "was better" not in run_cli("sample", run, "1?", *short).err


def test_best_names_a_better_update_without_checkpoint(sft, run_cli):
    late = {"every": 3, "best": "max eval/length"}
    run = sft("run", {"run": {"updates": 3}, "checkpoint": late})
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        line["eval/length"] = float(line["update"] == 2)
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sft("run", {"run": {"updates": 4}, "checkpoint": late}, "--resume")
    note = "update 2, which has no checkpoint, was better (1 against 0 at update 3)"
    assert note in run_cli("sample", f"{run}@best", "1?", "--max-new-tokens", 2).err


def test_a_run_without_evaluation_has_no_best_checkpoint(sft):
    run = sft("run", {"run": {"updates": 1}, "eval": {"limit": 0}})
    with pytest.raises(UserError, match="has no best checkpoint"):
        pretrained.resolve(f"{run}@best")


def test_a_revision_of_the_hub_is_fetched(monkeypatch, tmp_path):
    asked = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(pretrained, "snapshot_download", snapshot)
    with pytest.raises(UserError, match="has no safetensors"):
        pretrained.resolve("org/name@v1.0")
    assert (asked["name"], asked["revision"]) == ("org/name", "v1.0")


def test_a_template_gets_its_arguments(tiny):
    tokenizer = pretrained.load_tokenizer(tiny)
    for thinks in (False, True):
        chat = Chat(tokenizer, template=TEMPLATE, template_args={"enable_thinking": thinks})
        prompt = tokenizer.decode(chat.render([{"role": "user", "content": "hi"}]))
        assert prompt == f"[user:hi][assistant:{'' if thinks else '<none>'}"


def test_a_template_file_is_read_beside_the_recipe_and_kept_as_text(sft, write, tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    model = {"chat_template": "chat.jinja", "template_args": {"enable_thinking": True}}
    run = sft("run", {"run": {"updates": 1}, "model": model})
    recorded = tomllib.loads((run / "config.toml").read_text())["model"]
    assert recorded["chat_template"] == TEMPLATE
    assert recorded["template_args"] == {"enable_thinking": True}
    (tmp_path / "chat.jinja").unlink()
    saved = pretrained.load_tokenizer(pretrained.resolve(str(run)))
    assert saved.chat_template == TEMPLATE


@pytest.mark.parametrize(("metric", "done"), [("max eval/loss", 3), ("min eval/loss", 6)])
def test_patience_ends_a_run_whose_evaluations_get_worse(sft, metric, done):
    """The loss falls at each update, so its maximum is before the first."""
    over = {"run": {"updates": 6, "patience": 3}, "eval": {"every": 1}, "checkpoint": {"best": metric}}
    run = sft("run", over | {"optim": {"lr": 0.003}})
    series = read(run).metrics.series["eval/loss"]
    assert list(series.values()) == sorted(series.values(), reverse=True)
    assert max(series) == done
    if done == 3:
        assert read(run).ended_early == "eval/loss was best at update 0, 3 evaluations ago"
        longer = sft("run", over | {"run": {"updates": 6}, "optim": {"lr": 0.003}}, "--resume")
        assert max(read(longer).metrics.updates) == 6


def test_equal_evaluations_are_no_progress() -> None:
    flat = Curves((0, 1, 2), {"eval/accuracy": {0: 0.0, 1: 0.0, 2: 0.0}})
    assert best(flat) == ("eval/accuracy", 0, 0.0)
    assert progress_ended(flat, 2) == "eval/accuracy was best at update 0, 2 evaluations ago"
    assert progress_ended(flat, 3) == ""


def test_a_variable_that_the_template_does_not_have_is_refused(tiny, offline, write, run_cli):
    said = run_cli("validate", write(offline, {"model": {"template_args": {"enable_thinkin": False}}}))
    assert said.code == 2
    assert "model.template_args.enable_thinkin: the chat template has no variable" in said.err


def test_a_checkpoint_of_a_run_is_evaluated_by_its_name(sft, run_cli, online, write, tmp_path):
    run = tmp_path / "online"
    assert run_cli("train", write(online, {"run": {"updates": 2}}), "--run-dir", run, "-q").code == 0
    newest, named = run_cli("eval", run), run_cli("eval", f"{run}@2")
    assert (newest.code, named.code) == (0, 0), named.err
    assert named.out == newest.out
    offline_run = sft("run", {"run": {"updates": 1}})
    assert "--data FILE.jsonl --verifier number" in run_cli("eval", offline_run).err


def test_a_stage_that_ran_out_of_time_is_continued(offline, write, run_cli, tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}?", "completion": "1"}) + "\n" for a in range(5)))
    over = {"task": {"data": {"path": str(data)}, "arithmetic": None}, "batch": {"batch_size": 2}}
    write(offline, over | {"run": {"updates": 4, "max_time": "1m"}}, name="sft")
    pipeline = tmp_path / "pipeline.toml"
    pipeline.write_text('[[stage]]\nname = "sft"\nrecipe = "sft.toml"\n')
    words = ("train", pipeline, "--run-dir", tmp_path / "out", "-q")
    readings = itertools.count(0.0, 10.0)
    with monkeypatch.context() as patch:
        patch.setattr(session, "time", SimpleNamespace(monotonic=readings.__next__))
        said = run_cli(*words)
    assert said.code == 1
    assert "run.max_time ended stage 'sft'" in said.err
    listed = run_cli("run", "list", tmp_path / "out", "--json")
    assert json.loads(listed.out)["state"] == "stopped"
    newest = sorted((tmp_path / "out").glob("*sft*/checkpoints/step_*"))[-1]
    assert checkpoint.resumes(newest), "what it needs to be continued was kept"
    assert run_cli(*words, "--resume").code == 0
